"""torch's module database: each module, in training and in evaluation, does there what it does here.

A few inputs each; `opinfo_report.py --database modules` takes all of them.
"""

from __future__ import annotations

import pytest

from tests.device import findings
from tests.device.comparison import Comparison
from tests.device.findings import Summary, Unit
from tests.device.test_opinfo import LISTED, samples_of, shown

pytestmark = pytest.mark.timeout(400)  # the whole comparison is in the first test's set-up

INPUTS_MAX = 1


@pytest.fixture(scope="module")
def summary() -> Summary:
    with Comparison("moduleinfo") as comparison:
        names = comparison.described()["entries"]
        units = [Unit(name, "float32", samples_of(name, INPUTS_MAX), errors=False) for name in names]
        return Summary(comparison.run(units))


def test_what_is_not_in_the_list_passes(summary: Summary) -> None:
    unlisted = findings.unlisted(summary.problems, LISTED)
    assert not unlisted, shown(unlisted)


def test_what_is_in_the_list_does_not_pass(summary: Summary) -> None:
    stale = [f"{line.name} {line.direction}" for line, _ in findings.stale(summary, LISTED)]
    assert not stale, "take these off the list:\n" + "\n".join(stale)


def test_every_module_was_compared_forward_and_backward(summary: Summary) -> None:
    assert summary.not_here == []
    assert len(summary.counted("forward")) > 200
    assert len(summary.counted("backward")) > 200
