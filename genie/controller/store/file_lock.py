"""Opens the store's files: locked, readable only by their owner, with actionable errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from genie.errors import StoreError, StoreFullError, StoreUnavailableError
from genie.processes.files import FileLock, read_lock_holder_pid

PRIVATE_FILE_MODE = 0o600


def acquire_store_file_lock(path: Path) -> FileLock:
    """Acquires the lock without waiting. Raises StoreUnavailableError with the holder's pid if known."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock.try_acquire(path)
    except OSError as error:
        raise _to_store_error(path, error) from error
    if lock is None:
        holder = read_lock_holder_pid(path)
        raise StoreUnavailableError(
            f"the store is open in another process ({f'pid {holder}' if holder else 'pid unknown'}): "
            f"{path} is locked",
            hint="stop that controller first, or use another state directory",
        )
    return lock


def make_private_file(path: Path) -> None:
    """Creates the file if needed and restricts it to its owner."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE_MODE)
        try:
            os.fchmod(descriptor, PRIVATE_FILE_MODE)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _to_store_error(path, error) from error


def _to_store_error(path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"no space left for {path}: {error.strerror}", hint="free space on its disk")
    return StoreUnavailableError(f"could not open {path}: {error.strerror}", hint="check its owner and mode")
