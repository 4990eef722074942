"""Incremental snapshots of nodes equal snapshots from scratch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from genie.config import ControllerConfig
from genie.controller.ledger import Ledger, LedgerTable
from genie.controller.nodes.faults import NodeFaults
from genie.controller.nodes.membership import Membership
from genie.controller.nodes.snapshots import NodeSnapshot, NodeSnapshots
from genie.controller.rows import NodeRecord
from genie.model.node import NodeStatus
from tests.fakes.agent import make_node_info
from tests.fakes.clock import FakeClock

NODES = ("n0", "n1", "n2")


class FakePeer:
    """The part of a connection that views use."""

    def __init__(self) -> None:
        self._is_closed = False
        self.looks = 0
        self._listener: Callable[[], None] = lambda: None

    @property
    def is_closed(self) -> bool:
        self.looks += 1
        return self._is_closed

    def set_close_listener(self, listener: Callable[[], None]) -> None:
        self._listener = listener

    def close(self) -> None:
        self._is_closed = True
        self._listener()


class ViewInputs:
    """The inputs of the views, changed as the controller changes them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.ledger = Ledger(None, None, None)  # type: ignore[arg-type]  # its tables only
        self.membership = Membership(ControllerConfig())
        self.faults = NodeFaults(self.clock)
        self.views = NodeSnapshots(self.ledger, self.membership, self.faults, clock=self.clock)
        self.peers: dict[str, FakePeer] = {}

    # Any: rows of every table.
    def commit(self, table: LedgerTable[Any], row_id: str, row: Any) -> None:
        before = table.set_row(row_id, row)
        for listener in table.listeners:
            listener(row_id, before, row)

    def register(self, node_id: str) -> None:
        self.commit(self.ledger.nodes, node_id, NodeRecord(info=make_node_info(node_id)))
        self.peers[node_id] = FakePeer()
        self.membership.register_node(
            make_node_info(node_id),
            self.peers[node_id],  # type: ignore[arg-type]
            now_s=self.clock.monotonic_s(),
            now_wall_s=self.clock.wall_s(),
        )

    def beat(self, node_id: str, cpus: int) -> None:
        if self.membership.get(node_id) is not None:
            info = make_node_info(node_id, cpus=float(cpus))
            self.membership.record_heartbeat(
                info, now_s=self.clock.monotonic_s(), now_wall_s=self.clock.wall_s()
            )

    def leave(self, node_id: str) -> None:
        record = self.ledger.nodes.get(node_id)
        if record is not None:
            self.commit(self.ledger.nodes, node_id, msgspec.structs.replace(record, has_left=True))
        self.membership.remove_node(node_id)

    def forget(self, node_id: str) -> None:
        if node_id in self.ledger.nodes:
            self.commit(self.ledger.nodes, node_id, None)
        self.membership.remove_node(node_id)

    def close(self, node_id: str) -> None:
        if node_id in self.peers:
            self.peers[node_id].close()

    def fault(self, node_id: str) -> None:
        self.faults.record_fault(node_id, "disk full")

    def recover(self, node_id: str) -> None:
        self.faults.unblock_node(node_id)

    def begin_term(self) -> None:
        self.membership.begin_term(self.clock.monotonic_s())

    def reload(self) -> None:
        for listener in self.ledger._after_load_listeners:
            listener()

    def from_scratch(self) -> dict[str, NodeSnapshot]:
        now_s, found = self.clock.monotonic_s(), {}
        for node_id, record in self.ledger.nodes.items():
            info = self.membership.current_info(record.info, now_s)
            fault = self.faults.blocked_reason(node_id)
            if fault and info.status is NodeStatus.HEALTHY:
                info = msgspec.structs.replace(info, status=NodeStatus.DEGRADED, status_reason=fault)
            blocked = self.membership.blocked_reason(info) or fault
            closed = "it has left the cluster" if record.has_left else blocked
            found[node_id] = NodeSnapshot(info, closed, record.has_left)
        return found


