"""The in-process controller of the session tests."""

from __future__ import annotations

from tests.cluster.conftest import controller

__all__ = ["controller"]
