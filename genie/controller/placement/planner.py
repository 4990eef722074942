"""Decides which jobs start where: keeps the scheduler in sync with the ledger and the nodes.

`place` is the only way to a placement, for a job at its submission and for the scheduling pass. The
scheduler (scheduler/scheduler.py) assumes that its decisions are carried out; the ledger has the truth. So
every changed job is compared with the scheduler's state, and so is every decision that was not carried out.
After a load of the ledger the scheduler is rebuilt. Not responsible for writing placements
(jobs/launches.py) or sending launches (placement/pass_runner.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from genie.controller.ledger import Ledger
from genie.controller.nodes.snapshots import NodeSnapshot, NodeSnapshots
from genie.errors import UsageError
from genie.model.allocation import Hold, NodeHolds
from genie.model.job import Job, JobSpec, JobState, PlacementConstraints, Resources, parse_worker_name
from genie.model.node import NodeInfo, Vendor
from genie.processes.clock import Clock
from genie.scheduler import feasibility
from genie.scheduler.cluster.allocations import ClusterAllocations
from genie.scheduler.cluster.placer_group import PlacerFactory
from genie.scheduler.conversion import GPU_POSITION_UNKNOWN, job_request, node_facts, worker_shape
from genie.scheduler.decisions import Decision, Start, Wait
from genie.scheduler.explain import PendingJobExplanation, explain_pending_job, queued_jobs_in_order
from genie.scheduler.placement.protocol import NODE_GPUS_MAX
from genie.scheduler.quota import UNBOUNDED
from genie.scheduler.request import CPU_ACCELERATOR, JobRequest, NodeFacts, Shape, WorkerPlace, why_unsuitable
from genie.scheduler.rules import Rules
from genie.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)

PENDING_QUEUE_GROUPS_MAX = 1000
"""Groups of pending jobs with the same tenant and resource request. Each costs time in every pass."""
CACHE_REFRESH_EVALUATIONS_MAX = 20_000
"""Evaluations of a request on a node per refresh: below a millisecond (benchmarks/bench_scheduler.py)."""
_CACHE_ENTRIES_MAX = 1024
_PLACED_STATES = (JobState.PLACING, JobState.RUNNING)


class Planner:
    """`make_placer` returns an empty placer for a policy name; `policy` is the one that places jobs. A node
    runs at most `workers_per_node_max` workers. `launch_capacity` returns how many more launches can be sent
    now, `not_before_s` the monotonic time before which a job must not be placed."""

    def __init__(
        self,
        ledger: Ledger,
        snapshots: NodeSnapshots,
        *,
        clock: Clock,
        make_placer: PlacerFactory,
        policy: str,
        rules: Callable[[], Rules] = Rules,
        workers_per_node_max: int = UNBOUNDED,
        launch_capacity: Callable[[], int] = lambda: 1,
        not_before_s: Callable[[str], float] = lambda job_id: 0.0,
        needed_bytes: Callable[[str], int] = lambda job_id: 0,
    ) -> None:
        self._ledger = ledger
        self._node_snapshots = snapshots
        self._clock = clock
        self._wall_clock_offset_s = clock.wall_s() - clock.monotonic_s()
        self._make_placer = make_placer
        self._placement_policy = policy
        self._make_rules = rules
        self._workers_per_node_max = workers_per_node_max
        self._get_launch_capacity = launch_capacity
        self._get_not_before_s = not_before_s
        self._get_needed_disk_bytes = needed_bytes
        self._jobs_restricted_by_disk: set[str] = set()
        """Jobs that are placed only on the nodes with enough disk space for them."""
        self._gpu_ids_by_node: dict[str, tuple[int, ...]] = {}
        """By node: the IDs of its accelerators by position."""
        self._has_gpus = False
        self._backoff_until_s: dict[str, float] = {}
        """Queued jobs that must not be placed before a time, because an agent rejected their launch."""
        self._infeasible_reason_cache: dict[tuple[object, ...], str] = {}
        """Cache: why requests can never run on the registered nodes."""
        self._shape_cache: dict[Resources, tuple[PlacementConstraints, Shape]] = {}
        """Cache for jobs without a fixed node: the latest shape of each resource request."""
        self._facts_inputs_by_node: dict[str, tuple[tuple[object, ...], str]] = {}
        """By node: what the scheduler's facts were derived from."""
        self._uncommitted_starts: dict[str, tuple[JobRequest, tuple[WorkerPlace, ...]]] = {}
        """Jobs placed at a submission that is not durable yet; at most those of one transaction."""
        self._orphaned_workers: set[str] = set()
        """Workers with a hold whose job is not in the ledger, because it cannot be read."""
        self._jobs_over_launch_capacity: list[str] = []
        """Jobs that the last pass started beyond the launch capacity; `undo_unrecorded_pass_starts` queues
        them again."""
        self._is_scheduler_stale = True
        self._scheduler = self._new_scheduler()
        ledger.add_after_load_listener(self.invalidate)
        ledger.jobs.add_listener(self._on_job_changed)
        ledger.quotas.add_listener(self._on_quota_changed)
        ledger.holds.add_listener(self._on_holds_changed)
        snapshots.add_listener(self._on_node_changed)

    # -- reading ----------------------------------------------------------------------------

    def why_infeasible(self, spec: JobSpec) -> str:
        """Why a job could not run even if all registered nodes were healthy and free; empty if it could."""
        self._node_snapshots.registered_snapshots()
        if self._is_scheduler_stale:
            self._rebuild_scheduler()
        if missing := self._missing_gpus(spec):
            return f"node {spec.node_id} has no accelerator {min(missing)}"
        shape, constraints = self._to_shape(spec), spec.constraints
        key = (shape, constraints.workers, constraints.workers_min, constraints.within, constraints.spread)
        if key not in self._infeasible_reason_cache:
            if len(self._infeasible_reason_cache) >= _CACHE_ENTRIES_MAX:
                self._infeasible_reason_cache.clear()
            request = job_request(_hypothetical_job(spec, tenant=""), shape)
            nodes = self._scheduler.allocations.nodes
            self._infeasible_reason_cache[key] = feasibility.why_infeasible(
                request, nodes, workers_per_node_max=self._workers_per_node_max
            )
        return self._infeasible_reason_cache[key]

    def why_over_quota(self, spec: JobSpec, tenant: str) -> str:
        """Why the tenant could not start the job even if it held nothing else; empty if it could."""
        if self._is_scheduler_stale:
            self._rebuild_scheduler()
        quotas = self._scheduler.rules.quotas
        if tenant not in quotas.by_tenant:
            return ""
        return quotas.why_never_within_quota(
            job_request(_hypothetical_job(spec, tenant), self._to_shape(spec))
        )

    def accepts_queue_group_of(self, spec: JobSpec, tenant: str) -> bool:
        """Whether fewer than PENDING_QUEUE_GROUPS_MAX queue groups are pending, or one is of this job."""
        if self._is_scheduler_stale or self._scheduler.queue_group_count < PENDING_QUEUE_GROUPS_MAX:
            return True
        return self._scheduler.has_queue_group_of(
            job_request(_hypothetical_job(spec, tenant), self._to_shape(spec))
        )

    def pending_jobs(self) -> list[Wait]:
        """The pending jobs in scheduling order, each with its latest pending reason."""
        waits = {wait.job_id: wait for wait in self._scheduler.last_wait_decisions}
        ordered = (
            waits[request.job_id] for request in queued_jobs_in_order(self._scheduler, self._scheduler_now())
        )
        return [
            wait if wait.starts_at is None else replace(wait, starts_at=self._to_wall_clock(wait.starts_at))
            for wait in ordered
        ]

    def explain(self, job_id: str) -> PendingJobExplanation | None:
        """Explain why a job is pending; None when it is not."""
        wait = next((wait for wait in self._scheduler.last_wait_decisions if wait.job_id == job_id), None)
        if wait is None:
            return None
        found = explain_pending_job(self._scheduler, job_id, reason=wait.reason, now=self._scheduler_now())
        if found.starts_at is None:
            return found
        return replace(found, starts_at=self._to_wall_clock(found.starts_at))

    def free_disk_bytes_max(self, job: Job) -> int:
        """Return the largest free disk space, as last reported, of the nodes on which the job could run if
        they were open and free."""
        shape = self._to_shape(job.spec)
        suitable = (
            free
            for node_id, free in self._free_disk_bytes_by_node()
            if self._is_node_suitable(shape, node_id)
        )
        return max(suitable, default=0)

    def _free_disk_bytes_by_node(self) -> Iterator[tuple[str, int]]:
        for node_id, state in self._node_snapshots.last_snapshots().items():
            record = self._ledger.nodes.get(node_id)
            if record is not None and not record.has_left:
                yield node_id, state.info.disk_free_bytes

    def _is_node_suitable(self, shape: Shape, node_id: str) -> bool:
        facts = self._scheduler.allocations.get_node_facts(node_id)
        return facts is not None and not why_unsuitable(shape, replace(facts, blocked_reason=""))

    @property
    def policy_fault(self) -> str:
        """Why a custom policy is disabled; empty while it works."""
        return self._scheduler.policy_fault

    # -- deciding ---------------------------------------------------------------------------

    def place(self, new_job: Job | None = None) -> list[Decision]:
        """Decide what starts now: `new_job`, which is being submitted, or, without one, all queued jobs in a
        scheduling pass, with preemptions and pending reasons.

        An empty list for `new_job` leaves it to the scheduling pass. A start counts as done;
        `undo_unrecorded_starts` must follow unless the ledger records it. Starts stay within the launch
        capacity. Accelerators are given by ID.
        """
        capacity = self._get_launch_capacity() - len(self._uncommitted_starts)
        decisions = self._run_pass() if new_job is None else self._try_start_new_job(new_job, capacity)
        accepted: list[Decision] = []
        for decision in decisions:
            if isinstance(decision, Start):
                capacity -= len(decision.places)
                if capacity < 0:
                    self._jobs_over_launch_capacity.append(decision.job_id)
                    continue
                accepted.append(self._to_gpu_ids(decision))
            else:
                accepted.append(decision)
        return accepted

    def _run_pass(self) -> list[Decision]:
        self._node_snapshots.current_snapshots()
        if self._is_scheduler_stale:
            self._rebuild_scheduler()
        self._end_backoffs()
        return self._scheduler.decide(self._scheduler_now())

    def _try_start_new_job(self, job: Job, capacity: int) -> Sequence[Decision]:
        """Start a job without a pass, so that it is submitted and placed in one transaction."""
        if job.spec.constraints.workers > 1 or capacity <= 0:
            return ()
        self._node_snapshots.current_snapshots()
        if self._is_scheduler_stale:
            return ()
        request = self._to_job_request(job)
        start = self._scheduler.try_start_now(request, self._scheduler_now())
        if start is None:
            return ()
        self._uncommitted_starts[job.job_id] = (request, start.places)
        return (start,)

    def refresh_caches(self) -> bool:
        """Update the scheduler's caches between two decisions, so that the next one is faster, for at most a
        few milliseconds; True if nothing is left to update."""
        return self._is_scheduler_stale or self._scheduler.allocations.prepare_placements(
            CACHE_REFRESH_EVALUATIONS_MAX
        )

    def undo_unrecorded_pass_starts(self, job_ids: Iterable[str]) -> None:
        """Settle the starts of a scheduling pass, and undo those over capacity."""
        over_capacity, self._jobs_over_launch_capacity = self._jobs_over_launch_capacity, []
        self.undo_unrecorded_starts((*job_ids, *over_capacity))

    def undo_unrecorded_starts(self, job_ids: Iterable[str]) -> None:
        """Undo the starts of these jobs that the ledger has not recorded."""
        for job_id in job_ids:
            self._uncommitted_starts.pop(job_id, None)
            if not self._is_scheduler_stale:
                self._sync_with_ledger(job_id, self._ledger.jobs.get(job_id))

    def invalidate(self) -> None:
        """Rebuild the scheduler from the ledger before the next decision."""
        self._is_scheduler_stale = True

    # -- following the ledger and the nodes -------------------------------------------------

    def _new_scheduler(self) -> Scheduler:
        allocations = ClusterAllocations(
            self._make_placer, policy=self._placement_policy, workers_per_node_max=self._workers_per_node_max
        )
        return Scheduler(allocations, self._make_rules())

    def _rebuild_scheduler(self) -> None:
        self._scheduler = self._new_scheduler()
        self._gpu_ids_by_node.clear()
        self._infeasible_reason_cache.clear()
        self._shape_cache.clear()
        self._facts_inputs_by_node.clear()
        self._backoff_until_s.clear()
        self._jobs_restricted_by_disk.clear()
        states = self._node_snapshots.current_snapshots()
        self._has_gpus = any(_has_gpu(state.info) for state in states.values())
        self._is_scheduler_stale = False
        for node_id, state in states.items():
            self._set_node(node_id, state)
        unfinished = [job for job in self._ledger.jobs.values() if not job.state.is_final]
        for job in sorted(unfinished, key=lambda job: job.sequence):
            with self._ledger.quarantine.quarantine_row_on_error(self._ledger.jobs.prefix + job.job_id):
                self._sync_with_ledger(job.job_id, job)
        self._orphaned_workers.clear()
        for node_id, held in self._ledger.holds.items():
            for hold in held.holds:
                if parse_worker_name(hold.job_id)[0] not in self._ledger.jobs:
                    self._account_for_orphaned_hold(node_id, hold)
        for request, places in self._uncommitted_starts.values():
            self._record_start(request, places, self._scheduler_now())

    def _on_node_changed(self, node_id: str, state: NodeSnapshot | None) -> None:
        if self._is_scheduler_stale:
            return
        if state is not None and not self._has_gpus and _has_gpu(state.info):
            self.invalidate()  # Accelerator.AUTO now means GPUs
        elif state is None:
            self._remove_node(node_id)
        else:
            self._set_node(node_id, state)

    def _set_node(self, node_id: str, state: NodeSnapshot) -> None:
        info, closed = state.info, state.blocked_reason
        has = (info.gpus, info.cpus, info.memory_total_bytes, info.labels, info.rack)
        if self._facts_inputs_by_node.get(node_id) == (has, closed):
            return
        self._facts_inputs_by_node[node_id] = (has, closed)
        gpu_ids = tuple(gpu.gpu_id for gpu in info.gpus[:NODE_GPUS_MAX])
        if self._gpu_ids_by_node.setdefault(node_id, gpu_ids) != gpu_ids:
            self.invalidate()  # the positions of its accelerators have changed
            return
        facts = node_facts(info, blocked_reason=closed, has_left=state.has_left)
        known = self._scheduler.allocations.get_node_facts(node_id)
        if known == facts:
            return
        self._infeasible_reason_cache.clear()
        if known is None and self._jobs_restricted_by_disk:
            self.invalidate()  # it may have enough disk space
        if known is None and len(state.info.gpus) > NODE_GPUS_MAX:
            _log.warning("node %s: jobs can use only the first %d accelerators", node_id, NODE_GPUS_MAX)
        self._scheduler.set_node(facts)

    def _remove_node(self, node_id: str) -> None:
        if self._scheduler.allocations.get_node_facts(node_id) is None:
            return
        try:
            self._scheduler.remove_node(node_id)
            self._gpu_ids_by_node.pop(node_id, None)
            self._facts_inputs_by_node.pop(node_id, None)
            self._infeasible_reason_cache.clear()
            if self._jobs_restricted_by_disk:
                self.invalidate()  # it may have been the only one with enough disk space
            if self._has_gpus and not any(map(_has_gpu_facts, self._scheduler.allocations.nodes)):
                self.invalidate()  # as in _on_node_changed
        except UsageError:  # the scheduler still has jobs there
            self.invalidate()

    def _on_quota_changed(self, tenant: str, before: object, after: object) -> None:
        if not self._is_scheduler_stale:
            self._scheduler.set_rules(self._make_rules())

    def _on_job_changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        self._uncommitted_starts.pop(job_id, None)
        is_cleanup = after is None and before is not None and before.state.is_final
        if not self._is_scheduler_stale and not is_cleanup:
            self._sync_with_ledger(job_id, after)

    def _sync_with_ledger(self, job_id: str, job: Job | None) -> None:
        """Make the scheduler's state of this job match the ledger."""
        scheduler = self._scheduler
        if job is None or job.state.is_final:
            self._backoff_until_s.pop(job_id, None)
            self._jobs_restricted_by_disk.discard(job_id)
            if scheduler.is_running(job_id):
                scheduler.record_end(job_id)
            else:
                scheduler.withdraw(job_id)
        elif job.state in _PLACED_STATES:
            if not scheduler.is_running(job_id):
                self._account_for_placed_job(job)
            elif len(job.placements) > 1:
                self._release_ended_workers(job)
            if job.stop and scheduler.is_running(job_id):
                scheduler.mark_stopping(job_id, self._scheduler_now() + job.spec.constraints.grace_s)
        elif (not_before_s := self._get_not_before_s(job_id)) > self._clock.monotonic_s():
            self._backoff_until_s[job_id] = not_before_s
            if scheduler.is_running(job_id):
                scheduler.record_end(job_id)
        elif scheduler.is_running(job_id) and not self._get_needed_disk_bytes(job_id):
            scheduler.record_end(job_id, requeue=True)
        elif scheduler.is_running(job_id):
            scheduler.record_end(job_id)
            scheduler.submit(self._to_job_request(job))
        elif not scheduler.is_queued(job_id):
            scheduler.submit(self._to_job_request(job))

    def _account_for_placed_job(self, job: Job) -> None:
        """Account for a job that was placed in an earlier term or by another controller."""
        at = min(job.started_at or job.history[-1].at, self._scheduler_now())
        self._record_start(
            job_request(job, self._to_shape(job.spec)), self._places_of_running_workers(job), at
        )

    def _record_start(self, request: JobRequest, places: tuple[WorkerPlace, ...], started_at: float) -> None:
        try:
            self._scheduler.record_start(request, places, started_at)
        except (UsageError, KeyError) as error:
            # The job continues; the ledger has what it holds.
            _log.warning("job %s: the scheduler cannot account for its placement: %s", request.job_id, error)

    def _account_for_orphaned_hold(self, node_id: str, hold: Hold) -> None:
        """Account for a hold whose job cannot be read: a process may still use it."""
        self._orphaned_workers.add(hold.job_id)
        resources = Resources(
            gpus=len(hold.gpu_ids),
            gpu_milli=hold.gpu_milli,
            cpus=hold.cpus,
            memory_bytes=hold.memory_bytes,
        )
        spec = JobSpec(name="", command=(), resources=resources, node_id=node_id, gpu_ids=hold.gpu_ids)
        job = msgspec.structs.replace(_hypothetical_job(spec, hold.tenant), job_id=hold.job_id)
        places = (self._to_gpu_positions(node_id, hold.gpu_ids),)
        self._record_start(self._to_job_request(job), places, self._scheduler_now())

    def _on_holds_changed(self, node_id: str, before: NodeHolds | None, after: NodeHolds | None) -> None:
        if self._orphaned_workers and before is not None:
            left = {hold.job_id for hold in after.holds} if after is not None else set()
            if any(
                hold.job_id in self._orphaned_workers and hold.job_id not in left for hold in before.holds
            ):
                self.invalidate()

    def _release_ended_workers(self, job: Job) -> None:
        """Release what the ended workers of a running job held."""
        left = sum(placement.outcome is None for placement in job.placements)
        if left < len(self._scheduler.allocations.allocations_by_job[job.job_id].places):
            self._scheduler.retain_only_workers_at(job.job_id, self._places_of_running_workers(job))

    def _end_backoffs(self) -> None:
        now_s = self._clock.monotonic_s()
        for job_id in [job_id for job_id, at_s in self._backoff_until_s.items() if at_s <= now_s]:
            del self._backoff_until_s[job_id]
            self._sync_with_ledger(job_id, self._ledger.jobs.get(job_id))

    # -- conversions ------------------------------------------------------------------------

    def _scheduler_now(self) -> float:
        """The scheduler's time: seconds since 1970 that do not follow later changes of the wall clock."""
        return self._wall_clock_offset_s + self._clock.monotonic_s()

    def _to_wall_clock(self, scheduler_time: float) -> float:
        """Convert the scheduler's time for display."""
        return scheduler_time - self._scheduler_now() + self._clock.wall_s()

    def _missing_gpus(self, spec: JobSpec) -> set[int]:
        known = self._gpu_ids_by_node.get(spec.node_id)
        return set() if known is None else set(spec.gpu_ids) - set(known)

    def _to_job_request(self, job: Job) -> JobRequest:
        shape, needed_bytes = self._to_shape(job.spec), self._get_needed_disk_bytes(job.job_id)
        if needed_bytes and not shape.nodes:
            nodes = frozenset(
                node_id for node_id, free in self._free_disk_bytes_by_node() if free >= needed_bytes
            )
            if nodes:
                self._jobs_restricted_by_disk.add(job.job_id)
                shape = replace(shape, nodes=nodes)
        return job_request(job, shape)

    def _to_shape(self, spec: JobSpec) -> Shape:
        """Return the shape of a job, usually the same object for equal requests: decisions are cached by
        it."""
        if spec.node_id:
            known = self._gpu_ids_by_node.get(spec.node_id, ())
            positions = {gpu_id: position for position, gpu_id in enumerate(known)}
            return worker_shape(spec, has_gpus=self._has_gpus, gpu_positions=positions)
        found = self._shape_cache.get(spec.resources)
        if found is not None and found[0] == spec.constraints:
            return found[1]
        if len(self._shape_cache) >= _CACHE_ENTRIES_MAX:
            self._shape_cache.clear()
        shape = worker_shape(spec, has_gpus=self._has_gpus, gpu_positions={})
        self._shape_cache[spec.resources] = (spec.constraints, shape)
        return shape

    def _places_of_running_workers(self, job: Job) -> tuple[WorkerPlace, ...]:
        """Where workers of a job still run."""
        return tuple(
            self._to_gpu_positions(placement.node_id, placement.gpu_ids)
            for placement in job.placements
            if placement.outcome is None
        )

    def _to_gpu_positions(self, node_id: str, gpu_ids: tuple[int, ...]) -> WorkerPlace:
        known = self._gpu_ids_by_node.get(node_id, ())  # empty for a node that is no longer registered
        return WorkerPlace(
            node_id,
            tuple(known.index(gpu_id) if gpu_id in known else GPU_POSITION_UNKNOWN for gpu_id in gpu_ids),
        )

    def _to_gpu_ids(self, start: Start) -> Start:
        places = []
        for place in start.places:
            ids = self._gpu_ids_by_node[place.node_id]
            places.append(WorkerPlace(place.node_id, tuple([ids[position] for position in place.gpu_ids])))
        return Start(start.job_id, tuple(places), start.reason)


def _hypothetical_job(spec: JobSpec, tenant: str) -> Job:
    """A job for hypothetical questions."""
    return Job(
        job_id="",
        tenant=tenant,
        owner="",
        spec=spec,
        state=JobState.QUEUED,
        reason="",
        submitted_at=0.0,
        sequence=0,
    )


def _has_gpu(info: NodeInfo) -> bool:
    return any(gpu.vendor is not Vendor.CPU for gpu in info.gpus)


def _has_gpu_facts(facts: NodeFacts) -> bool:
    return any(gpu.vendor != CPU_ACCELERATOR for gpu in facts.gpus)
