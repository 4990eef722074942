"""Decides what starts where, what must go, and what waits for what. Pure: time comes in as an argument.

One pass goes through the waiting jobs in order. What fits starts. For the first that does not fit, room is
made by preemption where that is allowed; else it gets a reservation: the places that are free first when
everything runs to its time limit. Jobs behind it start only where that does not put the reservation off
(EASY backfill). A reservation stays with its job until that starts or is withdrawn. A job that waits for a
GPU that it names has that kept for it instead, and the one reservation goes to somebody else (pins.py).

Where nothing was freed since the last pass, only those who came since then are gone through: the others would
be told the same.

What a pass decides counts as done: the book holds it. `ended` and `withdraw` take it back.
Not for: carrying a decision out (controller/), which place is best (placement/).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from genie.errors import UsageError
from genie.scheduler import migration, victims
from genie.scheduler.book import Book, Foresight, Held
from genie.scheduler.filters import Filter
from genie.scheduler.order import FairShare, Kind, Lines, Order, Scales
from genie.scheduler.pins import Claims, Reservation, in_the_way
from genie.scheduler.policies import Fenced
from genie.scheduler.possible import grouped
from genie.scheduler.quota import Quotas
from genie.scheduler.request import NodeFacts, Request, WorkerPlace
from genie.scheduler.victims import Running


class Start(msgspec.Struct, frozen=True):
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
    allowed: Filter | None = None
    """Rules nodes out for kinds of jobs."""
    preempts: bool = True
    """Whether anybody is interrupted for others."""
    moves_max: int = 2
    """How often a preemptible job may be moved to make room for others; it restarts elsewhere each time."""
    backfills: bool = True
    assumed_s: float = 86_400.0
    """How long a job without a time limit is taken to run. Nobody ends it then."""

    def under(self, policy: Order) -> Rules:
        """The same with another policy. A user's own brings its filter and its costs with it."""
        if not isinstance(policy, Fenced):
            return replace(self, order=policy, cost=victims.lost_work, allowed=None)
        return replace(
            self, order=policy, cost=policy.cost, allowed=policy.allowed if policy.filters else None
        )


@dataclass(slots=True)
class _Waiting:
    """A job that waits, and what it was told last. Jobs of one kind fare alike but for their time limits."""

    request: Request
    kind: int
    told: Wait

    @property
    def line(self) -> Kind:
        return (self.kind, self.request.priority)


_KINDS_MAX = 10_000


class _Kinds:
    """Numbers for kinds of jobs. When there are too many it begins anew, and alike jobs may differ then."""

    def __init__(self) -> None:
        self._known: dict[Request, int] = {}
        self._numbers = itertools.count()

    def of(self, request: Request) -> int:
        number = self._known.get(request.kind)
        if number is None:
            if len(self._known) >= _KINDS_MAX:
                self._known.clear()
            number = self._known[request.kind] = next(self._numbers)
        return number


