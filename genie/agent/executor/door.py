"""Listens, checks who comes, and lets one client in.

Strangers are met on threads of their own, few at a time and each with a deadline, so that none of
them can hold up the client inside. When there are too many, the one that has been silent for the
longest time goes, so that nobody keeps the client out by saying nothing. A second client with the
right ticket is told that the place is taken. Not for: what a client may do once inside (session.py).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import queue
import socket
import ssl
import threading
import time
from pathlib import Path

from genie.agent.executor.config import ExecutorConfig
from genie.errors import (
    AddressInUseError,
    ConfigError,
    DeviceUnavailableError,
    GenieError,
    ProtocolError,
    TokenRefusedError,
)
from genie.runtime import opwire, tls

_log = logging.getLogger(__name__)

_STRANGERS_MAX = 8
_STRANGER_TIMEOUT_S = 10.0
_FIRST_BYTE_S = 2.0
_LAST_WORDS_S = 1.0
_BACKLOG = 16


class Door:
    """Listens from the start; lets clients in after `open`. `facts` goes to the client that is let in."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._ticket_sha256 = config.ticket_sha256
        self._context = _tls_context(config)
        self._listener = _listen(config.listen_host, config.port)
        self.port: int = self._listener.getsockname()[1]
        self._facts: opwire.Opened | None = None
        self._taken = threading.Lock()
        self._room = threading.BoundedSemaphore(_STRANGERS_MAX)
        self._silent: dict[socket.socket, None] = {}
        """Strangers that have sent nothing yet, oldest first; changed under the lock."""
        self._silent_lock = threading.Lock()
        self._clients: queue.Queue[opwire.Channel] = queue.Queue(maxsize=1)
        self._closed = threading.Event()

    def open(self, facts: opwire.Opened) -> None:
        self._facts = facts
        threading.Thread(target=self._accept_all, name="executor-door", daemon=True).start()

    def wait_client(self, timeout_s: float) -> opwire.Channel | None:
        """The client, once its ticket is accepted; None when nobody came in time."""
        try:
            return self._clients.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._closed.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        except OSError:
            pass  # some systems refuse this on a listener; closing is enough there
        self._listener.close()

    def _accept_all(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                _log.warning("cannot accept a connection: %s", error)
                time.sleep(0.1)  # out of descriptors, most likely: do not spin
                continue
            if not self._room.acquire(blocking=False):
                self._hurry_oldest()
                self._room.acquire()  # further ones wait in the backlog, for one deadline at most
            with self._silent_lock:
                self._silent[sock] = None
            peer = f"{address[0]}:{address[1]}"
            threading.Thread(
                target=self._meet, args=(sock, peer), name=f"executor-{peer}", daemon=True
            ).start()

    def _meet(self, sock: socket.socket, peer: str) -> None:
        try:
            self._wait_first_byte(sock, peer)
            self._let_in(sock, peer)
        except (GenieError, OSError) as error:
            _log.warning("turned away %s: %s", peer, error)
            sock.close()
        finally:
            self._room.release()

    def _hurry_oldest(self) -> None:
        with self._silent_lock:
            for sock in self._silent:
                try:
                    sock.shutdown(socket.SHUT_RDWR)  # wakes its thread, which then leaves
                except OSError:
                    pass  # it is on its way out already
                del self._silent[sock]
                return

    def _wait_first_byte(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.settimeout(_FIRST_BYTE_S)
            if not sock.recv(1, socket.MSG_PEEK):
                raise ProtocolError(f"{peer} left without a word")
        finally:
            with self._silent_lock:
                self._silent.pop(sock, None)

    def _let_in(self, sock: socket.socket, peer: str) -> None:
        deadline = time.monotonic() + _STRANGER_TIMEOUT_S
        opwire.tune(sock)
        sock.settimeout(_STRANGER_TIMEOUT_S)
        if self._context is not None:
            sock = self._context.wrap_socket(sock, server_side=True)
        channel = opwire.Channel(sock, peer=peer, trusted=False)
        try:
            channel.exchange_prefaces(timeout_s=_left(deadline))
            received = channel.receive_request(timeout_s=_left(deadline), wait_s=_left(deadline))
            if received is None:
                raise ProtocolError(f"{peer} left without a word")
            self._check_ticket(received[1], peer)
            if not self._taken.acquire(blocking=False):
                raise DeviceUnavailableError(
                    "this executor already serves a client", hint="an executor has one connection at a time"
                )
        except GenieError as error:
            self._refuse(channel, error)
            raise
        self._welcome(channel, deadline)

    def _check_ticket(self, request: opwire.Request, peer: str) -> None:
        if not isinstance(request, opwire.Open):
            raise ProtocolError(f"{peer} began with {type(request).__name__} instead of its ticket")
        shown = hashlib.sha256(request.ticket.encode()).hexdigest()
        if not hmac.compare_digest(shown, self._ticket_sha256):
            raise TokenRefusedError("the ticket is not for this executor")

    def _welcome(self, channel: opwire.Channel, deadline: float) -> None:
        """The place is taken by this client from here on, and stays taken: it is the only session."""
        assert self._facts is not None
        try:
            channel.send(0, self._facts, timeout_s=_left(deadline))
        except GenieError:
            self._taken.release()
            channel.close()
            raise
        channel.trusted = True
        self._clients.put_nowait(channel)

    def _refuse(self, channel: opwire.Channel, error: GenieError) -> None:
        answer = opwire.Error(code=error.code, message=str(error)[:1000], op="", number=0)
        try:
            channel.send(0, answer, timeout_s=_LAST_WORDS_S)
        except GenieError:
            pass  # it does not listen either
        channel.finish(timeout_s=_LAST_WORDS_S)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _tls_context(config: ExecutorConfig) -> ssl.SSLContext | None:
    return tls.server_context(Path(config.certificate_path), Path(config.key_path)) if config.tls else None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"port {port} on {host} is taken", hint="use port 0") from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
