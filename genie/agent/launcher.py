"""Processes, as an argument: what the agent asks of whoever starts them, and the real thing.

`ShimLauncher` puts each job under a shim (shim.py) and talks to it over a socket pair. genie/sim
has a launcher without processes. Not for: what a job needs before it starts (preparation.py) and
who may run (agent.py).
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from genie.agent import jobfiles, processes, shim
from genie.agent.journal import parse_exit
from genie.agent.processes import JOB_DIR_VARIABLE
from genie.errors import LaunchError, NodeError, StoreFullError
from genie.model.messages import ExitReport
from genie.runtime import files

_log = logging.getLogger(__name__)

RECORD_BYTES_MAX = 65536
STUBBORN_S = 3.0
"""Beyond the grace, until a shim that was told to end its job is ended itself."""
FORCE_S = 1.0
_LOG_NAME = re.compile(r"[0-9]{1,20}\.log")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything that a start needs. `directory` is the job's own; the command runs in `work_dir`."""

    job_id: str
    epoch: int
    argv: tuple[str, ...]
    env: dict[str, str]
    directory: Path
    work_dir: Path
    log_bytes_max: int
    log_files_max: int
    grace_s: float
    deadman_grace_s: float


class Launcher(Protocol):
    """Starts and ends jobs. What it started ends by itself when it is not refreshed in time."""

    def end_leftovers(self, jobs_dir: Path) -> int:
        """Kills whatever an earlier agent left running; how many there were. NodeError if one stays."""
        ...

    def start(self, plan: LaunchPlan, *, until_s: float) -> None:
        """The job may run until `until_s` by the monotonic clock, unless refreshed. LaunchError."""
        ...

    def refresh(self, until_s: float) -> None:
        """Every running job may go on until then."""
        ...

    def kill(self, job_id: str, *, reason: str, grace_s: float | None = None) -> None:
        """Takes the order; the end comes through `exits`. Unknown jobs and second orders are fine: the
        shortest grace counts. None is that of the plan."""
        ...

    def running(self) -> frozenset[str]: ...

    def exits(self) -> list[ExitReport]:
        """Ends that were not handed out before. `running` no longer has these jobs."""
        ...

    async def wait_exit(self) -> None:
        """Until `exits` may have something."""
        ...

    def close(self) -> None:
        """Lets go of what still runs; it ends by itself in time."""
        ...


@dataclass
class _Shim:
    plan: LaunchPlan
    process: subprocess.Popen[bytes]
    control: socket.socket
    heard: bytes = b""
    reason: str = ""
    """Why it was told to end the job; empty while it was not."""
    ordered_s: float = 0.0
    grace_s: float = 0.0
    unsent: bytes = field(default=b"")