class Scheduler:
    """One cluster's. The same calls in the same order give the same decisions."""

    def __init__(self, book: Book, rules: Rules) -> None:
        self.book = book
        self._rules = rules
        self._fault = self.fault
        book.set_filter(rules.allowed)
        self._kinds = _Kinds()
        self._waiting: dict[str, _Waiting] = {}
        self._near = 0
        """How many of those that wait want to be near to others."""
        self._lines = Lines(rules.order)
        self._came: dict[str, _Waiting] = {}
        """Who has not been gone through yet."""
        self._is_other = True
        """Whether anything but arrivals happened since the last pass."""
        self._never: dict[int, str] = {}
        """Why no node will do for a kind of jobs, while the nodes stay as they are; empty when one would."""
        self._crowds = 0
        """The book's count of when that was found out."""
        self._running: dict[str, Running] = {}
        self._reservation: Reservation | None = None
        self.claims = Claims(book)
        """GPUs that are kept for jobs which named them."""
        self._moves: dict[str, int] = {}
        """How often jobs that are not over have been moved."""

    @property
    def rules(self) -> Rules:
        return self._rules

    @property
    def fault(self) -> str:
        """Why the policy of the rules is out of use, and a built-in one decides; empty when it is not."""
        return self._rules.order.fault if isinstance(self._rules.order, Fenced) else ""

    @property
    def waiting(self) -> list[Request]:
        return [each.request for each in self._waiting.values()]

    @property
    def lined_up(self) -> list[tuple[Request, Kind]]:
        """Those that wait, each with what it is like."""
        return [(each.request, each.line) for each in self._waiting.values()]

    @property
    def told(self) -> list[Wait]:
        """What each that waits was told last."""
        return [each.told for each in self._waiting.values()]

    @property
    def kinds_waiting(self) -> int:
        """How many lines of alike jobs there are; a pass looks at each."""
        return len(self._lines)

    def has_alike(self, request: Request) -> bool:
        """Whether a job like this one waits already."""
        return self._lines.has(request.tenant, (self._kinds.of(request), request.priority))

    def is_waiting(self, job_id: str) -> bool:
        return job_id in self._waiting

    def is_running(self, job_id: str) -> bool:
        """Whether it holds anything, by its own decision or by what it was told."""
        return job_id in self._running

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
        self._look_at_all()

    def remove_node(self, node_id: str) -> None:
        """For one that was forgotten. UsageError when a job runs there: that has ended before."""
        self.book.remove_node(node_id)
        self._look_at_all()

    def _look_at_all(self) -> None:
        self._is_other = True
        self._never.clear()

    def set_rules(self, rules: Rules) -> None:
        """From the next pass on. What runs goes on, whoever may have started it; who waits is looked at anew,
        and nothing is kept for anybody."""
        self._rules = rules
        self._fault = self.fault
        self.book.set_filter(rules.allowed)
        self._never.clear()
        self._lines = Lines(rules.order)
        for waiting in self._waiting.values():
            self._lines.add(waiting.request, waiting.line)
        for job_id, running in self._running.items():
            if running.request.time_limit_s is None and not running.is_leaving:
                ends_at = running.started_at + rules.assumed_s
                self._running[job_id] = msgspec.structs.replace(running, ends_at=ends_at)
        self._reservation = None
        for job_id in self.claims:
            self.claims.drop(job_id)
        self._is_other = True

    def submit(self, request: Request) -> None:
        if request.job_id in self._waiting or request.job_id in self._running:
            raise UsageError(f"there is a job {request.job_id} already")
        self._queue(request)
        self.book.observe(request)

    def started(self, request: Request, places: tuple[WorkerPlace, ...], at: float) -> None:
        """It runs there already, whoever decided that, and whatever its nodes have lost since then."""
        self.book.hold(request, places, is_there=True)
        self._unqueue(request.job_id)
        self._run(request, places, at)
        self._is_other = True

    def keeps(self, job_id: str, places: tuple[WorkerPlace, ...]) -> None:
        """Of one that runs, only the workers at these places are left."""
        running = self._running[job_id]
        self.book.release(job_id)
        self.book.hold(running.request, places, is_there=True)
        self._running[job_id] = msgspec.structs.replace(running, held=Held(running.request, places))
        self._is_other = True

    def leaves(self, job_id: str, until: float) -> None:
        """One that runs has been told to go by then, whoever decided that."""
        running = self._running[job_id]
        self._running[job_id] = msgspec.structs.replace(
            running, ends_at=min(running.ends_at, until), is_leaving=True
        )

    def withdraw(self, job_id: str) -> None:
        """It waits no longer; nothing when it does not wait."""
        self._unqueue(job_id)
        self._moves.pop(job_id, None)
        self._drop_reservation(job_id)
        self._is_other = True

    def ended(self, job_id: str, *, again: bool = False) -> None:
        """What it held is free. `again`: it waits from now on, as one that was preempted does."""
        running = self._running.pop(job_id)
        self.book.release(job_id)
        self._is_other = True
        if again:
            self._queue(running.request)
        else:
            self._moves.pop(job_id, None)

    # -- looking ------------------------------------------------------------------------------

    def scales(self, now: float) -> Scales:
        return Scales(now, self.book.capacity, self.book.usage, self.rules.weights)

    def why_quota(self, request: Request, workers: int = 0) -> str:
        """Why its tenant may not start it now with so many workers, or its least; empty when it may."""
        if request.tenant not in self.rules.quotas.by_tenant:
            return ""
        usage, fixed = self.book.usage(request.tenant), self.book.fixed(request.tenant)
        return self.rules.quotas.why_not(request, workers or request.least_workers, usage=usage, fixed=fixed)

    # -- deciding -----------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """What starts, what must go, and of those that wait, whom there is something new to tell."""
        if self.fault != self._fault:  # what its order and its filter said holds no longer
            self.set_rules(self._rules)
        return _Pass(self, now).run()

    def start_now(self, request: Request, now: float) -> Start | None:
        """Starts one that has just come without a pass, where nobody waits and nothing is kept for anybody.
        None, and nothing has changed, where it must be gone through with others. `ended` takes it back."""
        is_alone = not self._waiting and self._reservation is None and not len(self.claims)
        if not is_alone or request.near or isinstance(self._rules.order, Fenced):
            return None
        walk = _Pass(self, now)
        if not walk._try_start(request, "it fits"):
            return None
        self.book.observe(request)
        start = walk._done[0]
        assert isinstance(start, Start)
        return start

    def _run(self, request: Request, places: tuple[WorkerPlace, ...], at: float) -> None:
        limit_s = request.time_limit_s
        ends_at = at + (self.rules.assumed_s if limit_s is None else limit_s)
        self._running[request.job_id] = Running(self.book.held[request.job_id], at, ends_at)
        self._drop_reservation(request.job_id)

    def _queue(self, request: Request) -> None:
        told = Wait(request.job_id, "has just come")
        waiting = _Waiting(request, self._kinds.of(request), told)
        self._waiting[request.job_id] = self._came[request.job_id] = waiting
        self._near += bool(request.near)
        self._lines.add(request, waiting.line)

    def _unqueue(self, job_id: str) -> None:
        if (waiting := self._waiting.pop(job_id, None)) is not None:
            self._near -= bool(waiting.request.near)
            self._lines.remove(waiting.request, waiting.line)
        self._came.pop(job_id, None)

    def _drop_reservation(self, job_id: str) -> None:
        if self._reservation is not None and self._reservation.job_id == job_id:
            self._reservation = None
        self.claims.drop(job_id)


