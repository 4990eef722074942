"""Three servers on a real etcd and two agents are upgraded to the next release, one after another, with jobs
running, and a server is downgraded again. The next release is a changed copy of this one (next_release.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from genie import config
from genie.agent import KEEP_JOBS_SIGNAL, joining
from genie.cluster.client import ClusterClient, open_client
from genie.config import Settings
from genie.errors import GenieError
from genie.model.job import Job, JobSpec, JobState
from genie.model.messages import NodeView
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.processes import files
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
from genie.runtime.network import TcpNetwork
from genie.supervisor.child import Child, python_module_command
from genie.supervisor.local_cluster import make_owner_access
from genie.version import __version__
from tests.controller.store.etcd_server import EtcdServer
from tests.next_release import NEW_CONSTRAINT, NEXT_VERSION, NextRelease
from tests.ports import free_port
from tests.waiting import until

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
SERVERS = ("s1", "s2", "s3")
NODES = ("n1", "n2")
SUBMIT_SCRIPT = f"""
import asyncio, json, sys
from genie import config
from genie.cluster.client import open_client
from genie.errors import GenieError
from genie.model.job import JobSpec, PlacementConstraints

async def submit(host, port):
    address = {{"cluster.master_addr": host, "cluster.master_port": port}}
    constraints = PlacementConstraints({NEW_CONSTRAINT}=2)
    async with open_client(config.load({{"paths.state_dir": sys.argv[1], **address}})) as client:
        try:
            job = await client.submit(JobSpec(name="pods", command=("true",), constraints=constraints))
            print(json.dumps({{"job_id": job.job_id}}))
        except GenieError as error:
            print(json.dumps({{"error": str(error)}}))

