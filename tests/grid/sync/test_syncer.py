"""Sync to real nodes: what is sent, deleted, kept, and never touched."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genie.errors import NoNodeError, SyncError, UsageError
from genie.grid.remote import tree
from genie.grid.ssh.pool import SshPool
from genie.grid.sync.syncer import Syncer, SyncProgress
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.remote.test_tree import ENTRIES, create_entries
from tests.grid.sync.conftest import SyncedProject, make_sync_grid_file
from tests.grid.sync.trees import read_tree, write_files
from tests.grid.testbed import SshTestbed


async def test_first_sync_sends_everything_and_the_second_nothing(project: SyncedProject) -> None:
    write_files(
        project.root,
        {b"a.py": b"1", b"pkg/b.py": b"2" * 5000, b"pkg/__init__.py": b"", b"c/__init__.py": b""},
    )
    (project.root / "run.sh").write_text("#!/bin/sh\n")
    (project.root / "run.sh").chmod(0o755)
    (project.root / "empty").mkdir(mode=0o750)
    (project.root / "link").symlink_to("pkg/b.py")
    report = await project.sync()
    assert (report.sent_files, report.sent_bytes, report.unchanged) == (5, 5011, False)
    assert read_tree(project.there) == read_tree(project.root)
    assert (project.there / "a.py").stat().st_mtime_ns == (project.root / "a.py").stat().st_mtime_ns
    again = await project.sync()
    assert (again.unchanged, again.sent_files, again.sent_bytes) == (True, 0, 0)


async def test_only_changes_are_sent(project: SyncedProject) -> None:
    write_files(project.root, {b"f%d" % n: b"x%d" % n for n in range(50)})
    await project.sync()
    write_files(project.root, {b"f7": b"new", b"g/h": b"added"})
    (project.root / "f9").unlink()
    (project.root / "f3").chmod(0o600)
    report = await project.sync()
    assert (report.sent_files, report.sent_bytes, report.deleted) == (2, 8, 1)
    assert read_tree(project.there) == read_tree(project.root)


async def test_touched_file_is_not_sent_again(project: SyncedProject) -> None:
    write_files(project.root, {b"a": b"1"})
    await project.sync()
    os.utime(project.root / "a", ns=(10**18, 10**18))
    report = await project.sync()
    assert (report.sent_files, report.unchanged) == (0, False)
    assert (project.there / "a").stat().st_mtime_ns == 10**18
    assert (await project.sync()).unchanged


async def test_touched_file_is_sent_again_without_checksums(testbed: SshTestbed, tmp_path: Path) -> None:
    file = make_sync_grid_file(testbed, "ws-nosums", "sync: {use_checksums: false}\n")
    root = tmp_path / "project"
    write_files(root, {b"a": b"1"})
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=tmp_path / "state")
        await syncer.sync(root, ["gpu1"])
        os.utime(root / "a", ns=(10**18, 10**18))
        (report,) = await syncer.sync(root, ["gpu1"])
    assert report.sent_files == 1


async def test_files_created_on_the_node_stay(project: SyncedProject) -> None:
    write_files(project.root, {b"src/a.py": b"1", b"src/b.py": b"2", b"old/c.py": b"3"})
    await project.sync()
    write_files(
        project.there, {b"src/results.csv": b"mine", b"old/mine.txt": b"mine", b"grid_env/bin/x": b"env"}
    )
    (project.root / "old" / "c.py").unlink()
    (project.root / "old").rmdir()
    report = await project.sync()
    assert report.deleted == 1
    assert (project.there / "src/results.csv").read_bytes() == b"mine"
    assert (project.there / "old/mine.txt").read_bytes() == b"mine"
    assert (project.there / "grid_env/bin/x").read_bytes() == b"env"
    assert not (project.there / "old/c.py").exists()


async def test_file_deleted_on_both_sides_is_not_reported_as_kept(project: SyncedProject) -> None:
    write_files(project.root, {b"a": b"ours", b"old/b": b"ours", b"old/c": b"ours"})
    await project.sync()
    for root in (project.root, project.there):
        shutil.rmtree(root / "old")
    report = await project.sync()
    assert (report.kept, report.deleted) == ((), 0)
    assert (await project.sync()).unchanged


async def test_file_modified_on_the_node_is_restored_or_kept_if_deleted_locally(
    project: SyncedProject,
) -> None:
    write_files(project.root, {b"a": b"ours", b"b": b"ours", b"c": b"ours"})
    await project.sync()
    write_files(project.there, {b"a": b"edit", b"b": b"edited there"})
    (project.there / "c").unlink()
    (project.root / "b").unlink()
    report = await project.sync()
    assert (report.restored, report.kept, report.deleted) == (2, ("b",), 0)
    assert (project.there / "a").read_bytes() == b"ours"
    assert (project.there / "b").read_bytes() == b"edited there"
    assert (project.there / "c").read_bytes() == b"ours"
    assert (await project.sync()).unchanged


@pytest.mark.parametrize("more", [{}, {b"b": b"changed"}])
async def test_file_changed_on_the_node_to_the_local_contents_is_not_sent(
    project: SyncedProject, more: dict[bytes, bytes]
) -> None:
    write_files(project.root, {b"a": b"1", b"b": b"2", b"d/c": b"3"})
    await project.sync()
    for root in (project.root, project.there):
        write_files(root, {b"a": b"9"})
        os.utime(root / "a", ns=(10**18, 10**18))
        (root / "d/c").chmod(0o600)
        (root / "d").chmod(0o700)
    write_files(project.root, more)
    report = await project.sync()
    assert (report.sent_files, report.restored) == (len(more), 0)
    assert (await project.sync()).unchanged
    (project.root / "a").unlink()
    assert (await project.sync()).deleted == 1, "it is ours, and as we know it"
    assert read_tree(project.there) == read_tree(project.root)


async def test_conflicting_file_of_the_node_is_replaced_and_named(project: SyncedProject) -> None:
    write_files(project.there, {b"a": b"theirs"})
    write_files(project.root, {b"a": b"ours"})
    report = await project.sync()
    assert report.overwritten == ("a",)
    assert (project.there / "a").read_bytes() == b"ours"


async def test_files_folders_and_links_can_replace_each_other(project: SyncedProject) -> None:
    write_files(project.root, {b"a": b"file", b"b/c/d": b"in a folder", b"e": b"file"})
    await project.sync()
    for name in ("a", "e", "b/c/d"):
        (project.root / name).unlink()
    (project.root / "b/c").rmdir()
    (project.root / "b").rmdir()
    write_files(project.root, {b"a/x/y": b"now a folder", b"b": b"now a file"})
    (project.root / "e").symlink_to("a")
    await project.sync()
    assert read_tree(project.there) == read_tree(project.root)


async def test_folder_with_files_of_the_node_is_not_replaced_by_a_file(project: SyncedProject) -> None:
    write_files(project.root, {b"b/c": b"1", b"d": b"2"})
    await project.sync()
    write_files(project.there, {b"b/mine": b"mine"})
    (project.root / "b/c").unlink()
    (project.root / "b").rmdir()
    write_files(project.root, {b"b": b"now a file", b"d": b"changed"})
    before = read_tree(project.there)
    with pytest.raises(SyncError, match=r"b would become a file, but contains b/mine"):
        await project.sync()
    assert read_tree(project.there) == before
    (project.there / "b/mine").unlink()
    await project.sync()
    assert read_tree(project.there) == read_tree(project.root)


async def test_excluded_files_are_neither_sent_nor_deleted(project: SyncedProject) -> None:
    write_files(
        project.root, {b"a.py": b"1", b".env": b"secret", b"x.log": b"log", b".gitignore": b"*.log\n"}
    )
    write_files(project.root, {b".grid/x": b"not ours", b"grid_env/y": b"not ours"})
    await project.sync()
    assert set(read_tree(project.there, without=())) - {b".grid"} >= {b"a.py", b".gitignore"}
    assert set(read_tree(project.there)) == {b"a.py", b".gitignore"}
    assert not (project.there / ".grid/x").exists()
    assert not (project.there / "grid_env").exists()
    write_files(project.root, {b".gitignore": b"*.py\n"})
    await project.sync()
    assert set(read_tree(project.there)) == {b"x.log", b".gitignore"}


async def test_hostile_names_arrive_unchanged(project: SyncedProject) -> None:
    names = [
        b"-rf",
        b"--delete",
        b"new\nline",
        b"\xff\xfe",
        b"n" * 255,
        b" ",
        b"a'b\"c$(touch x)`",
        b"CASE",
        b"case",
    ]
    write_files(project.root, {name: name for name in names})
    write_files(project.root, {b"-d/" + name: b"deep" for name in names})
    await project.sync()
    assert read_tree(project.there) == read_tree(project.root)
    for name in names:
        (project.root / os.fsdecode(name)).unlink()
    assert (await project.sync()).deleted == len(names)
    assert read_tree(project.there) == read_tree(project.root)


async def test_link_out_of_the_tree_is_sent_and_not_followed(project: SyncedProject) -> None:
    outside = project.root.parent / "outside"
    write_files(outside, {b"secret": b"secret"})
    write_files(project.root, {b"a": b"1"})
    (project.root / "out").symlink_to(outside)
    (project.root / "etc").symlink_to("/etc/passwd")
    await project.sync()
    assert (project.there / "out").readlink() == outside
    assert (project.there / "etc").readlink() == Path("/etc/passwd")
    assert (await project.sync()).unchanged


async def test_links_within_the_tree_can_be_followed(testbed: SshTestbed, tmp_path: Path) -> None:
    file = make_sync_grid_file(testbed, "ws-follow", "sync: {follow_symlinks: true}\n")
    root = tmp_path / "project"
    write_files(root, {b"real/a": b"1"})
    write_files(tmp_path / "outside", {b"secret": b"secret"})
    (root / "alias").symlink_to("real")
    (root / "file").symlink_to("real/a")
    (root / "out").symlink_to("../outside")
    (root / "real" / "loop").symlink_to("..")
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
        (report,) = await Syncer(pool, file, state_dir=tmp_path / "state").sync(root, ["gpu1"])
    assert report.error is None
    there = testbed["gpu1"].home / "ws-follow"
    assert (there / "alias/a").read_bytes() == b"1" and not (there / "alias").is_symlink()
    assert not (there / "file").is_symlink()
    assert (there / "out").readlink() == Path("../outside")
    assert (there / "real/loop").is_symlink()


async def test_link_planted_on_the_node_is_not_followed(testbed: SshTestbed, project: SyncedProject) -> None:
    write_files(project.root, {b"data/a": b"1", b"b": b"2"})
    await project.sync()
    outside = testbed["gpu1"].home / "outside"
    write_files(outside, {b"a": b"precious"})
    (project.there / "data/a").unlink()
    (project.there / "data").rmdir()
    (project.there / "data").symlink_to(outside)
    (project.there / "b").unlink()
    (project.there / "b").symlink_to(outside / "a")
    write_files(project.root, {b"data/a": b"new", b"data/c": b"new", b"b": b"new"})
    await project.sync()
    assert read_tree(outside, without=()) == {b"a": ("f", 0o644, b"precious")}
    assert read_tree(project.there) == read_tree(project.root)


async def test_error_names_a_conflicting_link_of_the_node(
    testbed: SshTestbed, project: SyncedProject
) -> None:
    outside = testbed["gpu1"].home / "disk"
    outside.mkdir()
    write_files(project.there, {b"mine": b"1"})
    (project.there / "data").symlink_to(outside)
    write_files(project.root, {b"data/a": b"1", b"b": b"2"})
    with pytest.raises(SyncError, match=r"data is a link on the node.*exclude_patterns"):
        await project.sync()
    assert list(outside.iterdir()) == []
    assert set(read_tree(project.there)) == {b"mine", b"data"}


async def test_large_file_is_sent_in_pieces_and_stays_sparse(project: SyncedProject) -> None:
    (project.root / "large").write_bytes(random.Random(1).randbytes(3_500_001))
    with (project.root / "sparse").open("wb") as file:
        file.seek(50_000_000)
        file.write(b"end")
        file.truncate(60_000_000)
    report = await project.sync()
    assert report.sent_bytes < 5_000_000
    assert (project.there / "large").read_bytes() == (project.root / "large").read_bytes()
    status = (project.there / "sparse").stat()
    assert status.st_size == 60_000_000 and status.st_blocks * 512 < 1_000_000
    with (project.there / "sparse").open("rb") as there:
        there.seek(49_999_990)
        assert there.read(20) == bytes(10) + b"end" + bytes(7)


async def test_duplicate_contents_are_sent_once(project: SyncedProject) -> None:
    data = random.Random(2).randbytes(300_000)
    write_files(project.root, {b"copy%d" % n: data for n in range(4)})
    write_files(project.root, {b"small%d" % n: b"same" for n in range(4)})
    report = await project.sync()
    assert report.sent_bytes == len(data) + 4
    assert read_tree(project.there) == read_tree(project.root)


async def test_failing_node_does_not_delay_others(own_testbed: SshTestbed, tmp_path: Path) -> None:
    file = make_sync_grid_file(own_testbed, "ws", "sync: {max_parallel_transfers: 2}\n")
    root = tmp_path / "project"
    write_files(root, {b"f%d" % n: os.urandom(9000) for n in range(300)})
    seen: list[SyncProgress] = []
    own_testbed["gpu2"].stop()
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=tmp_path / "state")
        one, two = await syncer.sync(root, ["gpu1", "gpu2"], progress=seen.append)
        assert one.error is None and two.error is not None and two.error.exit_code == 255
        own_testbed["gpu2"].restart()
        one, two = await syncer.sync(root, ["gpu1", "gpu2"])
        assert (one.unchanged, two.sent_files) == (True, 300)
    assert read_tree(own_testbed["gpu2"].home / "ws") == read_tree(root)
    assert (seen[-1].node, seen[-1].sent_files, seen[-1].sent_bytes) == ("gpu1", 300, seen[-1].bytes_total)


async def test_pool_smaller_than_the_transfer_limit_works(own_testbed: SshTestbed, tmp_path: Path) -> None:
    file = make_testbed_grid_file(
        own_testbed, more="ssh: {connect_timeout: 20, max_retries: 0, pool_size: 1}\n"
    )
    write_files(tmp_path / "project", {b"a": b"1"})
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        syncer = Syncer(pool, file, state_dir=tmp_path / "state")
        reports = await syncer.sync(tmp_path / "project", ["gpu1", "gpu2"])
    assert [report.error for report in reports] == [None, None]


async def test_second_machine_with_the_same_project_sends_nothing(
    testbed: SshTestbed, project: SyncedProject
) -> None:
    write_files(project.root, {b"a": b"1", b"b/c": b"2"})
    await project.sync()
    file = make_sync_grid_file(testbed, project.there.name)
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
        (report,) = await Syncer(pool, file, state_dir=project.root.parent / "other").sync(
            project.root, ["gpu1"]
        )
    assert report.unchanged


async def test_dry_run_reports_files_and_changes_nothing(project: SyncedProject) -> None:
    write_files(project.root, {b"a": b"1"})
    await project.sync()
    write_files(project.root, {b"a": b"22", b"b": b"3"})
    before = read_tree(project.there)
    report = await project.sync(dry_run=True)
    assert (report.sent_files, report.sent_bytes, report.paths) == (2, 3, ("a", "b"))
    assert read_tree(project.there) == before


async def test_dry_run_names_links_deletions_and_kept_files(project: SyncedProject) -> None:
    write_files(project.root, {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"})
    await project.sync()
    for name in ("b", "c", "d"):
        (project.root / name).unlink()
    (project.root / "link").symlink_to("a")
    (project.there / "c").write_text("changed there")
    (project.there / "d").unlink()
    report = await project.sync(dry_run=True)
    assert (report.paths, report.paths_to_delete, report.kept, report.deleted) == (
        ("link",),
        ("b",),
        ("c",),
        1,
    )
    done = await project.sync()
    assert (done.kept, done.deleted) == (("c",), 1)


async def test_missing_folder_and_unknown_node_are_rejected(project: SyncedProject) -> None:
    write_files(project.root, {b"a": b"1"})
    with pytest.raises(UsageError, match="not a folder"):
        await project._syncer.sync(project.root / "a", ["gpu1"])
    with pytest.raises(NoNodeError):
        await project._syncer.sync(project.root, ["gpu77"])


async def test_metrics_count_every_sync(testbed: SshTestbed, tmp_path: Path) -> None:
    class MetricsRecorder(list[float]):
        def record_sync(self, duration_s: float) -> None:
            self.append(duration_s)

    metrics = MetricsRecorder()
    write_files(tmp_path / "project", {b"a": b"1"})
    file = make_sync_grid_file(testbed, "ws-metrics")
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
        await Syncer(pool, file, state_dir=tmp_path, metrics=metrics).sync(
            tmp_path / "project", ["gpu1", "gpu2"]
        )
    assert len(metrics) == 2


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states=st.lists(ENTRIES, min_size=2, max_size=3), plain=st.booleans())
async def test_trees_are_equal_after_random_edits(project: SyncedProject, states, plain) -> None:
    if plain:
        project._syncer._engine = tree.PlainEngine()
    mine = {b"node-made": ("f", 0o644, b"mine")}
    write_files(project.there, {b"node-made": b"mine"})
    for entries in states:
        create_entries(
            project.root, {path: each for path, each in entries.items() if b".gitignore" not in path}
        )
        await project.sync()
        assert read_tree(project.there) == {**read_tree(project.root), **mine}
