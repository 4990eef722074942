"""The directory of a controller on its machine: its lock and its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from genie.errors import LeadershipError
from genie.processes import files

_LOCK_FILE = "controller.lock"
_NAME_FILE = "name"


@contextmanager
def lock_controller_directory(directory: Path) -> Iterator[None]:
    """Hold the lock of the directory: two controllers must not share a name, a CA and a store."""
    lock = files.FileLock.try_acquire(directory / _LOCK_FILE)
    if lock is None:
        raise LeadershipError(
            f"another controller is using {directory}",
            hint="stop it with 'genie down', or set GENIE_STATE_DIR to another directory",
        )
    try:
        yield
    finally:
        lock.release()


def read_or_create_name(directory: Path) -> str:
    """Return the name of the controller of this directory; created at the first start."""
    path = directory / _NAME_FILE
    if not path.exists():
        files.write_private(path, os.urandom(8).hex().encode())
    return path.read_text("utf-8").strip()
