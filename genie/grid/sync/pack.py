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
from genie.grid.remote.sync import PIECE_BYTES_MAX
from genie.grid.remote.tree import FRAME, NO_SHA, Folders, TreeRecord
from genie.grid.sync.local_tree import TreeSnapshot

_CHUNK_BYTES = 1 << 20
_BATCH = 2048
_TRIES = 3
_SHA_AT = FRAME.size - len(NO_SHA)

Digest = contents.WholeFileDigest | contents.SparseFileDigest


class VanishedError(Exception):
    """A file has disappeared since the scan: the scan must be repeated."""


class FileChunk:
    """Frames to send, the number of files that end in them, and their payload bytes."""

    def __init__(self, data: bytes, *, files: int, size: int) -> None:
        self.data, self.files, self.size = data, files, size


Chunks = Generator[FileChunk, None, None]


def hash_files(engine: tree.PlainEngine, snapshot: TreeSnapshot, offsets: list[int]) -> None:
    """Hashes the files at these offsets, without sending anything."""
    for _ in _Packer(engine, snapshot, known=None).chunks(offsets):
        pass


def pack_files(
    engine: tree.PlainEngine, snapshot: TreeSnapshot, offsets: list[int], *, on_node: set[bytes]
) -> Chunks:
    """Yields frames of these files. Skips hashes in `on_node`, and adds those that are sent."""
    return _Packer(engine, snapshot, known=on_node).chunks(_not_on_node(snapshot, offsets, on_node))


def bytes_to_send(
    engine: tree.PlainEngine, snapshot: TreeSnapshot, offsets: list[int], *, on_node: Set[bytes] = frozenset()
) -> int:
    """Returns the bytes of data in these files, without holes and without contents in `on_node`."""
    return _Packer(engine, snapshot, known=None).data_bytes(_not_on_node(snapshot, offsets, on_node))


def _not_on_node(snapshot: TreeSnapshot, offsets: list[int], on_node: Set[bytes]) -> list[int]:
    if not on_node:
        return offsets
    return [offset for offset in offsets if tree.record_sha(snapshot.records, offset) not in on_node]


def frame(kind: str, *, number: int = 0, size: int = 0, mode: int = 0, mtime_ns: int = 0) -> bytes:
    return FRAME.pack(ord(kind), 0, mode, number, size, mtime_ns, NO_SHA)


def plan_frames(plan: bytes) -> Iterator[bytes]:
    """Yields frames with the plan, and the end frame."""
    for at in range(0, len(plan), PIECE_BYTES_MAX):
        piece = plan[at : at + PIECE_BYTES_MAX]
        yield frame("P", size=len(piece)) + piece
    yield frame("Z")


