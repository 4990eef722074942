"""Turns grid nodes into nodes of a cluster, and back.

`promote` installs this version of Genie on a node in its own environment, joins the node with a single-use
token, and waits until the controller lists it. `demote` stops the agent, removes the node from the cluster,
and deletes the files that `promote` installed. Both are idempotent.

Not responsible for the agent (genie/agent) or Python environments for runs (setup.py).
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
from genie.grid.grid_file import GridFile, ProgressCallback
from genie.grid.ssh.login_shell import check_login_shell
from genie.grid.ssh.pool import CommandResult, NodeConnection, SshPool
from genie.grid.ssh.shell_words import make_login_shell_command, quote_path
from genie.model.names import address_text, parse_endpoint
from genie.model.node import NodeStatus
from genie.model.tenant import TokenKind
from genie.processes.tasks import run_all_concurrently
from genie.runtime.credentials import DEFAULT_PORT

PYTHON_CANDIDATES = ("python3", "python3.12", "python3.11", "python3.13")
_PYTHON_VERSION_MIN = (3, 11)
_ENVIRONMENT_FOLDER_NAME = "genie_env"
_STATE_FOLDER_NAME = ".genie"
_INSTALL_TIMEOUT_S = 1800.0
_JOIN_OR_LEAVE_TIMEOUT_S = 120.0
_AGENT_CONNECT_TIMEOUT_S = 60.0
_CONTROLLER_CHECK_TIMEOUT_S = 10.0
_TEST_CONNECTION_PROGRAM = """import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
except OSError as error:
    sys.exit(str(error))
