"""What nodes and jobs are to the scheduler: from the model's values to those of request.py.

Amounts of jobs are rounded up and those of nodes down, so that rounding never gives out what is not there.
What a node has beyond what the index can count is not given out either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from genie.model.job import Accelerator, Job, JobSpec
from genie.model.node import GPUInfo, NodeInfo
from genie.scheduler.placement.protocol import GPUS_MAX
from genie.scheduler.request import CPU, GpuFacts, NodeFacts, Request, Shape

_MIB = 1024**2
_COUNTED_MAX = 2**31 - 1


def facts_of(info: NodeInfo, *, closed: str = "") -> NodeFacts:
    """The node as it was last heard of. GPUs are numbered as they stand in `info`; those beyond GPUS_MAX are
    left out."""
    gpus = info.gpus[:GPUS_MAX]
    return NodeFacts(
        node_id=info.node_id,
        cpu_milli=min(math.floor(info.cpus * 1000), _COUNTED_MAX),
        memory_mib=_whole_mib(info.memory_total_bytes),
        gpus=tuple(_gpu_facts(gpu) for gpu in gpus),
        labels=frozenset(info.labels.items()),
        rack=info.rack,
        closed=closed,
        closed_gpus=frozenset(index for index, gpu in enumerate(gpus) if not gpu.available),
        memory_outside_mib=tuple(_outside_mib(gpu) for gpu in gpus),
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


def shape_of(spec: JobSpec, *, has_gpus: bool, positions: Mapping[int, int]) -> Shape:
    """What one worker asks for. `has_gpus`: whether the cluster has any, by which AUTO is decided.
    `positions` has those of its node's accelerators by their ids, for a job that is pinned to some."""
    wish, wishes = spec.resources, spec.wishes
    return Shape(
        gpus=wish.gpus,
        gpu_milli=wish.gpu_milli,
        gpu_memory_mib=_mib_up(wish.gpu_memory_bytes),
        cpu_milli=math.ceil(round(wish.cpus * 1000, 3)),
        memory_mib=_mib_up(wish.memory_bytes),
        models=frozenset(wishes.gpu_models),
        vendor=wishes.vendor,
        kind=_kind(wish.accelerator, has_gpus=has_gpus) if wish.gpus else "",
        gpu_memory_min_mib=_mib_up(wishes.gpu_memory_min_bytes),
        capability_min=wishes.capability_min,
        labels=frozenset(wishes.labels.items()),
        nodes=frozenset([spec.node_id]) if spec.node_id else frozenset(),
        gpu_ids=tuple(sorted(positions.get(gpu_id, GPU_UNKNOWN) for gpu_id in spec.gpu_ids)),
    )


def request_of(job: Job, shape: Shape) -> Request:
    """What the job asks for, of which each worker has this shape."""
    spec, wishes = job.spec, job.spec.wishes
    return Request(
        job_id=job.job_id,
        tenant=job.tenant,
        sequence=job.sequence,
        shape=shape,
        submitted_at=job.submitted_at,
        workers=wishes.workers,
        workers_min=wishes.workers_min,
        within=wishes.within,
        spread=wishes.spread,
        near=frozenset(wishes.near),
        apart=frozenset(wishes.apart),
        name=spec.name,
        priority=wishes.priority,
        preemptible=wishes.preemptible,
        grace_s=wishes.grace_s,
        time_limit_s=wishes.time_limit_s,
        deadline_at=wishes.deadline_at,
    )


GPU_UNKNOWN = 1 << 20
"""Stands for an accelerator that its node does not have."""


def _mib_up(size_bytes: int) -> int:
    return min(-(-size_bytes // _MIB), _COUNTED_MAX)


def _kind(wish: Accelerator, *, has_gpus: bool) -> str:
    if wish is Accelerator.AUTO:
        return "gpu" if has_gpus else CPU
    return wish.value
