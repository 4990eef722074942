"""Gossip makes a node suspect earlier; heartbeats take precedence, and nothing is reclaimed earlier."""

from __future__ import annotations

from genie.config import ControllerConfig
from genie.controller.nodes.membership import GOSSIP_SUSPECT_SHARE, Membership
from genie.model.member import MemberState
from genie.model.node import NodeInfo, NodeStatus
from tests.controller.nodes.test_snapshots import FakePeer
from tests.fakes.agent import make_node_info

CONFIG = ControllerConfig()
EARLY_S = GOSSIP_SUSPECT_SHARE * CONFIG.node_suspect_s
NODE = make_node_info("n1")
DEAD = {"n1": MemberState.DEAD}


def make_membership() -> Membership:
    """A node that sent a heartbeat at 0 s."""
    membership = Membership(CONFIG)
    membership.register_node(NODE, FakePeer(), now_s=0.0, now_wall_s=0.0)  # type: ignore[arg-type]
    membership.record_heartbeat(NODE, now_s=0.0, now_wall_s=0.0)
    return membership


def info_at(membership: Membership, now_s: float) -> NodeInfo:
    return membership.current_info(NODE, now_s)


def test_node_without_heartbeat_that_gossip_reports_dead_is_suspect_earlier() -> None:
    membership = make_membership()
    membership.set_unresponsive_members(DEAD, now_s=1.0)
    assert info_at(membership, EARLY_S - 0.1).status is NodeStatus.HEALTHY
    suspect = info_at(membership, EARLY_S)
    assert suspect.status is NodeStatus.SUSPECT
    assert suspect.status_reason == "no heartbeat for 1 s; gossip reports that it is dead"
    assert membership.blocked_reason(suspect).startswith("suspect: ")


def test_status_is_evaluated_again_when_gossip_makes_the_node_suspect() -> None:
    membership = make_membership()
    assert membership.current_info_valid_until_s("n1", 0.5) > EARLY_S
    changed: list[str] = []
    membership.add_listener(changed.append)
    membership.set_unresponsive_members({"n1": MemberState.SUSPECT, "unknown": MemberState.DEAD}, now_s=0.5)
    assert changed == ["n1"]
    assert membership.current_info_valid_until_s("n1", 0.5) <= EARLY_S
    membership.set_unresponsive_members({}, now_s=0.6)
    assert changed == ["n1", "n1"]
    assert membership.current_info_valid_until_s("n1", 0.6) > EARLY_S


def test_heartbeat_disproves_earlier_reports_of_gossip() -> None:
    membership = make_membership()
    membership.set_unresponsive_members(DEAD, now_s=1.0)
    membership.record_heartbeat(NODE, now_s=1.2, now_wall_s=1.2)
    membership.set_unresponsive_members(DEAD, now_s=1.3)  # it still reports the same
    assert info_at(membership, 1.2 + CONFIG.node_suspect_s - 0.1).status is NodeStatus.HEALTHY
    assert info_at(membership, 1.2 + CONFIG.node_suspect_s).status is NodeStatus.SUSPECT


def test_gossip_does_not_make_a_node_healthy() -> None:
    membership = make_membership()
    membership.set_unresponsive_members({}, now_s=3.0)
    assert info_at(membership, CONFIG.node_suspect_s).status is NodeStatus.SUSPECT


def test_gossip_reclaims_and_disconnects_nothing_earlier() -> None:
    plain, reported = make_membership(), make_membership()
    reported.set_unresponsive_members(DEAD, now_s=0.5)
    for tenth in range(300):
        now_s = tenth / 10
        assert reported.is_reclaimable("n1", now_s) == plain.is_reclaimable("n1", now_s)
        assert reported.is_in_contact("n1", now_s) == plain.is_in_contact("n1", now_s)
        is_disconnected = info_at(reported, now_s).status is NodeStatus.DISCONNECTED
        assert is_disconnected == (info_at(plain, now_s).status is NodeStatus.DISCONNECTED)
