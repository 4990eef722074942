"""Protocol violations: the client gets an error, its session ends, and the executor is not affected."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.executor.client import (
    BYTES,
    CONJUGATE,
    DEVICE,
    DTYPES,
    FRAME_BYTES_MAX,
    AliasOutput,
    Client,
    ErrorReply,
    NewOutput,
    RawBytes,
    RecordKind,
    ServedSession,
    Tensor,
    encode_argument,
    encode_output,
    encode_text,
    encode_view,
    frame,
    i64,
    record,
    served_session,
    template_body,
    u32,
    u64,
)

# State after the fixture: a storage of two floats, a template for its relu, and one as a dynamic op.
X = Tensor(1, (2,))
OP, DYNAMIC = 1, 2
HUGE = 2**62


@dataclass
class HostileSession:
    session: ServedSession
    client: Client


@pytest.fixture
def hostile_session() -> Iterator[HostileSession]:
    with served_session(memory_bytes_max=1 << 20) as (session, client):
        assert client.floats(-1, 1) == X
        predicted, first = client.template("aten::relu", [X], [NewOutput((2,))])
        asked, second = client.template("aten::relu", [X], None)
        assert (predicted, asked) == (OP, DYNAMIC)
        client.send(first, second)
        assert client.sync() is None
        yield HostileSession(session, client)


def assert_protocol_error(hostile: HostileSession, message: str = "") -> None:
    fatal_error = hostile.client.receive()
    assert isinstance(fatal_error, ErrorReply)
    assert fatal_error.code == "transport.protocol"
    assert message in fatal_error.message
    hostile.client.close()
    assert hostile.session.wait_end() == "fatal"
    assert hostile.session.native.stats()["bytes_allocated"] <= 16


def define_template(number: int, body: bytes) -> bytes:
    return record(RecordKind.DEFINE_TEMPLATE, number, u32(len(body)) + body)


def template_with_argument(kind: bytes) -> bytes:
    return define_template(9, template_body("aten::relu", [RawBytes(kind)], [NewOutput((2,))]))


def template_with_output(kind: bytes) -> bytes:
    return define_template(9, template_body("aten::relu", [X], [RawBytes(kind)]))


def encode_tensor_argument(
    dtype: int, shape: tuple[int, ...], strides: tuple[int, ...], flags: int = 0
) -> bytes:
    return struct.pack("<BBBB", 1, dtype, len(shape), flags) + i64(*shape, *strides)


FLOAT = DTYPES["float32"][0]
RECORDS = {
    "unknown record": record(100),
    "another unknown record": record(255),
    "truncated record": record(RecordKind.ALLOCATE, 0, u32(5)),
    "truncated record head": b"\x00\x00",
    "unknown template": record(RecordKind.OP, 7, u32(1, 5)),
    "template out of range": record(RecordKind.OP, 2**24 - 1, u32(1, 5)),
    "truncated op": record(RecordKind.OP, OP, u32(1)),
    "op with unknown storage": record(RecordKind.OP, OP, u32(77, 5)),
    "op with storage out of range": record(RecordKind.OP, OP, u32(2**32 - 1, 5)),
    "output number in use": record(RecordKind.OP, OP, u32(1, 1)),
    "output number out of range": record(RecordKind.OP, OP, u32(1, 2**22)),
    "op with template of a dynamic op": record(RecordKind.OP, DYNAMIC, u32(1)),
    "dynamic op with predicted template": record(RecordKind.DYNAMIC_OP, OP, u32(1)),
    "dynamic op with unknown storage": record(RecordKind.DYNAMIC_OP, DYNAMIC, u32(77)),
    "binding outputs of no reply": record(RecordKind.BIND_OUTPUTS, 1, u64(1) + u32(5)),
    "binding too many outputs": record(RecordKind.BIND_OUTPUTS, 2**24 - 1, u64(1)),
    "dropping an unknown template": record(RecordKind.DROP_TEMPLATE, 7),
    "allocating twice": record(RecordKind.ALLOCATE, 0, u32(1) + u64(8)),
    "allocating a number out of range": record(RecordKind.ALLOCATE, 0, u32(2**22) + u64(8)),
    "allocating a size that overflows": record(RecordKind.ALLOCATE, 0, u32(5) + u64(2**64 - 1)),
    "freeing an unknown storage": record(RecordKind.FREE, 0, u32(4)),
    "freeing twice": record(RecordKind.FREE, 0, u32(1)) * 2,
    "resizing an unknown storage": record(RecordKind.RESIZE, 0, u32(4) + u64(1)),
    "resizing to a size that overflows": record(RecordKind.RESIZE, 0, u32(1) + u64(2**63)),
    "writing an unknown storage": record(RecordKind.PUT, 1, encode_view(Tensor(4, (1,))) + u64(4) + bytes(4)),
    "writing beyond the end": record(RecordKind.PUT, 1, encode_view(Tensor(1, (3,))) + u64(12) + bytes(12)),
    "writing with wrong size": record(RecordKind.PUT, 1, encode_view(X) + u64(9) + bytes(9)),
    "writing less than announced": record(RecordKind.PUT, 1, encode_view(X) + u64(8) + bytes(7)),
    "inline upload too large": record(
        RecordKind.PUT, 1, encode_view(Tensor(1, (70_000,), "uint8", (0,))) + u64(70_000) + bytes(70_000)
    ),
    "a record after an upload": record(RecordKind.PUT, 0, encode_view(X) + u64(8)) + record(RecordKind.SYNC),
    "reading an unknown storage": record(RecordKind.GET, 0, encode_view(Tensor(4))),
    "reading beyond the end": record(RecordKind.GET, 0, encode_view(Tensor(1, (2,), offset=1))),
    "reading at a negative offset": record(RecordKind.GET, 0, encode_view(Tensor(1, (1,), offset=-1))),
    "reading at a huge offset": record(RecordKind.GET, 0, encode_view(Tensor(1, (1,), offset=HUGE))),
    "empty read at a huge offset": record(RecordKind.GET, 0, encode_view(Tensor(1, (0,), offset=HUGE))),
    "reading with huge strides": record(RecordKind.GET, 0, encode_view(Tensor(1, (2,), strides=(HUGE,)))),
    "reading a size that overflows": record(
        RecordKind.GET, 0, encode_view(Tensor(1, (2**32, 2**32), strides=(0, 0)))
    ),
    "reading a negative size": record(RecordKind.GET, 0, encode_view(Tensor(1, (-1,)))),
    "reading with a negative stride": record(
        RecordKind.GET, 0, encode_view(Tensor(1, (2,), strides=(-1,), offset=1))
    ),
    "reading with too many dimensions": record(RecordKind.GET, 0, encode_view(Tensor(1, (1,) * 65))),
    "reading the conjugate of a float": record(
        RecordKind.GET, 0, encode_view(Tensor(1, (2,), flags=CONJUGATE))
    ),
    "generator out of range": record(RecordKind.SEED, 0, u32(4096) + u64(1)),
    "state of a generator out of range": record(RecordKind.GENERATOR_STATE, 0, u32(2**32 - 1)),
    "truncated generator state": record(RecordKind.SET_GENERATOR, 0, u32(0, 100) + b"x"),
    "freeing the default generator": record(RecordKind.FREE_GENERATOR, 0, u32(0)),
    "record after close": record(RecordKind.CLOSE_SESSION) + record(RecordKind.SYNC),
    # templates
    "template number in use": define_template(OP, template_body("aten::relu", [X], [NewOutput((2,))])),
    "template number out of range": define_template(
        2**16, template_body("aten::relu", [X], [NewOutput((2,))])
    ),
    "empty template": define_template(9, b""),
    "template with trailing bytes": define_template(9, template_body("aten::relu", [X], None) + b"\0"),
    "truncated template": define_template(9, template_body("aten::relu", [X], [NewOutput((2,))])[:-1]),
    "template larger than its record": record(RecordKind.DEFINE_TEMPLATE, 9, u32(1000)),
    "text too long for a name": define_template(9, u32(5000) + b"x" * 5000),
    "name too long": define_template(9, template_body("aten::" + "x" * 123, [X], None)),
    "name larger than its record": define_template(9, u32(2**32 - 1)),
    "too many arguments": define_template(
        9, encode_text("aten::relu") + encode_text("") + u32(257) + b"\0" * 300 + b"\0"
    ),
    "more arguments than bytes": define_template(
        9, encode_text("aten::relu") + encode_text("") + u32(200) + b"\0"
    ),
    "invalid predicted flag": define_template(9, template_body("aten::relu", [X], None)[:-1] + b"\2"),
    "unknown argument kind": template_with_argument(b"\x0e"),
    "unknown dtype": template_with_argument(encode_tensor_argument(99, (2,), (1,))),
    "unsupported dtype": template_with_argument(encode_tensor_argument(12, (2,), (1,))),
    "scalar with unknown dtype": template_with_argument(b"\x02\xff\x00"),
    "negative size": template_with_argument(encode_tensor_argument(FLOAT, (-2,), (1,))),
    "negative stride": template_with_argument(encode_tensor_argument(FLOAT, (2,), (-1,))),
    "too many dimensions": template_with_argument(encode_tensor_argument(FLOAT, (1,) * 65, (1,) * 65)),
    "size that overflows": template_with_argument(encode_tensor_argument(FLOAT, (2**32, 2**32), (0, 0))),
    "span that overflows": template_with_argument(encode_tensor_argument(FLOAT, (2, 2), (HUGE, HUGE))),
    "list of lists": template_with_argument(encode_argument([[1]])[0]),
    "list too long": template_with_argument(b"\x09" + u32(65537) + b"\0" * 65537),
    "list larger than its record": template_with_argument(b"\x09" + u32(60000)),
    "text too long": template_with_argument(b"\x08" + u32(4097) + b"x" * 4097),
    "unknown output kind": template_with_output(b"\x63"),
    "output kind that cannot be predicted": template_with_output(b"\x05" + bytes(8)),
    "output with unknown dtype": template_with_output(b"\x01\xff\x00"),
    "output size that overflows": template_with_output(encode_output(NewOutput((2**40, 2**40)))),
    "alias of an unknown input": template_with_output(encode_output(AliasOutput(1))),
    "list of lists as output": template_with_output(encode_output([[NewOutput((2,))]])),
    "total output size that overflows": define_template(
        9,
        template_body(
            "aten::max.dim", [X, 0, False], [NewOutput((2**59,)), NewOutput((2**59,)), NewOutput((2**59,))]
        ),
    ),
}


@pytest.mark.parametrize("records", RECORDS.values(), ids=RECORDS.keys())
def test_invalid_record_ends_the_session(hostile_session: HostileSession, records: bytes) -> None:
    hostile_session.client.send(records)
    assert_protocol_error(hostile_session)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (frame(5, b"", kind=0), "unknown kind"),
        (frame(5, b"", kind=3), "unknown kind"),
        (frame(5, b"data", kind=BYTES), "announced size"),
        (frame(9, b""), "frame 9 received, expected 5"),
        (frame(5, b"", replies_received=99), "never sent"),
        (struct.pack("<IIQQ", FRAME_BYTES_MAX + 1, 1, 5, 0), "the maximum is"),
        (struct.pack("<IIQQ", 2**32 - 1, 2, 5, 0), "the maximum is"),
        (b"\xff" * 100, "the maximum is"),
    ],
    ids=["kind 0", "kind 3", "unannounced bytes", "gap", "replies", "oversized", "oversized bytes", "noise"],
)
def test_invalid_frame_ends_the_session(hostile_session: HostileSession, frames: bytes, message: str) -> None:
    assert hostile_session.client.frames == 4
    hostile_session.client.write(frames)
    assert_protocol_error(hostile_session, message)


@pytest.mark.parametrize("sent", [b"", bytes(9)], ids=["nothing", "too much"])
def test_upload_with_wrong_size_ends_the_session(hostile_session: HostileSession, sent: bytes) -> None:
    hostile_session.client.send(record(RecordKind.PUT, 0, encode_view(X) + u64(8)))
    hostile_session.client.send(sent, kind=BYTES)
    assert_protocol_error(hostile_session, "announced size")


def test_records_during_an_upload_end_the_session(hostile_session: HostileSession) -> None:
    hostile_session.client.send(record(RecordKind.PUT, 0, encode_view(X) + u64(8)))
    hostile_session.client.send(bytes(4), kind=BYTES)
    hostile_session.client.send(record(RecordKind.SYNC))
    assert_protocol_error(hostile_session, "in the middle of an upload")


def test_same_storage_number_for_two_outputs_ends_the_session(hostile_session: HostileSession) -> None:
    number, made = hostile_session.client.template(
        "aten::max.dim", [X, 0, False], [NewOutput(()), NewOutput((), "int64")]
    )
    hostile_session.client.send(made, record(RecordKind.OP, number, u32(1, 5, 5)))
    assert_protocol_error(hostile_session, "already in use")


def test_too_many_unreceived_replies_end_the_session(hostile_session: HostileSession) -> None:
    hostile_session.client.send(record(RecordKind.SYNC) * 1100)
    fatal_error = None
    for _ in range(1100):
        fatal_error = hostile_session.client.receive()
        if isinstance(fatal_error, ErrorReply):
            break
    assert isinstance(fatal_error, ErrorReply)
    assert "has not received" in fatal_error.message


def test_too_many_unbound_outputs_end_the_session(hostile_session: HostileSession) -> None:
    for _ in range(256):
        assert not isinstance(
            hostile_session.client.request(record(RecordKind.DYNAMIC_OP, DYNAMIC, u32(1))), ErrorReply
        )
    hostile_session.client.send(record(RecordKind.DYNAMIC_OP, DYNAMIC, u32(1)))
    fatal_error = hostile_session.client.receive()
    assert isinstance(fatal_error, ErrorReply)
    assert "unbound outputs" in fatal_error.message


def test_total_size_of_templates_is_limited(hostile_session: HostileSession) -> None:
    body = template_body("aten::nothing", [[None] * 65536], None)
    for number in range(10, 45):
        try:
            hostile_session.client.send(define_template(number, body))
        except OSError:
            break  # disconnected
    fatal_error = hostile_session.client.receive()
    assert isinstance(fatal_error, ErrorReply)
    assert "exceed the maximum size" in fatal_error.message


def test_result_that_exceeds_its_memory_is_refused(hostile_session: HostileSession) -> None:
    client = hostile_session.client
    error = client.run_refused("aten::_reshape_alias", X, [20000], [1])
    assert "exceeds the memory" in error.message
    client.op("aten::_reshape_alias", X, [20000], [1], outputs=[NewOutput((20000,))])
    streamed = client.sync()
    assert streamed is not None
    assert "exceeds the memory" in streamed.message
    assert client.stats().bytes_allocated == 8


def test_indices_are_checked_despite_unsafe_argument(hostile_session: HostileSession) -> None:
    client = hostile_session.client
    far = client.upload((1,), i64(10_000_000), "int64")
    value = client.floats(1)
    error = client.run_refused("aten::_index_put_impl_", X, [far], value, True, True)
    assert "out of" in error.message


def test_pin_memory_argument_is_ignored(hostile_session: HostileSession) -> None:
    client = hostile_session.client
    client.op("aten::empty.memory_format", [2], 6, None, DEVICE, True, None, outputs=[NewOutput((2,))])
    assert client.sync() is None


def test_corrupt_byte_neither_crashes_nor_hangs_the_session() -> None:
    """For any single wrong byte."""
    chance = random.Random(5)
    for _ in range(600):
        with served_session(memory_bytes_max=1 << 20) as (session, client):
            client.floats(-1, 1)
            number, made = client.template("aten::add.Tensor", [X, X, 1], [NewOutput((2,))])
            good = (
                made
                + record(RecordKind.OP, number, u32(1, 1, 2))
                + record(RecordKind.GET, 0, encode_view(Tensor(2, (2,))))
            )
            damaged = bytearray(good)
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            client.send(bytes(damaged))
            client.send(record(RecordKind.CLOSE_SESSION))
            client.receive_until_end()
            assert session.wait_end() in ("fatal", "closed")
