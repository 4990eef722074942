"""Why a job waits: what each node lacks for it, and when it would start if nothing changed.

Worked out when somebody asks, not at each decision. Not for: deciding (scheduler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genie.model.job import Within
from genie.scheduler.book import Supposition
from genie.scheduler.order import Lines
from genie.scheduler.pins import in_the_way
from genie.scheduler.request import FULL_MILLI, NodeFacts, Request
from genie.scheduler.scheduler import Scheduler

TRIES_MAX = 5_000
"""So often it is tried at most whether somebody fits, to find out when a job starts."""
ENDS_MAX = 10_000
"""So many ends of running jobs are looked ahead at most."""


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
    """When it would start if nobody came and all ran as long as they may; None when never."""
    ahead: int
    """So many jobs come before it."""
    ruled_out: tuple[RuledOut, ...]


def explain(scheduler: Scheduler, job_id: str, *, reason: str, now: float) -> Explanation:
    """Of a job that waits; KeyError for another. `reason` is that of its last Wait."""
    request = next((each for each in scheduler.waiting if each.job_id == job_id), None)
    if request is None:
        raise KeyError(job_id)
    line = in_order(scheduler, now)
    ahead = line[: line.index(request)]
    return Explanation(
        job_id=job_id,
        reason=reason,
        starts_at=_foreseen(scheduler, ahead, request, now),
        ahead=len(ahead),
        ruled_out=_ruled_out(scheduler, request),
    )


def in_order(scheduler: Scheduler, now: float) -> list[Request]:
    """Those that wait, as they would be gone through if nobody started."""
    lines = Lines(scheduler.rules.order)
    for each in scheduler.waiting:
        lines.add(each, (0, 0))
    return list(lines.walk(scheduler.scales(now), why_all=lambda *_: "", tell=lambda *_: None))


def _foreseen(scheduler: Scheduler, ahead: Sequence[Request], request: Request, now: float) -> float | None:
    """Those ahead of it go first wherever they fit, when enough has ended. What they hold, they keep. None
    also when that would take very many tries to find out."""
    if (claim := scheduler.claims.get(request.job_id)) is not None:
        return claim.starts_at
    ends = sorted(scheduler.running, key=lambda running: (running.ends_at, running.request.sequence))
    waiting = [each for each in ahead if not scheduler.why_quota(each)]
    if scheduler.why_quota(request):
        return None
    with scheduler.book.supposing() as then:
        times = [now, *(max(running.ends_at, now) for running in ends[:ENDS_MAX])]
        tries = 0
        for number, at in enumerate(times):
            if number:
                then.release(ends[number - 1].held)
            waiting, tried = _still_waiting(waiting, then)
            tries += tried + 1
            if tries > TRIES_MAX:
                return None
            if then.place(request, request.least_workers) is not None:
                return at
    return None


def _still_waiting(waiting: Sequence[Request], then: Supposition) -> tuple[list[Request], int]:
    """Who finds no room, and how often that was tried: where one does not fit, those like it do not."""
    left: list[Request] = []
    full: set[tuple[object, ...]] = set()
    tries = 0
    for each in waiting:
        kind = (
            each.shape, each.tenant, each.least_workers, each.within, each.spread, each.near, each.apart,
        )  # fmt: skip
        if kind not in full:
            tries += 1
            if then.place(each, each.least_workers) is not None:
                continue
            full.add(kind)
        left.append(each)
    return left, tries


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
    if why := in_the_way(book, request, scheduler.claims):
        return why
    workers = request.least_workers if request.within is Within.NODE else 1
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
