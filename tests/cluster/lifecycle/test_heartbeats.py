"""Heartbeats of a session: the list of nodes is complete in a large cluster, and the leader gets them."""

from __future__ import annotations

import genie
from genie.cluster.events import EventType
from genie.model.messages import SessionHeartbeat
from tests.cluster.small_controller import QUIET_SETTINGS, SmallController, make_node
from tests.waiting import until


async def test_list_of_nodes_is_complete_before_changes_are_published(controller: SmallController) -> None:
    controller.nodes = tuple(make_node(f"n{number}") for number in range(1, 6))
    state = await genie.init(heartbeat_interval=0.05, **QUIET_SETTINGS)
    await until(lambda: len(state.nodes) == 5)
    controller.nodes_per_reply = 2
    sent = state.stats["heartbeats_sent"]
    await until(lambda: state.stats["heartbeats_sent"] > sent + 2)
    assert sorted(state.nodes) == ["n1", "n2", "n3", "n4", "n5"]
    assert not [event for event in state.events.history() if event.type is EventType.NODE_LOST]


async def test_session_leaves_a_controller_that_no_longer_leads(controller: SmallController) -> None:
    """That controller still answers from memory while its store is unavailable."""
    with SmallController() as second:
        controller.more_controllers = (second.address,)
        await genie.init(heartbeat_interval=0.05, **QUIET_SETTINGS)
        assert second.count(SessionHeartbeat) == 0
        controller.leading = False
        await until(lambda: second.count(SessionHeartbeat) > 1)
        await genie.shutdown()
