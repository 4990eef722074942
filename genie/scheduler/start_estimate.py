"""Estimates when a queued job starts if no job arrives and all run to their time limits.

Simulates a scheduling pass at each end of a job: in order, the first job that does not fit gets a
reservation, and jobs behind it are backfilled. The end of a job without a time limit is unknown; if one must
end first, the estimate is a reason instead of a time. Preemption is not simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genie.scheduler.cluster.dry_run import DryRun
from genie.scheduler.gpu_reservations import Reservation
from genie.scheduler.order import JobQueue, OrderInputs, QueueGroupKey
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import WHOLE_GPU_MILLI, Allocation, Amounts, JobRequest, WorkerPlace
from genie.scheduler.scheduler import Scheduler

ESTIMATE_COST_IN_ATTEMPTS_MAX = 40_000
"""Maximum cost of an estimate, in placement attempts: some tenths of a second."""
_QUEUED_JOBS_PER_ATTEMPT = 2
_NODES_PER_ATTEMPT, _NODES_PER_PYTHON_ATTEMPT = 250, 4
"""Number of jobs or additional nodes to examine at about the cost of one placement attempt."""
_RUNNING_JOBS_CHECKED_MAX = 500


@dataclass(frozen=True)
class StartEstimate:
    """`note` is what the time assumes, or why it is unknown; may be empty."""

    starts_at: float | None
    note: str = ""


def estimate_start(scheduler: Scheduler, request: JobRequest, now: float) -> StartEstimate:
    """Estimate the start of a queued job."""
    if scheduler.rules.quotas.why_never_within_quota(request):
        return StartEstimate(None)
    with _without_gpu_reservations(scheduler), scheduler.allocations.dry_run() as trial:
        estimate = _QueueSimulation(scheduler, trial, now).estimate_start(request)
    if estimate.starts_at is not None:
        return estimate
    reservation = _reservation_of(scheduler, request)
    if reservation is None or not estimate.note:
        return estimate
    assumed_h = scheduler.rules.assumed_runtime_s / 3600
    why = f"{estimate.note}; jobs without a time limit are assumed to run for {assumed_h:g} hours"
    return StartEstimate(reservation.starts_at, why)


class _CostLimitError(Exception):
    """The estimate exceeds ESTIMATE_COST_IN_ATTEMPTS_MAX."""


@dataclass
class _BlockedJob:
    """The first job that does not fit, and its reservation."""

    request: JobRequest
    starts_at: float
    places: tuple[WorkerPlace, ...]


class _QueueSimulation:
    def __init__(self, scheduler: Scheduler, dry_run: DryRun, now: float) -> None:
        self._scheduler = scheduler
        self._cluster = scheduler.allocations
        self._dry_run = dry_run
        self._now = now
        self._queue = JobQueue(scheduler.rules.order)
        self._group_by_job: dict[str, QueueGroupKey] = {}
        """By job."""
        self._fit_key_by_group: dict[QueueGroupKey, tuple[object, ...]] = {}
        """What determines whether jobs of a group fit."""
        for request, group in scheduler.requests_and_queue_groups:
            self._queue.add(request, group)
            self._group_by_job[request.job_id] = group
            if group not in self._fit_key_by_group:
                self._fit_key_by_group[group] = _fit_key(
                    request, has_node_filter=scheduler.rules.node_filter is not None
                )
        self._jobs_with_limit: list[tuple[float, int, StartedJob]] = []
        """Running jobs with a known end; a heap by end."""
        self._jobs_without_limit: list[tuple[float, int, StartedJob]] = []
        """Running jobs without a time limit; a heap by assumed end."""
        for running in scheduler.running_jobs:
            self._add_running_job(running)
        self._usage_by_tenant: dict[str, Amounts] = {}
        self._nonpreemptible_usage: dict[str, Amounts] = {}
        self._blocked_job = self._find_reservation_holder()
        self._never_fitting_groups: set[QueueGroupKey] = set()
        self._fit_keys_without_room: set[tuple[object, ...]] = set()
        """Fit keys that do not fit at the current time."""
        self._reservation_delaying_groups: set[QueueGroupKey] = set()
        """Groups that would delay the blocked job at the current time, unless they end before."""
        self._cost_in_attempts = 0.0
        nodes_per_attempt = (
            _NODES_PER_PYTHON_ATTEMPT if self._cluster.uses_python_placer else _NODES_PER_ATTEMPT
        )
        self._attempt_cost = 1 + len(self._cluster.nodes) / nodes_per_attempt

    def estimate_start(self, target: JobRequest) -> StartEstimate:
        last = ""
        try:
            while not self._run_pass_and_check_started(target):
                if not self._jobs_with_limit and not self._jobs_without_limit:
                    return StartEstimate(None)
                if not self._jobs_with_limit:
                    last = self._jobs_without_limit[0][2].request.job_id
                self._advance_to_next_end()
        except _CostLimitError:
            return StartEstimate(None, "too many jobs are ahead to estimate the start")
        if last:
            return StartEstimate(None, f"{last} has no time limit, and must end first")
        return StartEstimate(self._now)

    # -- one pass -----------------------------------------------------------------------------

    def _run_pass_and_check_started(self, target: JobRequest) -> bool:
        """Start what fits at the current time; True as soon as the target starts."""
        self._add_cost(1 + len(self._queue) / _QUEUED_JOBS_PER_ATTEMPT)
        self._fit_keys_without_room.clear()
        self._reservation_delaying_groups.clear()
        inputs = OrderInputs(self._now, self._cluster.capacity, self._usage_of, self._scheduler.rules.weights)
        blocked = self._blocked_job
        if blocked is not None and self._try_start(blocked.request):
            self._blocked_job = None
            if blocked.request.job_id == target.job_id:
                return True
        for request in self._queue.iterate(
            inputs, why_skip_queue_group=self._why_skip_queue_group, on_skip=lambda *_: None
        ):
            is_blocked = self._blocked_job is not None and self._blocked_job.request is request
            if not is_blocked and self._try_start(request) and request.job_id == target.job_id:
                return True
        return False

    def _why_skip_queue_group(self, tenant: str, group: QueueGroupKey) -> str:
        is_full = (
            self._fit_key_by_group.get(group) in self._fit_keys_without_room
            or group in self._never_fitting_groups
        )
        return "not enough free resources" if is_full else ""

    def _try_start(self, request: JobRequest) -> bool:
        """Start the job if it fits within quota. The first job that does not fit becomes the blocked one."""
        quotas, tenant = self._scheduler.rules.quotas, request.tenant
        usage, nonpreemptible = self._usage_of(tenant), self._nonpreemptible_usage_of(tenant)
        self._add_cost(1 / _QUEUED_JOBS_PER_ATTEMPT)
        if quotas.why_over_quota(
            request, request.workers_required, usage=usage, nonpreemptible_usage=nonpreemptible
        ):
            return False
        group, blocked = self._group_by_job[request.job_id], self._blocked_job
        if blocked is not None and blocked.request is not request:
            return self._try_backfill(request, group, blocked)
        if (places := self._place(request)) is not None:
            self._record_start(request, places)
            return True
        self._fit_keys_without_room.add(self._fit_key_by_group[group])
        if blocked is None and not request.shape.gpu_ids and not self._try_reserve_for_blocked_job(request):
            self._never_fitting_groups.add(group)
        return False

    def _try_backfill(self, request: JobRequest, group: QueueGroupKey, blocked: _BlockedJob) -> bool:
        limit_s = request.time_limit_s
        ends_before = limit_s is not None and self._now + limit_s <= blocked.starts_at
        if not ends_before and group in self._reservation_delaying_groups:
            return False
        reserved = () if ends_before else {place.node_id for place in blocked.places}
        mark, places = self._dry_run.savepoint, self._place(request, excluded_nodes=reserved)
        if places is None and not ends_before:
            places = self._place(request)
            if places is not None and self._may_delay_reservation(blocked):
                self._dry_run.roll_back_to(mark)
                self._reservation_delaying_groups.add(group)
                return False
        if places is None:
            self._fit_keys_without_room.add(self._fit_key_by_group[group])
            return False
        self._record_start(request, places)
        return True

    def _place(
        self, request: JobRequest, *, excluded_nodes: Collection[str] = ()
    ) -> tuple[WorkerPlace, ...] | None:
        self._add_cost(self._attempt_cost)
        return self._dry_run.place(request, request.workers_required, excluded_nodes=excluded_nodes)

    def _record_start(self, request: JobRequest, places: tuple[WorkerPlace, ...]) -> None:
        self._queue.remove(request, self._group_by_job[request.job_id])
        allocation = Allocation(request, places)
        limit_s = request.time_limit_s
        ends_at = self._now + (self._scheduler.rules.assumed_runtime_s if limit_s is None else limit_s)
        self._add_running_job(StartedJob(allocation, self._now, ends_at))
        self._add_usage(request, allocation.amounts)

    def _advance_to_next_end(self) -> None:
        """Advance the time to the next end of a job. Jobs without a time limit end last, one at a time."""
        ends = self._jobs_with_limit or self._jobs_without_limit
        at = ends[0][0]
        self._now = max(self._now, at)
        while ends and ends[0][0] == at:
            _, _, running = heapq.heappop(ends)
            self._dry_run.release(running.allocation)
            self._add_usage(running.request, running.allocation.amounts.multiplied_by(-1))
            if ends is self._jobs_without_limit:
                return

    # -- the blocked job ----------------------------------------------------------------------

    def _find_reservation_holder(self) -> _BlockedJob | None:
        reservation = self._scheduler.reservation
        if reservation is None or not all(map(self._cluster.accepts_placements, reservation.places)):
            return None
        queued = {request.job_id: request for request, _ in self._scheduler.requests_and_queue_groups}
        request = queued.get(reservation.job_id)
        return None if request is None else _BlockedJob(request, reservation.starts_at, reservation.places)

    def _try_reserve_for_blocked_job(self, request: JobRequest) -> bool:
        """Reserve the places that are free first; False if it does not fit even after all jobs end."""
        ends = [running for _, _, running in sorted([*self._jobs_with_limit, *self._jobs_without_limit])]
        mark = self._dry_run.savepoint
        count = self._dry_run.fewest_releases_to_fit(request, [running.allocation for running in ends])
        self._add_cost(2 * len(ends) if count is None else 4 * count)
        if count is not None:
            places = self._dry_run.place(request, request.workers_required)
            assert places is not None
            at = ends[count - 1].ends_at if count else self._now
            self._blocked_job = _BlockedJob(request, max(at, self._now), places)
        self._dry_run.roll_back_to(mark)
        return count is not None

    def _may_delay_reservation(self, blocked: _BlockedJob) -> bool:
        """Whether the last placement conflicts with the reservation. Assumed, not checked, if many jobs run:
        then other nodes are enough."""
        running_jobs = [running for _, _, running in [*self._jobs_with_limit, *self._jobs_without_limit]]
        if len(running_jobs) > _RUNNING_JOBS_CHECKED_MAX:
            return True
        self._add_cost(len(running_jobs))
        mark = self._dry_run.savepoint
        for running in running_jobs:
            if running.ends_at <= blocked.starts_at:
                self._dry_run.release(running.allocation)
        is_free = self._dry_run.try_hold(blocked.request, blocked.places)
        self._dry_run.roll_back_to(mark)
        return not is_free

    # -- accounting ---------------------------------------------------------------------------

    def _add_running_job(self, running: StartedJob) -> None:
        has_end = running.is_stopping or running.request.time_limit_s is not None
        entry = (running.ends_at, running.request.sequence, running)
        heapq.heappush(self._jobs_with_limit if has_end else self._jobs_without_limit, entry)

    def _add_cost(self, attempts: float) -> None:
        self._cost_in_attempts += attempts
        if self._cost_in_attempts > ESTIMATE_COST_IN_ATTEMPTS_MAX:
            raise _CostLimitError

    def _usage_of(self, tenant: str) -> Amounts:
        return self._usage_by_tenant.get(tenant) or self._cluster.usage(tenant)

    def _nonpreemptible_usage_of(self, tenant: str) -> Amounts:
        return self._nonpreemptible_usage.get(tenant) or self._cluster.nonpreemptible_usage(tenant)

    def _add_usage(self, request: JobRequest, change: Amounts) -> None:
        self._usage_by_tenant[request.tenant] = self._usage_of(request.tenant) + change
        if not request.preemptible:
            self._nonpreemptible_usage[request.tenant] = (
                self._nonpreemptible_usage_of(request.tenant) + change
            )


def _fit_key(request: JobRequest, *, has_node_filter: bool) -> tuple[object, ...]:
    """Jobs with equal keys fit alike. Tenants matter only for fractions of GPUs, names and filters."""
    shape = request.shape
    by_tenant = (
        has_node_filter
        or request.near_job_names
        or request.apart_job_names
        or (shape.gpus and shape.gpu_milli < WHOLE_GPU_MILLI)
    )
    tenant = request.tenant if by_tenant else ""
    return (
        shape, tenant, request.workers_required, request.within, request.spread,
        request.near_job_names, request.apart_job_names,
    )  # fmt: skip


@contextmanager
def _without_gpu_reservations(scheduler: Scheduler) -> Iterator[None]:
    """The simulation considers all jobs in order instead."""
    with scheduler.gpu_reservations.suspend(tuple(scheduler.gpu_reservations)):
        yield


def _reservation_of(scheduler: Scheduler, request: JobRequest) -> Reservation | None:
    reservation = scheduler.reservation
    if reservation is not None and reservation.job_id == request.job_id:
        return reservation
    return scheduler.gpu_reservations.get(request.job_id)
