"""The list of nodes of a session and its expiry."""

from __future__ import annotations

from genie.cluster.lifecycle.peers import PeerTable
from genie.model.event import EventType
from genie.model.node import NodeStatus
from tests.cluster.small_controller import make_node


def test_new_node_is_reported_as_joined() -> None:
    table = PeerTable(timeout_s=10)
    (change,) = table.replace_nodes([make_node("a")], now_s=0)
    assert (change.type, change.node_id) == (EventType.NODE_JOINED, "a")
    assert change.reason == "a has joined the cluster", "not the host name, which two nodes may share"
    assert table.replace_nodes([make_node("a")], now_s=1) == []


def test_disconnected_new_node_is_not_reported_as_joined() -> None:
    table = PeerTable(timeout_s=10)
    assert table.replace_nodes([make_node("a", status=NodeStatus.DISCONNECTED)], now_s=0) == []
    (back,) = table.replace_nodes([make_node("a", last_heartbeat=2.0)], now_s=1)
    assert back.type is EventType.NODE_RECOVERED


def test_node_that_is_no_longer_listed_is_reported_as_lost() -> None:
    table = PeerTable(timeout_s=10)
    table.replace_nodes([make_node("a"), make_node("b")], now_s=0)
    (change,) = table.replace_nodes([make_node("b")], now_s=1)
    assert (change.type, change.node_id) == (EventType.NODE_LOST, "a")
    assert set(table.nodes) == {"b"}


def test_each_status_change_is_reported_once() -> None:
    table = PeerTable(timeout_s=100)
    table.replace_nodes([make_node("a")], now_s=0)
    changes = [
        [change.type for change in table.replace_nodes([make_node("a", status=status)], now_s=1)]
        for status in (
            NodeStatus.SUSPECT,
            NodeStatus.SUSPECT,
            NodeStatus.DISCONNECTED,
            NodeStatus.HEALTHY,
            NodeStatus.DEGRADED,
        )
    ]
    assert changes == [
        [EventType.NODE_SUSPECT],
        [],
        [EventType.NODE_LOST],
        [EventType.NODE_RECOVERED],
        [EventType.HEALTH_CHANGED],
    ]


def test_node_without_heartbeat_is_disconnected_until_the_next_one() -> None:
    table = PeerTable(timeout_s=10)
    table.replace_nodes([make_node("a", last_heartbeat=1.0)], now_s=0)
    assert table.replace_nodes([make_node("a", last_heartbeat=1.0)], now_s=9.9) == []
    (lost,) = table.replace_nodes([make_node("a", last_heartbeat=1.0)], now_s=10)
    assert (lost.type, lost.reason) == (
        EventType.NODE_LOST,
        "healthy -> disconnected: no heartbeat for 10 s",
    )
    assert table.nodes["a"].status is NodeStatus.DISCONNECTED
    (back,) = table.replace_nodes([make_node("a", last_heartbeat=2.0)], now_s=11)
    assert back.type is EventType.NODE_RECOVERED


def test_unknown_heartbeat_after_a_failover_is_not_a_heartbeat() -> None:
    table = PeerTable(timeout_s=10)
    table.replace_nodes([make_node("a", last_heartbeat=1.0)], now_s=0)
    table.replace_nodes([make_node("a", last_heartbeat=0.0)], now_s=5)
    (lost,) = table.replace_nodes([make_node("a", last_heartbeat=0.0)], now_s=10)
    assert lost.type is EventType.NODE_LOST


def test_unresponsive_controller_disconnects_all_nodes() -> None:
    table = PeerTable(timeout_s=10)
    table.replace_nodes([make_node("a"), make_node("b")], now_s=0)
    assert table.disconnect_expired_nodes(now_s=9) == []
    assert {change.node_id for change in table.disconnect_expired_nodes(now_s=10)} == {"a", "b"}
    assert table.disconnect_expired_nodes(now_s=11) == []


def test_nodes_dictionary_is_replaced_and_not_modified() -> None:
    table = PeerTable(timeout_s=10)
    table.replace_nodes([make_node("a")], now_s=0)
    kept = table.nodes
    table.replace_nodes([make_node("b")], now_s=1)
    assert set(kept) == {"a"}
