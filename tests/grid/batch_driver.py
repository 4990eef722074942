"""Runs on a node of the Ray cluster: batches that go well and badly, told as one JSON object.

Not for: judging it (test_ray_cluster.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from genie.errors import GenieError
from genie.grid import BatchExecutor, TaskFailure


def halve(number: int) -> float:
    if number == 3:
        raise ValueError("three is not halved")
    return number / 2


def die_at_five(number: int) -> int:
    if number == 5:
        os._exit(1)
    return number


def unpicklable(number: int) -> Any:
    return threading.Lock() if number == 1 else number


def touch_and_wait(folder: str, number: int) -> None:
    (Path(folder) / str(number)).touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.05)


class Counted:
    def __init__(self) -> None:
        self.found: list[str] = []

    def task_finished(self, status: str, duration_s: float) -> None:
        assert duration_s >= 0
        self.found.append(status)


def plain(results: list[Any]) -> list[Any]:
    return [[each.index, each.error] if isinstance(each, TaskFailure) else each for each in results]


def stuck(folder: Path, end: Callable[[BatchExecutor], None]) -> list[Any]:
    """Two batches run and are stuck, the rest waits: then `end` is called from another thread."""
    folder.mkdir()
    executor = BatchExecutor(batch_size=1, num_gpus=0, num_cpus=1, in_flight_max=2)

    def end_them() -> None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.05)
        end(executor)

    other = threading.Thread(target=end_them)
    other.start()
    try:
        tasks = [(str(folder), number) for number in range(20)]
        results: Any = plain(executor.submit_batched_tasks(touch_and_wait, tasks))
    except KeyboardInterrupt:
        results = "interrupted"
    other.join()
    while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:
        time.sleep(0.05)  # until nothing is stuck any more
    return [results, len(list(folder.iterdir()))]


def error_of(executor: BatchExecutor, tasks: list[int]) -> str:
    try:
        executor.submit_batched_tasks(halve, tasks)
    except GenieError as error:
        return error.message
    return ""


def main() -> None:
    try:
        BatchExecutor().submit_batched_tasks(halve, [1])
    except GenieError as error:
        unconnected = error.message
    ray.init(address="auto", log_to_driver=False)
    counted, marks = Counted(), Path(sys.argv[1])
    small = BatchExecutor(batch_size=4, num_gpus=0, metrics=counted)
    told = {
        "unconnected": unconnected,
        "halved": plain(small.submit_batched_tasks(halve, range(10))),
        "counted": sorted(counted.found),
        "died": plain(small.submit_batched_tasks(die_at_five, range(10))),
        "unpicklable": plain(small.submit_batched_tasks(unpicklable, range(3))),
        "empty": small.submit_batched_tasks(halve, []),
        "raised": error_of(BatchExecutor(batch_size=2, num_gpus=0, raise_on_error=True), [1, 3, 3]),
        "too_much": error_of(BatchExecutor(num_gpus=1000), [1]),
        "cancelled": stuck(marks / "cancelled", BatchExecutor.cancel),
        "interrupted": stuck(marks / "interrupted", lambda _: os.kill(os.getpid(), signal.SIGINT)),
    }
    ray.shutdown()
    print(f"TOLD {json.dumps(told)}")


if __name__ == "__main__":
    main()
