"""The small process around each job: starts it, keeps its log, and ends it when nobody vouches for it.

It outlives the agent on purpose. The agent says again and again until when the job may run; when
that time passes without news (the agent is dead, stopped or cut off), the shim ends the job. It is
started as a file with `python -I -S shim.py INSTRUCTIONS.json`, in a session of its own, and
imports the standard library only, so that it starts fast and depends on nothing that may change
under it. Started as `Shim` by nobody else. Not for: deciding when a job may run (agent.py).

On the control socket the agent sends lines: `r UNTIL` (may run until UNTIL, by the monotonic
clock) and `k "REASON"` (end it now). The shim answers with one line, the exit record, and closes.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

LINUX = sys.platform == "linux"
READ_BYTES = 65536
CONTROL_BYTES_MAX = 65536
RECORD_BYTES = 4096
KILL_AGAIN_S = 0.05
KILL_GIVE_UP_S = 10.0
DRAIN_S = 1.0
PROGRAM_CHARS_SHOWN = 100
SHELL_CHARACTERS = frozenset(" \t\n|&;<>()$`*?\"'")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Log:
    """The job's output in files named by the offset of their first byte; the oldest are dropped.

    A write that fails loses bytes and counts them: a full disk must not stop or end the job.
    """

    def __init__(self, directory: str, *, file_bytes_max: int, files_max: int) -> None:
        self.lost_bytes = 0
        self._directory = directory
        self._file_bytes_max = file_bytes_max
        self._files_max = files_max
        self._offset = 0
        self._room = 0
        self._fd = -1
        self._unsaid_bytes = 0
        self._unsaid_why = ""

    def write(self, data: bytes) -> None:
        if self._unsaid_bytes:
            note = f"\n[genie: {self._unsaid_bytes} bytes of output were lost: {self._unsaid_why}]\n"
            if self._put(note.encode()) == len(note.encode()):
                self._unsaid_bytes = 0
        left = len(data) - self._put(data)
        self.lost_bytes += left
        self._unsaid_bytes += left

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, data: bytes) -> int:
        """How many bytes got through."""
        done = 0
        try:
            while done < len(data):
                if self._room <= 0 or self._fd < 0:
                    self._open_next()
                count = os.write(self._fd, data[done : done + self._room])
                done += count
                self._offset += count
                self._room -= count
        except OSError as error:
            self._unsaid_why = error.strerror or str(error)
        return done

    def _open_next(self) -> None:
        self.close()
        path = os.path.join(self._directory, f"{self._offset:020d}.log")  # noqa: PTH118 - fast start
        # The job can put a pipe there: nothing here may wait for it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._room = self._file_bytes_max
        names = sorted(name for name in os.listdir(self._directory) if name.endswith(".log"))  # noqa: PTH208
        for name in names[: -(self._files_max + 1)]:
            try:
                os.unlink(os.path.join(self._directory, name))  # noqa: PTH108, PTH118
            except OSError:
                pass  # a directory, made by the job


class Shim:
    """One job from start to exit record."""

    def __init__(self, given: dict[str, Any]) -> None:  # Any: JSON, read key by key below
        self._given = given
        self._control = int(given["control_fd"])
        self._log = Log(
            given["log_dir"], file_bytes_max=given["log_bytes_max"], files_max=given["log_files_max"]
        )
        self._until = _since_boot(float(given["until_s"]))
        self._command: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._status: int | None = None
        self._heard = b""
        self._why_ended = ""
        self._kill_at = 0.0
        self._signals, self._signals_in = os.pipe()
        self._record_fd = -1
        # What the shim writes is private; the job gets the mask that the agent has.
        self._umask = os.umask(0o077)

    def run(self) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._record_fd = _reserve(self._given["exit_path"])
        self._watch_signals()
        self._pipe, output = os.pipe()
        os.set_blocking(self._pipe, False)
        try:
            self._command = self._start(output)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._finish(None, self._why_not_started(error), started=False)
            return
        finally:
            os.close(output)
        self._record_start(self._command.pid)
        while self._status is None:
            self._turn()
        self._end_descendants()
        self._drain()
        self._finish(*self._verdict())

    def _start(self, output: int) -> subprocess.Popen[bytes]:
        if self._left_s() <= 0:
            raise ValueError("too late: the agent's word ran out before the start")
        return subprocess.Popen(
            self._given["argv"],
            cwd=self._given["cwd"],
            env=self._given["env"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            umask=self._umask,
            preexec_fn=_die_with_parent if LINUX else None,  # noqa: PLW1509 - there is one thread
        )

    def _why_not_started(self, error: Exception) -> str:
        program = str(self._given["argv"][0])
        words = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        place = os.path.join(self._given["cwd"], program)  # noqa: PTH118
        if isinstance(error, FileNotFoundError) and not os.path.lexists(place):
            words = "no such program on this node"
        if SHELL_CHARACTERS.intersection(program):
            words += "; a command with shell syntax needs sh -c '...'"
        return f"cannot start {program[:PROGRAM_CHARS_SHOWN]!r}: {words}"

    def _record_start(self, pid: int) -> None:
        record = {
            "shim": [os.getpid(), start_mark(os.getpid())],
            "command": [pid, start_mark(pid)],
        }
        try:
            path = self._given["started_path"]
            # The job runs already and may have put a pipe there, on which opening would wait.
            fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(f"{path}.new", path)  # noqa: PTH105
        except OSError:
            pass  # a full disk: the agent finds leftovers by their environment as well

    # --- one turn of the loop ---------------------------------------------------------------

    def _turn(self) -> None:
        poll = select.poll()
        for fd in (self._signals, self._control, self._pipe):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(max(0.0, self._next_s()) * 1000 + 1):
            if fd == self._signals:
                self._take_signals()
            elif fd == self._control:
                self._take_orders()
            else:
                self._take_output()
        self._reap()
        self._judge()

    def _next_s(self) -> float:
        if self._why_ended:
            return min(max(min(self._kill_at - time.monotonic(), self._left_s()), KILL_AGAIN_S), 1.0)
        return min(self._left_s(), 60.0)

    def _left_s(self) -> float:
        return self._until - _boot_s()

    def _judge(self) -> None:
        if self._status is not None:
            return
        if self._left_s() <= 0:  # also when it is ending already: then the grace may be shorter from now on
            why = "the agent is gone" if self._control < 0 else "the node lost contact with the controller"
            self._begin_end(f"ended by Genie: {why}", grace_s=self._given["deadman_grace_s"])
        if self._why_ended and time.monotonic() >= self._kill_at:
            self._kill_descendants()

    def _begin_end(self, why: str, *, grace_s: float) -> None:
        kill_at = time.monotonic() + grace_s
        if self._why_ended:
            self._kill_at = min(self._kill_at, kill_at)
            return
        self._reap()
        if self._status is not None:
            return  # it ended by itself first, and that is what the record will say
        self._why_ended, self._kill_at = why, kill_at
        assert self._command is not None
        for number in (signal.SIGTERM, signal.SIGCONT):
            try:
                # Safe: the leader is not reaped yet, so its number cannot belong to anyone else.
                os.killpg(self._command.pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _take_signals(self) -> None:
        if signal.SIGTERM in os.read(self._signals, 512):
            self._begin_end("ended by Genie: the shim was told to stop", grace_s=self._given["grace_s"])

    def _take_orders(self) -> None:
        try:
            data = os.read(self._control, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # The agent is gone. The job goes on until the time that was last promised.
            os.close(self._control)
            self._control = -1
            return
        *lines, self._heard = (self._heard + data).split(b"\n")
        self._heard = self._heard[-CONTROL_BYTES_MAX:]
        for line in lines:
            self._obey(line)

    def _obey(self, line: bytes) -> None:
        order, _, rest = line.partition(b" ")
        try:
            if order == b"r":
                self._until = max(self._until, _since_boot(float(rest)))
            elif order == b"k":
                why, grace_s = json.loads(rest)
                self._begin_end(str(why), grace_s=float(grace_s))
        except (ValueError, TypeError):
            pass  # half a line from a dying agent

    def _take_output(self) -> None:
        try:
            data = os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._log.write(data)
        else:
            os.close(self._pipe)
            self._pipe = -1

    def _reap(self) -> bool:
        """Collects everything that has ended; False when there are no children at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if self._command is not None and pid == self._command.pid:
                self._status = status
                self._command.returncode = 0  # waited for here, so that Popen does not

    # --- the end ----------------------------------------------------------------------------

    def _verdict(self) -> tuple[int | None, str]:
        assert self._status is not None
        if self._why_ended:
            return None, self._why_ended
        if os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            return -number, f"killed by signal {number}"
        code = os.WEXITSTATUS(self._status)
        return code, f"exit code {code}"

    def _kill_descendants(self) -> None:
        if self._command is not None and self._status is None:
            try:
                os.killpg(self._command.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        for pid, mark in descendants(os.getpid()).items():
            send_signal(pid, mark, signal.SIGKILL)

    def _end_descendants(self) -> None:
        """What the command left behind. As their subreaper the shim is the parent of all that stray."""
        deadline = time.monotonic() + KILL_GIVE_UP_S
        while self._reap() and time.monotonic() < deadline:
            self._kill_descendants()
            poll = select.poll()
            poll.register(self._signals, select.POLLIN)
            if self._pipe >= 0:
                poll.register(self._pipe, select.POLLIN)
            for fd, _ in poll.poll(KILL_AGAIN_S * 1000):
                if fd == self._signals:
                    os.read(self._signals, 512)
                else:
                    self._take_output()

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while self._pipe >= 0 and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            # Everyone who could write is gone: what is not there now will not come.
            if not poll.poll(0):
                break
            self._take_output()
        self._log.close()

    def _finish(self, exit_code: int | None, reason: str, *, started: bool = True) -> None:
        record = {
            "job_id": self._given["job_id"],
            "epoch": self._given["epoch"],
            "exit_code": exit_code,
            "reason": reason[:500],
            "ended_at": time.time(),
            "started": started,
            "log_bytes_lost": self._log.lost_bytes,
        }
        data = json.dumps(record).encode()
        try:
            _seal(self._record_fd, self._given["exit_path"], data)
        except OSError as error:
            sys.stderr.write(f"cannot write the exit record: {error}\n")
        if self._control >= 0:
            try:
                os.write(self._control, data + b"\n")
            except OSError:
                pass

    def _watch_signals(self) -> None:
        for fd in (self._signals, self._signals_in):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._signals_in, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, _noted)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def start_mark(pid: int) -> str:
    """When this process started, in a form that no later process with the same number shares; '' if gone."""
    if not LINUX:
        asked = subprocess.run(
            ["/bin/ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip()
    fields = _stat(pid)
    return f"{_boot_id()}:{fields[19].decode()}" if fields else ""


def descendants(pid: int) -> dict[int, str]:
    """Every process below this one, with its start mark. Empty where there is no /proc."""
    if not LINUX:
        return {}
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (fields := _stat(int(name))):
            parents[int(name)] = int(fields[1])
    found: set[int] = set()
    grew = True
    while grew:
        below = {child for child, parent in parents.items() if parent == pid or parent in found}
        grew = not below <= found
        found |= below
    return {child: start_mark(child) for child in found}


def send_signal(pid: int, mark: str, number: int) -> bool:
    """Signals exactly this process; one that has taken its number since is left alone."""
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


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat after the name: state, parent, ..., start time at 19; empty when gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - fast start
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


_boot: list[str] = []


def _boot_id() -> str:
    if not _boot:
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
                _boot.append(file.read().strip())
        except OSError:
            _boot.append("boot")
    return _boot[0]


def _boot_s() -> float:
    """Time that also passes while the machine is suspended: its lease does not wait for it either."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _since_boot(monotonic_s: float) -> float:
    return _boot_s() + (monotonic_s - time.monotonic())


def _reserve(path: str) -> int:
    """Takes the space of the exit record now, so that it can be written when the disk is full.

    It stays open, so that the job cannot put something in its place that the end would wait for.
    """
    fd = -1
    try:
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(fd, b" " * RECORD_BYTES)
        os.fsync(fd)
    except OSError:
        pass
    return fd


def _seal(fd: int, path: str, data: bytes) -> None:
    if fd < 0:
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, data.ljust(RECORD_BYTES), 0)
        os.fsync(fd)
        if not os.path.samestat(os.fstat(fd), os.lstat(f"{path}.new")):
            raise OSError(errno.EEXIST, "something else is in its place")
    finally:
        os.close(fd)
    os.replace(f"{path}.new", path)  # noqa: PTH105
    directory = os.open(os.path.dirname(path), os.O_RDONLY)  # noqa: PTH120
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _noted(number: int, frame: object) -> None:
    """The wake-up descriptor carries the number; there is nothing else to do."""


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if LINUX:
        try:
            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
        except (OSError, AttributeError):
            pass


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123
        given = json.load(file)
    os.unlink(sys.argv[1])  # noqa: PTH108 - it holds the job's environment, which may hold secrets
    os.set_blocking(given["control_fd"], False)
    Shim(given).run()


if __name__ == "__main__":
    main()
