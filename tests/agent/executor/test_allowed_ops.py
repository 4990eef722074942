"""The list of ops: explicit, without what reaches outside, and without what trusts its arguments."""

from __future__ import annotations

import re

import torch

from genie.agent.executor.session import ALLOWED_OPS
from tests.agent.executor.client import New, served_session

NEVER = re.compile(
    r"from_file|_?pin_memory|is_pinned|record_stream|_print|_test_.*|_unsafe_(index|masked).*|_to_cpu|_copy_from.*"
    r"|set_data|_backward|requires_grad_|retain_grad|.*_mps|_mps_.*|_?sparse_.*|_?nested_.*|.*mkldnn.*|fbgemm_.*"
    r"|_?quantize_.*|.*_jagged.*|.*int[48]pack.*|_cslt_.*"
)


def test_nothing_that_reaches_outside_is_on_the_list() -> None:
    assert [name for name in sorted(ALLOWED_OPS) if NEVER.fullmatch(name)] == []


def test_the_list_is_sorted_and_names_ops_of_this_torch() -> None:
    known = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    missing = ALLOWED_OPS - known
    # A few come and go between the releases that are supported.
    assert len(missing) < 40, sorted(missing)


def test_what_is_not_on_the_list_is_refused_however_harmless() -> None:
    with served_session(allowed_ops=["relu"]) as (_, client):
        source = client.floats(-1, 1)
        assert client.floats_in(client.made("aten::relu", source, gives=[New((2,))])) == (0, 1)
        error = client.refused("aten::neg", source)
        assert (error.code, error.op) == ("device.op_refused", "aten::neg")
