"""Memory that processes outside of the cluster use. With a driver's list of processes: test_nvidia.py."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.hardware.outside import GpuProcess, descends, outside_bytes

ABOVE_ALL_PIDS = 4_194_999


@given(
    st.integers(0, 1 << 40),
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 1 << 40)), st.sampled_from([True, False, None]))),
    st.booleans(),
)
def test_it_is_never_less_than_nothing_nor_more_than_all(
    used: int, listed: list[tuple[int | None, bool | None]], is_held: bool
) -> None:
    processes = [GpuProcess(pid, memory) for pid, (memory, _) in enumerate(listed)]
    outside = outside_bytes(used, processes, is_held=is_held, is_ours=lambda pid: listed[pid][1])
    assert 0 <= outside <= used
    believed = bool(listed) and all(memory is not None and ours is not None for memory, ours in listed)
    if not is_held:
        assert outside == used
    elif believed:
        assert outside == max(used - sum(memory or 0 for memory, ours in listed if ours), 0)
    else:
        assert outside == 0


def test_descent_is_told_by_the_line_of_parents() -> None:
    me = os.getpid()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert descends(child.pid, root_pid=me)
        assert descends(me, root_pid=me)
        assert descends(os.getppid(), root_pid=me) is False
        assert descends(me, root_pid=child.pid) is False
        assert child.stdin is not None
        child.stdin.close()
    assert descends(ABOVE_ALL_PIDS, root_pid=me) is None


def test_a_process_that_may_not_be_looked_at_is_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_self: psutil.Process) -> list[psutil.Process]:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "parents", denied)
    assert descends(os.getppid(), root_pid=os.getpid()) is False
