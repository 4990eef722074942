"""The grid's figures: added up over processes, never in the way, and in Prometheus' own format."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from genie.grid.metrics import STATUSES_MAX, SYNC_BUCKETS_S, TASK_BUCKETS_S, GridMetrics
from genie.runtime.files import FileLock
from tests.needs import require_program


@pytest.fixture
def metrics(tmp_path: Path) -> GridMetrics:
    return GridMetrics(tmp_path)


def sample(text: str, name: str) -> str:
    (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return str(found)


def test_figures_are_there_from_the_start_and_promtool_finds_nothing_wrong(metrics: GridMetrics) -> None:
    metrics.node_scores({"gpu1": 12.5, "gpu2": math.inf})
    metrics.task_finished("failed", 0.2)
    text = metrics.text()
    promtool = require_program("promtool", package="prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert sample(text, 'grid_node_health_score{node="gpu1"}') == "12.5"
    assert sample(text, 'grid_node_health_score{node="gpu2"}') == "+Inf"
    assert sample(text, 'grid_tasks_completed_total{status="succeeded"}') == "0"


def test_every_name_of_the_page_has_help_and_type(metrics: GridMetrics) -> None:
    text = metrics.text()
    for name, kind in (
        ("grid_node_health_score", "gauge"),
        ("grid_tasks_completed_total", "counter"),
        ("grid_task_duration_seconds", "histogram"),
        ("grid_sync_duration_seconds", "histogram"),
        ("grid_active_tasks", "gauge"),
    ):
        assert f"# HELP {name} " in text
        assert f"# TYPE {name} {kind}\n" in text


def test_buckets_count_what_is_at_or_below_them(metrics: GridMetrics) -> None:
    for duration_s in (0.01, 10.0, 10.1, 1e9):
        metrics.sync_finished(duration_s)
    text = metrics.text()
    assert sample(text, 'grid_sync_duration_seconds_bucket{le="0.05"}') == "1"
    assert sample(text, 'grid_sync_duration_seconds_bucket{le="10.0"}') == "2"
    assert sample(text, 'grid_sync_duration_seconds_bucket{le="30.0"}') == "3"
    assert sample(text, 'grid_sync_duration_seconds_bucket{le="+Inf"}') == "4"
    assert sample(text, "grid_sync_duration_seconds_count") == "4"
    assert float(sample(text, "grid_sync_duration_seconds_sum")) == pytest.approx(1e9 + 20.11)
    assert 10.0 in SYNC_BUCKETS_S, "the limit of the rule SlowSync"
    assert sorted(TASK_BUCKETS_S) == list(TASK_BUCKETS_S)


def test_label_values_are_escaped(metrics: GridMetrics) -> None:
    metrics.task_finished('a"b\\c\nd', 1.0)
    assert 'status="a\\"b\\\\c\\nd"} 1' in metrics.text()


def test_states_without_end_become_other(metrics: GridMetrics) -> None:
    for number in range(STATUSES_MAX + 10):
        metrics.task_finished(f"s{number}", 1.0)
    completed = metrics.figures().completed
    assert len(completed) == STATUSES_MAX + 1
    assert completed["other"] == 12


def test_processes_add_up(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from genie.grid.metrics import GridMetrics\n"
        "for _ in range(20): GridMetrics(Path(sys.argv[1])).task_finished('succeeded', 1.0)"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    found = GridMetrics(tmp_path).figures()
    assert (found.completed["succeeded"], sum(found.tasks.counts), found.tasks.sum_s) == (60, 60, 60.0)


def test_active_tasks_go_up_and_down(metrics: GridMetrics) -> None:
    metrics.task_started()
    metrics.task_started()
    assert sample(metrics.text(), "grid_active_tasks") == "2"
    metrics.task_ended()
    metrics.task_ended()
    metrics.task_ended()
    assert metrics.figures().active_tasks == 0


def test_tasks_of_a_process_that_was_killed_are_not_active(tmp_path: Path, metrics: GridMetrics) -> None:
    code = (
        "import os, sys, signal; from pathlib import Path; from genie.grid.metrics import GridMetrics\n"
        "m = GridMetrics(Path(sys.argv[1])); m.task_started(); assert m.figures().active_tasks == 1\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == -9
    assert metrics.figures().active_tasks == 0


def test_scores_of_nodes_that_are_gone_go_with_them(metrics: GridMetrics) -> None:
    metrics.node_scores({"gpu1": 1.0, "gpu2": 2.0})
    metrics.node_scores({"gpu2": 3.0})
    assert metrics.figures().scores == {"gpu2": 3.0}


@pytest.mark.parametrize("text", ["", "{", '{"completed": 3}', "\0"])
def test_a_file_that_is_broken_begins_anew(tmp_path: Path, metrics: GridMetrics, text: str) -> None:
    metrics.task_finished("failed", 1.0)
    (tmp_path / "grid" / "metrics.json").write_text(text)
    metrics.task_finished("failed", 1.0)
    assert metrics.figures().completed["failed"] == 1


def test_a_lock_that_is_held_costs_a_figure_and_no_more(tmp_path: Path, metrics: GridMetrics, caplog) -> None:
    metrics.task_finished("failed", 1.0)
    held = FileLock.try_take(tmp_path / "grid" / "metrics.lock")
    assert held is not None
    try:
        metrics.task_finished("failed", 1.0)
    finally:
        held.release()
    assert "could not be kept" in caplog.text
    assert metrics.figures().completed["failed"] == 1


async def test_a_lock_that_is_held_does_not_hold_up_an_event_loop(
    tmp_path: Path, metrics: GridMetrics
) -> None:
    await asyncio.to_thread(metrics.task_started)
    held = FileLock.try_take(tmp_path / "grid" / "metrics.lock")
    assert held is not None
    metrics.task_ended()
    metrics.task_finished("failed", 1.0)
    held.release()  # had one of them waited for it, that figure would be lost
    found = await asyncio.to_thread(GridMetrics(tmp_path).figures)
    assert (found.completed["failed"], found.active_tasks) == (1, 0)


def test_a_program_that_ends_keeps_its_last_figures(tmp_path: Path, metrics: GridMetrics) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from genie.grid.metrics import GridMetrics\n"
        "async def work(): [GridMetrics(Path(sys.argv[1])).sync_finished(1.0) for _ in range(50)]\n"
        "asyncio.run(work())"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == 0
    assert sum(metrics.figures().syncs.counts) == 50


def test_only_the_user_can_read_the_figures(tmp_path: Path, metrics: GridMetrics) -> None:
    (tmp_path / "grid").mkdir(mode=0o700)
    (tmp_path / "grid" / ".metrics.json.new").touch(0o644)
    metrics.task_finished("failed", 1.0)
    assert (tmp_path / "grid" / "metrics.json").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "grid").write_text("a file where the folder should be")
    metrics = GridMetrics(tmp_path)
    metrics.task_finished("failed", 1.0)
    assert "grid_active_tasks 0" in metrics.text()
