"""Captured models: recorded once, replayed, and right after changes of weights, modules and settings."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from genie.device import capture
from genie.errors import OpRefusedError, UsageError
from tests.device.conftest import D0, D1
from tests.device.scripts import run_script

pytestmark = pytest.mark.usefixtures("devices")


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).eval()


def count_sent_ops(device: str = D0) -> int:
    return int(torch.remote_accelerator.stream_stats(device)["ops"])


def test_captured_model_matches_the_model() -> None:
    local = small_model()
    captured = capture(small_model().to(D0))
    for seed in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(captured(x).cpu(), local(x))
        torch.testing.assert_close(captured(x.to(D0)).cpu(), local(x))


def test_replay_sends_one_record_for_any_model() -> None:
    captured = capture(nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)]).to(D0))
    x = torch.ones(1, 4, device=D0)
    captured(x)
    before = count_sent_ops()
    captured(x)
    assert count_sent_ops() - before == 3  # the input, the replay, a copy of the output


def test_autocast_and_training_mode_have_separate_recordings() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9)).to(D0).eval()
    captured = capture(model)
    x = torch.ones(1, 4)
    plain = captured(x)
    with torch.autocast("remote_accelerator", dtype=torch.bfloat16):
        assert captured(x).dtype == torch.bfloat16
    model[1].train()
    assert (captured(x) == 0).sum().item() > 0
    model[1].eval()
    assert torch.equal(captured(x).cpu(), plain.cpu())


def test_recording_ignores_unrelated_work() -> None:
    other = [capture(nn.Linear(2, 2).to(D0))]
    other[0](torch.ones(1, 2))
    generators = [torch.Generator(device=D0)]

    class Disturbed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other.clear()
            generators.clear()
            gc.collect()
            return x + 1

    x = torch.zeros(2, device=D0)
    captured = capture(Disturbed())
    assert [captured(x).tolist() for _ in range(3)] == [[1, 1]] * 3
    for wrong in (lambda: torch.manual_seed(1), lambda: torch.remote_accelerator.memory_allocated(0)):
        with pytest.raises(OpRefusedError, match="part of a captured graph"):
            capture(lambda x, wrong=wrong: (wrong(), x + 1)[1])(x)
    assert (x + 1).tolist() == [1, 1]


def test_freed_temporaries_are_not_results() -> None:
    class Keeps(nn.Module):
        last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x + 1
            return self.last * 2

    gc.collect()
    before = torch.remote_accelerator.memory_stats(D0)["tensors"]
    model = Keeps()
    captured = capture(model)
    x = torch.ones(2, device=D0)
    captured(x)
    model.last = None
    assert captured(x).tolist() == [4, 4]
    del captured
    gc.collect()
    many = [torch.ones(2, device=D0) for _ in range(20)]
    assert sum(each.sum().item() for each in many) == 40
    del many, x
    assert torch.remote_accelerator.memory_stats(D0)["tensors"] == before


def test_other_thread_waits_for_the_recording() -> None:
    done: list[float] = []
    threads: list[threading.Thread] = []

    def work() -> None:
        y = torch.ones(4, device=D0)
        for _ in range(20):
            y = y + 1
        torch.remote_accelerator.stream_stats(D0)
        done.append(y.sum().item())

    class Busy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            threads.append(threading.Thread(target=work))
            threads[-1].start()
            for _ in range(200):
                x = x + 1
            return x

    captured = capture(Busy())
    x = torch.zeros(2, device=D0)
    first = captured(x)
    threads[0].join(30)
    assert (done, first.tolist(), captured(x).tolist()) == ([84.0], [200, 200], [200, 200])


def test_results_are_not_overwritten_by_later_calls() -> None:
    captured = capture(nn.Linear(2, 2).to(D0))
    one, two = captured(torch.zeros(1, 2)), captured(torch.ones(1, 2))
    three = captured(torch.zeros(1, 2))
    assert torch.equal(one.cpu(), three.cpu())
    assert not torch.equal(one.cpu(), two.cpu())


def test_writing_to_a_result_does_not_affect_the_graph() -> None:
    captured = capture(lambda x: (x + 1, x + 2))
    for i in range(4):
        one, other = captured(torch.full((3,), float(i), device=D0))
        one.mul_(100)
        captured(torch.zeros(3, device=D0))
        assert (one.tolist(), other.tolist()) == ([100.0 * (i + 1)] * 3, [i + 2.0] * 3)


def test_tensor_returned_twice_is_two_tensors() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = x + 1
        return made, made

    captured = capture(twice)
    for _ in range(3):
        one, other = captured(torch.zeros(3, device=D0))
        one.mul_(100)
        assert (one.tolist(), other.tolist()) == ([100.0] * 3, [1.0] * 3)


@dataclass
class UnsupportedResult:
    y: torch.Tensor


@pytest.mark.parametrize("wrap", [UnsupportedResult, lambda y: [{y}], lambda y: (1, UnsupportedResult(y))])
def test_unsupported_result_types_are_refused(wrap: Callable[[torch.Tensor], object]) -> None:
    """Such results would change with the next replay."""
    captured = capture(lambda x: wrap(x * 2))
    with pytest.raises(OpRefusedError, match=r"not a (UnsupportedResult|set)"):
        captured(torch.ones(2, device=D0))
    assert torch.ones(2, device=D0).sum().item() == 2


def test_writes_to_arguments_are_written_back() -> None:
    def step(x: torch.Tensor, cache: dict[str, torch.Tensor], place: torch.Tensor) -> torch.Tensor:
        cache["rows"].index_copy_(0, place, x)
        return cache["rows"].sum(0)

    captured = capture(step)
    rows = torch.zeros(4, 2, device=D0)
    for i in range(4):
        given = torch.full((1, 2), float(i + 1), device=D0)
        total = captured(given, {"rows": rows}, torch.tensor([i], device=D0))
        assert total.tolist() == [sum(range(i + 2))] * 2
    assert rows[:, 0].tolist() == [1, 2, 3, 4]


def write_batch_norm_statistics(x: torch.Tensor) -> None:
    """torch's schema does not declare that the statistics are written."""
    nn.functional.batch_norm(torch.full((3, 2), 9.0, device=x.device), x, x + 1, training=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.data.add_(1),
        lambda x: x.view(-1)[1:].detach().mul_(3),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch._foreach_add_([x], 2),
        write_batch_norm_statistics,
    ],
    ids=["in place", "data", "a view", "out", "a list", "batch norm"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_kind_of_write_to_an_argument_is_written_back(
    write: Callable[[torch.Tensor], object], mode: Callable[[], AbstractContextManager[None]]
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        write(x)
        return x.sum()

    here, there = torch.ones(2), torch.ones(2, device=D0)
    captured = capture(model)
    with mode():
        for _ in range(3):
            torch.testing.assert_close(captured(there).cpu(), model(here))
    torch.testing.assert_close(there.cpu(), here)
    with torch.inference_mode():
        made = torch.ones(2, device=D0)
        sums = [captured(made).item() for _ in range(3)]
        assert made.sum().item() == sums[-1]


def test_read_only_arguments_are_not_written_back() -> None:
    def model(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, mean, mean + 1, training=False)

    captured = capture(model)
    mean = torch.zeros(2, device=D0)
    for _ in range(2):
        captured(torch.ones(3, 2, device=D0), mean)
    assert mean._version == 0


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
def test_captured_model_can_alternate_between_inference_mode_and_no_grad(compiled: bool) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2

    made = torch.compile(model, backend="genie") if compiled else capture(model)
    x = torch.zeros(2, device=D0)
    weight = torch.ones(2, device=D0, requires_grad=True)
    for turn in range(4):
        with torch.inference_mode(turn % 2 == 0), torch.no_grad():
            got = made(x)
        assert (x.tolist(), got.tolist()) == ([turn + 1] * 2, [2 * (turn + 1)] * 2)
        assert got.is_inference() == (turn % 2 == 0)
    (got * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [8, 8]


class WritesBothArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        seen = y.clone()
        if y.shape[0] != 5:  # the expanded one
            y.add_(10)
        return (seen.sum() + x.sum()) * self.weight


@pytest.mark.parametrize("device", [D0, "cpu"])
@pytest.mark.parametrize(
    "two",
    [
        lambda x: (x, x),
        lambda x: (x, x.view(12)),
        lambda x: (x[:2], x[1:]),
        lambda x: (x[1:], x[:2]),
        lambda x: (x[:, 1:3], x[:, 0:2].t()),
        lambda x: (x[:, 0], x[:, 1]),
        lambda x: (x[0], x[0].expand(5, 4)),
        lambda x: (x, x.view(torch.int32)),
        lambda x: (torch.view_as_complex(x.view(6, 2)), torch.view_as_complex(x.view(6, 2)).conj()),
        lambda x: (torch.view_as_complex(x.view(6, 2)), torch.view_as_complex(x.view(6, 2)).conj().imag),
        lambda x: (x[0], x[2]),
    ],
    ids=["same", "view", "overlap", "overlap, the later first", "transposed", "columns", "expanded",
         "dtype", "conjugated", "negated", "apart"],
)  # fmt: skip
def test_arguments_that_share_memory_are_written_back(
    two: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], device: str
) -> None:
    whole = torch.arange(12.0).view(3, 4)
    here, there = whole.clone(), whole.clone().to(device)
    eager, captured = WritesBothArguments().requires_grad_(False), capture(WritesBothArguments().to(D0))
    for _ in range(3):
        torch.testing.assert_close(captured(*two(there)).cpu(), eager(*two(here)))
        assert torch.equal(there.cpu(), here)
    one, other = whole.clone(), whole.clone()  # the same shapes, without shared memory
    expected = eager(two(one)[0], two(other)[1])
    apart = [whole.clone().to(device) for _ in range(2)]
    torch.testing.assert_close(captured(two(apart[0])[0], two(apart[1])[1]).cpu(), expected)
    assert [each.cpu().tolist() for each in apart] == [one.tolist(), other.tolist()]


def test_argument_passed_twice_is_the_same_object_in_the_model() -> None:
    captured = capture(lambda x, y: x + 1 if x is y else x + 2)
    x, y = torch.zeros(1, device=D0), torch.zeros(1, device=D0)
    assert [captured(x, x).item(), captured(x, y).item(), captured(y, y).item()] == [1, 2, 1]


def test_disjoint_views_as_arguments_need_one_recording() -> None:
    captured = capture(lambda x, y: x - y)
    rows = torch.arange(6.0, device=D0).view(6, 1)
    for one, other in ((0, 1), (5, 2), (3, 0)):
        assert captured(rows[one], rows[other]).item() == one - other
    assert [each.replays for each in captured.report()] == [2]


class AddsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, device=D0))

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        if which == "writes what it holds":
            self.kept.add_(1)
        if which == "writes its argument":
            x.add_(1)
        return x + self.kept


