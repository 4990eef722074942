"""Active runs are counted until their end is known, whether or not they are followed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import pytest

from genie.grid.grid_file import GridFile, read_grid_file
from genie.grid.metrics import ACTIVE_RUNS_MAX, ActiveRun, GridMetrics
from genie.grid.runs.launch import reconcile_active_runs, track_run_in_metrics
from genie.grid.runs.run import Run
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import SshPool
from tests.grid.testbed import SshTestbed
from tests.waiting import until

NODES = ["gpu1", "gpu2"]


def write_grid_file(testbed: SshTestbed, folder: Path) -> GridFile:
    path = folder / "grid.yaml"
    path.write_text(testbed.grid_yaml(nodes=NODES, more="ssh: {connect_timeout: 20, max_retries: 0}\n"))
    return read_grid_file(path)


async def has_run_ended(runner: Runner, run: Run) -> bool:
    return (await runner.fetch_status(run)).has_ended


async def test_detached_run_is_active_until_its_end_is_found(
    own_testbed: SshTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, metrics = write_grid_file(own_testbed, tmp_path), GridMetrics(tmp_path)
    relative = dataclasses.replace(file, path=Path("grid.yaml"))
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        runner = Runner(pool, file)
        failing = await runner.start("gpu1", "exec sleep 7501")
        removed = await runner.start("gpu2", "true")
        for run in (failing, removed):
            track_run_in_metrics(run, state_dir=tmp_path, file=relative)
        await until(lambda: has_run_ended(runner, removed), what="the end of the short run")
        await runner.remove_run(removed)
        await reconcile_active_runs(runner, file, metrics, nodes=NODES)
        assert metrics.read_snapshot().active_tasks == 1
        for pid in await until(lambda: own_testbed["gpu1"].processes("sleep 7501"), what="the long run"):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: has_run_ended(runner, failing), what="the end of the long run")
        other = dataclasses.replace(file, path=tmp_path / "other.yaml")
        await reconcile_active_runs(runner, other, metrics, nodes=NODES)  # its gpu1 may be another host
        await reconcile_active_runs(runner, file, metrics, nodes=["gpu2"])  # gpu1 cannot be reached
        assert metrics.read_snapshot().active_tasks == 1
        await reconcile_active_runs(runner, file, metrics, nodes=NODES)
    found = metrics.read_snapshot()
    assert found.active_tasks == 0
    assert found.completed == {"succeeded": 0, "failed": 1, "unknown": 1}


async def test_run_on_a_node_removed_from_the_file_is_unknown(testbed: SshTestbed, tmp_path: Path) -> None:
    file, metrics = write_grid_file(testbed, tmp_path), GridMetrics(tmp_path)
    entry = ActiveRun(node="removed", grid_file=str(file.path), started=0.0)
    await asyncio.to_thread(metrics.record_run_started, "r-1", entry)
    async with SshPool(file, ssh_config=testbed.ssh_config) as pool:
        await reconcile_active_runs(Runner(pool, file), file, metrics, nodes=NODES)
    found = await asyncio.to_thread(metrics.read_snapshot)
    assert (found.active_tasks, found.completed["unknown"]) == (0, 1)


def test_metrics_count_the_end_of_a_run_once(tmp_path: Path) -> None:
    metrics = GridMetrics(tmp_path)
    metrics.record_run_started("r-1", ActiveRun(node="gpu1", grid_file="x", started=0.0))
    metrics.record_run_ended("r-1", "succeeded", 2.0)
    metrics.record_run_ended("r-1", "failed", 2.0)
    found = metrics.read_snapshot()
    assert (found.completed["succeeded"], found.completed["failed"]) == (1, 0)


def test_oldest_active_run_is_dropped_beyond_the_maximum(tmp_path: Path) -> None:
    metrics = GridMetrics(tmp_path)
    figures = metrics.read_snapshot()
    figures.runs = {f"r-{n}": ActiveRun(node="n", grid_file="f", started=0.0) for n in range(ACTIVE_RUNS_MAX)}
    metrics._apply_or_enqueue(lambda kept: setattr(kept, "runs", figures.runs))
    metrics.record_run_started("r-new", ActiveRun(node="n", grid_file="f", started=0.0))
    runs = metrics.read_snapshot().runs
    assert len(runs) == ACTIVE_RUNS_MAX and "r-0" not in runs and "r-new" in runs
