"""Connections, as an argument: the protocol that controller and agent are written against, and TCP.

A `Channel` carries whole frames. `TcpNetwork` is the real thing, with TLS; genie/sim has one in
memory. Not for: what the frames mean (rpc.py).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from genie.errors import (
    AddressInUseError,
    ConfigError,
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NothingListensError,
    ProtocolError,
    TlsError,
    TransportError,
    UnreachableError,
)
from genie.runtime import wire

_log = logging.getLogger(__name__)

PREFACE_TIMEOUT_S = 10.0
_TAKE_BYTES = 64 * 1024
CONNECTIONS_MAX = 4096
SEND_NOW_BYTES_MAX = 64 * 1024
"""Waiting to be sent on one connection, beyond which a sender waits. The transport's own mark is the same."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How to check the server: the context trusts one CA, and the certificate must carry `server_name`."""

    context: ssl.SSLContext
    server_name: str


class Channel(Protocol):
    """One connection. Frames arrive whole and in order, or ConnectionLostError says that it ended."""

    peer: str
    """host:port of the other side, for messages."""
    certificate_name: str
    """Name in the client certificate that TLS has verified; empty without one."""
    cap_bytes: int
    """Largest payload that is accepted."""

    async def send(self, frame: bytes) -> None: ...

    def try_send_nowait(self, frame: bytes) -> bool:
        """False, and nothing is sent, where `send` might have to wait or would fail."""
        ...

    async def receive(self) -> wire.Frame: ...

    def try_receive_nowait(self) -> wire.Frame | None:
        """The next frame if it is here already; the errors are those of `receive`."""
        ...

    def close(self) -> None:
        """At once; idempotent. What was sent before may or may not arrive."""
        ...


Accept = Callable[[Channel], Awaitable[None]]


class Network(Protocol):
    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> Channel: ...

    async def serve(
        self,
        host: str,
        port: int,
        accept: Accept,
        *,
        tls: ssl.SSLContext | None,
        on_listening: Callable[[int], None],
    ) -> None:
        """Listens until cancelled; `on_listening` gets the port. Leaving closes every connection."""
        ...


