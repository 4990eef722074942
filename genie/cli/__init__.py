"""The command line. `main` is the entry point of `genie`, `grid_main` that of `grid-cli`.

Command modules are imported when one of their commands is invoked (app.py), and import their own
dependencies inside functions. Only this package does that: commands, `genie --help` and shell completion
must start fast, and importing the client, the network and the tables takes several times as long as
parsing.

The Python API is in genie/__init__.py.
"""

from __future__ import annotations

from collections.abc import Sequence

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failed, 2 usage, 255 transport, 130 interrupted."""
    try:
        from genie.cli.app import run

        return run(argv)
    except KeyboardInterrupt:  # during imports
        return _INTERRUPTED


def grid_main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `grid-cli` (the same as `genie grid`) and return its exit code."""
    try:
        from genie.cli.app import grid, run

        return run(argv, commands=grid, prog="grid-cli")
    except KeyboardInterrupt:  # during imports
        return _INTERRUPTED


__all__ = ["grid_main", "main"]
