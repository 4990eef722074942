"""FIFO order, strict and with backfill, on a simulated node of 4 GPUs.

    python examples/schedulers/fifo_scheduler.py

`large` needs all GPUs and waits for `first`. With strict FIFO all later jobs wait for `large`. With backfill
jobs start earlier if their time limits end before `large` can start, so `large` is not delayed.
"""

from __future__ import annotations

from genie.scheduler.order import Fifo
from genie.scheduler.rules import Rules
from genie.sim.events import SimulationParameters, simulate
from genie.sim.workloads.workload import SimJob, uniform_nodes

JOBS = [
    SimJob("first", 0.0, 100.0, gpus_per_worker=3, time_limit_s=100.0),
    SimJob("large", 1.0, 50.0, gpus_per_worker=4, time_limit_s=60.0),
    SimJob("short", 2.0, 60.0, gpus_per_worker=1, time_limit_s=90.0),
    SimJob("long", 3.0, 200.0, gpus_per_worker=1, time_limit_s=300.0),
]


def main() -> None:
    for title, rules in (
        ("strict FIFO", Rules(order=Fifo(), allows_backfill=False)),
        ("with backfill", Rules(order=Fifo())),
    ):
        run = simulate(
            uniform_nodes(1, gpus=4), JOBS, SimulationParameters(rules, placement_policy="bestfit")
        )
        print(title)
        for record in run.job_results:
            print(
                f"  {record.job.job_id:6} runs from {record.first_started_s:3.0f} s to "
                f"{record.ended_s:3.0f} s"
            )


if __name__ == "__main__":
    main()
