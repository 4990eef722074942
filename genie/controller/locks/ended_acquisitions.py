"""Acquisitions of locks that ended before their lease, and why. In memory of the leader only.

A request that arrives after the release of its acquisition must not acquire the lock again. Each tenant has
entries of its own, so that releases of one tenant never remove those of another. Pure: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict

ENDED_ACQUISITIONS_PER_TENANT_MAX = 512
TENANTS_MAX = 256
ENDED_ACQUISITIONS_KEPT_S = 7200.0
"""Longer than any lease, so that its holder learns why it has ended, and than any request can be delayed."""


class EndedAcquisitions:
    def __init__(self) -> None:
        self._reasons_by_tenant: OrderedDict[str, OrderedDict[tuple[str, str], tuple[str, float]]] = (
            OrderedDict()
        )
        """Reason and time, by tenant, the one with the newest entry last; then by name of the lock and
        acquisition ID."""

    def add(self, tenant: str, name: str, acquisition_id: str, reason: str, *, now_s: float) -> None:
        """Add an entry. Removes the oldest one of the tenant, or all of the tenant whose newest entry is the
        oldest, if there are too many."""
        reasons = self._reasons_by_tenant.setdefault(tenant, OrderedDict())
        self._reasons_by_tenant.move_to_end(tenant)
        reasons[name, acquisition_id] = reason, now_s
        reasons.move_to_end((name, acquisition_id))
        if len(reasons) > ENDED_ACQUISITIONS_PER_TENANT_MAX:
            reasons.popitem(last=False)
        if len(self._reasons_by_tenant) > TENANTS_MAX:
            self._reasons_by_tenant.popitem(last=False)

    def find_reason(self, tenant: str, name: str, acquisition_id: str, *, now_s: float) -> str | None:
        """Return why the acquisition ended; None if it is not known to have ended."""
        found = self._reasons_by_tenant.get(tenant, OrderedDict()).get((name, acquisition_id))
        if found is None or now_s - found[1] >= ENDED_ACQUISITIONS_KEPT_S:
            return None
        return found[0]
