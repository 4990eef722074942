"""The data plane: how tensors travel between this process and the executors of a cluster.

    coordinator = TransportCoordinator(DataPlaneConfig(host="gpu-box"))
    selection = await coordinator.initialize()

`genie.init` does this, and `state.transport_coordinator` is the coordinator of the session, which also opens
executors (cluster/devices.py). The network probes are in network_discovery.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from genie.errors import ConfigError, UsageError
from genie.runtime.backend_info import BACKENDS
from genie.runtime.network_discovery import DiscoveryResult, NetworkDiscovery, Selection, select_backend


@dataclass(frozen=True, kw_only=True)
class DataPlaneConfig:
    """Settings of the data plane. `genie.init` derives them from ClusterConfig."""

    host: str
    """Address of the controller. Its network decides which backends are available."""
    port: int = 5555
    backend: str = "auto"
    """auto, tcp, rdma, dpdk or dpdk_gpudev. A backend given by name is used or rejected, never replaced."""
    timeout_s: float = 30.0
    """For network discovery, and for opening one executor."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host is empty", hint="set host to the address of the controller")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} is not allowed", hint="allowed: 1 to 65535")
        allowed = ("auto", *BACKENDS)
        if self.backend not in allowed:
            hint = f"allowed: {', '.join(allowed)}"
            raise ConfigError(f"backend = {self.backend!r} is not allowed", hint=hint)
        if not 0 < self.timeout_s < math.inf:  # written so that NaN is rejected, too
            raise ConfigError(f"timeout_s = {self.timeout_s} is not allowed", hint="allowed: seconds above 0")


class TransportCoordinator:
    """Selects the network backend of the data plane. Has no connection of its own."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self.config = config
        self.discovery: DiscoveryResult | None = None
        """Result of the network probes; None before discover()."""
        self.selection: Selection | None = None
        """The backend in use and the reason; None before select()."""

    @property
    def backend(self) -> str:
        """Name of the selected backend; empty before initialize()."""
        return self.selection.backend if self.selection else ""

    async def initialize(self) -> Selection:
        """Probes the network and selects the backend. Does nothing if a backend is already selected.

        Raises UnreachableError if the host does not respond, ConfigError if the configured backend does not
        work on this machine.
        """
        if self.selection is None:
            await self.discover(timeout_s=self.config.timeout_s)
            self.select()
        assert self.selection is not None
        return self.selection

    async def discover(self, *, timeout_s: float) -> DiscoveryResult:
        """First half of initialize(). An unreachable host is a result, not an error."""
        config = self.config
        self.discovery = await NetworkDiscovery().discover(config.host, config.port, timeout_s=timeout_s)
        return self.discovery

    def select(self) -> Selection:
        """Second half of initialize(). Raises UsageError before discover()."""
        if self.discovery is None:
            raise UsageError("the network was not probed yet", hint="call discover() or initialize() first")
        self.selection = select_backend(self.config.backend, self.discovery)
        return self.selection
