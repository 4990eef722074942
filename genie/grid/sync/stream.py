"""A transfer to one node, on an SSH channel of its own.

The receiving program (remote/sync.py: receive_change_main) is sent first. Flow control is the SSH window:
`send` waits until the node has accepted most of the data. Frames are made by pack.py.
"""

from __future__ import annotations

import asyncio
import functools
import json
import zlib
from collections.abc import Mapping
from typing import Any

import asyncssh

from genie.errors import ConnectionLostError, DeadlineError, GenieError, NodeRefusedError, ProtocolError
from genie.grid.remote import core
from genie.grid.ssh.node_helper import list_module_with_dependencies, read_remote_source
from genie.grid.ssh.pool import NodeConnection
from genie.grid.ssh.target import format_error

# One line: csh allows no newline in quotes. Reads exactly the program; the rest of stdin is its input.
_BOOT_COMMAND = (
    "exec python3 -ISc \"import sys,zlib,os;f=os.fdopen(0,'rb',0,closefd=False);n=int(f.readline());"
    "b=bytearray();list(iter(lambda:len(b)<n and b.extend(f.read(n-len(b)) or sys.exit(1)),False));"
    'exec(zlib.decompress(b))"'
)
_REPLY_BYTES_MAX = 1 << 20


class SyncStream:
    """One transfer. Each operation times out after `stall_s` without progress."""

    def __init__(
        self, link: NodeConnection, process: asyncssh.SSHClientProcess[bytes], *, stall_s: float
    ) -> None:
        self._node_name = link.name
        self._receiver_process = process
        self._stall_timeout_s = stall_s

    @classmethod
    async def open(cls, link: NodeConnection, args: Mapping[str, Any], *, stall_s: float) -> SyncStream:
        boot = _encode_receiver_source()
        head = b"%d\n" % len(boot) + boot + json.dumps(dict(args)).encode() + b"\n"
        try:
            async with asyncio.timeout(stall_s):
                process = await link.connection.create_process(
                    _BOOT_COMMAND, encoding=None, stderr=asyncssh.DEVNULL
                )
            process.stdin.write(head)
        except TimeoutError:
            raise DeadlineError(
                f"node {link.name}: opening a session timed out after {stall_s:g} s"
            ) from None
        except (asyncssh.Error, OSError) as error:
            raise ConnectionLostError(
                f"node {link.name}: could not open a session: {format_error(error)}"
            ) from error
        return cls(link, process, stall_s=stall_s)

    async def send(self, data: bytes) -> None:
        """Raises the error that the node returned, ConnectionLostError or DeadlineError."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                self._receiver_process.stdin.write(data)
                await self._receiver_process.stdin.drain()
        except TimeoutError:
            raise DeadlineError(
                f"node {self._node_name}: the transfer stalled for {self._stall_timeout_s:g} s"
            ) from None
        except (asyncssh.Error, OSError) as error:
            raise await self._error_from_node_or_connection(error) from error

    async def read_reply(self, *, timeout_s: float) -> Any:
        """Waits for the reply of the node after everything was sent."""
        try:
            async with asyncio.timeout(timeout_s):
                text = await read_all_and_keep_tail(self._receiver_process.stdout)
        except TimeoutError:
            raise DeadlineError(
                f"node {self._node_name}: no reply to a transfer within {timeout_s:g} s"
            ) from None
        except (asyncssh.Error, OSError) as error:
            raise ConnectionLostError(
                f"node {self._node_name}: connection lost: {format_error(error)}"
            ) from error
        return self._parse_reply(text)

    def close(self) -> None:
        self._receiver_process.close()

    async def _error_from_node_or_connection(self, error: Exception) -> GenieError:
        try:
            await self.read_reply(timeout_s=min(self._stall_timeout_s, 5.0))
        except GenieError as answered:
            return answered
        return ConnectionLostError(f"node {self._node_name}: connection lost: {format_error(error)}")

    def _parse_reply(self, text: bytes) -> Any:
        _, magic, body = text.partition(core.FIRST_REPLY_MAGIC)
        if not magic:
            raise ConnectionLostError(f"node {self._node_name}: connection lost during a transfer")
        try:
            message = json.loads(body)
            if "error" not in message:
                return message["ok"]
            reason, why = str(message["error"]["reason"]), str(message["error"]["text"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ProtocolError(f"node {self._node_name}: invalid reply to a transfer") from None
        raise NodeRefusedError(f"node {self._node_name}: {why}", reason=reason)


async def read_all_and_keep_tail(reader: asyncssh.SSHReader[bytes]) -> bytes:
    """Reads to the end and returns the last part: startup files of the shell may print something first."""
    found = b""
    while piece := await reader.read(_REPLY_BYTES_MAX):
        found = (found + piece)[-_REPLY_BYTES_MAX:]
    return found


@functools.cache
def _encode_receiver_source() -> bytes:
    package = "genie.grid.remote"
    lines = [
        "import sys,types",
        f"m=types.ModuleType({package + '.core'!r});sys.modules[m.__name__]=m",
        f"exec(compile({read_remote_source('core')!r},m.__name__,'exec'),m.__dict__)",
    ]
    for module in list_module_with_dependencies("sync"):
        if module != "core":
            lines.append(
                f"m.load_module_from_source({package + '.' + module!r},{read_remote_source(module)!r})"
            )
    lines.append(f"sys.modules[{package + '.sync'!r}].receive_change_main()")
    return zlib.compress("\n".join(lines).encode())
