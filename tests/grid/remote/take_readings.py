"""Takes a node's readings in this process, as its helper does."""

from __future__ import annotations

from typing import Any

from genie.grid.remote import health  # noqa: F401 - it registers the op
from genie.grid.remote.core import OP_AND_IS_QUICK_BY_NAME


def take_readings(timeout_s: float = 20.0, root: str = "/") -> dict[str, Any]:
    function, quick = OP_AND_IS_QUICK_BY_NAME["health.read"]
    assert not quick
    return dict(function({"root": root, "timeout_s": timeout_s, "throttle_check_c": 80.0}, b""))
