"""The session without async: in scripts, and in code that an event loop already runs."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest

import genie
from genie.errors import AlreadyInitializedError, UnreachableError
from genie.model.messages import SessionEnd
from tests.cluster.small_controller import SmallController


def test_connect_blocks_until_there_is_a_session(controller: SmallController) -> None:
    state = genie.connect("127.0.0.1", controller.port)
    assert state.initialized
    assert genie.get_cluster_state() is state


def test_disconnect_ends_what_connect_began(controller: SmallController) -> None:
    genie.disconnect()
    state = genie.connect()
    genie.disconnect()
    assert not genie.is_initialized()
    assert not state.initialized
    assert controller.count(SessionEnd) == 1
    genie.disconnect()
    assert genie.connect() is not state
    genie.disconnect()


async def test_disconnect_works_where_an_event_loop_runs_as_in_a_notebook(
    controller: SmallController,
) -> None:
    await genie.init()
    genie.disconnect()
    assert not genie.is_initialized()


async def test_connect_works_where_an_event_loop_runs_as_in_a_notebook(controller: SmallController) -> None:
    state = genie.connect()
    assert set(state.nodes) == {"n1"}
    assert await genie.init() is state
    await genie.shutdown()
    assert not genie.is_initialized()


def test_a_session_lasts_as_long_as_its_block(controller: SmallController) -> None:
    with genie.session() as state:
        assert genie.get_cluster_state() is state
        assert controller.count(SessionEnd) == 0
    assert not genie.is_initialized()
    assert controller.count(SessionEnd) == 1


async def test_a_session_block_works_where_an_event_loop_runs(controller: SmallController) -> None:
    with genie.session() as state:
        await asyncio.sleep(0)
        assert state.initialized
    assert not genie.is_initialized()


def test_a_session_ends_when_its_block_raises(controller: SmallController) -> None:
    with pytest.raises(ZeroDivisionError), genie.session():
        raise ZeroDivisionError
    assert not genie.is_initialized()


def test_a_session_inside_another_leaves_the_outer_one_open(controller: SmallController) -> None:
    with genie.session() as outer:
        with genie.session() as inner:
            assert inner is outer
        assert genie.is_initialized()
    assert not genie.is_initialized()


def test_a_session_with_other_arguments_is_refused_inside_another(controller: SmallController) -> None:
    with genie.session(), pytest.raises(AlreadyInitializedError, match="backend"):
        genie.connect(backend="tcp")


def test_a_failed_connect_raises_and_leaves_nothing(
    controller: SmallController, unused_tcp_port: int
) -> None:
    with pytest.raises(UnreachableError):
        genie.connect("127.0.0.1", unused_tcp_port)
    assert not genie.is_initialized()
    assert [t.name for t in threading.enumerate() if t.name.startswith("genie-session")] == []


@pytest.mark.parametrize("function", [genie.connect, genie.session])
def test_they_take_what_init_takes(function: object) -> None:
    assert inspect.signature(function) == inspect.signature(genie.init)  # type: ignore[arg-type]
