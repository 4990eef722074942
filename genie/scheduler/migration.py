"""Room by moving: work that can be interrupted goes elsewhere, so that what is free lies together.

Nobody loses his place for good: a plan is made only when all who move fit elsewhere and the job that waits
fits where they were. So a plan always ends with one more job running. Not for: sending work away for good
(victims.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from genie.model.job import Within
from genie.scheduler.book import Book
from genie.scheduler.request import Request, WorkerPlace
from genie.scheduler.victims import Running

NODES_TRIED_MAX = 16


@dataclass(frozen=True)
class Migration:
    """These jobs go, and fit elsewhere; then the one that waits fits at these places."""

    moves: tuple[str, ...]
    places: tuple[WorkerPlace, ...]


def plan(request: Request, running: Iterable[Running], *, book: Book) -> Migration | None:
    """For a job that goes on one node: the moves of the least GPU share, of the nodes that were tried."""
    if request.least_workers > 1 and request.within is not Within.NODE:
        return None
    movable: dict[str, list[Running]] = {}
    for each in running:
        nodes = {place.node_id for place in each.held.places}
        if each.request.preemptible and not each.is_leaving and len(nodes) == 1:
            movable.setdefault(nodes.pop(), []).append(each)
    free = {facts.node_id: facts for facts in book.nodes if not book.why_not(request, facts)}
    tried = sorted(
        (node_id for node_id in movable if node_id in free), key=lambda name: (_load(movable[name]), name)
    )
    plans = (_cleared(request, node_id, movable[node_id], book) for node_id in tried[:NODES_TRIED_MAX])
    found = [each for each in plans if each is not None]
    return min(found, key=lambda each: (each[0], each[1].places), default=(0, None))[1]


def _load(several: Iterable[Running]) -> int:
    return sum(each.held.amounts.gpu_milli for each in several)


def _cleared(
    request: Request, node_id: str, several: list[Running], book: Book
) -> tuple[int, Migration] | None:
    """What it takes on this node, with the GPU share that moves."""
    here = msgspec.structs.replace(request, shape=replace(request.shape, nodes=frozenset({node_id})))
    gone: list[Running] = []
    with book.supposing() as then:
        for each in sorted(several, key=lambda each: (each.held.amounts.gpu_milli, each.request.sequence)):
            then.release(each.held)
            gone.append(each)
            places = then.place(here, here.least_workers)
            if places is None:
                continue
            if any(then.place(each.request, len(each.held.places)) is None for each in gone):
                return None
            moves = tuple(each.request.job_id for each in gone)
            return _load(gone), Migration(moves, places)
    return None
