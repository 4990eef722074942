"""attach and detach, lost connections, and both orders of importing torch and genie."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from genie import device
from genie.device import connection, library, registry
from genie.device.connection import ExecutorLink
from genie.errors import (
    AlreadyInitializedError,
    DeadlineError,
    DeviceLostError,
    DeviceUnavailableError,
    LaunchError,
    NotInitializedError,
    TlsError,
    TokenRefusedError,
    TransportError,
    UnreachableError,
    UsageError,
)
from genie.runtime import device_protocol
from tests.device.conftest import D0, SocketPipe, remote_device
from tests.executor.process import TICKET, start_executor
from tests.executor.thread import ThreadedExecutor, executor_on_a_thread
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("devices", "without_shared_devices")

LONG_S = 10.0


@contextmanager
def attached_executor(**settings: object) -> Iterator[ThreadedExecutor]:
    """A separate executor for this test, as remote_accelerator:0."""
    with executor_on_a_thread(**settings) as executor:
        device.attach([remote_device(0, lambda: executor.port)])
        try:
            yield executor
        finally:
            device.detach()


# --- attach and detach --------------------------------------------------------------------------


def test_error_without_session_says_what_to_call() -> None:
    for use in (
        lambda: torch.ones(1, device=D0),
        lambda: torch.ones(1).to(D0),
        torch.remote_accelerator.synchronize,
        lambda: torch.remote_accelerator.set_device(0),
    ):
        with pytest.raises(NotInitializedError, match=r"genie\.init"):
            use()
    assert (torch.remote_accelerator.device_count(), torch.remote_accelerator.is_available()) == (0, False)
    torch.manual_seed(0)


def test_cluster_without_accelerators_is_reported() -> None:
    device.attach([])
    with pytest.raises(DeviceUnavailableError, match="no accelerators"):
        torch.ones(1, device=D0)


def test_attach_opens_no_connection() -> None:
    def must_not_be_called() -> int:
        raise AssertionError("opened")

    device.attach([remote_device(0, must_not_be_called), remote_device(1, must_not_be_called)])
    assert torch.remote_accelerator.device_count() == 2
    assert torch.remote_accelerator.get_device_name(1) == "Test accelerator 1"
    torch.manual_seed(3)
    torch.remote_accelerator.empty_cache()
    with pytest.raises(AlreadyInitializedError):
        device.attach([])


def test_tensors_are_lost_after_detach() -> None:
    with attached_executor():
        left = torch.ones(3, device=D0)
        device.detach()
        device.detach()
        for use in (lambda: left + 1, left.cpu, lambda: left.sum().item(), lambda: repr(left)):
            with pytest.raises(DeviceLostError, match=r"node-0.*job-1.*shut down"):
                use()
        assert left.shape == (3,)


def test_attach_after_detach_starts_new_sessions() -> None:
    with attached_executor():
        old = torch.ones(3, device=D0)
    with attached_executor():
        new = torch.full((3,), 2.0, device=D0)
        with pytest.raises(DeviceLostError):
            old + new
        assert new.sum().item() == 6


def test_detach_wakes_a_waiting_thread() -> None:
    outcome: list[BaseException] = []
    with unresponsive_executor() as port:
        device.attach([remote_device(0, lambda: port)])

        def work() -> None:
            try:
                torch.ones(1, device=D0).cpu()
            except DeviceLostError as error:
                outcome.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(registry.is_any_device_used, what="the thread to be connected")
        device.detach()
        thread.join(LONG_S)
        assert len(outcome) == 1


def test_use_fails_if_detached_while_the_executor_is_opened() -> None:
    with executor_on_a_thread() as executor:

        def slow() -> int:
            device.detach()
            return executor.port

        device.attach([remote_device(0, slow)])
        with pytest.raises(NotInitializedError):
            torch.ones(1, device=D0)


# --- opening ------------------------------------------------------------------------------------


def test_error_of_opening_an_executor_propagates() -> None:
    def refuse() -> int:
        raise LaunchError("the node has no room")

    device.attach([remote_device(0, refuse)])
    with pytest.raises(LaunchError, match="no room"):
        torch.randn(2, device=D0)
    with pytest.raises(LaunchError, match="no room"):
        torch.nn.Linear(2, 2).to(D0)


def test_unreachable_executor_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    device.attach([remote_device(0, lambda: port)])
    with pytest.raises(UnreachableError, match="node-0"):
        torch.ones(1, device=D0)


def test_remote_host_without_tls_is_refused() -> None:
    address = device.ExecutorAddress(host="192.0.2.1", port=9, server_name="", ticket=TICKET)
    device.attach(
        [device.RemoteDevice(**(vars(remote_device(0, int)) | {"start_executor": lambda: address}))]
    )
    with pytest.raises(TlsError, match="another machine"):
        torch.ones(1, device=D0)


def test_wrong_ticket_is_an_error() -> None:
    with executor_on_a_thread() as executor:
        wrong = remote_device(0, lambda: executor.port)
        address = device.ExecutorAddress(host="127.0.0.1", port=executor.port, server_name="", ticket="wrong")
        device.attach([device.RemoteDevice(**(vars(wrong) | {"start_executor": lambda: address}))])
        with pytest.raises(TokenRefusedError):
            torch.ones(1, device=D0)
        device.detach()
        device.attach([wrong])
        torch.ones(1, device=D0)
        device.detach()


def test_resuming_a_connection_stops_at_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "RESUME_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(connection, "OPEN_SESSION_TIMEOUT_S", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = ExecutorLink(remote_device(0, lambda: silent.getsockname()[1]).start_executor(), "node-0")
        with pytest.raises(DeadlineError, match="node-0"):
            link.resume_session(0)


def test_second_client_is_refused() -> None:
    with attached_executor() as executor:
        torch.ones(1, device=D0)
        with pytest.raises(DeviceUnavailableError, match="already serves"):
            ExecutorLink(remote_device(0, lambda: executor.port).start_executor(), "node-0").open_session()
        assert torch.ones(2, device=D0).sum().item() == 2


def test_seed_set_before_first_use_applies() -> None:
    torch.manual_seed(77)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(77))
    with attached_executor():
        assert torch.equal(torch.rand(4, device=D0).cpu(), expected)
    with attached_executor():
        torch.manual_seed(77)
        assert torch.equal(torch.rand(4, device=D0).cpu(), expected)


def test_exceeding_the_quota_raises_out_of_memory() -> None:
    with attached_executor(memory_bytes_max=1_000_000):
        with pytest.raises(torch.OutOfMemoryError, match=r"1000000.*memory for a tensor, op 0 on .*node-0"):
            torch.empty(2**50, device=D0).sum().item()
        kept = [torch.zeros(50_000, device=D0) for _ in range(5)]
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(10, device=D0).sum().item()
        kept.pop()
        assert torch.zeros(10, device=D0).sum().item() == 0
        assert torch.remote_accelerator.memory_stats()["allocated_bytes.limit"] == 1_000_000


def test_torch_accelerator_reports_memory_and_resets_peak() -> None:
    with attached_executor():
        kept = torch.zeros(1000, device=D0)
        large = torch.zeros(100_000, device=D0)
        assert torch.accelerator.memory_allocated() == 404_000
        del large
        assert torch.accelerator.memory_allocated(D0) == kept.nbytes == 4000
        assert torch.accelerator.max_memory_allocated() == 404_000
        torch.accelerator.reset_peak_memory_stats()
        assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_reserved() == 4000
        del kept
        torch.remote_accelerator.reset_peak_memory_stats()
        assert torch.remote_accelerator.max_memory_allocated() == 0
        torch.accelerator.empty_cache()


def test_added_devices_get_the_next_indices() -> None:
    with attached_executor() as first, executor_on_a_thread() as second:
        kept = torch.ones(3, device=D0, requires_grad=True)
        kept.sum().backward()
        device.extend([remote_device(1, lambda: second.port)])
        assert torch.remote_accelerator.device_count() == 2
        later = torch.full((3,), 2.0, device="remote_accelerator:1", requires_grad=True)
        (later * kept.detach().to(later.device)).sum().backward()
        assert later.grad is not None and later.grad.sum().item() == 3
        assert (kept + 1).sum().item() == 6
        assert first.session.stats()["ops"] > 0, "the first connection is still in use"
        with pytest.raises(
            DeviceUnavailableError, match="has 2 devices: remote_accelerator:0 to remote_accelerator:1"
        ):
            torch.ones(1, device="remote_accelerator:2")


def test_devices_can_be_added_while_a_lost_one_reconnects() -> None:
    """The adding thread holds the GIL, which releasing the lost connection needs."""
    ports: list[int] = []
    added = threading.Event()
    with ExitStack() as stack:
        stack.callback(device.detach)
        device.attach([remote_device(0, lambda: ports[-1])])

        def add() -> None:
            while not added.is_set():
                library.update_devices_from_registry()

        thread = threading.Thread(target=add)
        for number in range(12):
            with executor_on_a_thread() as executor:
                ports.append(executor.port)
                assert torch.ones(3, device=D0).sum().item() == 3
                if number == 0:
                    thread.start()
                    stack.callback(thread.join)
                    stack.callback(added.set)
                executor.stop()
                wait_until(lambda: registry.device_slot(0).connection_if_open is None)


def test_added_device_index_can_be_used_before_the_library_is_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with attached_executor(), executor_on_a_thread() as second:
        torch.ones(1, device=D0)
        with monkeypatch.context() as patch:
            patch.setattr(registry._registry, "change_callbacks", [])
            device.extend([remote_device(1, lambda: second.port)])
        assert torch.ones(2, device="remote_accelerator:1").sum().item() == 2


def test_adding_no_devices_does_not_notify(monkeypatch: pytest.MonkeyPatch) -> None:
    with attached_executor():
        notified: list[None] = []
        monkeypatch.setattr(registry._registry, "change_callbacks", [lambda: notified.append(None)])
        device.extend([])
        assert notified == []
        device.extend([remote_device(1, lambda: 1)])
        assert notified == [None]


def test_truncated_stats_reply_ends_the_connection() -> None:
    """A truncated reply is a protocol violation, so the session ends."""
    server = socket.create_server(("127.0.0.1", 0))
    opened = device_protocol.Opened("cpu", "fake", 1, "job-1", "0", session_key="key", plaintext=True)

    def serve() -> None:
        sock, _ = server.accept()
        with sock:
            pipe = SocketPipe(sock)
            device_protocol.receive_request(pipe, peer="client", timeout_s=LONG_S)
            device_protocol.send_reply(pipe, opened, peer="client", timeout_s=LONG_S)
            received = b""
            while struct.pack("<I", 15 << 24) not in received:
                received += sock.recv(4096)
            sock.sendall(struct.pack("<QQQII", 3, 1, 0, 1, 0) + b"abc")
            while sock.recv(4096):
                pass

    with ExitStack() as stack:
        stack.callback(server.close)
        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join)
        device.attach([remote_device(0, lambda: int(server.getsockname()[1]))])
        stack.callback(device.detach)
        with pytest.raises(DeviceLostError, match="is truncated"):
            torch.remote_accelerator.memory_stats(0)


def test_adding_devices_without_session_has_no_effect() -> None:
    device.extend([remote_device(0, lambda: 1)])
    assert torch.remote_accelerator.device_count() == 0


def test_event_synchronize_waits() -> None:
    with attached_executor():
        x = torch.ones(3, device=D0)
        event = torch.Event(device=D0)
        event.record()
        event.synchronize()
        assert event.query()
        assert x.sum().item() == 3


def test_backward_works_with_the_maximum_number_of_devices() -> None:
    with executor_on_a_thread() as executor:
        many = [remote_device(number, lambda: executor.port) for number in range(registry.DEVICES_MAX + 1)]
        with pytest.raises(UsageError, match="at most 127"):
            device.attach(many)
        device.attach(many[:-1])
        try:
            assert torch.accelerator.device_count() == torch.remote_accelerator.device_count() == 127
            x = torch.ones(3, device=D0, requires_grad=True)
            (x * 2).sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [2, 2, 2]
            with pytest.raises(UsageError, match="at most 127"):
                device.extend(many[-1:])
        finally:
            device.detach()


@pytest.mark.parametrize("index", [129, 200, 254])
def test_index_beyond_the_maximum_is_refused(index: int) -> None:
    with attached_executor(), pytest.raises(DeviceUnavailableError, match="largest device index is 126"):
        torch.ones(2, device=f"remote_accelerator:{index}")


def test_invalid_rng_state_is_reported() -> None:
    with attached_executor():
        torch.remote_accelerator.set_rng_state(torch.zeros(3, dtype=torch.uint8))
        with pytest.raises(RuntimeError, match="set_rng_state, op 0 on remote_accelerator:0"):
            torch.remote_accelerator.synchronize()


# --- lost executors -----------------------------------------------------------------------------


def test_lost_executor_raises_in_waiting_threads(tmp_path: Path) -> None:
    with ExitStack() as stack:
        executors = [start_executor(tmp_path / str(number), job_id=f"job-{number}") for number in range(2)]
        for executor in executors:
            stack.callback(executor.kill)
        for executor in executors:
            executor.wait_ready()
        ports = iter([executor.port for executor in executors])
        device.attach([remote_device(0, lambda: next(ports))])
        stack.callback(device.detach)
        x = torch.ones(3, device=D0)
        torch.remote_accelerator.synchronize()
        executors[0].process.send_signal(signal.SIGSTOP)
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                x.sum().item()
            except DeviceLostError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        wait_until(lambda: torch.remote_accelerator.stream_stats(0)["replies"] > 1)
        registry.device_slot(0).disconnect_lost_executor("its node is gone")
        waiting.join(LONG_S)
        assert "its node is gone" in str(raised[0])
        assert torch.ones(2, device=D0).sum().item() == 2, "the next use opens another"


def test_lost_executor_is_named_and_next_use_reconnects() -> None:
    with ExitStack() as stack:
        executors = [stack.enter_context(executor_on_a_thread()) for _ in range(2)]
        ports = iter([executor.port for executor in executors])
        device.attach([remote_device(0, lambda: next(ports))])
        stack.callback(device.detach)
        torch.manual_seed(5)
        old = torch.rand(3, device=D0)
        executors[0].stop()
        for _ in range(2):
            with pytest.raises(DeviceLostError, match=r"remote_accelerator:0.*node-0.*job-1"):
                (old + 1).cpu()
        new = torch.rand(3, device=D0)
        assert torch.equal(new.cpu(), torch.rand(3, generator=torch.Generator().manual_seed(5)))
        with pytest.raises(DeviceLostError):
            old + new


def encode_reply(kind: int, *, number: int = 1, size: int = 0, payload: bytes = b"") -> bytes:
    """A frame of the executor, as native/torch/wire.h has it."""
    return struct.pack("<QQQII", size or len(payload), number, 0, kind, 0) + payload


def encode_text(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff" * 90,
        encode_reply(7),
        encode_reply(0, payload=b"an acknowledgement has none"),
        encode_reply(1, number=9),
        encode_reply(1, payload=b"too long for a float"),
        encode_reply(1, size=1 << 62),
        encode_reply(2, payload=b"\xff\xff\xff\xff"),
        encode_reply(
            2, payload=encode_text(b"\xff\xfe") + encode_text(b"\xff") + bytes(8) + encode_text(b"\xff\xff")
        ),
        encode_reply(
            3, payload=encode_text(b"\xff") + encode_text(b"") + bytes(8) + encode_text(b"\xff\xff")
        ),
        encode_reply(3, payload=b"\x01"),
    ],
)
def test_malformed_replies_are_errors(answer: bytes) -> None:
    with unresponsive_executor(answer) as port:
        device.attach([remote_device(0, lambda: port)])
        with pytest.raises((DeviceLostError, TransportError, RuntimeError)):
            torch.ones(1, device=D0).cpu()


def test_oversized_reply_is_refused() -> None:
    nested = struct.pack("<I", 1) + b"\x03\x01\x00\x00\x00" * 100_000
    with unresponsive_executor(encode_reply(1, payload=nested)) as port:
        device.attach([remote_device(0, lambda: port)])
        with pytest.raises((DeviceLostError, TransportError)):
            torch.ones(3, device=D0).nonzero()


def exit_code_of_child(work: Callable[[], int]) -> int:
    """The exit code of a forked process that runs `work`, with a timeout."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in a process with threads, as DataLoaders do.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:  # pragma: no cover - another process
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    status: list[int] = []

    def ended() -> bool:
        pid, found = os.waitpid(child, os.WNOHANG)
        status.append(found)
        return pid != 0

    try:
        wait_until(ended, what="the child to end")
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return os.waitstatus_to_exitcode(status[-1])


