"""Copies between executors of which at least one is on a CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from genie import device
from tests.device.conftest import remote_device
from tests.device.test_executor_copy import DTYPES, allocated_bytes, random_tensor, same_bits, synchronize
from tests.executor.process import start_executor
from tests.waiting import wait_until

GIB, MIB = 1024**3, 1024**2
GPU, GPU_TOO, CPU = (f"remote_accelerator:{number}" for number in range(3))
WAYS = [(GPU, GPU_TOO), (GPU, CPU), (CPU, GPU)]


@pytest.fixture(scope="module", autouse=True)
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that can use the NVIDIA GPU")
    folder = tmp_path_factory.mktemp("across")
    with ExitStack() as stack:
        started = [
            start_executor(folder / str(number), vendor=vendor, memory_bytes_max=2 * GIB)
            for number, vendor in enumerate(("nvidia", "nvidia", "cpu"))
        ]
        for executor in started:
            stack.callback(executor.kill)
        for executor in started:
            executor.wait_ready()
        device.attach([remote_device(n, lambda port=e.port: port) for n, e in enumerate(started)])
        stack.callback(device.detach)
        for name in (GPU, GPU_TOO, CPU):
            torch.zeros(1, device=name)
        yield


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied(dtype: torch.dtype) -> None:
    here = random_tensor(dtype, 3, 5)
    for source, target in WAYS:
        assert same_bits(here.to(source).to(target).cpu(), here)


@pytest.mark.parametrize(("source", "target"), WAYS)
@pytest.mark.parametrize("count", [1, MIB, MIB + 1, 5 * MIB - 7, 20 * MIB])
def test_tensors_of_any_size_are_copied(source: str, target: str, count: int) -> None:
    here = torch.arange(count, dtype=torch.int32)
    there = here.to(source)
    arrived = there.to(target)
    there.zero_()
    assert torch.equal(arrived.cpu(), here)


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_views_and_targets_with_gaps_are_copied(source: str, target: str) -> None:
    here = torch.randn(700, 900, dtype=torch.complex64)
    there = torch.zeros(900, 1400, dtype=torch.complex64, device=target)
    there[:, ::2].copy_(here.to(source).t().conj())
    assert torch.equal(there[:, ::2].cpu(), here.t().conj())
    assert there[:, 1::2].abs().sum().item() == 0
    number = torch.ones(1000, device=source).sum().to(target)
    assert number.item() == 1000


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_copies_keep_their_order_among_ops(source: str, target: str) -> None:
    """The copy is ordered after earlier ops, and later ops do not change it."""
    weight = torch.full((2048, 2048), 1 / 2048, device=source)
    value = torch.ones(2048, 2048, device=source)
    arrived = []
    for _ in range(20):
        value = weight @ value
        arrived.append(value.to(target))
        value += 1
    for step, each in enumerate(arrived):
        torch.testing.assert_close(each.cpu(), torch.full((2048, 2048), step + 1.0), rtol=1e-3, atol=1e-3)


def test_copies_free_their_memory() -> None:
    baseline = allocated_bytes(GPU)
    source = torch.ones(64 * MIB, dtype=torch.uint8, device=GPU)
    for _ in range(40):
        source.to(GPU_TOO)
    synchronize(GPU_TOO)
    del source
    wait_until(lambda: allocated_bytes(GPU) == baseline)


def test_threads_copy_in_both_directions_at_once() -> None:
    failures: list[BaseException] = []

    def back_and_forth(start: str, end: str) -> None:
        try:
            value = torch.zeros(3 * MIB, device=start)
            for _ in range(30):
                value = (value + 1).to(end)
                value = (value + 1).to(start)
            assert value.cpu().eq(60).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=back_and_forth, args=way) for way in (*WAYS, (GPU_TOO, GPU))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures
