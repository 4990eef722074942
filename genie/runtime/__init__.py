"""Transport: the wire format, connections, certificates, and network discovery.

The names below are imported on first use, because most programs need none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genie.runtime.control_plane import ControlDataIntegration
    from genie.runtime.data_plane import DataPlaneConfig, TransportCoordinator

__all__ = ["ControlDataIntegration", "DataPlaneConfig", "TransportCoordinator"]

_MODULES = {
    "ControlDataIntegration": "genie.runtime.control_plane",
    "DataPlaneConfig": "genie.runtime.data_plane",
    "TransportCoordinator": "genie.runtime.data_plane",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'genie.runtime' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
