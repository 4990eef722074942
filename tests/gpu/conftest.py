"""Tests of this folder run on machines with an NVIDIA GPU, and are reported as skipped elsewhere.

They are the only ones that may be left out when GENIE_TEST_REQUIRE_ALL=1 (tests/conftest.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.needs import require_module


@cache
def has_nvidia_gpu() -> bool:
    """Checks the driver's device file, or torch where there is none, as in some virtual machines."""
    if Path("/dev/nvidiactl").exists():
        return True
    return bool(require_module("torch", package="torch").cuda.is_available())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if not has_nvidia_gpu():
        pytest.skip("needs an NVIDIA GPU")
