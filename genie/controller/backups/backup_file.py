"""The file of a backup: a header with a checksum, then the rows of a store. Plain blocking code.

    magic (8 bytes) | header size (4, big endian) | SHA-256 of the header (32) | header (JSON), padded
    to 1024 bytes in total; then for each row: key size (4), value size (4), key, value

Engine-independent: a backup of SQLite can be restored to etcd and the other way round. A row on a lease is
never part of it. The file is complete or does not exist: it is written under another name, with mode 0600,
and renamed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from genie.controller.store.protocol import KEY_BYTES_MAX, VALUE_BYTES_MAX, KeyValue
from genie.errors import BackupError, StoreFullError, StoreVersionError
from genie.processes import files

FORMAT_VERSION = 1
_BACKUP_FILE_MAGIC = b"GENIEBK\n"
_MAGIC_SIZE_AND_CHECKSUM = struct.Struct(">8sI32s")
_ROW_SIZES = struct.Struct(">II")
_HEADER_AREA_BYTES = 1024
_CHECKSUM_READ_BYTES = 1024 * 1024

BackupRow = tuple[str, bytes]
"""Key and value."""


class BackupHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup contains. `revision` is that of the store it was taken from."""

    format_version: int = FORMAT_VERSION
    cluster_id: str
    generation: int
    revision: int
    created_at: float
    """Unix time."""
    genie_version: str
    row_count: int = 0
    body_bytes: int = 0
    body_sha256: str = ""


class _FormatVersion(msgspec.Struct, frozen=True):
    format_version: int


def encode_rows(rows: Iterable[KeyValue]) -> bytes:
    parts: list[bytes] = []
    for row in rows:
        key = row.key.encode()
        parts += (_ROW_SIZES.pack(len(key), len(row.value)), key, row.value)
    return b"".join(parts)


