"""Memory of processes outside of the cluster. For process lists of the driver see test_nvidia.py."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.hardware.memory_outside_cluster import GpuProcess, bytes_used_outside_cluster, is_descendant

ABOVE_ALL_PIDS = 4_194_999


@given(
    st.integers(0, 1 << 40),
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 1 << 40)), st.sampled_from([True, False, None]))),
    st.booleans(),
)
def test_outside_memory_is_between_zero_and_used(
    used: int, listed: list[tuple[int | None, bool | None]], is_allocated: bool
) -> None:
    processes = [GpuProcess(pid, memory) for pid, (memory, _) in enumerate(listed)]
    outside = bytes_used_outside_cluster(
        used, processes, is_allocated=is_allocated, is_ours=lambda pid: listed[pid][1]
    )
    assert 0 <= outside <= used
    believed = bool(listed) and all(memory is not None and ours is not None for memory, ours in listed)
    if not is_allocated:
        assert outside == used
    elif believed:
        assert outside == max(used - sum(memory or 0 for memory, ours in listed if ours), 0)
    else:
        assert outside == 0


def test_is_descendant_follows_the_parents() -> None:
    me = os.getpid()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert is_descendant(child.pid, root_pid=me)
        assert is_descendant(me, root_pid=me)
        assert is_descendant(os.getppid(), root_pid=me) is False
        assert is_descendant(me, root_pid=child.pid) is False
        assert child.stdin is not None
        child.stdin.close()
    assert is_descendant(ABOVE_ALL_PIDS, root_pid=me) is None


def test_inaccessible_process_is_not_a_descendant(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_self: psutil.Process) -> list[psutil.Process]:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "parents", denied)
    assert is_descendant(os.getppid(), root_pid=os.getpid()) is False
