"""Runs one entry of torch's op database locally and remotely, and compares the results.

For every sample, the outputs, the inputs afterwards and the gradients must be equal; for some samples also
with non-contiguous and conjugated inputs, in place, and with out=. Local errors must be remote errors. Does
not start executors or handle crashes (opinfo_report.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

from tests.device.conftest import D0
from tests.device.findings import ComparisonUnit, Findings, shorten
from tests.device.paired_runs import (
    DeviceCopier,
    MismatchError,
    NondeterministicError,
    assert_same,
    assert_same_placement,
    fetch_to_cpu,
    gradients,
    seed_generators,
    select_evenly,
    tensors_of,
)
from tests.device.run_classifier import RunClassifier, RunResult, run_and_catch
from tests.device.tolerances import tolerance_of

# Samples to try until the in-place or out= variant has succeeded locally once.
_VARIANT_TRIES_MAX = 6
# Their results are uninitialized; only shapes and dtypes are compared.
_UNINITIALISED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
     "resize_", "resize_as_")
)  # fmt: skip
# Likewise for single outputs, by index: without dropout there is no seed.
_UNINITIALISED_OUTPUTS = {
    "torch.ops.aten._efficient_attention_forward": (2, 3),
    "torch.ops.aten._flash_attention_forward": (2, 3),
}
# Additional local runs after a mismatch with the remote device.
_LOCAL_RUNS = 6
# A gradient that varies may be this many times as far from the exact one as local runs, at its worst number
# and on average.
_WORST_ERROR_RATIO, _MEAN_ERROR_RATIO = 3.0, 1.5
_FINER_DTYPES = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
# CUDA also requires all arguments but the input in host memory.
_HOST_ARGUMENTS = frozenset(("tensor_split",))
# Some of their samples name no device, and would run locally in both runs.
_FACTORIES = frozenset(("arange", "linspace", "logspace"))


@dataclass(frozen=True)
class _OpCall:
    """One call; with `grad` its gradients are compared as well."""

    label: str
    call: Callable[..., Any]
    sample: Any
    grad: bool

    def __str__(self) -> str:
        try:
            return f"{self.label}: {self.sample.summary()}"
        except RuntimeError as error:  # a layout that torch cannot describe
            return f"{self.label}: {error}"


def dtypes_by_name(local: str) -> dict[str, list[str]]:
    """The dtypes that torch supports for an op on that device."""
    kind = local.partition(":")[0]
    return {op.full_name: sorted(map(_dtype_name, op.supported_dtypes(kind))) for op in op_db}


def compare_entry(unit: ComparisonUnit, *, local: str, report_progress: Callable[[str], None]) -> Findings:
    """`report_progress` is called before each call. Errors of sample generators propagate."""
    op = next(op for op in op_db if op.full_name == unit.name)
    dtype = getattr(torch, unit.dtype)
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes(local.partition(":")[0])
    checker = _Checker(op, dtype, local, report_progress)
    samples = select_evenly(
        lambda: op.sample_inputs(local, dtype, requires_grad=grad, set_seed=False), unit.samples
    )
    for number, sample in enumerate(samples):
        checker.check(_OpCall(f"sample {number}", op.op, sample, grad))
    if samples and all(x.layout is torch.strided for x in tensors_of(_sample_arguments(samples[0]))):
        checker.check(_OpCall("not contiguous", op.op, samples[0].noncontiguous(), grad))
    if dtype.is_complex and op.test_conjugated_samples and samples:
        checker.check(_OpCall("conjugated", op.op, samples[0].transform(_conjugate), grad))
    checker.check_in_place(samples, grad)
    if op.supports_out:
        checker.check_out(samples)
    if unit.errors and op.error_inputs_func is not None:
        for number, error in enumerate(
            select_evenly(lambda: op.error_inputs(local, set_seed=False), unit.samples)
        ):
            checker.check(_OpCall(f"error {number}", op.op, error.sample_input, grad=False))
    return checker.findings


class _Checker(RunClassifier):
    def __init__(
        self, op: Any, dtype: torch.dtype, local: str, report_progress: Callable[[str], None]
    ) -> None:
        super().__init__(Findings(op.full_name, _dtype_name(dtype)), report_progress)
        self._op = op
        self._local = local
        self._dtype = dtype
        self._tolerance = tolerance_of(op.decorators, "TestCommon", dtype, local)
        self._values = op.name not in _UNINITIALISED

    def check(self, case: _OpCall) -> RunResult:
        """Returns the local run."""
        self.report_progress(case.label)
        here, there = self._run(case, self._local), self._run(case, D0)
        findings = self.findings
        same = self.judge(
            findings.forward, case, here, there, lambda: self._compare_or_arbitrate(case, there, here)
        )
        if not case.grad or here.error is not None:
            return here
        if same:
            self.report_progress(f"{case.label}, backward")
            self._check_backward(case, here, there)
        else:
            findings.backward.note(findings.forward.outcome, findings.forward.reason, findings.forward.sample)
        return here

    def check_in_place(self, samples: Sequence[Any], grad: bool) -> None:
        in_place = self._op.get_inplace()
        if in_place is None:
            return
        candidates = [sample for sample in samples if isinstance(sample.input, torch.Tensor)]
        self._until_one_works(_OpCall("in place", in_place, sample, grad=False) for sample in candidates)
        if grad and self._op.supports_inplace_autograd:
            self._until_one_works(
                _OpCall("in place on a copy", lambda x, *a, **k: in_place(x.clone(), *a, **k), sample, True)
                for sample in candidates
                if not sample.broadcasts_input
            )

    def check_out(self, samples: Sequence[Any]) -> None:
        self._until_one_works(self._into(samples, "out=", _ones_like_output))
        self._until_one_works(self._into(samples, "out= without elements", _empty_like_output))

    def _into(
        self, samples: Sequence[Any], label: str, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[_OpCall]:
        for sample in samples:
            plain = self._run(_OpCall(label, self._op.op, sample, grad=False), self._local)
            outputs = plain.outputs
            if plain.error is None and tensors_of(outputs):
                several = isinstance(outputs, list | tuple)
                out = tuple(map(make, tensors_of(outputs))) if several else make(outputs)
                kwargs = {**sample.kwargs, "out": out}
                into = SampleInput(sample.input, args=sample.args, kwargs=kwargs)
                yield _OpCall(label, self._op.op, into, grad=False)

    def _until_one_works(self, cases: Iterator[_OpCall]) -> None:
        for case in itertools.islice(cases, _VARIANT_TRIES_MAX):
            if self.check(case).error is None:
                return

    def _run(self, case: _OpCall, device: str) -> RunResult:
        def work(run: RunResult) -> None:
            run.arguments = self._copy_sample(case.sample, device)
            first, rest, named = run.arguments
            seed_generators(device)
            with torch.set_grad_enabled(case.grad):
                run.outputs = case.call(first, *rest, **named)

        return run_and_catch(work, device)

    def _copy_sample(self, sample: Any, device: str) -> tuple[Any, Any, Any]:
        move = DeviceCopier(self._local, device)
        move_rest = DeviceCopier(self._local, self._local) if self._op.name in _HOST_ARGUMENTS else move
        named = sample.kwargs
        if self._op.name in _FACTORIES and not tensors_of(_sample_arguments(sample)):
            named = {"device": self._local} | named
        if "options" in named:
            named = named | {"options": _with_device(named["options"], self._local)}
        return move(sample.input), move_rest(sample.args), move_rest(named)

    def _compare_or_arbitrate(self, case: _OpCall, there: RunResult, here: RunResult) -> None:
        """A difference between a local GPU and its CPU is torch's, and is noted: the remote device then
        counts as right if it matches the CPU."""
        self._compare_places(there, here)
        try:
            self._compare_values(there, here)
        except MismatchError:
            if self._local == "cpu":
                raise
            arbiter = self._run(case, "cpu")
            if arbiter.error is not None or not _passes(lambda: self._compare_values(there, arbiter)):
                raise
            self.findings.as_on_cpu.append(shorten(str(case)))

    def _compare_places(self, there: RunResult, here: RunResult) -> None:
        assert_same_placement(there.outputs, here.outputs, local=self._local, remote=D0, what="output")
        same = _outputs_that_are_inputs(there), _outputs_that_are_inputs(here)
        if same[0] != same[1]:
            raise MismatchError(f"outputs are inputs: {same[0]} instead of {same[1]}")

    def _compare_values(self, there: RunResult, here: RunResult) -> None:
        # of the arguments only tensors: device names differ
        pairs = {
            "output": (self._initialised_outputs(there.outputs), self._initialised_outputs(here.outputs)),
            "argument": (tensors_of(there.arguments), tensors_of(here.arguments)),
        }
        for what, (found, expected) in pairs.items():
            assert_same(
                fetch_to_cpu(found),
                fetch_to_cpu(expected),
                what=what,
                tolerance=self._tolerance,
                values=self._values,
            )

    def compare_gradients(
        self,
        case: _OpCall,
        found: Any,
        expected: Any,
        again: Callable[[str], Any],
        exact: Callable[[], Any] = lambda: None,
    ) -> None:
        """As _compare_or_arbitrate. Many GPU kernels sum in varying order, with different rounding. A remote
        gradient that is as close to the `exact` one as local ones is a VariesError, which must be listed."""

        def compare(to: Any) -> None:
            several = [x if x is None else tuple(x) for x in (found, to)]
            assert_same(*several, what="gradient", tolerance=self._tolerance)

        try:
            compare(expected)
        except MismatchError:
            if self._local == "cpu" or found is None or expected is None:
                raise
            arbiter = again("cpu")
            if arbiter is not None and _passes(lambda: compare(arbiter)):
                self.findings.as_on_cpu.append(shorten(str(case)))
                return
            runs = [expected, *(again(self._local) for _ in range(_LOCAL_RUNS))]
            truth = exact()
            if truth is None:
                raise
            compare(_replace_less_exact(found, [run for run in runs if run is not None], truth))
            raise NondeterministicError("not as in a local run, and as near to the exact gradient") from None

    def _initialised_outputs(self, outputs: Any) -> Any:
        nobodys = _UNINITIALISED_OUTPUTS.get(self._op.full_name, ())
        return [x for i, x in enumerate(outputs) if i not in nobodys] if nobodys else outputs

    def _differentiated(
        self, case: _OpCall, forward: RunResult, device: str, *, drawn: torch.dtype | None = None
    ) -> RunResult:
        def work(run: RunResult) -> None:
            outputs = case.sample.output_process_fn_grad(forward.outputs)
            run.outputs = gradients(outputs, forward.arguments, drawn=drawn)

        return run_and_catch(work, device)

    def exact_gradients(self, case: _OpCall) -> RunResult:
        """The gradient of the same values in a dtype of higher precision."""
        finer = replace(case, sample=case.sample.transform(_to_finer_dtype))
        return self._differentiated(finer, self._run(finer, "cpu"), "cpu", drawn=self._dtype)

    def _check_backward(self, case: _OpCall, here: RunResult, there: RunResult) -> None:
        mine = self._differentiated(case, here, self._local)
        theirs = self._differentiated(case, there, D0)
        if mine.error is None and mine.outputs is None and theirs.outputs is None and theirs.error is None:
            return  # nothing to differentiate

        def written(run: RunResult) -> Any:
            return _cut_to_packed_sequences(case.sample, fetch_to_cpu(run.outputs))

        def again(device: str) -> Any:
            run = self._differentiated(case, self._run(case, device), device)
            return written(run) if run.error is None else None

        def exact() -> Any:
            run = self.exact_gradients(case)
            return written(run) if run.error is None else None

        def compare() -> None:
            assert_same_placement(theirs.outputs, mine.outputs, local=self._local, remote=D0, what="gradient")
            self.compare_gradients(case, written(theirs), written(mine), again, exact)

        self.judge(self.findings.backward, case, mine, theirs, compare)


def _passes(compare: Callable[[], None]) -> bool:
    try:
        compare()
    except MismatchError:
        return False
    return True


def _replace_less_exact(
    found: Sequence[Any], runs: Sequence[Sequence[Any]], exact: Sequence[Any]
) -> list[Any]:
    """Each found tensor, if it is as close to the exact one as those of the runs; else that of the first
    run."""
    alike = [run for run in runs if len(run) == len(found) == len(exact)]
    if not alike:
        return list(runs[0])
    return [
        mine if _is_as_close_to_exact(mine, several, truth) else several[0]
        for mine, truth, *several in zip(found, exact, *alike, strict=True)
    ]


def _is_as_close_to_exact(mine: Any, several: Sequence[Any], exact: Any) -> bool:
    """The mean over all elements: single elements may deviate more than in the local runs."""
    if (
        len({_shape_if_comparable(x) for x in (mine, *several)}) > 1
        or _shape_if_comparable(mine) is None
        or _shape_if_comparable(exact) is None
    ):
        return False
    off = [(_to_real(x) - _to_real(exact)).abs() for x in (mine, *several)]
    worst, mean = ([float(measure(x)) for x in off] for measure in (torch.max, torch.mean))
    if not all(map(math.isfinite, worst)):
        return False
    return worst[0] <= _WORST_ERROR_RATIO * max(worst[1:]) and mean[0] <= _MEAN_ERROR_RATIO * max(mean[1:])


def _to_finer_dtype(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        finer = value.detach().to(_FINER_DTYPES.get(value.dtype, value.dtype))
        return finer.requires_grad_(value.requires_grad)
    return _FINER_DTYPES.get(value, value) if isinstance(value, torch.dtype) else value


def _shape_if_comparable(x: Any) -> tuple[Any, ...] | None:
    """None for values without a numerical distance."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.numel() == 0:
        return None
    return (x.shape, x.dtype) if x.is_floating_point() or x.is_complex() else None


