"""Limits on the requests of each token: rejections with a retry time, turns, and no effect on others."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from genie.controller import request_limits
from genie.errors import GenieError, OverloadedError, PermissionError_
from genie.model.job import JobSpec
from genie.model.messages import (
    CancelJob,
    Done,
    GetStatus,
    JobReply,
    JobsReply,
    ListJobs,
    ListTokens,
    Message,
    SubmitJob,
)
from genie.model.tenant import Identity, TokenKind
from tests.controller.running_controller import Client, running_controller
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def _list_jobs_at_once(client: Client, count: int, limit: int = 1000) -> list[JobsReply | GenieError]:
    return await client.peer.call_each([ListJobs(limit=limit)] * count, timeout_s=30)


async def test_flood_of_one_token_is_rejected_and_others_are_served(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path, clock=FakeClock()) as one,
        one.client(await one.token(TokenKind.USER, tenant="red")) as red,
        one.client(await one.token(TokenKind.USER, tenant="blue")) as blue,
        one.agent("a") as agent,
    ):
        job = await blue.submit(gpus=1)
        flood = asyncio.create_task(_list_jobs_at_once(red, 256))
        assert (await blue.job(job.job_id)).job_id == job.job_id
        assert await agent.beat()
        kinds = Counter(type(outcome) for outcome in await flood)
        assert 0 < kinds[JobsReply] <= request_limits.REQUEST_BURST_UNITS / 100
        assert kinds[JobsReply] + kinds[OverloadedError] == 256
        rejected = [error for error in await flood if isinstance(error, OverloadedError)]
        assert all(error.retry_after_s > 0 for error in rejected)
        assert not red.peer.is_closed


async def test_rate_limit_refills_after_the_stated_time(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        token = await one.token(TokenKind.USER, tenant="red")
        async with one.client(token) as red:
            for _ in range(200):
                (outcome,) = await _list_jobs_at_once(red, 1)
                if isinstance(outcome, OverloadedError):
                    break
            assert isinstance(outcome, OverloadedError)
            with pytest.raises(OverloadedError, match="rate limit of token"):
                await red.ask(ListJobs(limit=1000))
            await clock.advance(outcome.retry_after_s + 0.1)
            assert await red.ask(ListJobs(limit=1000))


async def test_token_that_ignores_rejections_is_disconnected_until_it_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "REQUEST_BURST_UNITS", 150.0)
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        token = await one.token(TokenKind.USER, tenant="red")
        async with one.client(token) as red:
            await _list_jobs_at_once(red, 400)
            await until(lambda: red.peer.is_closed)
        with pytest.raises(OverloadedError, match="rate limit of token"):
            async with one.client(token):
                pass
        await clock.advance(1.0)
        async with one.client(token) as again:
            assert await again.status()


async def test_bytes_in_flight_are_limited_per_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "REQUEST_BYTES_IN_FLIGHT_MAX", 250_000)
    spec = JobSpec(name="x", command=("true",), env={"X": "x" * 100_000})
    async with (
        running_controller(tmp_path) as one,
        one.client(await one.token(TokenKind.USER, tenant="red")) as red,
        one.client(await one.token(TokenKind.USER, tenant="blue")) as blue,
    ):
        requests = [SubmitJob(spec=spec, request_id=f"r{count}") for count in range(5)]
        flood = asyncio.create_task(red.peer.call_each(requests, timeout_s=30))
        assert await blue.submit_spec(spec)
        kinds = Counter(type(outcome) for outcome in await flood)
        assert kinds == {JobReply: 2, OverloadedError: 3}
        rejected = [error for error in await flood if isinstance(error, OverloadedError)]
        assert "bytes of requests in flight of token" in rejected[0].message
        assert await red.submit_spec(spec), "they count while they are in flight"


async def test_forbidden_requests_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "REQUEST_BURST_UNITS", 100.0)
    async with (
        running_controller(tmp_path, clock=FakeClock()) as one,
        one.client(await one.token(TokenKind.USER, tenant="red")) as red,
    ):
        outcomes = await red.peer.call_each([ListTokens()] * 10, timeout_s=30)
        kinds = Counter(type(outcome) for outcome in outcomes)
        assert kinds == {PermissionError_: 4, OverloadedError: 6}


async def test_owner_can_cancel_at_its_rate_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "REQUEST_BURST_UNITS", 11.0)
    async with running_controller(tmp_path, clock=FakeClock()) as one, one.client() as owner:
        job = await owner.submit(gpus=1)
        assert isinstance((await _list_jobs_at_once(owner, 2))[1], OverloadedError)
        assert await owner.ask(CancelJob(job_id=job.job_id))
        async with one.client() as again:
            assert await again.ask(CancelJob(job_id=job.job_id))


async def test_list_requests_take_turns_with_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two lists the controller reads its other connections."""
    monkeypatch.setattr(request_limits, "LIST_REQUESTS_IN_FLIGHT_MAX", 1000)
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as agent:
        await owner.submit(gpus=1)
        flood = asyncio.create_task(_list_jobs_at_once(owner, 300, limit=1))
        await until(lambda: owner.peer._pending_calls)
        assert await agent.beat()
        assert not flood.done(), "the heartbeat was served before the lists"
        assert {type(outcome) for outcome in await flood} == {JobsReply}


