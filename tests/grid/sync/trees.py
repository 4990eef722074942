"""Test folders: written from a description, and read back into one."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from genie.errors import NativeBuildError
from genie.grid.remote import tree
from genie.grid.sync.local_tree import load_local_engine
from tests import needs

Entry = tuple[str, int, bytes]
"""'d', 'f' or 'l', the mode, contents or target."""


def load_compiled_engine() -> tree.PlainEngine:
    """The compiled engine; skips the file if there is no compiler."""
    try:
        engine = load_local_engine()
    except NativeBuildError:
        engine = tree.PlainEngine()
    if engine.name != "compiled":
        needs.require_program("c++", package="g++")
        raise AssertionError("the tree engine was not compiled")
    return engine


def write_files(root: Path, files: dict[bytes, bytes]) -> None:
    for name, data in files.items():
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read_tree(root: Path, *, without: tuple[bytes, ...] = tree.RESERVED_NAMES) -> dict[bytes, Entry]:
    """Returns the contents of a folder, except some names at its top."""
    found: dict[bytes, Entry] = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder) / name
            inner = path.relative_to(root)
            if os.fsencode(inner.parts[0]) not in without:
                found[os.fsencode(inner)] = _read_entry(path)
    return found


def _read_entry(path: Path) -> Entry:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "l", 0, os.fsencode(path.readlink())
    if stat.S_ISDIR(status.st_mode):
        return "d", stat.S_IMODE(status.st_mode), b""
    return "f", stat.S_IMODE(status.st_mode), path.read_bytes()


def remove_contents(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
