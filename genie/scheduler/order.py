"""Which waiting job comes next. An order is two keys: within a tenant, and among the first of each tenant.

The first key must not change while a job waits; the second is asked anew after every start, since what a
tenant holds has changed then. Not for: whether there is room (scheduler.py).
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from genie.scheduler.request import Amounts, Request

Key: TypeAlias = tuple[float, ...]
"""The lowest comes first."""


@dataclass(frozen=True)
class Scales:
    """What an order may look at: the time, and what tenants hold of what there is."""

    now: float
    capacity: Amounts
    usage: Callable[[str], Amounts]
    weights: Mapping[str, float]
    """Of tenants; 1 for those that are not in it."""
    _shares: dict[str, tuple[Amounts, float]] = field(default_factory=dict, repr=False, compare=False)

    def dominant_share(self, tenant: str) -> float:
        """The largest part that the tenant holds of any one thing, by its weight."""
        held, known = self.usage(tenant), self._shares.get(tenant)
        if known is None or known[0] is not held:
            self._shares[tenant] = known = (held, self._share(tenant, held))
        return known[1]

    def _share(self, tenant: str, held: Amounts) -> float:
        there = self.capacity
        parts = (
            (held.gpu_milli, there.gpu_milli),
            (held.cpu_milli, there.cpu_milli),
            (held.memory_mib, there.memory_mib),
        )
        share = max((part / whole for part, whole in parts if whole), default=0.0)
        return share / self.weights.get(tenant, 1.0)


class Order(Protocol):
    def within(self, request: Request) -> Key: ...

    def among(self, request: Request, scales: Scales) -> Key: ...


class Fifo:
    """First come, first served."""

    def within(self, request: Request) -> Key:
        return (request.sequence,)

    def among(self, request: Request, scales: Scales) -> Key:
        return (request.sequence,)


@dataclass(frozen=True)
class Priority:
    """The higher priority first, then who came first or has the nearer deadline.

    A job gains a priority for every `aging_s` that it has waited, so that no stream of others holds it back
    for ever. The gain is the same for all who wait, and counts from the arrival: it never changes the order
    of two jobs that wait. One with a deadline counts as come `aging_s` before that, if it came later: the
    nearer the deadline, the earlier. That is worth one priority at most.
    """

    aging_s: float = 3600.0

    def within(self, request: Request) -> Key:
        came, deadline = request.submitted_at, math.inf
        if request.deadline_at is not None:
            deadline = request.deadline_at
            came = min(came, max(deadline, came) - self.aging_s)
        return (came / self.aging_s - request.priority, deadline, request.sequence)

    def among(self, request: Request, scales: Scales) -> Key:
        return self.within(request)


@dataclass(frozen=True)
class FairShare:
    """The tenant with the smallest dominant share first; within a tenant by priority."""

    within_tenant: Priority = Priority()

    def within(self, request: Request) -> Key:
        return self.within_tenant.within(request)

    def among(self, request: Request, scales: Scales) -> Key:
        return (scales.dominant_share(request.tenant), request.sequence)


Kind: TypeAlias = tuple[int, int]
"""What a job is like, as a number, and its priority."""

_Entry: TypeAlias = tuple[Key, int, str]


class Lines:
    """Who waits. Jobs of one tenant that are alike stand in one line, which can be passed over as a whole."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lines: dict[tuple[str, Kind], list[_Entry]] = {}
        self._requests: dict[str, Request] = {}
        self._entries: dict[str, _Entry] = {}
        """As they stand in their lines: an order of a user's own may answer something else the next time."""

    def __len__(self) -> int:
        return len(self._lines)

    def has(self, tenant: str, kind: Kind) -> bool:
        return (tenant, kind) in self._lines

    def add(self, request: Request, kind: Kind) -> None:
        entry = (self._order.within(request), request.sequence, request.job_id)
        self._requests[request.job_id], self._entries[request.job_id] = request, entry
        bisect.insort(self._lines.setdefault((request.tenant, kind), []), entry)

    def remove(self, request: Request, kind: Kind) -> None:
        del self._requests[request.job_id]
        line = self._lines[request.tenant, kind]
        del line[bisect.bisect_left(line, self._entries.pop(request.job_id))]
        if not line:
            del self._lines[request.tenant, kind]

    def walk(
        self, scales: Scales, *, why_all: Callable[[str, Kind], str], tell: Callable[[str, str], None]
    ) -> Iterator[Request]:
        """Each once, in order. What the caller starts between two of them counts for the next.

        Where `why_all` says why nobody of a tenant's line can start, those left in it are told that and are
        not given.
        """
        firsts: dict[str, list[tuple[_Entry, Kind, Iterator[_Entry]]]] = {}
        for (tenant, kind), line in self._lines.items():
            rest = iter(tuple(line))
            firsts.setdefault(tenant, []).append((next(rest), kind, rest))
        moment = 0
        """Grows with each that is given: what tenants hold may have changed since."""
        heads: list[tuple[Key, str, str, int]] = []
        for tenant, lines in firsts.items():
            heapq.heapify(lines)
            heads.append(self._head(lines[0][0], tenant, scales, moment))
        heapq.heapify(heads)
        while heads:
            key, tenant, job_id, asked_at = heapq.heappop(heads)
            lines = firsts[tenant]
            while lines and (why := why_all(tenant, lines[0][1])):
                first, _, rest = heapq.heappop(lines)
                for entry in (first, *rest):
                    tell(entry[2], why)
            if not lines:
                continue
            if (job_id, asked_at) != (lines[0][0][2], moment):
                head = self._head(lines[0][0], tenant, scales, moment)
                if head[0] != key:
                    heapq.heappush(heads, head)
                    continue
            first, kind, rest = lines[0]
            if (following := next(rest, None)) is None:
                heapq.heappop(lines)
            else:
                heapq.heapreplace(lines, (following, kind, rest))
            if (request := self._requests.get(first[2])) is not None:
                yield request
                moment += 1
            if lines:
                heapq.heappush(heads, self._head(lines[0][0], tenant, scales, moment))

    def _head(self, entry: _Entry, tenant: str, scales: Scales, moment: int) -> tuple[Key, str, str, int]:
        return (self._among(entry, scales), tenant, entry[2], moment)

    def _among(self, entry: _Entry, scales: Scales) -> Key:
        request = self._requests.get(entry[2])
        return () if request is None else self._order.among(request, scales)
