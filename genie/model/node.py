"""Nodes and their accelerators: hardware and status.

NodeInfo and GPUInfo have the fields of the visual guide; its short names for three readings (`memory`,
`util`, `temp`) are properties.
"""

from __future__ import annotations

import msgspec

from genie.model.record import FactEnum, Facts


class NodeRole(FactEnum):
    """The role of a process. A server hosts a cluster, a worker joins one with its GPUs."""

    CLIENT = "client"
    SERVER = "server"
    WORKER = "worker"


class NodeStatus(FactEnum):
    """The status of a node, by its last health check or its missing heartbeats."""

    INITIALIZING = "initializing"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"
    CRITICAL = "critical"
    SUSPECT = "suspect"
    DISCONNECTED = "disconnected"


class Vendor(FactEnum):
    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    CPU = "cpu"


class GPUInfo(Facts, frozen=True, kw_only=True):
    """One accelerator. A reading that the hardware does not provide is None."""

    gpu_id: int
    name: str
    vendor: Vendor
    uuid: str = ""
    memory_total_bytes: int = 0
    memory_used_bytes: int = 0
    utilization_pct: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    available: bool = True
    reason: str = ""
    """Why it is not available; empty if it is."""
    memory_outside_bytes: int = 0
    """Memory in use by processes that are not jobs of the cluster."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability, such as 9.0; 0.0 if there is none."""
    island: int = 0
    """GPUs of a node with the same number are connected by NVLink or a similar fabric."""
    numa: int = 0

    @property
    def memory(self) -> int:
        """Total memory in bytes."""
        return self.memory_total_bytes

    @property
    def util(self) -> float | None:
        """Utilization in percent."""
        return self.utilization_pct

    @property
    def temp(self) -> float | None:
        """Temperature in degrees Celsius."""
        return self.temperature_c


class NodeInfo(Facts, frozen=True, kw_only=True):
    """A machine or process of the cluster, as last reported."""

    node_id: str
    hostname: str
    role: NodeRole
    host: str
    """Address under which other nodes reach it."""
    control_port: int = 0
    network_backend: str = "tcp"
    gpus: tuple[GPUInfo, ...] = ()
    cpus: float = 0.0
    memory_total_bytes: int = 0
    memory_used_bytes: int = 0
    status: NodeStatus = NodeStatus.INITIALIZING
    status_reason: str = ""
    last_heartbeat: float = 0.0
    """Seconds since the epoch, by the clock of the receiver."""
    incarnation: int = 0
    version: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    rack: str = ""
    closed: str = ""
    """Why the node accepts no new work, such as low disk space; empty if it does."""
    disk_total_bytes: int = 0
    """Of the file system of the state directory; 0 if unknown."""
    disk_free_bytes: int = 0

    @property
    def gpu_count(self) -> int:
        return len(self.gpus)
