"""Parcels between executors: authorization, repeated and interrupted fetches, and failures."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from genie.errors import DeviceUnavailableError, TokenRefusedError
from genie.executor import listener as executor_listener
from genie.runtime import device_protocol
from tests.executor.client import (
    TIMEOUT_S,
    Client,
    ErrorReply,
    RecordKind,
    ReplyReader,
    SocketPipe,
    Tensor,
    fetch_parcel_record,
    handshake,
    open_pipe,
    record,
)
from tests.executor.process import TICKET
from tests.executor.thread import ThreadedExecutor, executor_on_a_thread
from tests.waiting import wait_until

MIB = 1024 * 1024
PARCELS_MAX = 4096
HEADER = struct.Struct("<QII")
CONTENTS, FAILURE = 0, 1
ACKNOWLEDGED = b"\x01"


_fetch_keys: dict[int, str] = {}
"""By port of the executor; no key if it is not a real one."""


def fetch_token(number: int, port: int) -> str:
    return device_protocol.make_fetch_token(_fetch_keys.get(port, ""), number)


@contextmanager
def executor_with_client(**settings: object) -> Iterator[tuple[ThreadedExecutor, Client]]:
    with executor_on_a_thread(**settings) as executor:
        pipe = open_pipe(executor.port)
        _fetch_keys[executor.port] = handshake(pipe, TICKET).fetch_key
        client = Client(pipe)
        try:
            yield executor, client
        finally:
            client.close()
            del _fetch_keys[executor.port]


@pytest.fixture
def executor_a() -> Iterator[tuple[ThreadedExecutor, Client]]:
    with executor_with_client(resume_s=0.1) as both:
        yield both


@pytest.fixture
def executor_b() -> Iterator[tuple[ThreadedExecutor, Client]]:
    with executor_with_client(resume_s=0.1) as both:
        yield both


@contextmanager
def open_fetch(port: int, number: int, token: str | None = None) -> Iterator[SocketPipe]:
    """Connect and authenticate; the parcel follows."""
    pipe = open_pipe(port)
    try:
        request = device_protocol.Fetch(number, fetch_token(number, port) if token is None else token)
        assert device_protocol.request_fetch(
            pipe, request, peer="the executor", timeout_s=TIMEOUT_S
        ).plaintext
        yield pipe
    finally:
        pipe.close()


def read_parcel(pipe: SocketPipe) -> bytes | ErrorReply:
    size, kind, _ = HEADER.unpack(pipe.read_exactly(HEADER.size, TIMEOUT_S))
    data = pipe.read_exactly(size, TIMEOUT_S)
    assert kind in (CONTENTS, FAILURE)
    return data if kind == CONTENTS else ReplyReader(data).error()


def fetch_contents(port: int, number: int) -> bytes | ErrorReply:
    with open_fetch(port, number) as pipe:
        found = read_parcel(pipe)
        pipe.write_all(ACKNOWLEDGED, TIMEOUT_S)
        return found


@pytest.fixture(autouse=True)
def wait_for_earlier_fetches() -> None:
    wait_until(lambda: count_fetch_threads() == 0)


def count_fetch_threads() -> int:
    return sum(thread.name.startswith("executor-fetch") for thread in threading.enumerate())


def pack_floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# --- publishing and dropping --------------------------------------------------------------------


def test_parcel_is_sent_once(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    client.publish_parcel(1, client.floats(1, 2, 3))
    assert fetch_contents(executor.port, 1) == pack_floats(1, 2, 3)
    wait_until(lambda: executor.session.stats()["parcels"] == 0)
    again = fetch_contents(executor.port, 1)
    assert isinstance(again, ErrorReply)
    assert "does not exist" in again.message
    assert client.sync() is None


def test_fetch_may_precede_the_parcel(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    tensor = client.floats(4, 5)
    with open_fetch(executor.port, 7) as pipe:
        assert client.sync() is None, "the fetch does not block the session"
        client.publish_parcel(7, tensor)
        assert read_parcel(pipe) == pack_floats(4, 5)


def test_source_may_be_written_or_freed_after_publishing(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    tensor = client.floats(1, 2)
    client.publish_parcel(1, tensor)
    client.put(tensor, pack_floats(8, 9))
    client.publish_parcel(2, tensor)
    client.free(tensor)
    assert fetch_contents(executor.port, 1) == pack_floats(1, 2)
    assert fetch_contents(executor.port, 2) == pack_floats(8, 9)


def test_parcel_of_a_view_is_contiguous(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    tensor = client.floats(*range(6))
    client.publish_parcel(1, Tensor(tensor.storage, (3, 2), strides=(1, 3)))
    client.publish_parcel(2, Tensor(tensor.storage, (2,), strides=(2,), offset=1))
    client.publish_parcel(3, Tensor(tensor.storage, (0, 2)))
    assert fetch_contents(executor.port, 1) == pack_floats(0, 3, 1, 4, 2, 5)
    assert fetch_contents(executor.port, 2) == pack_floats(1, 3)
    assert fetch_contents(executor.port, 3) == b""


def test_unacknowledged_parcel_can_be_fetched_again(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    client.publish_parcel(1, client.floats(6))
    with open_fetch(executor.port, 1) as pipe:
        assert read_parcel(pipe) == pack_floats(6)
    with open_fetch(executor.port, 1) as pipe:
        pass
    assert fetch_contents(executor.port, 1) == pack_floats(6)


def test_interrupted_fetch_can_be_repeated(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    data = bytes(range(256)) * (32 * MIB // 256)
    client.publish_parcel(1, client.upload((32 * MIB,), data, "uint8"))
    with open_fetch(executor.port, 1) as pipe:
        pipe.read_exactly(HEADER.size + MIB, TIMEOUT_S)
    assert fetch_contents(executor.port, 1) == data
    wait_until(lambda: executor.session.stats()["parcels"] == 0)


def test_newer_fetch_cancels_the_older_one(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    tensor = client.floats(6)
    with open_fetch(executor.port, 1) as old:
        wait_until(lambda: executor.session.stats()["pending_fetches"] == 1)
        with open_fetch(executor.port, 1) as new:
            with pytest.raises(ConnectionError):
                old.read_exactly(1, TIMEOUT_S)
            client.publish_parcel(1, tensor)
            assert read_parcel(new) == pack_floats(6)


def test_dropped_parcel_does_not_exist(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    client.publish_parcel(1, client.floats(6))
    client.drop_parcel(1)
    client.drop_parcel(5)  # never published
    assert client.sync() is None  # the fetch uses another connection, and could be faster
    assert isinstance(fetch_contents(executor.port, 1), ErrorReply)
    assert executor.session.stats()["parcels"] == 0


def test_parcels_count_towards_the_quota() -> None:
    with executor_with_client(memory_bytes_max=10 * MIB) as (executor, client):
        tensor = client.upload((4 * MIB,), bytes(4 * MIB), "uint8")
        client.publish_parcel(1, tensor)
        assert client.stats().bytes_allocated == 8 * MIB
        client.publish_parcel(2, tensor)
        error = client.sync()
        assert error is not None
        assert error.code == "device.out_of_memory"
        refused = fetch_contents(executor.port, 2)
        assert isinstance(refused, ErrorReply)
        assert refused.code == "device.out_of_memory"
        assert fetch_contents(executor.port, 1) == bytes(4 * MIB)
        wait_until(lambda: executor.session.stats()["bytes_allocated"] == 4 * MIB)
        client.publish_parcel(3, tensor)
        assert client.sync() is None
        assert client.stats().bytes_allocated_peak == 8 * MIB


def test_number_of_parcels_is_limited(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    tensor = client.floats(3)
    for number in range(1, PARCELS_MAX + 1):
        client.publish_parcel(number, tensor)
    assert client.sync() is None
    client.publish_parcel(PARCELS_MAX + 1, tensor)
    error = client.sync()
    assert error is not None
    assert "have not fetched yet" in error.message
    assert isinstance(fetch_contents(executor.port, PARCELS_MAX + 1), ErrorReply)
    client.drop_parcel(1)
    client.publish_parcel(PARCELS_MAX + 2, tensor)
    assert client.sync() is None
    assert fetch_contents(executor.port, PARCELS_MAX + 2) == pack_floats(3)


def test_parcel_of_a_poisoned_tensor_holds_the_failure() -> None:
    with executor_with_client(memory_bytes_max=MIB) as (executor, client):
        missing = client.allocate((MIB,))
        client.publish_parcel(1, missing)
        found = fetch_contents(executor.port, 1)
        assert isinstance(found, ErrorReply)
        assert found.code == "device.out_of_memory"


@pytest.mark.parametrize("number", [3, 2, 0])
def test_parcel_numbers_must_increase(executor_a: tuple[ThreadedExecutor, Client], number: int) -> None:
    executor, client = executor_a
    tensor = client.floats(1)
    client.publish_parcel(3, tensor)
    client.publish_parcel(number, tensor)
    client.receive_until_end()
    assert client.fatal_error is not None
    wait_until(lambda: executor.ended)


def test_fetches_end_with_the_session(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    client.publish_parcel(1, client.floats(1))
    with open_fetch(executor.port, 2) as pipe:
        wait_until(lambda: count_fetch_threads() == 1)
        client.close_session()
        with pytest.raises(ConnectionError):
            pipe.read_exactly(1, TIMEOUT_S)
    wait_until(lambda: executor.ended)
    assert executor.session.stats()["parcels"] == 0
    assert executor.session.stats()["bytes_allocated"] == 0


# --- authorization ------------------------------------------------------------------------------


def test_token_is_valid_for_one_parcel_of_one_executor(
    executor_a: tuple[ThreadedExecutor, Client], executor_b: tuple[ThreadedExecutor, Client]
) -> None:
    executor, client = executor_a
    client.publish_parcel(1, client.floats(1))
    another_number, another_executor = fetch_token(2, executor.port), fetch_token(1, executor_b[0].port)
    for token in ("", "0" * 64, another_number, another_executor, TICKET, "\u00e4"):
        with pytest.raises(TokenRefusedError), open_fetch(executor.port, 1, token):
            pass
    assert fetch_contents(executor.port, 1) == pack_floats(1)


def test_token_cannot_be_derived_from_the_digest_of_the_ticket(
    executor_a: tuple[ThreadedExecutor, Client],
) -> None:
    executor, client = executor_a
    client.publish_parcel(1, client.floats(1))
    digest = device_protocol.ticket_digest(TICKET)
    for token in (
        digest,
        device_protocol.make_fetch_token(digest, 1),
        device_protocol.make_fetch_token("", 1),
    ):
        with pytest.raises(TokenRefusedError), open_fetch(executor.port, 1, token):
            pass


def test_fetch_key_is_that_of_the_session() -> None:
    with executor_on_a_thread(resume_s=5.0) as executor:
        pipe = open_pipe(executor.port)
        opened = handshake(pipe, TICKET)
        client = Client(pipe)
        client.floats(1)
        client.sync()
        executor.disconnect_client()
        client.close()
        again = open_pipe(executor.port)
        resumed = handshake(again, TICKET, session_key=opened.session_key, replies_received=client.replies)
        again.close()
    assert resumed.fetch_key == opened.fetch_key
    assert len(opened.fetch_key) == 64


def test_fetch_without_a_session_is_refused() -> None:
    with executor_on_a_thread() as executor:
        with pytest.raises(DeviceUnavailableError), open_fetch(executor.port, 1):
            pass
        pipe = open_pipe(executor.port)
        handshake(pipe, TICKET)
        pipe.close()


def test_number_of_pending_fetches_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_listener, "_FETCH_CONNECTIONS_MAX", 10)
    with executor_with_client() as (executor, client), ExitStack() as stack:
        for number in range(1, 11):
            stack.enter_context(open_fetch(executor.port, number))
        with (
            pytest.raises(DeviceUnavailableError, match="10 connections that fetch parcels"),
            open_fetch(executor.port, 11),
        ):
            pass
        client.publish_parcel(1, client.floats(1))
        assert client.sync() is None
        stack.close()
        wait_until(lambda: count_fetch_threads() == 0, what="fetches with a lost connection to end")
        with open_fetch(executor.port, 1) as pipe:
            assert read_parcel(pipe) == pack_floats(1)


def test_fetch_that_sends_data_early_is_disconnected(executor_a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = executor_a
    with open_fetch(executor.port, 1) as pipe:
        pipe.write_all(b"\x01" * 100, TIMEOUT_S)
        with pytest.raises(ConnectionError):
            pipe.read_exactly(1, TIMEOUT_S)
    client.publish_parcel(1, client.floats(1))
    assert fetch_contents(executor.port, 1) == pack_floats(1)


def test_connection_fetches_several_parcels_with_one_token_each(
    executor_a: tuple[ThreadedExecutor, Client],
) -> None:
    executor, client = executor_a
    for number in range(1, 4):
        client.publish_parcel(number, client.floats(number))
    with open_fetch(executor.port, 1) as pipe:
        for number in range(1, 4):
            if number > 1:
                request = device_protocol.Fetch(number, fetch_token(number, executor.port))
                assert device_protocol.request_fetch(
                    pipe, request, peer="x", timeout_s=TIMEOUT_S, is_reused=True
                ).plaintext
            assert read_parcel(pipe) == pack_floats(number)
            pipe.write_all(ACKNOWLEDGED, TIMEOUT_S)
        with pytest.raises(TokenRefusedError):
            wrong = device_protocol.Fetch(4, fetch_token(3, executor.port))
            device_protocol.request_fetch(pipe, wrong, peer="x", timeout_s=TIMEOUT_S, is_reused=True)
    assert client.sync() is None


def test_idle_fetch_connection_is_closed(
    executor_a: tuple[ThreadedExecutor, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_listener, "_FETCH_IDLE_TIMEOUT_S", 0.05)
    executor, client = executor_a
    client.publish_parcel(1, client.floats(1))
    with open_fetch(executor.port, 1) as pipe:
        read_parcel(pipe)
        pipe.write_all(ACKNOWLEDGED, TIMEOUT_S)
        with pytest.raises(ConnectionError):
            pipe.read_exactly(1, TIMEOUT_S)


# --- fetching -----------------------------------------------------------------------------------

Both = tuple[ThreadedExecutor, Client]


def assert_fetch_fails(client: Client, target: Tensor, bystander: Tensor) -> ErrorReply:
    """The failure is reported, the target is poisoned, and other tensors are not affected."""
    reported = client.sync()
    assert reported is not None
    again = client.get(target)
    assert isinstance(again, ErrorReply)
    assert again.message == reported.message
    assert client.floats_in(bystander) == (42,)
    assert client.sync() is None
    return reported


def test_parcel_is_fetched_into_a_view(executor_a: Both, executor_b: Both) -> None:
    (source, one), (_, other) = executor_a, executor_b
    one.publish_parcel(1, one.floats(1, 2, 3, 4))
    there = other.floats(*[0] * 8)
    other.fetch_parcel(Tensor(there.storage, (4,), strides=(2,)), source.port, 1, fetch_token(1, source.port))
    assert other.floats_in(there) == (1, 0, 2, 0, 3, 0, 4, 0)
    wait_until(lambda: source.session.stats()["parcels"] == 0)


def test_fetches_from_one_executor_share_a_connection(executor_a: Both, executor_b: Both) -> None:
    (source, one), (_, other) = executor_a, executor_b
    there = other.floats(0)
    for number in range(1, 6):
        one.publish_parcel(number, one.floats(number))
        other.fetch_parcel(there, source.port, number, fetch_token(number, source.port))
        assert other.floats_in(there) == (number,)
    assert count_fetch_threads() == 1


def test_fetch_reconnects_after_the_source_closed_the_connection(
    executor_a: Both, executor_b: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_listener, "_FETCH_IDLE_TIMEOUT_S", 0.01)
    (source, one), (_, other) = executor_a, executor_b
    there = other.floats(0)
    for number in range(1, 4):
        one.publish_parcel(number, one.floats(number))
        other.fetch_parcel(there, source.port, number, fetch_token(number, source.port))
        assert other.floats_in(there) == (number,)
        wait_until(lambda: count_fetch_threads() == 0)


def test_fetch_works_after_a_failed_one(executor_a: Both, executor_b: Both) -> None:
    (source, one), (_, other) = executor_a, executor_b
    for number in range(1, 4):
        one.publish_parcel(number, one.floats(number, number))
    there, short = other.floats(0, 0), other.floats(0)
    other.fetch_parcel(there, source.port, 1, fetch_token(1, source.port))
    other.fetch_parcel(short, source.port, 2, fetch_token(2, source.port))
    assert other.sync() is not None
    other.fetch_parcel(there, source.port, 3, fetch_token(3, source.port))
    assert other.floats_in(there) == (3, 3)


def test_large_parcel_is_fetched_completely(executor_a: Both, executor_b: Both) -> None:
    (source, one), (_, other) = executor_a, executor_b
    data = bytes(range(256)) * (9 * MIB // 256)
    one.publish_parcel(1, one.upload((9 * MIB,), data, "uint8"))
    there = other.allocate((9 * MIB,), "uint8")
    other.fetch_parcel(there, source.port, 1, fetch_token(1, source.port))
    assert other.get(there) == data


def test_pending_fetch_is_repeated_after_the_client_reconnects(executor_a: Both) -> None:
    source, one = executor_a
    with executor_on_a_thread() as target:
        pipe = open_pipe(target.port)
        opened = handshake(pipe, TICKET)
        other = Client(pipe)
        there = other.floats(0, 0)
        assert other.sync() is None
        other.fetch_parcel(there, source.port, 1, fetch_token(1, source.port))
        wait_until(lambda: count_fetch_threads() == 1)
        target.disconnect_client()
        other.close()
        again = open_pipe(target.port)
        resumed = handshake(again, TICKET, session_key=opened.session_key, replies_received=other.replies)
        assert resumed.frames_received == other.frames - 1, "a frame with a pending fetch is unreceived"
        other.pipe = again
        other.write(other.sent[-1])
        one.publish_parcel(1, one.floats(5, 6))
        assert other.floats_in(there) == (5, 6)
        other.close()


def test_pending_fetch_sends_keep_alive_acknowledgements(executor_a: Both, executor_b: Both) -> None:
    """Otherwise the client would time out."""
    (source, one), (_, other) = executor_a, executor_b
    there = other.floats(0, 0)
    assert other.sync() is None
    other.fetch_parcel(there, source.port, 1, fetch_token(1, source.port))
    for _ in range(2):
        assert other.receive_acknowledgement() == other.frames - 1
    one.publish_parcel(1, one.floats(5, 6))
    assert other.floats_in(there) == (5, 6)


def test_lost_source_is_named_in_the_error(executor_a: Both, executor_b: Both) -> None:
    (source, _), (_, other) = executor_a, executor_b
    there, bystander = other.floats(0, 0), other.floats(42)
    other.fetch_parcel(there, source.port, 1, fetch_token(1, source.port))
    wait_until(lambda: count_fetch_threads() == 1)
    source.stop()
    reported = assert_fetch_fails(other, there, bystander)
    assert reported.code == "device.lost"
    assert f"the source at 127.0.0.1:{source.port}" in reported.message


def test_failure_of_the_source_is_reported(executor_b: Both) -> None:
    _, other = executor_b
    with executor_with_client(memory_bytes_max=MIB) as (source, one):
        one.publish_parcel(1, one.allocate((MIB,)))
        there, bystander = other.floats(0), other.floats(42)
        other.fetch_parcel(there, source.port, 1, fetch_token(1, source.port))
        assert assert_fetch_fails(other, there, bystander).code == "device.out_of_memory"


@pytest.mark.parametrize("number", [1, 2])
def test_fetch_with_wrong_token_fails(executor_a: Both, executor_b: Both, number: int) -> None:
    (source, one), (_, other) = executor_a, executor_b
    one.publish_parcel(1, one.floats(7))
    there, bystander = other.floats(0), other.floats(42)
    other.fetch_parcel(there, source.port, 1, fetch_token(number + 1, source.port))
    assert assert_fetch_fails(other, there, bystander).code == "access.token_refused"
    assert fetch_contents(source.port, 1) == pack_floats(7)


def test_fetch_with_wrong_size_fails(executor_a: Both, executor_b: Both) -> None:
    (source, one), (_, other) = executor_a, executor_b
    one.publish_parcel(1, one.floats(7, 8))
    there, bystander = other.floats(0), other.floats(42)
    other.fetch_parcel(there, source.port, 1, fetch_token(1, source.port))
    assert "8 bytes, expected 4" in assert_fetch_fails(other, there, bystander).message


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "example.invalid", "\u00e4" * 100, ""])
def test_fetch_from_another_machine_requires_tls(executor_b: Both, host: str) -> None:
    _, other = executor_b
    there, bystander = other.floats(0), other.floats(42)
    other.fetch_parcel(there, 9, 1, fetch_token(1, 9), host=host)
    assert assert_fetch_fails(other, there, bystander).code == "access.tls"


def test_tokens_are_not_logged(executor_a: Both, executor_b: Both, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    (source, one), (_, other) = executor_a, executor_b
    one.publish_parcel(1, one.floats(7))
    other.fetch_parcel(other.floats(0), source.port, 1, fetch_token(1, source.port))
    other.fetch_parcel(other.floats(0), source.port, 1, fetch_token(2, source.port))
    assert other.sync() is not None
    wait_until(lambda: "rejected the client 127.0.0.1" in caplog.text)
    assert fetch_token(1, source.port) not in caplog.text
    assert fetch_token(2, source.port) not in caplog.text


@contextmanager
def fake_executor(*acts: Callable[[SocketPipe], None]) -> Iterator[int]:
    """A listener in place of an executor. Each connection gets the next act; then it stops listening."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(TIMEOUT_S)

    def run() -> None:
        for act in acts:
            sock, _ = listener.accept()
            with sock:
                act(SocketPipe(sock))
        listener.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        thread.join(TIMEOUT_S)
        listener.close()


