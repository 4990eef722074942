"""Where the grid keeps what is its own on a node: <remote_root>/.grid, and what may stand in its place.

A link there is followed within the user's home and remote_root, and refused when it leads out of them:
what is kept there is read back and removed, and belongs to nobody else. shell_words.py says the same in sh.

Runs on nodes, so: standard library only, Python 3.8. Not for: what is in it.
"""

from __future__ import annotations

import os

from genie.grid.remote.core import OpError

NAME = ".grid"


def own_folder(root: str, *parts: str) -> str:
    """The path of a part of it, which need not be there. Raises OpError for a link that is not followed."""
    path = os.path.join(root, NAME)
    if os.path.islink(path):
        real = os.path.realpath(path)
        places = [os.path.realpath(place).rstrip("/") + "/" for place in (os.path.expanduser("~"), root)]
        if not os.path.isdir(real):
            raise OpError("link", broken(path))
        if not any(real.startswith(place) for place in places):
            raise OpError("link", refusal(path, real))
    return os.path.join(path, *parts)


def broken(path: str) -> str:
    return path + " is a link to no folder; remove it, or use another remote_root"


def refusal(path: str, real: str) -> str:
    return (
        path + " is a link that leads out of the home, to " + real + "; remove it, or use another remote_root"
    )
