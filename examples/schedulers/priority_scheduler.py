"""Priorities, and preemption with a grace period, on a simulated node of 4 GPUs.

    python examples/schedulers/priority_scheduler.py

`urgent` comes when all GPUs are in use. `batch` agreed to be interrupted and has the lowest priority: it is
told to go, has 30 s to save its work, and runs on later from its last checkpoint. `fixed` did not agree.
"""

from __future__ import annotations

from genie.scheduler.order import Priority
from genie.scheduler.scheduler import Rules
from genie.sim.events import Plan, simulate
from genie.sim.workload import SimJob, alike_nodes

JOBS = [
    SimJob("fixed", 0.0, 300.0, gpus=2, priority=0, time_limit_s=300.0),
    SimJob("batch", 0.0, 400.0, gpus=2, priority=0, preemptible=True, grace_s=30.0, checkpoint_s=60.0),
    SimJob("plain", 90.0, 50.0, gpus=1, priority=0, time_limit_s=50.0),
    SimJob("urgent", 100.0, 50.0, gpus=2, priority=10, time_limit_s=50.0),
]


def main() -> None:
    run = simulate(alike_nodes(1, gpus=4), JOBS, Plan(Rules(order=Priority()), placement="bestfit"))
    for record in run.records:
        job = record.job
        print(
            f"{job.job_id:6} priority {job.priority:2}, submitted at {job.submitted_s:3.0f} s:"
            f" runs at {record.started_s:3.0f} s, ends at {record.ended_s:3.0f} s,"
            f" preempted {record.preemptions} times, {record.lost_s:.0f} s of work lost"
        )


if __name__ == "__main__":
    main()
