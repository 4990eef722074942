"""One row that cannot be read or changed affects nobody else: real controllers on a real store."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from genie.controller.nodes.agents import Agents
from genie.controller.store import Put
from genie.controller.store.protocol import VALUE_BYTES_MAX
from genie.errors import NodeError, RowTooLargeError
from genie.model.job import Job, JobSpec, JobState, is_shrunk_job
from genie.model.messages import CancelJob, RemoveNode
from genie.model.tenant import TokenKind
from tests.controller.running_controller import RunningController, job_spec, running_controller
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def fill_row_of_job(one: RunningController, job_id: str) -> None:
    """Rewrite a stored job so that no byte can be added, as an earlier version might have stored it."""
    key = f"job/{job_id}"
    found = await one.store.get(key)
    assert found is not None
    job = msgspec.json.decode(found.value, type=Job)
    spare = VALUE_BYTES_MAX - len(found.value) - len(',"env":{"A":""}')
    spec = msgspec.structs.replace(job.spec, env={"A": "a" * spare})
    value = msgspec.json.encode(msgspec.structs.replace(job, spec=spec))
    assert len(value) == VALUE_BYTES_MAX
    await one.store.commit([], [Put(key, value)])


async def test_job_that_fills_its_row_ends_and_so_do_the_other_jobs_of_its_node(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            large, other = await owner.submit(gpus=1), await owner.submit(gpus=1)
            launches = [await agent.start_next(), await agent.start_next()]
        await fill_row_of_job(one, large.job_id)
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            for launch in launches:
                agent.end(launch)
            await agent.register(*agent.exits.values())
            await agent.beat()
            assert agent.exits == {}, "all exits are settled"
            assert (await owner.job(other.job_id)).state is JobState.SUCCEEDED
            ended = await owner.job(large.job_id)
            assert (ended.state, is_shrunk_job(ended)) == (JobState.SUCCEEDED, True)
            assert await owner.held("n1") == []
            status = await owner.status()
            assert (status.quarantined, status.alarms) == ((), ())


@pytest.mark.parametrize("how", ["cancel", "restart of the node"])
async def test_job_that_fills_its_row_can_be_cancelled_and_lost(tmp_path: Path, how: str) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit(gpus=1)
            launch = await agent.start_next()
        await fill_row_of_job(one, job.job_id)
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            if how == "cancel":
                await owner.ask(CancelJob(job_id=job.job_id))
                agent.end(launch, None, reason="killed")
                await agent.beat()
            else:
                async with agent.restarted().connected(one.network, access) as restarted:
                    await restarted.register()
            state = JobState.CANCELLED if how == "cancel" else JobState.LOST
            assert (await owner.job(job.job_id)).state is state
            assert await owner.held("n1") == []


async def test_unconfirmed_job_that_fills_its_row_fails_and_the_controller_leads_again(
    tmp_path: Path,
) -> None:
    async with running_controller(tmp_path) as one:
        async with one.client() as owner, one.agent() as agent:
            job = await owner.submit(gpus=1)
            await agent.next_launch()
            await agent.beat()  # the launch has been acknowledged
        await fill_row_of_job(one, job.job_id)
        await one.restart()
        async with one.client() as owner:
            failed = await owner.job(job.job_id)
            assert failed.state is JobState.FAILED
            assert "its stored record is too large" in failed.reason
            assert (await owner.submit()).state is JobState.QUEUED


async def test_row_that_cannot_be_read_is_quarantined_and_shown(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        user = await one.token(TokenKind.USER, tenant="blue")
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            bad = await owner.submit(gpus=1)
            launch = await agent.start_next()
        key = f"job/{bad.job_id}"
        await one.store.commit([], [Put(key, b'{"of": "another version"}')])
        await one.restart()
        async with one.client() as owner, one.client(user) as blue, agent.connected(one.network, access):
            await agent.register()
            assert (await agent.beat()).jobs_to_kill == (), "a job that cannot be read is not killed"
            status = await owner.status()
            assert [row.key for row in status.quarantined] == [key]
            assert "cannot be read" in status.quarantined[0].reason
            shown = await blue.status()
            assert (shown.quarantined, shown.quarantined_count) == ((), 1), "details are for the owner"
            assert await owner.held("n1") == [bad.job_id], "its accelerator stays allocated"
            other = await blue.submit(gpus=1)
            assert (await agent.start_next()).job_id == other.job_id
            agent.end(launch)
            for _ in range(3):
                await agent.beat()
            assert await owner.held("n1") == [other.job_id], "released when the node no longer runs it"
            assert await one.store.get(key) is not None, "kept in the store"


async def test_node_whose_allocations_cannot_be_read_gets_no_work(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit(gpus=1)
            await agent.start_next()
        await one.store.commit([], [Put("ledger/n1", b"{")])
        await one.restart()
        async with one.client() as owner:
            async with agent.connected(one.network, access):
                with pytest.raises(NodeError, match="genie forget n1"):
                    await agent.register()
            waiting = await owner.submit(gpus=1)
            assert waiting.state is JobState.QUEUED
            with pytest.raises(NodeError, match="jobs may still run"):
                await owner.ask(RemoveNode(node_id="n1"))
            await clock.advance(20.0)
            await owner.ask(RemoveNode(node_id="n1"))
            assert (await owner.job(job.job_id)).state is JobState.LOST
            async with one.agent("n1") as fresh:
                assert (await fresh.start_next()).job_id == waiting.job_id
            assert (await owner.status()).quarantined == ()


async def test_failing_step_of_a_tick_does_not_prevent_scheduling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Agents) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Agents, "reclaim_jobs", fail)
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        waiting = await owner.submit(gpus=1)
        await clock.advance(1.0)
        async with one.agent() as agent:
            await clock.advance(1.0)
            assert (await agent.start_next()).job_id == waiting.job_id
        alarms = (await owner.status()).alarms
        assert alarms == ("reclaiming jobs of lost nodes fails: a bug",)


async def test_submission_whose_encoding_is_too_large_for_the_store_is_rejected(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        env = {"A": "\x01" * 100_000}
        with pytest.raises(RowTooLargeError, match="working directory"):
            await owner.submit_spec(JobSpec(name="job", command=("true",), env=env))


async def test_job_that_cannot_be_placed_waits_and_others_start(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        async with one.client() as owner:
            large = await owner.submit(gpus=1)
        await fill_row_of_job(one, large.job_id)
        await one.restart()
        agent = FakeAgent(make_node_info("n1", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()

            assert one.controller is not None
            jobs = one.controller._jobs.catalog

            def is_explained() -> bool:  # too large for a reply, too
                return (
                    "could not be placed" in jobs.with_pending_reason(jobs._ledger.jobs[large.job_id]).reason
                )

            await until(is_explained)
            other = await owner.submit(gpus=1)
            assert (await agent.start_next()).job_id == other.job_id
            assert await owner.held("n1") == [other.job_id]
            cancelled = (await owner.ask(CancelJob(job_id=large.job_id))).job
            assert cancelled.state is JobState.CANCELLED


async def test_gang_on_nodes_with_too_many_workers_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.controller.jobs.launches.HOLDS_PER_TRANSACTION_MAX", 3)
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent(gpus=4) as agent:
        small = [await owner.submit(cpus=0.5) for _ in range(2)]
        started = [await agent.start_next() for _ in small]
        gang = await owner.submit_spec(job_spec("gang", workers=2))

        async def is_explained() -> bool:
            return "workers in all; the maximum" in (await owner.job(gang.job_id)).reason

        await until(is_explained)
        assert {launch.job_id for launch in started} == {job.job_id for job in small}
        another = await owner.submit(gpus=1)
        assert (await agent.start_next()).job_id == another.job_id
