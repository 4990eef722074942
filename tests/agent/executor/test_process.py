"""A real executor process: who gets in, and when it ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from genie.agent.executor import door
from genie.errors import DeviceUnavailableError, TokenRefusedError, TransportError
from genie.runtime import opwire, tls
from tests.agent.executor.client import TIMEOUT_S, Client, dial, knock
from tests.agent.executor.process import TICKET, ExecutorProcess, start_executor
from tests.agent.executor.thread import executor_on_a_thread

MIB = 1024 * 1024
HERE = opwire.OwnDevice()


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ExecutorProcess]]:
    """All that these tests need, started at once: most of a start is the import of torch."""
    folder = tmp_path_factory.mktemp("executors")
    secured = _certificate(folder)
    settings: dict[str, dict[str, object]] = {
        "plain": {"memory_bytes_max": 64 * MIB},
        "leaving": {},
        "secured": secured,
        "idle": {"idle_s": 0.1},
    }
    with ExitStack() as stack:
        started: dict[str, ExecutorProcess] = {}
        for name, values in settings.items():
            started[name] = start_executor(folder / name, **values)
            stack.callback(started[name].kill)
        for name in ("plain", "leaving", "secured"):
            started[name].wait_ready()
        yield started


@pytest.fixture(scope="module")
def inside(executors: dict[str, ExecutorProcess]) -> Iterator[Client]:
    """The one client of the plain executor."""
    channel = dial(executors["plain"].port)
    facts = knock(channel, TICKET)
    assert isinstance(facts, opwire.Opened)
    assert (facts.kind, facts.job_id, facts.memory_bytes) == ("cpu", "job-1", 64 * MIB)
    yield Client(channel)
    channel.close()


def _certificate(folder: Path) -> dict[str, object]:
    authority = tls.CertificateAuthority.create(now=time.time())
    key, csr = tls.new_key_and_csr()
    name = tls.executor_name("job-1")
    (folder / "key").write_bytes(key)
    (folder / "certificate").write_text(authority.issue(csr, name=name, days=1, now=time.time()))
    (folder / "ca").write_text(authority.ca_pem)
    return {
        "certificate_path": str(folder / "certificate"),
        "key_path": str(folder / "key"),
        "server_name": name,
    }


def still_serves(client: Client) -> bool:
    made = client.made("aten::ones", [2], device=HERE)
    client.send(opwire.Free([made.handle]))
    return client.counters().tensors == 0


def test_a_wrong_ticket_is_refused(executors: dict[str, ExecutorProcess], inside: Client) -> None:
    channel = dial(executors["plain"].port)
    reply = knock(channel, "not the ticket")
    channel.close()
    assert isinstance(reply, opwire.Error)
    assert reply.code == TokenRefusedError.code
    assert still_serves(inside)


def test_a_second_client_is_told_that_the_place_is_taken(
    executors: dict[str, ExecutorProcess], inside: Client
) -> None:
    channel = dial(executors["plain"].port)
    reply = knock(channel, TICKET)
    channel.close()
    assert isinstance(reply, opwire.Error)
    assert (reply.code, "already" in reply.message) == (DeviceUnavailableError.code, True)
    assert still_serves(inside)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GENIEX\x00\x09",
        opwire.preface() + b"\xff" * 64,
        opwire.preface() + opwire.encode(0, opwire.Open("x" * 500))[:-10],
        opwire.preface() + opwire.encode(0, opwire.Stats()),
        opwire.preface() + opwire.encode(0, opwire.Seed(1)) * 400,
        opwire.preface() + (5000).to_bytes(4, "big") + b"\x01\x00\x00\x00\x00",
        opwire.preface() + (100).to_bytes(4, "big") + b"\x02\x00\x00\x00\x00",
        b"",
    ],
    ids=["http", "version", "garbage", "truncated", "no ticket", "flood", "oversized", "data", "silence"],
)
def test_a_stranger_who_does_not_speak_the_wire_gets_nowhere(
    executors: dict[str, ExecutorProcess], inside: Client, words: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", executors["plain"].port), timeout=TIMEOUT_S) as stranger:
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        heard = b""
        try:
            while part := stranger.recv(4096):
                heard += part
        except ConnectionResetError:
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


def test_strangers_who_say_nothing_do_not_keep_the_client_out() -> None:
    with ExitStack() as stack:
        executor = stack.enter_context(executor_on_a_thread())
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", executor.port)))
        channel = dial(executor.port)
        stack.callback(channel.close)
        assert isinstance(knock(channel, TICKET), opwire.Opened)


def test_a_stranger_who_says_nothing_is_soon_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_FIRST_BYTE_S", 0.05)
    with (
        executor_on_a_thread() as executor,
        socket.create_connection(("127.0.0.1", executor.port), timeout=5.0) as stranger,
    ):
        assert stranger.recv(1) == b"", "well before the deadline of one who speaks"
        channel = dial(executor.port)
        assert isinstance(knock(channel, TICKET), opwire.Opened)
        channel.close()


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten::empty.memory_format", [[2**45]]),
        ("aten::arange", [2**34]),
        ("aten::eye", [2**17]),
        ("aten::randperm", [2**36]),
    ],
)
def test_a_request_for_too_much_memory_is_refused_and_the_executor_lives(
    inside: Client, op: str, args: list[opwire.Value]
) -> None:
    assert inside.refused(op, *args, device=HERE).code == opwire.OUT_OF_MEMORY
    assert still_serves(inside)


def test_memory_that_an_op_takes_on_the_way_is_limited_too(inside: Client) -> None:
    made = inside.made("aten::zeros", [100_000], device=HERE)
    column = inside.made("aten::view", opwire.Handle(made.handle), [100_000, 1])
    error = inside.refused("aten::mul.Tensor", opwire.Handle(made.handle), opwire.Handle(column.handle))
    assert error.code == opwire.OUT_OF_MEMORY
    inside.send(opwire.Free([made.handle, column.handle]))
    assert still_serves(inside)


def test_it_ends_well_when_its_client_leaves(executors: dict[str, ExecutorProcess]) -> None:
    executor = executors["leaving"]
    channel = dial(executor.port)
    assert isinstance(knock(channel, TICKET), opwire.Opened)
    Client(channel).made("aten::ones", [1000], device=HERE)
    channel.close()
    assert executor.wait_end() == 0


def test_it_ends_well_when_nobody_comes(executors: dict[str, ExecutorProcess]) -> None:
    assert executors["idle"].wait_end() == 0
    assert "no client came" in executors["idle"].output()


def test_it_listens_on_loopback_only_and_takes_a_free_port(executors: dict[str, ExecutorProcess]) -> None:
    process = psutil.Process(executors["plain"].process.pid)
    listening = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", executors["plain"].port)]


def test_over_tls_its_certificate_has_to_carry_its_name(executors: dict[str, ExecutorProcess]) -> None:
    executor = executors["secured"]
    context = tls.client_context((executor.folder.parent / "ca").read_text())
    with pytest.raises(OSError, match="certificate"):
        dial(executor.port, context, tls.executor_name("another-job"))
    with pytest.raises(TransportError):  # without TLS it understands nothing
        plain = dial(executor.port)
        try:
            knock(plain, TICKET)
        finally:
            plain.close()
    channel = dial(executor.port, context, executor.config.server_name)
    assert isinstance(knock(channel, TICKET), opwire.Opened)
    client = Client(channel)
    made = client.made("aten::ones", [8 * MIB], device=HERE)
    assert client.download(made) == bytes.fromhex("0000803f") * 8 * MIB
    channel.close()
    assert executor.wait_end() == 0
