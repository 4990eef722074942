"""The C++ byte stream: one contract with and without TLS, certificate checks, and TLS shutdown."""

from __future__ import annotations

import array
import fcntl
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from genie.runtime import tls
from tests.needs import native_library
from tests.waiting import wait_until

SHORT_S = 0.05
LONG_S = 20.0
SERVER_NAME = tls.executor_certificate_name("job-1")

_library = native_library("genie_executor")
Stream: Any = _library.Stream
ConnectionLost: type[Exception] = _library.ConnectionLost
TlsHandshakeFailed: type[Exception] = _library.TlsHandshakeFailed


@dataclass(frozen=True)
class Certificates:
    """Certificate, key and CA of a valid connection."""

    ca_der: list[bytes]
    certificate: str
    key: str


def issue_certificates(folder: Path, *, name: str = SERVER_NAME, now: float | None = None) -> Certificates:
    now = time.time() if now is None else now
    authority = tls.CertificateAuthority.create(now=now)
    key, csr = tls.new_key_and_csr()
    folder.mkdir(exist_ok=True)
    (folder / "key.pem").write_bytes(key)
    (folder / "certificate.pem").write_text(authority.issue(csr, name=name, days=1, now=now))
    return Certificates(
        [ssl.PEM_cert_to_DER_cert(authority.ca_pem)], str(folder / "certificate.pem"), str(folder / "key.pem")
    )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return issue_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def thread_pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def exit_stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def socket_pair(exit_stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = exit_stack.enter_context(socket.create_connection(listener.getsockname()))
        far, _ = listener.accept()
        exit_stack.enter_context(far)
    return near, far


def open_tls_client_stream(
    sock: socket.socket, certificates: Certificates, *, name: str = SERVER_NAME, wait_s: float = LONG_S
) -> Any:
    return Stream.tls_client(sock.detach(), certificates.ca_der, name, wait_s)


def open_tls_server_stream(sock: socket.socket, certificates: Certificates, *, wait_s: float = LONG_S) -> Any:
    return Stream.tls_server(sock.detach(), certificates.certificate, certificates.key, wait_s)


def connect_streams(
    kind: str, near: socket.socket, far: socket.socket, certificates: Certificates, pool: ThreadPoolExecutor
) -> tuple[Any, Any]:
    if kind == "plaintext":
        return Stream.plaintext(near.detach()), Stream.plaintext(far.detach())
    accepted = pool.submit(open_tls_server_stream, far, certificates)
    return open_tls_client_stream(near, certificates), accepted.result(LONG_S)


@pytest.fixture(params=["plaintext", "tls"])
def stream_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connected_streams(
    stream_kind: str,
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
    exit_stack: ExitStack,
) -> tuple[Any, Any]:
    near, far = connect_streams(stream_kind, *socket_pair, certificates, thread_pool)
    for stream in (near, far):
        exit_stack.callback(stream.close)
    return near, far


only_tls = pytest.mark.parametrize("stream_kind", ["tls"], indirect=True)
only_plaintext = pytest.mark.parametrize("stream_kind", ["plaintext"], indirect=True)


# --- the contract, with and without TLS ---------------------------------------------------------


def test_bytes_are_sent_in_both_directions(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    for data in (b"x", b"", bytes(range(256)) * 300):
        near.write_all(data, LONG_S)
        assert far.read_exactly(len(data), LONG_S) == data
        far.write_all(memoryview(data), LONG_S)
        assert near.read_exactly(len(data), LONG_S) == data


def test_large_transfers_in_both_directions_at_once_are_complete(
    connected_streams: tuple[Any, Any], thread_pool: ThreadPoolExecutor
) -> None:
    chunk = random.Random(1).randbytes(1_000_003)
    sent = [chunk[start:] + chunk[:start] for start in (0, 17)]

    def send(stream: Any, data: bytes) -> None:
        for _ in range(100):
            stream.write_all(data, LONG_S)

    def received(stream: Any, data: bytes) -> bool:
        return stream.read_exactly(100 * len(data), LONG_S) == data * 100

    sends = [
        thread_pool.submit(send, stream, data) for stream, data in zip(connected_streams, sent, strict=True)
    ]
    reads = [
        thread_pool.submit(received, stream, data)
        for stream, data in zip(reversed(connected_streams), sent, strict=True)
    ]
    assert [future.result() for future in sends + reads] == [None, None, True, True]


def test_reads_and_writes_may_be_split_differently(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    for piece in (b"a", b"bc", b"def"):
        near.write_all(piece, LONG_S)
    assert far.read_exactly(6, LONG_S) == b"abcdef"
    far.write_all(b"abcdef", LONG_S)
    assert [near.read_exactly(count, LONG_S) for count in (3, 2, 1)] == [b"abc", b"de", b"f"]


def test_read_times_out(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    far.write_all(b"abc", LONG_S)
    with pytest.raises(ConnectionLost, match="timeout: the peer sent 3 of 5 bytes"):
        near.read_exactly(5, SHORT_S)
    with pytest.raises(ConnectionLost, match="timeout: the peer sent 0 of 1 bytes"):
        near.read_exactly(1, 0)


def test_write_times_out(connected_streams: tuple[Any, Any]) -> None:
    near, _ = connected_streams
    with pytest.raises(ConnectionLost, match=r"timeout: the peer received \d+ of 67108864 bytes"):
        near.write_all(bytes(64 << 20), SHORT_S)


def test_end_of_stream_raises_connection_lost(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    far.write_all(b"last words", LONG_S)
    far.close()
    assert near.read_exactly(10, LONG_S) == b"last words"
    with pytest.raises(ConnectionLost, match=r"closed the connection|connection lost"):
        near.read_exactly(1, LONG_S)


def test_end_within_a_read_raises_connection_lost(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    far.write_all(b"abc", LONG_S)
    far.close()
    with pytest.raises(ConnectionLost):
        near.read_exactly(4, LONG_S)


def test_write_to_closed_peer_raises_connection_lost(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    far.close()
    with pytest.raises(ConnectionLost, match=r"broke|closed"):
        while True:
            near.write_all(bytes(1 << 20), LONG_S)


def test_received_data_is_readable_after_a_failed_write(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    near.write_all(b"never read, so that closing breaks the connection", LONG_S)
    far.write_all(b"last words", LONG_S)
    far.close()
    with pytest.raises(ConnectionLost, match="broke"):
        while True:
            near.write_all(bytes(1 << 20), LONG_S)
    assert near.read_exactly(10, LONG_S) == b"last words"


def unread_bytes(sock: socket.socket) -> int:
    """Bytes that have arrived and are still unread."""
    count = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, count)
    return count[0]


@pytest.mark.parametrize("end", ["shut_down", "close"])
def test_shut_down_wakes_reader(
    stream_kind: str,
    end: str,
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
) -> None:
    arriving, far_socket = socket_pair
    near, far = connect_streams(stream_kind, arriving.dup(), far_socket, certificates, thread_pool)
    far.write_all(b"x", LONG_S)
    wait_until(lambda: unread_bytes(arriving))
    reading = thread_pool.submit(near.read_exactly, 2, None)
    wait_until(lambda: not unread_bytes(arriving), what="the first byte is read, and the second waited for")
    getattr(near, end)()
    with pytest.raises(ConnectionLost, match="was closed locally"):
        reading.result(LONG_S)
    near.close()
    far.close()


def test_shut_down_wakes_writer(connected_streams: tuple[Any, Any], thread_pool: ThreadPoolExecutor) -> None:
    near, far = connected_streams
    writing = thread_pool.submit(near.write_all, bytes(64 << 20), None)
    far.read_exactly(1, LONG_S)
    near.shut_down()
    with pytest.raises(ConnectionLost, match="was closed locally"):
        writing.result(LONG_S)


def test_reads_and_writes_raise_after_shut_down(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    far.write_all(b"too late", LONG_S)
    near.shut_down()
    with pytest.raises(ConnectionLost, match="was closed locally"):
        near.read_exactly(1, LONG_S)
    with pytest.raises(ConnectionLost, match="was closed locally"):
        near.write_all(b"x", LONG_S)


def test_closed_stream_raises(connected_streams: tuple[Any, Any]) -> None:
    near, _ = connected_streams
    near.close()
    near.close()
    near.shut_down()
    for use in (lambda: near.read_exactly(1, 1), lambda: near.write_all(b"x", 1), lambda: near.is_encrypted):
        with pytest.raises(ConnectionLost, match="closed"):
            use()


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_timeout_must_be_a_number(connected_streams: tuple[Any, Any], timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s must be"):
        connected_streams[0].read_exactly(1, timeout_s)


@pytest.mark.parametrize("forever_s", [None, float("inf"), 1e300])
def test_infinite_timeout_is_allowed(
    connected_streams: tuple[Any, Any], thread_pool: ThreadPoolExecutor, forever_s: float | None
) -> None:
    near, far = connected_streams
    reading = thread_pool.submit(near.read_exactly, 1, forever_s)
    far.write_all(b"x", forever_s)
    assert reading.result(LONG_S) == b"x"


def test_closed_peer_raises_no_sigpipe(tmp_path: Path, certificates: Certificates) -> None:
    """With the default SIGPIPE handler of C, which would end the process."""
    code = f"""
import signal, socket, threading
from genie.native import libraries
library = libraries.load("genie_executor")
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
def plaintext(near, far): return library.Stream.plaintext(near), library.Stream.plaintext(far)
def tls(near, far):
    ends = [None, None]
    files = ({certificates.certificate!r}, {certificates.key!r})
    def accept(): ends[1] = library.Stream.tls_server(far, *files, 20)
    thread = threading.Thread(target=accept)
    thread.start()
    ends[0] = library.Stream.tls_client(near, {certificates.ca_der!r}, {SERVER_NAME!r}, 20)
    thread.join()
    return ends
for make in (plaintext, tls):
    near, far = make(*(end.detach() for end in socket.socketpair()))
    far.close()
    try:
        near.write_all(bytes(1 << 20), 20)
    except library.ConnectionLost as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), (
        signal.Signals(-done.returncode) if done.returncode else ""
    )
    assert done.stdout.splitlines() == ["the connection broke: Broken pipe"] * 2


def test_non_socket_is_rejected() -> None:
    descriptor, other = os.pipe()
    with pytest.raises(ConnectionLost, match="not a connected socket"):
        Stream.plaintext(descriptor)
    os.close(other)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    with pytest.raises(ConnectionLost, match="not a connected socket"):
        Stream.plaintext(-1)


# --- certificate checks -------------------------------------------------------------------------


def test_only_tls_stream_is_encrypted(connected_streams: tuple[Any, Any], stream_kind: str) -> None:
    assert [stream.is_encrypted for stream in connected_streams] == [stream_kind == "tls"] * 2


def run_handshakes_and_catch(
    sockets: tuple[socket.socket, socket.socket],
    near: Callable[[socket.socket], object],
    far: Callable[[socket.socket], object],
    pool: ThreadPoolExecutor,
) -> tuple[BaseException | None, BaseException | None]:
    """The errors of both sides."""
    futures: list[Future[object]] = [pool.submit(near, sockets[0]), pool.submit(far, sockets[1])]
    errors = [future.exception(LONG_S) for future in futures]
    return errors[0], errors[1]


def test_certificate_of_another_ca_is_rejected(
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
    tmp_path: Path,
) -> None:
    other = issue_certificates(tmp_path / "other")
    near, far = run_handshakes_and_catch(
        socket_pair,
        lambda s: open_tls_client_stream(s, other),
        lambda s: open_tls_server_stream(s, certificates),
        thread_pool,
    )
    assert isinstance(near, TlsHandshakeFailed)
    assert "certificate verification failed" in str(near)
    assert isinstance(far, TlsHandshakeFailed)
    assert "alert" in str(far)


def test_certificate_for_another_name_is_rejected(
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
) -> None:
    other = tls.executor_certificate_name("job-2")
    near, _ = run_handshakes_and_catch(
        socket_pair,
        lambda s: open_tls_client_stream(s, certificates, name=other),
        lambda s: open_tls_server_stream(s, certificates),
        thread_pool,
    )
    assert isinstance(near, TlsHandshakeFailed)
    assert "mismatch" in str(near)


def test_expired_certificate_is_rejected(
    socket_pair: tuple[socket.socket, socket.socket], thread_pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    old = issue_certificates(tmp_path / "old", now=time.time() - 3 * 86400)
    near, _ = run_handshakes_and_catch(
        socket_pair,
        lambda s: open_tls_client_stream(s, old),
        lambda s: open_tls_server_stream(s, old),
        thread_pool,
    )
    assert isinstance(near, TlsHandshakeFailed)
    assert "expired" in str(near)


def test_several_cas_can_be_trusted(
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
    tmp_path: Path,
) -> None:
    both = issue_certificates(tmp_path / "other").ca_der + certificates.ca_der
    accepted = thread_pool.submit(open_tls_server_stream, socket_pair[1], certificates)
    near = Stream.tls_client(socket_pair[0].detach(), both, SERVER_NAME, LONG_S)
    near.close()
    accepted.result().close()


@pytest.mark.parametrize(
    ("ca_der", "name", "words"),
    [
        ([], SERVER_NAME, "no CA given"),
        ([b"nonsense"], SERVER_NAME, "could not parse"),
        (None, "", "no server name given"),
        (None, "a\0b", "no server name given"),
    ],
)
def test_client_without_valid_ca_or_name_does_not_connect(
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    ca_der: list[bytes] | None,
    name: str,
    words: str,
) -> None:
    near, far = socket_pair
    with pytest.raises(TlsHandshakeFailed, match=words):
        Stream.tls_client(near.detach(), certificates.ca_der if ca_der is None else ca_der, name, LONG_S)
    assert far.recv(1) == b""  # nothing was sent, and the descriptor is closed


def test_certificate_with_trailing_bytes_is_rejected(
    socket_pair: tuple[socket.socket, socket.socket], certificates: Certificates
) -> None:
    with pytest.raises(TlsHandshakeFailed, match="could not parse"):
        Stream.tls_client(socket_pair[0].detach(), [certificates.ca_der[0] + b"x"], SERVER_NAME, LONG_S)


def test_server_error_names_missing_file(
    socket_pair: tuple[socket.socket, socket.socket], certificates: Certificates, tmp_path: Path
) -> None:
    with pytest.raises(
        TlsHandshakeFailed, match=r"could not use the certificate .*missing\.pem: .*[Nn]o such file"
    ):
        Stream.tls_server(socket_pair[0].detach(), str(tmp_path / "missing.pem"), certificates.key, LONG_S)
    with pytest.raises(TlsHandshakeFailed, match=r"could not use the key .*"):
        Stream.tls_server(socket_pair[1].detach(), certificates.certificate, certificates.certificate, LONG_S)


def test_key_of_another_certificate_is_rejected(
    socket_pair: tuple[socket.socket, socket.socket], certificates: Certificates, tmp_path: Path
) -> None:
    other = issue_certificates(tmp_path / "other")
    with pytest.raises(TlsHandshakeFailed, match=r"could not use the key .*: .*mismatch"):
        Stream.tls_server(socket_pair[0].detach(), certificates.certificate, other.key, LONG_S)


def test_encrypted_key_is_rejected_without_prompt(certificates: Certificates, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(certificates.key).read_bytes(), password=None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    code = f"""
import os, socket
from genie.native import libraries
library = libraries.load("genie_executor")
os.open(os.ttyname(0), os.O_RDWR)  # makes it the controlling terminal, where OpenSSL could prompt
sock, _ = socket.socketpair()
try:
    library.Stream.tls_server(sock.detach(), {certificates.certificate!r}, {str(locked)!r}, 5)
except library.TlsHandshakeFailed as error:
    print(error)
"""
    asked, terminal = os.openpty()
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, stdin=terminal, capture_output=True, text=True, timeout=60, start_new_session=True
    )
    os.close(terminal)
    assert done.stdout.startswith(f"could not use the key {locked}: "), done
    with pytest.raises(OSError, match="Input/output error"):  # the terminal received no prompt
        os.read(asked, 1)
    os.close(asked)


@pytest.mark.parametrize("words", [b"GET / HTTP/1.0\r\n\r\n", b"GENIEX\0\2", bytes(range(255, 0, -1))])
def test_server_rejects_plaintext_client(
    socket_pair: tuple[socket.socket, socket.socket], certificates: Certificates, words: bytes
) -> None:
    near, far = socket_pair
    near.sendall(words)
    with pytest.raises(TlsHandshakeFailed, match=r"TLS 1\.3 handshake with the peer failed: "):
        open_tls_server_stream(far, certificates)


def test_client_rejects_plaintext_server(
    socket_pair: tuple[socket.socket, socket.socket], certificates: Certificates
) -> None:
    near, far = socket_pair
    far.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    with pytest.raises(TlsHandshakeFailed, match=r"TLS 1\.3 handshake with the peer failed: "):
        open_tls_client_stream(near, certificates)


def test_older_tls_is_rejected(
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
) -> None:
    context = tls.unverified_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    near, far = run_handshakes_and_catch(
        socket_pair, context.wrap_socket, lambda s: open_tls_server_stream(s, certificates), thread_pool
    )
    assert isinstance(near, ssl.SSLError)
    assert isinstance(far, TlsHandshakeFailed)
    assert "unsupported protocol" in str(far)


@pytest.mark.parametrize("side", [open_tls_client_stream, open_tls_server_stream])
def test_handshake_with_silent_peer_times_out(
    socket_pair: tuple[socket.socket, socket.socket], certificates: Certificates, side: Callable[..., Any]
) -> None:
    with pytest.raises(ConnectionLost, match="timeout during the TLS handshake"):
        side(socket_pair[0], certificates, wait_s=SHORT_S)


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01"])
def test_disconnect_during_handshake_raises_connection_lost(
    socket_pair: tuple[socket.socket, socket.socket], certificates: Certificates, data: bytes
) -> None:
    near, far = socket_pair
    near.sendall(data)
    near.close()
    with pytest.raises(ConnectionLost, match="closed the connection during the TLS handshake"):
        open_tls_server_stream(far, certificates)


# --- TLS ----------------------------------------------------------------------------------------


def test_modified_tls_record_ends_the_connection(
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
) -> None:
    near, far = socket_pair
    with socket.socket(fileno=os.dup(near.fileno())) as between:
        accepted = thread_pool.submit(open_tls_server_stream, far, certificates)
        sender, receiver = open_tls_client_stream(near, certificates), accepted.result()
        sender.write_all(b"good", LONG_S)
        assert receiver.read_exactly(4, LONG_S) == b"good"
        between.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        for _ in range(2):
            with pytest.raises(ConnectionLost, match=r"is corrupt: .*mac"):
                receiver.read_exactly(1, LONG_S)
        sender.close()
        receiver.close()


def test_disconnect_without_tls_close_raises_connection_lost(
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
) -> None:
    near, far = socket_pair
    with socket.socket(fileno=os.dup(near.fileno())) as between:
        accepted = thread_pool.submit(open_tls_server_stream, far, certificates)
        sender, receiver = open_tls_client_stream(near, certificates), accepted.result()
        between.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost, match="disconnected without closing TLS"):
            receiver.read_exactly(1, LONG_S)
        sender.close()
        receiver.close()


def connect_python_tls_client(
    sock: socket.socket, certificates: Certificates, seen: list[str]
) -> ssl.SSLSocket:
    """Python's TLS, which reports every handshake message."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=certificates.ca_der[0])

    def note(_: object, direction: str, __: object, ___: object, kind: Any, ____: bytes) -> None:
        seen.append(f"{direction} {getattr(kind, 'name', kind)}")

    context._msg_callback = note  # type: ignore[attr-defined]
    return context.wrap_socket(sock, server_hostname=SERVER_NAME)


def test_tls_keys_are_renewed_and_no_session_tickets_are_sent(
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
) -> None:
    """70 MB are more than 4096 records of 16 KiB; the peer is Python's TLS."""
    seen: list[str] = []
    accepted = thread_pool.submit(open_tls_server_stream, socket_pair[1], certificates)
    data = random.Random(2).randbytes(1 << 20)
    with connect_python_tls_client(socket_pair[0], certificates, seen) as near:
        far = accepted.result()
        sending = thread_pool.submit(lambda: [far.write_all(data, LONG_S) for _ in range(70)])
        with near.makefile("rb") as file:
            assert all(file.read(len(data)) == data for _ in range(70))
        sending.result(LONG_S)
        near.sendall(b"thanks")
        assert far.read_exactly(6, LONG_S) == b"thanks"
        far.close()
    assert "read SERVER_HELLO" in seen
    assert "read KEY_UPDATE" in seen
    assert not [line for line in seen if "TICKET" in line]


# --- TLS shutdown -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 100, 40_000, 20_000_000])
@only_tls
def test_data_after_tls_shutdown_arrives(
    connected_streams: tuple[Any, Any], thread_pool: ThreadPoolExecutor, size: int
) -> None:
    near, far = connected_streams
    near.write_all(b"hello", LONG_S)
    assert far.read_exactly(5, LONG_S) == b"hello"
    data = [random.Random(seed).randbytes(size) for seed in range(2)]

    def change(stream: Any, first: bytes) -> bytes:
        """Shuts down TLS and writes at once; returns what the other side wrote."""
        plaintext = stream.downgrade_to_plaintext(LONG_S)
        assert not plaintext.is_encrypted
        writing = thread_pool.submit(plaintext.write_all, first, LONG_S)
        received: bytes = plaintext.read_exactly(size, LONG_S)
        writing.result(LONG_S)
        plaintext.close()
        return received

    changing = [
        thread_pool.submit(change, stream, first)
        for stream, first in zip(connected_streams, data, strict=True)
    ]
    assert [future.result(LONG_S) for future in changing] == [data[1], data[0]]
    for stream in connected_streams:
        with pytest.raises(ConnectionLost, match="closed"):
            stream.read_exactly(1, LONG_S)


class PythonTlsClient:
    """A TLS client whose bytes the test sends itself."""

    def __init__(self, sock: socket.socket, certificates: Certificates) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=certificates.ca_der[0])
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=SERVER_NAME)
        self.sock = sock
        while not self.tried(self.tls.do_handshake):
            sock.sendall(self.outgoing.read())
            self.incoming.write(sock.recv(65536))
        sock.sendall(self.outgoing.read())

    def tried(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except ssl.SSLWantReadError:
            return False
        return True


def test_data_in_the_packet_of_tls_shutdown_is_not_lost(
    socket_pair: tuple[socket.socket, socket.socket],
    certificates: Certificates,
    thread_pool: ThreadPoolExecutor,
) -> None:
    accepted = thread_pool.submit(open_tls_server_stream, socket_pair[1], certificates)
    peer = PythonTlsClient(socket_pair[0], certificates)
    far = accepted.result(LONG_S)
    peer.tried(peer.tls.unwrap)
    socket_pair[0].sendall(peer.outgoing.read() + b"and now without")
    plaintext = far.downgrade_to_plaintext(LONG_S)
    assert plaintext.read_exactly(15, LONG_S) == b"and now without"
    plaintext.write_all(b"reply", LONG_S)
    plaintext.close()
    with socket_pair[0].makefile("rb") as file:
        rest = file.read()
    peer.incoming.write(rest[:-5])
    assert rest[-5:] == b"reply"
    peer.tls.unwrap()  # the peer's TLS shutdown


@only_tls
def test_tls_data_during_tls_shutdown_is_an_error(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    far.write_all(b"one thing more", LONG_S)
    with pytest.raises(ConnectionLost, match="application data"):
        near.downgrade_to_plaintext(LONG_S)


@only_tls
def test_tls_shutdown_times_out(connected_streams: tuple[Any, Any]) -> None:
    with pytest.raises(ConnectionLost, match="did not shut down TLS"):
        connected_streams[0].downgrade_to_plaintext(SHORT_S)


@only_tls
def test_disconnect_during_tls_shutdown_raises_connection_lost(connected_streams: tuple[Any, Any]) -> None:
    near, far = connected_streams
    far.close()
    with pytest.raises(ConnectionLost, match=r"connection lost|broke"):
        near.downgrade_to_plaintext(LONG_S)


@only_plaintext
def test_plaintext_stream_cannot_shut_down_tls(connected_streams: tuple[Any, Any]) -> None:
    with pytest.raises(RuntimeError, match="no TLS to shut down"):
        connected_streams[0].downgrade_to_plaintext(LONG_S)
