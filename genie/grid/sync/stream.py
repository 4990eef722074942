"""A change on its way to one node, on a channel of its own beside the helper's.

The program that takes it (remote/sync.py: receive_main) is sent first. SSH's window is the flow control:
`send` waits until the node has taken most of it. Not for: making frames (pack.py).
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
from genie.grid.node_helper import source, with_needs
from genie.grid.remote import core
from genie.grid.ssh_pool import Link
from genie.grid.ssh_target import told

# One line: csh takes no other within quotes. No byte more is read than the program has: the rest is its own.
_BOOT = (
    "exec python3 -ISc \"import sys,zlib,os;f=os.fdopen(0,'rb',0,closefd=False);n=int(f.readline());"
    "b=bytearray();list(iter(lambda:len(b)<n and b.extend(f.read(n-len(b)) or sys.exit(1)),False));"
    'exec(zlib.decompress(b))"'
)
_ANSWER_BYTES_MAX = 1 << 20


class Stream:
    """One transfer. Every wait ends after `stall_s` without progress."""

    def __init__(self, link: Link, process: asyncssh.SSHClientProcess[bytes], *, stall_s: float) -> None:
        self._name = link.name
        self._process = process
        self._stall_s = stall_s

    @classmethod
    async def open(cls, link: Link, args: Mapping[str, Any], *, stall_s: float) -> Stream:
        boot = _boot_text()
        head = b"%d\n" % len(boot) + boot + json.dumps(dict(args)).encode() + b"\n"
        try:
            async with asyncio.timeout(stall_s):
                process = await link.connection.create_process(_BOOT, encoding=None, stderr=asyncssh.DEVNULL)
            process.stdin.write(head)
        except TimeoutError:
            raise DeadlineError(f"node {link.name}: no session within {stall_s:g} s") from None
        except (asyncssh.Error, OSError) as error:
            raise ConnectionLostError(
                f"node {link.name}: no session for a transfer: {told(error)}"
            ) from error
        return cls(link, process, stall_s=stall_s)

    async def send(self, data: bytes) -> None:
        """Raises what the node answered, where it gave up; ConnectionLostError and DeadlineError."""
        try:
            async with asyncio.timeout(self._stall_s):
                self._process.stdin.write(data)
                await self._process.stdin.drain()
        except TimeoutError:
            raise DeadlineError(
                f"node {self._name}: it took nothing of a transfer for {self._stall_s:g} s"
            ) from None
        except (asyncssh.Error, OSError) as error:
            raise await self._why(error) from error

    async def answer(self, *, timeout_s: float) -> Any:
        """What came of it, after all was sent."""
        try:
            async with asyncio.timeout(timeout_s):
                text = await last_words(self._process.stdout)
        except TimeoutError:
            raise DeadlineError(
                f"node {self._name}: no answer to a transfer within {timeout_s:g} s"
            ) from None
        except (asyncssh.Error, OSError) as error:
            raise ConnectionLostError(f"node {self._name}: the connection broke: {told(error)}") from error
        return self._parsed(text)

    def close(self) -> None:
        self._process.close()

    async def _why(self, error: Exception) -> GenieError:
        try:
            await self.answer(timeout_s=min(self._stall_s, 5.0))
        except GenieError as answered:
            return answered
        return ConnectionLostError(f"node {self._name}: the connection broke: {told(error)}")

    def _parsed(self, text: bytes) -> Any:
        _, magic, body = text.partition(core.MAGIC)
        if not magic:
            raise ConnectionLostError(f"node {self._name}: the connection broke in the middle of a transfer")
        try:
            message = json.loads(body)
            if "error" not in message:
                return message["ok"]
            reason, said = str(message["error"]["reason"]), str(message["error"]["text"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ProtocolError(f"node {self._name}: its answer to a transfer is not ours") from None
        raise NodeRefusedError(f"node {self._name}: {said}", reason=reason)


async def last_words(reader: asyncssh.SSHReader[bytes]) -> bytes:
    """The last of what comes until its end: a startup file of the shell may have printed something before."""
    found = b""
    while piece := await reader.read(_ANSWER_BYTES_MAX):
        found = (found + piece)[-_ANSWER_BYTES_MAX:]
    return found


@functools.cache
def _boot_text() -> bytes:
    package = "genie.grid.remote"
    lines = [
        "import sys,types",
        f"m=types.ModuleType({package + '.core'!r});sys.modules[m.__name__]=m",
        f"exec(compile({source('core')!r},m.__name__,'exec'),m.__dict__)",
    ]
    for module in with_needs("sync"):
        if module != "core":
            lines.append(f"m.load({package + '.' + module!r},{source(module)!r})")
    lines.append(f"sys.modules[{package + '.sync'!r}].receive_main()")
    return zlib.compress("\n".join(lines).encode())
