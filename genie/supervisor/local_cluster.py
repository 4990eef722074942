"""The supervisor: runs etcd member, controller and agent as child processes and restarts them after a crash.

    async with run_local_cluster(settings, progress=print) as cluster:
        await cluster.wait()

The children have their own sessions and survive the death of this process. Process records in the state
directory identify them, so that `stop_running_cluster` ends exactly those.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genie.agent import KEEP_JOBS_SIGNAL
from genie.agent.identity import AGENTS_DIR
from genie.agent.journal import REGISTERED_FILE
from genie.agent.launcher import kill_jobs_of_stopped_agents
from genie.config import ClusterConfig, Settings
from genie.controller.etcd.local_member import LocalMember, etcd_data_directory
from genie.controller.nodes.admission import check_bind_address
from genie.controller.placement.placers import why_scheduler_not_compiled
from genie.controller.store.open import LOCAL_ETCD_STORE
from genie.errors import (
    AgentRunningError,
    ConfigError,
    DeadlineError,
    GenieError,
    NodeNotAcceptedError,
    StoreFullError,
    TokenMissingError,
    UnreachableError,
    UsageError,
)
from genie.model.messages import GetStatus
from genie.model.names import address_text
from genie.model.node import NodeInfo, NodeStatus
from genie.processes import files
from genie.processes.tasks import unwrapped_task_group
from genie.runtime.controller_connection import fetch_nodes
from genie.runtime.credentials import LOCAL_CLUSTER_FILE, OWNER_TOKEN_FILE, LocalCluster, read_owner_token
from genie.runtime.network import TcpNetwork
from genie.supervisor import process_records, this_machine
from genie.supervisor.child import Child, python_module_command
from genie.supervisor.etcd_majority import format_join_again, wait_for_majority, was_removed_from_cluster
from genie.supervisor.etcd_member import (
    ETCD,
    EtcdMemberProcess,
    new_local_member,
    remember_and_get_runs_agent,
    uses_local_etcd,
    with_settings_of_local_member,
)
from genie.supervisor.incomplete_join import IncompleteJoin, mark_join_complete, undo_incomplete_join
from genie.supervisor.local_node import (
    LocalNode,
    address_of_access,
    can_list_nodes,
    has_joined,
    open_connection_of_access,
)
from genie.supervisor.machine_role import check_may_start_as_node, check_may_start_cluster
from genie.supervisor.server_join import ServerJoin, check_not_a_server, parse_server_join_token

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
SERVER_JOIN_TIMEOUT_S = 180.0
SERVER_START_TIMEOUT_S = 300.0
_START_POLL_S = 0.02
_NODE_LIST_POLL_S_MAX = 0.5
_CONTROLLER_CONNECT_TIMEOUT_S = 10.0
_CONTROLLER_CALL_TIMEOUT_S = 20.0
_CONTROLLER_STOP_GRACE_S = 10.0
_ETCD_STOP_GRACE_S = 10.0
_AGENT_STOP_GRACE_MARGIN_S = 5.0
_WAIT_MESSAGE_DELAY_S = 2.0
"""A longer wait is reported as progress."""
_PORT_IN_USE_HINT = "stop the program that uses it ('genie down' for Genie), or choose another --port"
CONTROLLER, AGENT, SUPERVISOR = process_records.CONTROLLER, process_records.AGENT, process_records.SUPERVISOR
_PROCESS_NAMES = (SUPERVISOR, CONTROLLER, AGENT, ETCD)

ProgressPrinter = Callable[[str], None]
_NOT_REGISTERED_STATUSES = (NodeStatus.INITIALIZING, NodeStatus.DISCONNECTED)


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """The running processes of one state directory. `cluster` is None if only an agent runs."""

    cluster: LocalCluster | None
    pids: dict[str, int]
    """By name: up, controller, agent, etcd."""
    node_id: str = ""
    """Node ID of the agent."""

    def __str__(self) -> str:
        where = f"at {address_text(self.cluster.host, self.cluster.port)} " if self.cluster else ""
        return f"{where}({', '.join(f'{name}: process {pid}' for name, pid in self.pids.items())})"


class Supervisor:
    """Starts, restarts and stops the children. Created by `run_local_cluster` and `run_local_agent`."""

    def __init__(self, settings: Settings, *, progress: ProgressPrinter, is_program: bool) -> None:
        self.cluster: LocalCluster | None = None
        """Address of the controller, once it listens."""
        self._is_program = is_program
        """Whether this process has a process record."""
        self._settings = settings
        self._state_dir = settings.paths.state_dir.absolute()
        self._progress = _ignore_write_errors(progress)
        self._local_node = LocalNode(settings, progress=self._progress)
        self._controller = Child(
            CONTROLLER, command=python_module_command("genie.controller"), state_dir=self._state_dir
        )
        self._agent = Child(AGENT, command=python_module_command("genie.agent"), state_dir=self._state_dir)
        self._etcd = EtcdMemberProcess(
            settings.controller, state_dir=self._state_dir, progress=self._progress
        )
        self._restart_tasks: list[asyncio.Task[None]] = []
        self._is_stopped = False
        self._keeps_jobs = True
        """Until the start is complete: one that fails must not end what an earlier agent has left running."""
        self._address_being_joined = ""
        """Address of the cluster while the agent has not registered."""

    @property
    def node_id(self) -> str:
        """Node ID of the agent; before that has joined, the one to request."""
        return self._local_node.node_id

    @property
    def pids(self) -> dict[str, int]:
        """Process IDs of the children, by name."""
        found = {child.name: child.pid for child in self._children}
        return {name: pid for name, pid in found.items() if pid is not None}

    @property
    def _children(self) -> tuple[Child, ...]:
        return self._etcd.child, self._controller, self._agent

    def record_ready(self) -> None:
        """Records that all children have started, for `--detach`."""
        process_records.record_process(self._state_dir, SUPERVISOR, os.getpid(), ready=True)

    async def wait(self) -> None:
        """Returns when other processes have stopped all children; restarts crashed ones meanwhile."""
        await asyncio.gather(*(asyncio.shield(task) for task in self._restart_tasks))

    async def launch_etcd(self) -> LocalMember:
        """Launches the etcd member of this machine: the one that it has, or the first one of a new
        cluster."""
        member, data = LocalMember.read(self._state_dir), etcd_data_directory(self._state_dir)
        if member is None:
            member = await asyncio.to_thread(new_local_member, self._settings.controller, name=self.node_id)
        elif not (data / "member").exists():  # etcd would start a new cluster
            raise ConfigError(
                f"the data of this machine's etcd member {member.name}, {data}, is missing",
                hint="restore a backup with 'genie store restore FILE'; if other servers are left, remove "
                f"the member there ('genie etcd remove {member.name}') and join again",
            )
        await self._etcd.launch(member)
        return member

    async def wait_for_etcd_majority(self, member: LocalMember) -> None:
        """Returns when the etcd cluster serves requests; reports meanwhile which members do not run, also in
        the record of this process."""
        child, reported = self._etcd.child, ""
        if IncompleteJoin.read(self._state_dir) is not None:
            self._progress("continuing the join of this machine as a server, which was interrupted")

        def report(missing_servers: str) -> None:
            nonlocal reported
            self._progress(missing_servers)
            if missing_servers != reported:
                self._record_missing_servers(missing_servers)
                reported = missing_servers

        await wait_for_majority(member, child, state_dir=self._state_dir, progress=report)
        if reported:
            self._record_missing_servers("")
        mark_join_complete(self._state_dir)

    def _record_missing_servers(self, missing_servers: str) -> None:
        if not self._is_program:
            return
        try:
            process_records.record_process(
                self._state_dir, SUPERVISOR, os.getpid(), missing_servers=missing_servers
            )
        except StoreFullError as error:
            _log.warning("could not record what this server waits for: %s", error)

    def report_refused_node(self, error: NodeNotAcceptedError) -> None:
        """Says why no agent is started, and how this machine becomes a node again."""
        self._progress(
            f"warning: no agent was started: {error.message}; to add this machine again, run 'genie down "
            "--keep-jobs' and 'genie up --rejoin'"
        )

    async def join_as_server(self, access: ClusterConfig, *, agent: bool) -> None:
        """Makes this machine a server of the cluster of `access`: etcd member, controller, and agent if
        `agent`. Undoes everything if one of them does not start."""
        if access.token is None:
            raise TokenMissingError(
                "joining as a server requires a token",
                hint="create one with 'genie token create --server' and pass it with --token-file FILE",
            )
        token = parse_server_join_token(access.token)
        check_not_a_server(self._state_dir)
        self._check_controller_can_listen()  # before the join, which uses up the token
        # Otherwise all jobs here are those of the node that a failed join removes again.
        self._keeps_jobs = (self._state_dir / AGENTS_DIR).exists()
        join = ServerJoin(
            self._settings.controller,
            self._etcd,
            state_dir=self._state_dir,
            network=TcpNetwork(),
            progress=self._progress,
        )
        host, port = address_of_access(access)
        try:
            await join.run(host, port, token, name=self.node_id, runs_agent=agent)
            self._local_node.use_name_of_member()
            own_access = await self.wait_for_leader(await self.start_controller())
            assert own_access is not None, "the join has written an owner token"
            if agent:
                # The token of a server is that of the owner: a node that was removed is added again.
                await self.start_agent(own_access, rejoin=True)
            join.mark_complete()
        except BaseException:
            await _await_despite_cancellation(self._undo_server_join(join))
            raise

    async def _undo_server_join(self, join: ServerJoin) -> None:
        try:
            await join.remove_added_member()
        finally:
            await self.stop()
            await join.revoke_owner_token()
            join.remove_written_files()

    def _check_controller_can_listen(self) -> None:
        config = self._settings.controller
        check_bind_address(config)
        this_machine.check_port_free(config.bind, config.port, hint=_PORT_IN_USE_HINT)

    async def start_controller(self) -> LocalCluster:
        """Starts the controller and waits until it listens and knows whether it leads."""
        config = self._settings.controller
        self._check_controller_can_listen()
        (self._state_dir / LOCAL_CLUSTER_FILE).unlink(missing_ok=True)
        self._progress(f"starting the controller on {config.bind}")
        self._controller.start(self._controller_arguments(config.port))
        progress_at_s = asyncio.get_running_loop().time() + _WAIT_MESSAGE_DELAY_S
        while (found := LocalCluster.read(self._state_dir)) is None:
            self._controller.check_not_exited()
            if uses_local_etcd(self._settings) and asyncio.get_running_loop().time() >= progress_at_s:
                progress_at_s = float("inf")
                self._progress("waiting for the controller to find the leader")
            await asyncio.sleep(_START_POLL_S)
        self.cluster = found
        # A port chosen by the system must stay the same after a crash: agents use it.
        self._controller.set_restart_arguments(self._controller_arguments(found.port))
        self._progress(f"the controller listens on {address_text(found.host, found.port)}")
        if why := why_scheduler_not_compiled():
            self._progress(why)
        return found

    async def start_agent(self, access: ClusterConfig, *, rejoin: bool = False) -> NodeInfo | None:
        """Starts the agent and waits until it has registered. Returns None with a join token, which cannot
        list nodes. Raises NodeNotAcceptedError for a node that the cluster refuses, unless `rejoin` or a join
        token allows it to join again."""
        node_dir = await self._local_node.find_or_join(access, rejoin=rejoin)
        self._progress(f"starting the agent of node {self.node_id}")
        before = _read_int_file(node_dir / "incarnation")
        self._address_being_joined = address_text(*address_of_access(access))
        self._agent.start(
            [
                *("--state-dir", str(self._state_dir)),
                *("--node-id", self.node_id),
                *("--controller", self._address_being_joined),
                *self._label_arguments(),
            ],
            node_id=self.node_id,
        )
        await self._wait_until_agent_registered(node_dir, after_incarnation=before)
        node = (
            await self._wait_until_node_listed(access, after_incarnation=before)
            if can_list_nodes(access)
            else None
        )
        self._address_being_joined = ""
        self._progress(
            f"node {self.node_id} has joined the cluster" + (f" with {_format_gpus(node)}" if node else "")
        )
        return node

    def complete_start(self, group: asyncio.TaskGroup) -> None:
        """Restarts crashed children from now on. From now on, `stop` ends the jobs of this machine."""
        self._keeps_jobs = False
        for child in self._children:
            if child.pid is not None:
                self._restart_tasks.append(group.create_task(self._restart_child_after_crashes(child)))

    async def _restart_child_after_crashes(self, child: Child) -> None:
        await child.restart_after_crashes(self._report_crash)
        if child is not self._etcd.child or not was_removed_from_cluster(child):
            return
        # The controller would go on with the etcd members of the others. The agent remains a node of them.
        self._progress(
            "warning: this server was removed from the cluster with 'genie etcd remove': stopping the "
            f"controller; to add it again, run 'genie down --keep-jobs', {format_join_again(self._state_dir)}"
        )
        await self._stop_controller()

    def keep_jobs_on_stop(self) -> None:
        """Keeps the jobs of this machine running when `stop` stops the agent; the next agent adopts them."""
        self._keeps_jobs = True

    async def stop(self) -> None:
        """Stops the agent first, so that its last reports arrive, then the controller, then its store.

        Ends the jobs of this machine if the start was complete, unless `keep_jobs_on_stop` was called.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        for task in self._restart_tasks:
            task.cancel()
        if self._agent.pid is not None:
            self._progress("stopping the agent")
            await self._agent.stop(
                grace_s=self._settings.agent.stop_grace_s + _AGENT_STOP_GRACE_MARGIN_S,
                number=KEEP_JOBS_SIGNAL if self._keeps_jobs else signal.SIGTERM,
            )
        if not self._keeps_jobs and (count := await kill_leftover_jobs(self._state_dir)):
            self._progress(f"ended processes of jobs that an agent had left running: {count}")
        if self._controller.pid is not None:
            self._progress("stopping the controller")
            await self._stop_controller()
        if self._etcd.child.pid is not None:
            self._progress("stopping etcd")
            await self._etcd.child.stop(grace_s=_ETCD_STOP_GRACE_S)

    async def _stop_controller(self) -> None:
        await self._controller.stop(grace_s=_CONTROLLER_STOP_GRACE_S)
        _remove_local_cluster_file(self._state_dir)

    async def wait_for_leader(self, found: LocalCluster) -> ClusterConfig | None:
        """Returns the owner's access to this controller when the cluster has a leader; None for a standby
        without an owner token. It is not the access to that leader, which may have been lost meanwhile: a
        standby finds the next one."""
        if not (self._state_dir / OWNER_TOKEN_FILE).exists():
            self._progress(
                f"standby: another controller leads; {_copied_state_directory_hint(self._state_dir)}"
            )
            return None
        access = make_owner_access(self._state_dir, found)
        async with open_connection_of_access(self._settings, access) as connection:
            while True:
                status = await connection.call(GetStatus(), timeout_s=_CONTROLLER_CALL_TIMEOUT_S)
                if status.leading:
                    return access
                if status.leader and status.leader != connection.where:
                    break
                await asyncio.sleep(_START_POLL_S)
        self._progress(f"standby: the leader is {status.leader}")
        return access

    def start_timeout_error(self, timeout_s: float, what: str) -> GenieError:
        """The error for a start that took longer than `timeout_s`."""
        if not self._address_being_joined:
            return DeadlineError(
                f"{what} did not start within {timeout_s:g} s",
                hint=f"see the logs in {self._agent.log_path.parent}",
            )
        last = self._agent.last_log_lines(count=1)
        return UnreachableError(
            f"node {self.node_id} could not register with {self._address_being_joined} within {timeout_s:g} s"
            + (f"; last line of the agent's log: {last[0]}" if last else ""),
            hint=f"check the address and the network; see the log {self._agent.log_path}",
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

    def _label_arguments(self) -> list[str]:
        """Labels and rack, which may come from the command line of this process."""
        config = self._settings.agent
        labels = ",".join(f"{key}={value}" for key, value in config.labels.items())
        return [
            *((f"--labels={labels}",) if labels else ()),
            *((f"--rack={config.rack}",) if config.rack else ()),
        ]

    async def _wait_until_agent_registered(self, node_dir: Path, *, after_incarnation: int) -> None:
        """Waits until the agent has registered with an incarnation greater than `after_incarnation`."""
        loop = asyncio.get_running_loop()
        progress_at_s = loop.time() + _WAIT_MESSAGE_DELAY_S
        while _registered_incarnation(node_dir) <= after_incarnation:
            self._agent.check_not_exited()
            if loop.time() >= progress_at_s:
                progress_at_s = float("inf")
                self._progress(
                    f"waiting for node {self.node_id} to register with {self._address_being_joined}"
                )
            await asyncio.sleep(_START_POLL_S)

    async def _wait_until_node_listed(self, access: ClusterConfig, *, after_incarnation: int) -> NodeInfo:
        poll_s = _START_POLL_S
        async with open_connection_of_access(self._settings, access) as connection:
            while True:
                self._agent.check_not_exited()
                for view in await fetch_nodes(connection, timeout_s=_CONTROLLER_CALL_TIMEOUT_S):
                    node = view.info
                    known = node.node_id == self.node_id and node.incarnation > after_incarnation
                    if known and node.status not in _NOT_REGISTERED_STATUSES:
                        return node
                await asyncio.sleep(poll_s)
                poll_s = min(2 * poll_s, _NODE_LIST_POLL_S_MAX)  # the list of a large cluster is expensive

    def _report_crash(self, what: str) -> None:
        _log.error("a child process crashed: %s", what)
        self._progress(what)


@asynccontextmanager
async def run_local_cluster(
    settings: Settings,
    *,
    progress: ProgressPrinter,
    timeout_s: float = START_TIMEOUT_S,
    agent: bool | None = None,
    rejoin: bool = False,
    is_program: bool = False,
) -> AsyncIterator[Supervisor]:
    """Runs controller and agent (only the controller if `agent` is False) for the block, which is entered
    when both have started. A server with etcd remembers `agent`, and uses that for None. The agent of a
    standby joins through it, which requires the owner token of the cluster. If the node of this machine was
    removed, no agent is started, unless `rejoin` adds it again.

    `is_program`: this process only runs the cluster. It waits for a majority of the etcd members without a
    deadline, because the other servers may start at any time, and 'genie down' ends it.

    Raises ConfigError on a node of another cluster, AgentRunningError if this state directory has a running
    cluster, AddressInUseError, and LaunchError with the last lines of the log if a child does not start.
    """
    check_may_start_cluster(settings.paths.state_dir)
    settings = with_settings_of_local_member(settings)
    # Not a new cluster where a server of another one was wanted.
    opening = _run_supervisor(settings, progress, is_program=is_program, continues_after_undone_join=False)
    async with opening as (supervisor, group):
        if uses_local_etcd(settings):
            async with _raise_on_start_timeout(timeout_s, supervisor, "etcd"):
                member = await supervisor.launch_etcd()
            async with _raise_on_start_timeout(None if is_program else timeout_s, supervisor, "etcd"):
                await supervisor.wait_for_etcd_majority(member)
        async with _raise_on_start_timeout(timeout_s, supervisor, "the cluster"):
            runs_agent = remember_and_get_runs_agent(settings.paths.state_dir, agent)
            access = await supervisor.wait_for_leader(await supervisor.start_controller())
            if runs_agent and access is None:
                raise TokenMissingError(
                    "the agent of a standby controller requires the owner token",
                    hint=_copied_state_directory_hint(settings.paths.state_dir),
                )
            if runs_agent and access is not None:
                try:
                    await supervisor.start_agent(access, rejoin=rejoin)
                except NodeNotAcceptedError as error:
                    supervisor.report_refused_node(error)
        supervisor.complete_start(group)
        yield supervisor


@asynccontextmanager
async def run_local_agent(
    settings: Settings,
    access: ClusterConfig,
    *,
    progress: ProgressPrinter,
    timeout_s: float = START_TIMEOUT_S,
    is_program: bool = False,
) -> AsyncIterator[Supervisor]:
    """Runs an agent in the cluster of `access` for the block.

    Raises ConfigError on a server, and UnreachableError if it has not registered within `timeout_s`.
    """
    check_may_start_as_node(settings.paths.state_dir)
    async with _run_supervisor(settings, progress, is_program=is_program) as (supervisor, group):
        async with _raise_on_start_timeout(timeout_s, supervisor, "the agent"):
            await supervisor.start_agent(access)
        supervisor.complete_start(group)
        yield supervisor


@asynccontextmanager
async def run_joining_server(
    settings: Settings,
    access: ClusterConfig,
    *,
    progress: ProgressPrinter,
    timeout_s: float = SERVER_JOIN_TIMEOUT_S,
    agent: bool = True,
    is_program: bool = False,
) -> AsyncIterator[Supervisor]:
    """Joins the cluster of `access` as a server and runs etcd member, controller and agent (if `agent`) for
    the block.

    A failed join leaves neither an etcd member nor files behind.
    """
    settings = replace(settings, controller=replace(settings.controller, store=LOCAL_ETCD_STORE))
    async with _run_supervisor(settings, progress, is_program=is_program) as (supervisor, group):
        async with _raise_on_start_timeout(timeout_s, supervisor, "the server"):
            await supervisor.join_as_server(access, agent=agent)
        supervisor.complete_start(group)
        yield supervisor


@asynccontextmanager
async def _run_supervisor(
    settings: Settings,
    progress: ProgressPrinter,
    *,
    is_program: bool,
    continues_after_undone_join: bool = True,
) -> AsyncIterator[tuple[Supervisor, asyncio.TaskGroup]]:
    """`is_program`: records this process as the supervisor, so that 'genie down' ends it."""
    state_dir = files.make_private_directory(settings.paths.state_dir)
    supervisor = Supervisor(settings, progress=progress, is_program=is_program)
    with hold_supervisor_lock(state_dir):
        if (found := find_running_cluster(state_dir)) is not None:
            raise _already_running_error(state_dir, found)
        if is_program:
            process_records.record_process(state_dir, SUPERVISOR, os.getpid())
        was_undone = await undo_incomplete_join(state_dir, progress=_ignore_write_errors(progress))
        if was_undone and not continues_after_undone_join:
            raise _interrupted_join_error()
        async with unwrapped_task_group() as group:
            failure: BaseException | None = None
            try:
                yield supervisor, group
            except Exception as error:
                supervisor.keep_jobs_on_stop()  # the user did not request their end
                failure = error
            except asyncio.CancelledError as error:
                failure = error
            finally:
                try:
                    await _await_despite_cancellation(supervisor.stop())
                except (GenieError, asyncio.CancelledError) as error:
                    failure = failure or error  # the error of the block takes precedence
                if is_program:
                    process_records.remove_process_record(state_dir, SUPERVISOR)
            if failure is not None:
                raise failure


async def _await_despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Waits until `work` has finished, even when cancelled meanwhile; raises CancelledError afterwards.

    `work` must have its own timeout.
    """
    cancelled: asyncio.CancelledError | None = None
    async with unwrapped_task_group() as group:
        task = group.create_task(work)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled


def start_timeout_s(settings: Settings) -> float:
    """A server may have to wait for the leader of the others."""
    member = LocalMember.read(settings.paths.state_dir)
    return START_TIMEOUT_S if member is None or not member.endpoints else SERVER_START_TIMEOUT_S


def find_running_cluster(state_dir: Path) -> RunningCluster | None:
    """Returns the running processes of this state directory; None if there are none."""
    records = [process_records.read_process_record(state_dir, name) for name in _PROCESS_NAMES]
    pids = {record.name: record.pid for record in records if record is not None}
    if not pids:
        return None
    node_id = next((record.node_id for record in records if record and record.name == AGENT), "")
    return RunningCluster(LocalCluster.read(state_dir) if CONTROLLER in pids else None, pids, node_id)


async def stop_running_cluster(
    state_dir: Path,
    *,
    progress: ProgressPrinter = lambda _line: None,
    agent_grace_s: float = 5.0,
    keep_jobs: bool = False,
) -> RunningCluster | None:
    """Stops the processes that `find_running_cluster` finds and returns them; None if there were none.

    Also ends jobs that an agent has left running, even if no process of the cluster is left. With
    `keep_jobs`, the jobs keep running until the next agent adopts them. Raises UsageError for `keep_jobs` if
    another program hosts the cluster: it ends the jobs when it ends."""
    progress = _ignore_write_errors(progress)
    found = find_running_cluster(state_dir)
    if keep_jobs and found is not None and SUPERVISOR not in found.pids:
        _check_not_hosted(state_dir, found)
    agent_s = agent_grace_s + _AGENT_STOP_GRACE_MARGIN_S
    # The supervisor first: it stops the others in order, and would restart them otherwise.
    supervisor_s = agent_s + _CONTROLLER_STOP_GRACE_S + _ETCD_STOP_GRACE_S + _AGENT_STOP_GRACE_MARGIN_S
    graces = {SUPERVISOR: supervisor_s, AGENT: agent_s}
    numbers = {SUPERVISOR: KEEP_JOBS_SIGNAL, AGENT: KEEP_JOBS_SIGNAL} if keep_jobs else {}
    for name in (SUPERVISOR, AGENT, CONTROLLER, ETCD):
        record = process_records.read_process_record(state_dir, name)
        if record is not None:
            what = "the cluster" if name == SUPERVISOR else process_records.name_in_text(name)
            progress(f"stopping {what} (process {record.pid})")
            await process_records.end_process(
                record,
                grace_s=graces.get(name, _CONTROLLER_STOP_GRACE_S),
                number=numbers.get(name, signal.SIGTERM),
            )
        if name == AGENT and not keep_jobs and (count := await kill_leftover_jobs(state_dir)):
            progress(f"ended processes of jobs that an agent had left running: {count}")
        process_records.remove_process_record(state_dir, name)
    if found is not None and CONTROLLER in found.pids:
        _remove_local_cluster_file(state_dir)
    return found


async def kill_leftover_jobs(state_dir: Path) -> int:
    """Kills jobs whose agent has ended without ending them; those without a dead-man timer keep running
    otherwise.
    Returns the number of processes."""
    return await asyncio.to_thread(kill_jobs_of_stopped_agents, state_dir / AGENTS_DIR)


def check_agent_is_of_cluster(running: RunningCluster, access: ClusterConfig, *, state_dir: Path) -> None:
    """Raises AgentRunningError if the running agent belongs to another cluster than that of `access`."""
    node_dir = state_dir / AGENTS_DIR / running.node_id
    if running.node_id and not has_joined(node_dir, access, requires_address_if_unpinned=True):
        requested = address_text(*address_of_access(access))
        raise AgentRunningError(
            f"cannot join {requested}: this machine runs an agent of another cluster {running}",
            hint=f"stop it with 'genie down', or set GENIE_STATE_DIR to another directory than {state_dir}",
        )


def make_owner_access(state_dir: Path, cluster: LocalCluster) -> ClusterConfig:
    """Returns the owner's access to the cluster of this machine."""
    token = read_owner_token(state_dir)
    if token is None:
        raise TokenMissingError(
            f"no owner token in {state_dir}", hint="run 'genie down --keep-jobs' and 'genie up' again"
        )
    return ClusterConfig(
        discovery_method="address", master_addr=cluster.host, master_port=cluster.port, token=str(token)
    )


def _ignore_write_errors(progress: ProgressPrinter) -> ProgressPrinter:
    """A closed terminal or a full disk must not stop the cluster."""

    def report(line: str) -> None:
        try:
            progress(line)
        except (OSError, ValueError) as error:
            _log.warning("could not report progress (%s): %s", error, line)

    return report


@contextmanager
def hold_supervisor_lock(state_dir: Path) -> Iterator[None]:
    """Held by the supervisor of this state directory, and by a command that replaces its store; the kernel
    releases it when that process dies. Raises AgentRunningError if another process holds it."""
    path = process_records.supervisor_lock_path(state_dir)
    lock = files.FileLock.try_acquire(path)
    if lock is None:
        raise _already_running_error(
            state_dir, find_running_cluster(state_dir), holder=files.read_lock_holder_pid(path)
        )
    try:
        yield
    finally:
        lock.release()


def _check_not_hosted(state_dir: Path, found: RunningCluster) -> None:
    """Raises UsageError if a program that is not `genie up` or `genie join` supervises this cluster."""
    path = process_records.supervisor_lock_path(state_dir)
    lock = files.FileLock.try_acquire(path)
    if lock is not None:
        lock.release()
        return
    holder = files.read_lock_holder_pid(path) or "(unknown)"
    raise UsageError(
        f"cannot keep the jobs: process {holder} hosts this cluster {found} with genie.init, and ends the "
        "jobs when it ends",
        hint="wait for that program, or run 'genie down', which ends the jobs now; a cluster that was "
        "started with 'genie up' can be stopped without ending jobs",
    )


def _interrupted_join_error() -> ConfigError:
    return ConfigError(
        "the join of this machine as a server was interrupted, and what it had written is removed now",
        hint="create another token with 'genie token create --server' on a server, and repeat 'genie join "
        "--server'; or repeat 'genie up' to start a cluster of its own here",
    )


def _already_running_error(
    state_dir: Path, found: RunningCluster | None, *, holder: str = ""
) -> AgentRunningError:
    elsewhere = f"set GENIE_STATE_DIR to another directory than {state_dir}"
    record = process_records.read_process_record(state_dir, SUPERVISOR)
    if found and record is not None and record.missing_servers:
        return AgentRunningError(
            f"already running {found}, and {record.missing_servers}",
            hint="start the other servers with 'genie up' there; 'genie down --keep-jobs' stops this one",
        )
    if found:
        return AgentRunningError(
            f"already running {found}",
            hint="stop it with 'genie down --keep-jobs', after which its jobs continue, or with 'genie "
            f"down', which ends them; or {elsewhere}",
        )
    # A server session holds the lock until it ends, even after 'genie down'.
    process = f"process {holder}" if holder else "another process"
    return AgentRunningError(
        f"{process} is starting a cluster in {state_dir}, or has hosted one and is still running",
        hint=f"wait for it or end that program, or {elsewhere}",
    )


@asynccontextmanager
async def _raise_on_start_timeout(
    timeout_s: float | None, supervisor: Supervisor, what: str
) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        assert timeout_s is not None
        raise supervisor.start_timeout_error(timeout_s, what) from None


def _registered_incarnation(node_dir: Path) -> int:
    """The last incarnation that has registered; 0 if none has."""
    try:
        return int(json.loads((node_dir / REGISTERED_FILE).read_text("utf-8"))["incarnation"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _read_int_file(path: Path) -> int:
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):
        return 0


def _remove_local_cluster_file(state_dir: Path) -> None:
    """Removes the address of the stopped controller, so that commands no longer use it."""
    (state_dir / LOCAL_CLUSTER_FILE).unlink(missing_ok=True)


def _copied_state_directory_hint(state_dir: Path) -> str:
    return f"copy {OWNER_TOKEN_FILE} from the state directory of the first controller to {state_dir}"


def _format_gpus(node: NodeInfo) -> str:
    names = [gpu.name for gpu in node.gpus]
    return f"{len(names)} accelerator{'' if len(names) == 1 else 's'}" + (
        f": {', '.join(names)}" if names else ""
    )
