"""Guards of recordings: after a change, captured models are recorded again, or raise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from genie.device import capture, graphs, model_capture
from genie.errors import OpRefusedError, UsageError
from tests.device.conftest import D0, D1

pytestmark = pytest.mark.usefixtures("devices")


def count_recordings(captured: model_capture.CapturedModel) -> int:
    return len(captured.report())


# --- autocast -----------------------------------------------------------------------------------


def autocast_to_bfloat16(**options: bool) -> torch.autocast:
    return torch.autocast("remote_accelerator", dtype=torch.bfloat16, **options)


class UsesAutocast(nn.Module):
    """Uses autocast itself, with the cache enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast_to_bfloat16(cache_enabled=True):
            return self.part(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 4, bias=False), UsesAutocast], ids=["outside", "inside"]
)
def test_replays_cast_weights_that_autocast_had_cached(
    make: Callable[[], nn.Module],
) -> None:
    model = make().to(D0)
    captured = capture(model)
    one, two = torch.ones(1, 4, device=D0), torch.ones(2, 4, device=D0)
    with autocast_to_bfloat16():
        model(one)
        for x in (one, two):
            captured(x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    for x in (one, two):
        with autocast_to_bfloat16():
            got = captured(x).cpu()
        with autocast_to_bfloat16():
            assert torch.equal(got, model(x).cpu())


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 4, bias=False), UsesAutocast], ids=["outside", "inside"]
)
def test_autocast_cache_of_a_recording_is_not_shared(make: Callable[[], nn.Module]) -> None:
    model = make().to(D0)
    captured = capture(model)
    x = torch.ones(1, 4, device=D0)
    with autocast_to_bfloat16():
        captured(x)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(2)
        assert torch.equal(model(x).cpu(), captured(x).cpu())


# --- memory of the weights ----------------------------------------------------------------------


