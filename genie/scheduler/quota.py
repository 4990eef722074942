"""Quotas of tenants: guaranteed resources, and what preemptible jobs may borrow beyond them.

Jobs within their tenant's quota may preempt jobs on borrowed quota. A tenant without a quota is not limited,
and all its jobs count as within quota. Does not authorize (tenancy/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from genie.scheduler.request import WHOLE_GPU_MILLI, Amounts, JobRequest, format_count, format_memory

UNBOUNDED = 2**62


def gpu_limit_amounts(gpus: float) -> Amounts:
    """Return an amount of GPUs, with CPUs and memory unlimited."""
    return Amounts(round(gpus * WHOLE_GPU_MILLI), UNBOUNDED, UNBOUNDED)


@dataclass(frozen=True)
class Quota:
    """`guaranteed` is guaranteed; preemptible jobs may use up to `borrowable` in addition."""

    guaranteed: Amounts
    borrowable: Amounts = field(default_factory=lambda: gpu_limit_amounts(UNBOUNDED // WHOLE_GPU_MILLI))


ResourceClaim: TypeAlias = tuple[JobRequest, Amounts]
"""A job and its resources, held or requested."""


@dataclass(frozen=True)
class Quotas:
    by_tenant: Mapping[str, Quota] = field(default_factory=dict)

    def jobs_within_quota(self, tenant: str, claims: Iterable[ResourceClaim]) -> frozenset[str]:
        """Return the tenant's jobs within its own quota; the others are on borrowed quota.

        Jobs that are not preemptible count first, then higher priorities.
        """
        quota = self.by_tenant.get(tenant)
        if quota is None:
            return frozenset(request.job_id for request, _ in claims)
        left, owned = quota.guaranteed, set()
        for request, amounts in sorted(claims, key=_claim_sort_key):
            if fits_within(amounts, left):
                left -= amounts
                owned.add(request.job_id)
        return frozenset(owned)

    def why_over_quota(
        self, request: JobRequest, workers: int, *, usage: Amounts, nonpreemptible_usage: Amounts
    ) -> str:
        """Return why the quota does not allow these workers now; empty if it does. `nonpreemptible_usage` is
        the part of the usage that is not preemptible."""
        quota = self.by_tenant.get(request.tenant)
        if quota is None:
            return ""
        if why := self.why_never_within_quota(request):
            return f"cannot start under the current quota: {why}"
        more = request.amounts(workers)
        limit = _format_amounts(quota.guaranteed)
        used = f"tenant {request.tenant} uses {_format_amounts(usage)} of its quota of {limit}"
        if not request.preemptible and not _is_within_quota(nonpreemptible_usage, more, quota.guaranteed):
            return f"{used}; only preemptible jobs may borrow more"
        if _is_within_quota(usage, more, quota.guaranteed + quota.borrowable):
            return ""
        return f"{used} and may borrow {_format_amounts(quota.borrowable)}"

    def why_never_within_quota(self, request: JobRequest) -> str:
        """Return why the quota does not allow its minimum of workers even without other jobs; empty if it
        does."""
        quota = self.by_tenant.get(request.tenant)
        if quota is None:
            return ""
        requested, most = request.amounts(request.workers_required), quota.guaranteed + quota.borrowable
        if _is_within_quota(Amounts(), requested, most if request.preemptible else quota.guaranteed):
            return ""
        limit = _format_amounts(quota.guaranteed)
        why = f"requests {_format_amounts(requested)}; the quota of tenant {request.tenant} is {limit}"
        if not _is_within_quota(Amounts(), requested, most):
            return (
                f"{why} plus {_format_amounts(quota.borrowable)} borrowed"
                if quota.borrowable.gpu_milli
                else why
            )
        return f"{why}; only preemptible jobs may borrow more"


def _claim_sort_key(claim: ResourceClaim) -> tuple[bool, int, int]:
    request, _ = claim
    return (request.preemptible, -request.priority, request.sequence)


def _is_within_quota(usage: Amounts, requested: Amounts, quota: Amounts) -> bool:
    """Only requested resources are checked: a quota may have been lowered below the usage."""
    return (
        (not requested.gpu_milli or usage.gpu_milli + requested.gpu_milli <= quota.gpu_milli)
        and (not requested.cpu_milli or usage.cpu_milli + requested.cpu_milli <= quota.cpu_milli)
        and (not requested.memory_mib or usage.memory_mib + requested.memory_mib <= quota.memory_mib)
    )


def fits_within(part: Amounts, whole: Amounts) -> bool:
    return (
        part.gpu_milli <= whole.gpu_milli
        and part.cpu_milli <= whole.cpu_milli
        and part.memory_mib <= whole.memory_mib
    )


def _format_amounts(amounts: Amounts) -> str:
    parts = [format_count(amounts.gpu_milli / WHOLE_GPU_MILLI, "GPU")]
    if 0 < amounts.cpu_milli < UNBOUNDED:
        parts.append(format_count(amounts.cpu_milli / 1000, "CPU"))
    if 0 < amounts.memory_mib < UNBOUNDED:
        parts.append(f"{format_memory(amounts.memory_mib)} of memory")
    return ", ".join(parts)
