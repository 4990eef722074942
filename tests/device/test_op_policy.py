"""The tables of reviewed ops: what executors allow, and what the client knows about ops."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from genie.executor.session import ALLOWED_OPS
from tests.executor.client import RecordKind, record, served_session, template_body, u32

_NATIVE = Path(__file__).parents[2] / "native" / "torch"
_ROW = re.compile(r'\{"(?:aten::)?(\w+)", (\w+(?: \| \w+)*)\},')
# Ops of these families differ between accelerators: a new one must be reviewed for the table.
_EXECUTOR_INFERS = re.compile(
    r"_?(native_|cudnn_|miopen_|thnn_)?(batch_norm|layer_norm|ctc_loss|embedding_bag)\w*"
    r"|_(scaled_dot_product|flash_attention|efficient_attention|cudnn|thnn|fused_sdp)_\w+"
)
_SHAPE_FROM_NUMBERS = re.compile(r"_?(upsample|histogram)\w*|histc|\w*range|linspace|logspace")


def _rows(file: str) -> dict[str, str]:
    rows = _ROW.findall((_NATIVE / file).read_text())
    names = [name for name, _ in rows]
    assert names == sorted(set(names)), f"{file}: the rows must be sorted and unique"
    return dict(rows)


def _ops_of_torch() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("aten::").partition(".")[0] for name in names if name.startswith("aten::")}


def test_rows_of_the_client_are_of_allowed_or_decomposed_ops() -> None:
    rows = _rows("device/op_policy.cpp")
    unknown = [
        name for name, policy in rows.items() if name not in ALLOWED_OPS and "DECOMPOSED" not in policy
    ]
    assert unknown == []


def test_allowed_ops_of_families_have_a_row() -> None:
    rows = _rows("device/op_policy.cpp")
    for pattern, policy in (
        (_EXECUTOR_INFERS, "EXECUTOR_INFERS"),
        (_SHAPE_FROM_NUMBERS, "SHAPE_FROM_NUMBERS"),
    ):
        missing = [n for n in sorted(ALLOWED_OPS) if pattern.fullmatch(n) and policy not in rows.get(n, "")]
        assert missing == [], policy


def test_checked_ops_are_allowed() -> None:
    rows, spatial = _rows("executor/argument_checks.cpp"), _rows("executor/spatial_checks.cpp")
    assert not set(rows) & set(spatial)
    assert set(rows) | set(spatial) <= ALLOWED_OPS


def test_every_op_of_torch_that_is_not_allowed_is_refused_by_name() -> None:
    names = sorted(_ops_of_torch() - ALLOWED_OPS)
    assert len(names) > 200
    with served_session() as (_, client):
        for name in names:
            body = template_body(f"aten::{name}", [], [])
            client.send(
                record(RecordKind.DEFINE_TEMPLATE, 1, u32(len(body)) + body),
                record(RecordKind.OP, 1),
                record(RecordKind.DROP_TEMPLATE, 1),
            )
            error = client.sync()
            assert error is not None, name
            assert (error.code, error.op) == ("device.op_refused", f"aten::{name}")
            assert f"aten::{name} is not allowed on an executor" in error.message
