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
    test_failures_are_listed,  # noqa: F401 - with the summary of this file
    test_listed_entries_fail,  # noqa: F401
)

CONFIGURATIONS_MAX = 2


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compare_database("optiminfo", few=CONFIGURATIONS_MAX)


@pytest.mark.parametrize("way", ["default", "for loop", "foreach", "fused"])
def test_each_variant_was_compared(summary: Summary, way: str) -> None:
    assert [name for name in summary.counted("forward") if name.endswith(f", {way}")]
