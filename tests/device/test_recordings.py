"""What a recording was made with: where it no longer holds, captured models are recorded again, or say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from genie.device import capture, graphs
from tests.device.conftest import D0

pytestmark = pytest.mark.usefixtures("devices")


def recordings(captured: graphs.Captured) -> int:
    return len(captured.report())


# --- autocast -----------------------------------------------------------------------------------


def in_bfloat16(**options: bool) -> torch.autocast:
    return torch.autocast("remote_accelerator", dtype=torch.bfloat16, **options)


class Inside(nn.Module):
    """With an autocast of its own, which keeps what it casts."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with in_bfloat16(cache_enabled=True):
            return self.part(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4, bias=False), Inside], ids=["outside", "inside"])
def test_weights_that_autocast_has_cast_before_are_cast_by_every_replay(
    make: Callable[[], nn.Module],
) -> None:
    model = make().to(D0)
    captured = capture(model)
    one, two = torch.ones(1, 4, device=D0), torch.ones(2, 4, device=D0)
    with in_bfloat16():
        model(one)
        for x in (one, two):
            captured(x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    for x in (one, two):
        with in_bfloat16():
            got = captured(x).cpu()
        with in_bfloat16():
            assert torch.equal(got, model(x).cpu())


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4, bias=False), Inside], ids=["outside", "inside"])
def test_what_autocast_casts_in_a_recording_is_the_recordings_own(make: Callable[[], nn.Module]) -> None:
    model = make().to(D0)
    captured = capture(model)
    x = torch.ones(1, 4, device=D0)
    with in_bfloat16():
        captured(x)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(2)
        assert torch.equal(model(x).cpu(), captured(x).cpu())


# --- where the weights are ----------------------------------------------------------------------


class Flat(nn.Module):
    """Its weight is a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.arange(18.0, device=D0).view(2, 3, 3)
        self.weight = nn.Parameter(self.flat[0], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _other_part(model: Flat) -> None:
    model.weight.data = model.flat[1]


def _other_strides(model: Flat) -> None:
    model.weight.data = model.weight.data.t()


def _other_shape(model: Flat) -> None:
    model.weight.data = model.flat.view(6, 3)[:3, :2]


@pytest.mark.parametrize(
    "change",
    [_other_part, _other_strides, _other_shape, lambda model: model.weight.t_()],
    ids=["part", "strides", "shape", "in place"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_a_weight_on_other_parts_of_its_memory_is_seen(
    change: Callable[[Flat], object], compiled: bool
) -> None:
    torch._dynamo.reset()
    model = Flat()
    made: Any = torch.compile(model, backend="genie") if compiled else capture(model)
    x = torch.arange(3.0, device=D0).view(1, 3)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(made(x).cpu(), model(x).cpu())
        change(model)
        for _ in range(2):
            assert torch.equal(made(x).cpu(), model(x).cpu())
