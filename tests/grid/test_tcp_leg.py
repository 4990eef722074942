"""The way to a host: what it says before it has an owner, and what leaves together."""

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
from genie.grid import tcp_leg
from genie.grid.tcp_leg import TcpLeg


class Owner(asyncio.Protocol):
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


class Host:
    """A server that takes one connection and does what a test says."""

    def __init__(self) -> None:
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.called = asyncio.Event()
        self.port = 0

    async def took(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.called.set()


@pytest_asyncio.fixture
async def host() -> AsyncIterator[Host]:
    host = Host()
    server = await asyncio.start_server(host.took, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    async with server:
        yield host
        if host.called.is_set():
            host.writer.close()


async def options(config: Path | None = None) -> asyncssh.SSHClientConnectionOptions:
    named = [] if config is None else [str(config)]
    return await asyncssh.SSHClientConnectionOptions.construct(host="gpu1", config=named, client_keys=None)


async def connected(host: Host, leave: asyncio.Event) -> tuple[asyncio.Task[Owner], asyncio.Event]:
    """The attempt, and an event for when it asked for leave."""
    asked = asyncio.Event()

    async def reached() -> None:
        asked.set()
        await leave.wait()

    leg = TcpLeg(await options(), reached=reached)

    async def connect() -> Owner:
        owner = Owner()
        _, given = await leg.create_connection(lambda: owner, "127.0.0.1", host.port)
        assert given is owner
        return owner

    return asyncio.create_task(connect()), asked


async def test_leave_is_asked_when_the_host_has_spoken_and_its_words_reach_the_owner(host: Host) -> None:
    leave = asyncio.Event()
    async with asyncio.timeout(30):
        connecting, asked = await connected(host, leave)
        await host.called.wait()
        assert await host.reader.readline() == b"SSH-2.0-ours\r\n"
        assert not asked.is_set()
        host.writer.write(b"SSH-2.0-first\r\n")
        await asked.wait()
        host.writer.write(b"more")
        await host.writer.drain()
        leave.set()
        owner = await connecting
        host.writer.close()
        await owner.lost.wait()
    assert bytes(owner.got) == b"SSH-2.0-first\r\nmore"


async def test_who_gives_up_waiting_for_leave_leaves_no_connection(host: Host) -> None:
    async with asyncio.timeout(30):
        connecting, asked = await connected(host, asyncio.Event())
        await host.called.wait()
        host.writer.write(b"SSH-2.0-first\r\n")
        await asked.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert await host.reader.read() == b"SSH-2.0-ours\r\n"


async def test_a_host_that_is_silent_for_connect_timeout_is_given_up(host: Host, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host gpu1\n  ConnectTimeout 1\n")

    async def reached() -> None:
        raise AssertionError("it has said nothing")

    leg = TcpLeg(await options(config), reached=reached)
    async with asyncio.timeout(30):
        with pytest.raises(TimeoutError, match="timed out"):
            await leg.create_connection(Owner, "127.0.0.1", host.port)
        await host.called.wait()
        assert await host.reader.read() == b"SSH-2.0-ours\r\n"


@pytest.mark.parametrize("way", ["silent", "no leave"])
async def test_what_nobody_waits_for_any_more_complains_to_no_one(host: Host, way: str) -> None:
    asked, leave = asyncio.Event(), asyncio.Event()

    async def reached() -> None:
        asked.set()
        await leave.wait()
        raise UsageError("no leave")

    async def connect() -> None:
        given = await options()
        given.connect_timeout = 0.05 if way == "silent" else 20
        await asyncssh.connect(
            "127.0.0.1",
            host.port,
            tunnel=TcpLeg(given, reached=reached),
            config=None,
            known_hosts=None,
            client_keys=None,
        )

    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with asyncio.timeout(30):
        connecting = asyncio.create_task(connect())
        await host.called.wait()
        if way != "silent":
            host.writer.write(b"SSH-2.0-first\r\n")
            await asked.wait()
        leave.set()
        with pytest.raises((TimeoutError, UsageError)):
            await connecting
        await host.reader.read()
    del connecting
    gc.collect()
    assert complaints == []


class Socket:
    def __init__(self) -> None:
        self.options: list[tuple[int, int, int]] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self.options.append((level, option, value))


class Sink(asyncio.Transport):
    """Counts what is written to it, and how often."""

    def __init__(self) -> None:
        self.socket = Socket()
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


async def test_of_words_without_end_only_so_many_are_kept() -> None:
    sink, owner = Sink(), Owner()
    held = tcp_leg._Held(owner)
    held.connection_made(sink)
    held.data_received(b"x" * tcp_leg._BYTES_MAX)
    assert not sink.is_paused and not held.spoken.is_set()
    held.data_received(b"x")
    assert sink.is_paused and held.spoken.is_set()
    assert owner.got == b""
    held.let_go()
    assert not sink.is_paused
    assert len(owner.got) == tcp_leg._BYTES_MAX + 1


@pytest.mark.parametrize("before", [b"", b"one line\r\nno SSH- here\n"])
async def test_a_host_has_spoken_when_it_says_that_it_is_an_ssh_server(before: bytes) -> None:
    held = tcp_leg._Held(Owner())
    held.connection_made(Sink())
    for letter in before + b"SSH-":
        assert not held.spoken.is_set()
        held.data_received(bytes([letter]))
    assert held.spoken.is_set()


async def test_the_first_receipts_are_acknowledged_at_once_and_later_ones_go_straight_to_the_owner() -> None:
    sink, owner = Sink(), Owner()
    held = tcp_leg._Held(owner)
    held.connection_made(sink)
    held.data_received(b"first")
    held.let_go()
    for number in range(tcp_leg._PROMPT_RECEIPTS):
        assert not hasattr(sink, "owner"), number
        held.data_received(b".")
    assert sink.owner is owner
    assert owner.got == b"first" + b"." * tcp_leg._PROMPT_RECEIPTS
    at_once = (socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    assert sink.socket.options == [at_once] * (1 + tcp_leg._PROMPT_RECEIPTS)


async def test_the_owner_is_told_to_pause_and_of_the_end_also_through_what_holds_it() -> None:
    told: list[str] = []

    class Told(Owner):
        def pause_writing(self) -> None:
            told.append("pause")

        def resume_writing(self) -> None:
            told.append("resume")

        def eof_received(self) -> bool:
            told.append("end")
            return True

    held = tcp_leg._Held(Told())
    held.connection_made(Sink())
    assert held.eof_received() is None
    held.let_go()
    held.pause_writing()
    held.resume_writing()
    assert held.eof_received() is True
    assert told == ["pause", "resume", "end"]


async def test_the_owner_learns_of_a_host_that_hangs_up_before_it_was_let_go() -> None:
    owner = Owner()
    held = tcp_leg._Held(owner)
    held.connection_made(Sink())
    held.connection_lost(None)
    await held.spoken.wait()
    assert not owner.lost.is_set()
    held.let_go()
    assert owner.lost.is_set()


async def test_what_is_written_in_one_turn_leaves_together_and_in_order() -> None:
    sink = Sink()
    gathering = tcp_leg._Gathering(sink)
    for part in (b"a", b"b", b"c"):
        gathering.write(part)
    assert sink.writes == []
    await asyncio.sleep(0)
    gathering.write(b"d")
    await asyncio.sleep(0)
    assert sink.writes == [b"abc", b"d"]


async def test_what_uvloop_says_of_a_host_that_has_just_hung_up_is_no_error() -> None:
    class Closed(Sink):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            raise RuntimeError("the handler is closed")

    tcp_leg._Gathering(Closed()).write(b"x" * (tcp_leg._BYTES_MAX + 1))


async def test_nothing_is_written_to_a_host_that_is_gone() -> None:
    sink = Sink()
    sink.close()
    tcp_leg._Gathering(sink).write(b"x" * (tcp_leg._BYTES_MAX + 1))
    assert sink.writes == []


async def test_much_does_not_wait_for_the_turn_to_end() -> None:
    sink = Sink()
    gathering = tcp_leg._Gathering(sink)
    gathering.write(b"x" * tcp_leg._BYTES_MAX)
    gathering.write(b"y")
    assert sink.writes == [b"x" * tcp_leg._BYTES_MAX + b"y"]
    await asyncio.sleep(0)
    assert len(sink.writes) == 1


async def test_closing_sends_what_was_written_before() -> None:
    sink = Sink()
    gathering = tcp_leg._Gathering(sink)
    gathering.write(b"last words")
    gathering.close()
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
async def test_another_way_of_openssh_s_settings_is_left_to_it(
    tmp_path: Path, line: str, straight: bool
) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host gpu1\n{line}")
    assert TcpLeg.leads_to(await options(config)) is straight
