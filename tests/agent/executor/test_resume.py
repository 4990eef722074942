"""A connection that is cut: nothing is lost or done twice, and the session goes on over the next one."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from tests.agent.executor.client import (
    FRAME_BYTES_MAX,
    HERE,
    Client,
    Error,
    New,
    Record,
    Reply,
    Same,
    ServedSession,
    Tensor,
    frame,
    record,
    served_session,
    u32,
    u64,
    view,
)
from tests.waiting import wait_until

MIB = 1024 * 1024


@pytest.fixture
def session() -> Iterator[tuple[ServedSession, Client]]:
    with served_session() as pair:
        yield pair


def cut(session: ServedSession, client: Client) -> None:
    client.close()
    assert session.wait_end() == "lost"


def resume(session: ServedSession, client: Client, *, received: int | None = None) -> None:
    """As the torch device does: sends again what the executor has not received."""
    replies = client.replies if received is None else received
    frames = session.native.frames_received
    client.pipe = session.connect(replies_received=replies)
    client.replies = replies
    for data in client.sent[frames:]:
        client.write(data)


def add_one(client: Client, tensor: Tensor) -> None:
    client.op("aten::add_.Scalar", tensor, 1.0, 1, gives=[Same()])


def test_a_session_goes_on_over_another_connection(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    made = client.floats(1, 2)
    assert client.floats_in(made) == (1, 2)
    cut(served, client)
    resume(served, client)
    add_one(client, made)
    assert client.floats_in(made) == (2, 3)


def test_what_was_sent_and_not_received_is_carried_out_once(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    made = client.floats(0)
    for _ in range(20):
        add_one(client, made)
    cut(served, client)
    resume(served, client)
    assert client.floats_in(made) == (20,)
    client.pipe.close()
    assert served.wait_end() == "lost"
    client.pipe = served.connect(replies_received=client.replies)
    for data in client.sent:  # all of them again, as if nothing had been acknowledged
        client.write(data)
    client.frames += 1
    client.write(frame(client.frames, record(Record.GET, 0, view(made))))
    reply = client.receive()
    assert isinstance(reply, Reply)
    assert struct.unpack("<f", reply.payload) == (20,)


@pytest.mark.parametrize("at", [0, 1, 23, 24, 30, -1])
def test_a_frame_that_is_cut_anywhere_is_sent_again(session: tuple[ServedSession, Client], at: int) -> None:
    served, client = session
    made = client.floats(0)
    add_one(client, made)
    client.sync()
    number, template = client.template("aten::add_.Scalar", [made, 1.0, 1], [Same()])
    data = frame(client.frames + 1, template + record(Record.OP, number, u32(made.storage)))
    client.write(data[:at])
    cut(served, client)
    assert served.native.frames_received == client.frames
    client.frames += 1
    client.sent.append(data)
    resume(served, client)
    assert client.floats_in(made) == (2,)


def test_a_reply_that_was_not_received_is_sent_again(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    made = client.floats(5)
    client.send(record(Record.GET, 0, view(made)), record(Record.SYNC))
    wait_until(lambda: served.native.frames_received == client.frames)
    cut(served, client)
    resume(served, client)
    reply = client.receive()
    assert isinstance(reply, Reply)
    assert struct.unpack("<f", reply.payload) == (5,)
    assert client.receive() == Reply(2, b"")
    assert client.floats_in(made) == (5,)


def test_a_failure_that_was_not_heard_is_told_again_and_only_there(
    session: tuple[ServedSession, Client],
) -> None:
    served, client = session
    one = client.floats(1)
    client.op("aten::mm", one, one, gives=[New((1, 1))])
    assert client.sync() is not None
    cut(served, client)
    resume(served, client, received=0)
    again = client.receive()
    assert isinstance(again, Error)
    assert again.op == "aten::mm"
    assert client.sync() is None


@pytest.mark.parametrize("change", ["written", "uploaded", "resized", "freed", "in place"])
def test_a_large_reply_is_sent_again_as_it_was(session: tuple[ServedSession, Client], change: str) -> None:
    served, client = session
    size = 3 * MIB
    made = client.made("aten::full", [size], 7.0, 6, None, HERE, None, gives=[New((size,))])
    client.send(record(Record.GET, 0, view(made)))
    client.pipe.read_exactly(100_000, 10.0)  # and no further: the executor is in the middle of it
    match change:
        case "written":
            client_sent_blind(client, "aten::fill_.Scalar", made)
        case "uploaded":
            blind(client, record(Record.PUT, 0, view(made) + u64(size * 4)))
        case "resized":
            blind(client, record(Record.RESIZE, 0, u32(made.storage) + u64(4)))
        case "freed":
            blind(client, record(Record.FREE, 0, u32(made.storage)))
        case "in place":
            client_sent_blind(client, "aten::zero_", made)
    cut(served, client)
    resume(served, client)
    reply = client.receive()
    assert isinstance(reply, Reply)
    assert reply.payload == struct.pack("<f", 7.0) * size
    if change == "uploaded":
        client.send_bytes(bytes(size * 4))
    if change not in ("freed", "resized"):
        data = client.get(made)
        assert isinstance(data, bytes)
        assert data[:8] == bytes(8)
    assert client.sync() is None


def blind(client: Client, *records: bytes) -> None:
    """A frame that nobody takes yet: the executor is busy sending."""
    client.frames += 1
    data = frame(client.frames, b"".join(records))
    client.sent.append(data)
    client.write(data)


def client_sent_blind(client: Client, op: str, made: Tensor) -> None:
    args = [made, 0.0] if op == "aten::fill_.Scalar" else [made]
    number, template = client.template(op, args, [Same()])
    blind(client, template, record(Record.OP, number, u32(made.storage)))


@pytest.mark.parametrize("op", ["aten::fill_.Scalar", "aten::resize_", "put"])
def test_a_large_reply_does_not_change_while_it_waits(session: tuple[ServedSession, Client], op: str) -> None:
    """The client has read it, but not said so: the executor may have to send it again."""
    served, client = session
    size = MIB
    made = client.made("aten::full", [size], 7.0, 6, None, HERE, None, gives=[New((size,))])
    first = client.get(made)
    client.replies = 0  # forgotten: nothing is acknowledged from here on
    if op == "aten::fill_.Scalar":
        client.op(op, made, 1.0, gives=[Same()])
    elif op == "put":
        client.put(Tensor(made.storage, (3,)), bytes(12))
    else:
        number, template = client.template(op, [made, [3], None], None)
        client.send(template, record(Record.ASK, number, u32(made.storage)))
    wait_until(lambda: served.native.frames_received == client.frames)
    cut(served, client)
    resume(served, client)
    reply = client.receive()
    assert isinstance(reply, Reply)
    assert reply.payload == first


def test_memory_that_only_a_reply_still_needs_counts_until_the_client_has_it() -> None:
    """Otherwise a client that never says so could take many times its quota. The first 64 MiB are free."""
    size = 80 * MIB
    with served_session(memory_bytes_max=100 * MIB) as (_, client):
        made = client.allocate((size,), "uint8")
        data = client.get(made)
        assert isinstance(data, bytes)
        received, client.replies = client.replies, 0
        client.free(made)
        refused = client.allocate((90 * MIB,), "uint8")
        client.replies = received  # the reply's number is checked, and said from here on
        client.send(record(Record.SYNC))
        error = client.receive()
        assert isinstance(error, Error)
        assert error.code == "device.out_of_memory"
        client.free(refused)
        client.allocate((90 * MIB,), "uint8")
        assert client.sync() is None


def test_an_upload_goes_on_where_it_was_cut(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    data = bytes(range(256)) * (3 * FRAME_BYTES_MAX // 256)
    target = client.allocate((len(data),), "uint8")
    client.send(record(Record.PUT, 0, view(target) + u64(len(data))))
    client.send(data[:FRAME_BYTES_MAX], kind=2)
    part = frame(client.frames + 1, data[FRAME_BYTES_MAX : 2 * FRAME_BYTES_MAX], kind=2)
    client.write(part[:1_000_000])
    wait_until(lambda: served.native.frames_received == client.frames)
    cut(served, client)
    client.frames += 1
    client.sent.append(part)
    resume(served, client)
    client.send(data[2 * FRAME_BYTES_MAX :], kind=2)
    assert client.get(target) == data


def test_what_was_asked_can_be_bound_after_a_cut(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    source = client.floats(0, 3)
    number, made = client.template("aten::nonzero", [source], None)
    reply = client.ask_for(made, record(Record.ASK, number, u32(source.storage)))
    assert isinstance(reply, Reply)
    cut(served, client)
    resume(served, client)
    client.send(record(Record.BIND, 1, u64(reply.number) + u32(50)))
    assert client.get(Tensor(50, (1, 1), "int64")) == struct.pack("<q", 1)


def test_a_client_with_replies_that_were_never_sent_is_sent_away(
    session: tuple[ServedSession, Client],
) -> None:
    served, client = session
    client.sync()
    cut(served, client)
    client.pipe = served.connect(replies_received=5)
    farewell = client.receive()
    assert isinstance(farewell, Error)
    assert "never sent" in farewell.message
    client.close()
    assert served.wait_end() == "fatal"


# --- acknowledgements ---------------------------------------------------------------------------


def test_frames_are_acknowledged_when_the_client_falls_silent(session: tuple[ServedSession, Client]) -> None:
    _, client = session
    client.floats(1)
    heard = 0
    while heard < client.frames:
        heard = client.receive_acknowledgement()


def test_many_frames_are_acknowledged_before_the_client_falls_silent(
    session: tuple[ServedSession, Client],
) -> None:
    _, client = session
    made = client.floats(1)
    add_one(client, made)
    before = client.frames
    empty = b"".join(frame(before + i, b"") for i in range(1, 65))
    client.frames += 64
    client.write(empty + frame(client.frames + 1, b"")[:10])  # never silent: a frame has begun
    heard = 0
    while heard <= before:
        heard = client.receive_acknowledgement()
