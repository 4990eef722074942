"""The five phases of init(): configuration, local node, network discovery, backend, monitoring.

Each begins and ends with an INIT_PHASE event and a log line. Resources of a phase are pushed on the session's
exit stack, so that a failure in a later phase closes them in reverse order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from genie.cluster.devices import DeviceBroker, list_accelerators, registered_torch_device
from genie.cluster.events import EventBus
from genie.cluster.health import HealthChecker, NetworkReading, create_health_checker
from genie.cluster.lifecycle.heartbeats import HeartbeatSender
from genie.cluster.locking.session_locks import SessionLocks, SubmitToLoop
from genie.cluster.monitoring import create_resource_monitor
from genie.cluster.node_info import create_local_node, new_session_id
from genie.cluster.state import ClusterState
from genie.config import ClusterConfig, Settings
from genie.errors import ConfigError, DeadlineError, GenieError, UnreachableError
from genie.hardware import CpuMeter, Inventory, host_facts
from genie.model.event import EventType
from genie.model.messages import SessionEnd
from genie.model.names import address_text
from genie.model.node import NodeRole, NodeStatus
from genie.processes.tasks import unwrapped_task_group
from genie.runtime.controller_connection import ControllerConnection, open_controller_connection
from genie.runtime.credentials import Access, find_access, find_address
from genie.runtime.data_plane import DataPlaneConfig, TransportCoordinator
from genie.runtime.network import Network, TcpNetwork, local_address_towards
from genie.runtime.network_discovery import DiscoveryResult
from genie.runtime.network_interfaces import InterfaceMeter
from genie.supervisor.connection import is_address_given_by_caller, store_controller_addresses
from genie.supervisor.this_machine import add_local_cluster_hint
from genie.telemetry import log

_log = logging.getLogger(__name__)

INIT_PHASES = ("configuration", "local node", "network discovery", "backend", "monitoring")
_END_SESSION_TIMEOUT_S = 2.0
_FIRST_HEALTH_CHECK_TIMEOUT_S = 1.0
# init() has one deadline. Calls get slightly more than the remaining time, so that the error is always the
# one that names the phase.
_CALL_TIMEOUT_MARGIN_S = 1.0


class SessionStartup:
    """Runs once. All its resources are on `stack` when it returns or raises."""

    def __init__(
        self,
        settings: Settings,
        events: EventBus,
        stack: AsyncExitStack,
        *,
        submit: SubmitToLoop,
        began_s: float,
        network: Network | None = None,
    ) -> None:
        self._settings = settings
        self._events = events
        self._exit_stack = stack
        self._submit_to_loop = submit
        self._network = network or TcpNetwork()
        self._began_s = began_s
        elapsed_s = time.monotonic() - began_s
        self._deadline = asyncio.get_running_loop().time() + settings.cluster.timeout - elapsed_s
        self._phase_number = 0
        self._node_id = ""
        self._must_start_agent = False
        self._join_token: str | None = None
        self._stats: dict[str, float] = {"reconnects": 0}
        self._cpu_meter = CpuMeter()
        self._interface_meter: InterfaceMeter | None = None

    async def run(self) -> ClusterState:
        """Runs all phases and returns the state. Raises DeadlineError with the phase that timed out."""
        try:
            async with asyncio.timeout_at(self._deadline):
                async with self._in_phase(1, began_s=self._began_s):
                    self._configure_logging_and_heartbeat_timeout()
                async with self._in_phase(2):
                    state = await self._make_state_with_local_node()
                async with self._in_phase(3):
                    access = await self._discover_cluster(state)
                async with self._in_phase(4):
                    connection = await self._connect_to_controller(state, access)
                async with self._in_phase(5):
                    await self._start_monitoring(state, connection)
        except TimeoutError:
            raise DeadlineError(
                f"init() did not finish within {self._settings.cluster.timeout:g} s: timed out in phase "
                f"{self._phase_number} of {len(INIT_PHASES)}, {INIT_PHASES[self._phase_number - 1]}",
                hint="check the network to the cluster, or pass a larger timeout",
            ) from None
        state.stats["init_s"] = time.monotonic() - self._began_s
        return state

    @asynccontextmanager
    async def _in_phase(self, number: int, *, began_s: float | None = None) -> AsyncIterator[None]:
        self._phase_number, name = number, INIT_PHASES[number - 1]
        began_s = time.monotonic() if began_s is None else began_s
        self._log_and_publish_phase(name, "started", 0.0, f"phase {number} of {len(INIT_PHASES)}: {name}")
        try:
            yield
        except BaseException as error:
            duration_s = time.monotonic() - began_s
            reason = str(error) or "interrupted or timed out"
            self._log_and_publish_phase(
                name, "failed", duration_s, f"{name} failed after {duration_s:.3f} s: {reason}"
            )
            raise
        duration_s = time.monotonic() - began_s
        self._stats[f"phase_{number}_s"] = duration_s
        self._log_and_publish_phase(name, "done", duration_s, f"{name} done in {duration_s:.3f} s")

    def _log_and_publish_phase(self, name: str, state: str, duration_s: float, reason: str) -> None:
        level = logging.DEBUG if state == "started" else logging.INFO
        _log.log(level, "init %d/%d: %s", self._phase_number, len(INIT_PHASES), reason)
        facts: dict[str, str | int | float | bool | None] = {
            "phase": self._phase_number,
            "name": name,
            "state": state,
            "duration_s": duration_s,
        }
        self._events.publish(EventType.INIT_PHASE, node_id=self._node_id, reason=reason, facts=facts)

    @property
    def _call_timeout_s(self) -> float:
        return max(self._deadline - asyncio.get_running_loop().time(), 0.0) + _CALL_TIMEOUT_MARGIN_S

    # --- 1: configuration ---------------------------------------------------------------------

    def _configure_logging_and_heartbeat_timeout(self) -> None:
        """Configures logging and logs the source of each setting."""
        sources = self._settings.sources
        requested = sources["log.level"] != "default" or sources["log.format"] != "default"
        log.configure_session(self._settings.log, requested=requested)
        self._settings = _with_default_heartbeat_timeout_raised(self._settings)
        given = {
            key.removeprefix("cluster."): source
            for key, source in sources.items()
            if key.startswith("cluster.") and source != "default"
        }
        _log.info(
            "sources of the settings: %s",
            ", ".join(f"{k} from {v}" for k, v in given.items()) or "defaults only",
        )

    # --- 2: local node ------------------------------------------------------------------------

    async def _make_state_with_local_node(self) -> ClusterState:
        hosts = self._settings.cluster.node_role != "client"
        if hosts:
            await self._host_cluster_if_server()
        config = self._settings.cluster
        inventory = Inventory(self._settings.agent.cpu_accelerators if hosts else 0)
        self._exit_stack.callback(inventory.close)
        gpus = await inventory.read_async(timeout_s=self._call_timeout_s)
        suffix = secrets.token_hex(3)
        node = create_local_node(
            config,
            suffix=suffix,
            gpus=gpus,
            facts=await asyncio.to_thread(host_facts),
            now=time.time(),
        )
        self._node_id = node.node_id
        # Other sessions may use the same configured node ID; a generated one contains the suffix.
        is_configured = config.node_id is not None
        return ClusterState(
            config=config,
            node=node,
            events=self._events,
            stats=self._stats,
            session_id=new_session_id(node.node_id, suffix=suffix) if is_configured else node.node_id,
            monitor=create_resource_monitor(
                node, interval_s=config.gpu_poll_interval, events=self._events, source=inventory
            )
            if config.enable_gpu_monitoring
            else None,
        )

    async def _host_cluster_if_server(self) -> None:
        """Starts a cluster for a server if none is running. Otherwise phase 4 starts an agent."""
        from genie.supervisor import hosting  # imported here: requires Linux or macOS

        is_hosted = False
        self._settings = hosting.with_node_id_of_agent(self._settings)
        if self._settings.cluster.node_role == "server":
            self._settings, is_hosted = await hosting.start_or_find_cluster(
                self._settings, self._exit_stack, timeout_s=self._call_timeout_s
            )
        if not is_hosted:
            self._must_start_agent = True
            self._settings, self._join_token = hosting.split_join_token(self._settings)

    # --- 3: network discovery -----------------------------------------------------------------

    async def _discover_cluster(self, state: ClusterState) -> Access:
        config, state_dir = self._settings.cluster, self._settings.paths.state_dir
        host, port = find_address(config, state_dir)
        _check_master_port_applies(self._settings, host, port)
        _log.info("connecting to the controller at %s", address_text(host, port))
        async with add_local_cluster_hint(host, port, state_dir=state_dir):
            access = await find_access(
                config,
                state_dir=state_dir,
                network=self._network,
                timeout_s=self._call_timeout_s,
                is_address_fixed=is_address_given_by_caller(self._settings),
            )
            access, found = await self._discover_reachable_server(access)
        state.discovery, state.rtt_ms = found, found.tcp_rtt_ms
        if found.interface is not None:
            self._interface_meter = InterfaceMeter(found.interface.name)
        return access

    async def _discover_reachable_server(self, access: Access) -> tuple[Access, DiscoveryResult]:
        """Probes the known controllers in turn; returns the access to the first that can be reached."""
        servers = list(dict.fromkeys([(access.host, access.port), *access.other_servers]))
        errors: list[UnreachableError] = []
        for number, (host, port) in enumerate(servers):
            config = self._settings.cluster
            self._transport = TransportCoordinator(
                DataPlaneConfig(host=host, port=port, backend=config.backend, timeout_s=config.timeout)
            )
            found = await self._transport.discover(timeout_s=self._call_timeout_s / (len(servers) - number))
            try:
                found.check_reachable()
            except UnreachableError as error:
                errors.append(error)
                continue
            others = tuple(server for server in servers if server != (host, port))
            return replace(access, host=host, port=port, other_servers=others), found
        if len(errors) == 1:
            raise errors[0]
        reasons = "; ".join(error.message for error in errors)
        raise UnreachableError(f"no controller of the cluster responds: {reasons}", hint=errors[0].hint)

    # --- 4: backend ---------------------------------------------------------------------------

    async def _connect_to_controller(self, state: ClusterState, access: Access) -> ControllerConnection:
        state.selection = self._transport.select()
        _log.info("using network backend %s: %s", state.selection.backend, state.selection.reason)
        if state.selection.fallback_from is not None:
            self._publish_event(EventType.BACKEND_FALLBACK, state.selection.reason)
        state.node = msgspec.structs.replace(state.node, network_backend=state.selection.backend)
        opening = open_controller_connection(
            access,
            network=self._network,
            program="genie.init",
            timeout_s=self._call_timeout_s,
            on_change=lambda connected, reason: self._on_connection_change(state, connected, reason),
        )
        state_dir = self._settings.paths.state_dir
        async with add_local_cluster_hint(access.host, access.port, state_dir=state_dir):
            connection = await self._exit_stack.enter_async_context(opening)
        welcome = await connection.wait_for_first_connection()
        await store_controller_addresses(connection, state_dir)
        state.cluster_id, state.tenant = welcome.cluster_id, welcome.tenant
        state.control_integration = connection
        here = await asyncio.to_thread(local_address_towards, access.host, access.port)
        state.node = msgspec.structs.replace(
            state.node,
            host=here or state.node.host,
            control_port=access.port if state.node.role is NodeRole.SERVER else 0,
        )
        self._exit_stack.push_async_callback(_request_session_end, connection, state.session_id)
        state.locks = SessionLocks(
            connection, submit=self._submit_to_loop, holder=f"{state.session_id} (process {os.getpid()})"
        )
        self._exit_stack.push_async_callback(state.locks.release_all)
        if self._must_start_agent:
            await self._start_agent(access)
        await self._register_devices(state, connection)
        return connection

    async def _start_agent(self, access: Access) -> None:
        from genie.supervisor import hosting

        config = ClusterConfig(
            discovery_method="address",
            master_addr=access.host,
            master_port=access.port,
            token=self._join_token or str(access.token),
        )
        await hosting.start_worker_agent(
            self._settings, config, self._exit_stack, timeout_s=self._call_timeout_s
        )

    async def _register_devices(self, state: ClusterState, connection: ControllerConnection) -> None:
        self._heartbeat_sender = HeartbeatSender(state, connection)
        if state.config.enable_heartbeat:
            await self._heartbeat_sender.send_heartbeat(timeout_s=self._call_timeout_s)
        else:
            await self._heartbeat_sender.fetch_and_apply_node_list(timeout_s=self._call_timeout_s)
        broker = DeviceBroker(
            list_accelerators(state.nodes.values()),
            transport=self._transport,
            connection=connection,
            session_id=state.session_id,
            submit=self._submit_to_loop,
        )
        state.transport_coordinator = broker
        self._exit_stack.enter_context(
            registered_torch_device(broker, launch_blocking=state.config.launch_blocking)
        )

    def _on_connection_change(self, state: ClusterState, connected: bool, reason: str) -> None:
        state.stats["reconnects"] += connected
        _log.log(logging.INFO if connected else logging.WARNING, "%s", reason)
        self._publish_event(EventType.CONNECTION_RESTORED if connected else EventType.CONNECTION_LOST, reason)

    # --- 5: monitoring ------------------------------------------------------------------------

    async def _start_monitoring(self, state: ClusterState, connection: ControllerConnection) -> None:
        if state.config.enable_health_checks:
            state.health = await self._create_health_checker_and_check_once(state, connection)
        else:
            state.node = msgspec.structs.replace(state.node, status=NodeStatus.HEALTHY)
        # After the last await: a coroutine that is never awaited causes a warning.
        work: dict[str, Coroutine[Any, Any, None]] = {"heartbeat": self._heartbeat_sender.run()}
        if state.monitor is not None:
            work["gpu monitor"] = state.monitor.run()
        if state.health is not None:
            work["health checks"] = state.health.run()
        state.monitor_tasks = await self._exit_stack.enter_async_context(self._running_background_tasks(work))

    async def _create_health_checker_and_check_once(
        self, state: ClusterState, connection: ControllerConnection
    ) -> HealthChecker:
        """Returns the health checker after its first report."""
        checker = create_health_checker(
            state.node.node_id,
            gpus=lambda: state.local_node.gpus,
            network=lambda: _read_network_state(state, connection, self._interface_meter),
            peers=lambda: [node for key, node in state.nodes.items() if key != state.node.node_id],
            cpu=self._cpu_meter.read,
            disk_path=self._settings.paths.state_dir,
            interval_s=state.config.health_check_interval,
            events=self._events,
        )
        self._exit_stack.callback(checker.close)
        await checker.check(timeout_s=_FIRST_HEALTH_CHECK_TIMEOUT_S)
        return checker

    @asynccontextmanager
    async def _running_background_tasks(
        self, work: dict[str, Coroutine[Any, Any, None]]
    ) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Runs the tasks until the end of the session. One that fails is reported, the others continue."""
        async with unwrapped_task_group() as group:
            tasks = [
                group.create_task(self._run_task_and_report_failure(name, part), name=name)
                for name, part in work.items()
            ]
            try:
                yield tasks
            finally:
                for task in tasks:
                    task.cancel()

    async def _run_task_and_report_failure(self, name: str, part: Coroutine[Any, Any, None]) -> None:
        try:
            await part
        except Exception as error:
            _log.exception("background task %s of this session failed", name)
            self._publish_event(EventType.MONITOR_ERROR, f"the {name} failed: {error}")

    def _publish_event(self, kind: EventType, reason: str) -> None:
        self._events.publish(kind, node_id=self._node_id, reason=reason)


