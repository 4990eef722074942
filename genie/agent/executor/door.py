"""Listens, checks who comes, and lets one client in, again when its connection broke.

Strangers are met on threads of their own, few at a time and each with a deadline, so that none of
them can hold up the client inside. When there are too many, the one that has been silent for the
longest time goes, so that nobody keeps the client out by saying nothing. A second client with the
right ticket is told that the place is taken; one that also knows the session's key is the client
itself, and takes the place of its old connection. Other executors, which the client sends to fetch
something, show a token instead; each has a thread of its own for as long as that takes. Not for:
what a client may do once inside (session.py).
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from genie.agent.executor.config import ExecutorConfig
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
from genie.runtime import opwire

_log = logging.getLogger(__name__)

_STRANGERS_MAX = 8
_FETCHES_MAX = 64
"""An executor fetches one thing at a time, so this is how many others there may be."""
_FETCH_IDLE_S = 10.0
"""How long one that has fetched something may take to ask for more."""
_STRANGER_TIMEOUT_S = 10.0
_FIRST_BYTE_S = 2.0
_LAST_WORDS_S = 1.0
_BACKLOG = 16
_DRAIN_BYTES = 4096


class Stream(opwire.Pipe, Protocol):
    """A connection of the C++ library: native/torch/stream_bindings.h."""

    @property
    def encrypted(self) -> bool: ...

    def without_tls(self, timeout_s: float) -> Stream: ...

    def shut_down(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Arrival:
    """A client whose ticket is good, still without an answer."""

    stream: Stream
    request: opwire.Open
    peer: str
    bare: bool
    """The op stream may go without TLS: both ends are processes of this machine."""


Deliver = Callable[[int, Stream], bool]
"""Gives whoever is at the other end what is shipped under the number. True when it has it, and may ask for
more on the same connection."""


class Door:
    """Listens from the start; lets clients in after `open`."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._listener = _listen(config.listen_host, config.port)
        self.port: int = self._listener.getsockname()[1]
        self._facts: opwire.Opened | None = None
        self._streams: Any = None  # Any: a compiled class
        self._deliver: Deliver | None = None
        self._room = threading.BoundedSemaphore(_STRANGERS_MAX)
        self._fetches = threading.BoundedSemaphore(_FETCHES_MAX)
        self._silent: dict[socket.socket, None] = {}
        """Strangers that have sent nothing yet, oldest first; changed under the lock."""
        self._silent_lock = threading.Lock()
        self._changed = threading.Condition()
        """Guards what follows, and `_closed`."""
        self._waiting: Arrival | None = None
        """A newer connection of the client replaces one that still waits."""
        self._session_key = ""
        """Empty: nobody has a session here."""
        self._unused = False
        """Whoever was given the key may not have heard it."""
        self._inside: Stream | None = None
        """The connection that is being served."""
        self._fetching: set[Stream] = set()
        """Connections of executors that fetch, or may fetch more."""
        self._closed = threading.Event()

    def send_fetches_to(self, deliver: Deliver) -> None:
        """Called before `open`, by whoever has what other executors come for."""
        self._deliver = deliver

    def open(self, facts: opwire.Opened, streams: Any) -> None:
        """`facts` goes to the client that is let in; `streams` is the library's class Stream."""
        self._facts = facts
        self._streams = streams
        threading.Thread(target=self._accept_all, name="executor-door", daemon=True).start()

    def wait_client(self, timeout_s: float) -> Arrival | None:
        """The client, once its ticket is accepted; None when it did not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed.is_set(), timeout_s)
            arrival, self._waiting = self._waiting, None
            return arrival

    def welcome(self, arrival: Arrival, *, frames_received: int) -> Stream:
        """Answers the client; the op stream begins on what this returns. TransportError when it is gone."""
        assert self._facts is not None
        answer = msgspec.structs.replace(
            self._facts,
            session_key=self._session_key,
            frames_received=frames_received,
            bare=arrival.bare,
        )
        stream = arrival.stream
        try:
            opwire.answer(stream, answer, peer=arrival.peer, timeout_s=_STRANGER_TIMEOUT_S)
            if arrival.bare and stream.encrypted:
                stream = stream.without_tls(_STRANGER_TIMEOUT_S)
        except OSError as error:
            arrival.stream.close()
            raise ConnectionLostError(f"the connection to {arrival.peer} broke: {error}") from error
        except GenieError:
            arrival.stream.close()
            raise
        with self._changed:
            self._inside = stream
            if self._waiting is not None or self._closed.is_set():
                stream.shut_down()  # it has come again, or must go, already
        return stream

    def vacate(self) -> None:
        """Whoever had the place has never used it: the ticket alone opens a session, as its key does."""
        with self._changed:
            self._unused = True
            self._inside = None

    def cut(self) -> None:
        """Ends the connection of the client inside, which may come back."""
        with self._changed:
            if self._inside is not None:
                self._inside.shut_down()

    def close(self) -> None:
        """Nobody comes in any more, and whoever is inside goes."""
        with self._changed:
            self._closed.set()
            self._drop_waiting()
            for stream in self._fetching:
                stream.shut_down()
            self._changed.notify_all()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        except OSError:
            pass  # some systems refuse this on a listener; closing is enough there
        self._listener.close()
        self.cut()

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
        finally:
            sock.close()  # unless a stream has taken it over
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
        near = _is_loopback(sock.getpeername()[0]) and _is_loopback(sock.getsockname()[0])
        stream = self._stream_over(sock, peer, _left(deadline))
        try:
            request = opwire.receive_request(stream, peer=peer, timeout_s=_left(deadline))
            here = opwire.this_machine()
            same = near and here != "" and request.machine == here
            bare = same or not stream.encrypted
            if isinstance(request, opwire.Fetch):
                self._check_token(request)
                self._let_fetch(stream, request, peer, bare=bare)
            else:
                self._check_ticket(request)
                self._admit(Arrival(stream, request, peer, bare=bare))
        except GenieError as error:
            self._refuse(stream, error, peer)
            raise

    def _let_fetch(self, stream: Stream, request: opwire.Fetch, peer: str, *, bare: bool) -> None:
        with self._changed:
            if self._deliver is None or not self._session_key or self._closed.is_set():
                raise DeviceUnavailableError("this executor serves nobody")
        if not self._fetches.acquire(blocking=False):
            raise DeviceUnavailableError(f"{_FETCHES_MAX} fetches wait at this executor already")
        thread = threading.Thread(
            target=self._fetch, args=(stream, request, peer, bare), name=f"executor-fetch-{peer}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # there are no threads left
            self._fetches.release()
            raise DeviceUnavailableError(f"this executor cannot serve another fetch: {error}") from error

    def _fetch(self, stream: Stream, request: opwire.Fetch, peer: str, bare: bool) -> None:
        """On a thread of its own, which ends with the connection or with the session."""
        try:
            opwire.answer(stream, opwire.Fetched(bare=bare), peer=peer, timeout_s=_STRANGER_TIMEOUT_S)
            if bare and stream.encrypted:
                stream = stream.without_tls(_STRANGER_TIMEOUT_S)
            with self._changed:
                self._fetching.add(stream)
                if self._closed.is_set():
                    return
            self._deliver_all(stream, request, peer, bare)
        except TokenRefusedError as error:
            _log.warning("turned away %s: %s", peer, error)
        except (GenieError, OSError) as error:
            _log.info("%s fetches no more: %s", peer, error)
        finally:
            with self._changed:
                self._fetching.discard(stream)
            stream.close()
            self._fetches.release()

    def _deliver_all(self, stream: Stream, request: opwire.Fetch, peer: str, bare: bool) -> None:
        assert self._deliver is not None
        while self._deliver(request.number, stream):
            request = opwire.receive_fetch(stream, peer=peer, timeout_s=_FETCH_IDLE_S)
            try:
                self._check_token(request)
            except TokenRefusedError as error:
                self._refuse(stream, error, peer)
                raise
            opwire.answer(stream, opwire.Fetched(bare=bare), peer=peer, timeout_s=_STRANGER_TIMEOUT_S)

    def _stream_over(self, sock: socket.socket, peer: str, timeout_s: float) -> Stream:
        """The socket is the stream's from here on, whatever comes of it."""
        stream: Stream
        if not self._config.tls:
            stream = self._streams.bare(sock.detach())
            return stream
        try:
            stream = self._streams.tls_server(
                sock.detach(), self._config.certificate_path, self._config.key_path, timeout_s
            )
        except OSError as error:
            raise TlsError(f"no TLS with {peer}: {error}") from error
        return stream

    def _check_ticket(self, request: opwire.Open) -> None:
        shown = opwire.ticket_digest(request.ticket)
        if not hmac.compare_digest(shown, self._config.ticket_sha256):
            raise TokenRefusedError("the ticket is not for this executor")

    def _check_token(self, request: opwire.Fetch) -> None:
        due = opwire.fetch_token(self._config.ticket_sha256, request.number)
        if not hmac.compare_digest(request.token.encode(), due.encode()):
            raise TokenRefusedError("the token does not open that parcel of this executor")

    def _admit(self, arrival: Arrival) -> None:
        with self._changed:
            if self._closed.is_set():
                raise DeviceUnavailableError("this executor is ending")
            self._check_place(arrival.request.session_key)
            if not arrival.request.session_key:
                self._session_key = secrets.token_hex(16)
            self._unused = False
            self._drop_waiting()
            self._waiting = arrival
            self._changed.notify_all()
            if self._inside is not None:
                self._inside.shut_down()  # its old connection, which it has given up

    def _check_place(self, shown_key: str) -> None:
        if not shown_key:
            if self._session_key and not self._unused:
                raise DeviceUnavailableError(
                    "this executor already serves a client", hint="an executor has one client at a time"
                )
        elif not self._session_key or not hmac.compare_digest(shown_key.encode(), self._session_key.encode()):
            raise DeviceUnavailableError("this executor has no such session", hint="its tensors are lost")

    def _drop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.stream.close()
            self._waiting = None

    def _refuse(self, stream: Stream, error: GenieError, peer: str) -> None:
        """The connection stays until the stranger has closed it or a while is over, so that this arrives."""
        answer = opwire.Error(code=error.code, message=str(error)[:1000])
        deadline = time.monotonic() + _LAST_WORDS_S
        try:
            opwire.answer(stream, answer, peer=peer, timeout_s=_LAST_WORDS_S)
            while time.monotonic() < deadline:
                stream.read_exactly(_DRAIN_BYTES, _left(deadline))
        except (GenieError, OSError):
            pass  # the usual case: it has heard enough
        stream.close()


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"port {port} on {host} is taken", hint="use port 0") from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
