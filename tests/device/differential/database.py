"""Runs one snippet locally and remotely, and compares everything that can be observed.

Of tensors: values (bitwise where two local runs agree, else within the spread of local runs), shape, strides,
offset, dtype, layout, requires_grad, lazy bits, and which of them share memory. Of errors: the type. A
database for tests/device/comparison.py, which starts the executor and handles crashes.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from tests.device.conftest import D0
from tests.device.differential import topics
from tests.device.differential.snippets import SEED, Inputs, Snippet, Table
from tests.device.findings import ComparisonUnit, Findings, Outcome
from tests.device.run_classifier import error_of, outcome_of

# More local runs where two differ.
_LOCAL_RUNS = 5
_NO_DTYPE = "any"
# On a GPU these fail an assertion in a kernel, which makes the GPU unusable for the process. A remote device
# must raise the error that torch raises on the CPU.
_DEVICE_ASSERTIONS = frozenset(
    ("indexing.integers_out_of_range", "indexing.assign_out_of_range", "indexing.index_select_out_of_range",
     "indexing.take_out_of_range", "indexing.gather_out_of_range", "indexing.scatter_out_of_range",
     "indexing.embedding_out_of_range", "indexing.cross_entropy_out_of_range", "indexing.one_hot_negative",
     "programs.bernoulli_invalid", "programs.multinomial_invalid", "programs.loss_bce_out_of_range",
     "programs.assert_async", "programs.error_leaves_the_session_usable")
)  # fmt: skip
_ROUNDINGS_MAX = 16


def snippets() -> dict[str, Snippet]:
    """All snippets as `topic.name`."""
    found: dict[str, Snippet] = {}
    for module in pkgutil.iter_modules(topics.__path__):
        table: Table = importlib.import_module(f"{topics.__name__}.{module.name}").SNIPPETS
        found |= {f"{module.name}.{name}": snippet for name, snippet in table.items()}
    return found


_SNIPPETS = snippets()


def dtypes_by_name(local: str) -> dict[str, list[str]]:
    return {name: [_NO_DTYPE] for name in _SNIPPETS}


def compare_entry(unit: ComparisonUnit, *, local: str, report_progress: Callable[[str], None]) -> Findings:
    findings = Findings(unit.name, unit.dtype)
    snippet = _SNIPPETS[unit.name]
    if unit.name in _DEVICE_ASSERTIONS:
        local = "cpu"
    report_progress("local")
    here = [observe(snippet, local, local) for _ in range(2)]
    report_progress("remote")
    there = observe(snippet, D0, local)
    if isinstance(there.error, Exception) and outcome_of(there.error) is Outcome.CRASHED:
        findings.forward.note(Outcome.CRASHED, describe_error(there.error))
        return findings
    if _difference_of_values(here[0], here[1]) is not None:
        here += [observe(snippet, local, local) for _ in range(_LOCAL_RUNS)]
    outcome, reason = judge(there, here)
    findings.forward.note(outcome, reason)
    return findings


@dataclass
class Observation:
    """The result of a run: an error, or leaves with a description each, and the values of tensors."""

    error: BaseException | None = None
    structure: str = ""
    leaves: list[dict[str, Any]] = field(default_factory=list)
    values: list[torch.Tensor | None] = field(default_factory=list)


def observe(snippet: Snippet, device: str, local: str) -> Observation:
    """One run, from the same state of the process; its settings are reset. `local`: of the comparison."""
    seen = Observation()

    def run() -> None:
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        result = snippet(Inputs(device))
        if device == D0:
            torch.remote_accelerator.synchronize()
        _reset_settings()
        _describe(result, seen)
        if local != "cpu":  # where every result of the local run is
            for leaf, described in zip(pytree.tree_leaves(result), seen.leaves, strict=True):
                if isinstance(leaf, torch.Tensor):
                    described["is on the device"] = leaf.device.type == torch.device(device).type

    try:
        seen.error = error_of(run)
    finally:
        _reset_settings()
        if device == D0 and seen.error is not None:
            error_of(torch.remote_accelerator.synchronize)  # pending errors must not reach the next run
    return seen


def judge(there: Observation, here: list[Observation], *, values: bool = True) -> tuple[Outcome, str]:
    """Compares a remote run with local runs; without `values`, only what describes tensors."""
    expected = here[0]
    if there.error is not None or expected.error is not None:
        return _judge_errors(there.error, expected.error)
    if there.structure != expected.structure:
        return Outcome.WRONG, f"{there.structure} instead of {expected.structure}"
    for number, (mine, theirs) in enumerate(zip(there.leaves, expected.leaves, strict=True)):
        for name, value in theirs.items():
            if mine[name] != value:
                return Outcome.WRONG, f"result {number}: {name} is {mine[name]!r} instead of {value!r}"
    differing = _difference_of_values(there, expected) if values else None
    if differing is None or _is_within_spread(there, here, differing):
        return Outcome.PASS, ""
    mine, theirs = there.values[differing], expected.values[differing]
    assert mine is not None and theirs is not None
    outcome = Outcome.VARIES if _differ_by_rounding(mine, theirs) else Outcome.WRONG
    return outcome, f"result {differing}: {mine} instead of {theirs}"


def _judge_errors(found: BaseException | None, expected: BaseException | None) -> tuple[Outcome, str]:
    if expected is None:
        assert isinstance(found, Exception)
        return outcome_of(found), describe_error(found)
    if found is None:
        return Outcome.WRONG, f"no error instead of {describe_error(expected)}"
    if isinstance(found, type(expected)):
        return Outcome.PASS, ""
    return Outcome.FAILED, f"{describe_error(found)} instead of {describe_error(expected)}"


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _reset_settings() -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def _describe(result: Any, seen: Observation) -> None:
    leaves, structure = pytree.tree_flatten(result)
    seen.structure = without_device(str(structure))
    storages: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            seen.leaves.append(_describe_tensor(leaf, number, storages))
            seen.values.append(_fetch(leaf))
        else:
            seen.leaves.append({"type": type(leaf).__name__, "value": _plain_value(leaf)})
            seen.values.append(None)


def _describe_tensor(x: torch.Tensor, number: int, storages: dict[int, int]) -> dict[str, Any]:
    described = {
        "type": type(x).__name__,
        "shape": tuple(x.shape),
        "dtype": x.dtype,
        "layout": x.layout,
        "requires_grad": x.requires_grad,
        "is_leaf": x.is_leaf,
        "grad_fn": type(x.grad_fn).__name__,
    }
    if x.layout is torch.strided:
        described |= {
            "stride": x.stride(),
            "storage_offset": x.storage_offset(),
            "is_conj": x.is_conj(),
            "is_neg": x.is_neg(),
            "shares memory with result": storages.setdefault(x.untyped_storage()._cdata, number),
        }
    return described


def _plain_value(leaf: Any) -> Any:
    if isinstance(leaf, str):
        return without_device(leaf)
    if isinstance(leaf, float) and leaf != leaf:
        return "nan"
    return (
        leaf
        if isinstance(leaf, bool | int | float | complex | torch.dtype | None)
        else without_device(repr(leaf))
    )


def without_device(text: str) -> str:
    """CPU tensors are printed without a device."""
    text = re.sub(r",?\s*device=(device\(type='\w+'(, index=\d+)?\)|'[\w:]+'|[\w:]+)", "", text)
    return re.sub(r"\b(remote_accelerator|cuda|cpu)(:\d+)?\b", "DEVICE", text)


def _fetch(x: torch.Tensor) -> torch.Tensor:
    found = x.detach().cpu().resolve_conj().resolve_neg()
    return found.clone(memory_format=torch.contiguous_format) if found.layout is torch.strided else found


def _difference_of_values(one: Observation, other: Observation) -> int | None:
    """The first result with other values, bit by bit; None if there is none."""
    if len(one.values) != len(other.values):
        return None
    for number, (mine, theirs) in enumerate(zip(one.values, other.values, strict=True)):
        if mine is None or theirs is None or mine.layout is not torch.strided:
            continue
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype or not _are_same_bits(mine, theirs):
            return number
    return None


def _are_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(_bits(one), _bits(other)):
        return True
    if not one.is_floating_point() and not one.is_complex():
        return False
    nan = one.isnan()  # of which there are many
    return bool(
        torch.equal(nan, other.isnan())
        and torch.equal(_bits(one.masked_fill(nan, 0)), _bits(other.masked_fill(nan, 0)))
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def _differ_by_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By a few units in the last place: LAPACK rounds by the alignment of its memory. Must be listed."""
    if one.shape != other.shape or not (other.is_floating_point() or other.is_complex()):
        return False
    difference = (one - other).abs().max()
    return bool(0 < difference <= _ROUNDINGS_MAX * torch.finfo(other.dtype).eps * other.abs().max())


def _is_within_spread(there: Observation, here: list[Observation], number: int) -> bool:
    """Whether the remote values lie between those of the local runs, which differ among themselves."""
    runs = [run.values[number] for run in here if run.error is None]
    if len(runs) <= 2 or not torch.is_floating_point(runs[0]):  # type: ignore[arg-type]
        return False
    several = torch.stack([run.double() for run in runs])  # type: ignore[union-attr]
    spread = (several.amax(0) - several.amin(0)).max()
    return bool((there.values[number].double() - several.mean(0)).abs().max() <= 2 * spread)  # type: ignore[union-attr]
