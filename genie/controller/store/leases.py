"""Lease timers for the engines that keep leases in this process (SQLite, and the simulator's memory store).

One timer task per lease. The keys attached to a lease are deleted by the engine. etcd has its own
leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from genie.controller.store.background import BackgroundTasks
from genie.errors import LeaseLostError, UsageError
from genie.processes.clock import Clock

LEASES_MAX = 10_000


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    deadline_s: float
    timer: asyncio.Task[None] | None = None


class LeaseTimers:
    """Active leases and their deadlines. `expire` is awaited once for each lease that expires."""

    def __init__(
        self, *, clock: Clock, background: BackgroundTasks, expire: Callable[[int], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self._background = background
        self._expire_lease = expire
        self._leases: dict[int, _Lease] = {}

    def check_lease_limit(self) -> None:
        if len(self._leases) >= LEASES_MAX:
            raise UsageError(
                f"the limit of {LEASES_MAX} leases is reached", hint="revoke leases that are not needed"
            )

    def start_timer(self, lease_id: int, *, ttl_s: float) -> None:
        lease = _Lease(ttl_s, self._clock.monotonic_s() + ttl_s)
        self._leases[lease_id] = lease
        lease.timer = self._background.start_task(
            self._expire_lease_at_deadline(lease_id, lease), name=f"lease-{lease_id}"
        )

    def renew_timer(self, lease_id: int) -> None:
        """Restarts the TTL. Raises LeaseLostError if the lease was revoked or its deadline has passed."""
        if self.is_expired_or_revoked(lease_id):
            raise LeaseLostError(f"lease {lease_id} has expired or was revoked", hint="grant a new one")
        lease = self._leases[lease_id]
        lease.deadline_s = self._clock.monotonic_s() + lease.ttl_s

    def extend_all_timers(self, *, by_s: float) -> None:
        """Restarts the TTL of every lease, once with `by_s` more, as a new leader of etcd does."""
        for lease in self._leases.values():
            lease.deadline_s = self._clock.monotonic_s() + lease.ttl_s + by_s

    def is_expired_or_revoked(self, lease_id: int) -> bool:
        lease = self._leases.get(lease_id)
        return lease is None or self._clock.monotonic_s() >= lease.deadline_s

    def stop_timer(self, lease_id: int) -> None:
        """Removes the lease without expiring it. Ignores an unknown lease."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.timer is not None:
            lease.timer.cancel()

    async def _expire_lease_at_deadline(self, lease_id: int, lease: _Lease) -> None:
        while (remaining_s := lease.deadline_s - self._clock.monotonic_s()) > 0:
            await self._clock.sleep(remaining_s)
        self._leases.pop(lease_id, None)
        await self._expire_lease(lease_id)
