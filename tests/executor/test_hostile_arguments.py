"""Arguments that torch's kernels trust are checked before the kernel runs (argument_checks.h)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.executor.client import ErrorReply
from tests.executor.fuzz_calls import UNDEFINED, Call, TensorSpec
from tests.executor.fuzz_worker import FuzzSession


@pytest.fixture(scope="module")
def session() -> Iterator[FuzzSession]:
    session = FuzzSession("cpu")
    try:
        yield session
    finally:
        session.close()


def floats(*shape: int) -> TensorSpec:
    return TensorSpec("float32", shape)


def integers(*values: int, shape: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec("int64", (len(values),) if shape is None else shape, values)


def run(session: FuzzSession, op: str, *arguments: Any) -> ErrorReply | None:
    """The error, unless the call succeeded: the fuzzer predicts no outputs."""
    error = session.call(Call(op, arguments))
    return None if error is None or error.message.startswith("predicted") else error


def _max_pool(index: int) -> tuple[Any, ...]:
    indices = integers(index, 1, 2, 3, shape=(1, 1, 2, 2))
    return (floats(1, 1, 2, 2), floats(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


def _embedding_bag(last_offset: int) -> tuple[Any, ...]:
    return (floats(5, 3), integers(1, 4), integers(0, last_offset), False, 0, False, None, False, -1)


def _embedding_bag_backward(bag: int) -> tuple[Any, ...]:
    none = TensorSpec("int64", (0,))
    return (floats(2, 3), integers(1, 4), integers(0, bag), integers(1, 1), none, 5, False, 0, None, -1)


def _ctc_loss(label: int) -> tuple[Any, ...]:
    return (floats(4, 1, 3), integers(1, label, shape=(1, 2)), [4], [2], 0, False)


def _segments(last: int) -> tuple[Any, ...]:
    return (floats(4), "sum", integers(2, last), None, None, 0, True, None)


# name, arguments for a number, one that is valid, some that are not
NUMBERS = [
    ("max_pool2d_with_indices_backward", _max_pool, 15, (16, -2, 2**40)),
    ("adaptive_max_pool2d_backward",
     lambda i: (floats(1, 1, 1), floats(1, 2, 2), integers(i, shape=(1, 1, 1))), 3, (4, -1)),
    ("embedding_dense_backward", lambda i: (floats(2, 3), integers(0, i), 5, -1, True), 4, (5, -1)),
    ("_embedding_bag", _embedding_bag, 2, (3, -1)),
    ("_embedding_bag_dense_backward", _embedding_bag_backward, 1, (2, -1)),
    ("_ctc_loss", _ctc_loss, 2, (3, -1)),
    ("segment_reduce", _segments, 2, (3, -1)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arguments", "valid", "invalid"), NUMBERS, ids=[row[0] for row in NUMBERS])
def test_index_out_of_range_is_an_error(
    session: FuzzSession, op: str, arguments: Any, valid: int, invalid: tuple[int, ...]
) -> None:
    assert run(session, op, *arguments(valid)) is None
    for number in invalid:
        error = run(session, op, *arguments(number))
        assert error is not None, number
        assert error.op == f"aten::{op}"


SHAPES = [
    ("_cdist_backward", lambda n: (floats(n, 3), floats(2, 4), floats(3, 4), 2.0, floats(2, 3)), 2, 1),
    ("_pdist_backward", lambda n: (floats(n), floats(3, 4), 2.0, floats(3)), 3, 2),
    ("_log_softmax_backward_data", lambda n: (floats(2, 3), floats(n, 3), 1, 6), 2, 1),
    ("native_layer_norm_backward",
     lambda n: (floats(2, 3), floats(2, 3), [3], floats(n, 1), floats(2, 1), floats(3), floats(3),
                [True] * 3), 2, 1),
    ("native_batch_norm",
     lambda n: (floats(2, 4, 3), floats(n), floats(4), floats(4), floats(4), True, 0.1, 1e-5), 4, 3),
    ("native_batch_norm_backward",
     lambda n: (floats(2, 4), floats(2, 4), floats(4), floats(4), floats(4), floats(n), floats(4), True, 1e-5,
                [True] * 3), 4, 0),
    ("reflection_pad1d_backward", lambda n: (floats(1, n), floats(1, 3), [1, 1]), 5, 4),
    ("unfold_backward", lambda n: (floats(3, 2), [n], 0, 2, 1), 4, 9),
    ("_fft_r2c", lambda n: (floats(3, 3), [n], 0, True), 1, 2**62),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arguments", "valid", "invalid"), SHAPES, ids=[row[0] for row in SHAPES])
def test_shape_that_does_not_match_is_refused(
    session: FuzzSession, op: str, arguments: Any, valid: int, invalid: int
) -> None:
    assert run(session, op, *arguments(valid)) is None
    error = run(session, op, *arguments(invalid))
    assert error is not None
    assert (error.code, error.op) == ("device.op_refused", f"aten::{op}")


def test_missing_statistics_are_refused(session: FuzzSession) -> None:
    arguments = (floats(2, 4), floats(2, 4), *[UNDEFINED] * 5, False, 1e-5, [True] * 3)
    error = run(session, "native_batch_norm_backward", *arguments)
    assert error is not None
    assert "running_mean is missing" in error.message
