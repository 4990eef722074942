"""The torch device `remote_accelerator`: tensors and ops that live in executors on other machines.

The work is done in C++ (native/torch/device): tensors, ops, the op stream. roster.py knows which
device is where; connection.py connects to an executor, and again after a cut; backend.py tells
torch; accelerator.py is `torch.remote_accelerator`; graphs.py, buckets.py and compiler.py replay whole
models.
Importing this package does not import torch.
Not for: finding executors (cluster/ gives a callable that does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genie.device.roster import ExecutorAddress, RemoteDevice, attach, detach, extend

if TYPE_CHECKING:
    from genie.device.graphs import capture

__all__ = ["ExecutorAddress", "RemoteDevice", "attach", "capture", "detach", "extend"]


def __getattr__(name: str) -> Any:
    if name == "capture":  # late: it imports torch
        from genie.device.graphs import capture

        return capture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
