"""Starts and ends the processes of jobs: the `JobLauncher` protocol and `ShimLauncher`.

`ShimLauncher` runs each job under a shim (shim.py), which it controls over a connection. It adopts the shims
of an earlier agent. A job has ended when all of its processes have (leftovers.py). genie/sim has a launcher
without processes. Preparing a job is preparation.py's task.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from genie.agent import job_files, leftovers, shim
from genie.agent.journal import (
    AGENT_LOCK_FILE,
    PREPARED_LAUNCHES_DIR,
    SHIM_SOCKETS_DIR,
    JobRecord,
    Journal,
    parse_exit_record,
)
from genie.agent.leftovers import JOB_DIR_VARIABLE, AdoptedJob, Greeting, JobProcesses, ShimConnection
from genie.errors import NameInvalidError, NodeError, NodeUnfitError, StoreFullError
from genie.model.messages import ExitReport
from genie.processes import cgroups, files, process_table
from genie.processes.process_identity import ProcessIdentity

_log = logging.getLogger(__name__)

SHIM_KILL_DELAY_AFTER_GRACE_S = 3.0
"""After the grace period, until a shim that has not ended its job is killed together with it."""
SHIM_KILL_TIMEOUT_S = 1.0
KILL_RETRY_INTERVAL_S = 1.0
"""Interval at which processes that could not be killed are killed again."""
LAUNCHER_THREADS_MAX = 4
SILENT_SHIM_TIMEOUT_S = 10.0
"""After the adoption, until a job with a dead-man timer is killed whose shim does not respond, while no
leader has acknowledged a heartbeat. Below the shortest dead-man time of the default settings."""
SILENT_SHIM_GRACE_S = 5.0
"""Grace period assumed while the shim does not respond."""
SILENT_SHIM_REASON = "ended by Genie: its shim did not respond, and its dead-man timer has expired"
_ADOPTED_SHIM_POLL_INTERVAL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything needed to start a job. `directory` is the job's; the command runs in `work_dir`."""

    job_id: str
    epoch: int
    argv: tuple[str, ...]
    env: dict[str, str]
    directory: Path
    work_dir: Path
    log_file_bytes_max: int
    log_files_max: int
    grace_s: float
    deadman_grace_s: float
    has_deadman_timer: bool = True
    """Without it, the job runs until it ends or is killed, also without an agent."""
    record: JobRecord | None = None
    socket_path: Path | None = None
    """Where the next agent of the node connects to the shim. The job can only be adopted with this and
    `record`."""
    prepared_path: Path | None = None
    """The file with this plan, which the next agent of the node would start. It is removed immediately before
    the shim is started."""


def encode_plan(plan: LaunchPlan) -> bytes:
    """Encodes the plan for an agent of this release or of another one."""
    return msgspec.msgpack.encode(plan, enc_hook=str)


def try_decode_plan(body: bytes) -> LaunchPlan | None:
    """Returns None if another release has written it, or only a part of it was written."""
    try:
        return msgspec.msgpack.decode(body, type=LaunchPlan, dec_hook=lambda kind, value: kind(value))
    except (msgspec.DecodeError, RecursionError) as error:
        _log.warning("ignoring a prepared launch: %s", error)
        return None


