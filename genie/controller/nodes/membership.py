"""The failure detector: the registered nodes, their connections, and the time since their last heartbeat.

A node without heartbeats is first suspect, then disconnected, then its jobs may be reclaimed. A new term of
leadership counts from its own start. The current time is an argument. Registration and heartbeats are
handled in agents.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from genie.config import ControllerConfig
from genie.model.node import NodeInfo, NodeStatus
from genie.runtime.rpc import Peer

_BLOCKING_STATUS = frozenset(
    {NodeStatus.UNHEALTHY, NodeStatus.CRITICAL, NodeStatus.SUSPECT, NodeStatus.DISCONNECTED}
)
_ROUNDING_S = 0.001


@dataclass(slots=True)
class RegisteredNode:
    """A node that has registered with this controller since it started."""

    reported: NodeInfo
    """As the node last described itself, after validation."""
    info: NodeInfo
    """The same with the status that the controller gives it."""
    peer: Peer
    heartbeat_s: float
    heartbeat_at: float
    has_heartbeat: bool = False
    """Until its first heartbeat is acknowledged, an agent may start nothing."""


class Membership:
    def __init__(self, config: ControllerConfig) -> None:
        self._suspect_s = config.node_suspect_s
        self._disconnected_s = config.node_ttl_s
        self._grace_s = config.node_reclaim_grace_s
        self._members: dict[str, RegisteredNode] = {}
        self._term_began_s = 0.0
        self._listeners: list[Callable[[str], None]] = []
        self._term_listeners: list[Callable[[], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the ID of each node that registers, sends a heartbeat, leaves or loses its
        connection."""
        self._listeners.append(listener)

    def add_term_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` at the beginning of each term of leadership."""
        self._term_listeners.append(listener)

    def begin_term(self, now_s: float) -> None:
        self._term_began_s = now_s
        for listener in self._term_listeners:
            listener()

    def get(self, node_id: str) -> RegisteredNode | None:
        return self._members.get(node_id)

    def members(self) -> list[RegisteredNode]:
        return list(self._members.values())

    def attach(self, info: NodeInfo, peer: Peer, *, now_s: float, now_at: float) -> Peer | None:
        """Register a node with its connection; return its previous connection if that is another one."""
        before = self._members.get(info.node_id)
        self._members[info.node_id] = RegisteredNode(info, _with_own_status(info), peer, now_s, now_at)
        peer.set_close_listener(partial(self._notify, info.node_id))
        self._notify(info.node_id)
        return before.peer if before is not None and before.peer is not peer else None

    def detach(self, node_id: str) -> None:
        """Remove a node that has left."""
        self._members.pop(node_id, None)
        self._notify(node_id)

    def record_heartbeat(self, info: NodeInfo, *, now_s: float, now_at: float) -> None:
        member = self._members[info.node_id]
        if info is not member.reported:
            member.reported, member.info = info, _with_own_status(info)
        member.heartbeat_s, member.heartbeat_at = now_s, now_at
        member.has_heartbeat = True
        self._notify(info.node_id)

    def connection(self, node_id: str) -> Peer | None:
        member = self._members.get(node_id)
        return member.peer if member is not None and not member.peer.is_closed else None

    def silence_s(self, node_id: str, now_s: float) -> float:
        """Seconds since the last heartbeat or since this term began, whichever was later."""
        member = self._members.get(node_id)
        last_s = self._term_began_s if member is None else max(member.heartbeat_s, self._term_began_s)
        return now_s - last_s

    def is_in_contact(self, node_id: str, now_s: float) -> bool:
        """Whether the node has sent a heartbeat in this term and is not suspect."""
        member = self._members.get(node_id)
        if member is None or not member.has_heartbeat or member.heartbeat_s < self._term_began_s:
            return False
        return self.silence_s(node_id, now_s) < self._suspect_s

    def is_reclaimable(self, node_id: str, now_s: float, *, granted_s: float = 0.0) -> bool:
        """Whether the node's jobs have ended for certain. `granted_s` is the dead-man timeout that the node
        was given: an earlier controller may have given a longer one."""
        return self.reclaimable_in_s(node_id, now_s, granted_s=granted_s) <= 0

    def reclaimable_in_s(self, node_id: str, now_s: float, *, granted_s: float) -> float:
        """Seconds until `is_reclaimable`, if no heartbeat arrives; 0 or less if it is."""
        return max(self._disconnected_s, granted_s) + self._grace_s - self.silence_s(node_id, now_s)

    def current_info(self, registered: NodeInfo, now_s: float) -> NodeInfo:
        """Return the node's latest report with its current status."""
        member = self._members.get(registered.node_id)
        if member is None:
            return self._with_status(registered, now_s, unseen="no heartbeat since this controller started")
        info = msgspec.structs.replace(member.info, last_heartbeat=member.heartbeat_at)
        return self._with_status(info, now_s, unseen="")

    def unchanged_until_s(self, node_id: str, now_s: float) -> float:
        """Time until which `current_info` stays the same without a heartbeat. For a suspect node that is at
        most a second: its status reason contains the elapsed seconds."""
        silence_s = self.silence_s(node_id, now_s)
        if node_id not in self._members:
            next_s = self._disconnected_s if silence_s < self._disconnected_s else math.inf
        elif silence_s < self._suspect_s:
            next_s = self._suspect_s
        else:
            next_s = math.floor(silence_s) + 1.0
            if silence_s < self._disconnected_s:
                next_s = min(next_s, self._disconnected_s)
        return max(now_s - silence_s + next_s - _ROUNDING_S, now_s)

    def blocked_reason(self, info: NodeInfo) -> str:
        """Why the node accepts no placement; empty if it does. Takes the result of `current_info`."""
        if info.status in _BLOCKING_STATUS:
            return f"{info.status}" + (f": {info.status_reason}" if info.status_reason else "")
        if self.connection(info.node_id) is None:
            return "its agent is not connected"
        if info.closed:
            return info.closed
        return "" if self._members[info.node_id].has_heartbeat else "no heartbeat yet"

    def _notify(self, node_id: str) -> None:
        for listener in self._listeners:
            listener(node_id)

    def _with_status(self, info: NodeInfo, now_s: float, *, unseen: str) -> NodeInfo:
        silence_s = self.silence_s(info.node_id, now_s)
        if silence_s < self._suspect_s and not unseen:
            return info
        reason = unseen or f"no heartbeat for {math.floor(silence_s)} s"
        if silence_s >= self._disconnected_s:
            return msgspec.structs.replace(info, status=NodeStatus.DISCONNECTED, status_reason=reason)
        return msgspec.structs.replace(info, status=NodeStatus.SUSPECT, status_reason=reason)


def _with_own_status(info: NodeInfo) -> NodeInfo:
    """Replace a status that only the controller can determine by HEALTHY."""
    if info.status in (NodeStatus.INITIALIZING, NodeStatus.SUSPECT, NodeStatus.DISCONNECTED):
        return msgspec.structs.replace(info, status=NodeStatus.HEALTHY, status_reason="")
    return info