def accept_fetch(pipe: SocketPipe) -> None:
    assert isinstance(
        device_protocol.receive_request(pipe, peer="x", timeout_s=TIMEOUT_S), device_protocol.Fetch
    )
    device_protocol.send_reply(pipe, device_protocol.Fetched(plaintext=True), peer="x", timeout_s=TIMEOUT_S)


def send_bytes(data: bytes) -> Callable[[SocketPipe], None]:
    def act(pipe: SocketPipe) -> None:
        accept_fetch(pipe)
        pipe.write_all(data, TIMEOUT_S)
        pipe.sock.shutdown(socket.SHUT_WR)
        try:
            pipe.read_exactly(1, TIMEOUT_S)
        except OSError:
            pass  # disconnected

    return act


def send_garbage(pipe: SocketPipe) -> None:
    pipe.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n", TIMEOUT_S)


WHOLE = HEADER.pack(8, CONTENTS, 0) + pack_floats(3, 4)


def test_interrupted_transfer_is_restarted(executor_b: Both) -> None:
    _, other = executor_b
    there = other.floats(0, 0)
    with fake_executor(
        send_bytes(WHOLE[:-3]), send_bytes(b""), send_bytes(WHOLE[:5]), send_bytes(WHOLE)
    ) as port:
        other.fetch_parcel(there, port, 1, fetch_token(1, port))
        assert other.floats_in(there) == (3, 4)


