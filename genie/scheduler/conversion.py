"""Converts jobs and nodes of the model to the values of request.py.

Requests are rounded up and capacities down, so rounding never overcommits a node. Capacity beyond the range
of the placers is not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from genie.model.job import Accelerator, Job, JobSpec
from genie.model.node import GPUInfo, NodeInfo
from genie.scheduler.placement.protocol import NODE_GPUS_MAX
from genie.scheduler.request import CPU_ACCELERATOR, GpuFacts, JobRequest, NodeFacts, Shape

_MIB = 1024**2
RESOURCE_AMOUNT_MAX = 2**31 - 1


def node_facts(info: NodeInfo, *, blocked_reason: str = "", has_left: bool = False) -> NodeFacts:
    """Convert the last report of a node. GPUs are numbered by their position in `info`; only the first
    NODE_GPUS_MAX are used."""
    gpus = info.gpus[:NODE_GPUS_MAX]
    return NodeFacts(
        node_id=info.node_id,
        cpu_milli=min(math.floor(info.cpus * 1000), RESOURCE_AMOUNT_MAX),
        memory_mib=_round_down_to_mib(info.memory_total_bytes),
        gpus=tuple(_gpu_facts(gpu) for gpu in gpus),
        labels=frozenset(info.labels.items()),
        rack=info.rack,
        blocked_reason=blocked_reason,
        blocked_gpus=frozenset(index for index, gpu in enumerate(gpus) if not gpu.available),
        memory_used_outside_cluster_mib=tuple(_memory_used_outside_cluster_mib(gpu) for gpu in gpus),
        has_left=has_left,
    )


def _gpu_facts(gpu: GPUInfo) -> GpuFacts:
    return GpuFacts(
        model=gpu.name,
        vendor=gpu.vendor.value,
        memory_mib=_round_down_to_mib(gpu.memory_total_bytes),
        capability=gpu.capability,
        island=gpu.island,
        numa=gpu.numa,
    )


def _round_down_to_mib(size_bytes: int) -> int:
    return min(size_bytes // _MIB, RESOURCE_AMOUNT_MAX)


def _memory_used_outside_cluster_mib(gpu: GPUInfo) -> int:
    """Rounded up, at most the memory of the GPU."""
    return min(-(-gpu.memory_outside_bytes // _MIB), _round_down_to_mib(gpu.memory_total_bytes))


def worker_shape(spec: JobSpec, *, has_gpus: bool, gpu_positions: Mapping[int, int]) -> Shape:
    """Convert the request of one worker. `has_gpus`: whether the cluster has GPUs, which decides AUTO.
    `gpu_positions` maps accelerator ids of the job's node to positions, for a job that names accelerators."""
    resources, constraints = spec.resources, spec.constraints
    return Shape(
        gpus=resources.gpus,
        gpu_milli=resources.gpu_milli,
        gpu_memory_mib=_round_up_to_mib(resources.gpu_memory_bytes),
        cpu_milli=math.ceil(round(resources.cpus * 1000, 3)),
        memory_mib=_round_up_to_mib(resources.memory_bytes),
        models=frozenset(constraints.gpu_models),
        vendor=constraints.vendor,
        accelerator_kind=_accelerator_kind(resources.accelerator, has_gpus=has_gpus)
        if resources.gpus
        else "",
        gpu_memory_min_mib=_round_up_to_mib(constraints.gpu_memory_min_bytes),
        capability_min=constraints.capability_min,
        labels=frozenset(constraints.labels.items()),
        nodes=frozenset([spec.node_id]) if spec.node_id else frozenset(),
        gpu_ids=tuple(sorted(gpu_positions.get(gpu_id, GPU_POSITION_UNKNOWN) for gpu_id in spec.gpu_ids)),
    )


def job_request(job: Job, shape: Shape) -> JobRequest:
    """Convert a job whose workers have this shape."""
    spec, constraints = job.spec, job.spec.constraints
    return JobRequest(
        job_id=job.job_id,
        tenant=job.tenant,
        sequence=job.sequence,
        shape=shape,
        submitted_at=job.submitted_at,
        workers=constraints.workers,
        workers_min=constraints.workers_min,
        within=constraints.within,
        spread=constraints.spread,
        near_job_names=frozenset(constraints.near),
        apart_job_names=frozenset(constraints.apart),
        name=spec.name,
        priority=constraints.priority,
        preemptible=constraints.preemptible,
        grace_s=constraints.grace_s,
        time_limit_s=constraints.time_limit_s,
        deadline_at=constraints.deadline_at,
    )


GPU_POSITION_UNKNOWN = 1 << 20
"""Position of an accelerator that its node does not have."""


def _round_up_to_mib(size_bytes: int) -> int:
    return min(-(-size_bytes // _MIB), RESOURCE_AMOUNT_MAX)


def _accelerator_kind(accelerator: Accelerator, *, has_gpus: bool) -> str:
    if accelerator is Accelerator.AUTO:
        return "gpu" if has_gpus else CPU_ACCELERATOR
    return accelerator.value
