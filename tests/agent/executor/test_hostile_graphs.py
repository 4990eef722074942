"""A client that says of graphs what wire.h does not allow, or pulls the memory away under them.

There is no accelerator here that takes work down, so one is made up: it counts, and its work has been done
when it is asked to do it again. tests/gpu has the real one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tests.agent.executor.client import (
    Client,
    Error,
    New,
    Record,
    Reply,
    Same,
    ServedSession,
    Tensor,
    argument,
    i64,
    record,
    served_session,
    u32,
    u64,
    view,
)

# As the fixture leaves it: a storage of two floats, a template for relu of it, and graph 0, which gives Y.
X, Y = Tensor(1, (2,)), Tensor(2, (2,))
RELU, ASK = 1, 2


@dataclass
class CountingCapture:
    """Stands for the accelerator's graphs; the work is done while it is taken down."""

    kept_bytes: int = 0
    begun: int = 0
    replayed: int = 0
    abandoned: int = 0

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> tuple[object, int]:
        return object(), self.kept_bytes

    def abandon(self) -> None:
        self.abandoned += 1

    def replay(self, graph: object) -> None:
        self.replayed += 1


@dataclass
class Attacked:
    session: ServedSession
    client: Client
    capture: CountingCapture = field(default_factory=CountingCapture)

    def report(self, graph: int = 0) -> tuple[int, int, str]:
        reply = self.client.ask_for(record(Record.GRAPH_REPORT, 0, u32(graph)))
        assert isinstance(reply, Reply), reply
        how, replays, size = struct.unpack_from("<BQI", reply.payload)
        return how, replays, reply.payload[13 : 13 + size].decode()

    def replay(self, graph: int = 0) -> None:
        self.client.send(record(Record.GRAPH_REPLAY, 0, u32(graph)))


def recorded(client: Client, graph: int = 0, *inside: bytes, how: int = 1) -> bytes:
    begin = record(Record.GRAPH_BEGIN, 0, u32(graph))
    return begin + b"".join(inside) + record(Record.GRAPH_END, how)


def prepare(client: Client) -> None:
    assert client.floats(-1, 1) == X
    assert client.new_storage() == Y.storage
    (relu, first), (ask, second) = (
        client.template("aten::relu", [X], [New((2,))]),
        client.template("aten::relu", [X], None),
    )
    assert (relu, ask) == (RELU, ASK)
    client.send(first, second, recorded(client, 0, record(Record.OP, RELU, u32(1, 2))))
    assert client.sync() is None


@pytest.fixture
def attacked() -> Iterator[Attacked]:
    with served_session(memory_bytes_max=1 << 20) as (session, client):
        prepare(client)
        yield Attacked(session, client)


@pytest.fixture
def captured() -> Iterator[Attacked]:
    """As above, where work can be taken down."""
    capture = CountingCapture()
    with served_session(memory_bytes_max=1 << 20, capture=capture) as (session, client):
        prepare(client)
        yield Attacked(session, client, capture)


def ends(attacked: Attacked, said: str = "") -> None:
    farewell = attacked.client.receive()
    assert isinstance(farewell, Error)
    assert farewell.code == "transport.protocol"
    assert said in farewell.message
    attacked.client.close()
    assert attacked.session.wait_end() == "fatal"


def graph(*inside: bytes) -> bytes:
    return record(Record.GRAPH_BEGIN, 0, u32(1)) + b"".join(inside)


