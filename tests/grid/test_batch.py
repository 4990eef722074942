"""Batches, as far as they go without a cluster; tests/grid/test_ray_cluster.py has the rest."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

import genie.grid
from genie.errors import UsageError
from genie.grid import BatchExecutor, batch, batch_gpu_task
from genie.grid.batch import TaskFailure

WITHOUT_GENIE = """
import sys
sys.modules["genie"] = None
from ray import cloudpickle
run_batch = cloudpickle.loads(sys.stdin.buffer.read())
outcomes = run_batch(cloudpickle.dumps(divmod), [(7, 2), (1, 0), (9, 4)])
print([(kind, cloudpickle.loads(value) if kind == "ok" else value) for kind, value, _, _ in outcomes])
"""
SEND = """
import sys, ray
from genie.grid import batch
with batch._sent_by_value(ray):
    sys.stdout.buffer.write(ray.cloudpickle.dumps(batch.run_batch))
"""


def test_what_workers_run_needs_no_genie_there() -> None:
    sent = subprocess.run([sys.executable, "-c", SEND], capture_output=True, check=True, timeout=60)
    command = [sys.executable, "-c", WITHOUT_GENIE]
    done = subprocess.run(command, input=sent.stdout, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert b"('ok', (3, 1)), ('error', 'ZeroDivisionError: " in done.stdout
    assert b"('ok', (2, 1))" in done.stdout


def test_the_demonstration_multiplies_and_gives_the_same_for_the_same_task() -> None:
    one, again, other = batch_gpu_task(1, 16), batch_gpu_task(1, 16), batch_gpu_task(2, 16)
    assert (one["task_id"], one["size"]) == (1, 16)
    assert one["sum"] == again["sum"] != other["sum"]


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"in_flight_max": 0}, {"max_retries": -1}, {"num_gpus": -1.0}]
)
def test_what_could_not_run_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        BatchExecutor(**wrong)  # type: ignore[arg-type]


def test_what_was_not_begun_when_all_was_cancelled_fails_and_no_generator_is_drained() -> None:
    results: list[object] = ["done"]
    batch._fail_rest(results, ["a", "b", "c"])
    assert results == ["done", TaskFailure(1, "cancelled"), TaskFailure(2, "cancelled")]
    results = ["done"]
    batch._fail_rest(results, itertools.count())
    assert results == ["done"]


def test_importing_the_grid_does_not_import_ray() -> None:
    program = "import sys, genie.grid as g; g.BatchExecutor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
    with pytest.raises(AttributeError, match="nothing"):
        genie.grid.nothing  # noqa: B018
