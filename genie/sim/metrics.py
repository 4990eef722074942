"""Computes metrics of a simulated run: utilization, wait times, fairness, lost work. Pure.

The fields of `SimulationSummary` define the metrics.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from genie.sim.events import SimJobResult, SimulationResult
from genie.sim.workloads.workload import SimJob

LARGE_GANG_GPUS_MIN = 32
SLOWDOWN_DURATION_S_MIN = 10.0
_MILLI_PER_GPU = 1000


@dataclass(frozen=True)
class ValueSpread:
    """Distribution of values; all 0 without values."""

    count: int
    mean: float
    p50: float
    p99: float
    maximum: float


@dataclass(frozen=True)
class SimulationSummary:
    """Metrics of a run. Times are in seconds, ratios from 0 to 1."""

    finished_jobs: int
    infeasible_jobs: int
    """Jobs that do not fit the empty cluster; excluded from all other metrics."""
    never_started_jobs: int
    """Jobs that a custom policy rejected on all nodes; excluded from time metrics."""
    jobs_ended_by_time_limit: int
    """Jobs ended by their time limit."""
    total_gpus: int
    span_s: float
    """From the first submission to the last end."""
    utilisation: float
    """GPU time in use / total GPU time of the span."""
    utilisation_while_pending: float
    """The same while jobs are pending; 1 if none ever is."""
    utilisation_until_last_arrival: float
    """The same while jobs are pending, until the last submission; the queue is no mixture after that."""
    pending_time_share: float
    """Fraction of the span with pending jobs."""
    wait_s: ValueSpread
    """From submission to the first start."""
    large_gang_wait_s: ValueSpread
    """The same for gangs of at least 32 GPUs."""
    completion_s: ValueSpread
    """From submission to the end."""
    slowdown: ValueSpread
    """Completion time / duration, which counts as at least 10 s."""
    jain_index_of_tenants: float
    """Jain's index over tenants of used / requested GPU time from submission to the end of their jobs; 1 is
    equal."""
    finish_time_fairness: ValueSpread
    """Completion time / that on a private cluster with 1/n of the GPUs per tenant, first come first served;
    at most 1 is no worse."""
    preemptions: int
    jobs_ended_by_node_failure: int
    """Job ends caused by node failures."""
    lost_gpu_hours: float
    """Unsaved work."""
    fragmentation: float
    """Fraction of GPUs that are free while jobs are pending but fit no worker of the first one."""


def summarise_simulation(run: SimulationResult) -> SimulationSummary:
    records = [
        record
        for record in run.job_results
        if record.first_started_s is not None and record.ended_s is not None
    ]
    waits = [_wait_s(record) for record in records]
    whole = _utilization_total_and_while_pending(run, until_s=math.inf)
    arriving = _utilization_total_and_while_pending(
        run, until_s=max((record.job.submitted_s for record in records), default=0.0)
    )
    return SimulationSummary(
        finished_jobs=len(records),
        infeasible_jobs=len(run.infeasible_job_ids),
        never_started_jobs=len(run.job_results) - len(records),
        jobs_ended_by_time_limit=sum(
            record.job.duration_s > record.job.limited_duration_s for record in records
        ),
        total_gpus=run.total_gpu_milli // _MILLI_PER_GPU,
        span_s=run.usage_samples[-1].time_s - run.usage_samples[0].time_s if run.usage_samples else 0.0,
        utilisation=whole[0],
        utilisation_while_pending=whole[1],
        utilisation_until_last_arrival=arriving[1],
        pending_time_share=whole[2],
        wait_s=summarise_values(waits),
        large_gang_wait_s=summarise_values(
            [wait for record, wait in zip(records, waits, strict=True) if is_large_gang(record.job)]
        ),
        completion_s=summarise_values([_completion_s(record) for record in records]),
        slowdown=summarise_values(
            [_completion_s(it) / max(it.job.limited_duration_s, SLOWDOWN_DURATION_S_MIN) for it in records]
        ),
        jain_index_of_tenants=jain_index(_service_ratios_of_tenants(records)),
        finish_time_fairness=summarise_values(
            finish_time_fairness(records, gpus=run.total_gpu_milli / _MILLI_PER_GPU)
        ),
        preemptions=sum(record.preemption_count for record in records),
        jobs_ended_by_node_failure=sum(record.node_failure_count for record in records),
        lost_gpu_hours=sum(it.lost_work_s * it.job.total_gpu_milli for it in records) / _MILLI_PER_GPU / 3600,
        fragmentation=_mean_fragmentation(run),
    )


def is_large_gang(job: SimJob) -> bool:
    return job.workers > 1 and job.total_gpu_milli >= LARGE_GANG_GPUS_MIN * _MILLI_PER_GPU


def summarise_values(values: Sequence[float]) -> ValueSpread:
    if not values:
        return ValueSpread(0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    return ValueSpread(
        len(ordered),
        math.fsum(ordered) / len(ordered),
        percentile(ordered, 0.5),
        percentile(ordered, 0.99),
        ordered[-1],
    )


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the percentile, rounded up to the next value."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def jain_index(values: Iterable[float]) -> float:
    """Return Jain's index: 1 if all values are equal, 1/n if one of n has everything."""
    found = list(values)
    squares = math.fsum(value * value for value in found)
    return math.fsum(found) ** 2 / (len(found) * squares) if squares else 1.0