class JobLauncher(Protocol):
    """Starts and ends jobs. A job with a dead-man timer ends by itself unless it is refreshed in time."""

    async def adopt_jobs_and_kill_leftovers(
        self, jobs_dir: Path, *, may_adopt: Callable[[JobRecord], bool]
    ) -> tuple[list[AdoptedJob], int]:
        """Takes over the jobs of an earlier agent that `may_adopt` accepts; kills all of its other processes
        and returns their number. `running_jobs_and_kill_errors` then lists adopted jobs, and jobs with
        survivors. `may_adopt` is called on a thread."""
        ...

    async def start_job(self, plan: LaunchPlan, *, deadman_expiry_s: float) -> None:
        """Starts a job. With a dead-man timer it may run until `deadman_expiry_s` (monotonic) unless
        refreshed. Raises NodeUnfitError. After a cancellation, the job may start nevertheless; it is then
        left to the next agent, unless it is killed."""
        ...

    def extend_deadman_timers(self, deadman_expiry_s: float) -> None:
        """Extends the dead-man timers of all running jobs that have one."""
        ...

    def kill_job(self, job_id: str, *, reason: str, grace_s: float | None = None) -> None:
        """Ends a job; `take_exit_reports` returns the report. Unknown jobs are ignored; repeated calls can
        only shorten the grace period. None means that of the plan."""
        ...

    def running_jobs_and_kill_errors(self) -> dict[str, str]:
        """All jobs that have a process, with the reason why it cannot be killed; empty if there is none.

        Includes jobs of an earlier agent that were not adopted, for which there is no exit report.
        """
        ...

    def take_exit_reports(self) -> list[ExitReport]:
        """Returns new exits; `running_jobs_and_kill_errors` no longer contains these jobs. All of their
        processes have ended."""
        ...

    async def wait_for_exit_report(self) -> None:
        """Waits until `take_exit_reports` may have a report."""
        ...

    def close(self) -> None:
        """Releases running jobs: the next agent of the node adopts them, unless their dead-man timers have
        ended them before."""
        ...


@dataclass
class _RunningShim:
    job_id: str
    epoch: int
    directory: Path
    grace_s: float
    has_deadman_timer: bool
    control_socket: socket.socket
    processes: JobProcesses
    process: subprocess.Popen[bytes] | ProcessIdentity | None
    """An adopted shim is not a child of this process; None until it has responded."""
    socket_path: Path | None = None
    received_bytes: bytes = b""
    kill_reason: str = ""
    """Reason of the kill request; empty if none was sent."""
    kill_sent_s: float = 0.0
    kill_grace_s: float = 0.0
    unsent_bytes: bytes = field(default=b"")
    is_being_killed: bool = False
    unkillable_reason: str = ""
    """Which processes could not be killed; empty if none."""
    adopted: AdoptedJob | None = None
    """None for a job that this agent has started."""

    @property
    def is_responding(self) -> bool:
        return self.adopted is None or self.adopted.is_responding

    def apply_greeting(self, greeting: Greeting) -> None:
        assert self.adopted is not None
        self.has_deadman_timer = greeting.until_s is not None
        self.grace_s = greeting.grace_s
        self.process = greeting.shim_process
        self.processes = JobProcesses(
            self.directory,
            control_groups=self.processes.control_groups,
            recorded_processes={greeting.shim_process: self.job_id},
        )
        self.adopted.mark_responding(greeting)
        if greeting.end_reason:
            self.kill_reason = greeting.end_reason
            self.kill_sent_s, self.kill_grace_s = time.monotonic(), greeting.kill_in_s


@dataclass
class _StartInProgress:
    is_killed: bool = False
    """Whether the job must end as soon as its shim has started. Counts only for a cancelled start; otherwise
    the caller of `start_job` kills the job."""


@dataclass
class _EndingJob:
    """A job whose shim has ended, or a job of an earlier agent."""

    processes: JobProcesses
    exit_report: ExitReport | None = None
    unkillable_reason: str = ""
    retry_timer: asyncio.TimerHandle | None = None


