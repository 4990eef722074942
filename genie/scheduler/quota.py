"""Quotas of tenants: guaranteed resources, and what preemptible jobs may borrow beyond them.

Jobs within their tenant's quota may preempt jobs on borrowed quota. A tenant without a quota is not limited,
and all its jobs count as within quota. Does not authorize (tenancy/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from genie.scheduler.request import FULL_MILLI, Amounts, JobRequest, format_count, format_memory

UNBOUNDED = 2**62


def gpu_amounts(gpus: float) -> Amounts:
    """Return an amount of GPUs, with CPUs and memory unlimited."""
    return Amounts(round(gpus * FULL_MILLI), UNBOUNDED, UNBOUNDED)


@dataclass(frozen=True)
class Quota:
    """`own` is guaranteed; preemptible jobs may use up to `borrowed` in addition."""

    own: Amounts
    borrowed: Amounts = field(default_factory=lambda: gpu_amounts(UNBOUNDED // FULL_MILLI))


Claim: TypeAlias = tuple[JobRequest, Amounts]
"""A job and its resources, held or requested."""


@dataclass(frozen=True)
class Quotas:
    by_tenant: Mapping[str, Quota] = field(default_factory=dict)

    def owned(self, tenant: str, claims: Iterable[Claim]) -> frozenset[str]:
        """Return the tenant's jobs within its own quota; the others are on borrowed quota.

        Jobs that are not preemptible count first, then higher priorities.
        """
        quota = self.by_tenant.get(tenant)
        if quota is None:
            return frozenset(request.job_id for request, _ in claims)
        left, owned = quota.own, set()
        for request, amounts in sorted(claims, key=_claim_order):
            if fits(amounts, left):
                left -= amounts
                owned.add(request.job_id)
        return frozenset(owned)

    def why_not(self, request: JobRequest, workers: int, *, usage: Amounts, nonpreemptible: Amounts) -> str:
        """Return why the quota does not allow these workers now; empty if it does. `nonpreemptible` is the
        part of the usage that is not preemptible."""
        quota = self.by_tenant.get(request.tenant)
        if quota is None:
            return ""
        if why := self.why_never(request):
            return f"cannot start under the current quota: {why}"
        more = request.amounts(workers)
        used = f"tenant {request.tenant} uses {_format(usage)} of its quota of {_format(quota.own)}"
        if not request.preemptible and not _is_within(nonpreemptible, more, quota.own):
            return f"{used}; only preemptible jobs may borrow more"
        if _is_within(usage, more, quota.own + quota.borrowed):
            return ""
        return f"{used} and may borrow {_format(quota.borrowed)}"

    def why_never(self, request: JobRequest) -> str:
        """Return why the quota does not allow its minimum of workers even without other jobs; empty if it
        does."""
        quota = self.by_tenant.get(request.tenant)
        if quota is None:
            return ""
        requested, most = request.amounts(request.least_workers), quota.own + quota.borrowed
        if _is_within(Amounts(), requested, most if request.preemptible else quota.own):
            return ""
        why = f"requests {_format(requested)}; the quota of tenant {request.tenant} is {_format(quota.own)}"
        if not _is_within(Amounts(), requested, most):
            return f"{why} plus {_format(quota.borrowed)} borrowed" if quota.borrowed.gpu_milli else why
        return f"{why}; only preemptible jobs may borrow more"


def _claim_order(claim: Claim) -> tuple[bool, int, int]:
    request, _ = claim
    return (request.preemptible, -request.priority, request.sequence)


def _is_within(usage: Amounts, more: Amounts, whole: Amounts) -> bool:
    """Only requested resources are checked: a quota may have been lowered below the usage."""
    return (
        (not more.gpu_milli or usage.gpu_milli + more.gpu_milli <= whole.gpu_milli)
        and (not more.cpu_milli or usage.cpu_milli + more.cpu_milli <= whole.cpu_milli)
        and (not more.memory_mib or usage.memory_mib + more.memory_mib <= whole.memory_mib)
    )


def fits(part: Amounts, whole: Amounts) -> bool:
    return (
        part.gpu_milli <= whole.gpu_milli
        and part.cpu_milli <= whole.cpu_milli
        and part.memory_mib <= whole.memory_mib
    )


def _format(amounts: Amounts) -> str:
    parts = [format_count(amounts.gpu_milli / FULL_MILLI, "GPU")]
    if 0 < amounts.cpu_milli < UNBOUNDED:
        parts.append(format_count(amounts.cpu_milli / 1000, "CPU"))
    if 0 < amounts.memory_mib < UNBOUNDED:
        parts.append(f"{format_memory(amounts.memory_mib)} of memory")
    return ", ".join(parts)
