"""What a tenant may hold: its own part, and what it may borrow while nobody else needs it.

Only work that can be taken back may borrow. Who is within his own part may take back what others have
borrowed. A tenant without a quota has no own part to defend and no bound. Not for: access (tenancy/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from genie.scheduler.request import FULL_MILLI, Amounts, Request

UNBOUNDED = 2**62


def of_gpus(gpus: float) -> Amounts:
    """So many GPUs, and no bound for the rest."""
    return Amounts(round(gpus * FULL_MILLI), UNBOUNDED, UNBOUNDED)


@dataclass(frozen=True)
class Quota:
    """`own` is the tenant's; up to `borrowed` more may be held by preemptible jobs."""

    own: Amounts
    borrowed: Amounts = field(default_factory=lambda: of_gpus(UNBOUNDED // FULL_MILLI))


@dataclass(frozen=True)
class Quotas:
    by_tenant: Mapping[str, Quota] = field(default_factory=dict)

    def is_within_own(self, tenant: str, usage: Amounts) -> bool:
        quota = self.by_tenant.get(tenant)
        return quota is None or fits(usage, quota.own)

    def is_borrowing(self, tenant: str, usage: Amounts) -> bool:
        return not self.is_within_own(tenant, usage)

    def why_not(self, request: Request, workers: int, usage: Amounts) -> str:
        """Why the tenant may not start so much more; empty when it may."""
        quota = self.by_tenant.get(request.tenant)
        if quota is None:
            return ""
        after = usage + request.amounts(workers)
        if fits(after, quota.own):
            return ""
        holds = f"{request.tenant} holds {_text(usage)}, and its quota is {_text(quota.own)}"
        if not request.preemptible:
            return f"{holds}; only preemptible jobs may borrow more"
        if fits(after, quota.own + quota.borrowed):
            return ""
        return f"{holds}; it may borrow {_text(quota.borrowed)}"


def fits(part: Amounts, whole: Amounts) -> bool:
    return (
        part.gpu_milli <= whole.gpu_milli
        and part.cpu_milli <= whole.cpu_milli
        and part.memory_mib <= whole.memory_mib
    )


def _text(amounts: Amounts) -> str:
    gpus = amounts.gpu_milli / FULL_MILLI
    parts = [f"{gpus:g} GPU{'' if gpus == 1 else 's'}"]
    if 0 < amounts.cpu_milli < UNBOUNDED:
        parts.append(f"{amounts.cpu_milli / 1000:g} CPUs")
    if 0 < amounts.memory_mib < UNBOUNDED:
        parts.append(f"{amounts.memory_mib} MiB")
    return ", ".join(parts)
