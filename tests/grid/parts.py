"""Stand-ins for parts of the grid that a checkout may not have: health, metrics and sync.

Only what is missing is put in; where the real part is there, it is used. `BOOT` does the same at the start
of a grid-cli of its own process. Not for: tests of those parts.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from genie.errors import NoNodeError, SyncError

BOOT = (
    "import sys; from tests.grid.parts import install_missing; install_missing(); "
    "from genie.cli import grid_main; sys.exit(grid_main())"
)
COUNTED = "tasks.txt"


class _Health:
    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self.name = name
        self.rank = 1.0
        self.labels = labels


class _Checker:
    def __init__(self, pool: Any, file: Any, *, clock: Any, cache: Any = None) -> None:
        self._nodes = [_Health(node.name, dict(node.labels)) for node in file.nodes]

    async def check_all(self, *, fresh: bool = False) -> list[_Health]:
        return self._nodes


def _choose(nodes: list[_Health], *, gpus: int = 0, labels: Any = None) -> _Health:
    for node in nodes:
        if all(node.labels.get(key) == value for key, value in (labels or {}).items()):
            return node
    raise NoNodeError("no node fits")


class _Metrics:
    """Writes a line for each run that has ended."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "grid" / COUNTED

    def node_scores(self, scores: dict[str, float]) -> None:
        pass

    def task_started(self) -> None:
        pass

    def task_ended(self) -> None:
        pass

    def task_finished(self, status: str, duration_s: float) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(f'grid_tasks_completed_total{{status="{status}"}} 1\n')

    def text(self) -> str:
        return self._path.read_text() if self._path.exists() else ""


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

    module = types.ModuleType("genie.grid.sync.syncer")
    module.__dict__["Syncer"] = Syncer
    patch.setitem(sys.modules, "genie.grid.sync", types.ModuleType("genie.grid.sync"))
    patch.setitem(sys.modules, module.__name__, module)
    return asked


def install_missing() -> None:
    made = {
        "health_check": {"HealthChecker": _Checker, "HealthCache": lambda state_dir: None, "choose": _choose},
        "metrics": {"GridMetrics": _Metrics},
    }
    for name, members in made.items():
        if f"genie.grid.{name}" not in sys.modules and not importlib.util.find_spec(f"genie.grid.{name}"):
            module = types.ModuleType(f"genie.grid.{name}")
            module.__dict__.update(members)
            sys.modules[module.__name__] = module
