"""The command line: `genie`. `main` is the door; one file per noun stands behind it.

The command modules import what they need inside their functions, and are themselves imported when a
command of theirs is named (app.py). That is on purpose, and only here: commands, `genie --help` and
shell completion must begin at once, and the client, the network and the tables cost several times
what the parser does.

Not for: anything that a library user needs (genie/__init__.py).
"""

from __future__ import annotations

from collections.abc import Sequence

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 ok, 1 failed, 2 usage, 255 transport, 130 interrupted."""
    try:
        from genie.cli.app import run

        return run(argv)
    except KeyboardInterrupt:  # while it was being loaded
        return _INTERRUPTED


def grid_main(argv: Sequence[str] | None = None) -> int:
    """`grid-cli`: the commands of `genie grid`, with the same exit codes."""
    try:
        from genie.cli.app import grid, run

        return run(argv, door=grid, prog="grid-cli")
    except KeyboardInterrupt:  # while it was being loaded
        return _INTERRUPTED


__all__ = ["grid_main", "main"]
