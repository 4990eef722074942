"""A real executor process: who gets in, what it survives, and when it ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from genie.agent.executor import __main__ as executor_main
from genie.agent.executor import config as executor_config
from genie.errors import NativeBuildError, TokenRefusedError
from genie.runtime import native, opwire
from tests.agent.executor.client import HERE, TIMEOUT_S, Client, Error, New, Tensor, Value, dial, enter
from tests.agent.executor.process import TICKET, ExecutorProcess, start_executor

SOURCES = native.Workshop.of_this_installation().sources
MIB = 1024 * 1024
FLOAT32, INT64 = 6, 4
OUT_OF_MEMORY = "device.out_of_memory"


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ExecutorProcess]]:
    """All that these tests need, started at once: most of a start is the import of torch."""
    folder = tmp_path_factory.mktemp("executors")
    settings: dict[str, dict[str, object]] = {
        "plain": {"memory_bytes_max": 64 * MIB},
        "leaving": {},
        "deserted": {"resume_s": 0.1},
        "idle": {"idle_s": 0.1},
    }
    with ExitStack() as stack:
        started: dict[str, ExecutorProcess] = {}
        for name, values in settings.items():
            started[name] = start_executor(folder / name, **values)
            stack.callback(started[name].kill)
        for name in ("plain", "leaving", "deserted"):
            started[name].wait_ready()
        yield started


@pytest.fixture(scope="module")
def inside(executors: dict[str, ExecutorProcess]) -> Iterator[Client]:
    """The one client of the plain executor."""
    pipe = dial(executors["plain"].port)
    facts = enter(pipe, TICKET)
    assert (facts.kind, facts.job_id, facts.memory_bytes) == ("cpu", "job-1", 64 * MIB)
    yield Client(pipe)
    pipe.close()


def still_serves(client: Client) -> bool:
    made = client.made("aten::ones", [2], FLOAT32, None, HERE, None, gives=[New((2,))])
    right = client.floats_in(made) == (1, 1)
    client.free(made)
    return right and client.stats().storages == 0


def test_a_wrong_ticket_is_refused(executors: dict[str, ExecutorProcess], inside: Client) -> None:
    pipe = dial(executors["plain"].port)
    with pytest.raises(TokenRefusedError):
        enter(pipe, "not the ticket")
    pipe.close()
    assert still_serves(inside)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GENIEX\x00\x09",
        opwire.preface() + b"\xff" * 64,
        opwire.preface() + opwire.encode(opwire.Open("x" * 500))[:-10],
        opwire.preface() + opwire.encode(opwire.Error("transport", "no ticket")),
        opwire.preface() + opwire.encode(opwire.Open("x" * 500)) * 400,
        opwire.preface() + (5000).to_bytes(4, "big"),
        opwire.preface() + (0).to_bytes(4, "big"),
        b"",
    ],
    ids=["http", "version", "garbage", "truncated", "no ticket", "flood", "oversized", "empty", "silence"],
)
def test_a_stranger_who_does_not_speak_the_wire_gets_nowhere(
    executors: dict[str, ExecutorProcess], inside: Client, words: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", executors["plain"].port), timeout=TIMEOUT_S) as stranger:
        heard = b""
        try:
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            while part := stranger.recv(4096):
                heard += part
        except ConnectionError:
            pass  # it was hung up on with words still unread
        assert len(heard) < 4096
    assert still_serves(inside)


def test_strangers_who_hang_on_the_line_do_not_hold_up_the_client(
    executors: dict[str, ExecutorProcess], inside: Client
) -> None:
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(socket.create_connection(("127.0.0.1", executors["plain"].port)))
        assert still_serves(inside)


@pytest.mark.parametrize(
    ("op", "args", "made"),
    [
        ("aten::empty.memory_format", [[2**45], FLOAT32, None, HERE, None, None], New((2**45,))),
        ("aten::arange", [2**34, INT64, None, HERE, None], New((2**34,), "int64")),
        ("aten::eye", [2**17, FLOAT32, None, HERE, None], New((2**17, 2**17))),
        ("aten::randperm", [2**36, INT64, None, HERE, None], New((2**36,), "int64")),
    ],
    ids=["empty", "arange", "eye", "randperm"],
)
def test_a_request_for_too_much_memory_is_refused_and_the_executor_lives(
    inside: Client, op: str, args: list[Value], made: New
) -> None:
    error = inside.refused(op, *args)
    assert error.code == OUT_OF_MEMORY, error
    tensor = inside.made(op, *args, gives=[made])
    streamed = inside.sync()
    assert streamed is not None
    assert streamed.code == OUT_OF_MEMORY
    inside.free(tensor)
    assert still_serves(inside)


def test_memory_that_an_op_takes_on_the_way_is_limited_too(inside: Client) -> None:
    made = inside.made("aten::zeros", [100_000], FLOAT32, None, HERE, None, gives=[New((100_000,))])
    column = Tensor(made.storage, (100_000, 1))
    error = inside.refused("aten::mul.Tensor", made, column)
    assert error.code == OUT_OF_MEMORY
    inside.free(made)
    assert still_serves(inside)


def test_it_ends_well_when_its_client_leaves(executors: dict[str, ExecutorProcess]) -> None:
    executor = executors["leaving"]
    pipe = dial(executor.port)
    enter(pipe, TICKET)
    client = Client(pipe)
    client.floats(*range(1000))
    client.goodbye()
    assert executor.wait_end() == 0
    client.close()


def test_it_ends_well_when_its_client_does_not_come_back(executors: dict[str, ExecutorProcess]) -> None:
    executor = executors["deserted"]
    pipe = dial(executor.port)
    enter(pipe, TICKET)
    client = Client(pipe)
    assert not isinstance(client.sync(), Error)
    client.close()
    assert executor.wait_end() == 0
    assert "did not come back" in executor.output()


def test_it_ends_well_when_nobody_comes(executors: dict[str, ExecutorProcess]) -> None:
    assert executors["idle"].wait_end() == 0
    assert "no client came" in executors["idle"].output()


def test_it_listens_on_loopback_only_and_takes_a_free_port(executors: dict[str, ExecutorProcess]) -> None:
    process = psutil.Process(executors["plain"].process.pid)
    listening = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", executors["plain"].port)]


def test_one_without_a_library_says_that_it_compiles_and_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    said: list[str] = []

    def find_compiler() -> None:
        said.append(status.read_text())

    empty = native.Workshop(SOURCES, tmp_path / "cache")
    monkeypatch.setattr(native.Workshop, "of_this_installation", lambda: empty)
    monkeypatch.setattr(native, "_libraries", {})
    monkeypatch.setattr(native, "find_compiler", find_compiler)
    config = executor_config.ExecutorConfig(
        job_id="j", endpoint_path=str(tmp_path / "e"), ticket_sha256="ab" * 32, status_path=str(status)
    )
    executor_config.write(tmp_path / "config", config)
    assert executor_main.main(["--config", str(tmp_path / "config")]) == NativeBuildError.exit_code
    assert said[0].startswith("compiling its library for torch ")
    assert "there is no C++ compiler" in status.read_text()
    assert "apt install g++" in status.read_text()
