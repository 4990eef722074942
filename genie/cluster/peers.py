"""Who else is in the cluster, as this process knows it: the controller's word, aged by our own clock.

A node whose heartbeat does not move on for `timeout_s` counts as disconnected here, whether the node
or the controller went silent. Pure: the time is an argument, and what changed is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from genie.model.event import EventType
from genie.model.node import NodeInfo, NodeStatus

_DOWN = (NodeStatus.SUSPECT, NodeStatus.DISCONNECTED)


@dataclass(frozen=True, slots=True)
class PeerChange:
    """One thing that is different from before, as an event wants it."""

    type: EventType
    node_id: str
    reason: str


class PeerTable:
    """`nodes` is replaced, never changed, so that other threads can read it without a lock."""

    def __init__(self, *, timeout_s: float) -> None:
        self.nodes: dict[str, NodeInfo] = {}
        self._timeout_s = timeout_s
        self._moved_s: dict[str, float] = {}

    def heard(self, nodes: Iterable[NodeInfo], *, now_s: float) -> list[PeerChange]:
        """Takes the controller's list as the new truth."""
        before, after = self.nodes, {node.node_id: node for node in nodes}
        for node_id, node in after.items():
            old = before.get(node_id)
            if old is None or _beat(old) != _beat(node) or node_id not in self._moved_s:
                self._moved_s[node_id] = now_s
        self._moved_s = {node_id: self._moved_s[node_id] for node_id in after}
        self.nodes = self._with_silent_ones(after, now_s)
        gone = [
            PeerChange(EventType.NODE_LOST, node_id, "the controller no longer lists it")
            for node_id in before.keys() - after.keys()
        ]
        return [*gone, *self._compared(before)]

    def aged(self, *, now_s: float) -> list[PeerChange]:
        """Nothing was heard; time has passed."""
        before = self.nodes
        self.nodes = self._with_silent_ones(before, now_s)
        return self._compared(before)

    def _with_silent_ones(self, nodes: dict[str, NodeInfo], now_s: float) -> dict[str, NodeInfo]:
        reason = f"no heartbeat for {self._timeout_s:g} s"
        return {
            node_id: msgspec.structs.replace(node, status=NodeStatus.DISCONNECTED, status_reason=reason)
            if now_s - self._moved_s[node_id] >= self._timeout_s
            and node.status is not NodeStatus.DISCONNECTED
            else node
            for node_id, node in nodes.items()
        }

    def _compared(self, before: dict[str, NodeInfo]) -> list[PeerChange]:
        changes: list[PeerChange] = []
        for node_id, node in self.nodes.items():
            old = before.get(node_id)
            if old is None:
                if node.status is not NodeStatus.DISCONNECTED:
                    changes.append(PeerChange(EventType.NODE_JOINED, node_id, f"{node_id} is in the cluster"))
            elif old.status is not node.status:
                changes.append(PeerChange(_kind(old.status, node.status), node_id, _why(old, node)))
        return changes


def _beat(node: NodeInfo) -> tuple[float, int]:
    return node.last_heartbeat, node.incarnation


def _kind(old: NodeStatus, new: NodeStatus) -> EventType:
    if new is NodeStatus.DISCONNECTED:
        return EventType.NODE_LOST
    if new is NodeStatus.SUSPECT:
        return EventType.NODE_SUSPECT
    return EventType.NODE_RECOVERED if old in _DOWN else EventType.HEALTH_CHANGED


def _why(old: NodeInfo, new: NodeInfo) -> str:
    return f"{old.status} -> {new.status}" + (f": {new.status_reason}" if new.status_reason else "")