class TcpChannel:
    """`lingers`: what was sent last is still delivered after close(). A server's refusal needs that. A
    client has its answers by then, and must not wait for the farewell of a peer that no longer answers."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        cap_bytes: int,
        lingers: bool = True,
    ) -> None:
        host, port, *_ = writer.get_extra_info("peername") or ("unknown", 0)
        self.peer = f"{host}:{port}"
        self.certificate_name = _certificate_name(writer.get_extra_info("peercert"))
        self.cap_bytes = cap_bytes
        self._lingers = lingers
        self._reader = reader
        self._taken = b""
        """Read and not yet given out from `_at` on. Small frames come many at a time."""
        self._at = 0
        self._writer = writer
        self._transport = writer.transport
        self._loop = asyncio.get_running_loop()
        self._going: list[bytes] = []
        """Sent and not yet given to the transport: what one turn of the loop sends goes as one write, which
        with TLS is one record and one system call instead of many."""
        self._going_bytes = 0

    async def send(self, frame: bytes) -> None:
        try:
            self._going.append(frame)
            self._flush()
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise ConnectionLostError(f"the connection to {self.peer} was lost: {error}") from error

    def try_send_nowait(self, frame: bytes) -> bool:
        if self._going_bytes > SEND_NOW_BYTES_MAX:
            self._flush()
        transport = self._transport
        if transport.is_closing() or transport.get_write_buffer_size() > SEND_NOW_BYTES_MAX:
            return False
        if not self._going:
            self._loop.call_soon(self._flush)
        self._going.append(frame)
        self._going_bytes += len(frame)
        return True

    def _flush(self) -> None:
        going, self._going, self._going_bytes = self._going, [], 0
        if going:
            self._writer.write(going[0] if len(going) == 1 else b"".join(going))

    async def receive(self) -> wire.Frame:
        try:
            while (frame := self.try_receive_nowait()) is None:
                await self._take_more()
            return frame
        except asyncio.IncompleteReadError as error:
            cut = " in the middle of a frame" if error.partial or self._at < len(self._taken) else ""
            raise ConnectionLostError(f"{self.peer} closed the connection{cut}") from None
        except OSError as error:
            raise ConnectionLostError(f"the connection to {self.peer} was lost: {error}") from error

    def try_receive_nowait(self) -> wire.Frame | None:
        taken, start = self._taken, self._at + wire.HEADER_BYTES
        if len(taken) < start:
            return None
        length, kind, call_id = wire.unpack_header(taken, self._at, cap_bytes=self.cap_bytes, peer=self.peer)
        end = start + length
        if len(taken) < end:
            return None
        if end == len(taken):
            # A large frame must not stay in memory for as long as its sender is silent.
            self._taken, self._at = b"", 0
        else:
            self._at = end
        return wire.Frame(kind, call_id, taken[start:end])

    async def _take_more(self) -> None:
        left = self._taken[self._at :]
        if len(left) < wire.HEADER_BYTES:
            data = await self._reader.read(_TAKE_BYTES)
            if not data:
                raise asyncio.IncompleteReadError(left, None)
        else:
            length, _, _ = wire.unpack_header(left, cap_bytes=self.cap_bytes, peer=self.peer)
            data = await self._reader.readexactly(wire.HEADER_BYTES + length - len(left))
        self._taken, self._at = left + data, 0

    async def exchange_prefaces(self) -> None:
        await self.send(wire.preface())
        try:
            async with asyncio.timeout(PREFACE_TIMEOUT_S):
                data = await self._reader.readexactly(wire.PREFACE_BYTES)
        except asyncio.IncompleteReadError:
            raise ProtocolError(
                f"{self.peer} closed the connection without a greeting",
                hint="it is not Genie, or one side uses TLS and the other does not",
            ) from None
        except OSError as error:
            raise ConnectionLostError(f"the connection to {self.peer} was lost: {error}") from error
        except TimeoutError:
            raise ProtocolError(
                f"{self.peer} sent no greeting within {PREFACE_TIMEOUT_S:g} s",
                hint="it is not Genie, or one side uses TLS and the other does not",
            ) from None
        wire.check_preface(data, peer=self.peer)

    def close(self) -> None:
        if self._lingers:
            self._flush()
            self._writer.close()
        else:
            self._writer.transport.abort()


class TcpNetwork:
    """TCP with TLS 1.3 where a context is given."""

    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> Channel:
        where = f"{host}:{port}"
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(
                    host,
                    port,
                    ssl=tls.context if tls else None,
                    server_hostname=tls.server_name if tls else None,
                )
                channel = TcpChannel(reader, writer, cap_bytes=wire.FRAME_BYTES_MAX, lingers=False)
                try:
                    await channel.exchange_prefaces()
                except BaseException:
                    channel.close()
                    raise
                return channel
        except TimeoutError:
            raise DeadlineError(
                f"{where} did not answer within {timeout_s:g} s", hint="check the address and any firewall"
            ) from None
        except (OSError, ssl.SSLError, UnicodeError) as error:
            raise explain_connect_failure(error, where) from error

    async def serve(
        self,
        host: str,
        port: int,
        accept: Accept,
        *,
        tls: ssl.SSLContext | None,
        on_listening: Callable[[int], None],
    ) -> None:
        failure: GenieError | None = None
        async with asyncio.TaskGroup() as connections:
            open_now: set[asyncio.Task[None]] = set()

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                if len(open_now) >= CONNECTIONS_MAX:
                    _log.warning("refused a connection: %d are open, the most allowed", len(open_now))
                    writer.close()
                    return
                task = connections.create_task(_serve_one(reader, writer, accept))
                open_now.add(task)
                task.add_done_callback(open_now.discard)

            try:
                server = await _listen(host, port, connected, tls)
            except GenieError as error:
                # Raised below: inside the group it would come out wrapped in an ExceptionGroup.
                failure = error
            else:
                try:
                    on_listening(server.sockets[0].getsockname()[1])
                    await asyncio.get_running_loop().create_future()
                finally:
                    server.close()
                    for task in open_now:
                        task.cancel()
        if failure is not None:
            raise failure


async def _listen(
    host: str,
    port: int,
    connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
    tls: ssl.SSLContext | None,
) -> asyncio.Server:
    try:
        return await asyncio.start_server(
            connected,
            host,
            port,
            ssl=tls,
            backlog=512,
            ssl_handshake_timeout=PREFACE_TIMEOUT_S if tls else None,
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"port {port} on {host} is in use",
                hint="stop what listens there ('genie down' if it is Genie) or choose another --port",
            ) from error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}", hint="check --bind and --port"
        ) from error


async def _serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, accept: Accept) -> None:
    """The boundary of one connection: whatever goes wrong on it stays on it."""
    channel = TcpChannel(reader, writer, cap_bytes=wire.FRAME_BYTES_MAX_STRANGER)
    try:
        await channel.exchange_prefaces()
        await accept(channel)
    except TransportError as error:
        _log.info("connection from %s ended: %s", channel.peer, error)
    except Exception:
        _log.exception("connection from %s failed", channel.peer)
    finally:
        channel.close()


def explain_connect_failure(error: OSError | UnicodeError, where: str) -> GenieError:
    """What a failed connect means, in words. Shared with whoever connects without this class."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(
            f"{where} showed a certificate that is not of this cluster: {error.verify_message}",
            hint="the token is of another cluster, or another program listens there",
        )
    if isinstance(error, ssl.SSLError):
        return TlsError(
            f"TLS with {where} failed: {error.reason or error}",
            hint="one side may use TLS and the other not; compare controller.tls on the server",
        )
    if _refused_everywhere(error):
        return NothingListensError(
            f"{where} refused the connection: nothing listens there",
            hint="start the cluster with 'genie up', or correct the address and port",
        )
    if isinstance(error, ConnectionError):
        return ConnectionLostError(
            f"{where} closed the connection during the greeting: {error}",
            hint="it is not Genie, or one side uses TLS and the other does not",
        )
    return UnreachableError(f"{where} cannot be reached: {error}", hint="check the address and the network")


def _refused_everywhere(error: OSError | UnicodeError) -> bool:
    """asyncio joins the failures of a name with several addresses into one OSError of their texts."""
    if isinstance(error, ConnectionRefusedError):
        return True
    text = str(error)
    refusals = text.count(f"[Errno {errno.ECONNREFUSED}]")
    return text.startswith("Multiple exceptions:") and refusals == text.count("[Errno ") > 0


def address_towards(host: str, port: int) -> str | None:
    """Our own address on the way there; None where there is none. Sends nothing; may block on a name."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _certificate_name(certificate: object) -> str:
    """The one DNS name that our CA has put into a client certificate."""
    if not isinstance(certificate, dict):
        return ""
    for kind, name in certificate.get("subjectAltName", ()):
        if kind == "DNS":
            return str(name)
    return ""
