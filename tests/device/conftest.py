"""Two real executors on the CPU behind remote_accelerator:0 and :1, shared by the tests of this folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from genie import device
from genie.device import ExecutorAddress, RemoteDevice, library, registry
from tests.executor.process import TICKET, start_executor

# Some virtual machines report AMX but crash processes that use it. torch reads this at first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

D0 = "remote_accelerator:0"
D1 = "remote_accelerator:1"


def remote_device(number: int, open_: Callable[[], int]) -> RemoteDevice:
    """`open_` returns the port of an executor on this machine."""
    return RemoteDevice(
        node_id=f"node-{number}",
        gpu_id=f"gpu-{number}",
        name=f"Test accelerator {number}",
        memory_bytes=2**30 * (number + 1),
        vendor="cpu",
        start_executor=lambda: ExecutorAddress(host="127.0.0.1", port=open_(), server_name="", ticket=TICKET),
    )


@pytest.fixture(scope="package")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("device")
    with ExitStack() as stack:
        executors = [start_executor(folder / str(number), job_id=f"job-{number}") for number in range(2)]
        for executor in executors:
            stack.callback(executor.kill)
        for executor in executors:
            executor.wait_ready()
        ports = [executor.port for executor in executors]
        device.attach([remote_device(number, lambda port=port: port) for number, port in enumerate(ports)])
        stack.callback(device.detach)
        for name in (D0, D1):  # connected here, so that no test appears to leak the socket
            torch.zeros(1, device=name)
        yield


class SocketPipe:
    """Adapts a plain socket to device_protocol.Pipe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def read_exactly(self, count: int, timeout_s: float) -> bytes:
        self._sock.settimeout(timeout_s)
        data = b""
        while len(data) < count:
            part = self._sock.recv(count - len(data))
            if not part:
                raise ConnectionError("the client disconnected")
            data += part
        return data

    def write_all(self, data: bytes, timeout_s: float) -> None:
        self._sock.settimeout(timeout_s)
        self._sock.sendall(data)


@pytest.fixture
def without_shared_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Detaches the shared executors for this test."""
    monkeypatch.setattr(registry._registry, "slots", None)
    library.update_devices_from_registry()
    yield
    device.detach()
    monkeypatch.undo()
    library.update_devices_from_registry()
