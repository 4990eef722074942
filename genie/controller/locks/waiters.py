"""Clients that wait for locks, in the order in which they began to wait. In memory of the leader only.

A client waits in bounded polls. Between two of them it keeps its place while its connection is open, for
BETWEEN_POLLS_S at most; the lock is not granted to a client that has disconnected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genie.errors import LockLimitError
from genie.runtime.rpc import Peer

WAITERS_PER_LOCK_MAX = 256
WAITERS_PER_TENANT_MAX = 512
BETWEEN_POLLS_S = 2.0


@dataclass(slots=True, eq=False)
class LockWaiter:
    """A client that wants a lock. One that does not wait is in no queue."""

    tenant: str
    name: str
    acquisition_id: str
    holder: str
    owner: str
    ttl_s: float
    peer: Peer
    """The connection of its last poll."""
    open_polls: int = 0
    last_poll_ended_s: float = 0.0

    def is_ready(self, now_s: float) -> bool:
        """Whether a grant would reach it."""
        return self.open_polls > 0 or (not self.peer.is_closed and self.keeps_place(now_s))

    def keeps_place(self, now_s: float) -> bool:
        return self.open_polls > 0 or now_s - self.last_poll_ended_s < BETWEEN_POLLS_S


class LockWaiters:
    """The queues, by row ID of the lock."""

    def __init__(self) -> None:
        self._queue_by_row: dict[str, dict[str, LockWaiter]] = {}
        self._count_by_tenant: Counter[str] = Counter()

    def clear(self) -> None:
        self._queue_by_row.clear()
        self._count_by_tenant.clear()

    def count(self, row_id: str) -> int:
        return len(self._queue_by_row.get(row_id, ()))

    def waiting_row_ids(self) -> list[str]:
        """The locks that clients wait for."""
        return list(self._queue_by_row)

    @contextmanager
    def poll(self, row_id: str, waiter: LockWaiter, *, now_s: float) -> Iterator[LockWaiter]:
        """Put the waiter into the queue, or find the one of its earlier polls, for one poll. Yields that
        of the queue. Raises LockLimitError if the queue is full."""
        queued = self._find_or_append(row_id, waiter, now_s=now_s)
        queued.peer = waiter.peer
        queued.open_polls += 1
        try:
            yield queued
        finally:
            queued.open_polls -= 1

    def first_ready(self, row_id: str, *, now_s: float) -> LockWaiter | None:
        """The client to which the lock is granted next."""
        queue = self._queue_by_row.get(row_id, {})
        return next((waiter for waiter in queue.values() if waiter.is_ready(now_s)), None)

    def remove(self, row_id: str, acquisition_id: str) -> bool:
        """Remove a client from the queue; return whether it was in it."""
        queue = self._queue_by_row.get(row_id, {})
        waiter = queue.pop(acquisition_id, None)
        if waiter is None:
            return False
        self._count_by_tenant[waiter.tenant] -= 1
        if not self._count_by_tenant[waiter.tenant]:
            del self._count_by_tenant[waiter.tenant]
        if not queue:
            del self._queue_by_row[row_id]
        return True

    def remove_abandoned(self, *, now_s: float) -> None:
        """Remove clients that have not polled for BETWEEN_POLLS_S."""
        for row_id, queue in list(self._queue_by_row.items()):
            self._remove_abandoned_from(row_id, queue, now_s=now_s)

    def _remove_abandoned_from(self, row_id: str, queue: dict[str, LockWaiter], *, now_s: float) -> None:
        for waiter in [each for each in queue.values() if not each.keeps_place(now_s)]:
            self.remove(row_id, waiter.acquisition_id)

    def _find_or_append(self, row_id: str, waiter: LockWaiter, *, now_s: float) -> LockWaiter:
        queue = self._queue_by_row.get(row_id, {})
        if waiter.acquisition_id in queue:
            return queue[waiter.acquisition_id]
        self._remove_abandoned_from(row_id, queue, now_s=now_s)
        if self.count(row_id) >= WAITERS_PER_LOCK_MAX:
            raise LockLimitError(
                f"{WAITERS_PER_LOCK_MAX} clients wait for lock {waiter.name!r}, which is the maximum"
            )
        if self._count_by_tenant[waiter.tenant] >= WAITERS_PER_TENANT_MAX:
            raise LockLimitError(
                f"{WAITERS_PER_TENANT_MAX} clients of tenant {waiter.tenant} wait for locks, which is the "
                "maximum"
            )
        self._queue_by_row.setdefault(row_id, {})[waiter.acquisition_id] = waiter
        self._count_by_tenant[waiter.tenant] += 1
        return waiter
