"""The handshake with an executor, also with malicious peers."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.errors import (
    AccessError,
    ConnectionLostError,
    DeadlineError,
    DeviceUnavailableError,
    FrameTooLargeError,
    ProtocolError,
    TokenRefusedError,
    TransportError,
    VersionError,
)
from genie.model.release import ProtocolVersions
from genie.runtime import device_protocol
from genie.runtime.device_protocol import Error, Fetch, Fetched, Open, Opened
from tests.executor.client import SocketPipe

SHORT_S = 0.05
LONG_S = 10.0
FACTS = Opened(
    "cpu", "a name", 2**40, "job-1", "2.13.0", session_key="k" * 32, frames_received=7, plaintext=True
)


@pytest.fixture
def pipe_and_peer_socket() -> Iterator[tuple[SocketPipe, socket.socket]]:
    """A pipe, and the raw socket of its peer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield SocketPipe(ours), theirs


def open_session(pipe: SocketPipe, timeout_s: float = LONG_S) -> Opened:
    return device_protocol.open_session(pipe, Open("secret"), peer="the peer", timeout_s=timeout_s)


def receive_request(pipe: SocketPipe, timeout_s: float = LONG_S) -> Open | Fetch:
    return device_protocol.receive_request(pipe, peer="the peer", timeout_s=timeout_s)


# --- both sides ---------------------------------------------------------------------------------


texts = st.text(max_size=50)
counts = st.integers(0, 2**62)


@given(
    st.builds(Open, texts, texts, counts, texts),
    st.one_of(
        st.builds(Opened, texts, texts, counts, texts, texts, texts, counts, st.booleans()),
        st.builds(Error, st.sampled_from(["device.unavailable", "access", "nonsense"]), texts),
    ),
)
def test_open_and_its_reply_arrive_unchanged(request: Open, answer: Opened | Error) -> None:
    ours, theirs = socket.socketpair()
    received: list[Open | Fetch] = []

    def executor() -> None:
        pipe = SocketPipe(theirs)
        received.append(receive_request(pipe))
        device_protocol.send_reply(pipe, answer, peer="x", timeout_s=LONG_S)

    thread = threading.Thread(target=executor)
    with ours, theirs:
        thread.start()
        if isinstance(answer, Error):
            with pytest.raises(Exception, match="rejected"):
                device_protocol.open_session(SocketPipe(ours), request, peer="x", timeout_s=LONG_S)
        else:
            assert (
                device_protocol.open_session(SocketPipe(ours), request, peer="x", timeout_s=LONG_S) == answer
            )
        thread.join(LONG_S)
    assert received == [request]


@given(
    st.builds(Fetch, st.integers(1, 2**62), texts, texts),
    st.one_of(st.builds(Fetched, st.booleans()), st.builds(Error, st.just("access"), texts)),
)
def test_fetch_and_its_reply_arrive_unchanged(request: Fetch, answer: Fetched | Error) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(device_protocol.make_preface() + device_protocol.encode(answer))
        if isinstance(answer, Error):
            with pytest.raises(AccessError, match="rejected"):
                device_protocol.request_fetch(SocketPipe(ours), request, peer="x", timeout_s=LONG_S)
        else:
            assert (
                device_protocol.request_fetch(SocketPipe(ours), request, peer="x", timeout_s=LONG_S) == answer
            )
        assert receive_request(SocketPipe(theirs)) == request


@pytest.mark.parametrize("answer", [Fetched(True), Opened("cpu", "x", 1, "j", "t")])
def test_reply_of_another_type_is_rejected(
    pipe_and_peer_socket: tuple[SocketPipe, socket.socket], answer: Fetched | Opened
) -> None:
    pipe, peer = pipe_and_peer_socket
    peer.sendall(device_protocol.make_preface() + device_protocol.encode(answer))
    with pytest.raises(ProtocolError):
        if isinstance(answer, Fetched):
            open_session(pipe)
        else:
            device_protocol.request_fetch(pipe, Fetch(1, "x"), peer="x", timeout_s=LONG_S)


