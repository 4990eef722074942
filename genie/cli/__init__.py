"""The command line. `main` is the entry point of `genie`, `grid_main` that of `grid-cli`.

Command modules are imported when one of their commands is invoked (app.py), and import their own
dependencies inside functions. Only this package does that: commands, `genie --help` and shell completion
must start fast, and importing the client, the network and the tables takes several times as long as
parsing.

The Python API is in genie/__init__.py.
"""

from __future__ import annotations

from collections.abc import Sequence

_INTERRUPTED_EXIT_CODE = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 ok, 1 failed, 2 usage, 255 transport, 130 interrupted."""
    try:
        from genie.cli.app import run_command_line

        return run_command_line(argv)
    except KeyboardInterrupt:  # during imports
        return _INTERRUPTED_EXIT_CODE


def grid_main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `grid-cli` (the same as `genie grid`) and return its exit code."""
    try:
        from genie.cli.app import grid_app, run_command_line

        return run_command_line(argv, commands=grid_app, prog="grid-cli")
    except KeyboardInterrupt:  # during imports
        return _INTERRUPTED_EXIT_CODE


__all__ = ["grid_main", "main"]
