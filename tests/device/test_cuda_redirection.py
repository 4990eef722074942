"""Within as_cuda(), code that names "cuda" uses the remote devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from genie.device import as_cuda
from genie.errors import UsageError
from tests.device.conftest import D0, D1

pytestmark = [
    pytest.mark.usefixtures("devices"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="as_cuda() does not hide a local GPU"),
]


@pytest.fixture
def redirected() -> Iterator[None]:
    with as_cuda():
        yield


@pytest.mark.usefixtures("redirected")
def test_tensors_and_modules_move_to_the_remote_device() -> None:
    x = torch.ones(2)
    moved = [
        x.cuda(),
        x.cuda(0, non_blocking=True),
        x.to("cuda"),
        x.to(device="cuda:0"),
        x.to(torch.device("cuda", 0)),
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda:0")),
        nn.Linear(2, 2).cuda().weight,
        nn.Linear(2, 2).to("cuda").weight,
        nn.Linear(2, 2, device="cuda").weight,
        torch.randn(2, generator=torch.Generator("cuda"), device="cuda"),
    ]
    assert {str(each.device) for each in moved} == {D0}
    assert all(each.is_cuda for each in moved)
    assert not x.is_cuda
    assert str(x.cuda(1).device) == str(x.to("cuda:1").device) == D1
    assert x.to("cuda").cpu().tolist() == [1, 1]


@pytest.mark.usefixtures("redirected")
def test_functions_of_torch_cuda_describe_the_remote_devices() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_name("cuda:1") == "Test accelerator 1"
    assert torch.cuda.get_device_properties(0).total_memory == 2**30
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert str(torch.zeros(1, device="cuda").device) == D1
        assert str(torch.zeros(1).cuda().device) == D1
    torch.cuda.manual_seed_all(3)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() >= 0


@pytest.mark.usefixtures("redirected")
def test_training_script_written_for_cuda_runs(tmp_path: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    x, y = torch.randn(16, 4).cuda(), torch.randint(2, (16,)).cuda()
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(x)
            loss = nn.functional.cross_entropy(output, y)
        assert output.dtype == torch.bfloat16
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    torch.save(model.state_dict(), tmp_path / "saved")
    loaded = torch.load(tmp_path / "saved", map_location="cuda:1")
    assert {str(each.device) for each in loaded.values()} == {D1}


def test_everything_is_restored_at_the_end() -> None:
    before = (torch.cuda.is_available, torch.load, torch.Generator, nn.Module.cuda)
    redirection = as_cuda()
    with pytest.raises(UsageError, match="active already"):
        as_cuda()
    redirection.stop()
    redirection.stop()
    assert (torch.cuda.is_available, torch.load, torch.Generator, nn.Module.cuda) == before
    assert not torch.cuda.is_available()
    assert torch.device("cuda").type == "cuda"
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.ones(1).cuda()
