"""What the contents of a file are called, and where in a file there is data.

A file below BLOCKS_BYTES_MIN is called by its SHA-256. A larger one may be all holes, so it is called by the
blocks of it that are not all zero: SHA-512, cut to 32 bytes, of TAG, size, SHA-256 of the runs of such blocks
(first, end, as little-endian 64 bit numbers), SHA-256 of the bytes of such blocks. The last block may be
short. All of it follows from the bytes of the file alone: whether zeros are stored or left out makes no
difference, only the time that it takes. The outer function is another one than that of small files, so that
no small file, whatever is in it, is called like a large one.

Runs on nodes and on this machine, so: standard library only, Python 3.8. Not for: what is done with it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator

BLOCK_BYTES = 64 << 10
BLOCKS_BYTES_MIN = 1 << 20
SPARSE_BYTES_MIN = 64 << 10
READ_BYTES = 1 << 20
TAG = b"genie grid contents, blocks of 64 KiB\n"
_RUN = struct.Struct("<QQ")
_SIZE = struct.Struct("<Q")
_ZEROS = bytes(BLOCK_BYTES)


class Whole:
    """The digest of a small file. Bytes and holes come in the order of the file."""

    def __init__(self) -> None:
        import hashlib

        self._bytes = hashlib.sha256()

    def add(self, data: bytes) -> None:
        self._bytes.update(data)

    def skip(self, size: int) -> None:
        """As many zeros."""
        for at in range(0, size, BLOCK_BYTES):
            self._bytes.update(_ZEROS[: min(size - at, BLOCK_BYTES)])

    def digest(self) -> bytes:
        return self._bytes.digest()


class Blocks:
    """The digest of a large file. Bytes and holes come in the order of the file."""

    def __init__(self) -> None:
        import hashlib

        self._bytes = hashlib.sha256()
        self._runs = hashlib.sha256()
        self._first = self._end = 0  # the run of blocks that are not all zero, up to now
        self._next = 0  # the number of the block that comes next
        self._held = b""  # what there is of that block

    def add(self, data: bytes) -> None:
        at = 0
        if self._held:
            at = min(BLOCK_BYTES - len(self._held), len(data))
            self._held += data[:at]
            if len(self._held) < BLOCK_BYTES:
                return
            self._add_blocks(self._held, 0, BLOCK_BYTES)
            self._held = b""
        end = len(data) - (len(data) - at) % BLOCK_BYTES
        self._add_blocks(data, at, end)
        self._held = data[end:]

    def skip(self, size: int) -> None:
        """As many zeros, in no time."""
        if self._held:
            filled = min(BLOCK_BYTES - len(self._held), size)
            self.add(_ZEROS[:filled])
            size -= filled
        if size:
            self._next += size // BLOCK_BYTES
            self._held = _ZEROS[: size % BLOCK_BYTES]

    def digest(self) -> bytes:
        """Once, at the end."""
        import hashlib

        size = self._next * BLOCK_BYTES + len(self._held)
        if self._held.count(0) < len(self._held):
            self._add_run(self._held, 0, len(self._held))
        self._end_run()
        whole = hashlib.sha512(TAG + _SIZE.pack(size) + self._runs.digest() + self._bytes.digest())
        return whole.digest()[:32]

    def _add_blocks(self, data: bytes, begin: int, end: int) -> None:
        """Whole blocks. A comparison with zeros ends at the first byte that is none, so it costs little."""
        for at in range(begin, end, BLOCK_BYTES):
            if data.startswith(_ZEROS, at):
                self._add_run(data, begin, at)
                self._next += 1
                begin = at + BLOCK_BYTES
        self._add_run(data, begin, end)

    def _add_run(self, data: bytes, begin: int, end: int) -> None:
        if begin == end:
            return
        if self._next != self._end:
            self._end_run()
            self._first = self._next
        self._next += -(-(end - begin) // BLOCK_BYTES)
        self._end = self._next
        self._bytes.update(memoryview(data)[begin:end])

    def _end_run(self) -> None:
        if self._first != self._end:
            self._runs.update(_RUN.pack(self._first, self._end))


def new_digest(size: int) -> Whole | Blocks:
    """For the contents of a file of this size."""
    return Blocks() if size >= BLOCKS_BYTES_MIN else Whole()


def digest_of_file(fd: int) -> bytes:
    """Of what is in it now. Who must know that it held still compares stamps."""
    found = os.fstat(fd)
    digest = new_digest(found.st_size)
    for is_data, offset, size in extents(fd, found):
        if not is_data:
            digest.skip(size)
            continue
        for data in pieces(fd, offset, size):
            digest.add(data)
    return digest.digest()


def pieces(fd: int, offset: int, size: int) -> Iterator[bytes]:
    """The bytes of a part of a file; fewer, where it became shorter."""
    end = offset + size
    while offset < end:
        data = os.pread(fd, min(READ_BYTES, end - offset), offset)
        if not data:
            return
        yield data
        offset += len(data)


def extents(fd: int, found: os.stat_result) -> Iterator[tuple[bool, int, int]]:
    """Data (True) and holes, in order, without gaps: (is data, offset, bytes).

    Where the file system cannot tell, or does not answer, all of it is data.
    """
    at, end = 0, found.st_size
    can_tell = is_sparse(found) and hasattr(os, "SEEK_DATA")
    while at < end:
        data = _seek(fd, at, os.SEEK_DATA, end) if can_tell else at
        if data > at:
            yield False, at, data - at
        if data < end:
            at = _seek(fd, data, os.SEEK_HOLE, end) if can_tell else end
            if at > data:
                yield True, data, at - data
                continue
            can_tell = False  # it is written to at this moment: the rest is read
        at = data


def is_sparse(found: os.stat_result) -> bool:
    return found.st_size >= SPARSE_BYTES_MIN and found.st_blocks * 512 < found.st_size


def _seek(fd: int, at: int, whence: int, end: int) -> int:
    """Where data or a hole begins. Nothing more of it before the end: the end."""
    try:
        return min(os.lseek(fd, at, whence), end)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end
        return at if whence == getattr(os, "SEEK_DATA", None) else end
