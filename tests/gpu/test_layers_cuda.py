"""Recurrent layers, optimizers and packed weights on an executor with a GPU match those on the GPU itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from genie import device
from tests.device.conftest import D0, remote_device
from tests.device.test_foreach import count_ops, optimize
from tests.device.test_recurrent import run
from tests.executor.process import running_executor


@pytest.fixture(scope="module", autouse=True)
def cuda_executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that can use the NVIDIA GPU")
    with running_executor(tmp_path_factory.mktemp("layers") / "executor", vendor="nvidia") as executor:
        device.attach([remote_device(0, lambda: executor.port)])
        torch.zeros(1, device=D0)
        yield
        device.detach()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [{"dropout": 0.5}, {}, {"bidirectional": True}, {"bias": False}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layer_matches_local_cuda(
    kind: type[nn.RNNBase], options: dict[str, Any], grad: bool
) -> None:
    expected = run("cuda", kind, grad=grad, **options)
    for one, other in zip(run(D0, kind, grad=grad, **options), expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.cpu(), other.cpu())


def test_projections_match_local_cuda() -> None:
    for one, other in zip(run(D0, nn.LSTM, proj_size=4), run("cuda", nn.LSTM, proj_size=4), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu())


def test_lstm_is_sent_as_one_op() -> None:
    module, x = nn.LSTM(8, 16, 2).to(D0), torch.randn(100, 4, 8, device=D0)
    module(x)
    assert count_ops(lambda: module(x)) < 10


@pytest.mark.parametrize("autocast", [False, True])
def test_packed_sequence_matches_local_cuda(autocast: bool) -> None:
    def work(where: str) -> list[torch.Tensor]:
        torch.manual_seed(2)
        module = nn.LSTM(4, 5, bidirectional=True).to(where)
        x = torch.linspace(-1, 1, 48).view(4, 3, 4).to(where)
        with torch.autocast(torch.device(where).type, dtype=torch.float16, enabled=autocast):
            packed, _ = module(pack_padded_sequence(x, [4, 2, 1]))
        padded, _ = pad_packed_sequence(packed)
        padded.float().square().sum().backward()
        return [padded, *(each.grad for each in module.parameters())]

    for one, other in zip(work(D0), work("cuda"), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.cpu(), other.cpu())


def test_bfloat16_lstm_is_close_to_local_cuda() -> None:
    found = run(D0, nn.LSTM, dtype=torch.float32)[0]
    module = nn.LSTM(6, 8).bfloat16()
    twin = nn.LSTM(6, 8).bfloat16()
    twin.load_state_dict(module.state_dict())
    x = torch.linspace(-1, 1, 90, dtype=torch.bfloat16).view(5, 3, 6)
    one, other = module.to(D0)(x.to(D0))[0], twin.to("cuda")(x.to("cuda"))[0]
    torch.testing.assert_close(one.cpu(), other.cpu(), rtol=2e-2, atol=1e-2)
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.SGD(p, momentum=0.9),
    ],
)
def test_optimizer_step_matches_local_cuda(make: Any) -> None:
    found, counts = optimize(D0, make)
    assert max(counts[1:]) <= 12

    def run_locally() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        parameters = [nn.Parameter(torch.randn(3, generator=generator).cuda()) for _ in range(40)]
        optimizer = make(parameters)
        for number in range(4):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (number + 1)
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.1 + number
            optimizer.step()
        return [parameter.detach().cpu() for parameter in parameters]

    for one, other in zip(found, run_locally(), strict=True):
        assert torch.equal(one, other)


def test_packed_weights_match_local_cuda() -> None:
    def work(where: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = torch.randint(0, 255, (64, 64), dtype=torch.uint8).to(where)
        packed = torch.ops.aten._convert_weight_to_int4pack(weights, 2)
        x = torch.randn(3, 128, dtype=torch.bfloat16).to(where)
        scales = torch.rand(4, 64, 2, dtype=torch.bfloat16).to(where)
        return [packed, torch.ops.aten._weight_int4pack_mm(x, packed, 32, scales)]

    for one, other in zip(work(D0), work("cuda"), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def test_sparse_gradients_match_local_cuda() -> None:
    def work(where: str) -> torch.Tensor:
        torch.manual_seed(0)
        module = nn.Embedding(10, 4, sparse=True).to(where)
        optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.tensor([1, 2, 2, 7]).to(where)).square().sum().backward()
            optimizer.step()
        return module.weight.detach()

    torch.testing.assert_close(work(D0).cpu(), work("cuda").cpu())
