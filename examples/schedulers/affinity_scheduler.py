"""Placement constraints: near another job, apart from one, in one NVLink island, by label, on one GPU.

    python examples/schedulers/affinity_scheduler.py

Two nodes with 4 GPUs in two islands each. Uses the scheduler without a cluster.
"""

from __future__ import annotations

from genie.model.job import Within
from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.decisions import Start
from genie.scheduler.placement.python_placer import PythonPlacer
from genie.scheduler.request import GpuFacts, JobRequest, NodeFacts, Shape
from genie.scheduler.rules import Rules
from genie.scheduler.scheduler import Scheduler

GPUS = tuple(GpuFacts("H200", "nvidia", 141_000, (9, 0), island=gpu // 2) for gpu in range(4))
ONE = Shape(gpus=1)
REQUESTS = {
    "server": JobRequest("server", "me", 1, ONE, name="server"),
    "near it": JobRequest("near it", "me", 2, ONE, near_job_names=frozenset({"server"})),
    "apart": JobRequest("apart", "me", 3, ONE, apart_job_names=frozenset({"server"})),
    "pair": JobRequest("pair", "me", 4, ONE, workers=2, within=Within.ISLAND),
    "fast disk": JobRequest("fast disk", "me", 5, Shape(gpus=1, labels=frozenset({("disk", "fast")}))),
    "GPU 1": JobRequest("GPU 1", "me", 6, Shape(gpus=1, nodes=frozenset({"n1"}), gpu_ids=(1,))),
}


def main() -> None:
    scheduler = Scheduler(ClusterAllocations(PythonPlacer, policy="bestfit"), Rules())
    scheduler.set_node(NodeFacts("n1", 64_000, 256_000, GPUS))
    scheduler.set_node(NodeFacts("n2", 64_000, 256_000, GPUS, labels=frozenset({("disk", "fast")})))
    for request in REQUESTS.values():
        scheduler.submit(request)
    for decision in scheduler.decide(now=0.0):
        if isinstance(decision, Start):
            places = "; ".join(f"{place.node_id} GPU {place.gpu_ids[0]}" for place in decision.places)
            print(f"{decision.job_id:9} starts on {places}")
        else:
            print(f"{decision.job_id:9} pending: {decision.reason}")


if __name__ == "__main__":
    main()
