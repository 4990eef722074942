"""TCP and TLS: frames, errors of connect, and invalid connections to a server."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from genie.errors import (
    AddressInUseError,
    ConfigError,
    ConnectionLostError,
    DeadlineError,
    FrameTooLargeError,
    NothingListensError,
    OverloadedError,
    ProtocolError,
    TlsError,
    TransportError,
    UnreachableError,
    VersionError,
)
from genie.model.release import ProtocolVersions
from genie.runtime import connection_limits, rpc, tls, wire
from genie.runtime.connection_limits import ConnectionLimits
from genie.runtime.network import Channel, ClientTls, TcpChannel, TcpNetwork, explain_connect_failure
from tests.waiting import until


async def _echo_frames(channel: Channel) -> None:
    while True:
        frame = await channel.receive()
        await channel.send(wire.pack_frame(wire.FrameKind.REPLY, frame.call_id, frame.payload))


@asynccontextmanager
async def run_server(
    accept: object = _echo_frames, *, context: object = None, limits: ConnectionLimits | None = None
) -> AsyncIterator[int]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            TcpNetwork(limits).serve("127.0.0.1", 0, accept, tls=context, on_listening=port.set_result)  # type: ignore[arg-type]
        )
        yield await port
        task.cancel()


@asynccontextmanager
async def run_foreign_server(answer: bytes) -> AsyncIterator[int]:
    """Something that is not Genie."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read(100)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_frames_arrive_whole_and_in_order() -> None:
    async with run_server() as port:
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        for number in range(3):
            await channel.send(wire.pack_frame(wire.FrameKind.REQUEST, number, bytes(number)))
        frames = [await channel.receive() for _ in range(3)]
        assert [(frame.call_id, len(frame.payload)) for frame in frames] == [(0, 0), (1, 1), (2, 2)]
        channel.close()


@pytest.mark.parametrize(("highest_of_client", "chosen"), [(1, 1), (3, 2)])
async def test_connection_uses_the_highest_common_version(highest_of_client: int, chosen: int) -> None:
    of_server: list[int] = []
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def accept(channel: Channel) -> None:
        of_server.append(channel.protocol_version)
        await _echo_frames(channel)

    server = TcpNetwork(versions=ProtocolVersions(lowest=1, highest=2))
    client = TcpNetwork(versions=ProtocolVersions(lowest=1, highest=highest_of_client))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.serve("127.0.0.1", 0, accept, tls=None, on_listening=port.set_result))
        channel = await client.connect("127.0.0.1", await port, tls=None, timeout_s=5)
        await channel.send(wire.pack_frame(wire.FrameKind.REQUEST, 1, b""))
        await channel.receive()
        assert (rpc.Peer(channel).protocol_version, of_server) == (chosen, [chosen])
        channel.close()
        newest = TcpNetwork(versions=ProtocolVersions(lowest=3, highest=4))
        with pytest.raises(VersionError, match=r"speaks version 1 to 2 .* speaks 3 to 4"):
            await newest.connect("127.0.0.1", await port, tls=None, timeout_s=5)
        task.cancel()


async def test_unauthenticated_peer_may_send_small_frames_only() -> None:
    async with run_server() as port:
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        with pytest.raises(ConnectionLostError):
            await channel.send(
                wire.pack_frame(wire.FrameKind.REQUEST, 1, bytes(wire.UNAUTHENTICATED_FRAME_BYTES_MAX + 1))
            )
            await channel.receive()
        channel.close()


