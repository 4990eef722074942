"""One process at a time: a lock on a file beside the store, and files that only their owner can read.

The lock is the kernel's, so it goes when the process goes, however it ends. The file stays
(removing it would let two processes lock two different files of one name). A child made by
fork without exec would keep the lock alive: start processes, do not fork.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from genie.errors import StoreError, StoreFullError, StoreUnavailableError

PRIVATE_MODE = 0o600


class FileLock:
    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> FileLock:
        """At once or StoreUnavailableError, which names the holder's process id when it is known."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_MODE)
        except OSError as error:
            raise _translate(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise _translate(path, error) from error
            raise StoreUnavailableError(
                f"the store is open in another process ({f'pid {holder}' if holder else 'pid unknown'}): "
                f"{path} is locked",
                hint="stop that controller first, or give another state directory",
            ) from error
        _write_pid(descriptor)
        return cls(path, descriptor)

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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


def _write_pid(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        # The id only helps a person; the lock holds without it, on a full disk too.
        pass


def _translate(path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"no space for {path}: {error.strerror}", hint="free space on its disk")
    return StoreUnavailableError(
        f"{path} cannot be opened: {error.strerror}", hint="check its owner and mode"
    )
