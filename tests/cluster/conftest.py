"""An in-process controller, and a session that is ended after each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.cluster import init
from tests.cluster.small_controller import SmallController


@pytest.fixture
def controller() -> Iterator[SmallController]:
    """Registered in the state directory of the test, so that init() finds it without arguments."""
    with SmallController() as running:
        running.announce(Path(os.environ["GENIE_STATE_DIR"]))
        yield running
        init.shutdown_blocking()
