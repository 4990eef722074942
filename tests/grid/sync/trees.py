"""Folders for tests: made from a description, and told back as one."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from genie.errors import NativeBuildError
from genie.grid.remote import tree
from genie.grid.sync.local_tree import local_engine
from tests import needs

Entry = tuple[str, int, bytes]
"""'d', 'f' or 'l', the mode, contents or target."""


def compiled() -> tree.Plain:
    """The compiled engine; where there is no compiler, the file is skipped and listed."""
    try:
        engine = local_engine()
    except NativeBuildError:
        engine = tree.Plain()
    if engine.name != "compiled":
        needs.require_program("c++", package="g++")
        raise AssertionError("the engine for trees was not compiled")
    return engine


def write(root: Path, files: dict[bytes, bytes]) -> None:
    for name, data in files.items():
        path = os.path.join(os.fsencode(root), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)


def told(root: Path, *, without: tuple[bytes, ...] = tree.RESERVED) -> dict[bytes, Entry]:
    """All that is in a folder, except some names at its top."""
    found: dict[bytes, Entry] = {}
    base = os.fsencode(root)
    for folder, folders, files in os.walk(base):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            inner = os.path.relpath(path, base)
            if inner.split(b"/")[0] not in without:
                found[inner] = _entry(path)
    return found


def _entry(path: bytes) -> Entry:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return "l", 0, os.readlink(path)
    if stat.S_ISDIR(status.st_mode):
        return "d", stat.S_IMODE(status.st_mode), b""
    with open(path, "rb") as file:
        return "f", stat.S_IMODE(status.st_mode), file.read()


def empty(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
