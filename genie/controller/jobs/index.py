"""Indexes of jobs, so that the cost of a read is proportional to its result.

`JobIndex` has the durable jobs by state, tenant and name, newest first. `StagedIndex` has what the builds of
writes need, including changes that are not durable yet. Not responsible for the jobs (jobs/catalog.py).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import merge
from itertools import chain, islice
from operator import attrgetter

from genie.controller.blobs.storage import blob_name
from genie.model.job import Job, JobKind, JobState

_REMOVED_ENTRIES_SKIPPED_MAX = 64
"""Removed entries that one read may skip before the list is compacted."""
# Members of an enum are slow to look up, and every change of a job compares them.
_QUEUED_STATE, _SESSION_KIND = JobState.QUEUED, JobKind.SESSION
_JOBS_PER_YIELD = 1000
"""Jobs to index between two yields to the event loop."""


class SequenceIndex:
    """Jobs in order of their sequence number. Adding the newest one, and removing one, takes constant time on
    average."""

    __slots__ = ("_sorted_sequences", "jobs_by_sequence", "visited_entry_count")

    def __init__(self) -> None:
        self.jobs_by_sequence: dict[int, Job] = {}
        """By sequence number, in no particular order."""
        self._sorted_sequences: list[int] = []
        """Ascending; also contains removed ones, until it is compacted."""
        self.visited_entry_count = 0
        """Number of entries that reads have visited, for tests of their cost."""

    def put(self, job: Job) -> None:
        """Add a job or replace the one with its sequence number."""
        sequence, order, jobs = job.sequence, self._sorted_sequences, self.jobs_by_sequence
        if not order or sequence > order[-1]:
            order.append(sequence)
        elif sequence not in jobs:
            position = bisect_left(order, sequence)
            if order[position] != sequence:
                order.insert(position, sequence)
        jobs[sequence] = job
        count = len(order)
        # Not where jobs are removed, because only additions make the list longer; and not at each of them.
        if count % _REMOVED_ENTRIES_SKIPPED_MAX == 0 and count > 2 * len(jobs) + _REMOVED_ENTRIES_SKIPPED_MAX:
            self._compact()

    def remove(self, sequence: int) -> None:
        self.jobs_by_sequence.pop(sequence, None)

    def jobs_newest_first(self, before_sequence: int | None = None) -> Iterator[Job]:
        """Jobs with smaller sequence numbers than `before_sequence`, descending."""
        order, jobs = self._sorted_sequences, self.jobs_by_sequence
        skipped = 0
        for position in range(
            len(order) if before_sequence is None else bisect_left(order, before_sequence), 0, -1
        ):
            self.visited_entry_count += 1
            job = jobs.get(order[position - 1])
            if job is not None:
                yield job
            else:
                skipped += 1
                if skipped == _REMOVED_ENTRIES_SKIPPED_MAX:
                    self._compact()  # the next read is cheaper; this one continues on the old list

    def jobs_oldest_first(self) -> Iterator[Job]:
        order, jobs = self._sorted_sequences, self.jobs_by_sequence
        return (jobs[sequence] for sequence in order if sequence in jobs)

    def _compact(self) -> None:
        self._sorted_sequences = [
            sequence for sequence in self._sorted_sequences if sequence in self.jobs_by_sequence
        ]


class JobIndex:
    """The durable jobs. `update` must be called for every change."""

    def __init__(self) -> None:
        self._jobs_by_state = {state: SequenceIndex() for state in JobState}
        self._jobs_by_tenant: dict[str, dict[JobState, SequenceIndex]] = {}
        self._job_ids_by_name: dict[str, dict[str, dict[int, str]]] = {}
        """Job IDs by name, tenant and sequence number."""
        self._job_count_by_blob: Counter[str] = Counter()
        """Number of unfinished jobs that need a blob, by its name."""
        self._jobs_by_client: dict[tuple[str, str], dict[str, Job]] = {}
        """Unfinished session jobs by tenant and client, then by job ID."""

    @classmethod
    async def build(cls, jobs: Iterable[Job]) -> JobIndex:
        """Index all jobs; yields to the event loop, because a leader must renew its lease meanwhile."""
        index = cls()
        for count, job in enumerate(sorted(jobs, key=attrgetter("sequence"))):
            index.update(None, job)
            if count % _JOBS_PER_YIELD == 0:
                await asyncio.sleep(0)
        return index

    def update(self, before: Job | None, after: Job | None) -> None:
        job = after or before
        assert job is not None
        of_tenant = self._jobs_by_tenant.get(job.tenant)
        if of_tenant is None:
            of_tenant = self._jobs_by_tenant[job.tenant] = {}
        if before is not None and (after is None or after.state is not before.state):
            state, sequence = before.state, before.sequence
            self._jobs_by_state[state].remove(sequence)
            of_tenant[state].remove(sequence)
        if after is not None:
            state = after.state
            self._jobs_by_state[state].put(after)
            own = of_tenant.get(state)
            if own is None:
                own = of_tenant[state] = SequenceIndex()
            own.put(after)
        if before is None or after is None:
            self._update_name(job, is_new=after is not None)
        spec = job.spec
        if spec.workdir is not None or spec.kind is _SESSION_KIND:
            self._update_blobs_and_clients(before, after)
        if after is None and not any(index.jobs_by_sequence for index in of_tenant.values()):
            del self._jobs_by_tenant[job.tenant]

    def _update_name(self, job: Job, *, is_new: bool) -> None:
        of_name = self._job_ids_by_name.setdefault(job.spec.name, {})
        of_tenant = of_name.setdefault(job.tenant, {})
        if is_new:
            of_tenant[job.sequence] = job.job_id
            return
        of_tenant.pop(job.sequence, None)
        if not of_tenant:
            del of_name[job.tenant]
        if not of_name:
            del self._job_ids_by_name[job.spec.name]

    def _update_blobs_and_clients(self, before: Job | None, after: Job | None) -> None:
        """Update what unfinished jobs need: blobs, and for sessions the client."""
        was, now = _is_unfinished(before), _is_unfinished(after)
        job = after or before
        assert job is not None
        if job.spec.workdir is not None and was != now:
            name = blob_name(job.spec.workdir.digest, job.tenant)
            self._job_count_by_blob[name] += 1 if now else -1
            if not self._job_count_by_blob[name]:
                del self._job_count_by_blob[name]
        if job.spec.kind is JobKind.SESSION:
            key = (job.tenant, job.session)
            if now and after is not None:
                self._jobs_by_client.setdefault(key, {})[job.job_id] = after
            elif was:
                of_client = self._jobs_by_client[key]
                of_client.pop(job.job_id, None)
                if not of_client:
                    del self._jobs_by_client[key]

    def count_in_state(self, state: JobState) -> int:
        return len(self._jobs_by_state[state].jobs_by_sequence)

    def jobs_in_states(self, states: Iterable[JobState]) -> list[Job]:
        return [job for state in states for job in self._jobs_by_state[state].jobs_by_sequence.values()]

    def jobs_newest_first(
        self, states: Iterable[JobState], *, before: int | None = None, tenant: str | None = None
    ) -> Iterator[Job]:
        """Jobs in these states, of one tenant or of all. Reads no more than the caller consumes."""
        found = self._jobs_by_state if tenant is None else self._jobs_by_tenant.get(tenant, {})
        parts = [found[state].jobs_newest_first(before) for state in states if state in found]
        return merge(*parts, key=_by_sequence_descending)

    def jobs_oldest_first(self, states: Iterable[JobState], *, tenant: str | None = None) -> Iterator[Job]:
        found = self._jobs_by_state if tenant is None else self._jobs_by_tenant.get(tenant, {})
        parts = [found[state].jobs_oldest_first() for state in states if state in found]
        return merge(*parts, key=_by_sequence)

    def finished_count_by_tenant(self) -> dict[str, int]:
        """Number of finished jobs by tenant."""
        return {
            tenant: sum(len(index.jobs_by_sequence) for state, index in of_tenant.items() if state.is_final)
            for tenant, of_tenant in self._jobs_by_tenant.items()
        }

    def find_ids_by_name(self, name: str, tenant: str | None, *, limit: int) -> tuple[list[str], int]:
        """Return the IDs of some jobs with this name, at most `limit`, and how many there are; `tenant` None
        for all tenants."""
        found = self._job_ids_by_name.get(name, {})
        groups = list(found.values()) if tenant is None else [found[tenant]] if tenant in found else []
        newest = chain.from_iterable(reversed(group.values()) for group in groups)
        return list(islice(newest, limit)), sum(map(len, groups))

    def has_name(self, name: str) -> bool:
        return name in self._job_ids_by_name

    def needed_blobs(self) -> Collection[str]:
        """The names of the blobs that unfinished jobs need; a view."""
        return self._job_count_by_blob.keys()

    def session_jobs(self) -> list[Job]:
        """All unfinished session jobs."""
        return [job for of_client in self._jobs_by_client.values() for job in of_client.values()]

    def session_jobs_of_client(self, tenant: str, client: str) -> list[Job]:
        return list(self._jobs_by_client.get((tenant, client), {}).values())

    @property
    def visited_entry_count(self) -> int:
        indexes = [*self._jobs_by_state.values()]
        indexes += [index for of_tenant in self._jobs_by_tenant.values() for index in of_tenant.values()]
        return sum(index.visited_entry_count for index in indexes)


class StagedIndex:
    """What builds read: the number of queued jobs, and the job of each request ID. Reversible."""

    def __init__(self) -> None:
        self.queued_count = 0
        self.queued_count_by_tenant: Counter[str] = Counter()
        self.job_id_by_request: dict[tuple[str, str], str] = {}

    @classmethod
    async def build(cls, jobs: Mapping[str, Job]) -> StagedIndex:
        index = cls()
        for count, (job_id, job) in enumerate(jobs.items()):
            index.update(job_id, None, job)
            if count % _JOBS_PER_YIELD == 0:
                await asyncio.sleep(0)
        return index

    def replace_with(self, other: StagedIndex) -> None:
        self.queued_count, self.queued_count_by_tenant = other.queued_count, other.queued_count_by_tenant
        self.job_id_by_request = other.job_id_by_request

    def update(self, job_id: str, before: Job | None, after: Job | None) -> None:
        if before is not None and before.state is _QUEUED_STATE:
            self.queued_count -= 1
            self.queued_count_by_tenant[before.tenant] -= 1
        if after is None:
            assert before is not None
            self.job_id_by_request.pop((before.tenant, before.request_id), None)
            if not self.queued_count_by_tenant[before.tenant]:
                del self.queued_count_by_tenant[before.tenant]
            return
        if after.state is _QUEUED_STATE:
            self.queued_count += 1
            self.queued_count_by_tenant[after.tenant] += 1
        # The request ID of a job never changes.
        if before is None and after.request_id:
            self.job_id_by_request[after.tenant, after.request_id] = job_id


def _is_unfinished(job: Job | None) -> bool:
    return job is not None and not job.state.is_final


def _by_sequence_descending(job: Job) -> int:
    return -job.sequence


_by_sequence = attrgetter("sequence")
