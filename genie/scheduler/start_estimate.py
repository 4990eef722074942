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

ESTIMATE_COST_IN_PLACEMENTS_MAX = 40_000
"""Maximum cost of an estimate, in placement attempts: some tenths of a second."""
_QUEUED_JOBS_COSTING_ONE_PLACEMENT = 2
_NODES_COSTING_ONE_PLACEMENT, _NODES_COSTING_ONE_PYTHON_PLACEMENT = 250, 4
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
    with _suspend_gpu_reservations(scheduler), scheduler.allocations.dry_run() as trial:
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
    """The estimate exceeds ESTIMATE_COST_IN_PLACEMENTS_MAX."""


@dataclass
class _ReservationHolder:
    """The first job that does not fit, and its reservation."""

    request: JobRequest
    starts_at: float
    places: tuple[WorkerPlace, ...]


class _QueueSimulation:
    def __init__(self, scheduler: Scheduler, dry_run: DryRun, now: float) -> None:
        self._scheduler = scheduler
        self._allocations = scheduler.allocations
        self._dry_run = dry_run
        self._simulated_now = now
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
        self._jobs_with_known_end: list[tuple[float, int, StartedJob]] = []
        """Running jobs with a known end; a heap by end."""
        self._jobs_with_unknown_end: list[tuple[float, int, StartedJob]] = []
        """Running jobs without a time limit; a heap by assumed end."""
        for running in scheduler.running_jobs:
            self._add_running_job(running)
        self._usage_by_tenant: dict[str, Amounts] = {}
        self._nonpreemptible_usage_by_tenant: dict[str, Amounts] = {}
        self._reservation_holder = self._find_current_reservation_holder()
        self._never_fitting_groups: set[QueueGroupKey] = set()
        self._fit_keys_without_room: set[tuple[object, ...]] = set()
        """Fit keys that do not fit at the current time."""
        self._reservation_delaying_groups: set[QueueGroupKey] = set()
        """Groups that would delay the reservation at the current time, unless they end before."""
        self._cost_in_placements = 0.0
        nodes_costing_one_placement = (
            _NODES_COSTING_ONE_PYTHON_PLACEMENT
            if self._allocations.uses_python_placer
            else _NODES_COSTING_ONE_PLACEMENT
        )
        self._placement_cost = 1 + len(self._allocations.nodes) / nodes_costing_one_placement

    def estimate_start(self, target: JobRequest) -> StartEstimate:
        last = ""
        try:
            while not self._run_pass_and_check_started(target):
                if not self._jobs_with_known_end and not self._jobs_with_unknown_end:
                    return StartEstimate(None)
                if not self._jobs_with_known_end:
                    last = self._jobs_with_unknown_end[0][2].request.job_id
                self._advance_to_next_end()
        except _CostLimitError:
            return StartEstimate(None, "too many jobs are ahead to estimate the start")
        if last:
            return StartEstimate(None, f"{last} has no time limit, and must end first")
        return StartEstimate(self._simulated_now)

    # -- one pass -----------------------------------------------------------------------------

    def _run_pass_and_check_started(self, target: JobRequest) -> bool:
        """Start what fits at the current time; True as soon as the target starts."""
        self._add_estimate_cost(1 + len(self._queue) / _QUEUED_JOBS_COSTING_ONE_PLACEMENT)
        self._fit_keys_without_room.clear()
        self._reservation_delaying_groups.clear()
        inputs = OrderInputs(
            self._simulated_now, self._allocations.capacity, self._usage_of, self._scheduler.rules.weights
        )
        blocked = self._reservation_holder
        if blocked is not None and self._try_start(blocked.request):
            self._reservation_holder = None
            if blocked.request.job_id == target.job_id:
                return True
        for request in self._queue.iterate(
            inputs, why_skip_queue_group=self._why_skip_queue_group, on_skip=lambda *_: None
        ):
            is_blocked = self._reservation_holder is not None and self._reservation_holder.request is request
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
        """Start the job if it fits within quota. The first job that does not fit gets the reservation."""
        quotas, tenant = self._scheduler.rules.quotas, request.tenant
        usage, nonpreemptible = self._usage_of(tenant), self._nonpreemptible_usage_of(tenant)
        self._add_estimate_cost(1 / _QUEUED_JOBS_COSTING_ONE_PLACEMENT)
        if quotas.why_over_quota(
            request, request.workers_required, usage=usage, nonpreemptible_usage=nonpreemptible
        ):
            return False
        group, blocked = self._group_by_job[request.job_id], self._reservation_holder
        if blocked is not None and blocked.request is not request:
            return self._try_backfill(request, group, blocked)
        if (places := self._place_in_dry_run(request)) is not None:
            self._record_start(request, places)
            return True
        self._fit_keys_without_room.add(self._fit_key_by_group[group])
        if blocked is None and not request.shape.gpu_ids and not self._try_reserve_earliest_places(request):
            self._never_fitting_groups.add(group)
        return False

    def _try_backfill(self, request: JobRequest, group: QueueGroupKey, blocked: _ReservationHolder) -> bool:
        limit_s = request.time_limit_s
        ends_before = limit_s is not None and self._simulated_now + limit_s <= blocked.starts_at
        if not ends_before and group in self._reservation_delaying_groups:
            return False
        reserved = () if ends_before else {place.node_id for place in blocked.places}
        mark, places = self._dry_run.savepoint, self._place_in_dry_run(request, excluded_nodes=reserved)
        if places is None and not ends_before:
            places = self._place_in_dry_run(request)
            if places is not None and self._may_placement_delay_reservation(blocked):
                self._dry_run.roll_back_to(mark)
                self._reservation_delaying_groups.add(group)
                return False
        if places is None:
            self._fit_keys_without_room.add(self._fit_key_by_group[group])
            return False
        self._record_start(request, places)
        return True

    def _place_in_dry_run(
        self, request: JobRequest, *, excluded_nodes: Collection[str] = ()
    ) -> tuple[WorkerPlace, ...] | None:
        self._add_estimate_cost(self._placement_cost)
        return self._dry_run.place(request, request.workers_required, excluded_nodes=excluded_nodes)

    def _record_start(self, request: JobRequest, places: tuple[WorkerPlace, ...]) -> None:
        self._queue.remove(request, self._group_by_job[request.job_id])
        allocation = Allocation(request, places)
        limit_s = request.time_limit_s
        ends_at = self._simulated_now + (
            self._scheduler.rules.assumed_runtime_s if limit_s is None else limit_s
        )
        self._add_running_job(StartedJob(allocation, self._simulated_now, ends_at))
        self._add_usage(request, allocation.amounts)

    def _advance_to_next_end(self) -> None:
        """Advance the time to the next end of a job. Jobs without a time limit end last, one at a time."""
        ends = self._jobs_with_known_end or self._jobs_with_unknown_end
        at = ends[0][0]
        self._simulated_now = max(self._simulated_now, at)
        while ends and ends[0][0] == at:
            _, _, running = heapq.heappop(ends)
            self._dry_run.release(running.allocation)
            self._add_usage(running.request, running.allocation.amounts.multiplied_by(-1))
            if ends is self._jobs_with_unknown_end:
                return

    # -- the reservation ----------------------------------------------------------------------

    def _find_current_reservation_holder(self) -> _ReservationHolder | None:
        reservation = self._scheduler.reservation
        if reservation is None or not all(map(self._allocations.accepts_placements, reservation.places)):
            return None
        queued = {request.job_id: request for request, _ in self._scheduler.requests_and_queue_groups}
        request = queued.get(reservation.job_id)
        return (
            None
            if request is None
            else _ReservationHolder(request, reservation.starts_at, reservation.places)
        )

    def _try_reserve_earliest_places(self, request: JobRequest) -> bool:
        """Reserve the places that are free first; False if it does not fit even after all jobs end."""
        ends = [
            running for _, _, running in sorted([*self._jobs_with_known_end, *self._jobs_with_unknown_end])
        ]
        mark = self._dry_run.savepoint
        count = self._dry_run.fewest_releases_to_fit(request, [running.allocation for running in ends])
        self._add_estimate_cost(2 * len(ends) if count is None else 4 * count)
        if count is not None:
            places = self._dry_run.place(request, request.workers_required)
            assert places is not None
            at = ends[count - 1].ends_at if count else self._simulated_now
            self._reservation_holder = _ReservationHolder(request, max(at, self._simulated_now), places)
        self._dry_run.roll_back_to(mark)
        return count is not None

    def _may_placement_delay_reservation(self, blocked: _ReservationHolder) -> bool:
        """Whether the last placement conflicts with the reservation. Assumed, not checked, if many jobs run:
        then other nodes are enough."""
        running_jobs = [
            running for _, _, running in [*self._jobs_with_known_end, *self._jobs_with_unknown_end]
        ]
        if len(running_jobs) > _RUNNING_JOBS_CHECKED_MAX:
            return True
        self._add_estimate_cost(len(running_jobs))
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
        heapq.heappush(self._jobs_with_known_end if has_end else self._jobs_with_unknown_end, entry)

    def _add_estimate_cost(self, attempts: float) -> None:
        self._cost_in_placements += attempts
        if self._cost_in_placements > ESTIMATE_COST_IN_PLACEMENTS_MAX:
            raise _CostLimitError

    def _usage_of(self, tenant: str) -> Amounts:
        return self._usage_by_tenant.get(tenant) or self._allocations.usage(tenant)

    def _nonpreemptible_usage_of(self, tenant: str) -> Amounts:
        return self._nonpreemptible_usage_by_tenant.get(tenant) or self._allocations.nonpreemptible_usage(
            tenant
        )

    def _add_usage(self, request: JobRequest, change: Amounts) -> None:
        self._usage_by_tenant[request.tenant] = self._usage_of(request.tenant) + change
        if not request.preemptible:
            self._nonpreemptible_usage_by_tenant[request.tenant] = (
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
def _suspend_gpu_reservations(scheduler: Scheduler) -> Iterator[None]:
    """The simulation considers all jobs in order instead."""
    with scheduler.gpu_reservations.suspend(tuple(scheduler.gpu_reservations)):
        yield


def _reservation_of(scheduler: Scheduler, request: JobRequest) -> Reservation | None:
    reservation = scheduler.reservation
    if reservation is not None and reservation.job_id == request.job_id:
        return reservation
    return scheduler.gpu_reservations.get(request.job_id)
