"""Content digests depend only on the bytes, not on how they are stored or read."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from genie.grid.grid_file import SyncSettings
from genie.grid.remote import contents, sync, tree
from genie.grid.remote.contents import BLOCK_DIGEST_FILE_BYTES_MIN, DIGEST_BLOCK_BYTES
from genie.grid.sync.local_tree import LocalTree
from genie.grid.sync.pack import hash_files
from tests.grid.sync.trees import load_compiled_engine, remove_contents

PAGE = 4096
EDGES = (-1, 0, 1)
SIZES = st.one_of(
    st.builds(
        lambda blocks, more: max(BLOCK_DIGEST_FILE_BYTES_MIN + blocks * DIGEST_BLOCK_BYTES + more, 0),
        st.integers(-1, 3),
        st.sampled_from(EDGES),
    ),
    st.integers(0, BLOCK_DIGEST_FILE_BYTES_MIN + 4 * DIGEST_BLOCK_BYTES),
)
LENGTHS = st.one_of(
    st.builds(
        lambda count, more: count + more,
        st.sampled_from([1, PAGE, DIGEST_BLOCK_BYTES]),
        st.sampled_from(EDGES),
    ),
    st.builds(lambda blocks: blocks * DIGEST_BLOCK_BYTES, st.integers(1, 8)),
    st.integers(1, 3 * DIGEST_BLOCK_BYTES),
)
PARTS = st.lists(st.tuples(st.sampled_from(["hole", "zeros", "data", "one"]), LENGTHS), max_size=12)
Parts = list[tuple[str, int]]


def reference_digest(data: bytes) -> bytes:
    """The definition in the docstring of contents.py, over all bytes at once."""
    if len(data) < BLOCK_DIGEST_FILE_BYTES_MIN:
        return hashlib.sha256(data).digest()
    blocks = [data[at : at + DIGEST_BLOCK_BYTES] for at in range(0, len(data), DIGEST_BLOCK_BYTES)]
    nonzero = [number for number, block in enumerate(blocks) if any(block)]
    runs = b""
    for number in nonzero:
        if number - 1 not in nonzero:
            end = number
            while end in nonzero:
                end += 1
            runs += struct.pack("<QQ", number, end)
    bytes_of_blocks = b"".join(blocks[number] for number in nonzero)
    inner = hashlib.sha256(runs).digest() + hashlib.sha256(bytes_of_blocks).digest()
    return hashlib.sha512(contents.BLOCK_DIGEST_TAG + struct.pack("<Q", len(data)) + inner).digest()[:32]


def write_sparse_or_dense_file(path: Path, parts: Parts, size: int, *, dense: bool) -> None:
    """Write the parts; the rest of the size is a hole. With `dense`, holes are written as zeros."""
    dice = random.Random(3)
    with path.open("wb") as file:
        at = 0
        for kind, wanted in parts:
            length = min(wanted, size - at)
            data = bytes(length) if kind in ("hole", "zeros") else dice.randbytes(length)
            if kind == "one" and length:
                data = bytes(length - 1) + b"1"
            if kind != "hole" or dense:
                os.pwrite(file.fileno(), data, at)
            at += length
        if dense:
            os.pwrite(file.fileno(), bytes(size - at), at)
        file.truncate(size)


def hash_files_with_engine(engine: tree.PlainEngine, root: Path, cache: Path) -> dict[bytes, bytes]:
    snapshot = LocalTree(root, SyncSettings(), cache=cache, engine=engine).scan()
    hash_files(engine, snapshot, snapshot.unhashed_offsets)
    return {one.path: one.sha for one in tree.iter_records(bytes(snapshot.records))}


def hash_files_as_node(root: Path) -> dict[bytes, bytes]:
    fd = os.open(root, os.O_RDONLY)
    try:
        return {
            name: sync._hash_file(fd, name) for name in [os.fsencode(path.name) for path in root.iterdir()]
        }
    finally:
        os.close(fd)


def raise_seek_not_supported(fd: int, at: int, whence: int) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.fixture(scope="module")
def compiled_engine() -> tree.PlainEngine:
    return load_compiled_engine()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=PARTS, size=SIZES)
@example(parts=[], size=BLOCK_DIGEST_FILE_BYTES_MIN)
@example(
    parts=[("data", DIGEST_BLOCK_BYTES - 1), ("hole", DIGEST_BLOCK_BYTES), ("one", 2)],
    size=BLOCK_DIGEST_FILE_BYTES_MIN + 1,
)
@example(parts=[("hole", 17 * DIGEST_BLOCK_BYTES), ("one", 9)], size=17 * DIGEST_BLOCK_BYTES + 9)
def test_digest_is_independent_of_storage_and_implementation(
    compiled_engine, tmp_path: Path, parts: Parts, size: int
) -> None:
    root = tmp_path / "tree"
    remove_contents(root)
    for name in ("sparse", "dense"):
        write_sparse_or_dense_file(root / name, parts, size, dense=name == "dense")
    data = (root / "dense").read_bytes()
    assert (root / "sparse").read_bytes() == data and len(data) == size
    want = dict.fromkeys((b"dense", b"sparse"), reference_digest(data))
    assert hash_files_as_node(root) == want
    for each in (tree.PlainEngine(), compiled_engine):
        assert hash_files_with_engine(each, root, tmp_path / "cache") == want
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents.os, "lseek", raise_seek_not_supported)
        assert hash_files_as_node(root) == want
        assert hash_files_with_engine(compiled_engine, root, tmp_path / "cache") == want


@settings(max_examples=60, deadline=None)
@given(
    parts=PARTS,
    size=st.integers(BLOCK_DIGEST_FILE_BYTES_MIN, BLOCK_DIGEST_FILE_BYTES_MIN + 4 * DIGEST_BLOCK_BYTES),
    seed=st.integers(),
)
def test_digest_is_independent_of_chunk_sizes(parts: Parts, size: int, seed: int) -> None:
    dice = random.Random(seed)
    digest, data = contents.make_digest_for_size(size), b""
    for kind, wanted in [*parts, ("hole", size)]:
        length = min(wanted, size - len(data))
        part = dice.randbytes(length) if kind in ("data", "one") else bytes(length)
        data += part
        if kind == "hole":
            digest.add_zeros(length)
            continue
        while part:
            step = dice.randint(1, 3 * DIGEST_BLOCK_BYTES)
            digest.add_data(part[:step])
            part = part[step:]
    assert digest.digest() == reference_digest(data)


def test_different_contents_have_different_digests(tmp_path: Path) -> None:
    """Also if only offsets or trailing zeros differ, or a small file is the hash input of a large one."""
    block = b"x" * DIGEST_BLOCK_BYTES
    size = BLOCK_DIGEST_FILE_BYTES_MIN
    layouts: list[tuple[Parts, int]] = [
        ([], size),
        ([], size + 1),
        ([("data", DIGEST_BLOCK_BYTES)], size),
        ([("data", DIGEST_BLOCK_BYTES)], size + DIGEST_BLOCK_BYTES),
        ([("hole", DIGEST_BLOCK_BYTES), ("data", DIGEST_BLOCK_BYTES)], size),
        ([("data", DIGEST_BLOCK_BYTES), ("hole", DIGEST_BLOCK_BYTES), ("data", DIGEST_BLOCK_BYTES)], size),
        ([("data", 2 * DIGEST_BLOCK_BYTES)], size),
    ]
    for number, (parts, length) in enumerate(layouts):
        write_sparse_or_dense_file(tmp_path / f"layout{number}", parts, length, dense=False)
    inner = hashlib.sha256(struct.pack("<QQ", 0, 1)).digest() + hashlib.sha256(block).digest()
    (tmp_path / "large").write_bytes(block + bytes(size - DIGEST_BLOCK_BYTES))
    (tmp_path / "small").write_bytes(contents.BLOCK_DIGEST_TAG + struct.pack("<Q", size) + inner)
    found = hash_files_as_node(tmp_path)
    assert len(set(found.values())) == len(found) == len(layouts) + 2


def test_digest_and_transfer_size_limits_are_consistent() -> None:
    assert tree.SMALL_FILE_BYTES_MAX < BLOCK_DIGEST_FILE_BYTES_MIN
    assert contents.READ_CHUNK_BYTES <= sync.FRAME_PIECE_BYTES_MAX


def test_holes_are_not_read(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        for at in (0, 1 << 30, (1 << 40) - 5):
            os.pwrite(file.fileno(), b"data!", at)
    read = record_read_sizes(monkeypatch, limit=1 << 20)
    assert len(hash_files_as_node(tmp_path)) == 1
    assert 15 <= sum(read) <= 3 * DIGEST_BLOCK_BYTES


def record_read_sizes(monkeypatch: pytest.MonkeyPatch, *, limit: int) -> list[int]:
    pread, read = os.pread, []

    def counted(fd: int, size: int, at: int) -> bytes:
        data = pread(fd, size, at)
        read.append(len(data))
        assert sum(read) <= limit, "zeros are read"
        return data

    monkeypatch.setattr(contents.os, "pread", counted)
    return read


def test_copy_on_node_keeps_holes(tmp_path: Path, monkeypatch) -> None:
    with (tmp_path / "from").open("wb") as file:
        os.pwrite(file.fileno(), b"x" * 10_000, 1 << 39)
        file.truncate(1 << 40)
    record_read_sizes(monkeypatch, limit=1 << 20)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        sync._copy_file(fd, b"from", fd, b"to")
        names = hash_files_as_node(tmp_path)
    finally:
        os.close(fd)
    assert names[b"from"] == names[b"to"]
    assert (tmp_path / "to").stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_is_all_data_if_holes_are_not_reported(tmp_path: Path, monkeypatch, number: int) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    with (tmp_path / "a").open("w+b") as file:
        os.pwrite(file.fileno(), b"x", 1 << 20)
        file.truncate(2 << 20)
        monkeypatch.setattr(contents.os, "lseek", refuse)
        assert list(contents.list_extents(file.fileno(), os.fstat(file.fileno()))) == [(True, 0, 2 << 20)]


def test_truncation_while_listing_extents_is_not_an_error(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w+b") as file:
        os.pwrite(file.fileno(), b"x" * PAGE, 0)
        os.pwrite(file.fileno(), b"x" * PAGE, 1 << 20)
        file.truncate(2 << 20)
        found = contents.list_extents(file.fileno(), os.fstat(file.fileno()))
        first = next(found)
        os.ftruncate(file.fileno(), 0)
        rest = list(found)
    covered = [(first[1], first[2]), *[(at, size) for _, at, size in rest]]
    assert sum(size for _, size in covered) == 2 << 20
