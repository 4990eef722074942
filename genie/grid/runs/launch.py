"""Launches runs: chooses the node, syncs a folder to it, and starts the run.

If the node turns out to be busy or unreachable before the start, the next best one is used. Runs are followed
by run_client.py, nodes are rated by health/check.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from genie.errors import GenieError, NodeRefusedError, NoNodeError, UnreachableError
from genie.grid.grid_file import GridFile
from genie.grid.health.check import HealthCache, NodeHealth, NodeHealthChecker, choose_best_node
from genie.grid.metrics import ActiveRun, GridMetrics
from genie.grid.runs.run import Run
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import SshPool

if TYPE_CHECKING:
    from genie.grid.sync.syncer import OnProgress, SyncReport


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What to run. `labels` and `gpus` select the node if none is given.

    `run_id` is for a single node; by default, each run gets a new one.
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


class RunLauncher:
    """Launches runs; `progress` is passed to the sync before a run.

    Concurrent launches choose their nodes one after the other, so that each sees the choices of the
    others and health is read once: share one launcher.
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
        self._grid_file = file
        self._runner = runner
        self._state_dir = state_dir.expanduser()
        self._on_sync_progress = progress
        self._choice_lock = asyncio.Lock()

    async def start_on_node(self, node: str, launch: RunSpec) -> Run:
        """Syncs to the node and starts the run. Raises as Runner.start does, and SyncError."""
        self._grid_file.node(node)
        if launch.sync is not None:
            for report in await self.sync(launch.sync, [node]):
                if report.error is not None:
                    raise report.error
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

    async def start_on_best_node(self, launch: RunSpec) -> Run:
        """Starts on the best node. Raises NoNodeError with reasons, or the error of the last node tried."""
        skipped: dict[str, GenieError] = {}
        while True:
            try:
                node = await self.choose_best_node(gpus=launch.gpus, labels=launch.labels, without=skipped)
            except NoNodeError:
                if skipped:
                    raise next(reversed(skipped.values())) from None
                raise
            try:
                return await self.start_on_node(node, launch)
            except UnreachableError as error:
                skipped[node] = error
            except NodeRefusedError as error:
                if error.reason != "busy":
                    raise
                skipped[node] = error

    async def check_all_nodes(self, *, fresh: bool = False) -> list[NodeHealth]:
        """The health of all nodes, sorted by score, and recorded in the metrics."""
        nodes = await self._make_checker().check_all_nodes(fresh=fresh)
        grid_metrics(self._state_dir).record_node_scores({each.name: each.effective_score for each in nodes})
        return nodes

    def _make_checker(self) -> NodeHealthChecker:
        cache = HealthCache(self._state_dir)
        return NodeHealthChecker(self._pool, self._grid_file, clock=time.time, cache=cache)

    async def choose_best_node(
        self, *, gpus: int = 0, labels: Mapping[str, str] | None = None, without: Mapping[str, object]
    ) -> str:
        """Returns the best node by cached health; if none fits, checks all again. Raises NoNodeError."""
        async with self._choice_lock:
            checker = self._make_checker()
            for fresh in (False, True):
                nodes = await checker.check_all_in_file_order(fresh=fresh)
                grid_metrics(self._state_dir).record_node_scores(
                    {each.name: each.effective_score for each in nodes}
                )
                try:
                    fitting = [each for each in nodes if each.name not in without]
                    name = choose_best_node(fitting, gpus=gpus, labels=labels or {}).name
                    checker.record_choice(name)
                    return name
                except NoNodeError:
                    if fresh:
                        raise
        raise AssertionError

    async def sync(
        self, local: Path, nodes: Sequence[str], *, on_report: Callable[[SyncReport], None] | None = None
    ) -> list[SyncReport]:
        """Syncs a folder to several nodes in parallel; returns a report for each."""
        from genie.grid.sync.syncer import Syncer  # takes 0.1 s, and most runs do not need it

        syncer = Syncer(
            self._pool, self._grid_file, state_dir=self._state_dir, metrics=grid_metrics(self._state_dir)
        )
        return await syncer.sync(local, nodes, progress=self._on_sync_progress, on_report=on_report)

    @contextlib.asynccontextmanager
    async def open_starter_after_sync(
        self, launches: Mapping[str, RunSpec], *, sync: Path | None
    ) -> AsyncIterator[Callable[[str], Awaitable[Run]]]:
        """Yields a function that starts the launch of a node as soon as that node has the folder `sync`.

        It raises as `start_on_node` does. An error in the local folder is raised for every node.
        """
        loop = asyncio.get_running_loop()
        ready: dict[str, asyncio.Future[GenieError | None]] = {
            name: loop.create_future() for name in launches
        }

        def on_report(report: SyncReport) -> None:
            _set_sync_result_once(ready[report.node], report.error)

        async def sync_nodes() -> None:
            try:
                if sync is not None:
                    await self.sync(sync, list(launches), on_report=on_report)
            except GenieError as error:
                for each in ready.values():
                    _set_sync_result_once(each, error)
            for each in ready.values():
                _set_sync_result_once(each, None)

        async def start(name: str) -> Run:
            error = await ready[name]
            if error is not None:
                raise error
            return await self.start_on_node(name, launches[name])

        async with asyncio.TaskGroup() as group:
            sending = group.create_task(sync_nodes())
            try:
                yield start
            finally:
                sending.cancel()


