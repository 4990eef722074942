"""Limits on authenticated connections: per token, for all users, and the reserve for the owner."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from genie.controller import connection as connections
from genie.errors import OverloadedError
from genie.model.messages import RevokeToken
from genie.model.tenant import TokenKind
from genie.processes import memory
from genie.runtime import connection_limits
from genie.tenancy.access import parse_token
from tests.controller.running_controller import running_controller
from tests.waiting import until


async def test_token_at_its_connection_limit_is_rejected_and_the_owner_can_revoke_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.CONNECTIONS_PER_TOKEN_MAX, TokenKind.USER, 3)
    async with running_controller(tmp_path) as one, AsyncExitStack() as stack:
        red = await one.token(TokenKind.USER, tenant="red")
        opened = [await stack.enter_async_context(one.client(red)) for _ in range(3)]
        with pytest.raises(OverloadedError, match="limit of 3 connections with token") as caught:
            await stack.enter_async_context(one.client(red))
        assert caught.value.retry_after_s > 0
        blue = await one.token(TokenKind.USER, tenant="blue")
        async with one.client(blue) as other:
            assert await other.status(), "other tokens are not affected"
        opened[0].peer.close()
        await until(lambda: one.controller is not None and len(one.controller._connections) == 2)
        opened.append(await stack.enter_async_context(one.client(red)))
        async with one.client() as owner:
            await owner.ask(RevokeToken(token_id=parse_token(red).token_id))
        await until(lambda: all(client.peer.is_closed for client in opened))


async def test_users_can_use_only_half_of_the_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "CONNECTIONS_MAX", 64)
    async with running_controller(tmp_path) as one, AsyncExitStack() as stack:
        tokens = [await one.token(TokenKind.USER, tenant=tenant) for tenant in ("red", "blue", "green")]
        for number in range(32):
            await stack.enter_async_context(one.client(tokens[number % 3]))
        with pytest.raises(OverloadedError, match="limit of 32 connections of users"):
            await stack.enter_async_context(one.client(tokens[2]))
        async with one.client() as owner, one.agent("a") as agent:
            assert await owner.status()
            assert await agent.beat()


async def test_tenant_with_several_tokens_cannot_use_all_connections_of_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "CONNECTIONS_MAX", 64)
    async with running_controller(tmp_path) as one, AsyncExitStack() as stack:
        red = [await one.token(TokenKind.USER, tenant="red") for _ in range(2)]
        opened = [await stack.enter_async_context(one.client(red[number % 2])) for number in range(16)]
        for token in red:
            with pytest.raises(OverloadedError, match="limit of 16 connections of tenant red is reached"):
                await stack.enter_async_context(one.client(token))
        async with one.client(await one.token(TokenKind.USER, tenant="blue")) as blue:
            assert await blue.status()
        opened[0].peer.close()
        await until(lambda: one.controller is not None and len(one.controller._connections) == 15)
        await stack.enter_async_context(one.client(red[0]))


@pytest.mark.parametrize("busy", [False, True])
async def test_owner_beyond_its_limit_replaces_its_oldest_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setitem(connections.CONNECTIONS_PER_TOKEN_MAX, TokenKind.OWNER, 2)
    monkeypatch.setattr("genie.runtime.rpc.Peer.is_idle", not busy)
    async with running_controller(tmp_path) as one:
        assert one.controller is not None
        open_now = one.controller._connections
        monkeypatch.setattr(open_now, "_limits", replace(open_now._limits, user_connections_max=0))
        async with one.client() as first, one.client() as second, one.client() as third:
            assert await third.status()
            await until(lambda: first.peer.is_closed)
            assert await second.status()


async def test_owner_beyond_its_limit_uses_connections_that_users_do_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many processes with an owner token do not replace each other's connections."""
    monkeypatch.setattr(connection_limits, "CONNECTIONS_MAX", 64)
    monkeypatch.setitem(connections.CONNECTIONS_PER_TOKEN_MAX, TokenKind.OWNER, 2)
    async with running_controller(tmp_path) as one, AsyncExitStack() as stack:
        user = await one.token(TokenKind.USER)
        owners = [await stack.enter_async_context(one.client()) for _ in range(2 + 31)]
        async with one.client(user):
            with pytest.raises(OverloadedError, match="limit of 32 connections of users"):
                await stack.enter_async_context(one.client(user))
        assert [await client.status() for client in owners]
        owners[-1].peer.close()
        await until(lambda: one.controller is not None and len(one.controller._connections) == 32)
        async with one.client(user), one.client(user), one.client() as more:
            assert await more.status()
            await until(lambda: owners[0].peer.is_closed)


async def test_memory_is_returned_to_the_system_only_after_a_wave_of_closed_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise those that are still being closed keep it until as many others were closed."""
    monkeypatch.setattr(connections, "_MEMORY_RETURN_CLOSED_CONNECTIONS_MIN", 5)
    async with running_controller(tmp_path) as one, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(one.client()) for _ in range(12)]
        assert one.controller is not None
        limits = one.controller._connections._limits
        open_now = connections.Connections(limits)
        opened = [connections.Connection(client.peer) for client in clients]
        for each in opened:
            open_now.add(each)
        for each in opened[:6]:
            open_now.discard(each)
        calls = [open_now.is_memory_return_worthwhile(), open_now.is_memory_return_worthwhile()]
        open_now.discard(opened[6])
        calls += [open_now.is_memory_return_worthwhile() for _ in range(3)]
        assert calls == [False, False, False, False, True]
        open_now.reset_peak_count()
        assert not open_now.is_memory_return_worthwhile()


async def test_memory_is_returned_to_the_system_after_many_connections_were_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(connections, "_MEMORY_RETURN_CLOSED_CONNECTIONS_MIN", 5)
    monkeypatch.setattr(memory, "trim_heap", lambda: calls.append("trim"))
    monkeypatch.setattr(memory, "collect_garbage", lambda: calls.append("collect"))
    async with running_controller(tmp_path) as one:
        async with AsyncExitStack() as stack:
            for _ in range(5):
                await stack.enter_async_context(one.client())
        await until(lambda: "trim" in calls, timeout_s=30)
    # A closed TLS connection is a cycle: its memory is free only after the collection.
    assert calls == ["collect", "trim"]


async def test_low_file_limit_is_shown_to_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie.controller.controller.get_open_file_limit", lambda: 1024)
    async with running_controller(tmp_path) as one, one.client() as owner:
        (alarm,) = (await owner.status()).alarms
        assert alarm.startswith("the controller may open 1024 files, which allows 768 connections")
        async with one.client(await one.token(TokenKind.USER)) as user:
            assert (await user.status()).alarms == ()
