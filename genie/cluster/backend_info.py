"""Public alias of genie.runtime.backend_info, which Genie's own code imports."""

from __future__ import annotations

from genie.runtime.backend_info import BACKEND_PRIORITY, BACKENDS, BackendInfo, get_backend_info

__all__ = ["BACKENDS", "BACKEND_PRIORITY", "BackendInfo", "get_backend_info"]
