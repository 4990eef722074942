"""health, top and metrics, against real SSH nodes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.grid.metrics import GridMetrics
from tests.cli.grid_setup import on_a_terminal, use_grid
from tests.grid.bed import Bed
from tests.waiting import wait_until


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    with Bed(tmp_path / "nodes", count=2) as bed:
        bed["gpu1"].gpus(2)
        use_grid(bed, tmp_path, monkeypatch)
        yield bed


def rows(out: str) -> dict[str, list[str]]:
    return {line.split()[0]: re.split(r"\s{2,}", line.strip()) for line in out.splitlines()[1:]}


def test_health_is_a_table_with_a_line_for_each_node(bed: Bed, genie) -> None:
    ran = genie("grid", "health")
    assert ran.code == 0
    heading = " ".join(ran.out.splitlines()[0].split())
    assert heading == "NODE STATE SCORE CPU GPUS GPU MEMORY TEMP DISK NOTE"
    assert "the best is gpu2\n" in ran.err
    found = rows(ran.out)
    assert found["gpu1"][1] == "ok"
    assert found["gpu1"][4:7] == ["2 of 2 free", "1%", "31 C"]
    assert found["gpu2"][4:7] == ["none", "-", "-"]


def test_health_as_json_names_the_best(bed: Bed, genie, state_dir: Path) -> None:
    ran = genie("grid", "health", "--json")
    found = json.loads(ran.out)
    assert found["best"] == "gpu2", "as loaded as gpu1, with no GPU memory in use"
    first = found["nodes"][0]
    assert (first["name"], first["state"], first["gpus_free"]) == ("gpu1", "ok", 2)
    assert first["readings"]["gpus"][1]["memory_used_bytes"] == 1000 << 20
    assert set(GridMetrics(state_dir).figures().scores) == {"gpu1", "gpu2"}


def test_one_node_can_be_named_and_a_wrong_name_is_an_error(bed: Bed, genie) -> None:
    assert list(rows(genie("grid", "health", "gpu2").out)) == ["gpu2"]
    ran = genie("grid", "health", "gpu3")
    assert ran.code == 1
    assert "gpu3" in ran.err


def test_a_second_command_uses_what_the_first_has_read_unless_it_shall_be_fresh(bed: Bed, genie) -> None:
    genie("grid", "health")
    bed["gpu1"].gpus(0)
    bed["gpu2"].stop()
    found = rows(genie("grid", "health").out)
    assert (found["gpu1"][4], found["gpu2"][1]) == ("2 of 2 free", "ok")
    found = rows(genie("grid", "health", "--fresh").out)
    assert (found["gpu1"][4], found["gpu2"][1]) == ("none", "unreachable")


def test_what_was_read_just_now_is_not_called_old_because_one_node_was_slow(
    bed: Bed, genie, state_dir: Path
) -> None:
    (bed["gpu1"].folder / "smi-hangs").touch()
    assert " ago; --fresh" not in genie("grid", "health", "--fresh").err
    kept = state_dir / "grid" / "health.json"
    text = kept.read_text()
    for at in {str(node["at"]) for node in json.loads(text)["nodes"]}:
        text = text.replace(at, str(float(at) - 5))
    kept.write_text(text)
    assert " ago; --fresh reads again" in genie("grid", "health").err


def test_a_node_that_is_away_is_told_and_the_others_count(bed: Bed, genie) -> None:
    bed["gpu1"].stop()
    ran = genie("grid", "health")
    assert ran.code == 0
    assert "cannot be reached" in rows(ran.out)["gpu1"][-1]


def test_no_node_that_can_be_chosen_ends_with_1_and_none_that_can_be_reached_with_255(
    bed: Bed, genie
) -> None:
    bed["gpu1"].restart(before="mount -t tmpfs -o size=1m tmpfs /root")  # full, or as good as
    bed["gpu2"].stop()
    assert genie("grid", "health", "--json").code == 1
    bed["gpu1"].stop()
    ran = genie("grid", "health", "--json", "--fresh")
    assert ran.code == 255
    assert json.loads(ran.out)["best"] is None


def test_an_unknown_host_key_names_the_way_out(bed: Bed, genie) -> None:
    bed.write_known_hosts(without=["gpu1"])
    assert "grid-cli nodes trust gpu1" in genie("grid", "health").out


def test_top_without_a_terminal_shows_nodes_and_gpus_once(bed: Bed, genie) -> None:
    ran = genie("grid", "top")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert ran.out.count("NVIDIA H100 80GB HBM3") == 2
    assert len(json.loads(genie("grid", "top", "--json").out)["nodes"]) == 2


def test_top_on_a_terminal_goes_on_until_the_interrupt(bed: Bed) -> None:
    code, seen = on_a_terminal(["top", "--interval", "1s"], typed=b"\x03", after=b"HBM3")
    assert code == 0
    assert "\x1b[?1049h" in seen and seen.rstrip().endswith("\x1b[?1049l")
    assert "Ctrl-C ends" in seen


def test_the_interrupt_is_the_way_out_of_top_whoever_can_be_reached(bed: Bed) -> None:
    for node in bed.nodes:
        node.stop()
    code, seen = on_a_terminal(["top"], typed=b"\x03", after=b"unreachable")
    assert (code, "gpu2" in seen) == (0, True)


@pytest.mark.parametrize("argv", [["top", "--interval", "0"], ["metrics", "--serve", "--port", "x"]])
def test_a_bad_value_is_a_usage_error(bed: Bed, genie, argv: list[str]) -> None:
    ran = genie("grid", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert argv[-2] in ran.err


def test_metrics_are_printed_with_the_scores_of_now(bed: Bed, genie, state_dir: Path) -> None:
    GridMetrics(state_dir).task_finished("succeeded", 3.0)
    bed["gpu2"].stop()
    ran = genie("grid", "metrics")
    assert 'grid_node_health_score{node="gpu2"} +Inf\n' in ran.out
    assert re.search(r'grid_node_health_score{node="gpu1"} [0-9.]+\n', ran.out)
    assert 'grid_tasks_completed_total{status="succeeded"} 1\n' in ran.out
    found = json.loads(genie("grid", "metrics", "--json").out)
    assert (found["tasks_completed"]["succeeded"], found["node_health_score"]["gpu2"]) == (1, None)


def test_serving_says_where_and_ends_with_the_interrupt(bed: Bed, tmp_path: Path) -> None:
    log = tmp_path / "log"
    argv = [sys.executable, "-m", "genie", "grid", "metrics", "--serve", "--port", "0"]
    with log.open("wb") as err, subprocess.Popen(argv, stderr=err) as process:
        try:
            wait_until(lambda: b"Ctrl-C" in log.read_bytes(), timeout_s=60, what="the address")
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(30)
    assert code == 130
    assert re.fullmatch(r"serving http://127\.0\.0\.1:\d+/metrics until Ctrl-C\n", log.read_text())