@pytest.mark.parametrize(
    ("acts", "code"),
    [
        ([send_bytes(WHOLE[:-3])], "device.lost"),
        ([send_bytes(WHOLE[:-3])] * 6, "device.lost"),
        ([send_garbage], "transport.protocol"),
        ([send_bytes(HEADER.pack(8, 2, 0))], "transport.protocol"),
        ([send_bytes(HEADER.pack(2**40, CONTENTS, 0))], "transport.protocol"),
        ([send_bytes(HEADER.pack(2**40, FAILURE, 0))], "transport.protocol"),
        ([send_bytes(HEADER.pack(9, FAILURE, 0) + b"\xff" * 9)], "transport.protocol"),
        ([send_bytes(HEADER.pack(0, FAILURE, 0))], "transport.protocol"),
    ],
    ids=["half", "half each time", "garbage", "kind", "size", "failure size", "failure", "empty failure"],
)
def test_invalid_parcel_fails_the_fetch(
    executor_b: Both, acts: list[Callable[[SocketPipe], None]], code: str
) -> None:
    _, other = executor_b
    there, bystander = other.floats(0, 0), other.floats(42)
    with fake_executor(*acts) as port:
        other.fetch_parcel(there, port, 1, fetch_token(1, port))
        assert assert_fetch_fails(other, there, bystander).code == code


