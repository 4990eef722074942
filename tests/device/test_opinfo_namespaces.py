"""torch's op database: what test_opinfo.py does, for linalg, nn.functional, fft and the other namespaces."""

from __future__ import annotations

import pytest

from tests.device.findings import Summary
from tests.device.test_opinfo import (
    compare_ops,
    is_in_namespace,
    pytestmark,  # noqa: F401 - the same time limit, and as long
    test_entries_of_the_exception_list_still_fail,  # noqa: F401
    test_failing_entries_are_in_the_exception_list,  # noqa: F401
    test_most_entries_of_the_database_were_compared,  # noqa: F401
    test_no_entry_is_wrong_or_crashes,  # noqa: F401 - with the summary of this file
    test_samples_that_raise_locally_raise_remotely,  # noqa: F401
)


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compare_ops(is_in_namespace)
