"""The connection pool: one shared connection per node, with a limit and keepalives.

`SshPool.connect(name)` yields a `NodeConnection`, which stays open while it is used. Each connection has one
helper (node_helper.py) that serves requests without starting a process on the node; a node without a usable
Python runs plain commands instead. Host keys are always verified, and ~/.ssh/config decides how a host is
reached (target.py).

Does not retry requests: one whose connection is lost raises, and the caller decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import asyncssh

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    ProtocolError,
    UnreachableError,
    UsageError,
)
from genie.grid.backoff import retry
from genie.grid.grid_file import GridFile, GridNode
from genie.grid.ssh.node_helper import HelperSession, start_helper
from genie.grid.ssh.target import (
    KnownHostsCache,
    format_error,
    format_ssh_command,
    format_target_address,
    make_connect_error,
    resolve_ssh_target,
)
from genie.grid.ssh.tcp_connection import TcpConnector
from genie.processes.tasks import pause_timeout, run_all_concurrently, wait_first_completed

_log = logging.getLogger(__name__)

_COMMAND_OUTPUT_BYTES_MAX = 64 << 20
_READ_CHUNK_BYTES = 1 << 16
_KEEPALIVE_INTERVAL_S = 5.0
_KEEPALIVES_MISSED_MAX = 3
_CLOSE_CONNECTION_TIMEOUT_S = 2.0

AsyncCallback = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class CommandResult:
    """Result of a plain command. `exit_code` is 128+n after signal n, as in a shell."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class NodeConnection:
    """The connection to one node. Requests may be concurrent."""

    def __init__(self, node: GridNode, connection: asyncssh.SSHClientConnection) -> None:
        self.node = node
        self.connection = connection
        self._helper: HelperSession | None = None
        self._was_helper_start_tried = False
        self.active_use_count = 0

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def has_helper(self) -> bool:
        """False if the node has no usable Python or the helper was not started yet."""
        return self._helper is not None

    @property
    def python_version(self) -> str:
        """The Python version of the node; '' without a helper."""
        return self._helper.python_version if self._helper else ""

    @property
    def is_open(self) -> bool:
        broken = self._helper is not None and self._helper.failure is not None
        return not broken and not self.connection.is_closed()

    async def call(
        self, op: str, args: Mapping[str, Any] | None = None, blob: bytes = b"", *, timeout_s: float
    ) -> tuple[Any, bytes]:
        """Sends the request `op` (MODULE.NAME, a module of remote/) to the helper.

        Raises NodeRefusedError if the node could not execute it; ConnectionLostError and DeadlineError if
        that is unknown.
        """
        assert self._helper is not None, "check has_helper first"
        return await self._helper.call(op, args or {}, blob, timeout_s=timeout_s)

    async def run_command(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        """Runs a quoted shell command to completion. Raises as `call` does."""
        try:
            async with asyncio.timeout(timeout_s):
                process = await self.connection.create_process(command, encoding=None)
                try:
                    out, err = await _send_stdin_and_read_output(process, stdin, name=self.name)
                finally:
                    process.close()
        except TimeoutError:
            raise DeadlineError(f"node {self.name}: a command timed out after {timeout_s:g} s") from None
        except (asyncssh.Error, OSError) as error:
            raise ConnectionLostError(f"node {self.name}: connection lost: {format_error(error)}") from error
        if process.exit_status is None and process.exit_signal is None:
            raise ConnectionLostError(f"node {self.name}: connection lost while a command was running")
        return CommandResult(_shell_exit_code(process), out, err)

    async def start_helper(self) -> None:
        """Starts the helper once per connection; `has_helper` stays False if the node cannot run it."""
        if not self._was_helper_start_tried:
            self._helper = await start_helper(self.connection, self.name)
            self._was_helper_start_tried = True

    async def close(self) -> None:
        self.connection.close()
        try:
            async with asyncio.timeout(_CLOSE_CONNECTION_TIMEOUT_S):
                await self.connection.wait_closed()
        except TimeoutError:
            self.connection.abort()


class SshPool:
    """The connections of this process. An async context manager; exiting it closes them."""

    def __init__(self, file: GridFile, *, ssh_config: Path) -> None:
        self._grid_file = file
        self._ssh_config = ssh_config.expanduser()
        self._connection_by_node: dict[str, NodeConnection] = {}
        self._connect_lock_by_node: dict[str, _ConnectLock] = {}
        self._opening_connection_count = 0
        self._slot_freed = asyncio.Event()
        self._is_closed = False
        self._known_hosts_cache = KnownHostsCache()

    async def __aenter__(self) -> SshPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._notify_slot_freed()
        links, self._connection_by_node = list(self._connection_by_node.values()), {}
        await asyncio.gather(*(link.close() for link in links))

    @property
    def nodes_with_open_connection(self) -> list[str]:
        return [name for name, link in self._connection_by_node.items() if link.is_open]

    @contextlib.asynccontextmanager
    async def connect(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
        without_helper: bool = False,
        before_login: AsyncCallback | None = None,
    ) -> AsyncIterator[NodeConnection]:
        """Yields the connection to the node, opened if needed; it stays open afterwards.

        `timeout_s` is per connection attempt and includes waiting for a pool slot and for a concurrent
        attempt to the same node. With `without_helper`, the helper is not started: for a single plain command
        it costs the node more than it saves. `before_login` is awaited in each attempt after the node has
        sent its SSH banner and before the login, and does not count against the timeout, so that callers that
        wait in it are not delayed by unreachable nodes. It is awaited again if the pool closed the connection
        meanwhile, and cancelled when another caller requests the same node.
        Raises UnreachableError, HostKeyUnknownError, HostKeyChangedError or LoginRefusedError.
        """
        node = self._grid_file.node(name)
        link = await self._acquire_connection_with_retries(
            node,
            timeout_s=timeout_s,
            retries=retries,
            without_helper=without_helper,
            before_login=before_login,
        )
        try:
            yield link
        finally:
            link.active_use_count -= 1
            self._notify_slot_freed()

    async def _acquire_connection_with_retries(
        self,
        node: GridNode,
        *,
        timeout_s: float | None,
        retries: int | None,
        without_helper: bool,
        before_login: AsyncCallback | None,
    ) -> NodeConnection:
        attempt_s = timeout_s if timeout_s is not None else self._grid_file.ssh.connect_timeout

        def log(error: Exception, wait_s: float) -> None:
            why = {"node": node.name, "pause_s": round(wait_s, 2), "why": str(error)}
            _log.info("retrying the connection to a node", extra=why)

        @retry(
            max_retries=retries if retries is not None else self._grid_file.ssh.max_retries,
            when=(UnreachableError, ConnectionLostError, DeadlineError),
            on_retry=log,
        )
        async def acquire() -> NodeConnection:
            return await self._acquire_connection(
                node, timeout_s=attempt_s, without_helper=without_helper, before_login=before_login
            )

        return await acquire()

    async def _acquire_connection(
        self, node: GridNode, *, timeout_s: float, without_helper: bool, before_login: AsyncCallback | None
    ) -> NodeConnection:
        limit = asyncio.timeout(timeout_s)
        connect_lock = self._connect_lock_by_node.setdefault(node.name, _ConnectLock())

        async def run_before_login() -> None:
            if before_login is not None:
                with pause_timeout(limit):
                    await wait_first_completed(before_login(), connect_lock.has_waiters.wait())

        try:
            async with limit, connect_lock.hold():
                link = await self._get_or_open_connection(node, run_before_login)
                link.active_use_count += 1
                try:
                    if not without_helper:
                        await link.start_helper()
                except BaseException:
                    link.active_use_count -= 1
                    self._notify_slot_freed()
                    raise
                return link
        except TimeoutError:
            if not limit.expired():
                raise
            raise UnreachableError(
                f"node {node.name}: connecting timed out after {timeout_s:g} s",
                hint=f"try '{format_ssh_command(node)}', or raise ssh.connect_timeout or ssh.pool_size",
            ) from None

    async def _get_or_open_connection(self, node: GridNode, before_login: AsyncCallback) -> NodeConnection:
        link = self._connection_by_node.get(node.name)
        if link is not None and link.is_open:
            # It stays in the pool meanwhile: its slot may be needed, and this task may be cancelled.
            await before_login()
        link = self._connection_by_node.pop(node.name, None)
        if link is not None and not link.is_open:
            await link.close()
            link = None
        if link is None:
            async with contextlib.AsyncExitStack() as slot:

                async def on_banner() -> None:
                    await before_login()
                    await slot.enter_async_context(self._reserve_slot(node))

                link = NodeConnection(node, await self._connect_by_ssh(node, on_banner))
        if self._is_closed:
            await link.close()
            raise _pool_closed_error()
        self._connection_by_node[node.name] = link  # most recently used
        return link

    @contextlib.asynccontextmanager
    async def _reserve_slot(self, node: GridNode) -> AsyncIterator[None]:
        """Reserves a slot; closes the least recently used idle connection if the pool is full."""
        while (
            not self._is_closed
            and len(self._connection_by_node) + self._opening_connection_count
            >= self._grid_file.ssh.pool_size
        ):
            idle = next(
                (
                    link
                    for link in self._connection_by_node.values()
                    if not link.active_use_count or not link.is_open
                ),
                None,
            )
            if idle is not None:
                del self._connection_by_node[idle.name]
                _log.debug(
                    "the pool is full; closing an idle SSH connection",
                    extra={"node": idle.name, "for_node": node.name},
                )
                await idle.close()
                continue
            await self._slot_freed.wait()
        if self._is_closed:
            raise _pool_closed_error()
        self._opening_connection_count += 1
        try:
            yield
        finally:
            self._opening_connection_count -= 1
            self._notify_slot_freed()  # the slot of a failed connection is free again

    def _notify_slot_freed(self) -> None:
        """Wakes all current waiters; later ones wait for the next event."""
        self._slot_freed.set()
        self._slot_freed = asyncio.Event()

    async def _connect_by_ssh(self, node: GridNode, on_banner: AsyncCallback) -> asyncssh.SSHClientConnection:
        """`on_banner` is awaited after the SSH banner; with a jump host or proxy, before connecting."""
        target = await resolve_ssh_target(
            node, self._grid_file, self._ssh_config, trusted=self._known_hosts_cache
        )
        _log.debug("connecting to a node", extra={"node": node.name, "to": format_target_address(target)})
        arguments: dict[str, Any] = {
            "config": None
        }  # parsed already; parsed twice, every key would be offered twice
        if TcpConnector.is_direct(target.options):
            arguments["tunnel"] = TcpConnector(target.options, on_banner=on_banner)
            arguments["connect_timeout"] = None  # the tunnel enforces it: `on_banner` may take longer
        else:
            arguments["config"] = target.config_files  # for the jump hosts
            await on_banner()
        try:
            return await asyncssh.connect(
                node.name,
                **arguments,
                **target.login_key_arguments,
                options=target.options,
                known_hosts=target.known_hosts,
                encryption_algs=target.ciphers,
                keepalive_interval=_KEEPALIVE_INTERVAL_S,
                keepalive_count_max=_KEEPALIVES_MISSED_MAX,
                login_timeout=0,  # timeout_s is shorter; asyncssh would keep abandoned logins for two minutes
            )
        except (asyncssh.Error, OSError, ValueError) as error:
            raise make_connect_error(target, error) from error


def _pool_closed_error() -> UsageError:
    return UsageError("the connection pool is closed")


class _ConnectLock:
    """Serializes connection attempts to one node. `has_waiters` is set while other callers wait."""

    def __init__(self) -> None:
        self.has_waiters = asyncio.Event()
        self._lock = asyncio.Lock()
        self._waiter_count = 0

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        self._waiter_count += 1
        if self._lock.locked():
            self.has_waiters.set()
        try:
            await self._lock.acquire()
        finally:
            self._waiter_count -= 1
            if not self._waiter_count:
                self.has_waiters.clear()
        try:
            yield
        finally:
            self._lock.release()


async def _send_stdin_and_read_output(
    process: asyncssh.SSHClientProcess[bytes], stdin: bytes, *, name: str
) -> tuple[bytes, bytes]:
    """Sends stdin and reads both output streams, with a limit: a node must not exhaust our memory."""

    async def read_all(reader: asyncssh.SSHReader[bytes]) -> bytes:
        parts = []
        remaining = _COMMAND_OUTPUT_BYTES_MAX
        while data := await reader.read(_READ_CHUNK_BYTES):
            parts.append(data)
            remaining -= len(data)
            if remaining < 0:
                raise ProtocolError(
                    f"node {name}: a command wrote more than {_COMMAND_OUTPUT_BYTES_MAX} bytes"
                )
        return b"".join(parts)

    with contextlib.suppress(BrokenPipeError):  # it may have ended already
        process.stdin.write(stdin)
        process.stdin.write_eof()
    out, err = await run_all_concurrently(map(read_all, (process.stdout, process.stderr)))
    await process.wait_closed()
    return out, err


def _shell_exit_code(done: asyncssh.SSHClientProcess[bytes]) -> int:
    if done.exit_status is not None and done.exit_status >= 0:
        return done.exit_status
    return 128 - done.returncode if done.returncode is not None and done.returncode < 0 else 255
