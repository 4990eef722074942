"""A sync that sends nothing, for tests of what comes before and after it. Not for: tests of sync."""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from genie.errors import SyncError
from genie.grid.sync import syncer


def install_syncer(patch: pytest.MonkeyPatch, *, failing: Sequence[str] = ()) -> list[tuple[Path, list[str]]]:
    """A sync that sends nothing; gives the list of what it was asked for."""
    asked: list[tuple[Path, list[str]]] = []

    class Syncer:
        def __init__(self, pool: object, file: object, *, state_dir: Path, metrics: object) -> None:
            pass

        async def sync(self, local: Path, nodes: Sequence[str], *, progress: object) -> list[object]:
            asked.append((local, list(nodes)))
            return [
                types.SimpleNamespace(node=name, error=SyncError(f"node {name}") if name in failing else None)
                for name in nodes
            ]

    patch.setattr(syncer, "Syncer", Syncer)
    return asked
