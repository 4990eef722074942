"""A fake sync that sends nothing, for tests of code around it."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from genie.errors import SyncError
from genie.grid.sync import syncer


def install_fake_syncer(
    patch: pytest.MonkeyPatch, *, failing: Sequence[str] = ()
) -> list[tuple[Path, list[str]]]:
    """Replace Syncer by a fake; returns the list of its calls."""
    calls: list[tuple[Path, list[str]]] = []

    class Syncer:
        def __init__(self, pool: object, file: object, *, state_dir: Path, metrics: object) -> None:
            pass

        async def sync(
            self,
            local: Path,
            nodes: Sequence[str],
            *,
            progress: object,
            on_report: Callable[[object], None] | None,
        ) -> list[object]:
            calls.append((local, list(nodes)))
            reports: list[object] = [
                types.SimpleNamespace(node=name, error=SyncError(f"node {name}") if name in failing else None)
                for name in nodes
            ]
            for report in reports:
                if on_report is not None:
                    on_report(report)
            return reports

    patch.setattr(syncer, "Syncer", Syncer)
    return calls
