"""Captured models with batch sizes: right for every batch, with at most one recording per size."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from genie.device import capture
from genie.errors import OpRefusedError, UsageError
from tests.device.conftest import D0

pytestmark = pytest.mark.usefixtures("devices")


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).eval()


@pytest.mark.parametrize("here", [True, False], ids=["from this machine", "on the device"])
def test_every_batch_size_gives_right_results_with_few_recordings(here: bool) -> None:
    local = small_model()
    captured = capture(copy.deepcopy(local).to(D0), batch_sizes=(8, 1, 4, 2))
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 3, 5, 1):
        x = torch.randn(rows, 4)
        with torch.no_grad():
            expected = local(x)
        torch.testing.assert_close(captured(x if here else x.to(D0)).cpu(), expected)
    assert sorted(each.inputs for each in captured.report()) == [
        (f"float32[{rows}, 4]",) for rows in (1, 2, 4, 8)
    ]


def test_each_size_of_other_dimensions_has_its_own_recording() -> None:
    captured = capture(small_model().to(D0), batch_sizes=(2,))
    for length in (1, 2, 3, 1):
        for rows in (1, 2):
            captured(torch.ones(rows, length, 4))
    assert [each.inputs for each in captured.report()] == [
        (f"float32[2, {length}, 4]",) for length in (2, 3, 1)
    ]


class MixedInputsModel(nn.Module):
    def forward(self, x: torch.Tensor, table: torch.Tensor, scale: float, *, mask: torch.Tensor) -> object:
        return {"rows": x @ table * scale, "mask": [~mask], "table": table + 1, "sum": table.sum()}


def test_only_batched_tensors_are_padded_and_cut() -> None:
    captured = capture(MixedInputsModel(), batch_sizes=(4,))
    x, table, mask = torch.randn(3, 2), torch.randn(2, 5), torch.tensor([True, False, True])
    for _ in range(2):
        given = [each.to(D0) for each in (x, table, mask)]
        results = captured(given[0], given[1], 2.0, mask=given[2])
        torch.testing.assert_close(results["rows"].cpu(), x @ table * 2)
        assert torch.equal(results["mask"][0].cpu(), ~mask)
        torch.testing.assert_close(results["table"].cpu(), table + 1)
        torch.testing.assert_close(results["sum"].cpu(), table.sum())


def test_batch_is_padded_with_copies_of_its_rows() -> None:
    captured = capture(lambda x: 1 / x, batch_sizes=(8,))
    x = torch.full((3, 2), 2.0, device=D0)
    seen: list[torch.Tensor] = []
    inner = capture(lambda x: (seen.append(x), 1 / x)[1], batch_sizes=(8,))
    inner(x)
    assert torch.equal(seen[0].cpu(), torch.full((8, 2), 2.0))
    assert torch.equal(captured(x).cpu(), torch.full((3, 2), 0.5))


@pytest.mark.parametrize("rows", [0, 5, 100])
def test_batch_larger_than_all_sizes_is_refused(rows: int) -> None:
    captured = capture(small_model().to(D0), batch_sizes=(2, 4))
    with pytest.raises(UsageError, match=f"{rows} rows fits none of the batch sizes 2, 4"):
        captured(torch.ones(rows, 4))


@pytest.mark.parametrize("sizes", [(0,), (-1, 2), (1.5,), tuple(range(1, 40))])
def test_invalid_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="batch_sizes must be"):
        capture(small_model(), batch_sizes=sizes)


def test_call_without_tensor_is_refused() -> None:
    captured = capture(small_model().to(D0), batch_sizes=(2,))
    with pytest.raises(UsageError, match="first dimension is the batch"):
        captured(torch.tensor(1.0))


@pytest.mark.parametrize(
    "model",
    [
        nn.BatchNorm1d(4).train(),
        nn.BatchNorm1d(4, track_running_stats=False).eval(),
        lambda x: x.add_(1),
        lambda x: x.data.add_(1),
    ],
    ids=["rows that depend on each other", "and in eval mode", "writes to its argument", "and to its data"],
)
def test_models_that_padding_would_break_are_refused(model: object) -> None:
    model = model.to(D0) if isinstance(model, nn.Module) else model
    captured = capture(model, batch_sizes=(4,))  # type: ignore[arg-type]
    with pytest.raises(OpRefusedError, match="batch_sizes cannot be used"):
        captured(torch.ones(2, 4, device=D0))


@pytest.mark.parametrize("sizes", [4, True, (), range(1, 100)])
def test_non_integer_sizes_are_refused(sizes: object) -> None:
    with pytest.raises(UsageError, match="batch_sizes must be 1 to 32"):
        capture(small_model(), batch_sizes=sizes)  # type: ignore[arg-type]
