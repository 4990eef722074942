"""What a tenant may hold: its own part, and what it may borrow while nobody else needs it.

Only work that can be taken back may be on loan, and jobs within a tenant's own part may take it back. Who has
no quota owns all that he holds, and has no bound. Not for: access (tenancy/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from genie.scheduler.request import FULL_MILLI, Amounts, Request, counted

UNBOUNDED = 2**62


def of_gpus(gpus: float) -> Amounts:
    """So many GPUs, and no bound for the rest."""
    return Amounts(round(gpus * FULL_MILLI), UNBOUNDED, UNBOUNDED)


@dataclass(frozen=True)
class Quota:
    """`own` is the tenant's; up to `borrowed` more may be held by preemptible jobs."""

    own: Amounts
    borrowed: Amounts = field(default_factory=lambda: of_gpus(UNBOUNDED // FULL_MILLI))


Claim: TypeAlias = tuple[Request, Amounts]
"""A job and what it holds, or would hold."""


@dataclass(frozen=True)
class Quotas:
    by_tenant: Mapping[str, Quota] = field(default_factory=dict)

    def owned(self, tenant: str, claims: Iterable[Claim]) -> frozenset[str]:
        """Which of the tenant's jobs are within its own part; the others are on loan.

        What cannot be taken back counts first, then the higher priority.
        """
        quota = self.by_tenant.get(tenant)
        if quota is None:
            return frozenset(request.job_id for request, _ in claims)
        left, owned = quota.own, set()
        for request, amounts in sorted(claims, key=_first_owned):
            if fits(amounts, left):
                left -= amounts
                owned.add(request.job_id)
        return frozenset(owned)

    def why_not(self, request: Request, workers: int, *, usage: Amounts, fixed: Amounts) -> str:
        """Why the tenant may not start so much more; empty when it may. `fixed` is what cannot be taken back
        of what it holds."""
        quota = self.by_tenant.get(request.tenant)
        if quota is None:
            return ""
        if why := self.why_never(request):
            return f"can never start under the present quota: {why}"
        more = request.amounts(workers)
        holds = f"{request.tenant} holds {_text(usage)}, and its quota is {_text(quota.own)}"
        if not request.preemptible and not _grows_within(fixed, more, quota.own):
            return f"{holds}; only preemptible jobs may borrow more"
        if _grows_within(usage, more, quota.own + quota.borrowed):
            return ""
        return f"{holds}; it may borrow {_text(quota.borrowed)}"

    def why_never(self, request: Request) -> str:
        """Why the tenant could not start it with its least workers, held it nothing else; empty when it
        could."""
        quota = self.by_tenant.get(request.tenant)
        if quota is None:
            return ""
        asked, most = request.amounts(request.least_workers), quota.own + quota.borrowed
        if _grows_within(Amounts(), asked, most if request.preemptible else quota.own):
            return ""
        why = f"it asks for {_text(asked)}, and the quota of tenant {request.tenant} is {_text(quota.own)}"
        if not _grows_within(Amounts(), asked, most):
            return f"{why} and {_text(quota.borrowed)} on loan" if quota.borrowed.gpu_milli else why
        return f"{why}; only preemptible jobs may borrow more"


def _first_owned(claim: Claim) -> tuple[bool, int, int]:
    request, _ = claim
    return (request.preemptible, -request.priority, request.sequence)


def _grows_within(held: Amounts, more: Amounts, whole: Amounts) -> bool:
    """A bound that was lowered below what is held bounds only what more is asked of."""
    return (
        (not more.gpu_milli or held.gpu_milli + more.gpu_milli <= whole.gpu_milli)
        and (not more.cpu_milli or held.cpu_milli + more.cpu_milli <= whole.cpu_milli)
        and (not more.memory_mib or held.memory_mib + more.memory_mib <= whole.memory_mib)
    )


def fits(part: Amounts, whole: Amounts) -> bool:
    return (
        part.gpu_milli <= whole.gpu_milli
        and part.cpu_milli <= whole.cpu_milli
        and part.memory_mib <= whole.memory_mib
    )


def _text(amounts: Amounts) -> str:
    parts = [counted(amounts.gpu_milli / FULL_MILLI, "GPU")]
    if 0 < amounts.cpu_milli < UNBOUNDED:
        parts.append(counted(amounts.cpu_milli / 1000, "CPU"))
    if 0 < amounts.memory_mib < UNBOUNDED:
        parts.append(f"{amounts.memory_mib} MiB")
    return ", ".join(parts)
