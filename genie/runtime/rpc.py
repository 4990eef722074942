"""Calls over a channel: either side asks, the other answers, many at once on one connection.

`Peer.run()` must be running (in a TaskGroup of the owner) while calls are made; `dial` does
that for clients. Both sides may handle requests: the controller sends orders to agents over
the connection that the agent opened. Not for: who may ask what (the handler decides).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from genie.errors import ConnectionLostError, DeadlineError, GenieError, ProtocolError, TransportError
from genie.model.messages import Message, Request, reply_type
from genie.runtime import wire
from genie.runtime.network import Channel, ClientTls, Network
from genie.runtime.tasks import first_error

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

IN_FLIGHT_MAX = 256
"""Requests that one peer may have under way here; beyond that its connection is not read."""

ANSWER_S_MAX = 30.0
"""How long a peer may take to read an answer before its connection is closed."""

_CALL_IDS = 1 << 32
"""As many as a frame's header can tell apart."""

Handler = Callable[["Peer", Message], Awaitable[Message]]


class Peer:
    """The other end of one connection."""

    def __init__(
        self, channel: Channel, *, requests: Sequence[type[Message]] = (), handler: Handler | None = None
    ) -> None:
        assert bool(requests) == (handler is not None)
        self.channel = channel
        self._decoder = wire.RequestDecoder(requests) if requests else None
        self._handler = handler
        self._waiting: dict[int, asyncio.Future[wire.Frame]] = {}
        self._loop = asyncio.get_running_loop()
        self._next_call = 0
        self._under_way = 0
        self._has_room = asyncio.Event()
        self._sending = asyncio.Lock()
        self._closed = asyncio.Event()

    @property
    def name(self) -> str:
        return self.channel.peer

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def call(self, request: Request[_Reply], *, timeout_s: float) -> _Reply:
        """The peer's answer, or the GenieError it answered with; DeadlineError past `timeout_s`."""
        (outcome,) = await self.call_each((request,), timeout_s=timeout_s)
        if isinstance(outcome, GenieError):
            raise outcome
        return outcome

    async def call_each(
        self, requests: Sequence[Request[_Reply]], *, timeout_s: float
    ) -> list[_Reply | GenieError]:
        """What came of each, as `call` would have it, when all are answered. They are sent together."""
        loop, first = self._loop, self._next_call + 1
        if first + len(requests) > _CALL_IDS:
            first = 1
        deadline_s = loop.time() + timeout_s
        futures: list[asyncio.Future[wire.Frame]] = [loop.create_future() for _ in requests]
        self._next_call = first + len(futures) - 1
        self._waiting.update(enumerate(futures, first))
        timer = loop.call_at(deadline_s, _give_up, futures)
        try:
            for call_id, request in enumerate(requests, first):
                await self._send(call_id, request, deadline_s)
            return [
                await self._outcome(request, future, timeout_s)
                for request, future in zip(requests, futures, strict=True)
            ]
        finally:
            timer.cancel()
            for call_id in range(first, first + len(futures)):
                del self._waiting[call_id]

    async def _send(self, call_id: int, request: Request[_Reply], deadline_s: float) -> None:
        """Whatever goes wrong is the outcome of that call."""
        future = self._waiting[call_id]
        try:
            if self.is_closed:
                raise ConnectionLostError(f"the connection to {self.name} is closed")
            packed = wire.pack(wire.Kind.REQUEST, call_id, wire.encode(request))
            if not self.channel.try_send_nowait(packed):
                async with asyncio.timeout_at(deadline_s):
                    await self.channel.send(packed)
        except (GenieError, TimeoutError) as error:
            if not future.done():
                future.set_exception(error)
            if isinstance(error, ConnectionLostError):
                # Whoever reads may not have seen it yet. From here on nobody may take it for a connection.
                self.close()

    async def _outcome(
        self, request: Request[_Reply], future: asyncio.Future[wire.Frame], timeout_s: float
    ) -> _Reply | GenieError:
        try:
            frame = await future
            if frame.kind is wire.Kind.ERROR:
                return wire.decode_error(frame.payload, peer=self.name)
            return wire.decode_reply(reply_type(type(request)), frame.payload, peer=self.name)
        except TimeoutError:
            return DeadlineError(
                f"{self.name} did not answer {type(request).__name__} within {timeout_s:g} s"
            )
        except GenieError as error:
            return error

    async def run(self) -> None:
        """Reads until the connection ends; returns then. Requests under way are cancelled."""
        lost: TransportError = ConnectionLostError(f"the connection to {self.name} is closed")
        try:
            async with asyncio.TaskGroup() as answers:
                await self._read(answers)
        except* TransportError as group:
            lost = first_error(group)
        finally:
            self._closed.set()
            self.channel.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(lost)
                    future.exception()

    def close(self) -> None:
        self._closed.set()
        self.channel.close()

    async def _read(self, answers: asyncio.TaskGroup) -> None:
        while True:
            frame = self.channel.try_receive_nowait() or await self.channel.receive()
            if frame.kind is wire.Kind.REQUEST:
                while self._under_way >= IN_FLIGHT_MAX:
                    self._has_room.clear()
                    await self._has_room.wait()
                self._under_way += 1
                answers.create_task(self._answer(frame))
            elif (future := self._waiting.get(frame.call_id)) is not None and not future.done():
                future.set_result(frame)

    async def _answer(self, frame: wire.Frame) -> None:
        try:
            answer: Message | GenieError
            try:
                if self._decoder is None or self._handler is None:
                    raise ProtocolError("this side answers no requests")
                answer = await self._handler(self, self._decoder.decode(frame.payload, peer=self.name))
            except GenieError as error:
                answer = error
            except Exception:
                _log.exception("a request from %s failed", self.name)
                answer = GenieError("internal error", hint="the log of the other side has the details")
            if not self._sending.locked() and self.channel.try_send_nowait(_packed(answer, frame.call_id)):
                return
            # One at a time, and encoded only when it is its turn: a peer that does not read its answers
            # costs the memory of one, and after a while its connection.
            async with asyncio.timeout(ANSWER_S_MAX), self._sending:
                await self.channel.send(_packed(answer, frame.call_id))
        except TimeoutError:
            _log.info("%s does not read its answers", self.name)
            self.close()
        finally:
            self._under_way -= 1
            self._has_room.set()


