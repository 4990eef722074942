"""torch's op database: what test_opinfo.py does, for linalg, nn.functional, fft and the other namespaces."""

from __future__ import annotations

import pytest

from tests.device.findings import Summary
from tests.device.test_opinfo import (
    compared,
    in_namespace,
    pytestmark,  # noqa: F401 - the same time limit
    test_nothing_is_wrong_and_nothing_crashes,  # noqa: F401 - with the summary of this file
    test_nothing_that_raises_here_goes_through_there,  # noqa: F401
    test_the_comparison_is_of_the_whole_database,  # noqa: F401
    test_what_does_not_pass_is_in_the_list,  # noqa: F401
    test_what_is_in_the_list_does_not_pass,  # noqa: F401
)


@pytest.fixture(scope="module")
def summary() -> Summary:
    return compared(in_namespace)
