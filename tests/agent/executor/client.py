"""A bare client of the executor's wire, for tests that say things which the torch device never would."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from genie.agent.executor.config import ExecutorConfig
from genie.agent.executor.session import Session
from genie.errors import ConnectionLostError
from genie.runtime import opwire

TIMEOUT_S = 30.0


class Client:
    """Speaks after the ticket. `ask` numbers requests as the device does."""

    def __init__(self, channel: opwire.Channel) -> None:
        self.channel = channel
        self.sequence = 1

    def send(self, request: opwire.Request) -> int:
        sequence = self.sequence
        self.sequence += 1
        self.channel.send(sequence, request, timeout_s=TIMEOUT_S)
        return sequence

    def ask(self, request: opwire.Request) -> opwire.Reply:
        return self.channel.receive_reply(self.send(request), timeout_s=TIMEOUT_S)

    def run(self, op: str, *args: opwire.Value, **kwargs: opwire.Value) -> opwire.Reply:
        return self.ask(opwire.RunOp(op, list(args), kwargs))

    def made(self, op: str, *args: opwire.Value, **kwargs: opwire.Value) -> opwire.TensorMeta:
        """The one tensor that an op gives."""
        reply = self.run(op, *args, **kwargs)
        assert isinstance(reply, opwire.Result), reply
        (meta,) = reply.values
        assert isinstance(meta, opwire.TensorMeta)
        return meta

    def refused(self, op: str, *args: opwire.Value, **kwargs: opwire.Value) -> opwire.Error:
        reply = self.run(op, *args, **kwargs)
        assert isinstance(reply, opwire.Error), reply
        return reply

    def counters(self) -> opwire.Counters:
        reply = self.ask(opwire.Stats())
        assert isinstance(reply, opwire.Counters)
        return reply

    def download(self, meta: opwire.TensorMeta) -> bytes:
        sequence = self.send(opwire.Download(meta.handle))
        content = self.channel.receive_reply(sequence, timeout_s=TIMEOUT_S)
        assert content == opwire.Content(meta.dtype, meta.shape)
        into = bytearray(opwire.size_bytes(meta.dtype, meta.shape))
        self.channel.receive_data(sequence, memoryview(into), timeout_s=TIMEOUT_S)
        return bytes(into)

    def hears_the_end(self) -> bool:
        """Whether the executor has closed the connection, whatever it said before."""
        try:
            while True:
                self.channel.receive_reply(0, timeout_s=TIMEOUT_S)
        except ConnectionLostError:
            return True


def dial(port: int, context: ssl.SSLContext | None = None, server_name: str = "") -> opwire.Channel:
    sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    if context is not None:
        sock = context.wrap_socket(sock, server_hostname=server_name)
    return opwire.Channel(sock, peer="the executor", trusted=True)


def knock(channel: opwire.Channel, ticket: str) -> opwire.Reply:
    channel.exchange_prefaces(timeout_s=TIMEOUT_S)
    channel.send(0, opwire.Open(ticket), timeout_s=TIMEOUT_S)
    return channel.receive_reply(0, timeout_s=TIMEOUT_S)


@contextmanager
def session_on_a_thread(**settings: object) -> Iterator[Client]:
    """The real session of an executor, without the process around it. It must end with the client."""
    config = ExecutorConfig(
        job_id="job-1",
        endpoint_path=str(Path("unused")),
        ticket_sha256="0" * 64,
        **settings,  # type: ignore[arg-type]
    )
    ours, theirs = socket.socketpair()
    session = Session(opwire.Channel(theirs, peer="the client", trusted=True), config)
    thread = threading.Thread(target=session.serve)
    thread.start()
    client = Client(opwire.Channel(ours, peer="the executor", trusted=True))
    try:
        yield client
    finally:
        client.channel.close()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the session did not end with its client"
