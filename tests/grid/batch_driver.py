"""Runs on a node of the Ray cluster: successful and failing batches, printed as one JSON object.

tests/grid/ray/test_cluster.py checks the output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from genie.config import load
from genie.errors import GenieError
from genie.grid import BatchExecutor, TaskFailure
from genie.grid.metrics import GridMetrics, MetricsSnapshot


def halve_unless_three(number: int) -> float:
    if number == 3:
        raise ValueError("three is not halved")
    return number / 2


def exit_process_at_five(number: int) -> int:
    if number == 5:
        os._exit(1)
    return number


def return_unpicklable_for_one(number: int) -> Any:
    return threading.Lock() if number == 1 else number


def touch_file_and_wait(folder: str, number: int) -> None:
    (Path(folder) / str(number)).touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.05)


class CountingMetrics:
    def __init__(self) -> None:
        self.found: list[str] = []
        self.active = 0

    def record_task_changes(self, *, started: int = 0, ended: Sequence[tuple[str, float]] = ()) -> None:
        self.active += started - len(ended)
        assert all(duration_s >= 0 for _, duration_s in ended)
        self.found += [status for status, _ in ended]


def make_json_ready(results: list[Any]) -> list[Any]:
    return [[each.index, each.error] if isinstance(each, TaskFailure) else each for each in results]


def run_batches_until_ended(folder: Path, end: Callable[[BatchExecutor], None]) -> list[Any]:
    """Run two batches that block while the rest is pending, then call `end` in another thread."""
    folder.mkdir()
    executor = BatchExecutor(batch_size=1, num_gpus=0, num_cpus=1, in_flight_max=2)

    def end_when_blocked() -> None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.05)
        while not read_grid_metrics().active_tasks:
            time.sleep(0.05)
        active.append(read_grid_metrics().active_tasks)
        end(executor)

    active: list[int] = []

    other = threading.Thread(target=end_when_blocked)
    other.start()
    try:
        tasks = [(str(folder), number) for number in range(20)]
        results: Any = make_json_ready(executor.submit_batched_tasks(touch_file_and_wait, tasks))
    except KeyboardInterrupt:
        results = "interrupted"
    other.join()
    while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:
        time.sleep(0.05)  # until no batch blocks a CPU
    return [results, len(list(folder.iterdir())), *active, read_grid_metrics().active_tasks]


def read_grid_metrics() -> MetricsSnapshot:
    return GridMetrics(load().paths.state_dir.expanduser()).read_snapshot()


def submit_and_get_error(executor: BatchExecutor, tasks: list[int]) -> str:
    try:
        executor.submit_batched_tasks(halve_unless_three, tasks)
    except GenieError as error:
        return error.message
    return ""


def main() -> None:
    try:
        BatchExecutor().submit_batched_tasks(halve_unless_three, [1])
    except GenieError as error:
        unconnected = error.message
    ray.init(address="auto", log_to_driver=False)
    counted, marks = CountingMetrics(), Path(sys.argv[1])
    small = BatchExecutor(batch_size=4, num_gpus=0, metrics=counted)
    outcomes = {
        "unconnected": unconnected,
        "halved": make_json_ready(small.submit_batched_tasks(halve_unless_three, range(10))),
        "counted": [*sorted(counted.found), counted.active],
        "died": make_json_ready(small.submit_batched_tasks(exit_process_at_five, range(10))),
        "unpicklable": make_json_ready(small.submit_batched_tasks(return_unpicklable_for_one, range(3))),
        "empty": small.submit_batched_tasks(halve_unless_three, []),
        "raised": submit_and_get_error(
            BatchExecutor(batch_size=2, num_gpus=0, raise_on_error=True), [1, 3, 3]
        ),
        "too_much": submit_and_get_error(BatchExecutor(num_gpus=1000), [1]),
        "cancelled": run_batches_until_ended(marks / "cancelled", BatchExecutor.cancel),
        "completed": read_grid_metrics().completed,
        "interrupted": run_batches_until_ended(
            marks / "interrupted", lambda _: os.kill(os.getpid(), signal.SIGINT)
        ),
    }
    ray.shutdown()
    print(f"RESULTS {json.dumps(outcomes)}")


if __name__ == "__main__":
    main()