class WeightIsView(nn.Module):
    """Its weight is a view of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.arange(18.0, device=D0).view(2, 3, 3)
        self.weight = nn.Parameter(self.flat[0], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _move_weight(model: WeightIsView) -> None:
    model.weight.data = model.flat[1]


def _transpose_weight(model: WeightIsView) -> None:
    model.weight.data = model.weight.data.t()


def _shrink_weight(model: WeightIsView) -> None:
    model.weight.data = model.flat.view(6, 3)[:3, :2]


@pytest.mark.parametrize(
    "change",
    [_move_weight, _transpose_weight, _shrink_weight, lambda model: model.weight.t_()],
    ids=["part", "strides", "shape", "in place"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_weight_moved_within_its_storage_is_seen(
    change: Callable[[WeightIsView], object], compiled: bool
) -> None:
    torch._dynamo.reset()
    model = WeightIsView()
    made: Any = torch.compile(model, backend="genie") if compiled else capture(model)
    x = torch.arange(3.0, device=D0).view(1, 3)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(made(x).cpu(), model(x).cpu())
        change(model)
        for _ in range(2):
            assert torch.equal(made(x).cpu(), model(x).cpu())


class KeepsArgument(nn.Module):
    """Keeps its argument in a buffer until the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("previous", torch.zeros(3, device=D0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.previous
        self.previous = x
        return y


def test_argument_kept_as_a_buffer_is_not_overwritten() -> None:
    captured = capture(KeepsArgument())
    got = [captured(torch.full((3,), float(i + 1), device=D0))[0].item() for i in range(5)]
    assert got == [1, 3, 5, 7, 9]


class UsesCpuScalar(nn.Module):
    """Uses a CPU scalar, which CUDA and remote accelerators accept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=D0), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_changed_cpu_scalar_of_the_model_is_seen(compiled: bool) -> None:
    torch._dynamo.reset()
    model = UsesCpuScalar()
    made: Any = torch.compile(model, backend="genie") if compiled else capture(model)
    x = torch.ones(3, device=D0)
    with torch.no_grad():
        assert [made(x)[0].item() for _ in range(2)] == [2, 2]
        model.scale.add_(1)
        assert [made(x)[0].item() for _ in range(2)] == [3, 3]
        model.load_state_dict({"weight": torch.ones(3), "scale": torch.tensor(7.0)})
        assert [made(x)[0].item() for _ in range(2)] == [7, 7]
        model.scale.data.numpy()[...] = 9
        assert [made(x)[0].item() for _ in range(2)] == [9, 9]


# --- other threads ------------------------------------------------------------------------------


@pytest.fixture
def short_recorder_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "RECORDING_THREAD_IDLE_S_MAX", 2.0)


@pytest.mark.usefixtures("short_recorder_timeout")
def test_model_with_branches_on_other_threads_is_refused() -> None:
    x = torch.ones(3, device=D0)
    with ThreadPoolExecutor(2, thread_name_prefix="branch") as pool:

        def model(x: torch.Tensor) -> torch.Tensor:
            return torch.stack(list(pool.map(lambda k: x * k, (1, 2)))).sum(0)

        with pytest.raises(OpRefusedError, match=r"thread branch_.* thread MainThread"):
            capture(model)(x)
        assert model(x).tolist() == [3, 3, 3]
    assert capture(lambda x: x + 1)(x).tolist() == [2, 2, 2]


@pytest.mark.usefixtures("short_recorder_timeout")
def test_thread_that_blocks_the_recording_raises() -> None:
    lock, inside, taken = threading.Lock(), threading.Event(), threading.Event()
    there = torch.zeros(3, device=D0)
    refused: list[str] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        inside.set()
        assert taken.wait(30)
        with lock:
            return y + 1

    def other() -> None:
        assert inside.wait(30)
        with lock:
            taken.set()
            try:
                there.add_(1)
            except OpRefusedError as error:
                refused.append(str(error))

    thread = threading.Thread(target=other, name="the other")
    thread.start()
    captured = capture(model)
    x = torch.ones(3, device=D0)
    assert [captured(x).tolist() for _ in range(2)] == [[3, 3, 3]] * 2
    thread.join(30)
    assert len(refused) == 1
    assert "thread the other" in refused[0]
    assert "thread MainThread" in refused[0]
    assert (there + 1).tolist() == [1, 1, 1]


@pytest.mark.usefixtures("short_recorder_timeout")
def test_slow_recording_does_not_time_out() -> None:
    done: list[float] = []

    def work() -> None:
        done.append(torch.ones(4, device=D0).sum().item())

    threads: list[threading.Thread] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        for _ in range(60):
            x = x + 1
            threads[-1].join(0.05)
        return x

    assert capture(model)(torch.zeros(1, device=D0)).item() == 60
    threads[0].join(30)
    assert done == [4]


# --- device selection ---------------------------------------------------------------------------


def test_captured_function_runs_on_the_device_of_its_arguments() -> None:
    captured = capture(lambda x: x * 2)
    for device in (D0, D1, D0, D1):
        got = captured(torch.ones(2, device=device))
        assert got.device == torch.device(device)
        assert (got + torch.ones(2, device=device)).tolist() == [3, 3]
    write = capture(lambda x: x.add_(1))
    both = [torch.zeros(2, device=device) for device in (D0, D1)]
    for _ in range(2):
        for each in both:
            write(each)
    assert [each.tolist() for each in both] == [[2, 2], [2, 2]]


def test_arguments_on_two_devices_are_refused() -> None:
    here, there = torch.ones(2, device=D0), torch.ones(2, device=D1)
    captured = capture(lambda x, y: x + y)
    for _ in range(2):
        with pytest.raises(OpRefusedError, match="remote_accelerator:0, remote_accelerator:1"):
            captured(here, there)
        assert captured(here, here).tolist() == [2, 2]


def test_compiled_function_runs_on_the_device_of_its_arguments() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2, backend="genie")
    for device in (D0, D1, D0, D1):
        assert compiled(torch.ones(2, device=device)).device == torch.device(device)


class HasMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)  # type: ignore[no-any-return]


def test_method_accepts_cpu_arguments() -> None:
    model = HasMethod().to(D1)
    captured = capture(model.method)
    x = torch.ones(1, 3)
    for _ in range(2):
        assert torch.equal(captured(x).cpu(), model.method(x.to(D1)).cpu())


def test_function_accepts_cpu_arguments() -> None:
    captured = capture(lambda x, y: x + y)
    x, y = torch.ones(2), torch.ones(2, device=D1)
    for _ in range(2):
        assert captured(x, y).device == torch.device(D1)
        assert captured(y, x).tolist() == [2, 2]
        assert captured(x, x).device == torch.device(D0)
        with torch.remote_accelerator.device(1):  # type: ignore[attr-defined]
            assert captured(x, x).device == torch.device(D1)


def test_capture_error_says_which_tensors_to_move() -> None:
    with pytest.raises(OpRefusedError, match=r"weights are on: cpu.*module\.to"):
        capture(HasMethod().method)(torch.ones(1, 3))
    both = nn.ModuleList([HasMethod().to(D0), HasMethod().to(D1)])
    both.forward = both[1].method  # type: ignore[method-assign]
    with pytest.raises(OpRefusedError, match=r"weights are on: .*:0, .*:1"):
        capture(both)(torch.ones(1, 3))
    with pytest.raises(OpRefusedError, match=r"arguments are on: .*:0, .*:1"):
        capture(lambda x, y: x)(torch.ones(1, device=D0), torch.ones(1, device=D1))


# --- plain arguments ----------------------------------------------------------------------------


def _copy_sign(x: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.copysign(x, torch.full_like(x, value))


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (_copy_sign, (0.0, -0.0)),
        (lambda x, value: x * value.imag.hex().startswith("-"), (0j, complex(0.0, -0.0))),
        (lambda x, value: x * len(str(value)), (frozenset([1]), frozenset([1.0]), frozenset([True]))),
        (lambda x, value: x * len(str(value)), (slice(1), slice(1.0), slice(True))),
        (lambda x, value: x * len(str(value)), (frozenset([(0.0,)]), frozenset([(-0.0,)]))),
        (lambda x, value: x * len(str(value)), (range(0), range(10, 10))),
        (lambda x, value: x * len(str(value)), ({1: 2}, {1.0: 2}, {True: 2})),
    ],
    ids=["zero", "complex zero", "set", "slice", "inside", "range", "keys"],
)
def test_equal_values_of_other_types_have_separate_recordings(
    model: Callable[[torch.Tensor, object], torch.Tensor], values: tuple[object, ...]
) -> None:
    captured = capture(model)
    x = torch.ones(2, device=D0)
    for value in values * 2:
        assert captured(x, value).tolist() == model(x.cpu(), value).tolist()
    assert count_recordings(captured) == len(values)


def test_nan_argument_needs_one_recording() -> None:
    captured = capture(lambda x, value: x + value)
    for _ in range(3):
        assert captured(torch.ones(2, device=D0), float("nan")).isnan().all().item()
    assert count_recordings(captured) == 1


# --- settings of the process --------------------------------------------------------------------


@contextmanager
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def deterministic_with_warnings() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def use_medium_matmul_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def meta_device_by_default() -> Iterator[None]:
    with torch.device("meta"):
        yield


@pytest.mark.parametrize(
    "setting",
    [
        float64_by_default,
        deterministic_algorithms,
        deterministic_with_warnings,
        use_medium_matmul_precision,
        meta_device_by_default,
    ],
    ids=lambda f: f.__name__,
)
def test_torch_settings_have_separate_recordings(
    setting: Callable[[], Any],
) -> None:
    def asked() -> list[object]:
        return [
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_default_device(),
        ]

    known: list[list[object]] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        if asked() not in known:
            known.append(asked())
        return x * known.index(asked())

    captured = capture(model)
    x = torch.ones(1, device=D0)
    for _ in range(2):
        assert captured(x).item() == 0
        with setting():
            assert captured(x).item() == 1
    assert count_recordings(captured) == 2


# --- batch sizes --------------------------------------------------------------------------------


def test_empty_batch_error_does_not_suggest_a_larger_size() -> None:
    captured = capture(nn.Linear(4, 4).to(D0), batch_sizes=(2,))
    with pytest.raises(UsageError, match="a batch of 0 rows") as caught:
        captured(torch.ones(0, 4))
    assert "larger" not in caught.value.hint
    assert "skip empty batches" in caught.value.hint


# --- factories ----------------------------------------------------------------------------------


class PositionTransformer(nn.Module):
    """A small transformer: position embeddings and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        later = places[None, :] > places[:, None]
        return self.out(self.layer(x, src_mask=later))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "inductor", [False, pytest.param(True, marks=pytest.mark.long("compiles with inductor"))]
)
def test_model_with_positions_and_masks_is_captured(inductor: bool) -> None:
    torch.manual_seed(0)
    local = PositionTransformer().eval()
    there = PositionTransformer().eval()
    there.load_state_dict(local.state_dict())
    captured = capture(there.to(D0), inductor=inductor)
    for length in (5, 7, 5, 7, 5):
        tokens = torch.randint(0, 11, (2, length))
        with torch.no_grad():
            torch.testing.assert_close(captured(tokens).cpu(), local(tokens), rtol=1e-4, atol=1e-5)
    assert [report.replays for report in captured.report()] == [1, 2]


def test_compiled_model_with_positions_and_masks_matches_local() -> None:
    torch.manual_seed(0)
    local, there = PositionTransformer(), PositionTransformer()
    there.load_state_dict(local.state_dict())
    compiled = torch.compile(there.to(D0), backend="genie")
    for _ in range(3):
        tokens = torch.randint(0, 11, (2, 5))
        torch.testing.assert_close(compiled(tokens.to(D0)).cpu(), local(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ((5,), None), ((2, 9), None), ((2, 9, 3), None), ((9, 2, -2), None), ((0,), None), ((True,), None),
        ((2.5,), None), ((0, 1, 0.25), None), ((0.1, 1.0, 0.1), None), ((7,), torch.float16),
        ((1, 4, 0.5), torch.int32), ((0, 6, 2), torch.bfloat16), ((3,), torch.float64),
    ],
)  # fmt: skip
def test_arange_is_captured_as_in_eager_mode(numbers: Any, dtype: torch.dtype | None) -> None:
    expected = torch.arange(*numbers, dtype=dtype)
    captured = capture(lambda x: torch.arange(*numbers, dtype=dtype, device=x.device))
    x = torch.ones(1, device=D0)
    for found in (torch.arange(*numbers, dtype=dtype, device=D0), captured(x), captured(x), captured(x)):
        assert found.device == x.device
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)
    assert count_recordings(captured) == 1


