"""Commands that use a standby: real processes, one etcd, a leader that works, is stopped, and is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from genie import config
from genie.cluster.client import ClusterClient, open_client
from genie.config import Settings
from genie.model.job import JobState
from genie.model.names import address_text
from genie.runtime import logins
from genie.runtime.credentials import OWNER_TOKEN_FILE
from genie.supervisor.local_cluster import run_local_cluster
from genie.tenancy.access import parse_token
from tests.controller.store.etcd_server import EtcdServer
from tests.integration.cluster_processes import ClusterProcesses
from tests.integration.running_cluster import make_python_job
from tests.waiting import until

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class ClusterWithStandby:
    processes: ClusterProcesses
    address: str
    """HOST:PORT of the standby."""
    client_dir: Path
    """State directory of a machine with a login to the standby."""

    @property
    def client_settings(self) -> Settings:
        host, port = self.address.rsplit(":", 1)
        return config.load(
            {
                "paths.state_dir": self.client_dir,
                "cluster.master_addr": host,
                "cluster.master_port": int(port),
            }
        )

    async def run_genie(self, *arguments: str) -> tuple[str, str]:
        """Run a command with the address of the standby and return its output."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "genie", *arguments[:1], "--address", self.address, *arguments[1:]),
            env={**os.environ, "GENIE_STATE_DIR": str(self.client_dir), "PYTHONPATH": str(REPOSITORY)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()
        return out.decode(), err.decode()


@pytest.fixture
async def cluster(
    etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ClusterWithStandby]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    processes = ClusterProcesses(tmp_path, store=etcd.url)
    try:
        await processes.start_controller()
        standby = await processes.start_standby()
        await processes.start_agent("n1")
        client_dir = tmp_path / "client"
        token = parse_token((tmp_path / "controller" / OWNER_TOKEN_FILE).read_text())
        logins.store_login(client_dir, standby.host, standby.port, token)
        yield ClusterWithStandby(processes, address_text(standby.host, standby.port), client_dir)
    finally:
        await processes.controller.kill()
        await processes.stop()


async def test_commands_work_with_the_address_of_a_standby(
    cluster: ClusterWithStandby, tmp_path: Path
) -> None:
    workdir = tmp_path / "work"
    workdir.mkdir()
    (workdir / "input.txt").write_text("from the working directory")
    job_id = (await cluster.run_genie("submit", "--", "echo", "hello"))[0].strip()
    out, _ = await cluster.run_genie("logs", "--follow", job_id)
    assert out == "hello\n"
    with_workdir = ("submit", "--workdir", str(workdir), "--", "cat", "input.txt")
    job_id = (await cluster.run_genie(*with_workdir))[0].strip()
    out, _ = await cluster.run_genie("logs", "--follow", job_id)
    assert out == "from the working directory"
    out, err = await cluster.run_genie("nodes", "--json")
    document = json.loads(out)
    assert [node["info"]["status"] for node in document["nodes"]] == ["healthy"]
    assert document["age_s"] == 0.0 and "no leader" not in err
    status = json.loads((await cluster.run_genie("status", "--json"))[0])
    assert (status["address"], status["leading"], status["nodes"]) == (cluster.address, False, {"healthy": 1})
    async with asyncio.timeout(30), open_client(cluster.client_settings) as client:
        job = await client.submit(make_python_job("print('through the standby')"))
        assert (await client.wait_job(job.job_id)).state is JobState.SUCCEEDED
        assert client.where == cluster.address, "the client has not moved"


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
async def test_client_of_a_standby_survives_the_leader(
    cluster: ClusterWithStandby, fault: signal.Signals, tmp_path: Path
) -> None:
    finish_file = tmp_path / "finish"
    code = f"import pathlib, time\nwhile not pathlib.Path({str(finish_file)!r}).exists(): time.sleep(0.05)"
    async with asyncio.timeout(60), open_client(cluster.client_settings) as client:
        job = await client.submit(make_python_job(code))
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(client.wait_job(job.job_id))
            await _until_running(client, job.job_id)
            os.kill(cluster.processes.controller.pid, fault)
            assert [each.job_id for each in (await client.list_jobs())[0]] == [job.job_id]
            second = await client.submit(make_python_job("print('after')"))
            assert (await client.wait_job(second.job_id)).state is JobState.SUCCEEDED
            finish_file.touch()
        assert waiting.result().state is JobState.SUCCEEDED
        assert client.where == cluster.address
        assert {each.job_id for each in (await client.list_jobs())[0]} == {job.job_id, second.job_id}


async def test_server_starts_while_the_leader_is_lost(cluster: ClusterWithStandby, etcd: EtcdServer) -> None:
    """The lost leader remains the known one until its lease ends."""
    settings = config.load(
        {
            "paths.state_dir": cluster.processes.make_state_dir_of_standby("s2"),
            "controller.store": etcd.url,
            "controller.port": 0,
            "cluster.node_id": "n2",
        }
    )
    printed: list[str] = []

    def kill_leader_when_found(line: str) -> None:
        printed.append(line)
        if line.startswith("standby: the leader is"):
            os.kill(cluster.processes.controller.pid, signal.SIGKILL)

    async with asyncio.timeout(60):
        async with run_local_cluster(settings, progress=kill_leader_when_found):
            pass
    assert any(line.startswith("standby: the leader is") for line in printed)
    assert any(line.startswith("node n2 has joined the cluster") for line in printed)


async def _until_running(client: ClusterClient, job_id: str) -> None:
    async def is_running() -> bool:
        return (await client.get_job(job_id)).state is JobState.RUNNING

    await until(is_running)
