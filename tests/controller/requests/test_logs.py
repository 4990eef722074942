"""Logs of jobs that ran several times, and limits on waits for output."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from genie.controller.requests import open_waits
from genie.errors import GenieError, JobNotFoundError, OverloadedError, UsageError
from genie.model.job import RUNS_KEPT, Job, JobSpec, JobState, PlacementConstraints, Resources
from genie.model.messages import GetJob, JobReply, LogChunk, ReadLog, Request
from genie.model.tenant import TokenKind
from tests.controller.running_controller import (
    Client,
    RunningController,
    connect_agent,
    running_controller,
)
from tests.fakes.agent import FakeAgent, make_node_info
from tests.waiting import until


async def run_and_preempt(owner: Client, agent: FakeAgent, job: Job) -> None:
    """Run the job and preempt it for another one, which ends at once."""
    launch = await agent.start_next()
    assert launch.job_id == job.job_id
    high = await owner.submit_spec(make_spec("high", priority=900))
    kill = await agent.next_kill()
    agent.end(launch, None, reason=kill.reason)
    await agent.beat()
    second = await agent.start_next()
    assert second.job_id == high.job_id
    agent.end(second)
    await agent.beat()


def make_spec(name: str = "low", **constraints: object) -> JobSpec:
    return JobSpec(
        name=name,
        command=("true",),
        resources=Resources(gpus=1),
        constraints=PlacementConstraints(**constraints),
    )


def set_logs_by_epoch(agent: FakeAgent, job: Job, *, epochs: dict[int, bytes]) -> None:
    for epoch, data in epochs.items():
        agent.logs[f"{job.job_id}@{epoch}"] = data


async def test_each_run_has_a_log_and_the_latest_is_the_default(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as agent:
        job = await owner.submit_spec(make_spec(preemptible=True))
        await run_and_preempt(owner, agent, job)
        (first,) = (await owner.job(job.job_id)).earlier
        set_logs_by_epoch(agent, job, epochs={first.epoch: b"one"})

        async def read(run: int = 0, **more: float) -> LogChunk:
            return await owner.ask(ReadLog(job_id=job.job_id, run_number=run, **more))

        waiting = await read()
        assert (waiting.data, waiting.run_number, waiting.run_numbers) == (b"one", 1, (1,)), "the latest run"
        with pytest.raises(JobNotFoundError, match="no log of run 2") as caught:
            await read(2)
        assert caught.value.hint == "runs with logs: 1"
        launch = await agent.start_next()
        set_logs_by_epoch(agent, job, epochs={launch.placement.epoch: b"second"})
        last = await read()
        assert (last.data, last.run_number, last.run_numbers) == (b"second", 2, (1, 2))
        assert ((await read(1)).data, (await read(2)).data) == (b"one", b"second")
        with pytest.raises(JobNotFoundError, match="no log of run 4"):
            await read(4, wait_s=1.0)
        agent.end(launch)
        await agent.beat()
        await owner.until_state(job.job_id, JobState.SUCCEEDED)
        following = await read(3, wait_s=1.0)
        assert (following.eof, following.run_number) == (True, 0), (
            "a follower learns that there is no further run"
        )


@pytest.mark.parametrize("wrong", [{"offset": -1}, {"offset": 2**63}, {"bytes_max": 0}])
async def test_range_that_no_file_has_is_rejected_before_it_reaches_the_agent(
    tmp_path: Path, wrong: dict[str, int]
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as agent:
        job = await owner.submit(gpus=1)
        await agent.start_next()
        ((name, value),) = wrong.items()
        with pytest.raises(UsageError, match=f"{name} = {value} is not allowed"):
            await owner.ask(ReadLog(job_id=job.job_id, **wrong))


async def test_newest_runs_of_a_job_are_kept_and_survive_a_controller_restart(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as agent:
        job = await owner.submit_spec(make_spec(preemptible=True))
        for _ in range(RUNS_KEPT + 2):
            await run_and_preempt(owner, agent, job)
        kept = (await owner.job(job.job_id)).earlier
        assert [run.number for run in kept] == list(range(3, RUNS_KEPT + 3))
        assert all(run.nodes == ("a",) and run.started_at <= run.ended_at for run in kept)
        with pytest.raises(JobNotFoundError, match="no log of run 2"):
            await owner.ask(ReadLog(job_id=job.job_id, run_number=2))
        await one.restart()
        async with one.client() as again:
            assert (await again.job(job.job_id)).earlier == kept


async def test_launch_that_never_started_is_not_counted_as_a_run(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a") as agent:
        job = await owner.submit_spec(make_spec())
        launch = await agent.next_launch()
        agent.end(launch, None, reason="not started", started=False)
        await agent.beat()
        again = await owner.job(job.job_id)
        assert (again.earlier, again.run_number) == ((), 1)


class _AgentWithEndlessLogWait(FakeAgent):
    """Waits for output of the log forever, unless a request does not wait."""

    waits = 0

    async def _read_log(self, request: ReadLog) -> LogChunk:
        if request.wait_s:
            self.waits += 1
            await asyncio.Event().wait()
        return LogChunk(data=b"", start_offset=request.offset, next_offset=request.offset, eof=False)


async def _start_job_of_tenant(one: RunningController, agent: FakeAgent, tenant: str) -> tuple[str, Job]:
    token = await one.token(TokenKind.USER, tenant=tenant)
    async with one.client(token) as client:
        job = await client.submit(gpus=1)
        await agent.start_next()
        return token, job


async def test_log_waits_of_one_tenant_delay_neither_heartbeats_nor_logs_of_others(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, AsyncExitStack() as stack:
        agent = await connect_agent(one, make_node_info("a", gpus=2), stack, kind=_AgentWithEndlessLogWait)
        assert isinstance(agent, _AgentWithEndlessLogWait)
        red, job = await _start_job_of_tenant(one, agent, "red")
        blue, other = await _start_job_of_tenant(one, agent, "blue")
        clients = [await stack.enter_async_context(one.client(red)) for _ in range(2)]
        group = await stack.enter_async_context(asyncio.TaskGroup())
        flood = [
            group.create_task(_reply_or_error(client, ReadLog(job_id=job.job_id, wait_s=30.0)))
            for client in clients
            for _ in range(200)
        ]
        limit = open_waits.WAITS_PER_TENANT_AND_NODE_MAX
        await until(lambda: sum(task.done() for task in flood) == len(flood) - limit)
        rejected = [task.result() for task in flood if task.done()]
        assert {type(error) for error in rejected} == {OverloadedError}
        assert agent.waits == limit
        assert await agent.beat()
        async with one.client(blue) as client:
            chunk = await client.ask(ReadLog(job_id=other.job_id))
            assert (chunk.data, chunk.eof) == (b"", False)
            waiting = group.create_task(_reply_or_error(client, ReadLog(job_id=other.job_id, wait_s=30.0)))
            await until(lambda: agent.waits == limit + 1, what="another tenant may wait")
        for client in clients:
            client.peer.close()
        await until(lambda: all(task.done() for task in (*flood, waiting)))


async def test_waits_for_a_change_of_a_job_are_limited_per_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_waits, "WAITS_PER_TENANT_MAX", 3)
    async with running_controller(tmp_path) as one, one.client() as owner, asyncio.TaskGroup() as group:
        job = await owner.submit(gpus=1)
        wait = GetJob(job_id=job.job_id, while_state=JobState.QUEUED, wait_s=30.0)
        waits = [group.create_task(_reply_or_error(owner, wait)) for _ in range(5)]
        await until(lambda: sum(task.done() for task in waits) == 2)
        for task in waits:
            assert not task.done() or isinstance(task.result(), OverloadedError)
        assert (await owner.job(job.job_id)).state is JobState.QUEUED, "a read does not wait"
        with pytest.raises(OverloadedError, match="waits of tenant default"):
            await owner.ask(ReadLog(job_id=job.job_id, wait_s=30.0))
        owner.peer.close()


async def _reply_or_error(
    client: Client, request: Request[LogChunk] | Request[JobReply]
) -> LogChunk | JobReply | GenieError:
    (outcome,) = await client.peer.call_each([request], timeout_s=60)
    return outcome
