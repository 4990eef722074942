"""The client of the helper on a node (remote/core.py): starts it on a connection and sends it requests.

The operations are in remote/, the connection in pool.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import zlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import asyncssh

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NodeRefusedError,
    ProtocolError,
    UnreachableError,
)
from genie.grid.remote import core
from genie.grid.ssh.target import error_text

_log = logging.getLogger(__name__)

MALFORMED_REPLY_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions raised while reading a reply that does not have the expected structure."""
_REMOTE_PACKAGE = "genie.grid.remote"
# Portable across login shells: no variable, no backslash, no nested quotes.
_BOOT_COMMAND = (
    'exec python3 -ISc "import sys,zlib;f=sys.stdin.buffer;exec(zlib.decompress(f.read(int(f.readline()))))"'
)
_REMOTE_IMPORT = re.compile(r"^from genie\.grid\.remote(?:\.(\w+))? import ([\w, ]+)$", re.MULTILINE)
_NOISE_BYTES_MAX = 1 << 16


async def start_helper(connection: asyncssh.SSHClientConnection, name: str) -> Helper | None:
    """Starts the helper; returns None if the node has no suitable Python."""
    boot = _boot_text()
    helper = Helper(name)
    try:
        channel, _ = await connection.create_session(lambda: helper, _BOOT_COMMAND, encoding=None)
    except asyncssh.ChannelOpenError as error:
        raise UnreachableError(f"node {name}: could not open a session: {error.reason}") from error
    except (asyncssh.Error, OSError) as error:
        raise ConnectionLostError(f"node {name}: connection lost: {error_text(error)}") from error
    try:
        with contextlib.suppress(BrokenPipeError):  # without python3 it may have ended already
            channel.write(b"%d\n" % len(boot) + boot)
        await helper.started
    except BaseException:
        channel.close()
        raise
    if helper.broken is None:
        return helper
    if connection.is_closed():  # not because of its Python
        raise helper.broken
    channel.close()
    _log.info(
        "could not start the Python helper on a node; using shell commands",
        extra={"node": name, "why": helper.noise_text()},
    )
    return None


@cache
def _boot_text() -> bytes:
    name = f"{_REMOTE_PACKAGE}.core"
    text = source("core")
    prelude = f"import sys,types;m=types.ModuleType({name!r});sys.modules[{name!r}]=m\n"
    run = f"exec(compile({text!r},{name!r},'exec'),m.__dict__);m.main()\n"
    return zlib.compress((prelude + run).encode())


@cache
def source(module: str) -> str:
    """Returns the source of a module of remote/."""
    return resources.files(_REMOTE_PACKAGE).joinpath(f"{module}.py").read_text("utf-8")


@cache
def with_dependencies(module: str) -> tuple[str, ...]:
    """Returns a module of remote/ and the modules it imports, in load order."""
    found: list[str] = []
    for whole, names in _REMOTE_IMPORT.findall(source(module)):
        for name in [whole] if whole else names.split(","):
            found += [each for each in with_dependencies(name.strip()) if each not in found]
    return (*found, module)


