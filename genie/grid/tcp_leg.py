"""The way to a host without a jump host or a proxy: TCP that asks for leave when the host has spoken.

asyncssh takes anything with `create_connection` as a tunnel; this one is as long as a socket. It differs from
asyncssh's own in two things. Hosts that hang, or are not there, hold no place of the pool. And what is
written in one turn of the loop leaves in one piece: asyncssh writes every packet by itself, with an empty
one before it, and each costs both ends a call of the system and a wake-up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import asyncssh

_BYTES_MAX = 1 << 16


class TcpLeg:
    """For one connection. `reached` is awaited when the host has spoken, before anyone listens to it."""

    def __init__(
        self, options: asyncssh.SSHClientConnectionOptions, *, reached: Callable[[], Awaitable[object]]
    ) -> None:
        self._options = options
        self._reached = reached

    @staticmethod
    def leads_to(options: asyncssh.SSHClientConnectionOptions) -> bool:
        """False where the configuration names another way, or may yet do so once the host's name is known."""
        other_way = options.tunnel or options.proxy_command
        return not (other_way or options.canonicalize_hostname or options.config.has_match_final())

    async def create_connection(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """As asyncssh calls it. Raises OSError."""
        transport, held = await asyncio.get_running_loop().create_connection(
            lambda: _Held(factory()),
            host,
            port,
            family=self._options.family,
            local_addr=self._options.local_addr,
        )
        try:
            await held.spoken.wait()
            await self._reached()
        except BaseException:
            transport.abort()
            raise
        held.let_go()
        return transport, held.owner


class _Held(asyncio.Protocol):
    """Lets the owner say what it says first, and keeps the host's answer from it until it is let go."""

    def __init__(self, owner: asyncio.Protocol) -> None:
        self.owner = owner
        self.spoken = asyncio.Event()
        self._said = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.owner.connection_made(_Gathering(self._transport))

    def data_received(self, data: bytes) -> None:
        self.spoken.set()
        self._said += data
        if len(self._said) > _BYTES_MAX and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.spoken.set()
        self.owner.connection_lost(exc)

    def let_go(self) -> None:
        if self._transport is not None:
            self._transport.set_protocol(self.owner)
            self.owner.data_received(bytes(self._said))
            self._transport.resume_reading()


class _Gathering(asyncio.Transport):
    """Keeps what is written until the loop's next turn, at most _BYTES_MAX of it."""

    def __init__(self, inner: asyncio.Transport) -> None:
        super().__init__()
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes | bytearray | memoryview[Any]] = []
        self._bytes = 0

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes > _BYTES_MAX:
            self._flush()

    def _flush(self) -> None:
        if self._parts:
            whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts, self._bytes = [], 0
            self._inner.write(whole)

    def close(self) -> None:
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)
