"""The GPU memory that processes outside of the cluster use.

Processes inside are descendants of this process, the agent: shims keep all processes of a job as descendants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil


class GpuProcess(NamedTuple):
    pid: int
    memory_bytes: int | None
    """None if the driver does not report it."""


def bytes_used_outside_cluster(
    used_bytes: int,
    processes: Sequence[GpuProcess] | None,
    *,
    is_allocated: bool,
    is_ours: Callable[[int], bool | None],
) -> int:
    """`is_allocated`: a job of this agent uses the GPU. `is_ours` returns None if the PID does not exist.

    Memory without a process, such as that of the driver, counts as outside. A list that is empty, lacks a
    figure or contains unknown PIDs is ignored: in a container the driver hides processes or reports other
    PIDs. The memory of our jobs is then unknown, and nothing on a held GPU counts as outside.
    """
    if not is_allocated:
        return used_bytes
    inside_bytes = 0
    for process in processes or ():
        ours = is_ours(process.pid)
        if ours is None or process.memory_bytes is None:
            return 0
        inside_bytes += process.memory_bytes if ours else 0
    return max(used_bytes - inside_bytes, 0) if processes else 0


def is_descendant(pid: int, *, root_pid: int) -> bool | None:
    """Whether `pid` is the process `root_pid` or a descendant; None if there is no such process."""
    if pid == root_pid:
        return True
    try:
        return any(parent.pid == root_pid for parent in psutil.Process(pid).parents())
    except (psutil.NoSuchProcess, ValueError):
        return None
    except psutil.Error:
        return False  # it exists, and belongs to another user
