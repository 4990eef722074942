"""Grid metrics: summed over processes, never failing the work they count, in Prometheus text format."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from genie.grid import metrics as metrics_module
from genie.grid.metrics import (
    SYNC_DURATION_BUCKETS_S,
    TASK_DURATION_BUCKETS_S,
    TASK_STATUSES_MAX,
    ActiveRun,
    GridMetrics,
)
from genie.processes.files import FileLock
from tests.forkserver import ForkServer
from tests.needs import require_program


@pytest.fixture
def metrics(tmp_path: Path) -> GridMetrics:
    return GridMetrics(tmp_path)


def get_sample_value(text: str, name: str) -> str:
    (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return str(found)


def test_text_has_initial_counters_and_passes_promtool(metrics: GridMetrics) -> None:
    metrics.record_node_scores({"gpu1": 12.5, "gpu2": math.inf})
    metrics.record_task_changes(ended=[("failed", 0.2)])
    text = metrics.text()
    promtool = require_program("promtool", package="prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert get_sample_value(text, 'grid_node_health_score{node="gpu1"}') == "12.5"
    assert get_sample_value(text, 'grid_node_health_score{node="gpu2"}') == "+Inf"
    assert get_sample_value(text, 'grid_tasks_completed_total{status="succeeded"}') == "0.0"


def test_every_documented_metric_has_help_and_type(metrics: GridMetrics) -> None:
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


def test_buckets_are_cumulative_and_inclusive(metrics: GridMetrics) -> None:
    for duration_s in (0.01, 10.0, 10.1, 1e9):
        metrics.record_sync(duration_s)
    text = metrics.text()
    assert get_sample_value(text, 'grid_sync_duration_seconds_bucket{le="0.05"}') == "1.0"
    assert get_sample_value(text, 'grid_sync_duration_seconds_bucket{le="10.0"}') == "2.0"
    assert get_sample_value(text, 'grid_sync_duration_seconds_bucket{le="30.0"}') == "3.0"
    assert get_sample_value(text, 'grid_sync_duration_seconds_bucket{le="+Inf"}') == "4.0"
    assert get_sample_value(text, "grid_sync_duration_seconds_count") == "4.0"
    assert float(get_sample_value(text, "grid_sync_duration_seconds_sum")) == pytest.approx(1e9 + 20.11)
    assert 10.0 in SYNC_DURATION_BUCKETS_S, "threshold of the alert rule SlowSync"
    assert sorted(TASK_DURATION_BUCKETS_S) == list(TASK_DURATION_BUCKETS_S)


def test_label_values_are_escaped(metrics: GridMetrics) -> None:
    metrics.record_task_changes(ended=[('a"b\\c\nd', 1.0)])
    assert 'status="a\\"b\\\\c\\nd"} 1.0' in metrics.text()


@pytest.mark.parametrize("duration_s", [math.inf, math.nan, -1.0])
def test_invalid_duration_loses_no_other_metric(metrics: GridMetrics, duration_s: float) -> None:
    metrics.record_task_changes(ended=[("failed", 2.0)])
    metrics.record_task_changes(ended=[("failed", duration_s)])
    metrics.record_sync(duration_s)
    figures = metrics.read_snapshot()
    assert (figures.completed["failed"], figures.tasks.sum_s, sum(figures.syncs.counts)) == (2, 2.0, 1)


def test_invalid_process_id_is_dropped(tmp_path: Path, metrics: GridMetrics) -> None:
    metrics.record_task_changes(started=3)
    path = tmp_path / "grid" / "metrics.json"
    figures = json.loads(path.read_text())
    figures["active"] |= {"9" * 5000 + "-1": 2, "-1": 2, "x-y": 2, "99999999-gone": 5}
    path.write_text(json.dumps(figures))
    assert metrics.read_snapshot().active_tasks == 3


def test_too_many_statuses_count_as_other(metrics: GridMetrics) -> None:
    for number in range(TASK_STATUSES_MAX + 10):
        metrics.record_task_changes(ended=[(f"s{number}", 1.0)])
    completed = metrics.read_snapshot().completed
    assert len(completed) == TASK_STATUSES_MAX + 1
    assert completed["other"] == 12


def test_metrics_are_summed_over_processes(tmp_path: Path, fork_server: ForkServer) -> None:
    code = (
        "import sys; from pathlib import Path; from genie.grid import metrics\n"
        "metrics._FILE_LOCK_TIMEOUT_S = 60.0\n"
        "figures = metrics.GridMetrics(Path(sys.argv[1]))\n"
        "for _ in range(20): figures.record_task_changes(ended=[('succeeded', 1.0)])"
    )
    started = [fork_server.popen(["-c", code, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    found = GridMetrics(tmp_path).read_snapshot()
    assert (found.completed["succeeded"], sum(found.tasks.counts), found.tasks.sum_s) == (60, 60, 60.0)


def test_active_tasks_increase_and_decrease(metrics: GridMetrics) -> None:
    metrics.record_task_changes(started=2)
    assert get_sample_value(metrics.text(), "grid_active_tasks") == "2.0"
    metrics.record_task_changes(ended=[("succeeded", 1.0)] * 3)
    assert metrics.read_snapshot().active_tasks == 0


def test_tasks_of_killed_process_are_not_active(
    tmp_path: Path, metrics: GridMetrics, fork_server: ForkServer
) -> None:
    code = (
        "import os, sys, signal; from pathlib import Path; from genie.grid.metrics import GridMetrics\n"
        "m = GridMetrics(Path(sys.argv[1])); m.record_task_changes(started=1)\n"
        "assert m.read_snapshot().active_tasks == 1\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert fork_server.run(["-c", code, str(tmp_path)], timeout=60).returncode == -9
    assert metrics.read_snapshot().active_tasks == 0


def test_scores_of_removed_nodes_are_dropped(metrics: GridMetrics) -> None:
    metrics.record_node_scores({"gpu1": 1.0, "gpu2": 2.0})
    metrics.record_node_scores({"gpu2": 3.0})
    assert metrics.read_snapshot().scores == {"gpu2": 3.0}


@pytest.mark.parametrize("text", ["", "{", '{"completed": 3}', "\0", "[]", "3", "[" * 100_000, "\udc80"])
def test_damaged_file_resets_metrics(tmp_path: Path, metrics: GridMetrics, text: str) -> None:
    metrics.record_task_changes(ended=[("failed", 1.0)])
    (tmp_path / "grid" / "metrics.json").write_text(text, errors="surrogateescape")
    metrics.record_task_changes(ended=[("failed", 1.0)])
    assert metrics.read_snapshot().completed["failed"] == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("completed", value) for value in (None, [], {"failed": 1.5}, {"failed": True}, {"\ud800": 1})),
        *(("completed", {"failed": value}) for value in (-1, 2**63, 10**4299)),
        *(("tasks", {"counts": [value] * 13, "sum_s": 0}) for value in (-1, 10**4299)),
        *(("tasks", value) for value in (None, [], {}, {"counts": 3, "sum_s": 0}, {"counts": [""] * 13})),
        *(("tasks", {"counts": [0] * 13, "sum_s": value}) for value in (None, "1", math.inf, 10**400)),
        ("tasks", {"counts": [0] * 12, "sum_s": 0}),
        *(("scores", value) for value in ([], {"gpu1": "1"}, {"gpu1": math.nan}, {"\udfff": 1.0})),
        *(("active", value) for value in (None, {"1-2": 0.5}, {"1-2": [1]}, {"1-2": -1})),
        *(("runs", value) for value in (None, [1], {"r-1": None}, {"r-1": {"node": "n"}})),
        *(("runs", {"r-1": {"node": node, "grid_file": "f", "started": 1}}) for node in (None, 1)),
    ],
)
def test_file_with_one_invalid_value_resets_metrics(
    tmp_path: Path, metrics: GridMetrics, key: str, value: object
) -> None:
    metrics.record_sync(1.0)
    path = tmp_path / "grid" / "metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert sum(metrics.read_snapshot().syncs.counts) == 0
    assert metrics.text()


def test_file_without_runs_and_with_unknown_keys_is_read(tmp_path: Path, metrics: GridMetrics) -> None:
    metrics.record_node_scores({"gpu1": 2.0})
    path = tmp_path / "grid" / "metrics.json"
    figures = json.loads(path.read_text()) | {"scores": {"gpu1": 2, "gpu2": None}, "later": 1}
    del figures["runs"]
    path.write_text(json.dumps(figures))
    assert (metrics.read_snapshot().scores, metrics.read_snapshot().runs) == ({"gpu1": 2.0, "gpu2": None}, {})


def test_unencodable_value_loses_no_other_metric(metrics: GridMetrics) -> None:
    metrics.record_run_started("r-1", ActiveRun(node="gpu1", grid_file="/\udc80/grid.yaml", started=0.0))
    metrics.record_run_started("r-2", ActiveRun(node="gpu1", grid_file="f", started=math.inf))
    assert {run.grid_file for run in metrics.read_snapshot().runs.values()} == {"/\udc80/grid.yaml"}


def test_held_lock_drops_only_that_update(
    tmp_path: Path, metrics: GridMetrics, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "_FILE_LOCK_TIMEOUT_S", 0.1)
    metrics.record_task_changes(ended=[("failed", 1.0)])
    held = FileLock.try_acquire(tmp_path / "grid" / "metrics.lock")
    assert held is not None
    try:
        metrics.record_task_changes(ended=[("failed", 1.0)])
    finally:
        held.release()
    assert "could not update the metrics" in caplog.text
    assert metrics.read_snapshot().completed["failed"] == 1


def test_update_waits_for_busy_processes(
    tmp_path: Path, metrics: GridMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics.record_task_changes(started=1)
    held = FileLock.try_acquire(tmp_path / "grid" / "metrics.lock")
    assert held is not None
    now_s = 0.0

    def sleep(duration_s: float) -> None:
        nonlocal now_s
        now_s += duration_s
        if now_s > 1.5:
            held.release()

    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    metrics.record_task_changes(ended=[("failed", 1.0)])
    assert metrics.read_snapshot().completed["failed"] == 1


async def test_held_lock_does_not_block_the_event_loop(tmp_path: Path, metrics: GridMetrics) -> None:
    await asyncio.to_thread(metrics.record_task_changes, started=1)
    held = FileLock.try_acquire(tmp_path / "grid" / "metrics.lock")
    assert held is not None
    metrics.record_task_changes(ended=[("failed", 1.0)])
    held.release()  # an update that had waited for the lock would have been dropped
    found = await asyncio.to_thread(GridMetrics(tmp_path).read_snapshot)
    assert (found.completed["failed"], found.active_tasks) == (1, 0)


def test_exiting_program_writes_its_last_updates(
    tmp_path: Path, metrics: GridMetrics, fork_server: ForkServer
) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from genie.grid.metrics import GridMetrics\n"
        "async def work(): [GridMetrics(Path(sys.argv[1])).record_sync(1.0) for _ in range(50)]\n"
        "asyncio.run(work())"
    )
    assert fork_server.run(["-c", code, str(tmp_path)], timeout=60).returncode == 0
    assert sum(metrics.read_snapshot().syncs.counts) == 50


def test_metrics_file_is_private(tmp_path: Path, metrics: GridMetrics) -> None:
    (tmp_path / "grid").mkdir(mode=0o700)
    (tmp_path / "grid" / ".metrics.json.new").touch(0o644)
    metrics.record_task_changes(ended=[("failed", 1.0)])
    assert (tmp_path / "grid" / "metrics.json").stat().st_mode & 0o777 == 0o600


def test_unwritable_state_directory_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "grid").write_text("a file instead of the directory")
    metrics = GridMetrics(tmp_path)
    metrics.record_task_changes(ended=[("failed", 1.0)])
    assert "grid_active_tasks 0.0" in metrics.text()


@pytest.mark.parametrize("name", ["metrics.json", ".metrics.json.new"])
@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_special_file_is_replaced_without_blocking(
    tmp_path: Path, metrics: GridMetrics, name: str, kind: str
) -> None:
    (tmp_path / "grid").mkdir(mode=0o700)
    (tmp_path / "precious").write_text("unchanged")
    if kind == "fifo":
        os.mkfifo(tmp_path / "grid" / name)
    else:
        (tmp_path / "grid" / name).symlink_to(tmp_path / "precious")
    assert metrics.read_snapshot().completed["failed"] == 0
    metrics.record_task_changes(ended=[("failed", 1.0)])
    assert metrics.read_snapshot().completed["failed"] == 1
    assert (tmp_path / "precious").read_text() == "unchanged"


def test_oversized_file_is_not_read(tmp_path: Path, metrics: GridMetrics) -> None:
    metrics.record_task_changes(ended=[("failed", 1.0)])
    os.truncate(tmp_path / "grid" / "metrics.json", 300 << 30)
    assert metrics.read_snapshot().completed["failed"] == 0
    metrics.record_task_changes(ended=[("failed", 1.0)])
    assert metrics.read_snapshot().completed["failed"] == 1


def test_oldest_runs_are_dropped_when_file_would_be_too_large(tmp_path: Path, metrics: GridMetrics) -> None:
    metrics.record_task_changes(ended=[("failed", 1.0)])
    path = tmp_path / "grid" / "metrics.json"
    figures = json.loads(path.read_text())
    run = {"node": "gpu1", "grid_file": "/" + "x" * 4000, "started": 1.0}
    figures["runs"] = {f"r-{number}": run for number in range(2050)}
    path.write_text(json.dumps(figures))
    for number in range(2050, 2070):
        metrics.record_run_started(f"r-{number}", ActiveRun(**run))
    found = metrics.read_snapshot()
    assert (found.completed["failed"], list(found.runs)[-1]) == (1, "r-2069")
    assert 2000 < len(found.runs) < 2070
    assert (8 << 20) - 5000 < path.stat().st_size <= 8 << 20
    metrics.record_node_scores({"x" * (9 << 20): 1.0})
    assert metrics.read_snapshot().completed["failed"] == 1, "other metrics are lost"


def test_child_forked_while_writer_is_busy_writes_its_updates(
    tmp_path: Path, metrics: GridMetrics, fork_server: ForkServer
) -> None:
    code = """
