"""Recorded graphs as torch.fx graphs: random programs match their uncompiled results in every replay.

Inductor itself is not run: it takes seconds per program. Its input goes through torch's functionalization
instead, as it would before inductor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_module_simplified

from genie import config, device
from genie.device import capture
from genie.errors import OpRefusedError
from genie.executor import fxgraph, inductor
from genie.native.graph_steps import Step, StepArgument, StepOutput
from tests.device.conftest import D0, remote_device
from tests.executor.thread import executor_on_a_thread

PROGRAMS = 60
CPU = torch.device("cpu")


def compile_functionalized(traced: fxgraph.TracedGraph) -> Any:
    return aot_module_simplified(
        traced.module,
        traced.example_inputs,
        fw_compiler=lambda module, _: module.forward,
        keep_inference_input_mutations=True,
    )


@pytest.fixture
def attached_executor(
    without_shared_devices: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setattr(inductor, "_compile_fx", compile_functionalized)
    # Keep the environment of the tests.
    monkeypatch.setattr(config, "set_compiler_cache_dir", lambda folder: None)
    with executor_on_a_thread(endpoint_path=str(tmp_path / "endpoint")) as executor:
        device.attach([remote_device(0, lambda: executor.port)])
        yield
        assert (tmp_path / "inductor").is_dir()
        device.detach()
    assert not (tmp_path / "inductor").exists()  # removed with the session


class RandomProgram:
    """A random function of two inputs and two buffers; the same for the same seed, wherever it runs."""

    def __init__(self, seed: int, place: str) -> None:
        self._seed = seed
        self.kept = [torch.arange(24.0).view(4, 6).to(place), torch.ones(2, 3, 4).to(place)]

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        chance = random.Random(self._seed)
        values = [x, y, *self.kept]
        for _ in range(14):
            value = chance.choice(values)
            act = chance.choice(
                (_random_view, _random_view, _write_randomly, _write_randomly, _make_random_tensor)
            )
            result = act(value, values, chance)
            if result is not None:
                values.append(result)
        return [*chance.sample(values, 3), values[-1]]


def _random_view(value: torch.Tensor, _: list[torch.Tensor], chance: random.Random) -> torch.Tensor:
    if value.dim() == 0:
        return value.unsqueeze(0).expand(chance.choice((1, 3)))
    dimension = chance.randrange(value.dim())
    size = value.shape[dimension]
    match chance.randrange(8):
        case 0:
            return value.transpose(0, dimension)
        case 1:
            start = chance.randrange(size + 1)
            return value.narrow(dimension, start, chance.randint(0, size - start))
        case 2 if size:
            return value.select(dimension, chance.randrange(size))
        case 3:
            index = [slice(None)] * value.dim()
            index[dimension] = slice(chance.randrange(2), None, 2)
            return value[tuple(index)]
        case 4:
            return value.unsqueeze(dimension).expand(*value.shape[:dimension], 2, *value.shape[dimension:])
        case 5 if value.is_contiguous():
            return value.view(-1)
        case 6 if value.dim() > 1:
            return value.diagonal(0, 0, 1)
        case 7 if size > 1:
            return value.unfold(dimension, 2, 1)
    return value.unsqueeze(dimension)


def _has_overlapping_elements(value: torch.Tensor) -> bool:
    places = torch.arange(4096)  # more than any tensor has elements
    seen = places.as_strided(value.shape, value.stride(), value.storage_offset())
    return seen.unique().numel() < value.numel()


def _write_randomly(value: torch.Tensor, values: list[torch.Tensor], chance: random.Random) -> None:
    kind = chance.randrange(5)
    amount = chance.randint(1, 3)
    other = chance.choice(values)
    if _has_overlapping_elements(value):  # torch refuses it, or its result is undefined
        return
    match kind:
        case 0:
            value.add_(amount)
        case 1:
            value.mul_(0.5)
        case 2:
            value.fill_(amount)
        case 3:
            value.copy_(other.clone().sum())
        case 4 if value.dim() > 0 and value.shape[0] > 0:
            index = torch.zeros(1, dtype=torch.long, device=value.device)
            value.index_copy_(0, index, value[-1:].clone() + 1)


def _make_random_tensor(
    value: torch.Tensor, values: list[torch.Tensor], chance: random.Random
) -> torch.Tensor:
    match chance.randrange(6):
        case 0:
            return value + 1
        case 1:
            return value * chance.choice(values).sum()
        case 2:
            return value.clone()
        case 3:
            return torch.zeros(3, 2, device=value.device)
        case 4:
            return torch.cat([value.reshape(-1), chance.choice(values).reshape(-1)])
    return value.contiguous().relu()


@pytest.mark.usefixtures("attached_executor")
def test_random_programs_are_right_in_every_replay() -> None:
    compiled = 0
    for seed in range(PROGRAMS):
        here, there = RandomProgram(seed, "cpu"), RandomProgram(seed, D0)
        captured = capture(there, inductor=True)
        for call in range(3):
            x, y = torch.arange(6.0) + call, torch.arange(12.0).view(3, 4) - call
            expected = here(x.clone(), y.clone())
            got = captured(x.to(D0), y.to(D0))
            for one, other in zip([*got, *there.kept], [*expected, *here.kept], strict=True):
                torch.testing.assert_close(one.cpu(), other, msg=lambda text, seed=seed: f"{seed}: {text}")
        compiled += captured.report()[0].how == "inductor"
    assert compiled > PROGRAMS * 0.6


# --- refusals ----------------------------------------------------------------------------------

LAYOUT = (torch.float32, (2,), (1,))


def trace(*steps: Step, wanted: tuple[int, ...] = (2,)) -> fxgraph.TracedGraph:
    return fxgraph.trace_steps(steps, wanted, {1: 8}, CPU)


def op_step(name: str, *arguments: StepArgument, gives: StepOutput = ("new", 2, *LAYOUT)) -> Step:
    return ("op", f"aten::{name}", "", list(arguments), [gives])


X = ("tensor", 1, *LAYOUT, 0, False)


def test_string_arguments_are_restricted_to_identifiers() -> None:
    assert trace(op_step("gelu", X, ("value", "tanh"))).results[0].storage == 2
    for text in ("none\nimport os", "none'", "a" * 33, "*/"):
        with pytest.raises(OpRefusedError, match="string argument"):
            trace(op_step("gelu", X, ("value", text)))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([op_step("relu", ("tensor", 7, *LAYOUT, 0, False))], "does not exist"),
        ([op_step("relu", ("tensor", 2, *LAYOUT, 0, False))], "does not exist"),
        (
            [op_step("relu", X), ("free", 2), op_step("neg", ("tensor", 2, *LAYOUT, 0, False))],
            "does not exist",
        ),
        ([op_step("relu", X), ("free", 2)], "never created"),
        ([], "never created"),
        ([op_step("relu", X, gives=("new", 2, torch.float32, (3,), (1,)))], "another dtype or shape"),
        ([op_step("relu", X, gives=("new", 2, torch.float64, (2,), (1,)))], "another dtype or shape"),
    ],
    ids=["unknown", "before it is made", "after it is freed", "freed", "nothing", "size", "dtype"],
)
def test_inconsistent_steps_are_refused(steps: list[Step], message: str) -> None:
    with pytest.raises(OpRefusedError, match=message):
        trace(*steps)


def test_too_long_graph_is_not_compiled(tmp_path: Path) -> None:
    compiler = inductor.InductorCompiler(device="cpu", folder=tmp_path / "inductor")
    with pytest.raises(OpRefusedError, match="the maximum for compilation"):
        compiler.compile([("free", 1)] * (inductor.COMPILED_GRAPH_STEPS_MAX + 1), [], {}, lambda: None)
    assert not (tmp_path / "inductor").exists()
