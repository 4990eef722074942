"""One client's session: what it may do, what it is refused, and that a refusal does no harm."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import pytest
import torch

from tests.agent.executor.client import (
    CONJUGATE,
    FRAME_BYTES_MAX,
    HERE,
    NEGATIVE,
    UNDEFINED,
    Answer,
    Client,
    Data,
    Error,
    Generator,
    New,
    Raw,
    Record,
    Reply,
    Same,
    Scalar,
    Tensor,
    Value,
    record,
    served_session,
    u32,
    u64,
    view,
)

MIB = 1024 * 1024
FLOAT32, INT64, COMPLEX64 = 6, 4, 9
OUT_OF_MEMORY, REFUSED, REMOTE_OP = "device.out_of_memory", "device.op_refused", "device.remote_op"


@pytest.fixture
def client() -> Iterator[Client]:
    with served_session() as (_, client):
        yield client


@pytest.fixture
def limited() -> Iterator[Client]:
    """At most 1 MiB of tensors. The process's own limit is not set here: it is the tests' process."""
    with served_session(memory_bytes_max=MIB) as (_, client):
        yield client


def zeros(client: Client, *shape: int) -> Tensor:
    return client.made("aten::zeros", list(shape), FLOAT32, None, HERE, None, gives=[New(shape)])


def fill(client: Client, tensor: Tensor, value: float) -> None:
    client.op("aten::fill_.Scalar", tensor, value, gives=[Same()])


def failing(client: Client, wrong: Tensor) -> Tensor:
    """What an op should have made that fails: its argument is no matrix."""
    return client.made("aten::mm", wrong, wrong, gives=[New((2, 2))])


# --- ops with predicted outputs -----------------------------------------------------------------


def test_an_op_runs_and_its_result_can_be_fetched(client: Client) -> None:
    made = client.made("aten::add.Tensor", client.floats(1, 2), client.floats(10, 20), 2, gives=[New((2,))])
    assert client.floats_in(made) == (21.0, 42.0)


def test_a_template_serves_many_calls_with_other_data(client: Client) -> None:
    one, other = client.floats(1, 2), client.floats(3, 4)
    number, made = client.template("aten::add.Scalar", [one, Data(1.0), 1], [New((2,))])
    client.send(made)
    for source, value, expected in ((one, 5.0, (6, 7)), (other, 0.5, (3.5, 4.5))):
        storage = client.new_storage()
        data = u32(source.storage) + struct.pack("<d", value) + u32(storage)
        client.send(record(Record.OP, number, data))
        assert client.floats_in(Tensor(storage, (2,))) == expected
    client.send(record(Record.FORGET, number))
    client.send(client.template("aten::relu", [one], [New((2,))])[1])


def test_a_tensor_is_any_view_of_its_storage(client: Client) -> None:
    base = client.floats(0, 1, 2, 3, 4, 5)
    column = Tensor(base.storage, (2,), strides=(3,), offset=1)
    fill(client, column, 7.0)
    assert client.floats_in(base) == (0, 7, 2, 3, 7, 5)
    for offset in range(5):  # more views than are kept
        fill(client, Tensor(base.storage, (1,), offset=offset), float(offset))
    assert client.floats_in(base) == (0, 1, 2, 3, 4, 5)
    assert client.floats_in(Tensor(base.storage, (3, 2), strides=(1, 3))) == (0, 3, 1, 4, 2, 5)
    assert client.stats().bytes_allocated == 24


@pytest.mark.parametrize(("value", "dtype"), [(3.0, "float64"), (3, "int64")], ids=["float", "integer"])
def test_a_number_may_stand_for_a_tensor(client: Client, value: float, dtype: str) -> None:
    scalar = Scalar(struct.pack("<d" if dtype == "float64" else "<q", value), dtype)
    made = client.made("aten::mul.Tensor", client.floats(1, 2), scalar, gives=[New((2,))])
    assert client.floats_in(made) == (3.0, 6.0)


def test_a_number_that_an_op_gives_back_is_not_the_next_calls_number(client: Client) -> None:
    number, made = client.template("aten::lift_fresh_copy", [Scalar(b"", "float32")], [New(())])
    client.send(made)
    storages = [client.new_storage() for _ in range(2)]
    for storage, value in zip(storages, (1.0, 2.0), strict=True):
        data = struct.pack("<f", value).ljust(16, b"\0")
        client.send(record(Record.OP, number, data + u32(storage)))
    assert [client.floats_in(Tensor(storage)) for storage in storages] == [(1.0,), (2.0,)]


def test_lists_of_tensors_go_in_and_come_out(client: Client) -> None:
    parts = [client.floats(1, 2), client.floats(3)]
    joined = client.made("aten::cat", parts, 0, gives=[New((3,))])
    assert client.floats_in(joined) == (1, 2, 3)
    added = client.op("aten::_foreach_add.Scalar", parts, 1.0, gives=[[New((2,)), New((1,))]])
    assert [client.floats_in(tensor) for tensor in added] == [(2, 3), (4,)]
    client.op("aten::_foreach_mul_.Scalar", parts, 10.0)
    assert client.floats_in(parts[1]) == (30,)


def test_optional_tensors_and_outputs_may_be_missing(client: Client) -> None:
    image, weight = zeros(client, 1, 1, 4, 4), zeros(client, 1, 1, 2, 2)
    fill(client, image, 1.0)
    grad = zeros(client, 1, 1, 3, 3)
    (made,) = client.op(
        "aten::convolution_backward", grad, image, weight,
        [1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False],
        gives=[None, New((1, 1, 2, 2)), None],
    )  # fmt: skip
    assert client.floats_in(made) == (0, 0, 0, 0)
    out = client.made(
        "aten::convolution", image, weight, UNDEFINED, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
        gives=[New((1, 1, 3, 3))],
    )  # fmt: skip
    rows, index = client.uploaded((1, 2), struct.pack("<2f", 5, 6)), client.uploaded((1,), bytes(8), "int64")
    picked = client.made("aten::index.Tensor", rows, [None, index], gives=[New((1, 1))])
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
def test_a_view_that_an_op_gives_becomes_a_tensor_of_its_own(
    client: Client, op: str, args: list[Value]
) -> None:
    base = client.floats(1, 2, 3, 4)
    shape = {"aten::select.int": (), "aten::slice.Tensor": (2,)}.get(op, (4,))
    made = client.made(op, base, *args, gives=[New(shape)])
    before = client.floats_in(made)
    fill(client, base, 9.0)
    assert client.floats_in(made) == before
    assert client.stats().bytes_allocated == 16 + 4 * math.prod(shape)


def test_an_output_gets_the_strides_that_were_predicted(client: Client) -> None:
    source = client.uploaded((2, 2), struct.pack("<4f", 1, 2, 3, 4))
    made = client.made("aten::relu", source, gives=[New((2, 2), strides=(1, 2))])
    assert made.strides == (1, 2)
    assert client.floats_in(Tensor(made.storage, (4,))) == (1, 3, 2, 4)


def test_lazy_bits_are_done_with_before_a_result_is_kept(client: Client) -> None:
    source = client.uploaded((1,), struct.pack("<2f", 1, 2), "complex64")
    made = client.made("aten::_conj", source, gives=[New((1,), "complex64")])
    assert client.get(made) == struct.pack("<2f", 1, -2)


def test_a_tensor_may_carry_lazy_bits(client: Client) -> None:
    source = client.uploaded((1,), struct.pack("<2f", 1, 2), "complex64")
    lazy = Tensor(source.storage, (1,), "complex64", flags=CONJUGATE)
    assert client.get(lazy) == struct.pack("<2f", 1, -2)
    made = client.made("aten::mul.Tensor", lazy, lazy, gives=[New((1,), "complex64")])
    assert client.get(made) == struct.pack("<2f", -3, -4)
    client.put(lazy, struct.pack("<2f", 5, 6))
    assert client.get(source) == struct.pack("<2f", 5, -6)
    negative = Tensor(source.storage, (2,), flags=NEGATIVE)
    assert client.floats_in(negative) == (-5, 6)


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ([New((3,))], "predicted Float [3], got Float [2]"),
        ([New((2,), "float64")], "predicted Double [2], got Float [2]"),
        ([New((2, 1))], "predicted Float [2, 1]"),
        ([None], "predicted nothing"),
        ([Same()], "predicted a tensor that was given"),
        ([[New((2,))]], "predicted a list"),
        ([5], "predicted 5"),
    ],
)
def test_an_output_that_was_not_predicted_is_an_error(client: Client, gives: list[Value], said: str) -> None:
    client.op("aten::relu", client.floats(1, 2), gives=gives)
    error = client.sync()
    assert error is not None
    assert (error.code, error.op) == (REMOTE_OP, "aten::relu")
    assert said in error.message
    assert client.sync() is None


def test_an_output_that_is_missing_is_an_error(client: Client) -> None:
    source = client.floats(1, 2)
    grad = client.floats(1, 2)
    client.op(
        "aten::native_layer_norm_backward", grad, source, [2], client.floats(0), client.floats(1),
        None, None, [True, False, False], gives=[New((2,)), New((2,)), None],
    )  # fmt: skip
    error = client.sync()
    assert error is not None
    assert "predicted a tensor, got none" in error.message


def test_another_number_of_items_than_predicted_is_an_error(client: Client) -> None:
    client.op("aten::_foreach_neg", [client.floats(1)], gives=[[New((1,)), New((1,))]])
    error = client.sync()
    assert error is not None
    assert "predicted 2 items, got 1" in error.message


# --- ops that are asked -------------------------------------------------------------------------


def test_an_op_whose_outputs_depend_on_values_is_asked(client: Client) -> None:
    answer = client.asked("aten::nonzero", client.floats(0, 1, 2))
    assert isinstance(answer, Answer)
    (made,) = answer.values
    assert (made.dtype, made.shape) == ("int64", (2, 1))
    assert client.get(made) == struct.pack("<2q", 1, 2)
    assert client.stats().bytes_allocated == 12 + 16


def test_several_results_and_lists_of_results_keep_their_form(client: Client) -> None:
    source = client.floats(3, 1, 2)
    several = client.asked("aten::max.dim", source, 0, False)
    assert isinstance(several, Answer)
    assert [value.dtype for value in several.values] == ["float32", "int64"]
    listed = client.asked("aten::split.Tensor", source, 2, 0)
    assert isinstance(listed, Answer)
    ((first, second),) = listed.values
    assert (first.shape, second.shape) == ((2,), (1,))
    fill(client, source, 0.0)
    assert client.floats_in(first) == (3, 1), "a view becomes a tensor of its own"


def test_a_tensor_that_comes_back_is_named_as_the_one_that_was_given(client: Client) -> None:
    one, other = client.floats(1), client.floats(2)
    answer = client.asked("aten::add_.Tensor", other, one, 1)
    assert answer == Answer([Same(0)], [])
    assert client.asked("aten::add.out", one, one, 1, other) == Answer([Same(2)], [])
    assert client.floats_in(other) == (2,)


@pytest.mark.parametrize("value", [True, 2**63 - 1, -(2**63), 1.5, math.inf, complex(1, -2)])
def test_a_number_comes_back_as_it_was(client: Client, value: bool | int | float | complex) -> None:
    dtype = {bool: 11, int: 4, float: 7, complex: 10}[type(value)]
    made = client.asked("aten::scalar_tensor", value, dtype, None, HERE, None)
    assert isinstance(made, Answer)
    answer = client.asked("aten::_local_scalar_dense", made.values[0])
    assert isinstance(answer, Answer)
    assert answer.values == [value]
    assert type(answer.values[0]) is type(value)


def test_a_shape_changed_in_place_is_reported(client: Client) -> None:
    made = client.uploaded((2, 3), bytes(24))
    answer = client.asked("aten::t_", made)
    assert isinstance(answer, Answer)
    (change,) = answer.changed
    assert (change.index, change.shape, change.strides, change.storage_bytes) == (0, (3, 2), (1, 3), 24)
    grown = client.asked("aten::resize_", made, [4, 4], None)
    assert isinstance(grown, Answer)
    assert [(c.shape, c.storage_bytes) for c in grown.changed] == [((4, 4), 64)]
    assert client.stats().bytes_allocated == 64
    assert len(client.floats_in(Tensor(made.storage, (16,)))) == 16


def test_a_tensor_cannot_take_over_the_memory_of_another(client: Client) -> None:
    small, large = client.floats(1, 2), client.floats(*range(100))
    error = client.refused("aten::set_.source_Tensor", small, large)
    assert (error.code, "memory of another" in error.message) == (REFUSED, True)
    fill(client, small, 3.0)
    assert client.floats_in(small) == (3, 3)
    assert client.floats_in(large) == tuple(range(100))


def test_results_that_are_not_bound_count(limited: Client) -> None:
    source = limited.uploaded((50_000,), bytes(200_000))
    number, made = limited.template("aten::clone", [source, None], None)
    limited.send(made)
    replies = [limited.ask_for(record(Record.ASK, number, u32(source.storage))) for _ in range(5)]
    assert [isinstance(reply, Reply) for reply in replies] == [True] * 4 + [False]
    assert limited.stats().bytes_allocated == 1_000_000
    assert isinstance(replies[0], Reply)
    storage = limited.new_storage()
    limited.send(record(Record.BIND, 1, u64(replies[0].number) + u32(storage)))
    limited.free(Tensor(storage))
    assert limited.stats().bytes_allocated == 800_000


# --- uploads and downloads ----------------------------------------------------------------------


def test_uploaded_bytes_land_in_a_view_too(client: Client) -> None:
    base = client.floats(0, 0, 0, 0)
    column = Tensor(base.storage, (2,), strides=(2,), offset=1)
    client.put(column, struct.pack("<2f", 5, 6))
    assert client.floats_in(base) == (0, 5, 0, 6)


@pytest.mark.parametrize("turned", [False, True], ids=["straight", "by way of another"])
def test_a_large_upload_comes_in_frames_of_its_own(client: Client, turned: bool) -> None:
    shape = (1024, 1600)
    data = bytes(range(256)) * (1024 * 1600 * 4 // 256)
    target = client.allocate(shape)
    if turned:
        target = Tensor(target.storage, shape, strides=(1, 1024))
    client.send(record(Record.PUT, 0, view(target) + u64(len(data))))
    client.send_bytes(data, part=FRAME_BYTES_MAX - 12345)
    assert client.get(target) == data
    assert client.stats().storages == 1


def test_nothing_can_be_uploaded_too(client: Client) -> None:
    empty = client.allocate((0, 3))
    client.send(record(Record.PUT, 0, view(empty) + u64(0)))
    client.put(empty, b"")
    assert client.get(empty) == b""


def test_a_large_tensor_is_fetched_whole(client: Client) -> None:
    made = client.made("aten::arange", 2 * MIB, INT64, None, HERE, None, gives=[New((2 * MIB,), "int64")])
    data = client.get(made)
    assert isinstance(data, bytes)
    assert data == torch.arange(2 * MIB).numpy().tobytes()


def test_a_storage_is_resized_and_keeps_what_fits(client: Client) -> None:
    made = client.floats(1, 2, 3)
    client.send(record(Record.RESIZE, 0, u32(made.storage) + u64(4000)))
    assert client.floats_in(made) == (1, 2, 3)
    assert client.stats().bytes_allocated == 4000
    client.send(record(Record.RESIZE, 0, u32(made.storage) + u64(8)))
    assert client.floats_in(Tensor(made.storage, (2,))) == (1, 2)
    assert client.stats().bytes_allocated == 8


# --- random numbers -----------------------------------------------------------------------------


def normal(client: Client, generator: Value) -> tuple[float, ...]:
    made = client.made(
        "aten::randn.generator", [100], generator, FLOAT32, None, HERE, None, gives=[New((100,))]
    )
    return client.floats_in(made)


def expected_normal(seed: int) -> tuple[float, ...]:
    return tuple(torch.randn(100, generator=torch.Generator().manual_seed(seed)).tolist())


def state_of(client: Client, generator: int) -> bytes:
    reply = client.ask_for(record(Record.GENERATOR_STATE, 0, u32(generator)))
    assert isinstance(reply, Reply)
    return reply.payload


def test_a_seed_gives_the_numbers_that_torch_gives(client: Client) -> None:
    client.send(record(Record.SEED, 0, u32(0) + u64(11)))
    state = state_of(client, 0)
    made = normal(client, None)
    client.send(record(Record.SET_GENERATOR, 0, u32(0, len(state)) + state))
    assert made == normal(client, None) == expected_normal(11)


def test_generators_do_not_disturb_each_other(client: Client) -> None:
    client.send(record(Record.SEED, 0, u32(0) + u64(1)), record(Record.SEED, 0, u32(7) + u64(2)))
    assert normal(client, Generator(7)) == expected_normal(2)
    assert normal(client, Generator(0)) == expected_normal(1)
    client.send(record(Record.FREE_GENERATOR, 0, u32(7)))
    default_seed = torch.Generator().initial_seed()
    assert normal(client, Generator(7)) == expected_normal(default_seed), "a new one"


def test_a_state_that_is_none_is_an_error(client: Client) -> None:
    before = state_of(client, 3)
    client.send(record(Record.SET_GENERATOR, 0, u32(3, 5) + b"short"))
    assert client.sync() is not None
    assert state_of(client, 3) == before


# --- counting -----------------------------------------------------------------------------------


def test_freed_memory_is_counted_and_the_peak_stays(client: Client) -> None:
    made = [zeros(client, MIB) for _ in range(2)]
    client.free(*made)
    stats = client.stats()
    assert (stats.storages, stats.bytes_allocated, stats.bytes_allocated_peak) == (0, 0, 8 * MIB)
    assert (stats.bytes_max, stats.ops) == (0, 2)


# --- what it refuses, and stays alive -----------------------------------------------------------


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
def test_an_op_outside_the_list_is_refused_by_name(client: Client, op: str) -> None:
    error = client.refused(op, "/etc/passwd")
    assert (error.code, error.op) == (REFUSED, op)
    assert op in error.message
    assert client.stats().storages == 0


X = Tensor(1, (2,))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten::relu", ["text"]),
        ("aten::relu", [HERE]),
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
        ("aten::softmax.int", [X, Data(0.5), None]),
        ("aten::empty.memory_format", [[2], 12, None, HERE, None, None]),
        ("aten::empty.memory_format", [[2], 1000, None, HERE, None, None]),
        ("aten::empty.memory_format", [[2], -1, None, HERE, None, None]),
        ("aten::empty.memory_format", [[2], Data(6), None, HERE, None, None]),
        ("aten::empty.memory_format", [[2], None, 5, HERE, None, None]),
        ("aten::empty.memory_format", [[2], None, None, "cuda:0", None, None]),
        ("aten::empty.memory_format", [[2], None, None, HERE, None, 9]),
        ("aten::empty.memory_format", [[2], None, None, HERE, 1, None]),
        ("aten::empty.memory_format", [[2.5], None, None, HERE, None, None]),
        ("aten::empty.memory_format", [["2"], None, None, HERE, None, None]),
        ("aten::empty.memory_format", [2, None, None, HERE, None, None]),
        ("aten::randn.generator", [[2], 1, None, None, HERE, None]),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(client: Client, op: str, args: list[Value]) -> None:
    assert client.floats(-1, 1) == X
    error = client.refused(op, *args)
    assert (error.code, error.op) == (REFUSED, op), error
    assert client.floats_in(client.made("aten::relu", X, gives=[New((2,))])) == (0, 1)


def test_predicting_too_few_outputs_is_refused(client: Client) -> None:
    client.op("aten::max.dim", client.floats(1, 2), 0, False, gives=[New(())])
    error = client.sync()
    assert error is not None
    assert (error.code, "returns 2 values" in error.message) == (REFUSED, True)


# --- failures -----------------------------------------------------------------------------------


def test_an_op_that_fails_says_why_and_which(client: Client) -> None:
    made = zeros(client, 2, 3)
    error = client.refused("aten::mm", made, client.floats(1))
    assert (error.code, error.op, error.number) == (REMOTE_OP, "aten::mm", 2)
    assert "matri" in error.message


@pytest.mark.parametrize(
    ("op", "args", "code"),
    [
        ("aten::select.int", [X, 0, 99], "remote.IndexError"),
        ("aten::softmax.int", [X, 7, None], "remote.IndexError"),
        ("aten::linalg_inv_ex", [Tensor(1, (1, 2)), False], REMOTE_OP),
        ("aten::linalg_inv", [Tensor(2, (1, 1))], "remote.LinAlgError"),
        ("aten::_cudnn_init_dropout_state", [0.5, True, 1, 6, None, HERE, None],
         "remote.NotImplementedError"),
    ],
)  # fmt: skip
def test_a_failure_keeps_its_kind(client: Client, op: str, args: list[Value], code: str) -> None:
    client.floats(-1, 1)
    client.floats(0)
    assert client.refused(op, *args).code == code


def test_the_first_failure_is_told_with_the_next_reply_and_once(client: Client) -> None:
    good = client.floats(1, 2)
    first, second = failing(client, good), failing(client, good)
    error = client.get(good)
    assert isinstance(error, Error)
    assert (error.op, error.number) == ("aten::mm", 1)
    assert client.floats_in(good) == (1, 2), "and then all goes on"
    assert client.sync() is None
    for poisoned, number in ((first, 1), (second, 2)):
        again = client.get(poisoned)
        assert isinstance(again, Error)
        assert (again.code, again.number) == (error.code, number)


def test_what_is_made_of_poison_is_poison(client: Client) -> None:
    poisoned = failing(client, client.floats(1, 2))
    assert client.sync() is not None
    further = client.made("aten::relu", poisoned, gives=[New((2, 2))])
    assert client.sync() is None, "nothing new has failed"
    error = client.get(client.made("aten::cat", [further, further], 0, gives=[New((4, 2))]))
    assert isinstance(error, Error)
    assert (error.op, error.number) == ("aten::mm", 1)
    asked = client.refused("aten::nonzero", further)
    assert (asked.op, asked.number) == ("aten::mm", 1)
    client.put(poisoned, bytes(16))
    client.free(poisoned, further)
    assert client.sync() is None


@pytest.mark.parametrize("op", ["aten::add_.Tensor", "aten::mul.out"])
def test_a_tensor_that_poison_should_have_changed_is_told_of(client: Client, op: str) -> None:
    poisoned = failing(client, client.floats(1, 2))
    assert client.sync() is not None
    healthy = zeros(client, 2, 2)
    args = [healthy, poisoned, 1] if op == "aten::add_.Tensor" else [poisoned, poisoned, healthy]
    client.op(op, *args, gives=[Same(0 if op == "aten::add_.Tensor" else 2)])
    error = client.sync()
    assert error is not None, "it keeps old values, and nobody would know"
    assert error.op == "aten::mm"
    assert client.floats_in(healthy) == (0, 0, 0, 0)


def test_an_op_that_is_asked_after_a_failure_is_not_run(client: Client) -> None:
    good = client.floats(1, 2)
    failing(client, good)
    error = client.refused("aten::zero_", good)
    assert (error.op, error.number) == ("aten::mm", 1)
    assert client.floats_in(good) == (1, 2)
    assert client.stats().ops == 2, "it has its number nevertheless"


def test_the_failure_of_an_asked_op_is_its_own_reply(client: Client) -> None:
    good = client.floats(1, 2)
    assert client.refused("aten::mm", good, good).number == 1
    assert client.sync() is None


def test_an_op_that_fails_after_it_resized_has_changed_nothing(client: Client) -> None:
    source, target = client.floats(*range(10)), client.floats(*range(10))
    beyond = client.made("aten::full", [1000], 99, INT64, None, HERE, None, gives=[New((1000,), "int64")])
    before = client.stats().bytes_allocated
    client.refused("aten::index_select.out", source, 0, beyond, target)
    client.op("aten::index_select.out", source, 0, beyond, target, gives=[Same(2)])
    assert client.sync() is not None
    assert client.floats_in(target) is not None
    assert client.stats().bytes_allocated == before


def test_a_predicted_op_must_not_resize_what_it_writes(client: Client) -> None:
    wide, target = client.floats(1, 2, 3, 4), client.floats(7)
    client.op("aten::add.out", wide, wide, 1, target, gives=[Same(2)])
    error = client.sync()
    assert error is not None
    assert "predicted Float [1] to stay as it is" in error.message
    assert client.stats().bytes_allocated == 20
    fill(client, target, 5.0)
    assert client.floats_in(target) == (5,)


def test_a_message_is_text_whatever_goes_into_it(client: Client) -> None:
    source, index = client.floats(1), client.uploaded((1,), bytes(8), "int64")
    for reduce, shown in (("\u00e4" * 2040, "\u00e4" * 1000), (Raw(b"\x08" + u32(3) + b"a\xffb"), "a?b")):
        error = client.refused("aten::scatter_reduce.two", source, 0, index, source, reduce, True)
        assert shown in error.message
        assert len(error.message.encode()) <= 4000
    assert client.refused("aten::\u00e4", 1).code == REFUSED


# --- the quota ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "size"),
    [("aten::empty.memory_format", [2**50]), ("aten::zeros", [2**30, 2**30]), ("aten::full", [MIB])],
)
def test_memory_beyond_the_quota_is_refused_before_it_is_taken(
    limited: Client, op: str, size: list[int]
) -> None:
    tail = [FLOAT32, None, HERE, None, *([None] if "empty" in op else [])]
    args: list[Value] = [size, 1.0, *tail] if op == "aten::full" else [size, *tail]
    limited.op(op, *args, gives=[New(tuple(size))])
    error = limited.sync()
    assert error is not None
    assert error.code == OUT_OF_MEMORY
    assert limited.refused(op, *args).code == OUT_OF_MEMORY
    assert limited.stats().bytes_allocated_peak == 0


@pytest.mark.parametrize("grow", [False, True], ids=["allocate", "resize"])
def test_a_storage_beyond_the_quota_is_refused_and_poisons(limited: Client, grow: bool) -> None:
    shape = (MIB,)
    if grow:
        made = Tensor(limited.floats(1).storage, shape)
        limited.send(record(Record.RESIZE, 0, u32(made.storage) + u64(4 * MIB)))
    else:
        made = limited.allocate(shape)
    error = limited.sync()
    assert error is not None
    assert error.code == OUT_OF_MEMORY
    again = limited.get(made)
    assert isinstance(again, Error)
    assert again.code == OUT_OF_MEMORY
    limited.free(made)
    assert limited.stats().bytes_allocated == 0


def test_a_result_beyond_the_quota_is_not_kept(limited: Client) -> None:
    made = zeros(limited, 1000)
    column = Tensor(made.storage, (1000, 1))
    assert limited.refused("aten::mul.Tensor", made, column).code == OUT_OF_MEMORY
    stats = limited.stats()
    assert (stats.bytes_allocated, stats.bytes_allocated_peak) == (4000, 4000)


def test_growing_in_place_counts(limited: Client) -> None:
    made = zeros(limited, 10)
    assert isinstance(limited.asked("aten::resize_", made, [1000], None), Answer)
    assert limited.stats().bytes_allocated == 4000
    assert limited.refused("aten::resize_", made, [MIB], None).code == OUT_OF_MEMORY
    assert limited.stats().bytes_allocated == 4000


@pytest.mark.parametrize("op", ["aten::add.out", "aten::resize_as_", "aten::arange.out"])
def test_an_op_cannot_grow_a_tensor_that_it_writes_beyond_the_quota(limited: Client, op: str) -> None:
    small, one = zeros(limited, 10), zeros(limited, 1)
    part = Tensor(small.storage, (3,), strides=(2,), offset=2)
    wide = Tensor(one.storage, (MIB,), strides=(0,))
    before = limited.stats()
    for target in (small, part):
        args: list[Value] = {
            "aten::add.out": [wide, one, 1, target],
            "aten::resize_as_": [target, wide, None],
            "aten::arange.out": [MIB, target],
        }[op]
        assert limited.refused(op, *args).code == OUT_OF_MEMORY
        after = limited.stats()
        assert (after.bytes_allocated, after.bytes_allocated_peak) == (
            before.bytes_allocated,
            before.bytes_allocated_peak,
        )
    fill(limited, small, 3.0)
    assert limited.floats_in(small) == (3.0,) * 10
    assert limited.floats_in(part) == (3.0,) * 3


def test_tensors_that_look_larger_than_the_quota_can_neither_be_fetched_nor_filled(limited: Client) -> None:
    wide = Tensor(zeros(limited, 1).storage, (2**28,), strides=(0,))
    error = limited.get(wide)
    assert isinstance(error, Error)
    assert error.code == OUT_OF_MEMORY
    middling = Tensor(wide.storage, (MIB,), strides=(0,))
    limited.send(record(Record.PUT, 0, view(middling) + u64(4 * MIB)))
    limited.send_bytes(bytes(4 * MIB))
    put = limited.sync()
    assert put is not None
    assert put.code == OUT_OF_MEMORY
    assert limited.floats_in(Tensor(wide.storage, (1,))) == (0,)


def test_a_session_at_its_quota_can_still_be_read(limited: Client) -> None:
    made = zeros(limited, MIB // 4)
    assert limited.floats_in(Tensor(made.storage, (3,))) == (0, 0, 0)
    data = limited.get(made)
    assert isinstance(data, bytes)
    assert len(data) == MIB


def test_freed_memory_can_be_used_again(limited: Client) -> None:
    for _ in range(8):
        limited.free(zeros(limited, MIB // 8))
    assert limited.sync() is None
    assert limited.stats().bytes_allocated == 0


def test_closing_frees_everything() -> None:
    with served_session() as (session, client):
        zeros(client, MIB)
        client.goodbye()
        assert session.wait_end() == "goodbye"
        assert session.native.stats()["bytes_allocated"] == 4 * MIB
        session.native.close()
        assert (session.native.stats()["storages"], session.native.stats()["bytes_allocated"]) == (0, 0)
