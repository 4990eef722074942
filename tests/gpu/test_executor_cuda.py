"""The executor on a CUDA device, at protocol level: overlapping copies, faults, random numbers.

What a program sees through the torch device is test_device_cuda.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch

from genie.errors import HardwareError
from tests.executor.client import (
    DEVICE,
    UNDEFINED,
    AliasOutput,
    CallNumber,
    Client,
    DynamicResult,
    ErrorReply,
    Generator,
    NewOutput,
    RecordKind,
    Reply,
    Tensor,
    encode_view,
    frame,
    handshake,
    open_pipe,
    record,
    u32,
    u64,
)
from tests.executor.process import TICKET, ExecutorProcess, running_executor

MIB = 1024 * 1024
GIB = 1024 * MIB
FLOAT32, INT64 = 6, 4


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that can use the NVIDIA GPU")
    folder = tmp_path_factory.mktemp("cuda") / "executor"
    with running_executor(folder, vendor="nvidia", memory_bytes_max=4 * GIB, spin_us=50) as executor:
        yield executor


class ConnectedClient:
    """The client of the executor, with reconnect."""

    def __init__(self, port: int) -> None:
        self.port = port
        pipe = open_pipe(port)
        self.opened = handshake(pipe, TICKET)
        self.client = Client(pipe)

    def reconnect(self) -> None:
        pipe = open_pipe(self.port)
        client = self.client
        again = handshake(pipe, TICKET, session_key=self.opened.session_key, replies_received=client.replies)
        client.pipe = pipe
        for data in client.sent[again.frames_received :]:
            client.write(data)


@pytest.fixture(scope="module")
def connected_client(executor: ExecutorProcess) -> Iterator[ConnectedClient]:
    connected = ConnectedClient(executor.port)
    assert connected.opened.kind == "cuda"
    yield connected
    connected.client.close()


@pytest.fixture
def client(connected_client: ConnectedClient) -> Iterator[Client]:
    yield connected_client.client
    connected_client.client.sent.clear()


def zeros(client: Client, *shape: int) -> Tensor:
    return client.op_output(
        "aten::zeros", list(shape), FLOAT32, None, DEVICE, None, outputs=[NewOutput(shape)]
    )


def test_ops_are_pipelined_with_uploads(client: Client) -> None:
    total = zeros(client, 1000)
    part = client.allocate((1000,))
    for step in range(200):
        client.put(part, struct.pack("<f", step) * 1000)
        client.op("aten::add_.Tensor", total, part, CallNumber(1), outputs=[AliasOutput()])
    assert client.floats_in(total) == (float(sum(range(200))),) * 1000


@pytest.mark.parametrize("turned", [False, True], ids=["straight", "by way of another"])
def test_large_tensors_round_trip(client: Client, turned: bool) -> None:
    shape = (4096, 5000)
    data = torch.arange(4096 * 5000, dtype=torch.int32).numpy().tobytes()
    target = client.allocate(shape, "int32")
    if turned:
        target = Tensor(target.storage, shape, "int32", strides=(1, 4096))
    client.send(record(RecordKind.PUT, 0, encode_view(target) + u64(len(data))))
    client.send_bytes(data, part=3 * MIB + 4)
    assert client.get(target) == data
    client.free(target)


@pytest.mark.leaks_allowed("the connection of the whole module is replaced by another")
def test_large_reply_is_resent_unchanged(connected_client: ConnectedClient, client: Client) -> None:
    size = 8 * MIB
    made = client.op_output(
        "aten::full", [size], 7.0, FLOAT32, None, DEVICE, None, outputs=[NewOutput((size,))]
    )
    client.sync()
    client.sent = [b""] * client.frames
    client.send(record(RecordKind.GET, 0, encode_view(made)))
    client.pipe.read_exactly(1000, 10.0)
    number, template = client.template("aten::zero_", [made], [AliasOutput()])
    client.frames += 1
    blind = frame(client.frames, template + record(RecordKind.OP, number, u32(made.storage)))
    client.sent.append(blind)
    client.write(blind)
    client.close()
    connected_client.reconnect()
    reply = client.receive()
    assert isinstance(reply, Reply)
    assert reply.payload == struct.pack("<f", 7.0) * size
    data = client.get(made)
    assert isinstance(data, bytes)
    assert data == bytes(4 * size)
    client.free(made)


@pytest.mark.leaks_allowed("the connection of the whole module is replaced by another")
@pytest.mark.parametrize("freed", [False, True], ids=["kept", "freed"])
def test_large_reply_is_not_changed_by_a_replay(
    connected_client: ConnectedClient, client: Client, freed: bool
) -> None:
    """A CUDA graph writes its results to the same memory each time, even after the client has freed them."""
    size, graph = 8 * MIB, 3
    x = client.op_output("aten::full", [size], 7.0, FLOAT32, None, DEVICE, None, outputs=[NewOutput((size,))])
    y = Tensor(client.new_storage(), (size,))
    negate, first = client.template("aten::neg", [x], [NewOutput((size,))])
    zero, second = client.template("aten::zero_", [x], [AliasOutput()])
    begin, replay = (
        record(RecordKind.GRAPH_BEGIN, 0, u32(graph)),
        record(RecordKind.GRAPH_REPLAY, 0, u32(graph)),
    )
    step = record(RecordKind.OP, negate, u32(x.storage, y.storage))
    client.send(first, second, begin, step, record(RecordKind.GRAPH_END, 1), replay, replay)
    report = client.request(record(RecordKind.GRAPH_REPORT, 0, u32(graph)))
    assert isinstance(report, Reply)
    assert report.payload[0] == 1  # a CUDA graph
    client.sent = [b""] * client.frames
    client.send(record(RecordKind.GET, 0, encode_view(y)))
    client.pipe.read_exactly(1000, 10.0)
    letting_go = record(RecordKind.FREE, 0, u32(y.storage)) if freed else b""
    client.frames += 1
    blind = frame(client.frames, letting_go + record(RecordKind.OP, zero, u32(x.storage)) + replay)
    client.sent.append(blind)
    client.write(blind)
    client.close()
    connected_client.reconnect()
    reply = client.receive()
    assert isinstance(reply, Reply)
    assert reply.payload == struct.pack("<f", -7.0) * size
    if not freed:
        assert client.floats_in(Tensor(y.storage, (1,))) == (0.0,)
        client.free(y)
    client.send(record(RecordKind.GRAPH_FREE, 0, u32(graph)))
    client.free(x)
    assert client.sync() is None


def test_seed_matches_local_cuda(client: Client) -> None:
    for generator in (0, 5):
        client.send(record(RecordKind.SEED, 0, u32(generator) + u64(9)))
        made = client.op_output(
            "aten::randn.generator", [1000], Generator(generator), FLOAT32, None, DEVICE, None,
            outputs=[NewOutput((1000,))],
        )  # fmt: skip
        local = torch.Generator("cuda").manual_seed(9)
        expected = torch.randn(1000, device="cuda", generator=local).cpu()
        assert client.floats_in(made) == tuple(expected.tolist())
    state = client.request(record(RecordKind.GENERATOR_STATE, 0, u32(5)))
    assert isinstance(state, Reply)
    client.send(record(RecordKind.SET_GENERATOR, 0, u32(6, len(state.payload)) + state.payload))
    again = client.request(record(RecordKind.GENERATOR_STATE, 0, u32(6)))
    assert isinstance(again, Reply)
    assert again.payload == state.payload


def test_cpu_outputs_of_an_op_stay_on_the_cpu(client: Client) -> None:
    """The dropout seed of attention: its backward reads it from host memory."""
    shape = (1, 2, 16, 32)
    query = client.op_output(
        "aten::randn", list(shape), FLOAT32, None, DEVICE, None, outputs=[NewOutput(shape)]
    )
    forward = client.run_dynamic(
        "aten::_scaled_dot_product_efficient_attention", query, query, query, None, True, 0.5, False, None
    )
    assert isinstance(forward, DynamicResult), forward
    out, sums, seed, offset = forward.values
    backward = client.run_dynamic(
        "aten::_scaled_dot_product_efficient_attention_backward",
        query, query, query, query, UNDEFINED, out, sums, seed, offset, 0.5, [True, True, True, False], False,
        None,
    )  # fmt: skip
    assert isinstance(backward, DynamicResult), backward
    assert [value.shape if value else None for value in backward.values] == [shape, shape, shape, None]
    assert isinstance(client.get(seed), bytes)
    assert client.sync() is None


def test_exceeding_quota_or_device_memory_is_an_error(client: Client) -> None:
    before = client.stats().bytes_allocated
    for size in (2 * GIB, 2**45):
        error = client.run_refused("aten::empty.memory_format", [size], FLOAT32, None, DEVICE, None, None)
        assert error.code == "device.out_of_memory"
    row = zeros(client, 60_000)
    error = client.run_refused("aten::mul.Tensor", row, Tensor(row.storage, (60_000, 1)))
    assert error.code == "device.out_of_memory"
    client.free(row)
    assert client.sync() is None
    assert client.stats().bytes_allocated == before


def test_device_fault_ends_the_executor_with_a_clear_error(executor: ExecutorProcess, client: Client) -> None:
    """Runs last: a device fault ends the executor process."""
    source = zeros(client, 4)
    index = client.upload((1,), struct.pack("<q", 99), "int64")
    client.op("aten::index.Tensor", source, [index], outputs=[NewOutput((1,))])
    client.send(record(RecordKind.SYNC))
    while client.fatal_error is None:
        assert isinstance(client.receive(), ErrorReply)
    assert "CUDA" in client.fatal_error.message or "device" in client.fatal_error.message
    client.close()
    assert executor.wait_end() == HardwareError.exit_code, executor.output()
