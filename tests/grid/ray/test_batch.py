"""Batches without a cluster; tests/grid/ray/test_cluster.py uses one."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import genie.grid
from genie.errors import UsageError
from genie.grid import BatchExecutor, batch_gpu_task
from genie.grid.ray import batch
from genie.grid.ray.batch import TaskFailure
from tests.forkserver import ForkServer

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_GENIE = """
import sys
sys.modules["genie"] = None
from ray import cloudpickle
run_batch = cloudpickle.loads(sys.stdin.buffer.read())
outcomes = run_batch(cloudpickle.dumps(divmod), [(7, 2), (1, 0), (9, 4)])
print([(kind, cloudpickle.loads(value) if kind == "ok" else value) for kind, value, _, _ in outcomes])

def odd(task):
    import asyncio
    class Unprintable(Exception):
        def __str__(self):
            raise ValueError("no text")
    raise {0: Unprintable, 1: asyncio.CancelledError, 2: SystemExit}[task]()

print([text for _, text, _, _ in run_batch(cloudpickle.dumps(odd), [0, 1, 2])])
"""
SEND = """
import sys, ray
from genie.grid.ray import batch
with batch._pickle_module_by_value(ray):
    sys.stdout.buffer.write(ray.cloudpickle.dumps(batch.run_batch))
"""


def test_worker_code_runs_without_genie() -> None:
    server = ForkServer(preload=["ray.cloudpickle"])
    try:
        sent = server.run(["-c", SEND], timeout=60, text=False)
        assert sent.returncode == 0, sent.stderr.decode()
        with tempfile.TemporaryFile() as stdin:
            stdin.write(sent.stdout)
            stdin.seek(0)
            done = server.run(["-c", WITHOUT_GENIE], timeout=60, text=False, stdin=stdin)
    finally:
        server.close()
    assert done.returncode == 0, done.stderr.decode()
    assert b"('ok', (3, 1)), ('error', 'ZeroDivisionError: " in done.stdout
    assert b"('ok', (2, 1))" in done.stdout
    assert b"['Unprintable: could not format the error', 'CancelledError: ', 'SystemExit: ']" in done.stdout


def test_batch_gpu_task_is_deterministic() -> None:
    one, again, other = batch_gpu_task(1, 16), batch_gpu_task(1, 16), batch_gpu_task(2, 16)
    assert (one["task_id"], one["size"]) == (1, 16)
    assert one["sum"] == again["sum"] != other["sum"]


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"in_flight_max": 0}, {"max_retries": -1}, {"num_gpus": -1.0}]
)
def test_invalid_options_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        BatchExecutor(**wrong)  # type: ignore[arg-type]


def test_cancel_fails_unsubmitted_tasks_and_does_not_drain_generators() -> None:
    results: list[object] = ["done"]
    batch._fail_unsubmitted_tasks(results, ["a", "b", "c"])
    assert results == ["done", TaskFailure(1, "cancelled"), TaskFailure(2, "cancelled")]
    results = ["done"]
    batch._fail_unsubmitted_tasks(results, itertools.count())
    assert results == ["done"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs psutil elsewhere")
def test_metrics_count_tasks_without_third_party_packages() -> None:
    """-S disables site-packages: an environment of `grid-cli setup` has none of Genie's dependencies."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from genie.grid import BatchExecutor\n"
        "metrics = BatchExecutor()._metrics\n"
        "metrics.record_task_changes(started=3, ended=[('succeeded', 1.0)])\n"
        "assert 'msgspec' not in sys.modules and 'psutil' not in sys.modules\n"
        "print(metrics.read_snapshot().active_tasks, metrics.read_snapshot().completed)"
    )
    shown = subprocess.check_output([sys.executable, "-S", "-c", program], text=True, timeout=60)
    assert shown == "2 {'succeeded': 1, 'failed': 0}\n"


def test_importing_genie_grid_does_not_import_ray() -> None:
    program = "import sys, genie.grid as g; g.BatchExecutor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
    with pytest.raises(AttributeError, match="nothing"):
        genie.grid.nothing  # noqa: B018
