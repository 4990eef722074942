"""What comes before a run: which node, the folder that is sent there first, and then the start.

A node that turns out to be busy or gone before anything has begun there is left out, and the next best
one is taken. Not for: following runs (runner.py), judging nodes (health_check.py), sending (sync/).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from genie.errors import GenieError, NodeRefusedError, NoNodeError, UnreachableError
from genie.grid.grid_file import GridFile
from genie.grid.health_check import HealthCache, HealthChecker, choose
from genie.grid.metrics import GridMetrics
from genie.grid.run import Run
from genie.grid.runner import Runner
from genie.grid.ssh_pool import SshPool

if TYPE_CHECKING:
    from genie.grid.sync.syncer import OnProgress


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is wanted. `labels` and `gpus` choose the node, where none is named.

    `run_id` is for one node only; without it, one is made for each.
    """

    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    gpus: int = 0
    stdin: bytes = b""
    timeout_s: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    sync: Path | None = None
    run_id: str | None = None


class Launcher:
    """`progress` is given to the sync that comes before a run.

    Those who want a node at the same time choose one after the other, so that each knows what the others took
    and the nodes are read once: share one Launcher.
    """

    def __init__(
        self,
        pool: SshPool,
        file: GridFile,
        runner: Runner,
        *,
        state_dir: Path,
        progress: OnProgress | None = None,
    ) -> None:
        self._pool = pool
        self._file = file
        self._runner = runner
        self._state_dir = state_dir.expanduser()
        self._progress = progress
        self._choosing = asyncio.Lock()

    async def on(self, node: str, launch: Launch) -> Run:
        """Raises what Runner.start does, and SyncError."""
        self._file.node(node)
        if launch.sync is not None:
            for error in (await self.sync(launch.sync, [node])).values():
                raise error
        return await self._runner.start(
            node,
            launch.command,
            env=launch.env,
            cwd=launch.cwd,
            gpus=launch.gpus,
            stdin=launch.stdin,
            timeout_s=launch.timeout_s,
            run_id=launch.run_id,
        )

    async def on_best(self, launch: Launch) -> Run:
        """Raises NoNodeError with why not for each node, or what the last node that was tried said."""
        left_out: dict[str, GenieError] = {}
        while True:
            try:
                node = await self.best_node(gpus=launch.gpus, labels=launch.labels, without=left_out)
            except NoNodeError:
                if left_out:
                    raise next(reversed(left_out.values())) from None
                raise
            try:
                return await self.on(node, launch)
            except UnreachableError as error:
                left_out[node] = error
            except NodeRefusedError as error:
                if error.reason != "busy":
                    raise
                left_out[node] = error

    async def best_node(
        self, *, gpus: int = 0, labels: Mapping[str, str] | None = None, without: Mapping[str, object]
    ) -> str:
        """Readings that are still good are used; when none of those fits, all nodes are asked anew."""
        async with self._choosing:
            cache = HealthCache(self._state_dir)
            checker = HealthChecker(self._pool, self._file, clock=time.time, cache=cache)
            for fresh in (False, True):
                nodes = await checker.check_all(fresh=fresh)
                figures(self._state_dir).node_scores({each.name: each.rank for each in nodes})
                try:
                    fitting = [each for each in nodes if each.name not in without]
                    name = choose(fitting, gpus=gpus, labels=labels or {}).name
                    checker.note_chosen(name)
                    return name
                except NoNodeError:
                    if fresh:
                        raise
        raise AssertionError

    async def sync(self, local: Path, nodes: Sequence[str]) -> dict[str, GenieError]:
        """Brings a folder to nodes, side by side; what went wrong, by node."""
        from genie.grid.sync.syncer import Syncer  # a tenth of a second that most runs need not wait for

        syncer = Syncer(self._pool, self._file, state_dir=self._state_dir, metrics=figures(self._state_dir))
        reports = await syncer.sync(local, nodes, progress=self._progress)
        return {report.node: report.error for report in reports if report.error is not None}


def figures(state_dir: Path) -> GridMetrics:
    """What the grid counts, for all processes of this user."""
    return GridMetrics(state_dir.expanduser())


@contextlib.contextmanager
def counted(
    state_dir: Path, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], None]]:
    """Counts one run for as long as the block lasts; call what it gives with how the run ended."""
    kept = figures(state_dir)
    began = clock()
    status = ["left"]
    kept.task_started()
    try:
        yield status.append
    finally:
        kept.task_ended()
        kept.task_finished(status[-1], clock() - began)
