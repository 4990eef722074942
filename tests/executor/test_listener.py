"""Authentication, reconnects, and the use of TLS."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from genie.errors import DeviceUnavailableError, TokenRefusedError, TransportError
from genie.executor import listener
from genie.native import libraries
from genie.runtime import device_protocol, tls
from tests.executor.client import TIMEOUT_S, Client, ErrorReply, Tensor, handshake, open_pipe
from tests.executor.process import TICKET
from tests.executor.thread import ThreadedExecutor, executor_on_a_thread
from tests.waiting import wait_until

MIB = 1024 * 1024


@pytest.fixture
def executor() -> Iterator[ThreadedExecutor]:
    with executor_on_a_thread() as executor:
        yield executor


@contextmanager
def connected_client(executor: ThreadedExecutor) -> Iterator[tuple[Client, device_protocol.Opened]]:
    pipe = open_pipe(executor.port)
    opened = handshake(pipe, TICKET)
    client = Client(pipe)
    try:
        yield client, opened
    finally:
        client.close()


def reconnect(
    executor: ThreadedExecutor, client: Client, opened: device_protocol.Opened
) -> device_protocol.Opened:
    pipe = open_pipe(executor.port)
    again = handshake(pipe, TICKET, session_key=opened.session_key, replies_received=client.replies)
    client.pipe = pipe
    for data in client.sent[again.frames_received :]:
        client.write(data)
    return again


# --- handshake ----------------------------------------------------------------------------------


def test_handshake_reply_describes_the_accelerator(executor: ThreadedExecutor) -> None:
    with connected_client(executor) as (client, opened):
        assert (opened.kind, opened.job_id, opened.frames_received) == ("cpu", "job-1", 0)
        assert opened.plaintext, "there is no TLS to begin with"
        assert len(opened.session_key) >= 32
        assert client.sync() is None


@pytest.mark.parametrize("ticket", ["", "not the ticket", TICKET + " "])
def test_wrong_ticket_is_refused(executor: ThreadedExecutor, ticket: str) -> None:
    with connected_client(executor) as (client, opened):
        for key in ("", opened.session_key):
            other = open_pipe(executor.port)
            with pytest.raises(TokenRefusedError):
                handshake(other, ticket, session_key=key)
            other.close()
        assert client.sync() is None


@pytest.mark.parametrize("key", ["", "0" * 32, "x", "\u00e4"])
def test_second_client_without_session_key_is_refused(executor: ThreadedExecutor, key: str) -> None:
    with connected_client(executor) as (client, _):
        other = open_pipe(executor.port)
        with pytest.raises(DeviceUnavailableError, match="already" if not key else "no such session"):
            handshake(other, TICKET, session_key=key)
        other.close()
        assert client.sync() is None


def test_session_key_is_refused_before_the_first_session(executor: ThreadedExecutor) -> None:
    other = open_pipe(executor.port)
    with pytest.raises(DeviceUnavailableError):
        handshake(other, TICKET, session_key="0" * 32)
    other.close()
    with connected_client(executor) as (client, _):
        assert client.sync() is None


def test_client_that_sent_nothing_can_open_a_new_session(executor: ThreadedExecutor) -> None:
    """It may not have received its session key."""
    with connected_client(executor) as (_, first):
        pass

    def enters() -> bool:
        pipe = open_pipe(executor.port)
        try:
            second = handshake(pipe, TICKET)
        except DeviceUnavailableError:
            pipe.close()
            return False
        assert second.session_key != first.session_key
        client = Client(pipe)
        assert client.sync() is None
        client.close()
        return True

    wait_until(enters, what="the session to be replaced")


def test_idle_connections_do_not_block_the_client(executor: ThreadedExecutor) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", executor.port)))
        client, _ = stack.enter_context(connected_client(executor))
        assert client.sync() is None


@pytest.fixture
def open_stalled_connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., socket.socket]]:
    """Opens connections that send one byte; no timeout closes them."""
    monkeypatch.setattr(listener, "_FIRST_BYTE_TIMEOUT_S", 600.0)
    monkeypatch.setattr(listener, "_HANDSHAKE_TIMEOUT_S", 600.0)
    with ExitStack() as stack:

        def connect(executor: ThreadedExecutor, host: str = "127.0.0.1") -> socket.socket:
            sock = socket.create_connection(("127.0.0.1", executor.port), 10.0, source_address=(host, 0))
            stack.enter_context(sock).sendall(b"G")
            return sock

        yield connect
    wait_until(lambda: not any(t.name.startswith("executor-127") for t in threading.enumerate()))


def test_strangers_that_send_one_byte_do_not_block_the_client(
    executor: ThreadedExecutor, open_stalled_connection: Callable[..., socket.socket]
) -> None:
    for _ in range(200):
        open_stalled_connection(executor)
    with connected_client(executor) as (client, _):
        assert client.sync() is None


def test_oldest_stalled_handshake_of_the_most_frequent_address_is_closed(
    executor: ThreadedExecutor,
    open_stalled_connection: Callable[..., socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "_CONCURRENT_HANDSHAKES_MAX", 4)
    other = open_stalled_connection(executor, "127.0.0.2")
    first, *rest = [open_stalled_connection(executor) for _ in range(4)]
    preface = len(device_protocol.make_preface())
    assert first.recv(64) in (b"", device_protocol.make_preface())
    assert first.recv(64) == b""
    for sock in (other, *rest):
        assert len(sock.recv(64)) == preface
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)


def test_idle_connection_is_closed_after_first_byte_timeout(
    executor: ThreadedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_FIRST_BYTE_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", executor.port), timeout=5.0) as other:
        assert other.recv(1) == b"", "before the timeout of the handshake"
        with connected_client(executor) as (client, _):
            assert client.sync() is None


# --- reconnects ---------------------------------------------------------------------------------


def test_client_keeps_its_tensors_after_reconnect(executor: ThreadedExecutor) -> None:
    with connected_client(executor) as (client, opened):
        made = client.floats(1, 2)
        assert client.floats_in(made) == (1, 2)
        executor.disconnect_client()
        client.close()
        again = reconnect(executor, client, opened)
        assert (again.session_key, again.frames_received) == (opened.session_key, client.frames)
        assert client.floats_in(made) == (1, 2)


def test_reconnect_replaces_the_old_connection(executor: ThreadedExecutor) -> None:
    """The executor may not have noticed that the old connection is lost."""
    with connected_client(executor) as (client, opened):
        made = client.floats(3)
        client.sync()
        old = client.pipe
        reconnect(executor, client, opened)
        assert client.floats_in(made) == (3,)
        assert old.sock.recv(1) == b""
        old.close()


def test_last_of_several_reconnects_is_served(executor: ThreadedExecutor) -> None:
    with connected_client(executor) as (client, opened):
        made = client.floats(3)
        client.sync()
        for _ in range(5):
            client.pipe.close()
            reconnect(executor, client, opened)
        assert client.floats_in(made) == (3,)


def test_session_ends_when_client_does_not_reconnect() -> None:
    with executor_on_a_thread(resume_s=0.05) as executor, connected_client(executor) as (client, opened):
        client.floats(*range(1000))
        client.sync()
        executor.disconnect_client()
        wait_until(lambda: executor.ended)
        assert executor.session.stats()["bytes_allocated"] == 0
        other = open_pipe(executor.port)
        with pytest.raises((TransportError, DeviceUnavailableError)):
            handshake_with_short_timeout(other, opened)
        other.close()


def handshake_with_short_timeout(pipe: object, opened: device_protocol.Opened) -> None:
    """The executor does not reply after the session has ended."""
    request = device_protocol.Open(TICKET, session_key=opened.session_key)
    device_protocol.open_session(pipe, request, peer="the executor", timeout_s=0.5)  # type: ignore[arg-type]


def test_close_session_frees_everything(executor: ThreadedExecutor) -> None:
    with connected_client(executor) as (client, _):
        client.floats(*range(1000))
        client.close_session()
        wait_until(lambda: executor.ended)
        assert executor.session.stats()["bytes_allocated"] == 0
        assert executor.session.stats()["storages"] == 0


def test_corrupt_stream_ends_the_session(executor: ThreadedExecutor) -> None:
    with connected_client(executor) as (client, _):
        client.write(b"\xff" * 100)
        assert isinstance(client.receive(), ErrorReply)
        client.close()
        wait_until(lambda: executor.ended)


def test_closing_the_listener_ends_the_session(executor: ThreadedExecutor) -> None:
    with connected_client(executor) as (client, _):
        client.sync()
        executor.stop()
        client.receive_until_end()
        wait_until(lambda: executor.ended)
        with pytest.raises(OSError, match="refused"):
            open_pipe(executor.port)


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls_settings_and_ca(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], bytes]:
    """Settings of an executor with a certificate, and the certificate of its CA."""
    folder = tmp_path_factory.mktemp("secured")
    authority = tls.CertificateAuthority.create(now=time.time())
    key, csr = tls.new_key_and_csr()
    name = tls.executor_certificate_name("job-1")
    (folder / "key").write_bytes(key)
    (folder / "certificate").write_text(authority.issue(csr, name=name, days=1, now=time.time()))
    settings = {
        "certificate_path": str(folder / "certificate"),
        "key_path": str(folder / "key"),
        "server_name": name,
    }
    return settings, ssl.PEM_cert_to_DER_cert(authority.ca_pem)


def open_tls_pipe(port: int, authority: bytes, name: str) -> object:
    sock = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    stream = libraries.load("genie_executor").Stream
    return stream.tls_client(sock.detach(), [authority], name, TIMEOUT_S)


def can_run_ops(client: Client) -> bool:
    made = client.upload((MIB,), bytes(range(256)) * (MIB // 256), "uint8")
    fetched = client.get(Tensor(made.storage, (MIB,), "uint8"))
    client.free(made)
    client.sync()
    return fetched == bytes(range(256)) * (MIB // 256)


@pytest.mark.parametrize(
    ("machine", "plaintext"),
    [(device_protocol.machine_identity, True), (lambda: "another", False), (lambda: "", False)],
    ids=["this machine", "another machine", "an unknown machine"],
)
def test_op_stream_without_tls_only_within_one_machine(
    tls_settings_and_ca: tuple[dict[str, object], bytes], machine: Callable[[], str], plaintext: bool
) -> None:
    settings, authority = tls_settings_and_ca
    with executor_on_a_thread(**settings) as executor:
        pipe = open_tls_pipe(executor.port, authority, str(settings["server_name"]))
        opened = handshake(pipe, TICKET, machine=machine())
        assert opened.plaintext is plaintext
        client = Client(pipe.downgrade_to_plaintext(TIMEOUT_S) if plaintext else pipe)  # type: ignore[attr-defined]
        assert client.pipe.is_encrypted is not plaintext
        assert can_run_ops(client)
        executor.disconnect_client()
        client.close()
        again = open_tls_pipe(executor.port, authority, str(settings["server_name"]))
        resumed = handshake(
            again, TICKET, machine=machine(), session_key=opened.session_key, replies_received=client.replies
        )
        assert (resumed.plaintext, resumed.frames_received) == (plaintext, client.frames)
        client.pipe = again.downgrade_to_plaintext(TIMEOUT_S) if plaintext else again  # type: ignore[attr-defined]
        assert can_run_ops(client)
        client.close()


def test_plain_connection_is_refused_with_tls(tls_settings_and_ca: tuple[dict[str, object], bytes]) -> None:
    settings, authority = tls_settings_and_ca
    with executor_on_a_thread(**settings) as executor:
        with pytest.raises(ConnectionError):
            open_tls_pipe(executor.port, authority, tls.executor_certificate_name("another-job"))
        plain = open_pipe(executor.port)
        with pytest.raises(TransportError):
            handshake(plain, TICKET)
        plain.close()
        pipe = open_tls_pipe(executor.port, authority, str(settings["server_name"]))
        handshake(pipe, TICKET)
        assert can_run_ops(Client(pipe))
        pipe.close()  # type: ignore[attr-defined]


def test_stalled_handshake_does_not_block_the_client(executor: ThreadedExecutor) -> None:
    slow = open_pipe(executor.port)
    slow.write_all(
        device_protocol.make_preface() + device_protocol.encode(device_protocol.Open(TICKET))[:10], TIMEOUT_S
    )
    with connected_client(executor) as (client, _):
        assert client.sync() is None
        assert sum(t.name.startswith("executor-127") for t in threading.enumerate()) >= 1
    slow.close()
