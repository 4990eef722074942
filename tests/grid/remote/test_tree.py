"""File trees as records: the Python and the compiled engine are equivalent."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genie.grid.remote import tree
from tests.grid.sync.trees import load_compiled_engine, read_tree, remove_contents, write_files

PLAIN = tree.PlainEngine()
LARGE = b"large"
"""Placeholder for contents larger than one buffer, which keeps failure messages short."""
NAMES = st.sampled_from(
    [b"a", b"b.txt", b"-rf", b"a b", b"new\nline", b"\xff\xfe", b"A" * 255, b"a.b", b".gitignore", b"x"]
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(b"/".join)
CONTENTS = st.one_of(st.binary(max_size=40), st.just(LARGE))
ENTRIES = st.dictionaries(PATHS, st.tuples(st.sampled_from("fffdl"), CONTENTS), max_size=12)


@pytest.fixture(scope="module")
def compiled_engine() -> tree.PlainEngine:
    return load_compiled_engine()


def create_entries(root: Path, entries: dict[bytes, tuple[str, bytes]]) -> None:
    """Create the entries; skip those that conflict, such as a file below a file."""
    remove_contents(root)
    for path, (kind, data) in sorted(entries.items()):
        full = root / os.fsdecode(path)
        try:
            full.parent.mkdir(parents=True, exist_ok=True)
            if kind == "d":
                full.mkdir()
            elif kind == "l":
                full.symlink_to(os.fsdecode(data.replace(b"\0", b"")[:100] or b"nowhere"))
            else:
                write_files(root, {path: b"z" * 70_000 if data == LARGE else data})
        except (FileExistsError, NotADirectoryError, IsADirectoryError, FileNotFoundError):
            continue


def ends_with_x(path: bytes, is_folder: bool) -> bool:
    return path.endswith(b"x")


def scan_tree(
    engine: tree.PlainEngine, root: Path, old: bytes = b"", *, taken_ns: int = 0, reuse: bool = False
):
    walked = engine.walk(str(root), old, taken_ns=taken_ns, reuse=reuse, is_excluded=ends_with_x)
    return (
        walked.records,
        walked.unhashed_offsets,
        walked.is_unchanged,
        walked.rules_changed,
        walked.skipped_count,
    )


@pytest.fixture
def make_temporary_path(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: tmp_path / name


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=ENTRIES, after=ENTRIES)
def test_compiled_and_python_engine_scan_equally(compiled_engine, make_temporary_path, before, after) -> None:
    root = make_temporary_path("tree")
    create_entries(root, before)
    old = scan_tree(PLAIN, root)
    assert scan_tree(compiled_engine, root) == old
    later = time.time_ns() + 10**10
    assert scan_tree(compiled_engine, root, old[0], taken_ns=later, reuse=True) == scan_tree(
        PLAIN, root, old[0], taken_ns=later, reuse=True
    )
    create_entries(root, after)
    new = scan_tree(PLAIN, root, old[0], taken_ns=later, reuse=True)
    assert scan_tree(compiled_engine, root, old[0], taken_ns=later, reuse=True) == new
    fd = os.open(root, os.O_RDONLY)
    try:
        both = [each.find_mismatch_offsets(fd, old[0], taken_ns=later) for each in (PLAIN, compiled_engine)]
        assert both[0] == both[1]
        bare = b"".join(one.without_stamp + tree.NO_STAMP for one in tree.iter_records(new[0]))
        assert PLAIN.fill_in_stamps(fd, bare) == compiled_engine.fill_in_stamps(fd, bare)
        read = [
            each.read_small_files(fd, new[0], new[1], first=3, room=100_000)
            for each in (PLAIN, compiled_engine)
        ]
        assert read[0] == read[1]
    finally:
        os.close(fd)
    assert PLAIN.compare_records(old[0], new[0]) == compiled_engine.compare_records(old[0], new[0])
    assert PLAIN.strip_stamps_and_excluded(new[0]) == compiled_engine.strip_stamps_and_excluded(new[0])
    changes = b"".join(
        one.without_stamp + tree.NO_STAMP for one in tree.iter_records(new[0]) if one.kind != ord("x")
    )
    assert PLAIN.merge_records(old[0], changes) == compiled_engine.merge_records(old[0], changes)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=ENTRIES)
def test_compiled_and_python_engine_write_equal_files(compiled_engine, make_temporary_path, entries) -> None:
    root = make_temporary_path("tree")
    create_entries(root, entries)
    records, dirty, *_ = scan_tree(PLAIN, root)
    results = []
    for each in (PLAIN, compiled_engine):
        target, objects = (
            make_temporary_path(f"{each.name}-target"),
            make_temporary_path(f"{each.name}-objects"),
        )
        remove_contents(target)
        remove_contents(objects)
        results.append(transfer_files(each, root, records, dirty, target=target, objects=objects))
    assert results[0] == results[1]
    included = {one.path for one in tree.iter_records(records) if one.kind in (tree.FILE, tree.FOLDER)}
    want = {
        path: (kind, data)
        for path, (kind, _, data) in read_tree(root, without=()).items()
        if path in included
    }
    assert {path: (kind, data) for path, (kind, _, data) in results[0].items()} == want


def transfer_files(
    engine: tree.PlainEngine, root: Path, records: bytes, dirty: list[int], *, target: Path, objects: Path
):
    import hashlib

    fds = [os.open(folder, os.O_RDONLY) for folder in (root, objects, target)]
    try:
        frames, states = engine.read_small_files(fds[0], records, dirty, first=0, room=10_000_000)
        assert not any(states)
        named, known, at = bytearray(records), bytearray(frames), 0
        for position in dirty:
            end = at + tree.FRAME_HEADER.size + tree.file_size_of_record(records, position)
            sha = hashlib.sha256(known[at + tree.FRAME_HEADER.size : end]).digest()
            known[at + 24 : at + 56] = named[position + 24 : position + 56] = sha
            at = end
        assert engine.stage_files(fds[1], known) == (len(known), len(dirty))
        seen: set[bytes] = set()
        once = []
        for one in tree.iter_records(bytes(named)):
            if one.kind == tree.FOLDER or (one.kind == tree.FILE and one.sha not in seen):
                once.append(one.without_stamp + tree.NO_STAMP)
                seen.add(one.sha)
        engine.move_into_place(fds[2], fds[1], b"".join(once))
        with tree.OpenDirectories(fds[2]) as folders:
            for one in tree.iter_records(bytes(named)):
                if one.kind == tree.FILE and folders.try_lstat(one.path) is None:
                    parent, name = folders.open_parent(one.path)
                    os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=parent))
                    data = (root / os.fsdecode(one.path)).read_bytes()
                    (target / os.fsdecode(one.path)).write_bytes(data)
    finally:
        for fd in fds:
            os.close(fd)
    return read_tree(target, without=())


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_truncated_records_are_rejected(compiled_engine, kind) -> None:
    one = PLAIN if kind == "plain" else compiled_engine
    whole = tree.pack_record(tree.FILE, b"a") + tree.pack_record(tree.FILE, b"b")
    for data in (whole[:-1], whole[:100], whole[:10]):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is checked below
            one.strip_stamps_and_excluded(data)
        assert caught.value.errno == errno.EBADMSG


@pytest.mark.parametrize("kind", ["plain", "compiled"])
@pytest.mark.parametrize("path", [b"../out", b"/etc/x", b"a/../../out", b"link/x", b".", b"a//b", b""])
def test_paths_outside_the_tree_are_rejected(compiled_engine, tmp_path, kind, path) -> None:
    one = PLAIN if kind == "plain" else compiled_engine
    root, objects, outside = (tmp_path / name for name in ("root", "objects", "outside"))
    for folder in (root, objects, outside):
        folder.mkdir()
    (root / "link").symlink_to(outside)
    sha = bytes(32)
    (objects / tree.staged_file_name(sha, 0).decode()).touch()
    fds = [os.open(folder, os.O_RDONLY) for folder in (root, objects)]
    try:
        with pytest.raises(OSError):  # noqa: PT011 - several types are valid
            one.move_into_place(fds[0], fds[1], tree.pack_record(tree.FILE, path, mode=0o644, sha=sha))
    finally:
        for fd in fds:
            os.close(fd)
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_file_written_just_before_the_scan_is_read_again(compiled_engine, tmp_path, kind) -> None:
    one = PLAIN if kind == "plain" else compiled_engine
    write_files(tmp_path, {b"a": b"1"})
    records, dirty, *_ = scan_tree(one, tmp_path)
    assert dirty == [0]
    written_ns = (tmp_path / "a").stat().st_ctime_ns
    assert scan_tree(one, tmp_path, records, taken_ns=written_ns + 10**6)[1] == [0]
    assert scan_tree(one, tmp_path, records, taken_ns=written_ns + 10**9)[1] == []


def test_error_in_exclude_callback_is_raised(compiled_engine, tmp_path) -> None:
    write_files(tmp_path, {b"a": b"1"})

    def refuse(path: bytes, is_folder: bool) -> bool:
        raise KeyError(path)

    with pytest.raises(KeyError):
        compiled_engine.walk(str(tmp_path), b"", taken_ns=0, reuse=False, is_excluded=refuse)
