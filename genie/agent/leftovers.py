"""What an earlier agent has left running: connects to its shims, and kills processes of jobs.

Each shim (shim.py) listens on a socket in a directory of the agent. It answers a connection with a greeting,
which contains the job as the earlier agent recorded it. Whether a job is adopted is decided by the caller.

Killing finds all processes of a job, also those whose shim or agent died. A job has a control group
(processes/cgroups.py) where the agent may create one. Processes are also found by start record, by
GENIE_JOB_DIR in their environment, as descendants of those, and as orphans that the agent has adopted. The
normal end of a job is shim.py's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from genie.agent import job_files, shim
from genie.agent.journal import JobRecord
from genie.errors import StoreFullError
from genie.processes import cgroups, files, process_table
from genie.processes.process_identity import ProcessIdentity

_log = logging.getLogger(__name__)

JOB_DIR_VARIABLE = "GENIE_JOB_DIR"
CONTROL_GROUP_PREFIX = "genie-"
CONTROL_GROUPS_FILE = "cgroups"
LEFTOVERS_KILL_TIMEOUT_S = 2.0
GREETING_TIMEOUT_S = 1.0
"""For the greetings of all shims, before the registration of the node. A shim that is stopped, or that waits
for a disk, is adopted when it responds."""
_SHIM_BACKLOG = 128
SURVIVORS_SHOWN_MAX = 5
_KILL_RECHECK_INTERVAL_S_MIN = 0.02
_KILL_RECHECK_INTERVAL_S_MAX = 0.2

JobIdByProcess = dict[ProcessIdentity, str]
"""Processes that could not be killed, with the IDs of their jobs."""


@dataclass
class JobProcesses:
    """The processes of one job, or of all jobs under a directory."""

    directory: Path
    """Of the job, or of all jobs."""
    control_groups: Mapping[str, str] = field(default_factory=dict)
    """Control groups, with the IDs of their jobs."""
    recorded_processes: JobIdByProcess = field(default_factory=dict)
    """Processes that are known already, such as those of the start record, with the IDs of their jobs."""
    find_orphans: Callable[[], JobIdByProcess] = dict
    """Returns adopted processes that belong to these jobs."""
    excluded_job_ids: frozenset[str] = frozenset()
    """Jobs below `directory` that keep running."""

    def has_process_in_group(self) -> bool:
        """Whether a control group has a process."""
        return any(cgroups.processes(path) for path in self.control_groups)

    def kill_all_processes(
        self, *, timeout_s: float = LEFTOVERS_KILL_TIMEOUT_S
    ) -> tuple[int, JobIdByProcess]:
        """Kills them. Returns their number and the survivors.

        Blocks. Repeats until none is found, to include processes that start meanwhile.
        """
        seen: set[ProcessIdentity] = set()
        deadline = time.monotonic() + timeout_s
        step_s = _KILL_RECHECK_INTERVAL_S_MIN
        while True:
            alive = self._find_processes()
            seen |= alive.keys()
            # Stop all before killing one: none may react by starting another process or writing an exit
            # record.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for mark in alive:
                    mark.send_signal(number)
            for path in self.control_groups:
                cgroups.kill(path)
            if not alive or time.monotonic() >= deadline:
                return len(seen), alive
            time.sleep(step_s)
            step_s = min(2 * step_s, _KILL_RECHECK_INTERVAL_S_MAX)

    def remove_control_groups(self) -> None:
        for path in self.control_groups:
            if not cgroups.remove(path):
                _log.info("could not remove the control group %s", path)

    def _find_processes(self) -> JobIdByProcess:
        found = dict(self.recorded_processes)
        for mark, job_id in _find_processes_by_job_dir_variable(self.directory).items():
            if job_id not in self.excluded_job_ids:
                found[mark] = job_id
        found |= self.find_orphans()
        for path, job_id in self.control_groups.items():
            found |= {ProcessIdentity(pid, start): job_id for pid, start in cgroups.processes(path).items()}
        # Never this process nor its children: a job can write anything into its start record.
        found = {mark: job_id for mark, job_id in found.items() if mark.pid != os.getpid() and mark.is_alive}
        for mark, job_id in list(found.items()):
            below = process_table.descendant_start_marks(mark.pid)
            if os.getpid() not in below:
                found |= {ProcessIdentity(pid, start): job_id for pid, start in below.items()}
        self.recorded_processes = {mark: job_id for mark, job_id in found.items() if mark.is_alive}
        return self.recorded_processes


def read_start_record(path: Path) -> tuple[ProcessIdentity, ...]:
    """Returns the processes of a start record (shim and command); empty if there is no valid record."""
    try:
        body = json.loads(job_files.read_small_file(path))
        return tuple(ProcessIdentity(int(pid), str(start)) for pid, start in body.values())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("could not read %s: %s", path, error)
        return ()


def parse_survivors(record: bytes) -> tuple[ProcessIdentity, ...]:
    """The processes that a shim could not kill, from its exit record; empty if it is invalid."""
    try:
        return tuple(ProcessIdentity(int(pid), str(start)) for pid, start in json.loads(record)["survivors"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return ()


def read_recorded_processes(job_dir: Path) -> tuple[ProcessIdentity, ...]:
    """All processes that the records in the directory of a job name."""
    survivors: tuple[ProcessIdentity, ...] = ()
    with contextlib.suppress(OSError):
        survivors = parse_survivors(job_files.read_small_file(job_dir / "exit.json"))
    return read_start_record(job_dir / "started.json") + survivors


def find_adopted_orphans() -> list[ProcessIdentity]:
    """Processes that this process, as a subreaper, has adopted. Reaps those that have ended.

    Children that it started itself are in its session, which no orphan of a job can enter, or in
    `children_in_own_sessions`.
    """
    session, found = os.getsid(0), []
    with process_table.children_in_own_sessions_lock:
        adopted = process_table.child_session_ids(os.getpid())
        own = set(process_table.children_in_own_sessions)
    for pid, child_session in adopted.items():
        mark = ProcessIdentity.of_pid(pid)
        if child_session == session or pid in own or mark is None:
            continue
        if mark.is_alive:
            found.append(mark)
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return found


def read_recorded_control_groups(record_path: Path) -> set[str]:
    """Control groups that earlier agents of this node have used for jobs; empty if unknown."""
    try:
        lines = files.read_small_file(record_path).splitlines()
    except (OSError, UnicodeDecodeError):
        return set()
    return {line for line in lines if Path(line).name.startswith(CONTROL_GROUP_PREFIX)}


def record_control_groups(record_path: Path, groups: set[str]) -> None:
    """Records the control groups for the next agent of this node, which may be started in another one."""
    try:
        if groups != read_recorded_control_groups(record_path):
            files.write_private(record_path, "".join(f"{path}\n" for path in sorted(groups)).encode())
    except StoreFullError as error:
        _log.warning("could not record the control groups of jobs: %s", error)


def describe_survivors(survivors: Iterable[ProcessIdentity]) -> str:
    """For users: which processes could not be killed, and why."""
    pids = sorted(mark.pid for mark in survivors)
    shown = [
        str(pid) + (" (uninterruptible)" if _is_in_uninterruptible_sleep(pid) else "")
        for pid in pids[:SURVIVORS_SHOWN_MAX]
    ]
    more = f" and {len(pids) - SURVIVORS_SHOWN_MAX} more" if len(pids) > SURVIVORS_SHOWN_MAX else ""
    noun = "process" if len(pids) == 1 else "processes"
    return f"cannot kill {noun} {', '.join(shown)}{more}"


def _is_in_uninterruptible_sleep(pid: int) -> bool:
    return "D" in process_table.thread_states(pid)


def _find_processes_by_job_dir_variable(directory: Path) -> JobIdByProcess:
    prefix = f"{directory}{os.sep}"
    found: JobIdByProcess = {}
    for process in psutil.process_iter():
        try:
            job_dir = process.environ().get(JOB_DIR_VARIABLE, "")
        except (psutil.Error, OSError):
            continue  # ended, or another user's
        if process.pid == os.getpid() or not f"{job_dir}{os.sep}".startswith(prefix):
            continue
        mark = ProcessIdentity.of_pid(process.pid)
        if mark is not None:
            found[mark] = Path(job_dir).name
    return found


# --- shims -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class AdoptedJob:
    """A running job of an earlier agent. The launcher updates it when a shim responds that did not before."""

    record: JobRecord
    started_s: float | None
    """By the monotonic clock of this machine; None while the shim does not respond."""
    kill_reason: str = ""
    """Why it is being ended; empty if it is not."""

    @property
    def is_responding(self) -> bool:
        return self.started_s is not None

    def mark_responding(self, greeting: Greeting) -> None:
        self.started_s = greeting.started_s
        self.kill_reason = greeting.end_reason


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a shim on a new connection; fields of a later release are ignored."""

    job: JobRecord
    shim: tuple[int, str]
    grace_s: float
    started_s: float
    until_s: float | None
    end_reason: str
    kill_in_s: float

    @property
    def shim_process(self) -> ProcessIdentity:
        return ProcessIdentity(*self.shim)


