"""Concurrent requests to a whole controller: they share commits, and replies follow the commit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from genie.controller.nodes import orders
from genie.controller.requests import jobs as job_requests
from genie.controller.store import Store
from genie.errors import QueueFullError, StoreFullError
from genie.model.job import JobState
from genie.model.messages import CreateToken, Launch
from genie.model.tenant import TokenKind
from tests.controller.running_controller import Client, RunningController, job_spec, running_controller
from tests.fakes.agent import FakeAgent
from tests.fakes.clock import FakeClock
from tests.waiting import until

MANY = 16
JOBS = 1000
IN_FLIGHT = 250


class CommitCounter:
    """Counts the transactions of a store."""

    def __init__(self, store: Store) -> None:
        self.count = 0
        commit = store.commit

        async def counted(*arguments: object, **more: object) -> object:
            self.count += 1
            return await commit(*arguments, **more)  # type: ignore[arg-type]

        store.commit = counted  # type: ignore[method-assign, assignment]


class CommitGate:
    """Blocks the commits of a store until the test releases them."""

    def __init__(self, store: Store) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._is_open = False
        commit = store.commit

        async def held(*arguments: object, **more: object) -> object:
            if not self._is_open:
                self._waiting.append(asyncio.get_running_loop().create_future())
                await self._waiting[-1]
            return await commit(*arguments, **more)  # type: ignore[arg-type]

        store.commit = held  # type: ignore[method-assign, assignment]

    async def reached(self, count: int, *, what: str) -> None:
        # More: writes that pass by the queue, such as the record of this server.
        await until(lambda: len(self._waiting) >= count, what=what)

    def open(self, *, for_good: bool = False) -> None:
        self._is_open = for_good
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.set_result(None)


async def wait_for_queued_writes(one: RunningController, count: int, *, what: str) -> None:
    """Wait until `count` writes are queued behind the current commit."""
    assert one.controller is not None
    ledger = one.controller._ledger
    await until(lambda: len(ledger._write_queue) == count, what=what)


async def read_stored_job(one: RunningController, job_id: str) -> bytes:
    found = await one.store.get(f"job/{job_id}")
    assert found is not None, "reply before it was durable"
    return found.value


async def test_many_jobs_on_one_connection_share_commits(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent(gpus=MANY) as agent:
        commits = CommitCounter(one.store)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(client.submit(gpus=1)) for _ in range(MANY)]
        jobs = [task.result() for task in asked]
        assert len({job.job_id for job in jobs}) == MANY
        assert {gpu for job in jobs if job.placement for gpu in job.placement.gpu_ids} == set(range(MANY))
        assert commits.count <= MANY // 2, "two state changes per job"
        for job in jobs:
            assert b'"placing"' in await read_stored_job(one, job.job_id)

        launches = [await agent.next_launch() for _ in jobs]
        commits.count = 0
        async with asyncio.TaskGroup() as group:
            for launch in launches:
                group.create_task(agent.confirm(launch))
        assert commits.count <= MANY // 4

        for launch in launches:
            agent.end(launch)
        commits.count = 0
        await agent.beat()
        assert not agent.exits, "all exits are settled"
        assert commits.count <= 2
        for job in jobs:
            assert b'"succeeded"' in await read_stored_job(one, job.job_id)
        assert await client.held("n1") == []


async def test_job_that_fits_is_submitted_and_placed_in_one_commit(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent(gpus=1) as agent:
        commits = CommitCounter(one.store)
        job = await client.submit(gpus=1)
        assert (job.state, commits.count) == (JobState.PLACING, 1)
        assert [step.state for step in job.history] == ["queued", "placing"]
        assert b'"placing"' in await read_stored_job(one, job.job_id)
        assert (await agent.next_launch()).job_id == job.job_id
        waiting = await client.submit(gpus=1)
        assert waiting.state is JobState.QUEUED


async def test_pending_job_and_new_job_are_both_launched(tmp_path: Path) -> None:
    """In one commit, a pass places the first and the submission places the second."""
    async with running_controller(tmp_path) as one, one.client() as client, one.agent(gpus=2) as agent:
        first = await client.submit(gpus=2)
        launch = await agent.start_next()
        waited = await client.submit(gpus=1)
        assert (first.state, waited.state) == (JobState.PLACING, JobState.QUEUED)
        gate = CommitGate(one.store)
        agent.end(launch)
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.beat())
            await gate.reached(1, what="the end of the first job")
            group.create_task(client.ask(CreateToken(kind=TokenKind.USER)))
            await wait_for_queued_writes(one, 1, what="the token behind it")
            gate.open()
            await gate.reached(1, what="the token, while the pass places the pending job")
            await wait_for_queued_writes(one, 1, what="the placement of the pending job")
            submission = group.create_task(client.submit(gpus=1))
            await wait_for_queued_writes(one, 2, what="the submission behind it")
            gate.open(for_good=True)
        launched = {(await agent.next_launch()).job_id for _ in range(2)}
        assert launched == {waited.job_id, submission.result().job_id}


async def test_submission_to_a_long_queue_is_answered_before_the_scheduling_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_requests, "LONG_QUEUE_JOBS", 1)
    clock = FakeClock()  # stands still: a wait for a decision would not end
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as client,
        one.agent(gpus=1) as agent,
    ):
        await client.submit(gpus=1)
        launch = await agent.start_next()
        await client.submit(gpus=1)
        gate = CommitGate(one.store)
        agent.end(launch)
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.beat())
            await gate.reached(1, what="the end of the first job")
            submission = group.create_task(client.submit(gpus=1))
            await wait_for_queued_writes(one, 1, what="the submission behind it")
            gate.open()
            await gate.reached(1, what="the submission")
            await wait_for_queued_writes(one, 1, what="the placement of the pending job")
            gate.open()
            await gate.reached(1, what="the placement, for which the pass waits")
            await until(submission.done, timeout_s=20, what="the reply during the pass")
            gate.open(for_good=True)
        assert submission.result().state is JobState.QUEUED


async def test_refusal_by_a_full_queue_does_not_wait_for_a_commit(tmp_path: Path) -> None:
    async with running_controller(tmp_path, queue_max=1) as one, one.client() as client:
        job = await client.submit(request_id="first")
        gate = CommitGate(one.store)
        async with asyncio.TaskGroup() as group:
            group.create_task(client.ask(CreateToken(kind=TokenKind.USER)))
            await gate.reached(1, what="another write")
            with pytest.raises(QueueFullError, match="the queue is full"):
                await client.submit(request_id="second")
            gate.open(for_good=True)
        again = await client.submit(request_id="first")
        assert again.job_id == job.job_id, "not refused: its job is in the queue already"


async def test_placements_stay_within_the_launch_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "ORDERS_MAX", 1)
    async with running_controller(tmp_path) as one, one.client() as client, one.agent(gpus=2) as agent:
        agent.hang = asyncio.Event()
        gate = CommitGate(one.store)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(client.submit(gpus=1))
            await gate.reached(1, what="the first job")
            second = group.create_task(client.submit(gpus=1))
            await wait_for_queued_writes(one, 1, what="the second job behind it")
            gate.open(for_good=True)
        assert (first.result().state, second.result().state) == (JobState.PLACING, JobState.QUEUED)
        agent.hang.set()
        launched = [(await agent.next_launch()).job_id for _ in range(2)]
        assert launched == [first.result().job_id, second.result().job_id]


async def test_planner_counts_a_placement_during_its_commit_and_not_after_rollback(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent(gpus=1) as agent:
        assert one.controller is not None
        planner, commit, seen = one.controller._planner, one.store.commit, []

        async def failing(*_: object, **__: object) -> object:
            planner.invalidate()  # as after a hardware change of a node
            planner.place()
            seen.extend(running.request.job_id for running in planner._scheduler.running_jobs)
            raise StoreFullError("no space")

        one.store.commit = failing  # type: ignore[method-assign, assignment]
        with pytest.raises(StoreFullError):
            await client.submit(gpus=1)
        one.store.commit = commit  # type: ignore[method-assign]
        assert len(seen) == 1, "the placement counts meanwhile"
        assert planner._scheduler.running_jobs == [], "it is released"
        job = await client.submit(gpus=1)
        assert (await agent.next_launch()).job_id == job.job_id


async def test_new_job_is_not_placed_on_a_node_that_just_disconnected(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client:
        async with one.agent("n1", gpus=1):
            assert one.controller is not None
            planner = one.controller._planner
        job = await client.submit(gpus=1)
        assert job.state is JobState.QUEUED
        assert planner._scheduler.running_jobs == []


async def test_oldest_finished_jobs_are_deleted_concurrently_with_passes(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path, jobs_kept=1) as one,
        one.client() as client,
        one.agent(gpus=1) as agent,
    ):
        jobs = [await client.submit(gpus=1) for _ in range(5)]
        for _ in jobs:
            agent.end(await agent.start_next())
            await agent.beat()

        async def are_deleted() -> bool:
            await agent.beat()
            return [job.job_id for job in jobs if await one.store.get(f"job/{job.job_id}")] == [
                jobs[-1].job_id
            ]

        await until(are_deleted, what="the oldest four are deleted")
        assert (await client.job(jobs[-1].job_id)).state is JobState.SUCCEEDED


async def submit_many(client: Client, agent: FakeAgent, **constraints: object) -> list[Launch]:
    """Submit JOBS jobs without resource requests and return their launches."""
    launches = []
    for _ in range(JOBS // IN_FLIGHT):
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(client.submit_spec(job_spec(gpus=0, **constraints)))
        launches += [await agent.next_launch() for _ in range(IN_FLIGHT)]
    return launches


async def confirm_all(agent: FakeAgent, launches: list[Launch]) -> None:
    for start in range(0, JOBS, IN_FLIGHT):
        async with asyncio.TaskGroup() as group:
            for launch in launches[start : start + IN_FLIGHT]:
                group.create_task(agent.confirm(launch))


async def advance_until_all_jobs_are(one: RunningController, clock: FakeClock, state: JobState) -> None:
    assert one.controller is not None
    jobs = one.controller._jobs.catalog

    async def reached() -> bool:
        await clock.advance(1.0)
        return jobs.count_by_state()[state] == JOBS

    await until(reached, what=f"all jobs are {state}")


async def test_restartable_jobs_of_a_lost_node_are_queued_again_in_few_commits(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as client:
        async with one.agent() as agent:
            await confirm_all(agent, await submit_many(client, agent, preemptible=True))
        commits = CommitCounter(one.store)
        await advance_until_all_jobs_are(one, clock, JobState.QUEUED)
        assert commits.count < JOBS / 20
        assert await client.held("n1") == []


async def test_unconfirmed_launches_are_queued_again_in_few_commits(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as client:
        async with one.agent() as agent:
            await submit_many(client, agent)
        commits = CommitCounter(one.store)
        await advance_until_all_jobs_are(one, clock, JobState.QUEUED)
        assert commits.count < JOBS / 20


async def test_jobs_over_their_time_limit_are_stopped_in_few_commits(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as client,
        one.agent() as agent,
    ):
        await confirm_all(agent, await submit_many(client, agent, time_limit_s=100.0))
        agent.elapsed_s = 101.0
        await agent.beat()
        commits = CommitCounter(one.store)

        async def are_stopped() -> bool:
            await clock.advance(0.5)
            return len((await agent.beat()).jobs_to_kill) == JOBS

        await until(are_stopped, what="all jobs are stopped")
        assert commits.count < JOBS / 20


async def test_jobs_that_an_agent_no_longer_runs_are_lost_in_few_commits(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as client, one.agent() as agent:
        await confirm_all(agent, await submit_many(client, agent))
        agent.running.clear()
        commits = CommitCounter(one.store)
        for _ in range(3):
            await agent.beat()
        assert await client.held("n1") == []
        assert commits.count < JOBS / 20
