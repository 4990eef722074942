"""Connects to the shims of an earlier agent of this node, which ended without ending its jobs.

Each shim (shim.py) listens on a socket in a directory of the agent. It answers a connection with a greeting,
which contains the job as the earlier agent recorded it. Whether a job is adopted is decided by the caller.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from genie.agent import job_files, shim
from genie.agent.journal import JobRecord
from genie.processes import files
from genie.processes.process_identity import ProcessIdentity

_log = logging.getLogger(__name__)

KEEP_JOBS_SIGNAL = signal.SIGUSR1
"""An agent that receives it ends, and its jobs go on; a supervisor passes it on."""
GREETING_TIMEOUT_S = 10.0
"""For the greetings of all shims; one that is stopped, or that hangs, is killed with its job."""
_BACKLOG = 8


@dataclass(frozen=True, kw_only=True)
class AdoptedJob:
    """A running job of an earlier agent. Times are those of the monotonic clock of this machine."""

    record: JobRecord
    started_s: float
    deadman_expiry_s: float | None
    """None without a dead-man timer."""
    kill_reason: str
    """Why it is being ended; empty if it is not."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a shim on a new connection; fields of a later release are ignored."""

    job: JobRecord
    shim: tuple[int, str]
    group: str
    grace_s: float
    started_s: float
    until_s: float | None
    end_reason: str
    kill_in_s: float

    @property
    def shim_process(self) -> ProcessIdentity:
        return ProcessIdentity(*self.shim)

    def as_adopted_job(self) -> AdoptedJob:
        return AdoptedJob(
            record=self.job,
            started_s=self.started_s,
            deadman_expiry_s=self.until_s,
            kill_reason=self.end_reason,
        )


class _Versions(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    oldest_version: int


@dataclass
class ShimConnection:
    """The control connection to a shim of an earlier agent, which has sent its greeting."""

    control_socket: socket.socket
    greeting: Greeting
    socket_path: Path
    received_bytes: bytes = b""
    """What the shim has sent after its greeting."""


def listen(path: Path) -> socket.socket:
    """Returns the listening socket for a new shim. Raises OSError."""
    files.make_private_directory(path.parent)
    path.unlink(missing_ok=True)
    listening_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_address(path) as address:
            listening_socket.bind(address)
        listening_socket.listen(_BACKLOG)
    except BaseException:
        listening_socket.close()
        raise
    return listening_socket


def connect_to_shims(sockets_dir: Path, *, timeout_s: float = GREETING_TIMEOUT_S) -> list[ShimConnection]:
    """Connects to all shims that run, and reads their greetings. Removes the sockets of the others. Blocks."""
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
        """Closes the connection unless it can be used, and says why not."""
        line, newline, rest = self._received_bytes.partition(b"\n")
        try:
            if newline:
                _check_versions(line)
                greeting = msgspec.json.decode(line, type=Greeting)
                return ShimConnection(self.control_socket, greeting, self._path, rest)
            reason = "" if self._has_ended else "it does not respond"
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            reason = str(error)
        self.control_socket.close()
        if reason:
            _log.error("could not adopt the job of the shim at %s: %s", self._path.name, reason)
        self._path.unlink(missing_ok=True)
        return None


def _check_versions(line: bytes) -> None:
    """Raises ValueError if the shim and this agent have no common version of the connection."""
    found = msgspec.json.decode(line, type=_Versions)
    if found.version < shim.CONTROL_VERSION_OLDEST or found.oldest_version > shim.CONTROL_VERSION:
        raise ValueError(
            f"it speaks versions {found.oldest_version} to {found.version} of the control connection, "
            f"this agent {shim.CONTROL_VERSION_OLDEST} to {shim.CONTROL_VERSION}"
        )


def _try_connect(path: Path) -> socket.socket | None:
    control_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        control_socket.setblocking(False)
        with _short_address(path) as address:
            control_socket.connect(address)
    except OSError:  # nothing listens: the shim has ended, or was never started
        control_socket.close()
        path.unlink(missing_ok=True)
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
