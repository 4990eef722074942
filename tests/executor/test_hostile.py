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
    Alias,
    Client,
    Error,
    New,
    Raw,
    Record,
    ServedSession,
    Tensor,
    argument,
    frame,
    i64,
    output,
    record,
    served_session,
    template_body,
    text,
    u32,
    u64,
    view,
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
def hostile() -> Iterator[HostileSession]:
    with served_session(memory_bytes_max=1 << 20) as (session, client):
        assert client.floats(-1, 1) == X
        predicted, first = client.template("aten::relu", [X], [New((2,))])
        asked, second = client.template("aten::relu", [X], None)
        assert (predicted, asked) == (OP, DYNAMIC)
        client.send(first, second)
        assert client.sync() is None
        yield HostileSession(session, client)


def assert_protocol_error(hostile: HostileSession, message: str = "") -> None:
    fatal_error = hostile.client.receive()
    assert isinstance(fatal_error, Error)
    assert fatal_error.code == "transport.protocol"
    assert message in fatal_error.message
    hostile.client.close()
    assert hostile.session.wait_end() == "fatal"
    assert hostile.session.native.stats()["bytes_allocated"] <= 16


def template(number: int, body: bytes) -> bytes:
    return record(Record.DEFINE_TEMPLATE, number, u32(len(body)) + body)


def with_argument(kind: bytes) -> bytes:
    return template(9, template_body("aten::relu", [Raw(kind)], [New((2,))]))


def with_output(kind: bytes) -> bytes:
    return template(9, template_body("aten::relu", [X], [Raw(kind)]))


def tensor_argument(dtype: int, shape: tuple[int, ...], strides: tuple[int, ...], flags: int = 0) -> bytes:
    return struct.pack("<BBBB", 1, dtype, len(shape), flags) + i64(*shape, *strides)