def test_argument_that_aliases_model_memory_is_refused_if_written() -> None:
    model = AddsBuffer()
    captured = capture(model)
    other = torch.zeros(2, device=D0)
    for _ in range(2):
        assert captured(model.kept, "reads").tolist() == [0, 0]
    for which in ("writes what it holds", "writes its argument"):
        captured(other, which)
        for fresh in (captured, capture(model)):
            with pytest.raises(OpRefusedError, match=r"float32\[2\] shares memory .* holds itself"):
                fresh(model.kept, which)
    assert other.tolist() == [1, 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(0),
        lambda x: x.t_(),
        lambda x: x.set_(torch.empty_like(x)),
        lambda x: setattr(x, "data", x + 1),
    ],
)
def test_changing_shape_or_memory_of_an_argument_is_refused(change: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(OpRefusedError, match="not change their shape or memory"):
        capture(lambda x: (change(x), x + 1)[1])(torch.zeros(2, 3, device=D0))


def test_replaced_modules_and_hooks_are_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to(D0)
    captured = capture(model)
    x = torch.ones(1, 2)

    def same() -> bool:
        return torch.equal(captured(x).cpu(), model(x.to(D0)).cpu())

    assert same()
    model[0] = nn.Linear(2, 2).to(D0)
    assert same()
    model.append(nn.Linear(2, 3).to(D0))
    assert same()
    assert captured(x).shape == (1, 3)
    model[2].register_forward_hook(lambda module, args, output: output + 100)
    assert same()
    assert captured(x).min().item() > 50


@pytest.mark.parametrize("method", [False, True])
def test_training_mode_of_a_replaced_module_is_seen(method: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.9)).to(D0).eval()
    captured = capture(model.forward if method else model)
    x = torch.ones(1, 2, device=D0)

    def drops() -> bool:
        return bool((captured(x) == 0).any().item())

    assert [drops() for _ in range(3)] == [False] * 3
    old, model[1] = model[1], nn.Dropout(0.9)  # in training mode, as every new module
    assert [drops() for _ in range(2)] == [True] * 2
    model.eval()
    assert [drops() for _ in range(2)] == [False] * 2
    model[1] = old.train()
    assert [drops() for _ in range(2)] == [True] * 2


