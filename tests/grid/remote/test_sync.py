"""Changes on a node: killed at any step, and finished by the next request."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from genie.grid.remote import sync, tree
from genie.grid.remote.core import OpError
from genie.grid.remote.synced_tree import SyncedTree
from tests.forkserver import ForkServer
from tests.grid.sync.trees import read_tree, write_files

ENGINE = tree.PlainEngine()
# Exits like a crashed machine at the Nth change of the file system.
DYING = """
import os, sys
from genie.grid.remote import sync
left = int(sys.argv[3])
def dying(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return function(*args, **kwargs)
    return call
for name in ("rename", "unlink", "mkdir", "rmdir", "symlink", "chmod"):
    setattr(os, name, dying(getattr(os, name)))
sync.receive_and_apply_change({"root": sys.argv[1], "tree": "t", "wait_s": 5}, open(sys.argv[2], "rb").read())
"""


def make_sync_args(root: Path) -> dict[str, object]:
    return {"root": str(root), "tree": "t", "key": "0" * 32, "wait_s": 5}


def make_records(folder: Path) -> bytes:
    """Return records with digests and without stamps, as they are sent."""
    walked = ENGINE.walk(str(folder), b"", taken_ns=0, reuse=False, is_excluded=lambda *_: False)
    parts = []
    for one in tree.iter_records(walked.records):
        plain = bytearray(one.without_stamp)
        if one.kind == tree.FILE:
            plain[24:56] = hashlib.sha256((folder / os.fsdecode(one.path)).read_bytes()).digest()
        parts.append(bytes(plain) + tree.NO_STAMP)
    return b"".join(parts)


def make_change_frames(before: bytes, folder: Path) -> bytes:
    """Return the frames that update a node from these records to the contents of a directory."""
    from genie.grid.sync.delta import compute_delta, encode_plan
    from genie.grid.sync.pack import make_plan_frames

    after = make_records(folder)
    delta = compute_delta(ENGINE, theirs=before, drift=b"", ours=after)
    frames = []
    for place in delta.content_offsets:
        one = tree.TreeRecord(after, place)
        head = tree.FRAME_HEADER.pack(ord("F"), 0, one.mode, 0, one.size, one.mtime_ns, one.sha)
        frames.append(head + (folder / os.fsdecode(one.path)).read_bytes())
    base = hashlib.sha256(ENGINE.strip_stamps_and_excluded(before)).hexdigest() if before else ""
    plan = encode_plan(
        delta, after, base=base, digest=hashlib.sha256(ENGINE.strip_stamps_and_excluded(after)).hexdigest()
    )
    return b"".join(frames) + b"".join(make_plan_frames(plan))


@pytest.fixture
def old_and_new_tree(tmp_path: Path) -> tuple[Path, Path]:
    old, new = tmp_path / "old", tmp_path / "new"
    write_files(old, {b"a": b"1", b"b": b"2", b"gone/c": b"3", b"turns": b"file", b"d/e": b"4"})
    write_files(new, {b"a": b"changed", b"b": b"2", b"turns/x": b"folder", b"d/e": b"4", b"d/f": b"5"})
    write_files(new, {b"same1": b"same", b"same2": b"same"})
    (new / "b").chmod(0o600)
    (new / "link").symlink_to("a")
    return old, new


def test_tree_change_killed_at_any_step_is_finished_by_the_next_one(
    old_and_new_tree, tmp_path: Path, fork_server: ForkServer
) -> None:
    old, new = old_and_new_tree
    first, second = make_change_frames(b"", old), make_change_frames(make_records(old), new)
    (tmp_path / "change").write_bytes(second)
    finished = 0
    for step in range(100):
        root = tmp_path / f"node{step}"
        sync.receive_and_apply_change(make_sync_args(root), first)
        command = ["-c", DYING, str(root), str(tmp_path / "change"), str(step)]
        code = fork_server.run(command, timeout=30).returncode
        if code == 0:
            finished = step
            break
        assert code == 9
        whole = {b"1", b"2", b"3", b"4", b"5", b"file", b"changed", b"folder", b"same", b""}
        assert {data for kind, _, data in read_tree(root).values() if kind == "f"} <= whole
        _, drift = sync.check_tree_and_report_drift(make_sync_args(root), b"")
        assert not drift
        if read_tree(root) != read_tree(new):
            assert read_tree(root) == read_tree(old), f"killed at step {step}"
            sync.receive_and_apply_change(make_sync_args(root), second)
        assert read_tree(root) == read_tree(new), f"killed at step {step}"
    assert finished > 10


def test_tree_change_based_on_another_state_is_rejected(old_and_new_tree, tmp_path: Path) -> None:
    old, new = old_and_new_tree
    root = tmp_path / "node"
    sync.receive_and_apply_change(make_sync_args(root), make_change_frames(b"", old))
    with pytest.raises(OpError) as caught:
        sync.receive_and_apply_change(make_sync_args(root), make_change_frames(b"", new))
    assert caught.value.reason == "moved"
    assert read_tree(root) == read_tree(old)


def test_file_changed_before_deletion_is_kept(old_and_new_tree, tmp_path: Path) -> None:
    old, new = old_and_new_tree
    root = tmp_path / "node"
    sync.receive_and_apply_change(make_sync_args(root), make_change_frames(b"", old))
    second = make_change_frames(make_records(old), new)
    (root / "gone/c").write_bytes(b"the node's own")
    answer = sync.receive_and_apply_change(make_sync_args(root), second)
    assert answer["kept"] == ["gone/c"]
    assert (root / "gone/c").read_bytes() == b"the node's own"


def test_incomplete_object_is_removed(old_and_new_tree, tmp_path: Path) -> None:
    old, _ = old_and_new_tree
    root = tmp_path / "node"
    sync.receive_and_apply_change(make_sync_args(root), make_change_frames(b"", old))
    with SyncedTree(make_sync_args(root), create=True) as site:
        folder = Path(f"/proc/self/fd/{site.open_staging_folder()}").readlink()
    sha = hashlib.sha256(b"whole").digest()
    (folder / os.fsdecode(tree.staged_file_name(sha, 5))).write_bytes(b"whole")
    (folder / os.fsdecode(tree.staged_file_name(bytes(32), 500))).write_bytes(b"half")
    assert sync.check_tree_and_report_drift(make_sync_args(root), b"")[0]["objects"] == 1
    assert sync.list_staged_file_digests(make_sync_args(root), b"")[1] == sha


def test_objects_of_an_earlier_boot_are_removed(old_and_new_tree, tmp_path: Path) -> None:
    old, _ = old_and_new_tree
    root = tmp_path / "node"
    sync.receive_and_apply_change(make_sync_args(root), make_change_frames(b"", old))
    write_files(root, {b".grid/sync/t/objects-before/x": b"1"})
    sync.check_tree_and_report_drift(make_sync_args(root), b"")
    assert not (root / ".grid/sync/t/objects-before").exists()


def test_partial_frames_are_completed_by_later_data(old_and_new_tree, tmp_path: Path) -> None:
    old, _ = old_and_new_tree
    frames = make_change_frames(b"", old)
    for step in (1, 7, 100):
        root = tmp_path / f"node{step}"
        with SyncedTree(make_sync_args(root), create=True) as site:
            receiver, buffer = sync.ChangeReceiver(site), bytearray()
            for at in range(0, len(frames), step):
                buffer += frames[at : at + step]
                del buffer[: receiver.stage_frames(bytes(buffer))]
            assert receiver.is_complete
            receiver.apply_received_change()
        assert read_tree(root) == read_tree(old)


def test_link_out_of_home_is_rejected(old_and_new_tree, tmp_path: Path) -> None:
    old, _ = old_and_new_tree
    root, outside = tmp_path / "node", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / ".grid").symlink_to(outside)
    with pytest.raises(OpError, match="is a link out of the home directory, to ") as caught:
        sync.receive_and_apply_change(make_sync_args(root), make_change_frames(b"", old))
    assert caught.value.reason == "link"
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("held", [".grid", ".grid/sync", ".grid/sync/t", ".grid/sync/t/lock"])
def test_error_has_the_absolute_path(old_and_new_tree, tmp_path: Path, held: str) -> None:
    old, _ = old_and_new_tree
    place = tmp_path / "node" / held
    place.parent.mkdir(parents=True)
    place.mkdir() if held.endswith("lock") else place.touch()
    with pytest.raises((NotADirectoryError, IsADirectoryError)) as caught:
        sync.receive_and_apply_change(make_sync_args(tmp_path / "node"), make_change_frames(b"", old))
    assert caught.value.filename == str(place)


def test_link_within_home_is_followed(
    old_and_new_tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = old_and_new_tree
    monkeypatch.setenv("HOME", str(tmp_path))
    root, elsewhere = tmp_path / "node", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / ".grid").symlink_to(elsewhere)
    sync.receive_and_apply_change(make_sync_args(root), make_change_frames(b"", old))
    (root / ".grid").unlink()
    assert read_tree(root) == read_tree(old)
    assert (elsewhere / "sync" / "t").is_dir()


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "-x"])
def test_invalid_tree_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(OpError):
        SyncedTree({"root": str(tmp_path), "tree": name}, create=True)


def test_foreign_files_among_objects_are_ignored(old_and_new_tree, tmp_path: Path) -> None:
    old, new = old_and_new_tree
    root = tmp_path / "node"
    sync.receive_and_apply_change(make_sync_args(root), make_change_frames(b"", old))
    (objects,) = (root / ".grid/sync/t").glob("objects-*")
    earlier = objects.with_name("objects-earlier")
    for folder in (objects, earlier):
        (folder / "folder" / "inner").mkdir(parents=True)
        for name in ("z" * 64, "a" * 64, "a" * 64 + ".x", "c" * 64 + ".5"):
            (folder / name).write_text("x")
        (folder / ("b" * 64 + ".1")).symlink_to("/etc/passwd")
    (root / ".grid/sync/t/objects-file").write_text("x")
    answer, _ = sync.check_tree_and_report_drift(make_sync_args(root), b"")
    assert answer["objects"] == 0
    sync.receive_and_apply_change(make_sync_args(root), make_change_frames(make_records(old), new))
    assert read_tree(root) == read_tree(new)


@pytest.mark.parametrize("ends", ["exit 1", "kill -9 $$", "exec sleep 60"])
def test_failing_compiler_leaves_no_files(tmp_path: Path, monkeypatch, ends: str) -> None:
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    # -o PART SOURCE are the last three.
    compiler.write_text(f'#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\necho half > "$1"\n{ends}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sync, "_COMPILE_TIMEOUT_S", 0.3)
    source = tmp_path / "made" / "tree-aa-1-1.cpp"
    source.parent.mkdir()
    source.write_text("int x;")
    with contextlib.suppress(subprocess.TimeoutExpired):
        sync.compile_engine_library({"source": str(source), "path": str(source.with_name("tree-aa.so"))})
    assert list(source.parent.iterdir()) == []
