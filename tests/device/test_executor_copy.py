"""Copies between two remote devices: right values, sent directly between the executors."""

from __future__ import annotations

import re
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from genie import device
from genie.device import ExecutorAddress, RemoteDevice, capture
from genie.errors import DeviceLostError, OpRefusedError
from genie.runtime import device_protocol, tls
from tests.device.conftest import D0, D1, remote_device
from tests.device.run_classifier import error_of
from tests.executor.process import TICKET, ExecutorProcess, start_executor
from tests.executor.thread import ThreadedExecutor, executor_on_a_thread
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("devices")

MIB = 1024 * 1024
DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def stream_stats(where: str) -> dict[str, int]:
    found: dict[str, int] = torch.remote_accelerator.stream_stats(where)  # type: ignore[attr-defined]
    return found


def allocated_bytes(where: str) -> int:
    return int(torch.remote_accelerator.memory_allocated(where))  # type: ignore[attr-defined]


def synchronize(where: str) -> None:
    torch.remote_accelerator.synchronize(where)  # type: ignore[attr-defined]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, including NaN patterns."""
    generator = torch.Generator().manual_seed(1)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [each.contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied(dtype: torch.dtype) -> None:
    here = random_tensor(dtype, 3, 5)
    there = here.to(D0).to(D1)
    assert str(there.device) == D1
    assert same_bits(there.cpu(), here)


def test_views_are_copied_by_value() -> None:
    here = torch.arange(24.0).view(2, 3, 4)
    there = here.to(D0)
    for look in (
        lambda t: t.permute(2, 0, 1),
        lambda t: t[1:, ::2, 1:3],
        lambda t: t[0, 1, 2],
        lambda t: t.unsqueeze(1).expand(2, 5, 3, 4),
        lambda t: t.to(memory_format=torch.contiguous_format)[:, 1],
    ):
        assert torch.equal(look(there).to(D1).cpu(), look(here))


def test_copy_to_strided_target_keeps_gaps() -> None:
    source = torch.arange(6.0, device=D0).view(2, 3)
    target = torch.full((3, 6), -1.0, device=D1)
    target[:2, ::2].copy_(source)
    expected = torch.full((3, 6), -1.0)
    expected[:2, ::2] = torch.arange(6.0).view(2, 3)
    assert torch.equal(target.cpu(), expected)
    target.t()[:3, 1:].copy_(source.t())
    expected.t()[:3, 1:] = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (4, 1), (1,), ()])
def test_smaller_source_is_expanded(shape: tuple[int, ...]) -> None:
    source = torch.rand(shape)
    target = torch.zeros(4, 3, device=D1)
    target.copy_(source.to(D0))
    assert torch.equal(target.cpu(), source.expand(4, 3))


def test_row_and_scalar_are_broadcast() -> None:
    target = torch.zeros(1, 3, device=D1)
    target.copy_(torch.arange(3.0, device=D0))
    assert target.tolist() == [[0, 1, 2]]
    number = torch.zeros((), device=D1)
    number.copy_(torch.tensor(5, device=D0))
    assert number.item() == 5


def test_empty_tensors_are_copied() -> None:
    assert torch.empty(0, 3, device=D0).to(D1).shape == (0, 3)
    target = torch.empty(2, 0, device=D1)
    assert target.copy_(torch.empty(0, device=D0)) is target


def test_lazy_conjugates_and_negations_are_resolved() -> None:
    here = torch.randn(3, 4, dtype=torch.complex64)
    there = here.to(D0)
    assert torch.equal(there.conj().to(D1).cpu(), here.conj().resolve_conj())
    assert torch.equal(there.conj().imag.to(D1).cpu(), here.conj().imag.resolve_neg())
    target = torch.zeros(3, 4, dtype=torch.complex64, device=D1)
    target.conj().copy_(there)
    assert torch.equal(target.cpu(), here.conj().resolve_conj())
    target.t().conj().copy_(there.t().conj())
    assert torch.equal(target.cpu(), here)