async def test_failed_connect_error_states_the_cause() -> None:
    network = TcpNetwork()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(NothingListensError, match=r"nothing listens there .*genie up.*--bind ADDRESS"):
            await network.connect("127.0.0.1", port, tls=None, timeout_s=5)
        listener.listen()
        with pytest.raises(DeadlineError, match=r"did not respond within 0\.1 s"):
            await network.connect("127.0.0.1", port, tls=None, timeout_s=0.1)
    with pytest.raises(
        UnreachableError, match=r"(no such name \(.*check the spelling|the name lookup failed \(.*DNS server)"
    ):
        await network.connect("no-such-host.invalid", 1, tls=None, timeout_s=5)
    with pytest.raises(TransportError):
        await network.connect("a" * 300, 1, tls=None, timeout_s=5)
    async with run_foreign_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        with pytest.raises(ProtocolError, match="does not speak the Genie protocol"):
            await network.connect("127.0.0.1", port, tls=None, timeout_s=5)
    async with run_foreign_server(wire.make_preface(ProtocolVersions(lowest=7, highest=7))) as port:
        with pytest.raises(VersionError, match="speaks version 7"):
            await network.connect("127.0.0.1", port, tls=None, timeout_s=5)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EHOSTUNREACH, "Connect call failed ('10.0.0.7', 5555)"), "no route to host"),
        (OSError(errno.ENETUNREACH, "Connect call failed ('10.0.0.7', 5555)"), "network is unreachable"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "no such name (Name or"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "the name lookup failed (Temporary"),
        (OSError("Multiple exceptions: [Errno 113] a, [Errno 111] b"), "Multiple exceptions"),
    ],
)
def test_failure_reason_is_the_text_of_the_errno(error: OSError, reason: str) -> None:
    message = explain_connect_failure(error, "10.0.0.7:5555").message
    assert message.lower().startswith(f"10.0.0.7:5555 cannot be reached: {reason.lower()}")


def test_closed_connection_without_a_reason_has_none_in_the_message() -> None:
    message = explain_connect_failure(ConnectionResetError(), "10.0.0.7:5555").message
    assert message == "10.0.0.7:5555 closed the connection during the handshake"


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (socket.EAI_NONAME, "check the spelling of the host name"),
        (socket.EAI_AGAIN, "check the DNS server of this machine"),
        (socket.EAI_FAIL, "check the DNS server of this machine"),
    ],
)
def test_hint_mentions_spelling_only_if_the_name_does_not_exist(number: int, hint: str) -> None:
    error = explain_connect_failure(socket.gaierror(number, "failed"), "gpu-box:5555")
    assert error.hint.startswith(hint)


async def test_ipv6_address_is_shown_in_brackets(unused_tcp_port: int) -> None:
    with pytest.raises(UnreachableError, match=rf"^\[::1\]:{unused_tcp_port} "):
        await TcpNetwork().connect("::1", unused_tcp_port, tls=None, timeout_s=5)


