"""The other nodes of the cluster as a session knows them.

The list comes from the controller. A node without a new heartbeat for `timeout_s`, by the session's own
clock, counts as disconnected, whether the node or the controller is unresponsive. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from genie.model.event import EventType
from genie.model.node import NodeInfo, NodeStatus

_UNRESPONSIVE_STATUSES = (NodeStatus.SUSPECT, NodeStatus.DISCONNECTED)


@dataclass(frozen=True, slots=True)
class PeerChange:
    """One change of the list, to be published as an event."""

    type: EventType
    node_id: str
    reason: str


class PeerTable:
    """`nodes` is replaced, never modified, so that other threads can read it without a lock."""

    def __init__(self, *, timeout_s: float) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self._heartbeat_timeout_s = timeout_s
        self._last_new_heartbeat_s_by_node: dict[str, float] = {}

    def replace_nodes(self, nodes: Iterable[NodeInfo], *, now_s: float) -> list[PeerChange]:
        """Replaces the list by that of the controller; returns the changes."""
        before, after = self.nodes, {node.node_id: node for node in nodes}
        for node_id, node in after.items():
            old = before.get(node_id)
            if (
                old is None
                or _is_newer_report(old, node)
                or node_id not in self._last_new_heartbeat_s_by_node
            ):
                self._last_new_heartbeat_s_by_node[node_id] = now_s
        self._last_new_heartbeat_s_by_node = {
            node_id: self._last_new_heartbeat_s_by_node[node_id] for node_id in after
        }
        self.nodes = self._mark_expired_as_disconnected(after, now_s)
        removed = [
            PeerChange(EventType.NODE_LOST, node_id, "the controller no longer lists it")
            for node_id in before.keys() - after.keys()
        ]
        return [*removed, *self._find_changes_since(before)]

    def disconnect_expired_nodes(self, *, now_s: float) -> list[PeerChange]:
        """Marks nodes as disconnected after a failed heartbeat; returns the changes."""
        before = self.nodes
        self.nodes = self._mark_expired_as_disconnected(before, now_s)
        return self._find_changes_since(before)

    def _mark_expired_as_disconnected(self, nodes: dict[str, NodeInfo], now_s: float) -> dict[str, NodeInfo]:
        reason = f"no heartbeat for {self._heartbeat_timeout_s:g} s"
        return {
            node_id: msgspec.structs.replace(node, status=NodeStatus.DISCONNECTED, status_reason=reason)
            if now_s - self._last_new_heartbeat_s_by_node[node_id] >= self._heartbeat_timeout_s
            and node.status is not NodeStatus.DISCONNECTED
            else node
            for node_id, node in nodes.items()
        }

    def _find_changes_since(self, before: dict[str, NodeInfo]) -> list[PeerChange]:
        changes: list[PeerChange] = []
        for node_id, node in self.nodes.items():
            old = before.get(node_id)
            if old is None:
                if node.status is not NodeStatus.DISCONNECTED:
                    changes.append(
                        PeerChange(EventType.NODE_JOINED, node_id, f"{node_id} has joined the cluster")
                    )
            elif old.status is not node.status:
                changes.append(
                    PeerChange(
                        _event_type_for_status_change(old.status, node.status),
                        node_id,
                        _status_change_reason(old, node),
                    )
                )
        return changes


def _is_newer_report(old: NodeInfo, node: NodeInfo) -> bool:
    """Whether the node has sent a heartbeat or has been restarted in between. A new leader has received no
    heartbeat yet: that says nothing."""
    has_new_heartbeat = node.last_heartbeat not in (0.0, old.last_heartbeat)
    return has_new_heartbeat or node.incarnation != old.incarnation


def _event_type_for_status_change(old: NodeStatus, new: NodeStatus) -> EventType:
    if new is NodeStatus.DISCONNECTED:
        return EventType.NODE_LOST
    if new is NodeStatus.SUSPECT:
        return EventType.NODE_SUSPECT
    return EventType.NODE_RECOVERED if old in _UNRESPONSIVE_STATUSES else EventType.HEALTH_CHANGED


def _status_change_reason(old: NodeInfo, new: NodeInfo) -> str:
    return f"{old.status} -> {new.status}" + (f": {new.status_reason}" if new.status_reason else "")