def finish_time_fairness(records: Sequence[SimJobResult], *, gpus: float) -> list[float]:
    """Return completion time / that on the tenant's private cluster, for each job."""
    by_tenant: dict[str, list[SimJobResult]] = {}
    for record in records:
        if record.job.total_gpu_milli:
            by_tenant.setdefault(record.job.tenant, []).append(record)
    part = gpus / max(len(by_tenant), 1)
    found = []
    for own in by_tenant.values():
        own.sort(key=lambda record: record.job.submitted_s)
        alone = isolated_completion_s([record.job for record in own], gpus=part)
        found += [_completion_s(it) / max(least_s, 1e-9) for it, least_s in zip(own, alone, strict=True)]
    return found


def isolated_completion_s(jobs: Sequence[SimJob], *, gpus: float) -> list[float]:
    """Return the completion time of each job, in order, on a private cluster with `gpus` GPUs.

    Ignores node boundaries. A job with more GPUs than that takes proportionally longer.
    """
    ends: list[tuple[float, float]] = []
    free, now, found = gpus, 0.0, []
    for job in jobs:
        wanted = min(job.total_gpu_milli / _MILLI_PER_GPU, gpus)
        takes_s = job.limited_duration_s * job.total_gpu_milli / _MILLI_PER_GPU / wanted
        now = max(now, job.submitted_s)
        while ends and (ends[0][0] <= now or free < wanted - 1e-9):
            end_s, freed = heapq.heappop(ends)
            free += freed
            now = max(now, end_s)
        free -= wanted
        heapq.heappush(ends, (now + takes_s, wanted))
        found.append(now + takes_s - job.submitted_s)
    return found


def _wait_s(record: SimJobResult) -> float:
    assert record.first_started_s is not None
    return record.first_started_s - record.job.submitted_s


def _completion_s(record: SimJobResult) -> float:
    assert record.ended_s is not None
    return record.ended_s - record.job.submitted_s


def _utilization_total_and_while_pending(
    run: SimulationResult, *, until_s: float
) -> tuple[float, float, float]:
    """Return the utilization, the utilization while jobs are pending, and the fraction of that time."""
    whole = used = whole_waiting = used_waiting = span_s = waiting_s = 0.0
    for sample, following in zip(run.usage_samples, run.usage_samples[1:], strict=False):
        for_s = max(min(following.time_s, until_s) - sample.time_s, 0.0)
        span_s += for_s
        whole += for_s * sample.available_gpu_milli
        used += for_s * sample.used_gpu_milli
        if sample.pending_jobs:
            waiting_s += for_s
            whole_waiting += for_s * sample.available_gpu_milli
            used_waiting += for_s * sample.used_gpu_milli
    return (
        used / whole if whole else 0.0,
        used_waiting / whole_waiting if whole_waiting else 1.0,
        waiting_s / span_s if span_s else 0.0,
    )


def _service_ratios_of_tenants(records: Sequence[SimJobResult]) -> list[float]:
    """Return used / requested GPU time for each tenant."""
    used: dict[str, float] = {}
    requested: dict[str, float] = {}
    for record in records:
        milli, tenant = record.job.total_gpu_milli, record.job.tenant
        if milli:
            used[tenant] = used.get(tenant, 0.0) + milli * record.job.limited_duration_s
            requested[tenant] = requested.get(tenant, 0.0) + milli * _completion_s(record)
    return [used[tenant] / requested[tenant] for tenant in used]


def _mean_fragmentation(run: SimulationResult) -> float:
    if not run.fragmentation_samples:
        return 0.0
    return (
        sum(sample.unusable_gpu_milli for sample in run.fragmentation_samples)
        / len(run.fragmentation_samples)
        / run.total_gpu_milli
    )
