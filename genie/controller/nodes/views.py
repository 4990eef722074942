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
from genie.model.node import NodeInfo, NodeStatus
from genie.processes.clock import Clock

_EXPIRIES_PER_NODE_MAX = 8


@dataclass(frozen=True)
class NodeSnapshot:
    """The current state of one node. `closed` is why it accepts no placement; empty when it does."""

    info: NodeInfo
    closed: str = ""

    @property
    def node_id(self) -> str:
        return self.info.node_id


class Views:
    def __init__(self, ledger: Ledger, membership: Membership, faults: NodeFaults, *, clock: Clock) -> None:
        self._ledger = ledger
        self._membership = membership
        self._faults = faults
        self._clock = clock
        self._states: dict[str, NodeSnapshot] = {}
        self._valid_until_s: dict[str, float] = {}
        self._expiries: list[tuple[float, str]] = []
        """Heap of `_valid_until_s`; also contains earlier values, which are ignored."""
        self._stale: set[str] = set()
        """IDs of nodes whose snapshot must be renewed; bounded by the nodes ever registered."""
        self._listeners: list[Callable[[str, NodeSnapshot | None], None]] = []
        ledger.add_load_listener(self._reset)
        ledger.nodes.add_listener(self._row_changed)
        membership.add_listener(self._stale.add)
        membership.add_term_listener(self._reset)
        faults.add_listener(self._stale.add)

    def add_listener(self, listener: Callable[[str, NodeSnapshot | None], None]) -> None:
        """Call `listener` for each renewed snapshot; with None for a node that is no longer registered."""
        self._listeners.append(listener)

    def current(self) -> Mapping[str, NodeSnapshot]:
        """Snapshots of all registered nodes, including blocked ones."""
        now_s = self._clock.monotonic_s()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, node_id = heapq.heappop(self._expiries)
            if self._valid_until_s.get(node_id, math.inf) <= now_s:
                self._stale.add(node_id)
        return self.registered()

    def last(self) -> Mapping[str, NodeSnapshot]:
        """The snapshots as they were last renewed."""
        return self._states

    def registered(self) -> Mapping[str, NodeSnapshot]:
        """Like `current`, but without checking for missing heartbeats: for the hardware only."""
        if self._stale:
            now_s = self._clock.monotonic_s()
            for node_id in sorted(self._stale):  # deterministic: placements depend on the order
                self._renew(node_id, now_s)
                for listener in self._listeners:
                    listener(node_id, self._states.get(node_id))
            self._stale.clear()
        return self._states

    def _renew(self, node_id: str, now_s: float) -> None:
        record = self._ledger.nodes.get(node_id)
        if record is None:
            self._states.pop(node_id, None)
            self._valid_until_s.pop(node_id, None)
            return
        info = self._membership.current_info(record.info, now_s)
        fault = self._faults.closed_reason(node_id)
        if fault and info.status is NodeStatus.HEALTHY:
            info = msgspec.structs.replace(info, status=NodeStatus.DEGRADED, status_reason=fault)
        blocked = record.drained or self._membership.blocked_reason(info) or fault
        closed = "it has left the cluster" if record.left else blocked
        self._states[node_id] = NodeSnapshot(info, closed)
        until_s = self._membership.unchanged_until_s(node_id, now_s)
        self._set_expiry(node_id, min(until_s, self._faults.unchanged_until_s(node_id)))

    def _set_expiry(self, node_id: str, until_s: float) -> None:
        self._valid_until_s[node_id] = until_s
        heapq.heappush(self._expiries, (until_s, node_id))
        if len(self._expiries) > _EXPIRIES_PER_NODE_MAX * len(self._valid_until_s):
            self._expiries = [(until_s, node_id) for node_id, until_s in self._valid_until_s.items()]
            heapq.heapify(self._expiries)

    def _reset(self) -> None:
        self._states.clear()
        self._valid_until_s.clear()
        self._stale.clear()
        self._stale.update(self._ledger.nodes)
        self._expiries.clear()

    def _row_changed(self, node_id: str, before: object, after: object) -> None:
        self._stale.add(node_id)
