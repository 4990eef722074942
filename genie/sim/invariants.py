"""Checks invariants of a simulated cluster at every store transaction and process start.

Violations are added to `Machines.violations`. Conditions that hold only after the faults are checked by
the tests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from genie.controller.store import Delete, Put
from genie.model.allocation import FULL_MILLI, Hold, NodeHolds
from genie.model.job import Job, JobState, Placement, Spread, Within, parse_worker_unit
from genie.sim.cluster import FaultWindow
from genie.sim.processes import Machines, SimProcess
from genie.sim.world import World

_HOLDING_STATES = (JobState.PLACING, JobState.RUNNING)
_JOBS, _HOLDS = "job/", "ledger/"
_CHECK_INTERVAL_S = 0.5
_PLACEMENTS_MAX, _PLACEMENTS_WINDOW_S = 6, 1.0
"""More placements of one job within the window count as a livelock."""

_EXCUSED_S = 45.0
"""How long after a fault jobs may still be ended because of it: until a node, a leader and their clocks agree
again."""
_RATE_WINDOW_S = 5.0
_REQUESTS_OF_NODE_PER_S = 8.0
_REQUESTS_OF_LAUNCH = 4

AcceptedEpoch = Callable[[str, str], int]
"""Returns the latest epoch of a worker that the agent of a node accepted; 0 if none."""


class InvariantChecker:
    """Register `on_commit` with the store and run `run` concurrently with the cluster. `mismatch_s_max` is
    the maximum time of a hold without a process, or of a process without a hold."""

    def __init__(
        self, world: World, machines: Machines, *, accepted: AcceptedEpoch, mismatch_s_max: float
    ) -> None:
        self._world = world
        self._machines = machines
        self._accepted = accepted
        self._mismatch_s_max = mismatch_s_max
        self.jobs: dict[str, Job] = {}
        self.ended: dict[str, Job] = {}
        """Jobs that have ended, also those that were deleted since."""
        self.on_end: list[Callable[[Job], None]] = []
        self._holds_by_node: dict[str, NodeHolds] = {}
        self._held: dict[str, dict[str, tuple[str, Hold]]] = {}
        """Node and hold, by job and worker."""
        self._confirmed_launches: set[tuple[str, int]] = set()
        """Job IDs and epochs of launches that all nodes confirmed."""
        self._placed_at_s: dict[str, deque[float]] = {}
        self._mismatched_since_s: dict[tuple[str, int], float] = {}
        self.faults_ended = False
        """Holds without a process are checked only after the faults have ended."""
        machines.on_spawn.append(self._spawned)

    def on_commit(self, operations: Sequence[Put | Delete]) -> None:
        touched: set[str] = set()
        for operation in operations:
            prefix, _, row_id = operation.key.partition("/")
            value = operation.value if isinstance(operation, Put) else None
            if prefix + "/" == _JOBS:
                self._job_changed(row_id, None if value is None else msgspec.json.decode(value, type=Job))
                touched.add(row_id)
            elif prefix + "/" == _HOLDS and value is not None:
                touched |= self._holds_changed(row_id, msgspec.json.decode(value, type=NodeHolds))
        for job_id in touched:
            self._check_holds(job_id)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            self._check_processes_against_holds()

    # -- rows ---------------------------------------------------------------------------------

    def _job_changed(self, job_id: str, job: Job | None) -> None:
        before = self.jobs.pop(job_id, None)
        if job is None:
            return
        self.jobs[job_id] = job
        if job.state.is_final and job_id not in self.ended:
            self.ended[job_id] = job
            for callback in self.on_end:
                callback(job)
        was = before.state if before is not None else None
        if job.state is JobState.PLACING and was is not JobState.PLACING:
            self._check_placement(job)
            self._check_placement_rate(job_id)
        if job.state is JobState.RUNNING and was is not JobState.RUNNING:
            self._confirmed_launches.add((job_id, job.epoch))
            for rank, placement in enumerate(job.placements):
                if self._accepted(placement.node_id, job.unit(rank)) != placement.epoch:
                    self._report(f"epoch {job.epoch} runs, but {job.unit(rank)} was never accepted")
        if before is not None and before.state.is_final:
            self._report(f"{job_id} was final ({before.reason}) and changed to {job}")

    def _holds_changed(self, node_id: str, node_holds: NodeHolds) -> set[str]:
        before = self._holds_by_node.get(node_id, NodeHolds(node_id=node_id))
        self._holds_by_node[node_id] = node_holds
        touched = set()
        for hold in before.holds:
            job_id = parse_worker_unit(hold.job_id)[0]
            self._held.get(job_id, {}).pop(hold.job_id, None)
            touched.add(job_id)
        for hold in node_holds.holds:
            job_id = parse_worker_unit(hold.job_id)[0]
            self._held.setdefault(job_id, {})[hold.job_id] = (node_id, hold)
            touched.add(job_id)
        self._check_capacity(node_holds)
        return touched

    def _check_capacity(self, node_holds: NodeHolds) -> None:
        for gpu_id in {gpu_id for hold in node_holds.holds for gpu_id in hold.gpu_ids}:
            there = [hold for hold in node_holds.holds if gpu_id in hold.gpu_ids]
            if sum(hold.gpu_milli for hold in there) > FULL_MILLI or len({one.tenant for one in there}) > 1:
                self._report(f"accelerator {gpu_id} of {node_holds.node_id} is overallocated: {there}")

    def _check_placement(self, job: Job) -> None:
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
            self._report(f"placement violates the constraints: {job}")

    def _check_placement_rate(self, job_id: str) -> None:
        recent = self._placed_at_s.setdefault(job_id, deque(maxlen=_PLACEMENTS_MAX))
        if len(recent) == _PLACEMENTS_MAX and self._world.now_s - recent[0] < _PLACEMENTS_WINDOW_S:
            self._report(f"{job_id} is placed repeatedly without progress")
        recent.append(self._world.now_s)

    def _check_holds(self, job_id: str) -> None:
        """Check that the ledger holds exactly what the placements of the job require."""
        job = self.jobs.get(job_id)
        held = {
            unit: (node_id, hold.epoch, hold.gpu_ids)
            for unit, (node_id, hold) in self._held.get(job_id, {}).items()
        }
        if held != ({} if job is None else _expected_holds(job)):
            self._report(f"ledger has {held}, which does not match {job}")

    # -- processes ----------------------------------------------------------------------------

    def _spawned(self, process: SimProcess) -> None:
        if process.launch not in self._confirmed_launches:
            self._report(f"{process} started before all workers of its launch were confirmed")

    def _check_processes_against_holds(self) -> None:
        """Check that no process without a hold, and no hold without a process, lasts too long."""
        running = {(one.job_id, one.epoch): one for one in self._machines.alive() if not one.end_reason}
        held = {(unit, hold.epoch) for those in self._held.values() for unit, (_, hold) in those.items()}
        placing = {
            unit for unit, epoch in held if self.jobs[parse_worker_unit(unit)[0]].state is JobState.PLACING
        }
        mismatched = {
            key
            for key in running.keys() - held
            if not self._world.is_frozen(running[key].node_id) and not self._machines.is_overdue(running[key])
        }
        if self.faults_ended:
            mismatched |= {key for key in held - running.keys() if key[0] not in placing}
        now_s = self._world.now_s
        self._mismatched_since_s = {key: self._mismatched_since_s.get(key, now_s) for key in mismatched}
        for key, since_s in self._mismatched_since_s.items():
            if now_s - since_s > self._mismatch_s_max:
                what = "runs without a hold" if key in running else "is held without a process"
                self._report(f"{key} {what} since {since_s:.2f}")

    def _report(self, what: str) -> None:
        self._machines.report_violation(what)


class InnocentChecker:
    """Checks that jobs of an innocent tenant are ended only by faults of the machines that they use.

    `faults`: those that may end jobs. The jobs must have neither a time limit that they can reach nor a lower
    priority than others, and nobody may cancel them.
    """

    def __init__(
        self,
        world: World,
        machines: Machines,
        checker: InvariantChecker,
        *,
        tenant: str,
        faults: Sequence[FaultWindow],
    ) -> None:
        self._world = world
        self._machines = machines
        self._tenant = tenant
        self._checker = checker
        self._faults = faults
        self._excused: set[str] = set()
        machines.on_termination.append(self._terminated)
        checker.on_end.append(self._ended)

    def _ended(self, job: Job) -> None:
        if job.tenant != self._tenant or job.state is JobState.SUCCEEDED or job.job_id in self._excused:
            return
        if not self._is_excused(job):
            self._machines.report_violation(
                f"{job.job_id} ended without a fault of its node: {job.state}, {job.reason}"
            )

    def _terminated(self, process: SimProcess) -> None:
        job_id = process.launch[0]
        job = self._checker.jobs.get(job_id)
        if job is None or job.tenant != self._tenant:
            return
        if self._is_excused(job):
            self._excused.add(job_id)
        else:
            self._machines.report_violation(
                f"{process.job_id} was terminated without a fault of its node: {process.end_reason}"
            )

    def _is_excused(self, job: Job) -> bool:
        """Whether a machine of any of its workers has or had a fault: the workers of a gang end together."""
        now_s = self._world.now_s
        hosts = {placement.node_id.replace("-", ".") for placement in job.placements}
        return any(
            hosts & fault.hosts and fault.start_s <= now_s <= fault.end_s + _EXCUSED_S
            for fault in self._faults
        )


class RequestRate:
    """Checks that no node sends many requests, apart from those of launches."""

    def __init__(self, world: World, machines: Machines, hosts: Sequence[str]) -> None:
        self._world = world
        self._machines = machines
        self._hosts = hosts
        self._launches = 0
        machines.on_spawn.append(self._spawned)

    async def run(self) -> None:
        while True:
            before, self._launches = dict(self._world.requests_sent), 0
            await asyncio.sleep(_RATE_WINDOW_S)
            allowed = _REQUESTS_OF_NODE_PER_S * _RATE_WINDOW_S + _REQUESTS_OF_LAUNCH * self._launches
            for host in self._hosts:
                count = self._world.requests_sent[host] - before.get(host, 0)
                if count > allowed:
                    self._machines.report_violation(f"{host} sent {count} requests in {_RATE_WINDOW_S:g} s")

    def _spawned(self, process: SimProcess) -> None:
        self._launches += 1


def _expected_holds(job: Job) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    if job.state not in _HOLDING_STATES:
        return {}

    def hold_key(placement: Placement) -> tuple[str, int, tuple[int, ...]]:
        return placement.node_id, placement.epoch, placement.gpu_ids

    return {
        job.unit(rank): hold_key(placement)
        for rank, placement in enumerate(job.placements)
        if placement.outcome is None
    }
