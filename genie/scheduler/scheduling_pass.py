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
from dataclasses import replace

import msgspec

from genie.errors import UsageError
from genie.scheduler.cluster.dry_run import FutureClusterState
from genie.scheduler.decisions import Decision, Preempt, Start, Wait
from genie.scheduler.feasibility import group_reasons
from genie.scheduler.gpu_reservations import Reservation, busy_gpu_reason
from genie.scheduler.job_table import JobTable, PendingJob
from genie.scheduler.order import GroupKey, JobQueue
from genie.scheduler.preemption import migration, victims
from genie.scheduler.preemption.victims import StartedJob
from genie.scheduler.request import JobRequest, WorkerPlace

_NODES_SHOWN = 3


class SchedulingPass:
    def __init__(self, jobs: JobTable, now: float) -> None:
        self._jobs = jobs
        self._cluster = jobs.cluster
        self._rules = jobs.rules
        self._now = now
        self._decisions: list[Decision] = []
        self._waits: dict[str, Wait] = {}
        """Changed pending reasons, by job."""
        self._infeasible: dict[GroupKey, str] = {}
        """Why no job of the group could start even if others ended."""
        self._full_reasons: dict[GroupKey, str] = {}
        """Why no job of the group can start now. Further starts do not change that."""
        self._delaying_reasons: dict[GroupKey, str] = {}
        """The same for jobs that would not end before the reservation starts."""
        self._unreclaimable: set[GroupKey] = set()
        """Groups for which preempting all jobs on borrowed quota is not enough."""
        self._is_projected = False
        """Whether the projection is at the start time of the reservation."""
        self._ignores_gpu_reservations = False
        jobs.drop_stale_reasons()

    def run(self) -> list[Decision]:
        jobs = self._jobs
        arrivals = jobs.take_arrivals()
        with self._cluster.projection() as future:
            if not self._needs_full_pass:
                queue = JobQueue(self._rules.order)
                for job in arrivals:
                    queue.add(job.request, job.group)
                self._consider_all(queue, future)
            if self._needs_full_pass:
                jobs.begin_full_pass()
                considered = self._consider_reservations(future)
                self._consider_all(jobs.queue, future, skip=considered)
        if self._decisions and jobs.affinity_count:
            jobs.require_full_pass()
        waits = [wait for wait in self._waits.values() if wait.job_id in jobs.queued]
        return [*self._decisions, *waits]

    def try_start(self, request: JobRequest, reason: str) -> Start | None:
        """Start the job with as many workers as its quota and the free resources allow."""
        least = request.least_workers
        counts = range(request.workers, least - 1, -1)
        workers = next((count for count in counts if self._may_start(request, count)), 0)
        places = self._cluster.place(request, workers, least=least) if workers else None
        return None if places is None else self._start(request, places, reason)

    @property
    def _needs_full_pass(self) -> bool:
        """Whether jobs that were considered before could get another decision."""
        reservation = self._jobs.reservation
        is_due = reservation is not None and reservation.starts_at <= self._now
        return self._jobs.needs_full_pass or is_due

    def _consider_reservations(self, future: FutureClusterState) -> set[str]:
        """Consider the jobs with reservations before all others, and return them."""
        gpu_reservations, holder = self._jobs.gpu_reservations, self._jobs.reservation_holder
        considered = {*gpu_reservations, *([holder.request.job_id] if holder is not None else [])}
        if holder is not None:
            self._renew_reservation(holder, future)
        for job_id in gpu_reservations:
            if gpu_reservations.drop(job_id) is not None:  # unless an earlier job replaced it
                self._renew_gpu_reservation(self._jobs.queued[job_id], future)
                if holder is not None and gpu_reservations.get(job_id) is None:
                    self._jobs.require_full_pass()  # the holder may use those GPUs
        return considered

    def _consider_all(
        self, queue: JobQueue, future: FutureClusterState, *, skip: Collection[str] = ()
    ) -> None:
        queued = self._jobs.queued
        scales = self._jobs.scales(self._now)
        for request in queue.iterate(scales, group_reason=self._group_reason, on_skip=self._skip):
            if request.job_id not in skip:
                self._consider(queued[request.job_id], future)

    def _group_reason(self, tenant: str, group: GroupKey) -> str:
        """Why no job of the group can start, regardless of time limits; empty if they must be considered."""
        _, priority = group
        if why := self._infeasible_reason(group):
            return why
        holder = self._jobs.reservation_holder
        if holder is None or tenant in self._rules.quotas.by_tenant:
            return ""
        if (True, priority) > self._rank(holder.request):
            return ""
        return (
            self._full_reasons.get(group, "")
            if self._rules.backfills
            else _waits_behind_reason(holder.request)
        )

    def _infeasible_reason(self, group: GroupKey) -> str:
        return self._jobs.unsuitable.get(group[0], "") or self._infeasible.get(group, "")

    def _skip(self, job_id: str, why: str) -> None:
        reservation = self._jobs.reservation
        job = self._jobs.queued.get(job_id)
        if job is not None and (reservation is None or reservation.job_id != job_id):
            self._wait(job.request, why)

    # -- one job ------------------------------------------------------------------------------

    def _consider(self, job: PendingJob, future: FutureClusterState) -> None:
        request, holder = job.request, self._jobs.reservation_holder
        why = self._infeasible_reason(job.group) or self._jobs.why_quota(request)
        if why:
            return self._wait(request, why)
        if holder is not None and self._rank(request) <= self._rank(holder.request):
            return self._consider_behind(job, holder.request, future)
        if holder is not None:  # jobs considered earlier in this pass were behind another holder
            self._jobs.require_full_pass()
        with self._overriding_gpu_reservations(request):
            if self.try_start(request, "fits") is None:
                self._make_room(job)
                self._is_projected = False
                self._delaying_reasons.clear()
        if holder is not None and self._jobs.reservation_holder is holder:  # its places may be taken now
            self._renew_reservation(holder, future)
        return None

    def _consider_behind(self, job: PendingJob, holder: JobRequest, future: FutureClusterState) -> None:
        if not self._rules.backfills:
            return self._wait(job.request, _waits_behind_reason(holder))
        with self._overriding_gpu_reservations(job.request):
            self._backfill(job, holder, future)
        if job.request.tenant in self._rules.quotas.by_tenant and self._is_queued(job.request):
            self._reclaim(job)
        return None

    def _renew_reservation(self, holder: PendingJob, future: FutureClusterState) -> None:
        """Start the holder if it fits, or reserve again: an earlier start may be possible."""
        reservation = self._jobs.take_reservation()
        request = holder.request
        if why := self._jobs.why_quota(request):
            self._wait(request, why)
        else:
            with self._overriding_gpu_reservations(request):
                start = self._start_at(request, reservation.places, "reservation is due")
                if start is None and self.try_start(request, "fits") is None:
                    self._make_room(holder)
        self._is_projected = False
        self._delaying_reasons.clear()

    def _renew_gpu_reservation(self, job: PendingJob, future: FutureClusterState) -> None:
        """Start the job if its GPUs are free, or reserve them again."""
        request, holder = job.request, self._jobs.reservation_holder
        if holder is None or self._rank(request) > self._rank(holder.request):
            return self._consider(job, future)
        if why := self._infeasible_reason(job.group) or self._jobs.why_quota(request):
            return self._wait(request, why)
        with self._overriding_gpu_reservations(request):
            self._backfill(job, holder.request, future)
            if self._is_queued(request) and busy_gpu_reason(self._cluster, request):
                self._make_room(job)
            elif self._is_queued(request):
                self._reclaim(job)
        return None

    @contextmanager
    def _overriding_gpu_reservations(self, request: JobRequest) -> Iterator[None]:
        """GPU reservations of jobs with a lower rank do not apply to this job."""
        jobs, gpu_reservations = self._jobs, self._jobs.gpu_reservations
        rank = self._rank(request) if len(gpu_reservations) else (False, 0)
        lower = [job_id for job_id in gpu_reservations if self._rank(jobs.queued[job_id].request) < rank]
        if not lower:
            yield
            return
        with gpu_reservations.suspended(lower):
            self._ignores_gpu_reservations = True
            try:
                yield
            finally:
                self._ignores_gpu_reservations = False
            reservation = jobs.reservation
            is_reserved = reservation is not None and reservation.job_id == request.job_id
            if reservation is not None and is_reserved:
                gpu_reservations.drop_at(reservation.places)
        job_id = request.job_id
        if is_reserved or job_id in jobs.running or gpu_reservations.get(job_id) is not None:
            jobs.require_full_pass()

    def _is_queued(self, request: JobRequest) -> bool:
        return request.job_id in self._jobs.queued

    def _start_at(self, request: JobRequest, places: tuple[WorkerPlace, ...], reason: str) -> Start | None:
        if not all(map(self._cluster.is_open, places)):
            return None
        try:
            self._cluster.hold(request, places)
        except UsageError:
            return None
        return self._start(request, places, reason)

    def _start(self, request: JobRequest, places: tuple[WorkerPlace, ...], reason: str) -> Start:
        self._jobs.dequeue(request.job_id)
        self._jobs.run(request, self._now)
        nodes = places[0].node_id if len(places) == 1 else _node_names(places)
        start = Start(request.job_id, places, f"{reason}: {nodes}")
        self._decisions.append(start)
        return start

    def _wait(self, request: JobRequest, reason: str, starts_at: float | None = None) -> None:
        job = self._jobs.queued[request.job_id]
        if (job.pending.reason, job.pending.starts_at) != (reason, starts_at):
            job.pending = self._waits[request.job_id] = Wait(request.job_id, reason, starts_at)

    def _rank(self, request: JobRequest, workers: int = 0) -> victims.Rank:
        """A job of higher rank may take over the reservation."""
        return victims.rank(request, cluster=self._cluster, quotas=self._rules.quotas, workers=workers)

    def _may_start(self, request: JobRequest, workers: int) -> bool:
        """Whether quota allows it. A job that overrides GPU reservations must keep the rank that allows that:
        more workers could be on borrowed quota, and be preempted in turn."""
        if self._jobs.why_quota(request, workers):
            return False
        return not self._ignores_gpu_reservations or self._rank(request, workers) >= self._rank(request)

    # -- preemption and reservations ----------------------------------------------------------

    def _make_room(self, job: PendingJob) -> None:
        """Preempt or move others, or reserve. A job that could never fit reserves nothing."""
        request = job.request
        if why := self._unsuitable_reason(job):
            return self._wait(request, why)
        if self._rules.preempts:
            blocking = self._blocking(request)
            if (eviction := self._plan_eviction(request, blocking)) is not None:
                return self._preempt(request, eviction)
            is_any_stopping = any(running.is_stopping for running in blocking)
            if not is_any_stopping and (eviction := self._plan_migration(request)) is not None:
                return self._preempt(request, eviction)
        return self._reserve(job)

    def _plan_eviction(self, request: JobRequest, blocking: list[StartedJob]) -> victims.Eviction | None:
        """Select jobs whose preemption lets this one start; None if that is not enough."""
        # A job that ends before the last stopping one need not be preempted: such jobs are backfilled before
        # a reservation, and would be backfilled again.
        until = max((running.ends_at for running in blocking if running.is_stopping), default=-math.inf)
        ending = [running for running in blocking if running.ends_at <= until]
        others = [running for running in blocking if running.ends_at > until]
        cluster, quotas = self._cluster, self._rules.quotas
        candidates = victims.preemptible_by(request, others, cluster=cluster, quotas=quotas)
        return victims.plan(
            request, candidates, ending=ending, cluster=cluster, cost=self._rules.cost, now=self._now
        )

    def _reclaim(self, job: PendingJob) -> None:
        """Preempt jobs on borrowed quota for a job within its tenant's quota, even behind a reservation; only
        outside the reserved nodes, so that the reservation is not delayed."""
        request, reservation = job.request, self._jobs.reservation
        is_possible = self._rules.preempts and job.group not in self._unreclaimable
        if reservation is None or not is_possible or not self._rank(request)[0]:
            return
        reserved = {place.node_id for place in reservation.places}
        borrowing = victims.on_borrowed_quota(
            self._blocking(request), cluster=self._cluster, quotas=self._rules.quotas
        )
        outside = [
            it for it in borrowing if not any(place.node_id in reserved for place in it.allocation.places)
        ]
        eviction = self._plan_eviction(request, outside)
        if eviction is None or any(place.node_id in reserved for place in eviction.places):
            self._unreclaimable.add(job.group)
        else:
            self._preempt(request, eviction)

    def _blocking(self, request: JobRequest) -> list[StartedJob]:
        """Running jobs whose end could free resources for this one."""
        running = self._jobs.running
        if not request.shape.gpu_ids:
            return list(running.values())
        return [running[job_id] for job_id in self._cluster.jobs_on(min(request.shape.nodes))]

    def _plan_migration(self, request: JobRequest) -> victims.Eviction | None:
        """Select jobs to move to other nodes; each job is moved `moves_max` times at most."""
        moves = self._jobs.moves
        movable = [
            running
            for running in self._jobs.running.values()
            if running.request.preemptible and moves.get(running.request.job_id, 0) < self._rules.moves_max
        ]
        plan = migration.plan(request, movable, cluster=self._cluster) if movable else None
        if plan is None:
            return None
        for job_id in plan.moves:
            moves[job_id] = moves.get(job_id, 0) + 1
        return victims.Eviction(plan.moves, plan.places)

    def _preempt(self, request: JobRequest, eviction: victims.Eviction) -> None:
        running = self._jobs.running
        to_stop = [job_id for job_id in eviction.victims if not self._revoke_start(job_id, request)]
        # With the planned number of workers: more could be on borrowed quota, and be preempted in turn.
        why = "higher rank than other queued jobs"
        if not to_stop and self._start_at(request, eviction.places, why) is not None:
            return
        for job_id in to_stop:
            victim = running[job_id]
            until = min(victim.ends_at, self._now + victim.request.grace_s)
            running[job_id] = msgspec.structs.replace(victim, ends_at=until, is_stopping=True)
            why = f"preempted for {request.job_id}"
            self._decisions.append(Preempt(job_id, request.job_id, victim.request.grace_s, why))
        stopping = [job for job in self._blocking(request) if job.is_stopping]
        at = max((job.ends_at for job in stopping), default=self._now)
        self._add_reservation(request, at, eviction.places)
        nodes = {place.node_id for place in eviction.places}
        there = [
            job.request.job_id for job in stopping if any(it.node_id in nodes for it in job.allocation.places)
        ]
        self._wait(request, f"waiting for {', '.join(there) or 'preempted jobs'} to stop", at)

    def _revoke_start(self, job_id: str, request: JobRequest) -> bool:
        """Revoke a start of this pass; False if the job did not start in it."""
        starts = [each for each in self._decisions if isinstance(each, Start) and each.job_id == job_id]
        if not starts:
            return False
        self._decisions.remove(starts[0])
        self._jobs.end(job_id, requeue=True)
        self._full_reasons.clear()
        self._wait(self._jobs.queued[job_id].request, f"displaced by {request.job_id}")
        return True

    def _reserve(self, job: PendingJob) -> None:
        """Reserve the places that are free first if all jobs run to their time limits."""
        request = job.request
        ends = sorted(
            self._blocking(request), key=lambda running: (running.ends_at, running.request.sequence)
        )
        with self._cluster.dry_run() as trial:
            count = trial.fewest_releases(request, [running.allocation for running in ends])
            if count is None:
                why = self._infeasible[job.group] = self._why_infeasible(request)
                return self._wait(request, why)
            places = trial.place(request, request.least_workers)
            assert places is not None
        at = max(ends[count - 1].ends_at if count else self._now, self._now)
        self._add_reservation(request, at, places)
        reserved = f"waiting for resources on {_node_names(places)} (reserved for this job)"
        return self._wait(request, busy_gpu_reason(self._cluster, request) or reserved, at)

    def _add_reservation(self, request: JobRequest, at: float, places: tuple[WorkerPlace, ...]) -> None:
        """Reserve the GPUs that the job names if one is busy, or else the places for the only reservation."""
        reservation, holder = Reservation(request.job_id, at, places), self._jobs.reservation_holder
        is_behind = holder is not None and self._rank(request) <= self._rank(holder.request)
        if busy_gpu_reason(self._cluster, request) or is_behind:
            self._jobs.gpu_reservations.add(reservation)
        else:
            self._jobs.reserve(reservation)

    def _why_infeasible(self, request: JobRequest) -> str:
        gpu_reservations = self._jobs.gpu_reservations
        why = busy_gpu_reason(self._cluster, request, gpu_reservations)
        why = why or self._cluster.why_no_neighbour(request)
        if why:
            return why
        if request.near:
            return f"not enough free resources on nodes with a job named {' or '.join(sorted(request.near))}"
        reserved = f" without the GPUs reserved for {gpu_reservations.format_holders()}"
        return f"does not fit on an empty cluster{reserved if len(gpu_reservations) else ''}"

    def _unsuitable_reason(self, job: PendingJob) -> str:
        """Why no node is suitable for jobs of this kind; cached while the nodes do not change."""
        jobs = self._jobs
        jobs.drop_stale_reasons()
        if job.kind not in jobs.unsuitable:
            jobs.set_unsuitable(job.kind, self._why_no_node(job.request))
        return jobs.unsuitable[job.kind]

    def _why_no_node(self, request: JobRequest) -> str:
        cluster = self._cluster
        reasons: dict[str, str] = {}
        for node in cluster.nodes:
            if not (why := cluster.why_not(request, node) or cluster.why_full(node)):
                return ""
            reasons[node.node_id] = why
        if not reasons:
            return "no node has joined the cluster yet"
        closed = frozenset(
            node.node_id
            for node in cluster.nodes
            if node.closed and not cluster.why_not(request, replace(node, closed=""))
        )
        return f"no suitable node: {group_reasons(reasons, first=closed)}"

    # -- backfill -----------------------------------------------------------------------------

    def _backfill(self, job: PendingJob, holder: JobRequest, future: FutureClusterState) -> None:
        """Start the job if that does not delay the reservation."""
        request, group, cluster = job.request, job.group, self._cluster
        reservation = self._jobs.reservation
        assert reservation is not None
        limit_s = math.inf if request.time_limit_s is None else request.time_limit_s
        ends_before = self._now + limit_s <= reservation.starts_at
        why = self._full_reasons.get(group, "") or (
            "" if ends_before else self._delaying_reasons.get(group, "")
        )
        if why:
            return self._wait(request, why)
        if not ends_before:
            self._project(future)
        rejected = self._full_reasons
        for workers in range(request.workers, request.least_workers - 1, -1):
            if not self._may_start(request, workers):
                continue
            places = cluster.place(request, workers)
            if places is None:
                continue
            if ends_before or future.hold(request, places):
                self._start(request, places, "backfilled")
                return None
            cluster.release(request.job_id)
            rejected = self._delaying_reasons
            reserved = {place.node_id for place in reservation.places}
            places = cluster.place(request, workers, avoiding=reserved)
            if places is not None and future.hold(request, places):
                self._start(request, places, "backfilled outside the reserved nodes")
                return None
            if places is not None:
                cluster.release(request.job_id)
        why = busy_gpu_reason(cluster, request, self._jobs.gpu_reservations)
        if not why and rejected is self._full_reasons:  # the reservation may not be the cause
            why = self._unsuitable_reason(job) or cluster.why_no_neighbour(request)
            why = why or f"not enough free resources, and {_waits_behind_reason(holder)}"
        rejected[group] = why = why or f"would delay {holder.job_id}, which has a reservation"
        return self._wait(request, why)

    def _project(self, future: FutureClusterState) -> None:
        """Advance the projection to the start of the reservation: jobs that end by then are released."""
        if self._is_projected:
            return
        self._is_projected = True
        future.reset()
        reservation, holder = self._jobs.reservation, self._jobs.reservation_holder
        if reservation is None or holder is None:
            return
        for running in self._jobs.running.values():
            if running.ends_at <= reservation.starts_at:
                future.release(running.allocation)
        is_free = future.hold(holder.request, reservation.places)
        assert is_free, "reserved places must be free at the start of the reservation"


def _waits_behind_reason(holder: JobRequest) -> str:
    return f"behind {holder.job_id}, which has a reservation"


def _node_names(places: tuple[WorkerPlace, ...]) -> str:
    return ", ".join(sorted({place.node_id for place in places})[:_NODES_SHOWN])
