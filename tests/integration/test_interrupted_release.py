"""A controller that is killed in the middle of a release: no accelerator is lost, and none is doubled."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from genie.cluster.client import ClusterClient
from genie.controller.store.sqlite import SqliteStore
from genie.errors import GenieError
from genie.model.job import Job, JobState, PlacementConstraints, Spread, StopReason
from genie.processes.clock import SystemClock
from tests.integration import interrupted_controller
from tests.integration.cluster_processes import ClusterProcesses, run_cluster_processes
from tests.integration.running_cluster import make_python_job
from tests.integration.test_faults import fetch_holds, wait_for_job_state, watch_ledger
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
NODES = ("a", "b", "c")


async def _read_stored_job(cluster: ClusterProcesses, job_id: str) -> Job:
    path = cluster.state_dir / "controller" / "store.sqlite3"
    store = await SqliteStore.open(path, clock=SystemClock())
    try:
        found = await store.get(f"job/{job_id}")
        assert found is not None
        return msgspec.json.decode(found.value, type=Job)
    finally:
        await store.close()


async def _kill_controller_between_two_parts(
    cluster: ClusterProcesses, client: ClusterClient, job_id: str
) -> None:
    """Cancel a job that has not started; the controller dies after the first part of its release."""
    os.kill(cluster.controller.pid, signal.SIGUSR1)
    await until((cluster.state_dir / interrupted_controller.ARMED_FILE).exists)
    async with asyncio.TaskGroup() as group:
        cancelling = group.create_task(_cancel(client, job_id))
        await cluster.controller.wait_ended()
        cancelling.cancel()


async def _cancel(client: ClusterClient, job_id: str) -> None:
    with suppress(GenieError):
        await client.cancel(job_id)


@pytest.mark.timeout(120)
async def test_controller_killed_between_two_parts_of_a_release_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    runs = tmp_path / "runs"
    code = f"""
        import os, pathlib, time
        with pathlib.Path({str(runs)!r}).open("a") as file:
            file.write(os.environ["RANK"] + "\\n")
        while not pathlib.Path({str(tmp_path / "end")!r}).exists():
            time.sleep(0.05)
    """
    constraints = PlacementConstraints(workers=len(NODES), spread=Spread.SPREAD)
    spec = msgspec.structs.replace(make_python_job(code, gpus=1), constraints=constraints)
    async with (
        run_cluster_processes(tmp_path, *NODES, controller_module=interrupted_controller.MODULE) as cluster,
        cluster.client() as client,
    ):
        stopped = cluster.agents["c"].pid
        os.kill(stopped, signal.SIGSTOP)  # its worker is never ready, so the gang does not start
        try:
            gang = await client.submit(spec)
            await wait_for_job_state(client, gang.job_id, JobState.PLACING)
            await _kill_controller_between_two_parts(cluster, client, gang.job_id)
        finally:
            os.kill(stopped, signal.SIGCONT)
        between = await _read_stored_job(cluster, gang.job_id)
        assert (between.state, between.stop) == (JobState.PLACING, StopReason.PREEMPT)
        assert sum(place.outcome is not None for place in between.placements) == 1

        await cluster.start_controller()
        async with watch_ledger(client):
            running = await wait_for_job_state(client, gang.job_id, JobState.RUNNING, timeout_s=60)
            assert running.epoch > between.epoch
            await until(lambda: runs.exists() and len(runs.read_text().split()) == len(NODES))
            holds = await fetch_holds(client)
            assert sorted(holds) == list(NODES)
            assert all(len(of_node) == 1 for of_node in holds.values()), holds
            (tmp_path / "end").touch()
            ended = await client.wait_job(gang.job_id, timeout_s=60)
        assert ended.state is JobState.SUCCEEDED, ended.reason
        assert sorted(runs.read_text().split()) == ["0", "1", "2"], "each worker ran exactly once"
        assert await fetch_holds(client) == {node_id: [] for node_id in NODES}
        assert (await client.status()).quarantined == ()