def fetch_record_with_port(port: int) -> Callable[[Tensor], bytes]:
    return lambda target: fetch_parcel_record(target, port, 1, "")


@pytest.mark.parametrize(
    "records",
    [
        fetch_record_with_port(0),
        fetch_record_with_port(65536),
        lambda target: fetch_parcel_record(target, 9, 1, "", size_bytes=5),
        lambda target: fetch_parcel_record(target, 9, 1, "x" * 300),
        lambda target: fetch_parcel_record(target, 9, 1, "", host="h" * 300),
        lambda target: fetch_parcel_record(target, 9, 1, "")[:-1],
        lambda target: fetch_parcel_record(target, 9, 1, "") + record(RecordKind.SYNC),
        lambda target: record(RecordKind.SEED, 0, bytes(12)) + fetch_parcel_record(target, 9, 1, ""),
        lambda target: fetch_parcel_record(Tensor(target.storage, (99,)), 9, 1, ""),
        lambda target: fetch_parcel_record(Tensor(77, (2,)), 9, 1, ""),
        lambda target: record(RecordKind.FETCH_PARCEL),
        lambda target: record(RecordKind.PUBLISH_PARCEL, 0, b"1234"),
        lambda target: record(RecordKind.DROP_PARCEL),
    ],
    ids=[
        "no port", "large port", "size", "long token", "long host", "short", "more after", "more before",
        "beyond the storage", "unknown storage", "nothing", "short publish", "short drop",
    ],
)  # fmt: skip
def test_invalid_parcel_record_ends_the_session(executor_b: Both, records: Callable[[Tensor], bytes]) -> None:
    executor, other = executor_b
    target = other.floats(0, 0)
    other.send(records(target))
    other.receive_until_end()
    assert other.fatal_error is not None
    assert other.fatal_error.code == "transport.protocol"
    wait_until(lambda: executor.ended)
