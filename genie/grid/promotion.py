"""The door to the cluster: SSH nodes become nodes of a cluster, and come back.

`promote` brings this Genie to a node in an environment of its own, joins the node with a single-use
token, and waits until the controller sees it. `demote` stops the agent, takes the node out of the
cluster, and removes what `promote` brought. Both can be repeated: what is done already is left alone.

Not for: the agent itself (genie/agent), or Python environments for jobs (setup.py).
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from genie.cluster.client import ClusterClient
from genie.errors import DeadlineError, GenieError, GridError, NodeNotFoundError, TransportError
from genie.grid import own_wheel
from genie.grid.grid_file import GridFile, Say
from genie.grid.login_shell import check_login_shell
from genie.grid.shell_words import path_word, through_login_shell
from genie.grid.ssh_pool import Completed, Link, SshPool
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.runtime.tasks import all_of

PYTHONS = ("python3", "python3.12", "python3.11", "python3.13")
_OLDEST = (3, 11)
_ENVIRONMENT = "genie_env"
_STATE = ".genie"
_INSTALL_S = 1800.0
_JOIN_S = 120.0
_SEEN_S = 60.0
_STEP_S = 0.2
_LINES_SHOWN = 5

_NOT_UP = (NodeStatus.INITIALIZING, NodeStatus.SUSPECT, NodeStatus.DISCONNECTED)


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What became of one node: the word that fits `promote` or `demote`, or the error.

    With an error, the word is 'failed', or 'unreachable' where the node or the cluster was not reached, and
    `exit_code` is that of the error; else it is 0.
    """

    node: str
    outcome: str
    error: str = ""
    exit_code: int = 0


