"""Classifies a remote run against the same local run.

Does not define runs (opinfo.py, moduleinfo.py, optiminfo.py), nor count results (findings.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from genie.errors import DeviceLostError, OpRefusedError, TransportError
from tests.device.conftest import D0
from tests.device.findings import Findings, Outcome, Verdict, shorten
from tests.device.paired_runs import MismatchError, NondeterministicError


@dataclass
class RunResult:
    """Arguments after the run, and outputs or error."""

    arguments: Any = None
    outputs: Any = None
    error: Exception | None = None


def run_and_catch(work: Callable[[RunResult], None], device: str) -> RunResult:
    """Runs `work`, which fills in the run, and synchronizes the device."""
    run = RunResult()

    def whole() -> None:
        work(run)
        if device == D0:
            torch.remote_accelerator.synchronize()

    run.error = error_of(whole)
    if run.error is not None and device == D0:
        error_of(torch.remote_accelerator.synchronize)  # pending errors must not reach the next run
    return run


def error_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:  # the caller classifies it; an error is never a pass
        return error
    return None


class RunClassifier:
    """Adds to `findings`; calls `report_progress` with what comes next."""

    def __init__(self, findings: Findings, report_progress: Callable[[str], None]) -> None:
        self.findings = findings
        self.report_progress = report_progress

    def judge(
        self, verdict: Verdict, label: object, here: RunResult, there: RunResult, compare: Callable[[], None]
    ) -> bool:
        """True if there was something to compare and it was equal. `compare` raises MismatchError."""
        if here.error is not None:
            self._must_raise(label, here.error, there)
            return False
        error = there.error or error_of(compare)
        self.note(verdict, label, error)
        return error is None

    def note(self, verdict: Verdict, label: object, error: Exception | None) -> None:
        if error is None:
            verdict.note(Outcome.PASS)
        else:
            verdict.note(outcome_of(error), _describe_error(error), str(label))

    def _must_raise(self, label: object, error: Exception, there: RunResult) -> None:
        raised = self.findings.raised
        if there.error is None:
            raised.nothing.append(shorten(f"{label}: {_describe_error(error)}"))
        elif outcome_of(there.error) is Outcome.CRASHED and outcome_of(error) is not Outcome.CRASHED:
            self.note(self.findings.forward, label, there.error)
        elif isinstance(there.error, type(error)):
            raised.same += 1
        else:
            text = f"{label}: {_describe_error(there.error)} instead of {_describe_error(error)}"
            raised.other_type.append(shorten(text))


def outcome_of(error: Exception) -> Outcome:
    """Outcome of an error that only the remote device raised."""
    text = str(error)
    if isinstance(error, MismatchError):
        return Outcome.WRONG
    if isinstance(error, NondeterministicError):
        return Outcome.VARIES
    if isinstance(error, DeviceLostError | TransportError | SystemError) or "INTERNAL ASSERT" in text:
        return Outcome.CRASHED
    if isinstance(error, OpRefusedError):
        return Outcome.REFUSED
    if isinstance(error, NotImplementedError) and re.search(r"\w::\w", text):
        return Outcome.REFUSED
    return Outcome.FAILED


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
