"""Nodes and their accelerators: what a machine has and how it is.

The visual guide's drawing of NodeInfo and GPUInfo is kept field by field; the short names it uses
for three readings (`memory`, `util`, `temp`) are properties beside the fields with units.
"""

from __future__ import annotations

import enum

import msgspec

from genie.model.record import Record


class NodeRole(enum.StrEnum):
    """What a process is in the cluster. A server hosts the cluster, a worker joins one with its GPUs."""

    CLIENT = "client"
    SERVER = "server"
    WORKER = "worker"


class NodeStatus(enum.StrEnum):
    """How a node is, as its last health check or the controller's clock found it."""

    INITIALIZING = "initializing"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"
    CRITICAL = "critical"
    SUSPECT = "suspect"
    DISCONNECTED = "disconnected"


class Vendor(enum.StrEnum):
    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    CPU = "cpu"


class GPUInfo(Record, frozen=True, kw_only=True):
    """One accelerator. A reading that the hardware does not give is None, never a made-up number."""

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
    """Why it is not available; empty when it is."""
    memory_outside_bytes: int = 0
    """Of what is in use, what processes use that are no jobs of the cluster."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability, such as 9.0; 0.0 where there is none."""
    island: int = 0
    """Those of a node with the same number are joined by NVLink or the like."""
    numa: int = 0

    @property
    def memory(self) -> int:
        """Total memory in bytes."""
        return self.memory_total_bytes

    @property
    def util(self) -> float | None:
        """Utilisation in percent."""
        return self.utilization_pct

    @property
    def temp(self) -> float | None:
        """Temperature in degrees Celsius."""
        return self.temperature_c


class NodeInfo(Record, frozen=True, kw_only=True):
    """One process's or machine's place in the cluster, as last heard."""

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
    """Seconds since the epoch, by the clock of whoever heard it."""
    incarnation: int = 0
    version: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    rack: str = ""

    @property
    def gpu_count(self) -> int:
        return len(self.gpus)
