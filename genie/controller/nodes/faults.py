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

CLOSED_S_MIN = 1.0
CLOSED_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class _Fault:
    reason: str
    count: int
    """Faults in a row, without those while the node was closed."""
    closed_until_s: float


class NodeFaults:
    """The time for which a node is closed doubles with each fault, until it starts a job."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._faults: dict[str, _Fault] = {}
        self._listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the ID of each node that is closed or reset."""
        self._listeners.append(listener)

    def record(self, node_id: str, reason: str) -> None:
        """Close the node. Further faults count when it is open again: one cause rejects many launches."""
        now_s, before = self._clock.monotonic_s(), self._faults.get(node_id)
        if before is not None and now_s < before.closed_until_s:
            return
        count = 1 if before is None else before.count + 1
        closed_s = min(CLOSED_S_MIN * 2 ** min(count - 1, 16), CLOSED_S_MAX)
        self._faults[node_id] = _Fault(reason, count, now_s + closed_s)
        _log.warning("node %s gets no launches for %g s: %s", node_id, closed_s, reason)
        self._notify(node_id)

    def reset(self, node_id: str) -> None:
        """Open a node that has started a job, has registered again or was removed."""
        if self._faults.pop(node_id, None) is not None:
            self._notify(node_id)

    def clear(self) -> None:
        for node_id in list(self._faults):
            self.reset(node_id)

    def closed_reason(self, node_id: str) -> str:
        """Why the node gets no launches; empty if it does."""
        fault = self._faults.get(node_id)
        if fault is None or self._clock.monotonic_s() >= fault.closed_until_s:
            return ""
        return f"it rejected launches: {fault.reason}"

    def unchanged_until_s(self, node_id: str) -> float:
        """Time until which `closed_reason` stays the same without a further fault."""
        fault = self._faults.get(node_id)
        is_closed = fault is not None and self._clock.monotonic_s() < fault.closed_until_s
        return fault.closed_until_s if fault is not None and is_closed else float("inf")

    def _notify(self, node_id: str) -> None:
        for listener in self._listeners:
            listener(node_id)
