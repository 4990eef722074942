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
from genie.grid.ssh.target import format_error

_log = logging.getLogger(__name__)

MALFORMED_REPLY_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Exceptions raised while reading a reply that does not have the expected structure."""
_REMOTE_PACKAGE = "genie.grid.remote"
# Portable across login shells: no variable, no backslash, no nested quotes.
_BOOT_COMMAND = (
    'exec python3 -ISc "import sys,zlib;f=sys.stdin.buffer;exec(zlib.decompress(f.read(int(f.readline()))))"'
)
_REMOTE_IMPORT_PATTERN = re.compile(r"^from genie\.grid\.remote(?:\.(\w+))? import ([\w, ]+)$", re.MULTILINE)
_SHELL_OUTPUT_BYTES_MAX = 1 << 16


async def start_helper(connection: asyncssh.SSHClientConnection, name: str) -> HelperSession | None:
    """Starts the helper; returns None if the node has no suitable Python."""
    boot = _encode_helper_source()
    helper = HelperSession(name)
    try:
        channel, _ = await connection.create_session(lambda: helper, _BOOT_COMMAND, encoding=None)
    except asyncssh.ChannelOpenError as error:
        raise UnreachableError(f"node {name}: could not open a session: {error.reason}") from error
    except (asyncssh.Error, OSError) as error:
        raise ConnectionLostError(f"node {name}: connection lost: {format_error(error)}") from error
    try:
        with contextlib.suppress(BrokenPipeError):  # without python3 it may have ended already
            channel.write(b"%d\n" % len(boot) + boot)
        await helper.started
    except BaseException:
        channel.close()
        raise
    if helper.failure is None:
        return helper
    if connection.is_closed():  # not because of its Python
        raise helper.failure
    channel.close()
    _log.info(
        "could not start the Python helper on a node; using shell commands",
        extra={"node": name, "why": helper.shell_output_text()},
    )
    return None


@cache
def _encode_helper_source() -> bytes:
    name = f"{_REMOTE_PACKAGE}.core"
    text = read_remote_source("core")
    prelude = f"import sys,types;m=types.ModuleType({name!r});sys.modules[{name!r}]=m\n"
    run = f"exec(compile({text!r},{name!r},'exec'),m.__dict__);m.main()\n"
    return zlib.compress((prelude + run).encode())


@cache
def read_remote_source(module: str) -> str:
    """Returns the source of a module of remote/."""
    return resources.files(_REMOTE_PACKAGE).joinpath(f"{module}.py").read_text("utf-8")


@cache
def list_module_with_dependencies(module: str) -> tuple[str, ...]:
    """Returns a module of remote/ and the modules it imports, in load order."""
    found: list[str] = []
    for whole, names in _REMOTE_IMPORT_PATTERN.findall(read_remote_source(module)):
        for name in [whole] if whole else names.split(","):
            found += [each for each in list_module_with_dependencies(name.strip()) if each not in found]
    return (*found, module)


class HelperSession(asyncssh.SSHClientSession[bytes]):
    """The connection to one helper (remote/core.py), on one channel."""

    def __init__(self, name: str) -> None:
        self._node_name = name
        self._received_bytes = bytearray()
        self._is_magic_seen = False
        self._shell_output = bytearray()
        self._next_request_id = 1
        self._pending_replies: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}
        self._loaded_modules = {"core"}
        self._writable = asyncio.Event()
        self._writable.set()
        self._channel: asyncssh.SSHClientChannel[bytes]
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: GenieError | None = None
        self.python_version = ""

    async def call(
        self, op: str, args: Mapping[str, Any], blob: bytes, *, timeout_s: float
    ) -> tuple[Any, bytes]:
        limit = asyncio.timeout(timeout_s)
        number, self._next_request_id = self._next_request_id, self._next_request_id + 1
        reply: asyncio.Future[tuple[Any, bytes]] = asyncio.get_running_loop().create_future()
        try:
            async with limit:
                await self._writable.wait()
                if self.failure is not None:
                    raise self.failure
                self._pending_replies[number] = reply
                self._send_missing_modules(op.partition(".")[0])
                self._send_request({"id": number, "op": op, "args": args}, blob)
                return await reply
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineError(f"node {self._node_name}: {op} timed out after {timeout_s:g} s") from None
        except OSError as error:  # the channel is closed; connection_lost() follows
            raise ConnectionLostError(
                f"node {self._node_name}: connection lost: {format_error(error)}"
            ) from error
        finally:
            self._pending_replies.pop(number, None)

    def shell_output_text(self) -> str:
        """Returns the output before the first reply, usually an error of the shell."""
        return bytes(self._shell_output[-400:]).decode(errors="replace").strip()

    def _send_missing_modules(self, wanted: str) -> None:
        for module in (wanted,) if wanted in self._loaded_modules else list_module_with_dependencies(wanted):
            if module not in self._loaded_modules:
                self._loaded_modules.add(module)
                text = read_remote_source(module).encode()
                self._send_request(
                    {"id": 0, "op": "load", "args": {"name": f"{_REMOTE_PACKAGE}.{module}"}}, text
                )

    def _send_request(self, message: Mapping[str, Any], blob: bytes) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > core.MESSAGE_JSON_BYTES_MAX or len(blob) > core.MESSAGE_BLOB_BYTES_MAX:
            raise ProtocolError(
                f"the request is too large: {len(body)} bytes of JSON and {len(blob)} bytes of data"
            )
        try:
            self._channel.write(core.MESSAGE_HEADER.pack(len(body), len(blob)) + body + blob)
        except OSError as error:  # the node has closed it; connection_lost() follows
            raise ConnectionLostError(
                f"node {self._node_name}: connection lost: {format_error(error)}"
            ) from error

    # --- called by asyncssh ---

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self._channel = chan

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        if datatype is not None or self.failure is not None:
            self._keep_shell_output(data)
            return
        self._received_bytes += data
        try:
            while self._try_parse_reply():
                pass
        except (ProtocolError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._fail_all_requests(
                ProtocolError(f"node {self._node_name}: invalid reply from its helper: {error}")
            )
            self._channel.close()

    def connection_lost(self, exc: Exception | None) -> None:
        why = format_error(exc) if exc is not None else "the helper has exited"
        self._fail_all_requests(ConnectionLostError(f"node {self._node_name}: connection lost: {why}"))

    def _try_parse_reply(self) -> bool:
        if not self._is_magic_seen:
            return self._try_skip_shell_output()
        if len(self._received_bytes) < core.MESSAGE_HEADER.size:
            return False
        json_bytes, blob_bytes = core.MESSAGE_HEADER.unpack_from(self._received_bytes)
        if json_bytes > core.MESSAGE_JSON_BYTES_MAX or blob_bytes > core.MESSAGE_BLOB_BYTES_MAX:
            raise ProtocolError(
                f"the reply is too large: {json_bytes} bytes of JSON and {blob_bytes} bytes of data"
            )
        end = core.MESSAGE_HEADER.size + json_bytes + blob_bytes
        if len(self._received_bytes) < end:
            return False
        message = json.loads(
            self._received_bytes[core.MESSAGE_HEADER.size : core.MESSAGE_HEADER.size + json_bytes]
        )
        blob = bytes(self._received_bytes[core.MESSAGE_HEADER.size + json_bytes : end])
        del self._received_bytes[:end]
        self._handle_reply(message, blob)
        return True

    def _try_skip_shell_output(self) -> bool:
        start = self._received_bytes.find(core.FIRST_REPLY_MAGIC)
        if start >= 0:
            self._is_magic_seen = True
            del self._received_bytes[: start + len(core.FIRST_REPLY_MAGIC)]
            return True
        if len(self._received_bytes) > _SHELL_OUTPUT_BYTES_MAX:
            raise ProtocolError("the login shell printed too much")
        return False

    def _handle_reply(self, message: dict[str, Any], blob: bytes) -> None:
        if message["id"] == 0:
            self.python_version = str(message["ok"]["python"])
            if not self.started.done():
                self.started.set_result(None)
            return
        reply = self._pending_replies.get(message["id"])
        if reply is None or reply.done():
            return
        # Stays in _pending_replies until the reply is parsed, so that a malformed one fails its caller, too.
        error = message.get("error")
        if error is None:
            reply.set_result((message["ok"], blob))
        else:
            reason, text = str(error["reason"]), str(error["text"])
            reply.set_exception(NodeRefusedError(f"node {self._node_name}: {text}", reason=reason))

    def _keep_shell_output(self, data: bytes) -> None:
        self._shell_output += data
        del self._shell_output[:-_SHELL_OUTPUT_BYTES_MAX]

    def _fail_all_requests(self, error: GenieError) -> None:
        if self.failure is None:
            self.failure = error
            self._keep_shell_output(bytes(self._received_bytes))
            self._received_bytes.clear()
        self._writable.set()
        if not self.started.done():
            self.started.set_result(None)
        for reply in self._pending_replies.values():
            if not reply.done():
                reply.set_exception(self.failure)
        self._pending_replies.clear()