def test_forked_child_does_not_disturb_the_parent() -> None:
    with attached_executor():
        there = torch.ones(3, device=D0)

        def use() -> int:
            try:
                there + 1
            except DeviceLostError as error:
                return 17 if "forked" in str(error) else 18
            return 19

        assert exit_code_of_child(use) == 17
        assert (there + 1).tolist() == [2, 2, 2]


def test_forked_child_frees_tensors_of_replaced_executor() -> None:
    with ExitStack() as stack:
        executors = [stack.enter_context(executor_on_a_thread()) for _ in range(2)]
        ports = iter([executor.port for executor in executors])
        device.attach([remote_device(0, lambda: next(ports))])
        stack.callback(device.detach)
        old = [torch.ones(3, device=D0)]
        executors[0].stop()
        with pytest.raises(DeviceLostError):
            old[0].cpu()
        assert torch.ones(3, device=D0).sum().item() == 3

        def let_go() -> int:
            old.clear()
            return 17

        assert exit_code_of_child(let_go) == 17


@contextmanager
def unresponsive_executor(answer: bytes | None = None) -> Iterator[int]:
    """Accepts a client; then replies to its first frame with these bytes and disconnects, or does not
    reply."""
    server = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve() -> None:
        sock, _ = server.accept()
        with sock:
            pipe = SocketPipe(sock)
            device_protocol.receive_request(pipe, peer="the client", timeout_s=LONG_S)
            opened = device_protocol.Opened("cpu", "fake", 1, "job-1", "0", session_key="key", plaintext=True)
            device_protocol.send_reply(pipe, opened, peer="the client", timeout_s=LONG_S)
            sock.recv(1)
            if answer is None:
                done.wait(LONG_S)
            else:
                server.close()
                sock.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        device.detach()
        done.set()
        thread.join(LONG_S)
        server.close()
        assert not thread.is_alive()


