"""The kept connection: calls wait for it, are sent again where that is safe, and say so where it is not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genie.cluster.link import Link, open_link
from genie.config import ClusterConfig
from genie.errors import ConnectionLostError, GenieError, NotLeaderError, UnreachableError
from genie.model.messages import ListNodes, Message
from genie.runtime import rpc
from genie.runtime.credentials import find_access
from genie.runtime.network import TcpNetwork
from tests.cluster.small_controller import SmallController
from tests.waiting import until


@pytest.fixture
async def changes() -> list[tuple[bool, str]]:
    return []


@pytest.fixture
async def link(controller: SmallController, changes: list[tuple[bool, str]]) -> AsyncIterator[Link]:
    access = await find_access(
        ClusterConfig(), state_dir=Path(os.environ["GENIE_STATE_DIR"]), network=TcpNetwork(), timeout_s=5
    )
    async with open_link(
        access,
        network=TcpNetwork(),
        program="test",
        timeout_s=5,
        on_change=lambda up, why: changes.append((up, why)),
    ) as opened:
        yield opened


async def test_a_call_during_an_outage_is_answered_after_it(controller: SmallController, link: Link) -> None:
    controller.stop()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(link.call(ListNodes(), timeout_s=10))
        await until(lambda: not link.is_open)
        controller.start()
    assert len(call.result().nodes) == 1


async def test_both_ends_of_an_outage_are_told_with_the_reason(
    controller: SmallController, link: Link, changes: list[tuple[bool, str]]
) -> None:
    controller.stop()
    await until(lambda: len(changes) == 1)
    controller.start()
    await until(lambda: len(changes) == 2)
    assert [up for up, _ in changes] == [False, True]
    assert all(str(controller.port) in why for _, why in changes)
    assert link.reconnects == 1


async def test_a_call_whose_time_runs_out_during_an_outage_says_what_is_wrong(
    controller: SmallController, link: Link
) -> None:
    controller.stop()
    await until(lambda: not link.is_open)
    with pytest.raises((UnreachableError, ConnectionLostError), match=str(controller.port)):
        await link.call(ListNodes(), timeout_s=0.5)


async def test_a_request_that_was_cut_off_is_sent_again_only_where_that_is_safe(
    controller: SmallController, link: Link, monkeypatch: pytest.MonkeyPatch
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
    link.drop()
    assert (await link.call(ListNodes(), timeout_s=10)).nodes
    assert cut == 2
    cut = 1
    with pytest.raises(ConnectionLostError, match="may or may not have been done"):
        await link.call(ListNodes(), timeout_s=10, again=False)


async def test_a_connection_that_is_dropped_is_made_anew(controller: SmallController, link: Link) -> None:
    link.drop()
    assert (await link.call(ListNodes(), timeout_s=10)).nodes
    assert link.reconnects == 1


async def test_nobody_leading_yet_is_waited_for(
    controller: SmallController, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = controller._handle
    asked = 0

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        nonlocal asked
        if isinstance(request, ListNodes):
            asked += 1
            if asked < 3:
                raise NotLeaderError("an election is under way")
        return await answer(peer, request)

    monkeypatch.setattr(controller, "_handle", handle)
    link.drop()
    assert (await link.call(ListNodes(), timeout_s=10)).nodes
    asked = -1000
    with pytest.raises(NotLeaderError):
        await link.call(ListNodes(), timeout_s=0.3)


async def test_an_error_in_the_block_comes_out_as_it_is(controller: SmallController) -> None:
    access = await find_access(
        ClusterConfig(), state_dir=Path(os.environ["GENIE_STATE_DIR"]), network=TcpNetwork(), timeout_s=5
    )
    with pytest.raises(GenieError, match="mine"):
        async with open_link(access, network=TcpNetwork(), program="test", timeout_s=5):
            raise GenieError("mine")
