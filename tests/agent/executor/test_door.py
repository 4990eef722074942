"""Who is let in, how a client comes back after its connection broke, and where TLS ends."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from genie.agent.executor import door
from genie.errors import DeviceUnavailableError, TokenRefusedError, TransportError
from genie.runtime import native, opwire, tls
from tests.agent.executor.client import TIMEOUT_S, Client, Error, Tensor, dial, enter
from tests.agent.executor.process import TICKET
from tests.agent.executor.thread import ThreadedExecutor, executor_on_a_thread
from tests.waiting import wait_until

MIB = 1024 * 1024


@pytest.fixture
def executor() -> Iterator[ThreadedExecutor]:
    with executor_on_a_thread() as executor:
        yield executor


@contextmanager
def inside(executor: ThreadedExecutor) -> Iterator[tuple[Client, opwire.Opened]]:
    pipe = dial(executor.port)
    facts = enter(pipe, TICKET)
    client = Client(pipe)
    try:
        yield client, facts
    finally:
        client.close()


def come_back(executor: ThreadedExecutor, client: Client, facts: opwire.Opened) -> opwire.Opened:
    pipe = dial(executor.port)
    again = enter(pipe, TICKET, session_key=facts.session_key, replies_received=client.replies)
    client.pipe = pipe
    for data in client.sent[again.frames_received :]:
        client.write(data)
    return again


# --- coming in ----------------------------------------------------------------------------------


def test_a_client_is_told_what_it_has_got(executor: ThreadedExecutor) -> None:
    with inside(executor) as (client, facts):
        assert (facts.kind, facts.job_id, facts.frames_received) == ("cpu", "job-1", 0)
        assert facts.bare, "there is no TLS to begin with"
        assert len(facts.session_key) >= 32
        assert client.sync() is None


@pytest.mark.parametrize("ticket", ["", "not the ticket", TICKET + " "])
def test_a_wrong_ticket_is_refused(executor: ThreadedExecutor, ticket: str) -> None:
    with inside(executor) as (client, facts):
        for key in ("", facts.session_key):
            stranger = dial(executor.port)
            with pytest.raises(TokenRefusedError):
                enter(stranger, ticket, session_key=key)
            stranger.close()
        assert client.sync() is None


@pytest.mark.parametrize("key", ["", "0" * 32, "x", "\u00e4"])
def test_a_second_client_without_the_key_is_told_that_the_place_is_taken(
    executor: ThreadedExecutor, key: str
) -> None:
    with inside(executor) as (client, _):
        stranger = dial(executor.port)
        with pytest.raises(DeviceUnavailableError, match="already" if not key else "no such session"):
            enter(stranger, TICKET, session_key=key)
        stranger.close()
        assert client.sync() is None


def test_a_key_opens_nothing_where_nobody_has_been(executor: ThreadedExecutor) -> None:
    stranger = dial(executor.port)
    with pytest.raises(DeviceUnavailableError):
        enter(stranger, TICKET, session_key="0" * 32)
    stranger.close()
    with inside(executor) as (client, _):
        assert client.sync() is None


def test_a_client_that_left_before_it_said_anything_may_come_again(executor: ThreadedExecutor) -> None:
    """It may never have heard its key."""
    with inside(executor) as (_, first):
        pass

    def enters() -> bool:
        pipe = dial(executor.port)
        try:
            second = enter(pipe, TICKET)
        except DeviceUnavailableError:
            pipe.close()
            return False
        assert second.session_key != first.session_key
        client = Client(pipe)
        assert client.sync() is None
        client.close()
        return True

    wait_until(enters, what="the place to be free")


def test_strangers_who_say_nothing_do_not_keep_the_client_out(executor: ThreadedExecutor) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", executor.port)))
        client, _ = stack.enter_context(inside(executor))
        assert client.sync() is None


def test_a_stranger_who_says_nothing_is_soon_sent_away(
    executor: ThreadedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_FIRST_BYTE_S", 0.05)
    with socket.create_connection(("127.0.0.1", executor.port), timeout=5.0) as stranger:
        assert stranger.recv(1) == b"", "well before the deadline of one who speaks"
        with inside(executor) as (client, _):
            assert client.sync() is None


# --- coming back --------------------------------------------------------------------------------


def test_a_client_comes_back_to_its_tensors(executor: ThreadedExecutor) -> None:
    with inside(executor) as (client, facts):
        made = client.floats(1, 2)
        assert client.floats_in(made) == (1, 2)
        executor.cut()
        client.close()
        again = come_back(executor, client, facts)
        assert (again.session_key, again.frames_received) == (facts.session_key, client.frames)
        assert client.floats_in(made) == (1, 2)


def test_a_connection_that_is_half_dead_is_replaced(executor: ThreadedExecutor) -> None:
    """Its machine may have vanished: the executor would not know for a minute."""
    with inside(executor) as (client, facts):
        made = client.floats(3)
        client.sync()
        old = client.pipe
        come_back(executor, client, facts)
        assert client.floats_in(made) == (3,)
        assert old.sock.recv(1) == b""
        old.close()


def test_the_last_of_several_attempts_is_the_one_that_is_served(executor: ThreadedExecutor) -> None:
    with inside(executor) as (client, facts):
        made = client.floats(3)
        client.sync()
        for _ in range(5):
            client.pipe.close()
            come_back(executor, client, facts)
        assert client.floats_in(made) == (3,)


def test_a_client_that_does_not_come_back_is_given_up() -> None:
    with executor_on_a_thread(resume_s=0.05) as executor, inside(executor) as (client, facts):
        client.floats(*range(1000))
        client.sync()
        executor.cut()
        wait_until(lambda: executor.ended)
        assert executor.session.stats()["bytes_allocated"] == 0
        stranger = dial(executor.port)
        with pytest.raises((TransportError, DeviceUnavailableError)):
            enter_quickly(stranger, facts)
        stranger.close()


def enter_quickly(pipe: object, facts: opwire.Opened) -> None:
    """Nobody is there to answer who comes back too late."""
    request = opwire.Open(TICKET, session_key=facts.session_key)
    opwire.enter(pipe, request, peer="the executor", timeout_s=0.5)  # type: ignore[arg-type]


def test_goodbye_ends_the_session_at_once(executor: ThreadedExecutor) -> None:
    with inside(executor) as (client, _):
        client.floats(*range(1000))
        client.goodbye()
        wait_until(lambda: executor.ended)
        assert executor.session.stats()["bytes_allocated"] == 0
        assert executor.session.stats()["storages"] == 0


def test_a_broken_stream_ends_the_session(executor: ThreadedExecutor) -> None:
    with inside(executor) as (client, _):
        client.write(b"\xff" * 100)
        assert isinstance(client.receive(), Error)
        client.close()
        wait_until(lambda: executor.ended)


def test_hanging_up_ends_everything(executor: ThreadedExecutor) -> None:
    with inside(executor) as (client, _):
        client.sync()
        executor.hang_up()
        client.hear_the_end()
        wait_until(lambda: executor.ended)
        with pytest.raises(OSError, match="refused"):
            dial(executor.port)


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], bytes]:
    """The settings of an executor with a certificate, and the authority's certificate."""
    folder = tmp_path_factory.mktemp("secured")
    authority = tls.CertificateAuthority.create(now=time.time())
    key, csr = tls.new_key_and_csr()
    name = tls.executor_name("job-1")
    (folder / "key").write_bytes(key)
    (folder / "certificate").write_text(authority.issue(csr, name=name, days=1, now=time.time()))
    settings = {
        "certificate_path": str(folder / "certificate"),
        "key_path": str(folder / "key"),
        "server_name": name,
    }
    return settings, ssl.PEM_cert_to_DER_cert(authority.ca_pem)


