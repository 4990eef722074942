"""Why a job waits: what each node lacks for it, and when it would start if nothing changed.

Worked out when somebody asks, not at each decision. Not for: deciding (scheduler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genie.model.job import Within
from genie.scheduler.order import Lines
from genie.scheduler.outlook import outlook
from genie.scheduler.pins import in_the_way
from genie.scheduler.request import FULL_MILLI, NodeFacts, Request
from genie.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class RuledOut:
    """Nodes that will not do now, and what is in the way there. `ever`: also were they all free."""

    reason: str
    nodes: tuple[str, ...]
    ever: bool


@dataclass(frozen=True)
class Explanation:
    job_id: str
    reason: str
    """As the last decision said."""
    starts_at: float | None
    """When it would start if nobody came and all ran as long as they may; None when nobody can say."""
    ahead: int
    """So many jobs come before it."""
    ruled_out: tuple[RuledOut, ...]
    starts_why: str = ""
    """What `starts_at` rests on beside time limits, or why it is not known; empty for nothing to say."""


def explain(scheduler: Scheduler, job_id: str, *, reason: str, now: float) -> Explanation:
    """Of a job that waits; KeyError for another. `reason` is that of its last Wait."""
    request = next((each for each in scheduler.waiting if each.job_id == job_id), None)
    if request is None:
        raise KeyError(job_id)
    line = in_order(scheduler, now)
    found = outlook(scheduler, request, now)
    return Explanation(
        job_id=job_id,
        reason=reason,
        starts_at=found.starts_at,
        ahead=line.index(request),
        ruled_out=_ruled_out(scheduler, request),
        starts_why=found.why,
    )


def in_order(scheduler: Scheduler, now: float) -> list[Request]:
    """Those that wait, as they would be gone through if nobody started; first for whom something is kept."""
    lines = Lines(scheduler.rules.order)
    for each in scheduler.waiting:
        lines.add(each, (0, 0))
    line = lines.walk(scheduler.scales(now), why_all=lambda *_: "", tell=lambda *_: None)
    reservation, kept = scheduler.reservation, set(scheduler.claims)
    holder = "" if reservation is None else reservation.job_id
    return sorted(line, key=lambda each: (each.job_id != holder, each.job_id not in kept))


def _ruled_out(scheduler: Scheduler, request: Request) -> tuple[RuledOut, ...]:
    found: dict[tuple[str, bool], list[str]] = {}
    for facts in scheduler.book.nodes:
        if why := scheduler.book.why_not(request, facts):
            found.setdefault((why, True), []).append(facts.node_id)
        elif why := _why_not_now(scheduler, request, facts):
            found.setdefault((why, False), []).append(facts.node_id)
    several = (RuledOut(why, tuple(sorted(nodes)), ever) for (why, ever), nodes in found.items())
    return tuple(sorted(several, key=lambda each: (each.ever, -len(each.nodes), each.reason)))


def _why_not_now(scheduler: Scheduler, request: Request, facts: NodeFacts) -> str:
    """What is lacking for one worker, or for all of them where they must be on one node."""
    book = scheduler.book
    if why := book.why_crowded(facts) or in_the_way(book, request, scheduler.claims):
        return why
    if why := book.why_not_among(request, facts):
        return why
    workers = request.least_workers if request.within in (Within.NODE, Within.ISLAND) else 1
    shape = request.shape.times(workers)
    cpu_milli, memory_mib, gpus = book.free_on(facts.node_id)
    if shape.cpu_milli > cpu_milli:
        return f"{cpu_milli / 1000:g} of {facts.cpu_milli / 1000:g} CPUs are free"
    if shape.memory_mib > memory_mib:
        return f"{memory_mib} of {facts.memory_mib} MiB of memory are free"
    if not shape.gpus or shape.gpu_ids:
        return ""
    shut = facts.closed_gpus | book.kept_on(facts.node_id)
    every = [(0, 0) if number in shut else free for number, free in enumerate(gpus)]
    return _why_not_these(shape.gpus, shape.gpu_milli, shape.gpu_memory_mib, every)


def _why_not_these(count: int, milli: int, memory_mib: int, every: Sequence[tuple[int, int]]) -> str:
    with_share = [free for free, _ in every if free >= milli]
    if len(with_share) < count:
        what = "GPUs are free" if milli == FULL_MILLI else f"GPUs have a share of {milli / FULL_MILLI:g} free"
        return f"{len(with_share)} of {len(every)} {what}"
    with_both = [free for free, mib in every if free >= milli and mib >= memory_mib]
    if len(with_both) < count:
        return f"{len(with_both)} of {len(every)} GPUs have {memory_mib} MiB free"
    return ""
