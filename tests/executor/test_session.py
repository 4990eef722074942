"""The session of one client: ops, memory, generators, failures and the quota."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import pytest
import torch

from tests.executor.client import (
    CONJUGATE,
    DEVICE,
    FRAME_BYTES_MAX,
    NEGATIVE,
    UNDEFINED,
    AliasOutput,
    CallNumber,
    Client,
    DynamicResult,
    ErrorReply,
    Generator,
    NewOutput,
    RawBytes,
    RecordKind,
    Reply,
    Scalar,
    Tensor,
    Value,
    encode_view,
    record,
    served_session,
    u32,
    u64,
)

MIB = 1024 * 1024
FLOAT32, INT64, COMPLEX64 = 6, 4, 9
OUT_OF_MEMORY, REFUSED, REMOTE_OP = "device.out_of_memory", "device.op_refused", "device.remote_op"


@pytest.fixture
def client() -> Iterator[Client]:
    with served_session() as (_, client):
        yield client


@pytest.fixture
def client_with_quota() -> Iterator[Client]:
    """A quota of 1 MiB of tensors, without a limit on the process."""
    with served_session(memory_bytes_max=MIB) as (_, client):
        yield client


def zeros(client: Client, *shape: int) -> Tensor:
    return client.op_output(
        "aten::zeros", list(shape), FLOAT32, None, DEVICE, None, outputs=[NewOutput(shape)]
    )


def fill_tensor(client: Client, tensor: Tensor, value: float) -> None:
    client.op("aten::fill_.Scalar", tensor, value, outputs=[AliasOutput()])


def output_of_failed_op(client: Client, wrong: Tensor) -> Tensor:
    """Return the output of an op that fails: its argument is not a matrix."""
    return client.op_output("aten::mm", wrong, wrong, outputs=[NewOutput((2, 2))])


# --- ops with predicted outputs -----------------------------------------------------------------


def test_op_runs_and_its_result_can_be_read(client: Client) -> None:
    made = client.op_output(
        "aten::add.Tensor", client.floats(1, 2), client.floats(10, 20), 2, outputs=[NewOutput((2,))]
    )
    assert client.floats_in(made) == (21.0, 42.0)


def test_template_is_used_for_several_calls(client: Client) -> None:
    one, other = client.floats(1, 2), client.floats(3, 4)
    number, made = client.template("aten::add.Scalar", [one, CallNumber(1.0), 1], [NewOutput((2,))])
    client.send(made)
    for source, value, expected in ((one, 5.0, (6, 7)), (other, 0.5, (3.5, 4.5))):
        storage = client.new_storage()
        data = u32(source.storage) + struct.pack("<d", value) + u32(storage)
        client.send(record(RecordKind.OP, number, data))
        assert client.floats_in(Tensor(storage, (2,))) == expected
    client.send(record(RecordKind.DROP_TEMPLATE, number))
    client.send(client.template("aten::relu", [one], [NewOutput((2,))])[1])


def test_argument_may_be_any_view_of_a_storage(client: Client) -> None:
    base = client.floats(0, 1, 2, 3, 4, 5)
    column = Tensor(base.storage, (2,), strides=(3,), offset=1)
    fill_tensor(client, column, 7.0)
    assert client.floats_in(base) == (0, 7, 2, 3, 7, 5)
    for offset in range(5):  # more views than are cached
        fill_tensor(client, Tensor(base.storage, (1,), offset=offset), float(offset))
    assert client.floats_in(base) == (0, 1, 2, 3, 4, 5)
    assert client.floats_in(Tensor(base.storage, (3, 2), strides=(1, 3))) == (0, 3, 1, 4, 2, 5)
    assert client.stats().bytes_allocated == 24


@pytest.mark.parametrize(("value", "dtype"), [(3.0, "float64"), (3, "int64")], ids=["float", "integer"])
def test_scalar_may_be_passed_as_a_tensor(client: Client, value: float, dtype: str) -> None:
    scalar = Scalar(struct.pack("<d" if dtype == "float64" else "<q", value), dtype)
    made = client.op_output("aten::mul.Tensor", client.floats(1, 2), scalar, outputs=[NewOutput((2,))])
    assert client.floats_in(made) == (3.0, 6.0)


def test_returned_scalar_is_not_overwritten_by_the_next_call(client: Client) -> None:
    number, made = client.template("aten::lift_fresh_copy", [Scalar(b"", "float32")], [NewOutput(())])
    client.send(made)
    storages = [client.new_storage() for _ in range(2)]
    for storage, value in zip(storages, (1.0, 2.0), strict=True):
        data = struct.pack("<f", value).ljust(16, b"\0")
        client.send(record(RecordKind.OP, number, data + u32(storage)))
    assert [client.floats_in(Tensor(storage)) for storage in storages] == [(1.0,), (2.0,)]


def test_arguments_and_outputs_may_be_lists_of_tensors(client: Client) -> None:
    parts = [client.floats(1, 2), client.floats(3)]
    joined = client.op_output("aten::cat", parts, 0, outputs=[NewOutput((3,))])
    assert client.floats_in(joined) == (1, 2, 3)
    added = client.op("aten::_foreach_add.Scalar", parts, 1.0, outputs=[[NewOutput((2,)), NewOutput((1,))]])
    assert [client.floats_in(tensor) for tensor in added] == [(2, 3), (4,)]
    client.op("aten::_foreach_mul_.Scalar", parts, 10.0)
    assert client.floats_in(parts[1]) == (30,)


def test_optional_tensors_and_outputs_may_be_none(client: Client) -> None:
    image, weight = zeros(client, 1, 1, 4, 4), zeros(client, 1, 1, 2, 2)
    fill_tensor(client, image, 1.0)
    grad = zeros(client, 1, 1, 3, 3)
    (made,) = client.op(
        "aten::convolution_backward", grad, image, weight,
        [1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False],
        outputs=[None, NewOutput((1, 1, 2, 2)), None],
    )  # fmt: skip
    assert client.floats_in(made) == (0, 0, 0, 0)
    out = client.op_output(
        "aten::convolution", image, weight, UNDEFINED, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
        outputs=[NewOutput((1, 1, 3, 3))],
    )  # fmt: skip
    rows, index = client.upload((1, 2), struct.pack("<2f", 5, 6)), client.upload((1,), bytes(8), "int64")
    picked = client.op_output("aten::index.Tensor", rows, [None, index], outputs=[NewOutput((1, 1))])
    assert client.floats_in(picked) == (5,)
    assert client.floats_in(out) == (0,) * 9
    assert client.sync() is None


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten::select.int", [0, 1]),
        ("aten::slice.Tensor", [0, 2, 4, 1]),
        ("aten::contiguous", [0]),
        ("aten::detach", []),
    ],
    ids=["offset", "slice", "itself", "alias"],
)
def test_output_that_is_a_view_is_copied(client: Client, op: str, args: list[Value]) -> None:
    base = client.floats(1, 2, 3, 4)
    shape = {"aten::select.int": (), "aten::slice.Tensor": (2,)}.get(op, (4,))
    made = client.op_output(op, base, *args, outputs=[NewOutput(shape)])
    before = client.floats_in(made)
    fill_tensor(client, base, 9.0)
    assert client.floats_in(made) == before
    assert client.stats().bytes_allocated == 16 + 4 * math.prod(shape)


def test_output_gets_the_predicted_strides(client: Client) -> None:
    source = client.upload((2, 2), struct.pack("<4f", 1, 2, 3, 4))
    made = client.op_output("aten::relu", source, outputs=[NewOutput((2, 2), strides=(1, 2))])
    assert made.strides == (1, 2)
    assert client.floats_in(Tensor(made.storage, (4,))) == (1, 3, 2, 4)


def test_lazy_conjugation_of_outputs_is_resolved(client: Client) -> None:
    source = client.upload((1,), struct.pack("<2f", 1, 2), "complex64")
    made = client.op_output("aten::_conj", source, outputs=[NewOutput((1,), "complex64")])
    assert client.get(made) == struct.pack("<2f", 1, -2)


def test_argument_may_be_lazily_conjugated_or_negated(client: Client) -> None:
    source = client.upload((1,), struct.pack("<2f", 1, 2), "complex64")
    lazy = Tensor(source.storage, (1,), "complex64", flags=CONJUGATE)
    assert client.get(lazy) == struct.pack("<2f", 1, -2)
    made = client.op_output("aten::mul.Tensor", lazy, lazy, outputs=[NewOutput((1,), "complex64")])
    assert client.get(made) == struct.pack("<2f", -3, -4)
    client.put(lazy, struct.pack("<2f", 5, 6))
    assert client.get(source) == struct.pack("<2f", 5, -6)
    negative = Tensor(source.storage, (2,), flags=NEGATIVE)
    assert client.floats_in(negative) == (-5, 6)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([NewOutput((3,))], "predicted Float [3], got Float [2]"),
        ([NewOutput((2,), "float64")], "predicted Double [2], got Float [2]"),
        ([NewOutput((2, 1))], "predicted Float [2, 1]"),
        ([None], "predicted nothing"),
        ([AliasOutput()], "predicted an input tensor"),
        ([[NewOutput((2,))]], "predicted a list"),
        ([5], "predicted 5"),
    ],
)
def test_wrongly_predicted_output_is_an_error(client: Client, outputs: list[Value], message: str) -> None:
    client.op("aten::relu", client.floats(1, 2), outputs=outputs)
    error = client.sync()
    assert error is not None
    assert (error.code, error.op) == (REMOTE_OP, "aten::relu")
    assert message in error.message
    assert client.sync() is None


def test_missing_predicted_output_is_an_error(client: Client) -> None:
    source = client.floats(1, 2)
    grad = client.floats(1, 2)
    client.op(
        "aten::native_layer_norm_backward", grad, source, [2], client.floats(0), client.floats(1),
        None, None, [True, False, False], outputs=[NewOutput((2,)), NewOutput((2,)), None],
    )  # fmt: skip
    error = client.sync()
    assert error is not None
    assert "predicted a tensor, got none" in error.message


def test_wrong_predicted_list_length_is_an_error(client: Client) -> None:
    client.op("aten::_foreach_neg", [client.floats(1)], outputs=[[NewOutput((1,)), NewOutput((1,))]])
    error = client.sync()
    assert error is not None
    assert "predicted 2 items, got 1" in error.message


# --- dynamic ops --------------------------------------------------------------------------------


def test_dynamic_op_returns_outputs_of_data_dependent_shape(client: Client) -> None:
    answer = client.run_dynamic("aten::nonzero", client.floats(0, 1, 2))
    assert isinstance(answer, DynamicResult)
    (made,) = answer.values
    assert (made.dtype, made.shape) == ("int64", (2, 1))
    assert client.get(made) == struct.pack("<2q", 1, 2)
    assert client.stats().bytes_allocated == 12 + 16


def test_dynamic_op_keeps_the_structure_of_its_outputs(client: Client) -> None:
    source = client.floats(3, 1, 2)
    several = client.run_dynamic("aten::max.dim", source, 0, False)
    assert isinstance(several, DynamicResult)
    assert [value.dtype for value in several.values] == ["float32", "int64"]
    listed = client.run_dynamic("aten::split.Tensor", source, 2, 0)
    assert isinstance(listed, DynamicResult)
    ((first, second),) = listed.values
    assert (first.shape, second.shape) == ((2,), (1,))
    fill_tensor(client, source, 0.0)
    assert client.floats_in(first) == (3, 1), "a view becomes a tensor of its own"


def test_dynamic_op_reports_an_alias_of_its_input(client: Client) -> None:
    one, other = client.floats(1), client.floats(2)
    answer = client.run_dynamic("aten::add_.Tensor", other, one, 1)
    assert answer == DynamicResult([AliasOutput(0)], [])
    assert client.run_dynamic("aten::add.out", one, one, 1, other) == DynamicResult([AliasOutput(2)], [])
    assert client.floats_in(other) == (2,)


@pytest.mark.parametrize("value", [True, 2**63 - 1, -(2**63), 1.5, math.inf, complex(1, -2)])
def test_dynamic_op_returns_a_number_unchanged(client: Client, value: bool | int | float | complex) -> None:
    dtype = {bool: 11, int: 4, float: 7, complex: 10}[type(value)]
    made = client.run_dynamic("aten::scalar_tensor", value, dtype, None, DEVICE, None)
    assert isinstance(made, DynamicResult)
    answer = client.run_dynamic("aten::_local_scalar_dense", made.values[0])
    assert isinstance(answer, DynamicResult)
    assert answer.values == [value]
    assert type(answer.values[0]) is type(value)


def test_dynamic_op_reports_resized_input(client: Client) -> None:
    made = client.upload((2, 3), bytes(24))
    answer = client.run_dynamic("aten::t_", made)
    assert isinstance(answer, DynamicResult)
    (change,) = answer.changed
    assert (change.index, change.shape, change.strides, change.storage_bytes) == (0, (3, 2), (1, 3), 24)
    grown = client.run_dynamic("aten::resize_", made, [4, 4], None)
    assert isinstance(grown, DynamicResult)
    assert [(c.shape, c.storage_bytes) for c in grown.changed] == [((4, 4), 64)]
    assert client.stats().bytes_allocated == 64
    assert len(client.floats_in(Tensor(made.storage, (16,)))) == 16


def test_tensor_cannot_adopt_the_memory_of_another(client: Client) -> None:
    small, large = client.floats(1, 2), client.floats(*range(100))
    error = client.run_refused("aten::set_.source_Tensor", small, large)
    assert (error.code, "memory of another" in error.message) == (REFUSED, True)
    fill_tensor(client, small, 3.0)
    assert client.floats_in(small) == (3, 3)
    assert client.floats_in(large) == tuple(range(100))


def test_unbound_outputs_count_towards_the_quota(client_with_quota: Client) -> None:
    source = client_with_quota.upload((50_000,), bytes(200_000))
    number, made = client_with_quota.template("aten::clone", [source, None], None)
    client_with_quota.send(made)
    replies = [
        client_with_quota.request(record(RecordKind.DYNAMIC_OP, number, u32(source.storage)))
        for _ in range(5)
    ]
    assert [isinstance(reply, Reply) for reply in replies] == [True] * 4 + [False]
    assert client_with_quota.stats().bytes_allocated == 1_000_000
    assert isinstance(replies[0], Reply)
    storage = client_with_quota.new_storage()
    client_with_quota.send(record(RecordKind.BIND_OUTPUTS, 1, u64(replies[0].number) + u32(storage)))
    client_with_quota.free(Tensor(storage))
    assert client_with_quota.stats().bytes_allocated == 800_000


# --- uploads and downloads ----------------------------------------------------------------------


def test_upload_into_a_view_writes_only_the_view(client: Client) -> None:
    base = client.floats(0, 0, 0, 0)
    column = Tensor(base.storage, (2,), strides=(2,), offset=1)
    client.put(column, struct.pack("<2f", 5, 6))
    assert client.floats_in(base) == (0, 5, 0, 6)


@pytest.mark.parametrize("turned", [False, True], ids=["straight", "by way of another"])
def test_large_upload_in_bytes_frames_is_complete(client: Client, turned: bool) -> None:
    shape = (1024, 1600)
    data = bytes(range(256)) * (1024 * 1600 * 4 // 256)
    target = client.allocate(shape)
    if turned:
        target = Tensor(target.storage, shape, strides=(1, 1024))
    client.send(record(RecordKind.PUT, 0, encode_view(target) + u64(len(data))))
    client.send_bytes(data, part=FRAME_BYTES_MAX - 12345)
    assert client.get(target) == data
    assert client.stats().storages == 1


def test_empty_tensor_can_be_uploaded(client: Client) -> None:
    empty = client.allocate((0, 3))
    client.send(record(RecordKind.PUT, 0, encode_view(empty) + u64(0)))
    client.put(empty, b"")
    assert client.get(empty) == b""


def test_large_tensor_is_read_completely(client: Client) -> None:
    made = client.op_output(
        "aten::arange", 2 * MIB, INT64, None, DEVICE, None, outputs=[NewOutput((2 * MIB,), "int64")]
    )
    data = client.get(made)
    assert isinstance(data, bytes)
    assert data == torch.arange(2 * MIB).numpy().tobytes()


def test_resize_keeps_contents_up_to_the_smaller_size(client: Client) -> None:
    made = client.floats(1, 2, 3)
    client.send(record(RecordKind.RESIZE, 0, u32(made.storage) + u64(4000)))
    assert client.floats_in(made) == (1, 2, 3)
    assert client.stats().bytes_allocated == 4000
    client.send(record(RecordKind.RESIZE, 0, u32(made.storage) + u64(8)))
    assert client.floats_in(Tensor(made.storage, (2,))) == (1, 2)
    assert client.stats().bytes_allocated == 8


# --- random numbers -----------------------------------------------------------------------------


def draw_normal(client: Client, generator: Value) -> tuple[float, ...]:
    made = client.op_output(
        "aten::randn.generator", [100], generator, FLOAT32, None, DEVICE, None, outputs=[NewOutput((100,))]
    )
    return client.floats_in(made)


def expected_normal(seed: int) -> tuple[float, ...]:
    return tuple(torch.randn(100, generator=torch.Generator().manual_seed(seed)).tolist())


def generator_state(client: Client, generator: int) -> bytes:
    reply = client.request(record(RecordKind.GENERATOR_STATE, 0, u32(generator)))
    assert isinstance(reply, Reply)
    return reply.payload


def test_seed_gives_the_random_numbers_of_torch(client: Client) -> None:
    client.send(record(RecordKind.SEED, 0, u32(0) + u64(11)))
    state = generator_state(client, 0)
    made = draw_normal(client, None)
    client.send(record(RecordKind.SET_GENERATOR, 0, u32(0, len(state)) + state))
    assert made == draw_normal(client, None) == expected_normal(11)


def test_generators_are_independent(client: Client) -> None:
    client.send(record(RecordKind.SEED, 0, u32(0) + u64(1)), record(RecordKind.SEED, 0, u32(7) + u64(2)))
    assert draw_normal(client, Generator(7)) == expected_normal(2)
    assert draw_normal(client, Generator(0)) == expected_normal(1)
    client.send(record(RecordKind.FREE_GENERATOR, 0, u32(7)))
    default_seed = torch.Generator().initial_seed()
    assert draw_normal(client, Generator(7)) == expected_normal(default_seed), "a new one"


def test_invalid_generator_state_is_an_error(client: Client) -> None:
    before = generator_state(client, 3)
    client.send(record(RecordKind.SET_GENERATOR, 0, u32(3, 5) + b"short"))
    assert client.sync() is not None
    assert generator_state(client, 3) == before


# --- statistics ---------------------------------------------------------------------------------


def test_stats_count_freed_memory_and_keep_the_peak(client: Client) -> None:
    made = [zeros(client, MIB) for _ in range(2)]
    client.free(*made)
    stats = client.stats()
    assert (stats.storages, stats.bytes_allocated, stats.bytes_allocated_peak) == (0, 0, 8 * MIB)
    assert (stats.bytes_max, stats.ops) == (0, 2)


# --- refused ops and arguments ------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        "aten::from_file",
        "aten::save",
        "aten::_pin_memory",
        "aten::pin_memory",
        "aten::_print",
        "aten::record_stream",
        "aten::set_.source_Storage",
        "aten::to_sparse",
        "aten::requires_grad_",
        "aten::quantized_lstm.input",
        "aten::_to_cpu",
        "aten::__class__",
        "aten::no_such_op",
        "aten::add.NoSuchOverload",
        "prim::device",
        "add.Tensor",
        "",
    ],
)
def test_op_that_is_not_allowed_is_refused_by_name(client: Client, op: str) -> None:
    error = client.run_refused(op, "/etc/passwd")
    assert (error.code, error.op) == (REFUSED, op)
    assert op in error.message
    assert client.stats().storages == 0


X = Tensor(1, (2,))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten::relu", ["text"]),
        ("aten::relu", [DEVICE]),
        ("aten::relu", [None]),
        ("aten::relu", [1.0]),
        ("aten::relu", [[X]]),
        ("aten::relu", [Generator(0)]),
        ("aten::relu", []),
        ("aten::relu", [X, X]),
        ("aten::relu_", [Scalar(b"")]),
        ("aten::_foreach_neg_", [[X, Scalar(b"")]]),
        ("aten::cat", [X, 0]),
        ("aten::cat", [[X, 1], 0]),
        ("aten::cat", [[X, None], 0]),
        ("aten::add.Scalar", [X, X, 1]),
        ("aten::add.Scalar", [X, "1", 1]),
        ("aten::softmax.int", [X, 0.5, None]),
        ("aten::softmax.int", [X, CallNumber(0.5), None]),
        ("aten::empty.memory_format", [[2], 12, None, DEVICE, None, None]),
        ("aten::empty.memory_format", [[2], 1000, None, DEVICE, None, None]),
        ("aten::empty.memory_format", [[2], -1, None, DEVICE, None, None]),
        ("aten::empty.memory_format", [[2], CallNumber(6), None, DEVICE, None, None]),
        ("aten::empty.memory_format", [[2], None, 5, DEVICE, None, None]),
        ("aten::empty.memory_format", [[2], None, None, "cuda:0", None, None]),
        ("aten::empty.memory_format", [[2], None, None, DEVICE, None, 9]),
        ("aten::empty.memory_format", [[2], None, None, DEVICE, 1, None]),
        ("aten::empty.memory_format", [[2.5], None, None, DEVICE, None, None]),
        ("aten::empty.memory_format", [["2"], None, None, DEVICE, None, None]),
        ("aten::empty.memory_format", [2, None, None, DEVICE, None, None]),
        ("aten::randn.generator", [[2], 1, None, None, DEVICE, None]),
    ],
)
def test_argument_of_wrong_kind_is_refused(client: Client, op: str, args: list[Value]) -> None:
    assert client.floats(-1, 1) == X
    error = client.run_refused(op, *args)
    assert (error.code, error.op) == (REFUSED, op), error
    assert client.floats_in(client.op_output("aten::relu", X, outputs=[NewOutput((2,))])) == (0, 1)


def test_prediction_with_too_few_outputs_is_refused(client: Client) -> None:
    client.op("aten::max.dim", client.floats(1, 2), 0, False, outputs=[NewOutput(())])
    error = client.sync()
    assert error is not None
    assert (error.code, "returns 2 values" in error.message) == (REFUSED, True)


# --- failures -----------------------------------------------------------------------------------


def test_failed_op_reports_op_and_message(client: Client) -> None:
    made = zeros(client, 2, 3)
    error = client.run_refused("aten::mm", made, client.floats(1))
    assert (error.code, error.op, error.number) == (REMOTE_OP, "aten::mm", 2)
    assert "matri" in error.message


@pytest.mark.parametrize(
    ("op", "args", "code"),
    [
        ("aten::select.int", [X, 0, 99], "remote.IndexError"),
        ("aten::softmax.int", [X, 7, None], "remote.IndexError"),
        ("aten::linalg_inv_ex", [Tensor(1, (1, 2)), False], REMOTE_OP),
        ("aten::linalg_inv", [Tensor(2, (1, 1))], "remote.LinAlgError"),
        ("aten::_cudnn_init_dropout_state", [0.5, True, 1, 6, None, DEVICE, None],
         "remote.NotImplementedError"),
    ],
)  # fmt: skip
def test_failure_has_the_error_code_of_its_exception(
    client: Client, op: str, args: list[Value], code: str
) -> None:
    client.floats(-1, 1)
    client.floats(0)
    assert client.run_refused(op, *args).code == code


def test_first_failure_is_reported_once_with_the_next_reply(client: Client) -> None:
    good = client.floats(1, 2)
    first, second = output_of_failed_op(client, good), output_of_failed_op(client, good)
    error = client.get(good)
    assert isinstance(error, ErrorReply)
    assert (error.op, error.number) == ("aten::mm", 1)
    assert client.floats_in(good) == (1, 2), "the session continues"
    assert client.sync() is None
    for poisoned, number in ((first, 1), (second, 2)):
        again = client.get(poisoned)
        assert isinstance(again, ErrorReply)
        assert (again.code, again.number) == (error.code, number)


def test_output_of_an_op_with_poisoned_input_is_poisoned(client: Client) -> None:
    poisoned = output_of_failed_op(client, client.floats(1, 2))
    assert client.sync() is not None
    further = client.op_output("aten::relu", poisoned, outputs=[NewOutput((2, 2))])
    assert client.sync() is None, "nothing new has failed"
    error = client.get(client.op_output("aten::cat", [further, further], 0, outputs=[NewOutput((4, 2))]))
    assert isinstance(error, ErrorReply)
    assert (error.op, error.number) == ("aten::mm", 1)
    asked = client.run_refused("aten::nonzero", further)
    assert (asked.op, asked.number) == ("aten::mm", 1)
    client.put(poisoned, bytes(16))
    client.free(poisoned, further)
    assert client.sync() is None


@pytest.mark.parametrize("op", ["aten::add_.Tensor", "aten::mul.out"])
def test_unwritten_tensor_is_reported_when_an_input_is_poisoned(client: Client, op: str) -> None:
    poisoned = output_of_failed_op(client, client.floats(1, 2))
    assert client.sync() is not None
    healthy = zeros(client, 2, 2)
    args = [healthy, poisoned, 1] if op == "aten::add_.Tensor" else [poisoned, poisoned, healthy]
    client.op(op, *args, outputs=[AliasOutput(0 if op == "aten::add_.Tensor" else 2)])
    error = client.sync()
    assert error is not None, "it keeps old values, which must be reported"
    assert error.op == "aten::mm"
    assert client.floats_in(healthy) == (0, 0, 0, 0)


def test_dynamic_op_after_a_failure_is_skipped(client: Client) -> None:
    good = client.floats(1, 2)
    output_of_failed_op(client, good)
    error = client.run_refused("aten::zero_", good)
    assert (error.op, error.number) == ("aten::mm", 1)
    assert client.floats_in(good) == (1, 2)
    assert client.stats().ops == 2, "it has its number nevertheless"


def test_failure_of_a_dynamic_op_is_its_reply(client: Client) -> None:
    good = client.floats(1, 2)
    assert client.run_refused("aten::mm", good, good).number == 1
    assert client.sync() is None


def test_failed_op_restores_the_size_of_its_inputs(client: Client) -> None:
    source, target = client.floats(*range(10)), client.floats(*range(10))
    beyond = client.op_output(
        "aten::full", [1000], 99, INT64, None, DEVICE, None, outputs=[NewOutput((1000,), "int64")]
    )
    before = client.stats().bytes_allocated
    client.run_refused("aten::index_select.out", source, 0, beyond, target)
    client.op("aten::index_select.out", source, 0, beyond, target, outputs=[AliasOutput(2)])
    assert client.sync() is not None
    assert client.floats_in(target) is not None
    assert client.stats().bytes_allocated == before


def test_op_with_predicted_outputs_cannot_resize_inputs(client: Client) -> None:
    wide, target = client.floats(1, 2, 3, 4), client.floats(7)
    client.op("aten::add.out", wide, wide, 1, target, outputs=[AliasOutput(2)])
    error = client.sync()
    assert error is not None
    assert "predicted Float [1] to be unchanged" in error.message
    assert client.stats().bytes_allocated == 20
    fill_tensor(client, target, 5.0)
    assert client.floats_in(target) == (5,)


def test_error_message_is_valid_utf8(client: Client) -> None:
    source, index = client.floats(1), client.upload((1,), bytes(8), "int64")
    for reduce, shown in (
        ("\u00e4" * 2040, "\u00e4" * 1000),
        (RawBytes(b"\x08" + u32(3) + b"a\xffb"), "a?b"),
    ):
        error = client.run_refused("aten::scatter_reduce.two", source, 0, index, source, reduce, True)
        assert shown in error.message
        assert len(error.message.encode()) <= 4000
    assert client.run_refused("aten::\u00e4", 1).code == REFUSED


# --- the quota ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "size"),
    [("aten::empty.memory_format", [2**50]), ("aten::zeros", [2**30, 2**30]), ("aten::full", [MIB])],
)
def test_quota_is_checked_before_allocation(client_with_quota: Client, op: str, size: list[int]) -> None:
    tail = [FLOAT32, None, DEVICE, None, *([None] if "empty" in op else [])]
    args: list[Value] = [size, 1.0, *tail] if op == "aten::full" else [size, *tail]
    client_with_quota.op(op, *args, outputs=[NewOutput(tuple(size))])
    error = client_with_quota.sync()
    assert error is not None
    assert error.code == OUT_OF_MEMORY
    assert client_with_quota.run_refused(op, *args).code == OUT_OF_MEMORY
    assert client_with_quota.stats().bytes_allocated_peak == 0


@pytest.mark.parametrize("grow", [False, True], ids=["allocate", "resize"])
def test_storage_beyond_the_quota_is_poisoned(client_with_quota: Client, grow: bool) -> None:
    shape = (MIB,)
    if grow:
        made = Tensor(client_with_quota.floats(1).storage, shape)
        client_with_quota.send(record(RecordKind.RESIZE, 0, u32(made.storage) + u64(4 * MIB)))
    else:
        made = client_with_quota.allocate(shape)
    error = client_with_quota.sync()
    assert error is not None
    assert error.code == OUT_OF_MEMORY
    again = client_with_quota.get(made)
    assert isinstance(again, ErrorReply)
    assert again.code == OUT_OF_MEMORY
    client_with_quota.free(made)
    assert client_with_quota.stats().bytes_allocated == 0


def test_result_beyond_the_quota_is_freed(client_with_quota: Client) -> None:
    made = zeros(client_with_quota, 1000)
    column = Tensor(made.storage, (1000, 1))
    assert client_with_quota.run_refused("aten::mul.Tensor", made, column).code == OUT_OF_MEMORY
    stats = client_with_quota.stats()
    assert (stats.bytes_allocated, stats.bytes_allocated_peak) == (4000, 4000)


def test_in_place_growth_counts_towards_the_quota(client_with_quota: Client) -> None:
    made = zeros(client_with_quota, 10)
    assert isinstance(client_with_quota.run_dynamic("aten::resize_", made, [1000], None), DynamicResult)
    assert client_with_quota.stats().bytes_allocated == 4000
    assert client_with_quota.run_refused("aten::resize_", made, [MIB], None).code == OUT_OF_MEMORY
    assert client_with_quota.stats().bytes_allocated == 4000


@pytest.mark.parametrize("op", ["aten::add.out", "aten::resize_as_", "aten::arange.out"])
def test_op_cannot_grow_a_written_tensor_beyond_the_quota(client_with_quota: Client, op: str) -> None:
    small, one = zeros(client_with_quota, 10), zeros(client_with_quota, 1)
    part = Tensor(small.storage, (3,), strides=(2,), offset=2)
    wide = Tensor(one.storage, (MIB,), strides=(0,))
    before = client_with_quota.stats()
    for target in (small, part):
        args: list[Value] = {
            "aten::add.out": [wide, one, 1, target],
            "aten::resize_as_": [target, wide, None],
            "aten::arange.out": [MIB, target],
        }[op]
        assert client_with_quota.run_refused(op, *args).code == OUT_OF_MEMORY
        after = client_with_quota.stats()
        assert (after.bytes_allocated, after.bytes_allocated_peak) == (
            before.bytes_allocated,
            before.bytes_allocated_peak,
        )
    fill_tensor(client_with_quota, small, 3.0)
    assert client_with_quota.floats_in(small) == (3.0,) * 10
    assert client_with_quota.floats_in(part) == (3.0,) * 3


def test_expanded_tensor_larger_than_the_quota_cannot_be_read_or_written(client_with_quota: Client) -> None:
    wide = Tensor(zeros(client_with_quota, 1).storage, (2**28,), strides=(0,))
    error = client_with_quota.get(wide)
    assert isinstance(error, ErrorReply)
    assert error.code == OUT_OF_MEMORY
    middling = Tensor(wide.storage, (MIB,), strides=(0,))
    client_with_quota.send(record(RecordKind.PUT, 0, encode_view(middling) + u64(4 * MIB)))
    client_with_quota.send_bytes(bytes(4 * MIB))
    put = client_with_quota.sync()
    assert put is not None
    assert put.code == OUT_OF_MEMORY
    assert client_with_quota.floats_in(Tensor(wide.storage, (1,))) == (0,)


def test_session_at_its_quota_can_be_read(client_with_quota: Client) -> None:
    made = zeros(client_with_quota, MIB // 4)
    assert client_with_quota.floats_in(Tensor(made.storage, (3,))) == (0, 0, 0)
    data = client_with_quota.get(made)
    assert isinstance(data, bytes)
    assert len(data) == MIB


def test_freed_memory_can_be_allocated_again(client_with_quota: Client) -> None:
    for _ in range(8):
        client_with_quota.free(zeros(client_with_quota, MIB // 8))
    assert client_with_quota.sync() is None
    assert client_with_quota.stats().bytes_allocated == 0


def test_close_frees_everything() -> None:
    with served_session() as (session, client):
        zeros(client, MIB)
        client.close_session()
        assert session.wait_end() == "closed"
        assert session.native.stats()["bytes_allocated"] == 4 * MIB
        session.native.close()
        assert (session.native.stats()["storages"], session.native.stats()["bytes_allocated"]) == (0, 0)