class Promotion:
    """`packages` are installed beside Genie (torch, say), from the folder `wheels` or else from an index.

    `controller` is the cluster's address as nodes reach it. `force` demotes nodes that have jobs.
    """

    def __init__(
        self,
        pool: SshPool,
        file: GridFile,
        client: ClusterClient,
        *,
        controller: str,
        python: str | None = None,
        packages: Sequence[str] = (),
        wheels: Path | None = None,
        force: bool = False,
        say: Say = lambda _node, _text: None,
    ) -> None:
        self._pool = pool
        self._file = file
        self._client = client
        self._controller = controller
        self._python = python
        self._packages = tuple(packages)
        self._wheels = wheels
        self._force = force
        self._say = say

    async def promote(self, names: Sequence[str]) -> list[Moved]:
        """One entry for each name, in order; an error of one node leaves the others alone."""
        return await self._each(names, self._promote_one)

    async def demote(self, names: Sequence[str]) -> list[Moved]:
        return await self._each(names, self._demote_one)

    async def _each(self, names: Sequence[str], move: Callable[[str], Awaitable[str]]) -> list[Moved]:
        # Each holds its connection for as long as it takes.
        at_once = asyncio.Semaphore(min(self._file.sync.max_parallel_transfers, self._file.ssh.pool_size))

        async def one(name: str) -> Moved:
            async with at_once:
                try:
                    return Moved(node=name, outcome=await move(name))
                except GenieError as error:
                    code = error.exit_code
                    outcome = "unreachable" if code == TransportError.exit_code else "failed"
                    return Moved(node=name, outcome=outcome, error=str(error), exit_code=code)

        return await all_of(map(one, names))

    async def _promote_one(self, name: str) -> str:
        if await self._is_up(name):
            return "was there"
        async with self._pool.use(name, bare=True) as link:
            places = _places(self._file.remote_root)
            self._say(name, "looking for Python")
            python = await self._find_python(link)
            await self._install(link, places, python)
            self._say(name, f"joining the cluster at {self._controller}")
            await self._join(link, places)
        await self._wait_seen(name)
        return "promoted"

    async def _demote_one(self, name: str) -> str:
        await self._check_idle(name)
        async with self._pool.use(name, bare=True) as link:
            places = _places(self._file.remote_root)
            self._say(name, "stopping the agent")
            stop = f"if [ -x {places.genie} ]; then {places.state_variable} {places.genie} down; fi"
            _check(await _sh(link, stop, timeout_s=_JOIN_S), f"node {name}: its agent could not be stopped")
            self._say(name, "leaving the cluster")
            was_there = await self._forget(name)
            gone = f"rm -rf -- {places.environment} {places.state}"
            _check(await _sh(link, gone, timeout_s=_JOIN_S), f"node {name}: not everything could be removed")
        return "demoted" if was_there else "was not there"

    async def _check_idle(self, name: str) -> None:
        for view in await self._client.nodes():
            if view.info.node_id == name and view.ledger.holds and not self._force:
                jobs = ", ".join(sorted({hold.job_id for hold in view.ledger.holds})[:5])
                raise GridError(
                    f"node {name} has jobs: {jobs}",
                    hint=f"'genie drain {name}' and wait, or end them with --force",
                )

    async def _find_python(self, link: Link) -> str:
        """The first of the candidates that is new enough."""
        candidates = (self._python,) if self._python else PYTHONS
        show = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
        seen = []
        for candidate in candidates:
            asked = f"{shlex.quote(candidate)} -c {shlex.quote(show)}"
            done = await _sh(link, asked, timeout_s=self._file.ssh.timeout)
            version = done.stdout.decode(errors="replace").strip()
            if done.exit_code == 0 and _version(version) >= _OLDEST:
                return candidate
            seen.append(f"{candidate} {version}" if version else f"no {candidate}")
        raise GridError(
            f"node {link.name} has no Python {_OLDEST[0]}.{_OLDEST[1]} or newer: {', '.join(seen)}",
            hint="install one, and name it with --python",
        )

    async def _install(self, link: Link, places: _Places, python: str) -> None:
        # pip is the last that it gets: one whose making broke off is finished.
        made = f"[ -x {places.environment}/bin/pip ] || {shlex.quote(python)} -m venv {places.environment}"
        _check(
            await _sh(link, f"mkdir -p -- {places.root} && {{ {made}; }}", timeout_s=_INSTALL_S),
            f"node {link.name}: no environment could be made",
            hint="on Debian and Ubuntu: apt install python3-venv",
        )
        brought = f"{places.environment}/wheels"
        self._say(link.name, "bringing Genie there")
        file_name, content = await asyncio.to_thread(own_wheel.wheel)
        await _put(link, brought, file_name, content)
        source = ""
        if self._wheels is not None:
            for wheel in sorted(self._wheels.glob("*.whl")):
                await _put(link, brought, wheel.name, await asyncio.to_thread(wheel.read_bytes))
            source = f"--no-index --find-links {brought} "
        self._say(link.name, "installing")
        packages = " ".join(shlex.quote(package) for package in self._packages)
        wanted = f"{brought}/{shlex.quote(file_name)} {packages}"
        pip = f"{places.python} -m pip --disable-pip-version-check --no-input install {source}{wanted}"
        _check(
            await _sh(link, f"{pip} 2>&1", timeout_s=_INSTALL_S),
            f"node {link.name}: Genie could not be installed",
            hint="without an index on the node, give the wheels with --wheels DIR",
        )

    async def _join(self, link: Link, places: _Places) -> None:
        created = await self._client.create_token(TokenKind.JOIN, name=f"grid-{link.name}")
        join = (
            f"{places.state_variable} {places.genie} join {shlex.quote(self._controller)} "
            f"--node-id {shlex.quote(link.name)} --token-file - --detach 2>&1"
        )
        # The token goes through the pipe: arguments can be read by everyone on the node.
        _check(
            await _sh(link, join, stdin=created.token.encode(), timeout_s=_JOIN_S),
            f"node {link.name}: it could not join the cluster at {self._controller}",
            hint="that address must be reachable from the node",
        )

    async def _is_up(self, name: str) -> bool:
        return any(
            view.info.node_id == name and view.info.status not in _NOT_UP
            for view in await self._client.nodes()
        )

    async def _wait_seen(self, name: str) -> None:
        try:
            async with asyncio.timeout(_SEEN_S):
                while not await self._is_up(name):  # noqa: ASYNC110 - the other end is another process
                    await asyncio.sleep(_STEP_S)
        except TimeoutError:
            raise DeadlineError(
                f"node {name} has joined, but the cluster does not see it after {_SEEN_S:g} s"
            ) from None

    async def _forget(self, name: str) -> bool:
        """The controller refuses while the agent's connection is still there; that ends in a moment."""
        deadline = asyncio.get_running_loop().time() + _SEEN_S
        while True:
            try:
                await self._client.forget_node(name)
                return True
            except NodeNotFoundError:
                return False
            except GenieError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_STEP_S)


@dataclass(frozen=True)
class _Places:
    """Paths on the node, as words of sh."""

    root: str
    environment: str
    state: str

    @property
    def python(self) -> str:
        return f"{self.environment}/bin/python"

    @property
    def genie(self) -> str:
        return f"{self.environment}/bin/genie"

    @property
    def state_variable(self) -> str:
        return f"GENIE_STATE_DIR={self.state}"


def _places(root: str) -> _Places:
    return _Places(*(path_word(path) for path in (root, f"{root}/{_ENVIRONMENT}", f"{root}/{_STATE}")))


async def _sh(link: Link, line: str, *, stdin: bytes = b"", timeout_s: float) -> Completed:
    """Our lines are sh's; the login shell may be another one."""
    done = await link.command(through_login_shell(line), stdin=stdin, timeout_s=timeout_s)
    if done.exit_code != 0:
        await check_login_shell(link, timeout_s=timeout_s)
    return done


async def _put(link: Link, folder: str, name: str, content: bytes) -> None:
    put = f"mkdir -p -- {folder} && cat > {folder}/{shlex.quote(name)}"
    _check(
        await _sh(link, put, stdin=content, timeout_s=_INSTALL_S),
        f"node {link.name}: {name} could not be sent",
    )


def _check(done: Completed, problem: str, *, hint: str = "") -> Completed:
    if done.exit_code != 0:
        told = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-_LINES_SHOWN:]
        raise GridError(f"{problem}: {' / '.join(told) or f'exit code {done.exit_code}'}", hint=hint)
    return done


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
