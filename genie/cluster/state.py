"""What a process knows of its cluster: the object that genie.init() returns.

The session's thread writes it, everyone may read it. Values are replaced and never changed in place,
so a reader always sees a whole one. Not for: doing anything (session_run.py).
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
    from genie.cluster.health import HealthChecker
    from genie.cluster.link import Link
    from genie.cluster.monitoring import ResourceMonitor
    from genie.runtime.network_discovery import DiscoveryResult, Selection


@dataclass(eq=False, kw_only=True)
class ClusterState:
    """One session. After shutdown() `initialized` is False and the last values stay readable."""

    config: ClusterConfig
    node: NodeInfo = field(repr=False)
    """This process as init() found it; `local_node` has it with the newest readings."""
    events: EventBus = field(repr=False)
    """Subscribe here; `events.history()` has the five phases of init()."""
    initialized: bool = False
    nodes: dict[str, NodeInfo] = field(default_factory=dict)
    """The nodes that offer accelerators, by id, as the controller last listed them."""
    session_id: str = ""
    """This session's name at the controller: unique, unlike the node id that several may share."""
    cluster_id: str = ""
    tenant: str = ""
    discovery: DiscoveryResult | None = field(default=None, repr=False)
    selection: Selection | None = None
    """The backend in use and why."""
    control_integration: Link | None = field(default=None, repr=False)
    """The connection to the controller."""
    transport_coordinator: DeviceBroker | None = field(default=None, repr=False)
    """Opens the connections to executors that carry tensors."""
    monitor: ResourceMonitor | None = field(default=None, repr=False)
    health: HealthChecker | None = field(default=None, repr=False)
    monitor_tasks: list[asyncio.Task[Any]] = field(default_factory=list, repr=False)
    """Heartbeat, monitoring and health checks, on the session's own event loop."""
    rtt_ms: float | None = field(default=None, repr=False)
    """Round trip to the controller: of the last heartbeat, and before that of the discovery."""
    stats: dict[str, float] = field(default_factory=dict, repr=False)
    """Counters, and seconds: heartbeats_sent, heartbeats_failed, reconnects, init_s, phase_N_s."""

    @property
    def local_node(self) -> NodeInfo:
        """This process, with the newest readings of its machine and the verdict of its health checks."""
        node = self.node
        if self.monitor is not None:
            read = self.monitor.local_node
            node = msgspec.structs.replace(
                node,
                gpus=read.gpus,
                memory_total_bytes=read.memory_total_bytes,
                memory_used_bytes=read.memory_used_bytes,
            )
        report = self.health.report if self.health is not None else None
        if report is not None:
            node = msgspec.structs.replace(node, status=report.status, status_reason=report.reason)
        return node

    @property
    def backend(self) -> str:
        """Name of the network backend in use."""
        return self.selection.backend if self.selection else ""