@pytest.mark.parametrize("to", [torch.float64, torch.int32, torch.bfloat16, torch.complex64, torch.bool])
def test_copy_converts_dtype(to: torch.dtype) -> None:
    here = torch.tensor([0.0, 1.5, -2.25, 1000.0])
    target = torch.zeros(4, dtype=to, device=D1)
    target.copy_(here.to(D0))
    assert torch.equal(target.cpu(), here.to(to))
    assert torch.equal(here.to(D0).to(D1, to).cpu(), here.to(to))


def test_copies_are_ordered_among_ops_on_both_devices() -> None:
    one, other = torch.zeros(1000, device=D0), torch.zeros(1000, device=D1)
    for _ in range(50):
        one += 1
        other.copy_(one)
        one.mul_(2)
        other.sub_(1)
        one.copy_(other)
    assert one.cpu().eq(0).all()
    assert other.cpu().eq(0).all()


def test_gradients_flow_back_across_devices() -> None:
    def loss_of(first: nn.Module, second: nn.Module, where: str, then: str) -> torch.Tensor:
        return second(first(torch.ones(2, 3, device=where)).relu().to(then)).square().sum()

    torch.manual_seed(0)
    here = nn.Linear(3, 4), nn.Linear(4, 2)
    there = nn.Linear(3, 4).to(D0), nn.Linear(4, 2).to(D1)
    for local, remote in zip(here, there, strict=True):
        remote.load_state_dict(local.state_dict())
    loss_of(*here, "cpu", "cpu").backward()
    loss_of(*there, D0, D1).backward()
    for local, remote in zip(here, there, strict=True):
        for mine, its in zip(local.parameters(), remote.parameters(), strict=True):
            assert mine.grad is not None
            assert its.grad is not None
            assert its.grad.device == its.device
            torch.testing.assert_close(its.grad.cpu(), mine.grad)


def test_module_moves_between_devices() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moved = model.to(D0).to(D1)
    assert all(str(value.device) == D1 for value in moved.state_dict().values())
    for name, value in moved.state_dict().items():
        assert torch.equal(value.cpu(), before[name])


# --- transfer -----------------------------------------------------------------------------------


def test_copies_bypass_the_client() -> None:
    source = torch.arange(16 * MIB, dtype=torch.int32, device=D0)
    target = torch.zeros(16 * MIB, dtype=torch.int32, device=D1)
    synchronize(D0)
    synchronize(D1)
    before = {where: stream_stats(where) for where in (D0, D1)}
    target.copy_(source)
    synchronize(D1)
    after = {where: stream_stats(where) for where in (D0, D1)}
    for where in (D0, D1):
        assert after[where]["bytes_sent"] - before[where]["bytes_sent"] < 4096
    assert after[D0]["replies"] == before[D0]["replies"], "nothing was asked of the source"
    assert after[D1]["replies"] == before[D1]["replies"] + 1, "the synchronize above"
    assert torch.equal(target.cpu(), torch.arange(16 * MIB, dtype=torch.int32))


def test_parcel_at_the_source_is_dropped() -> None:
    source = torch.ones(4 * MIB, device=D0)
    baseline = allocated_bytes(D0)
    for _ in range(40):
        arrived = source.to(D1)
    synchronize(D1)
    wait_until(lambda: allocated_bytes(D0) == baseline)
    assert arrived.sum().item() == 4 * MIB


def test_threads_copy_in_both_directions_at_once() -> None:
    failures: list[BaseException] = []

    def back_and_forth(start: str, end: str, seed: int) -> None:
        try:
            value = torch.full((1000,), float(seed), device=start)
            for _ in range(100):
                value = (value + 1).to(end)
                value = (value + 1).to(start)
            assert value.cpu().eq(seed + 200).all()
        except BaseException as error:
            failures.append(error)

    ways = [(D0, D1, 1), (D1, D0, 2), (D0, D1, 3), (D1, D0, 4)]
    threads = [threading.Thread(target=back_and_forth, args=way) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "executors wait for each other"
    assert not failures


def test_copy_between_devices_cannot_be_captured() -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, device=D0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).to(D1)

    captured = capture(Across())
    with pytest.raises(OpRefusedError, match="between two remote devices"):
        captured(torch.ones(1, 2))
    assert torch.ones(2, device=D0).to(D1).tolist() == [1, 1]


