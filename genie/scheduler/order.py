"""Which waiting job comes next. An order is two keys: within a tenant, and among the first of each tenant.

The first key must not change while a job waits; the second is asked anew after every start, since what a
tenant holds has changed then. Not for: whether there is room (scheduler.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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

    def dominant_share(self, tenant: str) -> float:
        """The largest part that the tenant holds of any one thing, by its weight."""
        held, there = self.usage(tenant), self.capacity
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
    """The higher priority first, then the nearer deadline, then who came first.

    A job gains a priority for every `aging_s` that it has waited, so that no stream of others holds it back
    for ever. The gain is the same for all who wait, and counts from the arrival: it never changes the order
    of two jobs that wait.
    """

    aging_s: float = 3600.0

    def within(self, request: Request) -> Key:
        aged = request.priority - request.submitted_at / self.aging_s
        deadline = math.inf if request.deadline_at is None else request.deadline_at
        return (-aged, deadline, request.sequence)

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


def in_order(waiting: Iterable[Request], order: Order, scales: Scales) -> Iterator[Request]:
    """Each once. What the caller starts between two of them counts for the next."""
    lines: dict[str, list[Request]] = {}
    for request in waiting:
        lines.setdefault(request.tenant, []).append(request)
    for line in lines.values():
        line.sort(key=order.within, reverse=True)
    heads = [(order.among(line[-1], scales), tenant) for tenant, line in lines.items()]
    heapq.heapify(heads)
    while heads:
        key, tenant = heapq.heappop(heads)
        line = lines[tenant]
        if (now := order.among(line[-1], scales)) != key:  # what the tenant holds has changed meanwhile
            heapq.heappush(heads, (now, tenant))
            continue
        yield line.pop()
        if line:
            heapq.heappush(heads, (order.among(line[-1], scales), tenant))
