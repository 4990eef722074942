"""Training: gradients and losses match the CPU on every device index, and errors propagate from backward."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn
from torch.utils.checkpoint import checkpoint

from genie.errors import RemoteOpError
from tests.device.conftest import D0, D1

pytestmark = pytest.mark.usefixtures("devices")


class PlannedError(Exception):
    pass


class TransformerBlock(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def transformer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), TransformerBlock(16, 4), nn.LayerNorm(16), nn.Linear(16, 1))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(),
        nn.MaxPool1d(2), nn.Flatten(), nn.Linear(16, 1),
    )  # fmt: skip


def training_losses(module: nn.Module, device: str, data: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    x, y = (tensor.to(device) for tensor in data)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize(
    ("make", "shape", "device"),
    [(mlp, (16,), D0), (mlp, (16,), D1), (transformer, (2, 5), D1), (convnet, (6,), D0)],
)
def test_training_matches_cpu(make: object, shape: tuple[int, ...], device: str) -> None:
    torch.manual_seed(0)
    module: nn.Module = make()  # type: ignore[operator]
    data = torch.randn(*shape, 8), torch.randn(*shape, 1)
    twin = copy.deepcopy(module).to(device)
    for each, where in ((module, "cpu"), (twin, device)):
        F.mse_loss(each(data[0].to(where)), data[1].to(where)).backward()
    for mine, theirs in zip(twin.parameters(), module.parameters(), strict=True):
        assert mine.grad is not None
        assert str(mine.device) == str(mine.grad.device) == device
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)
    assert training_losses(twin, device, data) == pytest.approx(
        training_losses(module, "cpu", data), rel=1e-4
    )


def test_sgd_with_momentum_matches_cpu_for_a_module_created_remotely() -> None:
    results = []
    for device in ("cpu", D1):
        torch.manual_seed(3)
        module = nn.Linear(4, 2, device=device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(1, 4, device=device)).square().sum().backward()
            optimizer.step()
        results.append(module.weight.detach().cpu())
    torch.testing.assert_close(results[1], results[0])


def test_transformer_encoder_forward_matches_cpu() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        expected = encoder(x)
        torch.testing.assert_close(copy.deepcopy(encoder).to(D1)(x.to(D1)).cpu(), expected)


def test_gradients_flow_between_devices() -> None:
    x = torch.ones(3, requires_grad=True)
    y = (x.to(D0) * 2).to(D1) * 3
    (y.cpu() * torch.arange(3.0)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 6, 12]


def test_views_and_in_place_ops_are_differentiated() -> None:
    grads = []
    for device in ("cpu", D0):
        x = torch.arange(6.0, device=device, requires_grad=True)
        y = (x * x).reshape(2, 3)
        y[0].mul_(3)
        y[:, 1] = 0
        y.sum().backward()
        assert x.grad is not None
        grads.append(x.grad.tolist())
    assert grads[0] == grads[1]


def test_second_derivatives_and_functional_gradients_are_right() -> None:
    x = torch.tensor([1.0, 2.0], device=D1, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert (first.tolist(), second.tolist()) == ([3, 12], [6, 12])
    assert torch.func.grad(lambda t: (t * t).sum())(torch.ones(2, device=D0)).tolist() == [2, 2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_through_activation_checkpointing_is_right(reentrant: bool) -> None:
    x = torch.ones(3, device=D0, requires_grad=True)
    checkpoint(lambda t: (t * t).exp().sum(), x, use_reentrant=reentrant).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), 2 * torch.exp(torch.ones(3)))


@pytest.mark.parametrize("device", [D0, D1])
def test_hook_exception_propagates_from_backward(device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)

    def hook(grad: torch.Tensor) -> None:
        raise PlannedError(7)

    for _ in range(3):
        y = x * x
        y.register_hook(hook)
        with pytest.raises(PlannedError, match="7") as caught:
            y.sum().backward()
        assert caught.traceback[-1].name == "hook"
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def test_failing_op_in_backward_raises_its_error() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grads[0] @ torch.ones(5, 5, device=grads[0].device)

    x = torch.ones(2, 2, device=D0, requires_grad=True)
    with pytest.raises(RemoteOpError, match="aten::mm"):
        Wrong.apply(x).sum().backward()  # type: ignore[no-untyped-call]


def test_backward_works_on_a_new_thread() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = (x.to(D1) * 5).sum().cpu()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5, 5]


def test_several_threads_use_one_device() -> None:
    found: dict[int, float] = {}

    def work(number: int) -> None:
        for _ in range(20):
            x = torch.full((4, 4), float(number), device=D0, requires_grad=True)
            (x * x).sum().backward()
            assert x.grad is not None
            found[number] = x.grad.sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: 32.0 * number for number in range(4)}


def test_local_training_is_unaffected() -> None:
    before = torch._C._is_multithreading_enabled()
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    assert torch._C._is_multithreading_enabled() == before
