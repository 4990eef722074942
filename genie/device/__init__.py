"""The torch device `remote_accelerator`: tensors and ops that live in executors on other machines.

The work is done in C++ (native/torch/device): tensors, ops, the op stream. roster.py knows which
device is where; connection.py connects to an executor, and again after a cut; backend.py tells
torch; accelerator.py is `torch.remote_accelerator`; graphs.py, buckets.py and compiler.py replay whole
models.
Importing this package does not import torch, nor a network: names are loaded on first use.
Not for: finding executors (cluster/ gives a callable that does).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genie.device.graphs import capture
    from genie.device.roster import ExecutorAddress, RemoteDevice, attach, detach, extend

__all__ = ["ExecutorAddress", "RemoteDevice", "attach", "capture", "detach", "extend"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "genie.device.graphs" if name == "capture" else "genie.device.roster"  # the first imports torch
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value