FLOAT = DTYPES["float32"][0]
RECORDS = {
    "unknown record": record(100),
    "another unknown record": record(255),
    "truncated record": record(Record.ALLOCATE, 0, u32(5)),
    "truncated record head": b"\x00\x00",
    "unknown template": record(Record.OP, 7, u32(1, 5)),
    "template out of range": record(Record.OP, 2**24 - 1, u32(1, 5)),
    "truncated op": record(Record.OP, OP, u32(1)),
    "op with unknown storage": record(Record.OP, OP, u32(77, 5)),
    "op with storage out of range": record(Record.OP, OP, u32(2**32 - 1, 5)),
    "output number in use": record(Record.OP, OP, u32(1, 1)),
    "output number out of range": record(Record.OP, OP, u32(1, 2**22)),
    "op with template of a dynamic op": record(Record.OP, DYNAMIC, u32(1)),
    "dynamic op with predicted template": record(Record.DYNAMIC_OP, OP, u32(1)),
    "dynamic op with unknown storage": record(Record.DYNAMIC_OP, DYNAMIC, u32(77)),
    "binding outputs of no reply": record(Record.BIND_OUTPUTS, 1, u64(1) + u32(5)),
    "binding too many outputs": record(Record.BIND_OUTPUTS, 2**24 - 1, u64(1)),
    "dropping an unknown template": record(Record.DROP_TEMPLATE, 7),
    "allocating twice": record(Record.ALLOCATE, 0, u32(1) + u64(8)),
    "allocating a number out of range": record(Record.ALLOCATE, 0, u32(2**22) + u64(8)),
    "allocating a size that overflows": record(Record.ALLOCATE, 0, u32(5) + u64(2**64 - 1)),
    "freeing an unknown storage": record(Record.FREE, 0, u32(4)),
    "freeing twice": record(Record.FREE, 0, u32(1)) * 2,
    "resizing an unknown storage": record(Record.RESIZE, 0, u32(4) + u64(1)),
    "resizing to a size that overflows": record(Record.RESIZE, 0, u32(1) + u64(2**63)),
    "writing an unknown storage": record(Record.PUT, 1, view(Tensor(4, (1,))) + u64(4) + bytes(4)),
    "writing beyond the end": record(Record.PUT, 1, view(Tensor(1, (3,))) + u64(12) + bytes(12)),
    "writing with wrong size": record(Record.PUT, 1, view(X) + u64(9) + bytes(9)),
    "writing less than announced": record(Record.PUT, 1, view(X) + u64(8) + bytes(7)),
    "inline upload too large": record(
        Record.PUT, 1, view(Tensor(1, (70_000,), "uint8", (0,))) + u64(70_000) + bytes(70_000)
    ),
    "a record after an upload": record(Record.PUT, 0, view(X) + u64(8)) + record(Record.SYNC),
    "reading an unknown storage": record(Record.GET, 0, view(Tensor(4))),
    "reading beyond the end": record(Record.GET, 0, view(Tensor(1, (2,), offset=1))),
    "reading at a negative offset": record(Record.GET, 0, view(Tensor(1, (1,), offset=-1))),
    "reading at a huge offset": record(Record.GET, 0, view(Tensor(1, (1,), offset=HUGE))),
    "empty read at a huge offset": record(Record.GET, 0, view(Tensor(1, (0,), offset=HUGE))),
    "reading with huge strides": record(Record.GET, 0, view(Tensor(1, (2,), strides=(HUGE,)))),
    "reading a size that overflows": record(Record.GET, 0, view(Tensor(1, (2**32, 2**32), strides=(0, 0)))),
    "reading a negative size": record(Record.GET, 0, view(Tensor(1, (-1,)))),
    "reading with a negative stride": record(Record.GET, 0, view(Tensor(1, (2,), strides=(-1,), offset=1))),
    "reading with too many dimensions": record(Record.GET, 0, view(Tensor(1, (1,) * 65))),
    "reading the conjugate of a float": record(Record.GET, 0, view(Tensor(1, (2,), flags=CONJUGATE))),
    "generator out of range": record(Record.SEED, 0, u32(4096) + u64(1)),
    "state of a generator out of range": record(Record.GENERATOR_STATE, 0, u32(2**32 - 1)),
    "truncated generator state": record(Record.SET_GENERATOR, 0, u32(0, 100) + b"x"),
    "freeing the default generator": record(Record.FREE_GENERATOR, 0, u32(0)),
    "record after close": record(Record.CLOSE_SESSION) + record(Record.SYNC),
    # templates
    "template number in use": template(OP, template_body("aten::relu", [X], [New((2,))])),
    "template number out of range": template(2**16, template_body("aten::relu", [X], [New((2,))])),
    "empty template": template(9, b""),
    "template with trailing bytes": template(9, template_body("aten::relu", [X], None) + b"\0"),
    "truncated template": template(9, template_body("aten::relu", [X], [New((2,))])[:-1]),
    "template larger than its record": record(Record.DEFINE_TEMPLATE, 9, u32(1000)),
    "text too long for a name": template(9, u32(5000) + b"x" * 5000),
    "name too long": template(9, template_body("aten::" + "x" * 123, [X], None)),
    "name larger than its record": template(9, u32(2**32 - 1)),
    "too many arguments": template(9, text("aten::relu") + text("") + u32(257) + b"\0" * 300 + b"\0"),
    "more arguments than bytes": template(9, text("aten::relu") + text("") + u32(200) + b"\0"),
    "invalid predicted flag": template(9, template_body("aten::relu", [X], None)[:-1] + b"\2"),
    "unknown argument kind": with_argument(b"\x0e"),
    "unknown dtype": with_argument(tensor_argument(99, (2,), (1,))),
    "unsupported dtype": with_argument(tensor_argument(12, (2,), (1,))),
    "scalar with unknown dtype": with_argument(b"\x02\xff\x00"),
    "negative size": with_argument(tensor_argument(FLOAT, (-2,), (1,))),
    "negative stride": with_argument(tensor_argument(FLOAT, (2,), (-1,))),
    "too many dimensions": with_argument(tensor_argument(FLOAT, (1,) * 65, (1,) * 65)),
    "size that overflows": with_argument(tensor_argument(FLOAT, (2**32, 2**32), (0, 0))),
    "span that overflows": with_argument(tensor_argument(FLOAT, (2, 2), (HUGE, HUGE))),
    "list of lists": with_argument(argument([[1]])[0]),
    "list too long": with_argument(b"\x09" + u32(65537) + b"\0" * 65537),
    "list larger than its record": with_argument(b"\x09" + u32(60000)),
    "text too long": with_argument(b"\x08" + u32(4097) + b"x" * 4097),
    "unknown output kind": with_output(b"\x63"),
    "output kind that cannot be predicted": with_output(b"\x05" + bytes(8)),
    "output with unknown dtype": with_output(b"\x01\xff\x00"),
    "output size that overflows": with_output(output(New((2**40, 2**40)))),
    "alias of an unknown input": with_output(output(Alias(1))),
    "list of lists as output": with_output(output([[New((2,))]])),
    "total output size that overflows": template(
        9, template_body("aten::max.dim", [X, 0, False], [New((2**59,)), New((2**59,)), New((2**59,))])
    ),
}