class _Pass:
    """One walk over the waiting jobs."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self._scheduler = scheduler
        self._book = scheduler.book
        self._rules = scheduler.rules
        self._now = now
        self._news: dict[str, Wait] = {}
        self._done: list[Decision] = []
        self._hopeless: dict[Kind, str] = {}
        """Why no job of the kind could start however many ended."""
        self._full: dict[Kind, str] = {}
        """Why no job of the kind could start now; what starts only makes it worse."""
        self._delaying: dict[Kind, str] = {}
        """The same of those that would not end before the reservation begins."""
        self._unreclaimed: set[Kind] = set()
        """For whom nothing that is on loan would be enough, in this pass."""
        self._is_ahead = False
        """Whether the foresight stands at the time of the reservation."""
        self._is_past_claims = False
        self._heed_crowds()

    def run(self) -> list[Decision]:
        scheduler = self._scheduler
        waiting, came = scheduler._waiting, list(scheduler._came.values())
        scheduler._came.clear()
        with self._book.foreseeing() as then:
            if self._is_as_it_was:
                those = Lines(self._rules.order)
                for each in came:
                    those.add(each.request, each.line)
                self._walk(those, then)
            if not self._is_as_it_was:
                scheduler._is_other = False
                self._walk(scheduler._lines, then, but=self._first(then))
        if self._done and scheduler._near:
            scheduler._is_other = True
        news = [told for told in self._news.values() if told.job_id in waiting]
        return [*self._done, *news]

    @property
    def _is_as_it_was(self) -> bool:
        """Whether those who waited before would be told the same again."""
        reservation = self._scheduler._reservation
        is_due = reservation is not None and reservation.starts_at <= self._now
        return not self._scheduler._is_other and not is_due

    def _first(self, then: Foresight) -> set[str]:
        """Those for whom something is kept come before all others."""
        claims, holder = self._scheduler.claims, self._holder
        those = {*claims, *([holder.request.job_id] if holder is not None else [])}
        if holder is not None:
            self._again(holder, then)
        for job_id in claims:
            if claims.drop(job_id) is not None:  # unless one before it has taken that over
                self._claim_again(self._scheduler._waiting[job_id], then)
                if holder is not None and claims.get(job_id) is None:  # what was kept is open to the holder
                    self._scheduler._is_other = True
        return those

    def _walk(self, lines: Lines, then: Foresight, *, but: Collection[str] = ()) -> None:
        waiting = self._scheduler._waiting
        scales = self._scheduler.scales(self._now)
        for request in lines.walk(scales, why_all=self._why_all, tell=self._tell):
            if request.job_id not in but:
                self._consider(waiting[request.job_id], then)

    def _why_all(self, tenant: str, line: Kind) -> str:
        """Why all of these wait whatever their time limits are; empty when that must be looked at."""
        _, priority = line
        if why := self._why_hopeless(line):
            return why
        holder = self._holder
        if holder is None or tenant in self._rules.quotas.by_tenant:
            return ""
        if (True, priority) > self._rank(holder.request):
            return ""
        return self._full.get(line, "") if self._rules.backfills else self._why_behind(holder.request)

    def _why_hopeless(self, line: Kind) -> str:
        return self._scheduler._never.get(line[0], "") or self._hopeless.get(line, "")

    def _tell(self, job_id: str, why: str) -> None:
        reservation = self._scheduler._reservation
        waiting = self._scheduler._waiting.get(job_id)
        if waiting is not None and (reservation is None or reservation.job_id != job_id):
            self._wait(waiting.request, why)

    def _why_behind(self, holder: Request) -> str:
        return f"behind {holder.job_id}, which has a reservation"

    @property
    def _holder(self) -> _Waiting | None:
        """Who has the reservation."""
        reservation = self._scheduler._reservation
        return None if reservation is None else self._scheduler._waiting[reservation.job_id]

    # -- one job ------------------------------------------------------------------------------

    def _again(self, holder: _Waiting, then: Foresight) -> None:
        """Its reservation may have come, or have become an earlier one. It is before all others in that."""
        reservation, self._scheduler._reservation = self._scheduler._reservation, None
        assert reservation is not None
        request = holder.request
        if why := self._scheduler.why_quota(request):
            self._wait(request, why)
        else:
            with self._past_claims(request):
                why = "its reservation has come"
                is_there = self._start_there(request, reservation.places, why)
                if not is_there and not self._try_start(request, "it fits now"):
                    self._make_room(holder)
        self._is_ahead = False
        self._delaying.clear()

    def _start_there(self, request: Request, places: tuple[WorkerPlace, ...], reason: str) -> bool:
        """At its own places before all others: for those room was made."""
        if not all(map(self._book.is_open, places)):
            return False
        try:
            self._book.hold(request, places)
        except UsageError:
            return False
        self._start(request, places, reason)
        return True

    def _claim_again(self, waiting: _Waiting, then: Foresight) -> None:
        """The GPU that was kept for it may be free now. If not, it is kept on, whoever else waits."""
        request, holder = waiting.request, self._holder
        if holder is None or self._rank(request) > self._rank(holder.request):
            return self._consider(waiting, then)
        if why := self._why_hopeless(waiting.line) or self._scheduler.why_quota(request):
            return self._wait(request, why)
        with self._past_claims(request):
            self._backfill(waiting, holder.request, then)
            if self._is_waiting(request) and in_the_way(self._book, request):
                self._make_room(waiting)
            elif self._is_waiting(request):
                self._reclaim(waiting)
        return None

    @contextmanager
    def _past_claims(self, request: Request) -> Iterator[None]:
        """What is kept for others of a lower rank is not kept from this one."""
        claims, running = self._scheduler.claims, self._scheduler._running
        mine = self._rank(request) if len(claims) else (False, 0)
        waiting = self._scheduler._waiting
        lower = [job_id for job_id in claims if self._rank(waiting[job_id].request) < mine]
        if not lower:
            yield
            return
        with claims.lifted(lower):
            self._is_past_claims = True
            try:
                yield
            finally:
                self._is_past_claims = False
            reservation = self._scheduler._reservation
            is_kept = reservation is not None and reservation.job_id == request.job_id
            if reservation is not None and is_kept:
                claims.drop_at(reservation.places)
        if is_kept or request.job_id in running or claims.get(request.job_id) is not None:
            self._scheduler._is_other = True

    def _consider(self, waiting: _Waiting, then: Foresight) -> None:
        request, holder = waiting.request, self._holder
        why = self._why_hopeless(waiting.line) or self._scheduler.why_quota(request)
        if why:
            return self._wait(request, why)
        if holder is not None and self._rank(request) <= self._rank(holder.request):
            return self._consider_behind(waiting, holder.request, then)
        if holder is not None:  # for those who were gone through already it is another one
            self._scheduler._is_other = True
        with self._past_claims(request):
            if not self._try_start(request, "it fits"):
                self._make_room(waiting)
                self._is_ahead = False
                self._delaying.clear()
        if holder is not None and self._holder is holder:  # what it counts on may be taken
            self._again(holder, then)
        return None

    def _consider_behind(self, waiting: _Waiting, holder: Request, then: Foresight) -> None:
        if not self._rules.backfills:
            return self._wait(waiting.request, self._why_behind(holder))
        with self._past_claims(waiting.request):
            self._backfill(waiting, holder, then)
        if waiting.request.tenant in self._rules.quotas.by_tenant and self._is_waiting(waiting.request):
            self._reclaim(waiting)
        return None

    def _is_waiting(self, request: Request) -> bool:
        return request.job_id in self._scheduler._waiting

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
        self._scheduler._unqueue(request.job_id)
        self._scheduler._run(request, places, self._now)
        where = places[0].node_id
        if len(places) > 1:
            where = ", ".join(sorted({place.node_id for place in places})[:3])
        self._done.append(Start(request.job_id, places, f"{reason}: {where}"))

    def _wait(self, request: Request, reason: str, starts_at: float | None = None) -> None:
        waiting = self._scheduler._waiting[request.job_id]
        if (waiting.told.reason, waiting.told.starts_at) != (reason, starts_at):
            waiting.told = self._news[request.job_id] = Wait(request.job_id, reason, starts_at)

    def _rank(self, request: Request, workers: int = 0) -> victims.Rank:
        """The higher one may take over a reservation."""
        return victims.rank(request, book=self._book, quotas=self._rules.quotas, workers=workers)

    def _may_start(self, request: Request, workers: int) -> bool:
        """Where it takes what is kept for others, only with so many workers that it keeps the rank for which
        it may: with more it may be on loan, and go in turn."""
        if self._scheduler.why_quota(request, workers):
            return False
        return not self._is_past_claims or self._rank(request, workers) >= self._rank(request)

    # -- room ---------------------------------------------------------------------------------

    def _make_room(self, waiting: _Waiting) -> None:
        """By preemption, or by waiting for what ends first. A job that could never fit reserves nothing."""
        request = waiting.request
        if why := self._why_never(waiting):
            return self._wait(request, why)
        if self._rules.preempts:
            several = self._those_who_matter(request)
            if (eviction := self._eviction(request, several)) is not None:
                return self._preempt(request, eviction)
            is_anyone_leaving = any(running.is_leaving for running in several)
            if not is_anyone_leaving and (plan := self._moves(request)) is not None:
                return self._preempt(request, plan)
        return self._reserve(waiting)

    def _eviction(self, request: Request, several: list[Running]) -> victims.Eviction | None:
        """Who of these must go so that it can start; None when that would not be enough."""
        # Who must be over before the last of those who leave is gone need not be sent away: such jobs are let
        # in before a reservation, and would be let in again.
        until = max((running.ends_at for running in several if running.is_leaving), default=-math.inf)
        leaving = [running for running in several if running.ends_at <= until]
        others = [running for running in several if running.ends_at > until]
        candidates = victims.who_may_go(request, others, book=self._book, quotas=self._rules.quotas)
        book, cost = self._book, self._rules.cost
        return victims.plan(request, candidates, leaving=leaving, book=book, cost=cost, now=self._now)

    def _reclaim(self, waiting: _Waiting) -> None:
        """What is on loan comes back to whom it belongs, also behind somebody's reservation: beside the nodes
        that are reserved, so that nobody is delayed."""
        request, reservation = waiting.request, self._scheduler._reservation
        is_asked = self._rules.preempts and waiting.line not in self._unreclaimed
        if reservation is None or not is_asked or not self._rank(request)[0]:
            return
        kept = {place.node_id for place in reservation.places}
        running = self._those_who_matter(request)
        lent = victims.on_loan(running, book=self._book, quotas=self._rules.quotas)
        several = [each for each in lent if not any(place.node_id in kept for place in each.held.places)]
        eviction = self._eviction(request, several)
        if eviction is None or any(place.node_id in kept for place in eviction.places):
            self._unreclaimed.add(waiting.line)
        else:
            self._preempt(request, eviction)

    def _those_who_matter(self, request: Request) -> list[Running]:
        """Whose end could make room for it."""
        running = self._scheduler._running
        if not request.shape.gpu_ids:
            return list(running.values())
        return [running[job_id] for job_id in self._book.jobs_on(min(request.shape.nodes))]

    def _keep(self, request: Request, at: float, places: tuple[WorkerPlace, ...]) -> None:
        """For later: the GPUs that it named and waits for, or the one reservation."""
        kept, holder = Reservation(request.job_id, at, places), self._holder
        is_behind = holder is not None and self._rank(request) <= self._rank(holder.request)
        if in_the_way(self._book, request) or is_behind:
            self._scheduler.claims.keep(kept)
        else:
            self._scheduler._reservation = kept

    def _moves(self, request: Request) -> victims.Eviction | None:
        """Room by moving others, each of which is moved a few times at most."""
        moves = self._scheduler._moves
        movable = [
            running
            for running in self._scheduler.running
            if running.request.preemptible and moves.get(running.request.job_id, 0) < self._rules.moves_max
        ]
        plan = migration.plan(request, movable, book=self._book) if movable else None
        if plan is None:
            return None
        for job_id in plan.moves:
            moves[job_id] = moves.get(job_id, 0) + 1
        return victims.Eviction(plan.moves, plan.places)

    def _preempt(self, request: Request, eviction: victims.Eviction) -> None:
        running = self._scheduler._running
        victims_left = [job_id for job_id in eviction.victims if not self._take_back(job_id, request)]
        # With no more workers than room was made for: with more it may be on loan, and go in turn.
        why = "it comes before others that wait"
        if not victims_left and self._start_there(request, eviction.places, why):
            return
        for job_id in victims_left:
            victim = running[job_id]
            until = min(victim.ends_at, self._now + victim.request.grace_s)
            running[job_id] = msgspec.structs.replace(victim, ends_at=until, is_leaving=True)
            why = f"makes room for {request.job_id}"
            self._done.append(Preempt(job_id, request.job_id, victim.request.grace_s, why))
        leaving = [job for job in self._those_who_matter(request) if job.is_leaving]
        at = max((job.ends_at for job in leaving), default=self._now)
        self._keep(request, at, eviction.places)
        nodes = {place.node_id for place in eviction.places}
        there = [job.request.job_id for job in leaving if any(it.node_id in nodes for it in job.held.places)]
        self._wait(request, f"waits for {', '.join(there) or 'others'} to make room", at)

    def _take_back(self, job_id: str, request: Request) -> bool:
        """A start that was decided in this pass does not happen; whether it was one."""
        starts = [each for each in self._done if isinstance(each, Start) and each.job_id == job_id]
        if not starts:
            return False
        self._done.remove(starts[0])
        self._scheduler.ended(job_id, again=True)
        self._full.clear()
        self._wait(self._scheduler._waiting[job_id].request, f"gives way to {request.job_id}")
        return True

    def _reserve(self, waiting: _Waiting) -> None:
        """Where it fits first when everybody runs as long as he may."""
        request = waiting.request
        ends = sorted(
            self._those_who_matter(request), key=lambda running: (running.ends_at, running.request.sequence)
        )
        with self._book.supposing() as then:
            gone = then.fewest_gone(request, [running.held for running in ends])
            if gone is None:
                why = self._hopeless[waiting.line] = self._why_not_ever(request)
                return self._wait(request, why)
            places = then.place(request, request.least_workers)
            assert places is not None
        at = max(ends[gone - 1].ends_at if gone else self._now, self._now)
        self._keep(request, at, places)
        nodes = ", ".join(sorted({place.node_id for place in places})[:3])
        why = in_the_way(self._book, request) or f"has a reservation on {nodes}"
        return self._wait(request, why, at)

    def _why_not_ever(self, request: Request) -> str:
        claims = self._scheduler.claims
        if why := in_the_way(self._book, request, claims) or self._book.why_not_beside(request):
            return why
        if request.near:
            return f"waits for room beside a job named {' or '.join(sorted(request.near))}"
        kept = f" but what is kept for {claims.text()}" if len(claims) else ""
        return f"does not fit even when all is free{kept}"

    def _why_never(self, waiting: _Waiting) -> str:
        """Why no node will do for its kind; found out once while the nodes stay as they are."""
        self._heed_crowds()
        never = self._scheduler._never
        if waiting.kind not in never:
            if len(never) >= _KINDS_MAX:
                never.clear()
            never[waiting.kind] = self._why_no_node(waiting.request)
        return never[waiting.kind]

    def _heed_crowds(self) -> None:
        """What was said of nodes holds while none of them is newly full of workers, or not any more."""
        if self._scheduler._crowds != self._book.crowds:
            self._scheduler._crowds = self._book.crowds
            self._scheduler._never.clear()

    def _why_no_node(self, request: Request) -> str:
        reasons: dict[str, str] = {}
        for node in self._book.nodes:
            if not (why := self._book.why_not(request, node) or self._book.why_crowded(node)):
                return ""
            reasons[node.node_id] = why
        if not reasons:
            return "no node has joined the cluster yet"
        closed = frozenset(
            node.node_id
            for node in self._book.nodes
            if node.closed and not self._book.why_not(request, replace(node, closed=""))
        )
        return f"no node will do: {grouped(reasons, first=closed)}"

    # -- behind a reservation -----------------------------------------------------------------

    def _look_ahead(self, then: Foresight) -> None:
        """To the time when the reservation begins: who must be over by then is gone."""
        if self._is_ahead:
            return
        self._is_ahead = True
        then.catch_up()
        reservation, holder = self._scheduler._reservation, self._holder
        if reservation is None or holder is None:
            return
        for running in self._scheduler._running.values():
            if running.ends_at <= reservation.starts_at:
                then.release(running.held)
        is_kept = then.hold(holder.request, reservation.places)
        assert is_kept, "a reservation stands on what is free by then"

    def _backfill(self, waiting: _Waiting, holder: Request, then: Foresight) -> None:
        request, line = waiting.request, waiting.line
        reservation = self._scheduler._reservation
        assert reservation is not None
        limit_s = math.inf if request.time_limit_s is None else request.time_limit_s
        ends_before = self._now + limit_s <= reservation.starts_at
        why = self._full.get(line, "") or ("" if ends_before else self._delaying.get(line, ""))
        if why:
            return self._wait(request, why)
        if not ends_before:
            self._look_ahead(then)
        refused = self._full
        for workers in range(request.workers, request.least_workers - 1, -1):
            if not self._may_start(request, workers):
                continue
            places = self._book.place(request, workers)
            if places is None:
                continue
            if ends_before or then.hold(request, places):
                return self._start(request, places, "it fits and delays nobody")
            self._book.release(request.job_id)
            refused = self._delaying
            kept = {place.node_id for place in reservation.places}
            places = self._book.place(request, workers, avoiding=kept)
            if places is not None and then.hold(request, places):
                return self._start(request, places, "it fits beside what is reserved")
            if places is not None:
                self._book.release(request.job_id)
        why = in_the_way(self._book, request, self._scheduler.claims)
        if not why and refused is self._full:  # perhaps for want of something else than what is reserved
            why = self._why_never(waiting) or self._book.why_not_beside(request)
            why = why or f"no room now, and {self._why_behind(holder)}"
        refused[line] = why = why or f"would delay {holder.job_id}, which has a reservation"
        return self._wait(request, why)
