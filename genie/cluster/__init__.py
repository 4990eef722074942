"""The session and client of one process: init, monitoring, health, events.

Submodules are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genie.cluster.client import ClusterClient, open_client
    from genie.cluster.events import ClusterEvent, EventBus, EventType
    from genie.cluster.state import ClusterState

__all__ = [
    "ClusterClient",
    "ClusterEvent",
    "ClusterState",
    "EventBus",
    "EventType",
    "open_client",
]

_EXPORTS = {
    "ClusterClient": "genie.cluster.client",
    "ClusterEvent": "genie.cluster.events",
    "ClusterState": "genie.cluster.state",
    "EventBus": "genie.cluster.events",
    "EventType": "genie.cluster.events",
    "open_client": "genie.cluster.client",
}


_SUBMODULES = (
    "backend_info",
    "dashboard",
    "events",
    "health",
    "monitoring",
    "network_discovery",
    "node_info",
)
"""Submodules that are available after `import genie.cluster`."""


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"genie.cluster.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'genie.cluster' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_SUBMODULES]
