"""Some entries of each of torch's databases; test_opinfo.py and others compare all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from tests.device.comparison import Comparison
from tests.device.findings import ComparisonUnit, Summary
from tests.device.test_opinfo import (
    sample_count_max,
    select_dtype,
    test_entries_of_the_exception_list_still_fail,  # noqa: F401
    test_failing_entries_are_in_the_exception_list,  # noqa: F401
    test_no_entry_is_wrong_or_crashes,  # noqa: F401 - with the summary of this file
)

pytestmark = pytest.mark.timeout(200)  # the whole comparison is in the first test's set-up

# Every n-th entry in the order of the database, where similar entries are adjacent.
STEPS = {"opinfo": 24, "moduleinfo": 12, "optiminfo": 4}


@pytest.fixture(scope="module", params=STEPS)
def summary(request: pytest.FixtureRequest) -> Summary:
    database = request.param
    dtype: Callable[[Collection[str]], str | None] = (
        select_dtype if database == "opinfo" else lambda _: "float32"
    )
    with Comparison(database) as comparison:
        entries = list(comparison.describe_entries()["entries"].items())[:: STEPS[database]]
        units = [
            ComparisonUnit(name, chosen, sample_count_max(name, 1), errors=False)
            for name, supported in entries
            if (chosen := dtype(supported)) is not None
        ]
        return Summary(comparison.run(units))


def test_entries_of_each_kind_were_compared(summary: Summary) -> None:
    assert len(summary.counted("forward")) >= 10
