"""The torch device `remote_accelerator`: tensors and ops that live in executors on other machines.

The work is done in C++ (native/torch/device): tensors, ops, the op stream. The modules, from the bottom up:
connection.py connects to an executor and resumes after a connection loss; registry.py maps device indices to
accelerators; library.py loads the C++ library; graphs.py records and replays graphs; model_capture.py and
compiler.py replay whole models; spreading.py places a model on several devices; cuda_redirection.py redirects
code that names "cuda"; accelerator.py is `torch.remote_accelerator`; adapters.py makes other libraries accept
the device; backend.py registers all of it with torch.
Importing this package imports neither torch nor networking: names are loaded on first use.
Does not find executors: genie/cluster passes in a callable that does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genie.device.cuda_redirection import as_cuda
    from genie.device.model_capture import capture
    from genie.device.registry import ExecutorAddress, RemoteDevice, attach, detach, extend
    from genie.device.spreading import ModelPlacement, spread

__all__ = [
    "ExecutorAddress",
    "ModelPlacement",
    "RemoteDevice",
    "as_cuda",
    "attach",
    "capture",
    "detach",
    "extend",
    "spread",
]

# These import torch.
_TORCH_MODULES = {
    "ModelPlacement": "genie.device.spreading",
    "as_cuda": "genie.device.cuda_redirection",
    "capture": "genie.device.model_capture",
    "spread": "genie.device.spreading",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _TORCH_MODULES.get(name, "genie.device.registry")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value
