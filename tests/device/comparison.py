"""Compares entries of torch's databases in a child process with its own executor, and handles crashes of
both.

Does not define what is compared (opinfo.py, moduleinfo.py, optiminfo.py), nor the results (findings.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from tests import forkserver
from tests.device.findings import ComparisonUnit, Findings
from tests.executor.process import PRELOADED, ExecutorProcess, start_executor
from tests.forkserver import ForkedProcess

ROOT = Path(__file__).parents[2]
VENDORS = {"cpu": "cpu", "cuda": "nvidia"}
# Between two progress messages: one call of one op, locally and remotely.
STEP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
# The state of an exiting process in /proc/PID/stat. Set before its sockets are closed.
_PF_EXITING = 0x4
# Some virtual machines report AMX but crash processes that use it; bfloat16 is compared without it.
SETTINGS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


class WorkerEndedError(Exception):
    """The child has died or hangs; `at` is its current work."""

    def __init__(self, reason: str, at: str) -> None:
        super().__init__(reason)
        self.at = at


class Comparison:
    """Runs units one after the other, with a new child and executor after each crash.

    `database` is the module of this folder that defines entries: it has `compare_entry` and `dtypes_by_name`.
    """

    def __init__(self, database: str, device: str = "cpu", *, step_timeout_s: float = STEP_TIMEOUT_S) -> None:
        self._database = database
        self._device = device
        self._step_timeout_s = step_timeout_s
        self._closing = ExitStack()
        self._started = 0
        self._worker: _Worker | None = None

    def __enter__(self) -> Comparison:
        self._closing.enter_context(mock.patch.dict(os.environ, SETTINGS))
        self._folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="genie-")))
        return self

    def __exit__(self, *unused: object) -> None:
        self._end_worker()
        self._closing.close()

    def describe_entries(self) -> dict[str, Any]:
        """torch's version, the device's name, and the dtypes of every entry."""
        return self._ensure_worker().describe_entries

    def run(self, units: Sequence[ComparisonUnit]) -> Iterator[Findings]:
        for unit in units:
            try:
                findings = self._ensure_worker().compare(unit, self._step_timeout_s)
            except WorkerEndedError as error:
                findings = Findings.crashed(unit.name, unit.dtype, reason=str(error), sample=error.at)
            if findings.is_crashed:
                self._end_worker()
            yield findings

    def _ensure_worker(self) -> _Worker:
        if self._worker is None:
            self._started += 1
            self._worker = _Worker(self._folder / str(self._started), self._database, self._device)
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class _Worker:
    """The child process and its executor. Must be closed."""

    def __init__(self, folder: Path, database: str, device: str) -> None:
        self._closing = ExitStack()
        self._folder = folder
        self._text = b""
        self._at = "start"
        try:
            self._executor = self._start_executor(device)
            self._process, self._answers = self._start_process(database, device)
            self.describe_entries: dict[str, Any] = self._wait("ready", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def compare(self, unit: ComparisonUnit, step_timeout_s: float) -> Findings:
        """WorkerEndedError if there is no reply; the worker is unusable then."""
        self._at = "start"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(unit)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reply reports it
        findings = Findings.from_json(self._wait("findings", step_timeout_s))
        if findings.has_problem and self._executor_ended():
            raise WorkerEndedError(f"the executor ended: {_last_lines(self._executor.output())}", self._at)
        return findings

    def close(self) -> None:
        self._closing.close()

    def _executor_ended(self) -> bool:
        """Also true while it exits: the client notices the loss before the exit status is available."""
        try:
            stat = Path(f"/proc/{self._executor.process.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        state, *others = stat.rpartition(")")[2].split()
        return state in "ZX" or bool(int(others[5]) & _PF_EXITING)

    def _start_executor(self, device: str) -> ExecutorProcess:
        executor = start_executor(self._folder, vendor=VENDORS[device], idle_s=120.0)
        self._closing.callback(executor.kill)
        executor.wait_ready()
        return executor

    def _start_process(self, database: str, device: str) -> tuple[ForkedProcess, int]:
        answers, theirs = os.pipe()
        self._closing.callback(os.close, answers)
        with (self._folder / "worker").open("wb") as output:
            process = forkserver.get_shared_server(*PRELOADED).popen(
                [
                    "-m", "tests.device.database_worker",
                    database, device, str(self._executor.port), str(theirs),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
            )  # fmt: skip
        os.close(theirs)
        self._closing.callback(_end_process, process)
        return process, answers

    def _wait(self, key: str, timeout_s: float) -> Any:
        """The next message with that key; all others are progress messages."""
        while True:
            message = json.loads(self._read_line(timeout_s))
            if key in message:
                return message[key]
            self._at = message["at"]

    def _read_line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._text:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise WorkerEndedError(f"no response within {timeout_s:g} s", self._at)
            part = os.read(self._answers, 1 << 16)
            if not part:
                code = self._process.wait(START_TIMEOUT_S)
                output = (self._folder / "worker").read_text(errors="replace")
                raise WorkerEndedError(f"the client ended with {code}: {_last_lines(output)}", self._at)
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        return line


def _end_process(process: ForkedProcess) -> None:
    assert process.stdin is not None
    process.kill()
    process.wait(START_TIMEOUT_S)
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass  # unflushed data


def _last_lines(text: str) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[-8:])
