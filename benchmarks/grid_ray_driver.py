"""Driver of bench_grid_ray.py: alternates batches of small tasks with one Ray task per call.

    python grid_ray_driver.py [auto] ROUNDS TASKS NODES

Prints one line: SECONDS and a JSON object with the durations of both. Connects to the running cluster with
`auto`, otherwise starts Ray on this machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from alternation import time_alternately  # noqa: E402 - the path comes first

from genie.grid import BatchExecutor  # noqa: E402

BATCH_SIZE = 10
TASKS_TIMEOUT_S = 120


def small_task(number: int) -> int:
    return number * number


def main(arguments: list[str]) -> None:
    rounds, tasks, nodes = (int(each) for each in arguments[-3:])
    # Not in TMPDIR: socket paths of Ray must be short.
    with tempfile.TemporaryDirectory(prefix="gr-", dir="/tmp") as folder:
        if "auto" in arguments:
            ray.init(address="auto", log_to_driver=False)
        else:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 << 20,
                _temp_dir=folder,
            )
        try:
            print("SECONDS", json.dumps(measure(rounds, tasks, nodes)), flush=True)
        finally:
            ray.shutdown()


def start_workers_on_all_nodes() -> None:
    """Runs tasks on every node, so that worker processes exist before the measurement."""
    names = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    places = [NodeAffinitySchedulingStrategy(name, soft=False) for name in names]
    remote = ray.remote(small_task)
    ray.get(
        [remote.options(scheduling_strategy=place).remote(1) for place in places * 2], timeout=TASKS_TIMEOUT_S
    )


def measure(rounds: int, tasks: int, nodes: int) -> dict[str, list[float]]:
    alive = [each for each in ray.nodes() if each["Alive"]]
    assert len(alive) == nodes, f"{len(alive)} of {nodes} nodes"
    expected = [number * number for number in range(tasks)]
    remote = ray.remote(small_task).options(scheduling_strategy="SPREAD")  # like BatchExecutor
    executor = BatchExecutor(batch_size=BATCH_SIZE, num_gpus=0)

    def batched() -> None:
        assert executor.submit_batched_tasks(small_task, range(tasks)) == expected

    def one_per_call() -> None:
        found = ray.get([remote.remote(number) for number in range(tasks)], timeout=TASKS_TIMEOUT_S)
        assert found == expected

    start_workers_on_all_nodes()
    ours, theirs = time_alternately(rounds, batched, one_per_call)
    return {"ours": ours, "theirs": theirs}


if __name__ == "__main__":
    main(sys.argv[1:])
