"""Deletes finished jobs when the history is full.

Age applies to all jobs alike. Number and bytes are shared fairly: the tenant that uses most loses its oldest
jobs first, so that a tenant with less than an equal share loses none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Protocol

from genie.config import ControllerConfig
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.jobs.space import JobSpace
from genie.controller.ledger import Ledger, Transaction
from genie.model.job import FINAL_STATES, Job, JobState
from genie.processes.clock import Clock

_DELETE_BATCH_JOBS = 100
_DELETE_BATCHES_MAX = 20
"""Transactions that are written together."""


class JobHistory:
    def __init__(
        self,
        ledger: Ledger,
        catalog: JobCatalog,
        space: JobSpace,
        *,
        config: ControllerConfig,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._catalog = catalog
        self._space = space
        self._config = config
        self._clock = clock

    async def delete_old_jobs(self) -> None:
        """Delete finished jobs beyond the limits of the history: age, number and bytes."""
        while excess := self._find_jobs_to_delete(limit=_DELETE_BATCH_JOBS * _DELETE_BATCHES_MAX):
            parts = [
                excess[start : start + _DELETE_BATCH_JOBS]
                for start in range(0, len(excess), _DELETE_BATCH_JOBS)
            ]
            for outcome in await self._ledger.write_each(partial(self._delete_jobs, part) for part in parts):
                if isinstance(outcome, Exception):
                    raise outcome

    def _find_jobs_to_delete(self, *, limit: int) -> list[Job]:
        excess = HistoryExcess(
            delete_ended_before=self._clock.wall_s() - self._config.history_days * 86400,
            job_count=self._catalog.count_in_states(FINAL_STATES) - self._config.jobs_kept,
            size_bytes=self._space.excess_history_bytes(),
        )
        return select_jobs_to_delete(
            self._catalog,
            excess,
            bytes_by_tenant=self._space.finished_bytes_by_tenant,
            get_size_bytes=self._space.job_size_bytes,
            limit=limit,
        )

    def _delete_jobs(self, jobs: list[Job], txn: Transaction) -> None:
        for job in jobs:
            txn.delete(self._ledger.jobs, job.job_id)


class FinishedJobs(Protocol):
    """The finished jobs to select from: JobIndex and JobCatalog."""

    def jobs_oldest_first(
        self, states: Iterable[JobState], *, tenant: str | None = None
    ) -> Iterator[Job]: ...

    def finished_count_by_tenant(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class HistoryExcess:
    """What must be deleted: all jobs that ended before `delete_ended_before`, a number of jobs, and bytes.
    The last two are not positive if the history is within its limits."""

    delete_ended_before: float
    job_count: int
    size_bytes: int


def select_jobs_to_delete(
    index: FinishedJobs,
    excess: HistoryExcess,
    *,
    bytes_by_tenant: Mapping[str, int],
    get_size_bytes: Callable[[str], int],
    limit: int,
) -> list[Job]:
    """Return at most `limit` finished jobs to delete. `bytes_by_tenant`: space of the finished jobs of each
    tenant; `get_size_bytes` returns that of a job."""
    selected: dict[str, Job] = {}
    for job in islice(index.jobs_oldest_first(FINAL_STATES), limit):
        if (job.ended_at or 0.0) >= excess.delete_ended_before:
            break
        selected[job.job_id] = job
    jobs_left = excess.job_count - len(selected)
    bytes_left = excess.size_bytes - sum(map(get_size_bytes, selected))
    if bytes_left > 0:
        usage = Counter(bytes_by_tenant)
        for job in selected.values():
            usage[job.tenant] -= get_size_bytes(job.job_id)
        for job in _oldest_jobs_of_largest_tenants(
            index, usage, lambda job: get_size_bytes(job.job_id), selected
        ):
            if bytes_left <= 0 or len(selected) >= limit:
                break
            selected[job.job_id] = job
            bytes_left -= get_size_bytes(job.job_id)
            jobs_left -= 1
    if jobs_left > 0:
        counts = Counter(index.finished_count_by_tenant())
        for job in selected.values():
            counts[job.tenant] -= 1
        for job in _oldest_jobs_of_largest_tenants(index, counts, lambda job: 1, selected):
            if jobs_left <= 0 or len(selected) >= limit:
                break
            selected[job.job_id] = job
            jobs_left -= 1
    return list(selected.values())


def _oldest_jobs_of_largest_tenants(
    index: FinishedJobs,
    usage_by_tenant: Mapping[str, int],
    get_cost: Callable[[Job], int],
    skipped: Mapping[str, Job],
) -> Iterator[Job]:
    """The oldest finished job of the tenant with the highest usage, which then falls by the cost of the job,
    and so on. Jobs in `skipped` are left out."""
    heap = [(-used, tenant) for tenant, used in usage_by_tenant.items()]
    heapify(heap)
    iterators: dict[str, Iterator[Job]] = {}
    while heap:
        used, tenant = heap[0]
        if tenant not in iterators:
            iterators[tenant] = index.jobs_oldest_first(FINAL_STATES, tenant=tenant)
        job = next((each for each in iterators[tenant] if each.job_id not in skipped), None)
        if job is None:
            heappop(heap)
        else:
            heapreplace(heap, (used + get_cost(job), tenant))
            yield job
