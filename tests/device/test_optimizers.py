"""torch's optimizer database: every optimizer, in each way it can run, changes there what it changes here.

A few configurations each; `opinfo_report.py --database optimizers` takes all of them.
"""

from __future__ import annotations

import pytest

from tests.device.findings import Summary
from tests.device.test_opinfo import (
    compared_whole,
    test_what_does_not_pass_is_in_the_list,  # noqa: F401 - with the summary of this file
    test_what_is_in_the_list_does_not_pass,  # noqa: F401
)

pytestmark = pytest.mark.timeout(400)  # the whole comparison is in the first test's set-up

CONFIGURATIONS_MAX = 2


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compared_whole("optiminfo", few=CONFIGURATIONS_MAX)


@pytest.mark.parametrize("way", ["default", "for loop", "foreach", "fused"])
def test_each_way_was_compared(summary: Summary, way: str) -> None:
    assert [name for name in summary.counted("forward") if name.endswith(f", {way}")]
