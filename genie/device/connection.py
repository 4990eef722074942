"""Connects to an executor (address, certificate, ticket), and resumes the session after a connection loss.

The op stream that follows is native/torch. Does not decide when to connect (registry.py).
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NothingListensError,
    UnreachableError,
)
from genie.model.names import address_text
from genie.native import executor_stream, genie_device
from genie.runtime import device_protocol

if TYPE_CHECKING:
    from genie.native.genie_device import Connection, Stream

_P = ParamSpec("_P")
_T = TypeVar("_T")

CONNECT_TIMEOUT_S = 10.0
OPEN_SESSION_TIMEOUT_S = 30.0
RESUME_TIMEOUT_S = 20.0
"""How long reconnecting is retried. An executor keeps the session longer than that."""
_RESUME_BACKOFF_S_MIN = 0.05
_RESUME_BACKOFF_S_MAX = 1.0


@dataclass(frozen=True, kw_only=True)
class ExecutorAddress:
    """Where an executor listens, and the credentials for it. `server_name` must match its certificate."""

    host: str
    port: int
    server_name: str
    ticket: str
    ssl_context: ssl.SSLContext | None = None
    """Holds the trusted CAs; None: no TLS, allowed on loopback only."""


@dataclass
class ExecutorLink:
    """One session with one executor, over one connection after the other."""

    address: ExecutorAddress
    node_id: str
    resume_reply_timeout_s: float = OPEN_SESSION_TIMEOUT_S
    """How long an executor may be busy with one op before it replies to a reconnecting client."""
    reconnect_disabled: threading.Event = field(default_factory=threading.Event)
    """Set when the session must not reconnect."""
    _session_key: str = ""
    _fetch_key: str = ""
    _stream_in_handshake: Stream | None = None

    @property
    def peer_description(self) -> str:
        return f"the executor at {address_text(self.address.host, self.address.port)} on node {self.node_id}"

    def open_session(
        self,
        *,
        replies_received: int = 0,
        timeout_s: float = OPEN_SESSION_TIMEOUT_S,
        answer_timeout_s: float | None = None,
    ) -> tuple[Stream, device_protocol.Opened]:
        """Connect, check the certificate, send the ticket. Returns a stream that is ready for the op stream.

        `answer_timeout_s`: additional time for the executor's reply to the ticket.
        """
        deadline = time.monotonic() + timeout_s
        self._stream_in_handshake = stream = self._connect(min(CONNECT_TIMEOUT_S, timeout_s))
        if self.reconnect_disabled.is_set():
            stream.shut_down()
        try:
            request = device_protocol.Open(
                ticket=self.address.ticket,
                session_key=self._session_key,
                replies_received=replies_received,
                machine=device_protocol.machine_identity(),
            )
            opened = device_protocol.open_session(
                _NativeStreamPipe(stream),
                request,
                peer=self.peer_description,
                timeout_s=_remaining_s(deadline),
                answer_timeout_s=answer_timeout_s,
            )
            remaining_s = _remaining_s(deadline + (answer_timeout_s or 0.0))
            stream = executor_stream.downgrade_if_plaintext(
                stream, plaintext=opened.plaintext, peer=self.peer_description, timeout_s=remaining_s
            )
        except BaseException:
            stream.close()
            raise
        finally:
            self._stream_in_handshake = None
        self._session_key, self._fetch_key = opened.session_key, opened.fetch_key
        return stream, opened

    def resume_session(self, replies_received: int) -> tuple[Stream, int]:
        """Reconnect after a connection loss. Raises when the executor has ended, or is unreachable for
        RESUME_TIMEOUT_S.

        An executor that is running an op replies after that op.
        """
        deadline = time.monotonic() + RESUME_TIMEOUT_S
        backoff_s = _RESUME_BACKOFF_S_MIN
        while True:
            try:
                stream, opened = self.open_session(
                    replies_received=replies_received,
                    timeout_s=_remaining_s(deadline),
                    answer_timeout_s=self.resume_reply_timeout_s,
                )
            except NothingListensError:
                raise  # the executor has ended: a port that refuses is not a connection loss
            except (UnreachableError, ConnectionLostError, DeadlineError):
                if time.monotonic() > deadline:
                    raise
            else:
                return stream, opened.frames_received
            if self.reconnect_disabled.wait(min(backoff_s, _remaining_s(deadline))):
                raise ConnectionLostError("the session was shut down")
            backoff_s = min(2 * backoff_s, _RESUME_BACKOFF_S_MAX)

    def stop_reconnecting(self) -> None:
        """Also abort a connection attempt that is in progress. Thread-safe."""
        self.reconnect_disabled.set()
        opening = self._stream_in_handshake
        if opening is not None:
            opening.shut_down()

    def make_fetch_token(self, parcel_number: int) -> str:
        """The token with which another executor may fetch the parcel of this number from this executor."""
        return device_protocol.make_fetch_token(self._fetch_key, parcel_number)

    def _connect(self, timeout_s: float) -> Stream:
        address = self.address
        context = address.ssl_context
        return executor_stream.connect(
            genie_device,
            host=address.host,
            port=address.port,
            server_name=address.server_name,
            ca_certificates=None if context is None else context.get_ca_certs(binary_form=True),
            peer=self.peer_description,
            timeout_s=timeout_s,
        )


def open_connection(
    link: ExecutorLink, *, index: int, device_name: str, op_timeout_s: float, launch_blocking: bool
) -> Connection:
    """Open a session with the executor and return the library's connection, ready for ops."""
    try:
        stream, opened = link.open_session()
    except GenieError as error:
        raise type(error)(f"{device_name}: {error.message}", hint=error.hint) from error
    return genie_device.Connection(
        stream=stream,
        index=index,
        device_name=device_name,
        executor=f"node {link.node_id}, {opened.job_id}",
        kind=opened.kind,
        op_timeout_s=op_timeout_s,
        blocking=launch_blocking,
        flush_ops=OPS_PER_FRAME_MAX,
        host=link.address.host,
        port=link.address.port,
        server_name=link.address.server_name,
        resume=link.resume_session,
        token=link.make_fetch_token,
    )


OPS_PER_FRAME_MAX = 32
"""Ops that are batched into one frame, unless a value is needed sooner."""


def _remaining_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


class _NativeStreamPipe:
    """Adapts a stream of the library to device_protocol.Pipe: a lost connection is an OSError."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def read_exactly(self, count: int, timeout_s: float) -> bytes:
        return self._run_converting_errors(self._stream.read_exactly, count, timeout_s)

    def write_all(self, data: bytes, timeout_s: float) -> None:
        self._run_converting_errors(self._stream.write_all, data, timeout_s)

    def _run_converting_errors(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return call(*args, **kwargs)
        except genie_device.ConnectionLost as error:
            raise ConnectionError(str(error)) from error
