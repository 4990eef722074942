"""remote_accelerator on a real GPU, in a process that uses the same GPU directly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from genie import device
from genie.device import capture
from tests.device.conftest import remote_device
from tests.executor.process import running_executor

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module", autouse=True)
def remote_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("gpu")
    with running_executor(folder, vendor="nvidia", device_index=0) as executor:
        device.attach([remote_device(0, lambda: executor.port)])
        torch.zeros(1, device=REMOTE)
        yield
        device.detach()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4)
    )


def training_losses(where: str, steps: int = 5) -> list[float]:
    model = small_model().to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(4, 3, 8, 8, generator=generator).to(where)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_training_matches_local_gpu() -> None:
    torch.testing.assert_close(training_losses(REMOTE), training_losses("cuda"), rtol=1e-3, atol=1e-4)


def test_local_gpu_works_with_a_remote_device() -> None:
    training_losses(REMOTE, steps=1)
    local = nn.Linear(8, 8).cuda()
    local(torch.randn(4, 8).cuda()).sum().backward()
    assert local.weight.grad is not None
    assert torch.ones(3).pin_memory().is_pinned()
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    assert accelerator.type == "cuda"
    torch.accelerator.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        local(torch.randn(4, 8).cuda()).sum().backward()


def test_backward_over_local_and_remote_devices_is_refused() -> None:
    here = torch.ones(3, device="cuda", requires_grad=True)
    there = (here * 2).to(REMOTE)
    with pytest.raises(RuntimeError, match="a local GPU and a remote accelerator"):
        there.sum().backward()


def test_attention_matches_local_gpu() -> None:
    for dtype in (torch.float32, torch.float16):
        q, k, v = (torch.randn(2, 4, 16, 32).to(dtype) for _ in range(3))
        outputs = []
        for where in ("cuda", REMOTE):
            moved = [each.to(where).requires_grad_() for each in (q, k, v)]
            out = nn.functional.scaled_dot_product_attention(*moved, is_causal=True)
            out.sum().backward()
            outputs.append([out.detach().cpu(), *(each.grad.cpu() for each in moved)])
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-2, atol=1e-2)


def test_captured_model_is_a_cuda_graph_and_sees_changed_weights() -> None:
    model = small_model().eval().to(REMOTE)
    captured = capture(model)
    local = small_model().eval().cuda()
    with torch.no_grad():
        for step in range(5):
            x = torch.randn(2, 3, 8, 8)
            torch.testing.assert_close(captured(x).cpu(), local(x.cuda()).cpu(), rtol=1e-3, atol=1e-3)
            if step == 2:
                for each in (model, local):
                    each[4].weight.mul_(2.0)


def test_random_numbers_advance_between_replays() -> None:
    captured = capture(lambda x: x + torch.randn_like(x))
    x = torch.zeros(100, device=REMOTE)
    drawn = [captured(x).cpu() for _ in range(4)]
    assert len({tuple(each.tolist()) for each in drawn}) == 4


def test_exceeding_gpu_memory_raises_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**42, device=REMOTE).sum().item()
    assert torch.ones(2, device=REMOTE).sum().item() == 2


def test_large_copies_are_complete() -> None:
    sent = torch.randint(0, 255, (200 * 2**20,), dtype=torch.uint8)
    assert torch.equal(sent.to(REMOTE).cpu(), sent)
    assert torch.equal(sent[::3].to(REMOTE).cpu(), sent[::3])
    assert torch.equal(sent.to(REMOTE)[::3].cpu(), sent[::3])
