"""Standbys without TLS, controllers that have led, and limits of forwarded requests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path

import pytest

from genie.controller import request_limits
from genie.controller.connection import Connection, Handler
from genie.controller.ledger import TABLES_AGE_S_MAX
from genie.controller.standby import forward_limits, leader_link
from genie.controller.standby import requests as standby_requests
from genie.errors import (
    GenieError,
    NotLeaderError,
    OverloadedError,
    ReplyLostError,
    StoreUnavailableError,
)
from genie.model.job import JobState
from genie.model.messages import (
    FORWARDED_REQUESTS,
    NOT_FORWARDED_REQUESTS,
    OWNER_REQUESTS,
    USER_REQUESTS,
    CancelJob,
    CreateToken,
    GetJob,
    JobReply,
    ListJobs,
    ListNodes,
    Message,
    Ping,
    ReadLog,
)
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.processes.clock import SystemClock
from genie.sim.store import MemoryStore
from tests.controller.running_controller import Client, RunningController, running_controller
from tests.controller.standby.controllers_on_etcd import LeaderAndStandby, run_leader_and_standby
from tests.fakes.clock import FakeClock
from tests.waiting import until

LEASE_S = 30.0


async def test_without_tls_reads_are_answered_only_while_no_controller_leads(tmp_path: Path) -> None:
    """Requests cannot be forwarded then; a client that is sent to the leader gets newer data."""
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    store = memory.connect()
    async with (
        running_controller(tmp_path / "1", clock=clock, store=memory.connect(), name="one") as leader,
        running_controller(
            tmp_path / "2", clock=clock, store=store, leader_ttl_s=LEASE_S, name="two"
        ) as standby,
        standby.client((leader.state_dir / "owner.token").read_text()) as client,
    ):
        async with leader.client() as of_leader:
            job = await of_leader.submit()
        assert leader.controller is not None
        await clock.advance(1.0)
        with pytest.raises(NotLeaderError, match=leader.controller.address):
            await client.job(job.job_id)
        store.set_available(False)
        await clock.advance(LEASE_S / 2)
        with pytest.raises(NotLeaderError, match=leader.controller.address):
            await client.job(job.job_id)
        await clock.advance(LEASE_S)
        reply = await client.ask(GetJob(job_id=job.job_id))
        assert reply.job.state is JobState.QUEUED
        assert reply.age_s == pytest.approx(1.5 * LEASE_S, abs=2.0)
        store.set_available(True)
    await memory.close()


async def test_controller_that_has_led_answers_as_a_standby_without_a_leader(tmp_path: Path) -> None:
    """From a copy of its ledger, because the store does not respond, with the time since its lease."""
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    store = memory.connect()
    async with (
        running_controller(tmp_path, clock=clock, store=store, leader_ttl_s=3.0) as one,
        one.agent() as agent,
        one.client() as client,
    ):
        job = await client.submit(gpus=1)
        await agent.start_next()
        assert (await client.ask(ListJobs())).age_s == 0.0
        store.set_available(False)
        await clock.advance(3.5)
        await until(lambda: can_answer_from_copy(one))
        await agent.beat()
        await check_answers_of_former_leader(client, job.job_id)
        before_s = (await client.ask(GetJob(job_id=job.job_id))).age_s
        assert 0.0 < before_s < 3.5
        await clock.advance(100.0)  # the connection of the agent is long considered lost
        await check_answers_of_former_leader(client, job.job_id)
        assert (await client.ask(GetJob(job_id=job.job_id))).age_s == pytest.approx(before_s + 100, abs=0.1)
        assert (await client.status()).age_s == pytest.approx(before_s + 100, abs=0.1)
        await clock.advance(TABLES_AGE_S_MAX)
        with pytest.raises(NotLeaderError, match=r"copy of the leader's data is 3[67].. s old"):
            await client.ask(ListJobs())
        assert not (await client.status()).has_cluster_data
        store.set_available(True)
    await memory.close()


def can_answer_from_copy(controller: RunningController) -> bool:
    assert controller.controller is not None
    return controller.controller._standby_requests.can_answer_from_copy(ListNodes)


async def check_answers_of_former_leader(client: Client, job_id: str) -> None:
    (view,) = (await client.ask(ListNodes())).nodes
    assert (view.info.status, view.info.last_heartbeat) == (NodeStatus.SUSPECT, 0.0)
    assert view.info.status_reason == "no leader responds, and only the leader receives heartbeats"
    assert [hold.job_id for hold in view.node_holds.holds] == [job_id]
    status = await client.status()
    assert (status.leading, status.store_ok, status.has_cluster_data) == (False, False, True)
    assert (status.nodes, status.jobs, status.gpus_total) == ({"suspect": 1}, {"running": 1}, 1)
    assert status.alarms[0] == "no leader: the store does not respond"
    with pytest.raises(StoreUnavailableError, match="its store is unavailable"):
        await client.ask(ReadLog(job_id=job_id))


async def test_former_leader_applies_later_changes_to_its_copy(tmp_path: Path) -> None:
    memory = await MemoryStore.open(clock=SystemClock())
    store = memory.connect()
    async with (
        running_controller(tmp_path / "1", store=store, leader_ttl_s=1.0, name="one") as former,
        former.client() as client,
    ):
        first = await client.submit()
        store.set_available(False)
        await until(lambda: can_answer_from_copy(former))
        async with (
            running_controller(tmp_path / "2", store=memory.connect(), name="two") as next_leader,
            next_leader.client() as of_next_leader,
        ):
            second = await of_next_leader.submit()
            await of_next_leader.ask(CancelJob(job_id=first.job_id))
            assert [each.job_id for each in (await client.ask(ListJobs())).jobs] == [first.job_id]
            store.set_available(True)
            copy = former.controller._standby_requests._copy  # type: ignore[union-attr]
            assert copy is not None
            await until(lambda: copy.tables.jobs.get(second.job_id) is not None)
            assert copy.tables.jobs[first.job_id].state is JobState.CANCELLED
    await memory.close()


async def test_waits_of_two_tenants_do_not_block_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_limits, "TENANT_WAITS_MAX", 8)
    async with run_leader_and_standby(tmp_path) as cluster:
        red_token, blue_token, green_token = [
            await cluster.leader.token(TokenKind.USER, tenant=name) for name in ("red", "blue", "green")
        ]
        async with (
            cluster.standby.client(red_token) as red,
            cluster.standby.client(blue_token) as blue,
            cluster.standby.client(green_token) as green,
            cluster.standby.client() as owner,
            asyncio.TaskGroup() as group,
        ):
            waits = [
                *await open_waits_until_limit(red, cluster, group, count=4),
                *await open_waits_until_limit(blue, cluster, group, count=2),
            ]
            job = await green.submit()
            await owner.ask(CancelJob(job_id=job.job_id))
            ended = GetJob(job_id=job.job_id, while_state=JobState.QUEUED, wait_s=20.0)
            for client in (green, owner):
                reply = await client.ask(ended)
                assert (reply.job.state, reply.age_s) == (JobState.CANCELLED, 0.0)
            assert len((await red.ask(ListJobs())).jobs) == 1
            for task in waits:
                task.cancel()


async def open_waits_until_limit(
    client: Client, cluster: LeaderAndStandby, group: asyncio.TaskGroup, *, count: int
) -> list[asyncio.Task[JobReply]]:
    """Open the waits that the standby allows this client, and check that it rejects a further one."""
    job = await client.submit()
    assert cluster.standby.controller is not None
    limits = cluster.standby.controller._standby_requests._forward_limits
    in_flight = limits.in_flight + count
    request = GetJob(job_id=job.job_id, while_state=JobState.QUEUED, wait_s=20.0)
    waits = [group.create_task(client.ask(request)) for _ in range(count)]
    await until(lambda: limits.in_flight == in_flight)
    with pytest.raises(OverloadedError, match="forwarded requests that wait") as error:
        await client.ask(request)
    assert error.value.retry_after_s > 0
    return waits


async def test_overdue_read_does_not_end_the_writes_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_requests, "READ_TIMEOUT_S", 0.3)
    async with run_leader_and_standby(tmp_path) as cluster, cluster.standby.client() as client:
        job = await client.submit()
        await cluster.until_copied()
        hanging = hang_requests_of_leader(cluster, monkeypatch, ListJobs, CreateToken)
        async with cluster.standby.client() as other, asyncio.TaskGroup() as group:
            write = group.create_task(client.ask(CreateToken(kind=TokenKind.USER)))
            assert (await other.ask(ListJobs())).age_s > 0
            await until_pinged(cluster)
            assert not write.done()
            assert (await other.ask(GetJob(job_id=job.job_id))).age_s == 0.0
            hanging.set()
            assert (await write).token
            assert (await other.ask(ListJobs())).age_s == 0.0


async def test_leader_that_does_not_reply_to_a_ping_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_requests, "READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr(leader_link, "PING_TIMEOUT_S", 0.3)
    async with run_leader_and_standby(tmp_path) as cluster, cluster.standby.client() as client:
        await cluster.until_copied()
        hang_requests_of_leader(cluster, monkeypatch, ListJobs, CreateToken, Ping)
        async with cluster.standby.client() as other, asyncio.TaskGroup() as group:
            write = group.create_task(get_error(client.ask(CreateToken(kind=TokenKind.USER))))
            assert (await other.ask(ListJobs())).age_s > 0
            assert isinstance(await write, ReplyLostError)


def hang_requests_of_leader(
    cluster: LeaderAndStandby, monkeypatch: pytest.MonkeyPatch, *kinds: type[Message]
) -> asyncio.Event:
    """Make the leader handle these requests only after the event that is returned."""
    assert cluster.leader.controller is not None
    handlers, released = cluster.leader.controller._request_service._handlers, asyncio.Event()

    def make_hanging(handle: Handler) -> Handler:
        async def handle_after_event(connection: Connection, request: Message) -> Message:
            await released.wait()
            return await handle(connection, request)

        return handle_after_event

    for kind in kinds:
        monkeypatch.setitem(handlers, kind, make_hanging(handlers[kind]))
    return released


async def until_pinged(cluster: LeaderAndStandby) -> None:
    """Wait until the standby has the reply to its ping."""
    assert cluster.standby.controller is not None
    link = cluster.standby.controller._standby_requests._link
    await until(lambda: not link._attention_event.is_set())


async def get_error(call: Coroutine[object, object, object]) -> GenieError:
    with pytest.raises(GenieError) as caught:
        await call
    return caught.value


async def test_lists_from_the_copy_are_limited_and_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "LIST_REQUESTS_IN_FLIGHT_MAX", 2)
    async with run_leader_and_standby(tmp_path) as cluster:
        tokens = [await cluster.leader.token(TokenKind.USER, tenant=name) for name in ("red", "blue")]
        await cluster.lose_leader()
        counts = count_concurrent_copy_reads(cluster, monkeypatch, ListJobs)
        async with cluster.standby.client(tokens[0]) as red, cluster.standby.client(tokens[1]) as blue:
            replies = await asyncio.gather(
                *(client.ask(ListJobs()) for client in (red, blue) for _ in range(4)), return_exceptions=True
            )
        rejected = [reply for reply in replies if isinstance(reply, OverloadedError)]
        assert len(rejected) == 4 and all("lists in flight" in error.message for error in rejected)
        assert counts == [1, 1, 1, 1]


def count_concurrent_copy_reads(
    cluster: LeaderAndStandby, monkeypatch: pytest.MonkeyPatch, kind: type[Message]
) -> list[int]:
    """Add the number of concurrent reads of the standby's copy to the list that is returned, at each one."""
    assert cluster.standby.controller is not None
    reads = cluster.standby.controller._standby_requests._copy_reads
    assert reads is not None
    handle, counts, running = reads._handlers[kind], [], 0

    async def handle_and_count(connection: Connection, request: Message) -> Message:
        nonlocal running
        running += 1
        counts.append(running)
        for _ in range(10):
            await asyncio.sleep(0)
        running -= 1
        return await handle(connection, request)

    monkeypatch.setitem(reads._handlers, kind, handle_and_count)
    return counts


async def test_request_that_is_too_large_to_be_forwarded_is_for_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_leader_and_standby(tmp_path) as cluster, cluster.standby.client() as client:
        await client.submit()
        monkeypatch.setattr("genie.runtime.wire.FRAME_BYTES_MAX", 400)
        with pytest.raises(NotLeaderError, match="cannot be forwarded") as error:
            await client.submit("x" * 250)
        assert error.value.leader == cluster.leader_address


def test_every_request_of_clients_is_forwarded_or_handled_locally() -> None:
    requests = {*USER_REQUESTS, *OWNER_REQUESTS}
    assert {*FORWARDED_REQUESTS, *NOT_FORWARDED_REQUESTS} == requests