class BackupWriter:
    """Writes encoded rows in order. `finish` gives the file its name, `abort` removes what was written."""

    def __init__(self, path: Path) -> None:
        """Raises BackupError if `path` exists and is not a backup, or cannot be created."""
        self._path = path
        self._temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
        self._digest = hashlib.sha256()
        self._body_bytes = 0
        _check_absent_or_backup(path)
        try:
            # The directory may be one that others can write to, such as /tmp.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._temporary_path, flags, 0o600)
        except OSError as error:
            raise self._to_backup_error(error) from error
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._file.write(bytes(_HEADER_AREA_BYTES))

    def write(self, encoded_rows: bytes) -> None:
        try:
            self._file.write(encoded_rows)
        except OSError as error:
            raise self._to_backup_error(error) from error
        self._digest.update(encoded_rows)
        self._body_bytes += len(encoded_rows)

    def finish(self, header: BackupHeader, *, row_count: int) -> BackupHeader:
        """Makes the file durable and returns its complete header."""
        header = msgspec.structs.replace(
            header, row_count=row_count, body_bytes=self._body_bytes, body_sha256=self._digest.hexdigest()
        )
        body = msgspec.json.encode(header)
        assert _MAGIC_SIZE_AND_CHECKSUM.size + len(body) <= _HEADER_AREA_BYTES, "the header is too large"
        try:
            self._file.seek(0)
            self._file.write(
                _MAGIC_SIZE_AND_CHECKSUM.pack(_BACKUP_FILE_MAGIC, len(body), hashlib.sha256(body).digest())
                + body
            )
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary_path.replace(self._path)
            files.sync_directory(self._path.parent)
        except OSError as error:
            raise self._to_backup_error(error) from error
        return header

    def abort(self) -> None:
        """Removes an unfinished file. Does nothing after `finish`."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary_path.unlink(missing_ok=True)

    def _to_backup_error(self, error: OSError) -> StoreFullError | BackupError:
        if isinstance(error, FileNotFoundError):
            return BackupError(
                f"could not write the backup {self._path}: the directory does not exist",
                hint=f"create it: mkdir -p {self._path.parent}",
            )
        return BackupError(
            f"could not write the backup {self._path}: {error.strerror}",
            hint="check free space and permissions, or choose another file",
        )


class BackupReader:
    """An existing backup. `verify` reads all of it; call it before `rows`."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises BackupError, and StoreVersionError for a newer format."""
        self._path = path
        try:
            with path.open("rb") as file:
                area = file.read(_HEADER_AREA_BYTES)
        except OSError as error:
            raise BackupError(f"could not read the backup {path}: {error.strerror}") from error
        self.header = self._decode_header(area)

    def verify(self) -> None:
        """Compares size and checksum. Raises BackupError if the file is damaged."""
        digest, size_bytes = hashlib.sha256(), 0
        with self._open_body() as file:
            while data := file.read(_CHECKSUM_READ_BYTES):
                digest.update(data)
                size_bytes += len(data)
        if size_bytes != self.header.body_bytes:
            raise self._damaged_error(
                f"it has {size_bytes} bytes of rows instead of {self.header.body_bytes}"
            )
        if digest.hexdigest() != self.header.body_sha256:
            raise self._damaged_error("its checksum does not match")

    def rows(self) -> Iterator[BackupRow]:
        """The rows in the order of their keys."""
        with self._open_body() as file:
            while sizes := file.read(_ROW_SIZES.size):
                if len(sizes) != _ROW_SIZES.size:
                    raise self._damaged_error("a row is incomplete")
                key_bytes, value_bytes = _ROW_SIZES.unpack(sizes)
                if not 0 < key_bytes <= KEY_BYTES_MAX or value_bytes > VALUE_BYTES_MAX:
                    raise self._damaged_error("a row is too large")
                key, value = file.read(key_bytes), file.read(value_bytes)
                if len(value) != value_bytes:
                    raise self._damaged_error("a row is incomplete")
                yield self._decode_key(key), value

    @contextlib.contextmanager
    def _open_body(self) -> Iterator[BinaryIO]:
        try:
            with self._path.open("rb") as file:
                file.seek(_HEADER_AREA_BYTES)
                yield file
        except OSError as error:
            raise BackupError(f"could not read the backup {self._path}: {error.strerror}") from error

    def _decode_key(self, key: bytes) -> str:
        try:
            return key.decode()
        except UnicodeDecodeError:
            raise self._damaged_error("a key is not UTF-8") from None

    def _decode_header(self, area: bytes) -> BackupHeader:
        if not area.startswith(_BACKUP_FILE_MAGIC):
            raise BackupError(
                f"{self._path} is not a backup of a store", hint="create one: genie store backup FILE"
            )
        if len(area) < _HEADER_AREA_BYTES:
            raise self._damaged_error("its header is incomplete")
        _, size_bytes, checksum = _MAGIC_SIZE_AND_CHECKSUM.unpack_from(area)
        body = area[_MAGIC_SIZE_AND_CHECKSUM.size : _MAGIC_SIZE_AND_CHECKSUM.size + size_bytes]
        if hashlib.sha256(body).digest() != checksum:
            raise self._damaged_error("the checksum of its header does not match")
        try:
            version = msgspec.json.decode(body, type=_FormatVersion).format_version
            if version > FORMAT_VERSION:
                raise StoreVersionError(
                    f"the backup {self._path} has format {version}; this Genie supports up to "
                    f"{FORMAT_VERSION}",
                    hint="install the newer Genie that wrote it",
                )
            return msgspec.json.decode(body, type=BackupHeader)
        except msgspec.DecodeError as error:
            raise self._damaged_error(f"its header cannot be decoded: {error}") from error

    def _damaged_error(self, reason: str) -> BackupError:
        return BackupError(
            f"the backup {self._path} is damaged: {reason}", hint="use another backup; nothing was restored"
        )


def _check_absent_or_backup(path: Path) -> None:
    """Only a backup may be replaced: a mistyped name must not destroy another file."""
    try:
        with path.open("rb") as file:
            is_backup = file.read(len(_BACKUP_FILE_MAGIC)) == _BACKUP_FILE_MAGIC
    except FileNotFoundError:
        return
    except OSError as error:
        raise BackupError(f"could not write the backup {path}: {error.strerror}") from error
    if not is_backup:
        raise BackupError(
            f"{path} exists and is not a backup of a store", hint="choose another file or remove it first"
        )
