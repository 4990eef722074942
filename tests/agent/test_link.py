"""The link: which controller it finds, what it takes for evidence, and what it gives up on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from genie.agent.link import Link
from genie.errors import ConnectionLostError, NotLeaderError, ProtocolError, TokenRefusedError
from genie.model.messages import GetStatus, Message
from genie.model.tenant import TokenKind
from genie.runtime import rpc
from genie.runtime.clock import SystemClock
from genie.runtime.credentials import Access
from genie.runtime.network import TcpNetwork
from tests.fakes.controller import HOST, FakeController
from tests.waiting import until


@dataclass
class Watched:
    """A link and what it did."""

    link: Link
    attended: list[str] = field(default_factory=list)
    nobody: list[float] = field(default_factory=list)
    attend: Callable[[rpc.Peer], Awaitable[None]] | None = None

    async def take(self, peer: rpc.Peer) -> None:
        self.attended.append(peer.name)
        if self.attend is not None:
            await self.attend(peer)
        else:
            await peer.wait_closed()


async def _refuse(peer: rpc.Peer, request: Message) -> Message:
    raise ProtocolError("not asked in this test")


@asynccontextmanager
async def linked(*fakes: FakeController, ports: tuple[int, ...] = ()) -> AsyncIterator[Watched]:
    every = [*(fake.port for fake in fakes), *ports]
    access = Access(host=HOST, port=every[0], token=fakes[0].token(TokenKind.NODE), tls=None)
    link = Link(access, network=TcpNetwork(), clock=SystemClock(), rng=random.Random(1), handler=_refuse)
    link.endpoints = tuple((HOST, port) for port in every)
    link.timeout_s, link.backoff_s_max = 0.3, 0.1
    watched = Watched(link)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(link.run(watched.take, watched.nobody.append))
        try:
            yield watched
        finally:
            task.cancel()


@pytest.fixture
async def second(tmp_path: Path) -> AsyncIterator[FakeController]:
    async with FakeController(tmp_path / "second").listening() as fake:
        yield fake


async def test_the_one_that_leads_is_found(controller: FakeController, second: FakeController) -> None:
    controller.leading = False
    async with linked(controller, second) as watched:
        await until(lambda: watched.attended == [second.address])
        assert watched.link.is_up
        assert watched.link.endpoints[0] == (HOST, second.port)
    assert watched.nobody == []


async def test_refused_connections_and_followers_are_evidence_that_nobody_leads(
    controller: FakeController,
) -> None:
    controller.leading = False
    async with linked(controller, ports=(1,)) as watched:
        await until(lambda: len(watched.nobody) >= 2, what="evidence in every round")
        assert watched.nobody == sorted(watched.nobody)


async def test_one_that_is_silent_spoils_the_evidence(
    controller: FakeController, second: FakeController
) -> None:
    controller.leading = False
    second.silent = True
    async with linked(controller, second) as watched:
        await until(lambda: len(controller.hellos) >= 3, what="several rounds")
        assert watched.nobody == []
        second.silent, second.leading = False, False
        await until(lambda: watched.nobody, what="evidence once it speaks")


async def test_calls_need_a_connection(controller: FakeController) -> None:
    controller.leading = False
    async with linked(controller) as watched:
        await until(lambda: controller.hellos)
        with pytest.raises(ConnectionLostError, match="no connection"):
            await watched.link.call(GetStatus(), timeout_s=1)


async def test_a_refusal_is_final_until_somebody_has_taken_us(controller: FakeController) -> None:
    async def refused(peer: rpc.Peer) -> None:
        raise TokenRefusedError("token x was revoked")

    with pytest.raises(ExceptionGroup) as caught:
        async with linked(controller) as watched:
            watched.attend = refused
            await until(lambda: False, timeout_s=5)
    assert caught.group_contains(TokenRefusedError)


async def test_a_refusal_later_is_tried_again(controller: FakeController) -> None:
    async def refused(peer: rpc.Peer) -> None:
        raise TokenRefusedError("token x was revoked")

    async with linked(controller) as watched:
        watched.link.was_taken = True
        watched.attend = refused
        await until(lambda: len(watched.attended) >= 3, what="further attempts")
    assert watched.nobody == []


async def test_a_leader_that_loses_its_lead_in_the_middle_is_asked_again(controller: FakeController) -> None:
    async def no_longer(peer: rpc.Peer) -> None:
        controller.leading = False
        raise NotLeaderError("another one leads")

    async with linked(controller) as watched:
        watched.attend = no_longer
        await until(lambda: watched.nobody, what="evidence from the next round")
