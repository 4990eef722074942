"""Files that must be whole and private, and the lock that lets one process at a time at them.

Written beside, synced, renamed. Not for: what is in the files.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from genie.errors import StoreFullError, UsageError


def make_private_directory(path: Path) -> Path:
    """The directory and what is missing above it, readable by the owner only."""
    try:
        for missing in reversed([one for one in (path, *path.parents) if not one.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the directory {path}: {error}", hint="set GENIE_STATE_DIR to a place you can write"
        ) from error
    return path


def write_private(path: Path, data: bytes) -> None:
    """Replaces the file at once and durably, mode 0600. After a crash it is the old one or the new one."""
    make_private_directory(path.parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        beside.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StoreFullError(
            f"cannot write {path}: {error}", hint="check free space and permissions"
        ) from error


def sync_directory(path: Path) -> None:
    """Makes renames and new names in this directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileLock:
    """One process at a time. The lock is the kernel's, so it goes when the process goes, however it ends.

    The file stays: removing it would let two processes lock two files of one name. It holds the
    process id of whoever locked it last, for people.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def try_take(cls, path: Path) -> FileLock | None:
        """The lock, or None when another process has it. OSError when the file cannot be opened."""
        import fcntl  # late: a client needs no lock, and not every laptop has the module

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        _note_pid(descriptor)
        return cls(descriptor)

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def lock_holder(path: Path) -> str:
    """The process id in a lock's file, as text; empty when it is not known."""
    try:
        return path.read_text("utf-8", errors="replace").strip()[:32]
    except OSError:
        return ""


def _note_pid(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        # The id only helps a person; the lock holds without it, on a full disk too.
        pass
