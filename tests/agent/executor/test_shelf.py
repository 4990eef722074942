"""Copies between executors over the raw wire: who may fetch, how often, and what a broken copy leaves."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from genie.agent.executor import door
from genie.errors import DeviceUnavailableError, TokenRefusedError
from genie.runtime import opwire
from tests.agent.executor.client import (
    TIMEOUT_S,
    Client,
    Error,
    Record,
    Scanner,
    SocketPipe,
    Tensor,
    dial,
    enter,
    landing,
    record,
)
from tests.agent.executor.process import TICKET
from tests.agent.executor.thread import ThreadedExecutor, executor_on_a_thread
from tests.waiting import wait_until

MIB = 1024 * 1024
PARCELS_MAX = 4096
HEADER = struct.Struct("<QII")
CONTENTS, FAILURE = 0, 1
TAKEN = b"\x01"


def token_for(number: int, ticket: str = TICKET) -> str:
    return opwire.fetch_token(opwire.ticket_digest(ticket), number)


@contextmanager
def served(**settings: object) -> Iterator[tuple[ThreadedExecutor, Client]]:
    with executor_on_a_thread(**settings) as executor:
        pipe = dial(executor.port)
        enter(pipe, TICKET)
        client = Client(pipe)
        try:
            yield executor, client
        finally:
            client.close()


@pytest.fixture
def a() -> Iterator[tuple[ThreadedExecutor, Client]]:
    with served(resume_s=0.1) as both:
        yield both


@pytest.fixture
def b() -> Iterator[tuple[ThreadedExecutor, Client]]:
    with served(resume_s=0.1) as both:
        yield both


@contextmanager
def fetching(port: int, number: int, token: str | None = None) -> Iterator[SocketPipe]:
    """Let in; what comes next is the parcel."""
    pipe = dial(port)
    try:
        request = opwire.Fetch(number, token_for(number) if token is None else token)
        assert opwire.fetch(pipe, request, peer="the executor", timeout_s=TIMEOUT_S).bare
        yield pipe
    finally:
        pipe.close()


def parcel(pipe: SocketPipe) -> bytes | Error:
    size, kind, _ = HEADER.unpack(pipe.read_exactly(HEADER.size, TIMEOUT_S))
    data = pipe.read_exactly(size, TIMEOUT_S)
    assert kind in (CONTENTS, FAILURE)
    return data if kind == CONTENTS else Scanner(data).error()


def fetched(port: int, number: int) -> bytes | Error:
    with fetching(port, number) as pipe:
        found = parcel(pipe)
        pipe.write_all(TAKEN, TIMEOUT_S)
        return found


def waiting_fetches() -> int:
    return sum(thread.name.startswith("executor-fetch") for thread in threading.enumerate())


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# --- the shelf ----------------------------------------------------------------------------------


def test_what_is_shipped_is_given_once(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    client.ship(1, client.floats(1, 2, 3))
    assert fetched(executor.port, 1) == floats(1, 2, 3)
    wait_until(lambda: executor.session.stats()["shelved"] == 0)
    again = fetched(executor.port, 1)
    assert isinstance(again, Error)
    assert "not there" in again.message
    assert client.sync() is None


def test_a_fetch_may_come_before_the_ship(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    tensor = client.floats(4, 5)
    with fetching(executor.port, 7) as pipe:
        assert client.sync() is None, "nobody waits for the fetch"
        client.ship(7, tensor)
        assert parcel(pipe) == floats(4, 5)


def test_the_source_may_change_or_die_at_once(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    tensor = client.floats(1, 2)
    client.ship(1, tensor)
    client.put(tensor, floats(8, 9))
    client.ship(2, tensor)
    client.free(tensor)
    assert fetched(executor.port, 1) == floats(1, 2)
    assert fetched(executor.port, 2) == floats(8, 9)


def test_a_view_is_shipped_as_it_reads(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    tensor = client.floats(*range(6))
    client.ship(1, Tensor(tensor.storage, (3, 2), strides=(1, 3)))
    client.ship(2, Tensor(tensor.storage, (2,), strides=(2,), offset=1))
    client.ship(3, Tensor(tensor.storage, (0, 2)))
    assert fetched(executor.port, 1) == floats(0, 3, 1, 4, 2, 5)
    assert fetched(executor.port, 2) == floats(1, 3)
    assert fetched(executor.port, 3) == b""


def test_what_was_not_taken_may_be_fetched_again(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    client.ship(1, client.floats(6))
    with fetching(executor.port, 1) as pipe:
        assert parcel(pipe) == floats(6)
    with fetching(executor.port, 1) as pipe:
        pass
    assert fetched(executor.port, 1) == floats(6)


def test_one_who_leaves_in_the_middle_may_come_again(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    data = bytes(range(256)) * (32 * MIB // 256)
    client.ship(1, client.uploaded((32 * MIB,), data, "uint8"))
    with fetching(executor.port, 1) as pipe:
        pipe.read_exactly(HEADER.size + MIB, TIMEOUT_S)
    assert fetched(executor.port, 1) == data
    wait_until(lambda: executor.session.stats()["shelved"] == 0)


def test_a_newer_fetch_takes_the_place_of_an_older_one(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    tensor = client.floats(6)
    with fetching(executor.port, 1) as old:
        wait_until(lambda: waiting_fetches() == 1)
        with fetching(executor.port, 1) as new:
            with pytest.raises(ConnectionError):
                old.read_exactly(1, TIMEOUT_S)
            client.ship(1, tensor)
            assert parcel(new) == floats(6)


def test_taken_back_it_is_not_there_any_more(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    client.ship(1, client.floats(6))
    client.unship(1)
    client.unship(5)  # was never there
    assert client.sync() is None  # whoever fetches comes on another connection, and might be quicker
    assert isinstance(fetched(executor.port, 1), Error)
    assert executor.session.stats()["shelved"] == 0


def test_the_shelf_counts_as_memory_until_it_is_taken() -> None:
    with served(memory_bytes_max=10 * MIB) as (executor, client):
        tensor = client.uploaded((4 * MIB,), bytes(4 * MIB), "uint8")
        client.ship(1, tensor)
        assert client.stats().bytes_allocated == 8 * MIB
        client.ship(2, tensor)
        error = client.sync()
        assert error is not None
        assert error.code == "device.out_of_memory"
        refused = fetched(executor.port, 2)
        assert isinstance(refused, Error)
        assert refused.code == "device.out_of_memory"
        assert fetched(executor.port, 1) == bytes(4 * MIB)
        wait_until(lambda: executor.session.stats()["bytes_allocated"] == 4 * MIB)
        client.ship(3, tensor)
        assert client.sync() is None
        assert client.stats().bytes_allocated_peak == 8 * MIB


def test_the_shelf_is_bounded(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    tensor = client.floats(3)
    for number in range(1, PARCELS_MAX + 1):
        client.ship(number, tensor)
    assert client.sync() is None
    client.ship(PARCELS_MAX + 1, tensor)
    error = client.sync()
    assert error is not None
    assert "have not fetched yet" in error.message
    assert isinstance(fetched(executor.port, PARCELS_MAX + 1), Error)
    client.unship(1)
    client.ship(PARCELS_MAX + 2, tensor)
    assert client.sync() is None
    assert fetched(executor.port, PARCELS_MAX + 2) == floats(3)


def test_a_source_that_was_never_made_is_a_failure_for_whoever_fetches() -> None:
    with served(memory_bytes_max=MIB) as (executor, client):
        missing = client.allocate((MIB,))
        client.ship(1, missing)
        found = fetched(executor.port, 1)
        assert isinstance(found, Error)
        assert found.code == "device.out_of_memory"


@pytest.mark.parametrize("number", [3, 2, 0])
def test_numbers_rise(a: tuple[ThreadedExecutor, Client], number: int) -> None:
    executor, client = a
    tensor = client.floats(1)
    client.ship(3, tensor)
    client.ship(number, tensor)
    client.hear_the_end()
    assert client.farewell is not None
    wait_until(lambda: executor.ended)


def test_fetches_end_with_the_session(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    client.ship(1, client.floats(1))
    with fetching(executor.port, 2) as pipe:
        wait_until(lambda: waiting_fetches() == 1)
        client.goodbye()
        with pytest.raises(ConnectionError):
            pipe.read_exactly(1, TIMEOUT_S)
    wait_until(lambda: executor.ended)
    assert executor.session.stats()["shelved"] == 0
    assert executor.session.stats()["bytes_allocated"] == 0


# --- who may fetch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token",
    [
        "",
        "0" * 64,
        token_for(2),
        token_for(1, "another ticket"),
        TICKET,
        opwire.ticket_digest(TICKET),
        "\u00e4",
    ],
    ids=["none", "zeros", "another number", "another executor", "ticket", "digest", "not ascii"],
)
def test_a_token_opens_its_own_parcel_only(a: tuple[ThreadedExecutor, Client], token: str) -> None:
    executor, client = a
    client.ship(1, client.floats(1))
    with pytest.raises(TokenRefusedError), fetching(executor.port, 1, token):
        pass
    assert fetched(executor.port, 1) == floats(1)


def test_nothing_is_given_where_nobody_has_been() -> None:
    with executor_on_a_thread() as executor:
        with pytest.raises(DeviceUnavailableError), fetching(executor.port, 1):
            pass
        pipe = dial(executor.port)
        enter(pipe, TICKET)
        pipe.close()


def test_fetches_that_wait_are_bounded_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_FETCHES_MAX", 10)
    with served() as (executor, client), ExitStack() as stack:
        for number in range(1, 11):
            stack.enter_context(fetching(executor.port, number))
        with pytest.raises(DeviceUnavailableError, match="10 fetches"), fetching(executor.port, 11):
            pass
        client.ship(1, client.floats(1))
        assert client.sync() is None
        stack.close()
        wait_until(lambda: waiting_fetches() == 0, what="fetches whose connection is gone to end")
        with fetching(executor.port, 1) as pipe:
            assert parcel(pipe) == floats(1)


def test_a_fetch_that_speaks_out_of_turn_is_sent_away(a: tuple[ThreadedExecutor, Client]) -> None:
    executor, client = a
    with fetching(executor.port, 1) as pipe:
        pipe.write_all(b"\x01" * 100, TIMEOUT_S)
        with pytest.raises(ConnectionError):
            pipe.read_exactly(1, TIMEOUT_S)
    client.ship(1, client.floats(1))
    assert fetched(executor.port, 1) == floats(1)


def test_one_connection_fetches_several_and_shows_a_token_for_each(
    a: tuple[ThreadedExecutor, Client],
) -> None:
    executor, client = a
    for number in range(1, 4):
        client.ship(number, client.floats(number))
    with fetching(executor.port, 1) as pipe:
        for number in range(1, 4):
            if number > 1:
                request = opwire.Fetch(number, token_for(number))
                assert opwire.fetch(pipe, request, peer="x", timeout_s=TIMEOUT_S, again=True).bare
            assert parcel(pipe) == floats(number)
            pipe.write_all(TAKEN, TIMEOUT_S)
        with pytest.raises(TokenRefusedError):
            wrong = opwire.Fetch(4, token_for(3))
            opwire.fetch(pipe, wrong, peer="x", timeout_s=TIMEOUT_S, again=True)
    assert client.sync() is None


def test_who_has_fetched_and_then_says_nothing_is_sent_away(
    a: tuple[ThreadedExecutor, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_FETCH_IDLE_S", 0.05)
    executor, client = a
    client.ship(1, client.floats(1))
    with fetching(executor.port, 1) as pipe:
        parcel(pipe)
        pipe.write_all(TAKEN, TIMEOUT_S)
        with pytest.raises(ConnectionError):
            pipe.read_exactly(1, TIMEOUT_S)


# --- landing ------------------------------------------------------------------------------------

Both = tuple[ThreadedExecutor, Client]


def fails(client: Client, target: Tensor, bystander: Tensor) -> Error:
    """The client is told, the target cannot be used, and all else goes on."""
    told = client.sync()
    assert told is not None
    again = client.get(target)
    assert isinstance(again, Error)
    assert again.message == told.message
    assert client.floats_in(bystander) == (42,)
    assert client.sync() is None
    return told


def test_a_parcel_lands(a: Both, b: Both) -> None:
    (source, one), (_, other) = a, b
    one.ship(1, one.floats(1, 2, 3, 4))
    there = other.floats(*[0] * 8)
    other.land(Tensor(there.storage, (4,), strides=(2,)), source.port, 1, token_for(1))
    assert other.floats_in(there) == (1, 0, 2, 0, 3, 0, 4, 0)
    wait_until(lambda: source.session.stats()["shelved"] == 0)


def test_copies_from_one_executor_share_a_connection(a: Both, b: Both) -> None:
    (source, one), (_, other) = a, b
    there = other.floats(0)
    for number in range(1, 6):
        one.ship(number, one.floats(number))
        other.land(there, source.port, number, token_for(number))
        assert other.floats_in(there) == (number,)
    assert waiting_fetches() == 1


def test_a_connection_that_the_source_has_closed_is_made_anew(
    a: Both, b: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_FETCH_IDLE_S", 0.01)
    (source, one), (_, other) = a, b
    there = other.floats(0)
    for number in range(1, 4):
        one.ship(number, one.floats(number))
        other.land(there, source.port, number, token_for(number))
        assert other.floats_in(there) == (number,)
        wait_until(lambda: waiting_fetches() == 0)


def test_after_a_copy_that_failed_the_next_one_works(a: Both, b: Both) -> None:
    (source, one), (_, other) = a, b
    for number in range(1, 4):
        one.ship(number, one.floats(number, number))
    there, short = other.floats(0, 0), other.floats(0)
    other.land(there, source.port, 1, token_for(1))
    other.land(short, source.port, 2, token_for(2))
    assert other.sync() is not None
    other.land(there, source.port, 3, token_for(3))
    assert other.floats_in(there) == (3, 3)


def test_a_large_parcel_lands_in_the_same_place(a: Both, b: Both) -> None:
    (source, one), (_, other) = a, b
    data = bytes(range(256)) * (9 * MIB // 256)
    one.ship(1, one.uploaded((9 * MIB,), data, "uint8"))
    there = other.allocate((9 * MIB,), "uint8")
    other.land(there, source.port, 1, token_for(1))
    assert other.get(there) == data


def test_a_landing_waits_for_its_ship_and_is_not_forgotten_in_a_cut(a: Both) -> None:
    source, one = a
    with executor_on_a_thread() as target:
        pipe = dial(target.port)
        facts = enter(pipe, TICKET)
        other = Client(pipe)
        there = other.floats(0, 0)
        assert other.sync() is None
        other.land(there, source.port, 1, token_for(1))
        wait_until(lambda: waiting_fetches() == 1)
        target.cut()
        other.close()
        again = dial(target.port)
        resumed = enter(again, TICKET, session_key=facts.session_key, replies_received=other.replies)
        assert resumed.frames_received == other.frames - 1, "what has not landed has not arrived"
        other.pipe = again
        other.write(other.sent[-1])
        one.ship(1, one.floats(5, 6))
        assert other.floats_in(there) == (5, 6)
        other.close()


def test_a_landing_that_waits_is_heard_of(a: Both, b: Both) -> None:
    """Else the client would take the executor for dead after a while."""
    (source, one), (_, other) = a, b
    there = other.floats(0, 0)
    assert other.sync() is None
    other.land(there, source.port, 1, token_for(1))
    for _ in range(2):
        assert other.receive_acknowledgement() == other.frames - 1
    one.ship(1, one.floats(5, 6))
    assert other.floats_in(there) == (5, 6)


def test_a_source_that_dies_while_it_is_waited_for_is_named(a: Both, b: Both) -> None:
    (source, _), (_, other) = a, b
    there, bystander = other.floats(0, 0), other.floats(42)
    other.land(there, source.port, 1, token_for(1))
    wait_until(lambda: waiting_fetches() == 1)
    source.hang_up()
    told = fails(other, there, bystander)
    assert told.code == "device.lost"
    assert f"the source at 127.0.0.1:{source.port}" in told.message


def test_a_failure_there_is_a_failure_here(b: Both) -> None:
    _, other = b
    with served(memory_bytes_max=MIB) as (source, one):
        one.ship(1, one.allocate((MIB,)))
        there, bystander = other.floats(0), other.floats(42)
        other.land(there, source.port, 1, token_for(1))
        assert fails(other, there, bystander).code == "device.out_of_memory"


@pytest.mark.parametrize("number", [1, 2])
def test_a_wrong_token_lands_nothing(a: Both, b: Both, number: int) -> None:
    (source, one), (_, other) = a, b
    one.ship(1, one.floats(7))
    there, bystander = other.floats(0), other.floats(42)
    other.land(there, source.port, 1, token_for(number + 1))
    assert fails(other, there, bystander).code == "access.token_refused"
    assert fetched(source.port, 1) == floats(7)


def test_another_size_than_was_shipped_lands_nothing(a: Both, b: Both) -> None:
    (source, one), (_, other) = a, b
    one.ship(1, one.floats(7, 8))
    there, bystander = other.floats(0), other.floats(42)
    other.land(there, source.port, 1, token_for(1))
    assert "8 bytes where 4" in fails(other, there, bystander).message


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "example.invalid", "\u00e4" * 100, ""])
def test_without_tls_only_this_machine_is_connected_to(b: Both, host: str) -> None:
    _, other = b
    there, bystander = other.floats(0), other.floats(42)
    other.land(there, 9, 1, token_for(1), host=host)
    assert fails(other, there, bystander).code == "access.tls"


def test_tokens_are_not_logged(a: Both, b: Both, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    (source, one), (_, other) = a, b
    one.ship(1, one.floats(7))
    other.land(other.floats(0), source.port, 1, token_for(1))
    other.land(other.floats(0), source.port, 1, token_for(2))
    assert other.sync() is not None
    wait_until(lambda: "turned away" in caplog.text)
    assert token_for(1) not in caplog.text
    assert token_for(2) not in caplog.text


@contextmanager
def impostor(*acts: Callable[[SocketPipe], None]) -> Iterator[int]:
    """Listens where an executor should. Each connection gets the next act; then nobody listens any more."""
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


def let_in(pipe: SocketPipe) -> None:
    assert isinstance(opwire.receive_request(pipe, peer="x", timeout_s=TIMEOUT_S), opwire.Fetch)
    opwire.answer(pipe, opwire.Fetched(bare=True), peer="x", timeout_s=TIMEOUT_S)


def says(data: bytes) -> Callable[[SocketPipe], None]:
    def act(pipe: SocketPipe) -> None:
        let_in(pipe)
        pipe.write_all(data, TIMEOUT_S)
        pipe.sock.shutdown(socket.SHUT_WR)
        try:
            pipe.read_exactly(1, TIMEOUT_S)
        except OSError:
            pass  # it has heard enough

    return act


def rubbish(pipe: SocketPipe) -> None:
    pipe.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n", TIMEOUT_S)


WHOLE = HEADER.pack(8, CONTENTS, 0) + floats(3, 4)


def test_a_copy_that_breaks_off_is_begun_anew(b: Both) -> None:
    _, other = b
    there = other.floats(0, 0)
    with impostor(says(WHOLE[:-3]), says(b""), says(WHOLE[:5]), says(WHOLE)) as port:
        other.land(there, port, 1, token_for(1))
        assert other.floats_in(there) == (3, 4)


@pytest.mark.parametrize(
    ("acts", "code"),
    [
        ([says(WHOLE[:-3])], "device.lost"),
        ([says(WHOLE[:-3])] * 6, "device.lost"),
        ([rubbish], "transport.protocol"),
        ([says(HEADER.pack(8, 2, 0))], "transport.protocol"),
        ([says(HEADER.pack(2**40, CONTENTS, 0))], "transport.protocol"),
        ([says(HEADER.pack(2**40, FAILURE, 0))], "transport.protocol"),
        ([says(HEADER.pack(9, FAILURE, 0) + b"\xff" * 9)], "transport.protocol"),
        ([says(HEADER.pack(0, FAILURE, 0))], "transport.protocol"),
    ],
    ids=["half", "half each time", "rubbish", "kind", "size", "failure size", "failure", "empty failure"],
)
def test_an_impostor_lands_nothing_and_harms_nothing(
    b: Both, acts: list[Callable[[SocketPipe], None]], code: str
) -> None:
    _, other = b
    there, bystander = other.floats(0, 0), other.floats(42)
    with impostor(*acts) as port:
        other.land(there, port, 1, token_for(1))
        assert fails(other, there, bystander).code == code


def with_port(port: int) -> Callable[[Tensor], bytes]:
    return lambda target: landing(target, port, 1, "")


@pytest.mark.parametrize(
    "words",
    [
        with_port(0),
        with_port(65536),
        lambda target: landing(target, 9, 1, "", size_bytes=5),
        lambda target: landing(target, 9, 1, "x" * 300),
        lambda target: landing(target, 9, 1, "", host="h" * 300),
        lambda target: landing(target, 9, 1, "")[:-1],
        lambda target: landing(target, 9, 1, "") + record(Record.SYNC),
        lambda target: record(Record.SEED, 0, bytes(12)) + landing(target, 9, 1, ""),
        lambda target: landing(Tensor(target.storage, (99,)), 9, 1, ""),
        lambda target: landing(Tensor(77, (2,)), 9, 1, ""),
        lambda target: record(Record.LAND),
        lambda target: record(Record.SHIP, 0, b"1234"),
        lambda target: record(Record.UNSHIP),
    ],
    ids=[
        "no port", "large port", "size", "long token", "long host", "short", "more after", "more before",
        "beyond the storage", "unknown storage", "nothing", "short ship", "short unship",
    ],
)  # fmt: skip
def test_a_record_that_is_not_the_wires_ends_the_session(b: Both, words: Callable[[Tensor], bytes]) -> None:
    executor, other = b
    target = other.floats(0, 0)
    other.send(words(target))
    other.hear_the_end()
    assert other.farewell is not None
    assert other.farewell.code == "transport.protocol"
    wait_until(lambda: executor.ended)
