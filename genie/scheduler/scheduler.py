"""Decides what starts where, what must go, and what waits for what. Pure: time comes in as an argument.

One pass goes through the waiting jobs in order. What fits starts. For the first that does not fit, room is
made by preemption where that is allowed; else it gets a reservation: the places that are free first when
everything runs to its time limit. Jobs behind it start only where that does not put the reservation off
(EASY backfill). A reservation stays with its job until that starts or is withdrawn.

What a pass decides counts as done: the book holds it. `ended` and `withdraw` take it back.
Not for: carrying a decision out (controller/), which place is best (placement/).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from genie.errors import UsageError
from genie.scheduler import migration, victims
from genie.scheduler.book import Book, Foresight, Held
from genie.scheduler.order import FairShare, Order, Scales, in_order
from genie.scheduler.quota import Quotas
from genie.scheduler.request import NodeFacts, Request, WorkerPlace, why_not
from genie.scheduler.victims import Running


@dataclass(frozen=True)
class Start:
    """Run it there."""

    job_id: str
    places: tuple[WorkerPlace, ...]
    reason: str


@dataclass(frozen=True)
class Preempt:
    """Tell it to save its state and go; after `grace_s` it is ended."""

    job_id: str
    for_job: str
    grace_s: float
    reason: str


@dataclass(frozen=True)
class Wait:
    """Not now. `starts_at` is when it would start if nothing changed; None when nobody can say."""

    job_id: str
    reason: str
    starts_at: float | None = None


Decision: TypeAlias = Start | Preempt | Wait


@dataclass(frozen=True)
class Rules:
    """How this cluster decides."""

    order: Order = field(default_factory=FairShare)
    quotas: Quotas = field(default_factory=Quotas)
    weights: Mapping[str, float] = field(default_factory=dict)
    cost: victims.Cost = victims.lost_work
    preempts: bool = True
    moves_max: int = 2
    """How often a preemptible job may be moved to make room for others; it restarts elsewhere each time."""
    backfills: bool = True
    assumed_s: float = 86_400.0
    """How long a job without a time limit is taken to run. Nobody ends it then."""


@dataclass(frozen=True)
class Reservation:
    """Places that are kept for a job from a time on."""

    job_id: str
    starts_at: float
    places: tuple[WorkerPlace, ...]


class Scheduler:
    """One cluster's. The same calls in the same order give the same decisions."""

    def __init__(self, book: Book, rules: Rules) -> None:
        self.book = book
        self.rules = rules
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Running] = {}
        self._reservation: Reservation | None = None
        self._moves: dict[str, int] = {}
        """How often jobs that are not over have been moved."""

    @property
    def waiting(self) -> list[Request]:
        return list(self._waiting.values())

    @property
    def running(self) -> list[Running]:
        return list(self._running.values())

    @property
    def reservation(self) -> Reservation | None:
        """As the last pass left it."""
        return self._reservation

    # -- what happens -------------------------------------------------------------------------

    def set_node(self, facts: NodeFacts) -> None:
        self.book.set_node(facts)

    def submit(self, request: Request) -> None:
        if request.job_id in self._waiting or request.job_id in self._running:
            raise UsageError(f"there is a job {request.job_id} already")
        self._waiting[request.job_id] = request
        self.book.observe(request)

    def started(self, request: Request, places: tuple[WorkerPlace, ...], at: float) -> None:
        """It runs there already, whoever decided that."""
        self.book.hold(request, places)
        self._waiting.pop(request.job_id, None)
        self._run(request, places, at)

    def withdraw(self, job_id: str) -> None:
        """It waits no longer; nothing when it does not wait."""
        self._waiting.pop(job_id, None)
        self._moves.pop(job_id, None)
        self._drop_reservation(job_id)

    def ended(self, job_id: str, *, again: bool = False) -> None:
        """What it held is free. `again`: it waits from now on, as one that was preempted does."""
        running = self._running.pop(job_id)
        self.book.release(job_id)
        if again:
            self._waiting[job_id] = running.request
        else:
            self._moves.pop(job_id, None)

    # -- looking ------------------------------------------------------------------------------

    def scales(self, now: float) -> Scales:
        return Scales(now, self.book.capacity, self.book.usage, self.rules.weights)

    def why_quota(self, request: Request, workers: int = 0) -> str:
        """Why its tenant may not start it now with so many workers, or its least; empty when it may."""
        usage, fixed = self.book.usage(request.tenant), self.book.fixed(request.tenant)
        return self.rules.quotas.why_not(request, workers or request.least_workers, usage=usage, fixed=fixed)

    # -- deciding -----------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        return _Pass(self, now).run()

    def _run(self, request: Request, places: tuple[WorkerPlace, ...], at: float) -> None:
        limit_s = request.time_limit_s
        ends_at = at + (self.rules.assumed_s if limit_s is None else limit_s)
        self._running[request.job_id] = Running(Held(request, places), at, ends_at)
        self._drop_reservation(request.job_id)

    def _drop_reservation(self, job_id: str) -> None:
        if self._reservation is not None and self._reservation.job_id == job_id:
            self._reservation = None


