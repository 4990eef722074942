"""Opening the store's files: locked, readable by their owner only, and with errors that say what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from genie.errors import StoreError, StoreFullError, StoreUnavailableError
from genie.runtime.files import FileLock, lock_holder

PRIVATE_MODE = 0o600


def take_lock(path: Path) -> FileLock:
    """At once or StoreUnavailableError, which names the holder's process id when it is known."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock.try_take(path)
    except OSError as error:
        raise _translate(path, error) from error
    if lock is None:
        holder = lock_holder(path)
        raise StoreUnavailableError(
            f"the store is open in another process ({f'pid {holder}' if holder else 'pid unknown'}): "
            f"{path} is locked",
            hint="stop that controller first, or give another state directory",
        )
    return lock


def make_private_file(path: Path) -> None:
    """The file exists afterwards, and nobody but its owner may read it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_MODE)
        try:
            os.fchmod(descriptor, PRIVATE_MODE)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _translate(path, error) from error


def _translate(path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"no space for {path}: {error.strerror}", hint="free space on its disk")
    return StoreUnavailableError(
        f"{path} cannot be opened: {error.strerror}", hint="check its owner and mode"
    )
