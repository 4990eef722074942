"""Leak check for threads, sockets, child processes and detached processes.

The plugin LeakCheck takes a snapshot before the fixtures of a test are set up and compares after they are
torn down. A snapshot must take far less than 2 ms, so on Linux it reads /proc directly. conftest.py checks
tasks; memory and files are not checked.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from tests import forkserver

_LINUX = sys.platform == "linux"
# Grace period for threads and children that are about to end, on a busy machine.
_SETTLE_S = 5.0
_KILL_S = 5.0
# The helper process of Python for shared memory exists until the process ends.
_KEPT_BY_PYTHON = "multiprocessing.resource_tracker"
# Daemon threads of libraries (torch, grpc) are allowed; those of Genie have this prefix and are not.
_OWN_THREADS = "genie-"
# Every process of a test has the first two, processes on nodes of the grid's testbed the last.
_FOLDER_VARIABLES = ("GENIE_STATE_DIR", "HOME", "FAKE_NVML_STATE")


class LeakCheck:
    """The pytest hooks. Resources of fixtures with a wider scope than one test are allowed."""

    def __init__(self) -> None:
        self._watch = LeakWatch()
        self._before = Snapshot()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None]:
        self._before = self._watch.snapshot()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        result = yield
        marker = item.get_closest_marker("leaks_allowed")
        if marker is None:
            self._fail_test_for_leaks()
        elif not (marker.args and str(marker.args[0]).strip()):
            pytest.fail("leaks_allowed needs a reason", pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._watch.snapshot()
        try:
            return (yield)
        finally:
            self._watch.allow_since(before)

    def allow_child(self, pid: int) -> None:
        """Allows a process that a test has started for a fixture of wider scope."""
        self._watch.allowed |= Snapshot(children=frozenset([pid]))

    def _fail_test_for_leaks(self) -> None:
        leaked = self._watch.leaked_since(self._before)
        if leaked:
            lines = leaked.describe()
            kill_processes(leaked.children)
            pytest.fail("leaked by the test:\n  " + "\n  ".join(lines), pytrace=False)


@dataclass(frozen=True)
class Snapshot:
    """Threads, sockets and children of this process, without daemon threads of libraries."""

    threads: frozenset[threading.Thread] = frozenset()
    sockets: frozenset[str] = frozenset()
    children: frozenset[int] = frozenset()

    def __or__(self, other: Snapshot) -> Snapshot:
        return Snapshot(
            self.threads | other.threads, self.sockets | other.sockets, self.children | other.children
        )

    def __sub__(self, other: Snapshot) -> Snapshot:
        return Snapshot(
            self.threads - other.threads, self.sockets - other.sockets, self.children - other.children
        )

    def __bool__(self) -> bool:
        return bool(self.threads or self.sockets or self.children)

    def describe(self) -> list[str]:
        """One line per leaked resource, with details to find its origin."""
        return [
            *(f"thread {thread.name!r}" for thread in self.threads),
            *(_describe_socket(name) for name in self.sockets),
            *(_describe_child(pid) for pid in self.children),
        ]


@dataclass
class LeakWatch:
    """Takes and compares snapshots."""

    allowed: Snapshot = Snapshot()
    _not_ours: set[int] = field(default_factory=set)

    def snapshot(self) -> Snapshot:
        threads = frozenset(
            thread
            for thread in threading.enumerate()
            if not thread.daemon or thread.name.startswith(_OWN_THREADS)
        )
        sockets = _open_sockets() - forkserver.control_sockets()
        return Snapshot(threads, sockets, self._list_child_pids() - forkserver.fork_server_pids())

    def allow_since(self, before: Snapshot) -> None:
        self.allowed |= self.snapshot() - before

    def leaked_since(self, before: Snapshot) -> Snapshot:
        """Resources that are new and still exist after the grace period."""
        known = before | self.allowed
        leaked = self.snapshot() - known
        if not leaked:
            return leaked
        gc.collect()  # collecting a socket emits a warning, which is an error here
        deadline = time.monotonic() + _SETTLE_S
        while (leaked := self.snapshot() - known) and time.monotonic() < deadline:
            time.sleep(0.01)
        # The CUDA driver keeps a socket open until the process ends.
        ours = frozenset(name for name in leaked.sockets if "@cuda-" not in _describe_socket(name))
        return replace(leaked, sockets=ours)

    def _list_child_pids(self) -> frozenset[int]:
        if not _LINUX:
            return frozenset(child.pid for child in psutil.Process().children())
        try:
            # Fast path: most tests have no child.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return frozenset()
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - half the time
        self._not_ours &= pids
        ours = frozenset(pid for pid in pids - self._not_ours if _parent_of(pid) == os.getpid())
        self._not_ours |= pids - ours
        return frozenset(pid for pid in ours if _KEPT_BY_PYTHON not in _command_line(pid))


def processes_of_run(folder: Path) -> dict[int, str]:
    """Processes with their state or home directory below `folder`, the temporary folder of a run, and SSH
    servers of the grid's testbed there. Does not include the run itself and its workers."""
    found: dict[int, str] = {}
    below = f"{folder}{os.sep}"
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or not _belongs_to_run(process, below):
                continue
            test = process.environ().get("PYTEST_CURRENT_TEST", "a fixture").removesuffix(" (call)")
            found[process.pid] = f"process {process.pid} ({_command_line(process.pid)}), started by {test}"
        except psutil.Error:
            continue
    return found


def _belongs_to_run(process: psutil.Process, below: str) -> bool:
    if _KEPT_BY_PYTHON in _command_line(process.pid):
        return False
    environ = process.environ()
    if any(environ.get(name, "").startswith(below) for name in _FOLDER_VARIABLES):
        return True
    # sshd overwrites its environment with its title.
    return process.name() == "sshd" and below in " ".join(process.cmdline())


def kill_processes(pids: frozenset[int]) -> None:
    """Kills the processes, waits for their end and reaps children, so that a leak does not affect the next
    test."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(pid))
            processes[-1].kill()
    deadline = time.monotonic() + _KILL_S
    while (processes := [each for each in processes if _is_running(each)]) and time.monotonic() < deadline:
        time.sleep(0.005)


def _is_running(process: psutil.Process) -> bool:
    """False for a zombie, which is reaped if it is a child."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.is_running()
        if process.ppid() == os.getpid():
            process.wait(timeout=0)
    except (psutil.Error, ChildProcessError):
        pass
    return False


def _open_sockets() -> frozenset[str]:
    if not _LINUX:
        return frozenset(str(item) for item in psutil.Process().net_connections(kind="all"))
    found = set()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - half the time
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - half the time
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith("socket:"):
            found.add(target)
    return frozenset(found)


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - half the time
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0  # ended since the listing


def _command_line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.Error:
        return ""


def _describe_child(pid: int) -> str:
    return f"child process {pid} ({_command_line(pid) or 'ended, but was not waited for'})"


def _describe_socket(name: str) -> str:
    if not _LINUX:
        return name
    fds = [fd for fd in os.listdir("/proc/self/fd") if _read_descriptor_link(fd) == name]  # noqa: PTH208
    for connection in psutil.Process().net_connections(kind="all"):
        if str(connection.fd) in fds:
            there = f" to {connection.raddr}" if connection.raddr else ""
            return f"socket {connection.laddr or connection.family.name}{there} {connection.status}"
    return name


def _read_descriptor_link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    except OSError:
        return ""