def _to_real(x: torch.Tensor) -> torch.Tensor:
    plain = x.resolve_conj().resolve_neg()
    return (torch.view_as_real(plain) if x.is_complex() else plain).double()


def _cut_to_packed_sequences(sample: Any, gradients: Any) -> Any:
    """Attention over packed sequences: memory after the last one is uninitialized."""
    ends = [sample.kwargs.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k")]
    if gradients is None or any(end is None for end in ends):
        return gradients
    lengths = [int(end[-1]) for end in ends]
    cut = [x if x is None else x[:, :length] for x, length in zip(gradients, lengths, strict=False)]
    return [*cut, *gradients[len(cut) :]]


def _sample_arguments(sample: Any) -> tuple[Any, ...]:
    return sample.input, sample.args, sample.kwargs


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_device(options: Any, device: str) -> Any:
    """linear_cross_entropy selects its algorithm by device type; both runs use the local one."""
    kind = type(options)

    def adjust(self: Any, **given: Any) -> Any:
        return kind._adjust(self, **given | {"device": torch.device(device)})

    fixed = type(kind.__name__, (kind,), {"__slots__": (), "_adjust": adjust})
    return fixed(**{field.name: getattr(options, field.name) for field in dataclasses.fields(options)})


def _conjugate(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_complex():
        return value
    return value.detach().conj().requires_grad_(value.requires_grad)


def _ones_like_output(output: torch.Tensor) -> torch.Tensor:
    return torch.full_like(output.detach(), 1)


def _empty_like_output(output: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=output.dtype, device=output.device)


def _outputs_that_are_inputs(run: RunResult) -> list[tuple[int, int]]:
    """Which outputs are the same objects as which inputs."""
    outputs, inputs = tensors_of(run.outputs), tensors_of(run.arguments)
    return [(i, j) for i, x in enumerate(outputs) for j, y in enumerate(inputs) if x is y]
