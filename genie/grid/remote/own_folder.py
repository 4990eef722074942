"""The grid's own directory on a node, <remote_root>/.grid.

It may be a symbolic link to a directory inside the user's home or remote_root. Other links are rejected,
because files below it are read back and removed. shell_words.py implements the same rule in sh.

Runs on nodes: standard library only, Python 3.8.
"""

from __future__ import annotations

import os

from genie.grid.remote.core import OpError

GRID_FOLDER_NAME = ".grid"


def grid_folder_path(root: str, *parts: str) -> str:
    """Return a path below .grid, which need not exist. Raises OpError for a link that is not allowed."""
    path = os.path.join(root, GRID_FOLDER_NAME)
    if os.path.islink(path):
        real = os.path.realpath(path)
        places = [os.path.realpath(place).rstrip("/") + "/" for place in (os.path.expanduser("~"), root)]
        if not os.path.isdir(real):
            raise OpError(broken_link_message(path), reason="link")
        if not any(real.startswith(place) for place in places):
            raise OpError(rejected_link_message(path, real), reason="link")
    return os.path.join(path, *parts)


def broken_link_message(path: str) -> str:
    return path + " is a link to a missing directory; remove it, or use another remote_root"


def rejected_link_message(path: str, real: str) -> str:
    return (
        path + " is a link out of the home directory, to " + real + "; remove it, or use another remote_root"
    )
