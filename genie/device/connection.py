"""One client's end of a connection to one executor: ask, answer, and what happens when it is gone.

Frees ride with the next request: a tensor that dies only appends to a queue, which no lock guards
and which is never longer than the number of tensors that were alive. Not for: torch values
(calls.py) and when to connect (roster.py).
"""

from __future__ import annotations

import collections
import socket
import ssl
import threading
import time
from typing import NoReturn, TypeVar

from genie.errors import (
    DeviceLostError,
    GenieError,
    ProtocolError,
    TlsError,
    TransportError,
    UnreachableError,
    from_code,
)
from genie.runtime import opwire

CONNECT_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 30.0

_Reply = TypeVar("_Reply", bound=opwire.Reply)


class ExecutorConnection:
    """Safe for several threads; one request at a time. Every failure to get through means: lost."""

    def __init__(
        self,
        channel: opwire.Channel,
        facts: opwire.Opened,
        *,
        device_name: str,
        node_id: str,
        timeout_s: float,
    ) -> None:
        self.facts = facts
        self.device_name = device_name
        self.node_id = node_id
        self._channel = channel
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._sequence = 1
        self._freed: collections.deque[int] = collections.deque()
        self._lost_because = ""

    @classmethod
    def open(
        cls,
        *,
        host: str,
        port: int,
        server_name: str,
        ticket: str,
        ssl_context: ssl.SSLContext | None,
        device_name: str,
        node_id: str,
        op_timeout_s: float,
    ) -> ExecutorConnection:
        """Connects, checks the certificate, shows the ticket."""
        peer = f"the executor at {host}:{port} on node {node_id}"
        channel = _connect(host, port, server_name, ssl_context, peer)
        try:
            deadline = time.monotonic() + OPEN_TIMEOUT_S
            channel.exchange_prefaces(timeout_s=OPEN_TIMEOUT_S)
            channel.send(0, opwire.Open(ticket), timeout_s=OPEN_TIMEOUT_S)
            reply = channel.receive_reply(0, timeout_s=max(0.1, deadline - time.monotonic()))
            if isinstance(reply, opwire.Error):
                raise from_code(reply.code, f"{peer} refused {device_name}: {reply.message}")
            if not isinstance(reply, opwire.Opened):
                raise ProtocolError(f"{peer} answered a ticket with {type(reply).__name__}")
        except BaseException:
            channel.close()
            raise
        return cls(channel, reply, device_name=device_name, node_id=node_id, timeout_s=op_timeout_s)

    @property
    def lost(self) -> bool:
        return bool(self._lost_because)

    def run(self, request: opwire.RunOp) -> opwire.Result:
        """What the op gave. RemoteOpError, OpRefusedError or torch.OutOfMemoryError when it did not."""
        return self._ask(request, opwire.Result)

    def upload(self, request: opwire.Upload, data: memoryview) -> None:
        with self._lock:
            sequence = self._send(request)
            answer: opwire.Reply = self._receive(sequence, opwire.Ready)
            if not isinstance(answer, opwire.Error):
                with self._losing_on_failure():
                    self._channel.send_data(sequence, data, timeout_s=self._timeout_s)
                answer = self._receive(sequence, opwire.Done)
        if isinstance(answer, opwire.Error):
            self._raise(answer)

    def download(self, handle: int, expected: opwire.Content, into: memoryview) -> None:
        """Fills `into` with the tensor's bytes, contiguous; it has to be what the client takes it for."""
        with self._lock:
            sequence = self._send(opwire.Download(handle))
            answer = self._receive(sequence, opwire.Content)
            if not isinstance(answer, opwire.Error):
                with self._losing_on_failure():
                    if answer != expected:
                        raise ProtocolError(f"{answer} came where {expected} was due")
                    self._channel.receive_data(sequence, into, timeout_s=self._timeout_s)
        if isinstance(answer, opwire.Error):
            self._raise(answer)

    def seed(self, value: int) -> None:
        self._ask(opwire.Seed(value), opwire.Done)

    def synchronize(self) -> None:
        self._ask(opwire.Synchronize(), opwire.Done)

    def stats(self) -> opwire.Counters:
        return self._ask(opwire.Stats(), opwire.Counters)

    def rng_state(self) -> bytes:
        return self._ask(opwire.GetRngState(), opwire.RngState).state

    def set_rng_state(self, state: bytes) -> None:
        self._ask(opwire.SetRngState(state), opwire.Done)

    def free_later(self, handle: int) -> None:
        """Called when a tensor dies, on any thread, in the middle of anything: must not block."""
        self._freed.append(handle)

    def check_alive(self) -> None:
        if self._lost_because:
            raise self._lost_error()

    def close(self, reason: str) -> None:
        """A thread that waits for an answer is woken and sees the device as lost."""
        self._lost_because = self._lost_because or reason
        self._channel.close()

    def abandon(self, reason: str) -> None:
        """Gives the connection up without disturbing the process that it was shared with."""
        self._lock = threading.Lock()
        self._lost_because = self._lost_because or reason
        self._channel.abandon()

    def _ask(self, request: opwire.Request, kind: type[_Reply]) -> _Reply:
        with self._lock:
            answer = self._receive(self._send(request), kind)
        if isinstance(answer, opwire.Error):
            self._raise(answer)
        return answer

    def _send(self, request: opwire.Request) -> int:
        """The request, after the frees that are due. Returns its number."""
        self.check_alive()
        due = [self._freed.popleft() for _ in range(len(self._freed))]
        starts = range(0, len(due), opwire.HANDLES_PER_FREE_MAX)
        try:
            # First of all: it may not fit, and then nothing has been sent yet.
            last = opwire.encode((self._sequence + len(starts)) % opwire.SEQUENCE_MODULUS, request)
        except GenieError:
            self._freed.extend(due)
            raise
        frames = [self._numbered_free(due[i : i + opwire.HANDLES_PER_FREE_MAX]) for i in starts]
        sequence = self._sequence
        self._sequence = (sequence + 1) % opwire.SEQUENCE_MODULUS
        with self._losing_on_failure():
            self._channel.send_frames(b"".join([*frames, last]), timeout_s=self._timeout_s)
        return sequence

    def _numbered_free(self, handles: list[int]) -> bytes:
        frame = opwire.encode(self._sequence, opwire.Free(handles))
        self._sequence = (self._sequence + 1) % opwire.SEQUENCE_MODULUS
        return frame

    def _receive(self, sequence: int, kind: type[_Reply]) -> _Reply | opwire.Error:
        with self._losing_on_failure():
            answer = self._channel.receive_reply(sequence, timeout_s=self._timeout_s)
            if isinstance(answer, kind | opwire.Error):
                return answer
            raise ProtocolError(f"{type(answer).__name__} came where {kind.__name__} was due")

    def _losing_on_failure(self) -> _LosingOnFailure:
        return _LosingOnFailure(self)

    def _raise(self, error: opwire.Error) -> NoReturn:
        what = f"{error.op} (op {error.number})" if error.op else f"request {error.number}"
        text = f"{what} failed on {self.device_name}, node {self.node_id}: {error.message}"
        if error.code == opwire.OUT_OF_MEMORY:
            import torch

            raise torch.OutOfMemoryError(text)
        raised = from_code(error.code, text)
        if isinstance(raised, TransportError):  # the executor has given up on this connection
            self.close(error.message)
            raise self._lost_error() from raised
        raise raised

    def _lost_error(self) -> DeviceLostError:
        return DeviceLostError(
            f"{self.device_name}: the executor on node {self.node_id} (job {self.facts.job_id}) is gone: "
            f"{self._lost_because}",
            hint="its tensors are lost; make them again, and the device starts afresh",
        )


class _LosingOnFailure:
    """Anything that goes wrong in the middle of an exchange, Ctrl-C too, leaves the stream unusable."""

    def __init__(self, connection: ExecutorConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        self._connection.close(str(error) or f"interrupted by {type(error).__name__}")
        if isinstance(error, TransportError):
            raise self._connection._lost_error() from error


def _connect(
    host: str, port: int, server_name: str, context: ssl.SSLContext | None, peer: str
) -> opwire.Channel:
    if context is None:
        from genie.runtime.credentials import is_loopback  # late: `import genie.device` stays cheap

        if not is_loopback(host):
            raise TlsError(f"{peer} is on another machine, and without TLS nothing is sent there")
    try:
        sock = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    except OSError as error:
        raise UnreachableError(f"cannot connect to {peer}: {error}") from error
    try:
        opwire.tune(sock)
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname=server_name)
    except ssl.SSLError as error:
        sock.close()
        raise TlsError(f"{peer} did not pass for {server_name}: {error}") from error
    except OSError as error:
        sock.close()
        raise UnreachableError(f"cannot connect to {peer}: {error}") from error
    return opwire.Channel(sock, peer=peer, trusted=True)
