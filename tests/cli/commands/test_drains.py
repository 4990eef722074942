"""drain and undrain: what they print, and waiting for a node to become empty."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest

from genie.cli.commands import drains
from genie.errors import NodeNotFoundError, UnreachableError
from genie.model.allocation import Hold, NodeHolds
from genie.model.messages import (
    Done,
    DrainNode,
    DrainStarted,
    EmptyNode,
    ListNodes,
    Message,
    NodesReply,
    UndrainNode,
)
from tests.cli.sample_messages import make_node_view


@pytest.fixture(autouse=True)
def _short_poll_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "WAIT_POLL_INTERVAL_S", 0.01)


def nodes_reply(*job_ids: str, drained: str = "draining") -> NodesReply:
    holds = tuple(Hold(job_id=job_id, tenant="t", epoch=1, incarnation=1) for job_id in job_ids)
    view = msgspec.structs.replace(
        make_node_view(), drained=drained, node_holds=NodeHolds(node_id="box", holds=holds)
    )
    return NodesReply(nodes=(view,))


def replies_in_turn(replies: Sequence[Message | Exception]) -> Callable[[Message], Message]:
    """Return one reply after the other; the last one is repeated."""
    left = list(replies)

    def reply(request: Message) -> Message:
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    return reply


@pytest.mark.parametrize(
    ("started", "line"),
    [
        (DrainStarted(), "box is drained: no job runs there"),
        (
            DrainStarted(moving_job_ids=("j1", "j2", "j3"), staying_job_ids=("j4", "j5"), grace_s_max=30.0),
            "box is draining: 3 jobs move (grace period up to 30 s), 2 jobs run until they end: j4, j5",
        ),
        (
            DrainStarted(moving_job_ids=("j1",), grace_s_max=120.0),
            "box is draining: 1 job moves (grace period up to 2 min)",
        ),
        (DrainStarted(moving_job_ids=("j1",)), "box is draining: 1 job moves"),
        (DrainStarted(staying_job_ids=("j1",)), "box is draining: 1 job runs until it ends: j1"),
        (
            DrainStarted(staying_job_ids=tuple(f"j{number}" for number in range(12))),
            "box is draining: 12 jobs run until they end: j0, j1, j2, j3, j4, j5, j6, j7, j8, j9 and 2 more",
        ),
    ],
)
def test_drain_prints_which_jobs_move_and_which_stay(genie, controller, started, line) -> None:
    controller.replies[EmptyNode] = started
    assert genie("drain", "box", "--reason", "new fans") == (0, f"{line}\n", "")
    assert controller.requests == [EmptyNode(node_id="box", reason="new fans")]


def test_drain_that_keeps_jobs_lists_them(genie, controller) -> None:
    controller.replies |= {DrainNode: Done(), ListNodes: nodes_reply("j1.0", "j1.1")}
    ran = genie("drain", "box", "--keep-jobs")
    assert ran == (0, "box is draining: 1 job runs until it ends: j1\n", "")
    assert controller.requests == [DrainNode(node_id="box"), ListNodes()]


def test_undrain_confirms(genie, controller) -> None:
    controller.replies |= {UndrainNode: Done(), ListNodes: nodes_reply()}
    assert genie("undrain", "box") == (0, "box: accepting work again\n", "")
    controller.replies[ListNodes] = nodes_reply(drained="")
    assert genie("undrain", "box") == (0, "box: was not draining or drained\n", "")


def test_json_lists_moving_and_staying_jobs(genie, controller) -> None:
    controller.replies[EmptyNode] = DrainStarted(
        moving_job_ids=("j1",), staying_job_ids=("j2",), grace_s_max=5.0
    )
    assert json.loads(genie("drain", "box", "--json").out) == {
        "node": "box",
        "state": "draining",
        "moving_job_ids": ["j1"],
        "staying_job_ids": ["j2"],
        "grace_s_max": 5.0,
    }
    controller.replies[ListNodes] = nodes_reply()
    assert json.loads(genie("drain", "box", "--json", "--wait").out)["state"] == "drained"


@pytest.mark.parametrize("command", ["drain", "undrain"])
def test_only_node_ids_are_accepted(genie, controller, command) -> None:
    assert genie(command, "../box").code == 2
    assert controller.requests == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--timeout", "5m"], "--timeout requires --wait"),
        (["--wait", "--timeout", "soon"], "--timeout 'soon' is not a duration"),
    ],
)
def test_wrong_options_drain_nothing(genie, controller, options, message) -> None:
    ran = genie("drain", "box", *options)
    assert (ran.code, message in ran.err, controller.requests) == (2, True, [])


def test_unknown_node_is_an_error(genie, controller) -> None:
    controller.replies[EmptyNode] = NodeNotFoundError("there is no node 'box'")
    ran = genie("drain", "box", "--wait")
    assert (ran.code, ran.out, "there is no node" in ran.err) == (1, "", True)


# --- waiting ----------------------------------------------------------------------------------


def test_wait_prints_progress_until_the_node_is_empty(genie, controller) -> None:
    controller.replies[EmptyNode] = DrainStarted(moving_job_ids=("j1", "j2"))
    controller.replies[ListNodes] = replies_in_turn(
        [nodes_reply("j1", "j2"), nodes_reply("j1", "j2"), nodes_reply("j2"), nodes_reply()]
    )
    ran = genie("drain", "box", "--wait")
    assert (ran.code, ran.out) == (0, "box is draining: 2 jobs move\nbox is drained\n")
    assert ran.err == "box: 2 jobs are left: j1, j2\nbox: 1 job is left: j2\n"


def test_wait_for_a_node_without_jobs_returns_immediately(genie, controller) -> None:
    controller.replies[EmptyNode] = DrainStarted()
    assert genie("drain", "box", "--wait").out == "box is drained: no job runs there\n"


def test_wait_ends_when_the_node_leaves(genie, controller) -> None:
    controller.replies[EmptyNode] = DrainStarted(staying_job_ids=("j1",))
    controller.replies[ListNodes] = NodesReply(nodes=())
    assert genie("drain", "box", "--wait").code == 0


def test_wait_survives_a_change_of_leader(genie, controller) -> None:
    controller.replies[EmptyNode] = DrainStarted(moving_job_ids=("j1",))
    controller.replies[ListNodes] = replies_in_turn(
        [nodes_reply("j1"), UnreachableError("no route"), nodes_reply()]
    )
    ran = genie("drain", "box", "--wait")
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "box is drained")
    assert "waiting for the controller: no route" in ran.err


def test_timeout_lists_the_jobs_that_are_left(genie, controller) -> None:
    controller.replies |= {
        EmptyNode: DrainStarted(staying_job_ids=("j1", "j2")),
        ListNodes: nodes_reply("j1", "j2"),
    }
    ran = genie("drain", "box", "--wait", "--timeout", "0.3s")
    assert ran.code == 1
    assert "genie: box is not empty after 0 s: 2 jobs are left: j1, j2\n" in ran.err
    assert "hint: the drain of box continues ('genie undrain box' ends it)\n" in ran.err


def test_wait_fails_if_the_node_is_undrained(genie, controller) -> None:
    controller.replies |= {
        EmptyNode: DrainStarted(staying_job_ids=("j1",)),
        ListNodes: nodes_reply("j1", drained=""),
    }
    ran = genie("drain", "box", "--wait")
    assert ran.code == 1
    assert "box was undrained before it was empty: 1 job is left: j1" in ran.err


def test_interrupt_ends_the_wait_and_not_the_drain(genie, controller) -> None:
    def interrupt_and_reply(request: Message) -> Message:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return nodes_reply("j1")

    controller.replies |= {EmptyNode: DrainStarted(staying_job_ids=("j1",)), ListNodes: interrupt_and_reply}
    ran = genie("drain", "box", "--wait")
    assert ran.code == 130
    assert ran.err.endswith(
        "genie: stopped waiting; the drain of box continues ('genie undrain box' ends it)\n"
    )
    assert {type(request) for request in controller.requests} == {EmptyNode, ListNodes}
