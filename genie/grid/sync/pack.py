"""Reading files and making frames of them: whole small files, pieces of large ones, holes left out.

Contents are hashed while they are read. A file that changes meanwhile is read again, and named in an error
when it never holds still. Memory stays bounded: a chunk is about a megabyte.

Not for: deciding which files, and sending (stream.py). Blocking: call it from a thread.
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
from genie.grid.remote.tree import FRAME, NO_SHA, Folders, Record
from genie.grid.sync.local_tree import Snapshot

_CHUNK_BYTES = 1 << 20
_BATCH = 2048
_TRIES = 3
_SHA_AT = FRAME.size - len(NO_SHA)

Digest = contents.Whole | contents.Blocks


class VanishedError(Exception):
    """A file is gone since the walk: the walk has to be done again."""


class Chunk:
    """Frames to send, and how many files end in them."""

    def __init__(self, data: bytes, *, files: int, size: int) -> None:
        self.data, self.files, self.size = data, files, size


Chunks = Generator[Chunk, None, None]


def hash_files(engine: tree.Plain, snapshot: Snapshot, places: list[int]) -> None:
    """Makes their contents known, without sending anything."""
    for _ in _Packer(engine, snapshot, known=None).chunks(places):
        pass


def pack_files(engine: tree.Plain, snapshot: Snapshot, places: list[int], *, there: set[bytes]) -> Chunks:
    """Frames of these files. What is in `there` by its digest is left out, and what is sent is added."""
    return _Packer(engine, snapshot, known=there).chunks(_missing(snapshot, places, there))


def bytes_to_send(
    engine: tree.Plain, snapshot: Snapshot, places: list[int], *, there: Set[bytes] = frozenset()
) -> int:
    """How much data there is in these files, without their holes, and without what is in `there`."""
    return _Packer(engine, snapshot, known=None).data_bytes(_missing(snapshot, places, there))


def _missing(snapshot: Snapshot, places: list[int], there: Set[bytes]) -> list[int]:
    if not there:
        return places
    return [place for place in places if tree.sha_at(snapshot.records, place) not in there]


def frame(kind: str, *, number: int = 0, size: int = 0, mode: int = 0, mtime_ns: int = 0) -> bytes:
    return FRAME.pack(ord(kind), 0, mode, number, size, mtime_ns, NO_SHA)


def plan_frames(plan: bytes) -> Iterator[bytes]:
    """The plan in pieces, and the end."""
    for at in range(0, len(plan), PIECE_BYTES_MAX):
        piece = plan[at : at + PIECE_BYTES_MAX]
        yield frame("P", size=len(piece)) + piece
    yield frame("Z")


class _Packer:
    def __init__(self, engine: tree.Plain, snapshot: Snapshot, *, known: set[bytes] | None) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self._known = known
        self._number = 0
        self._large: set[int] = set()

    def chunks(self, places: list[int]) -> Chunks:
        root = os.open(self._snapshot.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        records = bytes(self._snapshot.records)
        try:
            at = 0
            while at < len(places):
                batch = places[at : at + _BATCH]
                frames, states = self._engine.read(
                    root, records, batch, first=self._number, room=_CHUNK_BYTES
                )
                self._number += len(states)
                taken = batch[: len(states)]
                small = [place for place, state in zip(taken, states, strict=True) if state == 0]
                yield self._small(frames, small)
                for place, state in zip(taken, states, strict=True):
                    if state != 0:
                        yield from self._slow(root, place)
                at += len(states)
        finally:
            os.close(root)

    def data_bytes(self, places: list[int]) -> int:
        """Only large files are opened for it; one that cannot be is told about when it is sent."""
        total = 0
        root = os.open(self._snapshot.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for place in places:
                size = tree.size_at(self._snapshot.records, place)
                total += size if size < contents.BLOCKS_BYTES_MIN else self._data_bytes_at(root, place, size)
        finally:
            os.close(root)
        return total

    def _data_bytes_at(self, root: int, place: int, size: int) -> int:
        try:
            fd = self._open(root, Record(self._snapshot.records, place).path)
        except (SyncError, VanishedError):
            return size
        try:
            parts = contents.extents(fd, os.fstat(fd))
            return sum(part_bytes for is_data, _, part_bytes in parts if is_data)
        finally:
            os.close(fd)

    def _small(self, frames: bytearray, places: list[int]) -> Chunk:
        """Hashes them, and takes out what the node has."""
        view = memoryview(frames)
        parts: list[memoryview] = []
        at = size = 0
        begin = 0
        for place in places:
            end = at + FRAME.size + int.from_bytes(view[at + 8 : at + 16], "little")
            sha = hashlib.sha256(view[at + FRAME.size : end]).digest()
            view[at + _SHA_AT : at + FRAME.size] = sha
            self._snapshot.set_sha(place, sha)
            if self._known is None or sha in self._known:
                parts.append(view[begin:at])
                begin = end
            else:
                self._known.add(sha)
                size += end - at - FRAME.size
            at = end
        parts.append(view[begin:at])
        return Chunk(b"".join(parts), files=len(places), size=size)

    def _slow(self, root: int, place: int) -> Iterator[Chunk]:
        """One file by itself: large, with holes, or not as the walk saw it."""
        one = Record(self._snapshot.records, place)
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
                self._snapshot.restat(place, before)
                digest = contents.new_digest(before.st_size)
                sending = self._known is not None and not self._is_known(fd, before.st_size)
                yield from self._pieces(fd, number, before, digest, sending=sending)
                after = os.fstat(fd)
            finally:
                os.close(fd)
            if tree.stamp_of(before) == tree.stamp_of(after) and before.st_size == after.st_size:
                sha = digest.digest()
                self._snapshot.set_sha(place, sha)
                yield self._last(number, before, sha, sending=sending)
                return
            yield Chunk(frame("A", number=number) if sending else b"", files=0, size=0)
        raise SyncError(
            f"{self._snapshot.root / Path(os.fsdecode(path))} changed while it was read, {_TRIES} times",
            hint="sync again when nothing writes to it, or leave it out with sync.exclude_patterns",
        )

    def _is_known(self, fd: int, size: int) -> bool:
        """Whether the node has it. One as large as an earlier one is read first: it may be the same."""
        assert self._known is not None
        if size not in self._large:
            self._large.add(size)
            return False
        return contents.digest_of_file(fd) in self._known

    def _last(self, number: int, found: os.stat_result, sha: bytes, *, sending: bool) -> Chunk:
        if not sending or self._known is None:
            return Chunk(b"", files=1, size=0)
        self._known.add(sha)
        mode = found.st_mode & 0o7777
        head = FRAME.pack(ord("E"), 0, mode, number, found.st_size, found.st_mtime_ns, sha)
        return Chunk(head, files=1, size=0)

    def _open(self, root: int, path: bytes) -> int:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with Folders(root) as folders:
                holder, name = folders.holder(path)
                return os.open(name, flags | os.O_NOFOLLOW, dir_fd=holder)
        except FileNotFoundError:
            raise VanishedError from None
        except OSError as error:
            real = self._followed(path)
            if real is not None:
                return os.open(real, flags | os.O_NOFOLLOW)
            if error.errno in (errno.ELOOP, errno.ENOTDIR):  # it was no link, and in a folder
                raise VanishedError from None
            raise SyncError(
                f"{self._snapshot.root / Path(os.fsdecode(path))} cannot be read: {error.strerror}",
                hint="leave it out with sync.exclude_patterns or a .gitignore, or make it readable",
            ) from None

    def _followed(self, path: bytes) -> str | None:
        """With sync.follow_symlinks a path may lead through links, but not out of the tree."""
        root = self._snapshot.root
        real = (root / Path(os.fsdecode(path))).resolve()
        return str(real) if real.is_relative_to(root) and real != root / Path(os.fsdecode(path)) else None

    def _pieces(
        self, fd: int, number: int, found: os.stat_result, digest: Digest, *, sending: bool
    ) -> Iterator[Chunk]:
        holes = b""
        for is_data, offset, size in contents.extents(fd, found):
            if not is_data:
                digest.skip(size)
                holes = frame("H", number=number, size=size)
                continue
            for data in contents.pieces(fd, offset, size):
                digest.add(data)
                head = holes + frame("D", number=number, size=len(data))
                yield Chunk(head + data if sending else b"", files=0, size=len(data) if sending else 0)
                holes = b""