import asyncio, os, sys, threading
from pathlib import Path
from genie.grid import metrics

metrics._PENDING_UPDATES_TIMEOUT_S = 3600.0  # a child that waited for the writer of its parent would time out
figures = metrics.GridMetrics(Path(sys.argv[1]))
busy, release = threading.Event(), threading.Event()
metrics._UPDATE_WRITER.enqueue(lambda: (busy.set(), release.wait(60)))
busy.wait(60)
child = os.fork()
if not child:
    async def work():
        figures.record_sync(1.0)
    asyncio.run(work())
    figures.record_sync(1.0)
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
release.set()
sys.exit(code)
"""
    assert fork_server.run(["-c", code, str(tmp_path)], timeout=60).returncode == 0
    assert sum(metrics.read_snapshot().syncs.counts) == 2


def test_child_forked_during_a_write_does_not_inherit_the_lock(
    tmp_path: Path, metrics: GridMetrics, fork_server: ForkServer
) -> None:
    code = """
import os, sys, threading
from pathlib import Path
from genie.grid.metrics import GridMetrics

figures = GridMetrics(Path(sys.argv[1]))
busy, release = threading.Event(), threading.Event()
writing = threading.Thread(target=figures._apply_to_file, args=[lambda _: (busy.set(), release.wait(60))])
writing.start()
busy.wait(60)
threading.Timer(0.1, release.set).start()
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.close(writer)
    os.read(reader, 1)
    figures.record_sync(1.0)
    os._exit(0)
writing.join()
figures.record_sync(1.0)
os.close(writer)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert fork_server.run(["-c", code, str(tmp_path)], timeout=60).returncode == 0
    assert sum(metrics.read_snapshot().syncs.counts) == 2
