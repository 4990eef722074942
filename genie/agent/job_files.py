"""Files in a job's directory, which the job can replace by anything: pipes, links, directories.

Reading never blocks and never follows a link, writing never opens an existing file, removing never fails.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from genie.processes import files

_log = logging.getLogger(__name__)

SMALL_FILE_BYTES_MAX = 65536
"""Of a small file of a job, and of what its shim reports."""


def open_regular_file(path: Path) -> IO[bytes]:
    """Opens a regular file. Raises OSError for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_small_file(path: Path, *, bytes_max: int = SMALL_FILE_BYTES_MAX) -> bytes:
    """Returns the contents of a small regular file. Raises OSError."""
    with open_regular_file(path) as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes", str(path))
    return data


def write_new_file(path: Path, data: bytes) -> None:
    """Replaces whatever is there by a file with mode 0600, neither atomically nor durably. Raises OSError."""
    remove_any(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces the file atomically and durably, with mode 0600. Raises OSError."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        Path(temporary).replace(path)
        files.sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def path_exists(path: Path) -> bool:
    """Whether the path exists; true for a dangling link, false if it cannot be read."""
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def remove_any(path: Path) -> None:
    """Removes what should be a file, also if it is a directory. Raises OSError."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        try_remove_tree(path)
        if path_exists(path):
            raise


def try_remove_any(path: Path) -> None:
    """As `remove_any`, but logs a warning if that fails."""
    try:
        remove_any(path)
    except OSError as error:
        _log.warning("could not remove %s: %s", path, error.strerror)


def try_set_modified_time(path: Path, modified_s: float) -> None:
    with contextlib.suppress(OSError):
        os.utime(path, (modified_s, modified_s), follow_symlinks=False)


@dataclass(frozen=True)
class RunDirectorySize:
    """The size of the directory of a job. A new run has another `inode`."""

    inode: int
    work_dir_bytes: int
    other_files_bytes: int


def try_measure_run_directory(directory: Path, last_size: RunDirectorySize | None) -> RunDirectorySize | None:
    """Measures the directory of an ended job, or returns `last_size` if it is of this run. Blocks."""
    work = directory / "work"
    try:
        inode = os.lstat(directory).st_ino
    except OSError:
        return None
    if last_size is not None and last_size.inode == inode:
        return last_size if path_exists(work) else replace(last_size, work_dir_bytes=0)
    work_bytes = tree_size_bytes(work)
    return RunDirectorySize(inode, work_bytes, tree_size_bytes(directory) - work_bytes)


def tree_size_bytes(path: Path) -> int:
    """The space that the tree occupies, without parts that cannot be read. Blocks."""
    size_bytes = 0
    directories = [str(path)]
    while directories:
        with contextlib.suppress(OSError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    size_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
    return size_bytes


def try_remove_tree(path: Path) -> None:
    """Removes as much of the tree as possible. Blocks."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            _remove_directory_contents(path)
            path.rmdir()
        else:
            path.unlink()


def _remove_directory_contents(root: Path) -> None:
    """Empties the directory. Directories below are moved up to it first: a job can nest them deeper than
    recursion and the length of a path allow."""
    root_fd = _make_writable_and_open_directory(str(root))
    try:
        pending = _remove_files_and_list_subdirectories(root_fd)
        taken = set(pending)
        names = (name for name in map(str, itertools.count()) if name not in taken)
        while pending:
            name = pending.pop()
            with contextlib.suppress(OSError):
                fd = _make_writable_and_open_directory(name, dir_fd=root_fd)
                try:
                    for inner in _remove_files_and_list_subdirectories(fd):
                        above = next(names)
                        with contextlib.suppress(OSError):
                            os.rename(inner, above, src_dir_fd=fd, dst_dir_fd=root_fd)
                            pending.append(above)
                finally:
                    os.close(fd)
                os.rmdir(name, dir_fd=root_fd)
    finally:
        os.close(root_fd)


def _make_writable_and_open_directory(name: str, *, dir_fd: int | None = None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=dir_fd)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=dir_fd)
        fd = os.open(name, flags, dir_fd=dir_fd)
    try:
        os.fchmod(fd, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove_files_and_list_subdirectories(fd: int) -> list[str]:
    """Removes everything but directories; returns the names of these, made writable."""
    directories = []
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        with contextlib.suppress(OSError):
            if is_directory:
                os.close(
                    _make_writable_and_open_directory(name, dir_fd=fd)
                )  # moving it changes its parent entry
                directories.append(name)
            else:
                os.unlink(name, dir_fd=fd)
    return directories
