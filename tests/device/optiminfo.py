"""Runs one entry of torch's optimizer database locally and remotely.

For every configuration, a few steps on a tiny model give the same parameters and state; remote optimizers
continue from states saved remotely and locally. Does not start executors (opinfo_report.py).
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_optimizers import optim_db

from tests.device.conftest import D0
from tests.device.findings import ComparisonUnit, Findings
from tests.device.paired_runs import (
    SEED,
    DeviceCopier,
    assert_same,
    assert_same_placement,
    fetch_to_cpu,
    select_evenly,
    tensors_of,
)
from tests.device.run_classifier import RunClassifier, RunResult, run_and_catch

_STEPS = 3
_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "for loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def dtypes_by_name(local: str) -> dict[str, list[str]]:
    """Names like `Adam, foreach`, one for each implementation of the optimizer in torch."""
    kind = local.partition(":")[0]
    return {
        f"{info.name}, {way}": ["float32"]
        for info in optim_db
        for way in _IMPLEMENTATIONS
        if way == "default"
        or (way != "fused" and "foreach" in info.supported_impls)
        or (way == "fused" and kind in info.supports_fused_on)
    }


def compare_entry(unit: ComparisonUnit, *, local: str, report_progress: Callable[[str], None]) -> Findings:
    name, _, way = unit.name.partition(", ")
    info = next(info for info in optim_db if info.name == name)
    checker = _Checker(Findings(unit.name, unit.dtype), local, report_progress)
    for given in select_evenly(lambda: info.optim_inputs_func(local), unit.samples):
        checker.check(info, given.kwargs | _IMPLEMENTATIONS[way], given.desc)
    return checker.findings


class _Checker(RunClassifier):
    def __init__(self, findings: Findings, local: str, report_progress: Callable[[str], None]) -> None:
        super().__init__(findings, report_progress)
        self._local = local

    def check(self, info: Any, kwargs: dict[str, Any], label: str) -> None:
        self.report_progress(label)
        here, there = (self._trained(info, kwargs, device) for device in (self._local, D0))
        self.judge(
            self.findings.forward, f"{label}: {kwargs}", here, there, lambda: self._compare(there, here)
        )

    def _trained(self, info: Any, kwargs: dict[str, Any], device: str) -> RunResult:
        """Some steps, then one by each of two optimizers that load the state."""

        def work(run: RunResult) -> None:
            model = _Model(info, self._local, device)
            options = DeviceCopier("cpu", "cpu")(kwargs)
            optimizer = info.optim_cls(model.parameters, **options)
            for _ in range(_STEPS):
                model.step(optimizer)
            saved = copy.deepcopy(optimizer.state_dict())
            # an optimizer that loads a state may reuse its tensors
            run.outputs = [copy.deepcopy([model.parameters, saved])]
            for state in (saved, torch.load(_save_to_buffer(fetch_to_cpu(saved)), weights_only=True)):
                following = info.optim_cls(model.parameters, **options)
                following.load_state_dict(state)
                model.step(following)
                run.outputs.append(copy.deepcopy([model.parameters, following.state_dict()]))

        return run_and_catch(work, device)

    def _compare(self, there: RunResult, here: RunResult) -> None:
        # "step" stays in host memory, as with CUDA, unless the optimizer is fused
        found, expected = ([x for x in tensors_of(run.outputs) if x.dim()] for run in (there, here))
        assert_same_placement(found, expected, local=self._local, remote=D0, what="state")
        assert_same(fetch_to_cpu(there.outputs), fetch_to_cpu(here.outputs), what="state")


class _Model:
    """Two layers and a loss, created locally, so that both runs start with the same values."""

    def __init__(self, info: Any, local: str, device: str) -> None:
        generator = torch.Generator().manual_seed(SEED)
        shapes = [(4, 6), (6, 2)] if info.name == "Muon" else [(4, 6), (6,), (6, 2), (2,)]
        self.parameters = [
            torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes
        ]
        self._x = torch.randn(5, 4, generator=generator).to(device)
        self._sparse = info.only_supports_sparse_grads

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self._loss()
            loss.backward()
            if self._sparse:
                for x in self.parameters:
                    assert x.grad is not None
                    x.grad = x.grad.to_sparse()
            return loss

        optimizer.step(closure)

    def _loss(self) -> torch.Tensor:
        x = self._x
        for parameter in self.parameters:
            x = x @ parameter if parameter.dim() == 2 else torch.tanh(x + parameter)
        return x.square().mean()


def _save_to_buffer(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
