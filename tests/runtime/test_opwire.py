"""The executor's wire: what goes in comes out, and nothing that a peer sends does harm."""

from __future__ import annotations

import math
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    FrameTooLargeError,
    OpRefusedError,
    ProtocolError,
    TransportError,
    VersionError,
)
from genie.runtime import opwire
from genie.runtime.opwire import Channel

SHORT_S = 0.05
LONG_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare socket of its peer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours, peer="the peer", trusted=True), theirs


def message_in(frame: bytes) -> bytes:
    return frame[opwire.HEADER_BYTES :]


# --- values survive -----------------------------------------------------------------------------

sizes = st.integers(0, 2**62)
shapes = st.lists(sizes, max_size=6).map(tuple)
numbers = st.integers(1, 2**62)
dtypes = st.sampled_from(opwire.DTYPE_NAMES)
floats = st.floats(allow_nan=True, allow_infinity=True)
items = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    floats,
    st.text(max_size=20),
    st.builds(opwire.Handle, numbers),
    st.builds(opwire.Inline, dtypes, shapes, st.binary(max_size=64)),
    st.builds(opwire.DType, dtypes),
    st.just(opwire.Layout("strided")),
    st.builds(opwire.MemoryFormat, st.sampled_from(["contiguous_format", "channels_last"])),
    st.just(opwire.OwnDevice()),
    st.builds(opwire.Complex, floats, floats),
)
values = st.one_of(items, st.lists(items, max_size=8))
metas = st.builds(opwire.TensorMeta, numbers, dtypes, shapes, shapes, sizes)
result_items = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), floats,
    st.builds(opwire.Complex, floats, floats), metas,
)  # fmt: skip
result_values = st.one_of(result_items, st.lists(result_items, max_size=5))


def same(one: Any, other: Any) -> bool:
    """Equal in value and type; NaN equals NaN, and 0.0 does not equal -0.0."""
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return isinstance(other, float) and struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, opwire.Complex):
        return isinstance(other, opwire.Complex) and same([one.real, one.imag], [other.real, other.imag])
    return type(one) is type(other) and one == other


@given(args=st.lists(values, max_size=6), kwargs=st.dictionaries(st.text(max_size=10), values, max_size=4))
@example(args=[math.nan, math.inf, -math.inf, -0.0, -(2**63), 2**63 - 1, 2**64 - 1, True, 1, 1.0], kwargs={})
@example(args=[[opwire.Complex(math.nan, -0.0)], [None, 0, False]], kwargs={"alpha": 5e-324})
def test_the_arguments_of_an_op_survive_with_their_types(args: list[Any], kwargs: dict[str, Any]) -> None:
    request = opwire.RunOp("aten::add.Tensor", args, kwargs)
    received = opwire.decode_request(message_in(opwire.encode(7, request)), peer="x")
    assert isinstance(received, opwire.RunOp)
    assert received.op == "aten::add.Tensor"
    assert same(received.args, args)
    assert list(received.kwargs) == list(kwargs)
    assert same(list(received.kwargs.values()), list(kwargs.values()))


@given(st.lists(result_values, max_size=4), st.lists(metas, max_size=3))
def test_the_results_of_an_op_survive_with_their_types(
    outs: list[Any], changed: list[opwire.TensorMeta]
) -> None:
    received = opwire.decode_reply(message_in(opwire.encode(1, opwire.Result(outs, changed))), peer="x")
    assert isinstance(received, opwire.Result)
    assert same(received.values, outs)
    assert received.changed == changed


@pytest.mark.parametrize(
    "request_",
    [
        opwire.Open("secret"),
        opwire.Upload(3, "bfloat16", (2, 0)),
        opwire.Download(2**62),
        opwire.Free([1, 2, 3]),
        opwire.Stats(),
        opwire.Seed(2**64 - 1),
        opwire.GetRngState(),
        opwire.SetRngState(b"\x00\xff"),
        opwire.Synchronize(),
    ],
    ids=lambda request: type(request).__name__,
)
def test_every_request_survives(request_: opwire.Request) -> None:
    assert opwire.decode_request(message_in(opwire.encode(0, request_)), peer="x") == request_


@pytest.mark.parametrize(
    "reply",
    [
        opwire.Opened("cpu", "a name", 2**40, "job-1", "2.13.0"),
        opwire.Ready(),
        opwire.Content("complex64", ()),
        opwire.Counters(1, 2, 3, 4, 5),
        opwire.RngState(b"abc"),
        opwire.Done(),
        opwire.Error("device.remote_op", "it failed", "aten::mm", 17),
    ],
    ids=lambda reply: type(reply).__name__,
)
def test_every_reply_survives(reply: opwire.Reply) -> None:
    assert opwire.decode_reply(message_in(opwire.encode(0, reply)), peer="x") == reply


# --- what cannot be said ------------------------------------------------------------------------


