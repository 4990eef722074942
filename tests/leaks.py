"""What a test may not leave behind: threads, sockets, child processes, detached processes.

LeakCheck, which conftest.py registers, takes a snapshot before a test's fixtures are set up and compares
after they are torn down. A snapshot must stay far below 2 ms, so on Linux it reads /proc itself.
Not for: tasks (conftest.py, while the loop still lives), memory, or files.
"""

from __future__ import annotations

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

_LINUX = sys.platform == "linux"
# Long enough for a thread or child that is on its way out on a busy machine.
_SETTLE_S = 2.0
# Python's own helper for shared memory lives as long as the process, by design.
_KEPT_BY_PYTHON = "multiprocessing.resource_tracker"
# Daemon threads of others may stay (torch and grpc keep some); Genie's own carry this name and may not.
_OWN_THREADS = "genie-"


class LeakCheck:
    """The hooks. What fixtures of a wider scope than one test make may stay, and is not blamed on a test."""

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
            self._fail_for_leaks()
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

    def _fail_for_leaks(self) -> None:
        left = self._watch.leaked_since(self._before)
        if left:
            lines = left.described()
            end_processes(left.children)
            pytest.fail("the test left behind:\n  " + "\n  ".join(lines), pytrace=False)


@dataclass(frozen=True)
class Snapshot:
    """The things of this process that have to be given back. Other people's daemon threads are not."""

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

    def described(self) -> list[str]:
        """One line for each thing, with what helps to find who made it."""
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
        return Snapshot(threads, _open_sockets(), self._children())

    def allow_since(self, before: Snapshot) -> None:
        self.allowed |= self.snapshot() - before

    def leaked_since(self, before: Snapshot) -> Snapshot:
        """What is new and does not go away by itself within a moment."""
        known = before | self.allowed
        left = self.snapshot() - known
        if not left:
            return left
        gc.collect()  # a socket in a garbage cycle warns when it is collected, and that is an error here
        deadline = time.monotonic() + _SETTLE_S
        while (left := self.snapshot() - known) and time.monotonic() < deadline:
            time.sleep(0.01)
        # The CUDA driver opens one for the whole life of a process that has used it.
        ours = frozenset(name for name in left.sockets if "@cuda-" not in _describe_socket(name))
        return replace(left, sockets=ours)

    def _children(self) -> frozenset[int]:
        if not _LINUX:
            return frozenset(child.pid for child in psutil.Process().children())
        try:
            # Cheap, and true for most tests: there is no child at all.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return frozenset()
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - half the time
        self._not_ours &= pids
        ours = frozenset(pid for pid in pids - self._not_ours if _parent_of(pid) == os.getpid())
        self._not_ours |= pids - ours
        return frozenset(pid for pid in ours if _KEPT_BY_PYTHON not in _command_line(pid))


def detached_processes(state_folder: Path) -> dict[int, str]:
    """Processes that outlived this run's tests: they carry a state directory under `state_folder`."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            state_dir = environ.get("GENIE_STATE_DIR", "")
            if process.pid == os.getpid() or not state_dir.startswith(f"{state_folder}{os.sep}"):
                continue
            test = environ.get("PYTEST_CURRENT_TEST", "a fixture").removesuffix(" (call)")
            found[process.pid] = f"process {process.pid} ({_command_line(process.pid)}), started by {test}"
        except psutil.Error:
            continue
    return found


def end_processes(pids: frozenset[int]) -> None:
    """Kills, and reaps children: leaks that have been reported shall not disturb the next test."""
    for pid in pids:
        try:
            process = psutil.Process(pid)
            ours = process.ppid() == os.getpid()
            process.kill()
            if ours:
                process.wait(timeout=1)
        except (psutil.Error, ChildProcessError):
            continue


def _open_sockets() -> frozenset[str]:
    if not _LINUX:
        return frozenset(str(item) for item in psutil.Process().net_connections(kind="all"))
    found = set()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - half the time
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - half the time
        except OSError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:"):
            found.add(target)
    return frozenset(found)


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - half the time
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0  # gone since the listing


def _command_line(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.Error:
        return ""


def _describe_child(pid: int) -> str:
    return f"child process {pid} ({_command_line(pid) or 'ended, but nobody waited for it'})"


def _describe_socket(name: str) -> str:
    if not _LINUX:
        return name
    fds = [fd for fd in os.listdir("/proc/self/fd") if _link(fd) == name]  # noqa: PTH208
    for connection in psutil.Process().net_connections(kind="all"):
        if str(connection.fd) in fds:
            there = f" to {connection.raddr}" if connection.raddr else ""
            return f"socket {connection.laddr or connection.family.name}{there} {connection.status}"
    return name


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    except OSError:
        return ""