# --- other executors ----------------------------------------------------------------------------


@contextmanager
def attach_executors(*executors: ThreadedExecutor | ExecutorProcess, **settings: Any) -> Iterator[None]:
    devices = [remote_device(number, lambda port=e.port: port) for number, e in enumerate(executors)]
    device.attach(devices, **settings)
    try:
        yield
    finally:
        device.detach()


@contextmanager
def attach_with_memory_limit(bytes_max: int, **settings: Any) -> Iterator[None]:
    """Two executors; the first has little memory."""
    with (
        executor_on_a_thread(memory_bytes_max=bytes_max) as one,
        executor_on_a_thread() as other,
        attach_executors(one, other, **settings),
    ):
        yield


@contextmanager
def start_executors(folder: Path, count: int = 2) -> Iterator[list[ExecutorProcess]]:
    with ExitStack() as stack:
        started = [start_executor(folder / str(n), job_id=f"job-{n}") for n in range(count)]
        for executor in started:
            stack.callback(executor.kill)
        for executor in started:
            executor.wait_ready()
        yield started


@pytest.mark.usefixtures("without_shared_devices")
@pytest.mark.parametrize("plaintext", [True, False], ids=["one machine", "two machines"])
def test_copies_use_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plaintext: bool) -> None:
    if not plaintext:
        monkeypatch.setattr(device_protocol, "machine_identity", lambda: "")  # unknown machine, so TLS stays
    authority = tls.CertificateAuthority.create(now=time.time())
    (tmp_path / "ca").write_text(authority.ca_pem)
    context = ssl.create_default_context(cadata=authority.ca_pem)

    def settings(number: int) -> dict[str, object]:
        key, csr = tls.new_key_and_csr()
        name = tls.executor_certificate_name(f"job-{number}")
        (tmp_path / f"key-{number}").write_bytes(key)
        issued = authority.issue(csr, name=name, days=1, now=time.time())
        (tmp_path / f"certificate-{number}").write_text(issued)
        return {
            "certificate_path": str(tmp_path / f"certificate-{number}"),
            "key_path": str(tmp_path / f"key-{number}"),
            "ca_path": str(tmp_path / "ca"),
            "server_name": name,
        }

    with ExitStack() as stack:
        executors = [stack.enter_context(executor_on_a_thread(**settings(number))) for number in range(2)]

        def opened(number: int) -> ExecutorAddress:
            return ExecutorAddress(
                host="127.0.0.1",
                port=executors[number].port,
                server_name=tls.executor_certificate_name(f"job-{number}"),
                ticket=TICKET,
                ssl_context=context,
            )

        device.attach(
            [
                RemoteDevice(
                    node_id="n",
                    gpu_id="g",
                    name="x",
                    memory_bytes=1,
                    vendor="cpu",
                    start_executor=lambda n=n: opened(n),
                )
                for n in range(2)
            ]
        )
        stack.callback(device.detach)
        here = torch.randn(3, 700_000)
        there = here.to(D0).t().to(D1)
        assert torch.equal(there.cpu(), here.t())
        assert torch.equal(there.to(D0).cpu(), here.t())


@pytest.mark.usefixtures("without_shared_devices")
def test_launch_blocking_raises_copy_error_at_the_call() -> None:
    with attach_with_memory_limit(10 * MIB, launch_blocking=True):
        source = torch.zeros(8 * MIB, dtype=torch.uint8, device=D0)
        with pytest.raises(torch.OutOfMemoryError):
            source.to(D1)
        assert torch.ones(2, device=D0).to(D1).tolist() == [1, 1]


