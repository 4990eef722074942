"""Synchronous sessions, in scripts and inside a running event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest

import genie
from genie.errors import AlreadyInitializedError, UnreachableError
from genie.model.messages import SessionEnd
from tests.cluster.small_controller import SmallController


def test_connect_blocks_until_the_session_is_ready(controller: SmallController) -> None:
    state = genie.connect("127.0.0.1", controller.port)
    assert state.initialized
    assert genie.get_cluster_state() is state


def test_disconnect_ends_the_session(controller: SmallController) -> None:
    genie.disconnect()
    state = genie.connect()
    genie.disconnect()
    assert not genie.is_initialized()
    assert not state.initialized
    assert controller.count(SessionEnd) == 1
    genie.disconnect()
    assert genie.connect() is not state
    genie.disconnect()


async def test_disconnect_works_inside_a_running_event_loop(
    controller: SmallController,
) -> None:
    await genie.init()
    genie.disconnect()
    assert not genie.is_initialized()


async def test_connect_works_inside_a_running_event_loop(controller: SmallController) -> None:
    state = genie.connect()
    assert set(state.nodes) == {"n1"}
    assert await genie.init() is state
    await genie.shutdown()
    assert not genie.is_initialized()


def test_session_ends_with_its_block(controller: SmallController) -> None:
    with genie.session() as state:
        assert genie.get_cluster_state() is state
        assert controller.count(SessionEnd) == 0
    assert not genie.is_initialized()
    assert controller.count(SessionEnd) == 1


async def test_session_works_inside_a_running_event_loop(controller: SmallController) -> None:
    with genie.session() as state:
        await asyncio.sleep(0)
        assert state.initialized
    assert not genie.is_initialized()


def test_session_ends_when_its_block_raises(controller: SmallController) -> None:
    with pytest.raises(ZeroDivisionError), genie.session():
        raise ZeroDivisionError
    assert not genie.is_initialized()


def test_nested_session_keeps_the_outer_one_open(controller: SmallController) -> None:
    with genie.session() as outer:
        with genie.session() as inner:
            assert inner is outer
        assert genie.is_initialized()
    assert not genie.is_initialized()


def test_nested_session_with_other_arguments_is_rejected(controller: SmallController) -> None:
    with genie.session(), pytest.raises(AlreadyInitializedError, match="backend"):
        genie.connect(backend="tcp")


def test_failed_connect_leaves_no_session(controller: SmallController, unused_tcp_port: int) -> None:
    with pytest.raises(UnreachableError):
        genie.connect("127.0.0.1", unused_tcp_port)
    assert not genie.is_initialized()
    assert [t.name for t in threading.enumerate() if t.name.startswith("genie-session")] == []


@pytest.mark.parametrize("function", [genie.connect, genie.session])
def test_signature_is_that_of_init(function: object) -> None:
    assert inspect.signature(function) == inspect.signature(genie.init)  # type: ignore[arg-type]