class ShimLauncher:
    """Runs real processes. Requires a running event loop; not thread-safe.

    `group`: path of the control group below which each job gets its own; None if there is none.
    `adopts_orphans`: this process is a subreaper, so that processes whose shim was killed become its
    children.
    """

    def __init__(self, control_group: str | None = None, *, adopts_orphans: bool = False) -> None:
        self._control_group = control_group
        self._adopts_orphans = adopts_orphans
        self._shims: dict[str, _RunningShim] = {}
        self._starts_in_progress: dict[str, _StartInProgress] = {}
        self._ending_jobs: dict[str, _EndingJob] = {}
        self._untaken_exits: list[ExitReport] = []
        self._has_untaken_exits = asyncio.Event()
        # Separate threads: a disk that blocks starts must not delay kills.
        self._start_thread_pool = ThreadPoolExecutor(LAUNCHER_THREADS_MAX, "genie-agent-starts")
        self._kill_thread_pool = ThreadPoolExecutor(LAUNCHER_THREADS_MAX, "genie-agent-ends")
        self._is_closed = False
        self._deadman_expiry_s = float("-inf")
        """Of the last extension; before the first one, that of adopted jobs is unknown."""

    async def adopt_jobs_and_kill_leftovers(
        self, jobs_dir: Path, *, may_adopt: Callable[[JobRecord], bool]
    ) -> tuple[list[AdoptedJob], int]:
        loop = asyncio.get_running_loop()
        connect = partial(_connect_to_shims, jobs_dir, may_adopt)
        accepted, rejected_shims = await loop.run_in_executor(self._start_thread_pool, connect)
        parents = leftovers.read_recorded_control_groups(_control_groups_file(jobs_dir)) | (
            {self._control_group} if self._control_group else set()
        )
        for record, connection in accepted:
            self._adopt_shim(record, connection, jobs_dir / record.job_id, parents)
        adopted = [each.adopted for each in self._shims.values() if each.adopted is not None]
        return adopted, await self._kill_leftovers(jobs_dir, parents, rejected_shims)

    def _adopt_shim(
        self, record: JobRecord, connection: ShimConnection, directory: Path, parent_groups: set[str]
    ) -> None:
        job_id = record.job_id
        groups = [
            path
            for parent in parent_groups
            for path in cgroups.children(parent)
            if os.path.basename(path) == connection.socket_path.name  # noqa: PTH119
        ]
        adopted_shim = self._shims[job_id] = _RunningShim(
            job_id,
            record.epoch,
            directory,
            SILENT_SHIM_GRACE_S,
            has_deadman_timer=record.has_deadman_timer,
            control_socket=connection.control_socket,
            processes=JobProcesses(directory, control_groups=dict.fromkeys(groups, job_id)),
            process=None,
            socket_path=connection.socket_path,
            received_bytes=connection.received_bytes,
            adopted=AdoptedJob(record=record, started_s=None),
        )
        loop = asyncio.get_running_loop()
        if connection.greeting is not None:
            adopted_shim.apply_greeting(connection.greeting)
        else:
            _log.warning("the shim of job %s does not respond; the state of the job is unknown", job_id)
            if record.has_deadman_timer:
                loop.call_later(SILENT_SHIM_TIMEOUT_S, self._enforce_timer_of_silent_shim, adopted_shim)
        loop.add_reader(connection.control_socket, self._on_control_socket_readable, job_id)

    def _enforce_timer_of_silent_shim(self, silent_shim: _RunningShim) -> None:
        """Ends a job whose shim cannot: it has not responded by the time that its dead-man timer expired."""
        if (
            self._is_closed
            or self._shims.get(silent_shim.job_id) is not silent_shim
            or silent_shim.is_responding
        ):
            return
        wait_s = self._deadman_expiry_s - time.monotonic()
        if wait_s <= 0:
            silent_shim.kill_reason = silent_shim.kill_reason or SILENT_SHIM_REASON
            self._kill_shim_and_job(silent_shim)
            wait_s = KILL_RETRY_INTERVAL_S
        asyncio.get_running_loop().call_later(wait_s, self._enforce_timer_of_silent_shim, silent_shim)

    async def _kill_leftovers(
        self, jobs_dir: Path, parents: set[str], rejected_shims: leftovers.JobIdByProcess
    ) -> int:
        """Kills processes of an earlier agent whose jobs were not adopted; returns their number."""
        adopted_groups = {group for each in self._shims.values() for group in each.processes.control_groups}
        adopted_ids = frozenset(self._shims)

        def find_and_kill() -> tuple[JobProcesses, int, leftovers.JobIdByProcess]:
            left = _find_leftovers(
                jobs_dir, parents, adopted_groups=adopted_groups, adopted_job_ids=adopted_ids
            )
            left.recorded_processes |= rejected_shims
            return left, *left.kill_all_processes()

        loop = asyncio.get_running_loop()
        left, count, survivors = await loop.run_in_executor(self._kill_thread_pool, find_and_kill)
        groups = left.control_groups
        for job_id in set(survivors.values()):
            rest = JobProcesses(
                jobs_dir / job_id,
                control_groups={path: job_id for path, owner in groups.items() if owner == job_id},
                recorded_processes={mark: job_id for mark, owner in survivors.items() if owner == job_id},
            )
            self._retry_kill_later(
                job_id, _EndingJob(rest), leftovers.describe_survivors(rest.recorded_processes)
            )
        for path in groups:
            cgroups.remove(path)
        used = {path for path in parents if path == self._control_group or cgroups.children(path)}
        leftovers.record_control_groups(_control_groups_file(jobs_dir), used)
        return count - len(survivors)

    async def start_job(self, plan: LaunchPlan, *, deadman_expiry_s: float) -> None:
        assert plan.job_id not in self.running_jobs_and_kill_errors(), f"{plan.job_id} is already running"
        loop = asyncio.get_running_loop()
        start = _StartInProgress()
        self._starts_in_progress[plan.job_id] = start
        starting = loop.run_in_executor(
            self._start_thread_pool, partial(self._start_shim, plan, deadman_expiry_s)
        )
        starting.add_done_callback(lambda _: self._starts_in_progress.pop(plan.job_id, None))
        try:
            new = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(partial(_release_shim_of_cancelled_start, start))
            raise
        except (OSError, StoreFullError) as error:
            raise NodeUnfitError(f"cannot start the shim of {plan.job_id}: {error}") from error
        self._shims[plan.job_id] = new
        loop.add_reader(new.control_socket, self._on_control_socket_readable, plan.job_id)

    def extend_deadman_timers(self, deadman_expiry_s: float) -> None:
        self._deadman_expiry_s = max(self._deadman_expiry_s, deadman_expiry_s)
        line = b"r %.6f\n" % deadman_expiry_s
        for running_shim in self._shims.values():
            # A stopped shim that does not read misses this refresh; a later one supersedes it.
            if running_shim.has_deadman_timer and not running_shim.unsent_bytes:
                self._send_control_line(running_shim, line)

    def kill_job(self, job_id: str, *, reason: str, grace_s: float | None = None) -> None:
        if start := self._starts_in_progress.get(job_id):
            start.is_killed = True
        running_shim = self._shims.get(job_id)
        if running_shim is None:
            return
        grace_s = running_shim.grace_s if grace_s is None else grace_s
        if not running_shim.kill_reason or grace_s < running_shim.kill_grace_s:
            running_shim.kill_reason = running_shim.kill_reason or reason
            running_shim.kill_sent_s, running_shim.kill_grace_s = time.monotonic(), grace_s
            running_shim.unsent_bytes += b"k %s\n" % json.dumps([reason, grace_s]).encode()
        elif (
            time.monotonic()
            > running_shim.kill_sent_s + running_shim.kill_grace_s + SHIM_KILL_DELAY_AFTER_GRACE_S
        ):
            self._kill_shim_and_job(running_shim)
        self._send_control_line(running_shim, b"")

    def running_jobs_and_kill_errors(self) -> dict[str, str]:
        running = {job_id: running_shim.unkillable_reason for job_id, running_shim in self._shims.items()}
        return running | {job_id: ending.unkillable_reason for job_id, ending in self._ending_jobs.items()}

    def take_exit_reports(self) -> list[ExitReport]:
        ended, self._untaken_exits = self._untaken_exits, []
        self._has_untaken_exits.clear()
        return ended

    async def wait_for_exit_report(self) -> None:
        await self._has_untaken_exits.wait()

    def close(self) -> None:
        self._is_closed = True
        for running_shim in self._shims.values():
            asyncio.get_running_loop().remove_reader(running_shim.control_socket)
            running_shim.control_socket.close()
            _wait_for_or_abandon_process(running_shim.process, timeout_s=0.0)
        for ending in self._ending_jobs.values():
            if ending.retry_timer is not None:
                ending.retry_timer.cancel()
        self._shims.clear()
        self._ending_jobs.clear()
        for threads in (self._start_thread_pool, self._kill_thread_pool):
            threads.shutdown(cancel_futures=True)

    def _send_control_line(self, running_shim: _RunningShim, control_line: bytes) -> None:
        data = running_shim.unsent_bytes + control_line
        try:
            running_shim.unsent_bytes = data[running_shim.control_socket.send(data) :] if data else b""
        except BlockingIOError:
            running_shim.unsent_bytes = data if running_shim.kill_reason else b""
        except OSError:
            running_shim.unsent_bytes = (
                b""  # the shim has ended; _on_control_socket_readable reports the exit
            )

    def _start_shim(self, plan: LaunchPlan, deadman_expiry_s: float) -> _RunningShim:
        """Runs on a thread."""
        group = f"{self._control_group}/{plan.job_id}.{plan.epoch}" if self._control_group else ""
        if group:
            cgroups.create(group)
        ours, theirs = socket.socketpair()
        try:
            with theirs, contextlib.ExitStack() as stack:
                listen_fd = -1
                if plan.socket_path is not None:
                    listen_fd = stack.enter_context(
                        leftovers.listen_for_next_agent(plan.socket_path)
                    ).fileno()
                process = _spawn_shim(
                    plan, theirs.fileno(), deadman_expiry_s, listen_fd=listen_fd, group=group
                )
        except BaseException:
            ours.close()
            if group:
                cgroups.remove(group)
            raise
        ours.setblocking(False)
        processes = JobProcesses(
            plan.directory,
            control_groups={group: plan.job_id} if group else {},
            find_orphans=partial(self._find_orphans_of_job, plan.job_id),
        )
        return _RunningShim(
            plan.job_id,
            plan.epoch,
            plan.directory,
            plan.grace_s,
            plan.has_deadman_timer,
            ours,
            processes,
            process,
            plan.socket_path,
        )

    def _find_orphans_of_job(self, job_id: str) -> leftovers.JobIdByProcess:
        """Adopted processes. They belong to a job whose shim has ended without ending them."""
        return dict.fromkeys(leftovers.find_adopted_orphans(), job_id) if self._adopts_orphans else {}

    # --- the end of a job -------------------------------------------------------------------

    def _on_control_socket_readable(self, job_id: str) -> None:
        running_shim = self._shims[job_id]
        # Read to the end each time: lines that the shim left unread cause an error on the socket, which
        # uvloop reports once and then stops watching it.
        while data := _try_receive_nowait(running_shim.control_socket):
            running_shim.received_bytes = (running_shim.received_bytes + data)[
                : job_files.SMALL_FILE_BYTES_MAX
            ]
        if not running_shim.is_responding:
            self._read_late_greeting(running_shim)
        if data is None:
            return
        asyncio.get_running_loop().remove_reader(running_shim.control_socket)
        running_shim.control_socket.close()
        del self._shims[job_id]
        ending = self._ending_jobs[job_id] = _EndingJob(running_shim.processes)
        self._end_job_on_thread(job_id, ending, partial(_read_exit_and_kill_survivors, running_shim, ending))

    def _read_late_greeting(self, silent_shim: _RunningShim) -> None:
        assert silent_shim.socket_path is not None
        try:
            found = leftovers.parse_greeting(
                silent_shim.received_bytes, socket_name=silent_shim.socket_path.name
            )
        except ValueError as error:
            silent_shim.kill_reason = f"ended by Genie: the agent cannot control its shim: {error}"
            self._kill_shim_and_job(silent_shim)
            return
        if found is not None:
            greeting, silent_shim.received_bytes = found
            silent_shim.apply_greeting(greeting)
            _log.info("the shim of job %s has responded", silent_shim.job_id)

    def _end_job_on_thread(self, job_id: str, ending: _EndingJob, end_job: Callable[[], str]) -> None:
        """Runs `end_job` on a thread; it returns why the job has not ended, empty if it has."""

        def on_done(done: asyncio.Future[str]) -> None:
            if self._is_closed or done.cancelled():
                return
            error = done.exception()
            if error is not None:
                _log.error("could not end the processes of %s", job_id, exc_info=error)
            if stuck := f"internal error: {error}" if error else done.result():
                self._retry_kill_later(job_id, ending, stuck)
                return
            del self._ending_jobs[job_id]
            if ending.exit_report is not None:
                self._untaken_exits.append(ending.exit_report)
                self._has_untaken_exits.set()

        asyncio.get_running_loop().run_in_executor(self._kill_thread_pool, end_job).add_done_callback(on_done)

    def _retry_kill_later(self, job_id: str, ending: _EndingJob, unkillable_reason: str) -> None:
        if ending.unkillable_reason != unkillable_reason:
            _log.error("job %s: %s; its accelerators are not used until it ends", job_id, unkillable_reason)
        ending.unkillable_reason = unkillable_reason
        self._ending_jobs[job_id] = ending
        ending.retry_timer = asyncio.get_running_loop().call_later(
            KILL_RETRY_INTERVAL_S,
            self._end_job_on_thread,
            job_id,
            ending,
            partial(_kill_and_describe_survivors, ending, timeout_s=0.0),
        )

    def _kill_shim_and_job(self, running_shim: _RunningShim) -> None:
        """Kills the shim together with its job. Its socket then reports the end."""

        def on_done(done: asyncio.Future[str]) -> None:
            running_shim.is_being_killed = False
            if not done.cancelled() and done.exception() is None:
                running_shim.unkillable_reason = done.result()

        if running_shim.is_being_killed:
            return
        _log.error("the shim of %s did not end its job; killing both", running_shim.job_id)
        running_shim.is_being_killed = True
        work = partial(_kill_shim_and_describe_survivors, running_shim)
        asyncio.get_running_loop().run_in_executor(self._kill_thread_pool, work).add_done_callback(on_done)