class Helper(asyncssh.SSHClientSession[bytes]):
    """The connection to one helper (remote/core.py), on one channel."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._buffer = bytearray()
        self._magic_seen = False
        self._noise = bytearray()
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}
        self._loaded = {"core"}
        self._writable = asyncio.Event()
        self._writable.set()
        self._channel: asyncssh.SSHClientChannel[bytes]
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.broken: GenieError | None = None
        self.python = ""

    async def call(
        self, op: str, args: Mapping[str, Any], blob: bytes, *, timeout_s: float
    ) -> tuple[Any, bytes]:
        limit = asyncio.timeout(timeout_s)
        number, self._next_id = self._next_id, self._next_id + 1
        reply: asyncio.Future[tuple[Any, bytes]] = asyncio.get_running_loop().create_future()
        try:
            async with limit:
                await self._writable.wait()
                if self.broken is not None:
                    raise self.broken
                self._waiting[number] = reply
                self._load(op.partition(".")[0])
                self._send({"id": number, "op": op, "args": args}, blob)
                return await reply
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineError(f"node {self._name}: {op} timed out after {timeout_s:g} s") from None
        except OSError as error:  # the channel is closed; connection_lost() follows
            raise ConnectionLostError(f"node {self._name}: connection lost: {error_text(error)}") from error
        finally:
            self._waiting.pop(number, None)

    def noise_text(self) -> str:
        """Returns the output before the first reply, usually an error of the shell."""
        return bytes(self._noise[-400:]).decode(errors="replace").strip()

    def _load(self, wanted: str) -> None:
        for module in (wanted,) if wanted in self._loaded else with_dependencies(wanted):
            if module not in self._loaded:
                self._loaded.add(module)
                text = source(module).encode()
                self._send({"id": 0, "op": "load", "args": {"name": f"{_REMOTE_PACKAGE}.{module}"}}, text)

    def _send(self, message: Mapping[str, Any], blob: bytes) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > core.JSON_BYTES_MAX or len(blob) > core.BLOB_BYTES_MAX:
            raise ProtocolError(
                f"the request is too large: {len(body)} bytes of JSON and {len(blob)} bytes of data"
            )
        try:
            self._channel.write(core.HEADER.pack(len(body), len(blob)) + body + blob)
        except OSError as error:  # the node has closed it; connection_lost() follows
            raise ConnectionLostError(f"node {self._name}: connection lost: {error_text(error)}") from error

    # --- called by asyncssh ---

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self._channel = chan

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        if datatype is not None or self.broken is not None:
            self._keep_noise(data)
            return
        self._buffer += data
        try:
            while self._parse_reply():
                pass
        except (ProtocolError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._fail(ProtocolError(f"node {self._name}: invalid reply from its helper: {error}"))
            self._channel.close()

    def connection_lost(self, exc: Exception | None) -> None:
        why = error_text(exc) if exc is not None else "the helper has exited"
        self._fail(ConnectionLostError(f"node {self._name}: connection lost: {why}"))

    def _parse_reply(self) -> bool:
        if not self._magic_seen:
            return self._skip_noise()
        if len(self._buffer) < core.HEADER.size:
            return False
        json_bytes, blob_bytes = core.HEADER.unpack_from(self._buffer)
        if json_bytes > core.JSON_BYTES_MAX or blob_bytes > core.BLOB_BYTES_MAX:
            raise ProtocolError(
                f"the reply is too large: {json_bytes} bytes of JSON and {blob_bytes} bytes of data"
            )
        end = core.HEADER.size + json_bytes + blob_bytes
        if len(self._buffer) < end:
            return False
        message = json.loads(self._buffer[core.HEADER.size : core.HEADER.size + json_bytes])
        blob = bytes(self._buffer[core.HEADER.size + json_bytes : end])
        del self._buffer[:end]
        self._handle_reply(message, blob)
        return True

    def _skip_noise(self) -> bool:
        start = self._buffer.find(core.MAGIC)
        if start >= 0:
            self._magic_seen = True
            del self._buffer[: start + len(core.MAGIC)]
            return True
        if len(self._buffer) > _NOISE_BYTES_MAX:
            raise ProtocolError("the login shell printed too much")
        return False

    def _handle_reply(self, message: dict[str, Any], blob: bytes) -> None:
        if message["id"] == 0:
            self.python = str(message["ok"]["python"])
            if not self.started.done():
                self.started.set_result(None)
            return
        reply = self._waiting.get(message["id"])
        if reply is None or reply.done():
            return
        # Stays in _waiting until the reply is parsed, so that a malformed one fails its caller, too.
        error = message.get("error")
        if error is None:
            reply.set_result((message["ok"], blob))
        else:
            reason, text = str(error["reason"]), str(error["text"])
            reply.set_exception(NodeRefusedError(f"node {self._name}: {text}", reason=reason))

    def _keep_noise(self, data: bytes) -> None:
        self._noise += data
        del self._noise[:-_NOISE_BYTES_MAX]

    def _fail(self, error: GenieError) -> None:
        if self.broken is None:
            self.broken = error
            self._keep_noise(bytes(self._buffer))
            self._buffer.clear()
        self._writable.set()
        if not self.started.done():
            self.started.set_result(None)
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(self.broken)
        self._waiting.clear()