class _Pass:
    """One walk over the waiting jobs."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._book = scheduler.book
        self._rules = scheduler.rules
        self._now = now
        self._done: list[Decision] = []
        self._waits: dict[str, tuple[str, float | None]] = {}
        self._refused: dict[tuple[object, ...], str] = {}
        """Why jobs like this one could not start in this pass; what starts only makes it worse."""

    def run(self) -> list[Decision]:
        book, rules = self._book, self._rules
        scales = self._scheduler.scales(self._now)
        waiting = self._scheduler._waiting
        holder = self._holder
        with book.foreseeing() as then:
            if holder is not None:
                self._again(holder, then)
            for request in in_order(list(waiting.values()), rules.order, scales):
                if request is not holder:
                    self._consider(request, then)
        waits = [Wait(job_id, why, at) for job_id, (why, at) in self._waits.items() if job_id in waiting]
        return [*self._done, *waits]

    @property
    def _holder(self) -> Request | None:
        """Who has the reservation."""
        reservation = self._scheduler._reservation
        return None if reservation is None else self._scheduler._waiting[reservation.job_id]

    # -- one job ------------------------------------------------------------------------------

    def _again(self, holder: Request, then: Foresight) -> None:
        """Its reservation may have come, or have become an earlier one. It is before all others in that."""
        reservation, self._scheduler._reservation = self._scheduler._reservation, None
        assert reservation is not None
        why = self._scheduler.why_quota(holder)
        if why:
            self._wait(holder, why)
        elif not self._start_there(holder, reservation) and not self._try_start(holder, "it fits now"):
            self._make_room(holder)
        self._look_ahead(then)

    def _start_there(self, holder: Request, reservation: Reservation) -> bool:
        """At its own places before all others: for those room was made."""
        try:
            self._book.hold(holder, reservation.places)
        except UsageError:
            return False
        self._start(holder, reservation.places, "its reservation has come")
        return True

    def _consider(self, request: Request, then: Foresight) -> None:
        why = self._scheduler.why_quota(request) or self._refused.get(self._kind(request), "")
        if why:
            return self._wait(request, why)
        holder = self._holder
        if holder is not None and self._rank(request) <= self._rank(holder):
            if self._rules.backfills:
                return self._backfill(request, holder, then)
            return self._refuse(request, f"behind {holder.job_id}, which has a reservation")
        if not self._try_start(request, "it fits"):
            self._make_room(request)
        if holder is not None and self._holder is holder:  # what has started may stand in its way
            return self._again(holder, then)
        return self._look_ahead(then)

    def _try_start(self, request: Request, reason: str) -> bool:
        least = request.least_workers
        counts = range(request.workers, least - 1, -1)
        workers = next((count for count in counts if self._may_start(request, count)), 0)
        places = self._book.place(request, workers, least=least) if workers else None
        if places is None:
            return False
        self._start(request, places, reason)
        return True

    def _start(self, request: Request, places: tuple[WorkerPlace, ...], reason: str) -> None:
        del self._scheduler._waiting[request.job_id]
        self._scheduler._run(request, places, self._now)
        where = ", ".join(sorted({place.node_id for place in places})[:3])
        self._done.append(Start(request.job_id, places, f"{reason}: {where}"))

    def _wait(self, request: Request, reason: str, starts_at: float | None = None) -> None:
        self._waits[request.job_id] = (reason, starts_at)

    def _rank(self, request: Request) -> victims.Rank:
        """The higher one may take over a reservation."""
        return victims.rank(request, book=self._book, quotas=self._rules.quotas)

    def _may_start(self, request: Request, workers: int) -> bool:
        return not self._scheduler.why_quota(request, workers)

    # -- room ---------------------------------------------------------------------------------

    def _make_room(self, request: Request) -> None:
        """By preemption, or by waiting for what ends first. A job that could never fit reserves nothing."""
        if why := self._why_never(request):
            return self._refuse(request, why)
        leaving = [running for running in self._scheduler.running if running.is_leaving]
        if self._rules.preempts:
            candidates = victims.who_may_go(
                request, self._scheduler.running, book=self._book, quotas=self._rules.quotas
            )
            eviction = victims.plan(
                request,
                candidates,
                leaving=leaving,
                book=self._book,
                cost=self._rules.cost,
                now=self._now,
            )
            if eviction is not None:
                return self._preempt(request, eviction)
        if not leaving:
            moves = self._scheduler._moves
            movable = [
                each
                for each in self._scheduler.running
                if moves.get(each.request.job_id, 0) < self._rules.moves_max
            ]
            plan = migration.plan(request, movable, book=self._book)
            if plan is not None:
                return self._migrate(request, plan)
        return self._reserve(request)

    def _migrate(self, request: Request, plan: migration.Migration) -> None:
        for job_id in plan.moves:
            self._scheduler._moves[job_id] = self._scheduler._moves.get(job_id, 0) + 1
        self._preempt(request, victims.Eviction(plan.moves, plan.places))

    def _preempt(self, request: Request, eviction: victims.Eviction) -> None:
        running = self._scheduler._running
        victims_left = [job_id for job_id in eviction.victims if not self._take_back(job_id, request)]
        if not victims_left and self._try_start(request, "it comes before others that wait"):
            return
        for job_id in victims_left:
            victim = running[job_id]
            until = min(victim.ends_at, self._now + victim.request.grace_s)
            running[job_id] = replace(victim, ends_at=until, is_leaving=True)
            why = f"makes room for {request.job_id}"
            self._done.append(Preempt(job_id, request.job_id, victim.request.grace_s, why))
        at = max((job.ends_at for job in running.values() if job.is_leaving), default=self._now)
        self._scheduler._reservation = Reservation(request.job_id, at, eviction.places)
        self._wait(request, f"waits for {', '.join(victims_left) or 'others'} to make room", at)

    def _take_back(self, job_id: str, request: Request) -> bool:
        """A start that was decided in this pass does not happen; whether it was one."""
        starts = [each for each in self._done if isinstance(each, Start) and each.job_id == job_id]
        if not starts:
            return False
        self._done.remove(starts[0])
        self._scheduler.ended(job_id, again=True)
        self._wait(self._scheduler._waiting[job_id], f"gives way to {request.job_id}")
        return True

    def _reserve(self, request: Request) -> None:
        """Where it fits first when everybody runs as long as he may."""
        ends = sorted(
            self._scheduler.running, key=lambda running: (running.ends_at, running.request.sequence)
        )
        with self._book.supposing() as then:
            for running in ends:
                then.release(running.held)
                places = then.place(request, request.least_workers)
                if places is not None:
                    at = max(running.ends_at, self._now)
                    self._scheduler._reservation = Reservation(request.job_id, at, places)
                    nodes = ", ".join(sorted({place.node_id for place in places})[:3])
                    return self._wait(request, f"has a reservation on {nodes}", at)
        return self._refuse(request, "does not fit even when all is free")

    def _why_never(self, request: Request) -> str:
        reasons = [why_not(request.shape, node) for node in self._book.nodes]
        if any(not why for why in reasons):
            return ""
        return (
            reasons[0]
            if len(set(reasons)) == 1
            else f"no node will do: {'; '.join(sorted(set(reasons))[:3])}"
        )

    def _refuse(self, request: Request, why: str) -> None:
        self._refused[self._kind(request)] = why
        self._wait(request, why)

    def _kind(self, request: Request) -> tuple[object, ...]:
        """Jobs that are alike in this fare alike."""
        return (
            request.shape, request.tenant, request.workers, request.workers_min, request.within,
            request.spread, request.near, request.apart, request.time_limit_s, request.preemptible,
            request.priority,
        )  # fmt: skip

    # -- behind a reservation -----------------------------------------------------------------

    def _look_ahead(self, then: Foresight) -> None:
        """To the time when the reservation begins: who must be over by then is gone."""
        then.catch_up()
        reservation, holder = self._scheduler._reservation, self._holder
        if reservation is None or holder is None:
            return
        for running in self._scheduler.running:
            if running.ends_at <= reservation.starts_at:
                then.release(running.held)
        is_kept = then.hold(holder, reservation.places)
        assert is_kept, "a reservation stands on what is free by then"

    def _backfill(self, request: Request, holder: Request, then: Foresight) -> None:
        reservation = self._scheduler._reservation
        assert reservation is not None
        limit_s = math.inf if request.time_limit_s is None else request.time_limit_s
        ends_before = self._now + limit_s <= reservation.starts_at
        for workers in range(request.workers, request.least_workers - 1, -1):
            if not self._may_start(request, workers):
                continue
            places = self._book.place(request, workers)
            if places is None:
                continue
            if ends_before or then.hold(request, places):
                return self._start(request, places, "it fits and delays nobody")
            self._book.release(request.job_id)
        return self._refuse(request, f"would delay {holder.job_id}, which has a reservation")
