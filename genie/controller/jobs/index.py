"""Indexes of jobs, so that the cost of a read is proportional to its result.

`JobIndex` has the durable jobs by state, tenant and name, newest first. `StagedIndex` has what the builds of
writes need, including changes that are not durable yet. Not responsible for the jobs (jobs/lifecycle.py).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from itertools import chain, islice
from operator import attrgetter

from genie.controller.jobs.blobs import blob_name
from genie.model.job import Job, JobKind, JobState

_SKIPPED_MAX = 64
"""Removed entries that one read may skip before the list is compacted."""
# Members of an enum are slow to look up, and every change of a job compares them.
_QUEUED, _SESSION = JobState.QUEUED, JobKind.SESSION
_SLICE = 1000
"""Jobs to index between two yields to the event loop."""


class SequenceIndex:
    """Jobs in order of their sequence number. Adding the newest one, and removing one, takes constant time on
    average."""

    __slots__ = ("_order", "jobs", "visited")

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        """By sequence number, in no particular order."""
        self._order: list[int] = []
        """Ascending; also contains removed ones, until it is compacted."""
        self.visited = 0
        """Number of entries that reads have visited, for tests of their cost."""

    def put(self, job: Job) -> None:
        """Add a job or replace the one with its sequence number."""
        sequence, order, jobs = job.sequence, self._order, self.jobs
        if not order or sequence > order[-1]:
            order.append(sequence)
        elif sequence not in jobs:
            position = bisect_left(order, sequence)
            if order[position] != sequence:
                order.insert(position, sequence)
        jobs[sequence] = job
        count = len(order)
        # Not where jobs are removed, because only additions make the list longer; and not at each of them.
        if count % _SKIPPED_MAX == 0 and count > 2 * len(jobs) + _SKIPPED_MAX:
            self._compact()

    def remove(self, sequence: int) -> None:
        self.jobs.pop(sequence, None)

    def newest_first(self, before: int | None = None) -> Iterator[Job]:
        """Jobs with smaller sequence numbers than `before`, descending."""
        order, jobs = self._order, self.jobs
        skipped = 0
        for position in range(len(order) if before is None else bisect_left(order, before), 0, -1):
            self.visited += 1
            job = jobs.get(order[position - 1])
            if job is not None:
                yield job
            else:
                skipped += 1
                if skipped == _SKIPPED_MAX:
                    self._compact()  # the next read is cheaper; this one continues on the old list

    def oldest_first(self) -> Iterator[Job]:
        order, jobs = self._order, self.jobs
        return (jobs[sequence] for sequence in order if sequence in jobs)

    def _compact(self) -> None:
        self._order = [sequence for sequence in self._order if sequence in self.jobs]


class JobIndex:
    """The durable jobs. `changed` must be called for every change."""

    def __init__(self) -> None:
        self._by_state = {state: SequenceIndex() for state in JobState}
        self._by_tenant: dict[str, dict[JobState, SequenceIndex]] = {}
        self._by_name: dict[str, dict[str, dict[int, str]]] = {}
        """Job IDs by name, tenant and sequence number."""
        self._blobs: Counter[str] = Counter()
        """Number of unfinished jobs that need a blob, by its name."""
        self._sessions: dict[tuple[str, str], dict[str, Job]] = {}
        """Unfinished session jobs by tenant and client, then by job ID."""

    @classmethod
    async def build(cls, jobs: Iterable[Job]) -> JobIndex:
        """Index all jobs; yields to the event loop, because a leader must renew its lease meanwhile."""
        index = cls()
        for count, job in enumerate(sorted(jobs, key=attrgetter("sequence"))):
            index.changed(None, job)
            if count % _SLICE == 0:
                await asyncio.sleep(0)
        return index

    def changed(self, before: Job | None, after: Job | None) -> None:
        job = after or before
        assert job is not None
        of_tenant = self._by_tenant.get(job.tenant)
        if of_tenant is None:
            of_tenant = self._by_tenant[job.tenant] = {}
        if before is not None and (after is None or after.state is not before.state):
            state, sequence = before.state, before.sequence
            self._by_state[state].remove(sequence)
            of_tenant[state].remove(sequence)
        if after is not None:
            state = after.state
            self._by_state[state].put(after)
            own = of_tenant.get(state)
            if own is None:
                own = of_tenant[state] = SequenceIndex()
            own.put(after)
        if before is None or after is None:
            self._changed_name(job, is_new=after is not None)
        spec = job.spec
        if spec.workdir is not None or spec.kind is _SESSION:
            self._changed_need(before, after)
        if after is None and not any(index.jobs for index in of_tenant.values()):
            del self._by_tenant[job.tenant]

    def _changed_name(self, job: Job, *, is_new: bool) -> None:
        of_name = self._by_name.setdefault(job.spec.name, {})
        of_tenant = of_name.setdefault(job.tenant, {})
        if is_new:
            of_tenant[job.sequence] = job.job_id
            return
        of_tenant.pop(job.sequence, None)
        if not of_tenant:
            del of_name[job.tenant]
        if not of_name:
            del self._by_name[job.spec.name]

    def _changed_need(self, before: Job | None, after: Job | None) -> None:
        """Update what unfinished jobs need: blobs, and for sessions the client."""
        was, now = _is_unfinished(before), _is_unfinished(after)
        job = after or before
        assert job is not None
        if job.spec.workdir is not None and was != now:
            name = blob_name(job.spec.workdir.digest, job.tenant)
            self._blobs[name] += 1 if now else -1
            if not self._blobs[name]:
                del self._blobs[name]
        if job.spec.kind is JobKind.SESSION:
            key = (job.tenant, job.session)
            if now and after is not None:
                self._sessions.setdefault(key, {})[job.job_id] = after
            elif was:
                of_client = self._sessions[key]
                of_client.pop(job.job_id, None)
                if not of_client:
                    del self._sessions[key]

    def count(self, state: JobState) -> int:
        return len(self._by_state[state].jobs)

    def in_states(self, states: Iterable[JobState]) -> list[Job]:
        return [job for state in states for job in self._by_state[state].jobs.values()]

    def newest_first(
        self, states: Iterable[JobState], *, before: int | None = None, tenant: str | None = None
    ) -> Iterator[Job]:
        """Jobs in these states, of one tenant or of all. Reads no more than the caller consumes."""
        found = self._by_state if tenant is None else self._by_tenant.get(tenant, {})
        parts = [found[state].newest_first(before) for state in states if state in found]
        return merge(*parts, key=_descending)

    def oldest_first(self, states: Iterable[JobState], *, tenant: str | None = None) -> Iterator[Job]:
        found = self._by_state if tenant is None else self._by_tenant.get(tenant, {})
        parts = [found[state].oldest_first() for state in states if state in found]
        return merge(*parts, key=_ascending)

    def finished_counts(self) -> dict[str, int]:
        """Number of finished jobs by tenant."""
        return {
            tenant: sum(len(index.jobs) for state, index in of_tenant.items() if state.is_final)
            for tenant, of_tenant in self._by_tenant.items()
        }

    def named(self, name: str, tenant: str | None, *, limit: int) -> tuple[list[str], int]:
        """Return the IDs of some jobs with this name, at most `limit`, and how many there are; `tenant` None
        for all tenants."""
        found = self._by_name.get(name, {})
        groups = list(found.values()) if tenant is None else [found[tenant]] if tenant in found else []
        newest = chain.from_iterable(reversed(group.values()) for group in groups)
        return list(islice(newest, limit)), sum(map(len, groups))

    def has_name(self, name: str) -> bool:
        return name in self._by_name

    def is_blob_needed(self, name: str) -> bool:
        return name in self._blobs

    def sessions(self) -> list[Job]:
        """All unfinished session jobs."""
        return [job for of_client in self._sessions.values() for job in of_client.values()]

    def sessions_of(self, tenant: str, client: str) -> list[Job]:
        return list(self._sessions.get((tenant, client), {}).values())

    @property
    def visited(self) -> int:
        indexes = [*self._by_state.values()]
        indexes += [index for of_tenant in self._by_tenant.values() for index in of_tenant.values()]
        return sum(index.visited for index in indexes)


class StagedIndex:
    """What builds read: the number of queued jobs, and the job of each request ID. Reversible."""

    def __init__(self) -> None:
        self.queued = 0
        self.queued_of_tenant: Counter[str] = Counter()
        self.by_request: dict[tuple[str, str], str] = {}

    @classmethod
    async def build(cls, jobs: Mapping[str, Job]) -> StagedIndex:
        index = cls()
        for count, (job_id, job) in enumerate(jobs.items()):
            index.changed(job_id, None, job)
            if count % _SLICE == 0:
                await asyncio.sleep(0)
        return index

    def replace_with(self, other: StagedIndex) -> None:
        self.queued, self.queued_of_tenant = other.queued, other.queued_of_tenant
        self.by_request = other.by_request

    def changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        if before is not None and before.state is _QUEUED:
            self.queued -= 1
            self.queued_of_tenant[before.tenant] -= 1
        if after is None:
            assert before is not None
            self.by_request.pop((before.tenant, before.request_id), None)
            if not self.queued_of_tenant[before.tenant]:
                del self.queued_of_tenant[before.tenant]
            return
        if after.state is _QUEUED:
            self.queued += 1
            self.queued_of_tenant[after.tenant] += 1
        # The request ID of a job never changes.
        if before is None and after.request_id:
            self.by_request[after.tenant, after.request_id] = job_id


def _is_unfinished(job: Job | None) -> bool:
    return job is not None and not job.state.is_final


def _descending(job: Job) -> int:
    return -job.sequence


_ascending = attrgetter("sequence")
