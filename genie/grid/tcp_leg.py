"""The way to a host without a jump host or a proxy: TCP that asks for leave when the host has spoken.

asyncssh takes anything with `create_connection` as a tunnel; this one is as long as a socket. It differs from
asyncssh's own in three things. Hosts that hang, or are not there, hold no place of the pool. What is written
in one turn of the loop leaves in one piece: asyncssh writes every packet by itself, with an empty one before
it, and each costs both ends a call of the system and a wake-up. And the first receipts are acknowledged at
once, which saves every connection 40 ms.
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

_BYTES_MAX = 1 << 16
_VERSION = b"SSH-"
"""Begins the line by which a host says that it is an SSH server. Other lines may come before it."""
_PROMPT_RECEIPTS = 32
"""More than a login and the start of a first command take; later, servers wait for no acknowledgement."""


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
        """As asyncssh calls it, which must have no limit of its own: waiting for leave takes none of it.

        Raises OSError, and TimeoutError for a host that has not spoken within ConnectTimeout.
        """
        limit = asyncio.timeout(self._options.connect_timeout)
        try:
            async with limit:
                transport, held = await self._open(factory, host, port)
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
        try:
            await self._reached()
        except BaseException:
            transport.abort()
            raise
        held.let_go()
        return transport, held.owner

    async def _open(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, _Held]:
        transport, held = await asyncio.get_running_loop().create_connection(
            lambda: _Held(factory()),
            host,
            port,
            family=self._options.family,
            local_addr=self._options.local_addr,
        )
        try:
            await held.spoken.wait()
        except BaseException:
            transport.abort()
            raise
        return transport, held


class _Held(asyncio.Protocol):
    """Lets the owner say what it says first, and keeps the host's answer from it until it is let go.

    One that never is, because nobody waits for it any more, is not told of the end either.
    Stays between the two for the first receipts, and acknowledges each at once. Until a session is open, an
    SSH server waits for that before it sends the next small packet, and the system would take 40 ms for it.
    """

    def __init__(self, owner: asyncio.Protocol) -> None:
        self.owner = owner
        self.spoken = asyncio.Event()
        self._said: bytearray | None = bytearray()
        self._lost: Exception | None = None
        self._prompt = _PROMPT_RECEIPTS
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.owner.connection_made(_Gathering(self._transport))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None, "data without a connection"
        _acknowledge(self._transport)
        if self._said is not None:
            self._hold(data)
            return
        self._prompt -= 1
        if not self._prompt:
            self._transport.set_protocol(self.owner)
        self.owner.data_received(data)

    def _hold(self, data: bytes) -> None:
        """Some hosts keep callers busy with a line now and then, and never come to what SSH begins with."""
        assert self._said is not None and self._transport is not None, "held, and connected"
        self._said += data
        too_much = len(self._said) > _BYTES_MAX
        if too_much:
            self._transport.pause_reading()
        if too_much or self._said.startswith(_VERSION) or b"\n" + _VERSION in self._said:
            self.spoken.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.spoken.set()
        self._lost = exc
        if self._said is None:
            self.owner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self.owner.eof_received() if self._said is None else None

    def pause_writing(self) -> None:
        self.owner.pause_writing()

    def resume_writing(self) -> None:
        self.owner.resume_writing()

    def let_go(self) -> None:
        assert self._said is not None, "it is let go once"
        said, self._said = bytes(self._said), None
        if self._transport is None:
            self.owner.connection_lost(self._lost)
            return
        self.owner.data_received(said)
        self._transport.resume_reading()


def _acknowledge(transport: asyncio.Transport) -> None:
    option = getattr(socket, "TCP_QUICKACK", None)  # Linux has it; it holds until the next receipt or so
    if option is not None:
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, 1)


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
            if not self._inner.is_closing():  # else asyncio would complain of each
                with contextlib.suppress(RuntimeError):  # uvloop's, where the host has just hung up
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
