"""Of the memory that is in use on a GPU, what processes outside of the cluster use.

Inside is what descends from this process, which is the agent: its shims keep every process of a job
below them. Not for: the list of a GPU's processes (nvidia.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil


class GpuProcess(NamedTuple):
    pid: int
    memory_bytes: int | None
    """None where the driver does not say."""


def outside_bytes(
    used_bytes: int,
    processes: Sequence[GpuProcess] | None,
    *,
    is_held: bool,
    is_ours: Callable[[int], bool | None],
) -> int:
    """`is_held`: a job of ours is on the GPU. `is_ours` of a pid is None where there is no such process.

    What nobody is listed for, such as the driver's own, counts as outside. A list is not believed when
    it is empty, lacks a figure or names processes that are not to be found here: so it looks in a
    container, whose processes the driver hides or numbers differently. Then what our own jobs use
    cannot be told from the rest, and on a GPU that they hold nothing is counted twice.
    """
    if not is_held:
        return used_bytes
    inside_bytes = 0
    for process in processes or ():
        ours = is_ours(process.pid)
        if ours is None or process.memory_bytes is None:
            return 0
        inside_bytes += process.memory_bytes if ours else 0
    return max(used_bytes - inside_bytes, 0) if processes else 0


def descends(pid: int, *, root_pid: int) -> bool | None:
    """Whether it is this process or one below it; None where there is no such process."""
    if pid == root_pid:
        return True
    try:
        return any(parent.pid == root_pid for parent in psutil.Process(pid).parents())
    except (psutil.NoSuchProcess, ValueError):
        return None
    except psutil.Error:
        return False  # it is there, and somebody else's