def _connect_to_shims(
    jobs_dir: Path, may_adopt: Callable[[JobRecord], bool]
) -> tuple[list[tuple[JobRecord, ShimConnection]], leftovers.JobIdByProcess]:
    """Returns the shims whose jobs are adopted, at most one of each job, and the processes of those that are
    killed. Blocks."""
    accepted: dict[str, tuple[JobRecord, ShimConnection]] = {}
    rejected: leftovers.JobIdByProcess = {}
    found: list[tuple[JobRecord | None, ShimConnection]] = []
    for connection in leftovers.connect_to_shims(jobs_dir.parent / SHIM_SOCKETS_DIR):
        greeting = connection.greeting
        record = _read_record_of_silent_shim(jobs_dir, connection) if greeting is None else greeting.job
        found.append((record, connection))
    # By descending epoch: the last launch of a job is adopted.
    found.sort(key=lambda each: -1 if each[0] is None else each[0].epoch, reverse=True)
    for record, connection in found:
        greeting = connection.greeting
        if record is not None and record.job_id not in accepted and may_adopt(record):
            accepted[record.job_id] = (record, connection)
            continue
        _log.error(
            "ending job %s, epoch %s: %s",
            *connection.job_id_and_epoch,
            "this is not its last launch"
            if record is not None
            else "its shim does not respond, and this node has no record of this launch",
        )
        if greeting is not None:
            rejected[greeting.shim_process] = greeting.job.job_id
        connection.control_socket.close()
        job_files.try_remove_any(connection.socket_path)
    return list(accepted.values()), rejected


