"""Captured models that the executor compiles: as right as without, and it says when it could not."""

from __future__ import annotations

import copy
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import device_models
from genie import device
from genie.device import backend, capture, roster
from genie.device.graphs import Captured
from tests.agent.executor.process import ExecutorProcess, running_executor
from tests.device.conftest import D0, remote_device

# A compiler is started for each kernel; the first graph of an executor takes longest.
pytestmark = [pytest.mark.usefixtures("own_executor"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def own_executor(
    devices: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ExecutorProcess, Path]]:
    """With a memory limit, and the folder that its user's other processes would share with it."""
    folder = tmp_path_factory.mktemp("inductor")
    shared = folder / "shared"
    shared.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(shared))
        patch.setattr(roster._roster, "slots", None)
        backend.follow_roster()
        with running_executor(folder / "own", memory_bytes_max=64 << 20, threads=2) as executor:
            device.attach([remote_device(0, lambda: executor.port)])
            torch.zeros(1, device=D0)
            yield executor, shared
            device.detach()
    backend.follow_roster()


def how(captured: Captured) -> list[str]:
    return [each.how for each in captured.report()]


def why(captured: Captured) -> str:
    return "; ".join(each.why for each in captured.report())


def assert_same_as_local(
    model: nn.Module, inputs: Callable[[int], tuple[torch.Tensor, ...]], *, calls: int = 4
) -> None:
    """Results of every call, and what the model has kept at the end."""
    local, remote = copy.deepcopy(model), copy.deepcopy(model).to(D0)
    captured = capture(remote, inductor=True)
    with torch.no_grad():
        for call in range(calls):
            given = inputs(call)
            got, expected = captured(*given), local(*given)
            if isinstance(expected, torch.Tensor):
                got, expected = (got,), (expected,)
            for one, other in zip(got, expected, strict=True):
                torch.testing.assert_close(one.cpu(), other)
    kept = {name: tensor.cpu() for name, tensor in remote.state_dict().items()}
    torch.testing.assert_close(kept, dict(local.state_dict()))
    assert how(captured) == ["inductor"], why(captured)
    assert captured.report()[0].replays == calls - 1


def random_rows(call: int, *shape: int) -> tuple[torch.Tensor]:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(call)),)


def test_a_convnet_with_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    model[1].running_mean.normal_()
    assert_same_as_local(model.eval(), lambda call: random_rows(call, 2, 3, 12, 12))


def test_a_decode_loop_keeps_its_cache() -> None:
    torch.manual_seed(0)
    model = device_models.DecodeStep(64, 1, 16, torch.float32).eval()
    assert_same_as_local(model, lambda call: (torch.tensor([[call + 3]]), torch.tensor([call])), calls=6)


