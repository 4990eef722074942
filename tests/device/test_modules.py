"""torch's module database: each module, in training and in evaluation, does there what it does here.

A few inputs each; `opinfo_report.py --database modules` takes all of them.
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

INPUTS_MAX = 1


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compared_whole("moduleinfo", few=INPUTS_MAX)


def test_every_module_was_compared_forward_and_backward(summary: Summary) -> None:
    assert summary.not_here == []
    assert len(summary.counted("forward")) > 200
    assert len(summary.counted("backward")) > 200
