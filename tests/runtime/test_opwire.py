"""How a connection to an executor is set up; nothing that a peer sends does harm."""

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
from genie.runtime import opwire
from genie.runtime.opwire import Error, Fetch, Fetched, Open, Opened
from tests.agent.executor.client import SocketPipe

SHORT_S = 0.05
LONG_S = 10.0
FACTS = Opened("cpu", "a name", 2**40, "job-1", "2.13.0", session_key="k" * 32, frames_received=7, bare=True)


@pytest.fixture
def ends() -> Iterator[tuple[SocketPipe, socket.socket]]:
    """A pipe, and the bare socket of its peer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield SocketPipe(ours), theirs


def enter(pipe: SocketPipe, timeout_s: float = LONG_S) -> Opened:
    return opwire.enter(pipe, Open("secret"), peer="the peer", timeout_s=timeout_s)


def receive_open(pipe: SocketPipe, timeout_s: float = LONG_S) -> Open | Fetch:
    return opwire.receive_request(pipe, peer="the peer", timeout_s=timeout_s)


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
def test_both_sides_hear_what_the_other_says(request: Open, answer: Opened | Error) -> None:
    ours, theirs = socket.socketpair()
    heard: list[Open | Fetch] = []

    def executor() -> None:
        pipe = SocketPipe(theirs)
        heard.append(receive_open(pipe))
        opwire.answer(pipe, answer, peer="x", timeout_s=LONG_S)

    thread = threading.Thread(target=executor)
    with ours, theirs:
        thread.start()
        if isinstance(answer, Error):
            with pytest.raises(Exception, match="refused"):
                opwire.enter(SocketPipe(ours), request, peer="x", timeout_s=LONG_S)
        else:
            assert opwire.enter(SocketPipe(ours), request, peer="x", timeout_s=LONG_S) == answer
        thread.join(LONG_S)
    assert heard == [request]


@given(
    st.builds(Fetch, st.integers(1, 2**62), texts, texts),
    st.one_of(st.builds(Fetched, st.booleans()), st.builds(Error, st.just("access"), texts)),
)
def test_whoever_fetches_is_heard_and_answered(request: Fetch, answer: Fetched | Error) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(opwire.preface() + opwire.encode(answer))
        if isinstance(answer, Error):
            with pytest.raises(AccessError, match="refused"):
                opwire.fetch(SocketPipe(ours), request, peer="x", timeout_s=LONG_S)
        else:
            assert opwire.fetch(SocketPipe(ours), request, peer="x", timeout_s=LONG_S) == answer
        assert receive_open(SocketPipe(theirs)) == request


@pytest.mark.parametrize("answer", [Fetched(True), Opened("cpu", "x", 1, "j", "t")])
def test_an_answer_to_another_question_is_no_answer(
    ends: tuple[SocketPipe, socket.socket], answer: Fetched | Opened
) -> None:
    pipe, peer = ends
    peer.sendall(opwire.preface() + opwire.encode(answer))
    with pytest.raises(ProtocolError):
        if isinstance(answer, Fetched):
            enter(pipe)
        else:
            opwire.fetch(pipe, Fetch(1, "x"), peer="x", timeout_s=LONG_S)


def test_a_token_is_of_one_number_and_one_ticket_and_shows_neither() -> None:
    digest = opwire.ticket_digest("ticket")
    tokens = {opwire.fetch_token(digest, 1), opwire.fetch_token(digest, 11)}
    tokens.add(opwire.fetch_token(opwire.ticket_digest("another"), 1))
    assert len(tokens) == 3
    assert all(len(token) == 64 and digest not in token for token in tokens)


@pytest.mark.parametrize("error", [TokenRefusedError, DeviceUnavailableError])
def test_a_refusal_is_raised_as_what_it_is(
    ends: tuple[SocketPipe, socket.socket], error: type[Exception]
) -> None:
    pipe, peer = ends
    peer.sendall(opwire.preface() + opwire.encode(Error(error.code, "because")))  # type: ignore[attr-defined]
    with pytest.raises(error, match="the peer refused: because"):
        enter(pipe)


def test_the_ticket_is_not_shown_to_whoever_does_not_speak_the_wire(
    ends: tuple[SocketPipe, socket.socket],
) -> None:
    pipe, peer = ends
    peer.sendall(b"SSH-2.0-")
    with pytest.raises(ProtocolError, match="does not speak"):
        enter(pipe)
    assert peer.recv(4096) == opwire.preface()


# --- what cannot be said ------------------------------------------------------------------------


def framed(payload: bytes) -> bytes:
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
def test_a_message_outside_the_protocol_is_refused(
    ends: tuple[SocketPipe, socket.socket], payload: bytes
) -> None:
    pipe, peer = ends
    peer.sendall(opwire.preface() + framed(payload))
    with pytest.raises(ProtocolError, match="the peer"):
        receive_open(pipe)


@pytest.mark.parametrize(
    ("side", "cap"), [(receive_open, opwire.OPEN_BYTES_MAX), (enter, opwire.ANSWER_BYTES_MAX)]
)
def test_an_announced_giant_costs_no_memory(
    ends: tuple[SocketPipe, socket.socket], side: Callable[[SocketPipe], object], cap: int
) -> None:
    pipe, peer = ends
    for announced in (cap + 1, 2**32 - 1):
        peer.sendall(opwire.preface() + struct.pack(">I", announced))
        tracemalloc.start()
        try:
            with pytest.raises(FrameTooLargeError, match=str(cap)):
                side(pipe)
            assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
        finally:
            tracemalloc.stop()


@given(st.binary(max_size=200), st.booleans())
def test_a_stream_of_garbage_ends_in_an_error_of_the_transport(garbage: bytes, polite: bool) -> None:
    for side in (receive_open, enter):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall((opwire.preface() if polite else b"") + garbage)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(TransportError):
                side(SocketPipe(ours))


@given(st.data())
def test_a_damaged_message_is_refused_or_is_a_message(data: st.DataObject) -> None:
    damaged = bytearray(opwire.encode(Open("secret", "key", 3, "machine")))
    damaged[data.draw(st.integers(4, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(opwire.preface() + bytes(damaged))
        theirs.shutdown(socket.SHUT_WR)
        try:
            receive_open(SocketPipe(ours))
        except TransportError:
            pass


@pytest.mark.parametrize("data", [b"GET / HT", b"GENIE\x00\x00\x01", bytes(8)])
def test_a_peer_that_is_not_ours_is_recognised(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not speak"):
        opwire.check_preface(data, peer="x")


@pytest.mark.parametrize("version", [1, 9])
def test_a_peer_of_another_version_is_recognised(version: int) -> None:
    with pytest.raises(VersionError, match=f"version {version}"):
        opwire.check_preface(opwire.preface(version), peer="x")
    opwire.check_preface(opwire.preface(), peer="x")


# --- time and breaks ----------------------------------------------------------------------------


def test_a_stream_cut_anywhere_is_a_lost_connection() -> None:
    said = opwire.preface() + opwire.encode(FACTS)
    for cut in range(len(said)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(said[:cut])
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionLostError):
                enter(SocketPipe(ours))


@pytest.mark.parametrize("said", [b"", opwire.preface(), opwire.preface() + opwire.encode(FACTS)[:-1]])
def test_a_peer_that_stops_in_the_middle_runs_into_the_deadline(
    ends: tuple[SocketPipe, socket.socket], said: bytes
) -> None:
    pipe, peer = ends
    peer.sendall(said)
    with pytest.raises(DeadlineError):
        enter(pipe, SHORT_S)


def test_one_deadline_holds_for_everything(ends: tuple[SocketPipe, socket.socket]) -> None:
    """A stranger that says a byte now and then does not stay for ever."""
    pipe, peer = ends
    said = opwire.preface() + opwire.encode(Open("secret"))
    asked: list[float] = []

    class Dripping:
        def read_exactly(self, count: int, timeout_s: float) -> bytes:
            asked.append(timeout_s)
            peer.sendall(said[:count])
            return pipe.read_exactly(count, timeout_s)

        def write_all(self, data: bytes, timeout_s: float) -> None:
            asked.append(timeout_s)

    with pytest.raises(TransportError):
        opwire.receive_request(Dripping(), peer="x", timeout_s=LONG_S)
    assert asked == sorted(asked, reverse=True)
    assert len(set(asked)) == len(asked)


# --- machines -----------------------------------------------------------------------------------


def test_two_processes_of_one_machine_know_it() -> None:
    script = "from genie.runtime import opwire; print(opwire.this_machine())"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == opwire.this_machine()
    if sys.platform == "linux":
        assert opwire.this_machine() != ""


def test_a_process_with_another_loopback_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = opwire.this_machine()
    opwire.this_machine.cache_clear()
    elsewhere = SimpleNamespace(st_ino=1)
    monkeypatch.setattr(Path, "stat", lambda self, **_: elsewhere)
    assert opwire.this_machine() != here
    monkeypatch.undo()
    opwire.this_machine.cache_clear()
    assert opwire.this_machine() == here
