"""The process around each job: starts it, writes its log, and ends it when the dead-man timer expires.

It outlives the agent. The agent refreshes the dead-man timer of a restartable job periodically; when it
expires (the agent is dead, stopped or disconnected), the shim ends the job. A job without the timer goes on
until it ends, or until an agent ends it. The shim is started as a file, `python -I -S shim.py
CONFIG.json`, in its own session, and imports only the standard library, processes/process_table.py and
processes/cgroups.py, so that it starts fast and does not depend on files that may be upgraded meanwhile. The
job is in a control group, if the agent has created one; the shim is not.

On the control connection the agent sends lines: `r UNTIL` (may run until UNTIL, monotonic clock) and
`k ["REASON", GRACE_S]` (end it). The shim replies with one line, the exit record, and closes the connection.
The first connection is inherited. The next agent of the node connects to the listening socket (leftovers.py);
the shim then sends a greeting, and uses that connection instead of the earlier one. It rejects processes of
jobs of this node.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

if __package__:
    from genie.processes import cgroups, process_table
else:  # started as a file, isolated from Genie's own path
    _genie = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    sys.path.insert(0, os.path.join(_genie, "processes"))  # noqa: PTH118
    process_table = importlib.import_module("process_table")
    cgroups = importlib.import_module("cgroups")

CONTROL_VERSION = 1
"""Version of the control connection: of its greeting, lines and exit record."""
CONTROL_VERSION_OLDEST = 1
"""The oldest version that this release understands; its shims and agents use the highest common one."""
DEADMAN_EXTENSION_S_MAX = 600.0
"""The dead-man timer is never set to more than this from now: the maximum of `controller.node_ttl_s`."""
CONFIG_FILE = "shim.json"
OUTPUT_READ_BYTES = 65536
CONTROL_LINE_BYTES_MAX = 65536
EXIT_RECORD_RESERVED_BYTES = 4096
SIGKILL_REPEAT_INTERVAL_S = 0.05
DESCENDANTS_KILL_TIMEOUT_S = 10.0
OUTPUT_DRAIN_TIMEOUT_S = 1.0
PROGRAM_CHARS_SHOWN = 100
SURVIVORS_RECORDED_MAX = 20
_PEER_CREDENTIALS = struct.Struct("iII")
"""Process, user and group, of SO_PEERCRED."""
SHELL_SYNTAX_CHARACTERS = frozenset(" \t\n|&;<>()$`*?\"'")


class RotatingJobLog:
    """Writes the job's output to files named by the offset of their first byte; removes the oldest.

    A failed write loses bytes and counts them: a full disk must not block or end the job.
    """

    def __init__(self, directory: str, *, file_bytes_max: int, files_max: int) -> None:
        self.lost_bytes = 0
        self._directory = directory
        self._file_bytes_max = file_bytes_max
        self._files_max = files_max
        self._offset = 0
        self._file_bytes_left = 0
        self._file_fd = -1
        self._unreported_lost_bytes = 0
        self._last_write_error = ""

    def write(self, data: bytes) -> None:
        if self._unreported_lost_bytes:
            note = (
                f"\n[genie: {self._unreported_lost_bytes} bytes of output were lost: "
                f"{self._last_write_error}]\n"
            )
            if self._write_bytes(note.encode()) == len(note.encode()):
                self._unreported_lost_bytes = 0
        lost = len(data) - self._write_bytes(data)
        self.lost_bytes += lost
        self._unreported_lost_bytes += lost

    def close(self) -> None:
        if self._file_fd >= 0:
            os.close(self._file_fd)
            self._file_fd = -1

    def _write_bytes(self, data: bytes) -> int:
        """Returns the number of bytes written."""
        done = 0
        try:
            while done < len(data):
                if self._file_bytes_left <= 0 or self._file_fd < 0:
                    self._open_next_file()
                count = os.write(self._file_fd, data[done : done + self._file_bytes_left])
                done += count
                self._offset += count
                self._file_bytes_left -= count
        except OSError as error:
            self._last_write_error = error.strerror or str(error)
        return done

    def _open_next_file(self) -> None:
        self.close()
        path = os.path.join(self._directory, f"{self._offset:020d}.log")  # noqa: PTH118 - fast start
        # Non-blocking: the job can put a pipe there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        self._file_fd = os.open(path, flags, 0o600)
        self._file_bytes_left = self._file_bytes_max
        names = sorted(name for name in os.listdir(self._directory) if name.endswith(".log"))  # noqa: PTH208
        for name in names[: -(self._files_max + 1)]:
            try:
                os.unlink(os.path.join(self._directory, name))  # noqa: PTH108, PTH118
            except OSError:
                pass  # a directory that the job created


class Shim:
    """Runs one job from start to exit record."""

    def __init__(self, config: dict[str, Any]) -> None:  # Any: JSON, read key by key below
        self._config = config
        self._control_fd = int(config["control_fd"])
        # An agent that runs while its files are upgraded may write the configuration of an earlier release.
        listen_fd = int(config.get("listen_fd", -1))
        self._listening_socket = socket.socket(fileno=listen_fd) if listen_fd >= 0 else None
        if self._listening_socket is not None:
            self._listening_socket.setblocking(False)
        self._control_group = str(config["group"])
        self._job_log = RotatingJobLog(
            config["log_dir"], file_bytes_max=config["log_bytes_max"], files_max=config["log_files_max"]
        )
        until_s = config["until_s"]  # None if the job has no dead-man timer
        self._deadman_expiry_s = math.inf if until_s is None else _monotonic_to_boot_s(float(until_s))
        self._job_process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._output_fd = -1
        self._job_wait_status: int | None = None
        self._partial_control_line = b""
        self._end_reason = ""
        self._kill_deadline_s = 0.0
        self._signal_read_fd, self._signal_write_fd = os.pipe()
        self._exit_record_fd = -1
        # Files of the shim are private; the job gets the umask of the agent.
        self._agent_umask = os.umask(0o077)

    def run(self) -> None:
        process_table.become_subreaper()
        self._exit_record_fd = _reserve_exit_record(self._config["exit_path"])
        self._install_signal_handlers()
        self._output_fd, output = os.pipe()
        os.set_blocking(self._output_fd, False)
        try:
            self._job_process = self._start_job_process(output)
        except subprocess.SubprocessError:  # raised by _prepare_job_process
            reason = f"could not move the job into the control group {self._control_group}"
            self._write_and_send_exit_record(None, reason, started=False, is_caused_by_node=True)
            return
        except (OSError, ValueError) as error:
            self._write_and_send_exit_record(None, self._format_start_error(error), started=False)
            return
        finally:
            os.close(output)
        self._started_s = time.monotonic()
        self._write_start_record(self._job_process.pid)
        while self._job_wait_status is None:
            self._handle_events_once()
        self._kill_descendants_until_none_left()
        self._drain_output()
        self._write_and_send_exit_record(*self._exit_code_and_reason())

    def _start_job_process(self, output_fd: int) -> subprocess.Popen[bytes]:
        if self._deadman_remaining_s() <= 0:
            raise ValueError("the dead-man timer expired before the start")
        return subprocess.Popen(
            self._config["argv"],
            cwd=self._config["cwd"],
            env=self._config["env"],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            start_new_session=True,
            umask=self._agent_umask,
            preexec_fn=lambda: _prepare_job_process(self._control_group),  # noqa: PLW1509 - there is one thread
        )

    def _format_start_error(self, error: Exception) -> str:
        program = str(self._config["argv"][0])
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        place = os.path.join(self._config["cwd"], program)  # noqa: PTH118
        if isinstance(error, FileNotFoundError) and not os.path.lexists(place):
            reason = "no such program on this node"
        if SHELL_SYNTAX_CHARACTERS.intersection(program):
            reason += "; a command with shell syntax needs sh -c '...'"
        return f"cannot start {program[:PROGRAM_CHARS_SHOWN]!r}: {reason}"

    def _write_start_record(self, pid: int) -> None:
        record = {
            "shim": [os.getpid(), process_table.start_mark(os.getpid())],
            "command": [pid, process_table.start_mark(pid)],
        }
        try:
            path = self._config["started_path"]
            # O_EXCL: the job may have put a pipe there, and opening that would block.
            fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(f"{path}.new", path)  # noqa: PTH105
        except OSError:
            pass  # disk full: the agent also finds leftovers by their environment

    # --- main loop --------------------------------------------------------------------------

    def _handle_events_once(self) -> None:
        poll = select.poll()
        listen_fd = -1 if self._listening_socket is None else self._listening_socket.fileno()
        for fd in (self._signal_read_fd, self._control_fd, self._output_fd, listen_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(max(0.0, self._poll_timeout_s()) * 1000 + 1):
            if fd == self._signal_read_fd:
                self._read_signals()
            elif fd == listen_fd:
                self._accept_connections()
            elif fd == self._control_fd:
                self._read_control_lines()
            elif fd == self._output_fd:
                self._read_output()
        self._reap_children()
        self._enforce_deadlines()

    def _poll_timeout_s(self) -> float:
        if self._end_reason:
            return min(
                max(
                    min(self._kill_deadline_s - time.monotonic(), self._deadman_remaining_s()),
                    SIGKILL_REPEAT_INTERVAL_S,
                ),
                1.0,
            )
        return min(self._deadman_remaining_s(), 60.0)

    def _deadman_remaining_s(self) -> float:
        return self._deadman_expiry_s - _seconds_since_boot()

    def _enforce_deadlines(self) -> None:
        if self._job_wait_status is not None:
            return
        if self._deadman_remaining_s() <= 0:
            self._read_pending_extensions()
        if self._deadman_remaining_s() <= 0:  # also while ending: the grace period may be shorter now
            why = (
                "the agent has ended" if self._control_fd < 0 else "the node lost contact with the controller"
            )
            self._begin_termination(f"ended by Genie: {why}", grace_s=self._config["deadman_grace_s"])
        if self._end_reason and time.monotonic() >= self._kill_deadline_s:
            self._kill_descendants()

    def _read_pending_extensions(self) -> None:
        """Reads what arrived while this process was stopped or waited for a disk."""
        self._accept_connections()
        if self._control_fd >= 0:
            self._read_control_lines()

    def _begin_termination(self, reason: str, *, grace_s: float) -> None:
        kill_at = time.monotonic() + grace_s
        if self._end_reason:
            self._kill_deadline_s = min(self._kill_deadline_s, kill_at)
            return
        self._reap_children()
        if self._job_wait_status is not None:
            return  # it ended by itself first; the record will say so
        self._end_reason, self._kill_deadline_s = reason, kill_at
        assert self._job_process is not None
        for number in (signal.SIGTERM, signal.SIGCONT):
            try:
                # Safe: the process is not reaped yet, so its ID cannot be reused.
                os.killpg(self._job_process.pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _read_signals(self) -> None:
        if signal.SIGTERM in os.read(self._signal_read_fd, 512):
            self._begin_termination(
                "ended by Genie: the shim received SIGTERM", grace_s=self._config["grace_s"]
            )

    def _read_control_lines(self) -> None:
        try:
            data = os.read(self._control_fd, OUTPUT_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # The agent has ended. The job continues, until its dead-man timer expires if it has one.
            os.close(self._control_fd)
            self._control_fd = -1
            return
        *lines, self._partial_control_line = (self._partial_control_line + data).split(b"\n")
        self._partial_control_line = self._partial_control_line[-CONTROL_LINE_BYTES_MAX:]
        for line in lines:
            self._handle_control_line(line)

    def _accept_connections(self) -> None:
        """Accepts the connection of the next agent of this node; it replaces that of the earlier one."""
        while self._listening_socket is not None:
            try:
                connection, _ = self._listening_socket.accept()
            except OSError:  # no further connection
                return
            if not self._may_control(connection):
                connection.close()
                continue
            connection.setblocking(False)
            if self._control_fd >= 0:
                self._read_control_lines()  # what the earlier agent sent before it ended
            if self._control_fd >= 0:
                os.close(self._control_fd)
            self._control_fd, self._partial_control_line = connection.detach(), b""
            try:
                os.write(self._control_fd, json.dumps(self._greeting()).encode() + b"\n")
            except OSError:
                pass  # closed already: the next read returns the end of the stream

    def _may_control(self, connection: socket.socket) -> bool:
        """Whether the peer can be an agent of this node: jobs of the node run as the same user."""
        if not hasattr(socket, "SO_PEERCRED"):
            return True
        pid, uid, _ = _PEER_CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        )
        if uid not in (0, os.geteuid()) or pid in self._pids_in_control_groups_of_jobs():
            return False
        chain = process_table.pids_of_process_and_ancestors(pid)
        return bool(chain) and os.getpid() not in chain and not any(map(self._is_shim_of_node, chain))

    def _pids_in_control_groups_of_jobs(self) -> set[int]:
        if not self._control_group:
            return set()
        groups = cgroups.children(os.path.dirname(self._control_group))  # noqa: PTH120
        return {pid for group in groups for pid in cgroups.processes(group)}

    def _is_shim_of_node(self, pid: int) -> bool:
        """Whether this process is the shim of a job of this node. A shim is the parent of all orphans of its
        job, and its arguments end with the path of its configuration, JOBS_DIR/JOB_ID/shim.json."""
        directory = os.path.dirname(os.path.dirname(self._config["exit_path"]))  # noqa: PTH120
        argument = process_table.last_argument(pid)
        return (
            os.path.basename(argument) == CONFIG_FILE  # noqa: PTH119
            and os.path.dirname(os.path.dirname(argument)) == directory  # noqa: PTH120
        )

    def _greeting(self) -> dict[str, Any]:  # Any: JSON
        remaining_s = self._deadman_remaining_s()
        return {
            "version": CONTROL_VERSION,
            "oldest_version": CONTROL_VERSION_OLDEST,
            "job": self._config.get("job"),
            "shim": [os.getpid(), process_table.start_mark(os.getpid())],
            "grace_s": self._config["grace_s"],
            "started_s": self._started_s,
            "until_s": None if math.isinf(remaining_s) else time.monotonic() + remaining_s,
            "end_reason": self._end_reason,
            "kill_in_s": max(self._kill_deadline_s - time.monotonic(), 0.0),
        }

    def _handle_control_line(self, line: bytes) -> None:
        order, _, rest = line.partition(b" ")
        try:
            if order == b"r":
                until_s = float(rest)
                if until_s - time.monotonic() <= DEADMAN_EXTENSION_S_MAX:
                    self._deadman_expiry_s = max(self._deadman_expiry_s, _monotonic_to_boot_s(until_s))
            elif order == b"k":
                why, grace_s = json.loads(rest)
                self._begin_termination(str(why), grace_s=float(grace_s))
        except (ValueError, TypeError):
            pass  # a partial line from a dying agent

    def _read_output(self) -> None:
        try:
            data = os.read(self._output_fd, OUTPUT_READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._job_log.write(data)
        else:
            os.close(self._output_fd)
            self._output_fd = -1

    def _reap_children(self) -> bool:
        """Reaps all ended children; returns False if there are no children at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if self._job_process is not None and pid == self._job_process.pid:
                self._job_wait_status = status
                self._job_process.returncode = 0  # reaped here, so that Popen does not wait for it

    # --- the end ----------------------------------------------------------------------------

    def _exit_code_and_reason(self) -> tuple[int | None, str]:
        assert self._job_wait_status is not None
        if self._end_reason:
            return None, self._end_reason
        if os.WIFSIGNALED(self._job_wait_status):
            number = os.WTERMSIG(self._job_wait_status)
            return -number, f"killed by signal {number}"
        code = os.WEXITSTATUS(self._job_wait_status)
        return code, f"exit code {code}"

    def _kill_descendants(self) -> None:
        if self._job_process is not None and self._job_wait_status is None:
            try:
                os.killpg(self._job_process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        process_table.signal_descendants(os.getpid(), signal.SIGKILL)
        if self._control_group:
            cgroups.kill(self._control_group)

    def _find_survivors(self) -> dict[int, str]:
        survivors = process_table.descendant_start_marks(os.getpid()) if self._reap_children() else {}
        return survivors | (cgroups.processes(self._control_group) if self._control_group else {})

    def _kill_descendants_until_none_left(self) -> None:
        """Kills what the command left running. As subreaper the shim becomes the parent of all orphans."""
        deadline = time.monotonic() + DESCENDANTS_KILL_TIMEOUT_S
        while self._find_survivors() and time.monotonic() < deadline:
            self._kill_descendants()
            poll = select.poll()
            poll.register(self._signal_read_fd, select.POLLIN)
            if self._output_fd >= 0:
                poll.register(self._output_fd, select.POLLIN)
            for fd, _ in poll.poll(SIGKILL_REPEAT_INTERVAL_S * 1000):
                if fd == self._signal_read_fd:
                    os.read(self._signal_read_fd, 512)
                else:
                    self._read_output()
            self._accept_connections()

    def _drain_output(self) -> None:
        deadline = time.monotonic() + OUTPUT_DRAIN_TIMEOUT_S
        while self._output_fd >= 0 and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(self._output_fd, select.POLLIN)
            # All writers have ended: no more output can arrive.
            if not poll.poll(0):
                break
            self._read_output()
        self._job_log.close()

    def _write_and_send_exit_record(
        self, exit_code: int | None, reason: str, *, started: bool = True, is_caused_by_node: bool = False
    ) -> None:
        record = {
            "job_id": self._config["job_id"],
            "epoch": self._config["epoch"],
            "exit_code": exit_code,
            "reason": reason[:500],
            "ended_at": time.time(),
            "started": started,
            "log_bytes_lost": self._job_log.lost_bytes,
            "by_node": is_caused_by_node,
            "survivors": list(self._find_survivors().items())[:SURVIVORS_RECORDED_MAX],
        }
        data = json.dumps(record).encode()
        if self._control_group:
            cgroups.remove(self._control_group)
        try:
            _write_exit_record(self._exit_record_fd, self._config["exit_path"], data)
        except OSError as error:
            sys.stderr.write(f"could not write the exit record: {error}\n")
        self._accept_connections()
        if self._control_fd >= 0:
            try:
                os.write(self._control_fd, data + b"\n")
            except OSError:
                pass

    def _install_signal_handlers(self) -> None:
        for fd in (self._signal_read_fd, self._signal_write_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._signal_write_fd, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, _noop_signal_handler)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def _seconds_since_boot() -> float:
    """A clock that also runs while the machine is suspended, as the lease does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _monotonic_to_boot_s(monotonic_s: float) -> float:
    return _seconds_since_boot() + (monotonic_s - time.monotonic())


def _reserve_exit_record(path: str) -> int:
    """Allocates the exit record now, so that it can be written when the disk is full.

    The file stays open, so that the job cannot replace it by a pipe that would block the write.
    """
    fd = -1
    try:
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(fd, b" " * EXIT_RECORD_RESERVED_BYTES)
        os.fsync(fd)
    except OSError:
        pass
    return fd


def _write_exit_record(fd: int, path: str, data: bytes) -> None:
    if fd < 0:
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, data.ljust(EXIT_RECORD_RESERVED_BYTES), 0)
        os.fsync(fd)
        if not os.path.samestat(os.fstat(fd), os.lstat(f"{path}.new")):
            raise OSError(errno.EEXIST, "the file was replaced")
    finally:
        os.close(fd)
    os.replace(f"{path}.new", path)  # noqa: PTH105
    directory = os.open(os.path.dirname(path), os.O_RDONLY)  # noqa: PTH120
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _noop_signal_handler(number: int, frame: object) -> None:
    """The wakeup descriptor delivers the signal number."""


def _prepare_job_process(group: str) -> None:
    """Makes the job end with the shim, and resets ignored signals: the shim ignores some, and so does an
    agent that was started with nohup or as a background job of a shell. Enters the control group."""
    if group:
        cgroups.enter(group)
    process_table.end_with_parent()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123
        config = json.load(file)
    os.unlink(sys.argv[1])  # noqa: PTH108 - it contains the job's environment, which may contain secrets
    os.set_blocking(config["control_fd"], False)
    Shim(config).run()


if __name__ == "__main__":
    main()
