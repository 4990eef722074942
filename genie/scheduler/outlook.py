"""When a job that waits would start, if nobody came and everybody ran as long as he may.

At each end of a job those that wait are gone through as a pass does it: in order, the first that does not fit
gets a reservation, and who comes behind it starts where that does not put it off. Nobody knows when a job
without a time limit ends; where one must be over first, that is said instead of a time. Preemption is left
out. Not for: deciding (scheduler.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genie.scheduler.book import Held, Supposition
from genie.scheduler.order import Kind, Lines, Scales
from genie.scheduler.pins import Reservation
from genie.scheduler.request import FULL_MILLI, Amounts, Request, WorkerPlace
from genie.scheduler.scheduler import Scheduler
from genie.scheduler.victims import Running

TRIES_MAX = 40_000
"""So often it is tried at most whether somebody fits, to find out when a job starts: some tenths of a
second."""
_LOOKS_OF_A_TRY = 2
_NODES_OF_A_TRY, _NODES_OF_A_PLAIN_TRY = 250, 4
"""Looking at so many jobs, or at so many more nodes, costs about as much as trying whether one fits."""
_RUNNING_LOOKED_AT_MAX = 500


@dataclass(frozen=True)
class Outlook:
    """`why` says what a time rests on, or why there is none; empty when nothing is to be said."""

    starts_at: float | None
    why: str = ""


def outlook(scheduler: Scheduler, request: Request, now: float) -> Outlook:
    """Of a job that waits."""
    if scheduler.rules.quotas.why_never(request):
        return Outlook(None)
    with _open_claims(scheduler), scheduler.book.supposing() as then:
        found = _Future(scheduler, then, now).find(request)
    if found.starts_at is not None:
        return found
    kept = _kept_for(scheduler, request)
    if kept is None or not found.why:
        return found
    return Outlook(kept.starts_at, f"{found.why}; one without is taken to run for {_assumed_text(scheduler)}")


class _TooManyError(Exception):
    """It would take more tries than are allowed."""


@dataclass
class _Blocked:
    """The first that does not fit, and what is kept for it."""

    request: Request
    at: float
    places: tuple[WorkerPlace, ...]


class _Future:
    def __init__(self, scheduler: Scheduler, then: Supposition, now: float) -> None:
        self._scheduler = scheduler
        self._book = scheduler.book
        self._then = then
        self._at = now
        self._lines = Lines(scheduler.rules.order)
        self._kinds: dict[str, Kind] = {}
        self._fits: dict[Kind, tuple[object, ...]] = {}
        """What decides whether jobs of a kind fit."""
        for request, kind in scheduler.lined_up:
            self._lines.add(request, kind)
            self._kinds[request.job_id] = kind
            if kind not in self._fits:
                self._fits[kind] = _fit(request, is_filtered=scheduler.rules.allowed is not None)
        self._known: list[tuple[float, int, Running]] = []
        """Who ends at the time that is said, the first first."""
        self._open: list[tuple[float, int, Running]] = []
        """Who has no time limit."""
        for running in scheduler.running:
            self._run(running)
        self._usage: dict[str, Amounts] = {}
        self._fixed: dict[str, Amounts] = {}
        self._blocked = self._holder()
        self._hopeless: set[Kind] = set()
        self._full: set[tuple[object, ...]] = set()
        """What has no room at this moment."""
        self._delaying: set[Kind] = set()
        """Who would put the blocked one off at this moment, unless he is over before."""
        self._tries = 0.0
        nodes_of_a_try = _NODES_OF_A_PLAIN_TRY if self._book.is_plain else _NODES_OF_A_TRY
        self._try_cost = 1 + len(self._book.nodes) / nodes_of_a_try

    def find(self, wanted: Request) -> Outlook:
        last = ""
        try:
            while not self._walk(wanted):
                if not self._known and not self._open:
                    return Outlook(None)
                if not self._known:
                    last = self._open[0][2].request.job_id
                self._end_next()
        except _TooManyError:
            return Outlook(None, "too many jobs are in between to look so far ahead")
        if last:
            return Outlook(None, f"{last} has no time limit, and must be over first")
        return Outlook(self._at)

    # -- one moment ---------------------------------------------------------------------------

    def _walk(self, wanted: Request) -> bool:
        """Whether the job starts now. Those before it do where they can; if it does not, those behind it."""
        self._count(1 + len(self._lines) / _LOOKS_OF_A_TRY)
        self._full.clear()
        self._delaying.clear()
        # What tenants hold changes as jobs start and end.
        scales = Scales(self._at, self._book.capacity, self._usage_of, self._scheduler.rules.weights)
        blocked = self._blocked
        if blocked is not None and self._try(blocked.request):
            self._blocked = None
            if blocked.request.job_id == wanted.job_id:
                return True
        for request in self._lines.walk(scales, why_all=self._why_all, tell=lambda *_: None):
            is_blocked = self._blocked is not None and self._blocked.request is request
            if not is_blocked and self._try(request) and request.job_id == wanted.job_id:
                return True
        return False

    def _why_all(self, tenant: str, kind: Kind) -> str:
        is_out = self._fits.get(kind) in self._full or kind in self._hopeless
        return "there is no room" if is_out else ""

    def _try(self, request: Request) -> bool:
        """Starts it if it fits and may. The first that does not fit is the blocked one from now on."""
        quotas, tenant = self._scheduler.rules.quotas, request.tenant
        usage, fixed = self._usage_of(tenant), self._fixed_of(tenant)
        self._count(1 / _LOOKS_OF_A_TRY)
        if quotas.why_not(request, request.least_workers, usage=usage, fixed=fixed):
            return False
        kind, blocked = self._kinds[request.job_id], self._blocked
        if blocked is not None and blocked.request is not request:
            return self._try_behind(request, kind, blocked)
        if (places := self._placed(request)) is not None:
            self._start(request, places)
            return True
        self._full.add(self._fits[kind])
        if blocked is None and not request.shape.gpu_ids and not self._block(request):
            self._hopeless.add(kind)
        return False

    def _try_behind(self, request: Request, kind: Kind, blocked: _Blocked) -> bool:
        limit_s = request.time_limit_s
        is_over = limit_s is not None and self._at + limit_s <= blocked.at
        if not is_over and kind in self._delaying:
            return False
        kept = () if is_over else {place.node_id for place in blocked.places}
        mark, places = self._then.mark, self._placed(request, avoiding=kept)
        if places is None and not is_over:
            places = self._placed(request)
            if places is not None and self._may_be_in_the_way_of(blocked):
                self._then.undo(mark)
                self._delaying.add(kind)
                return False
        if places is None:
            self._full.add(self._fits[kind])
            return False
        self._start(request, places)
        return True

    def _placed(self, request: Request, *, avoiding: Collection[str] = ()) -> tuple[WorkerPlace, ...] | None:
        self._count(self._try_cost)
        return self._then.place(request, request.least_workers, avoiding=avoiding)

    def _start(self, request: Request, places: tuple[WorkerPlace, ...]) -> None:
        self._lines.remove(request, self._kinds[request.job_id])
        held = Held(request, places)
        limit_s = request.time_limit_s
        ends_at = self._at + (self._scheduler.rules.assumed_s if limit_s is None else limit_s)
        self._run(Running(held, self._at, ends_at))
        self._add_usage(request, held.amounts)

    def _end_next(self) -> None:
        """Time goes on to the next end, and to all at that moment. Those without a limit come last."""
        those = self._known or self._open
        at = those[0][0]
        self._at = max(self._at, at)
        while those and those[0][0] == at:
            _, _, running = heapq.heappop(those)
            self._then.release(running.held)
            self._add_usage(running.request, running.held.amounts.times(-1))
            if those is self._open:
                return

    # -- who is in the way --------------------------------------------------------------------

    def _holder(self) -> _Blocked | None:
        reservation = self._scheduler.reservation
        if reservation is None or not all(map(self._book.is_open, reservation.places)):
            return None
        waiting = {request.job_id: request for request, _ in self._scheduler.lined_up}
        request = waiting.get(reservation.job_id)
        return None if request is None else _Blocked(request, reservation.starts_at, reservation.places)

    def _block(self, request: Request) -> bool:
        """Keeps for it what is free first; False when it does not fit whoever ends."""
        ends = [running for _, _, running in sorted([*self._known, *self._open])]
        mark = self._then.mark
        gone = self._then.fewest_gone(request, [running.held for running in ends])
        self._count(2 * len(ends) if gone is None else 4 * gone)
        if gone is not None:
            places = self._then.place(request, request.least_workers)
            assert places is not None
            at = ends[gone - 1].ends_at if gone else self._at
            self._blocked = _Blocked(request, max(at, self._at), places)
        self._then.undo(mark)
        return gone is not None

    def _may_be_in_the_way_of(self, blocked: _Blocked) -> bool:
        """Whether what was just placed takes what is kept, when those are gone who must be by then. Where
        very many run that is not looked at: beside the nodes that are kept there is room enough."""
        several = [running for _, _, running in [*self._known, *self._open]]
        if len(several) > _RUNNING_LOOKED_AT_MAX:
            return True
        self._count(len(several))
        mark = self._then.mark
        for running in several:
            if running.ends_at <= blocked.at:
                self._then.release(running.held)
        is_free = self._then.hold(blocked.request, blocked.places)
        self._then.undo(mark)
        return not is_free

    # -- counting -----------------------------------------------------------------------------

    def _run(self, running: Running) -> None:
        is_known = running.is_leaving or running.request.time_limit_s is not None
        entry = (running.ends_at, running.request.sequence, running)
        heapq.heappush(self._known if is_known else self._open, entry)

    def _count(self, tries: float) -> None:
        self._tries += tries
        if self._tries > TRIES_MAX:
            raise _TooManyError

    def _usage_of(self, tenant: str) -> Amounts:
        return self._usage.get(tenant) or self._book.usage(tenant)

    def _fixed_of(self, tenant: str) -> Amounts:
        return self._fixed.get(tenant) or self._book.fixed(tenant)

    def _add_usage(self, request: Request, more: Amounts) -> None:
        self._usage[request.tenant] = self._usage_of(request.tenant) + more
        if not request.preemptible:
            self._fixed[request.tenant] = self._fixed_of(request.tenant) + more


def _fit(request: Request, *, is_filtered: bool) -> tuple[object, ...]:
    """Jobs that have this in common fit alike. Only parts of GPUs are one tenant's."""
    shape = request.shape
    is_own = is_filtered or request.near or request.apart or (shape.gpus and shape.gpu_milli < FULL_MILLI)
    tenant = request.tenant if is_own else ""
    return (
        shape, tenant, request.least_workers, request.within, request.spread, request.near, request.apart,
    )  # fmt: skip


@contextmanager
def _open_claims(scheduler: Scheduler) -> Iterator[None]:
    """GPUs that are kept for jobs which named them: here all are gone through in order instead."""
    with scheduler.claims.lifted(tuple(scheduler.claims)):
        yield


def _kept_for(scheduler: Scheduler, request: Request) -> Reservation | None:
    reservation = scheduler.reservation
    if reservation is not None and reservation.job_id == request.job_id:
        return reservation
    return scheduler.claims.get(request.job_id)


def _assumed_text(scheduler: Scheduler) -> str:
    return f"{scheduler.rules.assumed_s / 3600:g} hours"
