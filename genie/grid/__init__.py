"""Grids: SSH hosts used with nothing installed on them.

`grid_file` lists the hosts, `ssh/` connects to them, and `remote/` runs on them while a connection is open.
The other modules build on these three.

Not responsible for nodes with an agent (genie/agent) or jobs placed by the cluster's scheduler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genie.grid.backoff import retry
    from genie.grid.executor import (
        Executor,
        check_all_nodes,
        find_best_node,
        smart_sync,
    )
    from genie.grid.executor import (
        Executor as OptimizedExecutor,
    )
    from genie.grid.ray.batch import BatchExecutor, TaskFailure, batch_gpu_task

__all__ = [
    "BatchExecutor",
    "Executor",
    "OptimizedExecutor",
    "TaskFailure",
    "batch_gpu_task",
    "check_all_nodes",
    "find_best_node",
    "retry",
    "smart_sync",
]

_EXPORTS = {
    "BatchExecutor": ("genie.grid.ray.batch", "BatchExecutor"),
    "Executor": ("genie.grid.executor", "Executor"),
    "OptimizedExecutor": ("genie.grid.executor", "Executor"),  # the Grid document's name
    "TaskFailure": ("genie.grid.ray.batch", "TaskFailure"),
    "batch_gpu_task": ("genie.grid.ray.batch", "batch_gpu_task"),
    "check_all_nodes": ("genie.grid.executor", "check_all_nodes"),
    "find_best_node": ("genie.grid.executor", "find_best_node"),
    "retry": ("genie.grid.backoff", "retry"),
    "smart_sync": ("genie.grid.executor", "smart_sync"),
}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'genie.grid' has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    value: object = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
