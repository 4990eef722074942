"""Restarts of a controller: everything that was acknowledged survives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from genie.controller.store import RangeResult
from genie.errors import NotLeaderError, StoreFullError, StoreUnavailableError
from genie.model.job import JobSpec, JobState, PlacementConstraints, Resources
from genie.model.messages import CancelJob, GetJob, ListJobs, ListTokens, SubmitJob
from genie.model.node import NodeStatus
from genie.runtime.credentials import connect_authenticated
from genie.sim.store import MemoryStore
from tests.controller.running_controller import CALL_S, RunningController, running_controller
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def test_queue_jobs_holds_and_tokens_survive_a_restart(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            first = await agent.register()
            await agent.beat()
            running = await owner.submit(gpus=1, request_id="again")
            launch = await agent.start_next()
            waiting = await owner.submit(gpus=1)
            tokens = await owner.ask(ListTokens())
            cluster_id = (await owner.status()).cluster_id
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            assert (await owner.status()).cluster_id == cluster_id
            assert [job.job_id for job in (await owner.ask(ListJobs())).jobs] == [
                waiting.job_id,
                running.job_id,
            ]
            assert await owner.held("n1") == [running.job_id]
            assert (await owner.ask(ListTokens())) == tokens
            assert (await owner.submit(request_id="again")).job_id == running.job_id
            second = await agent.register()
            assert second.leader_token > first.leader_token
            ack = await agent.beat()
            assert (ack.leading, ack.jobs_to_kill) == (True, ())
            assert (await owner.job(running.job_id)).state is JobState.RUNNING
            agent.end(launch)
            await agent.beat()
            assert (await owner.job(running.job_id)).state is JobState.SUCCEEDED
            assert (await agent.next_launch()).job_id == waiting.job_id


async def test_launch_unconfirmed_before_a_restart_is_void(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit(gpus=1)
            before = await agent.next_launch()
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            after = await agent.next_launch()
            assert after.job_id == before.job_id == job.job_id
            assert after.placement.epoch > before.placement.epoch


async def test_new_term_restarts_the_timeouts_of_all_nodes(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            spec = JobSpec(
                name="train",
                command=("true",),
                resources=Resources(gpus=1),
                constraints=PlacementConstraints(preemptible=True),
            )
            job = await owner.submit_spec(spec)
            await agent.start_next()
            await clock.advance(12.0)
        await one.restart()
        async with one.client() as owner:
            node = await owner.node("n1")
            assert (node.status, node.status_reason) == (
                NodeStatus.SUSPECT,
                "no heartbeat since this controller started",
            )
            await clock.advance(12.0)
            assert (await owner.job(job.job_id)).state is JobState.RUNNING

            async def is_queued_again() -> bool:
                await clock.advance(0.5)
                return (await owner.job(job.job_id)).state is JobState.QUEUED

            await until(is_queued_again)


async def test_reads_and_running_jobs_continue_without_the_store(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with (
        running_controller(tmp_path, clock=clock, store=store, leader_ttl_s=3.0) as one,
        one.client() as owner,
        one.agent() as agent,
    ):
        job = await owner.submit(gpus=1)
        launch = await agent.start_next()
        store.set_available(False)
        with pytest.raises(StoreUnavailableError):
            await owner.submit(gpus=1)
        await clock.advance(4.0)
        status = await owner.status()
        assert (status.leading, status.store_ok) == (False, False)
        assert (await owner.job(job.job_id)).state is JobState.RUNNING, "reads are answered from a copy"
        agent.end(launch)
        ack = await agent.beat()
        assert (ack.leading, ack.settled_exits) == (False, ())
        for _ in range(20):
            await clock.advance(1.0)
        assert (await owner.job(job.job_id)).state is JobState.RUNNING
        with pytest.raises(StoreUnavailableError, match="store is unavailable"):
            await owner.submit(gpus=1)

        store.set_available(True)

        async def leads() -> bool:
            await clock.advance(1.0)
            return (await owner.status()).leading

        await until(leads)
        assert (await owner.status()).store_ok
        await agent.beat()
        assert (await owner.job(job.job_id)).state is JobState.SUCCEEDED
        assert (await owner.submit(gpus=1)).state in (JobState.QUEUED, JobState.PLACING)


async def test_commit_with_a_lost_reply_is_resolved_by_a_reload(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with running_controller(tmp_path, clock=clock, store=store) as one, one.client() as owner:
        store.lose_next_commit_reply()
        spec = JobSpec(name="once", command=("true",))
        with pytest.raises(StoreUnavailableError):
            await owner.ask(SubmitJob(spec=spec, request_id="once"))
        job = (await owner.ask(SubmitJob(spec=spec, request_id="once"))).job
        assert [job.job_id] == [listed.job_id for listed in (await owner.ask(ListJobs())).jobs]
        second = await owner.submit()
        assert second.sequence > job.sequence


async def test_full_disk_is_reported_and_writes_resume_with_free_space(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        before = await owner.submit()
        commit = one.store.commit

        async def full(*arguments: object, **settings: object) -> object:
            raise StoreFullError("no space left on device")

        one.store.commit = full  # type: ignore[method-assign, assignment]
        with pytest.raises(StoreFullError):
            await owner.submit()
        assert [job.job_id for job in (await owner.ask(ListJobs())).jobs] == [before.job_id]
        assert not (await owner.status()).store_ok
        one.store.commit = commit  # type: ignore[method-assign]
        after = await owner.submit()
        assert after.sequence == before.sequence + 1
        assert (await owner.status()).store_ok


async def test_nodes_learn_about_a_controller_started_later(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with running_controller(tmp_path / "a", clock=clock, store=store) as first:
        access = await first.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with agent.connected(first.network, access):
            assert len((await agent.register()).controllers) == 1
            second_store = store.connect()
            async with running_controller(
                tmp_path / "b", clock=clock, store=second_store, name="two"
            ) as second:
                assert agent.peer is not None

                async def is_closed() -> bool:
                    await clock.advance(1.0)
                    return agent.peer is not None and agent.peer.is_closed

                await until(is_closed, what="the node has to register again")
                async with agent.connected(first.network, access):
                    assert second.controller is not None
                    assert second.controller.address in (await agent.register()).controllers
                    for _ in range(10):
                        await clock.advance(1.0)
                        await agent.beat()


async def test_standby_names_the_leader(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with (
        running_controller(tmp_path / "a", clock=clock, store=store, leader_ttl_s=3.0) as first,
        running_controller(
            tmp_path / "b", clock=clock, store=store.connect(), leader_ttl_s=3.0, name="two"
        ) as second,
    ):
        assert first.controller is not None
        assert second.controller is not None
        assert first.controller.is_leading
        assert not second.controller.is_leading
        owner_token = (first.state_dir / "owner.token").read_text()
        async with second.client(owner_token) as owner:
            status = await owner.status()
            assert (status.leading, status.leader) == (False, first.controller.address)
            with pytest.raises(NotLeaderError, match=first.controller.address):
                await owner.submit()
            with pytest.raises(NotLeaderError):
                await owner.ask(ListJobs())
        async with first.client() as owner:
            job = await owner.submit()
        await first.stop()

        async def took_over() -> bool:
            await clock.advance(0.5)
            return second.controller is not None and second.controller.is_leading

        await until(took_over)
        async with second.client(owner_token) as owner:
            assert (await owner.job(job.job_id)).state is JobState.QUEUED
            assert (await owner.status()).leading
        await first.start()


def slow_down_job_reads(store: MemoryStore, clock: FakeClock, seconds: int) -> None:
    """Let every read of the jobs take this time."""
    read = store.range

    async def slow(prefix: str, **settings: object) -> RangeResult:
        for _ in range(seconds if prefix == "job/" else 0):
            await clock.sleep(1.0)
        return await read(prefix, **settings)  # type: ignore[arg-type]

    store.range = slow  # type: ignore[method-assign, assignment]


async def reports_leading(one: RunningController) -> bool:
    access = await one.access()
    async with connect_authenticated(one.network, access, timeout_s=CALL_S, program="test") as (_, welcome):
        return welcome.leading


async def test_controller_leads_although_loading_takes_longer_than_the_lease(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with running_controller(tmp_path, clock=clock, store=store, leader_ttl_s=2.0) as one:
        async with one.client() as owner:
            job = await owner.submit()
        stopped = one.controller
        await one.stop()
        slow_down_job_reads(store, clock, 30)
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(one.start())
            await until(lambda: one.controller not in (None, stopped) and one.controller.port > 0)
            await clock.advance(5.0)
            asking = group.create_task(reports_leading(one))

            async def was_asked() -> bool:
                await clock.advance(0.05)
                return asking.done()

            await until(was_asked)
            assert not starting.done(), "still loading"
            assert not asking.result(), "agents keep their jobs while no controller leads"

            async def has_started() -> bool:
                await clock.advance(0.5)
                return starting.done()

            await until(has_started)
        assert one.controller is not None
        assert one.controller.is_leading
        await clock.advance(5.0)
        async with one.client() as owner:
            assert (await owner.job(job.job_id)).state is JobState.QUEUED
            assert (await owner.status()).leading


async def test_reads_never_use_tables_of_an_earlier_leadership(tmp_path: Path) -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    first_store = memory.connect()
    async with running_controller(tmp_path / "a", clock=clock, store=first_store, leader_ttl_s=2.0) as first:
        token = (first.state_dir / "owner.token").read_text()
        async with first.client() as owner:
            job = await owner.submit()
            first_store.set_available(False)
            async with running_controller(
                tmp_path / "b", clock=clock, store=memory.connect(), leader_ttl_s=2.0, name="two"
            ) as second:

                async def took_over() -> bool:
                    await clock.advance(0.5)
                    return second.controller is not None and second.controller.is_leading

                await until(took_over)
                async with second.client(token) as other:
                    cancelled_at_s = clock.monotonic_s()
                    await other.ask(CancelJob(job_id=job.job_id))
            slow_down_job_reads(first_store, clock, 10)
            first_store.set_available(True)
            assert first.controller is not None
            election = first.controller._election

            async def has_won() -> bool:
                await clock.advance(0.25)
                return election.is_leading

            await until(has_won)
            reply = await owner.ask(GetJob(job_id=job.job_id))
            is_age_shown = reply.age_s >= clock.monotonic_s() - cancelled_at_s
            assert reply.job.state is JobState.CANCELLED or is_age_shown, "from a copy, with its age"
            with pytest.raises(NotLeaderError, match="taking over leadership"):
                await owner.ask(CancelJob(job_id="unknown"))
            assert not (await owner.status()).leading

            async def leads() -> bool:
                await clock.advance(0.5)
                return (await owner.status()).leading

            await until(leads)
            assert (await owner.job(job.job_id)).state is JobState.CANCELLED
    await memory.close()
