"""Files that must be whole and private: written beside, synced, renamed. Nothing else about files."""

from __future__ import annotations

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
