"""torch's module database: each module, in train and eval mode, gives the same results remotely as locally.

A few inputs each; `opinfo_report.py --database modules` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.device.findings import Summary
from tests.device.test_opinfo import (
    compare_database,
    pytestmark,  # noqa: F401 - the same time limit, and as long
    test_failures_are_listed,  # noqa: F401 - with the summary of this file
    test_listed_entries_fail,  # noqa: F401
)

INPUTS_MAX = 1


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compare_database("moduleinfo", few=INPUTS_MAX)


def test_every_module_was_compared_forward_and_backward(summary: Summary) -> None:
    assert summary.missing_locally == []
    assert len(summary.counted("forward")) > 200
    assert len(summary.counted("backward")) > 200
