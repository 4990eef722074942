"""What a simulated run was worth: utilisation, waiting, fairness, what was lost. Pure.

Every figure has its meaning beside it, in `Summary`. Not for: running (events.py), showing (plots.py, cli).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from genie.sim.events import Record, Run
from genie.sim.workload import SimJob

LARGE_GPUS = 32
SLOWDOWN_LEAST_S = 10.0
_MILLI = 1000


@dataclass(frozen=True)
class Spread:
    """Of many values; all 0 when there are none."""

    count: int
    mean: float
    p50: float
    p99: float
    most: float


@dataclass(frozen=True)
class Summary:
    """Times are in seconds, shares from 0 to 1."""

    jobs: int
    impossible: int
    """Would not start on the empty cluster; left out of everything."""
    left_waiting: int
    """Kept off every node by a policy of the user's own: they wait to the end, and have no times."""
    cut_short: int
    """Ended by their time limits."""
    gpus: int
    span_s: float
    """From the first submission to the last end."""
    utilisation: float
    """GPU time in use, of all GPU time in the span."""
    utilisation_while_waiting: float
    """The same of the times when jobs wait; 1 when none ever does."""
    utilisation_while_arriving: float
    """The same, only until the last submission: after that, what still waits is no mixture any more."""
    waiting_share: float
    """Of the span: jobs wait."""
    wait_s: Spread
    """From submission to the first start."""
    wait_large_s: Spread
    """The same of gangs with at least 32 GPUs."""
    completion_s: Spread
    """From submission to the end."""
    slowdown: Spread
    """Completion by what the job takes, which counts as 10 s at least."""
    jain: float
    """Jain's index over tenants of the GPU time that their jobs took by what they asked for while they were
    there, waiting too: 1 is equal."""
    finish_fairness: Spread
    """Completion by what it would be with a cluster of 1/n of the GPUs for each of the n tenants alone, first
    come first served: at most 1 is no worse than that."""
    preemptions: int
    failures: int
    """Jobs that a failing node ended."""
    lost_gpu_hours: float
    """Work that was done and not saved."""
    fragmentation: float
    """Share of all GPUs that is free while jobs wait, and of no use for one worker of the first of them."""


def summarise(run: Run) -> Summary:
    records = [
        record for record in run.records if record.started_s is not None and record.ended_s is not None
    ]
    waits = [_wait_s(record) for record in records]
    whole = _utilisation(run, until_s=math.inf)
    arriving = _utilisation(run, until_s=max((record.job.submitted_s for record in records), default=0.0))
    return Summary(
        jobs=len(records),
        impossible=len(run.impossible),
        left_waiting=len(run.records) - len(records),
        cut_short=sum(record.job.duration_s > record.job.runs_s for record in records),
        gpus=run.gpu_milli // _MILLI,
        span_s=run.moments[-1].at_s - run.moments[0].at_s if run.moments else 0.0,
        utilisation=whole[0],
        utilisation_while_waiting=whole[1],
        utilisation_while_arriving=arriving[1],
        waiting_share=whole[2],
        wait_s=spread(waits),
        wait_large_s=spread(
            [wait for record, wait in zip(records, waits, strict=True) if is_large_gang(record.job)]
        ),
        completion_s=spread([_completion_s(record) for record in records]),
        slowdown=spread([_completion_s(it) / max(it.job.runs_s, SLOWDOWN_LEAST_S) for it in records]),
        jain=jain(_served(records)),
        finish_fairness=spread(finish_fairness(records, gpus=run.gpu_milli / _MILLI)),
        preemptions=sum(record.preemptions for record in records),
        failures=sum(record.failures for record in records),
        lost_gpu_hours=sum(it.lost_s * it.job.gpu_milli_all for it in records) / _MILLI / 3600,
        fragmentation=_fragmentation(run),
    )


