"""A controller that ends and comes back: everything that was acknowledged is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.errors import NotLeaderError, StoreFullError, StoreUnavailableError
from genie.model.job import JobSpec, JobState
from genie.model.messages import ListJobs, ListTokens, SubmitJob
from genie.model.node import NodeStatus
from genie.sim.store import MemoryStore
from tests.controller.standing import standing
from tests.fakes.agent import FakeAgent, node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def test_queue_jobs_holds_and_tokens_survive_and_running_work_goes_on(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(node_info("n1"))
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
            assert (ack.leading, ack.kill) == (True, ())
            assert (await owner.job(running.job_id)).state is JobState.RUNNING
            agent.end(launch)
            await agent.beat()
            assert (await owner.job(running.job_id)).state is JobState.SUCCEEDED
            assert (await agent.next_launch()).job_id == waiting.job_id


async def test_a_launch_of_the_last_life_that_was_not_confirmed_is_void(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(node_info("n1"))
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


async def test_a_new_term_gives_every_node_its_full_time(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one:
        access = await one.join("n1")
        agent = FakeAgent(node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit(gpus=1)
            await agent.start_next()
            await clock.advance(12.0)
        await one.restart()
        async with one.client() as owner:
            node = await owner.node("n1")
            assert (node.status, node.status_reason) == (
                NodeStatus.SUSPECT,
                "not heard since this controller started",
            )
            await clock.advance(12.0)
            assert (await owner.job(job.job_id)).state is JobState.RUNNING

            async def lost() -> bool:
                await clock.advance(0.5)
                return (await owner.job(job.job_id)).state is JobState.LOST

            await until(lost)


async def test_without_its_store_nothing_is_decided_reads_go_on_and_work_is_left_alone(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with (
        standing(tmp_path, clock=clock, store=store, leader_ttl_s=3.0) as one,
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
        assert (await owner.job(job.job_id)).state is JobState.RUNNING, "reads are answered from memory"
        agent.end(launch)
        ack = await agent.beat()
        assert (ack.leading, ack.settled) == (False, ())
        for _ in range(20):
            await clock.advance(1.0)
        assert (await owner.job(job.job_id)).state is JobState.RUNNING
        with pytest.raises(StoreUnavailableError, match="decides nothing now"):
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


async def test_a_commit_whose_answer_was_lost_is_found_out_by_reading(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with standing(tmp_path, clock=clock, store=store) as one, one.client() as owner:
        store.lose_next_answer()
        spec = JobSpec(name="once", command=("true",))
        with pytest.raises(StoreUnavailableError):
            await owner.ask(SubmitJob(spec=spec, request_id="once"))
        job = (await owner.ask(SubmitJob(spec=spec, request_id="once"))).job
        assert [job.job_id] == [listed.job_id for listed in (await owner.ask(ListJobs())).jobs]
        second = await owner.submit()
        assert second.sequence > job.sequence


async def test_a_full_disk_reaches_the_caller_and_it_goes_on_when_there_is_space(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
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


async def test_nodes_come_to_know_of_a_controller_that_is_started_later(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with standing(tmp_path / "a", clock=clock, store=store) as first:
        access = await first.join("n1")
        agent = FakeAgent(node_info("n1"))
        async with agent.connected(first.network, access):
            assert len((await agent.register()).controllers) == 1
            second_store = store.connect()
            async with standing(tmp_path / "b", clock=clock, store=second_store, name="two") as second:
                assert agent.peer is not None

                async def hung_up() -> bool:
                    await clock.advance(1.0)
                    return agent.peer is not None and agent.peer.is_closed

                await until(hung_up, what="the node has to register anew")
                async with agent.connected(first.network, access):
                    assert second.controller is not None
                    assert second.controller.address in (await agent.register()).controllers
                    for _ in range(10):
                        await clock.advance(1.0)
                        await agent.beat()


async def test_of_two_controllers_one_leads_and_the_other_says_who(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with (
        standing(tmp_path / "a", clock=clock, store=store, leader_ttl_s=3.0) as first,
        standing(tmp_path / "b", clock=clock, store=store.connect(), leader_ttl_s=3.0, name="two") as second,
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
