"""The list of ops: explicit, without what reaches outside, and without what trusts its arguments."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import pytest
import torch

from genie.agent.executor.ops import ALLOWED_OPS, allowed
from genie.errors import OpRefusedError
from genie.runtime.opwire import Handle, Inline, OwnDevice
from tests.agent.executor.client import Client, session_on_a_thread

HERE = OwnDevice()
NEVER = re.compile(
    r"from_file|_?pin_memory|is_pinned|record_stream|_print|_test_.*|_unsafe_(index|masked).*|_to_cpu|_copy_from.*"
    r"|set_data|_backward|requires_grad_|retain_grad|.*_mps|_mps_.*|_?sparse_.*|_?nested_.*|.*mkldnn.*|fbgemm_.*"
    r"|_?quantize_.*|.*_jagged.*|.*int[48]pack.*|_cslt_.*"
)


@pytest.fixture
def client() -> Iterator[Client]:
    with session_on_a_thread() as client:
        yield client


def test_nothing_that_reaches_outside_is_on_the_list() -> None:
    assert [name for name in sorted(ALLOWED_OPS) if NEVER.fullmatch(name)] == []


def test_the_list_is_sorted_and_names_ops_of_this_torch() -> None:
    known = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    missing = ALLOWED_OPS - known
    # A few come and go between the releases that are supported.
    assert len(missing) < 40, sorted(missing)


@pytest.mark.parametrize("name", ["aten::from_file", "aten::_unsafe_index.Tensor", "aten::not_yet_invented"])
def test_an_op_that_is_not_listed_is_refused_by_name(name: str) -> None:
    with pytest.raises(OpRefusedError, match=re.escape(name)):
        allowed(name)


def test_a_view_beyond_its_memory_is_refused_and_cannot_be_read(client: Client) -> None:
    small = client.made("aten::zeros", [4], device=HERE)
    refusal = client.refused("aten::_reshape_alias", Handle(small.handle), [20000], [1])
    assert "beyond the memory" in refusal.message
    assert client.counters().tensors == 1


def test_indices_are_checked_even_when_the_client_says_not_to(client: Client) -> None:
    target = client.made("aten::zeros", [4], device=HERE)
    far = Inline("int64", (1,), struct.pack("<q", 10_000_000))
    value = Inline("float32", (1,), struct.pack("<f", 1.0))
    refusal = client.refused("aten::_index_put_impl_", Handle(target.handle), [far], value, True, True)
    assert "out of" in refusal.message
