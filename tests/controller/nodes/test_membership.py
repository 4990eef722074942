"""The failure detector: what it knows about heartbeats after a change of the leader."""

from __future__ import annotations

import msgspec

from genie.config import ControllerConfig
from genie.controller.nodes.membership import Membership
from genie.model.node import NodeStatus
from tests.controller.nodes.test_snapshots import FakePeer
from tests.fakes.agent import make_node_info


def test_last_heartbeat_is_unknown_until_the_node_has_sent_one_in_this_term() -> None:
    membership = Membership(ControllerConfig())
    info = msgspec.structs.replace(make_node_info("n1"), last_heartbeat=1000.0)
    membership.begin_term(0.0)
    stored = membership.current_info(info, 1.0)
    assert (stored.last_heartbeat, stored.status) == (0.0, NodeStatus.SUSPECT)
    membership.register_node(info, FakePeer(), now_s=1.0, now_wall_s=1001.0)  # type: ignore[arg-type]
    assert membership.current_info(info, 1.0).last_heartbeat == 0.0
    membership.record_heartbeat(info, now_s=2.0, now_wall_s=1002.0)
    assert membership.current_info(info, 2.0).last_heartbeat == 1002.0
    # Another controller led in between; this one leads again.
    membership.begin_term(50.0)
    assert membership.current_info(info, 50.0).last_heartbeat == 0.0
    membership.record_heartbeat(info, now_s=51.0, now_wall_s=1051.0)
    assert membership.current_info(info, 51.0).last_heartbeat == 1051.0
