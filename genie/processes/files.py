"""Atomic, private files (mode 0600), and a lock file for mutual exclusion between processes."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import stat
from pathlib import Path

from genie.errors import StoreFullError, UsageError

SECTOR_BYTES = 512
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # not on Windows
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


def make_private_directory(path: Path) -> Path:
    """Creates the directory and its missing parents with mode 0700."""
    try:
        for missing in reversed([one for one in (path, *path.parents) if not one.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create the directory {path}: {error}", hint="set GENIE_STATE_DIR to a writable directory"
        ) from error
    return path


def write_private(path: Path, data: bytes) -> None:
    """Replaces the file atomically and durably, with mode 0600."""
    make_private_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # a read-only file system
            temporary.unlink(missing_ok=True)
        raise StoreFullError(
            f"cannot write {path}: {error}", hint="check free space and permissions"
        ) from error


def replace_or_overwrite_private_file(path: Path, data: bytes) -> None:
    """Like write_private(), but works on a full disk if the file exists: it is then overwritten in place.

    At most one sector, which disks write as a whole. Spaces are appended up to the former size.
    """
    assert len(data) <= SECTOR_BYTES, "larger than a sector"
    try:
        write_private(path, data)
    except StoreFullError:
        try:
            descriptor = os.open(path, os.O_WRONLY | _NOFOLLOW)
        except OSError:
            descriptor = -1
        if descriptor < 0:
            raise
        _overwrite_file(descriptor, path, data)


def _overwrite_file(descriptor: int, path: Path, data: bytes) -> None:
    try:
        size_bytes = min(os.fstat(descriptor).st_size, SECTOR_BYTES)
        os.pwrite(descriptor, data.ljust(size_bytes), 0)
        os.fsync(descriptor)
    except OSError as error:
        raise StoreFullError(
            f"cannot overwrite {path}: {error}", hint="check free space and permissions"
        ) from error
    finally:
        os.close(descriptor)


def remove_unfinished_writes(path: Path) -> None:
    """Removes the temporary files of a write_private() that was killed. Raises OSError."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        temporary.unlink(missing_ok=True)


def read_small_file(path: Path, *, bytes_max: int = 64 << 10) -> str:
    """Returns the text of a regular file.

    Raises OSError for a larger file and for anything that could block, such as a pipe, and
    UnicodeDecodeError if it is not UTF-8.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | _NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes", str(path))
    return data.decode("utf-8")


def sync_directory(path: Path) -> None:
    """Makes renames and new names in this directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileLock:
    """A flock() on a file, held by one process; the kernel releases it when the process ends.

    The file is never removed: otherwise two processes could lock two files of the same name. It contains
    the process ID of the last holder, for diagnosis.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def try_acquire(cls, path: Path) -> FileLock | None:
        """The lock, or None if another process holds it. Raises OSError if the file cannot be opened."""
        import fcntl  # imported here: clients need no lock, and the module is missing on Windows

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        _write_pid(descriptor)
        return cls(descriptor)

    @classmethod
    def is_held(cls, path: Path) -> bool:
        """Whether a process holds the lock. Leaves the process ID in the file as it is."""
        import fcntl

        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_lock_holder_pid(path: Path) -> str:
    """The process ID in a lock file, as text; empty if unknown."""
    try:
        return path.read_text("utf-8", errors="replace").strip()[:32]
    except OSError:
        return ""


def _write_pid(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        # Only diagnosis needs the ID; on a full disk the lock works without it.
        pass
