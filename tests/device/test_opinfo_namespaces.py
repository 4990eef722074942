"""torch's op database: what test_opinfo.py does, for linalg, nn.functional, fft and the other namespaces."""

from __future__ import annotations

import pytest

from tests.device.findings import Summary
from tests.device.test_opinfo import (
    compare_ops,
    is_in_namespace,
    pytestmark,  # noqa: F401 - the same time limit, and as long
    test_failures_are_listed,  # noqa: F401
    test_listed_entries_fail,  # noqa: F401
    test_local_errors_are_remote_errors,  # noqa: F401
    test_no_entry_is_wrong_or_crashes,  # noqa: F401 - with the summary of this file
    test_whole_database_is_compared,  # noqa: F401
)


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compare_ops(is_in_namespace)