"""
_UNDO_INSTALL_TIMEOUT_S = 20.0
"""After Ctrl-C."""
_POLL_INTERVAL_S = 0.2
_OUTPUT_LINES_SHOWN = 5

_NOT_CONNECTED_STATUSES = (NodeStatus.INITIALIZING, NodeStatus.SUSPECT, NodeStatus.DISCONNECTED)


@dataclass(frozen=True, kw_only=True)
class PromotionResult:
    """The result for one node. `outcome` is 'promoted', 'already promoted', 'demoted' or 'not promoted'.

    On error it is 'failed', or 'unreachable' if the node or the cluster is, and `exit_code` is that of the
    error.
    """

    node: str
    outcome: str
    error: str = ""
    exit_code: int = 0


class NodePromoter:
    """`packages` are installed in addition to Genie (torch, for example), from `wheels` or an index.

    `controller` is the cluster's address as seen from the nodes. `force` demotes nodes that have jobs.
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
        on_progress: ProgressCallback = lambda _node, _text: None,
    ) -> None:
        self._pool = pool
        self._grid_file = file
        self._client = client
        self._controller_address = controller
        self._python_program = python
        self._extra_packages = tuple(packages)
        self._wheels_folder = wheels
        self._demotes_nodes_with_jobs = force
        self._on_progress = on_progress

    async def promote(self, names: Sequence[str]) -> list[PromotionResult]:
        """Return one result per name, in order; an error of one node does not affect the others."""
        return await self._run_on_each_node(names, self._promote_node)

    async def demote(self, names: Sequence[str]) -> list[PromotionResult]:
        return await self._run_on_each_node(names, self._demote_node)

    async def _run_on_each_node(
        self, names: Sequence[str], move: Callable[[str], Awaitable[str]]
    ) -> list[PromotionResult]:
        # Each holds its connection until it is done.
        slots = asyncio.Semaphore(
            min(self._grid_file.sync.max_parallel_transfers, self._grid_file.ssh.pool_size)
        )

        async def run_on_node(name: str) -> PromotionResult:
            async with slots:
                try:
                    return PromotionResult(node=name, outcome=await move(name))
                except GenieError as error:
                    code = error.exit_code
                    outcome = "unreachable" if code == TransportError.exit_code else "failed"
                    return PromotionResult(node=name, outcome=outcome, error=str(error), exit_code=code)

        return await run_all_concurrently(map(run_on_node, names))

    async def _promote_node(self, name: str) -> str:
        if await self._is_node_connected(name):
            return "already promoted"
        async with self._pool.connect(name, without_helper=True) as link:
            places = _make_node_paths(self._grid_file.remote_root)
            self._on_progress(name, "searching for Python")
            python = await self._find_python(link)
            await self._check_controller_reachable(link, python)
            missing = await self._list_missing_paths(link, places)
            try:
                await self._install_genie(link, places, python)
                self._on_progress(name, f"joining the cluster at {self._controller_address}")
                await self._join_cluster(link, places)
            except GenieError:
                await self._undo_install(link, places, missing)
                raise
            except asyncio.CancelledError:  # Ctrl-C; a second one ends the cleanup, too
                try:
                    async with asyncio.timeout(_UNDO_INSTALL_TIMEOUT_S):
                        await self._undo_install(link, places, missing)
                except TimeoutError:
                    self._on_progress(name, "the incomplete installation is left: the node does not respond")
                raise
        await self._wait_until_connected(name)
        return "promoted"

    async def _list_missing_paths(self, link: NodeConnection, places: _NodePaths) -> list[str]:
        """Return those paths that `_install_genie` and `_join_cluster` will create."""
        paths = (places.environment_folder, places.state_folder)
        tests = "; ".join(f"[ -e {path} ] || echo {number}" for number, path in enumerate(paths))
        done = _require_success(
            await _run_shell(link, tests + "; true", timeout_s=self._grid_file.ssh.timeout),
            f"node {link.name}: could not read the remote directory",
        )
        return [paths[int(number)] for number in done.stdout.split()]

    async def _undo_install(self, link: NodeConnection, places: _NodePaths, created: Sequence[str]) -> None:
        """Remove what a failed promotion has created. Failures are reported as progress: the promotion has
        its own error."""
        if not created:
            return
        self._on_progress(link.name, "removing the incomplete installation")
        # An agent that uses an existing state directory is not part of this promotion.
        stop = f"{_make_stop_agent_command(places)}; " if places.state_folder in created else ""
        remove = f"rm -rf -- {' '.join(created)}"
        # A program that was interrupted may still write files.
        remove = f"{{ {remove} || {{ sleep 1; {remove}; }}; }}"
        try:
            _require_success(
                await _run_shell(link, stop + remove, timeout_s=_JOIN_OR_LEAVE_TIMEOUT_S),
                "could not remove all files",
            )
        except GenieError as error:
            self._on_progress(link.name, f"the incomplete installation is left: {error}")

    async def _demote_node(self, name: str) -> str:
        await self._check_no_running_jobs(name)
        async with self._pool.connect(name, without_helper=True) as link:
            places = _make_node_paths(self._grid_file.remote_root)
            self._on_progress(name, "stopping the agent")
            _require_success(
                await _run_shell(link, _make_stop_agent_command(places), timeout_s=_JOIN_OR_LEAVE_TIMEOUT_S),
                f"node {name}: could not stop the agent",
            )
            self._on_progress(name, "removing the node from the cluster")
            was_member = await self._forget_node_if_member(name)
            remove = f"rm -rf -- {places.environment_folder} {places.state_folder}"
            _require_success(
                await _run_shell(link, remove, timeout_s=_JOIN_OR_LEAVE_TIMEOUT_S),
                f"node {name}: could not remove all files",
            )
        return "demoted" if was_member else "not promoted"

    async def _check_no_running_jobs(self, name: str) -> None:
        for view in await self._client.nodes():
            if view.info.node_id == name and view.node_holds.holds and not self._demotes_nodes_with_jobs:
                jobs = ", ".join(sorted({hold.job_id for hold in view.node_holds.holds})[:5])
                raise GridError(
                    f"node {name} has running jobs: {jobs}",
                    hint=f"run 'genie drain {name}' and wait, or stop them with --force",
                )

    async def _find_python(self, link: NodeConnection) -> str:
        """Return the first candidate that is new enough. Raises GridError."""
        candidates = (self._python_program,) if self._python_program else PYTHON_CANDIDATES
        program = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
        seen = []
        for candidate in candidates:
            command = f"{shlex.quote(candidate)} -c {shlex.quote(program)}"
            done = await _run_shell(link, command, timeout_s=self._grid_file.ssh.timeout)
            version = done.stdout.decode(errors="replace").strip()
            if done.exit_code == 0 and _parse_version(version) >= _PYTHON_VERSION_MIN:
                return candidate
            seen.append(f"{candidate} {version}" if version else f"no {candidate}")
        raise GridError(
            f"node {link.name} has no Python {'.'.join(map(str, _PYTHON_VERSION_MIN))} or newer: "
            f"{', '.join(seen)}",
            hint="install one and pass it with --python",
        )

    async def _check_controller_reachable(self, link: NodeConnection, python: str) -> None:
        """Raise GridError if the node cannot connect to the controller: an installation would be in vain."""
        host, port = parse_endpoint(self._controller_address, what="--controller", port=DEFAULT_PORT)
        arguments = f"{shlex.quote(host)} {port} {_CONTROLLER_CHECK_TIMEOUT_S:g}"
        done = await _run_shell(
            link,
            f"{shlex.quote(python)} -c {shlex.quote(_TEST_CONNECTION_PROGRAM)} {arguments} 2>&1",
            timeout_s=self._grid_file.ssh.timeout + _CONTROLLER_CHECK_TIMEOUT_S,
        )
        _require_success(
            done,
            f"node {link.name}: could not reach the controller at {address_text(host, port)}",
            hint="pass its address as seen from the nodes with --controller, and check firewalls",
        )

    async def _install_genie(self, link: NodeConnection, places: _NodePaths, python: str) -> None:
        # venv creates pip last, so an incomplete environment is created again.
        folder = places.environment_folder
        venv = f"[ -x {folder}/bin/pip ] || {shlex.quote(python)} -m venv {folder}"
        _require_success(
            await _run_shell(
                link, f"mkdir -p -- {places.root} && {{ {venv}; }}", timeout_s=_INSTALL_TIMEOUT_S
            ),
            f"node {link.name}: could not create an environment",
            hint="on Debian and Ubuntu: apt install python3-venv",
        )
        wheels = f"{places.environment_folder}/wheels"
        self._on_progress(link.name, "uploading Genie")
        file_name, content = await asyncio.to_thread(own_wheel.build_genie_wheel)
        await _upload_file(link, wheels, file_name, content)
        source = ""
        if self._wheels_folder is not None:
            for wheel in sorted(self._wheels_folder.glob("*.whl")):
                await _upload_file(link, wheels, wheel.name, await asyncio.to_thread(wheel.read_bytes))
            source = f"--no-index --find-links {wheels} "
        self._on_progress(link.name, "installing")
        packages = " ".join(shlex.quote(package) for package in self._extra_packages)
        requirements = f"{wheels}/{shlex.quote(file_name)} {packages}"
        options = "--disable-pip-version-check --no-input"
        pip = f"{places.python_program} -m pip {options} install {source}{requirements}"
        _require_success(
            await _run_shell(link, f"{pip} 2>&1", timeout_s=_INSTALL_TIMEOUT_S),
            f"node {link.name}: could not install Genie",
            hint="if the node cannot reach a package index, pass the wheels with --wheels DIR",
        )

    async def _join_cluster(self, link: NodeConnection, places: _NodePaths) -> None:
        created = await self._client.create_token(TokenKind.JOIN, name=f"grid-{link.name}")
        join = (
            f"{places.state_dir_assignment} {places.genie_program} "
            f"join {shlex.quote(self._controller_address)} "
            f"--node-id {shlex.quote(link.name)} --token-file - --detach 2>&1"
        )
        # The token is passed on standard input: other users on the node can read arguments.
        try:
            _require_success(
                await _run_shell(
                    link, join, stdin=created.token.encode(), timeout_s=_JOIN_OR_LEAVE_TIMEOUT_S
                ),
                f"node {link.name}: could not join the cluster at {self._controller_address}",
                hint="the address must be reachable from the node",
            )
        except (GenieError, asyncio.CancelledError):
            await self._revoke_join_token(created.record.token_id, link.name)
            raise

    async def _revoke_join_token(self, token_id: str, node: str) -> None:
        try:
            await self._client.revoke_token(token_id)
        except GenieError as error:
            self._on_progress(node, f"join token {token_id} could not be revoked: {error}")

    async def _is_node_connected(self, name: str) -> bool:
        return any(
            view.info.node_id == name and view.info.status not in _NOT_CONNECTED_STATUSES
            for view in await self._client.nodes()
        )

    async def _wait_until_connected(self, name: str) -> None:
        try:
            async with asyncio.timeout(_AGENT_CONNECT_TIMEOUT_S):
                while not await self._is_node_connected(name):  # noqa: ASYNC110 - the state is in another process
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            raise DeadlineError(
                f"node {name} has joined, but is not connected to the cluster "
                f"after {_AGENT_CONNECT_TIMEOUT_S:g} s"
            ) from None

    async def _forget_node_if_member(self, name: str) -> bool:
        """Remove the node from the cluster; False if it is not a member.

        Retried, because the controller rejects it until the agent's connection has closed.
        """
        deadline = asyncio.get_running_loop().time() + _AGENT_CONNECT_TIMEOUT_S
        while True:
            try:
                await self._client.forget_node(name)
                return True
            except NodeNotFoundError:
                return False
            except GenieError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_POLL_INTERVAL_S)


