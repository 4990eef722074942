"""Clients and the executors that they hold open."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from genie.errors import DeviceUnavailableError, JobNotFoundError, NodeNotFoundError
from genie.model.job import JobState
from genie.model.messages import (
    DeviceReply,
    Endpoint,
    ExecutorReady,
    Launch,
    OpenDevice,
    RunningJob,
    SessionEnd,
    SessionHeartbeat,
    SignExecutor,
    WaitDevice,
)
from genie.model.node import Vendor
from genie.model.tenant import TokenKind
from genie.runtime import tls
from tests.controller.standing import Client, standing
from tests.fakes.agent import FakeAgent, node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

ENDPOINT = Endpoint(host="127.0.0.1", port=4242, server_name="x.executor.genie.internal")


async def _open(
    client: Client, *, request_id: str = "d1", gpu_id: int = 0, session: str = "laptop"
) -> DeviceReply:
    return await client.ask(
        OpenDevice(session_node_id=session, node_id="n1", gpu_id=gpu_id, request_id=request_id)
    )


async def _ready(agent: FakeAgent, launch: Launch) -> None:
    assert agent.peer is not None
    ready = ExecutorReady(job_id=launch.job_id, epoch=launch.placement.epoch, endpoint=ENDPOINT)
    await agent.peer.call(ready, timeout_s=5)


async def test_a_device_is_opened_on_the_accelerator_asked_for_and_waited_for(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as client, one.agent(gpus=2) as agent:
        opened = await _open(client, gpu_id=1)
        assert opened.endpoint is None
        launch = await agent.next_launch()
        assert launch.placement.gpu_ids == (1,)
        assert launch.ticket_sha256 == hashlib.sha256(opened.ticket.encode()).hexdigest()
        async with asyncio.TaskGroup() as group:
            wait = WaitDevice(job_id=opened.job.job_id, wait_s=20)
            waiting = group.create_task(client.peer.call(wait, timeout_s=30))
            await agent.confirm(launch)
            await _ready(agent, launch)
        assert waiting.result().endpoint == ENDPOINT
        assert waiting.result().ticket == opened.ticket


@pytest.mark.parametrize(("vendor", "milli", "at_once"), [(Vendor.NVIDIA, 1000, 1), (Vendor.CPU, 100, 10)])
async def test_a_gpu_is_held_whole_and_a_cpu_accelerator_by_tenths(
    tmp_path: Path, vendor: Vendor, milli: int, at_once: int
) -> None:
    async with standing(tmp_path) as one, one.client() as client, one.agent(vendor=vendor) as agent:
        for index in range(at_once):
            await _open(client, request_id=f"d{index}")
            assert (await agent.start_next()).spec.resources.gpu_milli == milli
        waits = await _open(client, request_id="more")
        job = waits.job

        async def explained() -> bool:
            return "GPU 0 of n1 is held by" in (await client.job(job.job_id)).reason

        await until(explained)
        plain = await client.submit()
        assert (await agent.next_launch()).job_id == plain.job_id, "a busy accelerator holds nobody else up"


async def test_asking_twice_opens_one_device(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as client, one.agent() as agent:
        first, second = await _open(client), await _open(client)
        assert (first.job.job_id, first.ticket) == (second.job.job_id, second.ticket)
        await agent.start_next()


async def test_what_is_not_there_cannot_be_opened(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as client, one.agent() as agent:
        with pytest.raises(DeviceUnavailableError, match="has no accelerator 7"):
            await _open(client, gpu_id=7)
        with pytest.raises(NodeNotFoundError):
            await client.ask(OpenDevice(session_node_id="a", node_id="n9", gpu_id=0, request_id="r"))
        await agent.leave()
        with pytest.raises(DeviceUnavailableError, match="has left the cluster"):
            await _open(client)


async def test_the_end_of_a_session_gives_back_what_that_client_held(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as client, one.agent(gpus=2) as agent:
        mine = await _open(client, request_id="a")
        await agent.start_next()
        other = await _open(client, request_id="b", gpu_id=1, session="desktop")
        await agent.start_next()
        await client.ask(SessionEnd(node_id="laptop"))
        assert (await agent.next_kill()).job_id == mine.job.job_id
        ack = await agent.beat()
        assert [order.job_id for order in ack.kill] == [mine.job.job_id]
        assert not (await client.job(other.job.job_id)).stop


async def test_a_client_that_is_silent_for_a_minute_loses_its_devices(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as client, one.agent() as agent:
        opened = await _open(client)
        await agent.start_next()
        for _ in range(10):
            await clock.advance(7.0)
            await agent.beat()
            await client.ask(SessionHeartbeat(node=node_info("laptop")))
        assert not (await client.job(opened.job.job_id)).stop
        assert (await client.status()).clients == 1

        async def cancelled() -> bool:
            await clock.advance(5.0)
            await agent.beat()
            return bool((await client.job(opened.job.job_id)).stop)

        await until(cancelled)
        assert "silent for 60 s" in (await client.job(opened.job.job_id)).reason
        assert (await client.status()).clients == 0


async def test_devices_survive_a_restart_of_the_controller_if_their_client_comes_back(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one:
        access = await one.join("n1")
        agent = FakeAgent(node_info("n1", gpus=2))
        async with one.client() as client, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            kept = await _open(client, request_id="a")
            launch = await agent.start_next()
            left = await _open(client, request_id="b", gpu_id=1, session="gone")
            await agent.start_next()
        await one.restart()
        async with one.client() as client, agent.connected(one.network, access):
            await agent.register()
            agent.running[launch.job_id] = RunningJob(
                job_id=launch.job_id, epoch=launch.placement.epoch, endpoint=ENDPOINT
            )
            await agent.beat()
            found = await client.ask(WaitDevice(job_id=kept.job.job_id, wait_s=1))
            assert found.endpoint == ENDPOINT, "the agent's heartbeat says where it listens"

            async def cancelled() -> bool:
                await clock.advance(7.0)
                await agent.beat()
                await client.ask(SessionHeartbeat(node=node_info("laptop")))
                return bool((await client.job(left.job.job_id)).stop)

            await until(cancelled)
            assert (await client.job(kept.job.job_id)).state is JobState.RUNNING
            assert not (await client.job(kept.job.job_id)).stop


async def test_a_device_is_its_tenants_alone(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.agent() as agent:
        blue, red = [await one.token(TokenKind.USER, tenant=name) for name in ("blue", "red")]
        async with one.client(blue) as ann, one.client(red) as bob, one.client() as owner:
            opened = await _open(ann)
            await agent.start_next()
            for other in (bob, owner):
                with pytest.raises(JobNotFoundError):
                    await other.ask(WaitDevice(job_id=opened.job.job_id))
            await bob.ask(SessionEnd(node_id="laptop"))
            assert not (await ann.job(opened.job.job_id)).stop


async def test_an_executors_certificate_is_signed_for_its_session(tmp_path: Path) -> None:
    async with standing(tmp_path, tls="on") as one, one.client() as client, one.agent() as agent:
        await _open(client)
        launch = await agent.next_launch()
        _, csr_pem = tls.new_key_and_csr()
        assert agent.peer is not None
        ask = SignExecutor(job_id=launch.job_id, epoch=launch.placement.epoch, csr_pem=csr_pem)
        signed = await agent.peer.call(ask, timeout_s=5)
        assert "CERTIFICATE" in signed.certificate_pem


async def test_what_an_executor_does_before_it_listens_is_shown_to_its_client(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as client, one.agent() as agent:
        opened = await _open(client)
        launch = await agent.start_next()
        for note in ("compiling its library", ""):
            agent.running[launch.job_id] = RunningJob(
                job_id=launch.job_id, epoch=launch.placement.epoch, note=note
            )
            await agent.beat()
            reply = await client.ask(WaitDevice(job_id=opened.job.job_id, wait_s=0))
            assert (reply.endpoint, reply.job.reason == "compiling its library") == (None, note != "")
