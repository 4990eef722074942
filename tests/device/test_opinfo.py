"""torch's op database: every op, with a few samples, gives the same results remotely, except the listed ones.

This file has the ops of torch itself; test_opinfo_namespaces.py has linalg, nn.functional and the others, and
test_opinfo_few.py a few of all, for `make test`.
opinfo_report.py runs all samples, in more dtypes. The list, opinfo_exceptions.txt, can only become shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from tests.device import findings
from tests.device.comparison import Comparison
from tests.device.findings import ComparisonUnit, Outcome, Problem, Summary
from tests.device.opinfo_report import DTYPES

pytestmark = [
    pytest.mark.timeout(400),  # the whole comparison is in the first test's set-up
    pytest.mark.long("compares a whole database"),
]

SAMPLES_MAX = 1
LISTED = [line for line in findings.read_exceptions() if line.device == "cpu"]


def sample_count_max(name: str, few: int) -> int | None:
    """Few samples; all of them for listed ops, which must fail in one."""
    return None if any(line.name == name for line in LISTED) else few


def select_dtype(supported: Collection[str]) -> str | None:
    """float32, or the first supported dtype; None if no dtype is compared."""
    return next((dtype for dtype in DTYPES if dtype in supported), None)


def compare_ops(chosen: Callable[[str], bool]) -> Summary:
    """Each op in float32, or its first supported dtype."""
    with Comparison("opinfo") as comparison:
        units = []
        for name, supported in comparison.describe_entries()["entries"].items():
            dtype = select_dtype(supported)
            if chosen(name) and dtype is not None:
                units.append(ComparisonUnit(name, dtype, sample_count_max(name, SAMPLES_MAX), errors=False))
        return Summary(comparison.run(units))


def compare_database(database: str, *, few: int) -> Summary:
    """Every entry of another database, in float32."""
    with Comparison(database) as comparison:
        names = comparison.describe_entries()["entries"]
        units = [ComparisonUnit(name, "float32", sample_count_max(name, few), errors=False) for name in names]
        return Summary(comparison.run(units))


def is_in_namespace(name: str) -> bool:
    """True for linalg.svd; not for svd, nor for std.unbiased, a variant of std."""
    space = name.partition(".")[0]
    return space in ("fft", "linalg", "masked", "nn", "signal", "sparse", "special", "torch")


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compare_ops(lambda name: not is_in_namespace(name))


def test_no_entry_is_wrong_or_crashes(summary: Summary) -> None:
    bad = [one for one in summary.problems if one.outcome in (Outcome.WRONG, Outcome.CRASHED)]
    assert not bad, format_problems(bad)


def test_failing_entries_are_in_the_exception_list(summary: Summary) -> None:
    unlisted = findings.unlisted_problems(summary.problems, LISTED)
    assert not unlisted, format_problems(unlisted)


def test_entries_of_the_exception_list_still_fail(summary: Summary) -> None:
    stale = [
        f"{line.name} {dtype} {line.direction}" for line, dtype in findings.stale_exceptions(summary, LISTED)
    ]
    assert not stale, "take these off the list:\n" + "\n".join(stale)


def test_samples_that_raise_locally_raise_remotely(summary: Summary) -> None:
    quiet = {
        name: one.raised.nothing for name, several in summary.by_name.items() for one in several
        if one.raised.nothing
    }  # fmt: skip
    assert quiet == {}


def test_most_entries_of_the_database_were_compared(summary: Summary) -> None:
    assert len(summary.counted("forward")) > 200
    assert len(summary.counted("backward")) > 150
    assert not [name for name in summary.missing_locally if not name.startswith("jiterator")]


def format_problems(problems: list[Problem]) -> str:
    return "\n" + "\n".join(
        f"{one.name} {one.dtype} {one.direction}: {one.outcome}: {one.reason}\n    {one.sample}"
        for one in problems
    )