def _with_default_heartbeat_timeout_raised(settings: Settings) -> Settings:
    """Increases a default timeout to two intervals: one lost heartbeat must not disconnect a node."""
    config = settings.cluster
    if settings.sources["cluster.heartbeat_timeout"] != "default":
        return settings
    timeout_s = max(config.heartbeat_timeout, 2 * config.heartbeat_interval)
    return replace(settings, cluster=replace(config, heartbeat_timeout=timeout_s))


def _check_master_port_applies(settings: Settings, host: str, port: int) -> None:
    """Raises ConfigError if master_port was passed without master_addr and the cluster has another port."""
    config = settings.cluster
    is_passed = settings.sources["cluster.master_port"].startswith("argument ")
    if (
        is_passed
        and config.master_addr is None
        and config.node_role != "server"
        and port != config.master_port
    ):
        where = address_text(host, port)
        raise ConfigError(
            f"master_port = {config.master_port} without master_addr: the default cluster is at {where}",
            hint=f"pass master_addr, too, or omit master_port to use {where}",
        )


async def _request_session_end(connection: ControllerConnection, session_id: str) -> None:
    """Makes the controller release the executors now; otherwise it does when the lease expires."""
    if not connection.is_open:
        return
    try:
        await connection.call(SessionEnd(node_id=session_id), timeout_s=_END_SESSION_TIMEOUT_S)
    except GenieError as error:
        _log.info("could not notify the controller of the end of this session: %s", error)


def _read_network_state(
    state: ClusterState, connection: ControllerConnection, meter: InterfaceMeter | None
) -> NetworkReading:
    return NetworkReading(
        connected=connection.is_open,
        rtt_ms=state.rtt_ms,
        reason="" if connection.is_open else f"no connection to {connection.where}",
        interface=state.discovery.interface if state.discovery else None,
        throughput=meter.read() if meter else None,
    )
