"""The process that compares entries of a database; comparison.py starts another one after a crash.

Reads units from standard input and replies on the given descriptor, one JSON object per line: its progress
("at"), then the result. Standard output is for torch's messages. It is a separate process also because
torch's databases change settings of the process that imports them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import warnings
from types import ModuleType
from typing import Any, TextIO

import torch

from genie import device
from tests.device.conftest import D0, remote_device
from tests.device.findings import ComparisonUnit, Findings
from tests.device.run_classifier import outcome_of

_PR_SET_PDEATHSIG = 1


def main(database: str, kind: str, *, port: int, answers: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with its parent
    faulthandler.enable()
    warnings.simplefilter("ignore")  # warnings are not compared
    torch.set_num_threads(1)
    local = "cpu" if kind == "cpu" else f"{kind}:0"
    entries = importlib.import_module(f"tests.device.{database}")
    device.attach([remote_device(0, lambda: port)])
    torch.zeros(1, device=D0).cpu()
    with os.fdopen(answers, "w") as out:
        _write_answer(out, ready=_describe_entries(entries, local))
        for line in sys.stdin:
            _write_answer(
                out,
                findings=dataclasses.asdict(
                    _compare_unit(ComparisonUnit(**json.loads(line)), entries, local, out)
                ),
            )
    device.detach()


def _compare_unit(unit: ComparisonUnit, entries: ModuleType, local: str, out: TextIO) -> Findings:
    began = time.monotonic()
    try:
        findings: Findings = entries.compare_entry(
            unit, local=local, report_progress=lambda what: _write_answer(out, at=what)
        )
    except Exception as error:  # an error of the comparison itself is reported, and is not a pass
        findings = Findings(unit.name, unit.dtype)
        for verdict in (findings.forward, findings.backward):
            verdict.note(outcome_of(error), f"the comparison: {type(error).__name__}: {error}")
    findings.seconds = round(time.monotonic() - began, 2)
    return findings


def _describe_entries(entries: ModuleType, local: str) -> dict[str, Any]:
    """Names of the entries, with the dtypes that torch supports locally."""
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0) if local != "cpu" else "cpu",
        "entries": entries.dtypes_by_name(local),
    }


def _write_answer(out: TextIO, **message: Any) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], port=int(sys.argv[3]), answers=int(sys.argv[4]))
