"""Gangs: workers that are placed, started and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from genie.errors import (
    FencedError,
    GenieError,
    JobNotFoundError,
    JobRefusedError,
    LaunchError,
    WorkersMissingError,
)
from genie.model.job import (
    Job,
    JobState,
    Spread,
    StopReason,
    Within,
    parse_worker_name,
)
from genie.model.messages import (
    CancelJob,
    Launch,
    ReadLog,
    RemoveNode,
    RunningJob,
)
from tests.controller.running_controller import (
    Client,
    advance_until_launch,
    connect_agent,
    job_spec,
    running_controller,
)
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def confirm_together(*launches: tuple[FakeAgent, Launch]) -> None:
    """Confirm all launches; all but the last are retried, as agents do."""
    for agent, launch in launches[:-1]:
        with pytest.raises(WorkersMissingError, match="workers are not ready yet"):
            await agent.confirm(launch)
    for agent, launch in reversed(launches):
        await agent.confirm(launch)


async def test_workers_start_together_and_get_each_others_addresses(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        job = await owner.submit_spec(job_spec(workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        assert {first.job_id, second.job_id} == {f"{job.job_id}.0", f"{job.job_id}.1"}
        assert {first.rank, second.rank} == {0, 1}
        assert first.hosts == second.hosts == ("127.0.0.1", "127.0.0.1")
        assert first.placement.epoch == second.placement.epoch
        await confirm_together((a, first), (b, second))
        running = await owner.job(job.job_id)
        assert (running.state, running.reason) == (JobState.RUNNING, "started on 2 nodes")
        a.end(first)
        await a.beat()
        assert (await owner.job(job.job_id)).state is JobState.RUNNING
        assert (await owner.held("a"), await owner.held("b")) == ([], [second.job_id])
        b.end(second)
        await b.beat()
        over = await owner.job(job.job_id)
        assert (over.state, over.exit_code, over.reason) == (JobState.SUCCEEDED, 0, "exit code 0")
        assert [place.outcome for place in over.placements] == [JobState.SUCCEEDED] * 2


async def test_confirmation_waits_for_the_other_workers(tmp_path: Path) -> None:
    """An agent that repeats it instead sends many requests: a large gang may wait for minutes."""
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
        asyncio.TaskGroup() as group,
    ):
        job = await owner.submit_spec(job_spec(workers=2))
        first = await advance_until_launch(clock, a, b)
        second = await b.next_launch()
        waiting = group.create_task(a.confirm(first, wait_s=60.0))
        assert one.controller is not None
        ready = one.controller._jobs.launches._ready_ranks_by_job
        await until(lambda: job.job_id in ready)
        await b.confirm(second)
        await waiting
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_waiting_confirmation_ends_when_the_launch_is_void_or_time_is_over(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
        asyncio.TaskGroup() as group,
    ):
        job = await owner.submit_spec(job_spec(workers=2))
        launch = await advance_until_launch(clock, a, b)
        assert one.controller is not None
        waiters = one.controller._jobs.launches._notifier._waiters
        waiting = group.create_task(_error_of(a.confirm(launch, wait_s=60.0)))
        await until(lambda: job.job_id in waiters)
        await clock.advance(3.1)
        assert isinstance(await waiting, WorkersMissingError), "the wait is limited"
        waiting = group.create_task(_error_of(a.confirm(launch, wait_s=60.0)))
        await until(lambda: job.job_id in waiters)
        await owner.ask(CancelJob(job_id=job.job_id))
        assert isinstance(await waiting, FencedError)


async def _error_of(work: Awaitable[None]) -> Exception:
    with pytest.raises(GenieError) as caught:
        await work
    return caught.value


async def test_gang_that_does_not_fit_holds_nothing(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        busy = await owner.submit_spec(job_spec("busy", node_id="b"))
        launch = await b.start_next()
        gang = await owner.submit_spec(job_spec("gang", workers=2))
        assert (gang.state, await owner.held("a")) == (JobState.QUEUED, [])
        b.end(launch)
        await b.beat()
        assert (await owner.job(busy.job_id)).state is JobState.SUCCEEDED
        assert {parse_worker_name((await agent.next_launch()).job_id)[0] for agent in (a, b)} == {gang.job_id}


async def test_gang_too_large_for_the_cluster_is_rejected(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2):
        with pytest.raises(JobRefusedError, match="requests 3 workers in total; 2 fit"):
            await owner.submit_spec(job_spec(workers=3))
        with pytest.raises(JobRefusedError, match="; 1 fit"):
            await owner.submit_spec(job_spec(workers=2, spread=Spread.SPREAD))
        with pytest.raises(JobRefusedError, match="3 workers in one node; 2 fit"):
            await owner.submit_spec(job_spec(workers=3, within=Within.NODE))


async def test_elastic_gang_starts_with_the_free_gpus(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2) as a:
        job = await owner.submit_spec(job_spec(workers=8, workers_min=2))
        launches = [await a.next_launch(), await a.next_launch()]
        assert {len(launch.hosts) for launch in launches} == {2}
        assert {launch.placement.gpu_ids for launch in launches} == {(0,), (1,)}
        await confirm_together(*((a, launch) for launch in launches))
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_failed_worker_ends_the_whole_job(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        job = await owner.submit_spec(job_spec(workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        await confirm_together((a, first), (b, second))
        a.end(first, 3)
        await a.beat()
        ending = await owner.job(job.job_id)
        assert (ending.state, ending.stop) == (JobState.RUNNING, StopReason.WORKER_ENDED)
        ack = await b.beat()
        assert [order.job_id for order in ack.jobs_to_kill] == [second.job_id]
        b.end(second, -15)
        await b.beat()
        over = await owner.job(job.job_id)
        assert (over.state, over.exit_code) == (JobState.FAILED, 3)
        assert over.reason == f"worker {first.rank} on node a: exit code 3"
        assert (await owner.held("a"), await owner.held("b")) == ([], [])


@asynccontextmanager
async def running_gang(
    tmp_path: Path, *, preemptible: bool
) -> AsyncIterator[tuple[Client, FakeClock, FakeAgent, Launch, AsyncExitStack]]:
    """A job with workers on a and b; yields the agent and launch of a. Closing the stack disconnects b."""
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as a,
        AsyncExitStack() as stack,
    ):
        b = await connect_agent(one, make_node_info("b"), stack)
        await owner.submit_spec(job_spec(workers=2, preemptible=preemptible))

        async def launched() -> bool:
            await clock.advance(0.1)
            return not a.launches.empty() and not b.launches.empty()

        await until(launched)
        first, second = await a.next_launch(), await b.next_launch()
        await confirm_together((a, first), (b, second))
        yield owner, clock, a, first, stack


async def test_restartable_job_is_queued_again_when_the_node_of_a_worker_is_lost(tmp_path: Path) -> None:
    async with running_gang(tmp_path, preemptible=True) as (owner, clock, a, first, stack):
        await stack.aclose()
        job_id = parse_worker_name(first.job_id)[0]

        async def is_stopping() -> bool:
            await clock.advance(1.0)
            await a.beat()
            return (await owner.job(job_id)).stop is StopReason.WORKER_ENDED

        await until(is_stopping)
        a.end(first, -15)
        await a.beat()
        job = await owner.job(job_id)
        assert job.state is JobState.QUEUED
        assert job.history[-1].reason.startswith(
            f"queued again: worker {1 - first.rank} on node b: node b sent"
        )
        assert (await owner.held("a"), await owner.held("b")) == ([], [])


async def test_workers_go_on_while_the_node_of_another_one_does_not_respond(tmp_path: Path) -> None:
    async with running_gang(tmp_path, preemptible=False) as (owner, clock, a, first, stack):
        await stack.aclose()
        for _ in range(40):
            await clock.advance(1.0)
            assert (await a.beat()).jobs_to_kill == ()
        job = await owner.job(parse_worker_name(first.job_id)[0])
        assert (job.state, job.stop) == (JobState.RUNNING, StopReason.NONE)
        assert "node b has not responded for 4" in job.reason
        assert len(await owner.held("a") + await owner.held("b")) == 2
        await owner.ask(RemoveNode(node_id="b"))
        a.end(first, -15)
        await a.beat()
        over = await owner.job(job.job_id)
        assert over.state is JobState.LOST
        assert over.reason == f"worker {1 - first.rank} on node b: node b was removed (genie forget)"


async def test_launch_that_one_node_rejects_is_void_on_all_nodes(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        b.refuse = LaunchError("not today")
        job = await owner.submit_spec(job_spec(workers=2))
        first = await a.next_launch()

        async def queued() -> bool:
            return "not today" in "".join(step.reason for step in (await owner.job(job.job_id)).history)

        await until(queued)
        with pytest.raises(FencedError):
            await a.confirm(first)
        b.refuse = None
        again, other = await a.next_launch(), await b.next_launch()
        assert again.placement.epoch > first.placement.epoch
        await confirm_together((a, again), (b, other))


async def test_gang_keeps_its_remaining_accelerators_when_one_is_lost(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        await owner.submit_spec(job_spec("gang", workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        await confirm_together((a, first), (b, second))
        await a.beat(node=msgspec.structs.replace(a.info, gpus=()))
        job = await owner.submit_spec(job_spec("next"))
        assert job.state is JobState.QUEUED
        assert job.reason == "waiting for resources on b (reserved for this job)"
        for agent, launch in ((a, first), (b, second)):
            agent.end(launch)
            await agent.beat(node=msgspec.structs.replace(agent.info, gpus=b.info.gpus * (agent is b)))
        assert (await b.next_launch()).job_id == job.job_id


async def test_resources_of_an_ended_worker_are_reused_while_others_run(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        gang = await owner.submit_spec(job_spec("gang", workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        await confirm_together((a, first), (b, second))
        a.end(first)
        await a.beat()
        job = await owner.submit_spec(job_spec("next"))
        assert (await a.start_next()).job_id == job.job_id
        assert (await owner.submit_spec(job_spec("last"))).state is JobState.QUEUED
        assert (await owner.job(gang.job_id)).state is JobState.RUNNING


async def test_gang_is_launched_again_when_one_worker_cannot_start(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        job = await owner.submit_spec(job_spec(workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        b.end(second, None, reason="the node lost contact", started=False)
        await b.beat()
        waiting = await owner.job(job.job_id)
        assert waiting.state is JobState.QUEUED
        assert [step.reason for step in waiting.history][-1] == (
            f"worker {second.rank} on node b: the node lost contact"
        )
        assert (await owner.held("a"), await owner.held("b")) == ([], [])
        with pytest.raises(FencedError):
            await a.confirm(first)
        await confirm_together((a, await a.next_launch()), (b, await b.next_launch()))
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


@pytest.mark.parametrize("has_started", [False, True])
async def test_confirmed_gang_with_a_failing_node_runs_again_only_if_no_worker_has_started(
    tmp_path: Path, has_started: bool
) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
        one.agent("c") as c,
    ):
        job = await owner.submit_spec(job_spec(workers=2))
        ready = [agent for agent in (a, b, c) if await _is_launched(agent, owner, job.job_id)]
        launches = [await agent.next_launch() for agent in ready]
        await confirm_together(*zip(ready, launches, strict=True))
        ready[0].end(
            launches[0], None, reason="not started: disk full", started=False, is_caused_by_node=True
        )
        await ready[0].beat()
        stopping = await owner.job(job.job_id)
        assert (stopping.state, stopping.stop) == (JobState.RUNNING, StopReason.WORKER_ENDED)
        assert len((await ready[1].beat()).jobs_to_kill) == 1
        ready[1].end(launches[1], None, reason="killed", started=has_started, is_caused_by_node=True)
        await ready[1].beat()
        reason = f"worker {launches[0].rank} on node {ready[0].info.node_id}: not started: disk full"
        after = await owner.job(job.job_id)
        if has_started:
            assert (after.state, after.reason) == (JobState.LOST, reason)
            return
        assert reason in [step.reason for step in after.history if step.state is JobState.QUEUED]
        others = [agent for agent in (a, b, c) if agent is not ready[0]]
        again = [await agent.next_launch() for agent in others]
        await confirm_together(*zip(others, again, strict=True))
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def _is_launched(agent: FakeAgent, owner: Client, job_id: str) -> bool:
    """Whether the job is placed on this node; waits for its launch."""

    async def is_placed() -> Job | None:
        job = await owner.job(job_id)
        return job if job.placements else None

    job = await until(is_placed)
    if agent.info.node_id not in {placement.node_id for placement in job.placements}:
        return False
    await until(lambda: not agent.launches.empty())
    return True


async def test_gang_with_a_lost_launch_is_queued_again_after_the_timeout(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        job = await owner.submit_spec(job_spec(workers=2))
        first = await advance_until_launch(clock, a, b)
        a.running[first.job_id] = RunningJob(job_id=first.job_id, epoch=first.placement.epoch)

        async def is_void() -> bool:
            await clock.advance(1.0)
            await a.beat()
            await b.beat()
            steps = (await owner.job(job.job_id)).history
            return any("not confirmed before the timeout on b" in step.reason for step in steps)

        await until(is_void)


async def test_each_worker_has_its_own_log(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("a", gpus=2) as a:
        job = await owner.submit_spec(job_spec("pair", workers=2))
        launches = [await a.next_launch(), await a.next_launch()]
        await confirm_together(*((a, launch) for launch in launches))
        for rank in range(2):
            a.logs[f"{job.job_id}.{rank}"] = f"rank {rank}".encode()
        logs = [
            (await owner.ask(ReadLog(job_id=key))).data
            for key in (job.job_id, f"{job.job_id}.0", f"{job.job_id}.1", "pair.1", "pair")
        ]
        assert logs == [b"rank 0", b"rank 0", b"rank 1", b"rank 1", b"rank 0"]
        with pytest.raises(JobNotFoundError, match="has no worker of rank 2: the highest rank is 1"):
            await owner.ask(ReadLog(job_id=f"{job.job_id}.2"))


async def test_cancelling_a_gang_ends_every_worker(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("a") as a,
        one.agent("b") as b,
    ):
        job = await owner.submit_spec(job_spec(workers=2))
        first, second = await a.next_launch(), await b.next_launch()
        await confirm_together((a, first), (b, second))
        await owner.ask(CancelJob(job_id=job.job_id))
        assert (await a.next_kill()).job_id == first.job_id
        assert (await b.next_kill()).job_id == second.job_id
        for agent, launch in ((a, first), (b, second)):
            agent.end(launch, -15)
            await agent.beat()
        assert (await owner.job(job.job_id)).state is JobState.CANCELLED


async def test_gang_survives_a_controller_restart(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = {name: await one.join(name) for name in ("a", "b")}
        async with AsyncExitStack() as stack:
            owner = await stack.enter_async_context(one.client())
            a, b = [
                await stack.enter_async_context(
                    FakeAgent(make_node_info(name)).connected(one.network, access[name])
                )
                for name in ("a", "b")
            ]
            for agent in (a, b):
                await agent.register()
                await agent.beat()
            job = await owner.submit_spec(job_spec(workers=2))
            first, second = await a.next_launch(), await b.next_launch()
            await confirm_together((a, first), (b, second))
        await one.restart()
        async with AsyncExitStack() as stack:
            owner = await stack.enter_async_context(one.client())
            for agent in (a, b):
                await stack.enter_async_context(agent.connected(one.network, access[agent.info.node_id]))
                await agent.register()
                await agent.beat()
            more = await owner.submit_spec(job_spec("more"))
            assert more.state is JobState.QUEUED, "running jobs are held after the restart"
            for agent, launch in ((a, first), (b, second)):
                agent.end(launch)
                await agent.beat()
            assert (await owner.job(job.job_id)).state is JobState.SUCCEEDED
            await until(lambda: not a.launches.empty() or not b.launches.empty())
