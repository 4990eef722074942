"""Snapshots of the nodes, updated incrementally.

Evaluating every node for every submitted job would cost more than all the rest. So a snapshot is renewed
only after a heartbeat, a write or the end of its connection, or when the time without a heartbeat may have
changed the node's status. The failure detector is in membership.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from genie.controller.ledger import Ledger
from genie.controller.nodes.faults import NodeFaults
from genie.controller.nodes.membership import Membership
from genie.controller.nodes.unresponsive import describe_withheld_jobs
from genie.model.node import NodeInfo, NodeStatus
from genie.processes.clock import Clock

_EXPIRY_HEAP_ENTRIES_PER_NODE_MAX = 8


@dataclass(frozen=True)
class NodeSnapshot:
    """The current state of one node. `blocked_reason` is why it accepts no placement; empty when it does."""

    info: NodeInfo
    blocked_reason: str = ""
    has_left: bool = False

    @property
    def node_id(self) -> str:
        return self.info.node_id


class NodeSnapshots:
    def __init__(self, ledger: Ledger, membership: Membership, faults: NodeFaults, *, clock: Clock) -> None:
        self._ledger = ledger
        self._membership = membership
        self._node_faults = faults
        self._clock = clock
        self._snapshots: dict[str, NodeSnapshot] = {}
        self._valid_until_s: dict[str, float] = {}
        self._expiry_heap: list[tuple[float, str]] = []
        """Heap of `_valid_until_s`; also contains earlier values, which are ignored."""
        self._stale_node_ids: set[str] = set()
        """IDs of nodes whose snapshot must be renewed; bounded by the nodes ever registered."""
        self._listeners: list[Callable[[str, NodeSnapshot | None], None]] = []
        ledger.add_after_load_listener(self._reset)
        ledger.nodes.add_listener(self._on_node_record_changed)
        membership.add_listener(self._stale_node_ids.add)
        membership.add_term_listener(self._reset)
        faults.add_listener(self._stale_node_ids.add)

    def add_listener(self, listener: Callable[[str, NodeSnapshot | None], None]) -> None:
        """Call `listener` for each renewed snapshot; with None for a node that is no longer registered."""
        self._listeners.append(listener)

    def current_snapshots(self) -> Mapping[str, NodeSnapshot]:
        """Snapshots of all registered nodes, including blocked ones."""
        now_s = self._clock.monotonic_s()
        while self._expiry_heap and self._expiry_heap[0][0] <= now_s:
            _, node_id = heapq.heappop(self._expiry_heap)
            if self._valid_until_s.get(node_id, math.inf) <= now_s:
                self._stale_node_ids.add(node_id)
        return self.registered_snapshots()

    def last_snapshots(self) -> Mapping[str, NodeSnapshot]:
        """The snapshots as they were last renewed."""
        return self._snapshots

    def registered_snapshots(self) -> Mapping[str, NodeSnapshot]:
        """Like `current_snapshots`, but without checking for missing heartbeats: for the hardware only."""
        if self._stale_node_ids:
            now_s = self._clock.monotonic_s()
            for node_id in sorted(self._stale_node_ids):  # deterministic: placements depend on the order
                self._renew_snapshot(node_id, now_s)
                for listener in self._listeners:
                    listener(node_id, self._snapshots.get(node_id))
            self._stale_node_ids.clear()
        return self._snapshots

    def _renew_snapshot(self, node_id: str, now_s: float) -> None:
        record = self._ledger.nodes.get(node_id)
        if record is None:
            self._snapshots.pop(node_id, None)
            self._valid_until_s.pop(node_id, None)
            return
        info = self._membership.current_info(record.info, now_s)
        if info.status is NodeStatus.DISCONNECTED and (held := self._ledger.holds.get(node_id)):
            reasons = filter(None, (info.status_reason, describe_withheld_jobs(held)))
            info = msgspec.structs.replace(info, status_reason="; ".join(reasons))
        fault = self._node_faults.blocked_reason(node_id)
        if fault and info.status is NodeStatus.HEALTHY:
            info = msgspec.structs.replace(info, status=NodeStatus.DEGRADED, status_reason=fault)
        blocked = record.drain_status or self._membership.blocked_reason(info) or fault
        closed = "it has left the cluster" if record.has_left else blocked
        self._snapshots[node_id] = NodeSnapshot(info, closed, record.has_left)
        until_s = self._membership.current_info_valid_until_s(node_id, now_s)
        self._set_expiry(node_id, min(until_s, self._node_faults.blocked_reason_valid_until_s(node_id)))

    def _set_expiry(self, node_id: str, until_s: float) -> None:
        self._valid_until_s[node_id] = until_s
        heapq.heappush(self._expiry_heap, (until_s, node_id))
        if len(self._expiry_heap) > _EXPIRY_HEAP_ENTRIES_PER_NODE_MAX * len(self._valid_until_s):
            self._expiry_heap = [(until_s, node_id) for node_id, until_s in self._valid_until_s.items()]
            heapq.heapify(self._expiry_heap)

    def _reset(self) -> None:
        self._snapshots.clear()
        self._valid_until_s.clear()
        self._stale_node_ids.clear()
        self._stale_node_ids.update(self._ledger.nodes)
        self._expiry_heap.clear()

    def _on_node_record_changed(self, node_id: str, before: object, after: object) -> None:
        self._stale_node_ids.add(node_id)
