"""Processes without processes: what runs on which accelerator is known exactly, and checked at every start.

`Machines` is the truth that no actor can see: an accelerator that is given out twice, or one job twice,
goes into `violations` (an error could be caught by the code under test). `SimLauncher` is what an
agent gets; a process under it ends by its plan, by order, or because its dead-man timer was not
refreshed, and leaves its exit record on disk as the real shim does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from genie.agent.launcher import LaunchPlan
from genie.model.allocation import FULL_MILLI
from genie.model.job import parse_unit
from genie.model.messages import ExitReport
from genie.runtime import files
from genie.sim.world import EPOCH_S, SimClock, World

DURATION_VARIABLE = "SIM_SECONDS"
SHARE_VARIABLE = "SIM_GPU_MILLI"


@dataclass
class SimProcess:
    node_id: str
    gpu_ids: frozenset[int]
    job_id: str
    epoch: int
    directory: Path
    ends_at_s: float
    until_s: float
    """Dead-man limit by the node's own clock."""
    grace_s: float
    deadman_grace_s: float
    doomed: str = ""
    """Why it is being ended; empty while it may go on."""
    killed_at_s: float = float("inf")
    """When SIGKILL comes; until then it may linger."""
    exit_code: int | None = None
    alive: bool = True
    gpu_milli: int = FULL_MILLI

    @property
    def launch(self) -> tuple[str, int]:
        """The job, and the decision by which this is one of its workers."""
        return parse_unit(self.job_id)[0], self.epoch


class Machines:
    def __init__(self, world: World) -> None:
        self._world = world
        self.processes: list[SimProcess] = []
        self.finished: dict[str, int] = {}
        """How often each job ran to its own end."""
        self.finished_launches: set[tuple[str, int]] = set()
        """Workers and launches of those."""
        self.violations: list[str] = []
        self.on_spawn: list[Callable[[SimProcess], None]] = []

    def alive(self, node_id: str = "") -> list[SimProcess]:
        return [one for one in self.processes if one.alive and node_id in ("", one.node_id)]

    def spawn(self, process: SimProcess) -> None:
        for other in self.alive():
            if other.job_id == process.job_id and other.epoch == process.epoch:
                self.violated(f"{process} runs twice, also as {other}")
            elif other.launch[0] == process.launch[0] and other.epoch != process.epoch:
                self._runs_beside(process, other)
        self.processes.append(process)
        for gpu_id in process.gpu_ids:
            there = [one for one in self.alive(process.node_id) if gpu_id in one.gpu_ids]
            if sum(one.gpu_milli for one in there) > FULL_MILLI:
                self.violated(f"{process} has too much of accelerator {gpu_id}, where there is {there}")
        for told in self.on_spawn:
            told(process)

    def _runs_beside(self, process: SimProcess, other: SimProcess) -> None:
        if not self.is_overdue(other):
            self.violated(f"{process} runs beside {other}, which is of another launch")

    def violated(self, what: str) -> None:
        self.violations.append(f"{self._world.now_s:.2f}: {what}")

    def is_overdue(self, process: SimProcess) -> bool:
        """Whether its dead-man timer should have ended it: a whole machine was stopped meanwhile, and nobody
        can reach into that. It ends as soon as that goes on."""
        over_s = process.until_s + process.deadman_grace_s
        return SimClock(self._world, process.node_id).monotonic_s() > over_s

    def lose_host(self, node_id: str) -> None:
        """A power cut: everything on the node is gone and nothing was written down."""
        for process in self.alive(node_id):
            process.alive = False

    def doom(self, process: SimProcess, reason: str, *, within_s: float) -> None:
        """SIGTERM now, SIGKILL within that time. It makes use of some of it."""
        process.doomed = process.doomed or reason
        lingers_s = self._world.random.uniform(0.0, within_s)
        process.killed_at_s = min(process.killed_at_s, self._world.now_s + lingers_s)

    async def run(self) -> None:
        """Lets processes end in their time. Runs beside the actors, as the kernel does."""
        while True:
            await asyncio.sleep(0.05)
            for process in self.alive():
                self._let_end(process)

    def _let_end(self, process: SimProcess) -> None:
        now_s = self._world.now_s
        if self._world.is_frozen(process.node_id):
            return
        if SimClock(self._world, process.node_id).monotonic_s() >= process.until_s:
            self.doom(process, "ended by Genie: the dead-man timer ran out", within_s=process.deadman_grace_s)
        if now_s >= process.ends_at_s and not process.doomed:
            process.exit_code = 0
            self.finished[process.job_id] = self.finished.get(process.job_id, 0) + 1
            self.finished_launches.add((process.job_id, process.epoch))
        elif now_s < process.killed_at_s:
            return
        process.alive = False
        report = report_of(process, now_s=self._world.now_s)
        body = msgspec.to_builtins(report)
        files.write_private(process.directory / "exit.json", msgspec.json.encode(body))


def report_of(process: SimProcess, *, now_s: float) -> ExitReport:
    return ExitReport(
        job_id=process.job_id,
        epoch=process.epoch,
        exit_code=process.exit_code,
        reason=process.doomed or "exit code 0",
        ended_at=EPOCH_S + now_s,
    )


class SimLauncher:
    """One agent's hand on its node's processes. `dead` when that agent was killed: then it moves nothing."""

    def __init__(self, world: World, machines: Machines, host: str) -> None:
        self._world = world
        self._machines = machines
        self._host = host
        self._mine: dict[str, SimProcess] = {}
        self.dead = False

    def end_leftovers(self, jobs_dir: Path) -> int:
        left = self._machines.alive(self._host)
        for process in left:
            process.alive = False
        return len(left)

    def start(self, plan: LaunchPlan, *, until_s: float) -> None:
        if self.dead:
            return
        seconds = float(plan.env.get(DURATION_VARIABLE, "1"))
        gpus = plan.env.get("GENIE_JOB_GPUS", "")
        process = SimProcess(
            node_id=self._host,
            gpu_ids=frozenset(int(gpu) for gpu in gpus.split(",") if gpu),
            job_id=plan.job_id,
            epoch=plan.epoch,
            directory=plan.directory,
            ends_at_s=self._world.now_s + seconds,
            until_s=until_s,
            grace_s=plan.grace_s,
            deadman_grace_s=plan.deadman_grace_s,
            gpu_milli=int(plan.env.get(SHARE_VARIABLE, FULL_MILLI)),
        )
        self._machines.spawn(process)
        self._mine[plan.job_id] = process

    def refresh(self, until_s: float) -> None:
        if not self.dead:
            for process in self._mine.values():
                process.until_s = until_s

    def kill(self, job_id: str, *, reason: str, grace_s: float | None = None) -> None:
        process = self._mine.get(job_id)
        if process is not None and not self.dead and not process.doomed:
            self._machines.doom(process, reason, within_s=process.grace_s if grace_s is None else grace_s)

    def running(self) -> frozenset[str]:
        return frozenset(self._mine)

    def exits(self) -> list[ExitReport]:
        ended = [process for process in self._mine.values() if not process.alive]
        for process in ended:
            del self._mine[process.job_id]
        return [report_of(process, now_s=self._world.now_s) for process in ended]

    async def wait_exit(self) -> None:
        while self.dead or all(process.alive for process in self._mine.values()):
            await asyncio.sleep(0.05)
        await self._world.wait_unpaused(self._host)

    def close(self) -> None:
        self._mine.clear()