def test_fetch_token_is_specific_to_parcel_and_key_and_reveals_neither() -> None:
    tokens = {device_protocol.make_fetch_token("key", 1), device_protocol.make_fetch_token("key", 11)}
    tokens.add(device_protocol.make_fetch_token("another", 1))
    assert len(tokens) == 3
    assert all(len(token) == 64 and "key" not in token for token in tokens)


@pytest.mark.parametrize("error", [TokenRefusedError, DeviceUnavailableError])
def test_error_reply_is_raised_with_its_type(
    pipe_and_peer_socket: tuple[SocketPipe, socket.socket], error: type[Exception]
) -> None:
    pipe, peer = pipe_and_peer_socket
    peer.sendall(device_protocol.make_preface() + device_protocol.encode(Error(error.code, "because")))  # type: ignore[attr-defined]
    with pytest.raises(error, match="the peer rejected the connection: because"):
        open_session(pipe)


def test_ticket_is_not_sent_to_a_peer_of_another_protocol(
    pipe_and_peer_socket: tuple[SocketPipe, socket.socket],
) -> None:
    pipe, peer = pipe_and_peer_socket
    peer.sendall(b"SSH-2.0-")
    with pytest.raises(ProtocolError, match="does not speak"):
        open_session(pipe)
    assert peer.recv(4096) == device_protocol.make_preface()


# --- invalid messages ---------------------------------------------------------------------------


def pack_message(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"open": 1}),
        msgspec.msgpack.encode(["reboot"]),
        msgspec.msgpack.encode(["open"]),
        msgspec.msgpack.encode(["open", 5]),
        msgspec.msgpack.encode(["open", "x" * 513]),
        msgspec.msgpack.encode(["open", "x", "k" * 129]),
        msgspec.msgpack.encode(["open", "x", "", -1]),
        msgspec.msgpack.encode(["open", "x", "", 2**63]),
        msgspec.msgpack.encode(["open", "x", "", 0, "m" * 129]),
        msgspec.msgpack.encode(["open", "x", "", 0, "", "and more"]),
        msgspec.msgpack.encode(FACTS),
        b"\x91" * 4000,
        msgspec.msgpack.encode("text")[:-1],
    ],
)
def test_message_outside_the_protocol_is_rejected(
    pipe_and_peer_socket: tuple[SocketPipe, socket.socket], payload: bytes
) -> None:
    pipe, peer = pipe_and_peer_socket
    peer.sendall(device_protocol.make_preface() + pack_message(payload))
    with pytest.raises(ProtocolError, match="the peer"):
        receive_request(pipe)


@pytest.mark.parametrize(
    ("side", "cap"),
    [
        (receive_request, device_protocol.HANDSHAKE_REQUEST_BYTES_MAX),
        (open_session, device_protocol.HANDSHAKE_REPLY_BYTES_MAX),
    ],
)
def test_oversized_length_allocates_no_memory(
    pipe_and_peer_socket: tuple[SocketPipe, socket.socket], side: Callable[[SocketPipe], object], cap: int
) -> None:
    pipe, peer = pipe_and_peer_socket
    for announced in (cap + 1, 2**32 - 1):
        peer.sendall(device_protocol.make_preface() + struct.pack(">I", announced))
        tracemalloc.start()
        try:
            with pytest.raises(FrameTooLargeError, match=str(cap)):
                side(pipe)
            assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
        finally:
            tracemalloc.stop()


@given(st.binary(max_size=200), st.booleans())
def test_garbage_raises_a_transport_error(garbage: bytes, polite: bool) -> None:
    for side in (receive_request, open_session):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall((device_protocol.make_preface() if polite else b"") + garbage)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(TransportError):
                side(SocketPipe(ours))


