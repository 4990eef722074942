"""Selects the finished jobs to delete when the history is full.

Age applies to all jobs alike. Number and bytes are shared fairly: the tenant that uses most loses its oldest
jobs first, so that a tenant with less than an equal share loses none. Not responsible for deleting them
(lifecycle.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import islice

from genie.controller.jobs.index import JobIndex
from genie.model.job import FINAL_STATES, Job


@dataclass(frozen=True)
class HistoryExcess:
    """What must be deleted: all jobs that ended before `delete_ended_before`, a number of jobs, and bytes.
    The last two are not positive if the history is within its limits."""

    delete_ended_before: float
    job_count: int
    size_bytes: int


def select_jobs_to_delete(
    index: JobIndex,
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
    index: JobIndex,
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
