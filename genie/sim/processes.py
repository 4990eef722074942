"""Simulated job processes. Every start is checked against the processes that are running.

`SimMachines` knows the true state, which controllers and agents cannot see. Overallocated accelerators and
duplicate jobs are recorded in `violations` (the code under test could catch an exception). `SimLauncher` is
the launcher of an agent. Its processes end by themselves, by request, or when the dead-man timer expires, and
write an exit record as the real shim does. They go on when the agent is killed; the next agent adopts them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

from genie.agent.jobs import CONTACT_LOST_REASON
from genie.agent.journal import JobRecord
from genie.agent.launcher import LaunchPlan
from genie.agent.leftovers import AdoptedJob
from genie.model.allocation import FULL_MILLI
from genie.model.job import parse_worker_name
from genie.model.messages import ExitReport
from genie.processes import files
from genie.sim.disk import SimDisk
from genie.sim.world import START_WALL_TIME_S, SimClock, World

DURATION_ENV_VARIABLE = "SIM_SECONDS"
GPU_MILLI_ENV_VARIABLE = "SIM_GPU_MILLI"
UNKILLABLE_ENV_VARIABLE = "SIM_UNKILLABLE_S"
"""How long a process of the job survives SIGKILL and the end of its command, in seconds."""
FILLS_DISK_ENV_VARIABLE = "SIM_FILLS_DISK"
"""Set if the job fills the disk of its node while it runs."""


@dataclass(eq=False)
class SimProcess:
    node_id: str
    gpu_ids: frozenset[int]
    job_id: str
    epoch: int
    directory: Path
    record: JobRecord
    started_s: float
    """Time of its start, by the clock of the node."""
    ends_at_s: float
    deadman_expiry_s: float
    """Expiry of the dead-man timer, by the clock of the node; infinite without one."""
    grace_s: float
    deadman_grace_s: float
    termination_reason: str = ""
    """Why the process is being terminated; empty until then."""
    sigkill_at_s: float = float("inf")
    """Time of SIGKILL; the process may run until then."""
    exit_code: int | None = None
    is_alive: bool = True
    gpu_milli: int = FULL_MILLI
    unkillable_s: float = 0.0
    survives_sigkill_until_s: float | None = None
    """Set when the command has ended but a process of the job cannot be killed."""

    @property
    def has_deadman_timer(self) -> bool:
        return self.deadman_expiry_s < float("inf")

    @property
    def job_id_and_epoch(self) -> tuple[str, int]:
        """Job ID and epoch."""
        return parse_worker_name(self.job_id)[0], self.epoch


class SimMachines:
    def __init__(self, world: World) -> None:
        self._world = world
        self._live_processes: list[SimProcess] = []
        self.completed_run_count_by_job: dict[str, int] = {}
        """Number of completed runs of each job."""
        self.completed_workers_and_epochs: set[tuple[str, int]] = set()
        """Completed workers with their epoch."""
        self.rolled_back_launches: set[tuple[str, int]] = set()
        """Job IDs and epochs of launches that a restored store does not contain. Their nodes end them; until
        then the job may run again elsewhere."""
        self.violations: list[str] = []
        self.spawn_callbacks: list[Callable[[SimProcess], None]] = []
        self.termination_callbacks: list[Callable[[SimProcess], None]] = []
        """Called when a process is terminated, or loses power: it does not end by itself."""
        self.exit_callbacks: list[Callable[[SimProcess], None]] = []
        self.disk_by_host: dict[str, SimDisk] = {}
        """By host."""

    def live_processes(self, node_id: str = "") -> list[SimProcess]:
        return [one for one in self._live_processes if node_id in ("", one.node_id)]

    def start_process(self, process: SimProcess) -> None:
        for other in self.live_processes():
            if other.job_id == process.job_id and other.epoch == process.epoch:
                self.report_violation(f"duplicate process: {process} and {other}")
            elif other.job_id_and_epoch[0] == process.job_id_and_epoch[0] and other.epoch != process.epoch:
                self._check_no_overlap_of_epochs(process, other)
        self._live_processes.append(process)
        for gpu_id in process.gpu_ids:
            there = [one for one in self.live_processes(process.node_id) if gpu_id in one.gpu_ids]
            if sum(one.gpu_milli for one in there) > FULL_MILLI:
                self.report_violation(f"accelerator {gpu_id} is overallocated by {process}: {there}")
        for callback in self.spawn_callbacks:
            callback(process)

    def _check_no_overlap_of_epochs(self, process: SimProcess, other: SimProcess) -> None:
        is_rolled_back = other.job_id_and_epoch in self.rolled_back_launches
        if not is_rolled_back and not self.is_deadman_timer_expired(other):
            self.report_violation(f"{process} overlaps with {other} of another epoch")

    def report_violation(self, description: str) -> None:
        self.violations.append(f"{self._world.now_s:.2f}: {description}")

    def is_deadman_timer_expired(self, process: SimProcess) -> bool:
        """Return whether the dead-man timer has expired, on a machine that is frozen until it resumes."""
        over_s = process.deadman_expiry_s + process.deadman_grace_s
        return SimClock(self._world, process.node_id).monotonic_s() > over_s

    def power_off(self, node_id: str) -> None:
        """End all processes of a node without exit records."""
        for process in self.live_processes(node_id):
            process.termination_reason = process.termination_reason or "power outage"
            self._call_termination_callbacks(process)
            self._end_process(process)
        if node_id in self.disk_by_host:
            self.disk_by_host[node_id].lose_power()

    def terminate(self, process: SimProcess, reason: str, *, within_s: float) -> None:
        """Send SIGTERM; the process ends at a random time within the grace period."""
        if not process.termination_reason:
            process.termination_reason = reason
            self._call_termination_callbacks(process)
        lingers_s = self._world.random.uniform(0.0, within_s)
        process.sigkill_at_s = min(process.sigkill_at_s, self._world.now_s + lingers_s)

    async def end_due_processes(self) -> None:
        """End processes at their time. Runs concurrently with controllers and agents."""
        while True:
            await asyncio.sleep(0.05)
            for process in self.live_processes():
                self._end_if_due(process)

    def _end_if_due(self, process: SimProcess) -> None:
        now_s = self._world.now_s
        if self._world.is_frozen(process.node_id):
            return
        if process.survives_sigkill_until_s is not None:
            if now_s >= process.survives_sigkill_until_s:
                self._end_process(process)
            return
        if SimClock(self._world, process.node_id).monotonic_s() >= process.deadman_expiry_s:
            self.terminate(process, CONTACT_LOST_REASON, within_s=process.deadman_grace_s)
        if now_s >= process.ends_at_s and not process.termination_reason:
            process.exit_code = 0
            self.completed_run_count_by_job[process.job_id] = (
                self.completed_run_count_by_job.get(process.job_id, 0) + 1
            )
            self.completed_workers_and_epochs.add((process.job_id, process.epoch))
        elif now_s < process.sigkill_at_s:
            return
        report = make_exit_report(process, now_s=self._world.now_s)
        body = msgspec.to_builtins(report)
        disk = self.disk_by_host.get(process.node_id)
        with disk.record_durable_files() if disk else nullcontext():
            files.write_private(process.directory / "exit.json", msgspec.json.encode(body))
        if process.unkillable_s:
            process.survives_sigkill_until_s = now_s + process.unkillable_s
        else:
            self._end_process(process)

    def kill_leftovers(self, node_id: str, *, adopted: Collection[SimProcess]) -> int:
        """End the processes of an earlier agent, except those that were adopted or cannot be killed. Return
        their number."""
        count = 0
        for process in self.live_processes(node_id):
            if process in adopted:
                continue
            if not process.termination_reason:
                process.termination_reason = "killed as a leftover"
                self._call_termination_callbacks(process)
            if process.unkillable_s:
                process.survives_sigkill_until_s = (
                    process.survives_sigkill_until_s or self._world.now_s + process.unkillable_s
                )
            else:
                self._end_process(process)
                count += 1
        return count

    def _end_process(self, process: SimProcess) -> None:
        process.is_alive = False
        self._live_processes.remove(process)
        for callback in self.exit_callbacks:
            callback(process)
        if process.node_id in self.disk_by_host:
            self.disk_by_host[process.node_id].fill_causes.discard(process.job_id_and_epoch)

    def _call_termination_callbacks(self, process: SimProcess) -> None:
        for callback in self.termination_callbacks:
            callback(process)


def make_exit_report(process: SimProcess, *, now_s: float) -> ExitReport:
    return ExitReport(
        job_id=process.job_id,
        epoch=process.epoch,
        exit_code=process.exit_code,
        reason=process.termination_reason or "exit code 0",
        ended_at=START_WALL_TIME_S + now_s,
    )


class SimLauncher:
    """Launcher of one agent. After the agent was killed (`is_agent_dead`), it has no effect."""

    def __init__(self, world: World, machines: SimMachines, host: str) -> None:
        self._world = world
        self._machines = machines
        self._host = host
        self._process_by_job: dict[str, SimProcess] = {}
        self._leftovers: list[SimProcess] = []
        """Processes of an earlier agent that cannot be killed."""
        self._has_exits = asyncio.Event()
        machines.exit_callbacks.append(self._on_process_exit)
        self.is_agent_dead = False

    async def adopt_jobs_and_kill_leftovers(
        self, jobs_dir: Path, *, may_adopt: Callable[[JobRecord], bool]
    ) -> tuple[list[AdoptedJob], int]:
        live = self._machines.live_processes(self._host)
        has_shim = [process for process in live if process.survives_sigkill_until_s is None]
        adopted = [process for process in has_shim if may_adopt(process.record)]
        self._process_by_job = {process.job_id: process for process in adopted}
        count = self._machines.kill_leftovers(self._host, adopted=adopted)
        self._leftovers = [process for process in live if process.is_alive and process not in adopted]
        return [_make_adopted_job(process) for process in adopted], count

    async def start_job(self, plan: LaunchPlan, *, deadman_expiry_s: float) -> None:
        if self.is_agent_dead:
            return
        assert plan.record is not None
        assert plan.prepared_path is not None
        plan.prepared_path.unlink()
        seconds = float(plan.env.get(DURATION_ENV_VARIABLE, "1"))
        gpus = plan.env.get("GENIE_JOB_GPUS", "")
        process = SimProcess(
            node_id=self._host,
            gpu_ids=frozenset(int(gpu) for gpu in gpus.split(",") if gpu),
            job_id=plan.job_id,
            epoch=plan.epoch,
            directory=plan.directory,
            record=plan.record,
            started_s=SimClock(self._world, self._host).monotonic_s(),
            ends_at_s=self._world.now_s + seconds,
            deadman_expiry_s=deadman_expiry_s if plan.has_deadman_timer else float("inf"),
            grace_s=plan.grace_s,
            deadman_grace_s=plan.deadman_grace_s,
            gpu_milli=int(plan.env.get(GPU_MILLI_ENV_VARIABLE, FULL_MILLI)),
            unkillable_s=float(plan.env.get(UNKILLABLE_ENV_VARIABLE, "0")),
        )
        if FILLS_DISK_ENV_VARIABLE in plan.env:
            self._machines.disk_by_host[self._host].fill_causes.add(process.job_id_and_epoch)
        self._machines.start_process(process)
        self._process_by_job[plan.job_id] = process

    def extend_deadman_timers(self, deadman_expiry_s: float) -> None:
        if not self.is_agent_dead:
            for process in self._process_by_job.values():
                # A job that is being ended is not continued: a later extension does not count for it.
                if process.has_deadman_timer and not process.termination_reason:
                    process.deadman_expiry_s = deadman_expiry_s

    def kill_job(self, job_id: str, *, reason: str, grace_s: float | None = None) -> None:
        process = self._process_by_job.get(job_id)
        if process is not None and not self.is_agent_dead and not process.termination_reason:
            self._machines.terminate(
                process, reason, within_s=process.grace_s if grace_s is None else grace_s
            )

    def running_jobs_and_kill_errors(self) -> dict[str, str]:
        leftovers = {process.job_id: process for process in self._leftovers if process.is_alive}
        return {
            job_id: _why_unkillable(process) for job_id, process in (leftovers | self._process_by_job).items()
        }

    def take_exit_reports(self) -> list[ExitReport]:
        ended = [process for process in self._process_by_job.values() if not process.is_alive]
        for process in ended:
            del self._process_by_job[process.job_id]
        return [make_exit_report(process, now_s=self._world.now_s) for process in ended]

    async def wait_for_exit_report(self) -> None:
        while self.is_agent_dead or all(process.is_alive for process in self._process_by_job.values()):
            self._has_exits.clear()
            await self._has_exits.wait()
        await self._world.wait_unpaused(self._host)

    def close(self) -> None:
        self._process_by_job.clear()

    def _on_process_exit(self, process: SimProcess) -> None:
        if self._process_by_job.get(process.job_id) is process:
            self._has_exits.set()


def _make_adopted_job(process: SimProcess) -> AdoptedJob:
    return AdoptedJob(
        record=process.record,
        started_s=process.started_s,
        kill_reason=process.termination_reason,
    )


def _why_unkillable(process: SimProcess) -> str:
    return "" if process.survives_sigkill_until_s is None else "1 process cannot be killed (injected fault)"
