"""Captured models that the executor compiles: the same results, and a report if compilation failed."""

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
from genie.device import capture, library, registry
from genie.device.model_capture import CapturedModel
from tests.device.conftest import D0, remote_device
from tests.executor.process import ExecutorProcess, running_executor

# A compiler is started for each kernel; the first graph of an executor takes longest.
pytestmark = [pytest.mark.usefixtures("own_compiling_executor"), pytest.mark.timeout(400)]
LONG = pytest.mark.long("compiles with inductor")


@pytest.fixture(scope="module")
def own_compiling_executor(
    devices: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ExecutorProcess, Path]]:
    """An executor with a memory limit, and the temporary folder of its user."""
    folder = tmp_path_factory.mktemp("inductor")
    shared = folder / "shared"
    shared.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(shared))
        patch.setattr(registry._registry, "slots", None)
        library.update_devices_from_registry()
        with running_executor(folder / "own", memory_bytes_max=64 << 20, threads=2) as executor:
            device.attach([remote_device(0, lambda: executor.port)])
            torch.zeros(1, device=D0)
            yield executor, shared
            device.detach()
    library.update_devices_from_registry()


def replay_kinds(captured: CapturedModel) -> list[str]:
    return [each.how for each in captured.report()]


def replay_reason(captured: CapturedModel) -> str:
    return "; ".join(each.why for each in captured.report())


def assert_same_as_local(
    model: nn.Module, inputs: Callable[[int], tuple[torch.Tensor, ...]], *, calls: int = 4
) -> None:
    """Results of every call, and the model's buffers at the end."""
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
    assert replay_kinds(captured) == ["inductor"], replay_reason(captured)
    assert captured.report()[0].replays == calls - 1


def random_rows(call: int, *shape: int) -> tuple[torch.Tensor]:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(call)),)


@LONG
def test_compiled_convnet_with_batch_norm_matches_local() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    model[1].running_mean.normal_()
    assert_same_as_local(model.eval(), lambda call: random_rows(call, 2, 3, 12, 12))


@LONG
def test_compiled_decode_loop_keeps_its_cache() -> None:
    torch.manual_seed(0)
    model = device_models.DecodeStep(64, 1, 16, torch.float32).eval()
    assert_same_as_local(model, lambda call: (torch.tensor([[call + 3]]), torch.tensor([call])), calls=6)


class ModelWithBuffers(nn.Module):
    """Writes to its buffers in place, entirely and in part, and reads them through other views."""

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


@LONG
def test_compiled_model_writes_its_buffers_as_local() -> None:
    assert_same_as_local(ModelWithBuffers(), lambda _: (torch.ones(3),))


class ReturnsViews(nn.Module):
    """Returns several views of one storage, and equal values twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(4, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, two = x + self.weight, x + self.weight
        one[0].add_(10)
        flipped = (one.t().contiguous() * 2).relu()
        return one, one.t(), one[1:], one.view(-1), two, torch.cat([one, two]), flipped, x.clone()


@LONG
def test_compiled_results_that_share_memory_match_local() -> None:
    assert_same_as_local(ReturnsViews(), lambda call: random_rows(call, 4, 3))


@LONG
def test_compiled_graph_sees_weights_changed_between_replays() -> None:
    model = nn.Linear(2, 1, bias=False).to(D0)
    captured = capture(model, inductor=True)
    x = torch.ones(1, 2)
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        assert captured(x).item() == 2 * value
    model.load_state_dict({"weight": torch.full((1, 2), 5.0)})
    assert captured(x).item() == 10
    assert replay_kinds(captured) == ["inductor"]


def test_random_numbers_of_a_compiled_graph_match_the_uncompiled_one() -> None:
    torch.manual_seed(3)
    plain, compiled = nn.Dropout(0.5).train(), capture(nn.Dropout(0.5).train(), inductor=True)
    x = torch.ones(100, device=D0)
    torch.manual_seed(4)
    drawn = [compiled(x).cpu() for _ in range(3)]
    torch.manual_seed(4)
    assert all(torch.equal(each, plain(x).cpu()) for each in drawn)
    assert replay_kinds(compiled) == ["steps"]
    assert "random numbers" in replay_reason(compiled)


@LONG
def test_compiled_graph_error_is_raised_and_next_replay_works() -> None:
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
    assert replay_kinds(captured) == ["inductor"]


def test_integer_division_by_zero_does_not_end_the_executor() -> None:
    captured = capture(lambda x, y: torch.div(x, y, rounding_mode="trunc"), inductor=True)
    some, none = torch.tensor([6, 8], device=D0), torch.zeros(2, dtype=torch.int64, device=D0)
    for _ in range(2):
        assert captured(some, some).tolist() == [1, 1]
    with pytest.raises(Exception, match=r"(?i)zero"):
        captured(some, none).cpu()
    assert captured(some, some).tolist() == [1, 1]
    assert "integers" in replay_reason(captured)


@LONG
def test_compiled_model_trains_as_on_cpu() -> None:
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


def test_inductor_option_is_checked() -> None:
    for options in ({"mode": "fast"}, {"inductor": "yes"}):
        with pytest.raises(Exception, match='has one option, "inductor"'):
            torch.compile(nn.Linear(2, 2), backend="genie", options=options)(torch.ones(1, 2))


def test_uncompiled_graph_reports_its_replay_kind() -> None:
    captured = capture(nn.Linear(2, 2).to(D0))
    assert captured.report() == []
    for _ in range(3):
        captured(torch.ones(1, 2))
    (report,) = captured.report()
    assert (report.inputs, report.how, report.replays) == (("float32[1, 2]",), "steps", 2)
    assert "no CUDA graph" in report.why
    assert report in torch.remote_accelerator.graph_reports(D0)


@pytest.mark.long("compiles with inductor")
def test_compiler_files_are_private_to_the_executor(
    own_compiling_executor: tuple[ExecutorProcess, Path],
) -> None:
    executor, shared = own_compiling_executor
    captured = capture(lambda x: x.sin() * 2, inductor=True)
    for _ in range(2):
        captured(torch.ones(4, device=D0))
    assert replay_kinds(captured) == ["inductor"], replay_reason(captured)
    folder = executor.folder / "inductor"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any(folder.rglob("*.so"))
    assert list(shared.iterdir()) == []
    assert "compiling a graph" in executor.output()


def test_graph_is_replayed_without_a_compiler(
    tmp_path: Path, without_shared_devices: None, monkeypatch: pytest.MonkeyPatch
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
        assert replay_kinds(captured) == ["steps"]
        assert "not compiled" in replay_reason(captured)
        device.detach()
