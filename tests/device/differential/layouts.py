"""Runs one entry of torch's op database with inputs in other memory formats, and compares shapes and strides.

A few samples in float32, each with all tensors in channels_last, channels_last_3d, transposed, expanded,
sliced and without elements. Values are compared by tests/device/opinfo.py. For tests/device/comparison.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.device.conftest import D0
from tests.device.differential.database import describe_error, judge, observe
from tests.device.differential.snippets import Inputs
from tests.device.findings import ComparisonUnit, Findings, Outcome
from tests.device.paired_runs import DeviceCopier, select_evenly
from tests.device.run_classifier import outcome_of

_SAMPLES_MAX = 3


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(0, 0, 1).expand(x.shape) if x.dim() > 0 and x.shape[0] > 1 else x


def _sliced(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], -1)[..., 0] if x.dim() > 0 else x


def _without_elements(x: torch.Tensor) -> torch.Tensor:
    return x[:0] if x.dim() > 1 else x


_FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": _channels_last,
    "transposed": _transposed,
    "expanded": _expanded,
    "sliced": _sliced,
    "without elements": _without_elements,
}


def dtypes_by_name(local: str) -> dict[str, list[str]]:
    kind = local.partition(":")[0]
    return {op.full_name: ["any"] for op in op_db if torch.float32 in op.supported_dtypes(kind)}


def compare_entry(unit: ComparisonUnit, *, local: str, report_progress: Callable[[str], None]) -> Findings:
    findings = Findings(unit.name, unit.dtype)
    op = next(op for op in op_db if op.full_name == unit.name)
    samples = select_evenly(
        lambda: op.sample_inputs(local, torch.float32, requires_grad=False, set_seed=False), _SAMPLES_MAX
    )
    for number, sample in enumerate(samples):
        for name, change in _FORMATS.items():
            label = f"sample {number}, {name}"
            report_progress(label)
            changed = _changed_sample(sample, change, is_needed=name != "contiguous")
            if changed is not None:
                findings.forward.note(*_compare_strides(op.op, changed, local), sample=label)
    return findings


def _changed_sample(sample: Any, change: Callable[[torch.Tensor], torch.Tensor], *, is_needed: bool) -> Any:
    """None if no tensor of the sample changes."""
    count = 0

    def apply(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        changed = change(value.detach())
        count += changed.stride() != value.stride() or changed.shape != value.shape
        return changed

    changed = sample.transform(apply)
    return changed if count or not is_needed else None


def _compare_strides(op: Callable[..., Any], sample: Any, local: str) -> tuple[Outcome, str]:
    def snippet(on: Inputs) -> Any:
        copy = DeviceCopier(local, str(on.device))
        given, args, kwargs = (copy(x) for x in (sample.input, sample.args, sample.kwargs))
        with torch.no_grad():
            return op(given, *args, **kwargs)

    here, there = observe(snippet, local, local), observe(snippet, D0, local)
    if isinstance(there.error, Exception) and outcome_of(there.error) is Outcome.CRASHED:
        return Outcome.CRASHED, describe_error(there.error)
    return judge(there, [here], values=False)
