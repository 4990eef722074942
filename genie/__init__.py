"""Genie makes the GPUs that you can reach feel like your own.

The public API. Names are loaded on first use, so that `import genie` stays cheap and pulls in
neither torch nor a network. Where torch is imported too, before or after, it is told the name of the
device, so that Genie can say what is missing without a session.
Not for: anything else; the rooms behind these names are private.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from genie.device import import_hook

if TYPE_CHECKING:
    from genie.cluster.init import ClusterState, get_cluster_state, init, is_initialized, shutdown
    from genie.cluster.session import connect, disconnect, session
    from genie.config import ClusterConfig
    from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus

__version__ = "0.1.0"

__all__ = [
    "ClusterConfig",
    "ClusterState",
    "GPUInfo",
    "NodeInfo",
    "NodeRole",
    "NodeStatus",
    "__version__",
    "connect",
    "disconnect",
    "get_cluster_state",
    "init",
    "is_initialized",
    "session",
    "shutdown",
]

# A library is silent until someone listens.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOMES = {
    "ClusterConfig": "genie.config",
    "ClusterState": "genie.cluster.init",
    "GPUInfo": "genie.model.node",
    "NodeInfo": "genie.model.node",
    "NodeRole": "genie.model.node",
    "NodeStatus": "genie.model.node",
    "connect": "genie.cluster.session",
    "disconnect": "genie.cluster.session",
    "get_cluster_state": "genie.cluster.init",
    "init": "genie.cluster.init",
    "is_initialized": "genie.cluster.init",
    "session": "genie.cluster.session",
    "shutdown": "genie.cluster.init",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'genie' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _register_device() -> None:
    from genie.device import backend  # it imports torch, which is there

    backend.register()


import_hook.call_with_torch(_register_device)
