"""PyTorch settings of the client have the same effect on a remote device as on a local one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from genie.device import capture
from genie.errors import OpRefusedError
from genie.native import genie_device
from tests.device.conftest import D0, D1
from tests.executor.client import RecordKind, record, served_session

pytestmark = pytest.mark.usefixtures("devices")

SETTINGS_BYTES = 34
DENORMAL = 1e-40


@pytest.fixture(autouse=True)
def default_settings() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.set_flush_denormal(False)


# --- effects ------------------------------------------------------------------------------------


def test_default_dtype_is_that_of_the_client() -> None:
    number = torch.arange(3)
    remote = number.to(D0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float32):
        torch.set_default_dtype(dtype)
        for make in (lambda x: x / 3, torch.sqrt, lambda x: x * 1.5, lambda x: torch.where(x > 1, 1.0, 2.0)):
            local, found = make(number), make(remote)
            assert found.dtype == local.dtype == dtype
            assert torch.equal(found.cpu(), local)


def test_default_dtype_of_factories() -> None:
    torch.set_default_dtype(torch.float64)
    for make in (torch.zeros, torch.ones, torch.rand, torch.empty, torch.eye, torch.hann_window):
        assert make(3, device=D0).dtype == torch.float64
    assert torch.linspace(0, 1, 3, device=D0).dtype == torch.float64
    assert torch.equal(torch.arange(0, 1, 0.1, device=D0).cpu(), torch.arange(0, 1, 0.1))


def test_settings_are_sent_to_each_device() -> None:
    torch.set_default_dtype(torch.float64)
    for device in (D0, D1):
        assert (torch.ones(1, dtype=torch.int64, device=device) / 2).cpu().dtype == torch.float64
    torch.set_default_dtype(torch.float32)
    assert (torch.ones(1, dtype=torch.int64, device=D1) / 2).cpu().dtype == torch.float32


def test_nondeterministic_op_raises_as_on_a_local_device() -> None:
    index, source = torch.tensor([1], device=D0), torch.ones(1, device=D0)

    def put() -> torch.Tensor:
        return torch.zeros(2, device=D0).put_(index, source).cpu()

    put()
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        put()
    torch.use_deterministic_algorithms(False)
    assert put().tolist() == [0, 1]


def test_new_memory_is_filled_under_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device=D0).isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), dtype=torch.float64, device=D0).isnan().all()
    assert torch.empty(2, dtype=torch.int16, device=D0).tolist() == [2**15 - 1] * 2
    grown = torch.zeros(2, device=D0).resize_(4).tolist()
    assert grown[:2] == [0, 0]
    assert all(map(math.isnan, grown[2:]))


def test_memory_is_not_filled_if_that_is_disabled() -> None:
    stats = torch.remote_accelerator.stream_stats  # type: ignore[attr-defined]

    def ops_of_empty() -> int:
        before = stats(0)["ops"]
        torch.empty(3, device=D0)
        return int(stats(0)["ops"] - before)

    torch.use_deterministic_algorithms(True)
    filled = ops_of_empty()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    assert ops_of_empty() == filled - 1


def test_flush_denormal() -> None:
    remote = torch.tensor([DENORMAL], device=D0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    flushed = remote + remote
    torch.set_flush_denormal(False)  # also affects what is read here
    assert flushed.item() == 0
    assert (remote + remote).item() > 0


def test_unsupported_setting_is_refused() -> None:
    ones = torch.ones(2, 2, device=D0)
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([9, *before[1:]])
    try:
        with pytest.raises(OpRefusedError, match="the priority of attention backends"):
            ones @ ones
    finally:
        torch._C._set_sdp_priority_order(before)
    assert (ones @ ones).tolist() == [[2, 2], [2, 2]]


def test_settings_in_a_captured_model() -> None:
    captured = capture(lambda x: x / 3)
    number = torch.arange(3, device=D0)
    for dtype in (torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        for _ in range(2):
            assert captured(number).cpu().dtype == dtype
    assert sorted(report.replays for report in captured.report()) == [1, 3]


# --- every setting ------------------------------------------------------------------------------

# How it is set and read, and two values.
Setting = tuple[Callable[[Any], object], Callable[[], Any], Any, Any]


def attribute(owner: Any, name: str, value: Any, other: Any) -> Setting:
    return (lambda new: setattr(owner, name, new)), (lambda: getattr(owner, name)), value, other


def _set_warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=value)


CUDA, MATMUL, CUDNN = torch.backends.cuda, torch.backends.cuda.matmul, torch.backends.cudnn
SETTINGS: dict[str, Setting] = {
    "default dtype": (torch.set_default_dtype, torch.get_default_dtype, torch.float64, torch.float32),
    "deterministic algorithms": (
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled,
        True,
        False,
    ),
    "warn only": (_set_warn_only, torch.is_deterministic_algorithms_warn_only_enabled, True, False),
    "fill": attribute(torch.utils.deterministic, "fill_uninitialized_memory", False, True),  # type: ignore[attr-defined]
    "cudnn enabled": (torch._C._set_cudnn_enabled, torch._C._get_cudnn_enabled, False, True),
    "cudnn benchmark": (torch._C._set_cudnn_benchmark, torch._C._get_cudnn_benchmark, True, False),
    "cudnn deterministic": (
        torch._C._set_cudnn_deterministic,
        torch._C._get_cudnn_deterministic,
        True,
        False,
    ),
    "mkldnn enabled": (torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled, False, True),
    "mkldnn deterministic": (
        torch._C._set_mkldnn_deterministic,
        torch._C._get_mkldnn_deterministic,
        True,
        False,
    ),
    "flash attention": (CUDA.enable_flash_sdp, CUDA.flash_sdp_enabled, False, True),
    "memory-efficient attention": (
        CUDA.enable_mem_efficient_sdp,
        CUDA.mem_efficient_sdp_enabled,
        False,
        True,
    ),
    "math attention": (CUDA.enable_math_sdp, CUDA.math_sdp_enabled, False, True),
    "cudnn attention": (CUDA.enable_cudnn_sdp, CUDA.cudnn_sdp_enabled, False, True),
    "reduced precision in math attention": (
        CUDA.allow_fp16_bf16_reduction_math_sdp,
        CUDA.fp16_bf16_reduction_math_sdp_allowed,
        True,
        False,
    ),
    "attention priority": (
        torch._C._set_sdp_priority_order,
        torch._C._get_sdp_priority_order,
        [3, 1, 2, 0, 4],
        [1, 2, 0, 3, 4],
    ),
    "fp16 reductions": attribute(MATMUL, "allow_fp16_reduced_precision_reduction", False, True),
    "bf16 reductions": attribute(MATMUL, "allow_bf16_reduced_precision_reduction", False, True),
    "fp16 accumulation": attribute(MATMUL, "allow_fp16_accumulation", True, False),
    "high matmul precision": (
        torch.set_float32_matmul_precision,
        torch.get_float32_matmul_precision,
        "high",
        "highest",
    ),
    "medium matmul precision": (
        torch.set_float32_matmul_precision,
        torch.get_float32_matmul_precision,
        "medium",
        "highest",
    ),
    "matmul tf32": attribute(MATMUL, "allow_tf32", True, False),
    "cudnn tf32": (torch._C._set_cudnn_allow_tf32, torch._C._get_cudnn_allow_tf32, False, True),
    "convolution precision": attribute(CUDNN.conv, "fp32_precision", "none", "tf32"),  # type: ignore[attr-defined]
    "rnn precision": attribute(CUDNN.rnn, "fp32_precision", "none", "tf32"),  # type: ignore[attr-defined]
    "cuda matmul precision": attribute(MATMUL, "fp32_precision", "tf32", "none"),
    "mkldnn matmul precision": attribute(torch.backends.mkldnn.matmul, "fp32_precision", "bf16", "none"),  # type: ignore[attr-defined]
}


def read_settings() -> bytes:
    return genie_device.torch_settings_key()[:SETTINGS_BYTES]


@pytest.mark.parametrize("name", SETTINGS)
def test_executor_applies_every_setting(name: str) -> None:
    set_to, get, value, other = SETTINGS[name]
    before, original = get(), read_settings()
    if before == value:  # other tests of this process have set it
        value = other
    set_to(value)
    assert get() == value != before
    changed = read_settings()
    set_to(before)
    assert get() == before
    with served_session() as (_, client):  # in this process, so its settings can be read here
        client.send(record(RecordKind.SETTINGS, 0, changed))
        assert client.sync() is None
        applied, applied_settings = get(), read_settings()
        client.send(record(RecordKind.SETTINGS, 0, original))
        assert client.sync() is None
    assert (applied, applied_settings) == (value, changed)
    assert (get(), read_settings()) == (before, original)