OUTSIDE = {
    "replaying an unknown graph": record(Record.GRAPH_REPLAY, 0, u32(7)),
    "replaying one beyond the last": record(Record.GRAPH_REPLAY, 0, u32(2**32 - 1)),
    "freeing an unknown graph": record(Record.GRAPH_FREE, 0, u32(7)),
    "freeing twice": record(Record.GRAPH_FREE, 0, u32(0)) * 2,
    "replaying a freed one": record(Record.GRAPH_FREE, 0, u32(0)) + record(Record.GRAPH_REPLAY, 0, u32(0)),
    "reporting an unknown graph": record(Record.GRAPH_REPORT, 0, u32(7)),
    "ending what was not begun": record(Record.GRAPH_END, 1),
    "a step outside of a graph": record(Record.GRAPH_STEP, RELU, u32(1, 3)),
    "a graph beyond the last": record(Record.GRAPH_BEGIN, 0, u32(4096)),
    "a graph in use": record(Record.GRAPH_BEGIN, 0, u32(0)),
    "a graph that ends strangely": graph(record(Record.GRAPH_END, 3)),
    "a replay cut short": record(Record.GRAPH_REPLAY),
}
INSIDE = {
    "another graph": record(Record.GRAPH_BEGIN, 0, u32(2)),
    "a replay": record(Record.GRAPH_REPLAY, 0, u32(0)),
    "a graph's end": record(Record.GRAPH_FREE, 0, u32(0)),
    "a report": record(Record.GRAPH_REPORT, 0, u32(0)),
    "filling": record(Record.PUT, 1, view(X) + u64(8) + bytes(8)),
    "fetching": record(Record.GET, 0, view(X)),
    "waiting": record(Record.SYNC),
    "resizing": record(Record.RESIZE, 0, u32(1) + u64(16)),
    "a seed": record(Record.SEED, 0, u32(0) + u64(1)),
    "a generator's state": record(Record.GENERATOR_STATE, 0, u32(0)),
    "setting a generator": record(Record.SET_GENERATOR, 0, u32(0, 0)),
    "freeing a generator": record(Record.FREE_GENERATOR, 0, u32(1)),
    "counters": record(Record.STATS),
    "a step that is asked": record(Record.GRAPH_STEP, ASK, u32(1)),
    "a step cut short": record(Record.GRAPH_STEP, RELU, u32(1)),
    "a step of an unknown template": record(Record.GRAPH_STEP, 99, u32(1, 3)),
    "a step of a storage beyond the last": record(Record.GRAPH_STEP, RELU, u32(2**22, 3)),
    "a step that makes one beyond the last": record(Record.GRAPH_STEP, RELU, u32(1, 2**32 - 1)),
    "a step that makes what it reads": record(Record.GRAPH_STEP, RELU, u32(1, 1)),
    "making anew what was read": record(Record.OP, RELU, u32(1, 3))
    + record(Record.FREE, 0, u32(1))
    + record(Record.ALLOCATE, 0, u32(1) + u64(8)),
}


