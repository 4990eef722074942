"""How nodes go: in good order, or by the owner's word when they no longer answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from genie.config import ControllerConfig
from genie.controller.admission import check_times
from genie.errors import ConfigError, GenieError, NodeError, NodeNotFoundError, TokenRefusedError, UsageError
from genie.model.job import JobState
from genie.model.messages import DrainNode, GetStatus, Join, ListNodes, RemoveNode, UndrainNode
from genie.model.node import Vendor
from genie.model.tenant import TokenKind
from genie.runtime import rpc
from tests.controller.standing import CALL_S, Client, launched_while, standing
from tests.fakes.agent import FakeAgent, node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def _node_ids(owner: Client) -> list[str]:
    return [view.info.node_id for view in (await owner.ask(ListNodes())).nodes]


async def test_a_node_that_leaves_in_good_order_is_no_longer_listed_or_counted(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        await agent.leave()
        assert await _node_ids(owner) == []
        assert (await owner.ask(GetStatus())).gpus_total == 0


async def test_a_node_that_left_may_come_back_with_the_same_name(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(node_info("n1")).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
            await agent.leave()
        async with agent.restarted().connected(one.network, access) as again:
            await again.register()
            await again.beat()
            assert await _node_ids(owner) == ["n1"]


async def test_a_node_that_holds_a_job_may_not_leave(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        job = await owner.submit("work", gpus=1)
        await agent.start_next()
        with pytest.raises(NodeError, match="still holds jobs: 1"):
            await agent.leave()
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_a_drained_node_takes_nothing_new_until_it_is_opened_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async with standing(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(node_info("n1")).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
            running = await owner.submit("before", gpus=1)
            await agent.start_next()
            await owner.ask(DrainNode(node_id="n1", reason="new fans"))
            assert (await owner.ask(ListNodes())).nodes[0].drained == "draining: new fans"
            waiting = await owner.submit("after", cpus=1)

            async def told() -> bool:
                return "draining: new fans" in (await owner.job(waiting.job_id)).reason

            await until(told)
            assert (await owner.job(running.job_id)).state is JobState.RUNNING
        async with agent.restarted().connected(one.network, access) as again:
            await again.register()
            await again.beat()
            assert (await owner.ask(ListNodes())).nodes[0].drained == "draining: new fans"
            await owner.ask(UndrainNode(node_id="n1"))
            assert (await again.next_launch()).job_id == waiting.job_id


async def test_draining_again_changes_the_reason_only_for_another(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1"):

        async def drained(reason: str = "") -> str:
            await owner.ask(DrainNode(node_id="n1", reason=reason))
            return (await owner.ask(ListNodes())).nodes[0].drained

        assert await drained() == "draining"
        assert await drained("new fans") == "draining: new fans"
        assert await drained() == "draining: new fans"
        assert await drained("new disk") == "draining: new disk"
        await owner.ask(UndrainNode(node_id="n1"))
        assert await drained() == "draining"


async def test_draining_says_what_is_wrong_and_is_the_owners(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1"):
        with pytest.raises(NodeNotFoundError, match="no node 'n9'"):
            await owner.ask(DrainNode(node_id="n9"))
        for reason in ("two\nlines", "x" * 300):
            with pytest.raises(UsageError, match="one line of at most 200"):
                await owner.ask(DrainNode(node_id="n1", reason=reason))
        assert (await owner.ask(ListNodes())).nodes[0].drained == ""


async def test_a_connected_node_is_not_removed(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1"):
        with pytest.raises(NodeError, match="is connected"):
            await owner.ask(RemoveNode(node_id="n1"))
        assert await _node_ids(owner) == ["n1"]


async def test_a_silent_node_is_removed_and_its_token_opens_nothing_any_more(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(node_info("n1")).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
        with pytest.raises(NodeError, match="until a moment ago"):
            await owner.ask(RemoveNode(node_id="n1"))
        await clock.advance(14.0)
        await owner.ask(RemoveNode(node_id="n1"))
        assert await _node_ids(owner) == []
        with pytest.raises(TokenRefusedError, match="revoked"):
            async with agent.restarted().connected(one.network, access):
                pass
        with pytest.raises(NodeNotFoundError, match="no node"):
            await owner.ask(RemoveNode(node_id="nobody"))


async def test_a_node_that_was_removed_comes_back_under_its_name(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner:
        async with one.agent("n1"):
            pass
        await clock.advance(14.0)
        await owner.ask(RemoveNode(node_id="n1"))
        token = await one.token(TokenKind.JOIN)
        wish = Join(token=token, node_id_wish="n1", csr_pem="", exact=True)
        async with rpc.dial(one.network, "127.0.0.1", one.port, tls=None, timeout_s=CALL_S) as peer:
            assert (await peer.call(wish, timeout_s=CALL_S)).node_id == "n1"


async def test_only_an_owner_removes_nodes(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        token = await one.token(TokenKind.USER, tenant="team")
        async with one.client(token) as user:
            with pytest.raises(GenieError, match="user token may not"):
                await user.ask(RemoveNode(node_id="n1"))


async def test_a_node_id_that_was_asked_for_by_name_is_that_or_an_error(tmp_path: Path) -> None:
    async with standing(tmp_path) as one:
        await one.join("box")
        token = await one.token(TokenKind.JOIN)
        wish = Join(token=token, node_id_wish="box", csr_pem="", exact=True)
        async with rpc.dial(one.network, "127.0.0.1", one.port, tls=None, timeout_s=CALL_S) as peer:
            with pytest.raises(UsageError, match="'box' is taken"):
                await peer.call(wish, timeout_s=CALL_S)
            # The refusal did not use the token up.
            free = Join(token=token, node_id_wish="other", csr_pem="", exact=True)
            assert (await peer.call(free, timeout_s=CALL_S)).node_id == "other"


async def test_the_owner_ends_what_a_node_that_is_gone_still_holds(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner:
        async with one.agent("n1") as agent:
            job = await owner.submit("work", gpus=1)
            await agent.confirm(await launched_while(clock, agent))
        # A controller at an address that the node was never told of may not reclaim by itself.
        assert one.controller is not None
        record = one.controller._ledger.nodes["n1"]
        one.controller._ledger.nodes._rows["n1"] = msgspec.structs.replace(
            record, controllers=("elsewhere:1",)
        )
        await clock.advance(30.0)
        assert await owner.held("n1") == [job.job_id]
        await owner.ask(RemoveNode(node_id="n1"))
        assert await _node_ids(owner) == []
        assert (await owner.job(job.job_id)).state is JobState.LOST


async def test_a_gpu_job_waits_for_a_gpu_node_that_left_and_is_not_put_on_a_cpu(tmp_path: Path) -> None:
    async with (
        standing(tmp_path) as one,
        one.client() as owner,
        one.agent("cpus", vendor=Vendor.CPU),
        one.agent("gpus") as agent,
    ):
        await agent.leave()
        job = await owner.submit("train", gpus=1)
        assert job.state is JobState.QUEUED
        assert "gpus: it has left the cluster" in job.reason
        assert await _node_ids(owner) == ["cpus"]


async def test_a_node_that_was_granted_a_longer_time_is_reclaimed_only_after_that(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock, node_ttl_s=60.0) as one, one.client() as owner:
        async with one.agent("n1") as agent:
            job = await owner.submit("work", gpus=1)
            launch = await launched_while(clock, agent)
            await agent.confirm(launch)
        one.config = replace(one.config, node_ttl_s=10.0)
        await one.restart()
        async with one.client() as again:
            await clock.advance(40.0)
            assert (await again.job(job.job_id)).state is JobState.RUNNING
            await clock.advance(20.0)

            async def lost() -> bool:
                await clock.advance(0.5)
                return (await again.job(job.job_id)).state is JobState.LOST

            await until(lost, what="the job is lost")


async def test_a_node_that_comes_back_at_the_last_moment_keeps_its_job(tmp_path: Path) -> None:
    clock = FakeClock()
    async with standing(tmp_path, clock=clock) as one, one.client() as owner, one.agent("n1") as agent:
        job = await owner.submit("work", gpus=1)
        launch = await launched_while(clock, agent)
        await agent.confirm(launch)
        assert one.controller is not None
        # The decision to reclaim is taken, and the write waits behind a heartbeat.
        await one.controller._jobs.lose(
            job.job_id, epoch=launch.placement.epoch, reason="silent", still=lambda: False
        )
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_a_write_during_a_reload_is_not_forgotten(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        job = await owner.submit("work", gpus=1)
        launch = await agent.start_next()
        assert one.controller is not None
        ledger = one.controller._ledger
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(ledger.load())
            agent.end(launch)
            group.create_task(agent.beat())
        assert (await owner.job(job.job_id)).state is JobState.SUCCEEDED
        assert ledger.jobs[job.job_id].state is JobState.SUCCEEDED
        assert ledger.holds["n1"].holds == ()


def test_times_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="node_suspect_s"):
        check_times(ControllerConfig(node_suspect_s=20.0, node_ttl_s=10.0))
