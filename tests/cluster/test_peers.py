"""What a session knows of the other nodes: the controller's word, aged by its own clock."""

from __future__ import annotations

from genie.cluster.peers import PeerTable
from genie.model.event import EventType
from genie.model.node import NodeStatus
from tests.cluster.small_controller import node


def test_a_node_that_is_new_has_joined() -> None:
    table = PeerTable(timeout_s=10)
    (change,) = table.heard([node("a")], now_s=0)
    assert (change.type, change.node_id) == (EventType.NODE_JOINED, "a")
    assert change.reason == "a is in the cluster", "not the host name, which two nodes may share"
    assert table.heard([node("a")], now_s=1) == []


def test_a_node_that_is_away_when_it_is_first_seen_has_not_joined() -> None:
    table = PeerTable(timeout_s=10)
    assert table.heard([node("a", status=NodeStatus.DISCONNECTED)], now_s=0) == []
    (back,) = table.heard([node("a", last_heartbeat=2.0)], now_s=1)
    assert back.type is EventType.NODE_RECOVERED


def test_a_node_that_is_no_longer_listed_is_lost_and_gone() -> None:
    table = PeerTable(timeout_s=10)
    table.heard([node("a"), node("b")], now_s=0)
    (change,) = table.heard([node("b")], now_s=1)
    assert (change.type, change.node_id) == (EventType.NODE_LOST, "a")
    assert set(table.nodes) == {"b"}


def test_each_change_of_status_is_told_once() -> None:
    table = PeerTable(timeout_s=100)
    table.heard([node("a")], now_s=0)
    told = [
        [change.type for change in table.heard([node("a", status=status)], now_s=1)]
        for status in (
            NodeStatus.SUSPECT,
            NodeStatus.SUSPECT,
            NodeStatus.DISCONNECTED,
            NodeStatus.HEALTHY,
            NodeStatus.DEGRADED,
        )
    ]
    assert told == [
        [EventType.NODE_SUSPECT],
        [],
        [EventType.NODE_LOST],
        [EventType.NODE_RECOVERED],
        [EventType.HEALTH_CHANGED],
    ]


def test_silence_makes_a_node_disconnected_and_a_new_heartbeat_brings_it_back() -> None:
    table = PeerTable(timeout_s=10)
    table.heard([node("a", last_heartbeat=1.0)], now_s=0)
    assert table.heard([node("a", last_heartbeat=1.0)], now_s=9.9) == []
    (lost,) = table.heard([node("a", last_heartbeat=1.0)], now_s=10)
    assert (lost.type, lost.reason) == (
        EventType.NODE_LOST,
        "healthy -> disconnected: no heartbeat for 10 s",
    )
    assert table.nodes["a"].status is NodeStatus.DISCONNECTED
    (back,) = table.heard([node("a", last_heartbeat=2.0)], now_s=11)
    assert back.type is EventType.NODE_RECOVERED


def test_a_controller_that_is_silent_makes_all_of_them_disconnected() -> None:
    table = PeerTable(timeout_s=10)
    table.heard([node("a"), node("b")], now_s=0)
    assert table.aged(now_s=9) == []
    assert {change.node_id for change in table.aged(now_s=10)} == {"a", "b"}
    assert table.aged(now_s=11) == []


def test_the_dictionary_is_replaced_and_never_changed() -> None:
    table = PeerTable(timeout_s=10)
    table.heard([node("a")], now_s=0)
    kept = table.nodes
    table.heard([node("b")], now_s=1)
    assert set(kept) == {"a"}
