"""Reservations of GPUs for jobs that request them by number, and why such GPUs are busy.

Nothing else is placed on a reserved GPU. All other GPUs stay available, so such a job does not need the only
reservation of the scheduler. Does not decide which job gets a GPU (scheduling_pass.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.request import WHOLE_GPU_MILLI, JobRequest, WorkerPlace, format_memory

_NAMES_SHOWN_MAX = 3


@dataclass(frozen=True)
class Reservation:
    """Places that are reserved for a job, which can start there at `starts_at`."""

    job_id: str
    starts_at: float
    places: tuple[WorkerPlace, ...]


class GpuReservations:
    """No GPU has two reservations, so their number is bounded by that of the GPUs."""

    def __init__(self, cluster: ClusterAllocations) -> None:
        self._allocations = cluster
        self._reservations_by_job: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._reservations_by_job)

    def __iter__(self) -> Iterator[str]:
        """The jobs, in the order of their reservations."""
        return iter(tuple(self._reservations_by_job))

    def get(self, job_id: str) -> Reservation | None:
        return self._reservations_by_job.get(job_id)

    def add(self, reservation: Reservation) -> None:
        """Replaces other reservations of these GPUs."""
        self.drop_overlapping(reservation.places)
        self._reservations_by_job[reservation.job_id] = reservation
        self._allocations.set_gpus_reserved(reservation.places, is_reserved=True)

    def drop(self, job_id: str) -> Reservation | None:
        reservation = self._reservations_by_job.pop(job_id, None)
        if reservation is not None:
            self._allocations.set_gpus_reserved(reservation.places, is_reserved=False)
        return reservation

    def drop_overlapping(self, places: Iterable[WorkerPlace]) -> None:
        gpus = _gpus_of_places(places)
        for job_id, reservation in tuple(self._reservations_by_job.items()):
            if gpus & _gpus_of_places(reservation.places):
                self.drop(job_id)

    @contextmanager
    def suspend(self, job_ids: Iterable[str]) -> Iterator[None]:
        """Within the context, the reservations of these jobs do not apply."""
        suspended = [self._reservations_by_job[job_id] for job_id in job_ids]
        for reservation in suspended:
            self._allocations.set_gpus_reserved(reservation.places, is_reserved=False)
        try:
            yield
        finally:
            for reservation in suspended:
                if self._reservations_by_job.get(reservation.job_id) is reservation:
                    self._allocations.set_gpus_reserved(reservation.places, is_reserved=True)

    def format_holders(self) -> str:
        """The first few jobs that have reservations."""
        return _format_names(self._reservations_by_job)

    def job_reserving(self, place: WorkerPlace) -> str:
        """The job for which one of these GPUs is reserved; empty if there is none."""
        gpus = _gpus_of_places([place])
        return next(
            (job_id for job_id, it in self._reservations_by_job.items() if gpus & _gpus_of_places(it.places)),
            "",
        )


def why_requested_gpus_busy(
    cluster: ClusterAllocations, request: JobRequest, reservations: GpuReservations | None = None
) -> str:
    """Why the GPUs that the job requests by number are not free; empty if they are, or it requests none."""
    shape = request.shape
    if not shape.gpu_ids or not (facts := cluster.get_node_facts(min(shape.nodes))):
        return ""
    reasons = [_why_one_gpu_busy(cluster, request, facts.node_id, gpu, reservations) for gpu in shape.gpu_ids]
    if reasons.count("") >= shape.gpus:
        return ""
    return next(reason for reason in reasons if reason)


def _why_one_gpu_busy(
    cluster: ClusterAllocations,
    request: JobRequest,
    node_id: str,
    gpu: int,
    reservations: GpuReservations | None,
) -> str:
    facts, gpus, shape = (
        cluster.get_node_facts(node_id),
        cluster.free_resources_of_node(node_id)[2],
        request.shape,
    )
    name = f"GPU {gpu} of {node_id}"
    if facts is None or gpu >= len(gpus):
        return f"{name} does not exist"
    holders = cluster.jobs_on_gpu(node_id, gpu)
    outside_mib = facts.memory_used_outside_cluster_mib[gpu] if facts.memory_used_outside_cluster_mib else 0
    free_milli, free_mib = gpus[gpu][0], max(gpus[gpu][1] - outside_mib, 0)
    names = _format_names(holder.job_id for holder in holders)
    if any(holder.tenant != request.tenant for holder in holders) or (holders and free_milli == 0):
        return f"{name} is held by {names}"
    if free_milli < shape.gpu_milli:
        return f"{name} is {free_milli / WHOLE_GPU_MILLI:g} free, the rest is held by {names}"
    if free_mib < shape.gpu_memory_mib:
        return f"{name} has {format_memory(free_mib)} of memory free"
    holder = reservations.job_reserving(WorkerPlace(node_id, (gpu,))) if reservations is not None else ""
    return f"{name} is reserved for {holder}" if holder not in ("", request.job_id) else ""


def _gpus_of_places(places: Iterable[WorkerPlace]) -> set[tuple[str, int]]:
    return {(place.node_id, gpu) for place in places for gpu in place.gpu_ids}


def _format_names(names: Iterable[str]) -> str:
    listed = list(names)
    more = ["others"] if len(listed) > _NAMES_SHOWN_MAX else []
    return ", ".join(listed[:_NAMES_SHOWN_MAX] + more)
