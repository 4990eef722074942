"""A node whose disk is low or full: no new work, finished jobs are evicted, a restarted agent registers."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from genie.agent import agent as agent_module
from genie.agent import job_files
from genie.agent.disk import STALLED_WRITE_S_MIN, DiskAccess, DiskMonitor, is_caused_by_node
from genie.agent.job_files import RunDirectorySize
from genie.agent.journal import JobRecord, Journal
from genie.errors import LaunchError, NodeUnfitError, StoreFullError, WorkdirError
from genie.hardware import DiskSpace, disk_space
from genie.model.job import Workdir
from genie.model.node import NodeStatus
from genie.processes import files
from tests.agent.conftest import STAY, RunAgent, make_joined_node_dir, wait_for_job_process
from tests.fakes.controller import FakeController
from tests.needs import require_namespaces, require_program
from tests.waiting import until

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _poll_hardware_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "HARDWARE_POLL_INTERVAL_S_MIN", 0.05)


# --- the decision -------------------------------------------------------------------------------


def test_node_closes_below_the_minimum_free_space_and_reopens_with_a_margin() -> None:
    monitor = DiskMonitor(GIB)
    assert monitor.why_node_is_blocked(0.0) == "", "not measured yet"
    readings = [(100, ""), (1.1, ""), (0.5, "low"), (1.2, "low"), (1.6, ""), (1.1, "")]
    for free_gib, expected in readings:
        monitor.record_reading(DiskSpace(total_bytes=100 * GIB, free_bytes=int(free_gib * GIB)))
        assert monitor.why_node_is_blocked(0.0).startswith(expected) and bool(expected) == bool(
            monitor.why_node_is_blocked(0.0)
        )
        assert monitor.bytes_to_free == (int(1.5 * GIB) - int(free_gib * GIB) if expected else 0)


def test_minimum_free_space_is_at_most_a_twentieth_of_the_disk() -> None:
    monitor = DiskMonitor(GIB)
    monitor.record_reading(DiskSpace(total_bytes=GIB, free_bytes=GIB // 10))
    assert not monitor.why_node_is_blocked(0.0)
    monitor.record_reading(DiskSpace(total_bytes=GIB, free_bytes=GIB // 30))
    assert monitor.why_node_is_blocked(0.0) == "low disk space: 0.03 GiB free, 0.07 GiB needed"


def test_node_is_closed_while_the_disk_does_not_respond() -> None:
    assert not DiskMonitor(GIB).why_node_is_blocked(STALLED_WRITE_S_MIN - 1)
    assert DiskMonitor(GIB).why_node_is_blocked(STALLED_WRITE_S_MIN + 2) == (
        "the disk does not respond: a write has taken 7 s"
    )


def test_error_caused_by_the_node_is_recognised_by_its_cause() -> None:
    wrapped = WorkdirError("could not write the working directory")
    wrapped.__cause__ = OSError(errno.ENOSPC, "no space")
    assert (
        is_caused_by_node(wrapped)
        and is_caused_by_node(StoreFullError("x"))
        and is_caused_by_node(NodeUnfitError("x"))
    )
    assert not is_caused_by_node(LaunchError("x")) and not is_caused_by_node(OSError(errno.ENOENT, "missing"))


def test_free_space_of_the_file_system_is_read(tmp_path: Path) -> None:
    space = disk_space(tmp_path)
    assert 0 <= space.free_bytes <= space.total_bytes and space.total_bytes > 0


# --- eviction -----------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    opened = Journal(tmp_path / "n1")
    opened.open()
    for number in range(4):
        directory = opened.record_launch(
            JobRecord(job_id=f"j{number}", epoch=1, incarnation=1, accepted_at=1.0, gpu_ids=())
        )
        (directory / "work" / "big").write_bytes(b"x" * 100_000)
        (directory / "log" / "00.log").write_bytes(b"x" * 10_000)
        os.utime(directory, (number, number))
    return opened


def measure_finished_runs(journal: Journal) -> dict[Path, RunDirectorySize]:
    found = {
        path: job_files.try_measure_run_directory(path, None) for path in journal.finished_run_directories(())
    }
    return {path: size for path, size in found.items() if size is not None}


def has_workdir_by_job(journal: Journal) -> dict[str, bool]:
    """Whether each remaining job has its working directory."""
    return {job_id: (journal.job_dir(job_id) / "work").exists() for job_id in journal.list_job_ids()}


@pytest.mark.parametrize(
    ("bytes_max", "bytes_to_free", "expected"),
    [
        (10**9, 0, {"j0": True, "j1": True, "j2": True, "j3": True}),
        (350_000, 0, {"j0": False, "j1": False, "j2": True, "j3": True}),
        (10**9, 150_000, {"j0": False, "j1": False, "j2": True, "j3": True}),
        (10**9, 415_000, {"j1": False, "j2": False, "j3": False}),
        (10**9, 10**9, {}),
    ],
)
def test_oldest_working_directories_are_evicted_first_and_logs_last(
    journal: Journal, bytes_max: int, bytes_to_free: int, expected: dict[str, bool]
) -> None:
    measured = measure_finished_runs(journal)
    journal.discard_old_runs_and_list_discarded(
        kept_count=9, live_job_ids=(), sizes=measured, bytes_max=bytes_max, bytes_to_free=bytes_to_free
    )
    assert has_workdir_by_job(journal) == expected
    assert [path.name for path in journal.finished_run_directories(())] == sorted(expected, reverse=True)


def test_size_of_a_run_directory_is_measured_once(journal: Journal) -> None:
    directory = journal.job_dir("j1")
    first = job_files.try_measure_run_directory(directory, None)
    assert (
        first is not None and 100_000 <= first.work_dir_bytes <= 120_000 and first.other_files_bytes >= 10_000
    )
    (directory / "work" / "more").write_bytes(b"x" * 100_000)
    assert job_files.try_measure_run_directory(directory, first) == first
    assert job_files.try_measure_run_directory(directory, replace(first, inode=0)) != first
    (directory / "work").rename(directory / "gone")
    assert job_files.try_measure_run_directory(directory, first) == replace(first, work_dir_bytes=0)
    assert job_files.try_measure_run_directory(journal.job_dir("none"), None) is None


def test_directory_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "0").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path)
    (tmp_path / "kept").touch()
    fd = os.open(root, os.O_RDONLY)
    for _ in range(2500):
        os.mkdir("d" * 100, dir_fd=fd)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.mkdir("closed", 0o000, dir_fd=fd)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    assert job_files.tree_size_bytes(root) >= 0
    job_files.try_remove_tree(root)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_small_file_is_overwritten_where_it_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "incarnation"
    files.replace_or_overwrite_private_file(path, b"100")

    def full(*ignored: object) -> None:
        raise StoreFullError("no space")

    monkeypatch.setattr(files, "write_private", full)
    files.replace_or_overwrite_private_file(path, b"99")
    assert path.read_bytes() == b"99 "
    files.replace_or_overwrite_private_file(path, b"1000")
    assert path.read_bytes() == b"1000"
    with pytest.raises(StoreFullError):
        files.replace_or_overwrite_private_file(tmp_path / "new", b"1")


# --- the agent ----------------------------------------------------------------------------------


def with_size(workdir: Workdir, size_bytes: int) -> Workdir:
    return Workdir(digest=workdir.digest, size_bytes=size_bytes)


class FakeFreeSpace:
    """The free space that an agent reads."""

    def __init__(self) -> None:
        self.free_bytes = 90 * GIB

    def __call__(self, path: Path) -> DiskSpace:
        return DiskSpace(total_bytes=100 * GIB, free_bytes=self.free_bytes)


async def test_low_disk_closes_the_node_and_evicts_finished_jobs(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    space = FakeFreeSpace()
    async with run_agent(disk=DiskAccess(measure_space=space)):
        await controller.launch("done", "/bin/sh", "-c", "echo > big")
        await controller.end_of("done")
        await until(lambda: not controller.heartbeats[-1].exits, what="it is settled")
        await controller.launch("j1", *STAY)
        job = await wait_for_job_process(node_dir, "j1")
        assert controller.heartbeats[-1].node.closed == ""
        space.free_bytes = GIB // 2
        await until(lambda: controller.heartbeats[-1].node.closed, what="the node is closed")
        node = controller.heartbeats[-1].node
        assert node.closed == node.status_reason == "low disk space: 0.50 GiB free, 1.50 GiB needed"
        assert (node.status, node.disk_free_bytes) == (NodeStatus.DEGRADED, GIB // 2)
        await until(lambda: not (node_dir / "jobs" / "done").exists(), what="its directory is evicted")
        with pytest.raises(NodeUnfitError, match="low disk space"):
            await controller.launch("j2", "true")
        assert job.is_alive
        space.free_bytes = 2 * GIB
        await until(lambda: not controller.heartbeats[-1].node.closed, what="the node is open again")
        assert controller.heartbeats[-1].node.status is NodeStatus.HEALTHY
        await controller.launch("j2", "true")
        assert (await controller.end_of("j2")).exit_code == 0


async def test_job_that_the_node_cannot_prepare_is_reported_as_failure_of_the_node(
    controller: FakeController, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*ignored: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("genie.agent.preparation._append_to_file", full)
    async with run_agent():
        await controller.launch("j1", "true", workdir=controller.keep_blob(b"x" * 2000))
        end = await controller.end_of("j1")
    assert (end.started, end.is_caused_by_node) == (False, True)
    assert "No space left on device" in end.reason


async def test_working_directory_that_does_not_fit_is_not_downloaded(
    controller: FakeController, run_agent: RunAgent
) -> None:
    space = FakeFreeSpace()
    space.free_bytes = 6 * GIB
    async with run_agent(disk=DiskAccess(measure_space=space)):
        large = with_size(controller.keep_blob(b"x"), 4 * GIB)
        await controller.launch("j1", "true", workdir=large)
        end = await controller.end_of("j1")
    assert (end.started, end.is_caused_by_node, end.needed_disk_bytes) == (False, True, 8 * GIB)
    assert end.reason == (
        f"not started: the working directory needs {8 * GIB} bytes of free disk space, packed and unpacked; "
        f"{6 * GIB} are free"
    )


@pytest.mark.parametrize(("free_bytes", "needed_bytes"), [(90 * GIB, 0), (10_000, 16_000)])
async def test_full_disk_is_reported_with_the_needed_space_only_if_little_was_free(
    controller: FakeController,
    run_agent: RunAgent,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    needed_bytes: int,
) -> None:
    """Otherwise another job has filled it."""

    def full(*ignored: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("genie.agent.preparation._append_to_file", full)
    space = FakeFreeSpace()
    space.free_bytes = free_bytes
    async with run_agent(disk=DiskAccess(measure_space=space), disk_free_min_bytes=0):
        await controller.launch("j1", "true", workdir=controller.keep_blob(b"x" * 2000))
        end = await controller.end_of("j1")
    assert (end.is_caused_by_node, end.needed_disk_bytes) == (True, needed_bytes)


async def test_temporary_files_of_a_job_are_removed_when_it_ends(
    controller: FakeController, run_agent: RunAgent, node_dir: Path
) -> None:
    async with run_agent():
        await controller.launch("j1", "/bin/sh", "-c", "echo > $TMPDIR/x")
        await controller.end_of("j1")
        await until(lambda: {path.name for path in (node_dir / "jobs").iterdir()} == {"j1"})
        assert not (node_dir / "jobs" / "j1" / "tmp").exists()
        assert (node_dir / "jobs" / "j1" / "work").exists()


async def test_agent_waits_for_disk_space_to_store_its_incarnation(
    controller: FakeController, run_agent: RunAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "DISK_RETRY_INTERVAL_S", 0.05)
    real, attempts = Journal.begin_incarnation, 0

    def begin(journal: Journal) -> int:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise StoreFullError("no space")
        return real(journal)

    monkeypatch.setattr(Journal, "begin_incarnation", begin)
    async with run_agent():
        await controller.peer()
    assert attempts == 3


# --- a disk that is really full -----------------------------------------------------------------


@asynccontextmanager
async def process_on_small_disk(directory: Path) -> AsyncIterator[int]:
    """Mounts 4 MiB at the directory in another mount namespace; yields a process in it."""
    require_namespaces("mount")
    script = 'mount -t tmpfs -o size=4m tmpfs "$0" && echo ready && exec sleep 300'
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(directory)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        await process.communicate()


def fill_disk(directory: Path) -> None:
    with (directory / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


async def test_agent_restarts_on_a_full_disk(tmp_path: Path, controller: FakeController) -> None:
    nsenter = require_program("nsenter", package="util-linux")
    state = tmp_path / "small"
    state.mkdir()
    async with process_on_small_disk(state) as pid:
        inside = Path(f"/proc/{pid}/root{state}")
        make_joined_node_dir(inside, controller)

        async def run_until(condition: Callable[[], object], what: str) -> None:
            command = (sys.executable, "-m", "genie.agent", "--state-dir", str(state))
            env = os.environ | {"GENIE_AGENT_HEARTBEAT_S": "0.1", "GENIE_AGENT_COMPILE_AHEAD": "false"}
            agent = await asyncio.create_subprocess_exec(
                nsenter, f"--mount=/proc/{pid}/ns/mnt", *command, env=env
            )
            try:
                await until(condition, what=what)
            finally:
                agent.send_signal(signal.SIGTERM)
                await agent.wait()

        await run_until(lambda: controller.heartbeats, "a heartbeat")
        fill_disk(inside)
        assert disk_space(inside).free_bytes == 0
        await run_until(
            lambda: controller.heartbeats[-1].incarnation == 2 and controller.heartbeats[-1].node.closed,
            "the node is closed",
        )
        assert controller.heartbeats[-1].node.status is NodeStatus.DEGRADED
        await run_until(lambda: controller.heartbeats[-1].incarnation == 3, "a third incarnation")
        (inside / "filler").unlink()
        await run_until(
            lambda: controller.heartbeats[-1].incarnation == 4 and not controller.heartbeats[-1].node.closed,
            "the node is open",
        )
