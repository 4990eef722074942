"""Two controllers on a real etcd; the leader is killed, and what clients have goes on with the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

import genie
from genie import config
from genie.cluster import init
from genie.cluster.client import open_client
from genie.config import Settings
from genie.model.job import JobKind, JobState
from genie.model.names import address_text
from genie.runtime import logins
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
from genie.runtime.known_servers import read_known_servers
from genie.tenancy.access import parse_token
from tests.controller.store.etcd_server import EtcdServer
from tests.integration.cluster_processes import ClusterProcesses
from tests.integration.running_cluster import make_python_job
from tests.integration.short_lease_controller import LEASE_S
from tests.waiting import until

REPOSITORY = Path(__file__).parents[2]
HEARTBEAT_INTERVAL_S = 0.2


@pytest.fixture
async def cluster(
    etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ClusterProcesses]:
    """A leader and a standby with short leases of sessions; no agent yet."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    processes = ClusterProcesses(
        tmp_path, store=etcd.url, controller_module="tests.integration.short_lease_controller"
    )
    try:
        await processes.start_controller()
        yield processes
    finally:
        await asyncio.to_thread(init.shutdown_blocking)
        await processes.stop()


@pytest.fixture
def client_settings(cluster: ClusterProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Those of a machine that has logged in to the first controller."""
    state_dir = tmp_path / "client"
    token = parse_token((tmp_path / "controller" / OWNER_TOKEN_FILE).read_text())
    assert cluster.address is not None
    logins.store_login(state_dir, cluster.address.host, cluster.address.port, token)
    monkeypatch.setenv("GENIE_STATE_DIR", str(state_dir))
    return config.load()


async def test_session_and_its_tensors_survive_the_leader(
    cluster: ClusterProcesses, client_settings: Settings
) -> None:
    standby = await cluster.start_standby()
    await cluster.start_agent("n1")
    state = await genie.init(heartbeat_interval=HEARTBEAT_INTERVAL_S)
    x = torch.ones(4, 4, device="remote_accelerator:0")
    assert x.sum().item() == 16.0
    await cluster.controller.kill()
    connection = state.control_integration
    assert connection is not None
    new_address = address_text(standby.host, standby.port)
    await until(lambda: connection.where == new_address and connection.is_open, timeout_s=30)
    sent = state.stats["heartbeats_sent"]
    heartbeats = 1.5 * LEASE_S / HEARTBEAT_INTERVAL_S
    await until(lambda: state.stats["heartbeats_sent"] > sent + heartbeats, timeout_s=60)
    assert (x @ x).sum().item() == 64.0
    assert torch.full((2,), 3.0, device="remote_accelerator:0").sum().item() == 6.0
    async with asyncio.timeout(30), open_client(client_settings) as client:
        assert client.where == new_address, "the next command finds the new leader"
        (job,) = [job for job in (await client.list_jobs())[0] if job.spec.kind is JobKind.SESSION]
        assert job.state is JobState.RUNNING and not job.stop
    await genie.shutdown()
    assert (await genie.init()).initialized, "a new session finds it, too"


async def test_queued_job_has_its_working_directory_after_the_leader_is_killed(
    cluster: ClusterProcesses, client_settings: Settings, tmp_path: Path
) -> None:
    standby = await cluster.start_standby()
    await _wait_until_announced(client_settings, standby)
    workdir = tmp_path / "work"
    workdir.mkdir()
    (workdir / "input.txt").write_text("from the working directory")
    spec = make_python_job("print(open('input.txt').read())")
    async with asyncio.timeout(30), open_client(client_settings) as client:
        job = await client.submit(spec, workdir=workdir)
        assert job.state is JobState.QUEUED, "no node has joined yet"
    await cluster.controller.kill()
    cluster.address = standby
    await cluster.start_agent("n1")
    async with asyncio.timeout(60), open_client(client_settings) as client:
        ended = await client.wait_job(job.job_id)
        assert ended.state is JobState.SUCCEEDED, ended.reason
        output = b"".join([part async for part in client.follow_log(job.job_id)])
        assert b"from the working directory" in output


async def _wait_until_announced(settings: Settings, standby: LocalCluster) -> None:
    """Waits until the leader knows the standby, to which it copies blobs."""
    state_dir, address = settings.paths.state_dir, (standby.host, standby.port)
    (pin,) = [login.token.pin for login in logins.list_logins(state_dir) if login.token is not None]

    async def is_announced() -> bool:
        async with open_client(settings):
            return address in read_known_servers(state_dir, pin)

    await until(is_announced, timeout_s=30)
