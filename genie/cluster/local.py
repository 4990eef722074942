"""The processes of a cluster on this machine: controller and agent as children, kept up, stopped in order.

    async with up(settings, progress=print) as cluster:
        await cluster.wait()

The children live in sessions of their own and survive the death of this process; what they are is
written down in the state directory, so that `stop_running` ends exactly those. Not for: what
they do, and for agents on other machines (agent/).
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genie.agent import joining
from genie.agent.identity import AGENTS_DIR, read_controllers
from genie.agent.journal import REGISTERED_FILE
from genie.cluster import processes
from genie.cluster.children import Child
from genie.cluster.client import ClusterClient, open_client
from genie.config import ClusterConfig, Settings
from genie.controller.admission import check_bind
from genie.errors import (
    AddressInUseError,
    AgentRunningError,
    ConfigError,
    DeadlineError,
    GenieError,
    TokenMissingError,
    UnreachableError,
    UsageError,
)
from genie.model.names import address_text, checked_node_id, node_id_from, parse_endpoint
from genie.model.node import NodeInfo, NodeStatus
from genie.model.tenant import TokenKind
from genie.runtime import files
from genie.runtime.credentials import LOCAL_CLUSTER_FILE, OWNER_TOKEN_FILE, LocalCluster, is_loopback
from genie.runtime.network import TcpNetwork
from genie.runtime.placers import why_plain
from genie.tenancy.access import NO_PIN, parse_token

_log = logging.getLogger(__name__)

START_S = 30.0
_STEP_S = 0.02
_CONTROLLER_GRACE_S = 10.0
_AGENT_SLACK_S = 5.0
_QUIET_S = 2.0
"""After this long a wait is told of."""
_LOCK_FILE = "up.lock"
CONTROLLER, AGENT, KEEPER = "controller", "agent", "up"

Progress = Callable[[str], None]
_NOT_REGISTERED = (NodeStatus.INITIALIZING, NodeStatus.DISCONNECTED)


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """What runs on this machine for one state directory. `cluster` is None for an agent alone."""

    cluster: LocalCluster | None
    pids: dict[str, int]
    """By name: up, controller, agent."""
    node_id: str = ""
    """The node that the agent is."""

    def __str__(self) -> str:
        where = f"at {self.cluster.host}:{self.cluster.port} " if self.cluster else ""
        return f"{where}({', '.join(f'{name}: process {pid}' for name, pid in self.pids.items())})"


class Supervisor:
    """Starts the children, keeps them running, stops them. Made by `up` and `up_agent`."""

    def __init__(self, settings: Settings, *, progress: Progress) -> None:
        self.node_id = local_node_id(settings)
        self.cluster: LocalCluster | None = None
        """Where the controller listens, once it does."""
        self._settings = settings
        self._state_dir = settings.paths.state_dir.absolute()
        self._progress = _never_failing(progress)
        self._controller = Child(CONTROLLER, module="genie.controller", state_dir=self._state_dir)
        self._agent = Child(AGENT, module="genie.agent", state_dir=self._state_dir)
        self._watches: list[asyncio.Task[None]] = []
        self._joining = ""
        """Address of the cluster that has not taken the agent in yet."""

    @property
    def pids(self) -> dict[str, int]:
        """The children's, by name."""
        found = {child.name: child.pid for child in (self._controller, self._agent)}
        return {name: pid for name, pid in found.items() if pid is not None}

    async def wait(self) -> None:
        """Returns when every child was stopped by someone else; a crashed one is started again meanwhile."""
        await asyncio.gather(*(asyncio.shield(task) for task in self._watches))

    async def start_controller(self) -> LocalCluster:
        """Returns when it listens and knows whether it leads."""
        config = self._settings.controller
        check_bind(config)
        _check_port_free(config.bind, config.port)
        (self._state_dir / LOCAL_CLUSTER_FILE).unlink(missing_ok=True)
        self._progress(f"starting the controller on {config.bind}")
        self._controller.start(self._controller_arguments(config.port))
        while (found := LocalCluster.read(self._state_dir)) is None:
            self._controller.check_alive()
            await asyncio.sleep(_STEP_S)
        self.cluster = found
        # A port that the system chose must stay the same after a crash: agents know it.
        self._controller.restart_with(self._controller_arguments(found.port))
        self._progress(f"the controller listens on {found.host}:{found.port}")
        if why := why_plain():
            self._progress(why)
        return found

    async def start_agent(self, access: ClusterConfig) -> NodeInfo | None:
        """Returns when the cluster has taken it in; with a join token alone, which cannot ask for nodes,
        without its description."""
        node_dir = self._known_node(access) or await self._join(access)
        self.node_id = node_dir.name
        self._progress(f"starting the agent of node {self.node_id}")
        before = _number_in(node_dir / "incarnation")
        self._joining = address_text(*_address(access))
        self._agent.start(
            [
                *("--state-dir", str(self._state_dir)),
                *("--node-id", self.node_id),
                *("--controller", self._joining),
                *self._place_arguments(),
            ],
            node_id=self.node_id,
        )
        await self._wait_registered(node_dir, after=before)
        node = await self._described(access, after=before) if _may_ask(access) else None
        self._joining = ""
        self._progress(
            f"node {self.node_id} is in the cluster" + (f" with {_gpus_text(node)}" if node else "")
        )
        return node

    def watch(self, group: asyncio.TaskGroup) -> None:
        for child in (self._controller, self._agent):
            if child.pid is not None:
                self._watches.append(group.create_task(child.watch(self._crashed)))

    async def stop(self) -> None:
        """Agent first, so that its last reports arrive; then the controller."""
        for task in self._watches:
            task.cancel()
        if self._agent.pid is not None:
            self._progress("stopping the agent")
            await self._agent.stop(grace_s=self._settings.agent.stop_grace_s + _AGENT_SLACK_S)
        if self._controller.pid is not None:
            self._progress("stopping the controller")
            await self._controller.stop(grace_s=_CONTROLLER_GRACE_S)
            _forget_cluster(self._state_dir)

    async def leader_of(self, found: LocalCluster) -> ClusterConfig | None:
        """The owner's access to the controller that leads: the one here, or, where that one stands by, the
        other. None where no owner's token is here, which only a controller that stands by has not."""
        if not (self._state_dir / OWNER_TOKEN_FILE).exists():
            self._progress(f"standby: another controller leads; {_copy_hint(self._state_dir)}")
            return None
        access = owner_access(self._state_dir, found)
        async with self._client(access) as client:
            while True:
                status = await client.status()
                if status.leading:
                    return access
                if status.leader and status.leader != client.where:
                    break
                await asyncio.sleep(_STEP_S)
        self._progress(f"standby: the leader is {status.leader}")
        host, port = parse_endpoint(status.leader)
        return replace(access, master_addr=host, master_port=port)

    def too_late(self, timeout_s: float, what: str) -> GenieError:
        """What it is that did not happen in this time."""
        if not self._joining:
            return DeadlineError(
                f"{what} did not come up within {timeout_s:g} s",
                hint=f"the logs are in {self._agent.log_path.parent}",
            )
        said = self._agent.last_lines(count=1)
        return UnreachableError(
            f"{self._joining} did not take node {self.node_id} in within {timeout_s:g} s"
            + (f"; the agent said last: {said[0]}" if said else ""),
            hint=f"check the address and the network; the agent's log is {self._agent.log_path}",
        )

    def _controller_arguments(self, port: int) -> list[str]:
        config = self._settings.controller
        return [
            *("--bind", config.bind),
            *("--port", str(port)),
            *("--store", config.store),
            *("--tls", config.tls),
            *("--state-dir", str(self._state_dir)),
        ]

    def _place_arguments(self) -> list[str]:
        """What may have been said on the command line, which the agent does not see otherwise."""
        config = self._settings.agent
        labels = ",".join(f"{key}={value}" for key, value in config.labels.items())
        return [
            *((f"--labels={labels}",) if labels else ()),
            *((f"--rack={config.rack}",) if config.rack else ()),
        ]

    def _known_node(self, access: ClusterConfig) -> Path | None:
        """The directory of a node that has joined this cluster from here before.

        UsageError where nobody said which of several it is, and there is no token to make another one with.
        """
        tokens = sorted((self._state_dir / AGENTS_DIR).glob("*/node.token"))
        joined = [path.parent for path in tokens if _has_joined(path.parent, access)]
        # Where the host's name was taken, the controller has put a number behind it.
        given = re.compile(re.escape(self.node_id) + ("" if self._is_named else r"(-\d+)?"))
        named = [path for path in joined if given.fullmatch(path.name)]
        if named or self._is_named or access.token is not None:
            return named[0] if named else None
        if len(joined) > 1:
            raise UsageError(
                f"several nodes of this cluster live here: {', '.join(path.name for path in joined)}",
                hint="say which with --node-id",
            )
        return joined[0] if joined else None

    @property
    def _is_named(self) -> bool:
        """Whether someone chose the name of this node."""
        return self._settings.sources["cluster.node_id"] != "default"

    async def _join(self, access: ClusterConfig) -> Path:
        """A new node, admitted with a join token: the given one, or one that the owner's token asks for."""
        where = address_text(*_address(access))
        if access.token is None:
            raise TokenMissingError(
                f"joining {where} needs a token",
                hint="make one with 'genie token create --join' on the cluster's machine",
            )
        text = access.token
        host, port = _address(access)
        if _may_ask(access):
            async with self._client(access) as client:
                text = (await client.create_token(TokenKind.JOIN, name=self.node_id)).token
        self._progress(f"joining the cluster as {self.node_id}")
        return await joining.join(
            host,
            port,
            text,
            state_dir=self._state_dir,
            node_id_wish=self.node_id,
            network=TcpNetwork(),
            # A name that was made of the host's may get a number; one that someone chose may not.
            exact=self._is_named,
        )

    async def _wait_registered(self, node_dir: Path, *, after: int) -> None:
        """Until the agent has written down that the controller took it in, in a later life than `after`."""
        loop = asyncio.get_running_loop()
        told_s = loop.time() + _QUIET_S
        while _registered(node_dir) <= after:
            self._agent.check_alive()
            if loop.time() >= told_s:
                told_s = float("inf")
                self._progress(f"waiting for {self._joining} to take node {self.node_id} in")
            await asyncio.sleep(_STEP_S)

    async def _described(self, access: ClusterConfig, *, after: int) -> NodeInfo:
        async with self._client(access) as client:
            while True:
                self._agent.check_alive()
                for view in await client.nodes():
                    node = view.info
                    known = node.node_id == self.node_id and node.incarnation > after
                    if known and node.status not in _NOT_REGISTERED:
                        return node
                await asyncio.sleep(_STEP_S)

    @asynccontextmanager
    async def _client(self, access: ClusterConfig) -> AsyncIterator[ClusterClient]:
        async with open_client(replace(self._settings, cluster=access), program="genie up") as client:
            yield client

    def _crashed(self, what: str) -> None:
        _log.error("%s", what)
        self._progress(what)


