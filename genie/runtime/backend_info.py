"""The network backends and what each of them is good for. Values only.

The figures are nominal ones of the technology, as its documents give them for good hardware. None
of them was measured by Genie, and none says what a given machine reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from genie.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """One way to carry tensors. `implemented`: this version of Genie has a transport for it."""

    name: str
    bandwidth_gbps: float
    """Nominal, in gigabits a second."""
    latency_ms: float
    """Nominal, in milliseconds."""
    zero_copy: bool
    requirements: tuple[str, ...]
    features: tuple[str, ...]
    implemented: bool


_ALL = (
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
        requirements=("everything that dpdk needs", "CUDA GPUs", "the DPDK gpudev library", "nvidia_peermem"),
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

BACKENDS: Mapping[str, BackendInfo] = MappingProxyType({info.name: info for info in _ALL})

PRIORITY = ("dpdk_gpudev", "rdma", "dpdk", "tcp")
"""Best first, as long as nothing has been measured."""


def get_backend_info(name: str) -> BackendInfo:
    """ConfigError for a name that is no backend; "auto" is a wish and not a backend."""
    if name not in BACKENDS:
        raise ConfigError(f"there is no network backend {name!r}", hint=f"allowed: {', '.join(BACKENDS)}")
    return BACKENDS[name]