class _Versions(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    oldest_version: int


@dataclass
class ShimConnection:
    """The control connection to a shim of an earlier agent."""

    control_socket: socket.socket
    socket_path: Path
    greeting: Greeting | None
    """None if the shim has not responded yet."""
    received_bytes: bytes
    """What the shim has sent after its greeting, or a part of the greeting."""

    @property
    def job_id_and_epoch(self) -> tuple[str, str]:
        job_id, _, epoch = self.socket_path.name.rpartition(".")
        return job_id, epoch


def listen_for_next_agent(path: Path) -> socket.socket:
    """Returns the listening socket for a new shim. Raises OSError."""
    files.make_private_directory(path.parent)
    job_files.remove_any(path)
    listening_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_address(path) as address:
            listening_socket.bind(address)
        listening_socket.listen(_SHIM_BACKLOG)
    except BaseException:
        listening_socket.close()
        raise
    return listening_socket


def connect_to_shims(sockets_dir: Path, *, timeout_s: float = GREETING_TIMEOUT_S) -> list[ShimConnection]:
    """Connects to all shims that run, and reads the greetings of those that respond within the timeout.
    Removes sockets without a shim, and of shims that cannot be adopted. Blocks."""
    connected = [
        _GreetingReader(control_socket, path)
        for path in sorted(sockets_dir.glob("*"))
        if (control_socket := _try_connect(path)) is not None
    ]
    deadline_s = time.monotonic() + timeout_s
    waiting = list(connected)
    while waiting and (remaining_s := deadline_s - time.monotonic()) > 0:
        poll = select.poll()
        for reader in waiting:
            poll.register(reader.control_socket, select.POLLIN)
        poll.poll(remaining_s * 1000 + 1)
        waiting = [reader for reader in waiting if not reader.try_read()]
    return [found for reader in connected if (found := reader.finish()) is not None]


def parse_greeting(received_bytes: bytes, *, socket_name: str) -> tuple[Greeting, bytes] | None:
    """Returns the greeting and what follows it; None if it is incomplete. Raises ValueError if this agent
    cannot control the shim."""
    line, newline, rest = received_bytes.partition(b"\n")
    if not newline:
        return None
    try:
        _check_versions(line)
        greeting = msgspec.json.decode(line, type=Greeting)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    found = f"{greeting.job.job_id}.{greeting.job.epoch}"
    if found != socket_name:
        raise ValueError(f"its greeting names {found}")
    return greeting, rest


class _GreetingReader:
    def __init__(self, control_socket: socket.socket, path: Path) -> None:
        self.control_socket = control_socket
        self._path = path
        self._received_bytes = b""
        self._has_ended = False

    def try_read(self) -> bool:
        """Returns whether the greeting is complete, or will never be."""
        try:
            data = self.control_socket.recv(job_files.SMALL_FILE_BYTES_MAX)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._received_bytes += data
        self._has_ended = not data or len(self._received_bytes) > job_files.SMALL_FILE_BYTES_MAX
        return self._has_ended or b"\n" in self._received_bytes

    def finish(self) -> ShimConnection | None:
        """Closes the connection if the shim has ended or cannot be adopted, and says why not."""
        try:
            found = parse_greeting(self._received_bytes, socket_name=self._path.name)
            if found is not None:
                return ShimConnection(self.control_socket, self._path, *found)
            if not self._has_ended:
                return ShimConnection(self.control_socket, self._path, None, self._received_bytes)
        except ValueError as error:
            _log.error("could not adopt the job of the shim at %s: %s", self._path.name, error)
        self.control_socket.close()
        job_files.try_remove_any(self._path)
        return None


def _check_versions(line: bytes) -> None:
    """Raises ValueError if the shim and this agent have no common version of the connection."""
    found = msgspec.json.decode(line, type=_Versions)
    if found.version < shim.CONTROL_VERSION_OLDEST or found.oldest_version > shim.CONTROL_VERSION:
        raise ValueError(
            f"it supports {_describe_versions(found.oldest_version, found.version)} of the control "
            f"connection, this agent {_describe_versions(shim.CONTROL_VERSION_OLDEST, shim.CONTROL_VERSION)}"
        )


def _describe_versions(oldest_version: int, version: int) -> str:
    return f"version {version}" if oldest_version == version else f"versions {oldest_version} to {version}"


def _try_connect(path: Path) -> socket.socket | None:
    control_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        control_socket.setblocking(False)
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(path))
        with _short_address(path) as address:
            control_socket.connect(address)
    except OSError as error:
        # Usually nothing listens: the shim has ended, or was never started.
        if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
            _log.error("could not connect to the shim at %s: %s; ending its job", path, error.strerror)
        control_socket.close()
        job_files.try_remove_any(path)
        return None
    return control_socket


@contextmanager
def _short_address(path: Path) -> Iterator[str]:
    """An address of the path that fits into the 107 bytes of a socket address."""
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory_fd}/{path.name}"
    finally:
        os.close(directory_fd)