async def test_port_in_use_and_foreign_address_errors_state_the_cause() -> None:
    async with run_server() as port:
        with pytest.raises(AddressInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            await TcpNetwork().serve("127.0.0.1", port, _echo_frames, tls=None, on_listening=print)
    with pytest.raises(
        ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: .* not an address of this machine .*node_role"
    ):
        await TcpNetwork().serve("192.0.2.1", 0, _echo_frames, tls=None, on_listening=print)


async def test_failing_handler_ends_only_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    async def accept(channel: Channel) -> None:
        if broken:
            raise ZeroDivisionError("a bug")
        await _echo_frames(channel)

    async with run_server(accept) as port:
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        with pytest.raises(ConnectionLostError):
            await channel.receive()
        channel.close()
        assert "a bug" in caplog.text
        broken = False
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        await channel.send(wire.pack_frame(wire.FrameKind.REQUEST, 1, b"x"))
        assert (await channel.receive()).payload == b"x"
        channel.close()


async def test_frame_cut_in_the_middle_is_a_lost_connection() -> None:
    seen: list[Exception] = []

    async def accept(channel: Channel) -> None:
        try:
            await channel.receive()
        except ConnectionLostError as error:
            seen.append(error)

    async with run_server(accept) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readexactly(wire.PREFACE_BYTES)
        writer.write(wire.make_preface() + wire.pack_frame(wire.FrameKind.REQUEST, 1, b"123456")[:-2])
        writer.close()
        await writer.wait_closed()
        await until(lambda: seen)
        assert "in the middle of a frame" in str(seen[0])


class IssuedCertificates:
    """A CA with certificates of a controller and a node, and a certificate of another CA."""

    def __init__(self, folder: Path) -> None:
        now = time.time()
        self.authority = tls.CertificateAuthority.create(now=now)
        self.folder = folder
        for who, name in (("server", tls.CONTROLLER_NAME), ("node", tls.node_certificate_name("n1"))):
            key_pem, csr_pem = tls.new_key_and_csr()
            (folder / f"{who}.key").write_bytes(key_pem)
            (folder / f"{who}.pem").write_text(self.authority.issue(csr_pem, name=name, days=1, now=now))

    def server(self, who: str = "server") -> object:
        return tls.server_context(
            self.folder / f"{who}.pem", self.folder / f"{who}.key", ca_pem=self.authority.ca_pem
        )

    def client(self, *, shows: bool = False) -> ClientTls:
        certificate = self.folder / "node.pem" if shows else None
        key = self.folder / "node.key" if shows else None
        context = tls.client_context(self.authority.ca_pem, certificate=certificate, key=key)
        return ClientTls(context, tls.CONTROLLER_NAME)


async def test_tls_authenticates_both_sides(tmp_path: Path) -> None:
    certified = IssuedCertificates(tmp_path)
    names: list[str] = []

    async def accept(channel: Channel) -> None:
        names.append(channel.certificate_name)
        await _echo_frames(channel)

    async with run_server(accept, context=certified.server()) as port:
        for shows in (True, False):
            channel = await TcpNetwork().connect(
                "127.0.0.1", port, tls=certified.client(shows=shows), timeout_s=5
            )
            await channel.send(wire.pack_frame(wire.FrameKind.REQUEST, 1, b"x"))
            assert (await channel.receive()).payload == b"x"
            channel.close()
        assert names == [tls.node_certificate_name("n1"), ""]


async def test_another_ca_and_a_node_impersonating_a_controller_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certified, other = IssuedCertificates(tmp_path), IssuedCertificates(tmp_path / "other")
    async with run_server(context=certified.server()) as port:
        with pytest.raises(TlsError, match="of another cluster"):
            await TcpNetwork().connect("127.0.0.1", port, tls=other.client(), timeout_s=5)
    async with run_server(context=certified.server("node")) as port:
        with pytest.raises(TlsError, match="is not the expected Genie server"):
            await TcpNetwork().connect("127.0.0.1", port, tls=certified.client(), timeout_s=5)


SMALL_LIMITS = ConnectionLimits(
    connections_max=40,
    unauthenticated_max=10,
    unauthenticated_per_address_max=8,
    user_connections_max=20,
    owner_connections_reserved=2,
    handshakes_per_s=1000.0,
    handshakes_burst=1000.0,
)


async def _echo_authenticated(channel: Channel) -> None:
    channel.set_authenticated()
    await _echo_frames(channel)


async def test_silent_strangers_do_not_lock_out_a_client(tmp_path: Path) -> None:
    certified = IssuedCertificates(tmp_path)
    async with run_server(_echo_authenticated, context=certified.server(), limits=SMALL_LIMITS) as port:
        strangers = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.0.{2 + number % 5}", 0))
            for number in range(60)
        ]
        channels = [
            await TcpNetwork().connect("127.0.0.1", port, tls=certified.client(), timeout_s=20)
            for _ in range(20)
        ]
        for channel in channels:
            await channel.send(wire.pack_frame(wire.FrameKind.REQUEST, 1, b"x"))
            assert (await channel.receive()).payload == b"x"
            channel.close()
        for _, writer in strangers:
            writer.transport.abort()


async def test_strangers_of_the_same_address_are_rejected_before_the_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "UNAUTHENTICATED_GRACE_S", 60.0)
    certified = IssuedCertificates(tmp_path)
    async with run_server(context=certified.server(), limits=SMALL_LIMITS) as port:
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        ends = [asyncio.create_task(reader.read(100)) for reader, _ in strangers]
        await until(lambda: sum(task.done() for task in ends) == 12)
        assert all(task.result()[:1] == b"\x15" for task in ends if task.done()), "a TLS alert"
        with pytest.raises(OverloadedError, match="a limit on connections is reached") as caught:
            await TcpNetwork().connect("127.0.0.1", port, tls=certified.client(), timeout_s=0.2)
        assert caught.value.retry_after_s > 0
        monkeypatch.setattr(connection_limits, "UNAUTHENTICATED_GRACE_S", 0.0)
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=certified.client(), timeout_s=20)
        channel.close()
        assert sum(task.done() for task in ends) == 13, "it has replaced the oldest stranger"
        for _, writer in strangers:
            writer.transport.abort()
        await asyncio.wait(ends)


async def test_connect_retries_while_the_rate_limit_rejects_it(tmp_path: Path) -> None:
    certified = IssuedCertificates(tmp_path)
    slow = replace(SMALL_LIMITS, handshakes_per_s=2.0, handshakes_burst=2.0)
    async with run_server(_echo_authenticated, context=certified.server(), limits=slow) as port:
        for _ in range(4):
            channel = await TcpNetwork().connect("127.0.0.1", port, tls=certified.client(), timeout_s=20)
            channel.close()


