"""Lost connections: the session continues on the next one, and nothing is lost or executed twice."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from tests.executor.client import (
    DEVICE,
    FRAME_BYTES_MAX,
    AliasOutput,
    Client,
    ErrorReply,
    NewOutput,
    RecordKind,
    Reply,
    ServedSession,
    Tensor,
    encode_view,
    frame,
    record,
    served_session,
    u32,
    u64,
)
from tests.waiting import wait_until

MIB = 1024 * 1024


@pytest.fixture
def session() -> Iterator[tuple[ServedSession, Client]]:
    with served_session() as pair:
        yield pair


def cut_connection(session: ServedSession, client: Client) -> None:
    client.close()
    assert session.wait_end() == "lost"


def resume(session: ServedSession, client: Client, *, received: int | None = None) -> None:
    """Resend what the executor has not received, as the torch device does."""
    replies = client.replies if received is None else received
    frames = session.native.frames_received
    client.pipe = session.connect(replies_received=replies)
    client.replies = replies
    for data in client.sent[frames:]:
        client.write(data)


def add_one(client: Client, tensor: Tensor) -> None:
    client.op("aten::add_.Scalar", tensor, 1.0, 1, outputs=[AliasOutput()])


def test_session_continues_on_a_new_connection(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    made = client.floats(1, 2)
    assert client.floats_in(made) == (1, 2)
    cut_connection(served, client)
    resume(served, client)
    add_one(client, made)
    assert client.floats_in(made) == (2, 3)


def test_resent_frames_are_executed_once(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    made = client.floats(0)
    for _ in range(20):
        add_one(client, made)
    cut_connection(served, client)
    resume(served, client)
    assert client.floats_in(made) == (20,)
    client.pipe.close()
    assert served.wait_end() == "lost"
    client.pipe = served.connect(replies_received=client.replies)
    for data in client.sent:  # all again, as if none had been acknowledged
        client.write(data)
    client.frames += 1
    client.write(frame(client.frames, record(RecordKind.GET, 0, encode_view(made))))
    reply = client.receive()
    assert isinstance(reply, Reply)
    assert struct.unpack("<f", reply.payload) == (20,)


@pytest.mark.parametrize("at", [0, 1, 23, 24, 30, -1])
def test_truncated_frame_is_received_after_resend(session: tuple[ServedSession, Client], at: int) -> None:
    served, client = session
    made = client.floats(0)
    add_one(client, made)
    client.sync()
    number, template = client.template("aten::add_.Scalar", [made, 1.0, 1], [AliasOutput()])
    data = frame(client.frames + 1, template + record(RecordKind.OP, number, u32(made.storage)))
    client.write(data[:at])
    cut_connection(served, client)
    assert served.native.frames_received == client.frames
    client.frames += 1
    client.sent.append(data)
    resume(served, client)
    assert client.floats_in(made) == (2,)


def test_unreceived_reply_is_sent_again(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    made = client.floats(5)
    client.send(record(RecordKind.GET, 0, encode_view(made)), record(RecordKind.SYNC))
    wait_until(lambda: served.native.frames_received == client.frames)
    cut_connection(served, client)
    resume(served, client)
    reply = client.receive()
    assert isinstance(reply, Reply)
    assert struct.unpack("<f", reply.payload) == (5,)
    assert client.receive() == Reply(2, b"")
    assert client.floats_in(made) == (5,)


def test_unreceived_failure_is_sent_again_once(
    session: tuple[ServedSession, Client],
) -> None:
    served, client = session
    one = client.floats(1)
    client.op("aten::mm", one, one, outputs=[NewOutput((1, 1))])
    assert client.sync() is not None
    cut_connection(served, client)
    resume(served, client, received=0)
    again = client.receive()
    assert isinstance(again, ErrorReply)
    assert again.op == "aten::mm"
    assert client.sync() is None


@pytest.mark.parametrize("change", ["written", "uploaded", "resized", "freed", "in place"])
def test_large_reply_is_sent_again_unchanged(session: tuple[ServedSession, Client], change: str) -> None:
    served, client = session
    size = 3 * MIB
    made = client.op_output("aten::full", [size], 7.0, 6, None, DEVICE, None, outputs=[NewOutput((size,))])
    client.send(record(RecordKind.GET, 0, encode_view(made)))
    client.pipe.read_exactly(100_000, 10.0)  # only a part: the executor is still sending
    match change:
        case "written":
            send_op_without_reading(client, "aten::fill_.Scalar", made)
        case "uploaded":
            send_without_reading(client, record(RecordKind.PUT, 0, encode_view(made) + u64(size * 4)))
        case "resized":
            send_without_reading(client, record(RecordKind.RESIZE, 0, u32(made.storage) + u64(4)))
        case "freed":
            send_without_reading(client, record(RecordKind.FREE, 0, u32(made.storage)))
        case "in place":
            send_op_without_reading(client, "aten::zero_", made)
    cut_connection(served, client)
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


def send_without_reading(client: Client, *records: bytes) -> None:
    """Write a frame while the executor is busy sending."""
    client.frames += 1
    data = frame(client.frames, b"".join(records))
    client.sent.append(data)
    client.write(data)


def send_op_without_reading(client: Client, op: str, made: Tensor) -> None:
    args = [made, 0.0] if op == "aten::fill_.Scalar" else [made]
    number, template = client.template(op, args, [AliasOutput()])
    send_without_reading(client, template, record(RecordKind.OP, number, u32(made.storage)))


@pytest.mark.parametrize("op", ["aten::fill_.Scalar", "aten::resize_", "put"])
def test_unreceived_large_reply_is_not_changed_by_later_ops(
    session: tuple[ServedSession, Client], op: str
) -> None:
    """The client has read it, but not acknowledged it: the executor may have to send it again."""
    served, client = session
    size = MIB
    made = client.op_output("aten::full", [size], 7.0, 6, None, DEVICE, None, outputs=[NewOutput((size,))])
    first = client.get(made)
    client.replies = 0  # acknowledges nothing from here on
    if op == "aten::fill_.Scalar":
        client.op(op, made, 1.0, outputs=[AliasOutput()])
    elif op == "put":
        client.put(Tensor(made.storage, (3,)), bytes(12))
    else:
        number, template = client.template(op, [made, [3], None], None)
        client.send(template, record(RecordKind.DYNAMIC_OP, number, u32(made.storage)))
    wait_until(lambda: served.native.frames_received == client.frames)
    cut_connection(served, client)
    resume(served, client)
    reply = client.receive()
    assert isinstance(reply, Reply)
    assert reply.payload == first


def test_memory_of_unreceived_replies_counts_towards_the_quota() -> None:
    """Otherwise a client that never acknowledges could exceed its quota. The first 64 MiB do not count."""
    size = 80 * MIB
    with served_session(memory_bytes_max=100 * MIB) as (_, client):
        made = client.allocate((size,), "uint8")
        data = client.get(made)
        assert isinstance(data, bytes)
        received, client.replies = client.replies, 0
        client.free(made)
        refused = client.allocate((90 * MIB,), "uint8")
        client.replies = received  # acknowledges the reply from here on
        client.send(record(RecordKind.SYNC))
        error = client.receive()
        assert isinstance(error, ErrorReply)
        assert error.code == "device.out_of_memory"
        client.free(refused)
        client.allocate((90 * MIB,), "uint8")
        assert client.sync() is None


def test_upload_continues_after_reconnect(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    data = bytes(range(256)) * (3 * FRAME_BYTES_MAX // 256)
    target = client.allocate((len(data),), "uint8")
    client.send(record(RecordKind.PUT, 0, encode_view(target) + u64(len(data))))
    client.send(data[:FRAME_BYTES_MAX], kind=2)
    part = frame(client.frames + 1, data[FRAME_BYTES_MAX : 2 * FRAME_BYTES_MAX], kind=2)
    client.write(part[:1_000_000])
    wait_until(lambda: served.native.frames_received == client.frames)
    cut_connection(served, client)
    client.frames += 1
    client.sent.append(part)
    resume(served, client)
    client.send(data[2 * FRAME_BYTES_MAX :], kind=2)
    assert client.get(target) == data


def test_dynamic_outputs_can_be_bound_after_reconnect(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    source = client.floats(0, 3)
    number, made = client.template("aten::nonzero", [source], None)
    reply = client.request(made, record(RecordKind.DYNAMIC_OP, number, u32(source.storage)))
    assert isinstance(reply, Reply)
    cut_connection(served, client)
    resume(served, client)
    client.send(record(RecordKind.BIND_OUTPUTS, 1, u64(reply.number) + u32(50)))
    assert client.get(Tensor(50, (1, 1), "int64")) == struct.pack("<q", 1)


def test_acknowledging_unsent_replies_ends_the_session(
    session: tuple[ServedSession, Client],
) -> None:
    served, client = session
    client.sync()
    cut_connection(served, client)
    client.pipe = served.connect(replies_received=5)
    fatal_error = client.receive()
    assert isinstance(fatal_error, ErrorReply)
    assert "never sent" in fatal_error.message
    client.close()
    assert served.wait_end() == "fatal"


# --- acknowledgements ---------------------------------------------------------------------------


def test_frames_are_acknowledged_when_the_client_is_idle(session: tuple[ServedSession, Client]) -> None:
    _, client = session
    client.floats(1)
    acknowledged = 0
    while acknowledged < client.frames:
        acknowledged = client.receive_acknowledgement()


def test_frames_are_acknowledged_while_the_client_sends(
    session: tuple[ServedSession, Client],
) -> None:
    _, client = session
    made = client.floats(1)
    add_one(client, made)
    before = client.frames
    empty = b"".join(frame(before + i, b"") for i in range(1, 65))
    client.frames += 64
    client.write(empty + frame(client.frames + 1, b"")[:10])  # not idle: a frame has started
    acknowledged = 0
    while acknowledged <= before:
        acknowledged = client.receive_acknowledgement()