@asynccontextmanager
async def up(
    settings: Settings, *, progress: Progress, timeout_s: float = START_S, agent: bool = True
) -> AsyncIterator[Supervisor]:
    """A cluster on this machine for the length of the block: controller and agent, both known to work.
    Without `agent` only the controller. A controller that stands by is up, too; its agent joins through
    the one that leads, which takes the owner's token of that one's state directory.

    AgentRunningError when this state directory has one already; AddressInUseError when the port is
    taken; LaunchError with the end of its log when a child does not come up.
    """
    async with _supervised(settings, progress) as (supervisor, group):
        async with _in_time(timeout_s, supervisor, "the cluster"):
            access = await supervisor.leader_of(await supervisor.start_controller())
            if agent and access is None:
                raise TokenMissingError(
                    "the agent of a controller that stands by needs the owner's token",
                    hint=_copy_hint(settings.paths.state_dir),
                )
            if agent and access is not None:
                await supervisor.start_agent(access)
        supervisor.watch(group)
        yield supervisor


@asynccontextmanager
async def up_agent(
    settings: Settings, access: ClusterConfig, *, progress: Progress, timeout_s: float = START_S
) -> AsyncIterator[Supervisor]:
    """Only an agent, in the cluster that `access` names, for the length of the block.

    UnreachableError when that cluster has not taken it in within `timeout_s`.
    """
    async with _supervised(settings, progress) as (supervisor, group):
        async with _in_time(timeout_s, supervisor, "the agent"):
            await supervisor.start_agent(access)
        supervisor.watch(group)
        yield supervisor


