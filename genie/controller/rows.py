"""Rows of the store that only controllers use. Those that are also messages are in genie/model/."""

from __future__ import annotations

import msgspec

from genie.model.node import NodeInfo
from genie.model.record import Record


class NodeRecord(Record, frozen=True, kw_only=True):
    """A node as it last registered, and the controllers that it has certainly been informed of."""

    info: NodeInfo
    controllers: tuple[str, ...] = ()
    ttl_s: float = 0.0
    """Dead-man timeout that the agent was given."""
    has_left: bool = msgspec.field(default=False, name="left")
    """It has left the cluster; it may register again."""
    drain_status: str = msgspec.field(default="", name="drained")
    """Such as "draining: new fans"; empty when the node is not drained. Survives restarts of the agent."""
    moves_jobs: bool = False
    """While it is drained: its restartable jobs are moved to other nodes."""


class Counter(Record, frozen=True, kw_only=True):
    value: int


class ClusterRecord(Record, frozen=True, kw_only=True):
    cluster_id: str
    ca_pin: str
    generation: int = 0
    """Raised by each restore of a backup; the high part of fencing tokens."""
    gossip_key_number: int = 0
    """Number of the key of gossip; the servers derive the key from it (nodes/gossip_keys.py)."""
    gossip_key_changed_at: float = 0.0
    is_gossip_key_change_due: bool = False
