"""The allowed ops have no access outside the process and do not skip checks of their arguments."""

from __future__ import annotations

import re

import torch

from genie.executor.session import ALLOWED_OPS
from tests.executor.client import NewOutput, served_session

NEVER = re.compile(
    r"from_file|_?pin_memory|is_pinned|record_stream|_print|_test_.*|_unsafe_(index|masked).*|_to_cpu|_copy_from.*"
    r"|set_data|_backward|requires_grad_|retain_grad|.*_mps|_mps_.*|_?sparse_.*|_?nested_.*|fbgemm_.*"
    r"|(?!mkldnn_rnn_layer).*mkldnn.*|_?quantize_.*|.*_jagged.*|_dyn_quant.*|_cslt_.*"
)


def test_allowed_ops_have_no_access_outside_the_process() -> None:
    assert [name for name in sorted(ALLOWED_OPS) if NEVER.fullmatch(name)] == []


def test_allowed_ops_exist_in_torch() -> None:
    known = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    missing = ALLOWED_OPS - known
    # Supported releases differ in a few ops.
    assert len(missing) < 40, sorted(missing)


def test_op_outside_the_allowed_ops_is_refused() -> None:
    with served_session(allowed_ops=["relu"]) as (_, client):
        source = client.floats(-1, 1)
        assert client.floats_in(client.op_output("aten::relu", source, outputs=[NewOutput((2,))])) == (0, 1)
        error = client.run_refused("aten::neg", source)
        assert (error.code, error.op) == ("device.op_refused", "aten::neg")
