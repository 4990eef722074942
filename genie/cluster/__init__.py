"""One process's session with a cluster: init, monitoring, health, events; and the processes that host one.

Names are loaded on first use, so that importing one room does not open the others. Not for:
deciding anything about jobs (controller/).
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

_HOMES = {
    "ClusterClient": "genie.cluster.client",
    "ClusterEvent": "genie.cluster.events",
    "ClusterState": "genie.cluster.state",
    "EventBus": "genie.cluster.events",
    "EventType": "genie.cluster.events",
    "open_client": "genie.cluster.client",
}


_ROOMS = ("dashboard", "events", "health", "monitoring", "node_info")
"""Modules that people use under this name after `import genie.cluster` alone."""


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"genie.cluster.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'genie.cluster' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
