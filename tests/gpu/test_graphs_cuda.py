"""Graphs on a CUDA device: captured as CUDA graphs, compiled or not, with the same results."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from benchmarks import device_models
from genie import device
from genie.device import capture
from tests.device.conftest import D0, remote_device
from tests.executor.process import start_executor

MIB = 1024**2
GIB = 1024 * MIB
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", autouse=True)
def cuda_executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that can use the NVIDIA GPU")
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("cuda") / "executor"
        executor = start_executor(folder, vendor="nvidia", memory_bytes_max=4 * GIB)
        stack.callback(executor.kill)
        executor.wait_ready()
        device.attach([remote_device(0, lambda: executor.port)])
        stack.callback(device.detach)
        torch.zeros(1, device=D0)
        yield


class ModelWithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("table", torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.table[1:3, ::2] += x
        self.table.t()[5].copy_(self.count.sum() + self.table[:, 0])
        return self.table.t() * 2


class PositionModel(nn.Module):
    """Typical parts of models: positions, a causal mask, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(32, 16)
        self.mix = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[-2]
        x = x + self.places(torch.arange(n, device=x.device))
        later = torch.arange(n, device=x.device)[None, :] > torch.arange(n, device=x.device)[:, None]
        scores = (x @ x.transpose(-2, -1)).masked_fill(later, float("-inf"))
        y = self.mix(scores.softmax(-1) @ x)
        return nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "mlp": (mlp, lambda call: (torch.full((3, 4), float(call)),)),
    "convnet": (
        lambda: device_models.make_convnet((1, 1), 16),
        lambda call: (torch.ones(2, 3, 32, 32) * call,),
    ),
    "transformer": (
        lambda: device_models.Transformer(64, 2, last_only=True),
        lambda call: (torch.arange(16).view(2, 8) + call,),
    ),
    "decode step": (
        lambda: device_models.DecodeStep(64, 2, 16, torch.float32),
        lambda call: (torch.tensor([[call + 3]]), torch.tensor([call])),
    ),
    "positions": (PositionModel, lambda call: (torch.full((2, 8, 16), 0.1 * call),)),
    "buffers": (ModelWithBuffers, lambda _: (torch.ones(3),)),
}


@pytest.mark.parametrize(
    ("inductor", "how"),
    [(False, "cuda graph"), (True, "inductor in a cuda graph")],
    ids=["plain", "inductor"],
)
@pytest.mark.parametrize("name", MODELS)
def test_graph_matches_cpu(name: str, inductor: bool, how: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    local = make().eval()
    remote = copy.deepcopy(local).to(D0)
    captured = capture(remote, inductor=inductor)
    with torch.no_grad():
        for call in range(5):
            given = inputs(call)
            torch.testing.assert_close(captured(*given).cpu(), local(*given), rtol=1e-2, atol=1e-3)
    kept = {key: tensor.cpu() for key, tensor in remote.state_dict().items()}
    torch.testing.assert_close(kept, dict(local.state_dict()), rtol=1e-2, atol=1e-3)
    (report,) = captured.report()
    assert (report.how, report.why) == (how, "")


def test_model_with_attention_and_positions_is_compiled() -> None:
    torch.manual_seed(0)
    local = PositionModel()
    remote = copy.deepcopy(local).to(D0)
    compiled = torch.compile(remote, backend="genie")
    for call in range(3):
        x = torch.full((2, 8, 16), 0.1 * call)
        torch.testing.assert_close(compiled(x.to(D0)).cpu(), local(x), rtol=1e-2, atol=1e-3)


def test_graph_works_after_freed_weights_are_restored() -> None:
    remote = nn.Linear(256, 256, bias=False, device=D0)
    kept, x = remote.weight.detach().cpu(), torch.ones(1, 256, device=D0)
    captured = capture(remote)
    with torch.no_grad():
        for _ in range(3):
            before = captured(x).cpu()
        storage = remote.weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        remote.weight.copy_(kept)
        for _ in range(3):
            torch.testing.assert_close(captured(x).cpu(), before)


def test_work_that_synchronizes_is_replayed_step_by_step() -> None:
    def masked(x: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[mask] = values
        return y * 2

    captured = capture(masked)
    x, mask = torch.zeros(4, device=D0), torch.tensor([True, False, True, False], device=D0)
    values = torch.tensor([3.0, 4.0], device=D0)
    for _ in range(3):
        assert captured(x, mask, values).tolist() == [6, 2, 8, 2]
    (report,) = captured.report()
    assert report.how == "steps"
    assert "no CUDA graph" in report.why


def test_weights_with_new_memory_are_seen() -> None:
    weight = torch.ones(4, device=D0)
    captured = capture(lambda x: x * weight)
    x = torch.full((4,), 2.0, device=D0)
    for _ in range(3):
        assert captured(x).tolist() == [2, 2, 2, 2]
    weight.untyped_storage().resize_(64)
    weight.fill_(3)
    assert captured(x).tolist() == [6, 6, 6, 6]
    assert captured(x).tolist() == [6, 6, 6, 6]
    assert captured.report()[0].how == "cuda graph"


def test_memory_of_a_graph_counts_until_it_is_freed() -> None:
    gc.collect()
    before = torch.remote_accelerator.memory_allocated(0)
    captured = capture(lambda x: (x + 1).sum())
    x = torch.ones(64 * MIB // 4, device=D0)
    for _ in range(3):
        captured(x)
    assert torch.remote_accelerator.memory_allocated(0) - before > 3 * 64 * MIB - MIB
    del captured, x
    gc.collect()
    assert torch.remote_accelerator.memory_allocated(0) == before


# --- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_results_are_not_overwritten_by_later_calls(size: int) -> None:
    captured = capture(lambda x: x * 2)
    kept = [captured(torch.full((size,), float(i), device=D0)) for i in range(6)]
    assert [each.unique().tolist() for each in kept] == [[2.0 * i] for i in range(6)]


def test_result_can_be_written_to() -> None:
    captured = capture(lambda x: (x + 1, x + 2))
    for i in range(5):
        one, other = captured(torch.full((8,), float(i), device=D0))
        one.mul_(100)
        captured(torch.zeros(8, device=D0))
        assert (one[0].item(), other[0].item()) == (100.0 * (i + 1), i + 2.0)


def test_views_and_inputs_returned_as_results_are_copied() -> None:
    captured = capture(lambda x: (x, (x * 2)[3:5]))
    kept = [captured(torch.full((8,), float(i), device=D0)) for i in range(5)]
    for i, (same, part) in enumerate(kept):
        assert (same.tolist(), part.tolist()) == ([float(i)] * 8, [2.0 * i] * 2)


def test_large_result_is_right_if_a_replay_follows_at_once() -> None:
    """Larger than replies that the executor copies; the tensor is freed before the reply arrives."""
    captured = capture(lambda x: x * 2)
    x = torch.ones(4_000_000, device=D0)
    for i in range(5):
        here = captured(x * i).cpu()
        captured(x * 100)
        assert here.unique().tolist() == [2.0 * i]


def test_memory_is_freed_with_results_and_graphs() -> None:
    torch.zeros(1, device=D0)
    torch.remote_accelerator.synchronize()
    before = torch.remote_accelerator.memory_stats()["allocated_bytes.current"]
    captured = capture(lambda x: x * 2)
    kept = [captured(torch.ones(1000, device=D0)) for _ in range(10)]
    del kept, captured
    torch.remote_accelerator.synchronize()
    assert torch.remote_accelerator.memory_stats()["allocated_bytes.current"] == before
