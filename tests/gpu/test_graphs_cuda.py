"""Captured models on a CUDA device: a replay writes where the last did, results are the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from genie import device
from genie.device import capture
from tests.agent.executor.process import ExecutorProcess, start_executor
from tests.device.conftest import D0, remote_device

GIB = 1024**3


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExecutorProcess]:
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that can use the NVIDIA GPU")
    folder: Path = tmp_path_factory.mktemp("graphs") / "executor"
    with ExitStack() as stack:
        started = start_executor(folder, vendor="nvidia", memory_bytes_max=4 * GIB)
        stack.callback(started.kill)
        started.wait_ready()
        device.attach([remote_device(0, lambda: started.port)])
        stack.callback(device.detach)
        torch.zeros(1, device=D0)  # connected here, so that no single test is blamed for the socket
        yield started


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("size", [10, 1_000_000])
def test_results_are_the_callers_to_keep(size: int) -> None:
    captured = capture(lambda x: x * 2)
    kept = [captured(torch.full((size,), float(i), device=D0)) for i in range(6)]
    assert [each.unique().tolist() for each in kept] == [[2.0 * i] for i in range(6)]


@pytest.mark.usefixtures("executor")
def test_a_result_may_be_written_to() -> None:
    captured = capture(lambda x: (x + 1, x + 2))
    for i in range(5):
        one, other = captured(torch.full((8,), float(i), device=D0))
        one.mul_(100)
        captured(torch.zeros(8, device=D0))
        assert (one[0].item(), other[0].item()) == (100.0 * (i + 1), i + 2.0)


@pytest.mark.usefixtures("executor")
def test_views_and_inputs_as_results_are_copied() -> None:
    captured = capture(lambda x: (x, (x * 2)[3:5]))
    kept = [captured(torch.full((8,), float(i), device=D0)) for i in range(5)]
    for i, (same, part) in enumerate(kept):
        assert (same.tolist(), part.tolist()) == ([float(i)] * 8, [2.0 * i] * 2)


@pytest.mark.usefixtures("executor")
def test_a_large_answer_is_right_although_a_replay_follows_at_once() -> None:
    """Larger than what the executor copies to answer; its tensor is gone when the answer arrives."""
    captured = capture(lambda x: x * 2)
    x = torch.ones(4_000_000, device=D0)
    for i in range(5):
        here = captured(x * i).cpu()
        captured(x * 100)
        assert here.unique().tolist() == [2.0 * i]


@pytest.mark.usefixtures("executor")
def test_memory_comes_back_when_results_and_graphs_are_gone() -> None:
    torch.zeros(1, device=D0)
    torch.remote_accelerator.synchronize()
    before = torch.remote_accelerator.memory_stats()["allocated_bytes.current"]
    captured = capture(lambda x: x * 2)
    kept = [captured(torch.ones(1000, device=D0)) for _ in range(10)]
    del kept, captured
    torch.remote_accelerator.synchronize()
    assert torch.remote_accelerator.memory_stats()["allocated_bytes.current"] == before
