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
from genie.scheduler.order import JobQueue, OrderInputs, QueueGroupKey
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import JobRequest
from genie.scheduler.rules import Rules

JOB_CLASSES_MAX = 10_000


@dataclass(slots=True)
class PendingJob:
    """Jobs of one job class get the same decisions except for what depends on their time limits."""

    request: JobRequest
    job_class_number: int
    last_decision: Wait
    """The last decision about it."""

    @property
    def queue_group_key(self) -> QueueGroupKey:
        return (self.job_class_number, self.request.priority)


class _JobClassNumbers:
    """Numbers job classes. At the limit it restarts; equal jobs may then have different numbers."""

    def __init__(self) -> None:
        self._numbers: dict[JobRequest, int] = {}
        self._next_number = itertools.count()

    def get_number(self, request: JobRequest) -> int:
        number = self._numbers.get(request.placement_fields)
        if number is None:
            if len(self._numbers) >= JOB_CLASSES_MAX:
                self._numbers.clear()
            number = self._numbers[request.placement_fields] = next(self._next_number)
        return number


class JobTable:
    """The state that Scheduler and SchedulingPass share. Its attributes are assigned here only."""

    def __init__(self, cluster: ClusterAllocations, rules: Rules) -> None:
        self.allocations = cluster
        self.rules = rules
        self.job_class_numbers = _JobClassNumbers()
        self.queued_jobs: dict[str, PendingJob] = {}
        self.queue = JobQueue(rules.order)
        """The queued jobs, in groups of one tenant, job class and priority."""
        self.new_arrivals: dict[str, PendingJob] = {}
        """Queued jobs that no pass has considered."""
        self.queued_affinity_job_count = 0
        """Number of queued jobs with `near` constraints."""
        self.running_jobs: dict[str, StartedJob] = {}
        self.reservation: Reservation | None = None
        self.gpu_reservations = GpuReservations(cluster)
        """GPUs reserved for jobs that request them by number."""
        self.migration_count_by_job: dict[str, int] = {}
        """How often each unfinished job has been moved."""
        self.needs_full_pass = True
        """Whether anything but arrivals changed since the last pass."""
        self.no_suitable_node_reason_by_job_class: dict[int, str] = {}
        """By job class: why no node is suitable, or empty. Valid while the nodes do not change."""
        self._seen_full_nodes_version = 0

    def order_inputs(self, now: float) -> OrderInputs:
        return OrderInputs(now, self.allocations.capacity, self.allocations.usage, self.rules.weights)

    def why_over_quota(self, request: JobRequest, workers: int = 0) -> str:
        """Why the tenant's quota prevents a start with `workers` (0: its minimum); empty if it does not."""
        if request.tenant not in self.rules.quotas.by_tenant:
            return ""
        usage, nonpreemptible = (
            self.allocations.usage(request.tenant),
            self.allocations.nonpreemptible_usage(request.tenant),
        )
        return self.rules.quotas.why_over_quota(
            request, workers or request.workers_required, usage=usage, nonpreemptible_usage=nonpreemptible
        )

    @property
    def reservation_holder(self) -> PendingJob | None:
        return None if self.reservation is None else self.queued_jobs[self.reservation.job_id]

    # -- changes --------------------------------------------------------------------------------

    def set_rules(self, rules: Rules) -> None:
        """Apply new rules: all reservations are dropped and all queued jobs are considered again."""
        self.rules = rules
        self.no_suitable_node_reason_by_job_class.clear()
        self.queue = JobQueue(rules.order)
        for job in self.queued_jobs.values():
            self.queue.add(job.request, job.queue_group_key)
        for job_id, running in self.running_jobs.items():
            if running.request.time_limit_s is None and not running.is_stopping:
                ends_at = running.started_at + rules.assumed_runtime_s
                self.running_jobs[job_id] = msgspec.structs.replace(running, ends_at=ends_at)
        self.reservation = None
        for job_id in self.gpu_reservations:
            self.gpu_reservations.drop(job_id)
        self.require_full_pass()

    def on_nodes_changed(self) -> None:
        self.no_suitable_node_reason_by_job_class.clear()
        self.require_full_pass()

    def require_full_pass(self) -> None:
        """Something other than arrivals has changed: the next pass considers all queued jobs."""
        self.needs_full_pass = True

    def begin_full_pass(self) -> None:
        self.needs_full_pass = False

    def take_arrivals(self) -> list[PendingJob]:
        """Return the arrivals; they count as considered."""
        arrivals = list(self.new_arrivals.values())
        self.new_arrivals.clear()
        return arrivals

    def enqueue(self, request: JobRequest) -> None:
        pending = Wait(request.job_id, "waiting for the next scheduling pass")
        job = PendingJob(request, self.job_class_numbers.get_number(request), pending)
        self.queued_jobs[request.job_id] = self.new_arrivals[request.job_id] = job
        self.queued_affinity_job_count += bool(request.near_job_names)
        self.queue.add(request, job.queue_group_key)

    def dequeue(self, job_id: str) -> None:
        if (job := self.queued_jobs.pop(job_id, None)) is not None:
            self.queued_affinity_job_count -= bool(job.request.near_job_names)
            self.queue.remove(job.request, job.queue_group_key)
        self.new_arrivals.pop(job_id, None)

    def add_running_job(self, request: JobRequest, started_at: float) -> None:
        """Add a job whose places are already allocated."""
        limit_s = request.time_limit_s
        ends_at = started_at + (self.rules.assumed_runtime_s if limit_s is None else limit_s)
        self.running_jobs[request.job_id] = StartedJob(
            self.allocations.allocations_by_job[request.job_id], started_at, ends_at
        )
        self.drop_reservation(request.job_id)

    def end_job(self, job_id: str, *, requeue: bool) -> None:
        """Release what a running job holds, and queue it again if `requeue`."""
        running = self.running_jobs.pop(job_id)
        self.allocations.release(job_id)
        self.require_full_pass()
        if requeue:
            self.enqueue(running.request)
        else:
            self.migration_count_by_job.pop(job_id, None)

    def set_reservation(self, reservation: Reservation) -> None:
        """Replace the only reservation that is not for GPUs by number."""
        self.reservation = reservation

    def pop_reservation(self) -> Reservation:
        """Drop the reservation and return it."""
        reservation, self.reservation = self.reservation, None
        assert reservation is not None
        return reservation

    def drop_reservation(self, job_id: str) -> None:
        if self.reservation is not None and self.reservation.job_id == job_id:
            self.reservation = None
        self.gpu_reservations.drop(job_id)

    def set_no_suitable_node_reason(self, job_class_number: int, reason: str) -> None:
        if len(self.no_suitable_node_reason_by_job_class) >= JOB_CLASSES_MAX:
            self.no_suitable_node_reason_by_job_class.clear()
        self.no_suitable_node_reason_by_job_class[job_class_number] = reason

    def drop_stale_no_suitable_node_reasons(self) -> None:
        """Forget reasons if a node has reached or left its limit of workers since they were found."""
        if self._seen_full_nodes_version != self.allocations.full_nodes_version:
            self._seen_full_nodes_version = self.allocations.full_nodes_version
            self.no_suitable_node_reason_by_job_class.clear()
