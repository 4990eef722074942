"""One scheduling pass: considers the queued jobs in order, and starts what fits.

For the first job that does not fit, others are preempted if that is allowed; otherwise it gets a reservation:
the places that become free first if all jobs run to their time limits. Jobs behind it start only if that does
not delay the reservation (EASY backfill). The reservation stays with its job until the job starts or is
withdrawn. A job that requests GPUs by number gets a reservation of those GPUs instead, and does not occupy
the only reservation (gpu_reservations.py).

If nothing was released since the last pass, only new arrivals are considered: for all others the result would
be the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec

from genie.errors import UsageError
from genie.scheduler.cluster.dry_run import FutureClusterState
from genie.scheduler.decisions import Decision, Preempt, Start, Wait
from genie.scheduler.feasibility import format_grouped_reasons
from genie.scheduler.gpu_reservations import Reservation, why_requested_gpus_busy
from genie.scheduler.job_table import JobTable, PendingJob
from genie.scheduler.order import JobQueue, QueueGroupKey
from genie.scheduler.preemption import migration, victims
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import JobRequest, NodeFacts, WorkerPlace

_NODES_SHOWN_MAX = 3


class SchedulingPass:
    def __init__(self, jobs: JobTable, now: float) -> None:
        self._job_table = jobs
        self._allocations = jobs.allocations
        self._rules = jobs.rules
        self._now = now
        self._decisions: list[Decision] = []
        self._changed_wait_by_job: dict[str, Wait] = {}
        """Changed pending reasons, by job."""
        self._why_never_fits_by_group: dict[QueueGroupKey, str] = {}
        """Why no job of the group could start even if others ended."""
        self._why_no_room_by_group: dict[QueueGroupKey, str] = {}
        """Why no job of the group can start now. Further starts do not change that."""
        self._why_delays_reservation_by_group: dict[QueueGroupKey, str] = {}
        """The same for jobs that would not end before the reservation starts."""
        self._groups_not_fitting_after_reclaim: set[QueueGroupKey] = set()
        """Groups for which preempting all jobs on borrowed quota is not enough."""
        self._is_projected_to_reservation = False
        """Whether the projection is at the start time of the reservation."""
        self._ignores_gpu_reservations = False
        jobs.drop_stale_no_suitable_node_reasons()

    def run(self) -> list[Decision]:
        jobs = self._job_table
        arrivals = jobs.take_arrivals()
        with self._allocations.project_future() as future:
            if not self._needs_full_pass:
                queue = JobQueue(self._rules.order)
                for job in arrivals:
                    queue.add(job.request, job.queue_group_key)
                self._consider_queued_jobs(queue, future)
            if self._needs_full_pass:
                jobs.begin_full_pass()
                considered = self._consider_reservations(future)
                self._consider_queued_jobs(jobs.queue, future, skip=considered)
        if self._decisions and jobs.queued_affinity_job_count:
            jobs.require_full_pass()
        waits = [wait for wait in self._changed_wait_by_job.values() if wait.job_id in jobs.queued_jobs]
        return [*self._decisions, *waits]

    def try_start(self, request: JobRequest, reason: str) -> Start | None:
        """Start the job with as many workers as its quota and the free resources allow."""
        least = request.workers_required
        counts = range(request.workers, least - 1, -1)
        workers = next((count for count in counts if self._may_start_workers(request, count)), 0)
        places = self._allocations.place(request, workers, workers_min=least) if workers else None
        return None if places is None else self._record_start(request, places, reason)

    @property
    def _needs_full_pass(self) -> bool:
        """Whether jobs that were considered before could get another decision."""
        reservation = self._job_table.reservation
        is_due = reservation is not None and reservation.starts_at <= self._now
        return self._job_table.needs_full_pass or is_due

    def _consider_reservations(self, future: FutureClusterState) -> set[str]:
        """Consider the jobs with reservations before all others, and return them."""
        gpu_reservations, holder = self._job_table.gpu_reservations, self._job_table.reservation_holder
        considered = {*gpu_reservations, *([holder.request.job_id] if holder is not None else [])}
        if holder is not None:
            self._start_or_renew_reservation(holder, future)
        for job_id in gpu_reservations:
            if gpu_reservations.drop(job_id) is not None:  # unless an earlier job replaced it
                self._start_or_renew_gpu_reservation(self._job_table.queued_jobs[job_id], future)
                if holder is not None and gpu_reservations.get(job_id) is None:
                    self._job_table.require_full_pass()  # the holder may use those GPUs
        return considered

    def _consider_queued_jobs(
        self, queue: JobQueue, future: FutureClusterState, *, skip: Collection[str] = ()
    ) -> None:
        queued = self._job_table.queued_jobs
        inputs = self._job_table.order_inputs(self._now)
        for request in queue.iterate(
            inputs, why_skip_queue_group=self._why_skip_queue_group, on_skip=self._record_skipped_job
        ):
            if request.job_id not in skip:
                self._consider_job(queued[request.job_id], future)

    def _why_skip_queue_group(self, tenant: str, group: QueueGroupKey) -> str:
        """Why no job of the group can start, regardless of time limits; empty if they must be considered."""
        _, priority = group
        if why := self._why_group_never_fits(group):
            return why
        holder = self._job_table.reservation_holder
        if holder is None or tenant in self._rules.quotas.by_tenant:
            return ""
        if (True, priority) > self._preemption_rank(holder.request):
            return ""
        return (
            self._why_no_room_by_group.get(group, "")
            if self._rules.allows_backfill
            else _behind_reservation_reason(holder.request)
        )

    def _why_group_never_fits(self, group: QueueGroupKey) -> str:
        return self._job_table.no_suitable_node_reason_by_job_class.get(
            group[0], ""
        ) or self._why_never_fits_by_group.get(group, "")

    def _record_skipped_job(self, job_id: str, reason: str) -> None:
        reservation = self._job_table.reservation
        job = self._job_table.queued_jobs.get(job_id)
        if job is not None and (reservation is None or reservation.job_id != job_id):
            self._keep_pending(job.request, reason)

    # -- one job ------------------------------------------------------------------------------

    def _consider_job(self, job: PendingJob, future: FutureClusterState) -> None:
        request, holder = job.request, self._job_table.reservation_holder
        why = self._why_group_never_fits(job.queue_group_key) or self._job_table.why_over_quota(request)
        if why:
            return self._keep_pending(request, why)
        if holder is not None and self._preemption_rank(request) <= self._preemption_rank(holder.request):
            return self._consider_behind_reservation(job, holder.request, future)
        if holder is not None:  # jobs considered earlier in this pass were behind another holder
            self._job_table.require_full_pass()
        with self._override_gpu_reservations(request):
            if self.try_start(request, "fits") is None:
                self._preempt_or_reserve(job)
                self._is_projected_to_reservation = False
                self._why_delays_reservation_by_group.clear()
        if holder is not None and self._job_table.reservation_holder is holder:  # its places may be taken now
            self._start_or_renew_reservation(holder, future)
        return None

    def _consider_behind_reservation(
        self, job: PendingJob, reservation_holder: JobRequest, future: FutureClusterState
    ) -> None:
        if not self._rules.allows_backfill:
            return self._keep_pending(job.request, _behind_reservation_reason(reservation_holder))
        with self._override_gpu_reservations(job.request):
            self._backfill_or_keep_pending(job, reservation_holder, future)
        if job.request.tenant in self._rules.quotas.by_tenant and self._is_queued(job.request):
            self._reclaim_borrowed_quota(job)
        return None

    def _start_or_renew_reservation(self, holder: PendingJob, future: FutureClusterState) -> None:
        """Start the holder if it fits, or reserve again: an earlier start may be possible."""
        reservation = self._job_table.pop_reservation()
        request = holder.request
        if why := self._job_table.why_over_quota(request):
            self._keep_pending(request, why)
        else:
            with self._override_gpu_reservations(request):
                start = self._try_start_at_places(request, reservation.places, "reservation is due")
                if start is None and self.try_start(request, "fits") is None:
                    self._preempt_or_reserve(holder)
        self._is_projected_to_reservation = False
        self._why_delays_reservation_by_group.clear()

    def _start_or_renew_gpu_reservation(self, job: PendingJob, future: FutureClusterState) -> None:
        """Start the job if its GPUs are free, or reserve them again."""
        request, holder = job.request, self._job_table.reservation_holder
        if holder is None or self._preemption_rank(request) > self._preemption_rank(holder.request):
            return self._consider_job(job, future)
        if why := self._why_group_never_fits(job.queue_group_key) or self._job_table.why_over_quota(request):
            return self._keep_pending(request, why)
        with self._override_gpu_reservations(request):
            self._backfill_or_keep_pending(job, holder.request, future)
            if self._is_queued(request) and why_requested_gpus_busy(self._allocations, request):
                self._preempt_or_reserve(job)
            elif self._is_queued(request):
                self._reclaim_borrowed_quota(job)
        return None

    @contextmanager
    def _override_gpu_reservations(self, request: JobRequest) -> Iterator[None]:
        """GPU reservations of jobs with a lower rank do not apply to this job."""
        jobs, gpu_reservations = self._job_table, self._job_table.gpu_reservations
        rank = self._preemption_rank(request) if len(gpu_reservations) else (False, 0)
        lower = [
            job_id
            for job_id in gpu_reservations
            if self._preemption_rank(jobs.queued_jobs[job_id].request) < rank
        ]
        if not lower:
            yield
            return
        with gpu_reservations.suspend(lower):
            self._ignores_gpu_reservations = True
            try:
                yield
            finally:
                self._ignores_gpu_reservations = False
            reservation = jobs.reservation
            is_reserved = reservation is not None and reservation.job_id == request.job_id
            if reservation is not None and is_reserved:
                gpu_reservations.drop_overlapping(reservation.places)
        job_id = request.job_id
        if is_reserved or job_id in jobs.running_jobs or gpu_reservations.get(job_id) is not None:
            jobs.require_full_pass()

    def _is_queued(self, request: JobRequest) -> bool:
        return request.job_id in self._job_table.queued_jobs

    def _try_start_at_places(
        self, request: JobRequest, places: tuple[WorkerPlace, ...], reason: str
    ) -> Start | None:
        if not all(map(self._allocations.accepts_placements, places)):
            return None
        try:
            self._allocations.hold(request, places)
        except UsageError:
            return None
        return self._record_start(request, places, reason)

    def _record_start(self, request: JobRequest, places: tuple[WorkerPlace, ...], reason: str) -> Start:
        self._job_table.dequeue(request.job_id)
        self._job_table.add_running_job(request, self._now)
        nodes = places[0].node_id if len(places) == 1 else _format_node_names(places)
        start = Start(request.job_id, places, f"{reason}: {nodes}")
        self._decisions.append(start)
        return start

    def _keep_pending(self, request: JobRequest, reason: str, starts_at: float | None = None) -> None:
        job = self._job_table.queued_jobs[request.job_id]
        if (job.last_decision.reason, job.last_decision.starts_at) != (reason, starts_at):
            job.last_decision = self._changed_wait_by_job[request.job_id] = Wait(
                request.job_id, reason, starts_at
            )

    def _preemption_rank(self, request: JobRequest, workers: int = 0) -> victims.PreemptionRank:
        """A job of higher rank may take over the reservation."""
        return victims.preemption_rank(
            request, cluster=self._allocations, quotas=self._rules.quotas, workers=workers
        )

    def _may_start_workers(self, request: JobRequest, workers: int) -> bool:
        """Whether quota allows it. A job that overrides GPU reservations must keep the rank that allows that:
        more workers could be on borrowed quota, and be preempted in turn."""
        if self._job_table.why_over_quota(request, workers):
            return False
        return not self._ignores_gpu_reservations or self._preemption_rank(
            request, workers
        ) >= self._preemption_rank(request)

    # -- preemption and reservations ----------------------------------------------------------

    def _preempt_or_reserve(self, job: PendingJob) -> None:
        """Preempt or move others, or reserve. A job that could never fit reserves nothing."""
        request = job.request
        if why := self._cached_why_no_node_suitable(job):
            return self._keep_pending(request, why)
        if self._rules.allows_preemption:
            blocking = self._jobs_blocking(request)
            if (eviction := self._plan_eviction(request, blocking)) is not None:
                return self._preempt_victims(request, eviction)
            is_any_stopping = any(running.is_stopping for running in blocking)
            if not is_any_stopping and (eviction := self._plan_migration(request)) is not None:
                return self._preempt_victims(request, eviction)
        return self._reserve_earliest_places(job)

    def _plan_eviction(self, request: JobRequest, blocking: list[StartedJob]) -> victims.Eviction | None:
        """Select jobs whose preemption lets this one start; None if that is not enough."""
        # A job that ends before the last stopping one need not be preempted: such jobs are backfilled before
        # a reservation, and would be backfilled again.
        until = max((running.ends_at for running in blocking if running.is_stopping), default=-math.inf)
        ending = [running for running in blocking if running.ends_at <= until]
        others = [running for running in blocking if running.ends_at > until]
        cluster, quotas = self._allocations, self._rules.quotas
        candidates = victims.jobs_preemptible_by(request, others, cluster=cluster, quotas=quotas)
        return victims.plan_eviction(
            request,
            candidates,
            ending=ending,
            cluster=cluster,
            cost=self._rules.preemption_cost,
            now=self._now,
        )

    def _reclaim_borrowed_quota(self, job: PendingJob) -> None:
        """Preempt jobs on borrowed quota for a job within its tenant's quota, even behind a reservation; only
        outside the reserved nodes, so that the reservation is not delayed."""
        request, reservation = job.request, self._job_table.reservation
        is_possible = (
            self._rules.allows_preemption
            and job.queue_group_key not in self._groups_not_fitting_after_reclaim
        )
        if reservation is None or not is_possible or not self._preemption_rank(request)[0]:
            return
        reserved = {place.node_id for place in reservation.places}
        borrowing = victims.jobs_on_borrowed_quota(
            self._jobs_blocking(request), cluster=self._allocations, quotas=self._rules.quotas
        )
        outside = [
            it for it in borrowing if not any(place.node_id in reserved for place in it.allocation.places)
        ]
        eviction = self._plan_eviction(request, outside)
        if eviction is None or any(place.node_id in reserved for place in eviction.places):
            self._groups_not_fitting_after_reclaim.add(job.queue_group_key)
        else:
            self._preempt_victims(request, eviction)

    def _jobs_blocking(self, request: JobRequest) -> list[StartedJob]:
        """Running jobs whose end could free resources for this one."""
        running = self._job_table.running_jobs
        if not request.shape.gpu_ids:
            return list(running.values())
        return [running[job_id] for job_id in self._allocations.jobs_on_node(min(request.shape.nodes))]

    def _plan_migration(self, request: JobRequest) -> victims.Eviction | None:
        """Select jobs to move to other nodes; each job is moved `migrations_per_job_max` times at most."""
        moves = self._job_table.migration_count_by_job
        movable = [
            running
            for running in self._job_table.running_jobs.values()
            if running.request.preemptible
            and moves.get(running.request.job_id, 0) < self._rules.migrations_per_job_max
        ]
        plan = migration.plan_migration(request, movable, cluster=self._allocations) if movable else None
        if plan is None:
            return None
        for job_id in plan.moved_job_ids:
            moves[job_id] = moves.get(job_id, 0) + 1
        return victims.Eviction(plan.moved_job_ids, plan.places)

    def _preempt_victims(self, request: JobRequest, eviction: victims.Eviction) -> None:
        running = self._job_table.running_jobs
        to_stop = [
            job_id for job_id in eviction.victim_job_ids if not self._try_displace_start(job_id, request)
        ]
        # With the planned number of workers: more could be on borrowed quota, and be preempted in turn.
        why = "higher rank than other queued jobs"
        if not to_stop and self._try_start_at_places(request, eviction.places, why) is not None:
            return
        for job_id in to_stop:
            victim = running[job_id]
            until = min(victim.ends_at, self._now + victim.request.grace_s)
            running[job_id] = msgspec.structs.replace(victim, ends_at=until, is_stopping=True)
            why = f"preempted for {request.job_id}"
            self._decisions.append(Preempt(job_id, request.job_id, victim.request.grace_s, why))
        stopping = [job for job in self._jobs_blocking(request) if job.is_stopping]
        at = max((job.ends_at for job in stopping), default=self._now)
        self._add_reservation(request, at, eviction.places)
        nodes = {place.node_id for place in eviction.places}
        there = [
            job.request.job_id for job in stopping if any(it.node_id in nodes for it in job.allocation.places)
        ]
        self._keep_pending(request, f"waiting for {', '.join(there) or 'preempted jobs'} to stop", at)

    def _try_displace_start(self, job_id: str, request: JobRequest) -> bool:
        """Revoke a start of this pass, in favour of `request`; False if the job did not start in it."""
        starts = [each for each in self._decisions if isinstance(each, Start) and each.job_id == job_id]
        if not starts:
            return False
        self._decisions.remove(starts[0])
        self._job_table.end_job(job_id, requeue=True)
        self._why_no_room_by_group.clear()
        self._keep_pending(self._job_table.queued_jobs[job_id].request, f"displaced by {request.job_id}")
        return True

    def _reserve_earliest_places(self, job: PendingJob) -> None:
        """Reserve the places that are free first if all jobs run to their time limits."""
        request = job.request
        ends = sorted(
            self._jobs_blocking(request), key=lambda running: (running.ends_at, running.request.sequence)
        )
        with self._allocations.dry_run() as trial:
            count = trial.fewest_releases_to_fit(request, [running.allocation for running in ends])
            if count is None:
                why = self._why_never_fits_by_group[job.queue_group_key] = self._why_never_fits(request)
                return self._keep_pending(request, why)
            places = trial.place(request, request.workers_required)
            assert places is not None
        at = max(ends[count - 1].ends_at if count else self._now, self._now)
        self._add_reservation(request, at, places)
        reserved = f"waiting for resources on {_format_node_names(places)} (reserved for this job)"
        return self._keep_pending(
            request, why_requested_gpus_busy(self._allocations, request) or reserved, at
        )

    def _add_reservation(
        self, request: JobRequest, starts_at: float, places: tuple[WorkerPlace, ...]
    ) -> None:
        """Reserve the GPUs that the job names if one is busy, or else the places for the only reservation."""
        reservation, holder = (
            Reservation(request.job_id, starts_at, places),
            self._job_table.reservation_holder,
        )
        is_behind = holder is not None and self._preemption_rank(request) <= self._preemption_rank(
            holder.request
        )
        if why_requested_gpus_busy(self._allocations, request) or is_behind:
            self._job_table.gpu_reservations.add(reservation)
        else:
            self._job_table.set_reservation(reservation)

    def _why_never_fits(self, request: JobRequest) -> str:
        gpu_reservations = self._job_table.gpu_reservations
        why = why_requested_gpus_busy(self._allocations, request, gpu_reservations)
        why = why or self._allocations.why_affinity_unsatisfied(request)
        if why:
            return why
        if request.near_job_names:
            names = " or ".join(sorted(request.near_job_names))
            return f"not enough free resources on nodes with a job named {names}"
        reserved = f" without the GPUs reserved for {gpu_reservations.format_holders()}"
        return f"does not fit on an empty cluster{reserved if len(gpu_reservations) else ''}"

    def _cached_why_no_node_suitable(self, job: PendingJob) -> str:
        """Why no node is suitable for jobs of this job class; cached while the nodes do not change."""
        jobs = self._job_table
        jobs.drop_stale_no_suitable_node_reasons()
        if job.job_class_number not in jobs.no_suitable_node_reason_by_job_class:
            jobs.set_no_suitable_node_reason(
                job.job_class_number, self._find_why_no_node_suitable(job.request)
            )
        return jobs.no_suitable_node_reason_by_job_class[job.job_class_number]

    def _find_why_no_node_suitable(self, request: JobRequest) -> str:
        cluster = self._allocations
        reasons: dict[str, str] = {}
        for node in cluster.nodes:
            if not (why := cluster.why_unsuitable(request, node) or cluster.why_node_full(node)):
                return ""
            if not node.has_left or cluster.is_suitable_if_open(request, node):
                reasons[node.node_id] = why
        if not reasons:
            return "no node is connected" if cluster.nodes else "no node has joined the cluster yet"
        closed = [
            node
            for node in cluster.nodes
            if node.blocked_reason and cluster.is_suitable_if_open(request, node)
        ]
        if len(closed) == 1 < len(reasons) and self._is_only_match(request, closed[0]):
            del reasons[closed[0].node_id]
            only = (
                f"only node {closed[0].node_id} matches, but it accepts no jobs ({closed[0].blocked_reason})"
            )
            return f"{only}; {format_grouped_reasons(reasons)}"
        first = frozenset(node.node_id for node in closed)
        return f"no suitable node: {format_grouped_reasons(reasons, nodes_first=first)}"

    def _is_only_match(self, request: JobRequest, node: NodeFacts) -> bool:
        """Whether no other node matches the request, even if it is full now."""
        cluster = self._allocations
        others = (each for each in cluster.nodes if each.node_id != node.node_id)
        return not node.has_left and not any(cluster.is_suitable_if_open(request, each) for each in others)

    # -- backfill -----------------------------------------------------------------------------

    def _backfill_or_keep_pending(
        self, job: PendingJob, reservation_holder: JobRequest, future: FutureClusterState
    ) -> None:
        """Start the job if that does not delay the reservation."""
        request, group, cluster = job.request, job.queue_group_key, self._allocations
        reservation = self._job_table.reservation
        assert reservation is not None
        limit_s = math.inf if request.time_limit_s is None else request.time_limit_s
        ends_before = self._now + limit_s <= reservation.starts_at
        why = self._why_no_room_by_group.get(group, "") or (
            "" if ends_before else self._why_delays_reservation_by_group.get(group, "")
        )
        if why:
            return self._keep_pending(request, why)
        if not ends_before:
            self._project_to_reservation(future)
        rejected = self._why_no_room_by_group
        for workers in range(request.workers, request.workers_required - 1, -1):
            if not self._may_start_workers(request, workers):
                continue
            places = cluster.place(request, workers)
            if places is None:
                continue
            if ends_before or future.try_hold(request, places):
                self._record_start(request, places, "backfilled")
                return None
            cluster.release(request.job_id)
            rejected = self._why_delays_reservation_by_group
            reserved = {place.node_id for place in reservation.places}
            places = cluster.place(request, workers, excluded_nodes=reserved)
            if places is not None and future.try_hold(request, places):
                self._record_start(request, places, "backfilled outside the reserved nodes")
                return None
            if places is not None:
                cluster.release(request.job_id)
        why = why_requested_gpus_busy(cluster, request, self._job_table.gpu_reservations)
        if not why and rejected is self._why_no_room_by_group:  # the reservation may not be the cause
            why = self._cached_why_no_node_suitable(job) or cluster.why_affinity_unsatisfied(request)
            why = why or f"not enough free resources, and {_behind_reservation_reason(reservation_holder)}"
        rejected[group] = why = why or f"would delay {reservation_holder.job_id}, which has a reservation"
        return self._keep_pending(request, why)

    def _project_to_reservation(self, future: FutureClusterState) -> None:
        """Advance the projection to the start of the reservation: jobs that end by then are released."""
        if self._is_projected_to_reservation:
            return
        self._is_projected_to_reservation = True
        future.reset_to_present()
        reservation, holder = self._job_table.reservation, self._job_table.reservation_holder
        if reservation is None or holder is None:
            return
        for running in self._job_table.running_jobs.values():
            if running.ends_at <= reservation.starts_at:
                future.release(running.allocation)
        is_free = future.try_hold(holder.request, reservation.places)
        assert is_free, "reserved places must be free at the start of the reservation"


def _behind_reservation_reason(reservation_holder: JobRequest) -> str:
    return f"behind {reservation_holder.job_id}, which has a reservation"


def _format_node_names(places: tuple[WorkerPlace, ...]) -> str:
    return ", ".join(sorted({place.node_id for place in places})[:_NODES_SHOWN_MAX])