nodes, few = st.sampled_from(NODES), st.integers(0, 3)
events = st.one_of(
    st.tuples(st.just("register"), nodes),
    st.tuples(st.just("beat"), nodes, few),
    st.tuples(st.just("leave"), nodes),
    st.tuples(st.just("forget"), nodes),
    st.tuples(st.just("close"), nodes),
    st.tuples(st.just("fault"), nodes),
    st.tuples(st.just("recover"), nodes),
    st.tuples(st.just("begin_term")),
    st.tuples(st.just("reload")),
    st.tuples(st.just("pass"), st.sampled_from([0.1, 1.0, 2.9, 3.0, 7.0, 10.0])),
)


@given(st.lists(events, max_size=30))
def test_incremental_node_views_equal_views_from_scratch(given_events: list[tuple[Any, ...]]) -> None:
    cluster = ViewInputs()
    notified: dict[str, NodeSnapshot] = {}

    def look(node_id: str, state: NodeSnapshot | None) -> None:
        if state is None:
            notified.pop(node_id, None)
        else:
            notified[node_id] = state

    cluster.views.add_listener(look)
    for name, *arguments in given_events:
        if name == "pass":
            cluster.clock._now_s += arguments[0]
        else:
            getattr(cluster, name)(*arguments)
        assert cluster.views.current_snapshots() == cluster.from_scratch(), name
        assert notified == cluster.from_scratch(), name
        registered = cluster.views.registered_snapshots()
        assert {key: node.info.gpus for key, node in registered.items()} == {
            key: node.info.gpus for key, node in cluster.from_scratch().items()
        }


def test_snapshot_of_a_node_is_not_renewed_without_a_change() -> None:
    cluster = ViewInputs()
    cluster.register("n0")
    cluster.beat("n0", 1)
    looks: list[str] = []
    cluster.views.add_listener(lambda node_id, state: looks.append(node_id))
    cluster.views.current_snapshots()
    cluster.clock._now_s += 1.0
    cluster.views.current_snapshots()
    assert looks == ["n0"]


def test_current_views_read_only_connections_that_have_changed() -> None:
    """Each scheduling pass reads them: its cost must not grow with the number of nodes."""
    cluster = ViewInputs()
    for number in range(20):
        cluster.register(f"n{number}")
        cluster.beat(f"n{number}", 1)
    cluster.views.current_snapshots()
    before = [peer.looks for peer in cluster.peers.values()]
    cluster.close("n3")
    assert cluster.views.current_snapshots()["n3"].blocked_reason == "its agent is not connected"
    looks = [peer.looks for peer in cluster.peers.values()]
    assert [now > then for now, then in zip(looks, before, strict=True)].count(True) == 1


def test_snapshots_of_disconnected_nodes_are_not_renewed_at_every_read() -> None:
    """Each placement looks at the nodes."""
    cluster = ViewInputs()
    for number in range(20):
        cluster.register(f"n{number}")
        cluster.beat(f"n{number}", 1)
    cluster.clock._now_s += 30.0
    cluster.views.current_snapshots()
    looks: list[str] = []
    cluster.views.add_listener(lambda node_id, state: looks.append(node_id))
    for _ in range(50):
        cluster.clock._now_s += 0.01
        cluster.views.current_snapshots()
    assert looks == []
    cluster.begin_term()
    cluster.clock._now_s += 60.0
    cluster.views.current_snapshots()
    assert len(looks) == 20


def test_number_of_scheduled_snapshot_expiries_is_bounded() -> None:
    cluster = ViewInputs()
    for _ in range(100):
        cluster.register("n0")
        cluster.beat("n0", 1)
        cluster.views.registered_snapshots()
    assert len(cluster.views._expiry_heap) < 20


def test_snapshots_are_renewed_in_a_deterministic_order() -> None:
    cluster, looked_at = ViewInputs(), list[str]()
    cluster.views.add_listener(lambda node_id, state: looked_at.append(node_id))
    names = [f"n{number:02}" for number in range(30)]
    for node_id in reversed(names):
        cluster.register(node_id)
    assert list(cluster.views.current_snapshots()) == looked_at == names