def _read_record_of_silent_shim(jobs_dir: Path, connection: ShimConnection) -> JobRecord | None:
    """The record of its job from the journal; None if there is none of this launch."""
    job_id, epoch = connection.job_id_and_epoch
    try:
        record = Journal(jobs_dir.parent).read_job_record(job_id)
    except NameInvalidError:
        return None
    return record if record is not None and (record.job_id, str(record.epoch)) == (job_id, epoch) else None


def _control_groups_file(jobs_dir: Path) -> Path:
    return jobs_dir.parent / leftovers.CONTROL_GROUPS_FILE


def kill_jobs_of_stopped_agents(agents_dir: Path, *, excluded_node_id: str = "") -> int:
    """Kills what stopped agents of this state directory have left running. Returns the number of processes.

    Accelerators belong to the machine, but each agent knows only the jobs of its own node. Blocks."""
    node_dirs = (path for path in sorted(agents_dir.glob("*")) if path.name != excluded_node_id)
    return sum(map(kill_jobs_of_stopped_agent, node_dirs))


def kill_jobs_of_stopped_agent(node_dir: Path, *, must_end: bool = False) -> int:
    """Kills what an agent that was killed has left running, and removes what it has left to be started, if no
    agent of the node runs now. Returns the number of processes. Blocks.

    With `must_end`, raises NodeError if processes survive, or if an agent of the node may be running."""
    if not (node_dir / "jobs").is_dir():
        return 0
    try:
        lock = files.FileLock.try_acquire(node_dir / AGENT_LOCK_FILE)
    except OSError as error:
        _log.warning("could not look for jobs that are left in %s: %s", node_dir, error.strerror)
        lock = None
    if lock is None:
        if must_end:
            raise NodeError(f"could not end the jobs in {node_dir}: an agent of that node may be running")
        return 0
    try:
        groups = leftovers.read_recorded_control_groups(node_dir / leftovers.CONTROL_GROUPS_FILE)
        count, survivors = _find_leftovers(node_dir / "jobs", groups).kill_all_processes()
        for name in (PREPARED_LAUNCHES_DIR, SHIM_SOCKETS_DIR):
            job_files.try_remove_tree(node_dir / name)
    finally:
        lock.release()
    if survivors:
        _log.error("after the end of the agent: %s", leftovers.describe_survivors(survivors))
        if must_end:
            raise NodeError(f"could not end all jobs: {leftovers.describe_survivors(survivors)}")
    return count - len(survivors)