def test_global_hooks_and_replaced_forward_are_seen() -> None:
    model = nn.Linear(2, 2).to(D0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for captured in (capture(model), capture(model.__call__), capture(function)):
        x = torch.ones(1, 2, device=D0)
        plain = [captured(x).cpu() for _ in range(2)][1]
        hooks = [
            nn.modules.module.register_module_forward_hook(lambda module, args, output: output + 100),
            nn.modules.module.register_module_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        ]
        try:
            assert torch.equal(captured(x).cpu(), model(x).cpu())
            hooks[0].remove()
            assert torch.equal(captured(x).cpu(), model(x).cpu())
        finally:
            for hook in hooks:
                hook.remove()
        assert torch.equal(captured(x).cpu(), plain)
    captured = capture(model)
    captured(x)
    model.forward = lambda x: x * 0 + 7
    assert captured(x).tolist() == [[7, 7]]
    del model.forward
    assert torch.equal(captured(x).cpu(), plain)


class HookOwner:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        model.register_forward_hook(self.hook)
        model.weight.owner = self  # type: ignore[union-attr]
        self.captured = capture(model)

    def hook(self, *args: object) -> None:
        pass


def test_reference_cycles_through_hooks_are_collected() -> None:
    gc.collect()
    before = torch.remote_accelerator.memory_stats(D0)["tensors"]
    owner = HookOwner(nn.Linear(4, 4).to(D0))
    for _ in range(2):
        owner.captured(torch.ones(1, 4, device=D0))
    dead = weakref.ref(owner)
    del owner
    gc.collect()
    assert dead() is None
    assert torch.remote_accelerator.memory_stats(D0)["tensors"] == before


def test_invalid_capture_arguments_are_reported() -> None:
    with pytest.raises(UsageError, match="a module or a function, not 3"):
        capture(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="True or False, not 'yes'"):
        capture(nn.Linear(2, 2), inductor="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not support mode"):
        torch._dynamo.lookup_backend("genie")(None, [], mode="max-autotune")


def test_each_shape_has_its_own_graph() -> None:
    local = small_model()
    captured = capture(small_model().to(D0))
    for rows in (1, 5, 1, 2, 5, 1):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(captured(x).cpu(), local(x))


def test_changed_weights_are_seen_by_the_next_replay() -> None:
    model = nn.Linear(2, 1, bias=False).to(D0)
    captured = capture(model)
    x = torch.ones(1, 2)
    captured(x)
    with torch.no_grad():
        model.weight.fill_(3.0)
    assert captured(x).item() == 6
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x.to(D0)).sum().backward()
    optimizer.step()
    assert captured(x).item() == 4
    model.load_state_dict({"weight": torch.full((1, 2), 5.0)})
    assert captured(x).item() == 10


