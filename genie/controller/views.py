"""The nodes as they stand, kept up to date one by one.

Looking at every node for every submitted job would cost more than all the rest, so only those are
looked at again of which something was heard or written, or whose silence may have made a
difference by now. Not for: the failure detector itself (membership.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from genie.controller.ledger import Ledger
from genie.controller.membership import Membership
from genie.model.node import NodeInfo
from genie.runtime.clock import Clock
from genie.runtime.rpc import Peer


@dataclass(frozen=True)
class NodeState:
    """One node as it stands. `closed` says why nothing may be placed there; empty when it may."""

    info: NodeInfo
    closed: str = ""

    @property
    def node_id(self) -> str:
        return self.info.node_id


class Views:
    def __init__(self, ledger: Ledger, membership: Membership, *, clock: Clock) -> None:
        self._ledger = ledger
        self._membership = membership
        self._clock = clock
        self._states: dict[str, NodeState] = {}
        self._peers: dict[str, Peer] = {}
        """The connections of nodes that are open."""
        self._good_until_s: dict[str, float] = {}
        self._next_change_s = 0.0
        self._stale: set[str] = set()
        """Ids of nodes that are or were registered: never more than those."""
        self.on_look: list[Callable[[str, NodeState | None], None]] = []
        """Told of each node that was looked at again; None for one that is not registered any more."""
        ledger.on_load.append(self._start_anew)
        ledger.nodes.on_change.append(self._row_changed)
        membership.on_change.append(self._stale.add)
        membership.on_term.append(self._start_anew)

    def current(self) -> Mapping[str, NodeState]:
        """Every registered node as it stands, the closed ones too."""
        self._stale.update(node_id for node_id, peer in self._peers.items() if peer.is_closed)
        return self.by_clock()

    def by_clock(self) -> Mapping[str, NodeState]:
        """The same, but one whose connection was closed a moment ago may not show it: `is_connected` does."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_change_s:
            self._stale.update(key for key, until_s in self._good_until_s.items() if now_s >= until_s)
        return self.registered()

    def is_connected(self, node_id: str) -> bool:
        """Whether its agent can be spoken to, as far as it was looked at."""
        peer = self._peers.get(node_id)
        return peer is not None and not peer.is_closed

    def registered(self) -> Mapping[str, NodeState]:
        """The same, but whether a node is still connected and well may have been true a moment ago: for
        whoever asks what there is, and not how it is."""
        if self._stale:
            now_s = self._clock.monotonic_s()
            for node_id in sorted(self._stale):  # the same order every time: where jobs go depends on it
                self._look_at(node_id, now_s)
                for told in self.on_look:
                    told(node_id, self._states.get(node_id))
            self._stale.clear()
            self._next_change_s = min(self._good_until_s.values(), default=float("inf"))
        return self._states

    def _look_at(self, node_id: str, now_s: float) -> None:
        record = self._ledger.nodes.get(node_id)
        self._peers.pop(node_id, None)
        if record is None:
            self._states.pop(node_id, None)
            self._good_until_s.pop(node_id, None)
            return
        info = self._membership.described(record.info, now_s)
        closed = "it has left the cluster" if record.left else record.drained or self._membership.closed(info)
        self._states[node_id] = NodeState(info, closed)
        self._good_until_s[node_id] = self._membership.same_until_s(node_id, now_s)
        peer = self._membership.connection(node_id)
        if peer is not None:
            self._peers[node_id] = peer

    def _start_anew(self) -> None:
        self._states.clear()
        self._peers.clear()
        self._good_until_s.clear()
        self._stale.clear()
        self._stale.update(self._ledger.nodes)
        self._next_change_s = 0.0

    def _row_changed(self, node_id: str, before: object, after: object) -> None:
        self._stale.add(node_id)
