"""Ctrl-C during a wait for a silent executor: it is handled soon, and the device works afterwards."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.device.scripts import run_script
from tests.executor.process import running_executor

pytestmark = pytest.mark.usefixtures("devices", "without_shared_devices")

STOPPED = """
import os, signal, sys, threading
import torch
from genie import device
from genie.device import capture, registry
from tests.device.conftest import D0, remote_device
from tests.device.interrupting import run_interrupted, signal_when_waiting

port, pid = int(sys.argv[1]), int(sys.argv[2])
device.attach([remote_device(0, lambda: port)])
x = torch.arange(6.0, device=D0)
torch.remote_accelerator.synchronize()

def held():
    connection = registry.device_slot(0).connection_if_open
    torch.remote_accelerator.synchronize()
    return connection.fetch_executor_counters()["tensors"], connection.client_counters()["storages"]

before = held()

def while_stopped(work):
    connection = registry.device_slot(0).connection_if_open
    run_interrupted(
        work,
        stop_executor=lambda: os.kill(pid, signal.SIGSTOP),
        resume_executor=lambda: os.kill(pid, signal.SIGCONT),
        progress=lambda: connection.client_counters()["frames"],
    )
    assert (x + 1).tolist() == [1, 2, 3, 4, 5, 6]
    assert held() == before, (held(), before)
"""


def run_script_with_executor(folder: Path, code: str) -> None:
    with running_executor(folder) as executor:
        run_script(STOPPED + textwrap.dedent(code) + "device.detach()\n", executor.port, executor.process.pid)


def test_waits_for_a_silent_executor_are_interruptible_without_leaks(tmp_path: Path) -> None:
    run_script_with_executor(
        tmp_path,
        """
        while_stopped(lambda: x.cpu())
        while_stopped(lambda: x[3].item())
        while_stopped(lambda: x.nonzero())
        while_stopped(lambda: torch.remote_accelerator.synchronize())
        while_stopped(lambda: torch.remote_accelerator.memory_stats())
        while_stopped(lambda: torch.remote_accelerator.get_rng_state())
        while_stopped(lambda: [x.add_(0) for _ in range(2**20)])
        while_stopped(lambda: [x + 1 for _ in range(2**20)])
        while_stopped(lambda: [torch.ones(100_000).to(D0) for _ in range(2**10)])

        here = torch.zeros(6)
        while_stopped(lambda: here.copy_(x))
        assert here.tolist() == [0] * 6

        there = torch.zeros(32_000_000, dtype=torch.uint8, device=D0)
        before = held()
        source = torch.ones(32_000_000, dtype=torch.uint8)

        def upload():
            try:
                there.copy_(source)
            finally:
                source.fill_(7)

        while_stopped(upload)
        assert there.max().item() == 1
        assert there.min().item() == 0
        """,
    )


def test_signal_handler_may_use_the_device_during_a_wait(tmp_path: Path) -> None:
    run_script_with_executor(
        tmp_path,
        """
        seen = []

        def handle(*_):
            os.kill(pid, signal.SIGCONT)
            seen.append((x + 1).sum().item())
            seen.append(x.nonzero().shape)

        signal.signal(signal.SIGALRM, handle)
        os.kill(pid, signal.SIGSTOP)
        watcher = threading.Thread(target=signal_when_waiting, args=(signal.SIGALRM,))
        watcher.start()
        assert x.cpu().tolist() == [0, 1, 2, 3, 4, 5]
        watcher.join()
        assert seen == [21, (5, 1)]

        # Waiting for another thread's capture is interruptible as well.
        recording, go_on = threading.Event(), threading.Event()

        def slow(value):
            recording.set()
            assert go_on.wait(60)
            return value + 1

        captured = capture(slow)
        results = []
        other = threading.Thread(target=lambda: results.append(captured(x)))

        def stop_executor():
            other.start()
            assert recording.wait(60)

        run_interrupted(lambda: x + 1, stop_executor=stop_executor, resume_executor=go_on.set)
        other.join()
        assert results[0].tolist() == [1, 2, 3, 4, 5, 6]
        """,
    )


def test_opening_a_connection_is_interruptible() -> None:
    run_script(
        """
        import socket
        import torch
        from genie import device
        from tests.device.conftest import D0, remote_device
        from tests.device.interrupting import run_interrupted

        server = socket.create_server(("127.0.0.1", 0))
        device.connection.OPEN_SESSION_TIMEOUT_S = 600
        device.attach([remote_device(0, lambda: server.getsockname()[1])])
        run_interrupted(lambda: torch.ones(1, device=D0))
        device.detach()
        server.close()
        """
    )


def test_partial_reply_is_interruptible_and_its_rest_discarded() -> None:
    run_script(
        """
import socket, struct, sys, threading
import torch
from genie import device
from genie.runtime import device_protocol
from tests.device.conftest import D0, SocketPipe, remote_device
from tests.device.interrupting import run_interrupted

SIZE = 32_000_000
server = socket.create_server(("127.0.0.1", 0))
half_sent, go_on, end = threading.Event(), threading.Event(), threading.Event()

def reply(number, size):
    return struct.pack("<QQQII", size, number, 0, 1, 0)

def wait_for(sock, kind):
    received = b""
    while struct.pack("<I", kind << 24) not in received:
        received += sock.recv(4096)

def serve():
    sock, _ = server.accept()
    pipe = SocketPipe(sock)
    device_protocol.receive_request(pipe, peer="the client", timeout_s=60)
    opened = device_protocol.Opened("cpu", "fake", 1, "job-1", "0", session_key="key", plaintext=True)
    device_protocol.send_reply(pipe, opened, peer="the client", timeout_s=60)
    wait_for(sock, 9)  # Get
    half = b"\\x01" * (SIZE // 2)
    sock.sendall(reply(1, SIZE) + half)
    half_sent.set()
    assert go_on.wait(60)
    sock.sendall(half)
    wait_for(sock, 10)  # Sync
    sock.sendall(reply(2, 0))
    assert end.wait(60)
    sock.close()

thread = threading.Thread(target=serve)
thread.start()
device.attach([remote_device(0, lambda: server.getsockname()[1])])
there = torch.empty(SIZE, dtype=torch.uint8, device=D0)
here = torch.zeros(SIZE, dtype=torch.uint8)

def progress():
    assert half_sent.wait(60)
    return here[::4096].sum().item()

run_interrupted(lambda: here.copy_(there), resume_executor=go_on.set, progress=progress)
got = here.sum().item()
assert 0 < got <= SIZE // 2, got
torch.remote_accelerator.synchronize()
assert here.sum().item() == got
end.set()
device.detach()
thread.join()
server.close()
"""
    )
