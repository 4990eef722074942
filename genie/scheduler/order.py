"""The order of the queue. An order has two keys: within a tenant, and among the first jobs of the tenants.

The first key must not change while a job is queued; the second is computed again after every start, because
the usage of the tenant has changed.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from genie.scheduler.request import Amounts, JobRequest

Key: TypeAlias = tuple[float, ...]
"""The lowest is first."""


@dataclass(frozen=True)
class OrderInputs:
    """The inputs of an order: the time, and usage, weights and capacity."""

    now: float
    capacity: Amounts
    usage: Callable[[str], Amounts]
    weights: Mapping[str, float]
    """Fair-share weights of tenants; 1 for those not listed."""
    _cached_dominant_shares: dict[str, tuple[Amounts, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def dominant_share(self, tenant: str) -> float:
        """The tenant's largest share of any resource, divided by its weight."""
        usage, cached = self.usage(tenant), self._cached_dominant_shares.get(tenant)
        if cached is None or cached[0] is not usage:
            self._cached_dominant_shares[tenant] = cached = (
                usage,
                self._compute_dominant_share(tenant, usage),
            )
        return cached[1]

    def _compute_dominant_share(self, tenant: str, usage: Amounts) -> float:
        capacity = self.capacity
        parts = (
            (usage.gpu_milli, capacity.gpu_milli),
            (usage.cpu_milli, capacity.cpu_milli),
            (usage.memory_mib, capacity.memory_mib),
        )
        share = max((part / whole for part, whole in parts if whole), default=0.0)
        return share / self.weights.get(tenant, 1.0)


Scales = OrderInputs
"""Former name of OrderInputs, for custom policies that import it."""


class QueuePolicy(Protocol):
    def within(self, request: JobRequest) -> Key: ...

    def among(self, request: JobRequest, inputs: OrderInputs) -> Key: ...


class Fifo:
    """First come, first served."""

    def within(self, request: JobRequest) -> Key:
        return (request.sequence,)

    def among(self, request: JobRequest, inputs: OrderInputs) -> Key:
        return (request.sequence,)


@dataclass(frozen=True)
class Priority:
    """Higher priority first, then earlier submission or deadline.

    A job gains one priority for every `aging_s` in the queue, so that it does not starve. All queued jobs
    gain at the same rate, so the order of two queued jobs never changes. A job with a deadline counts as
    submitted `aging_s` before the deadline if it was submitted later, which is worth one priority at most.
    """

    aging_s: float = 3600.0

    def within(self, request: JobRequest) -> Key:
        submitted_at, deadline = request.submitted_at, math.inf
        if request.deadline_at is not None:
            deadline = request.deadline_at
            submitted_at = min(submitted_at, max(deadline, submitted_at) - self.aging_s)
        return (submitted_at / self.aging_s - request.priority, deadline, request.sequence)

    def among(self, request: JobRequest, inputs: OrderInputs) -> Key:
        return self.within(request)


@dataclass(frozen=True)
class FairShare:
    """The tenant with the smallest dominant share first; within a tenant by priority."""

    order_within_tenant: Priority = Priority()

    def within(self, request: JobRequest) -> Key:
        return self.order_within_tenant.within(request)

    def among(self, request: JobRequest, inputs: OrderInputs) -> Key:
        return (inputs.dominant_share(request.tenant), request.sequence)


QueueGroupKey: TypeAlias = tuple[int, int]
"""The number of a job class, and a priority."""

_QueueEntry: TypeAlias = tuple[Key, int, str]


class JobQueue:
    """The queued jobs. Equal jobs of one tenant form a group, which can be skipped as a whole."""

    def __init__(self, order: QueuePolicy) -> None:
        self._order = order
        self._entries_by_group: dict[tuple[str, QueueGroupKey], list[_QueueEntry]] = {}
        self._request_by_job: dict[str, JobRequest] = {}
        self._entry_by_job: dict[str, _QueueEntry] = {}
        """As stored in the groups: a user's order may return another key at the next call."""

    def __len__(self) -> int:
        return len(self._entries_by_group)

    def has_group(self, tenant: str, group: QueueGroupKey) -> bool:
        return (tenant, group) in self._entries_by_group

    def add(self, request: JobRequest, group: QueueGroupKey) -> None:
        entry = (self._order.within(request), request.sequence, request.job_id)
        self._request_by_job[request.job_id], self._entry_by_job[request.job_id] = request, entry
        bisect.insort(self._entries_by_group.setdefault((request.tenant, group), []), entry)

    def remove(self, request: JobRequest, group: QueueGroupKey) -> None:
        del self._request_by_job[request.job_id]
        entries = self._entries_by_group[request.tenant, group]
        del entries[bisect.bisect_left(entries, self._entry_by_job.pop(request.job_id))]
        if not entries:
            del self._entries_by_group[request.tenant, group]

    def iterate(
        self,
        inputs: OrderInputs,
        *,
        why_skip_queue_group: Callable[[str, QueueGroupKey], str],
        on_skip: Callable[[str, str], None],
    ) -> Iterator[JobRequest]:
        """Yield each job once, in order. Starts by the caller affect the order of the following jobs.

        If `why_skip_queue_group` returns why no job of a group can start, `on_skip` is called with that
        reason for each remaining job of the group, and they are not yielded.
        """
        by_tenant: dict[str, list[tuple[_QueueEntry, QueueGroupKey, Iterator[_QueueEntry]]]] = {}
        for (tenant, group), entries in self._entries_by_group.items():
            rest = iter(tuple(entries))
            by_tenant.setdefault(tenant, []).append((next(rest), group, rest))
        version = 0
        """Grows with each yield: the usage of tenants may have changed since."""
        heads: list[tuple[Key, str, str, int]] = []
        for tenant, groups in by_tenant.items():
            heapq.heapify(groups)
            heads.append(self._make_heap_entry(groups[0][0], tenant, inputs, version))
        heapq.heapify(heads)
        while heads:
            key, tenant, job_id, key_version = heapq.heappop(heads)
            groups = by_tenant[tenant]
            while groups and (why := why_skip_queue_group(tenant, groups[0][1])):
                first, _, rest = heapq.heappop(groups)
                for entry in (first, *rest):
                    on_skip(entry[2], why)
            if not groups:
                continue
            if (job_id, key_version) != (groups[0][0][2], version):
                head = self._make_heap_entry(groups[0][0], tenant, inputs, version)
                if head[0] != key:
                    heapq.heappush(heads, head)
                    continue
            first, group, rest = groups[0]
            if (following := next(rest, None)) is None:
                heapq.heappop(groups)
            else:
                heapq.heapreplace(groups, (following, group, rest))
            if (request := self._request_by_job.get(first[2])) is not None:
                yield request
                version += 1
            if groups:
                heapq.heappush(heads, self._make_heap_entry(groups[0][0], tenant, inputs, version))

    def _make_heap_entry(
        self, entry: _QueueEntry, tenant: str, inputs: OrderInputs, version: int
    ) -> tuple[Key, str, str, int]:
        return (self._key_among_tenants(entry, inputs), tenant, entry[2], version)

    def _key_among_tenants(self, entry: _QueueEntry, inputs: OrderInputs) -> Key:
        request = self._request_by_job.get(entry[2])
        return () if request is None else self._order.among(request, inputs)
