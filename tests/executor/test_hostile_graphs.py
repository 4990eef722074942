"""Protocol violations with graphs, and graphs whose memory is freed or resized.

CUDA graphs are replaced by a fake capture that counts calls; tests/gpu tests real ones.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.executor.client import (
    AliasOutput,
    Client,
    ErrorReply,
    NewOutput,
    RecordKind,
    Reply,
    ServedSession,
    Tensor,
    encode_argument,
    encode_view,
    i64,
    record,
    served_session,
    u32,
    u64,
)

# State after the fixture: a storage of two floats, a template for its relu, and graph 0, which returns Y.
X, Y = Tensor(1, (2,)), Tensor(2, (2,))
RELU, DYNAMIC = 1, 2


@dataclass
class CountingCapture:
    """A fake capture; the work runs while it is captured."""

    kept_bytes: int = 0
    begun: int = 0
    replayed: int = 0
    aborted: int = 0

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> tuple[object, int]:
        return object(), self.kept_bytes

    def abort(self) -> None:
        self.aborted += 1

    def replay(self, graph: object) -> None:
        self.replayed += 1


@dataclass
class HostileSession:
    session: ServedSession
    client: Client
    capture: CountingCapture = field(default_factory=CountingCapture)

    def report(self, graph: int = 0) -> tuple[int, int, str]:
        reply = self.client.request(record(RecordKind.GRAPH_REPORT, 0, u32(graph)))
        assert isinstance(reply, Reply), reply
        kind, replays, size = struct.unpack_from("<BQI", reply.payload)
        return kind, replays, reply.payload[13 : 13 + size].decode()

    def replay(self, graph: int = 0) -> None:
        self.client.send(record(RecordKind.GRAPH_REPLAY, 0, u32(graph)))


def graph_records(client: Client, graph: int = 0, *inside: bytes, mode: int = 1) -> bytes:
    begin = record(RecordKind.GRAPH_BEGIN, 0, u32(graph))
    return begin + b"".join(inside) + record(RecordKind.GRAPH_END, mode)


def record_relu_graph(client: Client) -> None:
    assert client.floats(-1, 1) == X
    assert client.new_storage() == Y.storage
    (relu, first), (ask, second) = (
        client.template("aten::relu", [X], [NewOutput((2,))]),
        client.template("aten::relu", [X], None),
    )
    assert (relu, ask) == (RELU, DYNAMIC)
    client.send(first, second, graph_records(client, 0, record(RecordKind.OP, RELU, u32(1, 2))))
    assert client.sync() is None


@pytest.fixture
def hostile_session() -> Iterator[HostileSession]:
    with served_session(memory_bytes_max=1 << 20) as (session, client):
        record_relu_graph(client)
        yield HostileSession(session, client)


@pytest.fixture
def hostile_session_with_capture() -> Iterator[HostileSession]:
    """As `hostile_session`, with an accelerator that supports capture."""
    capture = CountingCapture()
    with served_session(memory_bytes_max=1 << 20, capture=capture) as (session, client):
        record_relu_graph(client)
        yield HostileSession(session, client, capture)


def assert_protocol_error(hostile: HostileSession, message: str = "") -> None:
    fatal_error = hostile.client.receive()
    assert isinstance(fatal_error, ErrorReply)
    assert fatal_error.code == "transport.protocol"
    assert message in fatal_error.message
    hostile.client.close()
    assert hostile.session.wait_end() == "fatal"


def unfinished_graph(*inside: bytes) -> bytes:
    return record(RecordKind.GRAPH_BEGIN, 0, u32(1)) + b"".join(inside)


OUTSIDE = {
    "replaying an unknown graph": record(RecordKind.GRAPH_REPLAY, 0, u32(7)),
    "replaying a graph out of range": record(RecordKind.GRAPH_REPLAY, 0, u32(2**32 - 1)),
    "freeing an unknown graph": record(RecordKind.GRAPH_FREE, 0, u32(7)),
    "freeing twice": record(RecordKind.GRAPH_FREE, 0, u32(0)) * 2,
    "replaying a freed graph": record(RecordKind.GRAPH_FREE, 0, u32(0))
    + record(RecordKind.GRAPH_REPLAY, 0, u32(0)),
    "reporting an unknown graph": record(RecordKind.GRAPH_REPORT, 0, u32(7)),
    "end without begin": record(RecordKind.GRAPH_END, 1),
    "step outside of a graph": record(RecordKind.GRAPH_STEP, RELU, u32(1, 3)),
    "graph number out of range": record(RecordKind.GRAPH_BEGIN, 0, u32(4096)),
    "graph number in use": record(RecordKind.GRAPH_BEGIN, 0, u32(0)),
    "unknown mode of end": unfinished_graph(record(RecordKind.GRAPH_END, 3)),
    "truncated replay": record(RecordKind.GRAPH_REPLAY),
}
INSIDE = {
    "another graph": record(RecordKind.GRAPH_BEGIN, 0, u32(2)),
    "a replay": record(RecordKind.GRAPH_REPLAY, 0, u32(0)),
    "freeing a graph": record(RecordKind.GRAPH_FREE, 0, u32(0)),
    "a report": record(RecordKind.GRAPH_REPORT, 0, u32(0)),
    "upload": record(RecordKind.PUT, 1, encode_view(X) + u64(8) + bytes(8)),
    "download": record(RecordKind.GET, 0, encode_view(X)),
    "synchronize": record(RecordKind.SYNC),
    "resizing": record(RecordKind.RESIZE, 0, u32(1) + u64(16)),
    "a seed": record(RecordKind.SEED, 0, u32(0) + u64(1)),
    "a generator's state": record(RecordKind.GENERATOR_STATE, 0, u32(0)),
    "setting a generator": record(RecordKind.SET_GENERATOR, 0, u32(0, 0)),
    "freeing a generator": record(RecordKind.FREE_GENERATOR, 0, u32(1)),
    "counters": record(RecordKind.STATS),
    "step with template of a dynamic op": record(RecordKind.GRAPH_STEP, DYNAMIC, u32(1)),
    "truncated step": record(RecordKind.GRAPH_STEP, RELU, u32(1)),
    "step with unknown template": record(RecordKind.GRAPH_STEP, 99, u32(1, 3)),
    "step with input out of range": record(RecordKind.GRAPH_STEP, RELU, u32(2**22, 3)),
    "step with output out of range": record(RecordKind.GRAPH_STEP, RELU, u32(1, 2**32 - 1)),
    "step that creates its input": record(RecordKind.GRAPH_STEP, RELU, u32(1, 1)),
    "creating an earlier input": record(RecordKind.OP, RELU, u32(1, 3))
    + record(RecordKind.FREE, 0, u32(1))
    + record(RecordKind.ALLOCATE, 0, u32(1) + u64(8)),
}


@pytest.mark.parametrize("records", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_invalid_graph_record_ends_the_session(hostile_session: HostileSession, records: bytes) -> None:
    hostile_session.client.send(records)
    assert_protocol_error(hostile_session)


@pytest.mark.parametrize("records", INSIDE.values(), ids=INSIDE.keys())
def test_record_not_allowed_in_a_graph_ends_the_session(
    hostile_session: HostileSession, records: bytes
) -> None:
    hostile_session.client.send(unfinished_graph(records))
    assert_protocol_error(hostile_session)


def test_session_can_be_closed_while_recording(hostile_session: HostileSession) -> None:
    hostile_session.client.send(unfinished_graph(record(RecordKind.OP, RELU, u32(1, 3))))
    hostile_session.client.send(record(RecordKind.CLOSE_SESSION))
    assert hostile_session.session.wait_end() == "closed"


# --- bounds -------------------------------------------------------------------------------------


def test_number_of_graph_steps_is_limited(hostile_session: HostileSession) -> None:
    pair = record(RecordKind.ALLOCATE, 0, u32(3) + u64(0)) + record(RecordKind.FREE, 0, u32(3))
    hostile_session.client.send(unfinished_graph())
    for _ in range(2):
        hostile_session.client.send(pair * (1 << 16))
    hostile_session.client.send(pair)
    assert_protocol_error(hostile_session, "too many steps")


def test_total_size_of_graphs_is_limited(hostile_session: HostileSession) -> None:
    client = hostile_session.client
    many = [X] * 65536
    number, made = client.template("aten::cat", [many, 0], [NewOutput((131072,))])
    step = record(RecordKind.GRAPH_STEP, number, encode_argument(many)[1] + u32(3))
    client.send(made)
    for each in range(1, 20):
        try:
            client.send(graph_records(client, each, *[step] * 15))
        except OSError:
            break  # disconnected
    assert_protocol_error(hostile_session, "the graphs exceed the maximum size")


def test_discarded_and_freed_graphs_do_not_count(hostile_session: HostileSession) -> None:
    client = hostile_session.client
    many = [X] * 65536
    number, made = client.template("aten::cat", [many, 0], [NewOutput((131072,))])
    step = record(RecordKind.GRAPH_STEP, number, encode_argument(many)[1] + u32(3))
    client.send(made)
    for each in range(40):
        kept = each % 2
        client.send(graph_records(client, 1, *[step] * 15, mode=kept))
        if kept:
            client.send(record(RecordKind.GRAPH_FREE, 0, u32(1)))
    assert client.sync() is None


def test_repeatedly_recorded_and_freed_graphs_leak_nothing(hostile_session: HostileSession) -> None:
    once = graph_records(hostile_session.client, 1) + record(RecordKind.GRAPH_FREE, 0, u32(1))
    for _ in range(20):
        hostile_session.client.send(once * 5000)
    assert hostile_session.client.sync() is None
    assert hostile_session.client.stats().bytes_allocated == 16


# --- memory of graphs ---------------------------------------------------------------------------


def test_replay_with_freed_input_ends_the_session(hostile_session: HostileSession) -> None:
    hostile_session.replay()
    assert hostile_session.client.floats_in(Y) == (0, 1)
    hostile_session.client.free(X)
    hostile_session.replay()
    assert_protocol_error(hostile_session, "storage 1 does not exist")


def test_capture_is_released_when_its_input_is_freed(hostile_session_with_capture: HostileSession) -> None:
    hostile_session_with_capture.replay()
    assert hostile_session_with_capture.client.floats_in(Y) == (0, 1)
    assert hostile_session_with_capture.capture.replayed == 1
    hostile_session_with_capture.client.free(X)
    hostile_session_with_capture.replay()
    assert_protocol_error(hostile_session_with_capture, "storage 1 does not exist")
    assert hostile_session_with_capture.capture.replayed == 1


def test_graph_is_captured_again_after_resize(hostile_session_with_capture: HostileSession) -> None:
    client, capture = hostile_session_with_capture.client, hostile_session_with_capture.capture
    hostile_session_with_capture.replay()
    hostile_session_with_capture.replay()
    assert client.sync() is None
    assert (capture.begun, capture.replayed) == (1, 2)
    client.send(record(RecordKind.RESIZE, 0, u32(1) + u64(64)))
    client.put(X, struct.pack("<2f", 5, -5))
    hostile_session_with_capture.replay()
    assert client.floats_in(Y) == (5, 0)
    assert (capture.begun, capture.replayed) == (2, 3)


def test_graph_with_shrunk_input_fails_until_it_is_resized_back(
    hostile_session_with_capture: HostileSession,
) -> None:
    client, capture = hostile_session_with_capture.client, hostile_session_with_capture.capture
    hostile_session_with_capture.replay()
    assert client.floats_in(Y) == (0, 1)
    client.send(record(RecordKind.RESIZE, 0, u32(1) + u64(0)))
    hostile_session_with_capture.replay()
    failure = client.sync()
    assert isinstance(failure, ErrorReply)
    assert "resized to 0 bytes and needs 8" in failure.message
    assert (failure.code, failure.op) == ("device.op_refused", "aten::relu")
    assert client.get(Y) == failure
    client.send(record(RecordKind.RESIZE, 0, u32(1) + u64(8)))
    client.put(X, struct.pack("<2f", 5, -5))
    hostile_session_with_capture.replay()
    assert client.floats_in(Y) == (5, 0)
    assert (capture.begun, capture.replayed, capture.aborted) == (2, 2, 0)


def test_tensor_larger_than_its_storage_ever_was_ends_the_session(hostile_session: HostileSession) -> None:
    hostile_session.client.send(record(RecordKind.RESIZE, 0, u32(1) + u64(0)))
    assert isinstance(hostile_session.client.get(X), ErrorReply)
    hostile_session.client.send(record(RecordKind.GET, 0, encode_view(Tensor(1, (3,)))))
    assert_protocol_error(hostile_session, "exceeds its storage")


def test_graph_is_captured_again_after_its_input_is_replaced(
    hostile_session_with_capture: HostileSession,
) -> None:
    client = hostile_session_with_capture.client
    hostile_session_with_capture.replay()
    client.send(record(RecordKind.FREE, 0, u32(1)) + record(RecordKind.ALLOCATE, 0, u32(1) + u64(8)))
    client.put(X, struct.pack("<2f", 7, -7))
    hostile_session_with_capture.replay()
    assert client.floats_in(Y) == (7, 0)
    assert hostile_session_with_capture.capture.begun == 2


def test_replay_creates_resized_results_again_but_not_freed_ones(
    hostile_session_with_capture: HostileSession,
) -> None:
    client = hostile_session_with_capture.client
    hostile_session_with_capture.replay()
    client.send(record(RecordKind.RESIZE, 0, u32(2) + u64(64)))
    hostile_session_with_capture.replay()
    assert client.floats_in(Y) == (0, 1)
    client.free(Y)
    client.send(record(RecordKind.ALLOCATE, 0, u32(2) + u64(8)))
    client.put(Y, struct.pack("<2f", 3, 4))
    hostile_session_with_capture.replay()
    answer = client.run_dynamic("aten::relu", X)
    assert not isinstance(answer, ErrorReply)
    # The client has freed the result: neither it nor the storage that reused its number is created again.
    assert client.stats().storages == 2


def test_number_of_captures_is_limited(hostile_session_with_capture: HostileSession) -> None:
    client = hostile_session_with_capture.client
    for size in range(20):
        client.send(record(RecordKind.RESIZE, 0, u32(1) + u64(64 + size)))
        hostile_session_with_capture.replay()
        assert client.floats_in(Y) == (0, 1)
    assert hostile_session_with_capture.capture.begun == 8
    assert hostile_session_with_capture.report() == (0, 20, "no CUDA graph: its tensors moved too often")


def test_memory_pool_of_a_capture_counts_towards_the_quota(
    hostile_session_with_capture: HostileSession,
) -> None:
    client = hostile_session_with_capture.client
    hostile_session_with_capture.capture.kept_bytes = 1 << 19
    hostile_session_with_capture.replay()
    assert client.stats().bytes_allocated == 16 + (1 << 19)
    client.send(graph_records(client, 1, record(RecordKind.OP, RELU, u32(1, 3))))
    hostile_session_with_capture.replay(1)
    assert client.sync() is None
    assert hostile_session_with_capture.report(0) == (1, 1, "")
    kind, replays, reason = hostile_session_with_capture.report(1)
    assert (kind, replays) == (0, 1)
    assert "of the session's 1048576 bytes" in reason
    client.send(record(RecordKind.GRAPH_FREE, 0, u32(0)))
    assert client.stats().bytes_allocated == 24


# --- failures -----------------------------------------------------------------------------------


def test_failed_replay_is_reported_and_next_replay_works(hostile_session: HostileSession) -> None:
    client = hostile_session.client
    index = client.upload((1,), i64(1), "int64")
    picked, number = Tensor(10, (1,)), 11
    pick, first = client.template("aten::index_select", [X, 0, index], [NewOutput((1,))])
    neg, second = client.template("aten::neg", [picked], [NewOutput((1,))])
    client.send(first, second)
    steps = record(RecordKind.OP, pick, u32(1, index.storage, 10)) + record(
        RecordKind.OP, neg, u32(10, number)
    )
    client.send(graph_records(client, 1, steps))
    client.put(index, i64(9))
    hostile_session.replay(1)
    error = client.get(Tensor(number, (1,)))
    assert isinstance(error, ErrorReply)
    assert "index_select" in error.op
    client.put(index, i64(1))
    hostile_session.replay(1)
    assert client.floats_in(Tensor(number, (1,))) == (-1,)


def test_failed_capture_is_reported_and_graph_replays_by_steps(
    hostile_session_with_capture: HostileSession,
) -> None:
    client = hostile_session_with_capture.client
    index = client.upload((1,), i64(1), "int64")
    pick, made = client.template("aten::index_select", [X, 0, index], [NewOutput((1,))])
    client.send(made, graph_records(client, 1, record(RecordKind.OP, pick, u32(1, index.storage, 10))))
    client.put(index, i64(9))
    hostile_session_with_capture.replay(1)
    assert isinstance(client.sync(), ErrorReply)
    assert hostile_session_with_capture.capture.aborted == 1
    kind, _, reason = hostile_session_with_capture.report(1)
    assert kind == 0
    assert "index_select" in reason
    client.put(index, i64(0))
    hostile_session_with_capture.replay(1)
    assert client.floats_in(Tensor(10, (1,))) == (-1,)


# --- unreceived replies -------------------------------------------------------------------------


@dataclass
class CompiledAddOne:
    """A compiled function that writes to its input."""

    inputs: list[object]
    results: list[object]

    def __call__(self, inputs: list[object]) -> list[object]:
        inputs[0].add_(1)  # type: ignore[attr-defined]
        return []


class FakeCompiler:
    def compile(
        self, steps: list[object], wanted: list[int], sizes: dict[int, int], keep_alive: Callable[[], None]
    ) -> CompiledAddOne:
        import torch

        (storage,) = sizes
        return CompiledAddOne([(storage, torch.float32, (sizes[storage] // 4,), (1,), 0)], [])


def test_unreceived_reply_is_not_changed_by_a_replay() -> None:
    with served_session(compiler=FakeCompiler()) as (session, client):
        large = client.upload((1 << 19,), bytes(1 << 21))
        number, made = client.template("aten::add_.Tensor", [large, large, 1], [AliasOutput()])
        client.send(made, graph_records(client, 1, record(RecordKind.OP, number, u32(1, 1)), mode=2))
        client.send(record(RecordKind.GET, 0, encode_view(large)))
        before = client.replies
        assert isinstance(client.receive(), Reply)
        client.replies = before  # acknowledges nothing
        client.send(record(RecordKind.GRAPH_REPLAY, 0, u32(1)))
        while client.receive_acknowledgement() < client.frames:
            pass
        client.close()
        assert session.wait_end() == "lost"
        client.pipe = session.connect(replies_received=0)
        client.replies = 0
        again = client.receive()
        assert isinstance(again, Reply)
        assert again.payload == bytes(1 << 21)
        first = client.get(Tensor(1, (1,)))
        assert first == struct.pack("<f", 1)


# --- compiled graphs ----------------------------------------------------------------------------


@dataclass
class CountingCompiler:
    compiled: int = 0

    def compile(
        self, steps: list[object], wanted: list[int], sizes: dict[int, int], keep_alive: Callable[[], None]
    ) -> CompiledAddOne:
        import torch

        self.compiled += 1
        storage = next(iter(sizes))
        return CompiledAddOne([(storage, torch.float32, (1,), (1,), 0)], [])


def _pool_gradient(client: Client) -> tuple[str, list[object], NewOutput]:
    grad, image = client.floats(1), client.upload((1, 1, 2, 2), bytes(16))
    indices = client.upload((1, 1, 1), i64(7), "int64")
    arguments = [Tensor(grad.storage, (1, 1, 1)), Tensor(image.storage, (1, 2, 2)), indices]
    return "aten::adaptive_max_pool2d_backward", arguments, NewOutput((1, 2, 2))


def _softmax_gradient(client: Client, size: int) -> tuple[str, list[object], NewOutput]:
    grad, output = client.floats(1, 2), client.floats(1, 2, 3)
    arguments = [grad, Tensor(output.storage, (size,)), 0, 6]
    return "aten::_log_softmax_backward_data", arguments, NewOutput((2,))


@pytest.mark.parametrize(
    ("step", "compiled", "reason"),
    [
        (_pool_gradient, 0, "its indices are checked at each call"),
        (lambda client: _softmax_gradient(client, 3), 0, "its shape must be [2]"),
        (lambda client: _softmax_gradient(client, 2), 1, ""),
    ],
    ids=["indices", "wrong shape", "right shape"],
)
def test_op_whose_arguments_cannot_be_checked_in_advance_is_not_compiled(
    step: Callable[[Client], tuple[str, list[object], NewOutput]], compiled: int, reason: str
) -> None:
    compiler = CountingCompiler()
    with served_session(compiler=compiler) as (session, client):
        name, arguments, output = step(client)
        number, made = client.template(name, arguments, [output])
        data = b"".join(encode_argument(argument)[1] for argument in arguments)
        result = client.new_storage()
        client.send(made, graph_records(client, 1, record(RecordKind.OP, number, data + u32(result)), mode=2))
        client.send(record(RecordKind.GRAPH_REPLAY, 0, u32(1)))
        error = client.sync()
        assert compiler.compiled == compiled
        assert reason in HostileSession(session, client).report(1)[2]
        assert (error is None) == bool(compiled)
