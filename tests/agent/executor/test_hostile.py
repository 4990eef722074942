"""A client that says what wire.h does not allow: it is told so, its session ends, and no harm is done."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.agent.executor.client import (
    BYTES,
    CONJUGATE,
    DTYPES,
    FRAME_BYTES_MAX,
    HERE,
    Client,
    Error,
    New,
    Raw,
    Record,
    Same,
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

# As the fixture leaves it: a storage of two floats, a template for relu of it (predicted) and one to ask.
X = Tensor(1, (2,))
OP, ASK = 1, 2
FAR = 2**62


@dataclass
class Attacked:
    session: ServedSession
    client: Client


@pytest.fixture
def attacked() -> Iterator[Attacked]:
    with served_session(memory_bytes_max=1 << 20) as (session, client):
        assert client.floats(-1, 1) == X
        predicted, first = client.template("aten::relu", [X], [New((2,))])
        asked, second = client.template("aten::relu", [X], None)
        assert (predicted, asked) == (OP, ASK)
        client.send(first, second)
        assert client.sync() is None
        yield Attacked(session, client)


def ends(attacked: Attacked, said: str = "") -> None:
    farewell = attacked.client.receive()
    assert isinstance(farewell, Error)
    assert farewell.code == "transport.protocol"
    assert said in farewell.message
    attacked.client.close()
    assert attacked.session.wait_end() == "fatal"
    assert attacked.session.native.stats()["bytes_allocated"] <= 16


def template(number: int, body: bytes) -> bytes:
    return record(Record.TEMPLATE, number, u32(len(body)) + body)


def with_argument(kind: bytes) -> bytes:
    return template(9, template_body("aten::relu", [Raw(kind)], [New((2,))]))


def with_output(kind: bytes) -> bytes:
    return template(9, template_body("aten::relu", [X], [Raw(kind)]))


def look(dtype: int, shape: tuple[int, ...], strides: tuple[int, ...], flags: int = 0) -> bytes:
    return struct.pack("<BBBB", 1, dtype, len(shape), flags) + i64(*shape, *strides)


FLOAT = DTYPES["float32"][0]
RECORDS = {
    "unknown record": record(100),
    "another unknown record": record(255),
    "a record cut short": record(Record.ALLOCATE, 0, u32(5)),
    "no whole record": b"\x00\x00",
    "unknown template": record(Record.OP, 7, u32(1, 5)),
    "template beyond the last": record(Record.OP, 2**24 - 1, u32(1, 5)),
    "an op cut short": record(Record.OP, OP, u32(1)),
    "an op of unknown storage": record(Record.OP, OP, u32(77, 5)),
    "an op of a storage beyond the last": record(Record.OP, OP, u32(2**32 - 1, 5)),
    "an output where something is": record(Record.OP, OP, u32(1, 1)),
    "an output beyond the last": record(Record.OP, OP, u32(1, 2**22)),
    "running what was to be asked": record(Record.OP, ASK, u32(1)),
    "asking what was predicted": record(Record.ASK, OP, u32(1)),
    "asking with unknown storage": record(Record.ASK, ASK, u32(77)),
    "binding what was not asked": record(Record.BIND, 1, u64(1) + u32(5)),
    "binding too many": record(Record.BIND, 2**24 - 1, u64(1)),
    "forgetting an unknown template": record(Record.FORGET, 7),
    "allocating twice": record(Record.ALLOCATE, 0, u32(1) + u64(8)),
    "allocating beyond the last": record(Record.ALLOCATE, 0, u32(2**22) + u64(8)),
    "allocating more than can be counted": record(Record.ALLOCATE, 0, u32(5) + u64(2**64 - 1)),
    "freeing what is not there": record(Record.FREE, 0, u32(4)),
    "freeing twice": record(Record.FREE, 0, u32(1)) * 2,
    "resizing what is not there": record(Record.RESIZE, 0, u32(4) + u64(1)),
    "resizing to more than can be counted": record(Record.RESIZE, 0, u32(1) + u64(2**63)),
    "filling what is not there": record(Record.PUT, 1, view(Tensor(4, (1,))) + u64(4) + bytes(4)),
    "filling beyond the end": record(Record.PUT, 1, view(Tensor(1, (3,))) + u64(12) + bytes(12)),
    "filling with another size": record(Record.PUT, 1, view(X) + u64(9) + bytes(9)),
    "filling with less than announced": record(Record.PUT, 1, view(X) + u64(8) + bytes(7)),
    "filling with too much in a record": record(
        Record.PUT, 1, view(Tensor(1, (70_000,), "uint8", (0,))) + u64(70_000) + bytes(70_000)
    ),
    "a record after an upload": record(Record.PUT, 0, view(X) + u64(8)) + record(Record.SYNC),
    "fetching what is not there": record(Record.GET, 0, view(Tensor(4))),
    "fetching beyond the end": record(Record.GET, 0, view(Tensor(1, (2,), offset=1))),
    "fetching from before the start": record(Record.GET, 0, view(Tensor(1, (1,), offset=-1))),
    "fetching from far away": record(Record.GET, 0, view(Tensor(1, (1,), offset=FAR))),
    "fetching nothing from far away": record(Record.GET, 0, view(Tensor(1, (0,), offset=FAR))),
    "fetching with long strides": record(Record.GET, 0, view(Tensor(1, (2,), strides=(FAR,)))),
    "fetching with a size that wraps": record(Record.GET, 0, view(Tensor(1, (2**32, 2**32), strides=(0, 0)))),
    "fetching a negative size": record(Record.GET, 0, view(Tensor(1, (-1,)))),
    "fetching a negative stride": record(Record.GET, 0, view(Tensor(1, (2,), strides=(-1,), offset=1))),
    "fetching in too many dimensions": record(Record.GET, 0, view(Tensor(1, (1,) * 65))),
    "fetching the conjugate of a float": record(Record.GET, 0, view(Tensor(1, (2,), flags=CONJUGATE))),
    "a generator beyond the last": record(Record.SEED, 0, u32(4096) + u64(1)),
    "the state of one beyond the last": record(Record.GENERATOR_STATE, 0, u32(2**32 - 1)),
    "a state cut short": record(Record.SET_GENERATOR, 0, u32(0, 100) + b"x"),
    "freeing the default generator": record(Record.FREE_GENERATOR, 0, u32(0)),
    "something after goodbye": record(Record.GOODBYE) + record(Record.SYNC),
    # templates
    "a template twice": template(OP, template_body("aten::relu", [X], [New((2,))])),
    "a template beyond the last": template(2**16, template_body("aten::relu", [X], [New((2,))])),
    "an empty template": template(9, b""),
    "a template longer than it says": template(9, template_body("aten::relu", [X], None) + b"\0"),
    "a template cut short": template(9, template_body("aten::relu", [X], [New((2,))])[:-1]),
    "a template longer than its record": record(Record.TEMPLATE, 9, u32(1000)),
    "a text that is too long for a name": template(9, u32(5000) + b"x" * 5000),
    "a name that is too long": template(9, template_body("aten::" + "x" * 123, [X], None)),
    "a name that never ends": template(9, u32(2**32 - 1)),
    "too many arguments": template(9, text("aten::relu") + text("") + u32(257) + b"\0" * 300 + b"\0"),
    "more arguments than bytes": template(9, text("aten::relu") + text("") + u32(200) + b"\0"),
    "neither predicted nor not": template(9, template_body("aten::relu", [X], None)[:-1] + b"\2"),
    "an unknown kind of argument": with_argument(b"\x0e"),
    "a dtype that is not": with_argument(look(99, (2,), (1,))),
    "a dtype that is not carried": with_argument(look(12, (2,), (1,))),
    "a scalar of no dtype": with_argument(b"\x02\xff\x00"),
    "a negative size": with_argument(look(FLOAT, (-2,), (1,))),
    "a negative stride": with_argument(look(FLOAT, (2,), (-1,))),
    "too many dimensions": with_argument(look(FLOAT, (1,) * 65, (1,) * 65)),
    "a size that wraps": with_argument(look(FLOAT, (2**32, 2**32), (0, 0))),
    "a span that wraps": with_argument(look(FLOAT, (2, 2), (FAR, FAR))),
    "a list of lists": with_argument(argument([[1]])[0]),
    "a list that is too long": with_argument(b"\x09" + u32(65537) + b"\0" * 65537),
    "a list longer than its bytes": with_argument(b"\x09" + u32(60000)),
    "a text that is too long": with_argument(b"\x08" + u32(4097) + b"x" * 4097),
    "an output of unknown kind": with_output(b"\x63"),
    "an output that cannot be predicted": with_output(b"\x05" + bytes(8)),
    "an output of no dtype": with_output(b"\x01\xff\x00"),
    "an output that wraps": with_output(output(New((2**40, 2**40)))),
    "an output of an input that is not there": with_output(output(Same(1))),
    "an output list of lists": with_output(output([[New((2,))]])),
    "outputs that wrap together": template(
        9, template_body("aten::max.dim", [X, 0, False], [New((2**59,)), New((2**59,)), New((2**59,))])
    ),
}


@pytest.mark.parametrize("records", RECORDS.values(), ids=RECORDS.keys())
def test_a_record_that_is_not_allowed_ends_the_session(attacked: Attacked, records: bytes) -> None:
    attacked.client.send(records)
    ends(attacked)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        (frame(5, b"", kind=0), "unknown kind"),
        (frame(5, b"", kind=3), "unknown kind"),
        (frame(5, b"data", kind=BYTES), "other bytes"),
        (frame(9, b""), "frame 9 came where 5 was due"),
        (frame(5, b"", replies_received=99), "never sent"),
        (struct.pack("<IIQQ", FRAME_BYTES_MAX + 1, 1, 5, 0), "the most is"),
        (struct.pack("<IIQQ", 2**32 - 1, 2, 5, 0), "the most is"),
        (b"\xff" * 100, "the most is"),
    ],
    ids=["no kind", "kind", "bytes unasked", "a gap", "replies", "oversized", "oversized bytes", "noise"],
)
def test_a_frame_that_is_not_allowed_ends_the_session(attacked: Attacked, frames: bytes, said: str) -> None:
    assert attacked.client.frames == 4
    attacked.client.write(frames)
    ends(attacked, said)


@pytest.mark.parametrize("sent", [b"", bytes(9)], ids=["nothing", "too much"])
def test_bytes_that_are_not_what_was_announced_end_the_session(attacked: Attacked, sent: bytes) -> None:
    attacked.client.send(record(Record.PUT, 0, view(X) + u64(8)))
    attacked.client.send(sent, kind=BYTES)
    ends(attacked, "other bytes")


def test_records_in_the_middle_of_an_upload_end_the_session(attacked: Attacked) -> None:
    attacked.client.send(record(Record.PUT, 0, view(X) + u64(8)))
    attacked.client.send(bytes(4), kind=BYTES)
    attacked.client.send(record(Record.SYNC))
    ends(attacked, "in the middle of an upload")


def test_the_same_number_for_two_outputs_ends_the_session(attacked: Attacked) -> None:
    number, made = attacked.client.template("aten::max.dim", [X, 0, False], [New(()), New((), "int64")])
    attacked.client.send(made, record(Record.OP, number, u32(1, 5, 5)))
    ends(attacked, "in use already")


def test_a_client_that_never_takes_its_replies_is_sent_away(attacked: Attacked) -> None:
    attacked.client.send(record(Record.SYNC) * 1100)
    farewell = None
    for _ in range(1100):
        farewell = attacked.client.receive()
        if isinstance(farewell, Error):
            break
    assert isinstance(farewell, Error)
    assert "more than it takes" in farewell.message


def test_a_client_that_never_binds_is_sent_away(attacked: Attacked) -> None:
    for _ in range(256):
        assert not isinstance(attacked.client.ask_for(record(Record.ASK, ASK, u32(1))), Error)
    attacked.client.send(record(Record.ASK, ASK, u32(1)))
    farewell = attacked.client.receive()
    assert isinstance(farewell, Error)
    assert "more than it binds" in farewell.message


def test_templates_have_a_bound_together(attacked: Attacked) -> None:
    body = template_body("aten::nothing", [[None] * 65536], None)
    for number in range(10, 45):
        try:
            attacked.client.send(template(number, body))
        except OSError:
            break  # it has hung up
    farewell = attacked.client.receive()
    assert isinstance(farewell, Error)
    assert "hold more than is allowed" in farewell.message


def test_results_beyond_their_memory_cannot_be_read(attacked: Attacked) -> None:
    client = attacked.client
    error = client.refused("aten::_reshape_alias", X, [20000], [1])
    assert "beyond the memory" in error.message
    client.op("aten::_reshape_alias", X, [20000], [1], gives=[New((20000,))])
    streamed = client.sync()
    assert streamed is not None
    assert "beyond the memory" in streamed.message
    assert client.stats().bytes_allocated == 8


def test_indices_are_checked_even_when_the_client_says_not_to(attacked: Attacked) -> None:
    client = attacked.client
    far = client.uploaded((1,), i64(10_000_000), "int64")
    value = client.floats(1)
    error = client.refused("aten::_index_put_impl_", X, [far], value, True, True)
    assert "out of" in error.message


def test_memory_is_not_pinned_whatever_the_client_says(attacked: Attacked) -> None:
    client = attacked.client
    client.op("aten::empty.memory_format", [2], 6, None, HERE, True, None, gives=[New((2,))])
    assert client.sync() is None


def test_a_stream_damaged_anywhere_does_no_harm() -> None:
    """Whatever single byte is wrong, the session answers, refuses or ends; it never hangs or crashes."""
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
            client.send(record(Record.GOODBYE))
            client.hear_the_end()
            assert session.wait_end() in ("fatal", "goodbye")
