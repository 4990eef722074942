"""Runs one entry of torch's module database locally and remotely, in train or eval mode.

For every input, the outputs, the gradients of parameters and inputs, and the buffers afterwards must be
equal. Does not start executors or handle crashes (opinfo_report.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db

from tests.device.conftest import D0
from tests.device.findings import ComparisonUnit, Findings
from tests.device.paired_runs import (
    SEED,
    DeviceCopier,
    Tolerance,
    assert_same,
    assert_same_placement,
    fetch_to_cpu,
    gradients,
    seed_generators,
    select_evenly,
)
from tests.device.run_classifier import RunClassifier, RunResult, run_and_catch
from tests.device.tolerances import tolerance_of

_MODES = {"train": True, "eval": False}


def dtypes_by_name(local: str) -> dict[str, list[str]]:
    """`nn.Linear, train` and `nn.Linear, eval`."""
    return {f"{info.name}, {mode}": ["float32"] for info in module_db for mode in _MODES}


def compare_entry(unit: ComparisonUnit, *, local: str, report_progress: Callable[[str], None]) -> Findings:
    """Errors of the database's input generators propagate."""
    name, _, mode = unit.name.partition(", ")
    info = next(info for info in module_db if info.name == name)
    training, dtype = _MODES[mode], getattr(torch, unit.dtype)
    tolerance = tolerance_of(info.decorators, "TestModule", dtype, local)
    checker = _Checker(Findings(unit.name, unit.dtype), local, tolerance, report_progress)
    inputs = select_evenly(
        lambda: info.module_inputs_func(
            info, device=local, dtype=dtype, requires_grad=True, training=training
        ),
        unit.samples,
    )
    for number, given in enumerate(inputs):
        torch.manual_seed(SEED)
        built = given.constructor_input
        module = info.module_cls(*built.args, **built.kwargs).to(local, dtype).train(training)
        checker.check(f"input {number} {given.desc}", module, given)
    return checker.findings


class _Checker(RunClassifier):
    def __init__(
        self, findings: Findings, local: str, tolerance: Tolerance, report_progress: Callable[[str], None]
    ) -> None:
        super().__init__(findings, report_progress)
        self._local = local
        self._tolerance = tolerance

    def check(self, label: str, module: torch.nn.Module, given: Any) -> None:
        self.report_progress(label)
        here, there = (self._run(copy.deepcopy(module), given, device) for device in (self._local, D0))
        what = f"{label}: {module}"
        same = self.judge(self.findings.forward, what, here, there, lambda: self._compare(there, here))
        if not same:
            if here.error is None:
                forward = self.findings.forward
                self.findings.backward.note(forward.outcome, forward.reason, forward.sample)
            return
        self.report_progress(f"{label}, backward")
        mine, theirs = _run_backward(here, self._local), _run_backward(there, D0)
        if mine.error is None and mine.outputs is None and theirs.error is None and theirs.outputs is None:
            return  # nothing to differentiate
        self.judge(self.findings.backward, what, mine, theirs, lambda: self._compare(theirs, mine))

    def _run(self, module: torch.nn.Module, given: Any, device: str) -> RunResult:
        def work(run: RunResult) -> None:
            module.to(device)
            inputs = given.forward_input
            args, kwargs = DeviceCopier(self._local, device)((inputs.args, inputs.kwargs))
            seed_generators(device)
            outputs = module(*args, **kwargs)
            run.arguments = list(module.parameters()), args, kwargs
            run.outputs = outputs, dict(module.named_buffers())

        return run_and_catch(work, device)

    def _compare(self, there: RunResult, here: RunResult) -> None:
        assert_same_placement(there.outputs, here.outputs, local=self._local, remote=D0, what="output")
        assert_same(
            fetch_to_cpu(there.outputs), fetch_to_cpu(here.outputs), what="output", tolerance=self._tolerance
        )


def _run_backward(forward: RunResult, device: str) -> RunResult:
    def work(run: RunResult) -> None:
        run.outputs = gradients(forward.outputs, forward.arguments)

    return run_and_catch(work, device)
