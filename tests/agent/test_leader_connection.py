"""Finding the leader, detecting that there is none, and errors that are final."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from genie.agent.identity import read_identity, write_controller_addresses, write_identity
from genie.agent.leader_connection import LeaderConnection
from genie.errors import (
    ConnectionLostError,
    NodeRemovedError,
    NotLeaderError,
    OutdatedLeaderError,
    ProtocolError,
    TokenRefusedError,
)
from genie.model.messages import GetStatus, Message
from genie.model.messages.handshake import Hello, Welcome
from genie.model.tenant import TokenKind
from genie.processes.clock import SystemClock
from genie.runtime import rpc, tls
from genie.runtime.credentials import Access
from genie.runtime.network import ClientTls, TcpNetwork
from tests.fakes.controller import HOST, FakeController
from tests.waiting import until


@dataclass
class RecordedConnection:
    """A connection and its recorded callbacks."""

    link: LeaderConnection
    attended: list[str] = field(default_factory=list)
    no_leader: list[float] = field(default_factory=list)
    attend: Callable[[rpc.Peer], Awaitable[None]] | None = None

    async def take(self, peer: rpc.Peer) -> None:
        self.attended.append(peer.name)
        if self.attend is not None:
            await self.attend(peer)
        else:
            await peer.wait_closed()


async def _reject_request(peer: rpc.Peer, request: Message) -> Message:
    raise ProtocolError("not asked in this test")


@asynccontextmanager
async def connect_to_controllers(
    *fakes: FakeController, ports: tuple[int, ...] = (), timeout_s: float = 0.3
) -> AsyncIterator[RecordedConnection]:
    every = [*(fake.port for fake in fakes), *ports]
    trusted = None
    if fakes[0].use_tls:
        trusted = ClientTls(tls.client_context(fakes[0].authority.ca_pem), tls.CONTROLLER_NAME)
    access = Access(host=HOST, port=every[0], token=fakes[0].token(TokenKind.NODE), tls=trusted)
    link = LeaderConnection(
        access,
        network=TcpNetwork(),
        clock=SystemClock(),
        rng=random.Random(1),
        handler=_reject_request,
        timeout_s=timeout_s,
        backoff_s_max=0.1,
    )
    link.endpoints = tuple((HOST, port) for port in every)
    watched = RecordedConnection(link)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(link.keep_connected_to_leader(watched.take, watched.no_leader.append))
        try:
            yield watched
        finally:
            task.cancel()


@pytest.fixture
async def second_controller(tmp_path: Path) -> AsyncIterator[FakeController]:
    async with FakeController(tmp_path / "second").listening() as fake:
        yield fake


async def test_leader_is_found(controller: FakeController, second_controller: FakeController) -> None:
    controller.leading = False
    async with connect_to_controllers(controller, second_controller) as watched:
        await until(lambda: watched.attended == [second_controller.address])
        assert watched.link.is_connected
        assert watched.link.endpoints[0] == (HOST, second_controller.port)
    assert watched.no_leader == []


async def test_controllers_that_do_not_respond_do_not_delay_the_search(
    controller: FakeController, second_controller: FakeController
) -> None:
    controller.silent = True
    async with connect_to_controllers(controller, second_controller, timeout_s=3600) as watched:
        await until(lambda: watched.attended == [second_controller.address])
        assert watched.link.is_connected
    assert watched.no_leader == []


async def test_leader_is_served_although_another_controller_rejects_the_token(
    controller: FakeController, second_controller: FakeController
) -> None:
    """Before the first registration, a rejection is final unless another controller leads."""
    controller.refusals[Hello] = TokenRefusedError("token x is unknown")
    async with connect_to_controllers(controller, second_controller) as watched:
        await until(lambda: watched.attended == [second_controller.address])


async def test_refused_connections_and_standbys_show_that_there_is_no_leader(
    controller: FakeController,
) -> None:
    controller.leading = False
    async with connect_to_controllers(controller, ports=(1,)) as watched:
        await until(lambda: len(watched.no_leader) >= 2, what="evidence in every round")
        assert watched.no_leader == sorted(watched.no_leader)


async def test_unresponsive_controller_may_be_the_leader(
    controller: FakeController, second_controller: FakeController
) -> None:
    controller.leading = False
    second_controller.silent = True
    async with connect_to_controllers(controller, second_controller) as watched:
        await until(lambda: len(controller.hellos) >= 3, what="several rounds")
        assert watched.no_leader == []
        second_controller.silent, second_controller.leading = False, False
        await until(lambda: watched.no_leader, what="evidence once it speaks")


async def test_call_requires_a_connection(controller: FakeController) -> None:
    controller.leading = False
    async with connect_to_controllers(controller) as watched:
        await until(lambda: controller.hellos)
        with pytest.raises(ConnectionLostError, match="no connection"):
            await watched.link.call_leader(GetStatus(), timeout_s=1)


async def test_rejection_is_final_before_the_first_registration(controller: FakeController) -> None:
    async def refused(peer: rpc.Peer) -> None:
        raise TokenRefusedError("token x was revoked")

    with pytest.raises(ExceptionGroup) as caught:
        async with connect_to_controllers(controller) as watched:
            watched.attend = refused
            await until(lambda: False)
    assert caught.group_contains(TokenRefusedError)


async def test_final_error_of_the_leader_is_raised_rather_than_that_of_another_controller(
    controller: FakeController, second_controller: FakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.refusals[Hello] = TokenRefusedError("token x is unknown")
    is_rejected = asyncio.Event()
    try_endpoint, reply_to_hello = LeaderConnection._try_controller, second_controller._answer_hello

    async def try_and_record(*arguments: Any) -> object:
        result = await try_endpoint(*arguments)
        is_rejected.set()
        return result

    async def reply_after_the_rejection(peer: rpc.Peer, request: Hello) -> Welcome:
        await is_rejected.wait()
        return await reply_to_hello(peer, request)

    async def refuse(peer: rpc.Peer) -> None:
        raise ProtocolError("node n1 has another version")

    monkeypatch.setattr(LeaderConnection, "_try_controller", try_and_record)
    monkeypatch.setattr(second_controller, "_answer_hello", reply_after_the_rejection)
    with pytest.raises(ExceptionGroup) as caught:
        async with connect_to_controllers(controller, second_controller, timeout_s=10) as watched:
            watched.attend = refuse
            await until(lambda: False)
    assert caught.group_contains(ProtocolError) and not caught.group_contains(TokenRefusedError)


async def test_rejection_is_retried_after_the_first_registration(controller: FakeController) -> None:
    async def refused(peer: rpc.Peer) -> None:
        raise TokenRefusedError("token x was revoked")

    async with connect_to_controllers(controller) as watched:
        watched.link.apply_registration_reply(watched.link.endpoints, timeout_s=0.3, backoff_s_max=0.1)
        watched.attend = refused
        await until(lambda: len(watched.attended) >= 3, what="further attempts")
    assert watched.no_leader == []


async def test_removal_of_the_node_is_final_unless_another_controller_leads(
    controller: FakeController, second_controller: FakeController
) -> None:
    controller.refusals[Hello] = NodeRemovedError("node n1 was removed from the cluster")
    async with connect_to_controllers(controller, second_controller) as watched:
        watched.link.apply_registration_reply(watched.link.endpoints, timeout_s=0.3, backoff_s_max=0.1)
        await until(lambda: watched.attended, what="the other controller is served")
    with pytest.raises(ExceptionGroup) as caught:
        async with connect_to_controllers(controller) as watched:
            watched.link.apply_registration_reply(watched.link.endpoints, timeout_s=0.3, backoff_s_max=0.1)
            await until(lambda: False)
    assert caught.group_contains(NodeRemovedError)


@pytest.mark.parametrize("hours", [2, -48])
async def test_controller_with_a_wrong_clock_is_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hours: int
) -> None:
    """Its certificate is not valid yet, or expired, by the clock of the agent."""
    fake = FakeController(tmp_path / "tls", use_tls=True)
    fake.write_certificate(now=time.time() + hours * 3600)
    async with fake.listening():
        pass
    async with connect_to_controllers(fake) as watched:
        async with fake.listening():
            await until(lambda: "by the clock of this machine" in caplog.text)
        fake.write_certificate(now=time.time())
        async with fake.listening():
            await until(lambda: watched.attended)


async def test_controller_that_lost_leadership_is_retried(controller: FakeController) -> None:
    async def no_longer(peer: rpc.Peer) -> None:
        controller.leading = False
        raise NotLeaderError("another one leads")

    async with connect_to_controllers(controller) as watched:
        watched.attend = no_longer
        await until(lambda: watched.no_leader, what="evidence from the next round")


async def test_restarted_agent_tries_every_stored_controller(
    controller: FakeController, tmp_path: Path
) -> None:
    """The last leader may be down for good."""
    node_dir = tmp_path / "node"
    write_identity(
        node_dir,
        token=str(controller.token(TokenKind.NODE)),
        certificate_pem="",
        key_pem=b"",
        ca_pem="",
        controller=(HOST, 1),
    )
    write_controller_addresses(node_dir, ((HOST, 1), (HOST, controller.port)))
    link = LeaderConnection(
        read_identity(node_dir),
        network=TcpNetwork(),
        clock=SystemClock(),
        rng=random.Random(1),
        handler=_reject_request,
        timeout_s=0.3,
    )
    watched = RecordedConnection(link)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(link.keep_connected_to_leader(watched.take, watched.no_leader.append))
        await until(lambda: watched.attended == [controller.address])
        task.cancel()
    given = read_identity(node_dir, controller=(HOST, 2))
    assert (given.port, given.other_servers) == (2, ((HOST, 1), (HOST, controller.port)))


async def test_rejected_leader_is_logged_once_and_tried_after_the_others(
    controller: FakeController, second_controller: FakeController, caplog: pytest.LogCaptureFixture
) -> None:
    """Both claim to lead, as when a controller was restored from a backup and the previous one still runs."""
    attended: list[str] = []

    async def reject_first(peer: rpc.Peer) -> None:
        attended.append(peer.name)
        if peer.name == controller.address:
            raise OutdatedLeaderError("its leader token is older", hint="genie store restore")

    async with connect_to_controllers(controller) as watched:
        watched.attend = reject_first
        await until(lambda: len(attended) >= 2)
        watched.link.endpoints = ((HOST, controller.port), (HOST, second_controller.port))
        await until(lambda: attended.count(second_controller.address) >= 5)
    first = attended.index(second_controller.address)
    assert controller.address not in attended[first:]
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == 1
    assert f"controller {controller.address} is not accepted: its leader token is older" in messages[0]
    assert "genie store restore" in messages[0]
    assert watched.no_leader == []


async def test_leader_that_only_gossip_knows_is_found(
    controller: FakeController, second_controller: FakeController
) -> None:
    controller.leading = False
    async with connect_to_controllers(controller) as watched:
        watched.link.set_controllers_known_by_gossip([second_controller.address])
        await until(lambda: watched.attended == [second_controller.address])
        assert watched.link.endpoints[0] == (HOST, second_controller.port)


async def test_controllers_that_only_gossip_knows_are_no_evidence(
    controller: FakeController, second_controller: FakeController, tmp_path: Path
) -> None:
    """Any member can invent addresses. One that does not respond, or rejects the token, changes nothing."""
    controller.leading = False
    second_controller.silent = True
    async with FakeController(tmp_path / "third").listening() as third:
        third.refusals[Hello] = TokenRefusedError("token x is unknown")
        async with connect_to_controllers(controller) as watched:
            watched.link.set_controllers_known_by_gossip([second_controller.address, third.address])
            await until(lambda: len(watched.no_leader) >= 2, what="evidence in every round")
            assert watched.attended == []


async def test_without_tls_gossip_leads_to_no_other_machine(controller: FakeController) -> None:
    assert not controller.use_tls
    async with connect_to_controllers(controller) as watched:
        watched.link.set_controllers_known_by_gossip(["10.99.0.1:5555", "127.0.0.1:1"])
        assert watched.link.controllers_known_by_gossip == ((HOST, 1),)
