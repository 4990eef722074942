"""Checks invariants of a simulated cluster at every store transaction and process start.

Violations are added to `SimMachines.violations`. Conditions that hold only after the faults are checked by
the tests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from genie.controller.controller import Controller
from genie.controller.store import Delete, Put
from genie.model.allocation import FULL_MILLI, Hold, NodeHolds
from genie.model.failover import deadman_s
from genie.model.job import Job, JobState, Placement, Spread, StopReason, Within, parse_worker_name
from genie.model.node import NodeStatus
from genie.sim.cluster import FaultWindow, SimCluster
from genie.sim.processes import SimMachines, SimProcess
from genie.sim.world import World

_HOLDING_STATES = (JobState.PLACING, JobState.RUNNING)
_JOB_KEY_PREFIX, _HOLDS_KEY_PREFIX = "job/", "ledger/"
_HOLD_CHECK_INTERVAL_S = 0.5
_PLACEMENTS_PER_WINDOW_MAX, _PLACEMENTS_WINDOW_S = 6, 1.0
"""More placements of one job within the window count as a livelock: the second rejection by a node already
has a pause of 1 s, and a job can be rejected once by each of the nodes."""

_EXCUSED_AFTER_FAULT_S = 55.0
"""How long after a fault jobs may still be ended because of it: a leader reclaims the jobs of a node after
22.5 s, and there may be no leader for _LEADERLESS_S_MAX."""
_LEADERLESS_S_MAX = 30.0
"""The lease of the previous leader (3 s), nine reads of the store (2 s each in `slow_load`) and a reserve."""
_NODE_LOSS_CHECK_INTERVAL_S = 0.5
_NODE_LOSS_TOLERANCE_S = 1.5
"""The default time to live is 19.5 s, a node must be lost within 20 s; and two intervals of the check."""
_REQUEST_RATE_WINDOW_S = 5.0
_HEARTBEATS_PER_NODE_PER_S_MAX = 2.0
"""One per `heartbeat_s`, which is 1 s, and another one: a change of the node or a connection sends more."""
_START_REQUESTS_PER_WORKER_MAX = 6
"""In one window, of a worker that cannot start yet: it pauses for 0.2, 0.4, 0.8, 1.6 and 2 s in between."""
_LEADER_DISCOVERY_ROUNDS_MAX = 8
"""In one window, of a node without a leader: it pauses for 0.05, 0.1, 0.2, 0.4, 0.8 and 1 s at most."""
_REQUESTS_PER_LAUNCH_MAX = 4
"""A confirmation and its repetition, and early heartbeats at the start and the end."""

GetAcceptedEpoch = Callable[[str, str], int]
"""Returns the latest epoch of a worker that the agent of a node accepted; 0 if none."""


class InvariantChecker:
    """Register `on_store_commit` with the store and run `check_periodically` concurrently with the cluster.
    `hold_mismatch_s_max` is the maximum time of a hold without a process, or of a process without a hold."""

    def __init__(
        self,
        world: World,
        machines: SimMachines,
        *,
        get_accepted_epoch: GetAcceptedEpoch,
        hold_mismatch_s_max: float,
    ) -> None:
        self._world = world
        self._machines = machines
        self._get_accepted_epoch = get_accepted_epoch
        self._hold_mismatch_s_max = hold_mismatch_s_max
        self.current_jobs: dict[str, Job] = {}
        self.ended_jobs: dict[str, Job] = {}
        """Jobs that have ended, also those that were deleted since."""
        self.job_end_callbacks: list[Callable[[Job], None]] = []
        self.job_delete_callbacks: list[Callable[[Job], None]] = []
        """Called with the last row of a job when it is deleted."""
        self._holds_by_node: dict[str, NodeHolds] = {}
        self._holds_by_job: dict[str, dict[str, tuple[str, Hold]]] = {}
        """Node and hold, by job and worker."""
        self._confirmed_launches: set[tuple[str, int]] = set()
        """Job IDs and epochs of launches that all nodes confirmed."""
        self._recent_placement_times_s: dict[str, deque[float]] = {}
        self._hold_mismatch_since_s: dict[tuple[str, int], float] = {}
        self.have_faults_ended = False
        """Holds without a process are checked only after the faults have ended."""
        machines.spawn_callbacks.append(self._check_spawned_process)

    def on_store_commit(self, operations: Sequence[Put | Delete]) -> None:
        touched: set[str] = set()
        for operation in operations:
            prefix, _, row_id = operation.key.partition("/")
            value = operation.value if isinstance(operation, Put) else None
            if prefix + "/" == _JOB_KEY_PREFIX:
                self._on_job_changed(row_id, None if value is None else msgspec.json.decode(value, type=Job))
                touched.add(row_id)
            elif prefix + "/" == _HOLDS_KEY_PREFIX and value is not None:
                touched |= self._on_holds_changed(row_id, msgspec.json.decode(value, type=NodeHolds))
        for job_id in touched:
            self._check_holds_match_placements(job_id)

    def replace_rows(self, operations: Sequence[Put | Delete]) -> set[str]:
        """Continue with the rows of a restored store. Return the jobs that it lacks or has in another state
        than the previous store."""
        before, self.current_jobs = self.current_jobs, {}
        self._holds_by_node, self._holds_by_job = {}, {}
        for operation in operations:
            prefix, _, row_id = operation.key.partition("/")
            if isinstance(operation, Put) and prefix + "/" == _JOB_KEY_PREFIX:
                self.current_jobs[row_id] = msgspec.json.decode(operation.value, type=Job)
            elif isinstance(operation, Put) and prefix + "/" == _HOLDS_KEY_PREFIX:
                self._on_holds_changed(row_id, msgspec.json.decode(operation.value, type=NodeHolds))
        self.ended_jobs = {job_id: job for job_id, job in self.current_jobs.items() if job.state.is_final}
        for job_id in self.current_jobs.keys() | self._holds_by_job.keys():
            self._check_holds_match_placements(job_id)
        every_job_id = before.keys() | self.current_jobs.keys()
        return {job_id for job_id in every_job_id if before.get(job_id) != self.current_jobs.get(job_id)}

    async def check_periodically(self) -> None:
        while True:
            await asyncio.sleep(_HOLD_CHECK_INTERVAL_S)
            self._check_processes_against_holds()

    # -- rows ---------------------------------------------------------------------------------

    def _on_job_changed(self, job_id: str, job: Job | None) -> None:
        before = self.current_jobs.pop(job_id, None)
        if job is None:
            if before is not None:
                for callback in self.job_delete_callbacks:
                    callback(before)
            return
        self.current_jobs[job_id] = job
        if job.state.is_final and job_id not in self.ended_jobs:
            self.ended_jobs[job_id] = job
            for callback in self.job_end_callbacks:
                callback(job)
        was = before.state if before is not None else None
        if job.state is JobState.PLACING and was is not JobState.PLACING:
            self._check_placement_constraints(job)
            self._check_placement_rate(job_id)
        if job.state is JobState.RUNNING and was is not JobState.RUNNING:
            self._confirmed_launches.add((job_id, job.epoch))
            for rank, placement in enumerate(job.placements):
                if self._get_accepted_epoch(placement.node_id, job.worker_name(rank)) != placement.epoch:
                    self._report_violation(
                        f"epoch {job.epoch} runs, but {job.worker_name(rank)} was never accepted"
                    )
        if before is not None and before.state.is_final:
            self._report_violation(f"{job_id} was final ({before.reason}) and changed to {job}")

    def _on_holds_changed(self, node_id: str, node_holds: NodeHolds) -> set[str]:
        before = self._holds_by_node.get(node_id, NodeHolds(node_id=node_id))
        self._holds_by_node[node_id] = node_holds
        touched = set()
        for hold in before.holds:
            job_id = parse_worker_name(hold.job_id)[0]
            self._holds_by_job.get(job_id, {}).pop(hold.job_id, None)
            touched.add(job_id)
        for hold in node_holds.holds:
            job_id = parse_worker_name(hold.job_id)[0]
            self._holds_by_job.setdefault(job_id, {})[hold.job_id] = (node_id, hold)
            touched.add(job_id)
        self._check_gpus_not_overallocated(node_holds)
        return touched

    def _check_gpus_not_overallocated(self, node_holds: NodeHolds) -> None:
        for gpu_id in {gpu_id for hold in node_holds.holds for gpu_id in hold.gpu_ids}:
            there = [hold for hold in node_holds.holds if gpu_id in hold.gpu_ids]
            if sum(hold.gpu_milli for hold in there) > FULL_MILLI or len({one.tenant for one in there}) > 1:
                self._report_violation(
                    f"accelerator {gpu_id} of {node_holds.node_id} is overallocated: {there}"
                )

    def _check_placement_constraints(self, job: Job) -> None:
        """Check that a placement satisfies the constraints of the job."""
        spec, constraints, placements = job.spec, job.spec.constraints, job.placements
        nodes = [placement.node_id for placement in placements]
        is_right = (
            (constraints.workers_min or constraints.workers) <= len(placements) <= constraints.workers
            and (constraints.spread is not Spread.SPREAD or len(set(nodes)) == len(nodes))
            and (constraints.within is not Within.NODE or len(set(nodes)) == 1)
            and (not spec.node_id or set(nodes) == {spec.node_id})
            and (not spec.gpu_ids or sorted(placements[0].gpu_ids) == sorted(spec.gpu_ids))
            and all(len(set(placement.gpu_ids)) == spec.resources.gpus for placement in placements)
        )
        if not is_right:
            self._report_violation(f"placement violates the constraints: {job}")

    def _check_placement_rate(self, job_id: str) -> None:
        recent = self._recent_placement_times_s.setdefault(job_id, deque(maxlen=_PLACEMENTS_PER_WINDOW_MAX))
        if len(recent) == _PLACEMENTS_PER_WINDOW_MAX and self._world.now_s - recent[0] < _PLACEMENTS_WINDOW_S:
            self._report_violation(f"{job_id} is placed repeatedly without progress")
        recent.append(self._world.now_s)

    def _check_holds_match_placements(self, job_id: str) -> None:
        """Check that the ledger holds exactly what the placements of the job require."""
        job = self.current_jobs.get(job_id)
        held = {
            worker_name: (node_id, hold.epoch, hold.gpu_ids)
            for worker_name, (node_id, hold) in self._holds_by_job.get(job_id, {}).items()
        }
        if held != ({} if job is None else _expected_holds(job)):
            self._report_violation(f"ledger has {held}, which does not match {job}")

    # -- processes ----------------------------------------------------------------------------

    def _check_spawned_process(self, process: SimProcess) -> None:
        if process.job_id_and_epoch not in self._confirmed_launches:
            self._report_violation(f"{process} started before all workers of its launch were confirmed")

    def _check_processes_against_holds(self) -> None:
        """Check that no process without a hold, and no hold without a process, lasts too long."""
        running = {
            (one.job_id, one.epoch): one
            for one in self._machines.live_processes()
            if not one.termination_reason
        }
        held = {
            (worker_name, hold.epoch)
            for those in self._holds_by_job.values()
            for worker_name, (_, hold) in those.items()
        }
        placing = {
            worker_name
            for worker_name, epoch in held
            if self.current_jobs[parse_worker_name(worker_name)[0]].state is JobState.PLACING
        }
        mismatched = {
            key
            for key in running.keys() - held
            if not self._world.is_frozen(running[key].node_id)
            and not self._machines.is_deadman_timer_expired(running[key])
        }
        if self.have_faults_ended:
            mismatched |= {key for key in held - running.keys() if key[0] not in placing}
        now_s = self._world.now_s
        self._hold_mismatch_since_s = {key: self._hold_mismatch_since_s.get(key, now_s) for key in mismatched}
        for key, since_s in self._hold_mismatch_since_s.items():
            if now_s - since_s > self._hold_mismatch_s_max:
                what = "runs without a hold" if key in running else "is held without a process"
                self._report_violation(f"{key} {what} since {since_s:.2f}")

    def _report_violation(self, description: str) -> None:
        self._machines.report_violation(description)


class InnocentTenantChecker:
    """Checks that jobs of an innocent tenant are ended only by faults of the machines that they use, that an
    outage ends only restartable ones, that these are queued again, and that finished ones remain readable: a
    run is much shorter than `history_days`, and they are few and small.

    `faults`: those that may end jobs. The jobs must have neither a time limit that they can reach nor a lower
    priority than others, and they may not be cancelled. One that a drain moves must succeed later.
    """

    def __init__(
        self,
        world: World,
        machines: SimMachines,
        checker: InvariantChecker,
        *,
        tenant: str,
        faults: Sequence[FaultWindow],
    ) -> None:
        self._world = world
        self._machines = machines
        self._tenant = tenant
        self._checker = checker
        self._fault_windows = faults
        self._excused_job_ids: set[str] = set()
        machines.termination_callbacks.append(self._check_terminated_process)
        checker.job_end_callbacks += [self._check_ended_job, self._check_not_lost_if_restartable]
        checker.job_delete_callbacks.append(self._report_deleted_job)

    def excuse_jobs(self, job_ids: Collection[str]) -> None:
        """Let these jobs end in any way."""
        self._excused_job_ids |= set(job_ids)

    def _check_ended_job(self, job: Job) -> None:
        if (
            job.tenant != self._tenant
            or job.state is JobState.SUCCEEDED
            or job.job_id in self._excused_job_ids
        ):
            return
        if not self._is_end_excused_by_fault(job):
            self._machines.report_violation(
                f"{job.job_id} ended without a fault of its node: {job.state}, {job.reason}"
            )

    def _check_not_lost_if_restartable(self, job: Job) -> None:
        if job.spec.is_restartable and job.state is JobState.LOST:
            self._machines.report_violation(f"{job.job_id} was not queued again: {job.reason}")

    def _report_deleted_job(self, job: Job) -> None:
        if job.tenant == self._tenant:
            self._machines.report_violation(f"{job.job_id} was deleted: {job.state}, {job.reason}")

    def _check_terminated_process(self, process: SimProcess) -> None:
        job_id = process.job_id_and_epoch[0]
        job = self._checker.current_jobs.get(job_id)
        if job is None or job.tenant != self._tenant or job.stop is StopReason.PREEMPT:
            return
        if job_id in self._excused_job_ids or process.job_id_and_epoch in self._machines.rolled_back_launches:
            return
        if self._is_end_excused_by_fault(job, process):
            self._excused_job_ids.add(job_id)
        else:
            self._machines.report_violation(
                f"{process.job_id} was terminated without a fault of its node: {process.termination_reason}"
            )

    def _is_end_excused_by_fault(self, job: Job, process: SimProcess | None = None) -> bool:
        """Whether a machine of any of its workers has or had a fault that may end this kind of job: the
        workers of a gang end together. `process`: one of an earlier run may be on another machine."""
        now_s = self._world.now_s
        hosts = {placement.node_id.replace("-", ".") for placement in job.placements}
        hosts |= {process.node_id} if process else set()
        return any(
            hosts & fault.hosts and fault.start_s <= now_s <= fault.end_s + _EXCUSED_AFTER_FAULT_S
            for fault in self._fault_windows
            if (job.spec.is_restartable or not fault.ends_only_restartable_jobs)
            and fault.termination_reason in ("", process.termination_reason if process else "")
        )


class LeadershipChecker:
    """Checks that there is a leader soon after a controller can lead: it is up, and reaches its store. A lost
    reply of the store interrupts its attempt to lead."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._able_to_lead_since_s: dict[str, tuple[tuple[Controller, int], float]] = {}

    async def check_periodically(self) -> None:
        led_s = self._cluster.world.now_s
        while True:
            await asyncio.sleep(1.0)
            now_s = self._cluster.world.now_s
            if self._cluster.leader is not None:
                led_s = now_s
            waited_s = now_s - max(led_s, self._update_and_get_able_to_lead_since_s(now_s))
            if waited_s > _LEADERLESS_S_MAX:
                self._cluster.machines.report_violation(f"no controller has led for {waited_s:.0f} s")
                led_s = now_s

    def _update_and_get_able_to_lead_since_s(self, now_s: float) -> float:
        """Return since when some controller could lead without interruption; now if none can."""
        before, self._able_to_lead_since_s = self._able_to_lead_since_s, {}
        for host in self._cluster.controller_hosts:
            controller = self._cluster.controller_able_to_lead(host)
            if controller is not None:
                attempt = (controller, self._cluster.store_of(host).lost_commit_reply_count)
                known, since_s = before.get(host, (None, now_s))
                self._able_to_lead_since_s[host] = (attempt, since_s if known == attempt else now_s)
        return min((since_s for _, since_s in self._able_to_lead_since_s.values()), default=now_s)