def test_arange_has_the_default_dtype_of_the_client() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.arange(0, 1, 0.25, device=D0).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_arange_is_one_op() -> None:
    before = torch.remote_accelerator.stream_stats(D0)["ops"]
    made = [torch.arange(4, device=D0), torch.arange(1, 4, device=D0), torch.arange(1, 4, 2, device=D0)]
    assert torch.remote_accelerator.stream_stats(D0)["ops"] - before == len(made)


@pytest.mark.filterwarnings("ignore:torch.range is deprecated:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.linspace(0, 1, 7, device=x.device),
        lambda x: torch.logspace(0, 1, 7, device=x.device),
        lambda x: torch.range(1, 6, 2, device=x.device),
        lambda x: torch.arange(3, out=torch.empty(0, dtype=torch.int64, device=x.device)),
        lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
        lambda x: torch.empty(0, device=x.device).resize_(2, 2).fill_(3),
        lambda x: torch.cumsum(x, 0, out=torch.empty(0, device=x.device)) + x,
    ],
)
def test_resize_of_a_new_tensor_is_captured(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    captured = capture(make)
    for value in range(3):
        x = torch.full((4,), float(value))
        torch.testing.assert_close(captured(x.to(D0)).cpu(), make(x))
    assert count_recordings(captured) == 1


def test_resize_of_an_existing_tensor_is_refused() -> None:
    kept, x = torch.empty(0, device=D0), torch.ones(2, device=D0)
    with pytest.raises(OpRefusedError, match="resizing a tensor"):
        capture(lambda x: torch.add(x, x, out=kept))(x)
    assert torch.add(x, x, out=kept).tolist() == [2, 2]


# --- refusals -----------------------------------------------------------------------------------


class ChangesTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.still = nn.Linear(2, 2)
        self.notes = [torch.zeros(1, device=D0)]

    def forward(self, x: torch.Tensor, *, more: bool) -> torch.Tensor:
        x.add_(1)
        y: torch.Tensor = self.norm(self.still(x))
        if more:
            self.notes[0].add_(1)
        return y * y.sum().item()


def test_capture_error_lists_changed_tensors() -> None:
    model = ChangesTensors().to(D0)
    x = torch.ones(3, 2, device=D0)
    with pytest.raises(OpRefusedError) as refused:
        capture(model)(x, more=False)
    message = str(refused.value)
    names = "norm.running_mean, norm.running_var, norm.num_batches_tracked"
    assert (
        "copy to this machine cannot be part of a captured graph; the model ran up to this point: " in message
    )
    assert f"it has written to {names}" in message
    assert model.norm.num_batches_tracked.item() == 1
    assert x.tolist() == [[1, 1]] * 3  # the model ran on a copy
    with pytest.raises(OpRefusedError, match=rf"{names}, 1 other tensor"):
        capture(model)(x, more=True)
    with pytest.raises(OpRefusedError, match="changed no existing tensor"):
        capture(model.eval())(x, more=False)
