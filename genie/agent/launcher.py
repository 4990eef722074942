"""Starts and ends the processes of jobs: the `JobLauncher` protocol and `ShimLauncher`.

`ShimLauncher` runs each job under a shim (shim.py), which it controls over a socket pair. A job has ended
when all of its processes have (leftovers.py). genie/sim has a launcher without processes. Preparing a job is
preparation.py's task.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from genie.agent import job_files, leftovers, shim
from genie.agent.journal import parse_exit
from genie.agent.leftovers import JOB_DIR_VARIABLE, JobProcesses
from genie.errors import NodeUnfitError, StoreFullError
from genie.model.messages import ExitReport
from genie.processes import cgroups, files, process_table

_log = logging.getLogger(__name__)

FORCE_AFTER_S = 3.0
"""After the grace period, until a shim that has not ended its job is killed together with it."""
FORCE_TIMEOUT_S = 1.0
RECHECK_S = 1.0
"""Interval at which processes that could not be killed are killed again."""
THREADS_MAX = 4
_LOG_NAME = re.compile(r"[0-9]{1,20}\.log")


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


class JobLauncher(Protocol):
    """Starts and ends jobs. A job ends by itself unless it is refreshed in time (dead-man timer)."""

    def end_leftovers(self, jobs_dir: Path) -> int:
        """Kills processes of an earlier agent; returns their number. `running` lists jobs with survivors."""
        ...

    async def start(self, plan: LaunchPlan, *, until_s: float) -> None:
        """Starts a job that may run until `until_s` (monotonic) unless refreshed. Raises NodeUnfitError."""
        ...

    def refresh(self, until_s: float) -> None:
        """Extends the dead-man timers of all running jobs."""
        ...

    def kill(self, job_id: str, *, reason: str, grace_s: float | None = None) -> None:
        """Ends a job; `exits` returns the report. Unknown jobs are ignored; repeated calls can only shorten
        the grace period. None means that of the plan."""
        ...

    def running(self) -> dict[str, str]:
        """All jobs that have a process, with the reason why it cannot be killed; empty if there is none.

        Includes jobs of an earlier agent, for which there is no exit report.
        """
        ...

    def exits(self) -> list[ExitReport]:
        """Returns new exits; `running` no longer contains these jobs. All of their processes have ended."""
        ...

    async def wait_exit(self) -> None:
        """Waits until `exits` may have a report."""
        ...

    def close(self) -> None:
        """Releases running jobs; their dead-man timers end them."""
        ...


@dataclass
class _Shim:
    plan: LaunchPlan
    process: subprocess.Popen[bytes]
    control: socket.socket
    processes: JobProcesses
    received: bytes = b""
    reason: str = ""
    """Reason of the kill request; empty if none was sent."""
    kill_sent_s: float = 0.0
    grace_s: float = 0.0
    unsent: bytes = field(default=b"")
    forcing: bool = False
    stuck: str = ""
    """Which processes could not be killed; empty if none."""

    @property
    def job_id(self) -> str:
        return self.plan.job_id


@dataclass
class _Ending:
    """A job whose shim has ended, or a job of an earlier agent."""

    processes: JobProcesses
    report: ExitReport | None = None
    stuck: str = ""
    timer: asyncio.TimerHandle | None = None


class ShimLauncher:
    """Runs real processes. Requires a running event loop; not thread-safe.

    `group`: path of the control group below which each job gets its own; None if there is none.
    `adopts_orphans`: this process is a subreaper, so that processes whose shim was killed become its
    children.
    """

    def __init__(self, group: str | None = None, *, adopts_orphans: bool = False) -> None:
        self._group = group
        self._adopts_orphans = adopts_orphans
        self._shims: dict[str, _Shim] = {}
        self._ending: dict[str, _Ending] = {}
        self._ended: list[ExitReport] = []
        self._has_ended = asyncio.Event()
        # Separate threads: a disk that blocks starts must not delay kills.
        self._starts = ThreadPoolExecutor(THREADS_MAX, "genie-agent-starts")
        self._ends = ThreadPoolExecutor(THREADS_MAX, "genie-agent-ends")
        self._closed = False

    def end_leftovers(self, jobs_dir: Path) -> int:
        record = jobs_dir.parent / leftovers.GROUPS_FILE
        parents = leftovers.read_groups(record) | ({self._group} if self._group else set())
        groups = {path: _job_of_group(path) for parent in parents for path in cgroups.children(parent)}
        job_dirs = {path.parent for name in ("started", "exit") for path in jobs_dir.glob(f"*/{name}.json")}
        known = {mark: job_dir.name for job_dir in job_dirs for mark in leftovers.read_known(job_dir)}
        count, survivors = JobProcesses(jobs_dir, groups=groups, known=known).end()
        for job_id in set(survivors.values()):
            rest = JobProcesses(
                jobs_dir / job_id,
                groups={path: job_id for path, owner in groups.items() if owner == job_id},
                known={mark: job_id for mark, owner in survivors.items() if owner == job_id},
            )
            self._retry_later(job_id, _Ending(rest), leftovers.describe(rest.known))
        for path in groups:
            cgroups.remove(path)
        used = {path for path in parents if path == self._group or cgroups.children(path)}
        leftovers.record_groups(record, used)
        return count - len(survivors)

    async def start(self, plan: LaunchPlan, *, until_s: float) -> None:
        assert plan.job_id not in self.running(), f"{plan.job_id} is already running"
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(self._starts, partial(self._start_shim, plan, until_s))
        try:
            new = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_discard_shim)
            raise
        except (OSError, StoreFullError) as error:
            raise NodeUnfitError(f"cannot start the shim of {plan.job_id}: {error}") from error
        self._shims[plan.job_id] = new
        loop.add_reader(new.control, self._on_readable, plan.job_id)

    def refresh(self, until_s: float) -> None:
        line = b"r %.6f\n" % until_s
        for running_shim in self._shims.values():
            # A stopped shim that does not read misses this refresh; a later one supersedes it.
            if not running_shim.unsent:
                self._send(running_shim, line)

    def kill(self, job_id: str, *, reason: str, grace_s: float | None = None) -> None:
        running_shim = self._shims.get(job_id)
        if running_shim is None:
            return
        grace_s = running_shim.plan.grace_s if grace_s is None else grace_s
        if not running_shim.reason or grace_s < running_shim.grace_s:
            running_shim.reason = running_shim.reason or reason
            running_shim.kill_sent_s, running_shim.grace_s = time.monotonic(), grace_s
            running_shim.unsent += b"k %s\n" % json.dumps([reason, grace_s]).encode()
        elif time.monotonic() > running_shim.kill_sent_s + running_shim.grace_s + FORCE_AFTER_S:
            self._force_end(running_shim)
        self._send(running_shim, b"")

    def running(self) -> dict[str, str]:
        running = {job_id: running_shim.stuck for job_id, running_shim in self._shims.items()}
        return running | {job_id: ending.stuck for job_id, ending in self._ending.items()}

    def exits(self) -> list[ExitReport]:
        ended, self._ended = self._ended, []
        self._has_ended.clear()
        return ended

    async def wait_exit(self) -> None:
        await self._has_ended.wait()

    def close(self) -> None:
        self._closed = True
        for running_shim in self._shims.values():
            asyncio.get_running_loop().remove_reader(running_shim.control)
            running_shim.control.close()
            _wait_process(running_shim.process, timeout_s=0.0)
        for ending in self._ending.values():
            if ending.timer is not None:
                ending.timer.cancel()
        self._shims.clear()
        self._ending.clear()
        for threads in (self._starts, self._ends):
            threads.shutdown(cancel_futures=True)

    def _send(self, running_shim: _Shim, line: bytes) -> None:
        data = running_shim.unsent + line
        try:
            running_shim.unsent = data[running_shim.control.send(data) :] if data else b""
        except BlockingIOError:
            running_shim.unsent = data if running_shim.reason else b""
        except OSError:
            running_shim.unsent = b""  # the shim has ended; _on_readable reports the exit

    def _start_shim(self, plan: LaunchPlan, until_s: float) -> _Shim:
        """Runs on a thread."""
        group = f"{self._group}/{plan.job_id}.{plan.epoch}" if self._group else ""
        if group:
            cgroups.create(group)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _spawn(plan, theirs.fileno(), until_s, group=group)
        except BaseException:
            ours.close()
            if group:
                cgroups.remove(group)
            raise
        ours.setblocking(False)
        processes = JobProcesses(
            plan.directory,
            groups={group: plan.job_id} if group else {},
            orphans=partial(self._orphans, plan.job_id),
        )
        return _Shim(plan, process, ours, processes)

    def _orphans(self, job_id: str) -> leftovers.Survivors:
        """Adopted processes. They belong to a job whose shim has ended without ending them."""
        return dict.fromkeys(leftovers.find_orphans(), job_id) if self._adopts_orphans else {}

    # --- the end of a job -------------------------------------------------------------------

    def _on_readable(self, job_id: str) -> None:
        running_shim = self._shims[job_id]
        # Read to the end each time: lines that the shim left unread cause an error on the socket, which
        # uvloop reports once and then stops watching it.
        while data := _receive(running_shim.control):
            running_shim.received = (running_shim.received + data)[: job_files.RECORD_BYTES_MAX]
        if data is None:
            return
        asyncio.get_running_loop().remove_reader(running_shim.control)
        running_shim.control.close()
        del self._shims[job_id]
        ending = self._ending[job_id] = _Ending(running_shim.processes)
        self._run_end(job_id, ending, partial(_finish_shim, running_shim, ending))

    def _run_end(self, job_id: str, ending: _Ending, work: Callable[[], str]) -> None:
        """Runs the work on a thread; it returns why the job has not ended, empty if it has."""

        def on_done(done: asyncio.Future[str]) -> None:
            if self._closed or done.cancelled():
                return
            error = done.exception()
            if error is not None:
                _log.error("could not end the processes of %s", job_id, exc_info=error)
            if stuck := f"internal error: {error}" if error else done.result():
                self._retry_later(job_id, ending, stuck)
                return
            del self._ending[job_id]
            if ending.report is not None:
                self._ended.append(ending.report)
                self._has_ended.set()

        asyncio.get_running_loop().run_in_executor(self._ends, work).add_done_callback(on_done)

    def _retry_later(self, job_id: str, ending: _Ending, stuck: str) -> None:
        if ending.stuck != stuck:
            _log.error("%s of %s; its accelerators are not used until it ends", stuck, job_id)
        ending.stuck = stuck
        self._ending[job_id] = ending
        ending.timer = asyncio.get_running_loop().call_later(
            RECHECK_S, self._run_end, job_id, ending, partial(_end_all, ending, timeout_s=0.0)
        )

    def _force_end(self, running_shim: _Shim) -> None:
        """Kills the shim together with its job. Its socket then reports the end."""

        def on_done(done: asyncio.Future[str]) -> None:
            running_shim.forcing = False
            if not done.cancelled() and done.exception() is None:
                running_shim.stuck = done.result()

        if running_shim.forcing:
            return
        _log.error("the shim of %s did not end its job; killing both", running_shim.job_id)
        running_shim.forcing = True
        work = partial(_end_unfinished, running_shim)
        asyncio.get_running_loop().run_in_executor(self._ends, work).add_done_callback(on_done)


def _finish_shim(ended: _Shim, ending: _Ending) -> str:
    """Reads the exit record, and kills what the shim has left. Returns why the job has not ended."""
    _wait_process(ended.process, timeout_s=1.0)
    try:
        ending.report = parse_exit(ended.received)
        survivors = leftovers.parse_survivors(ended.received)
        # A shim that has sent its record has ended all of its descendants but these.
        if not survivors and not ended.processes.is_any_contained():
            ended.processes.remove_groups()
            return ""
        ended.processes.known |= dict.fromkeys(survivors, ended.job_id)
    except msgspec.DecodeError:
        ending.report = _read_report(ended)
        ended.processes.known |= dict.fromkeys(leftovers.read_known(ended.plan.directory), ended.job_id)
    return _end_all(ending, timeout_s=FORCE_TIMEOUT_S)


def _end_all(ending: _Ending, *, timeout_s: float) -> str:
    _, survivors = ending.processes.end(timeout_s=timeout_s)
    if survivors:
        return leftovers.describe(survivors)
    ending.processes.remove_groups()
    return ""


def _end_unfinished(running_shim: _Shim) -> str:
    directory, job_id = running_shim.plan.directory, running_shim.job_id
    running_shim.processes.known |= dict.fromkeys(leftovers.read_known(directory), job_id)
    _, survivors = running_shim.processes.end(timeout_s=FORCE_TIMEOUT_S)
    return leftovers.describe(survivors) if survivors else ""


def _read_report(ended: _Shim) -> ExitReport:
    """The exit record from the file, or one for a shim that has not written any."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return parse_exit(job_files.read(ended.plan.directory / "exit.json"))
    _log.error("the shim of %s exited without an exit record; killing its job", ended.job_id)
    return ExitReport(
        job_id=ended.job_id,
        epoch=ended.plan.epoch,
        exit_code=None,
        reason=ended.reason or "ended by Genie: the shim exited unexpectedly",
        ended_at=_modified_s(ended.plan.directory),
    )