def _find_leftovers(
    jobs_dir: Path,
    parent_groups: set[str],
    *,
    adopted_groups: Collection[str] = (),
    adopted_job_ids: frozenset[str] = frozenset(),
) -> JobProcesses:
    """The processes of all jobs of a node that were not adopted."""
    groups = {
        path: _job_id_of_control_group(path)
        for parent in parent_groups
        for path in cgroups.children(parent)
        if path not in adopted_groups
    }
    job_dirs = {path.parent for name in ("started", "exit") for path in jobs_dir.glob(f"*/{name}.json")}
    known = {
        mark: job_dir.name
        for job_dir in job_dirs
        if job_dir.name not in adopted_job_ids
        for mark in leftovers.read_recorded_processes(job_dir)
    }
    return JobProcesses(
        jobs_dir, control_groups=groups, recorded_processes=known, excluded_job_ids=adopted_job_ids
    )


def _read_exit_and_kill_survivors(ended_shim: _RunningShim, ending: _EndingJob) -> str:
    """Reads the exit record, and kills what the shim has left. Returns why the job has not ended."""
    _wait_for_or_abandon_process(ended_shim.process, timeout_s=SHIM_KILL_TIMEOUT_S)
    if ended_shim.socket_path is not None:
        job_files.try_remove_any(ended_shim.socket_path)
    try:
        ending.exit_report = parse_exit_record(
            ended_shim.received_bytes, job_id=ended_shim.job_id, epoch=ended_shim.epoch
        )
        survivors = leftovers.parse_survivors(ended_shim.received_bytes)
        # A shim that has sent its record has ended all of its descendants but these.
        if not survivors and not ended_shim.processes.has_process_in_group():
            ended_shim.processes.remove_control_groups()
            return ""
        ended_shim.processes.recorded_processes |= dict.fromkeys(survivors, ended_shim.job_id)
    except msgspec.DecodeError:
        ending.exit_report = _read_exit_report(ended_shim)
        ended_shim.processes.recorded_processes |= dict.fromkeys(
            leftovers.read_recorded_processes(ended_shim.directory), ended_shim.job_id
        )
    return _kill_and_describe_survivors(ending, timeout_s=SHIM_KILL_TIMEOUT_S)