def _set_sync_result_once(future: asyncio.Future[GenieError | None], error: GenieError | None) -> None:
    if not future.done():  # the start that awaits it may have been cancelled
        future.set_result(error)


def grid_metrics(state_dir: Path) -> GridMetrics:
    """Returns the grid metrics, which all processes of this user share."""
    return GridMetrics(state_dir.expanduser())


def track_run_in_metrics(
    run: Run,
    *,
    state_dir: Path,
    file: GridFile,
    is_new: bool = True,
    clock: Callable[[], float] = time.time,
) -> Callable[[str], None]:
    """Counts the run as active. Call the result with 'succeeded', 'failed', ... when the run has ended.

    A detached run stays active until `reconcile_active_runs` finds that it has ended. With `is_new` false,
    the run is counted only if it is already active.
    """
    metrics = grid_metrics(state_dir)
    if is_new:
        entry = ActiveRun(node=run.node, grid_file=_grid_file_path(file), started=run.started)
        metrics.record_run_started(run.run_id, entry)

    def ended(status: str) -> None:
        until = run.ended if run.ended is not None else clock()
        metrics.record_run_ended(run.run_id, status, until - run.started)

    return ended


async def reconcile_active_runs(
    runner: Runner, file: GridFile, metrics: GridMetrics, *, nodes: Sequence[str]
) -> None:
    """Queries these nodes for the active runs of this grid file, and counts those that have ended.

    A run that its node no longer lists (nodes delete old ones), or whose node is no longer in the file, is
    counted as unknown. A run on an unreachable node, or on one not in `nodes`, stays active.
    """
    known = await asyncio.to_thread(metrics.read_snapshot)
    own = {run_id: entry for run_id, entry in known.runs.items() if entry.grid_file == _grid_file_path(file)}
    for run_id, entry in own.items():
        if all(node.name != entry.node for node in file.nodes):
            metrics.record_run_ended(run_id, *_run_end_status_and_duration_s(None, entry))
    active = {run_id: entry for run_id, entry in own.items() if entry.node in nodes}
    for found in await runner.list_runs_on_nodes(sorted({entry.node for entry in active.values()})):
        if found.error is not None:
            continue
        there = {run.run_id: run for run in found.runs}
        for run_id, entry in active.items():
            if entry.node == found.node:
                status, duration_s = _run_end_status_and_duration_s(there.get(run_id), entry)
                if status:
                    metrics.record_run_ended(run_id, status, duration_s)


def _grid_file_path(file: GridFile) -> str:
    """The absolute path: every project may have a config/cluster_config.yaml."""
    return "" if file.path is None else str(file.path.expanduser().resolve())


def _run_end_status_and_duration_s(run: Run | None, entry: ActiveRun) -> tuple[str, float]:
    """Returns status and duration of an ended run; '' if it has not ended."""
    if run is None:
        return "unknown", max(0.0, time.time() - entry.started)
    if not run.has_ended:
        return "", 0.0
    status = "lost" if run.exit_code is None else "failed" if run.exit_code else "succeeded"
    return status, max(0.0, (run.ended or time.time()) - run.started)
