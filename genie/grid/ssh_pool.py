"""Connections to the nodes: one for each, shared by all who ask, bounded, kept alive.

`SshPool.use(name)` gives a `Link`; as long as someone uses it, it stays. On the connection runs one
helper (remote/core.py), to which requests go without starting anything on the node; a node without a
usable Python has none, and takes plain commands. Host keys are strict, and ~/.ssh/config has the last
word about how a host is reached.

Not for: what is asked of a node (health_check, runner, sync), and starting again what may have begun:
a request whose connection breaks raises, and the caller decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import shlex
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any

import asyncssh
from asyncssh.encryption import get_default_encryption_algs

from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    HostKeyChangedError,
    HostKeyUnknownError,
    LoginRefusedError,
    NodeRefusedError,
    ProtocolError,
    UnreachableError,
    UsageError,
)
from genie.grid.grid_file import GridFile, GridNode
from genie.grid.remote import core
from genie.grid.ssh_config import config_about
from genie.grid.ssh_keys import check_key_file, key_files, login_keys, passphrase_hint
from genie.grid.tcp_leg import TcpLeg
from genie.runtime.tasks import all_of, either, paused

_log = logging.getLogger(__name__)

_REMOTE = "genie.grid.remote"
# Understood by every login shell: no variable, no backslash, no quote within quotes.
_BOOT = (
    'exec python3 -ISc "import sys,zlib;f=sys.stdin.buffer;exec(zlib.decompress(f.read(int(f.readline()))))"'
)
_REMOTE_IMPORT = re.compile(r"^from genie\.grid\.remote(?:\.(\w+))? import ([\w, ]+)$", re.MULTILINE)
_NOISE_BYTES_MAX = 1 << 16
_SAID_BYTES_MAX = 64 << 20
_KEEPALIVE_S = 5.0
_KEEPALIVE_COUNT = 3
_BACKOFF_S = 0.1
_BACKOFF_S_MAX = 5.0
_CLOSE_S = 2.0
_SSH_PORT = 22
_KNOWN_HOSTS = "~/.ssh/known_hosts"

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
        self._helper: _Helper | None = None
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
            self._helper = await _start_helper(self.connection, self.node)
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
                hint=f"try '{_ssh(node)}'; ssh.connect_timeout and ssh.pool_size are in the grid's file",
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
            raise _connect_error(target, error) from error


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


class KnownHosts:
    """known_hosts files, each set of them read once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, ...], asyncssh.SSHKnownHosts] = {}

    def of(self, files: Sequence[Path]) -> asyncssh.SSHKnownHosts:
        named = tuple(map(str, files))
        if named not in self._read:
            there = [str(file) for file in files if file.is_file()]
            try:
                read = asyncssh.read_known_hosts(there) if there else asyncssh.import_known_hosts("")
            except (ValueError, OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{' or '.join(there)} cannot be read: {error}") from None
            self._read[named] = read
        return self._read[named]


@dataclass(frozen=True)
class Target:
    """Where ~/.ssh/config leads for a node. `host` and `port` are what known_hosts names it by."""

    node: GridNode
    host: str
    port: int
    config: list[str]
    options: asyncssh.SSHClientConnectionOptions
    ciphers: list[str]
    known_hosts: asyncssh.SSHKnownHosts
    known_hosts_files: tuple[Path, ...]
    key_files: tuple[Path, ...]
    """Of the keys that are offered, whether they are there or not."""
    keys: Mapping[str, Any]
    """What a connection must be given beside `options`, which has no keys."""

    @property
    def known_keys(self) -> list[asyncssh.SSHKey]:
        """The host's keys in known_hosts, certificates of its authorities included."""
        port = self.port if self.port != _SSH_PORT else None
        keys, authorities, *_ = asyncssh.match_known_hosts(self.known_hosts, self.host, "", port)
        return [*keys, *authorities]

    @property
    def entry(self) -> str:
        """How known_hosts names the host: with its port, unless that is 22 or an alias stands for both."""
        plain = self.port == _SSH_PORT or bool(self.options.host_key_alias)
        return self.host if plain else f"[{self.host}]:{self.port}"

    @property
    def way_out_of_a_changed_key(self) -> str:
        """The commands, to be typed as they are: a file of its own and a port in brackets need care."""
        files = self.known_hosts_files
        file = next((each for each in files if self._stands_in(each)), files[0])
        words = shlex.join(["ssh-keygen", "-f", str(file), "-R", self.entry])
        return (
            f"when you know that the host was installed anew, remove the old key: {words} "
            f"and then: grid-cli nodes trust {self.node.name}"
        )

    def _stands_in(self, file: Path) -> bool:
        port = self.port if self.port != _SSH_PORT else None
        read = KnownHosts().of([file])
        keys, authorities, *_ = asyncssh.match_known_hosts(read, self.host, "", port)
        return bool(keys or authorities)


async def resolve(node: GridNode, file: GridFile, ssh_config: Path, *, trusted: KnownHosts) -> Target:
    """What ~/.ssh/config says about the host, under what the grid's file says. Raises UsageError."""
    given: dict[str, Any] = {}
    if node.user is not None:
        given["username"] = node.user
    if node.port is not None:
        given["port"] = node.port
    config = [str(ssh_config)] if _is_file(ssh_config) else []
    given |= {"config": config, "host": node.name}
    if file.ssh.key_file is not None:
        check_key_file(file.ssh.key_file)
    try:
        options = await _options(given, ssh_config)
    except (asyncssh.Error, OSError, ValueError) as error:
        raise UsageError(
            f"node {node.name}: {ssh_config} cannot be used: {told(error)}",
            hint=f"try '{_ssh(node)}'",
        ) from error
    # With "UserKnownHostsFile none" the library would trust any host; here that means that none is known.
    named = options.known_hosts if isinstance(options.known_hosts, list) else None
    files = [Path(_expanded(str(each))) for each in named or [_KNOWN_HOSTS]] if named is not None else []
    offered = key_files(options, own=file.ssh.key_file)
    return Target(
        node,
        host=options.host_key_alias or options.host,
        port=options.port or _SSH_PORT,
        config=config,
        options=options,
        ciphers=_ciphers(options),
        known_hosts=trusted.of(files),
        known_hosts_files=tuple(files),
        key_files=offered,
        keys=await asyncio.to_thread(login_keys, options, offered),
    )


def _ciphers(options: asyncssh.SSHClientConnectionOptions) -> list[str]:
    """Those of ~/.ssh/config in its order; without any, AES-GCM first, which costs us half as much here."""
    known = [each.decode() for each in options.encryption_algs]
    if list(options.encryption_algs) != get_default_encryption_algs():
        return known
    return sorted(known, key=lambda each: "gcm" not in each)


def _expanded(path: str) -> str:
    return str(Path(path).expanduser())


def _is_file(path: Path) -> bool:
    return path.is_file()


async def _options(given: dict[str, Any], ssh_config: Path) -> asyncssh.SSHClientConnectionOptions:
    construct = asyncssh.SSHClientConnectionOptions.construct
    found: asyncssh.SSHClientConnectionOptions
    if given["config"]:
        with config_about(given["host"], ssh_config) as short, contextlib.suppress(asyncssh.ConfigParseError):
            found = await construct(client_keys=None, **{**given, "config": [str(short)]})
            return found
    found = await construct(client_keys=None, **given)  # its errors name the file itself
    return found


def pause_s(attempt: int) -> float:
    """Before another attempt, growing to a bound; with jitter, so that all do not come back together."""
    share = random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
    return min(_BACKOFF_S_MAX, _BACKOFF_S * 2.0 ** min(attempt, 16)) * share


def _ssh(node: GridNode) -> str:
    """What to type to get there as the grid does."""
    port = f"-p {node.port} " if node.port is not None else ""
    return f"ssh {port}{node.user}@{node.name}" if node.user is not None else f"ssh {port}{node.name}"


def place_text(target: Target) -> str:
    """Host, port and jump hosts, as an error names them."""
    port = "" if target.port == _SSH_PORT else f" port {target.port}"
    jump = target.options.tunnel
    return f"{target.host}{port}{f' through {jump}' if isinstance(jump, str) and jump else ''}"


def _connect_error(target: Target, error: Exception) -> GenieError:
    name, where = target.node.name, place_text(target)
    if isinstance(error, asyncssh.KeyExchangeFailed | asyncssh.HostKeyNotVerifiable):
        return _host_key_error(target, error, where=where)
    if isinstance(error, asyncssh.PermissionDenied):
        return LoginRefusedError(
            f"node {name}: {where} refused the login of {target.options.username}",
            hint=f"try '{_ssh(target.node)}'; {passphrase_hint(target.key_files)}, "
            "and ssh.key_file or IdentityFile names another one",
        )
    if isinstance(error, asyncssh.KeyEncryptionError | asyncssh.KeyImportError):
        return LoginRefusedError(f"node {name}: a private key cannot be used: {error}", hint="ssh-add it")
    return UnreachableError(
        f"node {name}: {where} cannot be reached: {told(error)}", hint=f"try '{_ssh(target.node)}'"
    )


def _host_key_error(target: Target, error: Exception, *, where: str) -> GenieError:
    name = target.node.name
    if target.known_keys:
        known = ", ".join(key.get_fingerprint() for key in target.known_keys[:4])
        return HostKeyChangedError(
            f"node {name}: {where} shows another host key than known_hosts has ({known}); "
            "someone may be listening in",
            hint=target.way_out_of_a_changed_key,
        )
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return HostKeyUnknownError(
            f"node {name}: the host key of {where} is in no known_hosts file",
            hint=f"'grid-cli nodes trust {name}' shows its fingerprint and asks",
        )
    return UnreachableError(f"node {name}: {where} and we have no way of encrypting in common: {told(error)}")


async def _start_helper(connection: asyncssh.SSHClientConnection, node: GridNode) -> _Helper | None:
    """None where the node has no Python that can run it."""
    boot = _boot_text()
    helper = _Helper(node.name)
    try:
        channel, _ = await connection.create_session(lambda: helper, _BOOT, encoding=None)
    except asyncssh.ChannelOpenError as error:
        raise UnreachableError(f"node {node.name} opens no session: {error.reason}") from error
    except (asyncssh.Error, OSError) as error:
        raise ConnectionLostError(f"node {node.name}: the connection broke: {told(error)}") from error
    try:
        with contextlib.suppress(BrokenPipeError):  # no such program: it may be over already
            channel.write(b"%d\n" % len(boot) + boot)
        await helper.started
    except BaseException:
        channel.close()
        raise
    if helper.broken is None:
        return helper
    if connection.is_closed():  # which says nothing about its Python
        raise helper.broken
    channel.close()
    _log.info("no helper; plain commands are used", extra={"node": node.name, "why": helper.noise_text()})
    return None


@cache
def _boot_text() -> bytes:
    name = f"{_REMOTE}.core"
    text = source("core")
    prelude = f"import sys,types;m=types.ModuleType({name!r});sys.modules[{name!r}]=m\n"
    run = f"exec(compile({text!r},{name!r},'exec'),m.__dict__);m.main()\n"
    return zlib.compress((prelude + run).encode())


@cache
def source(module: str) -> str:
    """The text of a module of remote/."""
    return resources.files(_REMOTE).joinpath(f"{module}.py").read_text("utf-8")


@cache
def with_needs(module: str) -> tuple[str, ...]:
    """A module of remote/ behind those that it imports, in the order of loading them."""
    found: list[str] = []
    for whole, names in _REMOTE_IMPORT.findall(source(module)):
        for name in [whole] if whole else names.split(","):
            found += [each for each in with_needs(name.strip()) if each not in found]
    return (*found, module)


class _Helper(asyncssh.SSHClientSession[bytes]):
    """The client's side of remote/core.py, on one channel."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._buffer = bytearray()
        self._in_answers = False
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
        answer: asyncio.Future[tuple[Any, bytes]] = asyncio.get_running_loop().create_future()
        try:
            async with limit:
                await self._writable.wait()
                if self.broken is not None:
                    raise self.broken
                self._waiting[number] = answer
                self._load(op.partition(".")[0])
                self._send({"id": number, "op": op, "args": args}, blob)
                return await answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineError(f"node {self._name}: no answer to {op} within {timeout_s:g} s") from None
        except OSError as error:  # the channel is closed, and has not told us yet
            raise ConnectionLostError(f"node {self._name}: the connection broke: {told(error)}") from error
        finally:
            self._waiting.pop(number, None)

    def noise_text(self) -> str:
        """What came instead of an answer: a shell's complaint, most likely."""
        return bytes(self._noise[-400:]).decode(errors="replace").strip()

    def _load(self, wanted: str) -> None:
        for module in (wanted,) if wanted in self._loaded else with_needs(wanted):
            if module not in self._loaded:
                self._loaded.add(module)
                text = source(module).encode()
                self._send({"id": 0, "op": "load", "args": {"name": f"{_REMOTE}.{module}"}}, text)

    def _send(self, message: Mapping[str, Any], blob: bytes) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > core.JSON_BYTES_MAX or len(blob) > core.BLOB_BYTES_MAX:
            raise ProtocolError(f"a request of {len(body)} and {len(blob)} bytes is too large for a node")
        try:
            self._channel.write(core.HEADER.pack(len(body), len(blob)) + body + blob)
        except OSError as error:  # the node has closed it, and connection_lost() is on its way
            raise ConnectionLostError(f"node {self._name}: the connection broke: {told(error)}") from error

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
            while self._take_one():
                pass
        except (ProtocolError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._break(
                ProtocolError(f"node {self._name}: its helper sent something else than answers: {error}")
            )
            self._channel.close()

    def connection_lost(self, exc: Exception | None) -> None:
        why = told(exc) if exc is not None else "its helper has ended"
        self._break(ConnectionLostError(f"node {self._name}: the connection broke: {why}"))

    def _take_one(self) -> bool:
        if not self._in_answers:
            return self._skip_noise()
        if len(self._buffer) < core.HEADER.size:
            return False
        json_bytes, blob_bytes = core.HEADER.unpack_from(self._buffer)
        if json_bytes > core.JSON_BYTES_MAX or blob_bytes > core.BLOB_BYTES_MAX:
            raise ProtocolError(f"an answer of {json_bytes} and {blob_bytes} bytes")
        end = core.HEADER.size + json_bytes + blob_bytes
        if len(self._buffer) < end:
            return False
        message = json.loads(self._buffer[core.HEADER.size : core.HEADER.size + json_bytes])
        blob = bytes(self._buffer[core.HEADER.size + json_bytes : end])
        del self._buffer[:end]
        self._answer(message, blob)
        return True

    def _skip_noise(self) -> bool:
        start = self._buffer.find(core.MAGIC)
        if start >= 0:
            self._in_answers = True
            del self._buffer[: start + len(core.MAGIC)]
            return True
        if len(self._buffer) > _NOISE_BYTES_MAX:
            raise ProtocolError("a login shell that prints without end")
        return False

    def _answer(self, message: dict[str, Any], blob: bytes) -> None:
        if message["id"] == 0:
            self.python = str(message["ok"]["python"])
            if not self.started.done():
                self.started.set_result(None)
            return
        answer = self._waiting.get(message["id"])
        if answer is None or answer.done():
            return
        # Whoever waits stays in the list until all of it is read: what is not an answer must reach them, too.
        error = message.get("error")
        if error is None:
            answer.set_result((message["ok"], blob))
        else:
            reason, text = str(error["reason"]), str(error["text"])
            answer.set_exception(NodeRefusedError(f"node {self._name}: {text}", reason=reason))

    def _keep_noise(self, data: bytes) -> None:
        self._noise += data
        del self._noise[:-_NOISE_BYTES_MAX]

    def _break(self, error: GenieError) -> None:
        if self.broken is None:
            self.broken = error
            self._keep_noise(bytes(self._buffer))
            self._buffer.clear()
        self._writable.set()
        if not self.started.done():
            self.started.set_result(None)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.broken)
        self._waiting.clear()


def told(error: BaseException | None) -> str:
    """In words for people: of an address that does not answer, asyncio tells the call and its arguments."""
    refusals = re.findall(r"\[Errno ([0-9]{1,4})\] Connect call failed", str(error))
    if isinstance(error, OSError) and refusals:
        return ", ".join(dict.fromkeys(os.strerror(int(number)) for number in refusals))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


async def _said(process: asyncssh.SSHClientProcess[bytes], stdin: bytes, *, name: str) -> tuple[bytes, bytes]:
    """All that a command writes, up to a bound: a node must not fill our memory."""

    async def whole(reader: asyncssh.SSHReader[bytes]) -> bytes:
        parts = []
        room = _SAID_BYTES_MAX
        while data := await reader.read(_NOISE_BYTES_MAX):
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
