"""A database of entries that do what no op should do: it is there to test the comparison itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import torch

from tests.device.conftest import D0
from tests.device.findings import Findings, Outcome, Unit


def dtypes_by_name(local: str) -> dict[str, list[str]]:
    return {name: ["float32"] for name in (*_CRASHES, "works")}


def check(unit: Unit, *, local: str, beat: Callable[[str], None]) -> Findings:
    findings = Findings(unit.name, unit.dtype)
    beat("the only sample")
    if unit.name in _CRASHES:
        _CRASHES[unit.name]()
    torch.ones(2, device=D0).cpu()
    findings.forward.note(Outcome.PASS)
    return findings


def _end_executor() -> None:
    siblings = psutil.Process(os.getppid()).children()
    executors = [one for one in siblings if "genie.agent.executor" in one.cmdline()]
    # The newest is ours: others belong to tests, or wait for a client that has died.
    max(executors, key=psutil.Process.create_time).kill()


def _raise() -> None:
    raise ValueError("this comparison is broken")


_CRASHES: dict[str, Callable[[], object]] = {
    "ends the client": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "ends the executor": _end_executor,
    "is stuck": signal.pause,
    "raises": _raise,
}
