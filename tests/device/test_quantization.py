"""Quantization-aware training and packed weights give the same results as on a local CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.ao import quantization

from tests.device.conftest import D0
from tests.executor.client import served_session

pytestmark = pytest.mark.usefixtures("devices")

Results = list[torch.Tensor]


def make_input(device: str) -> torch.Tensor:
    return torch.linspace(-1, 1, 20).view(4, 5).to(device).requires_grad_()


def with_gradients(output: torch.Tensor, *leaves: torch.Tensor) -> Results:
    (output * output).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def fake_quantize_per_tensor(device: str) -> Results:
    x = make_input(device)
    return with_gradients(torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), x)


def fake_quantize_with_tensors(device: str) -> Results:
    x, scale = make_input(device), torch.tensor(0.1).to(device)
    zero_point = torch.tensor(0, dtype=torch.int32).to(device)
    return with_gradients(torch.fake_quantize_per_tensor_affine(x, scale, zero_point, -128, 127), x)


def fake_quantize_per_channel(device: str) -> Results:
    x, scales = make_input(device), torch.full((4,), 0.1).to(device)
    zero_points = torch.zeros(4, dtype=torch.int32).to(device)
    return with_gradients(torch.fake_quantize_per_channel_affine(x, scales, zero_points, 0, -8, 7), x)


def learnable_per_tensor(device: str) -> Results:
    x = make_input(device)
    scale = torch.tensor([0.1]).to(device).requires_grad_()
    zero_point = torch.zeros(1).to(device).requires_grad_()
    output = torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero_point, -8, 7)
    return with_gradients(output, x, scale, zero_point)


def learnable_per_channel(device: str) -> Results:
    x = make_input(device)
    scale = torch.full((4,), 0.1).to(device).requires_grad_()
    zero_point = torch.zeros(4).to(device).requires_grad_()
    output = torch._fake_quantize_learnable_per_channel_affine(x, scale, zero_point, 0, -8, 7)
    return with_gradients(output, x, scale, zero_point)


def run_observer(device: str, kind: Any, observer: Any, **options: Any) -> Results:
    module = kind.with_args(observer=observer, quant_min=0, quant_max=255, **options)().to(device)
    x = make_input(device)
    module(x * 2)
    return [*with_gradients(module(x), x), module.scale, module.zero_point]


def module_with_observer(device: str) -> Results:
    return run_observer(device, quantization.FakeQuantize, quantization.MovingAverageMinMaxObserver)


def fused_module(device: str) -> Results:
    return run_observer(
        device, quantization.FusedMovingAvgObsFakeQuantize, quantization.MovingAverageMinMaxObserver
    )


def fused_module_per_channel(device: str) -> Results:
    return run_observer(
        device,
        quantization.FusedMovingAvgObsFakeQuantize,
        quantization.MovingAveragePerChannelMinMaxObserver,
        ch_axis=0,
    )


def int8_matmul(device: str) -> Results:
    a, b = (
        torch.randint(-128, 127, (32, 64), dtype=torch.int8),
        torch.randint(-128, 127, (64, 16), dtype=torch.int8),
    )
    return [torch._int_mm(a.to(device), b.to(device))]


def int8_weights(device: str) -> Results:
    x, weights = (
        torch.randn(3, 64, dtype=torch.bfloat16),
        torch.randint(-128, 127, (16, 64), dtype=torch.int8),
    )
    scales = torch.rand(16, dtype=torch.bfloat16)
    return [torch._weight_int8pack_mm(x.to(device), weights.to(device), scales.to(device))]


def int4_weights(device: str) -> Results:
    weights = torch.randint(0, 15, (64, 128), dtype=torch.int32).to(device)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weights, 2)
    x = torch.randn(3, 128, dtype=torch.bfloat16).to(device)
    scales = torch.rand(4, 64, 2, dtype=torch.bfloat16).to(device)
    return [packed, torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)]


def scaled_matmul(device: str) -> Results:
    a, b = (torch.randn(16, 32).to(torch.float8_e4m3fn).to(device) for _ in range(2))
    one = torch.tensor(1.0).to(device)
    return [torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)]


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated.*:DeprecationWarning")
@pytest.mark.parametrize(
    "work",
    [
        fake_quantize_per_tensor,
        fake_quantize_with_tensors,
        fake_quantize_per_channel,
        learnable_per_tensor,
        learnable_per_channel,
        module_with_observer,
        fused_module,
        fused_module_per_channel,
        int8_matmul,
        int8_weights,
        int4_weights,
        scaled_matmul,
    ],
)
def test_results_equal_those_of_a_local_cpu(work: Callable[[str], Results]) -> None:
    torch.manual_seed(0)
    expected = work("cpu")
    torch.manual_seed(0)
    found = work(D0)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=0, atol=0)


def test_executor_refuses_packed_weights_with_too_few_scales() -> None:
    with served_session() as (_, client):
        x = client.upload((3, 128), bytes(3 * 128 * 2), "bfloat16")
        packed = client.upload((64, 64), bytes(64 * 64), "uint8")
        scales = client.upload((1, 64, 2), bytes(64 * 2 * 2), "bfloat16")
        error = client.run_refused("aten::_weight_int4pack_mm_for_cpu", x, packed, 32, scales)
        assert (error.code, error.op) == ("device.op_refused", "aten::_weight_int4pack_mm_for_cpu")
        assert (
            "argument 'qScaleAndZeros' must be a contiguous BFloat16 [4, 64, 2], not BFloat16 [1, 64, 2]"
            in error.message
        )
        empty = client.upload((0,), b"", "int64")
        one = client.floats(0.1)
        error = client.run_refused(
            "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", one, one, one, empty, -8, 7
        )
        assert "argument 'fake_quant_enabled' has too few elements" in error.message
