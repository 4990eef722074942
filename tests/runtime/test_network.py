"""TCP and TLS: what a failed connect means, and what a server does with a bad one."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from genie.errors import (
    AddressInUseError,
    ConfigError,
    ConnectionLostError,
    DeadlineError,
    FrameTooLargeError,
    NothingListensError,
    ProtocolError,
    TlsError,
    TransportError,
    UnreachableError,
    VersionError,
)
from genie.runtime import tls, wire
from genie.runtime.network import Channel, ClientTls, TcpChannel, TcpNetwork
from tests.waiting import until


async def _echo(channel: Channel) -> None:
    while True:
        frame = await channel.receive()
        await channel.send(wire.pack(wire.Kind.REPLY, frame.call_id, frame.payload))


@asynccontextmanager
async def serving(accept: object = _echo, *, context: object = None) -> AsyncIterator[int]:
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(
            TcpNetwork().serve("127.0.0.1", 0, accept, tls=context, on_listening=port.set_result)  # type: ignore[arg-type]
        )
        yield await port
        task.cancel()


@asynccontextmanager
async def plain_server(answer: bytes) -> AsyncIterator[int]:
    """Something that is not Genie."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read(100)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_frames_arrive_whole_and_in_order() -> None:
    async with serving() as port:
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        for number in range(3):
            await channel.send(wire.pack(wire.Kind.REQUEST, number, bytes(number)))
        frames = [await channel.receive() for _ in range(3)]
        assert [(frame.call_id, len(frame.payload)) for frame in frames] == [(0, 0), (1, 1), (2, 2)]
        channel.close()


async def test_a_stranger_may_send_small_frames_only() -> None:
    async with serving() as port:
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        with pytest.raises(ConnectionLostError):
            await channel.send(wire.pack(wire.Kind.REQUEST, 1, bytes(wire.FRAME_BYTES_MAX_STRANGER + 1)))
            await channel.receive()
        channel.close()


async def test_what_a_failed_connect_means_is_said() -> None:
    network = TcpNetwork()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = taken.getsockname()[1]
        with pytest.raises(NothingListensError, match="nothing listens there"):
            await network.connect("127.0.0.1", nobody, tls=None, timeout_s=5)
        taken.listen()
        with pytest.raises(DeadlineError, match=r"did not answer within 0\.1 s"):
            await network.connect("127.0.0.1", nobody, tls=None, timeout_s=0.1)
    with pytest.raises(UnreachableError):
        await network.connect("no-such-host.invalid", 1, tls=None, timeout_s=5)
    with pytest.raises(TransportError):
        await network.connect("a" * 300, 1, tls=None, timeout_s=5)
    async with plain_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        with pytest.raises(ProtocolError, match="does not speak Genie"):
            await network.connect("127.0.0.1", port, tls=None, timeout_s=5)
    async with plain_server(wire.preface(7)) as port:
        with pytest.raises(VersionError, match="speaks wire version 7"):
            await network.connect("127.0.0.1", port, tls=None, timeout_s=5)


async def test_a_port_in_use_and_an_address_of_another_machine_are_said() -> None:
    async with serving() as port:
        with pytest.raises(AddressInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            await TcpNetwork().serve("127.0.0.1", port, _echo, tls=None, on_listening=print)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        await TcpNetwork().serve("192.0.2.1", 0, _echo, tls=None, on_listening=print)


async def test_a_handler_that_fails_ends_its_own_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    async def accept(channel: Channel) -> None:
        if broken:
            raise ZeroDivisionError("a bug")
        await _echo(channel)

    async with serving(accept) as port:
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        with pytest.raises(ConnectionLostError):
            await channel.receive()
        channel.close()
        assert "a bug" in caplog.text
        broken = False
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        await channel.send(wire.pack(wire.Kind.REQUEST, 1, b"x"))
        assert (await channel.receive()).payload == b"x"
        channel.close()


async def test_a_frame_cut_in_the_middle_is_a_lost_connection() -> None:
    seen: list[Exception] = []

    async def accept(channel: Channel) -> None:
        try:
            await channel.receive()
        except ConnectionLostError as error:
            seen.append(error)

    async with serving(accept) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readexactly(wire.PREFACE_BYTES)
        writer.write(wire.preface() + wire.pack(wire.Kind.REQUEST, 1, b"123456")[:-2])
        writer.close()
        await writer.wait_closed()
        await until(lambda: seen)
        assert "in the middle of a frame" in str(seen[0])


class Certified:
    """A CA with a controller's, a node's and a stranger's certificates."""

    def __init__(self, folder: Path) -> None:
        now = time.time()
        self.authority = tls.CertificateAuthority.create(now=now)
        self.folder = folder
        for who, name in (("server", tls.CONTROLLER_NAME), ("node", tls.node_name("n1"))):
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


async def test_with_tls_both_sides_know_whom_they_talk_to(tmp_path: Path) -> None:
    certified = Certified(tmp_path)
    names: list[str] = []

    async def accept(channel: Channel) -> None:
        names.append(channel.certificate_name)
        await _echo(channel)

    async with serving(accept, context=certified.server()) as port:
        for shows in (True, False):
            channel = await TcpNetwork().connect(
                "127.0.0.1", port, tls=certified.client(shows=shows), timeout_s=5
            )
            await channel.send(wire.pack(wire.Kind.REQUEST, 1, b"x"))
            assert (await channel.receive()).payload == b"x"
            channel.close()
        assert names == [tls.node_name("n1"), ""]


async def test_another_ca_or_a_node_that_plays_controller_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certified, other = Certified(tmp_path), Certified(tmp_path / "other")
    async with serving(context=certified.server()) as port:
        with pytest.raises(TlsError, match="not of this cluster"):
            await TcpNetwork().connect("127.0.0.1", port, tls=other.client(), timeout_s=5)
    async with serving(context=certified.server("node")) as port:
        with pytest.raises(TlsError, match="not of this cluster"):
            await TcpNetwork().connect("127.0.0.1", port, tls=certified.client(), timeout_s=5)


async def test_one_side_with_tls_and_the_other_without_is_explained(tmp_path: Path) -> None:
    certified = Certified(tmp_path)
    async with serving(context=certified.server()) as port:
        with pytest.raises((ProtocolError, ConnectionLostError)) as caught:
            await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=20)
        assert "TLS" in caught.value.hint
    async with serving() as port:
        with pytest.raises((TlsError, ConnectionLostError)) as other:
            await TcpNetwork().connect("127.0.0.1", port, tls=certified.client(), timeout_s=20)
        assert "TLS" in str(other.value)


