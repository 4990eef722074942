"""The agent on a slow, blocked or full disk: heartbeats and running jobs do not depend on it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from genie.agent import agent as agent_module
from genie.agent.disk import PENDING_JOURNAL_CHANGES_MAX, DiskAccess, JournalWriteQueue
from genie.errors import NodeUnfitError, StoreFullError
from genie.model.job import JobKind
from genie.processes.clock import SystemClock
from genie.processes.tasks import file_io_threads, run_inline
from tests.agent.conftest import STAY, RunAgent, wait_for_job_process
from tests.fakes.controller import FakeController
from tests.waiting import until

_Result = TypeVar("_Result")


class ControllableDisk:
    """An Offload whose calls wait while it is blocked, and whose writes fail while it is full."""

    def __init__(self) -> None:
        self.is_full = False
        self.waiting = 0
        self._responds = asyncio.Event()
        self._responds.set()

    def block(self) -> None:
        self._responds.clear()

    def release(self) -> None:
        self._responds.set()

    async def __call__(self, work: Callable[[], _Result], *, writes: bool = False) -> _Result:
        self.waiting += 1
        await self._responds.wait()
        self.waiting -= 1
        if self.is_full and writes:
            raise StoreFullError("cannot write: no space left on device")
        return work()


async def wait_for_heartbeats(controller: FakeController, count: int = 3) -> None:
    before = len(controller.heartbeats)
    await until(lambda: len(controller.heartbeats) >= before + count, what="further heartbeats")


async def test_heartbeats_continue_while_the_disk_is_blocked(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    disk = ControllableDisk()
    async with run_agent(disk=DiskAccess(run_journal_call=disk, run_job_file_call=disk)):
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        peer = await controller.peer()
        disk.block()
        launching = asyncio.ensure_future(peer.call(controller.launch_of("j2", *STAY), timeout_s=20))
        await until(lambda: disk.waiting, what="the agent writes")
        await wait_for_heartbeats(controller)
        assert not launching.done()
        assert job.is_alive
        assert {one.job_id for one in controller.heartbeats[-1].running} == {"j1", "j2"}
        disk.release()
        await launching
        await wait_for_job_process(node_dir, "j2")


async def test_exit_is_reported_while_the_disk_is_blocked(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    disk = ControllableDisk()
    async with run_agent(disk=DiskAccess(run_journal_call=disk, run_job_file_call=disk)):
        order = await controller.launch("j1", *STAY)
        await wait_for_job_process(node_dir, "j1")
        disk.block()
        await controller.order_kill(order)
        await controller.end_of("j1")
        await until(lambda: not controller.heartbeats[-1].exits, what="it is settled")
        disk.release()
        await until((node_dir / "jobs" / "j1" / "settled.json").exists, what="the journal has it")


async def test_registration_and_heartbeats_do_not_need_disk_space(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    disk = ControllableDisk()
    async with run_agent(disk=DiskAccess(run_journal_call=disk, run_job_file_call=disk)):
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        disk.is_full = True
        controller.leader_token += 1  # a restarted controller
        (await controller.peer()).close()
        await until(lambda: len(controller.registers) >= 2, what="a second registration")
        await wait_for_heartbeats(controller)
        assert job.is_alive
        with pytest.raises(NodeUnfitError, match="no space left"):
            await controller.launch("j2", "true")
        assert [one.job_id for one in controller.heartbeats[-1].running] == ["j1"]
        disk.is_full = False
        await controller.launch("j2", "true")
        assert (await controller.end_of("j2")).exit_code == 0


async def test_running_jobs_survive_the_loss_of_the_directory_of_jobs(
    controller: FakeController,
    run_agent: RunAgent,
    node_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(agent_module, "DISK_RETRY_INTERVAL_S", 0.05)
    async with run_agent():
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        order = await controller.launch("j2", *STAY)
        await wait_for_job_process(node_dir, "j2")
        (node_dir / "jobs").rename(node_dir / "elsewhere")
        await controller.order_kill(order)
        await controller.end_of("j2")
        await until(lambda: caplog.text.count("could not remove the files of finished jobs") > 1)
        await wait_for_heartbeats(controller)
        assert job.is_alive
        (node_dir / "elsewhere").rename(node_dir / "jobs")
        await controller.launch("j3", "true")
        assert (await controller.end_of("j3")).exit_code == 0


async def test_launch_that_is_cancelled_while_it_is_recorded_is_not_listed(
    controller: FakeController, run_agent: RunAgent
) -> None:
    disk = ControllableDisk()
    async with run_agent(disk=DiskAccess(run_journal_call=disk, run_job_file_call=disk)):
        peer = await controller.peer()
        disk.block()
        launching = asyncio.ensure_future(peer.call(controller.launch_of("j1", *STAY), timeout_s=20))
        await until(lambda: controller.heartbeats[-1].running, what="the launch arrives")
        peer.close()
        await asyncio.wait([launching])
        assert launching.exception() is not None
        await until(lambda: len(controller.registers) >= 2, what="a second registration")
        await wait_for_heartbeats(controller)
        assert controller.heartbeats[-1].running == ()
        disk.release()


async def test_node_is_closed_while_its_disk_is_blocked(
    controller: FakeController, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.agent.disk.STALLED_WRITE_S_MIN", 0.2)
    monkeypatch.setattr("genie.agent.agent.HARDWARE_POLL_INTERVAL_S_MIN", 0.05)
    disk = ControllableDisk()
    async with run_agent(disk=DiskAccess(run_journal_call=disk, run_job_file_call=disk)):
        peer = await controller.peer()
        disk.block()
        launching = asyncio.ensure_future(peer.call(controller.launch_of("j1", "true"), timeout_s=20))
        await until(lambda: controller.heartbeats[-1].node.closed, what="the node is closed")
        assert controller.heartbeats[-1].node.closed.startswith("the disk does not respond")
        with pytest.raises(NodeUnfitError, match="the disk does not respond"):
            await controller.launch("j2", "true")
        disk.release()
        await launching
        await until(lambda: not controller.heartbeats[-1].node.closed, what="the node is open again")


# --- where files are used -----------------------------------------------------------------------

_EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.scandir", "os.listdir", "os.chmod"}
_watched: dict[int, tuple[str, list[str]]] = {}
_is_hooked = threading.Event()


def _record_file_access(event: str, arguments: tuple[object, ...]) -> None:
    if event in _EVENTS and (watch := _watched.get(threading.get_ident())) is not None:
        prefix, found = watch
        if str(arguments[0]).startswith(prefix):
            found.append(f"{event} {arguments[0]}")


@contextmanager
def record_files_used_by_this_thread(directory: Path) -> Iterator[list[str]]:
    if not _is_hooked.is_set():
        _is_hooked.set()
        sys.addaudithook(_record_file_access)  # cannot be removed
    found: list[str] = []
    _watched[threading.get_ident()] = (str(directory), found)
    try:
        yield found
    finally:
        del _watched[threading.get_ident()]


async def test_event_loop_uses_no_files_after_the_start(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    with file_io_threads("journal") as journal, file_io_threads("files") as bulk:
        async with run_agent(disk=DiskAccess(run_journal_call=journal, run_job_file_call=bulk), jobs_kept=1):
            await controller.peer()
            with record_files_used_by_this_thread(node_dir) as found:
                await controller.launch("s1", kind=JobKind.SESSION, ticket_sha256="ab" * 32)
                await controller.launch("j1", "/bin/sh", "-c", "echo one")
                assert await controller.whole_log("j1") == "one\n"
                order = await controller.launch("j1", *STAY)
                controller.leader_token += 1
                (await controller.peer()).close()
                await until(lambda: len(controller.registers) >= 2, what="a second registration")
                await controller.order_kill(order)
                await until(lambda: controller.exits["j1"].epoch == order.placement.epoch, what="its end")
                await controller.launch("j3", "true")
                await controller.end_of("j3")
                await until(lambda: not (node_dir / "jobs" / "j1").exists(), what="it is discarded")
            assert found == []


# --- the queue ----------------------------------------------------------------------------------


async def test_write_queue_runs_changes_in_order() -> None:
    done: list[int] = []
    with file_io_threads("journal") as offload:
        writes = JournalWriteQueue(offload, SystemClock())
        async with asyncio.TaskGroup() as group:
            running = group.create_task(writes.run())
            for number in range(50):
                writes.add_work(lambda number=number: done.append(number), action="append")  # type: ignore[misc]
            assert await writes.run_work(lambda: len(done)) == 50
            running.cancel()
    assert done == list(range(50))


async def test_failed_change_does_not_stop_the_write_queue(caplog: pytest.LogCaptureFixture) -> None:
    writes = JournalWriteQueue(run_inline, SystemClock())
    done: list[int] = []

    def fail() -> None:
        raise StoreFullError("no space")

    writes.add_work(fail, action="record the exit of j1")
    writes.add_work(lambda: 1 // 0, action="count")
    writes.add_work(lambda: done.append(1), action="append")
    await writes.run_pending_work()
    assert done == [1]
    assert "could not record the exit of j1: no space" in caplog.text


async def test_write_queue_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    writes = JournalWriteQueue(run_inline, SystemClock())
    done: list[int] = []
    for _ in range(PENDING_JOURNAL_CHANGES_MAX + 1):
        writes.add_work(lambda: done.append(1), action="append")
    with pytest.raises(StoreFullError, match="the disk is too slow"):
        await writes.run_work(lambda: None)
    await writes.run_pending_work()
    assert len(done) == PENDING_JOURNAL_CHANGES_MAX
    assert "are pending" in caplog.text
