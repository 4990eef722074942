"""The state of a session: the object that genie.init() returns.

The thread of the session writes it; any thread may read it. Values are replaced and never modified in place,
so that a reader always sees a consistent one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from genie.cluster.events import EventBus
from genie.config import ClusterConfig
from genie.model.node import NodeInfo

if TYPE_CHECKING:
    from genie.cluster.devices import DeviceBroker
    from genie.cluster.health import HealthChecker, HealthReport
    from genie.cluster.locking.session_locks import SessionLocks
    from genie.cluster.monitoring import ResourceMonitor
    from genie.runtime.controller_connection import ControllerConnection
    from genie.runtime.network_discovery import DiscoveryResult, Selection


@dataclass(eq=False, kw_only=True)
class ClusterState:
    """State of one session. After shutdown() `initialized` is False and the last values remain."""

    config: ClusterConfig
    node: NodeInfo = field(repr=False)
    """This process as of init(); `local_node` has the latest readings."""
    events: EventBus = field(repr=False)
    """The event bus; `events.history()` contains the five phases of init()."""
    initialized: bool = False
    nodes: dict[str, NodeInfo] = field(default_factory=dict)
    """The nodes of the cluster by ID, as of the last heartbeat."""
    session_id: str = ""
    """Unique ID of this session; several sessions may share a node ID."""
    cluster_id: str = ""
    tenant: str = ""
    discovery: DiscoveryResult | None = field(default=None, repr=False)
    selection: Selection | None = None
    """The backend in use and why."""
    control_integration: ControllerConnection | None = field(default=None, repr=False)
    """The connection to the controller (genie.runtime.ControlDataIntegration)."""
    transport_coordinator: DeviceBroker | None = field(default=None, repr=False)
    """Opens the connections to executors that carry tensors (genie.runtime.TransportCoordinator)."""
    locks: SessionLocks | None = field(default=None, repr=False)
    """The locks that this session holds (genie.lock)."""
    monitor: ResourceMonitor | None = field(default=None, repr=False)
    health: HealthChecker | None = field(default=None, repr=False)
    monitor_tasks: list[asyncio.Task[Any]] = field(default_factory=list, repr=False)
    """Heartbeat, monitoring and health checks, on the event loop of the session."""
    rtt_ms: float | None = field(default=None, repr=False)
    """Round trip time to the controller: of the last heartbeat or, before that, of the discovery."""
    stats: dict[str, float] = field(default_factory=dict, repr=False)
    """Counters and durations: heartbeats_sent, heartbeats_failed, reconnects, init_s, phase_N_s."""

    @property
    def local_node(self) -> NodeInfo:
        """This process with the latest readings of its machine and the status of its health checks."""
        node = self.node
        if self.monitor is not None:
            read = self.monitor.local_node
            node = msgspec.structs.replace(
                node,
                gpus=read.gpus,
                memory_total_bytes=read.memory_total_bytes,
                memory_used_bytes=read.memory_used_bytes,
            )
        if (report := self.health_report) is not None:
            node = msgspec.structs.replace(node, status=report.status, status_reason=report.reason)
        return node

    @property
    def health_report(self) -> HealthReport | None:
        """The latest report of the health checks; None if they are disabled."""
        return None if self.health is None else self.health.report

    @property
    def backend(self) -> str:
        """Name of the network backend in use."""
        return self.selection.backend if self.selection else ""
