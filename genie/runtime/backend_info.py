"""The network backends and their properties.

The figures are nominal values of each technology. Genie did not measure them, and a given machine may not
reach them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from genie.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """A network backend. `implemented`: this version of Genie has a transport for it."""

    name: str
    bandwidth_gbps: float
    """Nominal, in gigabits per second."""
    latency_ms: float
    """Nominal, in milliseconds."""
    zero_copy: bool
    requirements: tuple[str, ...]
    features: tuple[str, ...]
    implemented: bool


_ALL_BACKENDS = (
    BackendInfo(
        name="tcp",
        bandwidth_gbps=10.0,
        latency_ms=1.0,
        zero_copy=False,
        requirements=(),
        features=("works everywhere",),
        implemented=True,
    ),
    BackendInfo(
        name="dpdk",
        bandwidth_gbps=90.0,
        latency_ms=0.05,
        zero_copy=True,
        requirements=("DPDK libraries", "huge pages", "a network card that DPDK can drive"),
        features=("zero copy", "kernel bypass"),
        implemented=False,
    ),
    BackendInfo(
        name="dpdk_gpudev",
        bandwidth_gbps=95.0,
        latency_ms=0.03,
        zero_copy=True,
        requirements=("the requirements of dpdk", "CUDA GPUs", "the DPDK gpudev library", "nvidia_peermem"),
        features=("zero copy", "kernel bypass", "GPU direct"),
        implemented=False,
    ),
    BackendInfo(
        name="rdma",
        bandwidth_gbps=100.0,
        latency_ms=0.001,
        zero_copy=True,
        requirements=("an InfiniBand or RoCE device with an active port", "libibverbs"),
        features=("zero copy", "kernel bypass", "one-sided reads and writes"),
        implemented=False,
    ),
)

BACKENDS: Mapping[str, BackendInfo] = MappingProxyType({info.name: info for info in _ALL_BACKENDS})

BACKEND_PRIORITY = ("dpdk_gpudev", "rdma", "dpdk", "tcp")
"""Best first, if nothing was measured."""


def get_backend_info(name: str) -> BackendInfo:
    """Raises ConfigError for an unknown name. "auto" is not a backend."""
    if name not in BACKENDS:
        raise ConfigError(f"there is no network backend {name!r}", hint=f"allowed: {', '.join(BACKENDS)}")
    return BACKENDS[name]
