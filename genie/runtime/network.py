"""The network interface that controller, agents and clients use, and its implementation with TCP and TLS.

A `Channel` carries whole frames; rpc.py interprets them. genie/sim has an implementation in memory.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from genie.errors import (
    AddressInUseError,
    ClockSkewError,
    ConfigError,
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NothingListensError,
    OverloadedError,
    ProtocolError,
    TlsError,
    TransportError,
    UnreachableError,
)
from genie.model.names import address_text
from genie.model.release import ProtocolVersions
from genie.processes.file_limit import get_open_file_limit
from genie.processes.tasks import unwrapped_task_group
from genie.runtime import wire
from genie.runtime.connection_limits import ConnectionLimiter, ConnectionLimits, OpenConnection

_log = logging.getLogger(__name__)

PREFACE_TIMEOUT_S = 10.0
CLOSE_FLUSH_TIMEOUT_S = 2.0
"""How long a closed connection waits for its peer to read what was sent before."""
_READ_CHUNK_BYTES = 64 * 1024
_LISTEN_BACKLOG = 512
_ACCEPT_RETRY_INTERVAL_S = 0.1
_REJECTION_LOG_INTERVAL_S = 60.0
_OVERLOAD_RETRY_INTERVAL_S = 0.5
# A fatal TLS alert, internal_error: tells a client before the handshake that the server is overloaded.
_TLS_REJECTION_ALERT = bytes.fromhex("15030300020250")
_TLS_REJECTION_REASON = "TLSV1_ALERT_INTERNAL_ERROR"
# Error codes of OpenSSL for certificates of a trusted CA.
_CERTIFICATE_VALIDITY_ERRORS = {9: "is not valid yet", 10: "has expired"}
_HOST_NAME_MISMATCH = 62
_CONTROLLER_PORT_HINT = "the default port of a controller is 5555; 2379 and 2380 are those of etcd"
# Dead connections are detected after about two minutes.
_TCP_KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
SEND_BUFFER_BYTES_MAX = 64 * 1024
"""Maximum size of the send buffer before a sender waits; the same as the high-water mark of asyncio."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How to verify the server: the context trusts one CA, and the certificate must contain `server_name`."""

    context: ssl.SSLContext
    server_name: str


class Channel(Protocol):
    """One connection. Frames arrive whole and in order; ConnectionLostError is raised when it ends."""

    peer: str
    """host:port of the peer, for messages."""
    certificate_name: str
    """Name in the verified client certificate; empty without one."""
    protocol_version: int
    """The version of the protocol that both sides speak."""

    def set_frame_limit(self, size_bytes: int) -> None:
        """Sets the maximum size of a payload from the peer."""
        ...

    def set_authenticated(self) -> None:
        """The peer is authenticated: it no longer counts as a stranger (connection_limits.py)."""
        ...

    async def send(self, frame: bytes) -> None: ...

    def try_send_nowait(self, frame: bytes) -> bool:
        """Returns False, and sends nothing, if `send` might wait or fail."""
        ...

    async def receive(self) -> wire.Frame: ...

    def try_receive_nowait(self) -> wire.Frame | None:
        """The next frame if it has arrived, or None. Raises as `receive` does."""
        ...

    def close(self) -> None:
        """Closes immediately; idempotent. Frames that were sent before may be lost."""
        ...


AcceptCallback = Callable[[Channel], Awaitable[None]]


class Network(Protocol):
    @property
    def connection_limits(self) -> ConnectionLimits:
        """Those of each server."""
        ...

    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> Channel: ...

    async def serve(
        self,
        host: str,
        port: int,
        accept: AcceptCallback,
        *,
        tls: ssl.SSLContext | None,
        on_listening: Callable[[int], None],
    ) -> None:
        """Listens until cancelled; `on_listening` gets the port. Closes all connections on exit."""
        ...


