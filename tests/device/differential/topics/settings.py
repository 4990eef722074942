"""Settings of the process: defaults, deterministic algorithms, precision, autocast and grad modes."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from tests.device.differential.snippets import Inputs, Table

SNIPPETS = Table()


@SNIPPETS.define
def default_dtype_of_division(on: Inputs) -> object:
    torch.set_default_dtype(torch.float64)
    return (
        on.count(3, dtype=torch.int64) / 3,
        on.count(3, dtype=torch.int64).sqrt(),
        on.count(3, dtype=torch.int64) * 1.5,
    )


@SNIPPETS.define
def default_dtype_changes_for_same_shapes(on: Inputs) -> object:
    before = on.count(3, dtype=torch.int64) / 3
    torch.set_default_dtype(torch.float64)
    between = on.count(3, dtype=torch.int64) / 3
    torch.set_default_dtype(torch.float32)
    return before, between, on.count(3, dtype=torch.int64) / 3


@SNIPPETS.define
def default_dtype_of_factories(on: Inputs) -> object:
    torch.set_default_dtype(torch.bfloat16)
    return [
        torch.zeros(2, device=on.device), torch.arange(0, 1, 0.5, device=on.device), on.tensor([1.5]),
        torch.linspace(0, 1, 3, device=on.device), torch.full((1,), 2.5, device=on.device),
        torch.eye(2, device=on.device), torch.ones(1, device=on.device),
        torch.hann_window(4, device=on.device).dtype,
    ]  # fmt: skip


@SNIPPETS.define
def default_dtype_of_mean_and_bool(on: Inputs) -> object:
    torch.set_default_dtype(torch.float64)
    return on.bools(4) * 0.5, on.bools(4) / on.bools(4), torch.where(on.bools(2), 1.0, 2.0)


@SNIPPETS.define
def default_device(on: Inputs) -> object:
    with torch.device(on.device):
        return torch.zeros(2), torch.arange(3), torch.nn.Linear(2, 2).weight.shape


@SNIPPETS.define
def set_default_device(on: Inputs) -> object:
    torch.set_default_device(on.device)
    return torch.ones(2), torch.tensor([1.5]), torch.get_default_device().type == on.device.type


@SNIPPETS.define
def deterministic_empty_is_filled(on: Inputs) -> object:
    torch.use_deterministic_algorithms(True)
    return [
        torch.empty(3, device=on.device), torch.empty(2, dtype=torch.int16, device=on.device),
        torch.empty(2, dtype=torch.bool, device=on.device),
        torch.empty_strided((2, 2), (1, 2), device=on.device),
        torch.empty_like(on.count(3)), on.count(2).new_empty(2),
    ]  # fmt: skip


@SNIPPETS.define
def deterministic_resize_is_filled(on: Inputs) -> object:
    torch.use_deterministic_algorithms(True)
    return on.count(2).resize_(4)


@SNIPPETS.define
def deterministic_index_put(on: Inputs) -> object:
    torch.use_deterministic_algorithms(True)
    return torch.zeros(4, device=on.device).index_put_((on.tensor([1, 1, 2]),), on.normal(3), accumulate=True)


@SNIPPETS.define
def deterministic_scatter_add(on: Inputs) -> object:
    torch.use_deterministic_algorithms(True)
    return torch.zeros(4, device=on.device).scatter_add_(0, on.tensor([1, 1, 2]), on.normal(3))


@SNIPPETS.define
def deterministic_refuses(on: Inputs) -> object:
    torch.use_deterministic_algorithms(True)
    return on.count(4).put_(on.tensor([0, 0]), on.count(2), accumulate=False)


@SNIPPETS.define
def matmul_precision(on: Inputs) -> object:
    torch.set_float32_matmul_precision("high")
    return on.normal(16, 32) @ on.normal(32, 16), torch.get_float32_matmul_precision()


@SNIPPETS.define
def flush_denormal(on: Inputs) -> object:
    torch.set_flush_denormal(True)
    try:
        return on.tensor([1e-40]) * 1.0
    finally:
        torch.set_flush_denormal(False)


@SNIPPETS.define
def no_grad(on: Inputs) -> object:
    x = on.normal(3, grad=True)
    with torch.no_grad():
        return x * 2, x.requires_grad, torch.is_grad_enabled()


@SNIPPETS.define
def inference_mode(on: Inputs) -> object:
    with torch.inference_mode():
        y = on.normal(3) * 2
    return y.is_inference(), y


@SNIPPETS.define
def inference_tensor_in_autograd(on: Inputs) -> object:
    with torch.inference_mode():
        y = on.normal(3) * 2
    return (on.normal(3, grad=True) * y).sum().backward()


@SNIPPETS.define
def inference_tensor_in_place_outside(on: Inputs) -> object:
    with torch.inference_mode():
        y = on.normal(3) * 2
    return y.add_(1)


@SNIPPETS.define
def enable_grad_inside_no_grad(on: Inputs) -> object:
    x = on.normal(3, grad=True)
    with torch.no_grad(), torch.enable_grad():
        return x * 2


@SNIPPETS.define
def autocast_matmul(on: Inputs) -> object:
    with torch.autocast(on.device.type, dtype=torch.bfloat16):
        return on.normal(4, 4) @ on.normal(4, 4)


@SNIPPETS.define
def autocast_mixed_ops(on: Inputs) -> object:
    with torch.autocast(on.device.type, dtype=torch.bfloat16):
        x = F.linear(on.normal(2, 4), on.normal(3, 4))
        return (
            x,
            F.softmax(x, -1).dtype,
            F.layer_norm(x, (3,)).dtype,
            (x + on.normal(2, 3)).dtype,
            x.sum().dtype,
        )


@SNIPPETS.define
def autocast_nested_disabled(on: Inputs) -> object:
    kind = on.device.type
    with torch.autocast(kind, dtype=torch.bfloat16), torch.autocast(kind, enabled=False):
        return on.normal(2, 2) @ on.normal(2, 2)


@SNIPPETS.define
def autocast_backward(on: Inputs) -> object:
    layer = torch.nn.Linear(4, 3, device=on.device)
    with torch.no_grad():
        layer.weight.copy_(on.normal(3, 4))
        layer.bias.zero_()
    with torch.autocast(on.device.type, dtype=torch.bfloat16):
        loss = F.cross_entropy(layer(on.normal(5, 4)), on.integers(5, below=3))
    loss.backward()
    return loss, layer.weight.grad, layer.bias.grad


@SNIPPETS.define
def autocast_conv(on: Inputs) -> object:
    with torch.autocast(on.device.type, dtype=torch.bfloat16):
        return F.conv2d(on.normal(1, 3, 6, 6), on.normal(4, 3, 3, 3)).dtype


@SNIPPETS.define
def autocast_dtype_query(on: Inputs) -> object:
    with torch.autocast(on.device.type, dtype=torch.bfloat16):
        return torch.is_autocast_enabled(on.device.type), torch.get_autocast_dtype(on.device.type)


@SNIPPETS.define
def anomaly_mode(on: Inputs) -> object:
    with torch.autograd.detect_anomaly(check_nan=True):
        x = on.tensor([-1.0]).requires_grad_()
        return (x.sqrt() * 0).sum().backward()


@SNIPPETS.define
def saved_tensors_on_cpu(on: Inputs) -> object:
    x = on.normal(3, grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = (x * x).exp()
    y.sum().backward()
    return x.grad


@SNIPPETS.define
def saved_tensors_hooks(on: Inputs) -> object:
    x, packed = on.normal(3, grad=True), []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t.shape)
        return t * 2

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t / 2):
        y = x.exp()
    y.sum().backward()
    return x.grad, packed


@SNIPPETS.define
def print_options(on: Inputs) -> object:
    torch.set_printoptions(precision=2, sci_mode=False)
    try:
        return str(on.normal(3, 3)), repr(on.count(2, grad=True)), f"{on.normal(1).item():.3f}"
    finally:
        torch.set_printoptions(profile="default")


@SNIPPETS.define
def backend_flags_of_attention(on: Inputs) -> object:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(
            *(on.normal(1, 2, 5, 8) for _ in range(3)), attn_mask=on.normal(5, 5)
        )


@SNIPPETS.define
def no_backend_for_attention(on: Inputs) -> object:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return F.scaled_dot_product_attention(*(on.normal(2, 5, 7) for _ in range(3)))
