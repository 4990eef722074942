"""The failure detector: the registered nodes, their connections, and the time since their last heartbeat.

A node without heartbeats is first suspect, then disconnected, then its jobs may be reclaimed. If gossip also
reports that it does not respond, it is suspect earlier; gossip changes nothing else. A new term of leadership
counts from its own start. A node that has not registered in this term is disconnected earlier, because no
leader received its heartbeats during the takeover; its jobs are reclaimed no earlier than those of other
nodes. The current time is an argument. Registration and heartbeats are handled in agents.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from genie.config import ControllerConfig
from genie.model.failover import etcd_failover_bounds, lost_in_new_term_after_s
from genie.model.member import MemberState
from genie.model.node import NodeInfo, NodeStatus
from genie.runtime.rpc import Peer

_BLOCKING_STATUSES = frozenset(
    {NodeStatus.UNHEALTHY, NodeStatus.CRITICAL, NodeStatus.SUSPECT, NodeStatus.DISCONNECTED}
)
_ROUNDING_TOLERANCE_S = 0.001
GOSSIP_SUSPECT_SHARE = 0.5
"""Of the time without a heartbeat after which a node is suspect, if gossip reports that it does not respond.
By default 1.5 s: one heartbeat is late. A node that sends heartbeats is not suspect."""


@dataclass(slots=True)
class RegisteredNode:
    """A node that has registered with this controller since it started."""

    reported_info: NodeInfo
    """As the node last described itself, after validation."""
    info: NodeInfo
    """The same with the status that the controller gives it."""
    peer: Peer
    last_heartbeat_s: float
    last_heartbeat_at: float
    has_sent_heartbeat: bool = False
    """Until its first heartbeat is acknowledged, an agent may start nothing."""


class Membership:
    def __init__(self, config: ControllerConfig) -> None:
        self._suspect_after_s = config.node_suspect_s
        self._node_ttl_s = config.node_ttl_s
        self._disconnected_in_new_term_after_s = _disconnected_in_new_term_after_s(config)
        self._reclaim_grace_s = config.node_reclaim_grace_s
        self._node_by_id: dict[str, RegisteredNode] = {}
        self._gossip_report_by_id: dict[str, tuple[MemberState, float]] = {}
        """Nodes that are suspect or dead according to gossip, and since when it reports that."""
        self._term_began_s = 0.0
        self._node_listeners: list[Callable[[str], None]] = []
        self._term_listeners: list[Callable[[], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the ID of each node that registers, sends a heartbeat, leaves or loses its
        connection."""
        self._node_listeners.append(listener)

    def add_term_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` at the beginning of each term of leadership."""
        self._term_listeners.append(listener)

    def begin_term(self, now_s: float) -> None:
        self._term_began_s = now_s
        for listener in self._term_listeners:
            listener()

    def set_unresponsive_members(self, state_by_node_id: Mapping[str, MemberState], *, now_s: float) -> None:
        """Replace the nodes that do not respond according to gossip."""
        for node_id in sorted(self._gossip_report_by_id.keys() | state_by_node_id.keys()):
            state = state_by_node_id.get(node_id)
            if state is self._get_reported_state(node_id):
                continue
            if state is None:
                del self._gossip_report_by_id[node_id]
            else:
                self._gossip_report_by_id[node_id] = (state, now_s)
            if node_id in self._node_by_id:
                self._notify(node_id)

    def get(self, node_id: str) -> RegisteredNode | None:
        return self._node_by_id.get(node_id)

    def registered_nodes(self) -> list[RegisteredNode]:
        return list(self._node_by_id.values())

    def register_node(self, info: NodeInfo, peer: Peer, *, now_s: float, now_wall_s: float) -> Peer | None:
        """Register a node with its connection; return its previous connection if that is another one."""
        before = self._node_by_id.get(info.node_id)
        self._node_by_id[info.node_id] = RegisteredNode(
            info, _without_controller_status(info), peer, now_s, now_wall_s
        )
        peer.set_close_listener(partial(self._notify, info.node_id))
        self._notify(info.node_id)
        return before.peer if before is not None and before.peer is not peer else None

    def remove_node(self, node_id: str) -> None:
        """Remove a node that has left."""
        self._node_by_id.pop(node_id, None)
        self._notify(node_id)

    def record_heartbeat(self, info: NodeInfo, *, now_s: float, now_wall_s: float) -> None:
        member = self._node_by_id[info.node_id]
        if info is not member.reported_info:
            member.reported_info, member.info = info, _without_controller_status(info)
        member.last_heartbeat_s, member.last_heartbeat_at = now_s, now_wall_s
        member.has_sent_heartbeat = True
        self._notify(info.node_id)

    def get_connection(self, node_id: str) -> Peer | None:
        member = self._node_by_id.get(node_id)
        return member.peer if member is not None and not member.peer.is_closed else None

    def time_since_heartbeat_s(self, node_id: str, now_s: float) -> float:
        """Seconds since the last heartbeat or since this term began, whichever was later."""
        member = self._node_by_id.get(node_id)
        last_s = self._term_began_s if member is None else max(member.last_heartbeat_s, self._term_began_s)
        return now_s - last_s

    def is_in_contact(self, node_id: str, now_s: float) -> bool:
        """Whether the node has sent a heartbeat in this term and is not suspect."""
        member = self._node_by_id.get(node_id)
        if member is None or not member.has_sent_heartbeat or member.last_heartbeat_s < self._term_began_s:
            return False
        return self.time_since_heartbeat_s(node_id, now_s) < self._suspect_after_s

    def is_disconnected(self, node_id: str, now_s: float) -> bool:
        """Whether the node has not sent a heartbeat within its time to live. Its jobs may still run."""
        return self.time_since_heartbeat_s(node_id, now_s) >= self._get_disconnected_after_s(node_id)

    def is_reclaimable(self, node_id: str, now_s: float, *, deadman_timeout_s: float = 0.0) -> bool:
        """Whether the node's jobs with a dead-man timer have ended for certain. `deadman_timeout_s` is the
        dead-man timeout that the node was given: an earlier controller may have given a longer one."""
        return self.reclaimable_in_s(node_id, now_s, deadman_timeout_s=deadman_timeout_s) <= 0

    def reclaimable_in_s(self, node_id: str, now_s: float, *, deadman_timeout_s: float) -> float:
        """Seconds until `is_reclaimable`, if no heartbeat arrives; 0 or less if it is."""
        return (
            max(self._node_ttl_s, deadman_timeout_s)
            + self._reclaim_grace_s
            - self.time_since_heartbeat_s(node_id, now_s)
        )

    def current_info(self, registered_info: NodeInfo, now_s: float) -> NodeInfo:
        """Return the node's latest report with its current status. `last_heartbeat` is 0 if this controller
        has received none in this term: an earlier one says nothing about the node."""
        member = self._node_by_id.get(registered_info.node_id)
        if member is None:
            info = msgspec.structs.replace(registered_info, last_heartbeat=0.0)
            return self._with_status(info, now_s, unseen_reason="no heartbeat since this controller started")
        is_of_this_term = member.has_sent_heartbeat and member.last_heartbeat_s >= self._term_began_s
        last_heartbeat = member.last_heartbeat_at if is_of_this_term else 0.0
        info = msgspec.structs.replace(member.info, last_heartbeat=last_heartbeat)
        return self._with_status(info, now_s, unseen_reason="")

    def current_info_valid_until_s(self, node_id: str, now_s: float) -> float:
        """Time until which `current_info` stays the same without a heartbeat. For a suspect node that is at
        most a second: its status reason contains the elapsed seconds."""
        silence_s = self.time_since_heartbeat_s(node_id, now_s)
        disconnected_after_s = self._get_disconnected_after_s(node_id)
        if node_id not in self._node_by_id:
            next_s = disconnected_after_s if silence_s < disconnected_after_s else math.inf
        elif silence_s < (suspect_after_s := self._get_suspect_after_s(node_id)):
            next_s = suspect_after_s
        else:
            next_s = math.floor(silence_s) + 1.0
            if silence_s < disconnected_after_s:
                next_s = min(next_s, disconnected_after_s)
        return max(now_s - silence_s + next_s - _ROUNDING_TOLERANCE_S, now_s)

    def blocked_reason(self, info: NodeInfo) -> str:
        """Why the node accepts no placement; empty if it does. Takes the result of `current_info`."""
        if info.status in _BLOCKING_STATUSES:
            return f"{info.status}" + (f": {info.status_reason}" if info.status_reason else "")
        if self.get_connection(info.node_id) is None:
            return "its agent is not connected"
        if info.closed:
            return info.closed
        return "" if self._node_by_id[info.node_id].has_sent_heartbeat else "no heartbeat yet"

    def _get_suspect_after_s(self, node_id: str) -> float:
        share = GOSSIP_SUSPECT_SHARE if self._has_gossip_report_since_heartbeat(node_id) else 1.0
        return share * self._suspect_after_s

    def _get_disconnected_after_s(self, node_id: str) -> float:
        """Time without a heartbeat in this term after which the node is disconnected."""
        member = self._node_by_id.get(node_id)
        is_registered_in_term = member is not None and member.last_heartbeat_s >= self._term_began_s
        return self._node_ttl_s if is_registered_in_term else self._disconnected_in_new_term_after_s

    def _get_reported_state(self, node_id: str) -> MemberState | None:
        report = self._gossip_report_by_id.get(node_id)
        return None if report is None else report[0]

    def _has_gossip_report_since_heartbeat(self, node_id: str) -> bool:
        """A heartbeat disproves what gossip reported before."""
        report, node = self._gossip_report_by_id.get(node_id), self._node_by_id.get(node_id)
        return report is not None and node is not None and report[1] >= node.last_heartbeat_s

    def _notify(self, node_id: str) -> None:
        for listener in self._node_listeners:
            listener(node_id)

    def _with_status(self, info: NodeInfo, now_s: float, *, unseen_reason: str) -> NodeInfo:
        silence_s = self.time_since_heartbeat_s(info.node_id, now_s)
        if silence_s < self._get_suspect_after_s(info.node_id) and not unseen_reason:
            return info
        reason = unseen_reason or f"no heartbeat for {math.floor(silence_s)} s"
        if self._has_gossip_report_since_heartbeat(info.node_id):
            reason += f"; gossip reports that it is {self._get_reported_state(info.node_id)}"
        if silence_s >= self._get_disconnected_after_s(info.node_id):
            return msgspec.structs.replace(info, status=NodeStatus.DISCONNECTED, status_reason=reason)
        return msgspec.structs.replace(info, status=NodeStatus.SUSPECT, status_reason=reason)


def _disconnected_in_new_term_after_s(config: ControllerConfig) -> float:
    bounds = etcd_failover_bounds(
        node_ttl_s=config.node_ttl_s,
        leader_ttl_s=config.leader_ttl_s,
        etcd_election_timeout_s=config.etcd_election_timeout_s,
    )
    return lost_in_new_term_after_s(config.node_ttl_s, bounds)


def _without_controller_status(info: NodeInfo) -> NodeInfo:
    """Replace a status that only the controller can determine by HEALTHY."""
    if info.status in (NodeStatus.INITIALIZING, NodeStatus.SUSPECT, NodeStatus.DISCONNECTED):
        return msgspec.structs.replace(info, status=NodeStatus.HEALTHY, status_reason="")
    return info
