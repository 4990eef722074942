"""Nodes that rejected launches for a reason of their own, and until when they get no further ones.

The reason is the node's, such as a full disk; the job is placed elsewhere. Kept in memory only: a new leader
tries every node again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

BLOCKED_S_MIN = 1.0
BLOCKED_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class _NodeFault:
    reason: str
    consecutive_count: int
    """Faults in a row, without those while the node was closed."""
    blocked_until_s: float


class NodeFaults:
    """The time for which a node is closed doubles with each fault, until it starts a job."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fault_by_node: dict[str, _NodeFault] = {}
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the ID of each node that is closed or reset."""
        self._listeners.append(listener)

    def record_fault(self, node_id: str, reason: str) -> None:
        """Close the node. Further faults count when it is open again: one cause rejects many launches."""
        now_s, before = self._clock.monotonic_s(), self._fault_by_node.get(node_id)
        if before is not None and now_s < before.blocked_until_s:
            return
        count = 1 if before is None else before.consecutive_count + 1
        blocked_s = min(BLOCKED_S_MIN * 2 ** min(count - 1, 16), BLOCKED_S_MAX)
        self._fault_by_node[node_id] = _NodeFault(reason, count, now_s + blocked_s)
        _log.warning("node %s is blocked (gets no launches) for %g s: %s", node_id, blocked_s, reason)
        self._notify(node_id)

    def unblock_node(self, node_id: str) -> None:
        """Open a node that has started a job, has registered again or was removed."""
        if self._fault_by_node.pop(node_id, None) is not None:
            self._notify(node_id)

    def clear(self) -> None:
        for node_id in list(self._fault_by_node):
            self.unblock_node(node_id)

    def blocked_reason(self, node_id: str) -> str:
        """Why the node gets no launches; empty if it does."""
        fault = self._fault_by_node.get(node_id)
        if fault is None or self._clock.monotonic_s() >= fault.blocked_until_s:
            return ""
        return f"it rejected launches: {fault.reason}"

    def blocked_reason_valid_until_s(self, node_id: str) -> float:
        """Time until which `blocked_reason` stays the same without a further fault."""
        fault = self._fault_by_node.get(node_id)
        is_closed = fault is not None and self._clock.monotonic_s() < fault.blocked_until_s
        return fault.blocked_until_s if fault is not None and is_closed else float("inf")

    def _notify(self, node_id: str) -> None:
        for listener in self._listeners:
            listener(node_id)
