"""Hostile arguments of allowed ops end neither the executor's process nor its session (fuzz.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.executor import fuzz
from tests.executor.fuzz_calls import recorded_calls
from tests.executor.fuzz_worker import FuzzSession
from tests.needs import require_program


def _run(plan: fuzz.Plan, folder: Path) -> fuzz.FuzzReport:
    require_program("c++", package="g++")
    report = fuzz.run(plan, folder, report_finding=print)
    assert [str(finding) for finding in report.failures] == []
    return report


def test_hostile_arguments_end_no_session(tmp_path: Path) -> None:
    assert _run(fuzz.Plan(variants=2), tmp_path).cases > 20_000


@pytest.mark.long("further seeds of the fuzzer")
def test_hostile_arguments_of_further_seeds_end_no_session(tmp_path: Path) -> None:
    _run(fuzz.Plan(seeds=range(1, 3), variants=2), tmp_path)


# Reads one byte beyond each end of a storage of 12 bytes, in processes of their own.
_OUT_OF_BOUNDS = """
import ctypes, os, sys, torch
for placement, offset in ((1, 12), (2, -1), (1, 11), (2, 0)):
    assert ctypes.CDLL(None).guard_set_placement(placement)
    child = os.fork()
    if child == 0:
        kept = torch.zeros(3)
        ctypes.string_at(kept.data_ptr() + offset, 1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_accesses_beyond_guarded_storages_are_detected(tmp_path: Path) -> None:
    require_program("c++", package="g++")
    environment = dict(os.environ, LD_PRELOAD=str(fuzz.build_guard(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", _OUT_OF_BOUNDS], env=environment, capture_output=True, text=True, check=True
    )
    assert list(map(int, done.stdout.split())) == [-signal.SIGSEGV, -signal.SIGSEGV, 0, 0]


def test_recorded_calls_reach_the_kernels() -> None:
    """Otherwise, hostile variants of them would not either."""
    session = FuzzSession("cpu")
    try:
        calls = list(recorded_calls())[::6]
        errors = [(str(call), session.call(call)) for call in calls]
    finally:
        session.close()
    # The fuzzer predicts no outputs.
    failed = [item for item in errors if item[1] and not item[1].message.startswith("predicted")]
    assert len(failed) < len(calls) // 50, failed
