"""Content digests of files, and the data and holes of sparse files.

The digest of a file below BLOCK_DIGEST_FILE_BYTES_MIN is its SHA-256. A larger file may be sparse, so its
digest covers only blocks that are not all zero: SHA-512, truncated to 32 bytes, of BLOCK_DIGEST_TAG, size,
SHA-256 of the ranges of such blocks (first, end, as little-endian 64-bit numbers) and SHA-256 of their bytes.
The last block may be short. The digest depends only on the bytes of the file, not on whether zeros are stored
or holes. Large files use a different outer hash function, so that no small file can have the digest of a
large one.

Runs on nodes and on this machine: standard library only, Python 3.8.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator

DIGEST_BLOCK_BYTES = 64 << 10
BLOCK_DIGEST_FILE_BYTES_MIN = 1 << 20
SPARSE_FILE_BYTES_MIN = 64 << 10
READ_CHUNK_BYTES = 1 << 20
BLOCK_DIGEST_TAG = b"genie grid contents, blocks of 64 KiB\n"
_RANGE_STRUCT = struct.Struct("<QQ")
_SIZE_STRUCT = struct.Struct("<Q")
_ZERO_BLOCK = bytes(DIGEST_BLOCK_BYTES)


class WholeFileDigest:
    """The digest of a small file. Data and holes are added in file order."""

    def __init__(self) -> None:
        import hashlib

        self._sha256 = hashlib.sha256()

    def add_data(self, data: bytes) -> None:
        self._sha256.update(data)

    def add_zeros(self, size: int) -> None:
        """Add `size` zeros."""
        for at in range(0, size, DIGEST_BLOCK_BYTES):
            self._sha256.update(_ZERO_BLOCK[: min(size - at, DIGEST_BLOCK_BYTES)])

    def digest(self) -> bytes:
        return self._sha256.digest()


class SparseFileDigest:
    """The digest of a large file. Data and holes are added in file order."""

    def __init__(self) -> None:
        import hashlib

        self._sha256_of_data = hashlib.sha256()
        self._sha256_of_ranges = hashlib.sha256()
        self._range_start = self._range_end = 0  # the current range of blocks that are not all zero
        self._next_block_number = 0  # number of the next block
        self._partial_block = b""  # the bytes of that block so far

    def add_data(self, data: bytes) -> None:
        at = 0
        if self._partial_block:
            at = min(DIGEST_BLOCK_BYTES - len(self._partial_block), len(data))
            self._partial_block += data[:at]
            if len(self._partial_block) < DIGEST_BLOCK_BYTES:
                return
            self._add_whole_blocks(self._partial_block, 0, DIGEST_BLOCK_BYTES)
            self._partial_block = b""
        end = len(data) - (len(data) - at) % DIGEST_BLOCK_BYTES
        self._add_whole_blocks(data, at, end)
        self._partial_block = data[end:]

    def add_zeros(self, size: int) -> None:
        """Add `size` zeros, in constant time."""
        if self._partial_block:
            filled = min(DIGEST_BLOCK_BYTES - len(self._partial_block), size)
            self.add_data(_ZERO_BLOCK[:filled])
            size -= filled
        if size:
            self._next_block_number += size // DIGEST_BLOCK_BYTES
            self._partial_block = _ZERO_BLOCK[: size % DIGEST_BLOCK_BYTES]

    def digest(self) -> bytes:
        """Return the digest. Call it once, after all data."""
        import hashlib

        size = self._next_block_number * DIGEST_BLOCK_BYTES + len(self._partial_block)
        if self._partial_block.count(0) < len(self._partial_block):
            self._add_nonzero_range(self._partial_block, 0, len(self._partial_block))
        self._hash_current_range()
        whole = hashlib.sha512(
            BLOCK_DIGEST_TAG
            + _SIZE_STRUCT.pack(size)
            + self._sha256_of_ranges.digest()
            + self._sha256_of_data.digest()
        )
        return whole.digest()[:32]

    def _add_whole_blocks(self, data: bytes, begin: int, end: int) -> None:
        """Add whole blocks. The comparison with zeros is cheap: it stops at the first other byte."""
        for at in range(begin, end, DIGEST_BLOCK_BYTES):
            if data.startswith(_ZERO_BLOCK, at):
                self._add_nonzero_range(data, begin, at)
                self._next_block_number += 1
                begin = at + DIGEST_BLOCK_BYTES
        self._add_nonzero_range(data, begin, end)

    def _add_nonzero_range(self, data: bytes, begin: int, end: int) -> None:
        if begin == end:
            return
        if self._next_block_number != self._range_end:
            self._hash_current_range()
            self._range_start = self._next_block_number
        self._next_block_number += -(-(end - begin) // DIGEST_BLOCK_BYTES)
        self._range_end = self._next_block_number
        self._sha256_of_data.update(memoryview(data)[begin:end])

    def _hash_current_range(self) -> None:
        if self._range_start != self._range_end:
            self._sha256_of_ranges.update(_RANGE_STRUCT.pack(self._range_start, self._range_end))


def make_digest_for_size(size: int) -> WholeFileDigest | SparseFileDigest:
    """Return an empty digest for a file of this size."""
    return SparseFileDigest() if size >= BLOCK_DIGEST_FILE_BYTES_MIN else WholeFileDigest()


def compute_file_digest(fd: int) -> bytes:
    """Return the digest of the current contents. Callers detect concurrent changes by comparing stamps."""
    found = os.fstat(fd)
    digest = make_digest_for_size(found.st_size)
    for is_data, offset, size in list_extents(fd, found):
        if not is_data:
            digest.add_zeros(size)
            continue
        for data in read_pieces(fd, offset, size):
            digest.add_data(data)
    return digest.digest()


def read_pieces(fd: int, offset: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of a range of a file; fewer if the file has become shorter."""
    end = offset + size
    while offset < end:
        data = os.pread(fd, min(READ_CHUNK_BYTES, end - offset), offset)
        if not data:
            return
        yield data
        offset += len(data)


def list_extents(fd: int, found: os.stat_result) -> Iterator[tuple[bool, int, int]]:
    """Yield (is data, offset, size) for all data and holes, in order and without gaps.

    If the file system does not report holes, the whole file is data.
    """
    at, end = 0, found.st_size
    can_seek = is_sparse(found) and hasattr(os, "SEEK_DATA")
    while at < end:
        data = _seek_data_or_hole(fd, at, os.SEEK_DATA, end) if can_seek else at
        if data > at:
            yield False, at, data - at
        if data < end:
            at = _seek_data_or_hole(fd, data, os.SEEK_HOLE, end) if can_seek else end
            if at > data:
                yield True, data, at - data
                continue
            can_seek = False  # the file is being written: treat the rest as data
        at = data


def is_sparse(found: os.stat_result) -> bool:
    return found.st_size >= SPARSE_FILE_BYTES_MIN and found.st_blocks * 512 < found.st_size


def _seek_data_or_hole(fd: int, at: int, whence: int, end: int) -> int:
    """Return the offset of the next data or hole, or `end` if there is none."""
    try:
        return min(os.lseek(fd, at, whence), end)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end
        return at if whence == getattr(os, "SEEK_DATA", None) else end
