"""Nodes that leave, are drained, or are removed by the owner."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from genie.config import ControllerConfig
from genie.controller.jobs.lifecycle import LostWorker
from genie.controller.nodes.admission import check_failure_timeouts
from genie.errors import ConfigError, GenieError, NodeError, NodeNotFoundError, TokenRefusedError, UsageError
from genie.model.job import JobState
from genie.model.messages import DrainNode, GetStatus, ListNodes, RemoveNode, UndrainNode
from genie.model.messages.handshake import Join
from genie.model.node import Vendor
from genie.model.tenant import TokenKind
from genie.runtime import rpc
from tests.controller.running_controller import (
    CALL_S,
    Client,
    advance_until_launch,
    job_spec,
    running_controller,
)
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


async def _list_node_ids(owner: Client) -> list[str]:
    return [view.info.node_id for view in (await owner.ask(ListNodes())).nodes]


async def test_node_that_left_is_not_listed_or_counted(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        await agent.leave()
        assert await _list_node_ids(owner) == []
        assert (await owner.ask(GetStatus())).gpus_total == 0


async def test_node_that_left_may_register_again(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(make_node_info("n1")).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
            await agent.leave()
        async with agent.restarted().connected(one.network, access) as again:
            await again.register()
            await again.beat()
            assert await _list_node_ids(owner) == ["n1"]


async def test_node_with_a_job_may_not_leave(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        job = await owner.submit("work", gpus=1)
        await agent.start_next()
        with pytest.raises(NodeError, match="still has 1 workers of jobs"):
            await agent.leave()
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_drained_node_gets_no_jobs_until_undrained_even_after_its_agent_restarts(
    tmp_path: Path,
) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(make_node_info("n1")).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
            running = await owner.submit("before", gpus=1)
            await agent.start_next()
            await owner.ask(DrainNode(node_id="n1", reason="new fans"))
            assert (await owner.ask(ListNodes())).nodes[0].drained == "draining: new fans"
            waiting = await owner.submit("after", cpus=1)

            async def is_notified() -> bool:
                return "draining: new fans" in (await owner.job(waiting.job_id)).reason

            await until(is_notified)
            assert (await owner.job(running.job_id)).state is JobState.RUNNING
        async with agent.restarted().connected(one.network, access) as again:
            await again.register()
            await again.beat()
            assert (await owner.ask(ListNodes())).nodes[0].drained == "draining: new fans"
            await owner.ask(UndrainNode(node_id="n1"))
            assert (await again.next_launch()).job_id == waiting.job_id


async def test_draining_again_replaces_the_reason_only_if_one_is_given(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1"):

        async def drained(reason: str = "") -> str:
            await owner.ask(DrainNode(node_id="n1", reason=reason))
            return (await owner.ask(ListNodes())).nodes[0].drained

        assert await drained() == "draining"
        assert await drained("new fans") == "draining: new fans"
        assert await drained() == "draining: new fans"
        assert await drained("new disk") == "draining: new disk"
        await owner.ask(UndrainNode(node_id="n1"))
        assert await drained() == "draining"


async def test_drain_errors_are_explained_and_only_the_owner_drains(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1"):
        with pytest.raises(NodeNotFoundError, match="no node 'n9'"):
            await owner.ask(DrainNode(node_id="n9"))
        for reason in ("two\nlines", "x" * 300):
            with pytest.raises(UsageError, match="one line of at most 200"):
                await owner.ask(DrainNode(node_id="n1", reason=reason))
        assert (await owner.ask(ListNodes())).nodes[0].drained == ""


async def test_connected_node_cannot_be_removed(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1"):
        with pytest.raises(NodeError, match="is connected"):
            await owner.ask(RemoveNode(node_id="n1"))
        assert await _list_node_ids(owner) == ["n1"]


async def test_removed_node_is_rejected_with_its_old_token(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        access = await one.join("n1")
        async with FakeAgent(make_node_info("n1")).connected(one.network, access) as agent:
            await agent.register()
            await agent.beat()
        await clock.advance(3.0)
        with pytest.raises(NodeError, match=r"n1 is disconnected, .*: 3 s without a heartbeat") as caught:
            await owner.ask(RemoveNode(node_id="n1"))
        assert caught.value.hint == "try again in 10 s"
        await clock.advance(10.0)
        await owner.ask(RemoveNode(node_id="n1"))
        assert await _list_node_ids(owner) == []
        with pytest.raises(TokenRefusedError, match="revoked"):
            async with agent.restarted().connected(one.network, access):
                pass
        with pytest.raises(NodeNotFoundError, match="no node"):
            await owner.ask(RemoveNode(node_id="nobody"))


async def test_removed_node_may_join_again_with_its_id(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        async with one.agent("n1"):
            pass
        await clock.advance(14.0)
        await owner.ask(RemoveNode(node_id="n1"))
        token = await one.token(TokenKind.JOIN)
        wish = Join(token=token, requested_node_id="n1", csr_pem="", must_get_requested_id=True)
        async with rpc.dial(one.network, "127.0.0.1", one.port, tls=None, timeout_s=CALL_S) as peer:
            assert (await peer.call(wish, timeout_s=CALL_S)).node_id == "n1"


async def test_only_the_owner_removes_nodes(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        token = await one.token(TokenKind.USER, tenant="team")
        async with one.client(token) as user:
            with pytest.raises(GenieError, match="user tokens cannot"):
                await user.ask(RemoveNode(node_id="n1"))


async def test_exact_node_id_that_is_taken_is_rejected(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        await one.join("box")
        token = await one.token(TokenKind.JOIN)
        wish = Join(token=token, requested_node_id="box", csr_pem="", must_get_requested_id=True)
        async with rpc.dial(one.network, "127.0.0.1", one.port, tls=None, timeout_s=CALL_S) as peer:
            with pytest.raises(UsageError, match="'box' is already in use") as caught:
                await peer.call(wish, timeout_s=CALL_S)
            assert "if it is the same machine, 'genie forget box' first" in caught.value.hint
            # The rejection did not consume the token.
            free = Join(token=token, requested_node_id="other", csr_pem="", must_get_requested_id=True)
            assert (await peer.call(free, timeout_s=CALL_S)).node_id == "other"


async def test_removing_a_node_ends_its_jobs(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner:
        async with one.agent("n1") as agent:
            job = await owner.submit("work", gpus=1)
            await agent.confirm(await advance_until_launch(clock, agent))
        # A controller that the node does not know may not reclaim its jobs.
        assert one.controller is not None
        record = one.controller._ledger.nodes["n1"]
        one.controller._ledger.nodes._rows["n1"] = msgspec.structs.replace(
            record, controllers=("elsewhere:1",)
        )
        await clock.advance(30.0)
        assert await owner.held("n1") == [job.job_id]
        await owner.ask(RemoveNode(node_id="n1"))
        assert await _list_node_ids(owner) == []
        assert (await owner.job(job.job_id)).state is JobState.LOST


async def test_gpu_job_is_pending_while_the_gpu_nodes_have_left(tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.agent("cpus", vendor=Vendor.CPU),
        one.agent("gpus") as agent,
    ):
        await agent.leave()
        job = await owner.submit("train", gpus=1)
        assert job.state is JobState.QUEUED
        assert "gpus: it has left the cluster" in job.reason
        assert await _list_node_ids(owner) == ["cpus"]


async def test_jobs_of_a_node_are_reclaimed_after_its_longer_dead_man_timeout(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock, node_ttl_s=60.0) as one, one.client() as owner:
        async with one.agent("n1") as agent:
            job = await owner.submit_spec(job_spec(preemptible=True))
            launch = await advance_until_launch(clock, agent)
            await agent.confirm(launch)
        one.config = replace(one.config, node_ttl_s=10.0)
        await one.restart()
        async with one.client() as again:
            await clock.advance(40.0)
            assert (await again.job(job.job_id)).state is JobState.RUNNING
            await clock.advance(20.0)

            async def is_queued_again() -> bool:
                await clock.advance(0.5)
                return (await again.job(job.job_id)).state is JobState.QUEUED

            await until(is_queued_again, what="the job is queued again")


async def test_node_that_reconnects_before_the_reclaim_keeps_its_job(tmp_path: Path) -> None:
    clock = FakeClock()
    async with (
        running_controller(tmp_path, clock=clock) as one,
        one.client() as owner,
        one.agent("n1") as agent,
    ):
        job = await owner.submit("work", gpus=1)
        launch = await advance_until_launch(clock, agent)
        await agent.confirm(launch)
        assert one.controller is not None
        # The reclaim is decided, and its write is queued behind a heartbeat.
        await one.controller._jobs.lifecycle.record_lost_workers(
            [LostWorker(job.job_id, "n1", launch.placement.epoch, "silent", lambda: False)]
        )
        assert (await owner.job(job.job_id)).state is JobState.RUNNING


async def test_write_during_a_reload_of_the_ledger_is_not_lost(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one, one.client() as owner, one.agent("n1") as agent:
        job = await owner.submit("work", gpus=1)
        launch = await agent.start_next()
        assert one.controller is not None
        ledger = one.controller._ledger
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(ledger.load_tables())
            agent.end(launch)
            group.create_task(agent.beat())
        assert (await owner.job(job.job_id)).state is JobState.SUCCEEDED
        assert ledger.jobs[job.job_id].state is JobState.SUCCEEDED
        assert ledger.holds["n1"].holds == ()


def test_node_suspect_time_above_the_node_lease_is_rejected() -> None:
    with pytest.raises(ConfigError, match="node_suspect_s"):
        check_failure_timeouts(ControllerConfig(node_suspect_s=20.0, node_ttl_s=10.0))


def test_dead_man_time_below_the_duration_of_a_failover_is_rejected() -> None:
    url = "etcd://127.0.0.1:2379"
    check_failure_timeouts(ControllerConfig(store=url))
    check_failure_timeouts(ControllerConfig(node_ttl_s=10.0))  # SQLite: there is no other controller
    with pytest.raises(ConfigError, match="node_ttl_s = 10 is too low") as caught:
        check_failure_timeouts(ControllerConfig(store=url, node_ttl_s=10.0))
    assert "leader lease 4.5 s" in caught.value.message
    assert "controller.node_ttl_s to 19.3 or more" in caught.value.hint
    with pytest.raises(ConfigError, match="node_ttl_s") as caught:
        check_failure_timeouts(ControllerConfig(store=url, leader_ttl_s=10.0))
    assert "lower controller.leader_ttl_s (10)" in caught.value.hint
