"""A client of several controllers: it finds one that responds, and the one that leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from genie.errors import (
    ConnectionLostError,
    GenieError,
    JobNotFoundError,
    NotLeaderError,
    ReplyLostError,
    StoreUnavailableError,
)
from genie.model.messages import CreateToken, GetStatus, ListNodes, Message, NodesReply
from genie.model.messages.handshake import Hello
from genie.model.tenant import TokenKind
from genie.runtime import controller_connection, rpc
from genie.runtime.controller_connection import ControllerConnection, open_controller_connection
from genie.runtime.credentials import Access
from genie.runtime.network import TcpNetwork
from tests.cluster.small_controller import make_gpu, make_node
from tests.fakes.controller import HOST, OWNER_TOKEN, FakeController
from tests.ports import free_port
from tests.waiting import until


@pytest.fixture
async def one() -> AsyncIterator[FakeController]:
    async with FakeController(nodes=(make_node("n1", make_gpu()),)).listening() as fake:
        yield fake


@pytest.fixture
async def two() -> AsyncIterator[FakeController]:
    async with FakeController(nodes=(make_node("n2", make_gpu()),)).listening() as fake:
        yield fake


@asynccontextmanager
async def connected(*ports: int, timeout_s: float = 5) -> AsyncIterator[ControllerConnection]:
    others = tuple((HOST, port) for port in ports[1:])
    access = Access(host=HOST, port=ports[0], token=OWNER_TOKEN, tls=None, other_servers=others)
    async with open_controller_connection(
        access, network=TcpNetwork(), program="test", timeout_s=timeout_s
    ) as connection:
        yield connection


async def fetch_node_id(connection: ControllerConnection, *, timeout_s: float = 10) -> str:
    return (await connection.call(ListNodes(), timeout_s=timeout_s)).nodes[0].info.node_id


async def test_lost_connection_is_replaced_by_one_to_an_announced_controller(two: FakeController) -> None:
    first = FakeController(more_controllers=(two.address,))
    async with asyncio.timeout(30):
        async with first.listening():
            opened = connected(first.port)
            connection = await opened.__aenter__()
        try:
            assert await fetch_node_id(connection) == "n2"
            assert connection.where == two.address
            assert connection.access.port == two.port
        finally:
            await opened.__aexit__(None, None, None)


async def test_lost_connection_is_not_replaced_by_one_to_a_server_of_an_earlier_generation(
    two: FakeController,
) -> None:
    two.generation = 2
    restored = FakeController(more_controllers=(two.address,), generation=3)
    async with asyncio.timeout(30):
        async with restored.listening():
            opened = connected(restored.port)
            connection = await opened.__aenter__()
        try:
            with pytest.raises(GenieError, match=f"{two.address} has generation 2 of the cluster"):
                await fetch_node_id(connection, timeout_s=3)
            two.generation = 3
            assert await fetch_node_id(connection) == "n2"
        finally:
            await opened.__aexit__(None, None, None)


async def test_first_connection_is_to_any_known_controller(two: FakeController) -> None:
    async with connected(free_port(), two.port) as connection:
        assert connection.where == two.address


async def test_failed_first_connection_names_every_address_and_its_failure(one: FakeController) -> None:
    one.refusals[Hello] = NotLeaderError("this controller cannot check tokens")
    dead = free_port()
    with pytest.raises(NotLeaderError) as error:
        async with connected(dead, one.port):
            pass
    assert f"{HOST}:{dead} refused" in error.value.message
    assert f"{one.address}: this controller cannot check tokens" in error.value.message


async def test_unresponsive_first_controller_leaves_time_for_the_others(
    one: FakeController, two: FakeController
) -> None:
    one.silent = True
    async with connected(one.port, two.port, timeout_s=2) as connection:
        assert connection.where == two.address


async def test_rejected_request_is_sent_to_the_leader_that_the_standby_names(
    one: FakeController, two: FakeController
) -> None:
    one.leading = False
    one.refusals[ListNodes] = NotLeaderError.naming_leader(
        "this controller does not lead", leader=two.address
    )
    async with connected(one.port) as connection:
        assert await fetch_node_id(connection) == "n2"
        assert connection.where == two.address


async def test_request_that_a_standby_answers_stays_there(one: FakeController, two: FakeController) -> None:
    one.leader, one.more_controllers = two.address, (two.address,)
    async with connected(one.port) as connection:
        status = await connection.call(GetStatus(), timeout_s=5)
        assert (status.leading, status.leader, connection.where) == (False, two.address, one.address)
    assert two.count(GetStatus) == 0


async def test_standby_is_kept_while_its_leader_cannot_be_reached(
    one: FakeController,
) -> None:
    one.leading = False
    dead = f"{HOST}:{free_port()}"
    one.refusals[ListNodes] = NotLeaderError.naming_leader("it does not lead", leader=dead)
    async with connected(one.port) as connection:
        with pytest.raises(NotLeaderError) as error:
            await connection.call(ListNodes(), timeout_s=1)
        assert f"{dead} refused" in error.value.message
        assert f"{one.address}: it does not lead" in error.value.message
        assert connection.is_open and connection.reconnects == 0
        del one.refusals[ListNodes]
        assert await fetch_node_id(connection) == "n1"


async def test_servers_that_do_not_respond_do_not_delay_the_question_to_the_next_one(
    one: FakeController, two: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the leader is stopped: standbys name it until its lease ends."""
    monkeypatch.setattr(controller_connection, "_LEADER_QUERY_TIMEOUT_S", 1000.0)
    async with FakeController().listening() as stopped, FakeController().listening() as lost:
        stopped.silent = lost.silent = True
        one.leading, one.more_controllers = False, (lost.address, two.address)
        one.refusals[ListNodes] = NotLeaderError.naming_leader("it does not lead", leader=stopped.address)
        async with connected(one.port) as connection:
            assert await fetch_node_id(connection) == "n2"


