"""A database of misbehaving entries, which tests the comparison itself."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import psutil
import torch

from tests.device.conftest import D0
from tests.device.findings import ComparisonUnit, Findings, Outcome


def dtypes_by_name(local: str) -> dict[str, list[str]]:
    return {name: ["float32"] for name in (*_CRASHES, "works")}


def compare_entry(unit: ComparisonUnit, *, local: str, report_progress: Callable[[str], None]) -> Findings:
    findings = Findings(unit.name, unit.dtype)
    report_progress("the only sample")
    if unit.name in _CRASHES:
        _CRASHES[unit.name]()
    torch.ones(2, device=D0).cpu()
    findings.forward.note(Outcome.PASS)
    return findings


def _kill_executor() -> None:
    port = int(sys.argv[3])  # of database_worker.py
    ends = psutil.net_connections("tcp")
    listening = [end for end in ends if end.status == psutil.CONN_LISTEN and end.laddr.port == port]
    (executor,) = {end.pid for end in listening} - {os.getpid()}
    assert executor is not None
    os.kill(executor, signal.SIGKILL)


def _raise_value_error() -> None:
    raise ValueError("this comparison is broken")


_CRASHES: dict[str, Callable[[], object]] = {
    "ends the client": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "ends the executor": _kill_executor,
    "is stuck": signal.pause,
    "raises": _raise_value_error,
}
