"""Selects running jobs to preempt for a queued one.

A job may be preempted if it is preemptible and its rank is lower. A job on borrowed quota ranks below one
within its tenant's own quota; within each, lower priority ranks below. Each preemption replaces jobs by one
of higher rank, so the ranks of running jobs only rise, and preemption terminates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.quota import Quotas
from genie.scheduler.request import Allocation, JobRequest, WorkerPlace


class StartedJob(msgspec.Struct, frozen=True):
    """`ends_at` is when its time limit or grace period expires, or the assumed end if it has none."""

    allocation: Allocation
    started_at: float
    ends_at: float
    is_stopping: bool = False

    @property
    def request(self) -> JobRequest:
        return self.allocation.request


PreemptionCost: TypeAlias = Callable[[StartedJob, float], tuple[float, ...]]
"""Of preempting a job now; the lowest cost is preempted first."""


def lost_work_cost(running: StartedJob, now: float) -> tuple[float, ...]:
    """The lowest priority first; then the fewest GPU seconds lost."""
    gpus = max(running.allocation.amounts.gpu_milli, 1)
    return (running.request.priority, gpus * (now - running.started_at), -running.request.sequence)


@dataclass(frozen=True)
class Eviction:
    """After these jobs stop, the queued one fits at these places."""

    victim_job_ids: tuple[str, ...]
    places: tuple[WorkerPlace, ...]


PreemptionRank: TypeAlias = tuple[bool, int]
"""Whether the job is within its tenant's own quota, and its priority."""


def preemption_rank(
    request: JobRequest, *, cluster: ClusterAllocations, quotas: Quotas, workers: int = 0
) -> PreemptionRank:
    """Return the rank of a queued job if it started now with `workers` (0: its minimum)."""
    if request.tenant not in quotas.by_tenant:
        return (True, request.priority)
    claim = (request, request.amounts(workers or request.workers_required))
    owned = quotas.jobs_within_quota(request.tenant, [*cluster.claims_of_tenant(request.tenant), claim])
    return (request.job_id in owned, request.priority)


def jobs_preemptible_by(
    request: JobRequest, candidates: Iterable[StartedJob], *, cluster: ClusterAllocations, quotas: Quotas
) -> list[StartedJob]:
    """Return the preemptible jobs of lower rank that are not stopping yet."""
    own_rank = preemption_rank(request, cluster=cluster, quotas=quotas)
    owned: dict[str, frozenset[str]] = {}
    found = []
    for running in candidates:
        other = running.request
        if not other.preemptible or running.is_stopping:
            continue
        if (True, other.priority) < own_rank:
            found.append(running)
            continue
        if other.tenant not in owned:
            owned[other.tenant] = quotas.jobs_within_quota(
                other.tenant, cluster.claims_of_tenant(other.tenant)
            )
        if (other.job_id in owned[other.tenant], other.priority) < own_rank:
            found.append(running)
    return found


def jobs_on_borrowed_quota(
    candidates: Iterable[StartedJob], *, cluster: ClusterAllocations, quotas: Quotas
) -> list[StartedJob]:
    """Return the jobs beyond their tenant's own quota, and those that are stopping."""
    owned: dict[str, frozenset[str]] = {}
    found = []
    for running in candidates:
        tenant = running.request.tenant
        if tenant not in owned:
            owned[tenant] = quotas.jobs_within_quota(tenant, cluster.claims_of_tenant(tenant))
        if running.is_stopping or running.request.job_id not in owned[tenant]:
            found.append(running)
    return found


def plan_eviction(
    request: JobRequest,
    candidates: Iterable[StartedJob],
    *,
    ending: Sequence[StartedJob],
    cluster: ClusterAllocations,
    cost: PreemptionCost,
    now: float,
) -> Eviction | None:
    """Select the cheapest sufficient victims; None if all candidates together are not enough.

    Jobs in `ending` count as ended. Adds candidates by cost until the request fits, then drops those that
    turn out not to be needed, the most expensive first.
    """
    by_cost = sorted(candidates, key=lambda running: cost(running, now))
    chosen = _select_sufficient_victims(request, ending, by_cost, cluster)
    if chosen is None:
        return None
    for running in reversed(list(chosen)):
        without = [other for other in chosen if other is not running]
        if _find_places_after_stopping(request, [*ending, *without], cluster) is not None:
            chosen = without
    places = _find_places_after_stopping(request, [*ending, *chosen], cluster)
    assert places is not None
    return Eviction(tuple(running.request.job_id for running in chosen), places)


def _select_sufficient_victims(
    request: JobRequest,
    ending: Iterable[StartedJob],
    candidates_by_cost: Iterable[StartedJob],
    cluster: ClusterAllocations,
) -> list[StartedJob] | None:
    chosen: list[StartedJob] = []
    with cluster.dry_run() as trial:
        for running in ending:
            trial.release(running.allocation)
        if trial.place(request, request.workers_required) is not None:
            return chosen
        for running in candidates_by_cost:
            trial.release(running.allocation)
            chosen.append(running)
            if trial.place(request, request.workers_required) is not None:
                return chosen
    return None


def _find_places_after_stopping(
    request: JobRequest, stopped: Iterable[StartedJob], cluster: ClusterAllocations
) -> tuple[WorkerPlace, ...] | None:
    with cluster.dry_run() as trial:
        for running in stopped:
            trial.release(running.allocation)
        return trial.place(request, request.workers_required)
