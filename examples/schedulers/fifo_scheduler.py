"""First come, first served, strictly and with backfill, on a simulated node of 4 GPUs.

    python examples/schedulers/fifo_scheduler.py

`large` needs all GPUs and waits for `first`. Strictly in turn, all others wait behind it. With backfill those
go ahead that will have ended when `large` can start, by their time limits; `large` starts no later for that.
"""

from __future__ import annotations

from genie.scheduler.order import Fifo
from genie.scheduler.scheduler import Rules
from genie.sim.events import Plan, simulate
from genie.sim.workload import SimJob, alike_nodes

JOBS = [
    SimJob("first", 0.0, 100.0, gpus=3, time_limit_s=100.0),
    SimJob("large", 1.0, 50.0, gpus=4, time_limit_s=60.0),
    SimJob("short", 2.0, 60.0, gpus=1, time_limit_s=90.0),
    SimJob("long", 3.0, 200.0, gpus=1, time_limit_s=300.0),
]


def main() -> None:
    for title, rules in (
        ("strictly in turn", Rules(order=Fifo(), backfills=False)),
        ("with backfill", Rules(order=Fifo())),
    ):
        run = simulate(alike_nodes(1, gpus=4), JOBS, Plan(rules, placement="bestfit"))
        print(title)
        for record in run.records:
            print(f"  {record.job.job_id:6} runs from {record.started_s:3.0f} s to {record.ended_s:3.0f} s")


if __name__ == "__main__":
    main()
