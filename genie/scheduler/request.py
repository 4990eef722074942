"""Requests, nodes and allocations as the scheduler sees them. Plain values; amounts are integers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from genie.errors import UsageError
from genie.model.job import Spread, Within

WHOLE_GPU_MILLI = 1000
CPU_ACCELERATOR = "cpu"


class Amounts(msgspec.Struct, frozen=True, gc=False):
    """Resources of a job, node or tenant. `gpu_milli` is in thousandths of a GPU."""

    gpu_milli: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.gpu_milli + other.gpu_milli,
            self.cpu_milli + other.cpu_milli,
            self.memory_mib + other.memory_mib,
        )

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.gpu_milli - other.gpu_milli,
            self.cpu_milli - other.cpu_milli,
            self.memory_mib - other.memory_mib,
        )

    def multiplied_by(self, count: int) -> Amounts:
        if count == 1:
            return self
        return Amounts(self.gpu_milli * count, self.cpu_milli * count, self.memory_mib * count)


@dataclass(frozen=True)
class Shape:
    """What one worker requests, and its constraints on nodes. `gpu_milli` and GPU memory are per GPU."""

    gpus: int = 0
    gpu_milli: int = WHOLE_GPU_MILLI
    gpu_memory_mib: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0
    models: frozenset[str] = frozenset()
    """Allowed GPU models; empty for all."""
    vendor: str = ""
    accelerator_kind: str = ""
    """"gpu", "cpu" (the CPU of a node without GPUs as an accelerator), or empty for both."""
    gpu_memory_min_mib: int = 0
    """Minimum total memory per GPU."""
    capability_min: tuple[int, int] = (0, 0)
    labels: frozenset[tuple[str, str]] = frozenset()
    """Required labels."""
    nodes: frozenset[str] = frozenset()
    """Allowed nodes; empty for all."""
    gpu_ids: tuple[int, ...] = ()
    """Allowed GPUs of the only node in `nodes`; empty for all."""

    def __post_init__(self) -> None:
        if self.gpu_ids and len(self.nodes) != 1:
            raise UsageError("GPUs by number require exactly one node", hint="name the node of the GPUs")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Cached: shapes are hashed several times in every decision."""
        amounts = (self.gpus, self.gpu_milli, self.gpu_memory_mib, self.cpu_milli, self.memory_mib)
        needs = (
            self.models,
            self.vendor,
            self.accelerator_kind,
            self.gpu_memory_min_mib,
            self.capability_min,
        )
        return hash((amounts, needs, self.labels, self.nodes, self.gpu_ids))

    @property
    def constrains_gpus(self) -> bool:
        """Whether it requires certain GPUs, not only a number of them."""
        needs = (self.models, self.vendor, self.gpu_memory_min_mib, self.capability_min > (0, 0))
        return self.gpus > 0 and any(needs)

    @cached_property
    def amounts(self) -> Amounts:
        return Amounts(self.gpus * self.gpu_milli, self.cpu_milli, self.memory_mib)

    @cached_property
    def without_constraints(self) -> Shape:
        """The resources without the constraints."""
        return Shape(self.gpus, self.gpu_milli, self.gpu_memory_mib, self.cpu_milli, self.memory_mib)

    def multiplied_by(self, count: int) -> Shape:
        """Return the request of several workers together: on one node, on different GPUs."""
        return replace(
            self,
            gpus=self.gpus * count,
            cpu_milli=self.cpu_milli * count,
            memory_mib=self.memory_mib * count,
        )


class JobRequest(msgspec.Struct, frozen=True, dict=True):
    """A job, queued or running. `sequence` is its order of arrival; all times are seconds of one clock."""

    job_id: str
    tenant: str
    sequence: int
    shape: Shape
    submitted_at: float = 0.0
    workers: int = 1
    workers_min: int = 0
    """Minimum number of workers of an elastic job; 0 for all."""
    within: Within = Within.ANYWHERE
    spread: Spread = Spread.PACK
    near_job_names: frozenset[str] = frozenset()
    """Only on nodes that run a job of the tenant with one of these names."""
    apart_job_names: frozenset[str] = frozenset()
    """Not on nodes that run a job of the tenant with one of these names."""
    name: str = ""
    priority: int = 0
    preemptible: bool = False
    grace_s: float = 30.0
    """Grace period on preemption."""
    time_limit_s: float | None = None
    """None for no limit."""
    deadline_at: float | None = None

    @cached_property
    def placement_fields(self) -> JobRequest:
        """The fields that determine whether it fits; jobs for which they are equal form a job class."""
        return JobRequest(
            job_id="",
            tenant=self.tenant,
            sequence=0,
            shape=self.shape,
            workers=self.workers,
            workers_min=self.workers_min,
            within=self.within,
            spread=self.spread,
            near_job_names=self.near_job_names,
            apart_job_names=self.apart_job_names,
        )

    @property
    def workers_required(self) -> int:
        return self.workers_min or self.workers

    def amounts(self, workers: int) -> Amounts:
        return self.shape.amounts.multiplied_by(workers)