def test_replaced_weights_are_seen() -> None:
    model = nn.Linear(2, 1, bias=False).to(D0)
    captured = capture(model)
    x = torch.ones(1, 2)
    captured(x)
    model.weight.data = torch.full((1, 2), 7.0, device=D0)
    assert captured(x).item() == 14
    model.weight = nn.Parameter(torch.full((1, 2), 2.0, device=D0))
    assert captured(x).item() == 4


class Decoder(nn.Module):
    """One token at a time; the cache stays in buffers on the executor."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, position, self.project(token))
        return self.cache.sum(0)


def test_decode_loop_keeps_its_cache_on_the_executor() -> None:
    torch.manual_seed(1)
    local = Decoder()
    remote = Decoder()
    remote.load_state_dict(local.state_dict())
    captured = capture(remote.to(D1))
    with torch.no_grad():
        for step in range(6):
            token, position = torch.randn(1, 4), torch.tensor([step])
            torch.testing.assert_close(captured(token, position).cpu(), local(token, position))


def test_random_numbers_advance_between_replays() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn_like(x)

    captured = capture(Noise())
    x = torch.zeros(4, device=D0)
    torch.manual_seed(5)
    drawn = [captured(x).cpu() for _ in range(3)]
    generator = torch.Generator().manual_seed(5)
    for each in drawn:
        assert torch.equal(each, torch.randn(4, generator=generator))


def test_op_with_unpredicted_outputs_is_captured() -> None:
    local = nn.BatchNorm1d(3).eval()
    captured = capture(nn.BatchNorm1d(3).eval().to(D0))
    for _ in range(3):
        x = torch.randn(7, 3)
        torch.testing.assert_close(captured(x).cpu(), local(x))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda x: x * x.sum().item(), "copy to this machine"),
        (lambda x: x[x > 0], "aten::index"),
        (lambda x: x + torch.ones(2).to(D0), "copy from this machine"),
        (lambda x: x.cpu(), "copy to this machine"),
    ],
)
def test_uncapturable_op_is_named_and_device_still_works(model: object, named: str) -> None:
    x = torch.ones(2, device=D0)
    with pytest.raises(OpRefusedError, match=named):
        capture(model)(x)  # type: ignore[arg-type]
    assert (x + 1).tolist() == [2, 2]
    assert capture(lambda x: x + 1)(x).tolist() == [2, 2]


def test_model_on_two_devices_or_none_is_refused() -> None:
    with pytest.raises(OpRefusedError, match=r"one remote accelerator.*cpu"):
        capture(nn.Linear(2, 2))(torch.ones(1, 2))
    both = nn.Sequential(nn.Linear(2, 2).to(D0), nn.Linear(2, 2).to(D1))
    with pytest.raises(OpRefusedError, match="one remote accelerator"):
        capture(both)(torch.ones(1, 2))
    with pytest.raises(UsageError, match="set"):
        capture(nn.Linear(2, 2).to(D0))({"a"})


def test_method_that_uses_one_device_of_a_module_on_two_is_captured() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2).to(D0), nn.Linear(2, 2).to(D1)

        def first(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x)

    model = Both()
    captured = capture(model.first)
    x = torch.ones(1, 2, device=D0)
    for _ in range(2):
        assert torch.equal(captured(x).cpu(), model.one(x).cpu())
        model.one = nn.Linear(2, 2).to(D0)


def test_replay_error_is_raised_and_next_replay_works() -> None:
    captured = capture(nn.Embedding(3, 2).to(D0))
    captured(torch.tensor([0]))
    with pytest.raises(IndexError, match="embedding"):
        captured(torch.tensor([9])).cpu()
    assert captured(torch.tensor([1])).cpu().shape == (1, 2)


def test_freed_graph_frees_its_memory() -> None:
    gc.collect()
    before = torch.remote_accelerator.memory_stats(D0)
    captured = capture(small_model().to(D0))
    for rows in (2, 3, 2, 3):
        captured(torch.ones(rows, 4))
    del captured
    gc.collect()
    after = torch.remote_accelerator.memory_stats(D0)
    names = ("tensors", "allocated_bytes.current")
    assert [after[name] for name in names] == [before[name] for name in names]


# --- torch.compile ------------------------------------------------------------------------------


def test_compiled_model_trains_as_on_cpu() -> None:
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    losses = []
    for device, compiled in (("cpu", False), (D0, True)):
        model = small_model().to(device)
        step = torch.compile(model, backend="genie") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(step(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0])


def test_compiled_model_is_replayed() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)]).to(D0)
    compiled = torch.compile(model, backend="genie")
    x = torch.ones(1, 4, device=D0)
    with torch.no_grad():
        expected = model(x).cpu()
        compiled(x)
        before = count_sent_ops()
        torch.testing.assert_close(compiled(x).cpu(), expected)
        assert count_sent_ops() - before < 10


def test_compiled_function_handles_changed_numbers_and_shapes() -> None:
    scaled = torch.compile(lambda x, n: x * n, backend="genie")
    x = torch.ones(2, device=D0)
    assert [scaled(x, n)[0].item() for n in (2, 3, 4, 5, 6, 2)] == [2, 3, 4, 5, 6, 2]
    doubled = torch.compile(lambda x: x + x, backend="genie")
    for rows in (8, 8, 5, 8, 3, 5):
        assert doubled(torch.ones(rows, 2, device=D0)).sum().item() == 4 * rows


def test_compiled_backward_is_replayed() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(10)]).to(D0)
    compiled = torch.compile(model, backend="genie")
    x = torch.ones(1, 4, device=D0)
    counts = []
    for _ in range(4):
        before = count_sent_ops()
        compiled(x).sum().backward()
        counts.append(count_sent_ops() - before)
    assert counts[-1] == counts[-2]
    eager = count_sent_ops()
    model(x).sum().backward()
    assert counts[-1] < (count_sent_ops() - eager) * 2


def test_local_models_are_not_recorded() -> None:
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    assert torch.equal(torch.compile(model, backend="genie")(x), model(x))


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # raised by torch at import
def test_default_backend_refuses_settings_of_inductor() -> None:
    model, x = small_model().to(D0), torch.ones(1, 4, device=D0)
    with pytest.raises(
        BackendCompilerFailed, match=r"does not support these settings.*max_autotune"
    ) as failed:
        torch.compile(model, mode="max-autotune")(x)
    assert isinstance(failed.value.inner_exception, OpRefusedError)
    assert torch.compile(model, mode="reduce-overhead")(x).shape == model(x).shape


@pytest.mark.long("compiles with inductor")
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_default_backend_compiles_local_models() -> None:
    from torch._inductor import config  # it warns at import

    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with config.patch(compile_threads=1):  # no processes that outlive the test
        torch.testing.assert_close(torch.compile(model)(x), model(x))


def test_device_is_registered_with_inductor_imported_first() -> None:
    run_script(
        """
        import torch
        from torch._inductor.codegen import common
        common.init_backend_registration()
        assert common.get_scheduling_for_device("remote_accelerator") is None
        import genie
        from genie.device.compiler import UnsupportedCodegen
        assert common.get_scheduling_for_device("remote_accelerator") is UnsupportedCodegen
        assert common.get_wrapper_codegen_for_device("remote_accelerator") is UnsupportedCodegen
        assert common.get_device_op_overrides("cuda") and common.get_device_op_overrides("remote_accelerator")
    """,
        fresh=True,
    )
