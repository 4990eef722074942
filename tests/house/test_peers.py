"""The benchmark of peers: it measures Genie where they are missing, names them, and reads what they say.

What Slurm and Ray say was recorded from Slurm 22.05.8 and Ray 2.60.0, less what nobody reads here.
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

from tests.house.sources import ROOT

FOLDER = ROOT / "benchmarks" / "peers"
DRIVER = FOLDER / "bench_peers.py"
ANSWER = "began 100.5\nplaced 100.75 9.819\nplaced 102.0 7.2\nend\n"

# A peer as far as the room is concerned: it answers every question alike.
STAND_IN = f"""
import sys
sys.stderr.write("these are its last words")
print("ready", flush=True)
for line in sys.stdin:
    sys.stdout.write({ANSWER!r})
    sys.stdout.flush()
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules by name. They are scripts: nothing of them stays imported."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(FOLDER)
    names = ("peer_room", "slurm_peer", "ray_peer", "bench_peers")
    with monkeypatch.context() as paths:
        paths.setattr(sys, "path", list(sys.path))
        yield {name: importlib.import_module(name) for name in names}
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.fixture
def nothing_installed(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PATH": str(tmp_path), "GENIE_MASTER_PORT": "none"}


def run_driver(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DRIVER), "--json", "--rounds", "1", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=80, stdin=subprocess.DEVNULL
    )


def test_without_the_peers_genie_is_measured_and_they_are_named(nothing_installed: dict[str, str]) -> None:
    done = run_driver("--ray-python", "no-such-python", environment=nothing_installed)
    assert done.returncode == 0, done.stderr
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    names = [figure["name"] for figure in figures]
    assert names == [f"genie_{what}" for what in ("rate", "quiet_p50", "quiet_p99", "busy_p50", "busy_p99")]
    assert all(figure["value"] > 0 and figure["ok"] and figure["baseline"] is None for figure in figures)
    said = {line.partition(" is not measured: ")[0]: line for line in done.stderr.splitlines()}
    assert "slurmctld" in said["slurm"] and "apt-get install slurmctld" in said["slurm"]
    assert "no-such-python has no Ray" in said["ray"] and "pip install ray==" in said["ray"]


def test_when_nothing_is_left_to_measure_that_is_an_error(nothing_installed: dict[str, str]) -> None:
    done = run_driver("--only", "slurm", environment=nothing_installed)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("there is nothing to measure\n")


def test_another_ray_than_the_recipe_is_for_is_refused(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 1.0.0\n")
    python.chmod(0o755)
    assert "has Ray 1.0.0, and the recipe is for" in peers["ray_peer"].missing(str(python))


def test_slurm_is_refused_to_all_but_root(
    peers: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slurm = peers["slurm_peer"]
    for name in slurm.PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slurm, "HEADER", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert slurm.missing() is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in slurm.missing()


def test_who_may_have_no_room_is_told(peers: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = peers["bench_peers"]
    monkeypatch.setattr(peers["slurm_peer"], "missing", lambda: None)
    monkeypatch.setattr(peers["peer_room"], "room_command", lambda *inside: ["false"])
    assert driver.why_not("slurm", "python") == driver.NO_ROOM
    monkeypatch.setattr(peers["peer_room"], "room_command", lambda *inside: list(inside))
    assert driver.why_not("slurm", "python") is None


# -- what they say ----------------------------------------------------------------------------------


def test_an_answer_is_read_and_counted_within_its_time(peers: dict[str, ModuleType]) -> None:
    room = peers["peer_room"]
    answer = room.parse_answer(ANSWER.splitlines())
    assert answer.placements == (room.Placement(100.75, 9.819), room.Placement(102.0, 7.2))
    assert answer.within(1.0, 5.0) == [room.Placement(102.0, 7.2)]
    assert answer.within(0.25, 1.5) == [room.Placement(100.75, 9.819)]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "stops before its end"),
        (["began 1.0", "placed 2.0 3.0"], "stops before its end"),
        (["placed 2.0 3.0", "end"], "does not say 'placed"),
        (["began 1.0", "began 1.0", "end"], "does not say 'began"),
        (["began 1.0", "nothing was granted", "end"], "does not say 'nothing was granted'"),
        (["began 1.0", "placed 2.0 soon", "end"], "could not convert"),
    ],
)
def test_an_answer_that_is_none_is_refused(
    peers: dict[str, ModuleType], lines: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        peers["peer_room"].parse_answer(lines)


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        ("idle 125 gpu:8\n", 1000),
        ("inval 125 gpu:8\n", 0),
        ("unknown 125 gpu:8\n", 0),
        ("drained 1 gpu:8\nmixed 1 gpu:8\nidle 98 gpu:8\nunknown 25 gpu:8\n", 784),
        ("", 0),
    ],
)
def test_idle_gpus_are_counted_from_what_slurm_says(
    peers: dict[str, ModuleType], said: str, gpus: int
) -> None:
    assert peers["slurm_peer"].idle_gpus(said) == gpus


