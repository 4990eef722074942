"""Sessions while things happen to the cluster: a controller that dies, hangs or comes back."""

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
from tests.integration.running import StartedCluster
from tests.waiting import until


def has(state: genie.ClusterState, kind: EventType) -> bool:
    return any(event.type is kind for event in state.events.history())


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that keeps its connections and says nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_session_and_its_device_outlive_the_controllers_crash(own_cluster: StartedCluster) -> None:
    state = await genie.init(heartbeat_interval=0.2)
    x = torch.ones(4, 4, device="remote_accelerator:0")
    old = own_cluster.pids["controller"]
    os.kill(old, signal.SIGKILL)
    await until(lambda: has(state, EventType.CONNECTION_LOST))
    assert (x @ x).sum().item() == 64.0, "the executor does not need the controller"
    await until(lambda: has(state, EventType.CONNECTION_RESTORED), timeout_s=30)
    assert own_cluster.pids["controller"] != old, "the supervisor has started another one"
    assert state.stats["reconnects"] >= 1
    await until(lambda: state.nodes["n1"].status is NodeStatus.HEALTHY, timeout_s=30)
    sent = state.stats["heartbeats_sent"]
    await until(lambda: state.stats["heartbeats_sent"] > sent)
    assert (x @ x).sum().item() == 64.0
    async with open_client(own_cluster.running.settings()) as client:
        (job,) = [job for job in (await client.list_jobs())[0] if job.spec.kind == "session"]
        assert job.state == "running"
    await genie.shutdown()


async def test_a_controller_that_hangs_keeps_nobody_waiting(own_cluster: StartedCluster) -> None:
    """With TLS, where an orderly goodbye would need the other side."""
    state = await genie.init(heartbeat_interval=0.2, heartbeat_timeout=0.6)
    with frozen(own_cluster.pids["controller"]):
        await until(lambda: state.nodes["n1"].status is NodeStatus.DISCONNECTED, timeout_s=20)
        assert state.stats["heartbeats_failed"] >= 1
        await genie.shutdown()
        with pytest.raises(DeadlineError, match="phase 4 of 5"):
            await genie.init(timeout=1.0)
    assert not genie.is_initialized()
    assert (await genie.init()).initialized


async def test_a_lost_executor_is_replaced_at_the_next_use(own_cluster: StartedCluster) -> None:
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
