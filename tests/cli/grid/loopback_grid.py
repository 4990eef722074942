"""A grid of real SSH nodes on loopback, for tests of commands."""

from __future__ import annotations

import os
import pty
import select
from pathlib import Path

import pytest

from tests.forkserver import ForkServer
from tests.grid.testbed import SshTestbed

CTRL_C = b"\x03"


def use_testbed_as_grid(
    testbed: SshTestbed, folder: Path, monkeypatch: pytest.MonkeyPatch, *, more: str = ""
) -> Path:
    """Make the commands of this test use the nodes of the testbed. Returns the grid file."""
    path = folder / "cluster_config.yaml"
    path.write_text(
        testbed.grid_yaml(more=more or "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 20}\n")
    )
    monkeypatch.setenv("GENIE_GRID_FILE", str(path))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(testbed.ssh_config))
    return path


def run_grid_cli_on_terminal(
    server: ForkServer, argv: list[str], *, typed: bytes, after: bytes
) -> tuple[int, str]:
    """Run grid-cli on a new terminal and type once `after` is shown. Returns exit code and output."""
    ours, theirs = pty.openpty()
    # The first terminal that a session leader opens becomes its controlling terminal.
    code = (
        "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); "
        "from genie.cli import grid_main; sys.exit(grid_main(sys.argv[1:]))"
    )
    try:
        process = server.popen(
            ["-c", code, *argv], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        seen, sent = b"", b""
        while True:
            if sent == CTRL_C and not select.select([ours], [], [], 2.0)[0]:
                os.write(
                    ours, sent
                )  # a signal between the prompt and the read of the reply is not seen by the read
            try:
                data = os.read(ours, 65536)
            except OSError:  # Linux raises it when the other side is closed
                break
            if not data:
                break
            seen += data
            if typed and after in seen:
                os.write(ours, typed)
                typed, sent = b"", typed
        return process.wait(60), seen.decode()
    finally:
        os.close(ours)
