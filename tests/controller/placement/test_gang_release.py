"""Gangs whose release does not fit into one transaction: released in parts, and never twice."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from genie.controller.store import Store
from genie.controller.store.protocol import TXN_BYTES_MAX
from genie.errors import FencedError, GenieError, LaunchError
from genie.model.allocation import Hold, NodeHolds
from genie.model.job import Job, JobState, StopReason
from genie.model.messages import CancelJob
from tests.controller.running_controller import (
    Client,
    RunningController,
    connect_agent,
    job_spec,
    running_controller,
)
from tests.fakes.agent import FakeAgent, make_node_info
from tests.waiting import until

NODES = ("a", "b", "c", "d")


async def enlarge_holds(one: RunningController) -> None:
    """Add holds to each node, so that the rows of all nodes do not fit into one transaction."""
    assert one.controller is not None
    ledger = one.controller._ledger
    for node_id in NODES:
        unit = f"{node_id}-" + "x" * (TXN_BYTES_MAX // 3)
        more = Hold(job_id=unit, tenant="t", epoch=1, incarnation=1)
        held = ledger.holds.get(node_id) or NodeHolds(node_id=node_id)
        enlarged = held.with_hold(more)
        await ledger.write(lambda txn, held=enlarged: txn.put(ledger.holds, held.node_id, held))  # type: ignore[misc]


async def place_gang(one: RunningController, owner: Client, agents: list[FakeAgent]) -> Job:
    gang = await owner.submit_spec(job_spec("gang", workers=len(NODES)))
    for agent in agents:
        await until(lambda agent=agent: not agent.launches.empty(), what="a launch")  # type: ignore[misc]
    await enlarge_holds(one)
    return gang


def held_units(one: RunningController) -> list[str]:
    """The workers of jobs in the ledger that hold something."""
    assert one.controller is not None
    return [
        hold.job_id
        for held in one.controller._ledger.holds.values()
        for hold in held.holds
        if hold.job_id.startswith("j-")
    ]


async def connect_all_agents(one: RunningController, stack: AsyncExitStack) -> list[FakeAgent]:
    return [await connect_agent(one, make_node_info(node_id), stack) for node_id in NODES]


async def test_cancelled_gang_is_released_in_parts(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        AsyncExitStack() as stack,
    ):
        agents = await connect_all_agents(one, stack)
        gang = await place_gang(one, owner, agents)
        cancelled = (await owner.ask(CancelJob(job_id=gang.job_id))).job
        assert cancelled.state is JobState.CANCELLED
        assert held_units(one) == []
        assert (await owner.status()).quarantined == ()


async def test_gang_with_a_worker_that_cannot_start_is_queued_again_with_the_reason(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        AsyncExitStack() as stack,
    ):
        agents = await connect_all_agents(one, stack)
        gang = await place_gang(one, owner, agents)
        launch = await agents[-1].next_launch()
        agents[-1].end(launch, None, reason="damaged", started=False)
        await agents[-1].beat()
        waiting = await owner.job(gang.job_id)
        assert waiting.history[-1].state is JobState.QUEUED
        assert waiting.history[-1].reason == f"worker {launch.rank} on node d: damaged"
        assert held_units(one) == []
        assert (await owner.status()).quarantined == ()


async def test_rejected_launch_of_a_gang_is_void_on_all_nodes(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        AsyncExitStack() as stack,
    ):
        agents = await connect_all_agents(one, stack)
        agents[0].hang = asyncio.Event()
        agents[0].refuse = LaunchError("not today")
        gang = await owner.submit_spec(job_spec("gang", workers=len(NODES)))
        launches = [await agent.next_launch() for agent in agents[1:]]
        await enlarge_holds(one)
        agents[0].hang.set()

        async def is_queued() -> bool:
            return "not today" in (await owner.job(gang.job_id)).history[-1].reason

        await until(is_queued)
        assert held_units(one) == []
        with pytest.raises(FencedError):
            await agents[1].confirm(launches[0])


class BlockCommitsAfter:
    """Lets some commits of a store pass and blocks the next ones, as in a process that was killed."""

    def __init__(self, store: Store, count: int) -> None:
        self.blocked = asyncio.Event()
        commit = store.commit

        async def limited(*arguments: object, **more: object) -> object:
            nonlocal count
            if count == 0:
                self.blocked.set()
                await asyncio.get_running_loop().create_future()
            count -= 1
            return await commit(*arguments, **more)  # type: ignore[arg-type]

        store.commit = limited  # type: ignore[method-assign, assignment]


async def test_release_that_a_crash_interrupted_is_completed_by_the_next_term(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        async with AsyncExitStack() as stack:
            owner = await stack.enter_async_context(one.client())
            agents = await connect_all_agents(one, stack)
            gang = await place_gang(one, owner, agents)
            commits = BlockCommitsAfter(one.store, 1)
            cancelling = asyncio.get_running_loop().create_task(owner.ask(CancelJob(job_id=gang.job_id)))
            await asyncio.wait_for(commits.blocked.wait(), 10)
            found = await one.store.get(f"job/{gang.job_id}")
            assert found is not None
            between = msgspec.json.decode(found.value, type=Job)
            assert (between.state, between.stop) == (JobState.PLACING, StopReason.PREEMPT)
            released = [place for place in between.placements if place.outcome is not None]
            assert 0 < len(released) < len(NODES), "the crash is between two parts"
            launch = await agents[-1].next_launch()
            with pytest.raises(FencedError):
                await agents[-1].confirm(launch)
            await one.restart()
            cancelling.cancel()
            with suppress(asyncio.CancelledError, GenieError):
                await cancelling
        async with one.client() as owner:
            assert (await owner.job(gang.job_id)).state is JobState.QUEUED
            assert held_units(one) == []
            assert (await owner.status()).quarantined == ()


async def test_release_that_failed_between_parts_is_completed_by_the_next_tick(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        AsyncExitStack() as stack,
    ):
        agents = await connect_all_agents(one, stack)
        gang = await place_gang(one, owner, agents)
        assert one.controller is not None
        changes = one.controller._jobs.lifecycle._changes
        ledger = one.controller._ledger
        # Only the first part is written.
        await ledger.write(lambda txn: changes._stage_release(ledger.jobs[gang.job_id], [0, 1], txn))

        def is_released() -> bool:
            steps = ledger.jobs[gang.job_id].history
            return steps[-1].reason == "its launch is no longer valid" and not held_units(one)

        await until(is_released)
