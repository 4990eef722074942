"""Recognizes folders that are sent only by mistake: the home directory and its parents."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def why_folder_must_not_be_sent(root: Path) -> str:
    """Returns why this folder, a path without links, is no project; empty if it may be one."""
    homes = _list_home_directories()
    if root.parent == root:
        return "it is the root of the file system"
    if root in homes:
        return "it is the home directory"
    if any(home.is_relative_to(root) for home in homes):
        return "it contains the home directory"
    return ""


def _list_home_directories() -> list[Path]:
    """Returns the directories of HOME and of the user database: HOME may be empty, relative or wrong."""
    found = [os.path.expanduser("~")]  # noqa: PTH111 - Path.home() fails for a user without one
    with contextlib.suppress(ImportError, KeyError):  # Windows; a user that is not in the database
        import pwd

        found.append(pwd.getpwuid(os.getuid()).pw_dir)
    homes = []
    for path in map(Path, found):
        with contextlib.suppress(OSError, RuntimeError):  # a loop of links
            homes += [path.resolve()] if path.is_absolute() else []
    return homes
