"""Jobs that will do with no GPUs but those they name: what is kept for them, and what is in their way.

The GPU that such a job waits for is kept for it: nothing else is placed there. All other GPUs are free for
everybody, however long it waits, so it needs no part in the one reservation of the scheduler.
Not for: who comes first (scheduler.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genie.scheduler.book import Book
from genie.scheduler.request import FULL_MILLI, Request, WorkerPlace

_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Reservation:
    """Places that are kept for a job from a time on."""

    job_id: str
    starts_at: float
    places: tuple[WorkerPlace, ...]


class Claims:
    """Reservations of GPUs by name. No GPU has two, so there are as many as there are GPUs at most."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._by_job: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_job)

    def __iter__(self) -> Iterator[str]:
        """The jobs, in the order in which they got them."""
        return iter(tuple(self._by_job))

    def get(self, job_id: str) -> Reservation | None:
        return self._by_job.get(job_id)

    def keep(self, claim: Reservation) -> None:
        """From now on nothing else goes there. Who had one of these GPUs before has it no longer."""
        self.drop_at(claim.places)
        self._by_job[claim.job_id] = claim
        self._book.keep(claim.places, is_kept=True)

    def drop(self, job_id: str) -> Reservation | None:
        claim = self._by_job.pop(job_id, None)
        if claim is not None:
            self._book.keep(claim.places, is_kept=False)
        return claim

    def drop_at(self, places: Iterable[WorkerPlace]) -> None:
        gpus = _gpus(places)
        for job_id, claim in tuple(self._by_job.items()):
            if gpus & _gpus(claim.places):
                self.drop(job_id)

    @contextmanager
    def lifted(self, job_ids: Iterable[str]) -> Iterator[None]:
        """These do not count meanwhile."""
        claims = [self._by_job[job_id] for job_id in job_ids]
        for claim in claims:
            self._book.keep(claim.places, is_kept=False)
        try:
            yield
        finally:
            for claim in claims:
                if self._by_job.get(claim.job_id) is claim:
                    self._book.keep(claim.places, is_kept=True)

    def text(self) -> str:
        """For whom something is kept."""
        return _few(self._by_job)

    def at(self, place: WorkerPlace) -> str:
        """For whom one of these GPUs is kept; empty when for nobody."""
        found = (job_id for job_id, claim in self._by_job.items() if _gpus([place]) & _gpus(claim.places))
        return next(found, "")


def in_the_way(book: Book, request: Request, claims: Claims | None = None) -> str:
    """Why the GPUs that it names are not free for it now, in words; empty when they are, or it names none."""
    shape = request.shape
    if not shape.gpu_ids or not (facts := book.facts(min(shape.nodes))):
        return ""
    reasons = [_why_not(book, request, facts.node_id, gpu, claims) for gpu in shape.gpu_ids]
    if reasons.count("") >= shape.gpus:
        return ""
    return next(reason for reason in reasons if reason)


def _why_not(book: Book, request: Request, node_id: str, gpu: int, claims: Claims | None) -> str:
    facts, gpus, shape = book.facts(node_id), book.free_on(node_id)[2], request.shape
    name = f"GPU {gpu} of {node_id}"
    if facts is None or gpu >= len(gpus):
        return f"there is no {name}"
    holders = book.holders(node_id, gpu)
    outside_mib = facts.memory_outside_mib[gpu] if facts.memory_outside_mib else 0
    free_milli, free_mib = gpus[gpu][0], max(gpus[gpu][1] - outside_mib, 0)
    names = _few(holder.job_id for holder in holders)
    if any(holder.tenant != request.tenant for holder in holders) or (holders and free_milli == 0):
        return f"{name} is held by {names}"
    if free_milli < shape.gpu_milli:
        return f"{name} has a share of {free_milli / FULL_MILLI:g} free, and {names} the rest"
    if free_mib < shape.gpu_memory_mib:
        return f"{name} has {free_mib} MiB free"
    first = claims.at(WorkerPlace(node_id, (gpu,))) if claims is not None else ""
    return f"{name} is kept for {first}" if first not in ("", request.job_id) else ""


def _gpus(places: Iterable[WorkerPlace]) -> set[tuple[str, int]]:
    return {(place.node_id, gpu) for place in places for gpu in place.gpu_ids}


def _few(names: Iterable[str]) -> str:
    several = list(names)
    more = ["others"] if len(several) > _NAMES_SHOWN else []
    return ", ".join(several[:_NAMES_SHOWN] + more)