async def test_tls_on_one_side_only_is_explained(tmp_path: Path) -> None:
    certified = IssuedCertificates(tmp_path)
    async with run_server(context=certified.server()) as port:
        with pytest.raises((ProtocolError, ConnectionLostError)) as caught:
            await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=20)
        assert "TLS" in caught.value.hint
    async with run_server() as port:
        with pytest.raises((TlsError, ConnectionLostError)) as other:
            await TcpNetwork().connect("127.0.0.1", port, tls=certified.client(), timeout_s=20)
        assert "TLS" in str(other.value)


async def test_client_rejects_oversized_frames() -> None:
    async def accept(channel: Channel) -> None:
        await channel.send(wire.pack_frame(wire.FrameKind.REPLY, 1, b"12345"))
        await asyncio.Event().wait()

    async with run_server(accept) as port:
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        channel.set_frame_limit(4)
        with pytest.raises(FrameTooLargeError):
            await channel.receive()
        channel.close()


async def test_frames_arrive_whole_from_any_segmentation() -> None:
    frames = [
        wire.pack_frame(wire.FrameKind.REQUEST, number, bytes([number]) * size)
        for number, size in enumerate(SIZES)
    ]
    stream = b"".join(frames)

    for step in (1, 7, wire.HEADER_BYTES, 4096, len(stream)):

        async def send_in_steps(channel: Channel, step: int = step) -> None:
            for start in range(0, len(stream), step):
                await channel.send(stream[start : start + step])

        async with run_server(send_in_steps) as port:
            channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
            for number, size in enumerate(SIZES):
                assert await channel.receive() == (wire.FrameKind.REQUEST, number, bytes([number]) * size)
            with pytest.raises(ConnectionLostError, match=r"closed the connection$"):
                await channel.receive()
            channel.close()


SIZES = (0, 1, 5, 0, 300, 9, 20_000, 3)


async def test_unsent_frames_are_bounded_until_the_peer_reads() -> None:
    frame, done = wire.pack_frame(wire.FrameKind.REPLY, 1, b"x" * 10_000), asyncio.Event()
    sent = 0

    async def fill(channel: Channel) -> None:
        nonlocal sent
        while channel.try_send_nowait(frame):
            sent += 1
            await asyncio.sleep(0)
        done.set()
        await channel.send(frame)
        channel.close()
        assert not channel.try_send_nowait(frame), "not on a connection that is closed"

    async with run_server(fill) as port, asyncio.timeout(20):
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        await done.wait()
        for _ in range(sent + 1):
            assert len((await channel.receive()).payload) == 10_000
        channel.close()


async def test_frames_of_one_iteration_are_one_write_and_survive_close() -> None:
    writes: list[int] = []

    async def talk(channel: Channel) -> None:
        assert isinstance(channel, TcpChannel)
        write = channel._writer.write

        def counted(data: bytes) -> None:
            writes.append(len(data))
            write(data)

        channel._writer.write = counted  # type: ignore[method-assign, assignment]
        for number in range(3):
            assert channel.try_send_nowait(wire.pack_frame(wire.FrameKind.REPLY, number, b"x"))
        assert writes == [], "not before the turn is over"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(writes) == 1
        assert channel.try_send_nowait(wire.pack_frame(wire.FrameKind.REPLY, 3, b"x"))
        await channel.send(wire.pack_frame(wire.FrameKind.REPLY, 4, b"x"))
        assert len(writes) == 2, "what waits goes first, in the same write"
        assert channel.try_send_nowait(wire.pack_frame(wire.FrameKind.REPLY, 5, b"last"))
        channel.close()

    async with run_server(talk) as port, asyncio.timeout(20):
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        assert [(await channel.receive()).call_id for _ in range(6)] == [0, 1, 2, 3, 4, 5]
        channel.close()


async def test_received_frame_is_available_without_waiting() -> None:
    async def talk(channel: Channel) -> None:
        await channel.send(
            b"".join(wire.pack_frame(wire.FrameKind.REPLY, number, b"x") for number in range(2))
        )
        await channel.receive()

    async with run_server(talk) as port, asyncio.timeout(20):
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        assert channel.try_receive_nowait() is None
        assert (await channel.receive()).call_id == 0
        second = channel.try_receive_nowait()
        assert second is not None
        assert second.call_id == 1
        assert channel.try_receive_nowait() is None
        channel.close()
