"""Remote tensors behave as tensors: copies, views, dtypes, printing, and errors."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from genie.device import capture
from genie.errors import (
    DeviceUnavailableError,
    OpRefusedError,
    RemoteOpError,
    UsageError,
)
from tests.device.conftest import D0, D1

pytestmark = pytest.mark.usefixtures("devices")


def memory_stats_after_gc() -> dict[str, int]:
    gc.collect()  # tracebacks of errors, also of earlier tests, hold tensors
    found: dict[str, int] = torch.remote_accelerator.memory_stats(D0)
    return found


# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
        "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    ],
)  # fmt: skip
def test_every_dtype_round_trips(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    sent = torch.arange(-6, 6).reshape(3, 4).to(dtype)
    there = sent.to(D0)
    assert (there.dtype, there.shape, str(there.device)) == (dtype, sent.shape, D0)
    assert torch.equal(there.cpu().view(torch.uint8), sent.view(torch.uint8))


def test_extreme_values_round_trip() -> None:
    floats = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308], dtype=torch.float64)
    assert torch.equal(floats.to(D0).cpu().view(torch.int64), floats.view(torch.int64))
    for value in (2**63 - 1, -(2**63)):
        assert torch.full((1,), value, device=D0).item() == value
        assert torch.tensor(value, device=D0).tolist() == value
    assert math.isnan(torch.full((), math.nan, device=D0).item())
    assert torch.tensor(1 - 2j, device=D0).item() == 1 - 2j


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0, 3), (1,), (1, 1, 1)])
def test_empty_and_scalar_tensors_round_trip(shape: tuple[int, ...]) -> None:
    sent = torch.randn(shape)
    there = sent.to(D0)
    assert there.shape == sent.shape
    assert torch.equal((there + 1).cpu(), sent + 1)
    assert torch.equal(torch.empty(shape, device=D0).copy_(sent).cpu(), sent)


def test_64_mib_round_trip() -> None:
    sent = torch.arange(16 * 1024 * 1024, dtype=torch.int32)
    there = sent.to(D0)
    assert there[-1].item() == sent[-1].item()
    assert torch.equal(there.cpu(), sent)


@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.arange(3.0).expand(2, 3),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64).conj(),
    ],
    ids=["transposed", "strided", "expanded", "channels last", "conjugate"],
)
def test_unusual_layouts_match_other_devices(sent: torch.Tensor) -> None:
    there = sent.to(D0)
    assert torch.equal(there.cpu(), sent)
    assert there.stride() == sent.clone().stride()
    assert there.cpu().stride() == there.stride()


def test_remote_view_is_downloaded() -> None:
    there = torch.arange(24.0, device=D0).reshape(2, 3, 4)
    here = torch.arange(24.0).reshape(2, 3, 4)
    for view in (lambda x: x[1], lambda x: x.transpose(0, 2), lambda x: x[:, ::2, 1:], lambda x: x[0, 0, 0]):
        assert torch.equal(view(there).cpu(), view(here))


def test_to_same_device_is_identity_and_other_device_a_copy() -> None:
    there = torch.ones(2, device=D1)
    assert there.to(D1) is there
    assert there.to(D1, copy=True) is not there
    moved = there.to(D0)
    there.add_(1)
    assert (str(moved.device), moved.tolist(), there.tolist()) == (D0, [1, 1], [2, 2])
    assert moved.to(D1, torch.int32).dtype == torch.int32
    assert there.to("cpu", torch.float64).dtype == torch.float64


def test_in_place_copies_cross_devices() -> None:
    here, one, other = torch.zeros(3), torch.arange(3.0, device=D0), torch.zeros(3, device=D1)
    other.copy_(one)
    here.copy_(other)
    assert here.tolist() == [0, 1, 2]
    other[1:].copy_(torch.tensor([7, 8]))
    assert other.tolist() == [0, 7, 8]


def test_like_factories_create_tensors_on_another_device() -> None:
    there = torch.ones(2, 3, device=D0)
    assert str(torch.zeros_like(there, device="cpu").device) == "cpu"
    other = torch.full_like(there, 4, device=D1)
    assert (str(other.device), other.sum().item()) == (D1, 24)
    assert str(there.new_zeros(2, device=D1).device) == D1


# --- aliasing -----------------------------------------------------------------------------------


def test_views_and_in_place_ops_alias_as_in_torch() -> None:
    def play(x: torch.Tensor) -> list[torch.Tensor]:
        flat, row, window = x.view(-1), x[1], x[:, 1:3]
        row.add_(10)
        flat[0] = -1
        window.mul_(2)
        detached = x.detach()
        detached[2, 3] = 99
        x.t()[3].zero_()
        return [x, flat, row, window, detached]

    here = play(torch.arange(12.0).reshape(3, 4))
    there = play(torch.arange(12.0, device=D0).reshape(3, 4))
    for one, other in zip(there, here, strict=True):
        assert torch.equal(one.cpu(), other)


def test_tensor_reshaped_in_place_keeps_its_views() -> None:
    there = torch.arange(6.0, device=D0).reshape(2, 3)
    view = there[0]
    there.t_()
    view.fill_(5)
    assert there.shape == (3, 2)
    assert there.stride() == (1, 3)
    assert there.tolist() == [[5, 3], [5, 4], [5, 5]]


def test_failed_in_place_op_changes_nothing() -> None:
    there = torch.ones(2, 3, device=D0)
    with pytest.raises(RemoteOpError):
        there.add_(torch.ones(5, device=D0))
    assert there.tolist() == [[1, 1, 1], [1, 1, 1]]


# --- Python protocols ---------------------------------------------------------------------------


def test_tensor_text_shows_values_device_and_gradient() -> None:
    there = torch.arange(3, device=D0)
    assert repr(there) == f"tensor([0, 1, 2], device='{D0}')"
    assert (
        str(torch.ones(1, device=D0, requires_grad=True))
        == f"tensor([1.], device='{D0}', requires_grad=True)"
    )
    assert "grad_fn=<MulBackward0>" in repr(torch.ones(1, device=D0, requires_grad=True) * 2)
    assert f"{torch.tensor(2.5, device=D0):.2f}" == "2.50"
    assert "Parameter containing" in repr(torch.nn.Linear(1, 1).to(D0).weight)


def test_tensors_convert_to_numbers_and_bool() -> None:
    there = torch.tensor([0.0, 2.5], device=D0)
    assert (float(there[1]), int(there[1]), bool(there[0]), there[1].item()) == (2.5, 2, False, 2.5)
    assert bool((there >= 0).all())
    assert [value.item() for value in there] == there.tolist() == [0.0, 2.5]
    assert len(there) == 2
    assert 2.5 in there
    assert torch.equal(there, there.clone())
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(there)
    with pytest.raises(IndexError):
        there[7]


def test_deepcopy_of_a_module_is_independent() -> None:
    module = torch.nn.Linear(2, 2).to(D0)
    module.weight.grad = torch.ones(2, 2, device=D0)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.zero_()
    assert module.weight.abs().sum().item() > 0
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert twin.weight.requires_grad
    assert twin.weight.grad is None  # as deepcopy does in torch
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(module.weight * 2)


def test_module_changes_dtype_and_moves_back() -> None:
    module = torch.nn.Linear(3, 2).to(D0)
    weight = module.weight.cpu()
    module.double()
    assert module.weight.dtype == torch.float64
    assert module(torch.ones(1, 3, device=D0, dtype=torch.float64)).dtype == torch.float64
    assert torch.equal(module.float().cpu().weight, weight)


def test_out_argument_that_is_an_input_gives_right_results() -> None:
    x, y, z, w = (torch.full((3,), float(value), device=D0) for value in (1, 2, 3, 4))
    assert torch.mul(x, w, out=x) is x
    assert torch.mul(y, w, out=z) is z
    assert [each.tolist() for each in (x, y, z)] == [[4.0] * 3, [2.0] * 3, [8.0] * 3]
    assert torch.mul(y, y, out=w) is w
    assert (y.tolist(), w.tolist()) == ([2.0] * 3, [4.0] * 3)


def test_arguments_that_share_a_storage_give_right_results() -> None:
    whole = torch.arange(6.0, device=D0)
    front, back = whole[:3], whole[3:]
    apart = torch.zeros(3, device=D0), torch.ones(3, device=D0)
    for one, other in ((front, back), apart, (front, front), apart, (front, back)):
        here = one.cpu(), other.cpu()
        assert torch.equal(torch.stack([one, other]).cpu(), torch.stack(here))
        assert torch.equal(torch.add(one, other).cpu(), here[0] + here[1])


# --- errors -------------------------------------------------------------------------------------


def test_op_across_two_devices_raises_as_cuda() -> None:
    one, other = torch.ones(2, device=D0), torch.ones(2, device=D1)
    for wrong in (lambda: one + other, lambda: torch.cat([one, other]), lambda: other.add_(one)):
        with pytest.raises(
            RuntimeError, match=r"same device.*remote_accelerator:[01] and remote_accelerator:[01]"
        ):
            wrong()
    with pytest.raises(RuntimeError, match=f"same device.*{D0} and cpu"):
        one + torch.ones(2)
    with pytest.raises(RuntimeError, match="same device"):
        one @ other


def test_out_argument_on_cpu_is_an_error() -> None:
    here, there = torch.zeros(()), torch.ones((), device=D0)
    with pytest.raises(RuntimeError, match=f"{D0} and cpu"):
        here += there
    with pytest.raises(RuntimeError, match=f"{D0} and cpu"):
        torch.add(there, 1, out=here)
    assert here.item() == 0
    assert (here + there).item() == 1


def test_remote_error_names_op_number_and_device() -> None:
    with pytest.raises(
        RemoteOpError, match=rf"mat1 and mat2.*\[aten::mm, op \d+ on {D0}, node node-0, job-0\]"
    ):
        torch.ones(2, 3, device=D0) @ torch.ones(2, 3, device=D0)
    assert torch.ones(2, device=D0).sum().item() == 2


def test_data_dependent_error_is_raised_at_the_next_sync() -> None:
    table, index = torch.ones(3, 2, device=D0), torch.tensor([7], device=D0)
    wrong = torch.nn.functional.embedding(index, table)
    with pytest.raises(IndexError, match=rf"aten::embedding, op \d+ on {D0}"):
        table.sum().item()
    assert table.sum().item() == 6
    with pytest.raises(IndexError, match="aten::embedding"):
        (wrong + 1).cpu()


def test_unknown_index_error_lists_devices() -> None:
    with pytest.raises(
        DeviceUnavailableError,
        match=r"remote_accelerator:7 .* has 2 devices: remote_acc.*:0 to remote_acc.*:1",
    ):
        torch.ones(1, device="remote_accelerator:7")
    with pytest.raises(DeviceUnavailableError):
        torch.ones(1).to("remote_accelerator:2")


def test_save_and_load_tensor() -> None:
    there = torch.arange(6.0, device=D1).view(2, 3).t()
    for again in (
        pickle.loads(pickle.dumps(there)),
        _save_and_load(there),
        _save_and_load(there, map_location="cpu"),
    ):
        assert torch.equal(again.cpu(), there.cpu())
    assert str(_save_and_load(there).device) == D1
    assert str(_save_and_load(there, map_location=D0).device) == D0


def _save_and_load(tensor: torch.Tensor, **options: object) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"a": tensor}, file)
    file.seek(0)
    found: torch.Tensor = torch.load(file, **options)["a"]  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda x: torch.randn(2, generator=torch.Generator(), device=D0), RuntimeError),
        (lambda x: x.pin_memory(), RuntimeError),
        (lambda x: torch.ones(2, device=D0, pin_memory=True), OpRefusedError),
        (lambda x: x.to_sparse(), RuntimeError),
        (lambda x: torch.empty(2, dtype=torch.quint8, device=D0), NotImplementedError),
        (lambda x: x.numpy(), TypeError),
    ],
)
def test_unsupported_tensors_are_refused(wrong: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        wrong(torch.ones(2, device=D0))  # type: ignore[operator]


def test_too_large_call_is_refused() -> None:
    kept = torch.ones(2, device=D0)
    before = memory_stats_after_gc()["tensors"]
    with pytest.raises(OpRefusedError, match="too long"):
        torch.ones(70_000, 1, device=D0).repeat([1] * 70_000)
    with pytest.raises(OpRefusedError, match="too long"):
        torch.cat([kept] * 70_000)
    with pytest.raises(OpRefusedError, match="dimensions"):
        torch.ones([1] * 65, device=D0)
    assert len(torch.ones(50_000, 1, device=D0).unbind()) == 50_000
    assert kept.sum().item() == 2
    assert memory_stats_after_gc()["tensors"] == before


@pytest.mark.long("sends two million arguments")
def test_templates_of_growing_lists_are_evicted() -> None:
    one = torch.ones(1, device=D0)
    for length in range(20_000, 20_110):  # two million arguments in total
        last = torch.cat([one] * length)
    assert last.sum().item() == 20_109


def test_ops_on_long_lists_with_repeated_tensors_match_cpu() -> None:
    def play(whole: torch.Tensor) -> list[torch.Tensor]:
        rows = [*whole.unbind(), *whole.t().unbind(), *[whole[0]] * 3]
        sums = torch._foreach_add(rows, rows[::-1])
        torch._foreach_mul_(rows[:40], [float(i) for i in range(40)])
        joined = torch.cat([*rows, *sums, rows[0]])
        again = torch.atleast_2d(rows)
        again[1].add_(1)  # a view of the second row
        return [whole, joined, *sums, *torch.broadcast_tensors(*rows)]

    here, there = (play(torch.arange(1600.0, device=device).view(40, 40)) for device in ("cpu", D0))
    for mine, theirs in zip(there, here, strict=True):
        assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize(
    ("sent", "received"),
    [("uint8", "float32"), ("float16", "float64"), ("float32", "bfloat16"), ("int64", "int8")],
)
def test_an_upload_sends_the_smaller_of_two_dtypes(sent: str, received: str) -> None:
    count = 100_000
    local = torch.arange(count).remainder(100).to(getattr(torch, sent))
    smaller = min(local.itemsize, getattr(torch, received).itemsize)
    before = torch.remote_accelerator.stream_stats(D0)["bytes_sent"]
    there = local.to(D0, getattr(torch, received))
    torch.remote_accelerator.synchronize(D0)
    bytes_sent = torch.remote_accelerator.stream_stats(D0)["bytes_sent"] - before
    assert count * smaller <= bytes_sent < count * smaller + 10_000
    assert torch.equal(there.cpu(), local.to(getattr(torch, received)))


def test_a_download_converts_before_sending_only_to_a_smaller_dtype() -> None:
    def ops_of_download(source: torch.dtype, target: torch.dtype) -> int:
        there = torch.arange(10).to(source).to(D0)
        before = torch.remote_accelerator.memory_stats(D0)["ops"]
        assert torch.equal(there.to("cpu", target), torch.arange(10).to(source).to(target))
        return torch.remote_accelerator.memory_stats(D0)["ops"] - before

    assert ops_of_download(torch.float32, torch.float16) == 1
    assert ops_of_download(torch.uint8, torch.float32) == 0
    # out of range, the result depends on the processor; torch converts on the CPU
    assert ops_of_download(torch.float32, torch.uint8) == 0


# --- memory on the executor ---------------------------------------------------------------------


def test_dead_tensors_are_freed_on_the_executor() -> None:
    before = memory_stats_after_gc()
    tensors = [torch.ones(1000, device=D0) for _ in range(20)]
    during = memory_stats_after_gc()
    assert during["tensors"] - before["tensors"] == 20
    assert during["allocated_bytes.current"] - before["allocated_bytes.current"] == 80_000
    del tensors
    torch.remote_accelerator.empty_cache()
    after = memory_stats_after_gc()
    assert (after["tensors"], after["allocated_bytes.current"]) == (
        before["tensors"],
        before["allocated_bytes.current"],
    )


@pytest.mark.parametrize("left", [0, 40])
def test_storage_can_be_resized_to_zero_and_back(left: int) -> None:
    weight = torch.ones(1000, device=D0)
    rows, first, last = weight.view(10, 100), weight[: left // 4], weight[500:]
    before = memory_stats_after_gc()["allocated_bytes.current"]
    weight.untyped_storage().resize_(left)
    assert before - memory_stats_after_gc()["allocated_bytes.current"] == 4000 - left
    used = f"resized to {left} bytes"
    uses = (
        weight.cpu,
        rows.sum,
        lambda: weight.fill_(2),
        lambda: weight.to(D1),
        lambda: last.copy_(torch.ones(500)),
    )
    for use in uses:
        with pytest.raises(OpRefusedError, match=used):
            use()
    assert first.sum().item() == left // 4
    weight.untyped_storage().resize_(4000)
    weight.fill_(3)
    assert rows.sum().item() == 3000
    assert memory_stats_after_gc()["allocated_bytes.current"] == before


def test_captured_model_with_freed_weights_fails_until_restored() -> None:
    model = nn.Linear(2, 2, bias=False).to(D0)
    captured, x = capture(model), torch.ones(1, 2)
    with torch.no_grad():
        expected = model.weight.sum(1).cpu()
    for _ in range(2):
        torch.testing.assert_close(captured(x).cpu()[0], expected)
    here = model.weight.detach().cpu()
    for _ in range(2):
        model.weight.untyped_storage().resize_(0)
        with pytest.raises(OpRefusedError, match="resized to 0 bytes"):
            captured(x).cpu()
        model.weight.untyped_storage().resize_(16)
        with torch.no_grad():
            model.weight.copy_(here)
        torch.testing.assert_close(captured(x).cpu()[0], expected)


def test_long_computation_does_not_leak() -> None:
    before = memory_stats_after_gc()["tensors"]
    there = torch.ones(10, 10, device=D0)
    for _ in range(50):
        there = (there @ there).relu()[:10].clamp(max=1.0)
    del there
    assert memory_stats_after_gc()["tensors"] == before


# --- the device module --------------------------------------------------------------------------


def test_device_module_reports_properties() -> None:
    module = torch.remote_accelerator
    assert (module.is_available(), module.device_count(), module.current_device()) == (True, 2, 0)
    assert module.get_device_name(1) == "Test accelerator 1"
    properties = module.get_device_properties(D1)
    assert (properties.node_id, properties.gpu_id, properties.total_memory) == ("node-1", "gpu-1", 2**31)
    assert module.max_memory_allocated(0) >= module.memory_allocated(0)
    module.synchronize()


def test_current_device_is_used_without_an_index() -> None:
    module = torch.remote_accelerator
    with module.device(1):
        assert module.current_device() == 1
        assert str(torch.ones(1, device="remote_accelerator").device) == D1
    assert str(torch.ones(1, device="remote_accelerator").device) == D0
    module.set_device(D1)
    assert module.current_device() == 1
    module.set_device(0)
    with torch.device(D1):
        assert str(torch.ones(1).device) == D1
    with pytest.raises(DeviceUnavailableError):
        module.set_device(5)
    with pytest.raises(UsageError):
        module.synchronize("cpu")


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences_match_cpu(enforce_sorted: bool) -> None:
    rows = torch.randn(3, 4, 5)
    lengths = [4, 2, 1] if enforce_sorted else [2, 4, 1]
    net = torch.nn.LSTM(5, 6, batch_first=True)

    def run(place: str) -> list[torch.Tensor]:
        model = copy.deepcopy(net).to(place)
        x = rows.to(place).requires_grad_()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=enforce_sorted)
        assert packed.batch_sizes.device.type == "cpu"
        out, _ = pad_packed_sequence(model(packed)[0], batch_first=True)
        out.sum().backward()
        assert x.grad is not None
        return [out.cpu(), x.grad.cpu()]

    for found, expected in zip(run(D0), run("cpu"), strict=True):
        torch.testing.assert_close(found, expected)
