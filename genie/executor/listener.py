"""Listens, authenticates peers, and admits one client, which may reconnect.

Handshakes run on their own threads, each with a timeout, so that they do not delay the admitted client. When
too many are in progress, the oldest one of the address with the most is closed; accepting never waits. A
second client with a valid ticket is refused; one that also has the session key is the same client, and
replaces its old connection. Other executors authenticate with a token per parcel; each fetch runs on its own
thread. session.py serves the admitted client.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from genie.errors import (
    AddressInUseError,
    ConfigError,
    ConnectionLostError,
    DeviceUnavailableError,
    GenieError,
    ProtocolError,
    TlsError,
    TokenRefusedError,
)
from genie.model.names import address_text, is_loopback
from genie.processes.executor_config import ExecutorConfig
from genie.runtime import device_protocol

if TYPE_CHECKING:
    from genie.native.genie_executor import Stream

_log = logging.getLogger(__name__)

_FETCH_CONNECTIONS_MAX = 64
"""An executor fetches one parcel at a time, so this limits the number of other executors."""
_CONCURRENT_HANDSHAKES_MAX = 128
"""More than all other executors that may fetch, which can connect at the same time."""
_FETCH_IDLE_TIMEOUT_S = 10.0
"""Idle timeout of a connection between two fetches."""
_HANDSHAKE_TIMEOUT_S = 5.0
_FIRST_BYTE_TIMEOUT_S = 2.0
_SEND_REFUSAL_TIMEOUT_S = 1.0
_LISTEN_BACKLOG = 128
_DISCARD_CHUNK_BYTES = 4096


@dataclass(frozen=True)
class PendingClient:
    """A client with a valid ticket, before the handshake reply."""

    stream: Stream
    request: device_protocol.Open
    peer: str
    plaintext: bool
    """The op stream does not use TLS: both ends are processes of this machine."""


SendParcel: TypeAlias = "Callable[[int, Stream], bool]"
"""Sends the parcel of this number. True if it was acknowledged; another fetch may follow."""


class ExecutorListener:
    """Listens from the start; accepts connections after `start`."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._listening_socket = _listen(config.listen_host, config.port)
        self.port: int = self._listening_socket.getsockname()[1]
        self._opened_reply: device_protocol.Opened | None = None
        self._stream_type: type[Stream] | None = None
        self._send_parcel: SendParcel | None = None
        self._fetch_slots = threading.BoundedSemaphore(_FETCH_CONNECTIONS_MAX)
        self._sockets_in_handshake: dict[socket.socket, str] = {}
        """Unauthenticated connections with their addresses, oldest first; guarded by `_handshakes_lock`.

        Duplicates, because the stream takes the socket itself.
        """
        self._handshake_thread_count = 0
        """Threads of handshakes, also of connections that were closed; guarded by `_handshakes_lock`."""
        self._handshakes_lock = threading.Lock()
        self._state_changed = threading.Condition()
        """Guards the attributes below."""
        self._pending_client: PendingClient | None = None
        """A newer connection of the client replaces a pending one."""
        self._session_key = ""
        """Empty: there is no session."""
        self._fetch_key = ""
        """Known to this executor and its client only. New for each session."""
        self._accepts_new_session = False
        """The client may not have received its session key."""
        self._client_stream: Stream | None = None
        """The connection that is being served."""
        self._fetch_streams: set[Stream] = set()
        """Connections of other executors."""
        self._closed = threading.Event()

    def set_parcel_sender(self, send_parcel: SendParcel) -> None:
        """Set the function that sends parcels; called before `start`."""
        self._send_parcel = send_parcel

    def start(self, opened: device_protocol.Opened, stream_type: type[Stream]) -> None:
        """Accept connections. `opened`: the handshake reply; `stream_type`: the library's Stream."""
        self._opened_reply = opened
        self._stream_type = stream_type
        threading.Thread(target=self._accept_connections, name="executor-listener", daemon=True).start()

    def wait_for_client(self, timeout_s: float) -> PendingClient | None:
        """Wait for a client with a valid ticket; None on timeout."""
        with self._state_changed:
            self._state_changed.wait_for(lambda: self._pending_client or self._closed.is_set(), timeout_s)
            client, self._pending_client = self._pending_client, None
            return client

    def accept_client(self, client: PendingClient, *, frames_received: int) -> Stream:
        """Send the handshake reply and return the op stream. TransportError if the client disconnected."""
        assert self._opened_reply is not None
        reply = msgspec.structs.replace(
            self._opened_reply,
            session_key=self._session_key,
            fetch_key=self._fetch_key,
            frames_received=frames_received,
            plaintext=client.plaintext,
        )
        stream = client.stream
        try:
            device_protocol.send_reply(stream, reply, peer=client.peer, timeout_s=_HANDSHAKE_TIMEOUT_S)
            if client.plaintext and stream.is_encrypted:
                stream = stream.downgrade_to_plaintext(_HANDSHAKE_TIMEOUT_S)
        except OSError as error:
            client.stream.close()
            raise ConnectionLostError(f"lost the connection to {client.peer}: {error}") from error
        except GenieError:
            client.stream.close()
            raise
        with self._state_changed:
            self._client_stream = stream
            if self._pending_client is not None or self._closed.is_set():
                stream.shut_down()  # replaced by a newer connection, or closed
        return stream

    def allow_new_session(self) -> None:
        """The session was never used: accept the ticket alone, as well as the session key."""
        with self._state_changed:
            self._accepts_new_session = True
            self._client_stream = None

    def disconnect_client(self) -> None:
        """Close the connection of the client, which may reconnect."""
        with self._state_changed:
            if self._client_stream is not None:
                self._client_stream.shut_down()

    def close(self) -> None:
        """Stop listening and close all connections."""
        with self._state_changed:
            self._closed.set()
            self._drop_pending_client()
            for stream in self._fetch_streams:
                stream.shut_down()
            self._state_changed.notify_all()
        try:
            self._listening_socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        except OSError:
            pass  # not supported on some systems, where close() is enough
        self._listening_socket.close()
        self.disconnect_client()

    def _accept_connections(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._listening_socket.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                _log.warning("could not accept a connection: %s", error)
                time.sleep(0.1)  # probably out of file descriptors: do not spin
                continue
            self._start_handshake(sock, host=address[0], peer=f"{address[0]}:{address[1]}")

    def _start_handshake(self, sock: socket.socket, *, host: str, peer: str) -> None:
        """Never waits. Drops the connection if the threads of closed connections have not ended yet."""
        try:
            with self._handshakes_lock:
                if self._handshake_thread_count >= 2 * _CONCURRENT_HANDSHAKES_MAX:
                    raise OSError(errno.EAGAIN, "too many handshakes")
                if len(self._sockets_in_handshake) >= _CONCURRENT_HANDSHAKES_MAX:
                    self._close_oldest_handshake()
                socket_copy = sock.dup()
                self._sockets_in_handshake[socket_copy] = host
                self._handshake_thread_count += 1
        except OSError as error:  # also: out of file descriptors
            _log.warning("rejected the client %s: %s", peer, error)
            sock.close()
            return
        thread = threading.Thread(
            target=self._run_handshake, args=(sock, socket_copy, peer), name=f"executor-{peer}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # out of threads
            _log.warning("rejected the client %s: %s", peer, error)
            sock.close()
            self._end_handshake(socket_copy, thread_ended=True)

    def _run_handshake(self, sock: socket.socket, socket_copy: socket.socket, peer: str) -> None:
        try:
            self._wait_first_byte(sock, peer)
            self._authenticate_and_admit(sock, socket_copy, peer)
        except (GenieError, OSError) as error:
            _log.warning("rejected the client %s: %s", peer, error)
        finally:
            sock.close()  # has no effect after detach()
            self._end_handshake(socket_copy, thread_ended=True)

    def _close_oldest_handshake(self) -> None:
        """Closes the oldest connection of the address with the most; its thread then ends."""
        (most, _), *_ = Counter(self._sockets_in_handshake.values()).most_common(1)
        oldest = next(socket_copy for socket_copy, host in self._sockets_in_handshake.items() if host == most)
        del self._sockets_in_handshake[oldest]
        try:
            oldest.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # already disconnected

    def _end_handshake(self, socket_copy: socket.socket, *, thread_ended: bool = False) -> None:
        """The peer is authenticated, or its thread has ended."""
        with self._handshakes_lock:
            self._sockets_in_handshake.pop(socket_copy, None)
            self._handshake_thread_count -= thread_ended
        socket_copy.close()

    def _wait_first_byte(self, sock: socket.socket, peer: str) -> None:
        sock.settimeout(_FIRST_BYTE_TIMEOUT_S)
        if not sock.recv(1, socket.MSG_PEEK):
            raise ProtocolError(f"{peer} disconnected before the handshake")

    def _authenticate_and_admit(self, sock: socket.socket, socket_copy: socket.socket, peer: str) -> None:
        deadline = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        loopback = is_loopback(sock.getpeername()[0]) and is_loopback(sock.getsockname()[0])
        stream = self._make_stream(sock, peer, _remaining_s(deadline))
        try:
            request = device_protocol.receive_request(stream, peer=peer, timeout_s=_remaining_s(deadline))
            machine = device_protocol.machine_identity()
            same_machine = loopback and machine != "" and request.machine == machine
            plaintext = same_machine or not stream.is_encrypted
            if isinstance(request, device_protocol.Fetch):
                self._check_fetch_token(request)
                self._end_handshake(socket_copy)
                self._start_fetch_thread(stream, request, peer, plaintext=plaintext)
            else:
                self._check_ticket(request)
                self._end_handshake(socket_copy)
                self._admit_client(PendingClient(stream, request, peer, plaintext=plaintext))
        except GenieError as error:
            self._send_refusal_and_close(stream, error, peer)
            raise

    def _start_fetch_thread(
        self, stream: Stream, request: device_protocol.Fetch, peer: str, *, plaintext: bool
    ) -> None:
        with self._state_changed:
            if self._send_parcel is None or not self._session_key or self._closed.is_set():
                raise DeviceUnavailableError("this executor has no session")
        if not self._fetch_slots.acquire(blocking=False):
            raise DeviceUnavailableError(
                f"this executor already has {_FETCH_CONNECTIONS_MAX} connections that fetch parcels"
            )
        thread = threading.Thread(
            target=self._serve_fetches,
            args=(stream, request, peer, plaintext),
            name=f"executor-fetch-{peer}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # out of threads
            self._fetch_slots.release()
            raise DeviceUnavailableError(
                f"this executor could not start a thread to send a parcel to {peer}: {error}"
            ) from error

    def _serve_fetches(
        self, stream: Stream, request: device_protocol.Fetch, peer: str, plaintext: bool
    ) -> None:
        """Run on a separate thread, which ends with the connection or with the session."""
        try:
            device_protocol.send_reply(
                stream,
                device_protocol.Fetched(plaintext=plaintext),
                peer=peer,
                timeout_s=_HANDSHAKE_TIMEOUT_S,
            )
            if plaintext and stream.is_encrypted:
                stream = stream.downgrade_to_plaintext(_HANDSHAKE_TIMEOUT_S)
            with self._state_changed:
                self._fetch_streams.add(stream)
                if self._closed.is_set():
                    return
            self._send_requested_parcels(stream, request, peer, plaintext)
        except TokenRefusedError as error:
            _log.warning("rejected the client %s: %s", peer, error)
        except (GenieError, OSError) as error:
            _log.info("fetch connection of %s ended: %s", peer, error)
        finally:
            with self._state_changed:
                self._fetch_streams.discard(stream)
            stream.close()
            self._fetch_slots.release()

    def _send_requested_parcels(
        self, stream: Stream, request: device_protocol.Fetch, peer: str, plaintext: bool
    ) -> None:
        assert self._send_parcel is not None
        while self._send_parcel(request.number, stream):
            request = device_protocol.receive_fetch(stream, peer=peer, timeout_s=_FETCH_IDLE_TIMEOUT_S)
            try:
                self._check_fetch_token(request)
            except TokenRefusedError as error:
                self._send_refusal_and_close(stream, error, peer)
                raise
            device_protocol.send_reply(
                stream,
                device_protocol.Fetched(plaintext=plaintext),
                peer=peer,
                timeout_s=_HANDSHAKE_TIMEOUT_S,
            )

    def _make_stream(self, sock: socket.socket, peer: str, timeout_s: float) -> Stream:
        """The stream owns the socket, even if this fails."""
        assert self._stream_type is not None
        if not self._config.uses_tls:
            return self._stream_type.plaintext(sock.detach())
        try:
            return self._stream_type.tls_server(
                sock.detach(), self._config.certificate_path, self._config.key_path, timeout_s
            )
        except OSError as error:
            raise TlsError(f"TLS handshake with {peer} failed: {error}") from error

    def _check_ticket(self, request: device_protocol.Open) -> None:
        digest = device_protocol.ticket_digest(request.ticket)
        if not hmac.compare_digest(digest, self._config.ticket_sha256):
            raise TokenRefusedError("the ticket is not for this executor")

    def _check_fetch_token(self, request: device_protocol.Fetch) -> None:
        with self._state_changed:
            key = self._fetch_key
        if not key:
            raise DeviceUnavailableError("this executor has no session")
        expected = device_protocol.make_fetch_token(key, request.number)
        if not hmac.compare_digest(request.token.encode(), expected.encode()):
            raise TokenRefusedError("the token is not valid for this parcel")

    def _admit_client(self, client: PendingClient) -> None:
        with self._state_changed:
            if self._closed.is_set():
                raise DeviceUnavailableError("this executor is shutting down")
            self._check_session_key(client.request.session_key)
            if not client.request.session_key:
                self._session_key = secrets.token_hex(16)
                self._fetch_key = secrets.token_hex(32)
            self._accepts_new_session = False
            self._drop_pending_client()
            self._pending_client = client
            self._state_changed.notify_all()
            if self._client_stream is not None:
                self._client_stream.shut_down()  # the old connection of the client

    def _check_session_key(self, key: str) -> None:
        if not key:
            if self._session_key and not self._accepts_new_session:
                raise DeviceUnavailableError(
                    "this executor already serves a client", hint="an executor serves one client at a time"
                )
        elif not self._session_key or not hmac.compare_digest(key.encode(), self._session_key.encode()):
            raise DeviceUnavailableError("this executor has no such session", hint="its tensors are lost")

    def _drop_pending_client(self) -> None:
        if self._pending_client is not None:
            self._pending_client.stream.close()
            self._pending_client = None

    def _send_refusal_and_close(self, stream: Stream, error: GenieError, peer: str) -> None:
        """Send the error, and close only after the peer has closed or on timeout, so that it arrives."""
        reply = device_protocol.Error(code=error.code, message=str(error)[:1000])
        deadline = time.monotonic() + _SEND_REFUSAL_TIMEOUT_S
        try:
            device_protocol.send_reply(stream, reply, peer=peer, timeout_s=_SEND_REFUSAL_TIMEOUT_S)
            while time.monotonic() < deadline:
                stream.read_exactly(_DISCARD_CHUNK_BYTES, _remaining_s(deadline))
        except (GenieError, OSError):
            pass  # expected: the peer closed the connection
        stream.close()


def _remaining_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_LISTEN_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"port {port} on {host} is already in use", hint="use port 0") from error
        raise ConfigError(f"cannot listen on {address_text(host, port)}: {error}") from error
