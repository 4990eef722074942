"""Connecting to an executor: address, certificate, ticket; and again, after a cut, where it broke off.

What travels after that is the op stream of native/torch. Not for: when to connect (roster.py).
"""

from __future__ import annotations

import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NothingListensError,
    UnreachableError,
)
from genie.runtime import opstream, opwire

CONNECT_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 30.0
RESUME_S = 20.0
"""How long a cut connection is tried again. An executor waits longer than that."""
_RESUME_STEP_S = 0.05
_RESUME_STEP_S_MAX = 1.0


@dataclass(frozen=True, kw_only=True)
class ExecutorAddress:
    """Where an executor listens and what to show it. `server_name` is checked against its certificate."""

    host: str
    port: int
    server_name: str
    ticket: str
    ssl_context: ssl.SSLContext | None = None
    """What to trust; None: without TLS, on loopback only."""


@dataclass
class ExecutorLink:
    """One session with one executor, over as many connections as it takes."""

    address: ExecutorAddress
    node_id: str
    busy_s: float = OPEN_TIMEOUT_S
    """How long an executor may be busy with one op, and answer nobody who comes back."""
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when nobody wants to connect again."""
    _session_key: str = ""
    _opening: Any = None  # Any: a class of the library

    @property
    def peer(self) -> str:
        return f"the executor at {self.address.host}:{self.address.port} on node {self.node_id}"

    def open(  # Any: a class of the library
        self,
        *,
        replies_received: int = 0,
        timeout_s: float = OPEN_TIMEOUT_S,
        answer_timeout_s: float | None = None,
    ) -> tuple[Any, opwire.Opened]:
        """Connects, checks the certificate, shows the ticket. A stream that speaks ops from here on.

        `answer_timeout_s`: how much longer than `timeout_s` it may take, for the answer to the ticket.
        """
        deadline = time.monotonic() + timeout_s
        self._opening = stream = self._connect(min(CONNECT_TIMEOUT_S, timeout_s))
        if self.closed.is_set():
            stream.shut_down()
        try:
            request = opwire.Open(
                ticket=self.address.ticket,
                session_key=self._session_key,
                replies_received=replies_received,
                machine=opwire.this_machine(),
            )
            opened = opwire.enter(
                _Pipe(stream),
                request,
                peer=self.peer,
                timeout_s=_left_s(deadline),
                answer_timeout_s=answer_timeout_s,
            )
            left_s = _left_s(deadline + (answer_timeout_s or 0.0))
            stream = opstream.agreed(stream, bare=opened.bare, peer=self.peer, timeout_s=left_s)
        except BaseException:
            stream.close()
            raise
        finally:
            self._opening = None
        self._session_key = opened.session_key
        return stream, opened

    def resume(self, replies_received: int) -> tuple[Any, int]:
        """After a cut. Raises when the executor is gone for good, or cannot be reached for RESUME_S.

        One that is reached may be in the middle of an op, and answers after that.
        """
        deadline = time.monotonic() + RESUME_S
        step_s = _RESUME_STEP_S
        while True:
            try:
                stream, opened = self.open(
                    replies_received=replies_received,
                    timeout_s=_left_s(deadline),
                    answer_timeout_s=self.busy_s,
                )
            except NothingListensError:
                raise  # it has ended: a port that refuses is not a cut
            except (UnreachableError, ConnectionLostError, DeadlineError):
                if time.monotonic() > deadline:
                    raise
            else:
                return stream, opened.frames_received
            if self.closed.wait(min(step_s, _left_s(deadline))):
                raise ConnectionLostError("the session was shut down")
            step_s = min(2 * step_s, _RESUME_STEP_S_MAX)

    def stop(self) -> None:
        """Nobody wants to connect again. From any thread."""
        self.closed.set()
        opening = self._opening
        if opening is not None:
            opening.shut_down()

    def fetch_token(self, number: int) -> str:
        """With this another executor fetches what this one ships under the number, and nothing else."""
        return opwire.fetch_token(opwire.ticket_digest(self.address.ticket), number)

    def _connect(self, timeout_s: float) -> Any:
        address = self.address
        context = address.ssl_context
        return opstream.connect(
            _library(),
            host=address.host,
            port=address.port,
            server_name=address.server_name,
            trusted=None if context is None else context.get_ca_certs(binary_form=True),
            peer=self.peer,
            timeout_s=timeout_s,
        )


def open_connection(
    link: ExecutorLink, *, index: int, device_name: str, op_timeout_s: float, launch_blocking: bool
) -> Any:
    """A connection of the library, ready for ops."""
    try:
        stream, opened = link.open()
    except GenieError as error:
        raise type(error)(f"{device_name}: {error.message}", hint=error.hint) from error
    return _library().Connection(
        stream=stream,
        index=index,
        device_name=device_name,
        executor=f"node {link.node_id}, {opened.job_id}",
        kind=opened.kind,
        op_timeout_s=op_timeout_s,
        blocking=launch_blocking,
        flush_ops=FLUSH_OPS,
        host=link.address.host,
        port=link.address.port,
        server_name=link.address.server_name,
        resume=link.resume,
        token=link.fetch_token,
    )


FLUSH_OPS = 32
"""Ops that are gathered before they are sent, unless a value is needed sooner."""


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _library() -> Any:
    from genie.runtime import native

    return native.load("genie_device")


class _Pipe:
    """A stream of the library as opwire.py wants it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read_exactly(self, count: int, timeout_s: float) -> bytes:
        return self._run(self._stream.read_exactly, count, timeout_s)  # type: ignore[no-any-return]

    def write_all(self, data: bytes, timeout_s: float) -> None:
        self._run(self._stream.write_all, data, timeout_s)

    def _run(self, call: Any, *args: object) -> Any:
        try:
            return call(*args)
        except _library().ConnectionLost as error:
            raise ConnectionError(str(error)) from error