@dataclass(frozen=True)
class GpuFacts:
    model: str = ""
    vendor: str = ""
    memory_mib: int = 0
    capability: tuple[int, int] = (0, 0)
    island: int = 0
    """GPUs with the same number are connected by NVLink."""
    numa: int = 0


@dataclass(frozen=True)
class NodeFacts:
    """`blocked_reason` is why the node accepts no placements; empty if it does."""

    node_id: str
    cpu_milli: int
    memory_mib: int
    gpus: tuple[GpuFacts, ...] = ()
    labels: frozenset[tuple[str, str]] = frozenset()
    rack: str = ""
    blocked_reason: str = ""
    blocked_gpus: frozenset[int] = frozenset()
    """Draining, throttled or unhealthy GPUs, which accept no placements."""
    memory_used_outside_cluster_mib: tuple[int, ...] = ()
    """Memory of each GPU used by processes outside the cluster; empty for none."""
    has_left: bool = False
    """It has left the cluster and is blocked; pending reasons name it only if a job needs its return."""

    @property
    def amounts(self) -> Amounts:
        return Amounts(len(self.gpus) * WHOLE_GPU_MILLI, self.cpu_milli, self.memory_mib)


class WorkerPlace(msgspec.Struct, frozen=True, order=True):
    """Where one worker runs."""

    node_id: str
    gpu_ids: tuple[int, ...] = ()


class Allocation(msgspec.Struct, frozen=True):
    """What a running job holds."""

    request: JobRequest
    places: tuple[WorkerPlace, ...]

    @property
    def amounts(self) -> Amounts:
        return self.request.amounts(len(self.places))


def why_unsuitable(shape: Shape, node: NodeFacts) -> str:
    """Return why the node could not hold one such worker even if it were free; empty if it could."""
    if node.blocked_reason:
        return node.blocked_reason
    if shape.nodes and node.node_id not in shape.nodes:
        return "is not a requested node"
    if missing := shape.labels - node.labels:
        return "missing label " + ", ".join(f"{key}={value}" for key, value in sorted(missing))
    if shape.cpu_milli > node.cpu_milli:
        return "has " + format_count(node.cpu_milli / 1000, "CPU")
    if shape.memory_mib > node.memory_mib:
        return f"has {format_memory(node.memory_mib)} of memory"
    if shape.gpus > len(node.gpus):
        is_cpu = bool(node.gpus) and all(gpu.vendor == CPU_ACCELERATOR for gpu in node.gpus)
        return "has " + format_count(len(node.gpus), "CPU accelerator" if is_cpu else "GPU")
    if shape.gpu_ids:
        return _why_named_gpus_unsuitable(shape, node)
    return why_gpus_unsuitable(shape, node.gpus) if shape.gpus else ""


def format_count(count: float, noun: str) -> str:
    """`1 GPU`, `0.5 GPUs`."""
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def format_memory(memory_mib: int) -> str:
    """`64 GiB`, `0.5 GiB`: one unit, so that the amounts of one message can be compared."""
    memory_gib = memory_mib / 1024
    return f"{round(memory_gib, 2) or round(memory_gib, 3):.12g} GiB"


def _why_named_gpus_unsuitable(shape: Shape, node: NodeFacts) -> str:
    if missing := [gpu for gpu in shape.gpu_ids if not 0 <= gpu < len(node.gpus)]:
        return f"has no GPU {min(missing)}"
    usable = set(shape.gpu_ids) - node.blocked_gpus
    if len(usable) < shape.gpus <= len(set(shape.gpu_ids)):
        return f"GPU {min(set(shape.gpu_ids) - usable)} accepts no new jobs"
    if len(usable) < shape.gpus:
        return f"{shape.gpus} GPUs are requested, but {len(usable)} by number"
    return why_gpus_unsuitable(shape, tuple(node.gpus[gpu] for gpu in sorted(usable)))


def why_gpus_unsuitable(shape: Shape, gpus: tuple[GpuFacts, ...]) -> str:
    """Return why one of these GPUs is not suitable. All must be: which of them is used is decided later."""
    for gpu in gpus:
        if shape.models and gpu.model not in shape.models:
            return f"GPU model is {gpu.model or 'unknown'}"
        if shape.accelerator_kind and (gpu.vendor == CPU_ACCELERATOR) != (
            shape.accelerator_kind == CPU_ACCELERATOR
        ):
            return (
                "has only a CPU accelerator"
                if gpu.vendor == CPU_ACCELERATOR
                else "has GPUs, not a CPU accelerator"
            )
        if shape.vendor and gpu.vendor != shape.vendor:
            return f"GPU vendor is {gpu.vendor or 'unknown'}"
        if gpu.memory_mib < max(shape.gpu_memory_min_mib, shape.gpu_memory_mib):
            return f"GPUs have {format_memory(gpu.memory_mib)} of memory"
        if gpu.capability < shape.capability_min:
            return f"GPUs have compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    return ""
