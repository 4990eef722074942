"""Connections to the nodes: one for each, shared by all who ask, bounded, kept alive.

`SshPool.use(name)` gives a `Link`; as long as someone uses it, it stays. On the connection runs one
helper (node_helper.py), to which requests go without starting anything on the node; a node without a
usable Python has none, and takes plain commands. Host keys are strict, and ~/.ssh/config has the last
word about how a host is reached (ssh_target.py).

Not for: what is asked of a node (health_check, runner, sync), and starting again what may have begun:
a request whose connection breaks raises, and the caller decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
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
from genie.grid.grid_file import GridFile, GridNode
from genie.grid.node_helper import Helper, start_helper
from genie.grid.ssh_target import KnownHosts, connect_error, place_text, resolve, ssh_line, told
from genie.grid.tcp_leg import TcpLeg
from genie.runtime.tasks import all_of, either, paused

_log = logging.getLogger(__name__)

_SAID_BYTES_MAX = 64 << 20
_PIECE_BYTES = 1 << 16
_KEEPALIVE_S = 5.0
_KEEPALIVE_COUNT = 3
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 5.0
_CLOSE_S = 2.0

Turn = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Completed:
    """A plain command that has ended. `exit_code` is 128+n after signal n, as a shell gives it."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Link:
    """One node's connection. Requests may be made side by side."""

    def __init__(self, node: GridNode, connection: asyncssh.SSHClientConnection) -> None:
        self.node = node
        self.connection = connection
        self._helper: Helper | None = None
        self._helper_tried = False
        self.users = 0

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def has_helper(self) -> bool:
        """False where the node has no usable Python, or nobody has started the helper yet."""
        return self._helper is not None

    @property
    def python(self) -> str:
        """The version of the node's Python, '' without a helper."""
        return self._helper.python if self._helper else ""

    @property
    def is_open(self) -> bool:
        broken = self._helper is not None and self._helper.broken is not None
        return not broken and not self.connection.is_closed()

    async def call(
        self, op: str, args: Mapping[str, Any] | None = None, blob: bytes = b"", *, timeout_s: float
    ) -> tuple[Any, bytes]:
        """Asks the helper for `op`, named MODULE.NAME after the module of remote/ that has it.

        Raises NodeRefusedError for what the node could not do, ConnectionLostError and DeadlineError
        when nobody knows whether it was done.
        """
        assert self._helper is not None, "ask has_helper first"
        return await self._helper.call(op, args or {}, blob, timeout_s=timeout_s)

    async def command(self, command: str, *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Runs a line of shell that the caller has quoted, to its end. Raises like `call`."""
        try:
            async with asyncio.timeout(timeout_s):
                process = await self.connection.create_process(command, encoding=None)
                try:
                    out, err = await _said(process, stdin, name=self.name)
                finally:
                    process.close()
        except TimeoutError:
            raise DeadlineError(f"node {self.name}: a command took longer than {timeout_s:g} s") from None
        except (asyncssh.Error, OSError) as error:
            raise ConnectionLostError(f"node {self.name}: the connection broke: {told(error)}") from error
        if process.exit_status is None and process.exit_signal is None:
            raise ConnectionLostError(f"node {self.name}: the connection broke while a command ran")
        return Completed(_exit_code(process), out, err)

    async def start_helper(self) -> None:
        """Once for each connection; where the node cannot run it, `has_helper` stays False."""
        if not self._helper_tried:
            self._helper = await start_helper(self.connection, self.name)
            self._helper_tried = True

    async def close(self) -> None:
        self.connection.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.connection.wait_closed()
        except TimeoutError:
            self.connection.abort()


class SshPool:
    """All connections of this process. Use it as an async context; leaving it closes them."""

    def __init__(self, file: GridFile, *, ssh_config: Path) -> None:
        self._file = file
        self._ssh_config = ssh_config.expanduser()
        self._links: dict[str, Link] = {}
        self._doors: dict[str, _Door] = {}
        self._opening = 0
        self._freed = asyncio.Event()
        self._closed = False
        self._trusted = KnownHosts()

    async def __aenter__(self) -> SshPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._tell_freed()
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))

    @property
    def open_links(self) -> list[str]:
        return [name for name, link in self._links.items() if link.is_open]

    @contextlib.asynccontextmanager
    async def use(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
        bare: bool = False,
        turn: Turn | None = None,
    ) -> AsyncIterator[Link]:
        """The node's link, opened if need be; it stays open afterwards for whoever comes next.

        `timeout_s` is for one attempt to connect, waiting for a free place in the pool and for others who
        connect to the same node included. With `bare` the helper is not started for this, which costs a
        node more than one plain command does. `turn` is awaited in each attempt once the node has answered,
        before anything else is asked of it, and takes none of that time: those who wait for their turn
        do not wait behind nodes that are dead. Where the pool closed the connection meanwhile, it is
        awaited again; when someone else wants the same node, it is given up, and the link is had without.
        Raises UnreachableError, HostKeyUnknownError, HostKeyChangedError or LoginRefusedError.
        """
        node = self._file.node(name)
        link = await self._take(node, timeout_s=timeout_s, retries=retries, bare=bare, turn=turn)
        try:
            yield link
        finally:
            link.users -= 1
            self._tell_freed()

    async def _take(
        self, node: GridNode, *, timeout_s: float | None, retries: int | None, bare: bool, turn: Turn | None
    ) -> Link:
        each_s = timeout_s if timeout_s is not None else self._file.ssh.connect_timeout
        attempts = 1 + (retries if retries is not None else self._file.ssh.max_retries)
        for attempt in range(attempts):
            try:
                return await self._ready(node, timeout_s=each_s, bare=bare, turn=turn)
            except (UnreachableError, ConnectionLostError, DeadlineError) as error:
                if attempt + 1 == attempts:
                    raise
                wait_s = pause_s(attempt)
                why = {"node": node.name, "pause_s": round(wait_s, 2), "why": error.message}
                _log.info("connecting again", extra=why)
                await asyncio.sleep(wait_s)
        raise AssertionError

    async def _ready(self, node: GridNode, *, timeout_s: float, bare: bool, turn: Turn | None) -> Link:
        limit = asyncio.timeout(timeout_s)
        door = self._doors.setdefault(node.name, _Door())

        async def own_turn() -> None:
            if turn is not None:
                with paused(limit):
                    await either(turn(), door.wanted.wait())

        try:
            async with limit, door.passage():
                link = await self._open(node, own_turn)
                link.users += 1
                try:
                    if not bare:
                        await link.start_helper()
                except BaseException:
                    link.users -= 1
                    self._tell_freed()
                    raise
                return link
        except TimeoutError:
            if not limit.expired():
                raise
            raise UnreachableError(
                f"node {node.name}: no connection within {timeout_s:g} s",
                hint=f"try '{ssh_line(node)}'; ssh.connect_timeout and ssh.pool_size are in the grid's file",
            ) from None

    async def _open(self, node: GridNode, turn: Turn) -> Link:
        link = self._links.get(node.name)
        if link is not None and link.is_open:
            await turn()  # it stays the pool's: others may need its place, and we may be cancelled
        link = self._links.pop(node.name, None)
        if link is not None and not link.is_open:
            await link.close()
            link = None
        if link is None:
            async with contextlib.AsyncExitStack() as place:

                async def reached() -> None:
                    await turn()
                    await place.enter_async_context(self._place(node))

                link = Link(node, await self._connect(node, reached))
        if self._closed:
            await link.close()
            raise _closed_error()
        self._links[node.name] = link  # last used, last in the order
        return link

    @contextlib.asynccontextmanager
    async def _place(self, node: GridNode) -> AsyncIterator[None]:
        """Waits until one more connection is allowed, closing the longest unused one if all are open."""
        while not self._closed and len(self._links) + self._opening >= self._file.ssh.pool_size:
            idle = next((link for link in self._links.values() if not link.users or not link.is_open), None)
            if idle is not None:
                del self._links[idle.name]
                _log.debug("closing an unused connection", extra={"node": idle.name, "for_node": node.name})
                await idle.close()
                continue
            await self._freed.wait()
        if self._closed:
            raise _closed_error()
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1
            self._tell_freed()  # one that could not be opened leaves its place to others

    def _tell_freed(self) -> None:
        """To all who wait now; whoever comes later waits for the next time."""
        self._freed.set()
        self._freed = asyncio.Event()

    async def _connect(self, node: GridNode, reached: Turn) -> asyncssh.SSHClientConnection:
        """`reached` is awaited when the host has answered, or before all where the way is not ours to see."""
        target = await resolve(node, self._file, self._ssh_config, trusted=self._trusted)
        _log.debug("connecting", extra={"node": node.name, "to": place_text(target)})
        ways: dict[str, Any] = {"config": None}  # read already; read twice, every key would be tried twice
        if TcpLeg.leads_to(target.options):
            ways["tunnel"] = TcpLeg(target.options, reached=reached)
            ways["connect_timeout"] = None  # the leg has it: `reached` may take longer
        else:
            ways["config"] = target.config  # for the jump hosts
            await reached()
        try:
            return await asyncssh.connect(
                node.name,
                **ways,
                **target.keys,
                options=target.options,
                known_hosts=target.known_hosts,
                encryption_algs=target.ciphers,
                keepalive_interval=_KEEPALIVE_S,
                keepalive_count_max=_KEEPALIVE_COUNT,
                login_timeout=0,  # ours ends it sooner; theirs would keep what was given up for two minutes
            )
        except (asyncssh.Error, OSError, ValueError) as error:
            raise connect_error(target, error) from error


def _closed_error() -> UsageError:
    return UsageError("the pool of connections is closed")


class _Door:
    """To one node: one at a time connects. `wanted` is set while others wait behind the one who does."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self._lock = asyncio.Lock()
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        self._waiting += 1
        if self._lock.locked():
            self.wanted.set()
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self.wanted.clear()
        try:
            yield
        finally:
            self._lock.release()


def pause_s(attempt: int) -> float:
    """Before another attempt, growing to a bound; with jitter, so that all do not come back together."""
    share = random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
    return min(_BACKOFF_S_MAX, _BACKOFF_S * 2.0 ** min(attempt, 16)) * share


async def _said(process: asyncssh.SSHClientProcess[bytes], stdin: bytes, *, name: str) -> tuple[bytes, bytes]:
    """All that a command writes, up to a bound: a node must not fill our memory."""

    async def whole(reader: asyncssh.SSHReader[bytes]) -> bytes:
        parts = []
        room = _SAID_BYTES_MAX
        while data := await reader.read(_PIECE_BYTES):
            parts.append(data)
            room -= len(data)
            if room < 0:
                raise ProtocolError(f"node {name}: a command wrote more than {_SAID_BYTES_MAX} bytes")
        return b"".join(parts)

    with contextlib.suppress(BrokenPipeError):  # it may be over already
        process.stdin.write(stdin)
        process.stdin.write_eof()
    out, err = await all_of(map(whole, (process.stdout, process.stderr)))
    await process.wait_closed()
    return out, err


def _exit_code(done: asyncssh.SSHClientProcess[bytes]) -> int:
    if done.exit_status is not None and done.exit_status >= 0:
        return done.exit_status
    return 128 - done.returncode if done.returncode is not None and done.returncode < 0 else 255