def is_large_gang(job: SimJob) -> bool:
    return job.workers > 1 and job.gpu_milli_all >= LARGE_GPUS * _MILLI


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    return Spread(
        len(ordered),
        math.fsum(ordered) / len(ordered),
        percentile(ordered, 0.5),
        percentile(ordered, 0.99),
        ordered[-1],
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest value from above."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def jain(values: Iterable[float]) -> float:
    """1 when all are equal, 1/n when one of n has all."""
    found = list(values)
    squares = math.fsum(value * value for value in found)
    return math.fsum(found) ** 2 / (len(found) * squares) if squares else 1.0


def finish_fairness(records: Sequence[Record], *, gpus: float) -> list[float]:
    """Of each job: its completion by that on the tenant's own part of the cluster."""
    by_tenant: dict[str, list[Record]] = {}
    for record in records:
        if record.job.gpu_milli_all:
            by_tenant.setdefault(record.job.tenant, []).append(record)
    part = gpus / max(len(by_tenant), 1)
    found = []
    for own in by_tenant.values():
        own.sort(key=lambda record: record.job.submitted_s)
        alone = alone_s([record.job for record in own], gpus=part)
        found += [_completion_s(it) / max(least_s, 1e-9) for it, least_s in zip(own, alone, strict=True)]
    return found


def alone_s(jobs: Sequence[SimJob], *, gpus: float) -> list[float]:
    """Completion of each, in order, when they have so many GPUs for themselves, wherever these are.

    A job that needs more than all of them takes that much longer.
    """
    ends: list[tuple[float, float]] = []
    free, now, found = gpus, 0.0, []
    for job in jobs:
        wanted = min(job.gpu_milli_all / _MILLI, gpus)
        takes_s = job.runs_s * job.gpu_milli_all / _MILLI / wanted
        now = max(now, job.submitted_s)
        while ends and (ends[0][0] <= now or free < wanted - 1e-9):
            end_s, freed = heapq.heappop(ends)
            free += freed
            now = max(now, end_s)
        free -= wanted
        heapq.heappush(ends, (now + takes_s, wanted))
        found.append(now + takes_s - job.submitted_s)
    return found


def _wait_s(record: Record) -> float:
    assert record.started_s is not None
    return record.started_s - record.job.submitted_s


def _completion_s(record: Record) -> float:
    assert record.ended_s is not None
    return record.ended_s - record.job.submitted_s


def _utilisation(run: Run, *, until_s: float) -> tuple[float, float, float]:
    """Of all the time, of the time when jobs wait, and how much of the time that is."""
    whole = used = whole_waiting = used_waiting = span_s = waiting_s = 0.0
    for moment, following in zip(run.moments, run.moments[1:], strict=False):
        for_s = max(min(following.at_s, until_s) - moment.at_s, 0.0)
        span_s += for_s
        whole += for_s * moment.there_milli
        used += for_s * moment.used_milli
        if moment.waiting:
            waiting_s += for_s
            whole_waiting += for_s * moment.there_milli
            used_waiting += for_s * moment.used_milli
    return (
        used / whole if whole else 0.0,
        used_waiting / whole_waiting if whole_waiting else 1.0,
        waiting_s / span_s if span_s else 0.0,
    )


def _served(records: Sequence[Record]) -> list[float]:
    """For each tenant: how much of the time in which its jobs asked for GPUs they had them."""
    had: dict[str, float] = {}
    asked: dict[str, float] = {}
    for record in records:
        milli, tenant = record.job.gpu_milli_all, record.job.tenant
        if milli:
            had[tenant] = had.get(tenant, 0.0) + milli * record.job.runs_s
            asked[tenant] = asked.get(tenant, 0.0) + milli * _completion_s(record)
    return [had[tenant] / asked[tenant] for tenant in had]


def _fragmentation(run: Run) -> float:
    if not run.samples:
        return 0.0
    return sum(sample.useless_milli for sample in run.samples) / len(run.samples) / run.gpu_milli