class NodeLossChecker:
    """Checks that a node whose machine has lost its power is reported as lost within its time to live, also
    if the leader loses its power with it: then no later than that after a takeover of the longest duration.

    For clusters whose time to live covers a failover (genie/model/failover.py)."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._reported_host_outages: set[tuple[str, float]] = set()
        self._term: tuple[Controller, int] | None = None
        self._undisturbed_since_s = 0.0
        """Since when the leader runs and reaches its store: before, messages of the node may have waited."""
        self._term_began_s = 0.0

    async def check_periodically(self) -> None:
        cluster = self._cluster
        if deadman_s(cluster.config.node_ttl_s) < cluster.failover_bounds.total_s:
            return
        while True:
            await asyncio.sleep(_NODE_LOSS_CHECK_INTERVAL_S)
            leader = self._find_leader()
            if leader is not None:
                self._check_nodes_without_power(leader.node_statuses())

    def _find_leader(self) -> Controller | None:
        cluster, now_s = self._cluster, self._cluster.world.now_s
        host = next(filter(cluster.is_leader, cluster.controller_hosts), None)
        if host is None:
            return None
        leader = cluster.controller_able_to_lead(host)
        if leader is None:
            self._undisturbed_since_s = now_s
            return None
        if self._term != (leader, leader.fencing_token):
            self._term, self._term_began_s = (leader, leader.fencing_token), now_s
        return leader

    def _check_nodes_without_power(self, statuses: Mapping[str, NodeStatus]) -> None:
        cluster = self._cluster
        for host in cluster.node_hosts:
            lost_s, status = cluster.world.power_lost_s(host), statuses.get(cluster.node_id(host))
            if lost_s is None or status in (None, NodeStatus.DISCONNECTED):
                continue
            silent_since_s = max(
                lost_s,
                self._term_began_s - cluster.failover_bounds.takeover_s,
                self._undisturbed_since_s,
            )
            silence_s = cluster.world.now_s - silent_since_s
            is_late = silence_s > cluster.config.node_ttl_s + _NODE_LOSS_TOLERANCE_S
            if is_late and (host, lost_s) not in self._reported_host_outages:
                self._reported_host_outages.add((host, lost_s))
                cluster.machines.report_violation(
                    f"{host} lost its power {cluster.world.now_s - lost_s:.1f} s ago and is still {status}"
                )


class RequestRateChecker:
    """Checks that no node sends more requests than its heartbeats, launches and waiting workers need; it has
    at most `workers_per_node_max`. Each attempt to find the leader is a request to every controller."""

    def __init__(
        self,
        world: World,
        machines: SimMachines,
        hosts: Sequence[str],
        *,
        workers_per_node_max: int,
        controller_count: int,
    ) -> None:
        self._world = world
        self._machines = machines
        self._hosts = hosts
        self._requests_allowed_per_window = (
            _HEARTBEATS_PER_NODE_PER_S_MAX * _REQUEST_RATE_WINDOW_S
            + _START_REQUESTS_PER_WORKER_MAX * workers_per_node_max
            + _LEADER_DISCOVERY_ROUNDS_MAX * (controller_count - 1)
        )
        self._launch_count = 0
        machines.spawn_callbacks.append(self._count_launch)

    async def check_periodically(self) -> None:
        while True:
            before, self._launch_count = dict(self._world.requests_sent_by_host), 0
            await asyncio.sleep(_REQUEST_RATE_WINDOW_S)
            allowed = self._requests_allowed_per_window + _REQUESTS_PER_LAUNCH_MAX * self._launch_count
            for host in self._hosts:
                count = self._world.requests_sent_by_host[host] - before.get(host, 0)
                if count > allowed:
                    self._machines.report_violation(
                        f"{host} sent {count} requests in {_REQUEST_RATE_WINDOW_S:g} s"
                    )

    def _count_launch(self, process: SimProcess) -> None:
        self._launch_count += 1


def _expected_holds(job: Job) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    if job.state not in _HOLDING_STATES:
        return {}

    def hold_key(placement: Placement) -> tuple[str, int, tuple[int, ...]]:
        return placement.node_id, placement.epoch, placement.gpu_ids

    return {
        job.worker_name(rank): hold_key(placement)
        for rank, placement in enumerate(job.placements)
        if placement.outcome is None
    }
