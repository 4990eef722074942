"""LSTM, GRU and RNN: as on a local CPU, oneDNN's LSTM with gradients, the whole op without, else steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.device.conftest import D0
from tests.device.test_foreach import count_ops
from tests.executor.client import served_session

pytestmark = pytest.mark.usefixtures("devices")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"bidirectional": True, "batch_first": True},
    {"bias": False},
    {"dropout": 0.5},
    {"dtype": torch.float64},
]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """As in the executor: sums over several threads differ in rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(
    device: str, kind: type[nn.RNNBase], *, grad: bool = True, steps: int = 5, **options: Any
) -> list[torch.Tensor]:
    """Outputs, final states and gradients."""
    torch.manual_seed(1)
    module = kind(6, 8, num_layers=2, **options).to(device)
    dtype = options.get("dtype", torch.float32)
    shape = (3, steps, 6) if options.get("batch_first") else (steps, 3, 6)
    x = torch.linspace(-1, 1, 18 * steps, dtype=dtype).view(shape).to(device).requires_grad_(grad)
    torch.manual_seed(2)  # also resets cuDNN's dropout
    with torch.set_grad_enabled(grad):
        output, states = module(x)
        results = [output, *(states if isinstance(states, tuple) else [states])]
        if grad:
            sum(each.square().sum() for each in results).backward()
            results += [x.grad, *(each.grad for each in module.parameters())]
    return results


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "bidirectional", "no-bias", "dropout", "float64"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_results_equal_those_of_a_local_cpu(
    kind: type[nn.RNNBase], options: dict[str, Any], grad: bool
) -> None:
    found = run(D0, kind, grad=grad, **options)
    expected = run("cpu", kind, grad=grad, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        if (
            kind is nn.LSTM and "dropout" in options and not grad
        ):  # oneDNN's training op, locally its inference op
            torch.testing.assert_close(one.cpu(), other)
        else:
            assert torch.equal(one.cpu(), other)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_projections_equal_those_of_a_local_cpu(grad: bool) -> None:
    found = run(D0, nn.LSTM, grad=grad, proj_size=4)
    for one, other in zip(found, run("cpu", nn.LSTM, grad=grad, proj_size=4), strict=True):
        assert torch.equal(one.cpu(), other)


def test_number_of_ops_does_not_depend_on_the_number_of_steps() -> None:
    assert count_ops(lambda: run(D0, nn.LSTM, grad=True, steps=40)) < 60
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        assert count_ops(lambda kind=kind: run(D0, kind, grad=False, steps=40)) < 30


def test_packed_sequences_match_local() -> None:
    def work(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = nn.LSTM(4, 5, bidirectional=True).to(device)
        x = torch.linspace(-1, 1, 48).view(4, 3, 4).to(device).requires_grad_()
        packed, (hidden, cell) = module(pack_padded_sequence(x, [4, 2, 1]))
        padded, _ = pad_packed_sequence(packed)
        padded.square().sum().backward()
        return [padded, hidden, cell, x.grad, *(each.grad for each in module.parameters())]

    for one, other in zip(work(D0), work("cpu"), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_wrong_shapes_raise() -> None:
    module = nn.LSTM(4, 5).to(D0)
    with pytest.raises(RuntimeError, match="input"):
        module(torch.zeros(3, 2, 6, device=D0))
    weights = [each.detach() for each in module.parameters()]
    states = [torch.zeros(1, 2, 9, device=D0)] * 2  # more than the weights are made for
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises((RuntimeError, ValueError), match=r"shape|contiguous"),
        ):
            torch.lstm(torch.zeros(3, 2, 4, device=D0), states, weights, True, 1, 0.0, False, False, False)[
                0
            ].cpu()


def test_executor_refuses_shapes_that_onednn_does_not_check() -> None:
    with served_session() as (_, client):
        weight = client.floats(*range(8))
        error = client.run_refused(
            "aten::mkldnn_rnn_layer", *[weight] * 7, False, [], 2, 1024, 1, True, False, False, True
        )
        assert error.code == "device.op_refused"
        assert "three dimensions" in error.message
