"""Several concurrent clients and several nodes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
import torch

import genie
from genie.cluster import init
from genie.model.job import JobState, PlacementConstraints, Spread
from tests.integration.cluster_processes import run_cluster_processes
from tests.integration.running_cluster import RunningCluster, make_python_job
from tests.waiting import wait_until

CLIENT = """
    import genie, torch
    with genie.session() as state:
        x = torch.full((64, 64), {value}.0, device="remote_accelerator:0")
        print(state.local_node.node_id, (x @ x)[0, 0].item())
"""


def test_concurrent_clients_get_their_own_results(cluster: RunningCluster) -> None:
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CLIENT.format(value=value))],
            env=cluster.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for value in range(1, 3)
    ]
    outcomes = [client.communicate(timeout=80) for client in clients]
    assert [client.returncode for client in clients] == [0, 0], outcomes
    names = {out.split()[0] for out, _ in outcomes}
    assert len(names) == 2, "each session has its own name"
    assert [float(out.split()[1]) for out, _ in outcomes] == [64.0 * value * value for value in range(1, 3)]


@pytest.mark.timeout(120)
async def test_jobs_run_on_all_nodes_and_each_node_has_a_device_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_cluster_processes(tmp_path, "b", "a") as cluster, cluster.client() as client:
        jobs = [
            await client.submit(make_python_job("import time; time.sleep(0.5)", gpus=1)) for _ in range(4)
        ]
        ended = await asyncio.gather(*(client.wait_job(job.job_id, timeout_s=60) for job in jobs))
        assert [job.state for job in ended] == [JobState.SUCCEEDED] * 4
        assert {job.placement.node_id for job in ended if job.placement} == {"a", "b"}
        config = cluster.settings().cluster
        state = await genie.init(config.master_addr, config.master_port, token=config.token)
        try:
            assert state.transport_coordinator is not None
            assert [ref.node_id for ref in state.transport_coordinator.accelerator_refs] == ["a", "b"]
        finally:
            await asyncio.to_thread(init.shutdown_blocking)


@pytest.mark.timeout(120)
async def test_workers_of_a_gang_connect_to_each_other(tmp_path: Path) -> None:
    """Like torch.distributed: rank 0 listens at MASTER_ADDR:MASTER_PORT, the others connect."""
    meet = """
        import os, socket, time
        rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert (rank, workers) == (int(os.environ["GENIE_JOB_RANK"]), int(os.environ["GENIE_JOB_WORKERS"]))
        assert len(os.environ["GENIE_JOB_HOSTS"].split(",")) == workers
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank == 0:
            listener = socket.create_server(where)
            for _ in range(workers - 1):
                listener.accept()[0].sendall(b"hello")
        else:
            for attempt in range(200):
                try:
                    peer = socket.create_connection(where, timeout=10)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            assert peer.recv(5) == b"hello"
        print("rank", rank, "of", os.environ["GENIE_JOB_ID"])
    """
    async with run_cluster_processes(tmp_path, "b", "a") as cluster, cluster.client() as client:
        wanted = make_python_job(textwrap.dedent(meet), gpus=1)
        constraints = PlacementConstraints(workers=2, spread=Spread.SPREAD)
        job = await client.submit(msgspec.structs.replace(wanted, constraints=constraints))
        ended = await client.wait_job(job.job_id, timeout_s=60)
        assert (ended.state, ended.exit_code) == (JobState.SUCCEEDED, 0), ended.reason
        assert {placement.node_id for placement in ended.placements} == {"a", "b"}
        for rank in range(2):
            log = b"".join([part async for part in client.follow_log(f"{job.job_id}.{rank}", follow=False)])
            assert log.decode() == f"rank {rank} of {job.job_id}\n"


@pytest.mark.timeout(120)
async def test_failed_worker_ends_the_gang(tmp_path: Path) -> None:
    fail = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    async with run_cluster_processes(tmp_path, "b", "a") as cluster, cluster.client() as client:
        constraints = PlacementConstraints(workers=2, spread=Spread.SPREAD)
        job = await client.submit(
            msgspec.structs.replace(make_python_job(fail, gpus=1), constraints=constraints)
        )
        ended = await client.wait_job(job.job_id, timeout_s=60)
        assert (ended.state, ended.exit_code) == (JobState.FAILED, 7)
        assert "worker 1 on node" in ended.reason


@pytest.mark.timeout(120)
async def test_preempted_job_saves_its_state_and_resumes(tmp_path: Path) -> None:
    saving = f"""
        import pathlib, signal, sys, time
        state = pathlib.Path({str(tmp_path / "state")!r})
        if state.exists():
            sys.exit(0)
        def save(*_):
            time.sleep(0.5)
            state.write_text("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(600)
    """
    async with run_cluster_processes(tmp_path, "a") as cluster, cluster.client() as client:
        constraints = PlacementConstraints(preemptible=True, grace_s=20.0)
        low = make_python_job(textwrap.dedent(saving), gpus=1)
        one = await client.submit(msgspec.structs.replace(low, constraints=constraints))
        async for part in client.follow_log(one.job_id, follow=True):
            if b"ready" in part:
                break
        high = msgspec.structs.replace(
            make_python_job("pass", gpus=1), constraints=PlacementConstraints(priority=5)
        )
        two = await client.submit(high)
        assert (await client.wait_job(two.job_id, timeout_s=60)).state is JobState.SUCCEEDED
        assert (tmp_path / "state").read_text() == "saved"
        ended = await client.wait_job(one.job_id, timeout_s=60)
        states = [step.state for step in ended.history]
        assert ended.state is JobState.SUCCEEDED
        assert states == ["queued", "placing", "running", "queued", "placing", "running", "succeeded"]


@pytest.mark.timeout(120)
async def test_node_that_joins_later_gets_the_next_device_index(tmp_path: Path) -> None:
    def work() -> float:
        wait_until(lambda: torch.remote_accelerator.device_count() == 2, timeout_s=60)  # type: ignore[attr-defined]
        return float((here.to("remote_accelerator:1") * 2).sum())

    async with run_cluster_processes(tmp_path, "b") as cluster:
        config = cluster.settings().cluster
        state = await genie.init(
            config.master_addr, config.master_port, token=config.token, heartbeat_interval=0.2
        )
        try:
            here = await asyncio.to_thread(torch.ones, 3, device="remote_accelerator:0")
            await cluster.start_agent("a")
            assert await asyncio.to_thread(work) == 6
            assert state.transport_coordinator is not None
            assert [ref.node_id for ref in state.transport_coordinator.accelerator_refs] == ["b", "a"]
        finally:
            await asyncio.to_thread(init.shutdown_blocking)


@pytest.mark.timeout(120)
async def test_tensor_is_copied_directly_between_nodes(tmp_path: Path) -> None:
    """With TLS: each executor verifies the certificate of the other before it sends the ticket."""

    def work() -> tuple[bool, int]:
        here = torch.arange(500_000.0)
        there = here.to("remote_accelerator:0").add(1).to("remote_accelerator:1")
        back = (there * 2).to("remote_accelerator:0")
        sent = torch.remote_accelerator.stream_stats(1)["bytes_sent"]  # type: ignore[attr-defined]
        return torch.equal(back.cpu(), (here + 1) * 2), sent

    async with run_cluster_processes(tmp_path, "a", "b") as cluster:
        config = cluster.settings().cluster
        await genie.init(config.master_addr, config.master_port, token=config.token)
        try:
            right, sent = await asyncio.to_thread(work)
        finally:
            await asyncio.to_thread(init.shutdown_blocking)
    assert right
    assert sent < 100_000, "the client sent no tensor to the second node"