@asynccontextmanager
async def _supervised(
    settings: Settings, progress: Progress
) -> AsyncIterator[tuple[Supervisor, asyncio.TaskGroup]]:
    state_dir = files.make_private_directory(settings.paths.state_dir)
    supervisor = Supervisor(settings, progress=progress)
    failure: BaseException | None = None
    with _lock(state_dir):
        if (found := find_running(state_dir)) is not None:
            raise _already(state_dir, found)
        async with asyncio.TaskGroup() as group:
            try:
                yield supervisor, group
            except (Exception, asyncio.CancelledError) as error:
                # Raised again below: inside the group it would come out wrapped in an ExceptionGroup.
                failure = error
            finally:
                try:
                    await _to_the_end(supervisor.stop())
                except (GenieError, asyncio.CancelledError) as error:
                    failure = failure or error
    if failure is not None:
        raise failure


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Waits for work that must not be left half done, and has its own end, however often it is cancelled
    meanwhile. That it was comes out afterwards."""
    trouble: BaseException | None = None

    async def carry_out() -> None:
        nonlocal trouble
        try:
            await work
        except GenieError as error:  # inside the group it would come out wrapped in an ExceptionGroup
            trouble = error

    async with asyncio.TaskGroup() as group:
        task = group.create_task(carry_out())
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                trouble = trouble or error
    if trouble is not None:
        raise trouble


def find_running(state_dir: Path) -> RunningCluster | None:
    """What is alive of what was started for this state directory."""
    records = [processes.read_record(state_dir, name) for name in (KEEPER, CONTROLLER, AGENT)]
    pids = {record.name: record.pid for record in records if record is not None}
    if not pids:
        return None
    node_id = next((record.node_id for record in records if record and record.name == AGENT), "")
    return RunningCluster(LocalCluster.read(state_dir) if CONTROLLER in pids else None, pids, node_id)


async def stop_running(
    state_dir: Path, *, progress: Progress = lambda _line: None, agent_grace_s: float = 5.0
) -> RunningCluster | None:
    """Ends what `find_running` finds, in order, and says what it was; None when there was nothing."""
    progress = _never_failing(progress)
    found = find_running(state_dir)
    agent_s = agent_grace_s + _AGENT_SLACK_S
    # The keeper first: it stops the other two in order, and would start them again otherwise.
    graces = {KEEPER: agent_s + _CONTROLLER_GRACE_S + _AGENT_SLACK_S, AGENT: agent_s}
    for name in (KEEPER, AGENT, CONTROLLER):
        record = processes.read_record(state_dir, name)
        if record is not None:
            progress(f"stopping {'the cluster' if name == KEEPER else f'the {name}'} (process {record.pid})")
            await processes.end_process(record, grace_s=graces.get(name, _CONTROLLER_GRACE_S))
        processes.forget_record(state_dir, name)
    if found is not None and CONTROLLER in found.pids:
        _forget_cluster(state_dir)
    return found


def check_agent_is_of(running: RunningCluster, access: ClusterConfig, *, state_dir: Path) -> None:
    """AgentRunningError when the agent that runs here is of another cluster than the one of `access`."""
    node_dir = state_dir / AGENTS_DIR / running.node_id
    if running.node_id and not _has_joined(node_dir, access, at_address=True):
        raise AgentRunningError(
            f"an agent of another cluster than {address_text(*_address(access))} runs here {running}",
            hint="'genie down' stops it; GENIE_STATE_DIR names another directory than " + str(state_dir),
        )


def local_node_id(settings: Settings) -> str:
    """The name of this machine's node: the one that was set, or one made of the host name."""
    wish = settings.cluster.node_id
    return checked_node_id(wish) if wish is not None else node_id_from(socket.gethostname())


