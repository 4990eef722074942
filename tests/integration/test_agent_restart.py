"""An agent is killed with SIGKILL and restarted by its supervisor, or stopped for an upgrade: its jobs and
sessions continue."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import genie
from genie.cluster.client import ClusterClient, open_client
from genie.model.job import Job, JobState
from genie.model.node import NodeStatus
from genie.supervisor import local_cluster
from tests.integration.running_cluster import RunningCluster, StartedCluster, make_python_job
from tests.waiting import until


def make_waiting_job_code(go: Path) -> str:
    return f"""
        import pathlib, sys, time
        print("before")
        while not pathlib.Path({str(go)!r}).exists():
            time.sleep(0.05)
        print("after")
        sys.exit(7)
    """


async def wait_for_state(client: ClusterClient, job_id: str, state: JobState) -> Job:
    async def reached() -> Job | None:
        job = await client.get_job(job_id)
        assert job.state is state or not job.state.is_final, job.reason
        return job if job.state is state else None

    found = await until(reached, timeout_s=30, what=f"{job_id} is {state}")
    assert found is not None
    return found


async def wait_for_incarnation(client: ClusterClient, incarnation: int) -> None:
    async def has_returned() -> bool:
        (view,) = await client.nodes()
        return (view.info.incarnation, view.info.status) == (incarnation, NodeStatus.HEALTHY)

    await until(has_returned, timeout_s=30, what=f"incarnation {incarnation} of the node")


@pytest.mark.timeout(180)
async def test_job_and_session_survive_killed_agents(own_cluster: StartedCluster, tmp_path: Path) -> None:
    async with open_client(own_cluster.running.settings()) as client:
        await genie.init()
        x = torch.ones(4, 4, device="remote_accelerator:0")
        job = await client.submit(make_python_job(make_waiting_job_code(tmp_path / "go")))
        other = await client.submit(make_python_job("import time; time.sleep(600)", name="other"))
        for each in (job, other):
            await wait_for_state(client, each.job_id, JobState.RUNNING)
        for incarnation in (2, 3):
            os.kill(own_cluster.pids["agent"], signal.SIGKILL)
            assert (x @ x).sum().item() == 64.0
            await wait_for_incarnation(client, incarnation)
            assert (x @ x).sum().item() == 64.0
        (session,) = [one for one in (await client.list_jobs())[0] if one.spec.kind == "session"]
        assert (session.state, session.run_number) == (JobState.RUNNING, 1)
        (tmp_path / "go").touch()
        ended = await wait_for_state(client, job.job_id, JobState.FAILED)
        assert (ended.exit_code, ended.run_number) == (7, 1)
        assert b"".join([data async for data in client.follow_log(job.job_id)]) == b"before\nafter\n"
        await client.cancel(other.job_id)
        assert (await wait_for_state(client, other.job_id, JobState.CANCELLED)).run_number == 1
        await genie.shutdown()
        closed = await client.wait_job(session.job_id, timeout_s=30)
        assert (closed.state, closed.reason) == (JobState.SUCCEEDED, "the client closed the session")
        views = await client.nodes()
        assert [view.node_holds.holds for view in views] == [()]


@pytest.mark.timeout(180)
async def test_cluster_is_stopped_and_started_again_with_its_jobs_running(
    own_cluster: StartedCluster, tmp_path: Path
) -> None:
    """As `genie down --keep-jobs` and `genie up`; the supervisor ends because its children have ended."""
    state_dir = own_cluster.settings.paths.state_dir
    async with open_client(own_cluster.running.settings()) as client:
        job = await client.submit(make_python_job(make_waiting_job_code(tmp_path / "go")))
        await wait_for_state(client, job.job_id, JobState.RUNNING)
    supervisor = own_cluster.supervisor
    assert supervisor is not None
    supervisor.keep_jobs_on_stop()
    own_cluster.stop()
    assert local_cluster.find_running_cluster(state_dir) is None
    with StartedCluster(own_cluster.settings) as again:
        running: RunningCluster = again.running
        async with open_client(running.settings()) as client:
            await wait_for_state(client, job.job_id, JobState.RUNNING)
            (tmp_path / "go").touch()
            ended = await wait_for_state(client, job.job_id, JobState.FAILED)
            assert (ended.exit_code, ended.run_number) == (7, 1)
