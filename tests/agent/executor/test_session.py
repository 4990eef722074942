"""One client's session: what it may do, what it is refused, and that a refusal does no harm."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import pytest
import torch

from genie.agent.executor.ops import allowed
from genie.errors import OpRefusedError
from genie.runtime import opwire
from genie.runtime.opwire import Complex, DType, Error, Handle, Inline, OwnDevice, Result
from tests.agent.executor.client import TIMEOUT_S, Client, session_on_a_thread

MIB = 1024 * 1024
HERE = OwnDevice()


@pytest.fixture
def client() -> Iterator[Client]:
    with session_on_a_thread() as client:
        yield client


@pytest.fixture
def limited() -> Iterator[Client]:
    """At most 1 MiB of tensors. The process's own limit is not set here: it is the tests' process."""
    with session_on_a_thread(memory_bytes_max=MIB) as client:
        yield client


def floats(*values: float) -> Inline:
    return Inline("float32", (len(values),), struct.pack(f"<{len(values)}f", *values))


def floats_in(client: Client, meta: opwire.TensorMeta) -> tuple[float, ...]:
    assert meta.dtype == "float32"
    return struct.unpack(f"<{math.prod(meta.shape)}f", client.download(meta))


# --- what it does -------------------------------------------------------------------------------


def test_an_op_runs_and_its_result_can_be_fetched(client: Client) -> None:
    made = client.made("aten::add.Tensor", floats(1, 2), floats(10, 20), alpha=2)
    assert (made.dtype, made.shape, made.strides, made.offset) == ("float32", (2,), (1,), 0)
    assert floats_in(client, made) == (21.0, 42.0)


def test_a_view_shares_memory_with_what_it_views(client: Client) -> None:
    base = client.made("aten::zeros", [2, 3], device=HERE)
    row = client.made("aten::select.int", Handle(base.handle), 0, 1)
    assert (row.shape, row.offset) == ((3,), 3)
    client.run("aten::fill_.Scalar", Handle(row.handle), 7.0)
    assert floats_in(client, base) == (0, 0, 0, 7, 7, 7)
    assert client.counters().bytes_allocated == 24


def test_an_op_in_place_gives_back_the_same_tensor(client: Client) -> None:
    made = client.made("aten::ones", [2], device=HERE)
    assert client.made("aten::add_.Tensor", Handle(made.handle), 1.0).handle == made.handle
    assert client.counters().tensors == 1


def test_a_shape_changed_in_place_is_reported(client: Client) -> None:
    made = client.made("aten::ones", [2, 3], device=HERE)
    reply = client.run("aten::t_", Handle(made.handle))
    assert isinstance(reply, Result)
    assert [(meta.handle, meta.shape, meta.strides) for meta in reply.changed] == [
        (made.handle, (3, 2), (1, 3))
    ]


def test_several_results_and_lists_of_results_keep_their_form(client: Client) -> None:
    made = client.made("aten::arange", 6, dtype=DType("float32"), device=HERE)
    several = client.run("aten::max.dim", Handle(made.handle), 0)
    assert isinstance(several, Result)
    assert [type(value) for value in several.values] == [opwire.TensorMeta, opwire.TensorMeta]
    listed = client.run("aten::split.Tensor", Handle(made.handle), 4)
    assert isinstance(listed, Result)
    ((first, second),) = listed.values  # type: ignore[misc]
    assert (first.shape, second.shape) == ((4,), (2,))  # type: ignore[union-attr]


def test_an_output_that_is_masked_out_is_nothing(client: Client) -> None:
    image = client.made("aten::ones", [1, 1, 4, 4], device=HERE)
    weight = client.made("aten::ones", [1, 1, 2, 2], device=HERE)
    grad = client.made("aten::ones", [1, 1, 3, 3], device=HERE)
    reply = client.run(
        "aten::convolution_backward",
        *(Handle(meta.handle) for meta in (grad, image, weight)),
        [1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False],
    )  # fmt: skip
    assert isinstance(reply, Result)
    assert [value is None for value in reply.values] == [True, False, True]


@pytest.mark.parametrize("value", [True, 2**63 - 1, -(2**63), 1.5, math.inf, complex(1, -2)])
def test_a_number_comes_back_as_it_was(client: Client, value: bool | int | float | complex) -> None:
    sent: opwire.Value = Complex(value.real, value.imag) if isinstance(value, complex) else value
    dtype = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}[type(value)]
    made = client.made("aten::scalar_tensor", sent, dtype=DType(dtype), device=HERE)  # type: ignore[arg-type]
    reply = client.run("aten::_local_scalar_dense", Handle(made.handle))
    assert isinstance(reply, Result)
    assert reply.values == [sent]
    assert type(reply.values[0]) is type(sent)


def test_uploaded_bytes_land_in_a_view_too(client: Client) -> None:
    base = client.made("aten::zeros", [2, 2], device=HERE)
    column = client.made("aten::select.int", Handle(base.handle), 1, 0)
    sequence = client.send(opwire.Upload(column.handle, "float32", (2,)))
    assert client.channel.receive_reply(sequence, timeout_s=TIMEOUT_S) == opwire.Ready()
    client.channel.send_data(sequence, memoryview(struct.pack("<2f", 5, 6)), timeout_s=TIMEOUT_S)
    assert client.channel.receive_reply(sequence, timeout_s=TIMEOUT_S) == opwire.Done()
    assert floats_in(client, base) == (5, 0, 6, 0)


def test_a_seed_gives_the_numbers_that_torch_gives(client: Client) -> None:
    client.ask(opwire.Seed(11))
    state = client.ask(opwire.GetRngState())
    made = client.made("aten::randn", [100], device=HERE)
    assert isinstance(state, opwire.RngState)
    client.ask(opwire.SetRngState(state.state))
    again = client.made("aten::randn", [100], device=HERE)
    expected = tuple(torch.randn(100, generator=torch.Generator().manual_seed(11)).tolist())
    assert floats_in(client, made) == floats_in(client, again) == expected


def test_freed_tensors_give_their_memory_back(client: Client) -> None:
    base = client.made("aten::zeros", [MIB], device=HERE)
    view = client.made("aten::view", Handle(base.handle), [2, MIB // 2])
    client.send(opwire.Free([base.handle]))
    assert client.counters().bytes_allocated == 4 * MIB
    client.send(opwire.Free([view.handle]))
    counters = client.counters()
    assert (counters.tensors, counters.bytes_allocated) == (0, 0)
    assert counters.bytes_allocated_peak == 4 * MIB


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
    ],
)
def test_an_op_outside_the_list_is_refused_by_name(client: Client, op: str) -> None:
    error = client.refused(op, "/etc/passwd")
    assert (error.code, error.op) == (OpRefusedError.code, op)
    assert op in error.message
    assert client.counters().tensors == 0


def test_nothing_outside_aten_is_allowed() -> None:
    with pytest.raises(OpRefusedError):
        allowed("prim::device")


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("aten::relu", [Handle(999)], {}),
        ("aten::relu", ["text"], {}),
        ("aten::relu", [HERE], {}),
        ("aten::empty.memory_format", [[2]], {"dtype": 12}),
        ("aten::empty.memory_format", [[2]], {"layout": 5}),
        ("aten::empty.memory_format", [[2]], {"device": "cuda:0"}),
        ("aten::empty.memory_format", [[2.5]], {}),
        ("aten::empty.memory_format", [["2"]], {}),
        ("aten::randn.generator", [[2]], {"generator": 1}),
        ("aten::relu", [], {"nonsense": 1}),
        ("aten::relu", [1.0, 2.0, 3.0], {}),
        ("aten::relu", [Inline("float32", (2,), b"only five")], {}),
        ("aten::relu", [Inline("float32", (2**62, 2**62), b"")], {}),
    ],
)  # fmt: skip
def test_an_argument_of_the_wrong_kind_is_refused(
    client: Client, op: str, args: list[opwire.Value], kwargs: dict[str, opwire.Value]
) -> None:
    assert client.refused(op, *args, **kwargs).code == OpRefusedError.code
    assert floats_in(client, client.made("aten::relu", floats(-1, 1))) == (0, 1)


def test_an_op_that_fails_says_why_and_which(client: Client) -> None:
    client.made("aten::ones", [2, 3], device=HERE)
    error = client.refused("aten::mm", floats(1), floats(1))
    assert (error.code, error.op, error.number) == ("device.remote_op", "aten::mm", 2)
    assert "matri" in error.message


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float64", (2,)), ("float32", (3,)), ("float32", (1, 2)), ("float32", (2**61,))]
)
def test_an_upload_that_does_not_fit_is_refused_before_the_data(
    client: Client, dtype: opwire.DTypeName, shape: tuple[int, ...]
) -> None:
    made = client.made("aten::zeros", [2], device=HERE)
    reply = client.ask(opwire.Upload(made.handle, dtype, shape))
    assert isinstance(reply, Error)
    assert reply.code == OpRefusedError.code
    assert floats_in(client, made) == (0, 0)


@pytest.mark.parametrize("request_", [opwire.Upload(9, "bool", ()), opwire.Download(9)])
def test_an_unknown_tensor_can_neither_be_filled_nor_fetched(
    client: Client, request_: opwire.Request
) -> None:
    reply = client.ask(request_)
    assert isinstance(reply, Error)
    assert "tensor 9" in reply.message
    assert client.counters().tensors == 0


# --- the quota ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "size"),
    [("aten::empty.memory_format", [2**50]), ("aten::zeros", [2**31, 2**31]), ("aten::full", [MIB])],
)
def test_memory_beyond_the_quota_is_refused_before_it_is_taken(
    limited: Client, op: str, size: list[int]
) -> None:
    args: list[opwire.Value] = [size, 1.0] if op == "aten::full" else [size]
    assert limited.refused(op, *args, device=HERE).code == opwire.OUT_OF_MEMORY
    assert limited.counters().bytes_allocated_peak == 0


def test_a_result_beyond_the_quota_is_not_kept(limited: Client) -> None:
    made = limited.made("aten::zeros", [1000], device=HERE)
    column = limited.made("aten::view", Handle(made.handle), [1000, 1])
    assert limited.refused("aten::mul.Tensor", Handle(made.handle), Handle(column.handle)).code == (
        opwire.OUT_OF_MEMORY
    )
    assert limited.counters().bytes_allocated == 4000


def test_growing_in_place_counts(limited: Client) -> None:
    made = limited.made("aten::zeros", [10], device=HERE)
    limited.run("aten::resize_", Handle(made.handle), [1000])
    assert limited.counters().bytes_allocated == 4000
    assert limited.refused("aten::resize_", Handle(made.handle), [MIB]).code == opwire.OUT_OF_MEMORY
    assert limited.counters().bytes_allocated == 4000


@pytest.mark.parametrize("op", ["aten::add.out", "aten::resize_as_", "aten::arange.out"])
def test_an_op_cannot_grow_a_tensor_that_it_writes_beyond_the_quota(limited: Client, op: str) -> None:
    small = limited.made("aten::zeros", [10], device=HERE)
    view = limited.made("aten::slice.Tensor", Handle(small.handle), 0, 2, 8, 2)
    one = limited.made("aten::zeros", [1], device=HERE)
    wide = limited.made("aten::expand", Handle(one.handle), [MIB])
    before = limited.counters()
    for target in (small, view):
        match op:
            case "aten::add.out":
                error = limited.refused(
                    op, Handle(wide.handle), Handle(one.handle), out=Handle(target.handle)
                )
            case "aten::resize_as_":
                error = limited.refused(op, Handle(target.handle), Handle(wide.handle))
            case _:
                error = limited.refused(op, MIB, out=Handle(target.handle))
        assert error.code == opwire.OUT_OF_MEMORY
        after = limited.counters()
        assert (after.bytes_allocated, after.bytes_allocated_peak, after.tensors) == (
            before.bytes_allocated,
            before.bytes_allocated_peak,
            before.tensors,
        )
    limited.run("aten::fill_.Scalar", Handle(small.handle), 3.0)
    assert floats_in(limited, small) == (3.0,) * 10
    assert floats_in(limited, view) == (3.0,) * 3
    limited.send(opwire.Free([small.handle, view.handle, one.handle, wide.handle]))
    assert limited.counters().bytes_allocated == 0


def test_an_op_that_fails_after_it_resized_has_changed_nothing(limited: Client) -> None:
    source = limited.made("aten::zeros", [10], device=HERE)
    target = limited.made("aten::zeros", [10], device=HERE)
    beyond = limited.made("aten::full", [1000], 99, dtype=DType("int64"), device=HERE)
    before = limited.counters().bytes_allocated
    limited.refused(
        "aten::index_select.out", Handle(source.handle), 0, Handle(beyond.handle), out=Handle(target.handle)
    )
    assert len(limited.download(target)) == 40
    assert limited.counters().bytes_allocated == before


def test_taking_over_the_memory_of_another_tensor_counts_once(limited: Client) -> None:
    small = limited.made("aten::zeros", [10], device=HERE)
    large = limited.made("aten::zeros", [1000], device=HERE)
    limited.run("aten::set_.source_Tensor", Handle(small.handle), Handle(large.handle))
    assert limited.counters().bytes_allocated == 4000
    limited.send(opwire.Free([large.handle, small.handle]))
    assert limited.counters().bytes_allocated == 0


def test_fetching_a_tensor_that_looks_larger_than_the_quota_is_refused(limited: Client) -> None:
    made = limited.made("aten::zeros", [1], device=HERE)
    wide = limited.made("aten::expand", Handle(made.handle), [2**40])
    for request in (opwire.Download(wide.handle), opwire.Upload(wide.handle, "float32", (2**40,))):
        reply = limited.ask(request)
        assert isinstance(reply, Error)
        assert reply.code == opwire.OUT_OF_MEMORY


def test_freed_memory_can_be_used_again(limited: Client) -> None:
    for _ in range(8):
        made = limited.made("aten::zeros", [MIB // 8], device=HERE)
        limited.send(opwire.Free([made.handle]))
    assert limited.counters().bytes_allocated == 0


# --- what ends a session ------------------------------------------------------------------------


def test_garbage_ends_the_session_with_a_word(client: Client) -> None:
    client.channel.send_frames(b"\x00" * 100, timeout_s=TIMEOUT_S)
    reply = client.channel.receive_reply(1, timeout_s=TIMEOUT_S)
    assert isinstance(reply, Error)
    assert reply.code == "transport.protocol"
    assert client.hears_the_end()


@pytest.mark.parametrize(
    "frames",
    [
        b"\xff\xff\xff\xff\x01\x00\x00\x00\x01",
        opwire.encode(9, opwire.Stats()),
        opwire.encode(1, opwire.Open("again")),
        opwire.encode(1, opwire.Free([4])),
        opwire.data_header(1, 4) + b"data",
        opwire.encode(1, opwire.Stats())[:-1],
    ],
    ids=["oversized", "out of order", "open again", "free unknown", "data unasked", "truncated"],
)
def test_a_broken_stream_ends_the_session(client: Client, frames: bytes) -> None:
    client.channel.send_frames(frames, timeout_s=TIMEOUT_S)
    if frames == opwire.encode(1, opwire.Stats())[:-1]:
        client.channel.close()  # the rest never comes
    else:
        assert client.hears_the_end()


def test_data_that_is_not_what_was_announced_ends_the_session(client: Client) -> None:
    made = client.made("aten::zeros", [2], device=HERE)
    sequence = client.send(opwire.Upload(made.handle, "float32", (2,)))
    client.channel.receive_reply(sequence, timeout_s=TIMEOUT_S)
    client.channel.send_data(sequence, memoryview(bytes(9)), timeout_s=TIMEOUT_S)
    assert client.hears_the_end()
