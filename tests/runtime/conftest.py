"""The small controller of the tests of sessions."""

from __future__ import annotations

from tests.cluster.conftest import controller

__all__ = ["controller"]
