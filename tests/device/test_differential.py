"""Short programs behave the same on a remote device as on a local one, except those of the list.

`python -m tests.device.differential.run` does the same, also with CUDA. differential/exceptions.txt lists
every difference with its reason.
"""

from __future__ import annotations

import pytest

from tests.device import findings
from tests.device.differential import run
from tests.device.findings import Outcome, Summary

pytestmark = pytest.mark.timeout(400)  # the whole comparison is in the first test's set-up

LISTED = [line for line in findings.read_exceptions(run.EXCEPTIONS) if line.device == "cpu"]
SNIPPETS_MIN = 450
# Of the op database, in memory formats; the whole database is compared by the long test.
OPS_SHARD = "1/12"


@pytest.fixture(scope="module")
def summary() -> Summary:
    return run.compare("cpu")[0]


@pytest.fixture(scope="module")
def layouts() -> Summary:
    return run.compare("cpu", database="layouts", shard=OPS_SHARD)[0]


def test_only_listed_snippets_differ(summary: Summary) -> None:
    unlisted, stale = run.check_list(summary, LISTED)
    assert not unlisted, "\n".join(unlisted)
    assert not stale, "take these off the list:\n" + "\n".join(stale)


def test_no_snippet_crashes_a_process_or_ends_the_session(summary: Summary) -> None:
    assert summary.named(Outcome.CRASHED) == []


def test_every_topic_was_compared(summary: Summary) -> None:
    assert len(summary.by_name) >= SNIPPETS_MIN
    topics = {name.partition(".")[0] for name in summary.by_name}
    assert topics == {
        "autograd", "complex_numbers", "dtypes", "indexing", "layouts", "programs", "settings", "transforms",
        "views", "writes",
    }  # fmt: skip


def test_only_listed_ops_have_other_strides(layouts: Summary) -> None:
    unlisted, stale = run.check_list(layouts, LISTED)
    assert not unlisted, "\n".join(unlisted)
    assert not stale, "take these off the list:\n" + "\n".join(stale)


@pytest.mark.long("compares a whole database")
def test_only_listed_ops_of_the_whole_database_have_other_strides() -> None:
    unlisted, stale = run.check_list(run.compare("cpu", database="layouts")[0], LISTED)
    assert not unlisted, "\n".join(unlisted)
    assert not stale, "take these off the list:\n" + "\n".join(stale)
