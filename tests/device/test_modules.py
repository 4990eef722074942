"""torch's module database: each module, in train and eval mode, gives the same results remotely as locally.

A few inputs each; `opinfo_report.py --database modules` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.device.findings import Summary
from tests.device.test_opinfo import (
    compare_database,
    pytestmark,  # noqa: F401 - the same time limit, and as long
    test_entries_of_the_exception_list_still_fail,  # noqa: F401
    test_failing_entries_are_in_the_exception_list,  # noqa: F401 - with the summary of this file
)

INPUTS_MAX = 1


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compare_database("moduleinfo", few=INPUTS_MAX)


def test_every_module_was_compared_forward_and_backward(summary: Summary) -> None:
    assert summary.missing_locally == []
    assert len(summary.counted("forward")) > 200
    assert len(summary.counted("backward")) > 200
