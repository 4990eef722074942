"""Access to the kernel's process table: start marks, descendants, signals that are safe against PID reuse.

Standard library only, and importable as a file: the shim of a job (agent/shim.py) starts without Genie on its
path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time

LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_RECHECK_INTERVAL_S = 0.02


def start_mark(pid: int) -> str:
    """Identifies the start of this process, so that a later one with the same ID differs; '' if none runs."""
    if not LINUX:
        ps = subprocess.run(
            ["/bin/ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return ps.stdout.strip()
    fields = _read_stat_fields(pid)
    return f"{boot_id()}:{fields[19].decode()}" if fields else ""


def descendant_start_marks(pid: int) -> dict[int, str]:
    """All descendants of this process with their start marks. Empty where there is no /proc."""
    if not LINUX:
        return {}
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (fields := _read_stat_fields(int(name))):
            parents[int(name)] = int(fields[1])
    found: set[int] = set()
    grew = True
    while grew:
        below = {child for child, parent in parents.items() if parent == pid or parent in found}
        grew = not below <= found
        found |= below
    return {child: start_mark(child) for child in found}


def pids_of_process_and_ancestors(pid: int) -> list[int]:
    """This process, its parent, and so on, without process 1; empty if it has ended, or where there is no
    /proc. Ends before the first one that is hidden (the mount option hidepid hides those of other users)."""
    found, parent = [], pid
    while parent > 1 and (fields := _read_stat_fields(parent)):
        found.append(parent)
        parent = int(fields[1])
        if not _read_stat_fields(parent) and _read_parent(found[-1]) not in (parent, 0):
            parent = _read_parent(found[-1])  # the parent has ended meanwhile
    return found


def last_argument(pid: int) -> str:
    """The last argument with which this process was started; empty if that is unknown."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - fast start
            return os.fsdecode(file.read().rstrip(b"\0").rpartition(b"\0")[2])
    except OSError:
        return ""


def running_descendants(pid: int) -> list[int]:
    """The IDs of all descendants of this process that are no zombies. Empty where there is no /proc."""
    return sorted(child for child in descendant_start_marks(pid) if is_running(child))


def signal_descendants(pid: int, number: int) -> None:
    """Sends the signal to all descendants of this process."""
    for child, mark in descendant_start_marks(pid).items():
        send_signal(child, mark, number)


def kill_descendants(pid: int, *, timeout_s: float) -> list[int]:
    """Kills all descendants of this process; returns the IDs of those that still run after the timeout.

    Blocks. Repeats until none runs, to include those that start meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = running_descendants(pid)
        if not left or time.monotonic() >= deadline:
            return left
        # Stop all before killing one: none may react by starting another process.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            signal_descendants(pid, number)
        time.sleep(_KILL_RECHECK_INTERVAL_S)


def child_session_ids(pid: int) -> dict[int, int]:
    """The direct children of this process with their session IDs. Empty where there is no /proc."""
    if not LINUX:
        return {}
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (fields := _read_stat_fields(int(name))) and int(fields[1]) == pid:
            found[int(name)] = int(fields[3])
    return found


def is_running(pid: int) -> bool:
    """Whether a thread of this process can still run: False for a zombie.

    The first thread alone does not decide: it may have ended while another one is blocked in a driver.
    """
    if not LINUX:
        ps = subprocess.run(
            ["/bin/ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return ps.stdout.strip()[:1] not in ("", "Z")
    return any(state not in "ZXx" for state in thread_states(pid))


def thread_states(pid: int) -> list[str]:
    """The state letters of the threads of a process, such as R, S, D or Z; empty if it does not exist."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return []
    stats = [_read_stat_file(f"/proc/{pid}/task/{thread}/stat") for thread in threads]
    return [fields[0].decode() for fields in stats if fields]


children_in_own_sessions: set[int] = set()
"""Children that this process has started in another session; guarded by `children_in_own_sessions_lock`.

Other children in another session are orphans that it has adopted.
"""
children_in_own_sessions_lock = threading.Lock()


def become_subreaper() -> bool:
    """Makes this process the parent of orphaned descendants. Returns False where that is not possible."""
    return LINUX and prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> bool:
    """Makes the kernel kill this process when its parent ends. Returns False where that is not possible."""
    return LINUX and prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, value: int) -> bool:
    try:
        return int(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def send_signal(pid: int, mark: str, number: int) -> bool:
    """Sends the signal unless another process has this ID by now. Returns whether it was sent."""
    if not mark:
        return False
    try:
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            fd = os.pidfd_open(pid)
            try:
                if start_mark(pid) != mark:
                    return False
                signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)
        elif start_mark(pid) == mark:
            os.kill(pid, number)
        else:
            return False
    except OSError as error:
        if error.errno == errno.ENOSYS and start_mark(pid) == mark:  # a kernel without pidfd
            os.kill(pid, number)
            return True
        return False
    return True


def _read_stat_fields(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat after the name; empty if no such process runs.

    State, parent, process group, session, ..., start time at 19.
    """
    return _read_stat_file(f"/proc/{pid}/stat")


def _read_parent(pid: int) -> int:
    """Returns 0 if the process has ended."""
    fields = _read_stat_fields(pid)
    return int(fields[1]) if fields else 0


def _read_stat_file(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - fast start
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


_boot_id_cache: list[str] = []


def boot_id() -> str:
    """Identifies the current boot of this machine; empty if that is unknown."""
    if not _boot_id_cache:
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
                _boot_id_cache.append(file.read().strip())
        except OSError:
            _boot_id_cache.append("")
    return _boot_id_cache[0]
