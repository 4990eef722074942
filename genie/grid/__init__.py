"""A grid: a few SSH hosts used as they are, with nothing installed on them.

`grid_file` says which hosts, `ssh_pool` reaches them, `remote/` is what runs there while we are
connected. Everything else stands on these three.

Not for: nodes with an agent (genie/agent), and jobs that the cluster's scheduler places.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genie.grid.batch import BatchExecutor, TaskFailure, batch_gpu_task
    from genie.grid.executor import Executor

__all__ = ["BatchExecutor", "Executor", "TaskFailure", "batch_gpu_task"]

_HOMES = {
    "BatchExecutor": "genie.grid.batch",
    "Executor": "genie.grid.executor",
    "TaskFailure": "genie.grid.batch",
    "batch_gpu_task": "genie.grid.batch",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'genie.grid' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
