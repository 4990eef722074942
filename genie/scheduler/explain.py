"""Explains why a job is pending: what each node lacks for it, and when it is expected to start.

Computed on request, not in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genie.model.job import Within
from genie.scheduler.gpu_reservations import why_requested_gpus_busy
from genie.scheduler.order import JobQueue
from genie.scheduler.request import WHOLE_GPU_MILLI, JobRequest, NodeFacts, format_memory
from genie.scheduler.scheduler import Scheduler
from genie.scheduler.start_estimate import estimate_start


@dataclass(frozen=True)
class BlockedNodes:
    """Nodes that are blocked for the job for one reason. `is_permanent`: even if they were free."""

    reason: str
    nodes: tuple[str, ...]
    is_permanent: bool


@dataclass(frozen=True)
class PendingJobExplanation:
    job_id: str
    reason: str
    """Of the last decision."""
    starts_at: float | None
    """Expected start if no job arrives and all run to their time limits; None if unknown."""
    jobs_ahead: int
    """Number of jobs ahead of it in the queue."""
    blocked_nodes: tuple[BlockedNodes, ...]
    starts_at_note: str = ""
    """What `starts_at` assumes besides time limits, or why it is unknown; may be empty."""


def explain_pending_job(
    scheduler: Scheduler, job_id: str, *, reason: str, now: float
) -> PendingJobExplanation:
    """Explain a queued job; KeyError if it is not queued. `reason` is that of its last Wait."""
    request = next((each for each in scheduler.queued_requests if each.job_id == job_id), None)
    if request is None:
        raise KeyError(job_id)
    queue = queued_jobs_in_order(scheduler, now)
    estimate = estimate_start(scheduler, request, now)
    return PendingJobExplanation(
        job_id=job_id,
        reason=reason,
        starts_at=estimate.starts_at,
        jobs_ahead=queue.index(request),
        blocked_nodes=_blocked_nodes(scheduler, request),
        starts_at_note=estimate.note,
    )


def queued_jobs_in_order(scheduler: Scheduler, now: float) -> list[JobRequest]:
    """Return the queued jobs in the order of a pass in which none starts; those with reservations first."""
    queue = JobQueue(scheduler.rules.order)
    for request in scheduler.queued_requests:
        queue.add(request, (0, 0))
    ordered = queue.iterate(
        scheduler.order_inputs(now), why_skip_queue_group=lambda *_: "", on_skip=lambda *_: None
    )
    reservation, with_gpus = scheduler.reservation, set(scheduler.gpu_reservations)
    holder = "" if reservation is None else reservation.job_id
    return sorted(ordered, key=lambda each: (each.job_id != holder, each.job_id not in with_gpus))


def _blocked_nodes(scheduler: Scheduler, request: JobRequest) -> tuple[BlockedNodes, ...]:
    blocked: dict[tuple[str, bool], list[str]] = {}
    for facts in scheduler.allocations.nodes:
        if facts.has_left and not scheduler.allocations.is_suitable_if_open(request, facts):
            continue
        if why := scheduler.allocations.why_unsuitable(request, facts):
            blocked.setdefault((why, True), []).append(facts.node_id)
        elif why := _why_blocked_now(scheduler, request, facts):
            blocked.setdefault((why, False), []).append(facts.node_id)
    groups = (
        BlockedNodes(why, tuple(sorted(nodes)), permanent) for (why, permanent), nodes in blocked.items()
    )
    return tuple(sorted(groups, key=lambda each: (each.is_permanent, -len(each.nodes), each.reason)))


def _why_blocked_now(scheduler: Scheduler, request: JobRequest, facts: NodeFacts) -> str:
    """Why one worker does not fit now, or all of them if they must be on one node; empty if it fits."""
    cluster = scheduler.allocations
    if why := cluster.why_node_full(facts) or why_requested_gpus_busy(
        cluster, request, scheduler.gpu_reservations
    ):
        return why
    if why := cluster.why_node_violates_affinity(request, facts):
        return why
    workers = request.workers_required if request.within in (Within.NODE, Within.ISLAND) else 1
    shape = request.shape.multiplied_by(workers)
    cpu_milli, memory_mib, gpus = cluster.free_resources_of_node(facts.node_id)
    if shape.cpu_milli > cpu_milli:
        return f"{cpu_milli / 1000:g} of {facts.cpu_milli / 1000:g} CPUs are free"
    if shape.memory_mib > memory_mib:
        return f"{format_memory(memory_mib)} of {format_memory(facts.memory_mib)} of memory are free"
    if not shape.gpus or shape.gpu_ids:
        return ""
    closed = facts.blocked_gpus | cluster.reserved_gpus(facts.node_id)
    free = [(0, 0) if gpu in closed else amounts for gpu, amounts in enumerate(gpus)]
    return _why_too_few_free_gpus(shape.gpus, shape.gpu_milli, shape.gpu_memory_mib, free)


def _why_too_few_free_gpus(count: int, milli: int, memory_mib: int, free: Sequence[tuple[int, int]]) -> str:
    """`free` is the free fraction and memory of each GPU."""
    with_fraction = [gpu_milli for gpu_milli, _ in free if gpu_milli >= milli]
    if len(with_fraction) < count:
        what = (
            "GPUs are free"
            if milli == WHOLE_GPU_MILLI
            else f"GPUs have a fraction of {milli / WHOLE_GPU_MILLI:g} free"
        )
        return f"{len(with_fraction)} of {len(free)} {what}"
    with_both = [gpu_milli for gpu_milli, mib in free if gpu_milli >= milli and mib >= memory_mib]
    if len(with_both) < count:
        return f"{len(with_both)} of {len(free)} GPUs have {format_memory(memory_mib)} of memory free"
    return ""
