"""The testbed cleans up, even if it is interrupted while starting."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.grid.testbed import SshTestbed


def test_interrupted_start_stops_started_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testbed = SshTestbed(tmp_path / "nodes", count=3)
    first = (testbed.nodes[0].address, testbed.nodes[0].port)

    def interrupted(_: Path) -> None:
        testbed.nodes[0].wait_ready()
        raise SystemExit(143)

    monkeypatch.setattr(testbed.nodes[1], "prepare", interrupted)
    try:
        with pytest.raises(SystemExit, match="143"):
            testbed.__enter__()
        assert not testbed.folder.exists()
        with pytest.raises(ConnectionRefusedError), socket.create_connection(first, 1):
            pass
    finally:
        testbed.__exit__()
