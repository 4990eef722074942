"""Backup and restore with real processes: a controller is replaced by one with an earlier state."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from genie import config
from genie.cluster.client import ClusterClient, open_client
from genie.controller.backups.backup_file import BackupReader
from genie.errors import OutdatedLeaderError
from genie.model.job import JobState, Resources
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
from genie.supervisor.child import Child, python_module_command
from genie.supervisor.local_cluster import make_owner_access
from tests.controller.store.etcd_server import EtcdServer
from tests.integration.cluster_processes import ClusterProcess, ClusterProcesses, run_cluster_processes
from tests.integration.test_faults import (
    CountingJobOutput,
    make_counting_job,
    wait_for_job_state,
    watch_ledger,
)
from tests.waiting import until

_COMMAND_TIMEOUT_S = 60


async def run_genie(state_dir: Path, *arguments: str) -> tuple[int, str]:
    """Runs a command on the machine with this state directory; returns exit code and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "genie", *arguments),
        env={"GENIE_STATE_DIR": str(state_dir), "HOME": str(state_dir), "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(_COMMAND_TIMEOUT_S):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


def _copy_certificate_authority(source: Path, target: Path) -> None:
    (target / "controller").mkdir(parents=True, mode=0o700)
    for name in ("ca.pem", "ca.key"):
        (target / "controller" / name).write_bytes((source / "controller" / name).read_bytes())
        (target / "controller" / name).chmod(0o600)


@asynccontextmanager
async def run_controller(state_dir: Path, *, port: int, store: str = "sqlite") -> AsyncIterator[LocalCluster]:
    child = Child("controller", command=python_module_command("genie.controller"), state_dir=state_dir)
    bind = ["--bind", "127.0.0.1", "--port", str(port), "--store", store]
    process = ClusterProcess(child, ["--state-dir", str(state_dir), *bind])
    (state_dir / "local.json").unlink(missing_ok=True)
    process.start()

    def read_address() -> LocalCluster | None:
        process.check_not_exited()
        return LocalCluster.read(state_dir) if (state_dir / OWNER_TOKEN_FILE).exists() else None

    try:
        found = await until(read_address, timeout_s=30)
        assert found is not None
        yield found
    finally:
        await process.stop()


@asynccontextmanager
async def open_client_of(state_dir: Path, address: LocalCluster) -> AsyncIterator[ClusterClient]:
    settings = config.load({"paths.state_dir": state_dir})
    async with open_client(replace(settings, cluster=make_owner_access(state_dir, address))) as client:
        yield client


@asynccontextmanager
async def open_client_of_laptop(folder: Path, address: LocalCluster) -> AsyncIterator[ClusterClient]:
    """Another machine, which remembers what it has seen."""
    settings = config.load({"paths.state_dir": folder / "laptop"})
    access = make_owner_access(folder / "controller", address)
    async with open_client(replace(settings, cluster=access)) as client:
        yield client


async def _wait_for_node_status(client: ClusterClient, status: NodeStatus) -> None:
    async def reached() -> bool:
        return any(view.info.status is status for view in await client.nodes())

    await until(reached, timeout_s=30, what=f"the node is {status}")


def _read_agent_log(folder: Path) -> str:
    return (folder / "n1" / "logs" / "agent.log").read_text()


class _Jobs:
    """One job that runs through backup and restore, one that ends in between, and one that starts then."""

    def __init__(self, folder: Path) -> None:
        self.kept, self.ended, self.later = (
            CountingJobOutput(folder / name) for name in ("kept", "ended", "later")
        )
        self.ids: dict[str, str] = {}

    async def start(
        self, client: ClusterClient, output: CountingJobOutput, *, gpus: int = 0, end: Path | None = None
    ) -> None:
        spec = make_counting_job(output.file, until_file=end)
        job = await client.submit(msgspec.structs.replace(spec, resources=Resources(gpus=gpus)))
        self.ids[output.file.name] = job.job_id
        await output.wait_started()


async def test_nodes_accept_a_restored_controller_and_reject_the_previous_one(tmp_path: Path) -> None:
    async with run_cluster_processes(tmp_path, "n1") as cluster:
        jobs, backup = _Jobs(tmp_path), str(tmp_path / "cluster.backup")
        old_dir, new_dir = tmp_path / "controller", tmp_path / "restored"
        await _raise_leader_revision(cluster)
        async with cluster.client() as client:
            await jobs.start(client, jobs.kept, gpus=1)
            await jobs.start(client, jobs.ended, end=tmp_path / "end")
            code, printed = await run_genie(old_dir, "store", "backup", backup)
            assert code == 0, printed
            await jobs.start(client, jobs.later)
            (tmp_path / "end").touch()
            await wait_for_job_state(client, jobs.ids["ended"], JobState.SUCCEEDED)
        code, printed = await run_genie(old_dir, "store", "restore", backup)
        assert code != 0 and "another controller is using" in printed
        await cluster.controller.kill()
        _copy_certificate_authority(old_dir, new_dir)
        code, printed = await run_genie(new_dir, "store", "restore", backup)
        assert code == 0, printed
        assert "genie up" in printed
        assert cluster.address is not None
        async with run_controller(new_dir, port=cluster.address.port) as address:
            await _check_restored(new_dir, address, jobs)
        await _check_old_controller_is_rejected(tmp_path, cluster)


async def test_migration_to_etcd_and_back_keeps_running_jobs(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    await asyncio.to_thread(etcd.start)
    state_dir = tmp_path / "controller"
    try:
        async with run_cluster_processes(tmp_path, "n1") as cluster:
            jobs = _Jobs(tmp_path)
            await _raise_leader_revision(cluster)
            async with cluster.client() as client:
                await jobs.start(client, jobs.kept, gpus=1)
            code, printed = await run_genie(state_dir, "store", "migrate", "--to", etcd.url)
            assert code != 0 and "another controller is using" in printed
            await cluster.controller.stop()
            assert cluster.address is not None
            target = f"sqlite:{tmp_path}/returned.sqlite3"
            for source, url in (("sqlite", etcd.url), (etcd.url, target)):
                code, printed = await run_genie(state_dir, "store", "migrate", "--from", source, "--to", url)
                assert code == 0, printed
                assert f"next: genie up --detach --store {url}" in printed
                await _check_job_continues(state_dir, jobs, port=cluster.address.port, store=url)
            code, printed = await run_genie(state_dir, "store", "migrate", "--to", etcd.url)
            assert code != 0 and f"the store {etcd.url} is not empty" in printed
    finally:
        await asyncio.to_thread(etcd.stop)


async def _check_job_continues(state_dir: Path, jobs: _Jobs, *, port: int, store: str) -> None:
    async with (
        run_controller(state_dir, port=port, store=store) as address,
        open_client_of(state_dir, address) as client,
    ):
        await _wait_for_node_status(client, NodeStatus.HEALTHY)
        assert (await client.get_job(jobs.ids["kept"])).state is JobState.RUNNING
        holds = [hold.job_id for view in await client.nodes() for hold in view.node_holds.holds]
        assert holds == [jobs.ids["kept"]]
        await _check_backups_are_equal(state_dir, store=store)
    number = jobs.kept.number
    await until(lambda: jobs.kept.number > number)
    assert jobs.kept.start_count == 1


async def _check_backups_are_equal(state_dir: Path, *, store: str) -> None:
    """A backup by the running controller, and for etcd also one that reads the store directly."""
    rows = []
    for number, options in enumerate(((), ("--store", store)) if store.startswith("etcd") else ((),)):
        path = state_dir.parent / f"{number}.backup"
        code, printed = await run_genie(state_dir, "store", "backup", str(path), *options)
        assert code == 0, printed
        reader = BackupReader(path)
        await asyncio.to_thread(reader.verify)
        rows.append({key: value for key, value in reader.rows() if not key.startswith("node/")})
    assert rows[0] == rows[-1]
    assert "cluster" in rows[0] and "leader" not in rows[0]


async def _raise_leader_revision(cluster: ClusterProcesses) -> None:
    """Nodes then have seen a higher revision than a restored store has."""
    async with cluster.client() as client:
        for _ in range(30):
            await client.create_token(TokenKind.JOIN)
    await cluster.controller.stop()
    await cluster.start_controller()
    async with cluster.client() as client:
        await _wait_for_node_status(client, NodeStatus.HEALTHY)


async def _check_restored(new_dir: Path, address: LocalCluster, jobs: _Jobs) -> None:
    async with open_client_of_laptop(new_dir.parent, address) as client:
        assert client.where == f"{address.host}:{address.port}"
    async with open_client_of(new_dir, address) as client, watch_ledger(client):
        await _wait_for_node_status(client, NodeStatus.HEALTHY)
        # Not in the ledger: ended as an orphan.
        await until(lambda: not jobs.later.is_alive, timeout_s=30)
        # In the ledger, but no longer on the node.
        await wait_for_job_state(client, jobs.ids["ended"], JobState.LOST)
        assert (await client.get_job(jobs.ids["kept"])).state is JobState.RUNNING
        number = jobs.kept.number
        await until(lambda: jobs.kept.number > number)
        again = CountingJobOutput(jobs.kept.file.with_name("again"))
        await jobs.start(client, again)


async def _check_old_controller_is_rejected(folder: Path, cluster: ClusterProcesses) -> None:
    """Only the old controller is running, and leads in its own store; then also the new one again."""
    assert cluster.address is not None
    async with run_controller(folder / "controller", port=0) as old:
        agent = cluster.agents["n1"]
        await agent.stop()
        agent.start_with(
            *("--state-dir", str(folder / "n1"), "--node-id", "n1", "--controller", f"127.0.0.1:{old.port}")
        )
        await until(lambda: "genie store restore" in _read_agent_log(folder), timeout_s=30)
        assert "is not accepted" in _read_agent_log(folder)
        with pytest.raises(OutdatedLeaderError, match="has generation 0 of the cluster"):
            async with open_client_of_laptop(folder, old):
                pass
        async with open_client_of(folder / "controller", old) as client:
            job = await client.submit(make_counting_job(folder / "never"))
            new_dir = folder / "restored"
            async with (
                run_controller(new_dir, port=cluster.address.port) as address,
                open_client_of(new_dir, address) as new_client,
            ):
                await _wait_for_node_status(new_client, NodeStatus.HEALTHY)
            assert (await client.get_job(job.job_id)).state is JobState.QUEUED
    assert not _has_file(folder / "never")


def _has_file(path: Path) -> bool:
    return path.exists()
