"""Sees every transaction of the store and every process, and knows what must never be.

What is wrong goes into `Machines.violations`, as it does there. Not for: what is right only in the end, when
all faults are over (the tests look at that).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from genie.controller.store import Delete, Put
from genie.model.allocation import FULL_MILLI, Hold, NodeLedger
from genie.model.job import Job, JobState, Placement, Spread, Within, parse_unit
from genie.sim.processes import Machines, SimProcess
from genie.sim.world import World

_HELD = (JobState.PLACING, JobState.RUNNING)
_JOBS, _LEDGERS = "job/", "ledger/"
_LOOK_S = 0.5
_PLACED_MAX, _PLACED_WITHIN_S = 6, 1.0
"""More often in that time nothing is placed that gets anywhere."""

Accepted = Callable[[str, str], int]
"""Of a node and a worker: the newest launch that the agent there has taken on; 0 when it knows of none."""


class Witness:
    """`seen` is to be told of transactions, and `run` beside the actors. `without_s` is how long a hold may
    stand without a process, and a process without a hold, while nothing is wrong."""

    def __init__(self, world: World, machines: Machines, *, accepted: Accepted, without_s: float) -> None:
        self._world = world
        self._machines = machines
        self._accepted = accepted
        self._without_s = without_s
        self.jobs: dict[str, Job] = {}
        self._ledgers: dict[str, NodeLedger] = {}
        self._held: dict[str, dict[str, tuple[str, Hold]]] = {}
        """By job and by worker: where, and what."""
        self._began: set[tuple[str, int]] = set()
        """Launches that were confirmed as a whole."""
        self._placed_at_s: dict[str, deque[float]] = {}
        self._alone_since_s: dict[tuple[str, int], float] = {}
        self.is_calm = False
        """Whether faults are over. Only then it is known how long anything may take."""
        machines.on_spawn.append(self._spawned)

    def seen(self, operations: Sequence[Put | Delete]) -> None:
        touched: set[str] = set()
        for operation in operations:
            prefix, _, row_id = operation.key.partition("/")
            value = operation.value if isinstance(operation, Put) else None
            if prefix + "/" == _JOBS:
                job = None if value is None else msgspec.json.decode(value, type=Job)
                self._job_changed(row_id, job)
                touched.add(row_id)
            elif prefix + "/" == _LEDGERS and value is not None:
                touched |= self._ledger_changed(row_id, msgspec.json.decode(value, type=NodeLedger))
        for job_id in touched:
            self._check_holds(job_id)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._look_for_the_lonely()

    # -- rows ---------------------------------------------------------------------------------

    def _job_changed(self, job_id: str, job: Job | None) -> None:
        before = self.jobs.pop(job_id, None)
        if job is None:
            return
        self.jobs[job_id] = job
        was = before.state if before is not None else None
        if job.state is JobState.PLACING and was is not JobState.PLACING:
            self._check_places(job)
            self._check_pace(job_id)
        if job.state is JobState.RUNNING and was is not JobState.RUNNING:
            self._began.add((job_id, job.epoch))
            for rank, placement in enumerate(job.placements):
                if self._accepted(placement.node_id, job.unit(rank)) != placement.epoch:
                    self._violated(f"{job.unit(rank)} was never taken on, and yet launch {job.epoch} began")
        if before is not None and before.state.is_final:
            self._violated(f"{job_id} was over ({before.reason}) and changed to {job}")

    def _ledger_changed(self, node_id: str, ledger: NodeLedger) -> set[str]:
        before = self._ledgers.get(node_id, NodeLedger(node_id=node_id))
        self._ledgers[node_id] = ledger
        touched = set()
        for hold in before.holds:
            job_id = parse_unit(hold.job_id)[0]
            self._held.get(job_id, {}).pop(hold.job_id, None)
            touched.add(job_id)
        for hold in ledger.holds:
            job_id = parse_unit(hold.job_id)[0]
            self._held.setdefault(job_id, {})[hold.job_id] = (node_id, hold)
            touched.add(job_id)
        self._check_room(ledger)
        return touched

    def _check_room(self, ledger: NodeLedger) -> None:
        for gpu_id in {gpu_id for hold in ledger.holds for gpu_id in hold.gpu_ids}:
            there = [hold for hold in ledger.holds if gpu_id in hold.gpu_ids]
            if sum(hold.gpu_milli for hold in there) > FULL_MILLI or len({one.tenant for one in there}) > 1:
                self._violated(f"accelerator {gpu_id} of {ledger.node_id} is given out twice: {there}")

    def _check_places(self, job: Job) -> None:
        """That a launch is what was asked for."""
        spec, wishes, placements = job.spec, job.spec.wishes, job.placements
        nodes = [placement.node_id for placement in placements]
        is_right = (
            (wishes.workers_min or wishes.workers) <= len(placements) <= wishes.workers
            and (wishes.spread is not Spread.SPREAD or len(set(nodes)) == len(nodes))
            and (wishes.within is not Within.NODE or len(set(nodes)) == 1)
            and (not spec.node_id or set(nodes) == {spec.node_id})
            and (not spec.gpu_ids or sorted(placements[0].gpu_ids) == sorted(spec.gpu_ids))
            and all(len(set(placement.gpu_ids)) == spec.resources.gpus for placement in placements)
        )
        if not is_right:
            self._violated(f"this is not where it asked to be: {job}")

    def _check_pace(self, job_id: str) -> None:
        recent = self._placed_at_s.setdefault(job_id, deque(maxlen=_PLACED_MAX))
        if len(recent) == _PLACED_MAX and self._world.now_s - recent[0] < _PLACED_WITHIN_S:
            self._violated(f"{job_id} is placed again and again")
        recent.append(self._world.now_s)

    def _check_holds(self, job_id: str) -> None:
        """What counts is held, and nothing else is."""
        job = self.jobs.get(job_id)
        held = {
            unit: (node_id, hold.epoch, hold.gpu_ids)
            for unit, (node_id, hold) in self._held.get(job_id, {}).items()
        }
        if held != ({} if job is None else _to_hold(job)):
            self._violated(f"held: {held}, and the job is {job}")

    # -- processes ----------------------------------------------------------------------------

    def _spawned(self, process: SimProcess) -> None:
        if process.launch not in self._began:
            self._violated(f"{process} starts, and not all of its launch were ready")

    def _look_for_the_lonely(self) -> None:
        """Processes and holds belong together. Either may be alone for a while, and only so long."""
        running = {(one.job_id, one.epoch): one for one in self._machines.alive() if not one.doomed}
        held = {(unit, hold.epoch) for those in self._held.values() for unit, (_, hold) in those.items()}
        placing = {unit for unit, epoch in held if self.jobs[parse_unit(unit)[0]].state is JobState.PLACING}
        alone = {
            key
            for key in running.keys() - held
            if not self._world.is_frozen(running[key].node_id) and not self._machines.is_overdue(running[key])
        }
        if self.is_calm:
            alone |= {key for key in held - running.keys() if key[0] not in placing}
        now_s = self._world.now_s
        self._alone_since_s = {key: self._alone_since_s.get(key, now_s) for key in alone}
        for key, since_s in self._alone_since_s.items():
            if now_s - since_s > self._without_s:
                what = "runs and is not held" if key in running else "is held and does not run"
                self._violated(f"{key} {what} since {since_s:.2f}")

    def _violated(self, what: str) -> None:
        self._machines.violated(what)


def _to_hold(job: Job) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    if job.state not in _HELD:
        return {}

    def what(placement: Placement) -> tuple[str, int, tuple[int, ...]]:
        return placement.node_id, placement.epoch, placement.gpu_ids

    return {
        job.unit(rank): what(placement)
        for rank, placement in enumerate(job.placements)
        if placement.outcome is None
    }
