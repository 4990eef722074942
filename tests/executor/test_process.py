"""A real executor process: authentication, memory limits, and exit."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from genie.errors import HardwareError, NativeBuildError, TokenRefusedError
from genie.executor import __main__ as executor_main
from genie.model.job import CLIENT_LOST_EXIT_CODE
from genie.native import libraries
from genie.processes import executor_config
from genie.runtime import device_protocol
from tests.executor.client import (
    DEVICE,
    TIMEOUT_S,
    Client,
    ErrorReply,
    NewOutput,
    Tensor,
    Value,
    handshake,
    open_pipe,
)
from tests.executor.process import TICKET, ExecutorProcess, start_executor

SOURCES = libraries.BuildCache.of_this_installation().source_folder
MIB = 1024 * 1024
FLOAT32, INT64 = 6, 4
OUT_OF_MEMORY = "device.out_of_memory"


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ExecutorProcess]]:
    """The executors of all tests, started in parallel: importing torch takes most of the time."""
    folder = tmp_path_factory.mktemp("executors")
    settings: dict[str, dict[str, object]] = {
        "plain": {"memory_bytes_max": 64 * MIB},
        "closed": {"fresh": True},
        "abandoned": {"resume_s": 0.1},
        "idle": {"idle_s": 0.1},
        "violated": {},
    }
    with ExitStack() as stack:
        started: dict[str, ExecutorProcess] = {}
        for name, values in settings.items():
            status_path = str(folder / name / "status")
            started[name] = start_executor(folder / name, status_path=status_path, **values)
            stack.callback(started[name].kill)
        for name in ("plain", "closed", "abandoned", "violated"):
            started[name].wait_ready()
        yield started


@pytest.fixture(scope="module")
def client(executors: dict[str, ExecutorProcess]) -> Iterator[Client]:
    """The client of the plain executor."""
    pipe = open_pipe(executors["plain"].port)
    opened = handshake(pipe, TICKET)
    assert (opened.kind, opened.job_id, opened.memory_bytes) == ("cpu", "job-1", 64 * MIB)
    yield Client(pipe)
    pipe.close()


def read_status(executor: ExecutorProcess) -> str:
    """What the executor reports to the agent."""
    return (executor.folder / "status").read_text()


def still_serves(client: Client) -> bool:
    made = client.op_output("aten::ones", [2], FLOAT32, None, DEVICE, None, outputs=[NewOutput((2,))])
    right = client.floats_in(made) == (1, 1)
    client.free(made)
    return right and client.stats().storages == 0


def test_wrong_ticket_is_refused(executors: dict[str, ExecutorProcess], client: Client) -> None:
    pipe = open_pipe(executors["plain"].port)
    with pytest.raises(TokenRefusedError):
        handshake(pipe, "not the ticket")
    pipe.close()
    assert still_serves(client)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GENIEX\x00\x09",
        device_protocol.make_preface() + b"\xff" * 64,
        device_protocol.make_preface() + device_protocol.encode(device_protocol.Open("x" * 500))[:-10],
        device_protocol.make_preface()
        + device_protocol.encode(device_protocol.Error("transport", "no ticket")),
        device_protocol.make_preface() + device_protocol.encode(device_protocol.Open("x" * 500)) * 400,
        device_protocol.make_preface() + (5000).to_bytes(4, "big"),
        device_protocol.make_preface() + (0).to_bytes(4, "big"),
        b"",
    ],
    ids=["http", "version", "garbage", "truncated", "no ticket", "flood", "oversized", "empty", "silence"],
)
def test_invalid_handshake_is_refused(
    executors: dict[str, ExecutorProcess], client: Client, sent: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", executors["plain"].port), timeout=TIMEOUT_S) as other:
        received = b""
        try:
            other.sendall(sent)
            other.shutdown(socket.SHUT_WR)
            while part := other.recv(4096):
                received += part
        except ConnectionError:
            pass  # disconnected with unread data
        assert len(received) < 4096
    assert still_serves(client)


def test_idle_connections_do_not_block_the_client(
    executors: dict[str, ExecutorProcess], client: Client
) -> None:
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(socket.create_connection(("127.0.0.1", executors["plain"].port)))
        assert still_serves(client)


@pytest.mark.parametrize(
    ("op", "args", "made"),
    [
        ("aten::empty.memory_format", [[2**45], FLOAT32, None, DEVICE, None, None], NewOutput((2**45,))),
        ("aten::arange", [2**34, INT64, None, DEVICE, None], NewOutput((2**34,), "int64")),
        ("aten::eye", [2**17, FLOAT32, None, DEVICE, None], NewOutput((2**17, 2**17))),
        ("aten::randperm", [2**36, INT64, None, DEVICE, None], NewOutput((2**36,), "int64")),
    ],
    ids=["empty", "arange", "eye", "randperm"],
)
def test_excessive_allocation_is_refused_and_executor_continues(
    client: Client, op: str, args: list[Value], made: NewOutput
) -> None:
    error = client.run_refused(op, *args)
    assert error.code == OUT_OF_MEMORY, error
    tensor = client.op_output(op, *args, outputs=[made])
    streamed = client.sync()
    assert streamed is not None
    assert streamed.code == OUT_OF_MEMORY
    client.free(tensor)
    assert still_serves(client)


def test_temporary_memory_of_an_op_is_limited(client: Client) -> None:
    made = client.op_output(
        "aten::zeros", [100_000], FLOAT32, None, DEVICE, None, outputs=[NewOutput((100_000,))]
    )
    column = Tensor(made.storage, (100_000, 1))
    error = client.run_refused("aten::mul.Tensor", made, column)
    assert error.code == OUT_OF_MEMORY
    client.free(made)
    assert still_serves(client)


def test_executor_exits_when_client_closes_the_session(executors: dict[str, ExecutorProcess]) -> None:
    executor = executors["closed"]
    pipe = open_pipe(executor.port)
    handshake(pipe, TICKET)
    client = Client(pipe)
    client.floats(*range(1000))
    client.close_session()
    assert executor.wait_end() == 0
    client.close()


def test_executor_exits_when_client_does_not_reconnect(executors: dict[str, ExecutorProcess]) -> None:
    executor = executors["abandoned"]
    pipe = open_pipe(executor.port)
    handshake(pipe, TICKET)
    client = Client(pipe)
    assert not isinstance(client.sync(), ErrorReply)
    client.close()
    assert executor.wait_end() == CLIENT_LOST_EXIT_CODE
    assert read_status(executor) == "the client disconnected and did not reconnect within 0.1 s"


def test_executor_exits_when_no_client_connects(executors: dict[str, ExecutorProcess]) -> None:
    assert executors["idle"].wait_end() == CLIENT_LOST_EXIT_CODE
    assert read_status(executors["idle"]) == "no client connected within 0.1 s"


def test_executor_fails_when_client_violates_the_protocol(executors: dict[str, ExecutorProcess]) -> None:
    executor = executors["violated"]
    pipe = open_pipe(executor.port)
    handshake(pipe, TICKET)
    client = Client(pipe)
    client.write(b"\xff" * 100)
    assert executor.wait_end() == HardwareError.exit_code
    client.close()


def test_executor_listens_on_a_free_loopback_port(executors: dict[str, ExecutorProcess]) -> None:
    process = psutil.Process(executors["plain"].process.pid)
    listening = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", executors["plain"].port)]


def test_status_reports_compilation_and_its_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    statuses: list[str] = []

    def find_compiler() -> None:
        statuses.append(status.read_text())

    empty = libraries.BuildCache(SOURCES, tmp_path / "cache")
    monkeypatch.setattr(libraries.BuildCache, "of_this_installation", lambda: empty)
    monkeypatch.setattr(libraries, "_loaded_libraries", {})
    monkeypatch.setattr(libraries, "find_compiler", find_compiler)
    config = executor_config.ExecutorConfig(
        job_id="j", endpoint_path=str(tmp_path / "e"), ticket_sha256="ab" * 32, status_path=str(status)
    )
    executor_config.write(tmp_path / "config", config)
    assert executor_main.main(["--config", str(tmp_path / "config")]) == NativeBuildError.exit_code
    assert statuses[0].startswith("compiling the executor library for torch ")
    assert "there is no C++ compiler" in status.read_text()
    assert "apt install g++" in status.read_text()
