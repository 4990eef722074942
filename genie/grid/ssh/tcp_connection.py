"""Direct TCP connections (no jump host or proxy) that take a pool slot after the SSH banner.

asyncssh accepts any object with `create_connection` as a tunnel; this one opens a socket. It differs from
asyncssh's own connection in three ways. Hosts that hang or are down occupy no pool slot. Writes of one
iteration of the event loop are coalesced: asyncssh writes every packet separately, preceded by an empty one,
and each costs both ends a system call and a wake-up. The first segments are acknowledged immediately
(TCP_QUICKACK), which saves 40 ms per connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import asyncssh

_BUFFER_BYTES_MAX = 1 << 16
_BANNER_PREFIX = b"SSH-"
"""Start of the SSH banner. Other lines may precede it."""
_QUICKACK_SEGMENTS_MAX = 32
"""Enough for a login and the start of a command; later, servers do not wait for acknowledgements."""


class TcpConnector:
    """For one connection. `on_banner` is awaited after the banner, before asyncssh receives it."""

    def __init__(
        self, options: asyncssh.SSHClientConnectionOptions, *, on_banner: Callable[[], Awaitable[object]]
    ) -> None:
        self._options = options
        self._on_banner = on_banner

    @staticmethod
    def is_direct(options: asyncssh.SSHClientConnectionOptions) -> bool:
        """False if the configuration has a proxy or jump host, or could get one after canonicalization."""
        proxied = options.tunnel or options.proxy_command
        return not (proxied or options.canonicalize_hostname or options.config.has_match_final())

    async def create_connection(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Called by asyncssh, whose own connect timeout must be off: `on_banner` does not count against it.

        Raises OSError, and TimeoutError for a host that sent no banner within ConnectTimeout.
        """
        limit = asyncio.timeout(self._options.connect_timeout)
        try:
            async with limit:
                transport, buffer = await self._open_and_wait_for_banner(factory, host, port)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
        try:
            await self._on_banner()
        except BaseException:
            transport.abort()
            raise
        buffer.release_buffered()
        return transport, buffer.ssh_protocol

    async def _open_and_wait_for_banner(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, _BannerBuffer]:
        transport, buffer = await asyncio.get_running_loop().create_connection(
            lambda: _BannerBuffer(factory()),
            host,
            port,
            family=self._options.family,
            local_addr=self._options.local_addr,
        )
        try:
            await buffer.banner_received.wait()
        except BaseException:
            transport.abort()
            raise
        return transport, buffer


class _BannerBuffer(asyncio.Protocol):
    """Passes writes of `ssh_protocol` through, and buffers received data until `release_buffered`.

    If it is never released, `ssh_protocol` is not notified of the end of the connection either. Stays in
    place for the first segments to acknowledge each immediately: until a session is open, an SSH server waits
    for the acknowledgement before it sends the next small packet, and the kernel would delay it by 40 ms.
    """

    def __init__(self, ssh_protocol: asyncio.Protocol) -> None:
        self.ssh_protocol = ssh_protocol
        self.banner_received = asyncio.Event()
        self._buffered: bytearray | None = bytearray()
        self._connection_error: Exception | None = None
        self._quickacks_left = _QUICKACK_SEGMENTS_MAX
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.ssh_protocol.connection_made(_CoalescingTransport(self._transport))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None, "data without a connection"
        _set_quickack(self._transport)
        if self._buffered is not None:
            self._buffer_until_banner(data)
            return
        self._quickacks_left -= 1
        if not self._quickacks_left:
            self._transport.set_protocol(self.ssh_protocol)
        self.ssh_protocol.data_received(data)

    def _buffer_until_banner(self, data: bytes) -> None:
        """Buffers until the banner. Tarpits send other lines for ever, so the buffer is limited."""
        assert self._buffered is not None and self._transport is not None, "buffering and connected"
        self._buffered += data
        is_full = len(self._buffered) > _BUFFER_BYTES_MAX
        if is_full:
            self._transport.pause_reading()
        if is_full or self._buffered.startswith(_BANNER_PREFIX) or b"\n" + _BANNER_PREFIX in self._buffered:
            self.banner_received.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.banner_received.set()
        self._connection_error = exc
        if self._buffered is None:
            self.ssh_protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self.ssh_protocol.eof_received() if self._buffered is None else None

    def pause_writing(self) -> None:
        self.ssh_protocol.pause_writing()

    def resume_writing(self) -> None:
        self.ssh_protocol.resume_writing()

    def release_buffered(self) -> None:
        assert self._buffered is not None, "released once"
        data, self._buffered = bytes(self._buffered), None
        if self._transport is None:
            self.ssh_protocol.connection_lost(self._connection_error)
            return
        self.ssh_protocol.data_received(data)
        self._transport.resume_reading()


def _set_quickack(transport: asyncio.Transport) -> None:
    # Linux only; not permanent, so it is set after each segment.
    option = getattr(socket, "TCP_QUICKACK", None)
    if option is not None:
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, 1)


class _CoalescingTransport(asyncio.Transport):
    """Coalesces the writes of one event loop iteration, up to _BUFFER_BYTES_MAX."""

    def __init__(self, inner: asyncio.Transport) -> None:
        super().__init__()
        self._wrapped_transport = inner
        self._loop = asyncio.get_running_loop()
        self._pending_parts: list[bytes | bytearray | memoryview[Any]] = []
        self._pending_bytes = 0

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._pending_parts:
            self._loop.call_soon(self._flush)
        self._pending_parts.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes > _BUFFER_BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        if self._pending_parts:
            whole = self._pending_parts[0] if len(self._pending_parts) == 1 else b"".join(self._pending_parts)
            self._pending_parts, self._pending_bytes = [], 0
            if not self._wrapped_transport.is_closing():  # otherwise asyncio logs a warning for each write
                # RuntimeError: uvloop raises it when the host has just disconnected.
                with contextlib.suppress(RuntimeError):
                    self._wrapped_transport.write(whole)

    def close(self) -> None:
        self._flush()
        self._wrapped_transport.close()

    def abort(self) -> None:
        self._wrapped_transport.abort()

    def is_closing(self) -> bool:
        return self._wrapped_transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._wrapped_transport.get_extra_info(name, default)
