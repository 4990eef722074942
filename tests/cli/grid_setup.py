"""A grid of real SSH nodes for tests of commands: its file, OpenSSH's settings, a terminal to type on."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grid.bed import Bed


def use_grid(bed: Bed, folder: Path, monkeypatch: pytest.MonkeyPatch, *, more: str = "") -> Path:
    """Commands of this test use the bed's nodes from now on. Gives the grid's file."""
    path = folder / "cluster_config.yaml"
    path.write_text(bed.grid_yaml(more=more or "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 20}\n"))
    monkeypatch.setenv("GENIE_GRID_FILE", str(path))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(bed.ssh_config))
    return path


def on_a_terminal(argv: list[str], *, typed: bytes, after: bytes) -> tuple[int, str]:
    """Runs grid-cli on a terminal of its own; types once `after` has been shown. Exit code and output."""
    ours, theirs = pty.openpty()
    # The leader of a session gets the first terminal that it opens, and with it the interrupts.
    code = (
        "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); "
        "from genie.cli import grid_main; sys.exit(grid_main(sys.argv[1:]))"
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        seen = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # Linux says so when the other side is closed
                break
            if not data:
                break
            seen += data
            if typed and after in seen:
                os.write(ours, typed)
                typed = b""
        return process.wait(60), seen.decode()
    finally:
        os.close(ours)
