"""Calls over a real connection: replies, errors, timeouts, both directions, and lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import pytest

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    JobNotFoundError,
    OverloadedError,
    ProtocolError,
)
from genie.model.messages import (
    AGENT_REQUESTS,
    CancelJob,
    Done,
    GetJob,
    Kill,
    LogChunk,
    Message,
    ReadLog,
    Request,
)
from genie.model.messages.handshake import FetchTrust, TrustAnchor
from genie.runtime import network, rpc, wire
from genie.runtime.network import Channel, TcpNetwork
from tests.waiting import until

REQUESTS = (GetJob, CancelJob, FetchTrust, ReadLog)


class ScriptedServer:
    """A scripted server; `peers` are the connected ones."""

    def __init__(self) -> None:
        self.peers: list[rpc.Peer] = []
        self.release = asyncio.Event()
        self.cancelled = 0
        self.ended = 0
        self.errors: list[weakref.ref[GenieError]] = []
        """That handlers have raised."""

    async def handle(self, peer: rpc.Peer, request: Message) -> Message:
        if isinstance(request, GetJob):
            error = JobNotFoundError(f"no {request.job_id}", hint="look elsewhere")
            self.errors.append(weakref.ref(error))
            raise error
        if isinstance(request, CancelJob):
            raise ZeroDivisionError("a bug")
        if isinstance(request, ReadLog):
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return LogChunk(data=b"late", start_offset=0, next_offset=4, eof=True)
        return TrustAnchor(ca_pem="pem")

    async def accept(self, channel: Channel) -> None:
        channel.set_frame_limit(wire.FRAME_BYTES_MAX)
        peer = rpc.Peer(channel, requests=REQUESTS, handler=self.handle)
        self.peers.append(peer)
        await peer.run()
        self.ended += 1


@asynccontextmanager
async def run_scripted_server() -> AsyncIterator[tuple[ScriptedServer, int]]:
    server, network = ScriptedServer(), TcpNetwork()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            network.serve("127.0.0.1", 0, server.accept, tls=None, on_listening=port.set_result)
        )
        yield server, await port
        task.cancel()


def connect_peer(port: int) -> AbstractAsyncContextManager[rpc.Peer]:
    return rpc.dial(TcpNetwork(), "127.0.0.1", port, tls=None, timeout_s=5)


async def test_replies_are_matched_to_calls_in_any_order() -> None:
    async with run_scripted_server() as (server, port), connect_peer(port) as peer:
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(peer.call(ReadLog(job_id="a"), timeout_s=5))
            quick = await peer.call(FetchTrust(), timeout_s=5)
            assert quick == TrustAnchor(ca_pem="pem")
            assert not slow.done()
            server.release.set()
        assert slow.result().data == b"late"


async def test_genie_errors_keep_their_type_and_others_become_internal_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with run_scripted_server() as (_, port), connect_peer(port) as peer:
        with pytest.raises(JobNotFoundError, match="no x") as caught:
            await peer.call(GetJob(job_id="x"), timeout_s=5)
        assert caught.value.hint == "look elsewhere"
        with pytest.raises(GenieError, match="internal error"):
            await peer.call(CancelJob(job_id="x"), timeout_s=5)
        assert "a bug" in caplog.text, "the traceback is in the server's log"
        assert await peer.call(FetchTrust(), timeout_s=5)


async def test_error_of_a_handler_is_freed_without_the_garbage_collector() -> None:
    async with run_scripted_server() as (server, port), connect_peer(port) as peer:
        gc.disable()
        try:
            with pytest.raises(JobNotFoundError):
                await peer.call(GetJob(job_id="j"), timeout_s=5)
            assert len(server.errors) == 1
            await until(lambda: server.errors[0]() is None, what="no reference to the error is left")
        finally:
            gc.enable()


async def test_timeout_is_a_deadline_error_and_a_late_reply_is_dropped() -> None:
    async with run_scripted_server() as (server, port), connect_peer(port) as peer:
        with pytest.raises(DeadlineError, match=r"did not reply to ReadLog within 0\.05 s"):
            await peer.call(ReadLog(job_id="a"), timeout_s=0.05)
        server.release.set()
        assert await peer.call(FetchTrust(), timeout_s=5)


async def test_server_can_call_the_client() -> None:
    received: list[Message] = []

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        received.append(request)
        return Done()

    async with (
        run_scripted_server() as (server, port),
        rpc.dial(
            TcpNetwork(), "127.0.0.1", port, tls=None, timeout_s=5, requests=AGENT_REQUESTS, handler=handle
        ),
    ):
        await until(lambda: server.peers)
        order = Kill(job_id="j", epoch=1, leader_token=1, reason="r")
        assert await server.peers[0].call(order, timeout_s=5) == Done()
        assert received == [order]


async def test_peer_without_a_handler_rejects_requests() -> None:
    async with run_scripted_server() as (server, port), connect_peer(port):
        await until(lambda: server.peers)
        with pytest.raises(ProtocolError, match="does not accept requests"):
            await server.peers[0].call(Kill(job_id="j", epoch=1, leader_token=1, reason=""), timeout_s=5)


async def test_cancellation_while_a_failed_connection_is_closed_is_not_lost() -> None:
    handling, ending, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(peer: rpc.Peer, request: Message) -> Message:
        handling.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await ended.wait()
        return Done()

    async def reconnect(port: int) -> None:
        for _ in range(2):
            with contextlib.suppress(ProtocolError):
                async with rpc.dial(
                    TcpNetwork(),
                    "127.0.0.1",
                    port,
                    tls=None,
                    timeout_s=5,
                    requests=AGENT_REQUESTS,
                    handler=handle,
                ):
                    await handling.wait()
                    raise ProtocolError("no")

    async with run_scripted_server() as (server, port), asyncio.TaskGroup() as group:
        task = group.create_task(reconnect(port))
        await until(lambda: server.peers)
        order = Kill(job_id="j", epoch=1, leader_token=1, reason="r")
        with pytest.raises(ConnectionLostError):
            await server.peers[0].call(order, timeout_s=20)
        await ending.wait()
        task.cancel()
        ended.set()
        await asyncio.wait([task], timeout=20)
        assert task.cancelled()


async def test_lost_connection_fails_calls_and_cancels_handlers() -> None:
    async with run_scripted_server() as (server, port), connect_peer(port) as peer:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_assert_call_finds_connection_lost(peer))
            await until(lambda: server.peers)
            await asyncio.sleep(0)
            server.peers[0].close()
        assert waiting.result()
        with pytest.raises(ConnectionLostError):
            await peer.call(FetchTrust(), timeout_s=5)
        await until(lambda: server.cancelled <= 1)


async def _assert_call_finds_connection_lost(peer: rpc.Peer) -> bool:
    with pytest.raises(ConnectionLostError):
        await peer.call(ReadLog(job_id="a"), timeout_s=30)
    return True


async def test_error_in_the_block_of_dial_is_raised_unchanged() -> None:
    async with run_scripted_server() as (_, port):
        with pytest.raises(KeyError):
            async with rpc.dial(TcpNetwork(), "127.0.0.1", port, tls=None, timeout_s=5):
                raise KeyError


async def test_requests_above_the_in_flight_limit_are_rejected_and_replies_are_still_read() -> None:
    async def handle(peer: rpc.Peer, request: Message) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        run_scripted_server() as (server, port),
        rpc.dial(
            TcpNetwork(), "127.0.0.1", port, tls=None, timeout_s=5, requests=AGENT_REQUESTS, handler=handle
        ) as peer,
        asyncio.TaskGroup() as group,
    ):
        await until(lambda: server.peers)
        peer.set_in_flight_max(20)
        waits = [group.create_task(_reply_or_error(server.peers[0], ReadLog(job_id="a"))) for _ in range(30)]
        assert await peer.call(FetchTrust(), timeout_s=5), "a reply does not wait for the requests"
        await until(lambda: sum(task.done() for task in waits) == 10)
        rejected = [task.result() for task in waits if task.done()]
        assert {type(error) for error in rejected} == {OverloadedError}
        assert all(isinstance(error, GenieError) and error.retry_after_s > 0 for error in rejected)
        assert "limit of 20 requests in flight" in str(rejected[0])
        peer.close()


async def _reply_or_error(peer: rpc.Peer, request: Request[LogChunk]) -> LogChunk | GenieError:
    (outcome,) = await peer.call_each([request], timeout_s=30)
    return outcome


async def test_peer_that_ignores_the_limit_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "CONSECUTIVE_REJECTIONS_MAX", 5)
    async with run_scripted_server() as (server, port), connect_peer(port) as peer:
        await until(lambda: server.peers)
        server.peers[0].set_in_flight_max(2)
        outcomes = await peer.call_each([ReadLog(job_id="a")] * 20, timeout_s=30)
        assert ConnectionLostError in {type(outcome) for outcome in outcomes}
        await until(lambda: server.cancelled == 2)


async def test_peer_that_sends_many_invalid_requests_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "INVALID_REQUESTS_MAX", 3)
    async with run_scripted_server() as (server, port), connect_peer(port) as peer:
        for _ in range(3):
            with pytest.raises(ProtocolError):
                await peer.call(Kill(job_id="j", epoch=1, leader_token=1, reason=""), timeout_s=5)
        assert await peer.call(FetchTrust(), timeout_s=5)
        with pytest.raises(ConnectionLostError):
            await peer.call(Kill(job_id="j", epoch=1, leader_token=1, reason=""), timeout_s=5)
        await until(lambda: server.ended == 1)


@pytest.mark.parametrize("body", [{"type": []}, {"type": {}}, [], {"type": "GetJob", "job_id": {}}])
async def test_requests_without_a_valid_type_count_as_invalid(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, body: object
) -> None:
    monkeypatch.setattr(rpc, "INVALID_REQUESTS_MAX", 3)
    async with run_scripted_server() as (server, port), connect_peer(port) as peer:
        for call_id in range(5):
            frame = wire.pack_frame(wire.FrameKind.REQUEST, call_id, msgspec.msgpack.encode(body))
            assert peer.channel.try_send_nowait(frame)
        await until(lambda: server.ended == 1, what="the server has closed the connection")
    assert "Traceback" not in caplog.text


async def test_failures_that_the_decoder_does_not_expect_count_as_invalid_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FailingDecoder(wire.RequestDecoder):
        def decode(self, payload: bytes, *, peer: str) -> Message:
            raise TypeError("a bug of the decoder")

    monkeypatch.setattr(rpc, "INVALID_REQUESTS_MAX", 3)
    monkeypatch.setattr(wire, "RequestDecoder", FailingDecoder)
    async with run_scripted_server() as (server, port), connect_peer(port) as peer:
        for _ in range(3):
            with pytest.raises(GenieError, match="internal error"):
                await peer.call(FetchTrust(), timeout_s=5)
        with pytest.raises(ConnectionLostError):
            await peer.call(FetchTrust(), timeout_s=5)
        await until(lambda: server.ended == 1)


async def test_close_does_not_wait_for_a_peer_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CLOSE_FLUSH_TIMEOUT_S", 0.05)
    async with run_scripted_server() as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(wire.make_preface())
        await until(lambda: server.peers)
        (peer,) = server.peers
        large = wire.pack_frame(wire.FrameKind.REPLY, 1, bytes(60_000))
        await until(lambda: not peer.channel.try_send_nowait(large), what="the send buffer is full")
        transport = peer.channel._transport  # type: ignore[attr-defined]
        await until(transport.get_write_buffer_size)
        peer.close()
        await until(lambda: server.ended == 1, what="run() returned")
        await until(lambda: transport.get_write_buffer_size() == 0, what="the unread data was dropped")
        writer.close()


async def test_call_each_returns_one_outcome_per_request() -> None:
    async with run_scripted_server() as (_, port), connect_peer(port) as peer:
        good, missing, late = await peer.call_each(
            [FetchTrust(), GetJob(job_id="a"), ReadLog(job_id="a")],  # type: ignore[list-item]
            timeout_s=0.2,
        )
        assert good == TrustAnchor(ca_pem="pem")
        assert isinstance(missing, JobNotFoundError)
        assert isinstance(late, DeadlineError)
        assert not peer._pending_calls, "finished calls are removed"
        peer.close()
        outcomes = await peer.call_each([FetchTrust(), FetchTrust()], timeout_s=5)
        assert [type(outcome) for outcome in outcomes] == [ConnectionLostError] * 2


async def test_cancelled_call_each_leaves_no_unretrieved_error() -> None:
    reported: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    async with run_scripted_server() as (_, port), connect_peer(port) as peer:
        requests = [ReadLog(job_id="slow"), ReadLog(job_id="x" * (wire.FRAME_BYTES_MAX + 1))]
        async with asyncio.TaskGroup() as group:
            call = group.create_task(peer.call_each(requests, timeout_s=60))
            await until(lambda: sum(future.done() for future in peer._pending_calls.values()) == 1)
            call.cancel()
    del call  # its traceback refers to the futures
    gc.collect()
    assert reported == []


async def test_call_ids_wrap_around() -> None:
    async with run_scripted_server() as (_, port), connect_peer(port) as peer:
        peer._next_call_id = (1 << 32) - 2
        for _ in range(3):
            assert (await peer.call(FetchTrust(), timeout_s=5)).ca_pem == "pem"
        assert peer._next_call_id < 10


class _NeverReadChannel:
    """A channel whose peer sends requests and reads no replies."""

    peer = "peer:0"
    certificate_name = ""

    def __init__(self, requests: int) -> None:
        self.sent = 0
        self.closed = asyncio.Event()
        self._requests = requests

    def set_frame_limit(self, size_bytes: int) -> None:
        pass

    def set_authenticated(self) -> None:
        pass

    async def send(self, frame: bytes) -> None:
        self.sent += 1
        await self.closed.wait()

    def try_send_nowait(self, frame: bytes) -> bool:
        return False

    async def receive(self) -> wire.Frame:
        if self._requests:
            self._requests -= 1
            return wire.Frame(wire.FrameKind.REQUEST, self._requests, wire.encode_message(FetchTrust()))
        await self.closed.wait()
        raise ConnectionLostError("closed")

    def try_receive_nowait(self) -> wire.Frame | None:
        return None

    def close(self) -> None:
        self.closed.set()


async def test_peer_that_reads_no_replies_uses_bounded_memory_and_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "REPLY_TIMEOUT_S", 0.2)
    unread = _NeverReadChannel(requests=50)
    peer = rpc.Peer(unread, requests=REQUESTS, handler=ScriptedServer().handle)
    async with asyncio.timeout(10):
        await peer.run()
    assert peer.is_closed
    assert unread.sent == 1, "the others were never encoded"


class _SlowlyReadChannel(_NeverReadChannel):
    """A channel whose peer sends `burst` requests, reads one reply, and repeats both."""

    def __init__(self, *, burst: int) -> None:
        super().__init__(requests=0)
        self._burst = burst
        self._requests_until_read = burst
        self._can_send = asyncio.Semaphore(0)
        self.requests_sent = 0

    async def send(self, frame: bytes) -> None:
        await self._can_send.acquire()
        self.sent += 1

    async def receive(self) -> wire.Frame:
        await asyncio.sleep(0)
        if self.closed.is_set():
            raise ConnectionLostError("closed")
        if not self._requests_until_read:
            self._requests_until_read = self._burst
            sent = self.sent
            self._can_send.release()
            await until(lambda: self.sent > sent, what="a reply is sent")
        self._requests_until_read -= 1
        self.requests_sent += 1
        return wire.Frame(wire.FrameKind.REQUEST, self.requests_sent, wire.encode_message(FetchTrust()))


async def test_rejections_that_a_slow_reader_leaves_unread_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer reads often enough that its requests are never rejected CONSECUTIVE_REJECTIONS_MAX times in a
    row: each reply that it reads lets one more request in."""
    monkeypatch.setattr(rpc, "CONSECUTIVE_REJECTIONS_MAX", 8)
    monkeypatch.setattr(rpc, "WAITING_REJECTIONS_MAX", 16)
    slow = _SlowlyReadChannel(burst=8)
    peer = rpc.Peer(slow, requests=REQUESTS, handler=ScriptedServer().handle, in_flight_max=20)
    async with asyncio.timeout(10):
        await peer.run()
    assert slow.requests_sent - slow.sent <= 16 + 20 + 1


class _UnwritableChannel(_NeverReadChannel):
    """A channel on which sending fails while reading still blocks."""

    async def send(self, frame: bytes) -> None:
        raise ConnectionLostError("lost")


async def test_failed_send_closes_the_connection_immediately() -> None:
    lost = _UnwritableChannel(requests=0)
    peer = rpc.Peer(lost)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(peer.run())
        with pytest.raises(ConnectionLostError):
            await peer.call(FetchTrust(), timeout_s=5)
        assert peer.is_closed, "otherwise the next call would use it, too"


@pytest.mark.parametrize("end", ["ours", "theirs"])
async def test_close_listener_is_called_once_whichever_end_closes(end: str) -> None:
    closed: list[str] = []
    async with run_scripted_server() as (server, port), connect_peer(port) as peer:
        await peer.call(FetchTrust(), timeout_s=5)
        theirs = server.peers[0]
        theirs.set_close_listener(lambda: closed.append("replaced"))
        theirs.set_close_listener(lambda: closed.append("closed"))
        (theirs if end == "ours" else peer).close()
        await until(lambda: server.ended == 1)
        assert closed == ["closed"]
        theirs.close()
        assert closed == ["closed"]
