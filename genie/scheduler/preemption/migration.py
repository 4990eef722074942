"""Defragmentation: moves preemptible jobs to other nodes so that a queued job fits on one node.

A plan is made only if all moved jobs fit elsewhere and the queued job fits in their place, so every plan ends
with one more job running. Does not stop jobs without a new place (victims.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from genie.model.job import Within
from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import JobRequest, WorkerPlace

MIGRATION_NODES_TRIED_MAX = 16


@dataclass(frozen=True)
class Migration:
    """After these jobs move, the queued one fits at these places."""

    moved_job_ids: tuple[str, ...]
    places: tuple[WorkerPlace, ...]


def plan_migration(
    request: JobRequest, running: Iterable[StartedJob], *, cluster: ClusterAllocations
) -> Migration | None:
    """For a job on one node: return the moves of the least GPU usage among the nodes tried."""
    if request.workers_required > 1 and request.within is not Within.NODE:
        return None
    movable: dict[str, list[StartedJob]] = {}
    for job in running:
        nodes = {place.node_id for place in job.allocation.places}
        if job.request.preemptible and not job.is_stopping and len(nodes) == 1:
            movable.setdefault(nodes.pop(), []).append(job)
    suitable = {facts.node_id for facts in cluster.nodes if not cluster.why_unsuitable(request, facts)}
    by_usage = sorted(
        (node_id for node_id in movable if node_id in suitable),
        key=lambda node_id: (_total_gpu_milli(movable[node_id]), node_id),
    )
    plans = (
        _plan_migration_on_node(request, node_id, movable[node_id], cluster)
        for node_id in by_usage[:MIGRATION_NODES_TRIED_MAX]
    )
    found = [each for each in plans if each is not None]
    return min(found, key=lambda each: (each[0], each[1].places), default=(0, None))[1]


def _total_gpu_milli(jobs: Iterable[StartedJob]) -> int:
    return sum(job.allocation.amounts.gpu_milli for job in jobs)


def _plan_migration_on_node(
    request: JobRequest, node_id: str, movable: list[StartedJob], cluster: ClusterAllocations
) -> tuple[int, Migration] | None:
    """Return a plan for this node with the GPU thousandths that move; None if there is none."""
    on_node = msgspec.structs.replace(request, shape=replace(request.shape, nodes=frozenset({node_id})))
    moved: list[StartedJob] = []
    with cluster.dry_run() as trial:
        for job in sorted(movable, key=lambda job: (job.allocation.amounts.gpu_milli, job.request.sequence)):
            trial.release(job.allocation)
            moved.append(job)
            places = trial.place(on_node, on_node.workers_required)
            if places is None:
                continue
            if any(trial.place(job.request, len(job.allocation.places)) is None for job in moved):
                return None
            moves = tuple(job.request.job_id for job in moved)
            return _total_gpu_milli(moved), Migration(moves, places)
    return None