def owner_access(state_dir: Path, cluster: LocalCluster) -> ClusterConfig:
    """Access to the cluster that this machine hosts, with its owner's token."""
    try:
        token = (state_dir / OWNER_TOKEN_FILE).read_text("utf-8").strip()
    except OSError as error:
        raise TokenMissingError(f"the owner's token cannot be read: {error}") from error
    return ClusterConfig(
        discovery_method="address", master_addr=cluster.host, master_port=cluster.port, token=token
    )


def _never_failing(progress: Progress) -> Progress:
    """A terminal that has gone, or a full disk under a log, must not end what is being told of."""

    def tell(line: str) -> None:
        try:
            progress(line)
        except (OSError, ValueError) as error:
            _log.warning("could not be told (%s): %s", error, line)

    return tell


@contextmanager
def _lock(state_dir: Path) -> Iterator[None]:
    """Held by the process that starts and keeps children here; the system frees it when that one dies."""
    import fcntl  # not on every laptop, and only needed to host

    folder = files.make_private_directory(state_dir / processes.RUN_FOLDER)
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _already(state_dir, find_running(state_dir)) from None
        yield
    finally:
        os.close(descriptor)


def _already(state_dir: Path, found: RunningCluster | None) -> AgentRunningError:
    what = f"already running {found}" if found else f"another process is starting a cluster in {state_dir}"
    return AgentRunningError(
        what, hint=f"'genie down' stops it; GENIE_STATE_DIR names another directory than {state_dir}"
    )


