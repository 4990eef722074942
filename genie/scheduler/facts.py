"""What nodes and jobs are to the scheduler: from the model's values to those of request.py.

Amounts of jobs are rounded up and those of nodes down, so that rounding never gives out what is not there.
What a node has beyond what the index can count is not given out either.
"""

from __future__ import annotations

import math

from genie.model.node import GPUInfo, NodeInfo
from genie.scheduler.request import GpuFacts, NodeFacts

_MIB = 1024**2
_COUNTED_MAX = 2**31 - 1


def facts_of(info: NodeInfo, *, closed: str = "") -> NodeFacts:
    """The node as it was last heard of. GPUs are numbered as they stand in `info`."""
    return NodeFacts(
        node_id=info.node_id,
        cpu_milli=min(math.floor(info.cpus * 1000), _COUNTED_MAX),
        memory_mib=_whole_mib(info.memory_total_bytes),
        gpus=tuple(_gpu_facts(gpu) for gpu in info.gpus),
        labels=frozenset(info.labels.items()),
        rack=info.rack,
        closed=closed,
        closed_gpus=frozenset(index for index, gpu in enumerate(info.gpus) if not gpu.available),
        memory_outside_mib=tuple(_outside_mib(gpu) for gpu in info.gpus),
    )


def _gpu_facts(gpu: GPUInfo) -> GpuFacts:
    return GpuFacts(
        model=gpu.name,
        vendor=gpu.vendor.value,
        memory_mib=_whole_mib(gpu.memory_total_bytes),
        capability=gpu.capability,
        island=gpu.island,
        numa=gpu.numa,
    )


def _whole_mib(size_bytes: int) -> int:
    return min(size_bytes // _MIB, _COUNTED_MAX)


def _outside_mib(gpu: GPUInfo) -> int:
    """Rounded up: what is used in part is not free. Never more than the GPU has."""
    return min(-(-gpu.memory_outside_bytes // _MIB), _whole_mib(gpu.memory_total_bytes))
