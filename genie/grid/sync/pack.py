"""Reads files into frames: complete small files, pieces of large ones, without holes.

Files are hashed while they are read. A file that changes meanwhile is read again; if it keeps changing, an
error names it. Memory is bounded: a chunk has about 1 MiB. Blocking: call it from a thread.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Generator, Iterator, Set
from pathlib import Path

from genie.errors import SyncError
from genie.grid.remote import contents, tree
from genie.grid.remote.sync import FRAME_PIECE_BYTES_MAX
from genie.grid.remote.tree import FRAME_HEADER, NO_SHA, OpenDirectories, TreeRecord
from genie.grid.sync.local_tree import TreeSnapshot

_FRAMES_CHUNK_BYTES = 1 << 20
_FILES_PER_BATCH = 2048
_READ_ATTEMPTS = 3
_SHA_OFFSET_IN_FRAME = FRAME_HEADER.size - len(NO_SHA)

Digest = contents.WholeFileDigest | contents.SparseFileDigest


class FileVanishedError(Exception):
    """A file has disappeared since the scan: the scan must be repeated."""


class FileChunk:
    """Frames to send, the number of files that end in them, and their payload bytes."""

    def __init__(self, data: bytes, *, files: int, size: int) -> None:
        self.data, self.files, self.size = data, files, size


FileChunks = Generator[FileChunk, None, None]


def hash_files(engine: tree.PlainEngine, snapshot: TreeSnapshot, offsets: list[int]) -> None:
    """Hashes the files at these offsets, without sending anything."""
    for _ in _FilePacker(engine, snapshot, known=None).pack_chunks(offsets):
        pass


def pack_files(
    engine: tree.PlainEngine, snapshot: TreeSnapshot, offsets: list[int], *, on_node: set[bytes]
) -> FileChunks:
    """Yields frames of these files. Skips hashes in `on_node`, and adds those that are sent."""
    return _FilePacker(engine, snapshot, known=on_node).pack_chunks(
        _offsets_not_on_node(snapshot, offsets, on_node)
    )


def count_bytes_to_send(
    engine: tree.PlainEngine, snapshot: TreeSnapshot, offsets: list[int], *, on_node: Set[bytes] = frozenset()
) -> int:
    """Returns the bytes of data in these files, without holes and without contents in `on_node`."""
    return _FilePacker(engine, snapshot, known=None).count_data_bytes(
        _offsets_not_on_node(snapshot, offsets, on_node)
    )


def _offsets_not_on_node(snapshot: TreeSnapshot, offsets: list[int], on_node: Set[bytes]) -> list[int]:
    if not on_node:
        return offsets
    return [offset for offset in offsets if tree.file_sha_of_record(snapshot.records, offset) not in on_node]


def make_frame_header(
    kind: str, *, number: int = 0, size: int = 0, mode: int = 0, mtime_ns: int = 0
) -> bytes:
    return FRAME_HEADER.pack(ord(kind), 0, mode, number, size, mtime_ns, NO_SHA)


def make_plan_frames(plan: bytes) -> Iterator[bytes]:
    """Yields frames with the plan, and the end frame."""
    for at in range(0, len(plan), FRAME_PIECE_BYTES_MAX):
        piece = plan[at : at + FRAME_PIECE_BYTES_MAX]
        yield make_frame_header("P", size=len(piece)) + piece
    yield make_frame_header("Z")


class _FilePacker:
    def __init__(self, engine: tree.PlainEngine, snapshot: TreeSnapshot, *, known: set[bytes] | None) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self._digests_on_node = known
        self._next_file_number = 0
        self._large_file_sizes_seen: set[int] = set()

    def pack_chunks(self, offsets: list[int]) -> FileChunks:
        root = os.open(self._snapshot.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        records = bytes(self._snapshot.records)
        try:
            at = 0
            while at < len(offsets):
                batch = offsets[at : at + _FILES_PER_BATCH]
                frames, states = self._engine.read_small_files(
                    root, records, batch, first=self._next_file_number, room=_FRAMES_CHUNK_BYTES
                )
                self._next_file_number += len(states)
                taken = batch[: len(states)]
                small = [offset for offset, state in zip(taken, states, strict=True) if state == 0]
                yield self._pack_small_files(frames, small)
                for offset, state in zip(taken, states, strict=True):
                    if state != 0:
                        yield from self._pack_file_separately(root, offset)
                at += len(states)
        finally:
            os.close(root)

    def count_data_bytes(self, offsets: list[int]) -> int:
        """Opens only large files; one that cannot be opened is reported when it is sent."""
        total = 0
        root = os.open(self._snapshot.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for offset in offsets:
                size = tree.file_size_of_record(self._snapshot.records, offset)
                total += (
                    size
                    if size < contents.BLOCK_DIGEST_FILE_BYTES_MIN
                    else self._count_data_bytes_of_file(root, offset, size)
                )
        finally:
            os.close(root)
        return total

    def _count_data_bytes_of_file(self, root: int, offset: int, size: int) -> int:
        try:
            fd = self._open_file(root, TreeRecord(self._snapshot.records, offset).path)
        except (SyncError, FileVanishedError):
            return size
        try:
            parts = contents.list_extents(fd, os.fstat(fd))
            return sum(part_bytes for is_data, _, part_bytes in parts if is_data)
        finally:
            os.close(fd)

    def _pack_small_files(self, frames: bytearray, offsets: list[int]) -> FileChunk:
        """Hashes small files, and removes those that the node has."""
        view = memoryview(frames)
        parts: list[memoryview] = []
        at = size = 0
        begin = 0
        for offset in offsets:
            end = at + FRAME_HEADER.size + int.from_bytes(view[at + 8 : at + 16], "little")
            sha = hashlib.sha256(view[at + FRAME_HEADER.size : end]).digest()
            view[at + _SHA_OFFSET_IN_FRAME : at + FRAME_HEADER.size] = sha
            self._snapshot.set_file_sha(offset, sha)
            if self._digests_on_node is None or sha in self._digests_on_node:
                parts.append(view[begin:at])
                begin = end
            else:
                self._digests_on_node.add(sha)
                size += end - at - FRAME_HEADER.size
            at = end
        parts.append(view[begin:at])
        return FileChunk(b"".join(parts), files=len(offsets), size=size)

    def _pack_file_separately(self, root: int, offset: int) -> Iterator[FileChunk]:
        """Reads one file separately: large, sparse, or changed since the scan."""
        one = TreeRecord(self._snapshot.records, offset)
        path = one.path
        if self._digests_on_node is not None and one.sha in self._digests_on_node:
            return  # another file with the same contents was sent
        for _ in range(_READ_ATTEMPTS):
            number, self._next_file_number = self._next_file_number, self._next_file_number + 1
            fd = self._open_file(root, path)
            try:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    raise FileVanishedError
                self._snapshot.update_record(offset, before)
                digest = contents.make_digest_for_size(before.st_size)
                sending = self._digests_on_node is not None and not self._is_content_on_node(
                    fd, before.st_size
                )
                yield from self._pack_file_pieces(fd, number, before, digest, sending=sending)
                after = os.fstat(fd)
            finally:
                os.close(fd)
            if tree.pack_stamp(before) == tree.pack_stamp(after) and before.st_size == after.st_size:
                sha = digest.digest()
                self._snapshot.set_file_sha(offset, sha)
                yield self._make_last_chunk(number, before, sha, sending=sending)
                return
            yield FileChunk(make_frame_header("A", number=number) if sending else b"", files=0, size=0)
        raise SyncError(
            f"{self._snapshot.root / Path(os.fsdecode(path))} kept changing while it was read",
            hint="sync again when nothing writes to it, or exclude it with sync.exclude_patterns",
        )

    def _is_content_on_node(self, fd: int, size: int) -> bool:
        """True if the node has the contents. Hashes the file only if another one has the same size."""
        assert self._digests_on_node is not None
        if size not in self._large_file_sizes_seen:
            self._large_file_sizes_seen.add(size)
            return False
        return contents.compute_file_digest(fd) in self._digests_on_node

    def _make_last_chunk(self, number: int, found: os.stat_result, sha: bytes, *, sending: bool) -> FileChunk:
        if not sending or self._digests_on_node is None:
            return FileChunk(b"", files=1, size=0)
        self._digests_on_node.add(sha)
        mode = found.st_mode & 0o7777
        head = FRAME_HEADER.pack(ord("E"), 0, mode, number, found.st_size, found.st_mtime_ns, sha)
        return FileChunk(head, files=1, size=0)

    def _open_file(self, root: int, path: bytes) -> int:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with OpenDirectories(root) as folders:
                parent, name = folders.open_parent(path)
                return os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            raise FileVanishedError from None
        except OSError as error:
            real = self._resolve_links(path)
            if real is not None:
                return os.open(real, flags | os.O_NOFOLLOW)
            if error.errno in (errno.ELOOP, errno.ENOTDIR):  # replaced since the scan
                raise FileVanishedError from None
            raise SyncError(
                f"could not read {self._snapshot.root / Path(os.fsdecode(path))}: {error.strerror}",
                hint="make it readable, or exclude it with sync.exclude_patterns or a .gitignore",
            ) from None

    def _resolve_links(self, path: bytes) -> str | None:
        """Resolves links in a path (sync.follow_symlinks); None if it leads out of the tree."""
        root = self._snapshot.root
        real = (root / Path(os.fsdecode(path))).resolve()
        return str(real) if real.is_relative_to(root) and real != root / Path(os.fsdecode(path)) else None

    def _pack_file_pieces(
        self, fd: int, number: int, found: os.stat_result, digest: Digest, *, sending: bool
    ) -> Iterator[FileChunk]:
        holes = b""
        for is_data, offset, size in contents.list_extents(fd, found):
            if not is_data:
                digest.add_zeros(size)
                holes = make_frame_header("H", number=number, size=size)
                continue
            for data in contents.read_pieces(fd, offset, size):
                digest.add_data(data)
                head = holes + make_frame_header("D", number=number, size=len(data))
                yield FileChunk(head + data if sending else b"", files=0, size=len(data) if sending else 0)
                holes = b""
