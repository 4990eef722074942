"""Compares entries of torch's databases in a child process with an executor of its own, and survives both.

Not for: what is compared (opinfo.py and its like), or what came of it (findings.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from tests.agent.executor.process import ExecutorProcess, start_executor
from tests.device.findings import Findings, Unit

ROOT = Path(__file__).parents[2]
VENDORS = {"cpu": "cpu", "cuda": "nvidia"}
# Between two signs of life, that is: one call of one op, here and there.
STEP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0
# The client may see that its executor is gone before the system has told us.
_ENDING_S = 0.2
# Some virtual machines report AMX and kill whoever uses it; bfloat16 is compared without it.
SETTINGS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


class WorkerEndedError(Exception):
    """The child has died, or is stuck; `at` is what it was doing."""

    def __init__(self, reason: str, at: str) -> None:
        super().__init__(reason)
        self.at = at


class Comparison:
    """Runs units one after the other, with a new child and executor after each that crashed.

    `database` is the module of this folder that says what an entry is: it has `check` and `dtypes_by_name`.
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

    def described(self) -> dict[str, Any]:
        """torch's version, the device's name, and the dtypes of every entry."""
        return self._running().described

    def run(self, units: Sequence[Unit]) -> Iterator[Findings]:
        for unit in units:
            try:
                findings = self._running().compare(unit, self._step_timeout_s)
            except WorkerEndedError as error:
                findings = Findings.crashed(unit.name, unit.dtype, reason=str(error), sample=error.at)
            if findings.is_crashed:
                self._end_worker()
            yield findings

    def _running(self) -> _Worker:
        if self._worker is None:
            self._started += 1
            self._worker = _Worker(self._folder / str(self._started), self._database, self._device)
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class _Worker:
    """The child that compares, and its executor. Close it in any case."""

    def __init__(self, folder: Path, database: str, device: str) -> None:
        self._closing = ExitStack()
        self._folder = folder
        self._text = b""
        self._at = "start"
        try:
            self._executor = self._start_executor(device)
            self._process, self._answers = self._start_process(database, device)
            self.described: dict[str, Any] = self._wait("ready", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def compare(self, unit: Unit, step_timeout_s: float) -> Findings:
        """WorkerEndedError when there is no answer; the worker is of no use then."""
        self._at = "start"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(unit)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says it
        findings = Findings.from_json(self._wait("findings", step_timeout_s))
        if findings.has_problem and self._executor_ended():
            raise WorkerEndedError(f"the executor ended: {_tail(self._executor.output())}", self._at)
        return findings

    def close(self) -> None:
        self._closing.close()

    def _executor_ended(self) -> bool:
        try:
            self._executor.wait_end(_ENDING_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _start_executor(self, device: str) -> ExecutorProcess:
        executor = start_executor(self._folder, vendor=VENDORS[device], idle_s=120.0)
        self._closing.callback(executor.kill)
        executor.wait_ready()
        return executor

    def _start_process(self, database: str, device: str) -> tuple[subprocess.Popen[bytes], int]:
        answers, theirs = os.pipe()
        self._closing.callback(os.close, answers)
        with (self._folder / "worker").open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "tests.device.database_worker",
                    database, device, str(self._executor.port), str(theirs),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
            )  # fmt: skip
        os.close(theirs)
        self._closing.callback(_end, process)
        return process, answers

    def _wait(self, key: str, timeout_s: float) -> Any:
        """The next message with that key; every other says that the worker is getting on."""
        while True:
            message = json.loads(self._line(timeout_s))
            if key in message:
                return message[key]
            self._at = message["at"]

    def _line(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._text:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise WorkerEndedError(f"no answer within {timeout_s:g} s", self._at)
            part = os.read(self._answers, 1 << 16)
            if not part:
                code = self._process.wait(START_TIMEOUT_S)
                output = (self._folder / "worker").read_text(errors="replace")
                raise WorkerEndedError(f"the client ended with {code}: {_tail(output)}", self._at)
            self._text += part
        line, _, self._text = self._text.partition(b"\n")
        return line


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.kill()
    process.wait(START_TIMEOUT_S)
    try:
        process.stdin.close()
    except BrokenPipeError:
        pass  # there was something left to write


def _tail(text: str) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[-8:])
