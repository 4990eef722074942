"""Gangs: all workers start together or none does; elastic ones start with what there is.

    python examples/schedulers/gang_scheduler.py

Two gangs want all 8 GPUs of two nodes. Were workers placed one by one, each gang could get half and wait for
the other for ever. As wholes, they run one after the other; the elastic job takes what `half` leaves.
"""

from __future__ import annotations

from genie.scheduler.book import Book
from genie.scheduler.order import Fifo
from genie.scheduler.placement.plain import PlainPlacer
from genie.scheduler.request import GpuFacts, NodeFacts, Request, Shape
from genie.scheduler.scheduler import Rules, Scheduler, Start, Wait

PAIR = Shape(gpus=2)
JOBS = [
    Request("gang A", "me", 1, PAIR, workers=4, time_limit_s=60.0),
    Request("gang B", "me", 2, PAIR, workers=4, time_limit_s=60.0),
    Request("half", "me", 3, PAIR, workers=2, time_limit_s=60.0),
    Request("elastic", "me", 4, PAIR, workers=4, workers_min=1, time_limit_s=60.0),
]


def main() -> None:
    scheduler = Scheduler(Book(PlainPlacer, policy="bestfit"), Rules(order=Fifo()))
    for name in ("n1", "n2"):
        scheduler.set_node(NodeFacts(name, 64_000, 256_000, (GpuFacts("H200"),) * 4))
    for job in JOBS:
        scheduler.submit(job)
    for minute in range(3):
        now = 60.0 * minute
        for running in scheduler.running:  # all run to their time limits
            scheduler.ended(running.request.job_id)
        print(f"after {minute} minutes")
        for decision in scheduler.decide(now):
            if isinstance(decision, Start):
                nodes = ", ".join(place.node_id for place in decision.places)
                print(f"  {decision.job_id:7} starts with {len(decision.places)} workers on {nodes}")
            elif isinstance(decision, Wait):
                print(f"  {decision.job_id:7} waits: {decision.reason}")


if __name__ == "__main__":
    main()