def _discard_shim(starting: asyncio.Future[_Shim]) -> None:
    """Ends a job that started while its launch was cancelled: its shim has no other agent to refresh it."""
    if not starting.cancelled() and starting.exception() is None:
        new = starting.result()
        new.control.close()
        new.process.kill()
        _wait_process(new.process, timeout_s=0.1)


def _wait_process(process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # Left to its dead-man timer; a return code keeps Popen from warning about it.
        process.returncode = 0
    else:
        process_table.own_children.discard(process.pid)


def _job_of_group(path: str) -> str:
    """The job ID of a control group, which is named JOB_ID.EPOCH."""
    return os.path.basename(path).rpartition(".")[0]  # noqa: PTH119


def log_files(directory: Path) -> Iterator[tuple[int, Path]]:
    """Yields the log files of a job, oldest first, with the offset of their first byte."""
    for path in sorted((directory / "log").glob("*.log")):
        if _LOG_NAME.fullmatch(path.name):
            yield int(path.stem), path


def _receive(control: socket.socket) -> bytes | None:
    """Returns received data, empty at the end of the stream, None if there is none yet."""
    try:
        return control.recv(job_files.RECORD_BYTES_MAX)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        # Data that the shim sent before it ended can still be read.
        with contextlib.suppress(OSError):
            return control.recv(job_files.RECORD_BYTES_MAX)
    except OSError:
        pass
    return b""


def _spawn(plan: LaunchPlan, control_fd: int, until_s: float, *, group: str) -> subprocess.Popen[bytes]:
    config = {
        "job_id": plan.job_id,
        "epoch": plan.epoch,
        "argv": list(plan.argv),
        "cwd": str(plan.work_dir),
        "env": plan.env,
        "log_dir": str(plan.directory / "log"),
        "log_bytes_max": plan.log_file_bytes_max,
        "log_files_max": plan.log_files_max,
        "until_s": until_s,
        "grace_s": plan.grace_s,
        "deadman_grace_s": plan.deadman_grace_s,
        "exit_path": str(plan.directory / "exit.json"),
        "started_path": str(plan.directory / "started.json"),
        "control_fd": control_fd,
        "group": group,
    }
    path = plan.directory / "shim.json"
    files.write_private(path, json.dumps(config).encode())
    log_fd = os.open(plan.directory / "shim.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(log_fd, "wb") as log, process_table.own_children_lock:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", shim.__file__, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={JOB_DIR_VARIABLE: str(plan.directory)},
            pass_fds=(control_fd,),
            cwd="/",
            start_new_session=True,
        )
        process_table.own_children.add(process.pid)
    return process


def _modified_s(path: Path) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return 0.0
