"""Priorities and preemption with a grace period on a simulated node of 4 GPUs.

    python examples/schedulers/priority_scheduler.py

`urgent` is submitted when all GPUs are in use. `batch` is preemptible and has a lower priority: it is
preempted with a grace period of 30 s and later resumes from its last checkpoint. `fixed` is not preemptible.
"""

from __future__ import annotations

from genie.scheduler.order import Priority
from genie.scheduler.rules import Rules
from genie.sim.events import SimulationParameters, simulate
from genie.sim.workloads.workload import SimJob, uniform_nodes

JOBS = [
    SimJob("fixed", 0.0, 300.0, gpus_per_worker=2, priority=0, time_limit_s=300.0),
    SimJob(
        "batch",
        0.0,
        400.0,
        gpus_per_worker=2,
        priority=0,
        preemptible=True,
        grace_s=30.0,
        checkpoint_interval_s=60.0,
    ),
    SimJob("plain", 90.0, 50.0, gpus_per_worker=1, priority=0, time_limit_s=50.0),
    SimJob("urgent", 100.0, 50.0, gpus_per_worker=2, priority=10, time_limit_s=50.0),
]


def main() -> None:
    run = simulate(
        uniform_nodes(1, gpus=4),
        JOBS,
        SimulationParameters(Rules(order=Priority()), placement_policy="bestfit"),
    )
    for record in run.job_results:
        job = record.job
        print(
            f"{job.job_id:6} priority {job.priority:2}, submitted at {job.submitted_s:3.0f} s:"
            f" runs at {record.first_started_s:3.0f} s, ends at {record.ended_s:3.0f} s,"
            f" preempted {record.preemption_count} times, {record.lost_work_s:.0f} s of work lost"
        )


if __name__ == "__main__":
    main()
