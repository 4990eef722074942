"""One child process: started in its own session, its output in a bounded log, started again when it crashes.

A child that ends with exit code 0 was asked to by someone and is left alone. Not for: which children
there are and in what order (local.py).
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

from genie.cluster import processes
from genie.errors import GenieError, LaunchError
from genie.runtime import files

_log = logging.getLogger(__name__)

LOG_BYTES_MAX = 8 * 1024**2
CRASHES_MAX = 5
CRASH_WINDOW_S = 60.0
_DELAY_S_MIN = 0.2
_STEP_S = 0.1
_ERROR, _HINT = "error: ", "hint: "


def restart_delay_s(crashes: Sequence[float], *, now: float) -> float:
    """How long to wait before the next start, given when earlier ones ended badly: first doubling, and
    never more than CRASHES_MAX starts within CRASH_WINDOW_S."""
    recent = [at for at in crashes if now - at < CRASH_WINDOW_S]
    if len(recent) <= CRASHES_MAX:
        return float(_DELAY_S_MIN * 2 ** max(len(recent) - 1, 0))
    return recent[-CRASHES_MAX] + CRASH_WINDOW_S - now


class Child:
    """A program of Genie run with this interpreter. Made, started, watched, stopped."""

    def __init__(self, name: str, *, module: str, state_dir: Path) -> None:
        self.name = name
        self._module = module
        self._state_dir = state_dir
        self._arguments: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._record: processes.ProcessRecord | None = None
        self._crashes: deque[float] = deque(maxlen=CRASHES_MAX + 1)
        self._log_bytes_before = 0
        self._node_id = ""

    @property
    def log_path(self) -> Path:
        return processes.log_path(self._state_dir, self.name)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, arguments: Sequence[str], *, node_id: str = "") -> None:
        """Its own session, so that Ctrl-C at the terminal reaches only the one who decides about it.

        `node_id` is written down beside its pid: the node that it is, for an agent.
        """
        self._arguments, self._node_id = list(arguments), node_id
        files.make_private_directory(self.log_path.parent)
        bound_log(self.log_path)
        with self.log_path.open("ab") as log:
            self.log_path.chmod(0o600)
            self._log_bytes_before = log.tell()
            self._process = subprocess.Popen(
                # -P: what happens to lie in the current directory is not imported.
                [sys.executable, "-P", "-m", self._module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._record = processes.record_process(
            self._state_dir, self.name, self._process.pid, node_id=node_id
        )

    def exit_code(self) -> int | None:
        """None while it runs, or when it was never started."""
        return None if self._process is None else self._process.poll()

    def last_lines(self, *, count: int = 8) -> list[str]:
        """The end of what it has said since this start; earlier lives used the same log."""
        return processes.last_lines(self.log_path, count=count, since_bytes=self._log_bytes_before)

    def check_alive(self) -> None:
        """LaunchError when it is gone: with its own error where it gave one, else with the end of its log."""
        code = self.exit_code()
        if code is None:
            return
        lines = self.last_lines()
        log_hint = f"the whole log is {self.log_path}"
        if (own := _own_error(lines)) is not None:
            raise LaunchError(own[0], hint=own[1] or log_hint)
        said = "; it said:\n  " + "\n  ".join(lines) if lines else " without a word"
        raise LaunchError(f"the {self.name} ended with {_code_text(code)}{said}", hint=log_hint)

    async def watch(self, on_crash: Callable[[str], None]) -> None:
        """Starts it again whenever it crashes. Returns when it was stopped by someone else."""
        while True:
            code = self.exit_code()
            if code in (0, -signal.SIGTERM):
                _log.info("the %s was stopped from outside", self.name)
                return
            if code is not None:
                await self._start_again(f"the {self.name} ended with {_code_text(code)}", on_crash)
            bound_log(self.log_path)
            await asyncio.sleep(_STEP_S)

    async def _start_again(self, trouble: str, on_crash: Callable[[str], None]) -> None:
        """Until it starts: a disk that is full now may have space in a minute."""
        while trouble:
            now = time.monotonic()
            self._crashes.append(now)
            delay_s = restart_delay_s(self._crashes, now=now)
            on_crash(f"{trouble}; starting it again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            try:
                self.start(self._arguments, node_id=self._node_id)
                trouble = ""
            except (OSError, GenieError) as error:
                trouble = f"the {self.name} cannot be started: {error}"

    def restart_with(self, arguments: Sequence[str]) -> None:
        """What later starts are given instead."""
        self._arguments = list(arguments)

    async def stop(self, *, grace_s: float) -> None:
        """Ends it and forgets its file. Harmless when it has ended or was never started."""
        if self._process is None:
            return
        if self._process.poll() is None and self._record is not None:
            await processes.end_process(self._record, grace_s=grace_s)
        self._process.wait()  # already gone: only takes the exit code
        processes.forget_record(self._state_dir, self.name)


def bound_log(path: Path) -> None:
    """Keeps the newest LOG_BYTES_MAX twice over: the log, and the one before it.

    The child holds the file open for appending, so it is emptied in place and not renamed.
    """
    try:
        if path.stat().st_size <= LOG_BYTES_MAX:
            return
        shutil.copyfile(path, path.with_suffix(".log.1"))
        path.with_suffix(".log.1").chmod(0o600)
        with path.open("r+b") as file:
            file.truncate(0)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("cannot bound the log %s: %s", path, error)


def _own_error(lines: Sequence[str]) -> tuple[str, str] | None:
    """Message and hint, as Genie's programs write them last of all."""
    starts = [at for at, line in enumerate(lines) if line.startswith(_ERROR)]
    if not starts:
        return None
    message, _, hint = "\n".join(lines[starts[-1] :]).partition(f"\n{_HINT}")
    return message.removeprefix(_ERROR), hint


def _code_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