async def test_owner_and_status_do_not_wait_behind_lists_of_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "LIST_REQUESTS_IN_FLIGHT_MAX", 1000)
    async with (
        running_controller(tmp_path, clock=FakeClock()) as one,
        one.client(await one.token(TokenKind.USER, tenant="red")) as red,
        one.client(await one.token(TokenKind.USER, tenant="blue")) as blue,
        one.client() as owner,
    ):
        await red.submit(gpus=1)
        flood = asyncio.create_task(_list_jobs_at_once(red, 300, limit=1))
        await until(lambda: red.peer._pending_calls)
        assert await owner.status()
        assert await owner.ask(ListJobs(limit=1))
        assert await blue.status()
        assert not flood.done(), "they were served before the lists"
        assert {type(outcome) for outcome in await flood} == {JobsReply}


@pytest.mark.parametrize(
    ("kind", "request_"),
    [(TokenKind.OWNER, ListJobs()), (TokenKind.OWNER, GetStatus()), (TokenKind.USER, GetStatus())],
)
async def test_only_lists_of_tenants_wait_for_lists_of_tenants(kind: TokenKind, request_: Message) -> None:
    limits = request_limits.RequestLimits(FakeClock())
    red, blue, other = (
        limits.get_token_usage(Identity(kind=kind, tenant=name, name=name, token_id=name))
        for kind, name in ((TokenKind.USER, "red"), (TokenKind.USER, "blue"), (kind, "other"))
    )
    assert red and blue and other
    release = asyncio.Event()

    async def handle_slowly() -> Message:
        await release.wait()
        return Done()

    async def handle() -> Message:
        return Done()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(limits.run_list_request(red, ListJobs(), handle_slowly))
        await asyncio.sleep(0)
        waiting = group.create_task(limits.run_list_request(blue, ListJobs(), handle))
        assert await limits.run_list_request(other, request_, handle)
        assert not waiting.done()
        release.set()


async def test_requests_in_flight_are_limited_per_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "REQUESTS_IN_FLIGHT_MAX", 2)
    monkeypatch.setattr(request_limits, "LIST_REQUESTS_IN_FLIGHT_MAX", 1)
    async with running_controller(tmp_path) as one, one.client() as owner, one.client() as other:
        outcomes = await _list_jobs_at_once(owner, 5)
        messages = {outcome.message for outcome in outcomes if isinstance(outcome, OverloadedError)}
        assert len(messages) == 1
        assert "lists in flight of token" in messages.pop()
        assert await other.ask(ListJobs())