def tls_pipe(port: int, authority: bytes, name: str) -> object:
    sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    stream = native.load("genie_executor").Stream
    return stream.tls_client(sock.detach(), [authority], name, TIMEOUT_S)


def works(client: Client) -> bool:
    made = client.uploaded((MIB,), bytes(range(256)) * (MIB // 256), "uint8")
    fetched = client.get(Tensor(made.storage, (MIB,), "uint8"))
    client.free(made)
    client.sync()
    return fetched == bytes(range(256)) * (MIB // 256)


@pytest.mark.parametrize(
    ("machine", "bare"),
    [(opwire.this_machine, True), (lambda: "another", False), (lambda: "", False)],
    ids=["this machine", "another machine", "an unknown machine"],
)
def test_tls_ends_after_the_ticket_only_within_one_machine(
    secured: tuple[dict[str, object], bytes], machine: Callable[[], str], bare: bool
) -> None:
    settings, authority = secured
    with executor_on_a_thread(**settings) as executor:
        pipe = tls_pipe(executor.port, authority, str(settings["server_name"]))
        facts = enter(pipe, TICKET, machine=machine())
        assert facts.bare is bare
        client = Client(pipe.without_tls(TIMEOUT_S) if bare else pipe)  # type: ignore[attr-defined]
        assert client.pipe.encrypted is not bare
        assert works(client)
        executor.cut()
        client.close()
        again = tls_pipe(executor.port, authority, str(settings["server_name"]))
        resumed = enter(
            again, TICKET, machine=machine(), session_key=facts.session_key, replies_received=client.replies
        )
        assert (resumed.bare, resumed.frames_received) == (bare, client.frames)
        client.pipe = again.without_tls(TIMEOUT_S) if bare else again  # type: ignore[attr-defined]
        assert works(client)
        client.close()


def test_where_there_is_tls_nothing_goes_without(secured: tuple[dict[str, object], bytes]) -> None:
    settings, authority = secured
    with executor_on_a_thread(**settings) as executor:
        with pytest.raises(ConnectionError):
            tls_pipe(executor.port, authority, tls.executor_name("another-job"))
        plain = dial(executor.port)
        with pytest.raises(TransportError):
            enter(plain, TICKET)
        plain.close()
        pipe = tls_pipe(executor.port, authority, str(settings["server_name"]))
        enter(pipe, TICKET)
        assert works(Client(pipe))
        pipe.close()  # type: ignore[attr-defined]


def test_a_client_that_stops_in_the_middle_of_its_ticket_holds_nobody_up(executor: ThreadedExecutor) -> None:
    slow = dial(executor.port)
    slow.write_all(opwire.preface() + opwire.encode(opwire.Open(TICKET))[:10], TIMEOUT_S)
    with inside(executor) as (client, _):
        assert client.sync() is None
        assert sum(t.name.startswith("executor-127") for t in threading.enumerate()) >= 1
    slow.close()
