"""Ops that are defined, used and destroyed: torch reuses their addresses for other ops."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from genie.errors import OpRefusedError
from tests.device.conftest import D0

pytestmark = pytest.mark.usefixtures("devices")


@contextmanager
def defined_op(schema: str, *, namespace: str | None = None) -> Iterator[torch._ops.OpOverloadPacket]:
    """An op without a kernel for the device, so that it is sent, and refused by the executor."""
    library = torch.library.Library(namespace or f"t{uuid.uuid4().hex}", "FRAGMENT")
    try:
        library.define(schema)
        yield getattr(getattr(torch.ops, library.ns), schema.partition("(")[0])
    finally:
        library._destroy()


SCHEMAS = (
    "one(Tensor a) -> Tensor",
    "three(Tensor a, Tensor b, Tensor c) -> Tensor",
    "none(Tensor[] a, int b, float c, Tensor d) -> (Tensor, Tensor)",
    "two(Tensor a, Tensor? b=None) -> Tensor",
)


def refusal_of(call: torch._ops.OpOverloadPacket, name: str) -> str:
    x = torch.ones(2, device=D0)
    arguments = {"one": (x,), "three": (x, x, x), "none": ([x, x], 1, 2.0, x), "two": (x,)}[name]
    with pytest.raises(OpRefusedError) as refused:
        call(*arguments)
        torch.remote_accelerator.synchronize(0)  # type: ignore[attr-defined]
    return str(refused.value)


def test_an_op_is_not_taken_for_a_destroyed_one_at_its_address() -> None:
    for round_number in range(8):
        for schema in SCHEMAS[round_number % 2 :]:
            name = schema.partition("(")[0]
            with defined_op(schema) as op:
                message = refusal_of(op, name)
                assert f"::{name} is not allowed on an executor" in message
            gc.collect()


def test_an_op_that_is_defined_again_has_its_new_schema() -> None:
    namespace = f"t{uuid.uuid4().hex}"
    x = torch.ones(2, device=D0)
    with defined_op("changing(Tensor a) -> Tensor", namespace=namespace) as op, pytest.raises(OpRefusedError):
        op(x).cpu()
    gc.collect()
    with (
        defined_op("changing(Tensor a, Tensor b, int c) -> Tensor", namespace=namespace) as op,
        pytest.raises(OpRefusedError, match="changing is not allowed"),
    ):
        op(x, x, 3).cpu()
    assert (x + x).tolist() == [2, 2]
