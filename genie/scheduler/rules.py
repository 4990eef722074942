"""The configuration of a scheduler: queue order, quotas, preemption and backfill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from genie.scheduler.cluster.filters import NodeFilter
from genie.scheduler.order import FairShare, QueuePolicy
from genie.scheduler.policies import IsolatedPolicy
from genie.scheduler.preemption import victims
from genie.scheduler.quota import Quotas


@dataclass(frozen=True)
class Rules:
    order: QueuePolicy = field(default_factory=FairShare)
    quotas: Quotas = field(default_factory=Quotas)
    weights: Mapping[str, float] = field(default_factory=dict)
    """Fair-share weights of tenants; 1 for those not listed."""
    preemption_cost: victims.PreemptionCost = victims.lost_work_cost
    """Of preempting a job."""
    node_filter: NodeFilter | None = None
    """Excludes nodes for job classes."""
    allows_preemption: bool = True
    """Whether jobs are preempted or moved for others."""
    migrations_per_job_max: int = 2
    """How often a preemptible job may be moved to defragment nodes; each move restarts it."""
    allows_backfill: bool = True
    assumed_runtime_s: float = 86_400.0
    """Assumed run time of a job without a time limit; it is not enforced."""

    def with_order(self, policy: QueuePolicy) -> Rules:
        """Return a copy with another policy. A user's policy brings its own filter and costs."""
        if not isinstance(policy, IsolatedPolicy):
            return replace(self, order=policy, preemption_cost=victims.lost_work_cost, node_filter=None)
        return replace(
            self,
            order=policy,
            preemption_cost=policy.cost,
            node_filter=policy.allowed if policy.has_node_filter else None,
        )