@asynccontextmanager
async def _in_time(timeout_s: float, supervisor: Supervisor, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise supervisor.too_late(timeout_s, what) from None


def _check_port_free(host: str, port: int) -> None:
    """Fails early and by name. The controller would say the same, but only in its log."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(
                    f"port {port} on {host} is in use",
                    hint="stop what listens there ('genie down' if it is Genie) or choose another port",
                ) from error


def _may_ask(access: ClusterConfig) -> bool:
    """A join token opens the door for a node, and nothing else."""
    return access.token is not None and parse_token(access.token).kind is not TokenKind.JOIN


def _address(access: ClusterConfig) -> tuple[str, int]:
    if access.master_addr is None:
        raise ConfigError("there is no address of a controller", hint="pass master_addr")
    return parse_endpoint(access.master_addr, what="master_addr", port=access.master_port)


def _has_joined(node_dir: Path, access: ClusterConfig, *, at_address: bool = False) -> bool:
    """Whether this is a node of the cluster that `access` means.

    The pin of the token tells clusters apart. Without a token, and with `at_address` in clusters without
    TLS, which have no pins, the address has to be one that the node has kept.
    """
    pin = parse_token((node_dir / "node.token").read_text("utf-8")).pin
    if access.token is not None:
        same = parse_token(access.token).pin == pin
        return same and (pin != NO_PIN or not at_address or _keeps(node_dir, *_address(access)))
    return _keeps(node_dir, *_address(access))


def _keeps(node_dir: Path, host: str, port: int) -> bool:
    try:
        known = read_controllers(node_dir)
    except GenieError:
        return False
    return any(
        port == at and (host == name or (is_loopback(host) and is_loopback(name))) for name, at in known
    )


def _registered(node_dir: Path) -> int:
    """The last life of the node in which a controller took it in; 0 for none."""
    try:
        return int(json.loads((node_dir / REGISTERED_FILE).read_text("utf-8"))["incarnation"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):
        return 0


def _forget_cluster(state_dir: Path) -> None:
    """Its controller was stopped: commands here shall not look for it any more."""
    (state_dir / LOCAL_CLUSTER_FILE).unlink(missing_ok=True)


def _copy_hint(state_dir: Path) -> str:
    return f"copy {OWNER_TOKEN_FILE} of the first controller's state directory to {state_dir}"


def _gpus_text(node: NodeInfo) -> str:
    names = [gpu.name for gpu in node.gpus]
    return f"{len(names)} accelerator{'' if len(names) == 1 else 's'}" + (
        f": {', '.join(names)}" if names else ""
    )
