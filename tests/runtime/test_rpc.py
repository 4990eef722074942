"""Calls over a real connection: answers, errors, deadlines, both directions, and the end of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from genie.errors import ConnectionLostError, DeadlineError, GenieError, JobNotFoundError, ProtocolError
from genie.model.messages import (
    AGENT_REQUESTS,
    CancelJob,
    Done,
    FetchTrust,
    GetJob,
    Kill,
    LogChunk,
    Message,
    ReadLog,
    TrustAnchor,
)
from genie.runtime import rpc, wire
from genie.runtime.network import Channel, TcpNetwork
from tests.waiting import until

REQUESTS = (GetJob, CancelJob, FetchTrust, ReadLog)


class Server:
    """Answers by a small script; `peers` are those that are connected."""

    def __init__(self) -> None:
        self.peers: list[rpc.Peer] = []
        self.release = asyncio.Event()
        self.cancelled = 0

    async def handle(self, peer: rpc.Peer, request: Message) -> Message:
        if isinstance(request, GetJob):
            raise JobNotFoundError(f"no {request.job_id}", hint="look elsewhere")
        if isinstance(request, CancelJob):
            raise ZeroDivisionError("a bug")
        if isinstance(request, ReadLog):
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return LogChunk(data=b"late", start=0, next_offset=4, eof=True)
        return TrustAnchor(ca_pem="pem")

    async def accept(self, channel: Channel) -> None:
        channel.cap_bytes = wire.FRAME_BYTES_MAX
        peer = rpc.Peer(channel, requests=REQUESTS, handler=self.handle)
        self.peers.append(peer)
        await peer.run()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, int]]:
    server, network = Server(), TcpNetwork()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            network.serve("127.0.0.1", 0, server.accept, tls=None, on_listening=port.set_result)
        )
        yield server, await port
        task.cancel()


def dialled(port: int) -> AbstractAsyncContextManager[rpc.Peer]:
    return rpc.dial(TcpNetwork(), "127.0.0.1", port, tls=None, timeout_s=5)


async def test_answers_come_to_whoever_asked_in_any_order() -> None:
    async with serving() as (server, port), dialled(port) as peer:
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(peer.call(ReadLog(job_id="a"), timeout_s=5))
            quick = await peer.call(FetchTrust(), timeout_s=5)
            assert quick == TrustAnchor(ca_pem="pem")
            assert not slow.done()
            server.release.set()
        assert slow.result().data == b"late"


async def test_a_known_error_arrives_as_itself_and_a_bug_as_an_internal_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as (_, port), dialled(port) as peer:
        with pytest.raises(JobNotFoundError, match="no x") as caught:
            await peer.call(GetJob(job_id="x"), timeout_s=5)
        assert caught.value.hint == "look elsewhere"
        with pytest.raises(GenieError, match="internal error"):
            await peer.call(CancelJob(job_id="x"), timeout_s=5)
        assert "a bug" in caplog.text, "the traceback is in the server's log"
        assert await peer.call(FetchTrust(), timeout_s=5)


async def test_no_answer_in_time_is_a_deadline_error_and_a_late_answer_is_dropped() -> None:
    async with serving() as (server, port), dialled(port) as peer:
        with pytest.raises(DeadlineError, match=r"did not answer ReadLog within 0\.05 s"):
            await peer.call(ReadLog(job_id="a"), timeout_s=0.05)
        server.release.set()
        assert await peer.call(FetchTrust(), timeout_s=5)


async def test_the_other_side_may_ask_too() -> None:
    asked: list[Message] = []

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        asked.append(request)
        return Done()

    async with (
        serving() as (server, port),
        rpc.dial(
            TcpNetwork(), "127.0.0.1", port, tls=None, timeout_s=5, requests=AGENT_REQUESTS, handler=handle
        ),
    ):
        await until(lambda: server.peers)
        order = Kill(job_id="j", epoch=1, leader_token=1, reason="r")
        assert await server.peers[0].call(order, timeout_s=5) == Done()
        assert asked == [order]


async def test_a_side_that_answers_nothing_says_so() -> None:
    async with serving() as (server, port), dialled(port):
        await until(lambda: server.peers)
        with pytest.raises(ProtocolError, match="answers no requests"):
            await server.peers[0].call(Kill(job_id="j", epoch=1, leader_token=1, reason=""), timeout_s=5)


async def test_when_the_connection_ends_callers_are_told_and_handlers_are_cancelled() -> None:
    async with serving() as (server, port), dialled(port) as peer:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_lost(peer))
            await until(lambda: server.peers)
            await asyncio.sleep(0)
            server.peers[0].close()
        assert waiting.result()
        with pytest.raises(ConnectionLostError):
            await peer.call(FetchTrust(), timeout_s=5)
        await until(lambda: server.cancelled <= 1)


async def _lost(peer: rpc.Peer) -> bool:
    with pytest.raises(ConnectionLostError):
        await peer.call(ReadLog(job_id="a"), timeout_s=30)
    return True


async def test_what_the_block_raises_comes_out_of_dial_as_it_is() -> None:
    async with serving() as (_, port):
        with pytest.raises(KeyError):
            async with rpc.dial(TcpNetwork(), "127.0.0.1", port, tls=None, timeout_s=5):
                raise KeyError


async def test_a_peer_that_asks_too_much_at_once_is_not_read_further() -> None:
    async with serving() as (server, port), dialled(port) as peer:
        async with asyncio.TaskGroup() as group:
            flood = [
                group.create_task(peer.call(ReadLog(job_id="a"), timeout_s=20))
                for _ in range(rpc.IN_FLIGHT_MAX + 50)
            ]
            server.release.set()
        assert all(task.result().data == b"late" for task in flood), "they wait their turn, none is lost"


async def test_calls_that_go_together_have_each_its_own_outcome() -> None:
    async with serving() as (_, port), dialled(port) as peer:
        good, missing, late = await peer.call_each(
            [FetchTrust(), GetJob(job_id="a"), ReadLog(job_id="a")],  # type: ignore[list-item]
            timeout_s=0.2,
        )
        assert good == TrustAnchor(ca_pem="pem")
        assert isinstance(missing, JobNotFoundError)
        assert isinstance(late, DeadlineError)
        assert not peer._waiting, "nothing is remembered of them"
        peer.close()
        outcomes = await peer.call_each([FetchTrust(), FetchTrust()], timeout_s=5)
        assert [type(outcome) for outcome in outcomes] == [ConnectionLostError] * 2


async def test_numbers_of_calls_begin_anew_where_a_frame_has_no_more() -> None:
    async with serving() as (_, port), dialled(port) as peer:
        peer._next_call = (1 << 32) - 2
        for _ in range(3):
            assert (await peer.call(FetchTrust(), timeout_s=5)).ca_pem == "pem"
        assert peer._next_call < 10


class _Unread:
    """A channel whose other end asks again and again and reads nothing."""

    peer = "deaf:0"
    certificate_name = ""
    cap_bytes = wire.FRAME_BYTES_MAX

    def __init__(self, asks: int) -> None:
        self.sent = 0
        self.closed = asyncio.Event()
        self._asks = asks

    async def send(self, frame: bytes) -> None:
        self.sent += 1
        await self.closed.wait()

    def try_send_nowait(self, frame: bytes) -> bool:
        return False

    async def receive(self) -> wire.Frame:
        if self._asks:
            self._asks -= 1
            return wire.Frame(wire.Kind.REQUEST, self._asks, wire.encode(FetchTrust()))
        await self.closed.wait()
        raise ConnectionLostError("closed")

    def try_receive_nowait(self) -> wire.Frame | None:
        return None

    def close(self) -> None:
        self.closed.set()


async def test_a_peer_that_reads_no_answers_costs_one_and_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "ANSWER_S_MAX", 0.2)
    deaf = _Unread(asks=50)
    peer = rpc.Peer(deaf, requests=REQUESTS, handler=Server().handle)
    async with asyncio.timeout(10):
        await peer.run()
    assert peer.is_closed
    assert deaf.sent == 1, "the others were never encoded"


class _CannotSend(_Unread):
    """A channel that is known to be lost by whoever sends, and not yet by whoever reads."""

    async def send(self, frame: bytes) -> None:
        raise ConnectionLostError("lost")


async def test_a_connection_on_which_nothing_can_be_sent_counts_as_closed_at_once() -> None:
    lost = _CannotSend(asks=0)
    peer = rpc.Peer(lost)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(peer.run())
        with pytest.raises(ConnectionLostError):
            await peer.call(FetchTrust(), timeout_s=5)
        assert peer.is_closed, "or else the next one is asked over it, too"
