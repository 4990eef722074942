"""The device with an executor on CUDA: the same results as on the CPU, with CUDA's random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch.nn.attention import SDPBackend, sdpa_kernel

from genie import device
from genie.errors import DeviceLostError, RemoteOpError
from tests.device.conftest import D0, remote_device
from tests.device.test_autograd import convnet, mlp, training_losses, transformer
from tests.device.test_ops import CALLS, InputMaker, flatten_tensors
from tests.executor.process import start_executor

GIB = 1024**3
NOT_ON_CUDA = {"histc": "sums in another order", "view dtype": "bits depend on rounding"}


@pytest.fixture(scope="module", autouse=True)
def cuda_executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that can use the NVIDIA GPU")
    with ExitStack() as stack:
        executor = start_executor(
            tmp_path_factory.mktemp("cuda") / "executor", vendor="nvidia", memory_bytes_max=4 * GIB
        )
        stack.callback(executor.kill)
        executor.wait_ready()
        device.attach([remote_device(0, lambda: executor.port)])
        stack.callback(device.detach)
        torch.zeros(1, device=D0)
        yield


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_ON_CUDA])
def test_op_matches_cpu(name: str) -> None:
    expected = flatten_tensors(CALLS[name](InputMaker(name, "cpu")))
    found = flatten_tensors(CALLS[name](InputMaker(name, D0)))
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        loose = other.dtype in (torch.bfloat16, torch.float16)
        torch.testing.assert_close(
            one.cpu(), other, rtol=2e-2 if loose else 1e-3, atol=1e-2 if loose else 1e-4
        )


@pytest.mark.parametrize(("make", "shape"), [(mlp, (16,)), (transformer, (2, 5)), (convnet, (6,))])
def test_training_matches_cpu(make: object, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = make()  # type: ignore[operator]
    data = torch.randn(*shape, 8), torch.randn(*shape, 1)
    twin = copy.deepcopy(module).to(D0)
    assert training_losses(twin, D0, data) == pytest.approx(training_losses(module, "cpu", data), rel=1e-2)


def test_seed_matches_local_cuda() -> None:
    torch.manual_seed(9)
    expected = torch.randn(1000, device="cuda").cpu()
    torch.manual_seed(9)
    assert torch.equal(torch.randn(1000, device=D0).cpu(), expected)
    state = torch.remote_accelerator.get_rng_state()
    first = torch.rand(10, device=D0).cpu()
    torch.remote_accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(10, device=D0).cpu(), first)


def test_large_tensors_and_unusual_layouts_round_trip() -> None:
    sent = torch.arange(64 * 1024 * 1024, dtype=torch.int32)
    assert torch.equal(sent.to(D0).cpu(), sent)
    turned = torch.randn(300, 200).t()
    assert torch.equal(turned.to(D0).cpu(), turned)
    base = torch.zeros(4, 4, device=D0)
    base[:, 1].copy_(torch.arange(4.0))
    assert base[:, 1].tolist() == [0, 1, 2, 3]


def test_exceeding_the_quota_raises_out_of_memory() -> None:
    for take in (
        lambda: torch.empty(2 * GIB, device=D0),
        lambda: torch.arange(2 * GIB, device=D0),
        lambda: torch.ones(60_000, 1, device=D0) * torch.ones(60_000, device=D0),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            take().sum().item()
    assert torch.ones(2, device=D0).sum().item() == 2


def test_errors_name_devices_and_ops() -> None:
    with pytest.raises(RemoteOpError, match="aten::mm"):
        torch.ones(2, 3, device=D0) @ torch.ones(2, 3, device=D0)
    with pytest.raises(RuntimeError, match=f"{D0} and cuda"):
        torch.ones(2, device=D0) + torch.ones(2, device="cuda")
    assert torch.ones(2, device="cuda").to(D0).tolist() == [1, 1]
    assert torch.ones(2, device=D0).to("cuda").tolist() == [1, 1]


@pytest.fixture
def default_settings() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def equals_local_cuda(compute: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Return the result, which is the same on both devices."""
    torch.manual_seed(4)
    local = compute("cuda").cpu()
    torch.manual_seed(4)
    found = compute(D0).cpu()
    assert torch.equal(found, local)
    return found


@pytest.mark.usefixtures("default_settings")
def test_float32_precision_is_that_of_local_cuda() -> None:
    def product(device: str) -> torch.Tensor:
        return torch.randn(256, 256).to(device) @ torch.randn(256, 256).to(device)

    def convolved(device: str) -> torch.Tensor:
        return F.conv2d(torch.randn(4, 16, 32, 32).to(device), torch.randn(16, 16, 3, 3).to(device))

    exact = equals_local_cuda(product)
    torch.set_float32_matmul_precision("high")
    assert not torch.equal(equals_local_cuda(product), exact)
    with_tf32 = equals_local_cuda(convolved)
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert not torch.equal(equals_local_cuda(convolved), with_tf32)


@pytest.mark.usefixtures("default_settings")
def test_nondeterministic_op_raises_as_on_local_cuda() -> None:
    torch.use_deterministic_algorithms(True)
    for where in ("cuda", D0):
        with pytest.raises(RuntimeError, match="kthvalue CUDA does not have a deterministic implementation"):
            torch.rand(4).to(where).kthvalue(2)[0].cpu()


def test_attention_backend_is_that_of_local_cuda() -> None:
    def attention(device: str) -> torch.Tensor:
        query, key, value = torch.randn(3, 2, 4, 64, 64, dtype=torch.bfloat16).to(device)
        return F.scaled_dot_product_attention(query, key, value)

    equals_local_cuda(attention)
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            equals_local_cuda(attention)


def test_device_fault_ends_the_executor_with_a_clear_error() -> None:
    """Runs last: a device fault ends the executor process."""
    there = torch.ones(4, device=D0)
    with pytest.raises((RemoteOpError, DeviceLostError)):
        there[torch.tensor([99], device=D0)].sum().item()
    with pytest.raises((RemoteOpError, DeviceLostError)):
        for _ in range(3):
            (there + 1).sum().item()
