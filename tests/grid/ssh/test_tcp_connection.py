"""Direct TCP connections: buffering until the banner, and coalesced writes."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import pytest_asyncio

from genie.errors import UsageError
from genie.grid.ssh import tcp_connection
from genie.grid.ssh.tcp_connection import TcpConnector


class OwnerProtocol(asyncio.Protocol):
    def __init__(self) -> None:
        self.got = bytearray()
        self.transport: asyncio.Transport
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"SSH-2.0-ours\r\n")

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


class FakeHost:
    """A server for one connection, controlled by the test."""

    def __init__(self) -> None:
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.called = asyncio.Event()
        self.port = 0

    async def took(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.called.set()


@pytest_asyncio.fixture
async def fake_host() -> AsyncIterator[FakeHost]:
    host = FakeHost()
    server = await asyncio.start_server(host.took, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    async with server:
        yield host
        if host.called.is_set():
            host.writer.close()


async def make_options(config: Path | None = None) -> asyncssh.SSHClientConnectionOptions:
    named = [] if config is None else [str(config)]
    return await asyncssh.SSHClientConnectionOptions.construct(host="gpu1", config=named, client_keys=None)


async def start_connecting(
    host: FakeHost, leave: asyncio.Event
) -> tuple[asyncio.Task[OwnerProtocol], asyncio.Event]:
    """Returns the attempt, and an event that is set when on_banner is awaited."""
    asked = asyncio.Event()

    async def on_banner() -> None:
        asked.set()
        await leave.wait()

    tunnel = TcpConnector(await make_options(), on_banner=on_banner)

    async def connect() -> OwnerProtocol:
        owner = OwnerProtocol()
        _, given = await tunnel.create_connection(lambda: owner, "127.0.0.1", host.port)
        assert given is owner
        return owner

    return asyncio.create_task(connect()), asked


async def test_on_banner_is_awaited_after_the_banner_and_data_reaches_the_owner(fake_host: FakeHost) -> None:
    leave = asyncio.Event()
    async with asyncio.timeout(30):
        connecting, asked = await start_connecting(fake_host, leave)
        await fake_host.called.wait()
        assert await fake_host.reader.readline() == b"SSH-2.0-ours\r\n"
        assert not asked.is_set()
        fake_host.writer.write(b"SSH-2.0-first\r\n")
        await asked.wait()
        fake_host.writer.write(b"more")
        await fake_host.writer.drain()
        leave.set()
        owner = await connecting
        fake_host.writer.close()
        await owner.lost.wait()
    assert bytes(owner.got) == b"SSH-2.0-first\r\nmore"


async def test_cancelled_on_banner_closes_the_connection(fake_host: FakeHost) -> None:
    async with asyncio.timeout(30):
        connecting, asked = await start_connecting(fake_host, asyncio.Event())
        await fake_host.called.wait()
        fake_host.writer.write(b"SSH-2.0-first\r\n")
        await asked.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert await fake_host.reader.read() == b"SSH-2.0-ours\r\n"


async def test_host_without_a_banner_times_out_after_connect_timeout(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text("Host gpu1\n  ConnectTimeout 1\n")

    async def on_banner() -> None:
        raise AssertionError("it has sent nothing")

    tunnel = TcpConnector(await make_options(config), on_banner=on_banner)
    async with asyncio.timeout(30):
        with pytest.raises(TimeoutError, match="timed out"):
            await tunnel.create_connection(OwnerProtocol, "127.0.0.1", fake_host.port)
        await fake_host.called.wait()
        assert await fake_host.reader.read() == b"SSH-2.0-ours\r\n"


@pytest.mark.parametrize("way", ["silent", "no leave"])
async def test_abandoned_connection_logs_no_error(fake_host: FakeHost, way: str) -> None:
    asked, leave = asyncio.Event(), asyncio.Event()

    async def on_banner() -> None:
        asked.set()
        await leave.wait()
        raise UsageError("no leave")

    async def connect() -> None:
        given = await make_options()
        given.connect_timeout = 0.05 if way == "silent" else 20
        await asyncssh.connect(
            "127.0.0.1",
            fake_host.port,
            tunnel=TcpConnector(given, on_banner=on_banner),
            config=None,
            known_hosts=None,
            client_keys=None,
        )

    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with asyncio.timeout(30):
        connecting = asyncio.create_task(connect())
        await fake_host.called.wait()
        if way != "silent":
            fake_host.writer.write(b"SSH-2.0-first\r\n")
            await asked.wait()
        leave.set()
        with pytest.raises((TimeoutError, UsageError)):
            await connecting
        await fake_host.reader.read()
    del connecting
    gc.collect()
    assert complaints == []


class RecordingSocket:
    def __init__(self) -> None:
        self.options: list[tuple[int, int, int]] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.options.append((level, option, value))


class RecordingTransport(asyncio.Transport):
    """Records writes and their number."""

    def __init__(self) -> None:
        self.socket = RecordingSocket()
        super().__init__({"socket": self.socket})
        self.writes: list[bytes] = []
        self.is_closed = False
        self.is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.owner = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


async def test_data_before_the_banner_is_limited() -> None:
    sink, owner = RecordingTransport(), OwnerProtocol()
    buffer = tcp_connection._BannerBuffer(owner)
    buffer.connection_made(sink)
    buffer.data_received(b"x" * tcp_connection._BUFFER_BYTES_MAX)
    assert not sink.is_paused and not buffer.banner_received.is_set()
    buffer.data_received(b"x")
    assert sink.is_paused and buffer.banner_received.is_set()
    assert owner.got == b""
    buffer.release_buffered()
    assert not sink.is_paused
    assert len(owner.got) == tcp_connection._BUFFER_BYTES_MAX + 1


@pytest.mark.parametrize("before", [b"", b"one line\r\nno SSH- here\n"])
async def test_banner_is_recognized(before: bytes) -> None:
    buffer = tcp_connection._BannerBuffer(OwnerProtocol())
    buffer.connection_made(RecordingTransport())
    for letter in before + b"SSH-":
        assert not buffer.banner_received.is_set()
        buffer.data_received(bytes([letter]))
    assert buffer.banner_received.is_set()


async def test_first_segments_are_acknowledged_immediately() -> None:
    sink, owner = RecordingTransport(), OwnerProtocol()
    buffer = tcp_connection._BannerBuffer(owner)
    buffer.connection_made(sink)
    buffer.data_received(b"first")
    buffer.release_buffered()
    for number in range(tcp_connection._QUICKACK_SEGMENTS_MAX):
        assert not hasattr(sink, "owner"), number
        buffer.data_received(b".")
    assert sink.owner is owner
    assert owner.got == b"first" + b"." * tcp_connection._QUICKACK_SEGMENTS_MAX
    at_once = (socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    assert sink.socket.options == [at_once] * (1 + tcp_connection._QUICKACK_SEGMENTS_MAX)


async def test_flow_control_and_end_reach_the_owner_through_the_buffer() -> None:
    calls: list[str] = []

    class RecordingOwner(OwnerProtocol):
        def pause_writing(self) -> None:
            calls.append("pause")

        def resume_writing(self) -> None:
            calls.append("resume")

        def eof_received(self) -> bool:
            calls.append("end")
            return True

    buffer = tcp_connection._BannerBuffer(RecordingOwner())
    buffer.connection_made(RecordingTransport())
    assert buffer.eof_received() is None
    buffer.release_buffered()
    buffer.pause_writing()
    buffer.resume_writing()
    assert buffer.eof_received() is True
    assert calls == ["pause", "resume", "end"]


async def test_disconnect_before_release_reaches_the_owner() -> None:
    owner = OwnerProtocol()
    buffer = tcp_connection._BannerBuffer(owner)
    buffer.connection_made(RecordingTransport())
    buffer.connection_lost(None)
    await buffer.banner_received.wait()
    assert not owner.lost.is_set()
    buffer.release_buffered()
    assert owner.lost.is_set()


async def test_writes_of_one_loop_iteration_are_coalesced_in_order() -> None:
    sink = RecordingTransport()
    transport = tcp_connection._CoalescingTransport(sink)
    for part in (b"a", b"b", b"c"):
        transport.write(part)
    assert sink.writes == []
    await asyncio.sleep(0)
    transport.write(b"d")
    await asyncio.sleep(0)
    assert sink.writes == [b"abc", b"d"]


async def test_uvloop_error_after_a_disconnect_is_ignored() -> None:
    class Closed(RecordingTransport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            raise RuntimeError("the handler is closed")

    tcp_connection._CoalescingTransport(Closed()).write(b"x" * (tcp_connection._BUFFER_BYTES_MAX + 1))


async def test_nothing_is_written_after_a_disconnect() -> None:
    sink = RecordingTransport()
    sink.close()
    tcp_connection._CoalescingTransport(sink).write(b"x" * (tcp_connection._BUFFER_BYTES_MAX + 1))
    assert sink.writes == []


async def test_large_writes_are_sent_immediately() -> None:
    sink = RecordingTransport()
    transport = tcp_connection._CoalescingTransport(sink)
    transport.write(b"x" * tcp_connection._BUFFER_BYTES_MAX)
    transport.write(b"y")
    assert sink.writes == [b"x" * tcp_connection._BUFFER_BYTES_MAX + b"y"]
    await asyncio.sleep(0)
    assert len(sink.writes) == 1


async def test_close_flushes_pending_writes() -> None:
    sink = RecordingTransport()
    transport = tcp_connection._CoalescingTransport(sink)
    transport.write(b"last words")
    transport.close()
    assert (sink.writes, sink.is_closed) == ([b"last words"], True)


@pytest.mark.parametrize(
    ("line", "straight"),
    [
        ("  User someone\n", True),
        ("  ProxyJump gate\n", False),
        ("  ProxyCommand nc %h %p\n", False),
        ("  CanonicalizeHostname yes\n", False),
        ("Match final\n  ProxyJump gate\n", False),
    ],
)
async def test_proxied_connections_are_left_to_asyncssh(tmp_path: Path, line: str, straight: bool) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host gpu1\n{line}")
    assert TcpConnector.is_direct(await make_options(config)) is straight