async def test_call_is_repeated_at_the_standby_while_the_named_leader_does_not_respond(
    one: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby may be the next leader."""
    monkeypatch.setattr(controller_connection, "_LEADER_QUERY_TIMEOUT_S", 1000.0)
    async with FakeController().listening() as stopped, connected(one.port) as connection:
        stopped.silent = True
        one.refusals[ListNodes] = NotLeaderError.naming_leader("it does not lead", leader=stopped.address)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(fetch_node_id(connection))
            await until(lambda: one.count(ListNodes) == 3, what="the call is repeated")
            del one.refusals[ListNodes]
        assert call.result() == "n1" and connection.where == one.address


async def test_call_that_the_standby_carries_out_is_not_interrupted_by_its_search_for_a_leader(
    one: FakeController, two: FakeController
) -> None:
    """Otherwise the outcome would be unknown."""
    answer_of_one, answer_of_two, attempts, is_leader_asked = one._handle, two._handle, 0, asyncio.Event()

    async def handle_at_standby(peer: rpc.Peer, request: Message) -> Message:
        nonlocal attempts
        if isinstance(request, CreateToken):
            attempts += 1
            if attempts == 1:
                raise NotLeaderError.naming_leader("it does not lead", leader=two.address)
            is_leader_asked.set()
            await until(lambda: not connection._is_searching_leader, what="the leader has replied")
        return await answer_of_one(peer, request)

    async def handle_at_leader(peer: rpc.Peer, request: Message) -> Message:
        if isinstance(request, Hello):
            await is_leader_asked.wait()
        return await answer_of_two(peer, request)

    one._handle, two._handle = handle_at_standby, handle_at_leader  # type: ignore[method-assign]
    async with connected(one.port) as connection:
        one.refusals[CreateToken] = JobNotFoundError("of a test")  # the fake controller creates no tokens
        with pytest.raises(JobNotFoundError):
            await connection.call(CreateToken(kind=TokenKind.USER), timeout_s=10, idempotent=False)
        assert (connection.where, connection.reconnects, attempts) == (one.address, 0, 2)
        assert two.count(Hello) == 1


async def test_lost_reply_to_a_forwarded_request_is_requested_again_from_the_same_standby(
    one: FakeController, two: FakeController
) -> None:
    """It knows the next leader already, or is that itself."""
    answer, failed = one._handle, 0

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        nonlocal failed
        if isinstance(request, ListNodes) and not failed:
            failed += 1
            raise ReplyLostError("the leader was lost", retry_after_s=0.1)
        return await answer(peer, request)

    one._handle = handle  # type: ignore[method-assign]
    one.more_controllers, two.leading = (two.address,), False
    async with connected(one.port) as connection:
        assert await fetch_node_id(connection) == "n1"
    assert (failed, two.count(Hello)) == (1, 0)


async def test_idempotent_call_moves_from_a_controller_without_a_store_to_the_leader(
    one: FakeController, two: FakeController
) -> None:
    one.leading, one.more_controllers = False, (two.address,)
    one.refusals[ListNodes] = StoreUnavailableError("the store does not respond")
    async with connected(one.port) as connection:
        assert await fetch_node_id(connection) == "n2"


async def test_interrupted_request_that_is_not_idempotent_is_not_sent_to_another_controller(
    one: FakeController, two: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.more_controllers = (two.address,)
    answer = one._handle

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        if isinstance(request, CreateToken):
            peer.close()
        return await answer(peer, request)

    monkeypatch.setattr(one, "_handle", handle)
    async with connected(one.port) as connection:
        with pytest.raises(ConnectionLostError, match="may have been executed"):
            await connection.call(CreateToken(kind=TokenKind.USER), timeout_s=10, idempotent=False)
        await until(lambda: connection.where == two.address, what="the connection moves")
    assert two.count(CreateToken) == 0


async def test_server_on_another_machine_is_not_used_without_tls(
    one: FakeController, two: FakeController
) -> None:
    one.more_controllers = ("10.255.255.1:5555", two.address)
    async with connected(one.port) as connection:
        assert await fetch_node_id(connection) == "n1"
        assert [server for server in connection._servers.list_in_connect_order() if server[0] != HOST] == []


async def test_all_announced_controllers_are_listed(one: FakeController, tmp_path: Path) -> None:
    one.more_controllers = (f"{HOST}:2", f"{HOST}:1", "no address")
    async with connected(one.port) as connection:
        assert connection.announced_servers == tuple(sorted([(HOST, 1), (HOST, 2), (HOST, one.port)]))


async def test_move_to_leader_keeps_the_connection_if_no_other_controller_leads(
    one: FakeController, two: FakeController
) -> None:
    one.more_controllers, two.leading = (two.address,), False
    async with connected(one.port) as connection:
        assert not await connection.move_to_leader(timeout_s=5)
        assert connection.is_open and connection.where == one.address
        two.leading = True
        await until(lambda: connection.move_to_leader(timeout_s=5), what="the controller is asked again")
        await until(lambda: connection.is_open and connection.where == two.address)


async def test_call_leaves_a_controller_that_no_longer_responds(
    one: FakeController, two: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power failure: no packet says that the connection is lost."""
    monkeypatch.setattr(controller_connection, "_REPLY_OVERDUE_AFTER_S", 0.1)
    one.more_controllers, two.leading = (two.address,), False
    async with connected(one.port) as connection:
        one.silent = True
        async with asyncio.TaskGroup() as group:
            call = group.create_task(fetch_node_id(connection, timeout_s=30))
            await until(lambda: two.count(Hello) > 0, what="the other controller is asked")
            assert connection.where == one.address, "no other controller leads yet"
            two.leading = True
        assert call.result() == "n2"


async def test_only_an_idempotent_call_is_repeated_after_a_lost_reply_to_a_forwarded_request(
    one: FakeController,
) -> None:
    answer, failed = one._handle, 0

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        nonlocal failed
        if isinstance(request, ListNodes | CreateToken) and not failed:
            failed += 1
            raise ReplyLostError("the leader was lost", retry_after_s=0.01)
        return await answer(peer, request)

    one._handle = handle  # type: ignore[method-assign]
    async with connected(one.port) as connection:
        assert await fetch_node_id(connection) == "n1" and failed == 1
        failed = 0
        with pytest.raises(ReplyLostError):
            await connection.call(CreateToken(kind=TokenKind.USER), timeout_s=5, idempotent=False)
        assert failed == 1


async def test_connection_reports_the_highest_age_of_a_reply(one: FakeController) -> None:
    answer, ages_s = one._handle, [0.5, 3.0, 0.0]

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        if isinstance(request, ListNodes):
            return NodesReply(nodes=(), age_s=ages_s.pop(0))
        return await answer(peer, request)

    one._handle = handle  # type: ignore[method-assign]
    async with connected(one.port) as connection:
        for expected in (0.5, 3.0, 3.0):
            await connection.call(ListNodes(), timeout_s=5)
            assert connection.oldest_reply_age_s == expected
