"""The view that is kept node by node is the one that looking at every node anew would give."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from genie.config import ControllerConfig
from genie.controller.ledger import Ledger, NodeRecord, Table
from genie.controller.membership import Membership
from genie.controller.views import NodeState, Views
from tests.fakes.agent import node_info
from tests.fakes.clock import FakeClock

NODES = ("n0", "n1", "n2")


class FakePeer:
    """All that a view asks of a connection."""

    def __init__(self) -> None:
        self.is_closed = False


class Cluster:
    """The parts under a view, changed as the controller changes them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.ledger = Ledger(None, None, None)  # type: ignore[arg-type]  # its tables only
        self.membership = Membership(ControllerConfig())
        self.views = Views(self.ledger, self.membership, clock=self.clock)
        self.peers: dict[str, FakePeer] = {}

    # Any: rows of every table.
    def commit(self, table: Table[Any], row_id: str, row: Any) -> None:
        before = table._show(row_id, row)
        for told in table.on_change:
            told(row_id, before, row)

    def register(self, node_id: str) -> None:
        self.commit(self.ledger.nodes, node_id, NodeRecord(info=node_info(node_id)))
        self.peers[node_id] = FakePeer()
        self.membership.attach(
            node_info(node_id),
            self.peers[node_id],  # type: ignore[arg-type]
            now_s=self.clock.monotonic_s(),
            now_at=self.clock.wall_s(),
        )

    def beat(self, node_id: str, cpus: int) -> None:
        if self.membership.get(node_id) is not None:
            info = node_info(node_id, cpus=float(cpus))
            self.membership.heard(info, now_s=self.clock.monotonic_s(), now_at=self.clock.wall_s())

    def leave(self, node_id: str) -> None:
        record = self.ledger.nodes.get(node_id)
        if record is not None:
            self.commit(self.ledger.nodes, node_id, msgspec.structs.replace(record, left=True))
        self.membership.detach(node_id)

    def forget(self, node_id: str) -> None:
        if node_id in self.ledger.nodes:
            self.commit(self.ledger.nodes, node_id, None)
        self.membership.detach(node_id)

    def close(self, node_id: str) -> None:
        if node_id in self.peers:
            self.peers[node_id].is_closed = True

    def begin_term(self) -> None:
        self.membership.begin_term(self.clock.monotonic_s())

    def reload(self) -> None:
        for told in self.ledger.on_load:
            told()

    def looked_at(self) -> dict[str, NodeState]:
        """From scratch."""
        now_s, found = self.clock.monotonic_s(), {}
        for node_id, record in self.ledger.nodes.items():
            info = self.membership.described(record.info, now_s)
            closed = "it has left the cluster" if record.left else self.membership.closed(info)
            found[node_id] = NodeState(info, closed)
        return found


nodes, few = st.sampled_from(NODES), st.integers(0, 3)
events = st.one_of(
    st.tuples(st.just("register"), nodes),
    st.tuples(st.just("beat"), nodes, few),
    st.tuples(st.just("leave"), nodes),
    st.tuples(st.just("forget"), nodes),
    st.tuples(st.just("close"), nodes),
    st.tuples(st.just("begin_term")),
    st.tuples(st.just("reload")),
    st.tuples(st.just("pass"), st.sampled_from([0.1, 1.0, 2.9, 3.0, 7.0, 10.0])),
)


@given(st.lists(events, max_size=30))
def test_a_view_that_is_kept_is_the_view_from_scratch(given_events: list[tuple[Any, ...]]) -> None:
    cluster = Cluster()
    told: dict[str, NodeState] = {}

    def look(node_id: str, state: NodeState | None) -> None:
        if state is None:
            told.pop(node_id, None)
        else:
            told[node_id] = state

    cluster.views.on_look.append(look)
    for name, *arguments in given_events:
        if name == "pass":
            cluster.clock._now_s += arguments[0]
        else:
            getattr(cluster, name)(*arguments)
        assert cluster.views.current() == cluster.looked_at(), name
        assert told == cluster.looked_at(), name
        registered = cluster.views.registered()
        assert {key: node.info.gpus for key, node in registered.items()} == {
            key: node.info.gpus for key, node in cluster.looked_at().items()
        }


def test_a_node_is_not_looked_at_again_while_nothing_is_heard_of_it() -> None:
    cluster = Cluster()
    cluster.register("n0")
    cluster.beat("n0", 1)
    looks: list[str] = []
    cluster.views.on_look.append(lambda node_id, state: looks.append(node_id))
    cluster.views.current()
    cluster.clock._now_s += 1.0
    cluster.views.current()
    assert looks == ["n0"]


def test_nodes_are_looked_at_in_one_order_whoever_was_heard_first() -> None:
    cluster, looked_at = Cluster(), list[str]()
    cluster.views.on_look.append(lambda node_id, state: looked_at.append(node_id))
    names = [f"n{number:02}" for number in range(30)]
    for node_id in reversed(names):
        cluster.register(node_id)
    assert list(cluster.views.current()) == looked_at == names