class TcpChannel:
    """`flush_on_close`: frames sent before close() are still delivered, as a server's error reply must be.

    A client does not flush: it must not wait for a peer that does not respond.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        frame_bytes_max: int,
        flush_on_close: bool = True,
        on_authenticated: Callable[[], None] = lambda: None,
    ) -> None:
        host, port, *_ = writer.get_extra_info("peername") or ("unknown", 0)
        self.peer = address_text(host, port)
        self.certificate_name = _certificate_name(writer.get_extra_info("peercert"))
        self.protocol_version = 0
        """0 until `exchange_prefaces`."""
        self._frame_bytes_max = frame_bytes_max
        self._flush_on_close = flush_on_close
        self._on_authenticated = on_authenticated
        self._reader = reader
        self._receive_buffer = b""
        """Received bytes; those before `_receive_buffer_start` are consumed. One read may return many
        frames."""
        self._receive_buffer_start = 0
        self._writer = writer
        self._transport = writer.transport
        self._loop = asyncio.get_running_loop()
        self._unsent_frames: list[bytes] = []
        """Frames that are not yet passed to the transport. The frames of one iteration of the event loop are
        one write: with TLS one record and one system call."""
        self._unsent_bytes = 0
        self._is_closed = False

    def set_frame_limit(self, size_bytes: int) -> None:
        self._frame_bytes_max = size_bytes

    def set_authenticated(self) -> None:
        self._on_authenticated()

    async def send(self, frame: bytes) -> None:
        try:
            self._unsent_frames.append(frame)
            self._send_unsent_frames()
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise ConnectionLostError(f"the connection to {self.peer} was lost: {error}") from error

    def try_send_nowait(self, frame: bytes) -> bool:
        if self._unsent_bytes > SEND_BUFFER_BYTES_MAX:
            self._send_unsent_frames()
        transport = self._transport
        if transport.is_closing() or transport.get_write_buffer_size() > SEND_BUFFER_BYTES_MAX:
            return False
        if not self._unsent_frames:
            self._loop.call_soon(self._send_unsent_frames)
        self._unsent_frames.append(frame)
        self._unsent_bytes += len(frame)
        return True

    def _send_unsent_frames(self) -> None:
        unsent, self._unsent_frames, self._unsent_bytes = self._unsent_frames, [], 0
        if unsent:
            self._writer.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    async def receive(self) -> wire.Frame:
        try:
            while (frame := self.try_receive_nowait()) is None:
                await self._fill_receive_buffer()
            return frame
        except asyncio.IncompleteReadError as error:
            mid_frame = (
                " in the middle of a frame"
                if error.partial or self._receive_buffer_start < len(self._receive_buffer)
                else ""
            )
            raise ConnectionLostError(f"{self.peer} closed the connection{mid_frame}") from None
        except OSError as error:
            raise ConnectionLostError(f"the connection to {self.peer} was lost: {error}") from error

    def try_receive_nowait(self) -> wire.Frame | None:
        buffer, start = self._receive_buffer, self._receive_buffer_start + wire.HEADER_BYTES
        if len(buffer) < start:
            return None
        length, kind, call_id = wire.unpack_header(
            buffer, self._receive_buffer_start, frame_bytes_max=self._frame_bytes_max, peer=self.peer
        )
        end = start + length
        if len(buffer) < end:
            return None
        if end == len(buffer):
            # Free the memory of a large frame while the connection is idle.
            self._receive_buffer, self._receive_buffer_start = b"", 0
        else:
            self._receive_buffer_start = end
        return wire.Frame(kind, call_id, buffer[start:end])

    async def _fill_receive_buffer(self) -> None:
        left = self._receive_buffer[self._receive_buffer_start :]
        if len(left) < wire.HEADER_BYTES:
            data = await self._reader.read(_READ_CHUNK_BYTES)
            if not data:
                raise asyncio.IncompleteReadError(left, None)
        else:
            length, _, _ = wire.unpack_header(left, frame_bytes_max=self._frame_bytes_max, peer=self.peer)
            data = await self._reader.readexactly(wire.HEADER_BYTES + length - len(left))
        self._receive_buffer, self._receive_buffer_start = left + data, 0

    async def exchange_prefaces(self, versions: ProtocolVersions) -> None:
        """Raises VersionError if the peer speaks none of these versions."""
        await self.send(wire.make_preface(versions))
        try:
            async with asyncio.timeout(PREFACE_TIMEOUT_S):
                data = await self._reader.readexactly(wire.PREFACE_BYTES)
        except asyncio.IncompleteReadError:
            if self._has_verified_peer():
                raise ConnectionLostError(
                    f"{self.peer} closed the connection right after the TLS handshake",
                    hint="if this is a node, its certificate may not be valid by the clock of the "
                    "controller: check the clocks of both machines",
                ) from None
            raise ProtocolError(
                f"{self.peer} disconnected before the handshake",
                hint="it is not Genie, or one side uses TLS and the other does not",
            ) from None
        except OSError as error:
            if isinstance(error, ssl.SSLError) and self._is_first_contact():
                raise ProtocolError(
                    f"{self.peer} is not a Genie controller: it rejected the TLS connection "
                    f"({error.reason or error})",
                    hint=_CONTROLLER_PORT_HINT,
                ) from error
            raise ConnectionLostError(f"the connection to {self.peer} was lost: {error}") from error
        except TimeoutError:
            raise ProtocolError(
                f"{self.peer} did not start the handshake within {PREFACE_TIMEOUT_S:g} s",
                hint="it is not Genie, or one side uses TLS and the other does not",
            ) from None
        self.protocol_version = wire.choose_version(data, own=versions, peer=self.peer)

    def _has_verified_peer(self) -> bool:
        """Whether the peer is a server with a certificate of the cluster."""
        context = self._writer.get_extra_info("sslcontext")
        return context is not None and context.verify_mode is ssl.CERT_REQUIRED

    def _is_first_contact(self) -> bool:
        """Whether the peer is a server whose CA is still to be fetched from it."""
        connection = self._writer.get_extra_info("ssl_object")
        return (
            connection is not None
            and not connection.server_side
            and connection.context.verify_mode is ssl.CERT_NONE
        )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if not self._flush_on_close:
            self._transport.abort()
            return
        self._send_unsent_frames()
        self._writer.close()
        self._loop.call_later(CLOSE_FLUSH_TIMEOUT_S, self._transport.abort)

    async def wait_closed(self) -> None:
        """Waits until the socket is closed, at most CLOSE_FLUSH_TIMEOUT_S after close()."""
        with suppress(OSError):
            await self._writer.wait_closed()


class TcpNetwork:
    """TCP, with TLS 1.3 if a context is given. `limits`: those of each server; by default derived from the
    limit on open files. `versions`: those of the protocol."""

    def __init__(
        self,
        limits: ConnectionLimits | None = None,
        *,
        chance: Callable[[], float] = random.random,
        versions: ProtocolVersions = wire.SUPPORTED_VERSIONS,
    ) -> None:
        self._limits = limits
        self._versions = versions
        self._jitter_rng = chance

    @property
    def connection_limits(self) -> ConnectionLimits:
        return self._limits or ConnectionLimits.for_open_file_limit(get_open_file_limit())

    async def connect(self, host: str, port: int, *, tls: ClientTls | None, timeout_s: float) -> Channel:
        """Retries until the timeout while the server rejects connections because of a limit."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    return await _connect(host, port, tls=tls, versions=self._versions)
            except TimeoutError:
                raise DeadlineError(
                    f"{address_text(host, port)} did not respond within {timeout_s:g} s",
                    hint="check the address and any firewall",
                ) from None
            except OverloadedError as error:
                wait_s = error.retry_after_s * (0.5 + self._jitter_rng())
                if loop.time() + wait_s >= deadline_s:
                    raise
                await asyncio.sleep(wait_s)

    async def serve(
        self,
        host: str,
        port: int,
        accept: AcceptCallback,
        *,
        tls: ssl.SSLContext | None,
        on_listening: Callable[[int], None],
    ) -> None:
        listeners = await _listen(host, port)
        try:
            server = _TcpServer(ConnectionLimiter(self.connection_limits), accept, tls, self._versions)
            on_listening(listeners[0].getsockname()[1])
            async with unwrapped_task_group() as group:
                for listener in listeners:
                    group.create_task(server.accept_forever(listener, group))
        finally:
            for listener in listeners:
                listener.close()


