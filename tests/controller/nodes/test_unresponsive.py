"""Jobs without a dead-man timer on nodes that do not respond: they keep their accelerators."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from genie.controller.nodes.unresponsive import describe_withheld_jobs
from genie.controller.store import Put
from genie.errors import NodeRemovedError
from genie.model.allocation import Hold, NodeHolds
from genie.model.job import Job, JobState, StopReason
from genie.model.messages import CancelJob, GetQueue, Launch, ListNodes, RemoveNode
from genie.runtime.credentials import Access
from tests.controller.running_controller import Client, RunningController, job_spec, running_controller
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

SILENCE_S = 40
"""Longer than the time to live of a node and the grace period."""
KEEPS = "until the node returns or 'genie forget n1'"


@dataclass
class IsolatedNode:
    """A node whose agent runs one job and does not respond any more."""

    one: RunningController
    clock: FakeClock
    owner: Client
    access: Access
    agent: FakeAgent
    launch: Launch

    async def fetch_job(self) -> Job:
        return await self.owner.job(self.launch.job_id)

    async def has_hold(self) -> bool:
        return await self.owner.held("n1") == [self.launch.job_id]


@asynccontextmanager
async def isolated_node(tmp_path: Path, *, preemptible: bool = False) -> AsyncIterator[IsolatedNode]:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            await owner.submit_spec(job_spec(preemptible=preemptible))
            launch = await agent.start_next()
        await advance(clock, SILENCE_S)
        yield IsolatedNode(one, clock, owner, access, agent, launch)


async def advance(clock: FakeClock, seconds: int) -> None:
    for _ in range(seconds):
        await clock.advance(1.0)


@pytest.mark.parametrize("preemptible", [False, True])
async def test_launch_and_hold_say_whether_the_job_has_a_dead_man_timer(
    tmp_path: Path, preemptible: bool
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent() as agent:
        await owner.submit_spec(job_spec(preemptible=preemptible))
        launch = await agent.next_launch()
        [view] = (await owner.ask(ListNodes())).nodes
        assert (launch.has_deadman_timer, view.node_holds.holds[0].has_deadman_timer) == (preemptible,) * 2


async def test_job_keeps_its_accelerator_and_every_command_says_why(tmp_path: Path) -> None:
    async with isolated_node(tmp_path) as node:
        job = await node.fetch_job()
        assert job.state is JobState.RUNNING
        silence = f"node n1 has not responded for {SILENCE_S} s"
        assert job.reason == f"{silence}; the job keeps its accelerators {KEEPS}"
        assert await node.has_hold()
        withheld = f"its job keeps its accelerators {KEEPS}"
        assert (await node.owner.node("n1")).status_reason == f"no heartbeat for {SILENCE_S} s; {withheld}"
        assert f"{silence}; {withheld}" in (await node.owner.status()).alarms
        await node.owner.submit_spec(job_spec("next"))
        await node.clock.advance(1.0)
        [queued] = (await node.owner.ask(GetQueue())).jobs
        assert withheld in queued.reason


@pytest.mark.parametrize(
    ("gpu_ids", "what"),
    [
        ([(0,), (1,)], "its 2 jobs keep their accelerators"),
        ([(0,), ()], "its 2 jobs keep their resources"),
        ([()], "its job keeps its resources"),
    ],
)
def test_jobs_keep_accelerators_only_if_each_has_some(gpu_ids: list[tuple[int, ...]], what: str) -> None:
    holds = tuple(
        Hold(job_id=f"j{i}.0", tenant="t", epoch=1, incarnation=1, gpu_ids=ids, has_deadman_timer=False)
        for i, ids in enumerate(gpu_ids)
    )
    assert describe_withheld_jobs(NodeHolds(node_id="n1", holds=holds)) == f"{what} {KEEPS}"


async def test_job_goes_on_when_its_node_returns_with_the_same_incarnation(tmp_path: Path) -> None:
    async with isolated_node(tmp_path) as node:
        async with node.agent.connected(node.one.network, node.access):
            await node.agent.register()
            assert (await node.agent.beat()).jobs_to_kill == ()
            job = await node.fetch_job()
            assert (job.state, job.reason) == (JobState.RUNNING, "started on node n1")
            node.agent.end(node.launch)
            await node.agent.beat()
        assert (await node.fetch_job()).state is JobState.SUCCEEDED
        assert not await node.has_hold()


@pytest.mark.parametrize(
    ("preemptible", "state", "reason"),
    [
        (False, JobState.LOST, "node n1 restarted"),
        (True, JobState.QUEUED, "queued again: node n1 restarted"),
    ],
)
async def test_job_of_a_node_that_restarted_is_lost_or_queued_again(
    tmp_path: Path, preemptible: bool, state: JobState, reason: str
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit_spec(job_spec(preemptible=preemptible))
            await agent.start_next()
        async with agent.restarted().connected(one.network, access) as restarted:
            await restarted.register()
            job = await owner.job(job.job_id)
            assert (job.state, job.history[-1].reason) == (state, reason)
            assert await owner.held("n1") == []


async def test_new_leader_withholds_the_accelerator_too(tmp_path: Path) -> None:
    async with isolated_node(tmp_path) as node:
        await node.one.restart()
        async with node.one.client() as owner:
            await advance(node.clock, SILENCE_S)
            job = await owner.job(node.launch.job_id)
            assert (job.state, await owner.held("n1")) == (JobState.RUNNING, [job.job_id])
            assert KEEPS in job.reason
            assert KEEPS in (await owner.node("n1")).status_reason


async def test_job_that_an_earlier_version_launched_has_a_dead_man_timer(tmp_path: Path) -> None:
    """Its hold has no such field."""
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        async with one.client() as owner, one.agent() as agent:
            job = await owner.submit_spec(job_spec())
            await agent.start_next()
        found = await one.store.get("ledger/n1")
        assert found is not None
        held = msgspec.json.decode(found.value)
        del held["holds"][0]["deadman"]
        assert msgspec.json.decode(msgspec.json.encode(held), type=NodeHolds).holds[0].has_deadman_timer
        await one.store.commit([], [Put("ledger/n1", msgspec.json.encode(held))])
        await one.restart()
        async with one.client() as owner:

            async def is_lost() -> bool:  # the controller may begin its term after the first steps
                await clock.advance(1.0)
                return (await owner.job(job.job_id)).state is JobState.LOST

            await until(is_lost, what="the job is lost")
            assert await owner.held("n1") == []


@pytest.mark.parametrize("how", ["the node returns", "the node is removed"])
async def test_cancelled_job_ends_when_its_node_returns_or_is_removed(tmp_path: Path, how: str) -> None:
    async with isolated_node(tmp_path) as node:
        reply = (await node.owner.ask(CancelJob(job_id=node.launch.job_id))).job
        assert (reply.state, reply.stop) == (JobState.RUNNING, StopReason.CANCEL)
        assert reply.reason.endswith("the job ends when the node returns, or with 'genie forget n1'")
        await advance(node.clock, SILENCE_S)
        assert await node.has_hold()
        if how == "the node returns":
            async with node.agent.connected(node.one.network, node.access):
                await node.agent.register()
                [order] = (await node.agent.beat()).jobs_to_kill
                assert order.job_id == node.launch.job_id
                node.agent.end(node.launch, -15)
                await node.agent.beat()
            assert not await node.has_hold()
        else:
            await node.owner.ask(RemoveNode(node_id="n1"))
        assert (await node.fetch_job()).state is JobState.CANCELLED


@pytest.mark.parametrize(("preemptible", "state"), [(False, JobState.LOST), (True, JobState.QUEUED)])
async def test_removing_the_node_releases_its_jobs_and_rejects_it(
    tmp_path: Path, preemptible: bool, state: JobState
) -> None:
    async with isolated_node(tmp_path, preemptible=preemptible) as node:
        await node.owner.ask(RemoveNode(node_id="n1"))
        job = await node.fetch_job()
        assert job.state is state
        reason = "node n1 sent no heartbeat" if preemptible else "node n1 was removed (genie forget)"
        assert reason in job.history[-1].reason
        assert await node.one.store.get("ledger/n1") is None
        with pytest.raises(NodeRemovedError, match=r"was removed from the cluster \(genie forget\)"):
            async with node.agent.connected(node.one.network, node.access):
                pass


async def test_unconfirmed_launch_on_an_isolated_node_is_queued_again(tmp_path: Path) -> None:
    """Nothing has started, and its confirmation would be rejected."""
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        async with one.agent() as agent:
            job = await owner.submit_spec(job_spec())
            assert not (await agent.next_launch()).has_deadman_timer
        await advance(clock, SILENCE_S)
        assert (await owner.job(job.job_id)).state is JobState.QUEUED
        assert await owner.held("n1") == []
