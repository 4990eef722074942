"""The reconnecting connection: calls wait for it, and are resent only if idempotent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genie.config import ClusterConfig
from genie.errors import (
    ConnectionLostError,
    GenieError,
    NotLeaderError,
    OverloadedError,
    StoreUnavailableError,
    UnreachableError,
)
from genie.model.messages import ListNodes, Message
from genie.model.names import parse_endpoint
from genie.runtime import rpc
from genie.runtime.controller_connection import ControllerConnection, open_controller_connection
from genie.runtime.credentials import Access, find_access
from genie.runtime.network import TcpNetwork
from tests.cluster.small_controller import TOKEN, SmallController
from tests.waiting import until


@pytest.fixture
async def connection_changes() -> list[tuple[bool, str]]:
    return []


@pytest.fixture
async def connection(
    controller: SmallController, connection_changes: list[tuple[bool, str]]
) -> AsyncIterator[ControllerConnection]:
    access = await find_access(
        ClusterConfig(), state_dir=Path(os.environ["GENIE_STATE_DIR"]), network=TcpNetwork(), timeout_s=5
    )
    async with open_controller_connection(
        access,
        network=TcpNetwork(),
        program="test",
        timeout_s=5,
        on_change=lambda up, why: connection_changes.append((up, why)),
    ) as opened:
        yield opened


@pytest.mark.parametrize(("host", "where"), [("::1", "[::1]:7100"), ("gpu-box", "gpu-box:7100")])
async def test_address_of_a_connection_can_be_parsed_again(host: str, where: str) -> None:
    """`genie token create` prints it as the argument of `genie login`."""
    access = Access(host=host, port=7100, token=TOKEN, tls=None)
    opened = ControllerConnection(
        access, network=TcpNetwork(), program="test", on_change=lambda _up, _why: None
    )
    assert opened.where == where
    assert parse_endpoint(opened.where) == (host, 7100)


async def test_call_during_an_outage_completes_after_it(
    controller: SmallController, connection: ControllerConnection
) -> None:
    controller.stop()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(connection.call(ListNodes(), timeout_s=10))
        await until(lambda: not connection.is_open)
        controller.start()
    assert len(call.result().nodes) == 1


async def test_loss_and_reconnection_are_reported_with_the_reason(
    controller: SmallController, connection: ControllerConnection, connection_changes: list[tuple[bool, str]]
) -> None:
    controller.stop()
    await until(lambda: len(connection_changes) == 1)
    controller.start()
    await until(lambda: len(connection_changes) == 2)
    assert [up for up, _ in connection_changes] == [False, True]
    assert all(str(controller.port) in why for _, why in connection_changes)
    assert connection.reconnects == 1


async def test_call_that_times_out_during_an_outage_raises_the_cause(
    controller: SmallController, connection: ControllerConnection
) -> None:
    controller.stop()
    await until(lambda: not connection.is_open)
    with pytest.raises((UnreachableError, ConnectionLostError), match=str(controller.port)):
        await connection.call(ListNodes(), timeout_s=0.5)


async def test_interrupted_request_is_resent_only_if_idempotent(
    controller: SmallController, connection: ControllerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = controller._handle
    cut = 0

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        nonlocal cut
        if isinstance(request, ListNodes) and cut < 2:
            cut += 1
            peer.close()
        return await answer(peer, request)

    monkeypatch.setattr(controller, "_handle", handle)
    connection.disconnect()
    assert (await connection.call(ListNodes(), timeout_s=10)).nodes
    assert cut == 2
    cut = 1
    with pytest.raises(ConnectionLostError, match="may have been executed"):
        await connection.call(ListNodes(), timeout_s=10, idempotent=False)


async def test_dropped_connection_is_reopened(
    controller: SmallController, connection: ControllerConnection
) -> None:
    connection.disconnect()
    assert (await connection.call(ListNodes(), timeout_s=10)).nodes
    assert connection.reconnects == 1


async def test_call_waits_for_a_leader(
    controller: SmallController, connection: ControllerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = controller._handle
    calls = 0

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        nonlocal calls
        if isinstance(request, ListNodes):
            calls += 1
            if calls < 3:
                raise NotLeaderError("an election is under way")
        return await answer(peer, request)

    monkeypatch.setattr(controller, "_handle", handle)
    connection.disconnect()
    assert (await connection.call(ListNodes(), timeout_s=10)).nodes
    calls = -1000
    with pytest.raises(NotLeaderError):
        await connection.call(ListNodes(), timeout_s=0.3)


async def test_only_an_idempotent_call_is_sent_again_when_the_store_is_unavailable(
    controller: SmallController, connection: ControllerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = controller._handle
    calls = 0

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        nonlocal calls
        if isinstance(request, ListNodes):
            calls += 1
            if calls == 1:
                raise StoreUnavailableError("the store does not respond")
        return await answer(peer, request)

    monkeypatch.setattr(controller, "_handle", handle)
    connection.disconnect()
    assert (await connection.call(ListNodes(), timeout_s=20)).nodes
    assert calls == 2
    calls = 0
    with pytest.raises(StoreUnavailableError):
        await connection.call(ListNodes(), timeout_s=20, idempotent=False)
    assert calls == 1


async def test_call_waits_as_long_as_the_controller_without_store_says(
    controller: SmallController, connection: ControllerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = controller._handle
    waits_s = [0.01]

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        if isinstance(request, ListNodes) and waits_s:
            raise StoreUnavailableError("the store does not respond", retry_after_s=waits_s.pop())
        return await answer(peer, request)

    monkeypatch.setattr(controller, "_handle", handle)
    assert (await connection.call(ListNodes(), timeout_s=10)).nodes
    waits_s.append(60.0)
    with pytest.raises(StoreUnavailableError):
        await connection.call(ListNodes(), timeout_s=10)


async def test_error_in_the_block_of_a_connection_is_raised_unchanged(controller: SmallController) -> None:
    access = await find_access(
        ClusterConfig(), state_dir=Path(os.environ["GENIE_STATE_DIR"]), network=TcpNetwork(), timeout_s=5
    )
    with pytest.raises(GenieError, match="mine"):
        async with open_controller_connection(access, network=TcpNetwork(), program="test", timeout_s=5):
            raise GenieError("mine")


async def test_rejected_call_is_sent_again_after_the_stated_time_within_its_timeout(
    controller: SmallController, connection: ControllerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = controller._handle
    rejections = [0.01, 0.01]

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        if isinstance(request, ListNodes) and rejections:
            raise OverloadedError("the limit is reached", retry_after_s=rejections.pop())
        return await answer(peer, request)

    monkeypatch.setattr(controller, "_handle", handle)
    assert len((await connection.call(ListNodes(), timeout_s=10)).nodes) == 1
    rejections.append(60.0)
    with pytest.raises(OverloadedError, match="the limit is reached"):
        await connection.call(ListNodes(), timeout_s=10)