@pytest.mark.parametrize("records", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_a_graph_record_that_is_not_allowed_ends_the_session(attacked: Attacked, records: bytes) -> None:
    attacked.client.send(records)
    ends(attacked)


@pytest.mark.parametrize("records", INSIDE.values(), ids=INSIDE.keys())
def test_what_cannot_be_part_of_a_graph_ends_the_session(attacked: Attacked, records: bytes) -> None:
    attacked.client.send(graph(records))
    ends(attacked)


def test_a_session_may_end_in_the_middle_of_a_graph(attacked: Attacked) -> None:
    attacked.client.send(graph(record(Record.OP, RELU, u32(1, 3))))
    attacked.client.send(record(Record.GOODBYE))
    assert attacked.session.wait_end() == "goodbye"


# --- bounds -------------------------------------------------------------------------------------


def test_a_graph_has_a_bound_of_steps(attacked: Attacked) -> None:
    pair = record(Record.ALLOCATE, 0, u32(3) + u64(0)) + record(Record.FREE, 0, u32(3))
    attacked.client.send(graph())
    for _ in range(2):
        attacked.client.send(pair * (1 << 16))
    attacked.client.send(pair)
    ends(attacked, "more steps than are allowed")


def test_graphs_have_a_bound_of_bytes_together(attacked: Attacked) -> None:
    client = attacked.client
    many = [X] * 65536
    number, made = client.template("aten::cat", [many, 0], [New((131072,))])
    step = record(Record.GRAPH_STEP, number, argument(many)[1] + u32(3))
    client.send(made)
    for each in range(1, 20):
        try:
            client.send(recorded(client, each, *[step] * 15))
        except OSError:
            break  # it has hung up
    ends(attacked, "the graphs hold more than is allowed")


def test_graphs_that_are_forgotten_or_freed_do_not_count(attacked: Attacked) -> None:
    client = attacked.client
    many = [X] * 65536
    number, made = client.template("aten::cat", [many, 0], [New((131072,))])
    step = record(Record.GRAPH_STEP, number, argument(many)[1] + u32(3))
    client.send(made)
    for each in range(40):
        kept = each % 2
        client.send(recorded(client, 1, *[step] * 15, how=kept))
        if kept:
            client.send(record(Record.GRAPH_FREE, 0, u32(1)))
    assert client.sync() is None


def test_graphs_begun_and_ended_without_end_leave_nothing(attacked: Attacked) -> None:
    once = recorded(attacked.client, 1) + record(Record.GRAPH_FREE, 0, u32(1))
    for _ in range(20):
        attacked.client.send(once * 5000)
    assert attacked.client.sync() is None
    assert attacked.client.stats().bytes_allocated == 16


# --- the memory under a graph -------------------------------------------------------------------


def test_a_replay_needs_what_it_reads(attacked: Attacked) -> None:
    attacked.replay()
    assert attacked.client.floats_in(Y) == (0, 1)
    attacked.client.free(X)
    attacked.replay()
    ends(attacked, "storage 1 is not known")


def test_work_taken_down_is_given_up_with_what_it_reads(captured: Attacked) -> None:
    captured.replay()
    assert captured.client.floats_in(Y) == (0, 1)
    assert captured.capture.replayed == 1
    captured.client.free(X)
    captured.replay()
    ends(captured, "storage 1 is not known")
    assert captured.capture.replayed == 1


def test_a_storage_that_was_resized_is_taken_down_again(captured: Attacked) -> None:
    client, capture = captured.client, captured.capture
    captured.replay()
    captured.replay()
    assert client.sync() is None
    assert (capture.begun, capture.replayed) == (1, 2)
    client.send(record(Record.RESIZE, 0, u32(1) + u64(64)))
    client.put(X, struct.pack("<2f", 5, -5))
    captured.replay()
    assert client.floats_in(Y) == (5, 0)
    assert (capture.begun, capture.replayed) == (2, 3)


def test_a_graph_whose_storage_was_made_smaller_fails_until_it_has_its_size_back(captured: Attacked) -> None:
    client, capture = captured.client, captured.capture
    captured.replay()
    assert client.floats_in(Y) == (0, 1)
    client.send(record(Record.RESIZE, 0, u32(1) + u64(0)))
    captured.replay()
    failure = client.sync()
    assert isinstance(failure, Error)
    assert "resized to 0 bytes and needs 8" in failure.message
    assert (failure.code, failure.op) == ("device.op_refused", "aten::relu")
    assert client.get(Y) == failure
    client.send(record(Record.RESIZE, 0, u32(1) + u64(8)))
    client.put(X, struct.pack("<2f", 5, -5))
    captured.replay()
    assert client.floats_in(Y) == (5, 0)
    assert (capture.begun, capture.replayed, capture.abandoned) == (2, 2, 0)


def test_a_tensor_beyond_all_that_its_storage_was_ends_the_session(attacked: Attacked) -> None:
    attacked.client.send(record(Record.RESIZE, 0, u32(1) + u64(0)))
    assert isinstance(attacked.client.get(X), Error)
    attacked.client.send(record(Record.GET, 0, view(Tensor(1, (3,)))))
    ends(attacked, "reaches beyond its storage")


def test_another_storage_of_the_same_number_is_taken_down_again(captured: Attacked) -> None:
    client = captured.client
    captured.replay()
    client.send(record(Record.FREE, 0, u32(1)) + record(Record.ALLOCATE, 0, u32(1) + u64(8)))
    client.put(X, struct.pack("<2f", 7, -7))
    captured.replay()
    assert client.floats_in(Y) == (7, 0)
    assert captured.capture.begun == 2


def test_results_that_the_client_changes_are_made_anew(captured: Attacked) -> None:
    client = captured.client
    captured.replay()
    client.send(record(Record.RESIZE, 0, u32(2) + u64(64)))
    captured.replay()
    assert client.floats_in(Y) == (0, 1)
    client.free(Y)
    client.send(record(Record.ALLOCATE, 0, u32(2) + u64(8)))
    client.put(Y, struct.pack("<2f", 3, 4))
    captured.replay()
    answer = client.asked("aten::relu", X)
    assert not isinstance(answer, Error)
    # The client has let the result go: it does not come back, and neither does what took its number.
    assert client.stats().storages == 2


def test_memory_that_moves_all_the_time_is_not_taken_down_for_ever(captured: Attacked) -> None:
    client = captured.client
    for size in range(20):
        client.send(record(Record.RESIZE, 0, u32(1) + u64(64 + size)))
        captured.replay()
        assert client.floats_in(Y) == (0, 1)
    assert captured.capture.begun == 8
    assert captured.report() == (0, 20, "no CUDA graph: its tensors get other memory too often")


def test_memory_that_the_accelerator_keeps_for_a_graph_counts(captured: Attacked) -> None:
    client = captured.client
    captured.capture.kept_bytes = 1 << 19
    captured.replay()
    assert client.stats().bytes_allocated == 16 + (1 << 19)
    client.send(recorded(client, 1, record(Record.OP, RELU, u32(1, 3))))
    captured.replay(1)
    assert client.sync() is None
    assert captured.report(0) == (1, 1, "")
    how, replays, why = captured.report(1)
    assert (how, replays) == (0, 1)
    assert "of this session's 1048576 bytes" in why
    client.send(record(Record.GRAPH_FREE, 0, u32(0)))
    assert client.stats().bytes_allocated == 24


# --- failures -----------------------------------------------------------------------------------


def test_a_replay_that_fails_in_the_middle_is_told_and_the_next_one_works(attacked: Attacked) -> None:
    client = attacked.client
    index = client.uploaded((1,), i64(1), "int64")
    picked, number = Tensor(10, (1,)), 11
    pick, first = client.template("aten::index_select", [X, 0, index], [New((1,))])
    neg, second = client.template("aten::neg", [picked], [New((1,))])
    client.send(first, second)
    steps = record(Record.OP, pick, u32(1, index.storage, 10)) + record(Record.OP, neg, u32(10, number))
    client.send(recorded(client, 1, steps))
    client.put(index, i64(9))
    attacked.replay(1)
    error = client.get(Tensor(number, (1,)))
    assert isinstance(error, Error)
    assert "index_select" in error.op
    client.put(index, i64(1))
    attacked.replay(1)
    assert client.floats_in(Tensor(number, (1,))) == (-1,)


def test_work_that_cannot_be_taken_down_is_told_and_done(captured: Attacked) -> None:
    client = captured.client
    index = client.uploaded((1,), i64(1), "int64")
    pick, made = client.template("aten::index_select", [X, 0, index], [New((1,))])
    client.send(made, recorded(client, 1, record(Record.OP, pick, u32(1, index.storage, 10))))
    client.put(index, i64(9))
    captured.replay(1)
    assert isinstance(client.sync(), Error)
    assert captured.capture.abandoned == 1
    how, _, why = captured.report(1)
    assert how == 0
    assert "index_select" in why
    client.put(index, i64(0))
    captured.replay(1)
    assert client.floats_in(Tensor(10, (1,))) == (-1,)


# --- replies that were not received -------------------------------------------------------------


@dataclass
class AddsOne:
    """A compiled function that writes to what it is given."""

    inputs: list[object]
    results: list[object]

    def __call__(self, given: list[object]) -> list[object]:
        given[0].add_(1)  # type: ignore[attr-defined]
        return []


class AddsOneCompiler:
    def compile(
        self, steps: list[object], wanted: list[int], sizes: dict[int, int], meanwhile: Callable[[], None]
    ) -> AddsOne:
        import torch

        (storage,) = sizes
        return AddsOne([(storage, torch.float32, (sizes[storage] // 4,), (1,), 0)], [])


def test_a_reply_that_was_not_received_does_not_change_with_a_replay() -> None:
    with served_session(compiler=AddsOneCompiler()) as (session, client):
        large = client.uploaded((1 << 19,), bytes(1 << 21))
        number, made = client.template("aten::add_.Tensor", [large, large, 1], [Same()])
        client.send(made, recorded(client, 1, record(Record.OP, number, u32(1, 1)), how=2))
        client.send(record(Record.GET, 0, view(large)))
        before = client.replies
        assert isinstance(client.receive(), Reply)
        client.replies = before  # it says that it has nothing
        client.send(record(Record.GRAPH_REPLAY, 0, u32(1)))
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
