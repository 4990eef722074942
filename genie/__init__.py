"""Genie: use remote GPUs as a PyTorch device, a cluster or a grid.

The public API. Names that the documentation does not mention are private. Names are loaded on first use, so
that `import genie` is fast and imports neither torch nor network code. If torch is imported too, before or
after, the device name is registered with torch, so that an error explains a missing session.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from genie.device import import_hook
from genie.version import __version__

if TYPE_CHECKING:
    from genie.cluster.init import ClusterState, get_cluster_state, init, is_initialized, shutdown
    from genie.cluster.locks import lock
    from genie.cluster.session import connect, disconnect, session
    from genie.config import ClusterConfig
    from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus

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
    "lock",
    "session",
    "shutdown",
]

# Libraries do not log unless the application configures logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_MODULES = {
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
    "lock": "genie.cluster.locks",
    "session": "genie.cluster.session",
    "shutdown": "genie.cluster.init",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'genie' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def _register_device() -> None:
    from genie.device import backend  # imports torch, which is already imported

    backend.register()


import_hook.call_after_import("torch", _register_device)
