"""Gang scheduling: all workers of a gang start together; an elastic gang starts with fewer workers.

    python examples/schedulers/gang_scheduler.py

Two gangs request all 8 GPUs of two nodes. If workers were placed one by one, each gang could get half of the
GPUs, and both would deadlock. Placed as a whole, they run one after the other; the elastic job uses the GPUs
that `half` does not need.
"""

from __future__ import annotations

from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.decisions import Start, Wait
from genie.scheduler.order import Fifo
from genie.scheduler.placement.python_placer import PythonPlacer
from genie.scheduler.request import GpuFacts, JobRequest, NodeFacts, Shape
from genie.scheduler.rules import Rules
from genie.scheduler.scheduler import Scheduler

PAIR = Shape(gpus=2)
JOBS = [
    JobRequest("gang A", "me", 1, PAIR, workers=4, time_limit_s=60.0),
    JobRequest("gang B", "me", 2, PAIR, workers=4, time_limit_s=60.0),
    JobRequest("half", "me", 3, PAIR, workers=2, time_limit_s=60.0),
    JobRequest("elastic", "me", 4, PAIR, workers=4, workers_min=1, time_limit_s=60.0),
]


def main() -> None:
    scheduler = Scheduler(ClusterAllocations(PythonPlacer, policy="bestfit"), Rules(order=Fifo()))
    for name in ("n1", "n2"):
        scheduler.set_node(NodeFacts(name, 64_000, 256_000, (GpuFacts("H200"),) * 4))
    for job in JOBS:
        scheduler.submit(job)
    for minute in range(3):
        now = 60.0 * minute
        for running in scheduler.running_jobs:  # each job runs until its time limit
            scheduler.record_end(running.request.job_id)
        print(f"after {minute} minutes")
        for decision in scheduler.decide(now):
            if isinstance(decision, Start):
                nodes = ", ".join(place.node_id for place in decision.places)
                print(f"  {decision.job_id:7} starts with {len(decision.places)} workers on {nodes}")
            elif isinstance(decision, Wait):
                print(f"  {decision.job_id:7} pending: {decision.reason}")


if __name__ == "__main__":
    main()
