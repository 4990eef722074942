"""Files in a job's own directory, where the job can put anything in their place: pipes, links, directories.

Reading never waits and never follows a link, writing never opens what is there, removing never fails.
Not for: the node's own files (runtime/files.py), and what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO

from genie.runtime import files

_log = logging.getLogger(__name__)

RECORD_BYTES_MAX = 65536


def open_plain(path: Path) -> IO[bytes]:
    """OSError for whatever is not a plain file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read(path: Path) -> bytes:
    """A small record. OSError when it is not there, too large, or no plain file."""
    with open_plain(path) as file:
        data = file.read(RECORD_BYTES_MAX + 1)
    if len(data) > RECORD_BYTES_MAX:
        raise OSError(errno.EFBIG, "too large for a record", str(path))
    return data


def write(path: Path, data: bytes) -> None:
    """Replaces the file at once and durably, mode 0600. OSError."""
    fd, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        Path(beside).replace(path)
        files.sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            Path(beside).unlink()
        raise


def exists(path: Path) -> bool:
    """Whether anything is there, a dangling link too. What cannot be looked at is not there."""
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def try_unlink(path: Path) -> None:
    """One file. What is in its place and cannot be unlinked stays, and is the job's own."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error.strerror)


def try_remove_tree(path: Path) -> None:
    """As much as can be removed. Blocks."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            path.chmod(0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
