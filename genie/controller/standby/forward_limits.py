"""Limits on the requests that a standby forwards, so that no tenants block the others or the owner.

All requests share one connection to the leader. Requests that wait for a change, other requests, and those
of the owner are limited separately. Of the slots of tenants, one tenant may use no more than remain free:
however many tenants send as many requests as they can, the next one gets slots.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genie.errors import OverloadedError, ReplyLostError
from genie.model.tenant import Identity, TokenKind
from genie.processes.clock import Clock

TENANT_WAITS_MAX = 768
TENANT_REQUESTS_MAX = 768
"""Requests of tenants that do not wait."""
OWNER_WAITS_MAX = 192
OWNER_REQUESTS_MAX = 192
"""The sum of the four is less than the leader accepts on one connection
(rpc.CLUSTER_PEER_REQUESTS_IN_FLIGHT_MAX)."""
_RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True, order=True)
class _SlotGroup:
    is_owner: bool
    is_wait: bool

    @property
    def slots_max(self) -> int:
        if self.is_owner:
            return OWNER_WAITS_MAX if self.is_wait else OWNER_REQUESTS_MAX
        return TENANT_WAITS_MAX if self.is_wait else TENANT_REQUESTS_MAX


class ForwardLimits:
    """Counts the requests in flight to the leader."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._used_by_group: Counter[_SlotGroup] = Counter()
        self._used_by_tenant: Counter[tuple[_SlotGroup, str]] = Counter()
        self._unanswered: list[tuple[float, _SlotGroup, str]] = []
        """A heap of requests that are no longer awaited, but which the leader may still handle until then."""

    @property
    def in_flight(self) -> int:
        return self._used_by_group.total()

    @contextmanager
    def count_in_flight(self, identity: Identity, *, is_wait: bool, handled_s_max: float) -> Iterator[None]:
        """Count one request until its reply; raise OverloadedError if a limit is reached. Without a reply, it
        is counted for `handled_s_max`: a client that disconnects does not end its requests at the leader."""
        group = _SlotGroup(is_owner=identity.kind is TokenKind.OWNER, is_wait=is_wait)
        self._release_unanswered_until(self._clock.monotonic_s())
        self._check_slot_available(group, identity.tenant)
        handled_until_s = self._clock.monotonic_s() + handled_s_max
        self._used_by_group[group] += 1
        self._used_by_tenant[group, identity.tenant] += 1
        try:
            yield
        except (asyncio.CancelledError, ReplyLostError):
            heapq.heappush(self._unanswered, (handled_until_s, group, identity.tenant))
            raise
        except BaseException:
            self._release(group, identity.tenant)
            raise
        self._release(group, identity.tenant)

    def release_unanswered(self) -> None:
        """Release the slots of requests without a reply: their connection is closed, which has ended them."""
        self._release_unanswered_until(float("inf"))

    def _check_slot_available(self, group: _SlotGroup, tenant: str) -> None:
        free = group.slots_max - self._used_by_group[group]
        used = self._used_by_tenant[group, tenant]
        if free > 0 and (group.is_owner or used < free):
            return
        kind = "requests that wait" if group.is_wait else "requests"
        of = "the owner" if group.is_owner else f"tenant {tenant}"
        raise OverloadedError(
            f"{of} has {used} forwarded {kind} in flight, and this controller forwards only {free} more",
            hint="try again in a moment, or use another controller",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _release_unanswered_until(self, now_s: float) -> None:
        while self._unanswered and self._unanswered[0][0] <= now_s:
            _, group, tenant = heapq.heappop(self._unanswered)
            self._release(group, tenant)

    def _release(self, group: _SlotGroup, tenant: str) -> None:
        self._used_by_group[group] -= 1
        self._used_by_tenant[group, tenant] -= 1
        if not self._used_by_tenant[group, tenant]:
            del self._used_by_tenant[group, tenant]
