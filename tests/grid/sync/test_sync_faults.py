"""Faults of a sync: lost connections, full disks, changing files, concurrent syncs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from genie.errors import NodeRefusedError, SyncError, UnreachableError
from genie.grid.grid_file import SshSettings
from genie.grid.remote import contents, tree
from genie.grid.remote.synced_tree import STATE_FILE_HEADER, STATE_FILE_MAGIC
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import NodeConnection, SshPool
from genie.grid.sync import local_tree, pack, stream, sync_without_python, syncer
from genie.grid.sync.local_tree import LocalTree, TreeSnapshot
from genie.grid.sync.syncer import Syncer, SyncProgress, tree_name_on_nodes
from tests.grid.sync.conftest import SyncedProject, make_sync_grid_file
from tests.grid.sync.trees import read_tree, write_files
from tests.grid.testbed import SshTestbed
from tests.waiting import until


def write_many_files(root: Path, *, count: int = 200, size: int = 60_000) -> int:
    dice = random.Random(5)
    write_files(root, {b"d%d/f%d" % (n % 7, n): dice.randbytes(size) for n in range(count)})
    return count * size


async def test_interrupted_first_sync_is_resumed(own_testbed: SshTestbed, tmp_path: Path) -> None:
    file = make_sync_grid_file(own_testbed, "ws")
    root, there = tmp_path / "project", own_testbed["gpu1"].home / "ws"
    total = write_many_files(root)
    seen: list[dict[bytes, object]] = []

    def cut_once(progress: SyncProgress) -> None:
        if not seen and progress.sent_bytes > total // 2:
            seen.append(dict(read_tree(there)))
            own_testbed["gpu1"].kill_connections()

    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        one = Syncer(pool, file, state_dir=tmp_path / "state")
        (report,) = await one.sync(root, ["gpu1"], progress=cut_once)
    assert report.error is None
    assert seen == [{}], "nothing is visible before all of it is there"
    assert 0 < report.sent_bytes < total - total // 8, "what had arrived is not sent again"
    assert read_tree(there) == read_tree(root)


async def test_hanging_node_fails_only_its_own_sync(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(syncer, "_TRANSFER_STALL_TIMEOUT_S", 3.0)
    monkeypatch.setattr(syncer, "_SYNC_ATTEMPTS", 1)
    file = make_sync_grid_file(own_testbed, "ws")
    root = tmp_path / "project"
    total = write_many_files(root, count=400)
    with contextlib.ExitStack() as until_then:

        def hang(progress: SyncProgress) -> None:
            if progress.sent_bytes > total // 4 and not hung:
                hung.append(until_then.enter_context(own_testbed["gpu2"].suspended()))

        hung: list[None] = []
        async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
            one, two = await Syncer(pool, file, state_dir=tmp_path / "state").sync(
                root, ["gpu1", "gpu2"], progress=hang
            )
            until_then.close()
    assert one.error is None
    assert two.error is not None and "stalled" in str(two.error)
    assert read_tree(own_testbed["gpu1"].home / "ws") == read_tree(root)


async def test_full_disk_is_reported_and_leaves_the_tree_unchanged(
    own_testbed: SshTestbed, tmp_path: Path
) -> None:
    own_testbed["gpu1"].restart(before="mount -t tmpfs -o size=1m tmpfs /root")
    file = make_sync_grid_file(own_testbed, "ws")
    root = tmp_path / "project"
    write_files(root, {b"a": b"first"})
    look = "cd /root/ws && find . -path ./.grid -prune -o -type f -print | sort | xargs md5sum"
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        one = Syncer(pool, file, state_dir=tmp_path / "state")
        assert (await one.sync(root, ["gpu1"]))[0].error is None
        before = own_testbed["gpu1"].run(look)
        write_files(root, {b"a": b"second", b"b": os.urandom(300_000)})
        write_many_files(root, count=40)
        (report,) = await one.sync(root, ["gpu1"])
        assert isinstance(report.error, SyncError) and "disk of the node is full" in str(report.error)
        assert own_testbed["gpu1"].run(look) == before
        assert own_testbed["gpu1"].run("ls /root/ws/.grid/sync/*/objects-*") == "", "the space was given back"
        for path in root.rglob("*"):
            if path.is_file() and path.name != "a":
                path.unlink()
        (report,) = await one.sync(root, ["gpu1"])
        assert report.error is None
    assert own_testbed["gpu1"].run("cat /root/ws/a") == "second"


@pytest.mark.parametrize("fits", [True, False])
async def test_full_disk_leaves_no_partial_library(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch, fits: bool
) -> None:
    key, binary, source = local_tree.read_engine_library()
    assert min(len(binary), len(source)) > 20_000
    monkeypatch.setattr(syncer, "read_engine_library", lambda: (key, binary if fits else b"", source))
    own_testbed["gpu1"].restart(before="mount -t tmpfs -o size=16k tmpfs /root")
    write_files(tmp_path / "project", {b"a": b"1"})
    file = make_sync_grid_file(own_testbed, "ws")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        one = Syncer(pool, file, state_dir=tmp_path / "state")
        (report,) = await one.sync(tmp_path / "project", ["gpu1"])
    assert isinstance(report.error, SyncError) and "disk of the node is full" in str(report.error)
    assert own_testbed["gpu1"].run("find /root/ws/.grid/sync -type f") == ""


async def test_leftovers_of_killed_library_builds_are_removed_after_an_hour(project: SyncedProject) -> None:
    write_files(project.root, {b"a": b"1"})
    await project.sync()
    folder = project.there / ".grid/sync"
    endings = [".so.12-34.part", "-12-34.cpp", "-12-34.cpp.part"]
    old, fresh = ([f"tree-{letter * 32}{end}" for end in endings] for letter in "ab")
    others = ["tree-notes.part", "tree-aa.so"]
    for name in (*old, *fresh, *others):
        (folder / name).write_bytes(b"half")
    for name in (*old, *others):
        os.utime(folder / name, (time.time() - 3700,) * 2)
    await project.sync()
    left = {path.name for path in folder.iterdir()}
    assert left.isdisjoint(old) and left.issuperset([*fresh, *others])


async def test_unwritable_home_is_reported(own_testbed: SshTestbed, tmp_path: Path) -> None:
    own_testbed["gpu1"].restart(before="mount -o remount,bind,ro /root")
    write_files(tmp_path / "project", {b"a": b"1"})
    file = make_sync_grid_file(own_testbed, "ws")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        one = Syncer(pool, file, state_dir=tmp_path / "state")
        (report,) = await one.sync(tmp_path / "project", ["gpu1"])
    assert isinstance(report.error, SyncError) and "read-only" in str(report.error)


async def test_file_that_changes_during_reading_is_read_again(project: SyncedProject, monkeypatch) -> None:
    write_files(project.root, {b"log": b"x" * 400_000})
    left = [1]
    _let_file_grow_while_read(project.root / "log", left, monkeypatch)
    await project.sync()
    assert left == [0]
    assert (project.there / "log").read_bytes() == b"x" * 400_000 + b"more"


async def test_sparse_file_that_changes_before_sending_is_read_again(
    project: SyncedProject, monkeypatch
) -> None:
    with (project.root / "log").open("wb") as file:
        file.truncate(400_000)
    monkeypatch.setattr(syncer, "_SYNC_ATTEMPTS", 1)
    left = [1]
    _let_file_grow_while_read(project.root / "log", left, monkeypatch)
    await project.sync()
    assert left == [0]
    assert (project.there / "log").read_bytes() == bytes(400_000) + b"more"


async def test_error_names_a_file_that_keeps_changing(project: SyncedProject, monkeypatch) -> None:
    write_files(project.root, {b"a": b"1", b"log": b"x" * 400_000})
    _let_file_grow_while_read(project.root / "log", [100], monkeypatch)
    with pytest.raises(SyncError, match="project/log kept changing while it was read"):
        await project.sync()
    assert read_tree(project.there) == {}


def _let_file_grow_while_read(path: Path, left: list[int], monkeypatch) -> None:
    extents = contents.list_extents

    def growing(fd: int, found: os.stat_result):
        yield from extents(fd, found)
        if left[0]:
            left[0] -= 1
            with path.open("ab") as file:
                file.write(b"more")

    monkeypatch.setattr(contents, "list_extents", growing)


async def test_file_that_changes_after_the_comparison_is_sent_as_it_is(
    project: SyncedProject, monkeypatch
) -> None:
    write_files(project.root, {b"a": b"1", b"b": b"1"})
    await project.sync()
    hash_files = syncer.hash_files

    def late(*args: object) -> None:
        hash_files(*args)  # type: ignore[arg-type]
        write_files(project.root, {b"a": b"latest"})

    monkeypatch.setattr(syncer, "hash_files", late)
    write_files(project.root, {b"a": b"2", b"b": b"3"})
    await project.sync()
    assert read_tree(project.there) == read_tree(project.root)
    assert (project.there / "a").read_bytes() == b"latest"


async def test_file_that_disappears_during_sending_is_not_an_error(
    project: SyncedProject, monkeypatch
) -> None:
    write_files(project.root, {b"a": b"1", b"gone": b"2"})
    scan = LocalTree.scan

    def losing(self: LocalTree) -> TreeSnapshot:
        found = scan(self)
        (project.root / "gone").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(LocalTree, "scan", losing)
    await project.sync()
    assert set(read_tree(project.there)) == {b"a"}


@pytest.mark.parametrize("where", ["gone", "folder"])
async def test_file_that_becomes_a_link_during_sending_is_not_an_error(
    project: SyncedProject, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    write_files(project.root, {b"a": b"1", b"gone": b"2", b"folder/b": b"3"})
    scan = LocalTree.scan

    def changing(self: LocalTree) -> TreeSnapshot:
        found = scan(self)
        path = project.root / where
        if not path.is_symlink():
            path.rename(project.root.parent / "elsewhere")
            path.symlink_to("/nowhere")
        return found

    monkeypatch.setattr(LocalTree, "scan", changing)
    await project.sync()
    assert read_tree(project.there) == read_tree(project.root)
    assert (project.there / where).is_symlink()


async def test_error_names_an_unreadable_file(project: SyncedProject, monkeypatch) -> None:
    write_files(project.root, {b"a": b"1"})

    def refused(*_: object) -> int:
        raise SyncError("project/a cannot be read: Permission denied")

    monkeypatch.setattr(pack._FilePacker, "_open_file", refused)
    monkeypatch.setattr(pack.tree.PlainEngine, "read_small_files", lambda *_, **__: (bytearray(), [1]))
    project._syncer._engine = pack.tree.PlainEngine()
    with pytest.raises(SyncError, match="cannot be read"):
        await project.sync()


async def test_concurrent_syncs_of_one_tree_succeed(project: SyncedProject) -> None:
    total = write_many_files(project.root, count=100)
    one, two = await asyncio.gather(project.sync(), project.sync())
    assert one.sent_bytes + two.sent_bytes >= total
    assert read_tree(project.there) == read_tree(project.root)
    assert (await project.sync()).unchanged


async def test_sync_times_out_waiting_for_another_one(project: SyncedProject, monkeypatch) -> None:
    write_files(project.root, {b"a": b"1"})
    await project.sync()
    monkeypatch.setattr(syncer, "_TREE_LOCK_WAIT_S", 0.1)
    with (project.there / ".grid/sync" / tree_name_on_nodes(project.root) / "lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SyncError, match="another sync of this tree is in progress"):
            await project.sync()
    assert (await project.sync()).unchanged


async def test_damaged_node_state_only_causes_a_full_sync(project: SyncedProject) -> None:
    write_files(project.root, {b"a": b"1", b"b": b"2"})
    await project.sync()
    state = project.there / ".grid/sync" / tree_name_on_nodes(project.root) / "state"
    for broken in (b"", STATE_FILE_MAGIC, state.read_bytes()[:-5], os.urandom(500)):
        state.write_bytes(broken)
        assert (await project.sync()).sent_files == 2
        assert read_tree(project.there) == read_tree(project.root)


async def test_damaged_local_index_only_causes_a_full_read(project: SyncedProject) -> None:
    write_files(project.root, {b"a": b"1", b"b": b"2"})
    await project.sync()
    (index,) = (project.root.parent / "state/grid/sync").glob("*.index")
    for broken in (b"", os.urandom(300), index.read_bytes()[:-3]):
        index.write_bytes(broken)
        assert (await project.sync()).unchanged


@pytest.mark.parametrize("touched", [False, True])
async def test_large_files_of_an_older_state_format_are_sent_again(
    project: SyncedProject, touched: bool
) -> None:
    """The old format hashed them by plain SHA-256. Its records of other files are still valid."""
    large = random.Random(4).randbytes(contents.BLOCK_DIGEST_FILE_BYTES_MIN)
    write_files(project.root, {b"a": b"1", b"gone": b"2", b"large": large})
    await project.sync()
    (index,) = (project.root.parent / "state/grid/sync").glob("*.index")
    for path in (index, project.there / ".grid/sync" / tree_name_on_nodes(project.root) / "state"):
        path.write_bytes(
            _convert_to_first_format(path.read_bytes(), {b"large": hashlib.sha256(large).digest()})
        )
    if touched:
        times = (10**18, (project.root / "large").stat().st_mtime_ns)
        os.utime(project.there / "large", ns=times)
    (project.root / "gone").unlink()
    report = await project.sync()
    assert (report.sent_files, report.deleted, report.overwritten) == (int(not touched), 1, ())
    assert read_tree(project.there) == read_tree(project.root)
    assert index.read_bytes().startswith(STATE_FILE_MAGIC)
    assert (await project.sync()).unchanged


def _convert_to_first_format(data: bytes, shas: dict[bytes, bytes]) -> bytes:
    """Rewrites a state or an index to the first format, taken long after the last write."""
    _, taken_ns, _, rules = STATE_FILE_HEADER.unpack_from(data)
    records = bytearray(data[STATE_FILE_HEADER.size :])
    for one in tree.iter_records(bytes(records)):
        if one.path in shas:
            records[one.at + 24 : one.at + 56] = shas[one.path]
    digest = hashlib.sha256(tree.PlainEngine().strip_stamps_and_excluded(bytes(records))).digest()
    return STATE_FILE_HEADER.pack(b"GGTREE1\n", taken_ns + 10**10, digest, rules) + bytes(records)


async def test_incompatible_library_is_compiled_on_the_node(project: SyncedProject, monkeypatch) -> None:
    key, _, source = local_tree.read_engine_library()
    monkeypatch.setattr(syncer, "read_engine_library", lambda: (key, b"no library", source))
    write_files(project.root, {b"a": b"1"})
    await project.sync()
    made = project.there / ".grid/sync" / f"tree-{key}.so"
    await until(made.exists, timeout_s=60, what="the library")
    write_files(project.root, {b"a": b"2"})
    await project.sync()
    assert read_tree(project.there) == read_tree(project.root)


async def test_node_without_python_gets_everything_by_tar(testbed: SshTestbed, tmp_path: Path) -> None:
    node = testbed["gpu6"]
    root, there = tmp_path / "project", node.home / "ws tar"
    write_files(root, {b"a b": b"1", b"d/-x\n": b"2" * 2000, b"n" * 200 + b"/" + b"m" * 200: b"3"})
    (root / "link").symlink_to("/etc/passwd")
    (root / "a b").chmod(0o755)
    file = make_sync_grid_file(testbed, "ws tar")
    (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (node.bin / "python3").chmod(0o755)
    try:
        async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
            one = Syncer(pool, file, state_dir=tmp_path / "state")
            (report,) = await one.sync(root, ["gpu6"])
            assert report.error is None and "no Python on the node" in report.note
            assert (report.sent_files, report.sent_bytes) == (3, 2002)
            assert read_tree(there) == read_tree(root)
            outside = node.home / "outside"
            outside.mkdir()
            (there / "d/-x\n").unlink()
            (there / "d").rmdir()
            (there / "d").symlink_to(outside)
            (report,) = await one.sync(root, ["gpu6"])
            assert isinstance(report.error, SyncError) and "not a folder on the node" in str(report.error)
            assert list(outside.iterdir()) == []
    finally:
        (node.bin / "python3").unlink()


@pytest.mark.parametrize("has_python", [True, False])
async def test_link_out_of_the_home_is_rejected_by_runs_and_sync_alike(
    own_testbed: SshTestbed, tmp_path: Path, has_python: bool
) -> None:
    node, root, outside = own_testbed["gpu1"], tmp_path / "project", tmp_path / "outside"
    write_files(root, {b"a": b"1"})
    outside.mkdir()
    (node.home / "ws").mkdir()
    (node.home / "ws" / ".grid").symlink_to(outside)
    if not has_python:
        (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
        (node.bin / "python3").chmod(0o755)
    file = make_sync_grid_file(own_testbed, "ws")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        with pytest.raises(NodeRefusedError, match="is a link out of the home directory") as refused:
            await Runner(pool, file).start("gpu1", "true")
        (report,) = await Syncer(pool, file, state_dir=tmp_path / "state").sync(root, ["gpu1"])
    assert type(report.error) is NodeRefusedError
    assert (str(report.error), report.error.reason) == (str(refused.value), "link")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("has_python", [True, False])
@pytest.mark.parametrize("leads", [".grid", "missing"])
async def test_dangling_link_is_reported_as_such(
    own_testbed: SshTestbed, has_python: bool, leads: str
) -> None:
    node = own_testbed["gpu1"]
    (node.home / "ws").mkdir()
    (node.home / "ws" / ".grid").symlink_to(leads)
    if not has_python:
        (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
        (node.bin / "python3").chmod(0o755)
    file = make_sync_grid_file(own_testbed, "ws")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        with pytest.raises(NodeRefusedError, match=r"ws/\.grid is a link to a missing directory; remove it"):
            await Runner(pool, file).start("gpu1", "true")


async def test_slow_connection_to_a_node_without_python_is_not_a_stall(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_APPLY_S` does not limit sending."""
    node, root = own_testbed["gpu1"], tmp_path / "project"
    write_files(root, {str(number).encode(): b"1" for number in range(12)})
    (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (node.bin / "python3").chmod(0o755)
    archive = sync_without_python._make_tar_stream

    def slow(*args: Any) -> Iterator[bytes]:
        for piece in archive(*args):
            time.sleep(0.1)
            yield piece

    monkeypatch.setattr(sync_without_python, "_make_tar_stream", slow)
    monkeypatch.setattr(syncer, "_APPLY_CHANGE_TIMEOUT_S", 3.0)  # less than sending takes
    file = make_sync_grid_file(own_testbed, "ws")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        (report,) = await Syncer(pool, file, state_dir=tmp_path / "state").sync(root, ["gpu1"])
    assert (report.error, report.sent_files) == (None, 12)


async def test_hanging_node_does_not_delay_others(own_testbed: SshTestbed, tmp_path: Path) -> None:
    """It hangs longer than the test may take, and goes down when the other node is synced."""
    file = dataclasses.replace(
        make_sync_grid_file(own_testbed, "ws"), ssh=SshSettings(connect_timeout=600, max_retries=0)
    )
    write_files(tmp_path / "project", {b"a": b"1"})
    sent: list[str] = []

    def end_other(progress: SyncProgress) -> None:
        if not sent:
            own_testbed["gpu2"].stop()
        sent.append(progress.node)

    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        with own_testbed["gpu2"].suspended():
            good, bad = await Syncer(pool, file, state_dir=tmp_path / "state").sync(
                tmp_path / "project", ["gpu1", "gpu2"], progress=end_other
            )
    assert good.error is None and isinstance(bad.error, UnreachableError)
    assert set(sent) == {"gpu1"}


async def test_small_pool_syncs_nodes_one_after_the_other(own_testbed: SshTestbed, tmp_path: Path) -> None:
    file = dataclasses.replace(
        make_sync_grid_file(own_testbed, "ws"), ssh=SshSettings(pool_size=1, max_retries=0)
    )
    write_files(tmp_path / "project", {b"a": b"1"})
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        reports = await Syncer(pool, file, state_dir=tmp_path / "s").sync(
            tmp_path / "project", ["gpu1", "gpu2"]
        )
    assert [report.error for report in reports] == [None, None]


class ConnectionCountingPool(SshPool):
    """Records the maximum number of nodes in use at the same time."""

    now = most = 0

    @contextlib.asynccontextmanager
    async def connect(self, name: str, **how: Any) -> AsyncIterator[NodeConnection]:
        async with super().connect(name, **how) as link:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                yield link
            finally:
                self.now -= 1


async def test_max_parallel_transfers_limits_nodes(testbed: SshTestbed, tmp_path: Path) -> None:
    file = make_sync_grid_file(testbed, "ws-few", "sync: {max_parallel_transfers: 2}\n")
    write_files(tmp_path / "project", {b"a": b"1"})
    async with ConnectionCountingPool(file, ssh_config=testbed.ssh_config) as pool:
        names = [node.name for node in testbed.nodes[1:7]]
        reports = await Syncer(pool, file, state_dir=tmp_path / "state").sync(tmp_path / "project", names)
    assert ([report.error for report in reports], pool.most) == ([None] * 6, 2)


async def test_hanging_node_occupies_one_slot(testbed: SshTestbed, tmp_path: Path) -> None:
    file = make_sync_grid_file(testbed, "ws-places", "sync: {max_parallel_transfers: 2}\n")
    file = dataclasses.replace(file, ssh=SshSettings(connect_timeout=120, max_retries=0))
    write_files(tmp_path / "project", {b"a": b"1"})
    names = ["gpu2", "gpu3", "gpu4", "gpu5"]
    sent: set[str] = set()
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
        syncing = Syncer(pool, file, state_dir=tmp_path / "state").sync(
            tmp_path / "project", names, progress=lambda one: sent.add(one.node)
        )
        with testbed["gpu2"].suspended():
            task = asyncio.ensure_future(syncing)
            await until(lambda: sent == {"gpu3", "gpu4", "gpu5"}, what="the nodes behind the one that hangs")
        reports = await task
    assert [(report.node, report.error) for report in reports] == [(name, None) for name in names]


def test_receiver_with_a_truncated_program_exits() -> None:
    done = subprocess.run(
        ["sh", "-c", stream._BOOT_COMMAND], input=b"100\nhalf", capture_output=True, timeout=10
    )
    assert (done.returncode, done.stdout) == (1, b"")
