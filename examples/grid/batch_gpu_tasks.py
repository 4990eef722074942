"""Runs a hundred small tasks on the GPUs of the grid in batches of ten.

Runs on the head of the Ray cluster with the folder of Genie on PYTHONPATH. In that folder:

    grid-cli sync .
    grid-cli cluster submit --env PYTHONPATH=. -- python examples/grid/batch_gpu_tasks.py

The workers need Ray and torch or numpy, but not Genie: the tasks are sent to them.
"""

from __future__ import annotations

import argparse

import ray

from genie.grid import BatchExecutor, TaskFailure, batch_gpu_task


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100, help="number of tasks (default: 100)")
    parser.add_argument(
        "--size", type=int, default=2000, help="rows and columns of each matrix (default: 2000)"
    )
    args = parser.parse_args()

    ray.init(address="auto")
    executor = BatchExecutor(batch_size=10)
    tasks = [(i, args.size) for i in range(args.tasks)]
    results = executor.submit_batched_tasks(batch_gpu_task, tasks)
    ray.shutdown()

    failures = [each for each in results if isinstance(each, TaskFailure)]
    for failure in failures[:5]:
        print(f"task {failure.index} failed: {failure.error}")
    devices = sorted({each["device"] for each in results if not isinstance(each, TaskFailure)})
    print(f"Results: {len(results) - len(failures)} tasks completed on {', '.join(devices) or 'no device'}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