def raw_run(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"op": "aten::add.Tensor", "args": [], "kwargs": {}} | changes
    return msgspec.msgpack.encode(["run", fields["op"], fields["args"], fields["kwargs"]])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"run": 1}),
        msgspec.msgpack.encode(["reboot"]),
        msgspec.msgpack.encode(["sync", "and more"]),
        raw_run(op="os::system"),
        raw_run(op="aten::add.Tensor; rm"),
        raw_run(op="aten::__class__.__mro__\n"),
        raw_run(args=[[[1]]]),
        raw_run(args=[{"t": "d", "name": "object"}]),
        raw_run(args=[{"t": "h", "number": 0}]),
        raw_run(args=[{"t": "h", "number": "1"}]),
        raw_run(args=[{"t": "h", "number": 1, "extra": 2}]),
        raw_run(args=[{"t": "pickle", "data": b""}]),
        raw_run(args=[{"t": "l", "name": "sparse_coo"}]),
        raw_run(args=[b"bare bytes"]),
        raw_run(args=[[0] * 65537]),
        raw_run(args=[{"t": "i", "dtype": "uint8", "shape": [-1], "data": b""}]),
        raw_run(args=[{"t": "i", "dtype": "uint8", "shape": [1] * 65, "data": b"x"}]),
        raw_run(args=[{"t": "i", "dtype": "uint8", "shape": [65537], "data": bytes(65537)}]),
        msgspec.msgpack.encode(["upload", 1, "float32", [2**63]]),
        msgspec.msgpack.encode(["free", [1] * (opwire.HANDLES_PER_FREE_MAX + 1)]),
        msgspec.msgpack.encode(["seed", -1]),
        b"\x91" * 100_000,
        msgspec.msgpack.encode("text")[:-1],
    ],
)
def test_a_message_outside_the_protocol_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="the peer"):
        opwire.decode_request(payload, peer="the peer")


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_is_a_message(payload: bytes) -> None:
    for decode in (opwire.decode_request, opwire.decode_reply):
        try:
            decode(payload, peer="x")
        except ProtocolError:
            pass


@given(st.data())
def test_a_damaged_message_is_refused_or_is_a_message(data: st.DataObject) -> None:
    request = opwire.RunOp("aten::cat", [[opwire.Handle(1), None]], {"dim": opwire.DType("int8")})
    damaged = bytearray(message_in(opwire.encode(0, request)))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        opwire.decode_request(bytes(damaged), peer="x")
    except ProtocolError:
        pass


def test_a_number_that_the_wire_cannot_hold_is_refused_before_sending() -> None:
    with pytest.raises(OpRefusedError, match="too large"):
        opwire.encode(0, opwire.RunOp("aten::add.Scalar", [2**64], {}))


def test_a_call_over_the_cap_is_refused_before_sending() -> None:
    with pytest.raises(FrameTooLargeError):
        opwire.encode(0, opwire.RunOp("aten::add.Scalar", ["x" * (opwire.CONTROL_BYTES_MAX + 1)], {}))


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [("float32", (2, 3), 24), ("complex128", (), 16), ("bool", (5,), 5), ("int64", (0, 7), 0),
     ("bfloat16", (2**40, 2**40), 2**81)],
)  # fmt: skip
def test_sizes_are_exact_however_large(
    dtype: opwire.DTypeName, shape: tuple[int, ...], expected: int
) -> None:
    assert opwire.size_bytes(dtype, shape) == expected


# --- headers and prefaces -----------------------------------------------------------------------


def header(length: int, kind: int, sequence: int = 1) -> bytes:
    return struct.pack(">IBI", length, kind, sequence)


@pytest.mark.parametrize(
    ("kind", "trusted", "cap"),
    [
        (opwire.Kind.CONTROL, False, opwire.CONTROL_BYTES_MAX_STRANGER),
        (opwire.Kind.CONTROL, True, opwire.CONTROL_BYTES_MAX),
        (opwire.Kind.DATA, True, opwire.DATA_BYTES_MAX),
    ],
)
def test_each_kind_of_frame_has_its_cap(kind: opwire.Kind, trusted: bool, cap: int) -> None:
    assert opwire.decode_header(header(cap, kind), trusted=trusted, peer="x").length_bytes == cap
    with pytest.raises(FrameTooLargeError, match=str(cap)):
        opwire.decode_header(header(cap + 1, kind), trusted=trusted, peer="x")


@pytest.mark.parametrize(("kind", "trusted"), [(0, True), (3, True), (255, False), (2, False)])
def test_an_unknown_kind_of_frame_is_refused_and_so_is_data_from_strangers(kind: int, trusted: bool) -> None:
    with pytest.raises(ProtocolError, match="kind"):
        opwire.decode_header(header(1, kind), trusted=trusted, peer="x")


