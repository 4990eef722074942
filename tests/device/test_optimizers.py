"""torch's optimizer database: every optimizer, in each implementation, updates remote parameters as local
ones.

A few configurations each; `opinfo_report.py --database optimizers` runs all of them.
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

CONFIGURATIONS_MAX = 2


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compare_database("optiminfo", few=CONFIGURATIONS_MAX)


@pytest.mark.parametrize("way", ["default", "for loop", "foreach", "fused"])
def test_each_implementation_of_an_optimizer_was_compared(summary: Summary, way: str) -> None:
    assert [name for name in summary.counted("forward") if name.endswith(f", {way}")]