class Keeper(nn.Module):
    """Writes to its buffers in place, whole and in part, and reads them through other views."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("table", torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count += 1
        self.count.mul_(1.5)
        self.table[1:3, ::2] += x
        self.table.t()[5].copy_(self.count.sum() + self.table[:, 0])
        return self.count * 2, self.table.t(), self.table


def test_buffers_that_the_model_writes_to() -> None:
    assert_same_as_local(Keeper(), lambda _: (torch.ones(3),))


class Viewer(nn.Module):
    """Gives one piece of memory in several ways, and the same numbers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(4, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, two = x + self.weight, x + self.weight
        one[0].add_(10)
        flipped = (one.t().contiguous() * 2).relu()
        return one, one.t(), one[1:], one.view(-1), two, torch.cat([one, two]), flipped, x.clone()


def test_results_that_share_memory_and_views_of_them() -> None:
    assert_same_as_local(Viewer(), lambda call: random_rows(call, 4, 3))


def test_weights_that_change_between_replays() -> None:
    model = nn.Linear(2, 1, bias=False).to(D0)
    captured = capture(model, inductor=True)
    x = torch.ones(1, 2)
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        assert captured(x).item() == 2 * value
    model.load_state_dict({"weight": torch.full((1, 2), 5.0)})
    assert captured(x).item() == 10
    assert how(captured) == ["inductor"]


def test_random_numbers_are_drawn_as_without_compiling() -> None:
    torch.manual_seed(3)
    plain, compiled = nn.Dropout(0.5).train(), capture(nn.Dropout(0.5).train(), inductor=True)
    x = torch.ones(100, device=D0)
    torch.manual_seed(4)
    drawn = [compiled(x).cpu() for _ in range(3)]
    torch.manual_seed(4)
    assert all(torch.equal(each, plain(x).cpu()) for each in drawn)
    assert how(compiled) == ["steps"]
    assert "random numbers" in why(compiled)


def test_what_fails_in_a_compiled_graph_is_raised_and_the_next_replay_works() -> None:
    captured = capture(nn.Embedding(3, 2).to(D0), inductor=True)
    rows = torch.arange(100_000) % 3  # enough for a loop that several threads would share
    for _ in range(3):
        expected = captured._model.weight.cpu()[rows]  # type: ignore[attr-defined]
        assert torch.equal(captured(rows).cpu(), expected)
    wrong = rows.clone()
    wrong[50_000] = 9
    with pytest.raises(Exception, match="index"):
        captured(wrong).cpu()
    assert torch.equal(captured(rows).cpu(), expected)
    assert how(captured) == ["inductor"]


def test_a_division_of_whole_numbers_by_zero_is_an_error_and_not_the_end() -> None:
    captured = capture(lambda x, y: torch.div(x, y, rounding_mode="trunc"), inductor=True)
    some, none = torch.tensor([6, 8], device=D0), torch.zeros(2, dtype=torch.int64, device=D0)
    for _ in range(2):
        assert captured(some, some).tolist() == [1, 1]
    with pytest.raises(Exception, match=r"(?i)zero"):
        captured(some, none).cpu()
    assert captured(some, some).tolist() == [1, 1]
    assert "whole numbers" in why(captured)


def test_a_compiled_model_trains_as_on_the_cpu() -> None:
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    losses = []
    for place, options in (("cpu", None), (D0, {"inductor": True})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(place)
        step = torch.compile(model, backend="genie", options=options) if options else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(step(x.to(place)), y.to(place))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0])
    found = [each for each in torch.remote_accelerator.graph_reports(D0) if each.replays == 4]
    assert [each.how for each in found] == ["inductor", "inductor"], found


def test_the_option_is_checked() -> None:
    for options in ({"mode": "fast"}, {"inductor": "yes"}):
        with pytest.raises(Exception, match='takes the option "inductor"'):
            torch.compile(nn.Linear(2, 2), backend="genie", options=options)(torch.ones(1, 2))


def test_a_graph_that_is_not_compiled_says_how_it_is_replayed() -> None:
    captured = capture(nn.Linear(2, 2).to(D0))
    assert captured.report() == []
    for _ in range(3):
        captured(torch.ones(1, 2))
    (report,) = captured.report()
    assert (report.inputs, report.how, report.replays) == (("float32[1, 2]",), "steps", 2)
    assert "no CUDA graph" in report.why
    assert report in torch.remote_accelerator.graph_reports(D0)


def test_what_is_written_while_compiling_is_the_executors_own(
    own_executor: tuple[ExecutorProcess, Path],
) -> None:
    executor, shared = own_executor
    captured = capture(lambda x: x.sin() * 2, inductor=True)
    for _ in range(2):
        captured(torch.ones(4, device=D0))
    assert how(captured) == ["inductor"], why(captured)
    folder = executor.folder / "inductor"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any(folder.rglob("*.so"))
    assert list(shared.iterdir()) == []
    assert "compiling a graph" in executor.output()


def test_without_a_compiler_the_graph_is_replayed_as_it_is(
    tmp_path: Path, unattached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with running_executor(tmp_path / "own") as executor:
        device.attach([remote_device(0, lambda: executor.port)])
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        captured = capture(copy.deepcopy(model).to(D0), inductor=True)
        x = torch.ones(1, 4)
        for _ in range(3):
            torch.testing.assert_close(captured(x).cpu(), model(x))
        assert how(captured) == ["steps"]
        assert "not compiled" in why(captured)
        device.detach()