async def _connect(host: str, port: int, *, tls: ClientTls | None, versions: ProtocolVersions) -> Channel:
    try:
        reader, writer = await asyncio.open_connection(
            host,
            port,
            ssl=tls.context if tls else None,
            server_hostname=tls.server_name if tls else None,
        )
        channel = TcpChannel(reader, writer, frame_bytes_max=wire.FRAME_BYTES_MAX, flush_on_close=False)
        try:
            await channel.exchange_prefaces(versions)
        except BaseException:
            channel.close()
            raise
        return channel
    except TimeoutError:
        raise  # TimeoutError is an OSError
    except (OSError, ssl.SSLError, UnicodeError) as error:
        raise explain_connect_failure(error, address_text(host, port)) from error


class _TcpServer:
    """Accepts connections within the limits."""

    def __init__(
        self,
        limiter: ConnectionLimiter,
        accept: AcceptCallback,
        tls: ssl.SSLContext | None,
        versions: ProtocolVersions,
    ) -> None:
        self._versions = versions
        self._limiter = limiter
        self._accept_callback = accept
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._rejected_count = 0
        self._next_rejection_log_s = 0.0

    async def accept_forever(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(listener)
            except ConnectionError:
                continue  # the peer has closed it already
            except OSError as error:  # no file descriptor or memory left
                self._log_rejection(connect_failure_reason(error))
                await asyncio.sleep(_ACCEPT_RETRY_INTERVAL_S)
                continue
            found = self._limiter.accept(
                address[0], now_s=self._loop.time(), close=functools.partial(_shut_down_socket, sock)
            )
            if isinstance(found, str):
                self._reject(sock, found)
            else:
                group.create_task(self._serve_socket(sock, found))

    def _reject(self, sock: socket.socket, reason: str) -> None:
        """Closes a connection before the handshake, which would cost CPU time."""
        with sock, suppress(OSError):
            if self._tls is not None:
                sock.send(_TLS_REJECTION_ALERT)
        self._log_rejection(reason)

    def _log_rejection(self, reason: str) -> None:
        self._rejected_count += 1
        if (now_s := self._loop.time()) >= self._next_rejection_log_s:
            self._next_rejection_log_s = now_s + _REJECTION_LOG_INTERVAL_S
            _log.warning("rejected %d connections; the last one because %s", self._rejected_count, reason)
            self._rejected_count = 0

    async def _serve_socket(self, sock: socket.socket, connection: OpenConnection) -> None:
        try:
            channel = await self._open_channel(sock, connection)
            if channel is not None:
                await self._serve_channel(channel, connection)
        except Exception:  # a task boundary: it must not end the server
            _log.exception("connection from %s failed", connection.address)
        finally:
            connection.release()

    async def _serve_channel(self, channel: TcpChannel, connection: OpenConnection) -> None:
        """Serves one connection. Logs all errors, so that they do not affect other connections."""
        try:
            await channel.exchange_prefaces(self._versions)
            await self._accept_callback(channel)
        except TransportError as error:
            # Strangers must not fill the log.
            level = logging.INFO if connection.is_authenticated else logging.DEBUG
            _log.log(level, "connection from %s ended: %s", channel.peer, error)
        except Exception:
            _log.exception("connection from %s failed", channel.peer)
        finally:
            channel.close()
        await channel.wait_closed()

    async def _open_channel(self, sock: socket.socket, connection: OpenConnection) -> TcpChannel | None:
        """Does the TLS handshake; None if it fails."""
        reader = asyncio.StreamReader(limit=_READ_CHUNK_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        tls = self._tls
        try:
            _set_keepalive(sock)
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=tls,
                ssl_handshake_timeout=PREFACE_TIMEOUT_S if tls else None,
                ssl_shutdown_timeout=CLOSE_FLUSH_TIMEOUT_S if tls else None,
            )
        except OSError as error:
            sock.close()
            _log.debug("the handshake with %s failed: %s", connection.address, error)
            return None
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        return TcpChannel(
            reader,
            writer,
            frame_bytes_max=wire.UNAUTHENTICATED_FRAME_BYTES_MAX,
            on_authenticated=connection.set_authenticated,
        )


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on all addresses of the host."""
    listeners: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(_LISTEN_BACKLOG)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise _explain_listen_failure(error, host, port) from error
    return listeners


def _explain_listen_failure(error: OSError, host: str, port: int) -> GenieError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUseError(
            f"port {port} on {host} is in use",
            hint="stop the program that uses it ('genie down' for Genie), or choose another --port",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"cannot listen on {address_text(host, port)}: {host} is not an address of this machine",
            hint="'ip address' lists its addresses; correct --bind, "
            "or master_addr in genie.init(node_role='server')",
        )
    return ConfigError(
        f"cannot listen on {address_text(host, port)}: {connect_failure_reason(error)}",
        hint="check --bind and --port",
    )


def _set_keepalive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_KEEPALIVE_OPTIONS.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut_down_socket(sock: socket.socket) -> None:
    """Ends the connection of a socket that a transport may use; the transport closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def explain_connect_failure(error: OSError | UnicodeError, where: str) -> GenieError:
    """The error for a failed connect, also for programs that connect without TcpNetwork."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _CERTIFICATE_VALIDITY_ERRORS:
        when = _CERTIFICATE_VALIDITY_ERRORS[error.verify_code]
        return ClockSkewError(
            f"the certificate of {where} {when} by the clock of this machine",
            hint="check the clocks of both machines: timedatectl",
        )
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code == _HOST_NAME_MISMATCH:
        return TlsError(
            f"{where} is not the expected Genie server: {error.verify_message}", hint=_CONTROLLER_PORT_HINT
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(
            f"{where} presented a certificate of another cluster: {error.verify_message}",
            hint="the token belongs to another cluster, or another program listens there",
        )
    if isinstance(error, ssl.SSLError) and error.reason == _TLS_REJECTION_REASON:
        return OverloadedError(
            f"{where} rejects connections for now: a limit on connections is reached",
            retry_after_s=_OVERLOAD_RETRY_INTERVAL_S,
        )
    if isinstance(error, ssl.SSLError):
        return TlsError(
            f"TLS with {where} failed: {error.reason or error}",
            hint="another program may listen there, or only one side uses TLS (check controller.tls)",
        )
    if _was_refused_at_all_addresses(error):
        return NothingListensError(
            f"{where} refused the connection: nothing listens there",
            hint="start the cluster there with 'genie up', on another machine with --bind ADDRESS; "
            "or correct the address and port",
        )
    if isinstance(error, ConnectionError):
        return ConnectionLostError(
            f"{where} closed the connection during the handshake" + (f": {error}" if str(error) else ""),
            hint="it is not Genie, or one side uses TLS and the other does not",
        )
    hint = "check the address and the network"
    if isinstance(error, socket.gaierror):
        hint = name_lookup_hint(error)
    return UnreachableError(f"{where} cannot be reached: {connect_failure_reason(error)}", hint=hint)


def connect_failure_reason(error: OSError | UnicodeError) -> str:
    """Why a connect or bind failed: the text of the errno, of which asyncio only has the number."""
    if isinstance(error, socket.gaierror):
        found = "no such name" if error.errno == socket.EAI_NONAME else "the name lookup failed"
        return f"{found} ({error.strerror})"
    if isinstance(error, OSError) and error.errno is not None:
        text = os.strerror(error.errno)
        return text[:1].lower() + text[1:]
    return str(error)


def name_lookup_hint(error: socket.gaierror) -> str:
    """The hint for a failed name lookup."""
    if error.errno == socket.EAI_NONAME:
        return "check the spelling of the host name"
    return "check the DNS server of this machine (/etc/resolv.conf), or use an IP address"


def _was_refused_at_all_addresses(error: OSError | UnicodeError) -> bool:
    """Whether all addresses refused the connection; asyncio joins their errors into one OSError."""
    if isinstance(error, ConnectionRefusedError):
        return True
    text = str(error)
    refusals = text.count(f"[Errno {errno.ECONNREFUSED}]")
    return text.startswith("Multiple exceptions:") and refusals == text.count("[Errno ") > 0


def local_address_towards(host: str, port: int) -> str | None:
    """The local address of connections to `host`, or None. Sends nothing; may block in a name lookup."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _certificate_name(certificate: object) -> str:
    """The DNS name in a client certificate of our CA."""
    if not isinstance(certificate, dict):
        return ""
    for kind, name in certificate.get("subjectAltName", ()):
        if kind == "DNS":
            return str(name)
    return ""