@dataclass(frozen=True)
class _NodePaths:
    """Paths on the node, quoted for sh."""

    root: str
    environment_folder: str
    state_folder: str

    @property
    def python_program(self) -> str:
        return f"{self.environment_folder}/bin/python"

    @property
    def genie_program(self) -> str:
        return f"{self.environment_folder}/bin/genie"

    @property
    def state_dir_assignment(self) -> str:
        return f"GENIE_STATE_DIR={self.state_folder}"


def _make_node_paths(root: str) -> _NodePaths:
    return _NodePaths(
        *(
            quote_path(path)
            for path in (root, f"{root}/{_ENVIRONMENT_FOLDER_NAME}", f"{root}/{_STATE_FOLDER_NAME}")
        )
    )


def _make_stop_agent_command(places: _NodePaths) -> str:
    """A line of sh that stops the agent, if one is installed."""
    genie = places.genie_program
    return f"if [ -x {genie} ]; then {places.state_dir_assignment} {genie} down; fi"


async def _run_shell(
    link: NodeConnection, line: str, *, stdin: bytes = b"", timeout_s: float
) -> CommandResult:
    """Run a line of sh, whatever the login shell is."""
    done = await link.run_command(make_login_shell_command(line), stdin=stdin, timeout_s=timeout_s)
    if done.exit_code != 0:
        await check_login_shell(link, timeout_s=timeout_s)
    return done


async def _upload_file(link: NodeConnection, folder: str, name: str, content: bytes) -> None:
    command = f"mkdir -p -- {folder} && cat > {folder}/{shlex.quote(name)}"
    _require_success(
        await _run_shell(link, command, stdin=content, timeout_s=_INSTALL_TIMEOUT_S),
        f"node {link.name}: could not upload {name}",
    )


def _require_success(done: CommandResult, problem: str, *, hint: str = "") -> CommandResult:
    if done.exit_code != 0:
        lines = (
            (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-_OUTPUT_LINES_SHOWN:]
        )
        raise GridError(f"{problem}: {' / '.join(lines) or f'exit code {done.exit_code}'}", hint=hint)
    return done


def _parse_version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
