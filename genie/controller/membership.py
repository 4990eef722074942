"""Which nodes are heard from, and for how long those that are not have been silent.

A failure detector on one clock: suspect, then disconnected, then due to be reclaimed. A new term
of leadership counts every node's silence from its own start. Time comes in as an argument.
Not for: registration and what a node says (agents.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from genie.config import ControllerConfig
from genie.model.node import NodeInfo, NodeStatus
from genie.runtime.rpc import Peer

_CLOSED_STATUS = frozenset(
    {NodeStatus.UNHEALTHY, NodeStatus.CRITICAL, NodeStatus.SUSPECT, NodeStatus.DISCONNECTED}
)


@dataclass(slots=True)
class Member:
    """A node that has registered with this controller since it started."""

    said: NodeInfo
    """What it last said of itself, which was checked when it came."""
    info: NodeInfo
    """The same as we judge it."""
    peer: Peer
    heard_s: float
    heard_at: float
    has_beaten: bool = False
    """Until its first heartbeat is answered, an agent may run nothing."""


class Membership:
    def __init__(self, config: ControllerConfig) -> None:
        self._suspect_s = config.node_suspect_s
        self._down_s = config.node_ttl_s
        self._grace_s = config.reclaim_grace_s
        self._members: dict[str, Member] = {}
        self._term_began_s = 0.0
        self.on_change: list[Callable[[str], None]] = []
        """Told the id of each node that was heard, came or went."""
        self.on_term: list[Callable[[], None]] = []

    def begin_term(self, now_s: float) -> None:
        self._term_began_s = now_s
        for told in self.on_term:
            told()

    def get(self, node_id: str) -> Member | None:
        return self._members.get(node_id)

    def members(self) -> list[Member]:
        return list(self._members.values())

    def attach(self, info: NodeInfo, peer: Peer, *, now_s: float, now_at: float) -> Peer | None:
        """A node has registered over this connection; returns the one that it used before, if another."""
        before = self._members.get(info.node_id)
        self._members[info.node_id] = Member(info, _well(info), peer, now_s, now_at)
        self._changed(info.node_id)
        return before.peer if before is not None and before.peer is not peer else None

    def detach(self, node_id: str) -> None:
        """It has left in good order."""
        self._members.pop(node_id, None)
        self._changed(node_id)

    def heard(self, info: NodeInfo, *, now_s: float, now_at: float) -> None:
        member = self._members[info.node_id]
        if info is not member.said:
            member.said, member.info = info, _well(info)
        member.heard_s, member.heard_at = now_s, now_at
        member.has_beaten = True
        self._changed(info.node_id)

    def connection(self, node_id: str) -> Peer | None:
        member = self._members.get(node_id)
        return member.peer if member is not None and not member.peer.is_closed else None

    def silence_s(self, node_id: str, now_s: float) -> float:
        """Since its last heartbeat or since this term began, whichever was later."""
        member = self._members.get(node_id)
        heard_s = self._term_began_s if member is None else max(member.heard_s, self._term_began_s)
        return now_s - heard_s

    def is_in_contact(self, node_id: str, now_s: float) -> bool:
        """Whether it has been heard in this term, and lately."""
        member = self._members.get(node_id)
        if member is None or not member.has_beaten or member.heard_s < self._term_began_s:
            return False
        return self.silence_s(node_id, now_s) < self._suspect_s

    def is_reclaimable(self, node_id: str, now_s: float, *, granted_s: float = 0.0) -> bool:
        """`granted_s` is the time to live that the node was told: an earlier controller's may be longer."""
        return self.silence_s(node_id, now_s) >= max(self._down_s, granted_s) + self._grace_s

    def described(self, registered: NodeInfo, now_s: float) -> NodeInfo:
        """The node as people and the scheduler see it: latest readings, and a status by the clock."""
        member = self._members.get(registered.node_id)
        if member is None:
            return self._by_clock(registered, now_s, unheard="not heard since this controller started")
        info = msgspec.structs.replace(member.info, last_heartbeat=member.heard_at)
        return self._by_clock(info, now_s, unheard="")

    def same_until_s(self, node_id: str, now_s: float) -> float:
        """Until then `described` says what it says now, if nothing is heard. Of a silent node it says for
        how long, which is never the same."""
        if node_id not in self._members:
            return now_s
        suspect_at_s = now_s - self.silence_s(node_id, now_s) + self._suspect_s
        return max(suspect_at_s, now_s)

    def closed(self, info: NodeInfo) -> str:
        """Why nothing may be placed on this node; empty if it may. Takes what `described` gave."""
        if info.status in _CLOSED_STATUS:
            return f"{info.status}" + (f": {info.status_reason}" if info.status_reason else "")
        if self.connection(info.node_id) is None:
            return "its agent is not connected"
        return "" if self._members[info.node_id].has_beaten else "it has only just registered"

    def _changed(self, node_id: str) -> None:
        for told in self.on_change:
            told(node_id)

    def _by_clock(self, info: NodeInfo, now_s: float, *, unheard: str) -> NodeInfo:
        silence_s = self.silence_s(info.node_id, now_s)
        if silence_s < self._suspect_s and not unheard:
            return info
        reason = unheard or f"no heartbeat for {silence_s:.1f} s"
        if silence_s >= self._down_s:
            return msgspec.structs.replace(info, status=NodeStatus.DISCONNECTED, status_reason=reason)
        return msgspec.structs.replace(info, status=NodeStatus.SUSPECT, status_reason=reason)


def _well(info: NodeInfo) -> NodeInfo:
    """A node that does not yet judge its own health, or judges what only we can, counts as healthy."""
    if info.status in (NodeStatus.INITIALIZING, NodeStatus.SUSPECT, NodeStatus.DISCONNECTED):
        return msgspec.structs.replace(info, status=NodeStatus.HEALTHY, status_reason="")
    return info
