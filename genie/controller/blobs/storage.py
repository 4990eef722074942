"""Blobs: uploaded working directories, as files on disk named by their SHA-256.

An upload goes to a partial file; once its digest is verified it is renamed and never changes. When the
space of a tenant is used up, its own blobs that no unfinished job needs are evicted, least recently used
first. When the space of all is used up, so are those of other tenants, but not within
BLOB_PINNED_AFTER_USE_S of their upload or last use: a client uploads first and submits later. Blocking: call
it from one thread at a time, never from the event loop. Packing and unpacking is done by clients and agents.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from genie.errors import BlobSpaceError, StoreError, StoreFullError, UsageError, WorkdirError
from genie.model.limits import check_digest
from genie.model.messages import CHUNK_BYTES_MAX, BlobChunk, BlobStatus
from genie.processes import files
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

BLOB_PINNED_AFTER_USE_S = 600.0
_PARTIAL_SUFFIX = "+part"
_HASHING_CHUNK_BYTES = 1024 * 1024


@dataclass(slots=True)
class _PartialUpload:
    """The hash of the bytes in the partial file, so that verifying need not read it again."""

    size_bytes: int
    hasher: hashlib._Hash


class BlobStorage:
    """`tenant_bytes_max`: of each tenant; `bytes_max`: of all together."""

    def __init__(self, directory: Path, *, bytes_max: int, tenant_bytes_max: int, clock: Clock) -> None:
        self._directory = files.make_private_directory(directory)
        self._all_tenants_bytes_max = bytes_max
        self._tenant_bytes_max = min(tenant_bytes_max, bytes_max)
        self._clock = clock
        self._uploads_by_file_name: dict[str, _PartialUpload] = {}
        self._size_bytes_by_file_name: OrderedDict[str, int] = OrderedDict()
        """By file name, least recently used first."""
        self._last_used_s_by_file_name: dict[str, float] = {}
        """By file name: when it was last written or used by its tenant."""
        self._total_bytes = 0
        self._bytes_by_tenant: Counter[str] = Counter()
        for path in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime):
            if path.is_file():
                self._account_file_size(path.name, path.stat().st_size)

    def get_status(self, digest: str, *, tenant: str) -> BlobStatus:
        check_digest(digest)
        name = blob_name(digest, tenant)
        if name in self._size_bytes_by_file_name:
            self._mark_file_used(name)
            return BlobStatus(complete=True, received_bytes=self._size_bytes_by_file_name[name])
        return BlobStatus(
            complete=False,
            received_bytes=self._size_bytes_by_file_name.get(_partial_file_name(digest, tenant), 0),
        )

    def append_chunk(
        self,
        digest: str,
        *,
        tenant: str,
        offset: int,
        data: bytes,
        is_last: bool,
        is_needed: Callable[[str], bool],
    ) -> BlobStatus:
        """Append one chunk. If `offset` is not the current size, nothing is written, and the reply has the
        current size. WorkdirError if the digest does not match; the upload then starts over."""
        status = self.get_status(digest, tenant=tenant)
        if status.complete or offset != status.received_bytes:
            return status
        if len(data) > CHUNK_BYTES_MAX:
            raise UsageError(f"a chunk has {len(data)} bytes; the maximum is {CHUNK_BYTES_MAX}")
        name = _partial_file_name(digest, tenant)
        self._evict_to_make_space(len(data), tenant=tenant, is_needed=is_needed, keep=name)
        upload = self._append_to_partial_file(name, data)
        if is_last:
            self._finish_upload(name, digest, upload, blob_name=blob_name(digest, tenant))
        return BlobStatus(complete=is_last, received_bytes=upload.size_bytes)

    def read_chunk(self, digest: str, offset: int, *, tenant: str) -> BlobChunk:
        """Read one chunk from `offset`."""
        check_digest(digest)
        name = blob_name(digest, tenant)
        if name not in self._size_bytes_by_file_name:
            raise WorkdirError(
                f"the working directory {digest[:12]} is not on the controller", hint="submit the job again"
            )
        size_bytes = self._size_bytes_by_file_name[name]
        if not 0 <= offset <= size_bytes:
            raise UsageError(f"offset {offset} is not within the {size_bytes} bytes of {digest[:12]}")
        self._mark_file_used(name)
        try:
            with (self._directory / name).open("rb") as file:
                file.seek(offset)
                return BlobChunk(data=file.read(CHUNK_BYTES_MAX), size_bytes=size_bytes)
        except OSError as error:
            raise StoreError(f"could not read the working directory {digest[:12]}: {error}") from error

    def _append_to_partial_file(self, name: str, data: bytes) -> _PartialUpload:
        path = self._directory / name
        try:
            upload = self._uploads_by_file_name.get(name) or self._resume_upload(path)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                file.truncate(upload.size_bytes)
                file.write(data)
        except OSError as error:
            # The size of the file is unknown now: the next chunk reads it.
            self._uploads_by_file_name.pop(name, None)
            self._account_file_size(name, path.stat().st_size if path.exists() else 0)
            raise StoreFullError(
                f"could not store the working directory: {error}", hint="free disk space on the controller"
            ) from error
        upload.hasher.update(data)
        upload.size_bytes += len(data)
        self._uploads_by_file_name[name] = upload
        self._account_file_size(name, upload.size_bytes)
        return upload

    def _resume_upload(self, path: Path) -> _PartialUpload:
        digest, size_bytes = hashlib.sha256(), 0
        if path.exists():
            with path.open("rb") as file:
                while data := file.read(_HASHING_CHUNK_BYTES):
                    digest.update(data)
                    size_bytes += len(data)
        return _PartialUpload(size_bytes, digest)

    def _finish_upload(self, name: str, digest: str, upload: _PartialUpload, *, blob_name: str) -> None:
        path = self._directory / name
        self._uploads_by_file_name.pop(name, None)
        if upload.hasher.hexdigest() != digest:
            self._delete_blob_file(name)
            raise WorkdirError(
                f"the upload of {digest[:12]} has the digest {upload.hasher.hexdigest()[:12]}",
                hint="the directory may have changed during the upload; upload it again",
            )
        try:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.replace(self._directory / blob_name)
            files.sync_directory(self._directory)
        except OSError as error:
            raise StoreFullError(f"could not store the working directory: {error}") from error
        self._account_file_size(blob_name, self._pop_accounted_size_bytes(name))

    def _evict_to_make_space(
        self, more_bytes: int, *, tenant: str, is_needed: Callable[[str], bool], keep: str
    ) -> None:
        """Make space for `more_bytes` of a tenant; BlobSpaceError if that is not possible."""
        if self._bytes_by_tenant[tenant] + more_bytes > self._tenant_bytes_max:
            own = [
                name
                for name in self._size_bytes_by_file_name
                if _tenant_of_blob_file(name) == tenant and name != keep
            ]
            for name in own:
                if self._bytes_by_tenant[tenant] + more_bytes <= self._tenant_bytes_max:
                    break
                if not is_needed(name):
                    self._evict_blob(name)
            if self._bytes_by_tenant[tenant] + more_bytes > self._tenant_bytes_max:
                raise BlobSpaceError(
                    f"working directories of unfinished jobs of tenant {tenant} use all of its "
                    f"{self._tenant_bytes_max} bytes for blobs",
                    hint="wait until jobs end, or increase controller.blobs_tenant_bytes_max",
                )
        if self._total_bytes + more_bytes > self._all_tenants_bytes_max:
            self._evict_blobs_of_all_tenants(more_bytes, tenant=tenant, is_needed=is_needed, keep=keep)

    def _evict_blobs_of_all_tenants(
        self, more_bytes: int, *, tenant: str, is_needed: Callable[[str], bool], keep: str
    ) -> None:
        unpinned_s = self._clock.monotonic_s() - BLOB_PINNED_AFTER_USE_S
        for name in list(self._size_bytes_by_file_name):
            if self._total_bytes + more_bytes <= self._all_tenants_bytes_max:
                return
            is_pinned = (
                _tenant_of_blob_file(name) != tenant and self._last_used_s_by_file_name[name] > unpinned_s
            )
            if name != keep and not is_pinned and not is_needed(name):
                self._evict_blob(name)
        if self._total_bytes + more_bytes > self._all_tenants_bytes_max:
            raise BlobSpaceError(
                f"working directories of unfinished jobs and recent uploads use all of the "
                f"{self._all_tenants_bytes_max} bytes for blobs",
                hint="wait until jobs end, or increase controller.blobs_bytes_max",
            )

    def _evict_blob(self, name: str) -> None:
        _log.info("evicting blob %s", name)
        self._delete_blob_file(name)

    def _delete_blob_file(self, name: str) -> None:
        self._uploads_by_file_name.pop(name, None)
        self._pop_accounted_size_bytes(name)
        (self._directory / name).unlink(missing_ok=True)

    def _mark_file_used(self, name: str) -> None:
        self._size_bytes_by_file_name.move_to_end(name)
        self._last_used_s_by_file_name[name] = self._clock.monotonic_s()

    def _account_file_size(self, name: str, size_bytes: int) -> None:
        more_bytes = size_bytes - self._size_bytes_by_file_name.get(name, 0)
        self._size_bytes_by_file_name[name] = size_bytes
        self._total_bytes += more_bytes
        self._bytes_by_tenant[_tenant_of_blob_file(name)] += more_bytes
        self._mark_file_used(name)

    def _pop_accounted_size_bytes(self, name: str) -> int:
        """Remove a file from the accounts; return its size."""
        size_bytes = self._size_bytes_by_file_name.pop(name, 0)
        self._last_used_s_by_file_name.pop(name, None)
        self._total_bytes -= size_bytes
        self._bytes_by_tenant[_tenant_of_blob_file(name)] -= size_bytes
        return size_bytes


def blob_name(digest: str, tenant: str) -> str:
    """Per tenant: the digest alone does not give access to a blob of another tenant."""
    return f"{digest}+{tenant}"


def split_blob_name(name: str) -> tuple[str, str]:
    """Digest and tenant, the inverse of blob_name."""
    digest, _, tenant = name.partition("+")
    return digest, tenant


def _tenant_of_blob_file(name: str) -> str:
    return name.split("+")[1] if "+" in name else ""


def _partial_file_name(digest: str, tenant: str) -> str:
    return f"{digest}+{tenant}{_PARTIAL_SUFFIX}"
