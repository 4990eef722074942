"""Remote procedure calls over a channel: concurrent requests in both directions on one connection.

`Peer.run()` must be running (in a TaskGroup of the owner) while calls are made; `dial` does that for clients.
Both sides may handle requests: the controller sends requests to agents over the connection that the agent
opened. Handlers are responsible for authorization.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    OverloadedError,
    ProtocolError,
    TransportError,
    UsageError,
)
from genie.model.messages import Message, Request, reply_type
from genie.processes.tasks import first_error, unwrapped_task_group
from genie.runtime import wire
from genie.runtime.network import Channel, ClientTls, Network

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

REQUESTS_IN_FLIGHT_MAX = 512
"""Maximum number of requests in flight from one peer; further ones are rejected with OverloadedError."""

CLUSTER_PEER_REQUESTS_IN_FLIGHT_MAX = 2048
"""Replaces REQUESTS_IN_FLIGHT_MAX between the controller and its agents, in both directions. Higher than the
number of orders to one agent, and of confirmations from one, that can be pending at the same time."""

CONSECUTIVE_REJECTIONS_MAX = 4096
"""A peer that sends more requests above the limit in a row is disconnected."""

WAITING_REJECTIONS_MAX = 1024
"""A peer that reads so slowly that more rejections wait to be sent is disconnected. Reading only its replies
is no alternative: they arrive in order with its requests."""

INVALID_REQUESTS_MAX = 64
"""A peer that sends more requests that cannot be decoded is disconnected."""

REPLY_TIMEOUT_S = 30.0
"""Timeout for sending a reply; then the connection is closed."""

_CALL_ID_COUNT = 1 << 32
"""Number of distinct call IDs in the frame header."""

Handler = Callable[["Peer", Message], Awaitable[Message]]


class Peer:
    """The peer of one connection."""

    def __init__(
        self,
        channel: Channel,
        *,
        requests: Sequence[type[Message]] = (),
        handler: Handler | None = None,
        in_flight_max: int = REQUESTS_IN_FLIGHT_MAX,
    ) -> None:
        assert bool(requests) == (handler is not None)
        self.channel = channel
        self.release = ""
        """The version of Genie that the peer runs, as in its Hello or Welcome; empty before."""
        self._name_with_release = self.name
        """For errors. Formatted once, not for each frame."""
        self._in_flight_max = in_flight_max
        self._decoder = wire.RequestDecoder(requests) if requests else None
        self._handler = handler
        self._pending_calls: dict[int, asyncio.Future[wire.Frame]] = {}
        self._loop = asyncio.get_running_loop()
        self._next_call_id = 0
        self._requests_in_flight = 0
        self._consecutive_rejections = 0
        """Requests above the limit since the last one that was accepted."""
        self._rejected_call_ids_waiting: deque[int] = deque()
        """Call IDs of the rejections that wait to be sent."""
        self._invalid_requests = 0
        self.request_bytes = 0
        """Size of the last request, when the handler is called with it."""
        self._send_lock = asyncio.Lock()
        self._closed_event = asyncio.Event()
        self.is_closed = False
        """Whether `_closed_event` is set. An attribute: a controller reads it of every node in each pass."""
        self._on_close: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self.channel.peer

    @property
    def protocol_version(self) -> int:
        """The version of the protocol that both sides speak."""
        return self.channel.protocol_version

    def set_release(self, release: str) -> None:
        """Sets the version of Genie that the peer runs, for messages."""
        self.release = release
        self._name_with_release = f"{self.name} (Genie {release})" if release else self.name

    @property
    def is_idle(self) -> bool:
        """Whether no request of either side is in flight."""
        return not self._requests_in_flight and not self._pending_calls

    def set_in_flight_max(self, count: int) -> None:
        """Sets the maximum number of requests in flight from this peer."""
        self._in_flight_max = count

    async def wait_closed(self) -> None:
        await self._closed_event.wait()

    def set_close_listener(self, listener: Callable[[], None]) -> None:
        """Calls `listener` when the connection is closed, instead of an earlier one."""
        self._on_close = listener

    def _mark_closed_and_notify(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._closed_event.set()
            self._on_close()

    async def call(self, request: Request[_Reply], *, timeout_s: float) -> _Reply:
        """Returns the reply. Raises the GenieError of the peer, or DeadlineError after `timeout_s`."""
        (outcome,) = await self.call_each((request,), timeout_s=timeout_s)
        if isinstance(outcome, GenieError):
            raise outcome
        return outcome

    async def call_each(
        self, requests: Sequence[Request[_Reply]], *, timeout_s: float
    ) -> list[_Reply | GenieError]:
        """Sends all requests, then returns the reply or the error of each, as `call` would."""
        loop, first = self._loop, self._next_call_id + 1
        if first + len(requests) > _CALL_ID_COUNT:
            first = 1
        deadline_s = loop.time() + timeout_s
        futures: list[asyncio.Future[wire.Frame]] = [loop.create_future() for _ in requests]
        self._next_call_id = first + len(futures) - 1
        self._pending_calls.update(enumerate(futures, first))
        timer = loop.call_at(deadline_s, _fail_pending_calls_with_timeout, futures)
        try:
            for call_id, request in enumerate(requests, first):
                await self._send_request(call_id, request, deadline_s)
            return [
                await self._reply_or_error(request, future, timeout_s)
                for request, future in zip(requests, futures, strict=True)
            ]
        finally:
            timer.cancel()
            for call_id in range(first, first + len(futures)):
                del self._pending_calls[call_id]

    async def _send_request(self, call_id: int, request: Request[_Reply], deadline_s: float) -> None:
        """Sends one request; an error becomes the outcome of the call."""
        future = self._pending_calls[call_id]
        try:
            if self.is_closed:
                raise ConnectionLostError(f"the connection to {self.name} is closed")
            frame = wire.pack_frame(wire.FrameKind.REQUEST, call_id, wire.encode_message(request))
            if not self.channel.try_send_nowait(frame):
                async with asyncio.timeout_at(deadline_s):
                    await self.channel.send(frame)
        except (GenieError, TimeoutError) as error:
            if not future.done():
                future.set_exception(error)
                future.exception()  # the caller may be cancelled before it awaits this one
            if isinstance(error, ConnectionLostError):
                # run() may not have noticed it yet; is_closed must be true from now on.
                self.close()

    async def _reply_or_error(
        self, request: Request[_Reply], future: asyncio.Future[wire.Frame], timeout_s: float
    ) -> _Reply | GenieError:
        try:
            frame = await future
            if frame.kind is wire.FrameKind.ERROR:
                return wire.decode_error(frame.payload, peer=self.name)
            return wire.decode_reply(reply_type(type(request)), frame.payload, peer=self._name_with_release)
        except TimeoutError:
            return DeadlineError(
                f"{self.name} did not reply to {type(request).__name__} within {timeout_s:g} s"
            )
        except GenieError as error:
            return error

    async def run(self) -> None:
        """Reads until the connection ends. Cancels the requests in flight then."""
        lost: TransportError = ConnectionLostError(f"the connection to {self.name} is closed")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_frames(tasks))
                # Not left to the reader: a channel closes only when the peer has read what was sent.
                await self._closed_event.wait()
                raise lost
        except* TransportError as group:
            lost = first_error(group)
        finally:
            self._mark_closed_and_notify()
            self.channel.close()
            for future in self._pending_calls.values():
                if not future.done():
                    future.set_exception(lost)
                    future.exception()

    def close(self) -> None:
        self._mark_closed_and_notify()
        self.channel.close()

    async def _read_frames(self, tasks: asyncio.TaskGroup) -> None:
        """Reads all frames as they arrive: replies must never wait for requests."""
        while True:
            frame = self.channel.try_receive_nowait() or await self.channel.receive()
            if frame.kind is wire.FrameKind.REQUEST:
                if self._requests_in_flight >= self._in_flight_max:
                    self._reject_request(frame, tasks)
                    continue
                self._requests_in_flight += 1
                self._consecutive_rejections = 0
                tasks.create_task(self._handle_and_reply(frame))
            elif (future := self._pending_calls.get(frame.call_id)) is not None and not future.done():
                future.set_result(frame)

    def _reject_request(self, frame: wire.Frame, tasks: asyncio.TaskGroup) -> None:
        self._consecutive_rejections += 1
        if self._consecutive_rejections > CONSECUTIVE_REJECTIONS_MAX:
            raise ProtocolError(f"{self.name} ignores the limit of {self._in_flight_max} requests in flight")
        if not self._rejected_call_ids_waiting and self.channel.try_send_nowait(
            _pack_reply(self._make_overload_error(), frame.call_id)
        ):
            return
        if len(self._rejected_call_ids_waiting) >= WAITING_REJECTIONS_MAX:
            raise ProtocolError(
                f"{self.name} has not read the rejections of {WAITING_REJECTIONS_MAX} requests",
                hint="read replies while sending requests",
            )
        self._rejected_call_ids_waiting.append(frame.call_id)
        if len(self._rejected_call_ids_waiting) == 1:
            tasks.create_task(self._send_waiting_rejections())

    async def _send_waiting_rejections(self) -> None:
        while self._rejected_call_ids_waiting and not self.is_closed:
            await self._send_reply(self._make_overload_error(), self._rejected_call_ids_waiting[0])
            self._rejected_call_ids_waiting.popleft()

    def _make_overload_error(self) -> OverloadedError:
        return OverloadedError(
            f"the limit of {self._in_flight_max} requests in flight on one connection is reached"
        )

    async def _handle_and_reply(self, frame: wire.Frame) -> None:
        try:
            answer: Message | GenieError
            try:
                answer = await self._handle_request_frame(frame)
            except GenieError as error:
                # Frames of its traceback refer to it. With thousands of refusals per second, such cycles
                # would fill the memory until the garbage collector runs.
                answer = error.with_traceback(None)
            except Exception:
                _log.exception("a request from %s failed", self.name)
                answer = GenieError("internal error", hint="see the log of the peer for details")
            if self._send_lock.locked() or not self.channel.try_send_nowait(
                _pack_reply(answer, frame.call_id)
            ):
                await self._send_reply(answer, frame.call_id)
        finally:
            self._requests_in_flight -= 1

    def _handle_request_frame(self, frame: wire.Frame) -> Awaitable[Message]:
        if self._decoder is None or self._handler is None:
            raise ProtocolError("this side does not accept requests")
        try:
            request = self._decoder.decode(frame.payload, peer=self._name_with_release)
        except UsageError:  # well-formed, with a value that is not allowed
            raise
        except Exception:  # also one that the decoder does not expect: the frame comes from a stranger
            self._invalid_requests += 1
            if self._invalid_requests > INVALID_REQUESTS_MAX:
                self.close()
            raise
        self.request_bytes = len(frame.payload)
        return self._handler(self, request)

    async def _send_reply(self, answer: Message | GenieError, call_id: int) -> None:
        """Sends one reply at a time, and encodes it only then: a peer that does not read its replies uses the
        memory of one, until its connection is closed."""
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S), self._send_lock:
                await self.channel.send(_pack_reply(answer, call_id))
        except TimeoutError:
            _log.info("%s does not read its replies", self.name)
            self.close()


def _fail_pending_calls_with_timeout(futures: Sequence[asyncio.Future[wire.Frame]]) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(TimeoutError())
            future.exception()  # the waiter may be cancelled before it awaits this one


def _pack_reply(answer: Message | GenieError, call_id: int) -> bytes:
    if isinstance(answer, GenieError):
        return wire.pack_frame(wire.FrameKind.ERROR, call_id, wire.encode_error(answer))
    payload = wire.encode_message(answer)
    if len(payload) > wire.FRAME_BYTES_MAX:
        return _pack_reply(
            ProtocolError(f"the reply {type(answer).__name__} exceeds the maximum frame size"), call_id
        )
    return wire.pack_frame(wire.FrameKind.REPLY, call_id, payload)


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
    """A context with a connected peer. Errors of the body are raised unchanged."""
    channel = await network.connect(host, port, tls=tls, timeout_s=timeout_s)
    peer = Peer(
        channel, requests=requests, handler=handler, in_flight_max=CLUSTER_PEER_REQUESTS_IN_FLIGHT_MAX
    )
    body_error: Exception | None = None
    async with unwrapped_task_group() as group:
        running = group.create_task(peer.run())
        try:
            yield peer
        except Exception as error:
            # Raised after the group has ended: until Python 3.13, a group with an error drops a cancellation
            # that arrives while it waits for its tasks, and a caller that reconnects would never end.
            body_error = error
            running.cancel()
        finally:
            peer.close()
    if body_error is not None:
        raise body_error