asyncio.run(submit(sys.argv[2], int(sys.argv[3])))
"""


class UpgradableCluster:
    """Servers and agents as separate processes, each of this release or of the next one."""

    def __init__(self, folder: Path, *, store: str, next_release: NextRelease) -> None:
        self._folder = folder
        self._store = store
        self._next_release = next_release
        self._ports = {name: free_port() for name in SERVERS}
        self._children: dict[str, Child] = {}

    @property
    def settings(self) -> Settings:
        """Those of a client on the machine of the first server, which knows all of them."""
        state_dir = self._folder / SERVERS[0]
        settings = config.load({"paths.state_dir": state_dir})
        local = LocalCluster(host="127.0.0.1", port=self._ports[SERVERS[0]], cluster_id="")
        return replace(settings, cluster=make_owner_access(state_dir, local))

    async def start_server(self, name: str, *, upgraded: bool) -> None:
        state_dir = self._folder / name
        if not state_dir.exists():
            (state_dir / "controller").mkdir(parents=True, mode=0o700)
            state_dir.chmod(0o700)
            if name != SERVERS[0]:
                for path in ("controller/ca.pem", "controller/ca.key", OWNER_TOKEN_FILE):
                    files.write_private(state_dir / path, (self._folder / SERVERS[0] / path).read_bytes())
        (state_dir / "local.json").unlink(missing_ok=True)
        address = ["--bind", "127.0.0.1", "--port", str(self._ports[name])]
        child = self._start(
            name,
            "genie.controller",
            ["--state-dir", str(state_dir), "--store", self._store, *address],
            upgraded=upgraded,
        )

        def has_started() -> bool:
            child.check_not_exited()
            return LocalCluster.read(state_dir) is not None and (state_dir / OWNER_TOKEN_FILE).exists()

        await until(has_started, timeout_s=START_TIMEOUT_S, what=f"{name} listens")

    async def start_agent(self, node_id: str, client: ClusterClient, *, upgraded: bool) -> None:
        state_dir = self._folder / node_id
        before = (await fetch_nodes(client)).get(node_id)
        if not state_dir.exists():
            state_dir.mkdir(mode=0o700)
            token = await client.create_token(TokenKind.JOIN)
            await joining.join_cluster(
                "127.0.0.1",
                self._ports[SERVERS[0]],
                token.token,
                state_dir=state_dir,
                requested_node_id=node_id,
                network=TcpNetwork(),
            )
        child = self._start(
            node_id, "genie.agent", ["--state-dir", str(state_dir), "--node-id", node_id], upgraded=upgraded
        )

        async def has_registered() -> bool:
            child.check_not_exited()
            node = (await fetch_nodes(client)).get(node_id)
            if node is None or (before is not None and node.info.incarnation <= before.info.incarnation):
                return False
            return node.info.status is NodeStatus.HEALTHY

        await until(has_registered, timeout_s=START_TIMEOUT_S, what=f"{node_id} registers")

    async def wait_until_all_servers_are_announced(self) -> None:
        """Until then, a client would not find another server when the first one stops."""
        folder = self._folder / SERVERS[0] / "servers"

        async def are_announced() -> bool:
            async with open_client(self.settings):
                pass
            return any(len(json.loads(path.read_text())) == len(SERVERS) for path in folder.glob("*.json"))

        await until(are_announced, timeout_s=START_TIMEOUT_S, what="the servers know each other")

    def _start(self, name: str, module: str, arguments: list[str], *, upgraded: bool) -> Child:
        command = self._next_release.module_command(module) if upgraded else python_module_command(module)
        child = Child(module.rpartition(".")[2], command=command, state_dir=self._folder / name)
        child.start(arguments)
        self._children[name] = child
        return child

    async def stop(self, *names: str) -> None:
        for name in names:
            await self._children.pop(name).stop(grace_s=STOP_TIMEOUT_S)

    async def stop_agent_and_keep_jobs(self, node_id: str) -> None:
        """As `genie down --keep-jobs` does."""
        await self._children.pop(node_id).stop(grace_s=STOP_TIMEOUT_S, number=KEEP_JOBS_SIGNAL)

    async def stop_all(self) -> None:
        await self.stop(*(name for name in (*NODES, *SERVERS) if name in self._children))

    async def submit_with_new_constraint(self, server: str) -> dict[str, str]:
        """Submit a job by a client of the next release; returns its ID or the error."""
        arguments = (str(self._folder / SERVERS[0]), "127.0.0.1", str(self._ports[server]))
        process = await asyncio.create_subprocess_exec(
            *self._next_release.script_command(SUBMIT_SCRIPT), *arguments, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        found: dict[str, str] = json.loads(output)
        return found


async def fetch_nodes(client: ClusterClient) -> dict[str, NodeView]:
    return {view.info.node_id: view for view in await client.nodes()}


async def wait_for_state(client: ClusterClient, job: Job, state: JobState) -> Job:
    async def reached() -> Job | None:
        now = await client.get_job(job.job_id)
        assert not now.state.is_final or now.state is state, now.reason
        return now if now.state is state else None

    found = await until(reached, timeout_s=START_TIMEOUT_S, what=f"{job.spec.name} is {state}")
    assert found is not None
    return found


class LongJobs:
    """One job on each node that runs until it is released, and that must not be moved or restarted."""

    def __init__(self, folder: Path, client: ClusterClient) -> None:
        self._folder = folder
        self._client = client
        self._started: dict[str, Job] = {}

    async def start(self, node_id: str) -> None:
        script = f"while [ ! -e {self._folder}/release-{node_id} ]; do sleep 0.1; done"
        spec = JobSpec(name=f"long-{node_id}", command=("sh", "-c", script), node_id=node_id)
        job = await self._client.submit(spec)
        self._started[node_id] = await wait_for_state(self._client, job, JobState.RUNNING)

    async def check_running(self) -> None:
        for before in self._started.values():
            now = await self._client.get_job(before.job_id)
            assert (now.state, now.placements, now.run_number) == (JobState.RUNNING, before.placements, 1), (
                now.reason
            )

    async def finish(self, node_id: str) -> None:
        (self._folder / f"release-{node_id}").touch()
        await wait_for_state(self._client, self._started.pop(node_id), JobState.SUCCEEDED)
        (self._folder / f"release-{node_id}").unlink()


async def check_job_succeeds(client: ClusterClient, *, node_id: str = "") -> None:
    job = await client.submit(JobSpec(name="short", command=("true",), node_id=node_id))
    await wait_for_state(client, job, JobState.SUCCEEDED)


@pytest.fixture
async def cluster(etcd: EtcdServer, tmp_path: Path) -> AsyncIterator[UpgradableCluster]:
    made = UpgradableCluster(tmp_path, store=etcd.url, next_release=NextRelease(tmp_path / "next"))
    try:
        yield made
    finally:
        await made.stop_all()


async def test_servers_and_agents_are_upgraded_and_downgraded_while_jobs_run(
    cluster: UpgradableCluster, tmp_path: Path
) -> None:
    for name in SERVERS:
        await cluster.start_server(name, upgraded=False)
    await cluster.wait_until_all_servers_are_announced()
    async with open_client(cluster.settings) as client:
        for node_id in NODES:
            await cluster.start_agent(node_id, client, upgraded=False)
        jobs = LongJobs(tmp_path, client)
        for node_id in NODES:
            await jobs.start(node_id)
        for name in SERVERS:
            await check_server_upgrade(cluster, name, client, jobs)
        pods = await client.get_job(await until_accepted(cluster))
        await wait_for_rejection_by_old_agent(client, pods)
        assert await count_nodes_in_alarm(client) == len(NODES)
        for number, node_id in enumerate(NODES, 1):
            await check_agent_upgrade(cluster, node_id, client, jobs)
            assert await count_nodes_in_alarm(client) == len(NODES) - number
        assert {view.info.version for view in await client.nodes()} == {NEXT_VERSION}
        await wait_for_state(client, pods, JobState.SUCCEEDED)
        await check_server_downgrade(cluster, client, jobs, pods)
        for node_id in NODES:
            await jobs.finish(node_id)


async def check_server_upgrade(
    cluster: UpgradableCluster, name: str, client: ClusterClient, jobs: LongJobs
) -> None:
    rejected = await cluster.submit_with_new_constraint(SERVERS[0])
    assert NEW_CONSTRAINT in rejected["error"], rejected
    await cluster.stop(name)
    await check_job_succeeds(client)
    await cluster.start_server(name, upgraded=True)
    await check_job_succeeds(client)
    await jobs.check_running()


async def check_agent_upgrade(
    cluster: UpgradableCluster, node_id: str, client: ClusterClient, jobs: LongJobs
) -> None:
    """The job of the node continues under its shim of this release, and is adopted by the next release."""
    await cluster.stop_agent_and_keep_jobs(node_id)
    await cluster.start_agent(node_id, client, upgraded=True)
    await jobs.check_running()
    await jobs.finish(node_id)
    await check_job_succeeds(client, node_id=node_id)
    await jobs.start(node_id)
    await jobs.check_running()


async def check_server_downgrade(
    cluster: UpgradableCluster, client: ClusterClient, jobs: LongJobs, pods: Job
) -> None:
    """A server of this release leads agents of the next one, and does not replace the row of `pods`."""
    await cluster.stop(SERVERS[0])
    await cluster.start_server(SERVERS[0], upgraded=False)
    await check_job_succeeds(client)
    await cluster.stop(*SERVERS[1:])
    await check_job_succeeds(client)
    status = await client.status()
    assert (status.version, status.leading) == (__version__, True)
    await cluster.start_server(SERVERS[1], upgraded=True)
    await jobs.check_running()
    with pytest.raises(
        GenieError, match=f"newer release of Genie: this one, {__version__}.* spec.wishes.{NEW_CONSTRAINT}"
    ):
        await client.get_job(pods.job_id)
    rejected = await cluster.submit_with_new_constraint(SERVERS[0])
    assert NEW_CONSTRAINT in rejected["error"]
    await cluster.stop(SERVERS[0])
    await check_job_succeeds(client)
    assert (await client.get_job(pods.job_id)).state is JobState.SUCCEEDED


async def until_accepted(cluster: UpgradableCluster) -> str:
    """Submit until the leader has read the releases of all servers; returns the ID of the job."""

    async def submit() -> str | None:
        return (await cluster.submit_with_new_constraint(SERVERS[0])).get("job_id")

    return await until(submit, timeout_s=START_TIMEOUT_S, what="all servers are known to be upgraded")


async def wait_for_rejection_by_old_agent(client: ClusterClient, job: Job) -> None:
    async def is_rejected() -> bool:
        now = await client.get_job(job.job_id)
        assert not now.state.is_final, now.reason
        return any(
            f"(Genie {NEXT_VERSION}) sent Launch with spec.wishes.{NEW_CONSTRAINT}" in step.reason
            for step in now.history
        )

    await until(is_rejected, timeout_s=START_TIMEOUT_S, what="an agent rejects what it does not understand")


async def count_nodes_in_alarm(client: ClusterClient) -> int:
    for alarm in (await client.status()).alarms:
        if match := re.match(r"(\d+) nodes? runs? another release of Genie", alarm):
            return int(match[1])
    return 0