def _kill_and_describe_survivors(ending: _EndingJob, *, timeout_s: float) -> str:
    _, survivors = ending.processes.kill_all_processes(timeout_s=timeout_s)
    if survivors:
        return leftovers.describe_survivors(survivors)
    ending.processes.remove_control_groups()
    return ""


def _kill_shim_and_describe_survivors(running_shim: _RunningShim) -> str:
    directory, job_id = running_shim.directory, running_shim.job_id
    running_shim.processes.recorded_processes |= dict.fromkeys(
        leftovers.read_recorded_processes(directory), job_id
    )
    _, survivors = running_shim.processes.kill_all_processes(timeout_s=SHIM_KILL_TIMEOUT_S)
    return leftovers.describe_survivors(survivors) if survivors else ""


def _read_exit_report(ended_shim: _RunningShim) -> ExitReport:
    """The exit record from the file, or one for a shim that has not written any."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return parse_exit_record(
            job_files.read_small_file(ended_shim.directory / "exit.json"),
            job_id=ended_shim.job_id,
            epoch=ended_shim.epoch,
        )
    _log.error("the shim of %s exited without a valid exit record; killing its job", ended_shim.job_id)
    return ExitReport(
        job_id=ended_shim.job_id,
        epoch=ended_shim.epoch,
        exit_code=None,
        reason=ended_shim.kill_reason or "ended by Genie: the shim exited unexpectedly",
        ended_at=_modified_time_s(ended_shim.directory),
    )


def _release_shim_of_cancelled_start(start: _StartInProgress, starting: asyncio.Future[_RunningShim]) -> None:
    """Leaves a job that started while the agent ended to the next agent, which adopts it. Ends it if it was
    killed, or cannot be adopted."""
    if starting.cancelled() or starting.exception() is not None:
        return
    new = starting.result()
    new.control_socket.close()
    is_killed = start.is_killed or new.socket_path is None
    if is_killed:
        assert isinstance(new.process, subprocess.Popen)
        new.process.kill()
    _wait_for_or_abandon_process(new.process, timeout_s=0.1 if is_killed else 0.0)


def _wait_for_or_abandon_process(
    process: subprocess.Popen[bytes] | ProcessIdentity | None, *, timeout_s: float
) -> None:
    if process is None:
        return
    if isinstance(process, ProcessIdentity):
        deadline_s = time.monotonic() + timeout_s
        while process.is_alive and time.monotonic() < deadline_s:
            time.sleep(_ADOPTED_SHIM_POLL_INTERVAL_S)
        return
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # Left to its dead-man timer; a return code keeps Popen from warning about it.
        process.returncode = 0
    else:
        process_table.children_in_own_sessions.discard(process.pid)


def _job_id_of_control_group(path: str) -> str:
    """The job ID of a control group, which is named JOB_ID.EPOCH."""
    return os.path.basename(path).rpartition(".")[0]  # noqa: PTH119


def _try_receive_nowait(control: socket.socket) -> bytes | None:
    """Returns received data, empty at the end of the stream, None if there is none yet."""
    try:
        return control.recv(job_files.SMALL_FILE_BYTES_MAX)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        # Data that the shim sent before it ended can still be read.
        with contextlib.suppress(OSError):
            return control.recv(job_files.SMALL_FILE_BYTES_MAX)
    except OSError:
        pass
    return b""


def _spawn_shim(
    plan: LaunchPlan, control_fd: int, deadman_expiry_s: float, *, listen_fd: int, group: str
) -> subprocess.Popen[bytes]:
    config = {
        "job_id": plan.job_id,
        "epoch": plan.epoch,
        "argv": list(plan.argv),
        "cwd": str(plan.work_dir),
        "env": plan.env,
        "log_dir": str(plan.directory / "log"),
        "log_bytes_max": plan.log_file_bytes_max,
        "log_files_max": plan.log_files_max,
        "until_s": deadman_expiry_s if plan.has_deadman_timer else None,
        "grace_s": plan.grace_s,
        "deadman_grace_s": plan.deadman_grace_s,
        "exit_path": str(plan.directory / "exit.json"),
        "started_path": str(plan.directory / "started.json"),
        "control_fd": control_fd,
        "listen_fd": listen_fd,
        "job": None if plan.record is None else msgspec.to_builtins(plan.record),
        "group": group,
    }
    path = plan.directory / shim.CONFIG_FILE
    files.write_private(path, json.dumps(config).encode())
    log_fd = os.open(plan.directory / "shim.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(log_fd, "wb") as log, process_table.children_in_own_sessions_lock:
        if plan.prepared_path is not None:
            job_files.remove_any(plan.prepared_path)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", shim.__file__, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={JOB_DIR_VARIABLE: str(plan.directory)},
            pass_fds=[fd for fd in (control_fd, listen_fd) if fd >= 0],
            cwd="/",
            start_new_session=True,
        )
        process_table.children_in_own_sessions.add(process.pid)
    return process


def _modified_time_s(path: Path) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return 0.0
