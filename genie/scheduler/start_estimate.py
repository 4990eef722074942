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
from genie.scheduler.order import GroupKey, JobQueue, Scales
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import FULL_MILLI, Allocation, Amounts, JobRequest, WorkerPlace
from genie.scheduler.scheduler import Scheduler

COST_MAX = 40_000
"""Maximum cost of an estimate, in placement attempts: some tenths of a second."""
_JOBS_PER_ATTEMPT = 2
_NODES_PER_ATTEMPT, _NODES_PER_PLAIN_ATTEMPT = 250, 4
"""Number of jobs or additional nodes to examine at about the cost of one placement attempt."""
_RUNNING_CHECKED_MAX = 500


@dataclass(frozen=True)
class StartEstimate:
    """`why` is what the time assumes, or why it is unknown; may be empty."""

    starts_at: float | None
    why: str = ""


def estimate_start(scheduler: Scheduler, request: JobRequest, now: float) -> StartEstimate:
    """Estimate the start of a queued job."""
    if scheduler.rules.quotas.why_never(request):
        return StartEstimate(None)
    with _without_gpu_reservations(scheduler), scheduler.allocations.dry_run() as trial:
        estimate = _QueueSimulation(scheduler, trial, now).find(request)
    if estimate.starts_at is not None:
        return estimate
    reservation = _reservation_of(scheduler, request)
    if reservation is None or not estimate.why:
        return estimate
    assumed_h = scheduler.rules.assumed_runtime_s / 3600
    why = f"{estimate.why}; jobs without a time limit are assumed to run for {assumed_h:g} hours"
    return StartEstimate(reservation.starts_at, why)


class _CostLimitError(Exception):
    """The estimate exceeds COST_MAX."""


@dataclass
class _Blocked:
    """The first job that does not fit, and its reservation."""

    request: JobRequest
    at: float
    places: tuple[WorkerPlace, ...]