class _Packer:
    def __init__(self, engine: tree.PlainEngine, snapshot: TreeSnapshot, *, known: set[bytes] | None) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self._known = known
        self._number = 0
        self._large: set[int] = set()

    def chunks(self, offsets: list[int]) -> Chunks:
        root = os.open(self._snapshot.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        records = bytes(self._snapshot.records)
        try:
            at = 0
            while at < len(offsets):
                batch = offsets[at : at + _BATCH]
                frames, states = self._engine.read(
                    root, records, batch, first=self._number, room=_CHUNK_BYTES
                )
                self._number += len(states)
                taken = batch[: len(states)]
                small = [offset for offset, state in zip(taken, states, strict=True) if state == 0]
                yield self._small_files(frames, small)
                for offset, state in zip(taken, states, strict=True):
                    if state != 0:
                        yield from self._read_separately(root, offset)
                at += len(states)
        finally:
            os.close(root)

    def data_bytes(self, offsets: list[int]) -> int:
        """Opens only large files; one that cannot be opened is reported when it is sent."""
        total = 0
        root = os.open(self._snapshot.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for offset in offsets:
                size = tree.record_size(self._snapshot.records, offset)
                total += size if size < contents.BLOCKS_BYTES_MIN else self._data_bytes_at(root, offset, size)
        finally:
            os.close(root)
        return total

    def _data_bytes_at(self, root: int, offset: int, size: int) -> int:
        try:
            fd = self._open(root, TreeRecord(self._snapshot.records, offset).path)
        except (SyncError, VanishedError):
            return size
        try:
            parts = contents.extents(fd, os.fstat(fd))
            return sum(part_bytes for is_data, _, part_bytes in parts if is_data)
        finally:
            os.close(fd)

    def _small_files(self, frames: bytearray, offsets: list[int]) -> FileChunk:
        """Hashes small files, and removes those that the node has."""
        view = memoryview(frames)
        parts: list[memoryview] = []
        at = size = 0
        begin = 0
        for offset in offsets:
            end = at + FRAME.size + int.from_bytes(view[at + 8 : at + 16], "little")
            sha = hashlib.sha256(view[at + FRAME.size : end]).digest()
            view[at + _SHA_AT : at + FRAME.size] = sha
            self._snapshot.set_sha(offset, sha)
            if self._known is None or sha in self._known:
                parts.append(view[begin:at])
                begin = end
            else:
                self._known.add(sha)
                size += end - at - FRAME.size
            at = end
        parts.append(view[begin:at])
        return FileChunk(b"".join(parts), files=len(offsets), size=size)

    def _read_separately(self, root: int, offset: int) -> Iterator[FileChunk]:
        """Reads one file separately: large, sparse, or changed since the scan."""
        one = TreeRecord(self._snapshot.records, offset)
        path = one.path
        if self._known is not None and one.sha in self._known:
            return  # another file with the same contents was sent
        for _ in range(_TRIES):
            number, self._number = self._number, self._number + 1
            fd = self._open(root, path)
            try:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    raise VanishedError
                self._snapshot.restat(offset, before)
                digest = contents.new_digest(before.st_size)
                sending = self._known is not None and not self._is_known(fd, before.st_size)
                yield from self._pieces(fd, number, before, digest, sending=sending)
                after = os.fstat(fd)
            finally:
                os.close(fd)
            if tree.stamp_of(before) == tree.stamp_of(after) and before.st_size == after.st_size:
                sha = digest.digest()
                self._snapshot.set_sha(offset, sha)
                yield self._last(number, before, sha, sending=sending)
                return
            yield FileChunk(frame("A", number=number) if sending else b"", files=0, size=0)
        raise SyncError(
            f"{self._snapshot.root / Path(os.fsdecode(path))} kept changing while it was read",
            hint="sync again when nothing writes to it, or exclude it with sync.exclude_patterns",
        )

    def _is_known(self, fd: int, size: int) -> bool:
        """True if the node has the contents. Hashes the file only if another one has the same size."""
        assert self._known is not None
        if size not in self._large:
            self._large.add(size)
            return False
        return contents.digest_of_file(fd) in self._known

    def _last(self, number: int, found: os.stat_result, sha: bytes, *, sending: bool) -> FileChunk:
        if not sending or self._known is None:
            return FileChunk(b"", files=1, size=0)
        self._known.add(sha)
        mode = found.st_mode & 0o7777
        head = FRAME.pack(ord("E"), 0, mode, number, found.st_size, found.st_mtime_ns, sha)
        return FileChunk(head, files=1, size=0)

    def _open(self, root: int, path: bytes) -> int:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with Folders(root) as folders:
                parent, name = folders.open_parent(path)
                return os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            raise VanishedError from None
        except OSError as error:
            real = self._followed(path)
            if real is not None:
                return os.open(real, flags | os.O_NOFOLLOW)
            if error.errno in (errno.ELOOP, errno.ENOTDIR):  # replaced since the scan
                raise VanishedError from None
            raise SyncError(
                f"could not read {self._snapshot.root / Path(os.fsdecode(path))}: {error.strerror}",
                hint="make it readable, or exclude it with sync.exclude_patterns or a .gitignore",
            ) from None

    def _followed(self, path: bytes) -> str | None:
        """Resolves links in a path (sync.follow_symlinks); None if it leads out of the tree."""
        root = self._snapshot.root
        real = (root / Path(os.fsdecode(path))).resolve()
        return str(real) if real.is_relative_to(root) and real != root / Path(os.fsdecode(path)) else None

    def _pieces(
        self, fd: int, number: int, found: os.stat_result, digest: Digest, *, sending: bool
    ) -> Iterator[FileChunk]:
        holes = b""
        for is_data, offset, size in contents.extents(fd, found):
            if not is_data:
                digest.skip(size)
                holes = frame("H", number=number, size=size)
                continue
            for data in contents.pieces(fd, offset, size):
                digest.add(data)
                head = holes + frame("D", number=number, size=len(data))
                yield FileChunk(head + data if sending else b"", files=0, size=len(data) if sending else 0)
                holes = b""