def _give_up(futures: Sequence[asyncio.Future[wire.Frame]]) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(TimeoutError())
            future.exception()  # whoever waits for another one of them may go away first


def _packed(answer: Message | GenieError, call_id: int) -> bytes:
    if isinstance(answer, GenieError):
        return wire.pack(wire.Kind.ERROR, call_id, wire.encode_error(answer))
    payload = wire.encode(answer)
    if len(payload) > wire.FRAME_BYTES_MAX:
        return _packed(ProtocolError(f"the answer {type(answer).__name__} is over the frame cap"), call_id)
    return wire.pack(wire.Kind.REPLY, call_id, payload)


@asynccontextmanager
async def dial(
    network: Network,
    host: str,
    port: int,
    *,
    tls: ClientTls | None,
    timeout_s: float,
    requests: Sequence[type[Message]] = (),
    handler: Handler | None = None,
) -> AsyncIterator[Peer]:
    """A connected peer for the length of the block. Errors in the block come out as they are."""
    channel = await network.connect(host, port, tls=tls, timeout_s=timeout_s)
    peer = Peer(channel, requests=requests, handler=handler)
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as group:
        group.create_task(peer.run())
        try:
            yield peer
        except (Exception, asyncio.CancelledError) as error:
            # Raised again below: inside the group it would come out wrapped in an ExceptionGroup.
            failure = error
        finally:
            peer.close()
    if failure is not None:
        raise failure
