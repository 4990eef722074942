"""The five phases of init(): configuration, local node, network discovery, backend, monitoring.

Each begins and ends with an INIT_PHASE event and a log line. What a phase opens is put on the
session's stack, so that a failure in a later one closes it again, in the opposite order. Not for:
the thread that this runs on (session_run.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from genie.cluster.devices import DeviceBroker, Submit, accelerators, attached
from genie.cluster.events import EventBus
from genie.cluster.health import NetworkReading, create_health_checker
from genie.cluster.heartbeats import Heartbeats
from genie.cluster.link import Link, open_link
from genie.cluster.monitoring import create_resource_monitor
from genie.cluster.node_info import create_local_node, new_session_id
from genie.cluster.state import ClusterState
from genie.config import ClusterConfig, Settings
from genie.errors import DeadlineError, GenieError, UnreachableError
from genie.hardware import Inventory, host_facts
from genie.model.event import EventType
from genie.model.messages import SessionEnd
from genie.model.node import NodeStatus
from genie.runtime.credentials import Access, find_access
from genie.runtime.network import Network, TcpNetwork, address_towards
from genie.runtime.network_discovery import DiscoveryResult, NetworkDiscovery, select_backend
from genie.telemetry import log

_log = logging.getLogger(__name__)

PHASES = ("configuration", "local node", "network discovery", "backend", "monitoring")
_GOODBYE_S = 2.0
# The whole of init() has one deadline. Parts get a little more than what is left of it, so that the
# error is always the one that names the phase.
_BEYOND_S = 1.0


class Startup:
    """Runs once. Whatever it opened is on `stack` when it returns or raises."""

    def __init__(
        self,
        settings: Settings,
        events: EventBus,
        stack: AsyncExitStack,
        *,
        submit: Submit,
        began_s: float,
        network: Network | None = None,
    ) -> None:
        self._settings = settings
        self._events = events
        self._stack = stack
        self._submit = submit
        self._network = network or TcpNetwork()
        self._began_s = began_s
        gone_s = time.monotonic() - began_s
        self._deadline = asyncio.get_running_loop().time() + settings.cluster.timeout - gone_s
        self._phase = 0
        self._node_id = ""
        self._lends_machine = False
        self._join_token: str | None = None
        self._stats: dict[str, float] = {"reconnects": 0}

    async def run(self) -> ClusterState:
        """The state of a session that is up. DeadlineError names the phase that took too long."""
        try:
            async with asyncio.timeout_at(self._deadline):
                async with self._in_phase(1, began_s=self._began_s):
                    self._configure()
                async with self._in_phase(2):
                    state = await self._make_local_node()
                async with self._in_phase(3):
                    access = await self._discover(state)
                async with self._in_phase(4):
                    link = await self._connect(state, access)
                async with self._in_phase(5):
                    await self._monitor(state, link)
        except TimeoutError:
            raise DeadlineError(
                f"init() did not finish within {self._settings.cluster.timeout:g} s: it was in phase "
                f"{self._phase} of {len(PHASES)}, {PHASES[self._phase - 1]}",
                hint="check the network to the cluster, or pass a larger timeout",
            ) from None
        state.stats["init_s"] = time.monotonic() - self._began_s
        return state

    @asynccontextmanager
    async def _in_phase(self, number: int, *, began_s: float | None = None) -> AsyncIterator[None]:
        self._phase, name = number, PHASES[number - 1]
        began_s = time.monotonic() if began_s is None else began_s
        self._tell(name, "started", 0.0, f"phase {number} of {len(PHASES)}: {name}")
        try:
            yield
        except BaseException as error:
            took_s = time.monotonic() - began_s
            reason = str(error) or "it was interrupted or took too long"
            self._tell(name, "failed", took_s, f"{name} failed after {took_s:.3f} s: {reason}")
            raise
        took_s = time.monotonic() - began_s
        self._stats[f"phase_{number}_s"] = took_s
        self._tell(name, "done", took_s, f"{name} done in {took_s:.3f} s")

    def _tell(self, name: str, state: str, took_s: float, reason: str) -> None:
        _log.info("init %d/%d: %s", self._phase, len(PHASES), reason)
        facts: dict[str, str | int | float | bool | None] = {
            "phase": self._phase,
            "name": name,
            "state": state,
            "duration_s": took_s,
        }
        self._events.publish(EventType.INIT_PHASE, node_id=self._node_id, reason=reason, facts=facts)

    @property
    def _left_s(self) -> float:
        return max(self._deadline - asyncio.get_running_loop().time(), 0.0) + _BEYOND_S

    # --- 1: configuration ---------------------------------------------------------------------

    def _configure(self) -> None:
        """The settings were read and checked by the caller; here is the word on where they came from."""
        sources = self._settings.sources
        if sources["log.level"] != "default" or sources["log.format"] != "default":
            # In a user's program Genie is silent, unless the user has asked to hear it.
            log.configure(self._settings.log)
        given = {
            key.removeprefix("cluster."): source
            for key, source in sources.items()
            if key.startswith("cluster.") and source != "default"
        }
        _log.info("settings: %s", ", ".join(f"{k} from {v}" for k, v in given.items()) or "defaults only")

    # --- 2: local node ------------------------------------------------------------------------

    async def _make_local_node(self) -> ClusterState:
        hosts = self._settings.cluster.node_role != "client"
        if hosts:
            await self._host()
        config = self._settings.cluster
        inventory = Inventory(self._settings.agent.cpu_accelerators if hosts else 0)
        self._stack.callback(inventory.close)
        gpus = await inventory.read_async(timeout_s=self._left_s)
        suffix = secrets.token_hex(3)
        node = create_local_node(
            config,
            suffix=suffix,
            gpus=gpus,
            facts=await asyncio.to_thread(host_facts),
            now=time.time(),
        )
        self._node_id = node.node_id
        state = ClusterState(config=config, node=node, events=self._events, stats=self._stats)
        # An id that was given may be another session's, too; one that was made has the suffix in it.
        is_given = config.node_id is not None
        state.session_id = new_session_id(node.node_id, suffix=suffix) if is_given else node.node_id
        if config.enable_gpu_monitoring:
            state.monitor = create_resource_monitor(
                node, interval_s=config.gpu_poll_interval, events=self._events, source=inventory
            )
        return state

    async def _host(self) -> None:
        """For a server: a cluster, where there is none. Otherwise this machine is lent, in phase 4."""
        from genie.cluster import hosting  # needs what only a machine that can host has

        hosted = None
        self._settings = hosting.with_node_id(self._settings)
        if self._settings.cluster.node_role == "server":
            hosted = await hosting.host_cluster(self._settings, self._stack, timeout_s=self._left_s)
        if hosted is not None:
            self._settings = hosted
        else:
            self._lends_machine = True
            self._settings, self._join_token = hosting.joining_token(self._settings)

    # --- 3: network discovery -----------------------------------------------------------------

    async def _discover(self, state: ClusterState) -> Access:
        config = self._settings.cluster
        access = await find_access(
            config,
            state_dir=self._settings.paths.state_dir,
            network=self._network,
            timeout_s=self._left_s,
        )
        found = await NetworkDiscovery().discover(access.host, access.port, timeout_s=self._left_s)
        if not found.tcp_reachable:
            raise _unreachable(found)
        state.discovery, state.rtt_ms = found, found.tcp_rtt_ms
        return access

    # --- 4: backend ---------------------------------------------------------------------------

    async def _connect(self, state: ClusterState, access: Access) -> Link:
        assert state.discovery is not None
        state.selection = select_backend(state.config.backend, state.discovery)
        _log.info("backend %s: %s", state.selection.backend, state.selection.reason)
        if state.selection.fallback_from is not None:
            self._publish(EventType.BACKEND_FALLBACK, state.selection.reason)
        state.node = msgspec.structs.replace(state.node, network_backend=state.selection.backend)
        link = await self._stack.enter_async_context(
            open_link(
                access,
                network=self._network,
                program="genie.init",
                timeout_s=self._left_s,
                on_change=lambda connected, reason: self._connection_changed(state, connected, reason),
            )
        )
        welcome = await link.wait_first()
        state.cluster_id, state.tenant = welcome.cluster_id, welcome.tenant
        state.control_integration = link
        here = await asyncio.to_thread(address_towards, access.host, access.port)
        state.node = msgspec.structs.replace(state.node, host=here or state.node.host)
        self._stack.push_async_callback(_say_goodbye, link, state.session_id)
        if self._lends_machine:
            await self._lend_machine(access)
        await self._find_devices(state, link)
        return link

    async def _lend_machine(self, access: Access) -> None:
        from genie.cluster import hosting

        config = ClusterConfig(
            discovery_method="address",
            master_addr=access.host,
            master_port=access.port,
            token=self._join_token or str(access.token),
        )
        await hosting.lend_machine(self._settings, config, self._stack, timeout_s=self._left_s)

    async def _find_devices(self, state: ClusterState, link: Link) -> None:
        self._heartbeats = Heartbeats(state, link)
        if state.config.enable_heartbeat:
            await self._heartbeats.beat(timeout_s=self._left_s)
        else:
            await self._heartbeats.look(timeout_s=self._left_s)
        broker = DeviceBroker(
            accelerators(state.nodes.values()),
            link=link,
            session_id=state.session_id,
            submit=self._submit,
            timeout_s=state.config.timeout,
        )
        state.transport_coordinator = broker
        self._stack.enter_context(attached(broker, launch_blocking=state.config.launch_blocking))

    def _connection_changed(self, state: ClusterState, connected: bool, reason: str) -> None:
        state.stats["reconnects"] += connected
        _log.log(logging.INFO if connected else logging.WARNING, "%s", reason)
        self._publish(EventType.CONNECTION_RESTORED if connected else EventType.CONNECTION_LOST, reason)

    # --- 5: monitoring ------------------------------------------------------------------------

    async def _monitor(self, state: ClusterState, link: Link) -> None:
        config = state.config
        work: dict[str, Coroutine[Any, Any, None]] = {"heartbeat": self._heartbeats.run()}
        if state.monitor is not None:
            work["gpu monitor"] = state.monitor.run()
        if config.enable_health_checks:
            state.health = create_health_checker(
                state.node.node_id,
                gpus=lambda: state.local_node.gpus,
                network=lambda: _network_reading(state, link),
                peers=lambda: [node for key, node in state.nodes.items() if key != state.node.node_id],
                disk_path=self._settings.paths.state_dir,
                interval_s=config.health_check_interval,
                events=self._events,
            )
            work["health checks"] = state.health.run()
        else:
            state.node = msgspec.structs.replace(state.node, status=NodeStatus.HEALTHY)
        state.monitor_tasks = await self._stack.enter_async_context(self._in_background(work))

    @asynccontextmanager
    async def _in_background(
        self, work: dict[str, Coroutine[Any, Any, None]]
    ) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Tasks for the length of the session. One that fails is reported, and the others go on."""
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._guarded(name, part), name=name) for name, part in work.items()]
            try:
                yield tasks
            except (Exception, asyncio.CancelledError) as error:
                # Raised again below: inside the group it would come out wrapped in an ExceptionGroup.
                failure = error
            finally:
                for task in tasks:
                    task.cancel()
        if failure is not None:
            raise failure

    async def _guarded(self, name: str, part: Coroutine[Any, Any, None]) -> None:
        try:
            await part
        except Exception as error:
            _log.exception("the %s of this session ended with an error", name)
            self._publish(EventType.MONITOR_ERROR, f"the {name} ended with an error: {error}")

    def _publish(self, kind: EventType, reason: str) -> None:
        self._events.publish(kind, node_id=self._node_id, reason=reason)


async def _say_goodbye(link: Link, session_id: str) -> None:
    """What this session holds is given back at once. Without an answer the controller finds out by itself."""
    if not link.is_open:
        return
    try:
        await link.call(SessionEnd(node_id=session_id), timeout_s=_GOODBYE_S)
    except GenieError as error:
        _log.info("the controller was not told of the end of this session: %s", error)


def _network_reading(state: ClusterState, link: Link) -> NetworkReading:
    reason = "" if link.is_open else f"no connection to {link.where}"
    return NetworkReading(connected=link.is_open, rtt_ms=state.rtt_ms, reason=reason)


def _unreachable(found: DiscoveryResult) -> UnreachableError:
    tcp = found.probes["tcp"]
    return UnreachableError(f"{found.host}:{found.port} cannot be reached: {tcp.reason}", hint=tcp.fix)
