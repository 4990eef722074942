"""One child process in its own session: writes its output to a bounded log and restarts it after a crash.

A child that ends with exit code 0 was stopped on purpose and is not restarted.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from genie.errors import ConfigError, GenieError, LaunchError, StoreFullError
from genie.processes import files
from genie.supervisor import process_records

_log = logging.getLogger(__name__)

CHILD_LOG_BYTES_MAX = 8 * 1024**2
RESTART_BACKOFF_S_MAX = 5.0
CRASH_WINDOW_S = 60.0
_CRASH_TIMES_MAX = 8
_RESTART_BACKOFF_S_MIN = 0.2
_EXIT_POLL_S = 0.1
_ERROR_PREFIX, _HINT_PREFIX = "error: ", "hint: "


def python_module_command(module: str) -> list[str]:
    """The command of a Genie program that runs with this interpreter."""
    # -P: import nothing from the current directory.
    return [sys.executable, "-P", "-m", module]


def restart_backoff_s(crashes: Sequence[float], *, now: float) -> float:
    """Backoff before the next start, given the times of earlier crashes: doubles with every crash within
    CRASH_WINDOW_S. The limit is low: the cause, such as a full disk, may be gone at any time."""
    recent = sum(now - at < CRASH_WINDOW_S for at in crashes)
    return float(min(_RESTART_BACKOFF_S_MIN * 2 ** max(recent - 1, 0), RESTART_BACKOFF_S_MAX))


class Child:
    """A program of this machine. `command` is followed by the arguments of each start."""

    def __init__(self, name: str, *, command: Sequence[str], state_dir: Path) -> None:
        self.name = name
        self._command = list(command)
        self._state_dir = state_dir
        self._start_arguments: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._process_record: process_records.ProcessRecord | None = None
        self._is_process_record_written = False
        self._crash_times_s: deque[float] = deque(maxlen=_CRASH_TIMES_MAX)
        self._log_offset_at_start = 0
        self._node_id = ""
        self._is_stopped = False
        """By `stop`: it is not restarted then, however it ended."""

    @property
    def log_path(self) -> Path:
        return process_records.log_path(self._state_dir, self.name)

    @property
    def _name_in_text(self) -> str:
        return process_records.name_in_text(self.name)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, arguments: Sequence[str], *, node_id: str = "") -> None:
        """Starts it in its own session, so that Ctrl-C at the terminal reaches only the supervisor.

        `node_id` is written to the process record of an agent.
        """
        self._start_arguments, self._node_id = list(arguments), node_id
        self._is_stopped = False
        files.make_private_directory(self.log_path.parent)
        rotate_log_if_large(self.log_path)
        with self.log_path.open("ab") as log:
            self.log_path.chmod(0o600)
            self._log_offset_at_start = log.tell()
            self._process = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process_record = process_records.make_process_record(
            self.name, self._process.pid, node_id=node_id
        )
        self._is_process_record_written = False
        if not self._try_write_process_record():
            _log.warning(
                "could not write the record of %s; trying again until it is written", self._name_in_text
            )

    def _try_write_process_record(self) -> bool:
        """A process without a written record is running all the same: starting another would be wrong."""
        if self._process_record is not None and not self._is_process_record_written:
            try:
                self._process_record.write(self._state_dir)
            except StoreFullError:
                return False
        self._is_process_record_written = True
        return True

    def exit_code(self) -> int | None:
        """None while it runs or if it was never started."""
        return None if self._process is None else self._process.poll()

    def last_log_lines(self, *, count: int = 8, bytes_max: int = 8192) -> list[str]:
        """The last lines of its log since this start."""
        return process_records.read_last_lines(
            self.log_path, count=count, bytes_max=bytes_max, since_bytes=self._log_offset_at_start
        )

    def check_not_exited(self) -> None:
        """Raises LaunchError if it has ended, with its own error or the last lines of its log; ConfigError if
        its own error was an invalid setting."""
        code = self.exit_code()
        if code is None:
            return
        lines = self.last_log_lines()
        log_hint = f"see the log {self.log_path}"
        if (found := _find_error_and_hint_in_log(lines)) is not None:
            message, hint = found
            kind = ConfigError if code == ConfigError.exit_code else LaunchError
            raise kind(message, hint=hint or log_hint)
        output = "; its last output:\n  " + "\n  ".join(lines) if lines else " without output"
        raise LaunchError(f"{self._name_in_text} ended with {_format_exit_code(code)}{output}", hint=log_hint)

    async def restart_after_crashes(self, on_crash: Callable[[str], None]) -> None:
        """Restarts it after every crash. Returns when `stop` or another process has stopped it."""
        while not self._is_stopped:
            code = self.exit_code()
            if code in (0, -signal.SIGTERM):
                _log.info("%s was stopped by another process", self._name_in_text)
                return
            if code is not None:
                await self._restart_until_started(
                    f"{self._name_in_text} ended with {_format_exit_code(code)}", on_crash
                )
            rotate_log_if_large(self.log_path)
            self._try_write_process_record()
            await asyncio.sleep(_EXIT_POLL_S)

    async def _restart_until_started(self, reason: str, on_crash: Callable[[str], None]) -> None:
        """Retries until it starts: a full disk may have space later."""
        while reason:
            now = time.monotonic()
            self._crash_times_s.append(now)
            delay_s = restart_backoff_s(self._crash_times_s, now=now)
            on_crash(f"{reason}; restarting in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            if self._is_stopped:
                return
            try:
                self.start(self._start_arguments, node_id=self._node_id)
                reason = ""
            except (OSError, GenieError) as error:
                reason = f"could not start {self._name_in_text}: {error}"

    def set_restart_arguments(self, arguments: Sequence[str]) -> None:
        """Replaces the arguments of later restarts."""
        self._start_arguments = list(arguments)

    async def stop(self, *, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Ends it, by this signal, and removes its process record. Does nothing if it was never started."""
        self._is_stopped = True
        if self._process is None:
            return
        if self._process.poll() is None and self._process_record is not None:
            await process_records.end_process(self._process_record, grace_s=grace_s, number=number)
        self._process.wait()  # has ended: only reaps it
        process_records.remove_process_record(self._state_dir, self.name)


def rotate_log_if_large(path: Path) -> None:
    """Rotates the log at CHILD_LOG_BYTES_MAX; keeps one earlier file.

    The child appends to the open file, so it is copied and truncated, not renamed.
    """
    try:
        if path.stat().st_size <= CHILD_LOG_BYTES_MAX:
            return
        shutil.copyfile(path, path.with_suffix(".log.1"))
        path.with_suffix(".log.1").chmod(0o600)
        with path.open("r+b") as file:
            file.truncate(0)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("could not rotate the log %s: %s", path, error)


def _find_error_and_hint_in_log(lines: Sequence[str]) -> tuple[str, str] | None:
    """Returns the message and hint that a Genie program writes before it exits."""
    starts = [at for at, line in enumerate(lines) if line.startswith(_ERROR_PREFIX)]
    if not starts:
        return None
    message, _, hint = "\n".join(lines[starts[-1] :]).partition(f"\n{_HINT_PREFIX}")
    return message.removeprefix(_ERROR_PREFIX), hint


def _format_exit_code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
