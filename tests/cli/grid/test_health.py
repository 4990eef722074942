"""health, top and metrics, against real SSH nodes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from genie.grid.metrics import GridMetrics
from tests.cli.grid.loopback_grid import run_grid_cli_on_terminal, use_testbed_as_grid
from tests.forkserver import ForkServer
from tests.grid.testbed import SshTestbed
from tests.waiting import wait_until

CACHED_READINGS_NOTE = " old; use --fresh to read again"


@pytest.fixture
def testbed(own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshTestbed:
    for node in own_testbed.nodes:
        node.nvml(None)
    own_testbed["gpu1"].gpus(2)
    # Scores depend only on GPUs: the load of this machine may change between two readings.
    more = "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 20, cpu_weight: 0}\n"
    use_testbed_as_grid(own_testbed, tmp_path, monkeypatch, more=more)
    return own_testbed


def parse_table_rows(out: str) -> dict[str, list[str]]:
    return {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in out.splitlines()[1:]}


def test_health_prints_a_row_per_node(testbed: SshTestbed, genie) -> None:
    ran = genie("grid", "health")
    assert ran.code == 0
    heading = " ".join(ran.out.splitlines()[0].split())
    assert heading == "NODE STATE SCORE CPU LOAD GPUS GPU MEMORY USED GPU TEMP DISK FREE REASON"
    assert "best node: gpu2\n" in ran.err
    found = parse_table_rows(ran.out)
    assert found["gpu1"][1] == "ok"
    assert found["gpu1"][4:7] == ["2 of 2 free", "1%", "31 C"]
    assert found["gpu2"][4:7] == ["none", "-", "-"]


def test_health_json_names_the_best_node(testbed: SshTestbed, genie, state_dir: Path) -> None:
    ran = genie("grid", "health", "--json")
    found = json.loads(ran.out)
    assert found["best"] == "gpu2", "no GPU memory is in use"
    assert [node["name"] for node in found["nodes"]] == ["gpu2", "gpu1"], "sorted by score"
    second = found["nodes"][1]
    assert (second["state"], second["gpus_free"]) == ("ok", 2)
    assert second["readings"]["gpus"][1]["memory_used_bytes"] == 1000 << 20
    assert set(GridMetrics(state_dir).read_snapshot().scores) == {"gpu1", "gpu2"}


def test_named_nodes_are_sorted_by_score(testbed: SshTestbed, genie) -> None:
    found = json.loads(genie("grid", "health", "gpu1", "gpu2", "--json").out)
    assert [node["name"] for node in found["nodes"]] == ["gpu2", "gpu1"]


def test_unknown_node_name_is_an_error(testbed: SshTestbed, genie) -> None:
    assert list(parse_table_rows(genie("grid", "health", "gpu2").out)) == ["gpu2"]
    ran = genie("grid", "health", "gpu3")
    assert ran.code == 1
    assert "gpu3" in ran.err


def test_second_command_uses_the_cache_unless_fresh(testbed: SshTestbed, genie) -> None:
    genie("grid", "health")
    testbed["gpu1"].gpus(0)
    testbed["gpu2"].stop()
    found = parse_table_rows(genie("grid", "health").out)
    assert (found["gpu1"][4], found["gpu2"][1]) == ("2 of 2 free", "ok")
    found = parse_table_rows(genie("grid", "health", "--fresh").out)
    assert (found["gpu1"][4], found["gpu2"][1]) == ("none", "unreachable")


def test_fresh_readings_are_not_reported_as_cached(
    testbed: SshTestbed, genie, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nvidia-smi may take two thirds of the timeout: more than 1 s, from which on readings count as cached.
    use_testbed_as_grid(
        testbed, tmp_path, monkeypatch, more="ssh: {connect_timeout: 20}\nhealth_check: {timeout: 3}\n"
    )
    (testbed["gpu1"].folder / "smi-hangs").touch()
    assert CACHED_READINGS_NOTE not in genie("grid", "health", "--fresh").err
    kept = state_dir / "grid" / "health.json"
    text = kept.read_text()
    for at in {str(node["at"]) for node in json.loads(text)["nodes"]}:
        text = text.replace(at, str(float(at) - 5))
    kept.write_text(text)
    assert CACHED_READINGS_NOTE in genie("grid", "health").err


def test_unreachable_node_is_reported_and_others_are_used(testbed: SshTestbed, genie) -> None:
    testbed["gpu1"].stop()
    ran = genie("grid", "health")
    assert ran.code == 0
    assert "could not reach" in parse_table_rows(ran.out)["gpu1"][-1]


def test_health_exits_with_1_without_usable_and_255_without_reachable_nodes(
    testbed: SshTestbed, genie
) -> None:
    testbed["gpu1"].restart(before="mount -t tmpfs -o size=1m tmpfs /root")  # full, or as good as
    testbed["gpu2"].stop()
    assert genie("grid", "health", "--json").code == 1
    testbed["gpu1"].stop()
    ran = genie("grid", "health", "--json", "--fresh")
    assert ran.code == 255
    assert json.loads(ran.out)["best"] is None


def test_unknown_host_key_has_a_hint(testbed: SshTestbed, genie) -> None:
    testbed.write_known_hosts(without=["gpu1"])
    assert "grid-cli nodes trust gpu1" in genie("grid", "health").out


def test_top_without_a_terminal_prints_once(testbed: SshTestbed, genie) -> None:
    ran = genie("grid", "top")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert ran.out.count("NVIDIA H100 80GB HBM3") == 2
    assert len(json.loads(genie("grid", "top", "--json").out)["nodes"]) == 2


def test_top_on_a_terminal_runs_until_interrupted(testbed: SshTestbed, fork_server: ForkServer) -> None:
    code, seen = run_grid_cli_on_terminal(
        fork_server, ["top", "--interval", "1s"], typed=b"\x03", after=b"HBM3"
    )
    assert code == 0
    assert "\x1b[?1049h" in seen and seen.rstrip().endswith("\x1b[?1049l")
    assert "Ctrl-C to exit" in seen
    assert [row.split()[0] for row in re.findall(r"gpu\d +ok", seen)][:2] == ["gpu2", "gpu1"], "by score"


def test_interrupt_ends_top_with_unreachable_nodes(testbed: SshTestbed, fork_server: ForkServer) -> None:
    for node in testbed.nodes:
        node.stop()
    code, seen = run_grid_cli_on_terminal(fork_server, ["top"], typed=b"\x03", after=b"gpu2")
    assert code == 0
    assert [row.split()[0] for row in re.findall(r"gpu\d +unreachable", seen)] == ["gpu1", "gpu2"]


@pytest.mark.parametrize("argv", [["top", "--interval", "0"], ["metrics", "--serve", "--port", "x"]])
def test_invalid_value_is_a_usage_error(testbed: SshTestbed, genie, argv: list[str]) -> None:
    ran = genie("grid", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert argv[-2] in ran.err


def test_metrics_contain_current_scores(testbed: SshTestbed, genie, state_dir: Path) -> None:
    GridMetrics(state_dir).record_task_changes(ended=[("succeeded", 3.0)])
    testbed["gpu2"].stop()
    ran = genie("grid", "metrics")
    assert 'grid_node_health_score{node="gpu2"} +Inf\n' in ran.out
    assert re.search(r'grid_node_health_score{node="gpu1"} [0-9.]+\n', ran.out)
    assert 'grid_tasks_completed_total{status="succeeded"} 1.0\n' in ran.out
    found = json.loads(genie("grid", "metrics", "--json").out)
    assert (found["tasks_completed"]["succeeded"], found["node_health_score"]["gpu2"]) == (1, None)


def test_serve_prints_its_url_and_ends_when_interrupted(
    testbed: SshTestbed, tmp_path: Path, fork_server: ForkServer
) -> None:
    log = tmp_path / "log"
    argv = ["-m", "genie", "grid", "metrics", "--serve", "--port", "0"]
    with log.open("wb") as err, fork_server.popen(argv, stderr=err) as process:
        try:
            wait_until(lambda: b"Ctrl-C" in log.read_bytes(), timeout_s=60, what="the address")
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(30)
    assert code == 130
    assert re.fullmatch(r"serving http://127\.0\.0\.1:\d+/metrics; press Ctrl-C to stop\n", log.read_text())