class _QueueSimulation:
    def __init__(self, scheduler: Scheduler, trial: DryRun, now: float) -> None:
        self._scheduler = scheduler
        self._cluster = scheduler.allocations
        self._trial = trial
        self._now = now
        self._queue = JobQueue(scheduler.rules.order)
        self._groups: dict[str, GroupKey] = {}
        """By job."""
        self._fit_keys: dict[GroupKey, tuple[object, ...]] = {}
        """What determines whether jobs of a group fit."""
        for request, group in scheduler.queue_groups:
            self._queue.add(request, group)
            self._groups[request.job_id] = group
            if group not in self._fit_keys:
                self._fit_keys[group] = _fit_key(request, is_filtered=scheduler.rules.allowed is not None)
        self._jobs_with_limit: list[tuple[float, int, StartedJob]] = []
        """Running jobs with a known end; a heap by end."""
        self._jobs_without_limit: list[tuple[float, int, StartedJob]] = []
        """Running jobs without a time limit; a heap by assumed end."""
        for running in scheduler.running:
            self._run(running)
        self._usage: dict[str, Amounts] = {}
        self._nonpreemptible_usage: dict[str, Amounts] = {}
        self._blocked = self._reservation_holder()
        self._infeasible: set[GroupKey] = set()
        self._keys_without_room: set[tuple[object, ...]] = set()
        """Fit keys that do not fit at the current time."""
        self._delaying_groups: set[GroupKey] = set()
        """Groups that would delay the blocked job at the current time, unless they end before."""
        self._cost = 0.0
        nodes_per_attempt = (
            _NODES_PER_PLAIN_ATTEMPT if self._cluster.uses_python_placer else _NODES_PER_ATTEMPT
        )
        self._attempt_cost = 1 + len(self._cluster.nodes) / nodes_per_attempt

    def find(self, target: JobRequest) -> StartEstimate:
        last = ""
        try:
            while not self._run_pass(target):
                if not self._jobs_with_limit and not self._jobs_without_limit:
                    return StartEstimate(None)
                if not self._jobs_with_limit:
                    last = self._jobs_without_limit[0][2].request.job_id
                self._advance()
        except _CostLimitError:
            return StartEstimate(None, "too many jobs are ahead to estimate the start")
        if last:
            return StartEstimate(None, f"{last} has no time limit, and must end first")
        return StartEstimate(self._now)

    # -- one pass -----------------------------------------------------------------------------

    def _run_pass(self, target: JobRequest) -> bool:
        """Start what fits at the current time; True as soon as the target starts."""
        self._add_cost(1 + len(self._queue) / _JOBS_PER_ATTEMPT)
        self._keys_without_room.clear()
        self._delaying_groups.clear()
        scales = Scales(self._now, self._cluster.capacity, self._usage_of, self._scheduler.rules.weights)
        blocked = self._blocked
        if blocked is not None and self._try(blocked.request):
            self._blocked = None
            if blocked.request.job_id == target.job_id:
                return True
        for request in self._queue.iterate(scales, group_reason=self._group_reason, on_skip=lambda *_: None):
            is_blocked = self._blocked is not None and self._blocked.request is request
            if not is_blocked and self._try(request) and request.job_id == target.job_id:
                return True
        return False

    def _group_reason(self, tenant: str, group: GroupKey) -> str:
        is_full = self._fit_keys.get(group) in self._keys_without_room or group in self._infeasible
        return "not enough free resources" if is_full else ""

    def _try(self, request: JobRequest) -> bool:
        """Start the job if it fits within quota. The first job that does not fit becomes the blocked one."""
        quotas, tenant = self._scheduler.rules.quotas, request.tenant
        usage, nonpreemptible = self._usage_of(tenant), self._nonpreemptible_usage_of(tenant)
        self._add_cost(1 / _JOBS_PER_ATTEMPT)
        if quotas.why_not(request, request.least_workers, usage=usage, nonpreemptible=nonpreemptible):
            return False
        group, blocked = self._groups[request.job_id], self._blocked
        if blocked is not None and blocked.request is not request:
            return self._try_behind(request, group, blocked)
        if (places := self._place(request)) is not None:
            self._start(request, places)
            return True
        self._keys_without_room.add(self._fit_keys[group])
        if blocked is None and not request.shape.gpu_ids and not self._block(request):
            self._infeasible.add(group)
        return False

    def _try_behind(self, request: JobRequest, group: GroupKey, blocked: _Blocked) -> bool:
        limit_s = request.time_limit_s
        ends_before = limit_s is not None and self._now + limit_s <= blocked.at
        if not ends_before and group in self._delaying_groups:
            return False
        reserved = () if ends_before else {place.node_id for place in blocked.places}
        mark, places = self._trial.mark, self._place(request, avoiding=reserved)
        if places is None and not ends_before:
            places = self._place(request)
            if places is not None and self._may_delay(blocked):
                self._trial.undo(mark)
                self._delaying_groups.add(group)
                return False
        if places is None:
            self._keys_without_room.add(self._fit_keys[group])
            return False
        self._start(request, places)
        return True

    def _place(
        self, request: JobRequest, *, avoiding: Collection[str] = ()
    ) -> tuple[WorkerPlace, ...] | None:
        self._add_cost(self._attempt_cost)
        return self._trial.place(request, request.least_workers, avoiding=avoiding)

    def _start(self, request: JobRequest, places: tuple[WorkerPlace, ...]) -> None:
        self._queue.remove(request, self._groups[request.job_id])
        allocation = Allocation(request, places)
        limit_s = request.time_limit_s
        ends_at = self._now + (self._scheduler.rules.assumed_runtime_s if limit_s is None else limit_s)
        self._run(StartedJob(allocation, self._now, ends_at))
        self._add_usage(request, allocation.amounts)

    def _advance(self) -> None:
        """Advance the time to the next end of a job. Jobs without a time limit end last, one at a time."""
        ends = self._jobs_with_limit or self._jobs_without_limit
        at = ends[0][0]
        self._now = max(self._now, at)
        while ends and ends[0][0] == at:
            _, _, running = heapq.heappop(ends)
            self._trial.release(running.allocation)
            self._add_usage(running.request, running.allocation.amounts.times(-1))
            if ends is self._jobs_without_limit:
                return

    # -- the blocked job ----------------------------------------------------------------------

    def _reservation_holder(self) -> _Blocked | None:
        reservation = self._scheduler.reservation
        if reservation is None or not all(map(self._cluster.is_open, reservation.places)):
            return None
        queued = {request.job_id: request for request, _ in self._scheduler.queue_groups}
        request = queued.get(reservation.job_id)
        return None if request is None else _Blocked(request, reservation.starts_at, reservation.places)

    def _block(self, request: JobRequest) -> bool:
        """Reserve the places that are free first; False if it does not fit even after all jobs end."""
        ends = [running for _, _, running in sorted([*self._jobs_with_limit, *self._jobs_without_limit])]
        mark = self._trial.mark
        count = self._trial.fewest_releases(request, [running.allocation for running in ends])
        self._add_cost(2 * len(ends) if count is None else 4 * count)
        if count is not None:
            places = self._trial.place(request, request.least_workers)
            assert places is not None
            at = ends[count - 1].ends_at if count else self._now
            self._blocked = _Blocked(request, max(at, self._now), places)
        self._trial.undo(mark)
        return count is not None

    def _may_delay(self, blocked: _Blocked) -> bool:
        """Whether the last placement conflicts with the reservation. Assumed, not checked, if many jobs run:
        then other nodes are enough."""
        running_jobs = [running for _, _, running in [*self._jobs_with_limit, *self._jobs_without_limit]]
        if len(running_jobs) > _RUNNING_CHECKED_MAX:
            return True
        self._add_cost(len(running_jobs))
        mark = self._trial.mark
        for running in running_jobs:
            if running.ends_at <= blocked.at:
                self._trial.release(running.allocation)
        is_free = self._trial.hold(blocked.request, blocked.places)
        self._trial.undo(mark)
        return not is_free

    # -- accounting ---------------------------------------------------------------------------

    def _run(self, running: StartedJob) -> None:
        has_end = running.is_stopping or running.request.time_limit_s is not None
        entry = (running.ends_at, running.request.sequence, running)
        heapq.heappush(self._jobs_with_limit if has_end else self._jobs_without_limit, entry)

    def _add_cost(self, attempts: float) -> None:
        self._cost += attempts
        if self._cost > COST_MAX:
            raise _CostLimitError

    def _usage_of(self, tenant: str) -> Amounts:
        return self._usage.get(tenant) or self._cluster.usage(tenant)

    def _nonpreemptible_usage_of(self, tenant: str) -> Amounts:
        return self._nonpreemptible_usage.get(tenant) or self._cluster.nonpreemptible_usage(tenant)

    def _add_usage(self, request: JobRequest, more: Amounts) -> None:
        self._usage[request.tenant] = self._usage_of(request.tenant) + more
        if not request.preemptible:
            self._nonpreemptible_usage[request.tenant] = self._nonpreemptible_usage_of(request.tenant) + more


def _fit_key(request: JobRequest, *, is_filtered: bool) -> tuple[object, ...]:
    """Jobs with equal keys fit alike. Tenants matter only for fractions of GPUs, names and filters."""
    shape = request.shape
    by_tenant = is_filtered or request.near or request.apart or (shape.gpus and shape.gpu_milli < FULL_MILLI)
    tenant = request.tenant if by_tenant else ""
    return (
        shape, tenant, request.least_workers, request.within, request.spread, request.near, request.apart,
    )  # fmt: skip


@contextmanager
def _without_gpu_reservations(scheduler: Scheduler) -> Iterator[None]:
    """The simulation considers all jobs in order instead."""
    with scheduler.gpu_reservations.suspended(tuple(scheduler.gpu_reservations)):
        yield


def _reservation_of(scheduler: Scheduler, request: JobRequest) -> Reservation | None:
    reservation = scheduler.reservation
    if reservation is not None and reservation.job_id == request.job_id:
        return reservation
    return scheduler.gpu_reservations.get(request.job_id)