@given(st.data())
def test_damaged_message_is_rejected_or_decoded(data: st.DataObject) -> None:
    damaged = bytearray(device_protocol.encode(Open("secret", "key", 3, "machine")))
    damaged[data.draw(st.integers(4, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(device_protocol.make_preface() + bytes(damaged))
        theirs.shutdown(socket.SHUT_WR)
        try:
            receive_request(SocketPipe(ours))
        except TransportError:
            pass


@pytest.mark.parametrize("data", [b"GET / HT", b"GENIE\x00\x00\x01", bytes(8)])
def test_foreign_peer_is_recognized(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not speak"):
        device_protocol.choose_version(data, peer="x")


@pytest.mark.parametrize("version", [1, 9])
def test_peer_of_another_version_is_recognized(version: int) -> None:
    theirs = ProtocolVersions(lowest=version, highest=version)
    with pytest.raises(VersionError, match=f"version {version} of the executor protocol, this side .* 4"):
        device_protocol.choose_version(device_protocol.make_preface(theirs), peer="x")


def test_preface_negotiates_the_highest_common_version() -> None:
    assert device_protocol.make_preface() == b"GENIEX\x00\x04"  # as releases without negotiation send it
    newer = device_protocol.make_preface(ProtocolVersions(lowest=4, highest=6))
    assert device_protocol.choose_version(newer, peer="x") == 4
    assert device_protocol.choose_version(newer, own=ProtocolVersions(lowest=3, highest=5), peer="x") == 5


def test_reply_of_a_newer_executor_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fields = msgspec.to_builtins(FACTS)
        payload = msgspec.msgpack.encode([*fields, "what a later release adds"])
        theirs.sendall(device_protocol.make_preface() + pack_message(payload))
        assert open_session(SocketPipe(ours)) == FACTS


# --- timeouts and losses --------------------------------------------------------------------------


def test_stream_cut_anywhere_is_a_lost_connection() -> None:
    sent = device_protocol.make_preface() + device_protocol.encode(FACTS)
    for cut in range(len(sent)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(sent[:cut])
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionLostError):
                open_session(SocketPipe(ours))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        device_protocol.make_preface(),
        device_protocol.make_preface() + device_protocol.encode(FACTS)[:-1],
    ],
)
def test_peer_that_stops_sending_causes_a_timeout(
    pipe_and_peer_socket: tuple[SocketPipe, socket.socket], sent: bytes
) -> None:
    pipe, peer = pipe_and_peer_socket
    peer.sendall(sent)
    with pytest.raises(DeadlineError):
        open_session(pipe, SHORT_S)


def test_one_deadline_applies_to_the_whole_handshake(
    pipe_and_peer_socket: tuple[SocketPipe, socket.socket],
) -> None:
    """A peer that sends single bytes cannot extend the deadline."""
    pipe, peer = pipe_and_peer_socket
    sent = device_protocol.make_preface() + device_protocol.encode(Open("secret"))
    timeouts: list[float] = []

    class Dripping:
        def read_exactly(self, count: int, timeout_s: float) -> bytes:
            timeouts.append(timeout_s)
            peer.sendall(sent[:count])
            return pipe.read_exactly(count, timeout_s)

        def write_all(self, data: bytes, timeout_s: float) -> None:
            timeouts.append(timeout_s)

    with pytest.raises(TransportError):
        device_protocol.receive_request(Dripping(), peer="x", timeout_s=LONG_S)
    assert timeouts == sorted(timeouts, reverse=True)
    assert len(set(timeouts)) == len(timeouts)


# --- machines -----------------------------------------------------------------------------------


def test_processes_of_one_machine_have_the_same_machine_id() -> None:
    script = "from genie.runtime import device_protocol; print(device_protocol.machine_identity())"
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == device_protocol.machine_identity()
    if sys.platform == "linux":
        assert device_protocol.machine_identity() != ""


def test_another_network_namespace_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = device_protocol.machine_identity()
    device_protocol.machine_identity.cache_clear()
    elsewhere = SimpleNamespace(st_ino=1)
    monkeypatch.setattr(Path, "stat", lambda self, **_: elsewhere)
    assert device_protocol.machine_identity() != here
    monkeypatch.undo()
    device_protocol.machine_identity.cache_clear()
    assert device_protocol.machine_identity() == here