@pytest.mark.parametrize("records", RECORDS.values(), ids=RECORDS.keys())
def test_invalid_record_ends_the_session(hostile: HostileSession, records: bytes) -> None:
    hostile.client.send(records)
    assert_protocol_error(hostile)


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
def test_invalid_frame_ends_the_session(hostile: HostileSession, frames: bytes, message: str) -> None:
    assert hostile.client.frames == 4
    hostile.client.write(frames)
    assert_protocol_error(hostile, message)


@pytest.mark.parametrize("sent", [b"", bytes(9)], ids=["nothing", "too much"])
def test_upload_with_wrong_size_ends_the_session(hostile: HostileSession, sent: bytes) -> None:
    hostile.client.send(record(Record.PUT, 0, view(X) + u64(8)))
    hostile.client.send(sent, kind=BYTES)
    assert_protocol_error(hostile, "announced size")


def test_records_during_an_upload_end_the_session(hostile: HostileSession) -> None:
    hostile.client.send(record(Record.PUT, 0, view(X) + u64(8)))
    hostile.client.send(bytes(4), kind=BYTES)
    hostile.client.send(record(Record.SYNC))
    assert_protocol_error(hostile, "in the middle of an upload")


def test_same_number_for_two_outputs_ends_the_session(hostile: HostileSession) -> None:
    number, made = hostile.client.template("aten::max.dim", [X, 0, False], [New(()), New((), "int64")])
    hostile.client.send(made, record(Record.OP, number, u32(1, 5, 5)))
    assert_protocol_error(hostile, "already in use")


def test_too_many_unreceived_replies_end_the_session(hostile: HostileSession) -> None:
    hostile.client.send(record(Record.SYNC) * 1100)
    fatal_error = None
    for _ in range(1100):
        fatal_error = hostile.client.receive()
        if isinstance(fatal_error, Error):
            break
    assert isinstance(fatal_error, Error)
    assert "has not received" in fatal_error.message


def test_too_many_unbound_outputs_end_the_session(hostile: HostileSession) -> None:
    for _ in range(256):
        assert not isinstance(hostile.client.request(record(Record.DYNAMIC_OP, DYNAMIC, u32(1))), Error)
    hostile.client.send(record(Record.DYNAMIC_OP, DYNAMIC, u32(1)))
    fatal_error = hostile.client.receive()
    assert isinstance(fatal_error, Error)
    assert "unbound outputs" in fatal_error.message


def test_total_size_of_templates_is_limited(hostile: HostileSession) -> None:
    body = template_body("aten::nothing", [[None] * 65536], None)
    for number in range(10, 45):
        try:
            hostile.client.send(template(number, body))
        except OSError:
            break  # disconnected
    fatal_error = hostile.client.receive()
    assert isinstance(fatal_error, Error)
    assert "exceed the maximum size" in fatal_error.message


def test_result_that_exceeds_its_memory_is_refused(hostile: HostileSession) -> None:
    client = hostile.client
    error = client.run_refused("aten::_reshape_alias", X, [20000], [1])
    assert "exceeds the memory" in error.message
    client.op("aten::_reshape_alias", X, [20000], [1], outputs=[New((20000,))])
    streamed = client.sync()
    assert streamed is not None
    assert "exceeds the memory" in streamed.message
    assert client.stats().bytes_allocated == 8


def test_indices_are_checked_despite_unsafe_argument(hostile: HostileSession) -> None:
    client = hostile.client
    far = client.upload((1,), i64(10_000_000), "int64")
    value = client.floats(1)
    error = client.run_refused("aten::_index_put_impl_", X, [far], value, True, True)
    assert "out of" in error.message


def test_pin_memory_argument_is_ignored(hostile: HostileSession) -> None:
    client = hostile.client
    client.op("aten::empty.memory_format", [2], 6, None, DEVICE, True, None, outputs=[New((2,))])
    assert client.sync() is None


def test_corrupt_byte_neither_crashes_nor_hangs_the_session() -> None:
    """For any single wrong byte."""
    chance = random.Random(5)
    for _ in range(600):
        with served_session(memory_bytes_max=1 << 20) as (session, client):
            client.floats(-1, 1)
            number, made = client.template("aten::add.Tensor", [X, X, 1], [New((2,))])
            good = (
                made + record(Record.OP, number, u32(1, 1, 2)) + record(Record.GET, 0, view(Tensor(2, (2,))))
            )
            damaged = bytearray(good)
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            client.send(bytes(damaged))
            client.send(record(Record.CLOSE_SESSION))
            client.receive_until_end()
            assert session.wait_end() in ("fatal", "closed")
