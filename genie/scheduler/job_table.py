"""The jobs of one scheduler between two passes: queued, running, and the reservations of queued jobs.

This is the state that events (scheduler.py) and scheduling passes (scheduling_pass.py) share and change.
Does not decide anything.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec

from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.decisions import Wait
from genie.scheduler.gpu_reservations import GpuReservations, Reservation
from genie.scheduler.order import GroupKey, JobQueue, Scales
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import JobRequest
from genie.scheduler.rules import Rules

KINDS_MAX = 10_000


@dataclass(slots=True)
class PendingJob:
    """Jobs of one kind get the same decisions except for what depends on their time limits."""

    request: JobRequest
    kind: int
    pending: Wait
    """The last decision about it."""

    @property
    def group(self) -> GroupKey:
        return (self.kind, self.request.priority)


class _KindNumbers:
    """Numbers kinds of jobs. At the limit it restarts; equal jobs may then have different numbers."""

    def __init__(self) -> None:
        self._numbers: dict[JobRequest, int] = {}
        self._next = itertools.count()

    def of(self, request: JobRequest) -> int:
        number = self._numbers.get(request.kind)
        if number is None:
            if len(self._numbers) >= KINDS_MAX:
                self._numbers.clear()
            number = self._numbers[request.kind] = next(self._next)
        return number


class JobTable:
    """The state that Scheduler and SchedulingPass share. Its attributes are assigned here only."""

    def __init__(self, cluster: ClusterAllocations, rules: Rules) -> None:
        self.cluster = cluster
        self.rules = rules
        self.kinds = _KindNumbers()
        self.queued: dict[str, PendingJob] = {}
        self.queue = JobQueue(rules.order)
        """The queued jobs, in groups of one kind and tenant."""
        self.arrivals: dict[str, PendingJob] = {}
        """Queued jobs that no pass has considered."""
        self.affinity_count = 0
        """Number of queued jobs with `near` constraints."""
        self.running: dict[str, StartedJob] = {}
        self.reservation: Reservation | None = None
        self.gpu_reservations = GpuReservations(cluster)
        """GPUs reserved for jobs that request them by number."""
        self.moves: dict[str, int] = {}
        """How often each unfinished job has been moved."""
        self.needs_full_pass = True
        """Whether anything but arrivals changed since the last pass."""
        self.unsuitable: dict[int, str] = {}
        """By kind: why no node is suitable, or empty. Valid while the nodes do not change."""
        self._full_nodes_version = 0

    def scales(self, now: float) -> Scales:
        return Scales(now, self.cluster.capacity, self.cluster.usage, self.rules.weights)

    def why_quota(self, request: JobRequest, workers: int = 0) -> str:
        """Why the tenant's quota prevents a start with `workers` (0: its minimum); empty if it does not."""
        if request.tenant not in self.rules.quotas.by_tenant:
            return ""
        usage, nonpreemptible = (
            self.cluster.usage(request.tenant),
            self.cluster.nonpreemptible_usage(request.tenant),
        )
        return self.rules.quotas.why_not(
            request, workers or request.least_workers, usage=usage, nonpreemptible=nonpreemptible
        )

    @property
    def reservation_holder(self) -> PendingJob | None:
        return None if self.reservation is None else self.queued[self.reservation.job_id]

    # -- changes --------------------------------------------------------------------------------

    def set_rules(self, rules: Rules) -> None:
        """Apply new rules: all reservations are dropped and all queued jobs are considered again."""
        self.rules = rules
        self.unsuitable.clear()
        self.queue = JobQueue(rules.order)
        for job in self.queued.values():
            self.queue.add(job.request, job.group)
        for job_id, running in self.running.items():
            if running.request.time_limit_s is None and not running.is_stopping:
                ends_at = running.started_at + rules.assumed_runtime_s
                self.running[job_id] = msgspec.structs.replace(running, ends_at=ends_at)
        self.reservation = None
        for job_id in self.gpu_reservations:
            self.gpu_reservations.drop(job_id)
        self.require_full_pass()

    def nodes_changed(self) -> None:
        self.unsuitable.clear()
        self.require_full_pass()

    def require_full_pass(self) -> None:
        """Something other than arrivals has changed: the next pass considers all queued jobs."""
        self.needs_full_pass = True

    def begin_full_pass(self) -> None:
        self.needs_full_pass = False

    def take_arrivals(self) -> list[PendingJob]:
        """Return the arrivals; they count as considered."""
        arrivals = list(self.arrivals.values())
        self.arrivals.clear()
        return arrivals

    def enqueue(self, request: JobRequest) -> None:
        pending = Wait(request.job_id, "waiting for the next scheduling pass")
        job = PendingJob(request, self.kinds.of(request), pending)
        self.queued[request.job_id] = self.arrivals[request.job_id] = job
        self.affinity_count += bool(request.near)
        self.queue.add(request, job.group)

    def dequeue(self, job_id: str) -> None:
        if (job := self.queued.pop(job_id, None)) is not None:
            self.affinity_count -= bool(job.request.near)
            self.queue.remove(job.request, job.group)
        self.arrivals.pop(job_id, None)

    def run(self, request: JobRequest, at: float) -> None:
        """Add a job whose places are already allocated."""
        limit_s = request.time_limit_s
        ends_at = at + (self.rules.assumed_runtime_s if limit_s is None else limit_s)
        self.running[request.job_id] = StartedJob(self.cluster.held[request.job_id], at, ends_at)
        self.drop_reservation(request.job_id)

    def end(self, job_id: str, *, requeue: bool) -> None:
        """Release what a running job holds, and queue it again if `requeue`."""
        running = self.running.pop(job_id)
        self.cluster.release(job_id)
        self.require_full_pass()
        if requeue:
            self.enqueue(running.request)
        else:
            self.moves.pop(job_id, None)

    def reserve(self, reservation: Reservation) -> None:
        """Replace the only reservation that is not for GPUs by number."""
        self.reservation = reservation

    def take_reservation(self) -> Reservation:
        """Drop the reservation and return it."""
        reservation, self.reservation = self.reservation, None
        assert reservation is not None
        return reservation

    def drop_reservation(self, job_id: str) -> None:
        if self.reservation is not None and self.reservation.job_id == job_id:
            self.reservation = None
        self.gpu_reservations.drop(job_id)

    def set_unsuitable(self, kind: int, reason: str) -> None:
        if len(self.unsuitable) >= KINDS_MAX:
            self.unsuitable.clear()
        self.unsuitable[kind] = reason

    def drop_stale_reasons(self) -> None:
        """Forget reasons if a node has reached or left its limit of workers since they were found."""
        if self._full_nodes_version != self.cluster.full_nodes_version:
            self._full_nodes_version = self.cluster.full_nodes_version
            self.unsuitable.clear()