# --- importing ----------------------------------------------------------------------------------


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attach_before_torch_import_registers_at_import() -> None:
    shown = run_python(
        """
        import sys
        from genie import device
        from genie.errors import LaunchError

        def refuse():
            raise LaunchError("asked")

        device.attach([device.RemoteDevice(
            node_id="n", gpu_id="g", name="x", memory_bytes=1, vendor="cpu", start_executor=refuse)])
        assert "torch" not in sys.modules
        import torch
        assert type(torch.__loader__).__module__ != "genie.device.import_hook"
        assert torch.remote_accelerator.device_count() == 1
        try:
            torch.randn(2, device="remote_accelerator:0")
        except LaunchError as error:
            print(error)
        """
    )
    assert shown.strip() == "asked"


@pytest.mark.parametrize("autoload", ["0", "1"])
@pytest.mark.parametrize("imports", ["genie, torch", "torch, genie"])
def test_device_is_registered_and_reports_missing_session(
    imports: str, autoload: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    with attached_executor():
        torch.save(torch.ones(2, device=D0), tmp_path / "saved")
    shown = run_python(
        f"""
        import {imports}
        from genie.errors import NotInitializedError

        assert torch.device("{D0}").index == 0
        assert torch.remote_accelerator.device_count() == 0
        assert not torch.accelerator.is_available()
        for use in (
            lambda: torch.ones(2, device="{D0}"),
            lambda: torch.nn.Linear(2, 2).to("{D0}"),
            lambda: torch.load("{tmp_path / "saved"}"),
            lambda: torch.remote_accelerator.set_device(0),
        ):
            try:
                use()
            except NotInitializedError as error:
                print("genie.init" in str(error))
        assert torch.load("{tmp_path / "saved"}", map_location="cpu").tolist() == [1, 1]
        x = torch.ones(2, requires_grad=True)
        x.sum().backward()
        assert type(torch.autograd.Variable._execution_engine) is torch._C._ImperativeEngine
        from genie.device import library
        print(library.is_loaded())
        """
    )
    assert shown.split() == ["True"] * 4 + ["False"]


def test_process_with_local_gpu_registers_only_with_a_session() -> None:
    shown = run_python(
        """
        import torch
        torch.cuda.device_count = lambda: 1
        from genie import device
        print(torch._C._get_privateuse1_backend_name())
        device.attach([])
        print(torch._C._get_privateuse1_backend_name())
        """
    )
    assert shown.split() == ["privateuseone", "remote_accelerator"]


def test_other_backend_without_session_logs_nothing() -> None:
    shown = run_python(
        """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import torch
        torch.utils.rename_privateuse1_backend("other")
        import genie
        print(torch.device("other:1"))
        """
    )
    assert shown.split() == ["other:1"]


def test_other_backend_with_session_is_logged() -> None:
    shown = run_python(
        """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import torch
        torch.utils.rename_privateuse1_backend("other")
        from genie import device
        device.attach([])
        """
    )
    assert "taken by other" in shown


@pytest.mark.parametrize("name", ["genie", "genie.device"])
def test_import_does_not_import_torch_or_networking(name: str) -> None:
    shown = run_python(  # `make coverage` imports some of them at startup
        f"import sys; before = {{*sys.modules}}; import {name}; "
        "print({'torch', 'asyncio', 'socket', 'ssl'} & {*sys.modules} - before)"
    )
    assert shown.strip() == "set()"


def test_genie_is_importable_without_torch() -> None:
    assert run_python("import sys; sys.modules['torch'] = None; import genie; print(genie.init)")