def test_gpus_are_counted_on_ray_nodes_that_live(peers: dict[str, ModuleType]) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 2.0, "GPU": 3.0, "node:127.0.0.2": 1.0}},
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": False, "DeathReasonMessage": "received SIGTERM", "Resources": {}},
    ]
    assert peers["ray_peer"].alive_gpus(nodes) == 3


def test_a_ray_group_is_placed_when_its_bundle_has_a_node(peers: dict[str, ModuleType]) -> None:
    node = "166bbbc054866b4c06370942b7d4ab0bc84c723cf56b28eedbef9ae3"
    created = {"bundles": {0: {"GPU": 1.0}}, "bundles_to_node_id": {0: node}, "state": "CREATED"}
    pending = {"bundles": {0: {"GPU": 5.0}}, "bundles_to_node_id": {0: ""}, "state": "PENDING"}
    assert peers["ray_peer"].placed_on(created) == node
    with pytest.raises(ValueError, match="PENDING"):
        peers["ray_peer"].placed_on(pending)


# -- the room ---------------------------------------------------------------------------------------


def test_a_peer_is_asked_as_genie_is_and_ends_with_its_room(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    driver, samples = peers["bench_peers"], peers["bench_peers"].Samples()
    command = [sys.executable, "-c", STAND_IN]
    with peers["peer_room"].open_room(command, name="stand-in", folder=tmp_path) as room:
        driver.take(room, samples, workers=4)
    assert samples.latencies_ms == [9.819, 7.2]
    assert (samples.rates_per_s, samples.busy_ms) == ([0.25], [7.2])


@pytest.mark.parametrize(
    ("ending", "words"),
    [("", "stand-in: it did not start"), ("print('ready', flush=True)", "stops before its end")],
)
def test_a_peer_that_ends_is_told_with_its_last_words(
    peers: dict[str, ModuleType], tmp_path: Path, ending: str, words: str
) -> None:
    script = f"import sys; sys.stderr.write('these are its last words'); {ending}\nsys.stdin.readline()"
    command = [sys.executable, "-c", script if ending else script.replace("sys.stdin.readline()", "")]
    with (
        pytest.raises(SystemExit, match=rf"(?s){words}.*last words"),
        peers["peer_room"].open_room(command, name="stand-in", folder=tmp_path) as room,
    ):
        room.ask("quiet", 1, 0)


def test_a_peer_that_hangs_is_killed_at_its_limit(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with (
        pytest.raises(SystemExit, match="stand-in: it did not start"),
        peers["peer_room"].open_room(command, name="stand-in", folder=tmp_path, limit_s=0.2),
    ):
        raise AssertionError("it was never ready")


def test_who_leaves_a_room_by_an_error_does_not_wait_for_the_peer(
    peers: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, ended = peers["peer_room"], []
    end = room._end

    def note_end(process: subprocess.Popen[str]) -> None:
        ended.append(process.wait(timeout=20))  # its input is still open: only a signal ends it
        end(process)

    monkeypatch.setattr(room, "_end", note_end)
    command = [sys.executable, "-c", STAND_IN]
    with pytest.raises(KeyboardInterrupt), room.open_room(command, name="stand-in", folder=tmp_path):
        raise KeyboardInterrupt
    assert ended == [-signal.SIGKILL]


def test_lines_of_peers_have_genies_figures_as_baseline(peers: dict[str, ModuleType]) -> None:
    driver = peers["bench_peers"]
    genie = driver.Samples(rates_per_s=[400.0], busy_ms=[5.0], latencies_ms=[2.0])
    slurm = driver.Samples(rates_per_s=[100.0], busy_ms=[10.0], latencies_ms=[1.0])
    found = {figure.name: figure for figure in driver.figures({"genie": genie, "slurm": slurm})}
    assert (found["genie_rate"].baseline, found["genie_rate"].unit) == (None, "1/s")
    assert (found["slurm_rate"].baseline, found["slurm_rate"].ratio) == (400.0, 0.25)
    assert (found["slurm_quiet_p50"].baseline, found["slurm_busy_p99"].ratio) == (2.0, 2.0)
    assert driver.figures({"slurm": slurm})[0].baseline is None
