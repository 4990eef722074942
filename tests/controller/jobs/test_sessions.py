"""Sessions: devices, leases of clients, executors."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genie.config import ControllerConfig
from genie.controller.jobs.lifecycle import LostWorker
from genie.controller.jobs.sessions import LEASE_S_MIN, lease_duration_s
from genie.errors import DeviceUnavailableError, GenieError, JobNotFoundError, NodeNotFoundError
from genie.model.job import CLIENT_LOST_EXIT_CODE, JobState
from genie.model.messages import (
    DeviceReply,
    Endpoint,
    ExecutorReady,
    Launch,
    ListJobs,
    OpenDevice,
    RunningJob,
    SessionEnd,
    SessionHeartbeat,
    WaitDevice,
)
from genie.model.messages.handshake import SignExecutor
from genie.model.node import Vendor
from genie.model.tenant import TokenKind
from genie.runtime import tls
from genie.runtime.controller_connection import BACKOFF_S_MAX
from genie.sim.store import MemoryStore
from tests.controller.running_controller import Client, running_controller
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

ENDPOINT = Endpoint(host="127.0.0.1", port=4242, server_name="x.executor.genie.internal")


async def _open_device(
    client: Client, *, request_id: str = "d1", gpu_id: int = 0, session: str = "laptop"
) -> DeviceReply:
    return await client.ask(
        OpenDevice(session_node_id=session, node_id="n1", gpu_id=gpu_id, request_id=request_id)
    )


async def _report_executor_ready(agent: FakeAgent, launch: Launch) -> None:
    assert agent.peer is not None
    ready = ExecutorReady(job_id=launch.job_id, epoch=launch.placement.epoch, endpoint=ENDPOINT)
    await agent.peer.call(ready, timeout_s=5)


async def test_device_is_opened_on_the_requested_accelerator(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent(gpus=2) as agent:
        opened = await _open_device(client, gpu_id=1)
        assert opened.endpoint is None
        launch = await agent.next_launch()
        assert launch.placement.gpu_ids == (1,)
        assert launch.ticket_sha256 == hashlib.sha256(opened.ticket.encode()).hexdigest()
        async with asyncio.TaskGroup() as group:
            wait = WaitDevice(job_id=opened.job.job_id, wait_s=20)
            waiting = group.create_task(client.peer.call(wait, timeout_s=30))
            await agent.confirm(launch)
            await _report_executor_ready(agent, launch)
        assert waiting.result().endpoint == ENDPOINT
        assert waiting.result().ticket == opened.ticket


@pytest.mark.parametrize(("vendor", "milli", "at_once"), [(Vendor.NVIDIA, 1000, 1), (Vendor.CPU, 100, 10)])
async def test_session_holds_a_whole_gpu_or_a_tenth_of_a_cpu(
    tmp_path: Path, vendor: Vendor, milli: int, at_once: int
) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent(vendor=vendor) as agent:
        for index in range(at_once):
            await _open_device(client, request_id=f"d{index}")
            assert (await agent.start_next()).spec.resources.gpu_milli == milli
        waits = await _open_device(client, request_id="more")
        job = waits.job

        async def explained() -> bool:
            return "GPU 0 of n1 is held by" in (await client.job(job.job_id)).reason

        await until(explained)
        plain = await client.submit()
        assert (await agent.next_launch()).job_id == plain.job_id, (
            "a busy accelerator does not block other jobs"
        )


async def test_opening_twice_with_one_request_id_opens_one_device(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent() as agent:
        first, second = await _open_device(client), await _open_device(client)
        assert (first.job.job_id, first.ticket) == (second.job.job_id, second.ticket)
        await agent.start_next()


async def test_opening_an_unknown_device_fails(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent() as agent:
        with pytest.raises(DeviceUnavailableError, match="has no accelerator 7"):
            await _open_device(client, gpu_id=7)
        with pytest.raises(NodeNotFoundError):
            await client.ask(OpenDevice(session_node_id="a", node_id="n9", gpu_id=0, request_id="r"))
        await agent.leave()
        with pytest.raises(DeviceUnavailableError, match="has left the cluster"):
            await _open_device(client)


async def test_session_end_releases_the_devices_of_that_client(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent(gpus=2) as agent:
        mine = await _open_device(client, request_id="a")
        await agent.start_next()
        other = await _open_device(client, request_id="b", gpu_id=1, session="desktop")
        await agent.start_next()
        await client.ask(SessionEnd(node_id="laptop"))
        assert (await agent.next_kill()).job_id == mine.job.job_id
        ack = await agent.beat()
        assert [order.job_id for order in ack.jobs_to_kill] == [mine.job.job_id]
        assert not (await client.job(other.job.job_id)).stop


@pytest.mark.parametrize("exit_code", [0, -15])
async def test_session_that_its_client_has_closed_has_succeeded(tmp_path: Path, exit_code: int) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent() as agent:
        job = (await _open_device(client)).job
        launch = await agent.start_next()
        await client.ask(SessionEnd(node_id="laptop"))
        assert (await client.job(job.job_id)).reason == "being stopped: the client closed the session"
        agent.end(launch, exit_code)
        await agent.beat()
        ended = await client.job(job.job_id)
        assert (ended.state, ended.reason) == (JobState.SUCCEEDED, "the client closed the session")
        assert ended.exit_code == 0
        assert await client.held("n1") == []


async def test_closed_session_has_succeeded_even_if_its_node_is_lost(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent() as agent:
        job = (await _open_device(client)).job
        epoch = (await agent.start_next()).placement.epoch
        await client.ask(SessionEnd(node_id="laptop"))
        assert one.controller is not None
        await one.controller._jobs.lifecycle.record_lost_workers(
            [LostWorker(job.job_id, "n1", epoch, "node n1 was silent")]
        )
        ended = await client.job(job.job_id)
        assert ended.state is JobState.SUCCEEDED
        assert ended.reason == "the client closed the session (node n1 was silent)"


async def test_session_that_is_closed_before_it_starts_is_cancelled(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent() as agent:
        job = (await _open_device(client)).job
        await agent.next_launch()
        await client.ask(SessionEnd(node_id="laptop"))
        assert (await client.job(job.job_id)).state is JobState.CANCELLED


async def test_client_without_heartbeats_loses_its_devices_after_a_minute(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as client, one.agent() as agent:
        opened = await _open_device(client)
        await agent.start_next()
        for _ in range(10):
            await clock.advance(7.0)
            await agent.beat()
            await client.ask(SessionHeartbeat(node=make_node_info("laptop")))
        assert not (await client.job(opened.job.job_id)).stop
        assert (await client.status()).clients == 1

        async def cancelled() -> bool:
            await clock.advance(5.0)
            await agent.beat()
            return bool((await client.job(opened.job.job_id)).stop)

        await until(cancelled)
        assert "no heartbeat for 60 s" in (await client.job(opened.job.job_id)).reason
        assert (await client.status()).clients == 0


@pytest.mark.parametrize(
    ("interval_s", "allowed_s"),
    [(0.0, 60.0), (5.0, 60.0), (20.0, 60.0), (30.0, 90.0), (60.0, 180.0), (3600.0, 180.0)],
)
def test_session_lease_is_three_heartbeat_intervals_within_bounds(
    interval_s: float, allowed_s: float
) -> None:
    assert lease_duration_s(interval_s) == allowed_s


async def test_client_with_a_heartbeat_every_minute_keeps_its_device(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as client, one.agent() as agent:
        beat = SessionHeartbeat(node=make_node_info("laptop"), interval_s=60.0)
        await client.ask(beat)
        opened = await _open_device(client)
        await agent.start_next()
        for _ in range(3):
            for _ in range(24):  # two minutes, one lost heartbeat
                await clock.advance(5.0)
                await agent.beat()
            assert not (await client.job(opened.job.job_id)).stop
            assert (await client.status()).clients == 1
            await client.ask(beat)

        async def cancelled() -> bool:
            await clock.advance(5.0)
            await agent.beat()
            return bool((await client.job(opened.job.job_id)).stop)

        await until(cancelled)
        assert "no heartbeat for 180 s" in (await client.job(opened.job.job_id)).reason


@pytest.mark.parametrize("interval_s", [-1.0, float("nan"), float("inf"), 1e9])
async def test_invalid_heartbeat_interval_is_rejected(tmp_path: Path, interval_s: float) -> None:
    async with running_controller(tmp_path) as one, one.client() as client:
        with pytest.raises(GenieError, match="interval_s"):
            await client.ask(SessionHeartbeat(node=make_node_info("laptop"), interval_s=interval_s))


async def test_devices_survive_a_controller_restart_if_their_client_reconnects(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1", gpus=2))
        async with one.client() as client, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            kept = await _open_device(client, request_id="a")
            launch = await agent.start_next()
            left = await _open_device(client, request_id="b", gpu_id=1, session="gone")
            await agent.start_next()
        await one.restart()
        async with one.client() as client, agent.connected(one.network, access):
            await agent.register()
            agent.running[launch.job_id] = RunningJob(
                job_id=launch.job_id, epoch=launch.placement.epoch, endpoint=ENDPOINT
            )
            await agent.beat()
            found = await client.ask(WaitDevice(job_id=kept.job.job_id, wait_s=1))
            assert found.endpoint == ENDPOINT, "restored from the agent's heartbeat"

            async def cancelled() -> bool:
                await clock.advance(7.0)
                await agent.beat()
                await client.ask(SessionHeartbeat(node=make_node_info("laptop")))
                return bool((await client.job(left.job.job_id)).stop)

            await until(cancelled)
            assert (await client.job(kept.job.job_id)).state is JobState.RUNNING
            assert not (await client.job(kept.job.job_id)).stop


async def test_new_term_grants_a_full_lease_to_clients_of_an_earlier_term(tmp_path: Path) -> None:
    """While another controller led, the client was connected to that one."""
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with running_controller(tmp_path, clock=clock, store=store, leader_ttl_s=5.0) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as client, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            opened = await _open_device(client)
            await agent.start_next()
            await client.ask(SessionHeartbeat(node=make_node_info("laptop")))
        assert one.controller is not None
        store.set_available(False)
        await _advance_until(clock, lambda: not one.controller.is_leading)
        store.set_available(True)
        await _advance_until(clock, lambda: one.controller.is_leading)
        async with one.client() as client, agent.connected(one.network, access):
            await agent.register()
            for _ in range(35):
                await clock.advance(5.0)
                await agent.beat()
                assert not (await client.job(opened.job.job_id)).stop

            async def cancelled() -> bool:
                await clock.advance(1.0)
                await agent.beat()
                return bool((await client.job(opened.job.job_id)).stop)

            await until(cancelled)
            assert "no heartbeat for 180 s" in (await client.job(opened.job.job_id)).reason


async def test_heartbeat_reply_says_that_the_controller_does_not_lead(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with (
        running_controller(tmp_path, clock=clock, store=store, leader_ttl_s=5.0) as one,
        one.client() as client,
    ):
        beat = SessionHeartbeat(node=make_node_info("laptop"))
        assert (await client.ask(beat)).leading
        store.set_available(False)
        await _advance_until(clock, lambda: one.controller is not None and not one.controller.is_leading)
        assert not (await client.ask(beat)).leading


async def _advance_until(clock: FakeClock, predicate: Callable[[], bool]) -> None:
    async def is_true() -> bool:
        await clock.advance(0.5)
        return predicate()

    await until(is_true)


async def test_device_is_accessible_only_to_its_tenant(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.agent() as agent:
        blue, red = [await one.token(TokenKind.USER, tenant=name) for name in ("blue", "red")]
        async with one.client(blue) as ann, one.client(red) as bob, one.client() as owner:
            opened = await _open_device(ann)
            await agent.start_next()
            for other in (bob, owner):
                with pytest.raises(JobNotFoundError):
                    await other.ask(WaitDevice(job_id=opened.job.job_id))
            await bob.ask(SessionEnd(node_id="laptop"))
            assert not (await ann.job(opened.job.job_id)).stop


async def test_executor_certificate_is_signed_for_its_session(tmp_path: Path) -> None:
    async with running_controller(tmp_path, tls="on") as one, one.client() as client, one.agent() as agent:
        await _open_device(client)
        launch = await agent.next_launch()
        _, csr_pem = tls.new_key_and_csr()
        assert agent.peer is not None
        ask = SignExecutor(job_id=launch.job_id, epoch=launch.placement.epoch, csr_pem=csr_pem)
        signed = await agent.peer.call(ask, timeout_s=5)
        assert "CERTIFICATE" in signed.certificate_pem


async def test_client_sees_what_its_executor_does_before_it_listens(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent() as agent:
        opened = await _open_device(client)
        launch = await agent.start_next()
        for note in ("compiling its library", ""):
            agent.running[launch.job_id] = RunningJob(
                job_id=launch.job_id, epoch=launch.placement.epoch, status_note=note
            )
            await agent.beat()
            reply = await client.ask(WaitDevice(job_id=opened.job.job_id, wait_s=0))
            assert (reply.endpoint, reply.job.reason == "compiling its library") == (None, note != "")


@pytest.mark.parametrize("grace_s", [ControllerConfig().session_grace_s, 40.0])
async def test_session_of_a_killed_client_is_cancelled_after_the_grace_period(
    tmp_path: Path, grace_s: float
) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock, session_grace_s=grace_s) as one,
        one.client() as owner,
        one.agent(gpus=1) as agent,
    ):
        async with one.client() as client:
            await client.ask(SessionHeartbeat(node=make_node_info("laptop"), interval_s=60.0))
            job = (await _open_device(client)).job
            launch = await agent.start_next()
            await _report_executor_ready(agent, launch)
            async with one.client() as other:  # the client reconnects
                await other.ask(SessionHeartbeat(node=make_node_info("laptop"), interval_s=60.0))
        # Both connections are closed without the end of the session, as when its process is killed.

        async def is_stopped() -> bool:
            await clock.advance(1.0)
            return bool((await agent.beat()).jobs_to_kill)

        began_s = clock.monotonic_s()
        await until(is_stopped)
        assert grace_s <= clock.monotonic_s() - began_s < grace_s + LEASE_S_MIN / 4
        agent.end(launch, None, reason="killed")
        await agent.beat()
        ended = await owner.job(job.job_id)
        assert ended.state is JobState.CANCELLED
        assert f"the client disconnected and did not return within {grace_s:g} s" in ended.reason
        assert await owner.held("n1") == []


def test_grace_period_allows_several_reconnects_of_a_client() -> None:
    assert ControllerConfig().session_grace_s > 4 * BACKOFF_S_MAX


async def test_session_of_a_client_that_reconnects_continues(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.agent(gpus=1) as agent:
        async with one.client() as client:
            await client.ask(SessionHeartbeat(node=make_node_info("laptop"), interval_s=60.0))
            job = (await _open_device(client)).job
            launch = await agent.start_next()
            await _report_executor_ready(agent, launch)
        for _ in range(int(one.config.session_grace_s) - 2):
            await clock.advance(1.0)
            await agent.beat()
        async with one.client() as client:
            await client.ask(SessionHeartbeat(node=make_node_info("laptop"), interval_s=60.0))
            for _ in range(2 * int(one.config.session_grace_s)):
                await clock.advance(1.0)
                await agent.beat()
            assert (await client.job(job.job_id)).state is JobState.RUNNING
            assert not (await client.job(job.job_id)).stop


async def test_session_whose_executor_lost_its_client_is_cancelled(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent(gpus=1) as agent:
        job = (await _open_device(client)).job
        launch = await agent.start_next()
        agent.end(launch, CLIENT_LOST_EXIT_CODE, reason="the client did not return within 30 s")
        await agent.beat()
        ended = await client.job(job.job_id)
        assert (ended.state, ended.reason) == (
            JobState.CANCELLED,
            "cancelled: the client did not return within 30 s",
        )


async def test_replies_do_not_contain_the_hash_of_a_ticket(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent(gpus=1) as agent:
        user = await one.token(TokenKind.USER)
        opened = await _open_device(owner)
        launch = await agent.start_next()
        assert launch.ticket_sha256
        async with one.client(user) as client:
            for asking in (owner, client):
                listed = (await asking.ask(ListJobs())).jobs
                for job in (opened.job, *listed, await asking.job(opened.job.job_id)):
                    assert job.ticket_sha256 == ""


async def test_many_expired_sessions_are_cancelled_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduling waits for them: one transaction for each would delay the jobs of others."""
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent(gpus=1):
        async with one.client() as client:
            await client.ask(SessionHeartbeat(node=make_node_info("laptop"), interval_s=60.0))
            opened = [await _open_device(client, request_id=f"d{index}") for index in range(40)]
        assert one.controller is not None
        store, batches = one.controller._store, list[int]()
        commit = store.commit

        async def counted(compares: Any, operations: Any, **options: Any) -> Any:
            batches.append(len(operations))
            return await commit(compares, operations, **options)

        monkeypatch.setattr(store, "commit", counted)

        async def are_cancelled() -> bool:
            await clock.advance(1.0)
            return (await owner.job(opened[-1].job.job_id)).state is JobState.CANCELLED

        await until(are_cancelled)
        assert max(batches) >= 39
