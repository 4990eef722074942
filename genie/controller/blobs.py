"""Directories that were sent along, packed and named by their SHA-256, as files on disk.

An upload goes to a file of its own until the digest has been checked; then it is renamed and never
changes. When the space is used up, blobs that no unfinished job needs go, the longest unused
first. Blocking; the caller keeps it off the loop and calls from one thread at a time.
Not for: packing and unpacking.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from genie.controller.checks import check_digest
from genie.errors import StoreError, StoreFullError, UsageError, WorkdirError
from genie.model.messages import CHUNK_BYTES_MAX, BlobChunk, BlobStatus
from genie.runtime import files

_log = logging.getLogger(__name__)

_PART = "+part"
_READ_BYTES = 1024 * 1024


@dataclass(slots=True)
class _Upload:
    """A hash that has seen exactly the bytes in the file, so that sealing need not read it again."""

    size_bytes: int
    digest: hashlib._Hash


class Blobs:
    def __init__(self, directory: Path, *, bytes_max: int) -> None:
        self._directory = files.make_private_directory(directory)
        self._bytes_max = bytes_max
        self._uploads: dict[str, _Upload] = {}
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Of every file by name, the longest unused first."""
        found = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime)
        self._sizes.update((path.name, path.stat().st_size) for path in found if path.is_file())

    def stat(self, digest: str, *, tenant: str) -> BlobStatus:
        check_digest(digest)
        name = blob_name(digest, tenant)
        if name in self._sizes:
            self._sizes.move_to_end(name)
            return BlobStatus(complete=True, received_bytes=self._sizes[name])
        return BlobStatus(complete=False, received_bytes=self._sizes.get(_part(digest, tenant), 0))

    def put(
        self, digest: str, *, tenant: str, offset: int, data: bytes, last: bool, needed: AbstractSet[str]
    ) -> BlobStatus:
        """One chunk. When `offset` is not where the upload stands, nothing is written and the answer
        says where it does. WorkdirError, and the upload starts anew, when the digest is another."""
        standing = self.stat(digest, tenant=tenant)
        if standing.complete or offset != standing.received_bytes:
            return standing
        if len(data) > CHUNK_BYTES_MAX:
            raise UsageError(f"a chunk of {len(data)} bytes is over {CHUNK_BYTES_MAX}")
        name = _part(digest, tenant)
        self._make_room(len(data), needed=needed, keep=name)
        upload = self._append(name, data)
        if last:
            self._seal(name, digest, upload, into=blob_name(digest, tenant))
        return BlobStatus(complete=last, received_bytes=upload.size_bytes)

    def read(self, digest: str, offset: int, *, tenant: str) -> BlobChunk:
        """The bytes from `offset` on, as many as one chunk takes."""
        check_digest(digest)
        name = blob_name(digest, tenant)
        if name not in self._sizes:
            raise WorkdirError(f"the directory {digest[:12]} is not here", hint="submit the job again")
        size_bytes = self._sizes[name]
        if not 0 <= offset <= size_bytes:
            raise UsageError(f"offset {offset} is not within the {size_bytes} bytes of {digest[:12]}")
        self._sizes.move_to_end(name)
        try:
            with (self._directory / name).open("rb") as file:
                file.seek(offset)
                return BlobChunk(data=file.read(CHUNK_BYTES_MAX), size_bytes=size_bytes)
        except OSError as error:
            raise StoreError(f"the directory {digest[:12]} cannot be read: {error}") from error

    def _append(self, name: str, data: bytes) -> _Upload:
        path = self._directory / name
        try:
            upload = self._uploads.get(name) or self._resumed(path)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                file.truncate(upload.size_bytes)
                file.write(data)
        except OSError as error:
            # What is in the file now is not known: the next chunk finds out.
            self._uploads.pop(name, None)
            self._sizes[name] = path.stat().st_size if path.exists() else 0
            raise StoreFullError(
                f"cannot keep the directory that was sent: {error}", hint="free space on the controller"
            ) from error
        upload.digest.update(data)
        upload.size_bytes += len(data)
        self._uploads[name] = upload
        self._sizes[name] = upload.size_bytes
        self._sizes.move_to_end(name)
        return upload

    def _resumed(self, path: Path) -> _Upload:
        digest, size_bytes = hashlib.sha256(), 0
        if path.exists():
            with path.open("rb") as file:
                while data := file.read(_READ_BYTES):
                    digest.update(data)
                    size_bytes += len(data)
        return _Upload(size_bytes, digest)

    def _seal(self, name: str, digest: str, upload: _Upload, *, into: str) -> None:
        path = self._directory / name
        self._uploads.pop(name, None)
        if upload.digest.hexdigest() != digest:
            self._remove(name)
            raise WorkdirError(
                f"what was sent is not {digest[:12]}: its digest is {upload.digest.hexdigest()[:12]}",
                hint="the directory may have changed meanwhile; send it again",
            )
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.replace(self._directory / into)
            files.sync_directory(self._directory)
        except OSError as error:
            raise StoreFullError(f"cannot keep the directory that was sent: {error}") from error
        self._sizes[into] = self._sizes.pop(name)

    def _make_room(self, more_bytes: int, *, needed: AbstractSet[str], keep: str) -> None:
        total_bytes = sum(self._sizes.values()) + more_bytes
        for name in [name for name in self._sizes if name not in needed and name != keep]:
            if total_bytes <= self._bytes_max:
                return
            total_bytes -= self._sizes[name]
            _log.info("removing %s to make room", name)
            self._remove(name)
        if total_bytes > self._bytes_max:
            raise StoreFullError(
                f"directories of unfinished jobs take all of the {self._bytes_max} bytes for them",
                hint="wait for jobs to end, or raise controller.blobs_bytes_max",
            )

    def _remove(self, name: str) -> None:
        self._uploads.pop(name, None)
        self._sizes.pop(name, None)
        (self._directory / name).unlink(missing_ok=True)


def blob_name(digest: str, tenant: str) -> str:
    """By tenant: whoever knows only the digest of another's directory can neither find nor read it."""
    return f"{digest}+{tenant}"


def _part(digest: str, tenant: str) -> str:
    return f"{digest}+{tenant}{_PART}"
