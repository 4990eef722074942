"""When nodes are lost and when their jobs may be reclaimed, also after a change of leadership."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.config import ControllerConfig
from genie.controller.nodes.membership import Membership
from genie.errors import NodeError
from genie.model.job import JobState
from genie.model.messages import RemoveNode
from genie.model.node import NodeStatus
from tests.controller.nodes.test_snapshots import FakePeer
from tests.controller.running_controller import job_spec, running_controller
from tests.fakes.agent import make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

CONFIG = ControllerConfig()
RECLAIMED_AFTER_S = CONFIG.node_ttl_s + CONFIG.node_reclaim_grace_s
LOST_IN_NEW_TERM_AFTER_S = 11.5
NODE = make_node_info("n1")
TERM_BEGAN_S = 1000.0


def make_membership_in_new_term(*, is_known: bool) -> Membership:
    """`is_known`: whether this controller received heartbeats of the node in an earlier term."""
    membership = Membership(CONFIG)
    if is_known:
        register_with_heartbeat(membership, TERM_BEGAN_S - 5.0)
    membership.begin_term(TERM_BEGAN_S)
    return membership


def register_with_heartbeat(membership: Membership, now_s: float) -> None:
    membership.register_node(NODE, FakePeer(), now_s=now_s, now_wall_s=now_s)  # type: ignore[arg-type]
    membership.record_heartbeat(NODE, now_s=now_s, now_wall_s=now_s)


def status_at(membership: Membership, now_s: float) -> NodeStatus:
    return membership.current_info(NODE, now_s).status


@pytest.mark.parametrize("is_known", [False, True])
def test_node_that_does_not_register_in_a_new_term_is_lost_earlier_but_not_reclaimed(is_known: bool) -> None:
    membership = make_membership_in_new_term(is_known=is_known)
    lost_s = TERM_BEGAN_S + LOST_IN_NEW_TERM_AFTER_S
    assert status_at(membership, lost_s - 0.1) is not NodeStatus.DISCONNECTED
    assert not membership.is_disconnected("n1", lost_s - 0.1)
    assert status_at(membership, lost_s) is NodeStatus.DISCONNECTED
    assert membership.is_disconnected("n1", lost_s)
    reclaimed_s = TERM_BEGAN_S + RECLAIMED_AFTER_S
    assert not membership.is_reclaimable("n1", reclaimed_s - 0.1)
    assert membership.is_reclaimable("n1", reclaimed_s)


@pytest.mark.parametrize("is_known", [False, True])
def test_status_is_evaluated_again_when_the_node_becomes_lost(is_known: bool) -> None:
    membership = make_membership_in_new_term(is_known=is_known)
    now_s = TERM_BEGAN_S
    while status_at(membership, now_s) is not NodeStatus.DISCONNECTED:
        until_s = membership.current_info_valid_until_s("n1", now_s)
        assert until_s <= TERM_BEGAN_S + LOST_IN_NEW_TERM_AFTER_S
        now_s = max(until_s, now_s + 0.01)


def test_node_that_registers_in_the_new_term_is_lost_after_its_full_time_to_live() -> None:
    membership = make_membership_in_new_term(is_known=True)
    registered_s = TERM_BEGAN_S + 4.0
    register_with_heartbeat(membership, registered_s)
    assert status_at(membership, registered_s + CONFIG.node_ttl_s - 0.1) is NodeStatus.SUSPECT
    assert status_at(membership, registered_s + CONFIG.node_ttl_s) is NodeStatus.DISCONNECTED


async def test_node_lost_in_a_new_term_keeps_its_jobs_until_they_have_ended_for_certain(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock, node_ttl_s=CONFIG.node_ttl_s) as one:
        async with one.client() as owner, one.agent() as agent:
            job = await owner.submit_spec(job_spec(preemptible=True))
            await agent.start_next()
        await one.restart()
        async with one.client() as owner:
            for _ in range(24):
                await clock.advance(0.5)
            assert (await owner.node("n1")).status is NodeStatus.DISCONNECTED
            with pytest.raises(NodeError, match="its jobs may still run"):
                await owner.ask(RemoveNode(node_id="n1"))
            for _ in range(20):
                await clock.advance(0.5)
            assert (await owner.job(job.job_id)).state is JobState.RUNNING
            assert await owner.held("n1") == [job.job_id]

            async def is_queued_again() -> bool:
                await clock.advance(0.5)
                return (await owner.job(job.job_id)).state is JobState.QUEUED

            await until(is_queued_again)
            assert await owner.held("n1") == []
