"""The benchmark of Genie, Slurm and Ray: missing peers are skipped, and their output is parsed.

The outputs were recorded from Slurm 22.05.8 and Ray 2.60.0, without unused fields.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.repository_files import ROOT

FOLDER = ROOT / "benchmarks" / "peers"
DRIVER = FOLDER / "bench_peers.py"
REPLY = "began 100.5\nplaced 100.75 9.819\nplaced 102.0 7.2\nend\n"

# A fake peer that sends the same reply to every request.
FAKE_PEER = f"""
import sys
sys.stderr.write("end of the log")
print("ready", flush=True)
for line in sys.stdin:
    sys.stdout.write({REPLY!r})
    sys.stdout.flush()
"""


@pytest.fixture
def peer_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of the benchmark by name. They are scripts and are unloaded after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(FOLDER)
    names = ("peer_sandbox", "slurm_peer", "ray_peer", "bench_peers")
    with monkeypatch.context() as paths:
        paths.setattr(sys, "path", list(sys.path))
        yield {name: importlib.import_module(name) for name in names}
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.fixture
def environment_without_programs(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PATH": str(tmp_path), "GENIE_MASTER_PORT": "none"}


def run_peer_benchmark(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRIVER), "--json", "--rounds", "1", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=80, stdin=subprocess.DEVNULL
    )


@pytest.mark.long("runs the benchmark for Genie")
def test_missing_peers_are_skipped_with_a_reason(environment_without_programs: dict[str, str]) -> None:
    done = run_peer_benchmark("--ray-python", "no-such-python", environment=environment_without_programs)
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    names = [figure["name"] for figure in figures]
    assert names == [f"genie_{what}" for what in ("rate", "quiet_p50", "quiet_p99", "busy_p50", "busy_p99")]
    assert all(figure["value"] > 0 and figure["ok"] and figure["baseline"] is None for figure in figures)
    reasons = {line.partition(": skipped: ")[0]: line for line in done.stderr.splitlines()}
    assert "slurmctld" in reasons["slurm"] and "apt-get install slurmctld" in reasons["slurm"]
    assert "no-such-python has no Ray" in reasons["ray"] and "pip install ray==" in reasons["ray"]


def test_benchmark_fails_when_no_system_is_available(environment_without_programs: dict[str, str]) -> None:
    done = run_peer_benchmark("--only", "slurm", environment=environment_without_programs)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("nothing to measure: no selected system is available\n")


def test_other_ray_version_is_rejected(peer_modules: dict[str, ModuleType], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 1.0.0\n")
    python.chmod(0o755)
    assert "has Ray 1.0.0, but 2.60.0 is required" in peer_modules["ray_peer"].unavailable_reason(str(python))


def test_slurm_requires_root(
    peer_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slurm = peer_modules["slurm_peer"]
    for name in slurm.PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slurm, "SLURM_HEADER", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert slurm.unavailable_reason() is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "require root" in slurm.unavailable_reason()


def test_peer_is_skipped_without_permission_for_namespaces(
    peer_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = peer_modules["bench_peers"]
    monkeypatch.setattr(peer_modules["slurm_peer"], "unavailable_reason", lambda: None)
    monkeypatch.setattr(peer_modules["peer_sandbox"], "sandbox_command", lambda *inside: ["false"])
    assert driver.unavailable_reason("slurm", "python") == driver.NO_NAMESPACES_MESSAGE
    monkeypatch.setattr(peer_modules["peer_sandbox"], "sandbox_command", lambda *inside: list(inside))
    assert driver.unavailable_reason("slurm", "python") is None


# -- outputs of the peers ----------------------------------------------------------------------------


def test_placements_of_a_reply_are_parsed_and_filtered_by_interval(
    peer_modules: dict[str, ModuleType],
) -> None:
    sandbox = peer_modules["peer_sandbox"]
    reply = sandbox.parse_reply(REPLY.splitlines())
    assert reply.placements == (sandbox.Placement(100.75, 9.819), sandbox.Placement(102.0, 7.2))
    assert reply.placements_between(1.0, 5.0) == [sandbox.Placement(102.0, 7.2)]
    assert reply.placements_between(0.25, 1.5) == [sandbox.Placement(100.75, 9.819)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "incomplete"),
        (["began 1.0", "placed 2.0 3.0"], "incomplete"),
        (["placed 2.0 3.0", "end"], "unexpected line from the peer: 'placed"),
        (["began 1.0", "began 1.0", "end"], "unexpected line from the peer: 'began"),
        (["began 1.0", "allocation failed", "end"], "unexpected line from the peer: 'allocation failed'"),
        (["began 1.0", "placed 2.0 soon", "end"], "could not convert"),
    ],
)
def test_malformed_reply_is_rejected(
    peer_modules: dict[str, ModuleType], lines: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        peer_modules["peer_sandbox"].parse_reply(lines)


@pytest.mark.parametrize(
    ("output", "gpus"),
    [
        ("idle 125 gpu:8\n", 1000),
        ("inval 125 gpu:8\n", 0),
        ("unknown 125 gpu:8\n", 0),
        ("drained 1 gpu:8\nmixed 1 gpu:8\nidle 98 gpu:8\nunknown 25 gpu:8\n", 784),
        ("", 0),
    ],
)
def test_idle_gpus_are_parsed_from_sinfo(peer_modules: dict[str, ModuleType], output: str, gpus: int) -> None:
    assert peer_modules["slurm_peer"].count_idle_gpus(output) == gpus


def test_gpus_of_dead_ray_nodes_are_not_counted(peer_modules: dict[str, ModuleType]) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 3.0, "node:127.0.0.2": 1.0}},
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": False, "DeathReasonMessage": "received SIGTERM", "Resources": {}},
    ]
    assert peer_modules["ray_peer"].count_alive_gpus(nodes) == 3


def test_ray_group_is_placed_when_its_bundle_has_a_node(peer_modules: dict[str, ModuleType]) -> None:
    node = "166bbbc054866b4c06370942b7d4ab0bc84c723cf56b28eedbef9ae3"
    created = {"bundles": {0: {"GPU": 1.0}}, "bundles_to_node_id": {0: node}, "state": "CREATED"}
    pending = {"bundles": {0: {"GPU": 5.0}}, "bundles_to_node_id": {0: ""}, "state": "PENDING"}
    assert peer_modules["ray_peer"].find_placement_node(created) == node
    with pytest.raises(ValueError, match="PENDING"):
        peer_modules["ray_peer"].find_placement_node(pending)


# -- the sandbox ------------------------------------------------------------------------------------


def test_peer_is_measured_and_ends_with_its_sandbox(
    peer_modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    driver, samples = peer_modules["bench_peers"], peer_modules["bench_peers"].PlacementSamples()
    command = [sys.executable, "-c", FAKE_PEER]
    with peer_modules["peer_sandbox"].open_sandbox(command, name="fake", folder=tmp_path) as sandbox:
        driver.measure_in_sandbox(sandbox, samples, workers=4)
    assert samples.latencies_ms == [9.819, 7.2]
    assert (samples.rates_per_s, samples.busy_ms) == ([0.25], [7.2])


@pytest.mark.parametrize(
    ("ending", "message"),
    [("", "fake: did not start"), ("print('ready', flush=True)", "incomplete")],
)
def test_error_contains_the_log_of_a_peer_that_ends(
    peer_modules: dict[str, ModuleType], tmp_path: Path, ending: str, message: str
) -> None:
    script = f"import sys; sys.stderr.write('end of the log'); {ending}\nsys.stdin.readline()"
    command = [sys.executable, "-c", script if ending else script.replace("sys.stdin.readline()", "")]
    with (
        pytest.raises(SystemExit, match=rf"(?s){message}.*end of the log"),
        peer_modules["peer_sandbox"].open_sandbox(command, name="fake", folder=tmp_path) as sandbox,
    ):
        sandbox.request("quiet", 1, 0)


def test_hanging_peer_is_killed_at_the_time_limit(
    peer_modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with (
        pytest.raises(SystemExit, match="fake: did not start"),
        peer_modules["peer_sandbox"].open_sandbox(command, name="fake", folder=tmp_path, limit_s=0.2),
    ):
        raise AssertionError("it was never ready")


def test_exception_in_the_sandbox_kills_the_peer(
    peer_modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, ended = peer_modules["peer_sandbox"], []
    end = sandbox._end_peer

    def record_end(process: subprocess.Popen[str]) -> None:
        ended.append(process.wait(timeout=20))  # the input is still open, so only a signal ends it
        end(process)

    monkeypatch.setattr(sandbox, "_end_peer", record_end)
    command = [sys.executable, "-c", FAKE_PEER]
    with pytest.raises(KeyboardInterrupt), sandbox.open_sandbox(command, name="fake", folder=tmp_path):
        raise KeyboardInterrupt
    assert ended == [-signal.SIGKILL]


def test_baseline_of_a_peer_is_the_figure_of_genie(peer_modules: dict[str, ModuleType]) -> None:
    driver = peer_modules["bench_peers"]
    genie = driver.PlacementSamples(rates_per_s=[400.0], busy_ms=[5.0], latencies_ms=[2.0])
    slurm = driver.PlacementSamples(rates_per_s=[100.0], busy_ms=[10.0], latencies_ms=[1.0])
    found = {figure.name: figure for figure in driver.make_figures({"genie": genie, "slurm": slurm})}
    assert (found["genie_rate"].baseline, found["genie_rate"].unit) == (None, "1/s")
    assert (found["slurm_rate"].baseline, found["slurm_rate"].ratio) == (400.0, 0.25)
    assert (found["slurm_quiet_p50"].baseline, found["slurm_busy_p99"].ratio) == (2.0, 2.0)
    assert driver.make_figures({"slurm": slurm})[0].baseline is None