async def test_a_frame_over_the_cap_is_refused_by_the_client_too() -> None:
    async def accept(channel: Channel) -> None:
        await channel.send(wire.pack(wire.Kind.REPLY, 1, b"12345"))
        await asyncio.Event().wait()

    async with serving(accept) as port:
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        channel.cap_bytes = 4
        with pytest.raises(FrameTooLargeError):
            await channel.receive()
        channel.close()


async def test_frames_arrive_whole_however_they_are_cut() -> None:
    frames = [
        wire.pack(wire.Kind.REQUEST, number, bytes([number]) * size) for number, size in enumerate(SIZES)
    ]
    stream = b"".join(frames)

    for step in (1, 7, wire.HEADER_BYTES, 4096, len(stream)):

        async def send_in_steps(channel: Channel, step: int = step) -> None:
            for start in range(0, len(stream), step):
                await channel.send(stream[start : start + step])

        async with serving(send_in_steps) as port:
            channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
            for number, size in enumerate(SIZES):
                assert await channel.receive() == (wire.Kind.REQUEST, number, bytes([number]) * size)
            with pytest.raises(ConnectionLostError, match=r"closed the connection$"):
                await channel.receive()
            channel.close()


SIZES = (0, 1, 5, 0, 300, 9, 20_000, 3)


async def test_what_is_sent_at_once_is_bounded_and_goes_on_when_it_is_read() -> None:
    frame, done = wire.pack(wire.Kind.REPLY, 1, b"x" * 10_000), asyncio.Event()
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

    async with serving(fill) as port, asyncio.timeout(20):
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        await done.wait()
        for _ in range(sent + 1):
            assert len((await channel.receive()).payload) == 10_000
        channel.close()


async def test_what_one_turn_sends_is_one_write_in_order_and_outlives_the_close() -> None:
    writes: list[int] = []

    async def talk(channel: Channel) -> None:
        assert isinstance(channel, TcpChannel)
        write = channel._writer.write

        def counted(data: bytes) -> None:
            writes.append(len(data))
            write(data)

        channel._writer.write = counted  # type: ignore[method-assign, assignment]
        for number in range(3):
            assert channel.try_send_nowait(wire.pack(wire.Kind.REPLY, number, b"x"))
        assert writes == [], "not before the turn is over"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(writes) == 1
        assert channel.try_send_nowait(wire.pack(wire.Kind.REPLY, 3, b"x"))
        await channel.send(wire.pack(wire.Kind.REPLY, 4, b"x"))
        assert len(writes) == 2, "what waits goes first, in the same write"
        assert channel.try_send_nowait(wire.pack(wire.Kind.REPLY, 5, b"last"))
        channel.close()

    async with serving(talk) as port, asyncio.timeout(20):
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        assert [(await channel.receive()).call_id for _ in range(6)] == [0, 1, 2, 3, 4, 5]
        channel.close()


async def test_a_frame_that_is_here_need_not_be_waited_for() -> None:
    async def talk(channel: Channel) -> None:
        await channel.send(b"".join(wire.pack(wire.Kind.REPLY, number, b"x") for number in range(2)))
        await channel.receive()

    async with serving(talk) as port, asyncio.timeout(20):
        channel = await TcpNetwork().connect("127.0.0.1", port, tls=None, timeout_s=5)
        assert channel.try_receive_nowait() is None
        assert (await channel.receive()).call_id == 0
        second = channel.try_receive_nowait()
        assert second is not None
        assert second.call_id == 1
        assert channel.try_receive_nowait() is None
        channel.close()
