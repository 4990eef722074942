"""The testbed cleans up, even if it is interrupted while starting."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.grid.bed import Bed


def test_interrupted_start_stops_started_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(tmp_path / "nodes", count=3)
    first = (bed.nodes[0].address, bed.nodes[0].port)

    def interrupted(_: Path) -> None:
        bed.nodes[0].wait_ready()
        raise SystemExit(143)

    monkeypatch.setattr(bed.nodes[1], "prepare", interrupted)
    try:
        with pytest.raises(SystemExit, match="143"):
            bed.__enter__()
        assert not bed.folder.exists()
        with pytest.raises(ConnectionRefusedError), socket.create_connection(first, 1):
            pass
    finally:
        bed.__exit__()
