"""The comparison itself: it detects wrong results, and survives crashes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

from genie.errors import DeviceLostError, OpRefusedError, RemoteOpError
from tests.device import findings, opinfo, opinfo_report
from tests.device.comparison import Comparison
from tests.device.findings import ComparisonUnit, Findings, ListedException, Outcome, Problem, Summary
from tests.device.paired_runs import (
    DeviceCopier,
    MismatchError,
    NondeterministicError,
    Tolerance,
    assert_same,
    assert_same_placement,
    select_evenly,
)
from tests.device.run_classifier import RunClassifier, RunResult, outcome_of


@pytest.mark.timeout(200)
def test_crash_is_counted_and_comparison_continues() -> None:
    with Comparison("crashing_entries", step_timeout_s=20.0) as comparison:
        names = comparison.describe_entries()["entries"]
        units = [ComparisonUnit(name, "float32", None, errors=False) for name in names if name != "is stuck"]
        found = {one.name: one for one in comparison.run(units)}
    outcomes = {name: one.forward.outcome for name, one in found.items()}
    assert outcomes == {
        "ends the client": Outcome.CRASHED,
        "ends the executor": Outcome.CRASHED,
        "raises": Outcome.FAILED,
        "works": Outcome.PASS,
    }
    assert found["ends the client"].forward.sample == "the only sample"
    assert "the executor ended" in found["ends the executor"].forward.reason
    assert "ended with -11" in found["ends the client"].backward.reason
    assert "ValueError: this comparison is broken" in found["raises"].backward.reason


@pytest.mark.timeout(200)
def test_report_of_unknown_dtype_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        opinfo_report.main(["--dtypes", "float32,float31"])
    assert "float31 is not among" in capsys.readouterr().err


def test_cpu_is_the_reference_where_gpu_and_cpu_differ() -> None:
    op = next(op for op in op_db if op.full_name == "add")
    checker = opinfo._Checker(op, torch.float32, "cuda:0", lambda what: None)
    x, y = torch.ones(3), torch.full((3,), 2.0)
    case = opinfo._OpCall("sample 0", op.op, SampleInput(x, args=(y,)), grad=False)

    def run(outputs: torch.Tensor) -> RunResult:
        return RunResult(arguments=(x, (y,), {}), outputs=outputs)

    checker._compare_or_arbitrate(case, run(x + y), run(x - y))
    assert [text.partition(":")[0] for text in checker.findings.as_on_cpu] == ["sample 0"]
    with pytest.raises(MismatchError):
        checker._compare_or_arbitrate(case, run(x * y), run(x - y))


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0])),
        (torch.tensor([1.0], device="meta"), torch.tensor([1.0])),
    ],
    ids=["its input", "elsewhere"],
)
def test_wrong_device_is_an_error_regardless_of_cpu(there: torch.Tensor, here: torch.Tensor) -> None:
    op = next(op for op in op_db if op.full_name == "clone")
    checker = opinfo._Checker(op, torch.float32, "cuda:0", lambda what: None)
    case = opinfo._OpCall("sample 0", torch.clone, SampleInput(torch.ones(1)), grad=False)
    with pytest.raises(MismatchError, match=r"outputs are inputs|is on meta"):
        checker._compare_or_arbitrate(
            case,
            RunResult(arguments=(there, (), {}), outputs=there),
            RunResult(arguments=(here, (), {}), outputs=here.clone()),
        )
    assert not checker.findings.as_on_cpu


def gradient_comparison_error(
    found: Sequence[Any], runs: Sequence[Sequence[Any]], exact: Sequence[Any] | None, failing: bool = False
) -> type[BaseException] | None:
    """The error for `found` gradients, where local runs return the others in turn."""
    op = next(op for op in op_db if op.full_name == "add")
    checker = opinfo._Checker(op, torch.float32, "cuda:0", lambda what: None)
    case = opinfo._OpCall("sample 0", op.op, SampleInput(torch.ones(1), args=(1,)), grad=True)
    turns = itertools.cycle([*runs[1:], *([None] if failing else [])])
    try:
        checker.compare_gradients(
            case, found, runs[0], lambda where: None if where == "cpu" else next(turns), lambda: exact
        )
    except (MismatchError, NondeterministicError) as error:
        return type(error)
    assert not checker.findings.as_on_cpu
    return None


HALF = torch.bfloat16


def float64_tensors(*numbers: float) -> tuple[torch.Tensor]:
    return (torch.tensor(numbers, dtype=torch.float64),)


@pytest.mark.parametrize("failing", [False, True], ids=["", "with runs that fail"])
def test_gradient_as_close_to_exact_as_local_ones_is_nondeterministic_not_wrong(failing: bool) -> None:
    exact = (*float64_tensors(1.0, 2.0, 3.0), None)
    runs = [(torch.tensor([1.0, 2.0, last], dtype=HALF), None) for last in (3.05, 2.95, 3.1)]

    def outcome(*numbers: float) -> type[BaseException] | None:
        return gradient_comparison_error((torch.tensor(numbers, dtype=HALF), None), runs, exact, failing)

    assert outcome(1.0, 2.0, 3.05) is None
    assert outcome(1.0, 2.1, 3.0) is NondeterministicError
    assert outcome(1.1, 2.1, 3.0) is MismatchError
    assert outcome(1.0, 2.0, 3.4) is MismatchError
    for never in ([1.0, 2.0, math.nan], [1.0, 2.0, math.inf], [1.0, 2.0]):
        assert outcome(*never) is MismatchError
    assert gradient_comparison_error((runs[1][0], torch.ones(1)), runs, exact) is MismatchError
    assert gradient_comparison_error((runs[1][0],), runs, exact) is MismatchError
    assert gradient_comparison_error((runs[1][0], None), runs, None) is MismatchError


@pytest.mark.parametrize("run", [math.inf, math.nan])
def test_non_finite_local_runs_allow_no_deviation(run: float) -> None:
    several = [(torch.tensor([number]),) for number in (1.0, run, 1.0)]
    assert gradient_comparison_error((torch.tensor([1.001]),), several, float64_tensors(1.0)) is MismatchError


def test_conjugated_gradients_are_compared() -> None:
    exact = (torch.tensor([100 - 1j], dtype=torch.complex128),)
    runs = [(torch.tensor([part + 1j], dtype=torch.complex64).conj(),) for part in (100 - 8e-5, 100 + 1e-4)]
    found = torch.tensor([100 + 1.2e-4 - 1j], dtype=torch.complex64)
    assert gradient_comparison_error((found,), runs, exact) is NondeterministicError
    assert gradient_comparison_error((found.conj(),), runs, exact) is MismatchError


@pytest.mark.parametrize("name", ["nn.functional.interpolate.area", "cummax"])
def test_exact_gradient_uses_the_same_values_in_higher_precision(name: str) -> None:
    op = next(op for op in op_db if op.full_name == name)
    checker = opinfo._Checker(op, HALF, "cpu", lambda what: None)
    sample = next(iter(op.sample_inputs("cpu", HALF, requires_grad=True)))
    case = opinfo._OpCall("sample 0", op.op, sample, grad=True)
    coarse = checker._differentiated(case, checker._run(case, "cpu"), "cpu").outputs
    fine = checker.exact_gradients(case).outputs
    assert coarse is not None and fine is not None and fine[0].dtype is torch.float64
    assert torch.allclose(coarse[0].double(), fine[0], rtol=0.1, atol=0.1)
    assert not torch.equal(coarse[0].double(), fine[0])
    assert opinfo._replace_less_exact(coarse, [coarse], fine) == list(coarse)


def test_varying_entries_must_be_listed_and_may_pass() -> None:
    found = Findings("max", "bfloat16")
    found.backward.note(Outcome.VARIES, "any order")
    line = ListedException("max", "cuda", ("bfloat16",), "backward", Outcome.VARIES, "any order")
    assert [one.name for one in findings.unlisted_problems(Summary([found]).problems, [])] == ["max"]
    assert findings.unlisted_problems(Summary([found]).problems, [line]) == []
    assert Summary([found]).percent("backward") == 100
    quiet = Findings("max", "bfloat16")
    quiet.backward.note(Outcome.PASS)
    assert findings.stale_exceptions(Summary([quiet]), [line]) == []
    found.backward.note(Outcome.WRONG)
    assert [one.outcome for one in findings.unlisted_problems(Summary([found]).problems, [line])] == [
        Outcome.WRONG
    ]


def test_gradient_equal_to_cpu_but_not_gpu_passes_and_is_noted() -> None:
    op = next(op for op in op_db if op.full_name == "add")
    checker = opinfo._Checker(op, torch.float32, "cuda:0", lambda what: None)
    case = opinfo._OpCall("sample 0", op.op, SampleInput(torch.ones(1), args=(1,)), grad=True)
    of_cpu, of_gpu = [torch.ones(1)], [torch.full((1,), math.nan)]
    checker.compare_gradients(case, of_cpu, of_gpu, lambda device: of_cpu if device == "cpu" else of_gpu)
    assert len(checker.findings.as_on_cpu) == 1
    on_cpu = opinfo._Checker(op, torch.float32, "cpu", lambda what: None)
    with pytest.raises(MismatchError):
        on_cpu.compare_gradients(case, of_cpu, of_gpu, lambda device: of_cpu)


def test_gradients_after_the_last_packed_sequence_are_ignored() -> None:
    ends = torch.tensor([0, 2], dtype=torch.int32)
    sample = SampleInput(torch.ones(1), kwargs={"cu_seqlens_q": ends, "cu_seqlens_k": ends})
    cut = opinfo._cut_to_packed_sequences(sample, [torch.ones(1, 3, 2), torch.ones(1, 4, 2), None])
    assert [x if x is None else tuple(x.shape) for x in cut] == [(1, 2, 2), (1, 2, 2), None]
    whole = [torch.ones(1, 3, 2)]
    assert opinfo._cut_to_packed_sequences(SampleInput(torch.ones(1)), whole) is whole


def test_comparison_without_a_response_is_a_crash() -> None:
    with Comparison("crashing_entries", step_timeout_s=1.0) as comparison:
        (found,) = comparison.run([ComparisonUnit("is stuck", "float32", None, errors=False)])
    assert found.is_crashed
    assert "no response" in found.forward.reason


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (MismatchError("output: shape"), Outcome.WRONG),
        (NondeterministicError("gradient"), Outcome.VARIES),
        (OpRefusedError("aten::x"), Outcome.REFUSED),
        (NotImplementedError("Could not run 'aten::x'"), Outcome.REFUSED),
        (NotImplementedError("later"), Outcome.FAILED),
        (RemoteOpError("aten::x failed"), Outcome.FAILED),
        (AssertionError("of the op"), Outcome.FAILED),
        (RuntimeError("x INTERNAL ASSERT FAILED at"), Outcome.CRASHED),
        (DeviceLostError("gone"), Outcome.CRASHED),
        (SystemError("returned NULL"), Outcome.CRASHED),
    ],
)
def test_remote_errors_are_classified_by_type(error: Exception, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome


def classify_errors(here: Exception | None, there: Exception | None) -> Findings:
    judge = RunClassifier(Findings("op", "float32"), lambda what: None)
    judge.judge(
        judge.findings.forward, "sample 0", RunResult(error=here), RunResult(error=there), lambda: None
    )
    return judge.findings


def test_local_error_must_be_a_remote_error() -> None:
    assert classify_errors(ValueError("a"), ValueError("b")).raised.same == 1
    assert classify_errors(RuntimeError("a"), RemoteOpError("b")).raised.same == 1
    assert classify_errors(IndexError("a"), RemoteOpError("b")).raised.other_type
    assert classify_errors(IndexError("a"), None).raised.nothing == ["sample 0: IndexError: a"]
    assert classify_errors(IndexError("a"), DeviceLostError("b")).forward.outcome is Outcome.CRASHED
    assert classify_errors(IndexError("a"), None).forward.compared == 0


def test_outcome_of_an_entry_is_that_of_its_worst_sample() -> None:
    found = Findings("op", "float32")
    for outcome in (Outcome.PASS, Outcome.WRONG, Outcome.REFUSED, Outcome.PASS):
        found.forward.note(outcome, f"it was {outcome}", "here")
    assert (found.forward.outcome, found.forward.reason) == (Outcome.WRONG, "it was wrong")
    assert (found.forward.compared, found.forward.bad) == (4, 2)


def test_pass_percentages_are_of_compared_entries() -> None:
    several = [Findings(name, "float32") for name in "abcd"]
    for one, outcome in zip(several, (Outcome.PASS, Outcome.REFUSED, Outcome.PASS), strict=False):
        one.forward.note(outcome)
    several[0].backward.note(Outcome.WRONG)
    summary = Summary([*several, Findings("a", "int64")])
    assert summary.missing_locally == ["d"]
    assert (summary.percent("forward"), summary.percent("backward")) == (66.67, 0.0)
    assert (summary.named(Outcome.WRONG), summary.named(Outcome.REFUSED)) == (["a"], ["b"])


def test_exception_list_covers_only_its_entries() -> None:
    line = ListedException("std", "cpu", ("float32", "bool"), "forward", Outcome.REFUSED, "why")
    one = Findings("std", "float32")
    one.forward.note(Outcome.REFUSED)
    worse = Findings("std", "bool")
    worse.forward.note(Outcome.WRONG)
    summary = Summary([one, worse])
    assert [problem.dtype for problem in findings.unlisted_problems(summary.problems, [line])] == ["bool"]
    assert findings.stale_exceptions(summary, [line]) == [(line, "bool")]
    assert findings.stale_exceptions(Summary([one]), [line]) == []
    one.backward.note(Outcome.REFUSED)
    assert findings.unlisted_problems(Summary([one]).problems, [line]) == []
    backward = replace(line, direction="backward")
    assert [one.direction for one in findings.unlisted_problems(Summary([one]).problems, [backward])] == [
        "forward"
    ]


def test_exception_line_is_parsed() -> None:
    lines = findings.exception_lines(
        [
            Problem("std", "int64", "forward", Outcome.REFUSED, "OpRefusedError: a | b"),
            Problem("std", "bool", "forward", Outcome.REFUSED, "OpRefusedError: c [op 3]"),
            Problem("std", "int64", "backward", Outcome.REFUSED, "OpRefusedError: a"),
        ],
        "cpu",
    )
    assert [findings.parse_exception(line) for line in lines] == [
        ListedException("std", "cpu", ("bool", "int64"), "forward", Outcome.REFUSED, "OpRefusedError: c")
    ]
    with pytest.raises(ValueError, match="not a line"):
        findings.parse_exception("std | cpu | forward")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2) + 1e-4),
        (torch.tensor([1000]), torch.tensor([1001])),
        ([torch.ones(2)], (torch.ones(2),)),
        ([torch.ones(2)], [torch.ones(2)] * 2),
        ([torch.ones(2)], [None]),
        (1.0, 1.1),
        (1, 1.0),
        (1, True),
        (float("nan"), 1.0),
    ],
)
def test_differences_are_found(one: object, other: object) -> None:
    with pytest.raises(MismatchError, match="output"):
        assert_same(one, other, what="output")


def test_equal_results_are_equal() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_same([nan, {"a": 1}, float("nan"), None], [nan + 1e-8, {"a": 1}, float("nan"), None], what="it")
    assert_same(torch.ones(2), torch.ones(2) * 1.01, what="it", tolerance=Tolerance(rtol=0.1))
    assert_same(torch.ones(2), torch.zeros(2), what="it", values=False)
    with pytest.raises(MismatchError):  # integers are compared exactly
        assert_same(torch.tensor([1]), torch.tensor([2]), what="it", tolerance=Tolerance(atol=5.0))


def test_result_on_wrong_device_is_found() -> None:
    meta = torch.ones(2, device="meta")
    assert_same_placement([meta], [torch.ones(2)], local="cpu", remote="meta", what="output")
    with pytest.raises(MismatchError, match="is on cpu, not on meta"):
        assert_same_placement([torch.ones(2)], [torch.ones(2)], local="cpu", remote="meta", what="output")


def test_copies_keep_strides_and_shared_memory() -> None:
    base = torch.arange(12.0)
    one, other = base[2:10:2], base.view(3, 4).t()
    leaf = torch.ones(2, requires_grad=True)
    copied = DeviceCopier("cpu", "cpu")({"a": [one, other], "b": (leaf, leaf), "device": "cpu", "number": 3})
    mine, theirs = copied["a"]
    assert (mine.stride(), mine.storage_offset()) == (one.stride(), one.storage_offset())
    mine.fill_(-1)
    assert torch.equal(theirs, torch.tensor([[0.0, -1, -1], [1, 5, 9], [-1, -1, 10], [3, 7, 11]]))
    assert base[2] == 2
    assert copied["b"][0] is copied["b"][1]
    assert copied["b"][0] is not leaf
    assert copied["b"][0].requires_grad
    assert copied["b"][0].is_leaf


def test_copies_keep_conjugate_views() -> None:
    value = torch.tensor([1 + 2j, 3 - 1j]).conj()
    copied = DeviceCopier("cpu", "cpu")([value, value.imag])
    assert copied[0].is_conj()
    assert torch.equal(copied[0], value)
    assert torch.equal(copied[1], value.imag)


def test_copies_use_the_other_device() -> None:
    moved = DeviceCopier("cpu", "meta")([torch.ones(2), "cpu", torch.device("cpu"), "sum"])
    assert [str(x.device) if isinstance(x, torch.Tensor) else str(x) for x in moved] == [
        "meta", "meta", "meta", "sum"
    ]  # fmt: skip


def test_samples_are_thinned_out_evenly() -> None:
    assert select_evenly(lambda: range(10), None) == list(range(10))
    assert select_evenly(lambda: range(10), 4) == [0, 3, 6, 9]
    assert select_evenly(lambda: range(10), 1) == [0]
    assert torch.equal(*(select_evenly(lambda: [torch.rand(2)], None)[0] for _ in range(2)))
