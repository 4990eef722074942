"""torch's optimizer database: every optimizer, in each way it can run, changes there what it changes here.

A few configurations each; `opinfo_report.py --database optimizers` takes all of them.
"""

from __future__ import annotations

import pytest

from tests.device import findings
from tests.device.comparison import Comparison
from tests.device.findings import Summary, Unit
from tests.device.test_opinfo import LISTED, samples_of, shown

pytestmark = pytest.mark.timeout(400)  # the whole comparison is in the first test's set-up

CONFIGURATIONS_MAX = 2


@pytest.fixture(scope="module")
def summary() -> Summary:
    with Comparison("optiminfo") as comparison:
        names = comparison.described()["entries"]
        units = [Unit(name, "float32", samples_of(name, CONFIGURATIONS_MAX), errors=False) for name in names]
        return Summary(comparison.run(units))


def test_what_is_not_in_the_list_passes(summary: Summary) -> None:
    unlisted = findings.unlisted(summary.problems, LISTED)
    assert not unlisted, shown(unlisted)


def test_what_is_in_the_list_does_not_pass(summary: Summary) -> None:
    stale = [f"{line.name} {line.direction}" for line, _ in findings.stale(summary, LISTED)]
    assert not stale, "take these off the list:\n" + "\n".join(stale)


@pytest.mark.parametrize("way", ["default", "for loop", "foreach", "fused"])
def test_each_way_was_compared(summary: Summary, way: str) -> None:
    assert [name for name in summary.counted("forward") if name.endswith(f", {way}")]