@pytest.mark.parametrize("data", [b"GET / HT", b"GENIE\x00\x00\x01", bytes(8)])
def test_a_peer_that_is_not_ours_is_recognised(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not speak"):
        opwire.check_preface(data, peer="x")


def test_a_peer_of_another_version_is_recognised() -> None:
    with pytest.raises(VersionError, match="version 9"):
        opwire.check_preface(opwire.preface(9), peer="x")
    opwire.check_preface(opwire.preface(), peer="x")


# --- over a socket ------------------------------------------------------------------------------


def test_an_announced_giant_costs_no_memory(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(header(2**32 - 1, opwire.Kind.DATA))
    tracemalloc.start()
    try:
        with pytest.raises(FrameTooLargeError):
            channel.receive_request(timeout_s=LONG_S, wait_s=LONG_S)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


def test_a_stream_cut_anywhere_is_a_lost_connection_or_a_clean_end() -> None:
    frame = opwire.encode(1, opwire.RunOp("aten::relu", [opwire.Handle(1)], {}))
    for cut in range(len(frame) + 1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel = Channel(ours, peer="x", trusted=True)
            theirs.sendall(frame[:cut])
            theirs.close()
            if cut == 0:
                assert channel.receive_request(timeout_s=LONG_S, wait_s=LONG_S) is None
            elif cut < len(frame):
                with pytest.raises(ConnectionLostError):
                    channel.receive_request(timeout_s=LONG_S, wait_s=LONG_S)
            else:
                assert channel.receive_request(timeout_s=LONG_S, wait_s=LONG_S) is not None


@given(st.binary(max_size=200), st.booleans())
def test_a_stream_of_garbage_ends_in_an_error_of_the_transport(garbage: bytes, trusted: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(garbage)
        theirs.close()
        channel = Channel(ours, peer="x", trusted=trusted)
        try:
            while channel.receive_request(timeout_s=LONG_S, wait_s=LONG_S) is not None:
                pass
        except TransportError:
            pass


def test_a_peer_that_stops_in_the_middle_runs_into_the_deadline(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(header(100, opwire.Kind.CONTROL) + b"only this")
    with pytest.raises(DeadlineError):
        channel.receive_request(timeout_s=SHORT_S, wait_s=LONG_S)


def test_a_peer_that_does_not_read_runs_into_the_deadline(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    with pytest.raises(DeadlineError):
        channel.send_data(1, memoryview(bytes(16 * 1024 * 1024)), timeout_s=SHORT_S)


def test_prefaces_are_exchanged(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(opwire.preface())
    channel.exchange_prefaces(timeout_s=LONG_S)
    assert peer.recv(100) == opwire.preface()


@settings(max_examples=25)
@given(st.integers(1, 50_000), st.integers(100, 20_000))
def test_data_arrives_whole_whatever_the_chunks(size: int, chunk: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            for start in range(0, size, chunk):
                part = data[start : start + chunk]
                theirs.sendall(opwire.data_header(5, len(part)) + part)

        sender = threading.Thread(target=send)
        sender.start()
        into = bytearray(size)
        Channel(ours, peer="x", trusted=True).receive_data(5, memoryview(into), timeout_s=LONG_S)
        sender.join()
        assert into == data


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        (opwire.data_header(5, 11) + bytes(11), FrameTooLargeError),
        (opwire.data_header(6, 10) + bytes(10), ProtocolError),
        (header(0, opwire.Kind.DATA, 5), ProtocolError),
        (opwire.encode(5, opwire.Done()), ProtocolError),
    ],
    ids=["more than announced", "of another request", "empty", "a message"],
)
def test_wrong_data_is_refused(
    ends: tuple[Channel, socket.socket], frames: bytes, error: type[TransportError]
) -> None:
    channel, peer = ends
    peer.sendall(frames)
    with pytest.raises(error):
        channel.receive_data(5, memoryview(bytearray(10)), timeout_s=LONG_S)


def test_data_where_a_message_is_due_is_refused(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    peer.sendall(opwire.data_header(1, 3) + b"abc")
    with pytest.raises(ProtocolError, match="data"):
        channel.receive_reply(1, timeout_s=LONG_S)


def test_an_answer_to_another_request_is_refused_unless_it_is_an_error(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, peer = ends
    peer.sendall(opwire.encode(4, opwire.Error("transport.protocol", "enough", "", 4)))
    assert isinstance(channel.receive_reply(5, timeout_s=LONG_S), opwire.Error)
    peer.sendall(opwire.encode(4, opwire.Done()))
    with pytest.raises(ProtocolError, match="4 instead of 5"):
        channel.receive_reply(5, timeout_s=LONG_S)


def test_closing_wakes_a_reader(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    outcome: list[object] = []

    def read() -> None:
        try:
            outcome.append(channel.receive_request(timeout_s=LONG_S, wait_s=None))
        except TransportError as error:
            outcome.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    channel.close()
    reader.join(LONG_S)
    assert len(outcome) == 1
