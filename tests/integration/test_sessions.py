"""Sessions during failures of the cluster: a controller that crashes, hangs or restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import genie
from genie.cluster.client import open_client
from genie.cluster.events import EventType
from genie.errors import DeadlineError, DeviceLostError
from genie.model.node import NodeStatus
from tests.integration.running_cluster import StartedCluster
from tests.waiting import until


def has_event(state: genie.ClusterState, kind: EventType) -> bool:
    return any(event.type is kind for event in state.events.history())


@contextmanager
def suspend_process(pid: int) -> Iterator[None]:
    """Stops a process, which keeps its connections open and does not respond."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_session_and_device_survive_a_controller_crash(own_cluster: StartedCluster) -> None:
    state = await genie.init(heartbeat_interval=0.2)
    x = torch.ones(4, 4, device="remote_accelerator:0")
    old = own_cluster.pids["controller"]
    os.kill(old, signal.SIGKILL)
    await until(lambda: has_event(state, EventType.CONNECTION_LOST))
    assert (x @ x).sum().item() == 64.0, "the executor does not need the controller"
    await until(lambda: has_event(state, EventType.CONNECTION_RESTORED), timeout_s=30)
    assert own_cluster.pids["controller"] != old, "the supervisor has_event restarted the controller"
    assert state.stats["reconnects"] >= 1
    await until(lambda: state.nodes["n1"].status is NodeStatus.HEALTHY, timeout_s=30)
    sent = state.stats["heartbeats_sent"]
    await until(lambda: state.stats["heartbeats_sent"] > sent)
    assert (x @ x).sum().item() == 64.0
    async with open_client(own_cluster.running.settings()) as client:
        (job,) = [job for job in (await client.list_jobs())[0] if job.spec.kind == "session"]
        assert job.state == "running"
        await genie.shutdown()
        ended = await client.wait_job(job.job_id, timeout_s=30)
        assert (ended.state, ended.reason) == ("succeeded", "the client closed the session")


async def test_hanging_controller_does_not_block_the_session(own_cluster: StartedCluster) -> None:
    """With TLS, where an orderly shutdown needs the peer."""
    state = await genie.init(heartbeat_interval=0.2, heartbeat_timeout=0.6)
    with suspend_process(own_cluster.pids["controller"]):
        await until(lambda: state.nodes["n1"].status is NodeStatus.DISCONNECTED)
        assert state.stats["heartbeats_failed"] >= 1
        await genie.shutdown()
        with pytest.raises(DeadlineError, match="phase 4 of 5"):
            await genie.init(timeout=3.0)
    assert not genie.is_initialized()
    assert (await genie.init()).initialized


async def test_lost_executor_is_replaced_on_next_use(own_cluster: StartedCluster) -> None:
    await genie.init()
    x = torch.ones(2, device="remote_accelerator:0")
    async with open_client(own_cluster.running.settings()) as client:
        (job,) = [job for job in (await client.list_jobs())[0] if job.spec.kind == "session"]
        await client.cancel(job.job_id)
        await client.wait_job(job.job_id, timeout_s=30)
    with pytest.raises(DeviceLostError):
        (x + 1).cpu()
    assert torch.ones(2, device="remote_accelerator:0").sum().item() == 2.0
    await genie.shutdown()
