"""Who must go so that another job can start, and whether that would be enough.

A job may be sent away when it said that it can be and its rank is lower: a job on loan is below one within
its tenant's own part, and among those the lower priority is. Each preemption puts a job in place of others
that are all below it, so among the jobs that run the ranks only rise, and preemption comes to an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from genie.scheduler.book import Book, Held
from genie.scheduler.quota import Quotas
from genie.scheduler.request import Request, WorkerPlace


class Running(msgspec.Struct, frozen=True):
    """A job that runs. `ends_at` is when it must be over, or is taken to be."""

    held: Held
    started_at: float
    ends_at: float
    is_leaving: bool = False

    @property
    def request(self) -> Request:
        return self.held.request


Cost: TypeAlias = Callable[[Running, float], tuple[float, ...]]
"""Of sending a job away now; the lowest go first."""


def lost_work(running: Running, now: float) -> tuple[float, ...]:
    """The lowest priority first; then what has run the least, in GPU seconds."""
    gpus = max(running.held.amounts.gpu_milli, 1)
    return (running.request.priority, gpus * (now - running.started_at), -running.request.sequence)


@dataclass(frozen=True)
class Eviction:
    """These go, and then the job fits at these places."""

    victims: tuple[str, ...]
    places: tuple[WorkerPlace, ...]


Rank: TypeAlias = tuple[bool, int]
"""Whether it is within its tenant's own part, and its priority."""


def rank(request: Request, *, book: Book, quotas: Quotas, workers: int = 0) -> Rank:
    """Of a job that waits, were it to start now with so many workers, or its least."""
    if request.tenant not in quotas.by_tenant:
        return (True, request.priority)
    claim = (request, request.amounts(workers or request.least_workers))
    owned = quotas.owned(request.tenant, [*book.claims(request.tenant), claim])
    return (request.job_id in owned, request.priority)


def who_may_go(request: Request, several: Iterable[Running], *, book: Book, quotas: Quotas) -> list[Running]:
    """Those whom the job may send away: they agreed, and their rank is lower."""
    mine = rank(request, book=book, quotas=quotas)
    owned: dict[str, frozenset[str]] = {}
    found = []
    for running in several:
        other = running.request
        if not other.preemptible or running.is_leaving:
            continue
        if (True, other.priority) < mine:
            found.append(running)
            continue
        if other.tenant not in owned:
            owned[other.tenant] = quotas.owned(other.tenant, book.claims(other.tenant))
        if (other.job_id in owned[other.tenant], other.priority) < mine:
            found.append(running)
    return found


def on_loan(several: Iterable[Running], *, book: Book, quotas: Quotas) -> list[Running]:
    """Those that are beyond their tenant's own part, and those that leave already."""
    owned: dict[str, frozenset[str]] = {}
    found = []
    for running in several:
        tenant = running.request.tenant
        if tenant not in owned:
            owned[tenant] = quotas.owned(tenant, book.claims(tenant))
        if running.is_leaving or running.request.job_id not in owned[tenant]:
            found.append(running)
    return found


def plan(
    request: Request,
    candidates: Iterable[Running],
    *,
    leaving: Sequence[Running],
    book: Book,
    cost: Cost,
    now: float,
) -> Eviction | None:
    """The cheapest who are enough, or None when all of them together are not.

    Those who are leaving already count as gone. First as many as it takes, then those are spared without
    whom it still works, the dearest first.
    """
    ordered = sorted(candidates, key=lambda running: cost(running, now))
    chosen = _enough(request, leaving, ordered, book)
    if chosen is None:
        return None
    for running in reversed(list(chosen)):
        without = [other for other in chosen if other is not running]
        if _places(request, [*leaving, *without], book) is not None:
            chosen = without
    places = _places(request, [*leaving, *chosen], book)
    assert places is not None
    return Eviction(tuple(running.request.job_id for running in chosen), places)


def _enough(
    request: Request, leaving: Iterable[Running], ordered: Iterable[Running], book: Book
) -> list[Running] | None:
    """The first of them without whom it fits."""
    chosen: list[Running] = []
    with book.supposing() as then:
        for running in leaving:
            then.release(running.held)
        if then.place(request, request.least_workers) is not None:
            return chosen
        for running in ordered:
            then.release(running.held)
            chosen.append(running)
            if then.place(request, request.least_workers) is not None:
                return chosen
    return None


def _places(request: Request, gone: Iterable[Running], book: Book) -> tuple[WorkerPlace, ...] | None:
    with book.supposing() as then:
        for running in gone:
            then.release(running.held)
        return then.place(request, request.least_workers)