class ShimLauncher:
    """Real processes. Needs a running event loop; one thread."""

    def __init__(self) -> None:
        self._shims: dict[str, _Shim] = {}
        self._ended: list[ExitReport] = []
        self._has_ended = asyncio.Event()

    def end_leftovers(self, jobs_dir: Path) -> int:
        started = [mark for path in jobs_dir.glob("*/started.json") for mark in processes.read_started(path)]
        count, stubborn = processes.end_leftovers(jobs_dir, started)
        if stubborn:
            raise NodeError(
                f"processes of an earlier life do not end: {', '.join(map(str, sorted(stubborn)))}",
                hint="they may hold accelerators; end them or restart the machine, then start it again",
            )
        return count

    def start(self, plan: LaunchPlan, *, until_s: float) -> None:
        assert plan.job_id not in self._shims, f"{plan.job_id} runs already"
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _spawn(plan, theirs.fileno(), until_s)
        except (OSError, StoreFullError) as error:
            ours.close()
            raise LaunchError(f"cannot start the shim of {plan.job_id}: {error}") from error
        ours.setblocking(False)
        self._shims[plan.job_id] = _Shim(plan, process, ours)
        asyncio.get_running_loop().add_reader(ours, self._hear, plan.job_id)

    def refresh(self, until_s: float) -> None:
        line = b"r %.6f\n" % until_s
        for held in self._shims.values():
            # A shim that does not read (it is stopped) misses this one; the next says more anyway.
            if not held.unsent:
                self._say(held, line)

    def kill(self, job_id: str, *, reason: str, grace_s: float | None = None) -> None:
        held = self._shims.get(job_id)
        if held is None:
            return
        grace_s = held.plan.grace_s if grace_s is None else grace_s
        if not held.reason or grace_s < held.grace_s:
            held.reason = held.reason or reason
            held.ordered_s, held.grace_s = time.monotonic(), grace_s
            held.unsent += b"k %s\n" % json.dumps([reason, grace_s]).encode()
        elif time.monotonic() > held.ordered_s + held.grace_s + STUBBORN_S:
            _log.error("the shim of %s does not obey; ending it and its job by force", job_id)
            self._end_by_force(held)
        self._say(held, b"")

    def running(self) -> frozenset[str]:
        return frozenset(self._shims)

    def exits(self) -> list[ExitReport]:
        ended, self._ended = self._ended, []
        self._has_ended.clear()
        return ended

    async def wait_exit(self) -> None:
        await self._has_ended.wait()

    def close(self) -> None:
        for held in self._shims.values():
            self._release(held, wait_s=0.0)
        self._shims.clear()

    def _say(self, held: _Shim, line: bytes) -> None:
        data = held.unsent + line
        try:
            held.unsent = data[held.control.send(data) :] if data else b""
        except BlockingIOError:
            held.unsent = data if held.reason else b""
        except OSError:
            held.unsent = b""  # it has ended; its end is on the way

    def _hear(self, job_id: str) -> None:
        held = self._shims[job_id]
        # To the end each time: when the shim left one of our lines unread, the system reports that as an
        # error, which uvloop tells once and then watches no more.
        while data := _received(held.control):
            held.heard = (held.heard + data)[:RECORD_BYTES_MAX]
        if data is None:
            return
        del self._shims[job_id]
        self._release(held, wait_s=1.0)
        self._ended.append(self._end_of(held))
        self._has_ended.set()

    def _end_of(self, held: _Shim) -> ExitReport:
        """What the shim said, else what it wrote; without either it died and its job is ended here."""
        with contextlib.suppress(msgspec.DecodeError):
            return parse_exit(held.heard)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return parse_exit(jobfiles.read(held.plan.directory / "exit.json"))
        _log.error("the shim of %s died without a record; ending what it left", held.plan.job_id)
        self._end_by_force(held)
        return ExitReport(
            job_id=held.plan.job_id,
            epoch=held.plan.epoch,
            exit_code=None,
            reason=held.reason or "ended by Genie: the process that watched over it died",
            ended_at=_modified_s(held.plan.directory),
        )

    def _end_by_force(self, held: _Shim) -> None:
        started = processes.read_started(held.plan.directory / "started.json")
        processes.end_leftovers(held.plan.directory, started, within_s=FORCE_S)

    def _release(self, held: _Shim, *, wait_s: float) -> None:
        asyncio.get_running_loop().remove_reader(held.control)
        held.control.close()
        try:
            held.process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            # Left to its dead-man timer; Popen must not complain that nobody waited for it.
            held.process.returncode = 0


def log_files(directory: Path) -> Iterator[tuple[int, Path]]:
    """A job's log files with the offset of their first byte, oldest first."""
    for path in sorted((directory / "log").glob("*.log")):
        if _LOG_NAME.fullmatch(path.name):
            yield int(path.stem), path


def _received(control: socket.socket) -> bytes | None:
    """What has come; empty at the end; None when nothing is there yet."""
    try:
        return control.recv(RECORD_BYTES_MAX)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        # Once: what the shim said before it left is still there to be read.
        with contextlib.suppress(OSError):
            return control.recv(RECORD_BYTES_MAX)
    except OSError:
        pass
    return b""


def _spawn(plan: LaunchPlan, control_fd: int, until_s: float) -> subprocess.Popen[bytes]:
    given = {
        "job_id": plan.job_id,
        "epoch": plan.epoch,
        "argv": list(plan.argv),
        "cwd": str(plan.work_dir),
        "env": plan.env,
        "log_dir": str(plan.directory / "log"),
        "log_bytes_max": plan.log_bytes_max,
        "log_files_max": plan.log_files_max,
        "until_s": until_s,
        "grace_s": plan.grace_s,
        "deadman_grace_s": plan.deadman_grace_s,
        "exit_path": str(plan.directory / "exit.json"),
        "started_path": str(plan.directory / "started.json"),
        "control_fd": control_fd,
    }
    path = plan.directory / "shim.json"
    files.write_private(path, json.dumps(given).encode())
    trouble_fd = os.open(plan.directory / "shim.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(trouble_fd, "wb") as trouble:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", shim.__file__, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=trouble,
            stderr=trouble,
            env={JOB_DIR_VARIABLE: str(plan.directory)},
            pass_fds=(control_fd,),
            cwd="/",
            start_new_session=True,
        )


def _modified_s(path: Path) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return 0.0
