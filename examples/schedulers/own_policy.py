"""A custom policy: an order, a node filter, and the fallback when a policy fails.

    python examples/schedulers/own_policy.py
    PYTHONPATH=examples/schedulers genie sim run --nodes 16x8 --jobs 500 --order own_policy:SmallFirst

`SmallFirst` starts small jobs first and rejects large nodes for test jobs. `Broken` raises an exception at
its second job: it is disabled, the built-in order replaces it, and the reason is recorded.
"""

from __future__ import annotations

import time

from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.order import Key, OrderInputs
from genie.scheduler.placement.python_placer import PythonPlacer
from genie.scheduler.policies import PolicyRegistry
from genie.scheduler.request import GpuFacts, JobRequest, NodeFacts, Shape
from genie.scheduler.rules import Rules
from genie.scheduler.scheduler import Scheduler


class SmallFirst:
    def within(self, request: JobRequest) -> Key:
        return (request.workers * request.shape.gpus, request.sequence)

    def among(self, request: JobRequest, inputs: OrderInputs) -> Key:
        return (inputs.dominant_share(request.tenant), *self.within(request))

    def allowed(self, request: JobRequest, node: NodeFacts) -> str:
        return "is too large for tests" if request.tenant == "tests" and len(node.gpus) > 4 else ""


class Broken(SmallFirst):
    def within(self, request: JobRequest) -> Key:
        return (1 / (2 - request.sequence),)


def main() -> None:
    policies = PolicyRegistry()
    policies.register("small-first", SmallFirst)
    policies.register("broken", Broken)
    for name in ("fifo", "small-first", "broken"):
        policy = policies.create(name, budget_s=1.0, clock=time.monotonic)
        scheduler = Scheduler(
            ClusterAllocations(PythonPlacer, policy="bestfit"),
            Rules(allows_preemption=False).with_order(policy),
        )
        scheduler.set_node(NodeFacts("large", 64_000, 256_000, (GpuFacts("H200"),) * 8))
        for number, (tenant, gpus) in enumerate((("me", 6), ("me", 2), ("me", 1), ("tests", 1)), start=1):
            scheduler.submit(JobRequest(f"{tenant} {gpus}", tenant, number, Shape(gpus=gpus)))
        print(f"{name}: {scheduler.policy_fault or 'no fault'}")
        for decision in scheduler.decide(now=0.0):
            print(f"  {decision.job_id:7} {type(decision).__name__:5} {decision.reason}")


if __name__ == "__main__":
    main()