@pytest.mark.usefixtures("without_shared_devices")
def test_source_out_of_memory_is_reported_on_both_devices() -> None:
    with attach_with_memory_limit(10 * MIB):
        source = torch.zeros(8 * MIB, dtype=torch.uint8, device=D0)
        bystander = torch.ones(3, device=D1)
        arrived = source.to(D1)
        with pytest.raises(torch.OutOfMemoryError, match=r"copy between devices.*remote_accelerator:0"):
            synchronize(D0)
        with pytest.raises(torch.OutOfMemoryError, match=r"from remote_accelerator:0 \(node node-0"):
            arrived.cpu()
        with pytest.raises(torch.OutOfMemoryError):
            arrived.sum().item()
        assert bystander.tolist() == [1, 1, 1]
        assert source.sum().item() == 0
        assert source[: 2 * MIB].to(D1).sum().item() == 0


@pytest.mark.usefixtures("without_shared_devices")
def test_failed_source_poisons_the_target() -> None:
    with attach_with_memory_limit(MIB):
        missing = torch.ones(MIB, device=D0)
        arrived = (missing + 1).to(D1)
        later = arrived * 2
        with pytest.raises(torch.OutOfMemoryError):
            arrived.cpu()
        with pytest.raises(torch.OutOfMemoryError):
            later.cpu()
        with pytest.raises(torch.OutOfMemoryError):
            synchronize(D0)
        assert torch.ones(2, device=D0).to(D1).tolist() == [1, 1]


@pytest.mark.usefixtures("without_shared_devices")
def test_copies_survive_loss_of_either_connection() -> None:
    with executor_on_a_thread() as one, executor_on_a_thread() as other, attach_executors(one, other):
        value = torch.zeros(200_000, device=D0)
        for step in range(1, 21):
            there = (value + 1).to(D1)
            (one if step % 2 else other).disconnect_client()
            value = there.to(D0)
            (other if step % 3 else one).disconnect_client()
            assert value[-1].item() == step
        assert stream_stats(D0)["resumes"] > 0
        assert stream_stats(D1)["resumes"] > 0


@pytest.mark.usefixtures("without_shared_devices")
def test_killed_source_is_named_and_target_is_not_stale(tmp_path: Path) -> None:
    with start_executors(tmp_path) as (one, other), attach_executors(one, other):
        source, bystander = torch.ones(3, device=D0), torch.full((3,), 7.0, device=D1)
        target = torch.zeros(3, device=D1)
        synchronize(D0)
        synchronize(D1)
        one.kill()

        named = r"remote_accelerator:0 \(node node-0, job-0\)"
        error = error_of(lambda: target.copy_(source))
        if error is not None:  # the client noticed the loss before the copy
            assert isinstance(error, DeviceLostError)
            assert re.search(named, str(error))
            assert target.tolist() == [0, 0, 0]
        else:
            with pytest.raises(DeviceLostError, match=named):
                target.cpu()
            with pytest.raises(DeviceLostError, match="job-0"):
                target.sum().item()
        with pytest.raises(DeviceLostError, match="job-0"):
            source.cpu()
        assert bystander.tolist() == [7, 7, 7]
        assert (bystander + 1).tolist() == [8, 8, 8]


@pytest.mark.usefixtures("without_shared_devices")
def test_killed_target_leaves_no_parcel_at_the_source(tmp_path: Path) -> None:
    with start_executors(tmp_path) as (one, other), attach_executors(one, other):
        source, target = torch.ones(MIB, device=D0), torch.zeros(MIB, device=D1)
        synchronize(D1)
        baseline = allocated_bytes(D0)
        other.process.send_signal(signal.SIGSTOP)  # so that it stops fetching
        target.copy_(source)
        assert allocated_bytes(D0) == baseline + source.nbytes
        other.kill()
        with pytest.raises(DeviceLostError, match="remote_accelerator:1"):
            target.cpu()
        wait_until(lambda: allocated_bytes(D0) == baseline)
        assert source.sum().item() == MIB
        with pytest.raises(DeviceLostError, match="remote_accelerator:1"):
            target.copy_(source)
        wait_until(lambda: allocated_bytes(D0) == baseline)
