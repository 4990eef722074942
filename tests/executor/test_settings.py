"""PyTorch settings of the client: they apply to the ops that follow, and graphs keep theirs."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
import torch

from tests.executor.client import (
    DTYPES,
    Client,
    ErrorReply,
    NewOutput,
    RecordKind,
    ServedSession,
    Tensor,
    encode_argument,
    record,
    served_session,
    u32,
)

DENORMAL = 1e-40  # as float32

# The fields of native/torch/settings.h, in order: format, and the value in a process that has changed none.
FIELDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "default_dtype": ("B", (DTYPES["float32"][0],)),
    "flushes_denormals": ("B", (0,)),
    "cudnn_benchmark_limit": ("H", (10,)),
    "deterministic_algorithms": ("B", (0,)),
    "deterministic_warn_only": ("B", (0,)),
    "deterministic_fill": ("B", (1,)),
    "cublas_workspace": ("B", (0,)),
    "cudnn_enabled": ("B", (1,)),
    "cudnn_benchmark": ("B", (0,)),
    "cudnn_deterministic": ("B", (0,)),
    "cudnn_depthwise_kernel": ("B", (0,)),
    "mkldnn_enabled": ("B", (1,)),
    "mkldnn_deterministic": ("B", (0,)),
    "flash_sdp": ("B", (1,)),
    "memory_efficient_sdp": ("B", (1,)),
    "math_sdp": ("B", (1,)),
    "cudnn_sdp": ("B", (1,)),
    "math_sdp_reduced_precision": ("B", (0,)),
    "sdp_priorities": ("5B", (1, 2, 0, 3, 4)),
    "fp16_reduction": ("B", (0,)),
    "bf16_reduction": ("B", (0,)),
    "fp16_accumulation": ("B", (0,)),
    "cuda_conv": ("B", (1,)),
    "cuda_rnn": ("B", (1,)),
    "cuda_matmul": ("B", (0,)),
    "mkldnn_conv": ("B", (0,)),
    "mkldnn_rnn": ("B", (0,)),
    "mkldnn_matmul": ("B", (0,)),
    "reserved": ("B", (0,)),
}


def settings_record(**changes: int) -> bytes:
    assert changes.keys() <= FIELDS.keys()
    body = b"".join(
        struct.pack(f"<{form}", *((changes[name],) if name in changes else default))
        for name, (form, default) in FIELDS.items()
    )
    return record(RecordKind.SETTINGS, 0, body)


@pytest.fixture
def session() -> Iterator[tuple[ServedSession, Client]]:
    with served_session() as (served, client):
        yield served, client
        # The session runs in this process, so its settings are those of the tests that follow.
        client.send(settings_record())
        assert client.sync() is None


def double(client: Client, tensor: Tensor) -> Tensor:
    return client.op_output("aten::add.Tensor", tensor, tensor, 1, outputs=[NewOutput((1,))])


def test_settings_apply_to_the_ops_that_follow(session: tuple[ServedSession, Client]) -> None:
    _, client = session
    made = client.floats(DENORMAL)
    before = double(client, made)
    client.send(settings_record(flushes_denormals=1))
    after = double(client, made)
    client.send(settings_record())
    last = double(client, made)
    assert [client.floats_in(each)[0] > 0 for each in (before, after, last)] == [True, False, True]


def test_integer_division_has_the_default_dtype_of_the_client(session: tuple[ServedSession, Client]) -> None:
    _, client = session
    client.send(settings_record(default_dtype=DTYPES["float64"][0]))
    number = client.upload((1,), struct.pack("<q", 3), "int64")
    found = client.run_dynamic("aten::div.Tensor", number, number)
    assert not isinstance(found, ErrorReply)
    assert found.values[0].dtype == "float64"


def test_nondeterministic_op_fails_while_deterministic_algorithms_are_required(
    session: tuple[ServedSession, Client],
) -> None:
    _, client = session
    target, source = client.floats(1, 2), client.floats(5)
    index = client.upload((1,), struct.pack("<q", 1), "int64")
    client.send(settings_record(deterministic_algorithms=1))
    refused = client.run_refused("aten::put", target, index, source, False)
    assert "does not have a deterministic implementation" in refused.message
    client.send(settings_record(deterministic_algorithms=1, deterministic_warn_only=1))
    assert not isinstance(client.run_dynamic("aten::put", target, index, source, False), ErrorReply)


def test_settings_apply_on_the_next_connection(session: tuple[ServedSession, Client]) -> None:
    served, client = session
    made = client.floats(DENORMAL)
    client.send(settings_record(flushes_denormals=1))
    assert client.sync() is None
    client.close()
    assert served.wait_end() == "lost"
    client.pipe = served.connect(replies_received=client.replies)
    assert client.floats_in(double(client, made)) == (0.0,)


@pytest.mark.parametrize("is_changed_inside", [False, True])
def test_replay_uses_the_settings_of_the_recording(
    session: tuple[ServedSession, Client], is_changed_inside: bool
) -> None:
    _, client = session
    made = client.floats(DENORMAL)
    number, define = client.template("aten::add.Tensor", [made, made, 1], [NewOutput((1,))])
    results = [Tensor(client.new_storage(), (1,)) for _ in range(2)]
    data = b"".join(encode_argument(each)[1] for each in (made, made, 1))
    ops = [record(RecordKind.OP, number, data + u32(result.storage)) for result in results]
    flushing, normal = settings_record(flushes_denormals=1), settings_record()
    client.send(define, normal if is_changed_inside else flushing)
    client.send(record(RecordKind.GRAPH_BEGIN, 0, u32(0)), ops[0])
    client.send(flushing if is_changed_inside else normal, ops[1], record(RecordKind.GRAPH_END, 1))
    client.send(normal, record(RecordKind.GRAPH_REPLAY, 0, u32(0)))
    flushed = [client.floats_in(result) == (0.0,) for result in results]
    assert flushed == ([False, True] if is_changed_inside else [True, False])
    # The replay has not changed the settings of the session.
    assert client.floats_in(double(client, made)) == (pytest.approx(2 * DENORMAL, rel=1e-3),)


HOSTILE = {
    "a default dtype that is not floating": settings_record(default_dtype=DTYPES["int64"][0]),
    "an unknown default dtype": settings_record(default_dtype=200),
    "a flag of two": settings_record(flash_sdp=2),
    "an unknown precision": settings_record(mkldnn_conv=3),
    "a precision that CUDA does not have": settings_record(cuda_matmul=2),
    "an unknown reduction": settings_record(bf16_reduction=3),
    "an unknown workspace": settings_record(cublas_workspace=3),
    "an unknown depthwise kernel": settings_record(cudnn_depthwise_kernel=3),
    "truncated settings": settings_record()[:-1],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_unknown_settings_end_the_session(name: str) -> None:
    before = torch.get_default_dtype()
    with served_session() as (served, client):
        client.send(HOSTILE[name])
        fatal = client.receive()
        assert isinstance(fatal, ErrorReply)
        assert fatal.code == "transport.protocol"
        client.close()
        assert served.wait_end() == "fatal"
    assert torch.get_default_dtype() == before
