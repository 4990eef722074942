"""What is asked for and what there is, as the scheduler sees them. Values only; amounts are whole numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from genie.errors import UsageError
from genie.model.job import Spread, Within

FULL_MILLI = 1000
CPU = "cpu"


class Amounts(msgspec.Struct, frozen=True, gc=False):
    """What is held, of each thing that is shared. `gpu_milli` counts thousandths of GPUs."""

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

    def times(self, count: int) -> Amounts:
        if count == 1:
            return self
        return Amounts(self.gpu_milli * count, self.cpu_milli * count, self.memory_mib * count)


@dataclass(frozen=True)
class Shape:
    """What one worker takes, and which nodes will do for it. Shares and GPU memory are of each GPU."""

    gpus: int = 0
    gpu_milli: int = FULL_MILLI
    gpu_memory_mib: int = 0
    cpu_milli: int = 0
    memory_mib: int = 0
    models: frozenset[str] = frozenset()
    """Any of these GPU models; empty for all."""
    vendor: str = ""
    kind: str = ""
    """"gpu" or "cpu": a CPU may be offered as an accelerator where there are no GPUs; empty for both."""
    gpu_memory_min_mib: int = 0
    """The whole memory that a GPU must have at least, held or not."""
    capability_min: tuple[int, int] = (0, 0)
    labels: frozenset[tuple[str, str]] = frozenset()
    """Every one of these labels of a node."""
    nodes: frozenset[str] = frozenset()
    """Only these; empty for all."""
    gpu_ids: tuple[int, ...] = ()
    """Only on these GPUs of the one node in `nodes`; empty for all."""

    def __post_init__(self) -> None:
        if self.gpu_ids and len(self.nodes) != 1:
            raise UsageError("GPUs are asked for by number and no node, or several", hint="name one node")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Asked for several times in every decision, so it is counted once."""
        amounts = (self.gpus, self.gpu_milli, self.gpu_memory_mib, self.cpu_milli, self.memory_mib)
        needs = (self.models, self.vendor, self.kind, self.gpu_memory_min_mib, self.capability_min)
        return hash((amounts, needs, self.labels, self.nodes, self.gpu_ids))

    @property
    def asks_for_gpus(self) -> bool:
        """For some of those there are, that is, not only for so many."""
        needs = (self.models, self.vendor, self.gpu_memory_min_mib, self.capability_min > (0, 0))
        return self.gpus > 0 and any(needs)

    @cached_property
    def amounts(self) -> Amounts:
        return Amounts(self.gpus * self.gpu_milli, self.cpu_milli, self.memory_mib)

    @cached_property
    def bare(self) -> Shape:
        """What it holds, whatever else it asks for."""
        return Shape(self.gpus, self.gpu_milli, self.gpu_memory_mib, self.cpu_milli, self.memory_mib)

    def times(self, count: int) -> Shape:
        """So many workers as one: on one node, on different GPUs."""
        return replace(
            self,
            gpus=self.gpus * count,
            cpu_milli=self.cpu_milli * count,
            memory_mib=self.memory_mib * count,
        )


class Request(msgspec.Struct, frozen=True, dict=True):
    """A job that waits or runs. `sequence` is its order of arrival; times are in seconds of one clock."""

    job_id: str
    tenant: str
    sequence: int
    shape: Shape
    submitted_at: float = 0.0
    workers: int = 1
    workers_min: int = 0
    """An elastic job starts with so many at least; 0 for all of them."""
    within: Within = Within.ANYWHERE
    spread: Spread = Spread.PACK
    near: frozenset[str] = frozenset()
    """Only on nodes where a job of the tenant with one of these names runs."""
    apart: frozenset[str] = frozenset()
    """Not on nodes where a job of the tenant with one of these names runs."""
    name: str = ""
    priority: int = 0
    preemptible: bool = False
    grace_s: float = 30.0
    """How long it is given to save its state before it must go."""
    time_limit_s: float | None = None
    """It is ended after so long; None: nobody knows how long it takes."""
    deadline_at: float | None = None

    @cached_property
    def kind(self) -> Request:
        """What jobs that fare alike have in common; the rest is left out."""
        return Request(
            job_id="",
            tenant=self.tenant,
            sequence=0,
            shape=self.shape,
            workers=self.workers,
            workers_min=self.workers_min,
            within=self.within,
            spread=self.spread,
            near=self.near,
            apart=self.apart,
        )

    @property
    def least_workers(self) -> int:
        return self.workers_min or self.workers

    def amounts(self, workers: int) -> Amounts:
        return self.shape.amounts.times(workers)


@dataclass(frozen=True)
class GpuFacts:
    model: str = ""
    vendor: str = ""
    memory_mib: int = 0
    capability: tuple[int, int] = (0, 0)
    island: int = 0
    """Those with the same number are joined by NVLink."""
    numa: int = 0


@dataclass(frozen=True)
class NodeFacts:
    """One node. `closed` says why nothing may be placed there; empty when it may."""

    node_id: str
    cpu_milli: int
    memory_mib: int
    gpus: tuple[GpuFacts, ...] = ()
    labels: frozenset[tuple[str, str]] = frozenset()
    rack: str = ""
    closed: str = ""
    closed_gpus: frozenset[int] = frozenset()
    """Draining, throttled or unhealthy: nothing new is placed on them."""
    memory_outside_mib: tuple[int, ...] = ()
    """Of each GPU, what processes outside of the cluster use; empty for nothing."""

    @property
    def amounts(self) -> Amounts:
        return Amounts(len(self.gpus) * FULL_MILLI, self.cpu_milli, self.memory_mib)


class WorkerPlace(msgspec.Struct, frozen=True, order=True):
    """Where one worker runs."""

    node_id: str
    gpu_ids: tuple[int, ...] = ()


def why_not(shape: Shape, node: NodeFacts) -> str:
    """Why the node could not hold one such worker, were it all free; empty when it could."""
    if node.closed:
        return node.closed
    if shape.nodes and node.node_id not in shape.nodes:
        return "another node is asked for"
    if missing := shape.labels - node.labels:
        return "no label " + ", ".join(f"{key}={value}" for key, value in sorted(missing))
    if shape.cpu_milli > node.cpu_milli:
        return "has " + counted(node.cpu_milli / 1000, "CPU")
    if shape.memory_mib > node.memory_mib:
        return f"has {node.memory_mib} MiB of memory"
    if shape.gpus > len(node.gpus):
        is_cpu = bool(node.gpus) and all(gpu.vendor == CPU for gpu in node.gpus)
        return "has " + counted(len(node.gpus), "CPU accelerator" if is_cpu else "GPU")
    if shape.gpu_ids:
        return _why_not_these(shape, node)
    return why_not_gpus(shape, node.gpus) if shape.gpus else ""


def counted(count: float, word: str) -> str:
    """`1 GPU`, `0.5 GPUs`."""
    return f"{count:g} {word}{'' if count == 1 else 's'}"


def _why_not_these(shape: Shape, node: NodeFacts) -> str:
    if missing := [gpu for gpu in shape.gpu_ids if not 0 <= gpu < len(node.gpus)]:
        return f"has no GPU {min(missing)}"
    usable = set(shape.gpu_ids) - node.closed_gpus
    if len(usable) < shape.gpus <= len(set(shape.gpu_ids)):
        return f"its GPU {min(set(shape.gpu_ids) - usable)} takes nothing new"
    if len(usable) < shape.gpus:
        return f"{shape.gpus} GPUs are asked for, and {len(usable)} by number"
    return why_not_gpus(shape, tuple(node.gpus[gpu] for gpu in sorted(usable)))


def why_not_gpus(shape: Shape, gpus: tuple[GpuFacts, ...]) -> str:
    """All of these must do: which of them a worker gets is decided later."""
    for gpu in gpus:
        if shape.models and gpu.model not in shape.models:
            return f"its GPUs are {gpu.model or 'of an unknown model'}"
        if shape.kind and (gpu.vendor == CPU) != (shape.kind == CPU):
            return "its accelerators are CPUs" if gpu.vendor == CPU else "its accelerators are GPUs"
        if shape.vendor and gpu.vendor != shape.vendor:
            return f"its GPUs are by {gpu.vendor or 'an unknown vendor'}"
        if gpu.memory_mib < max(shape.gpu_memory_min_mib, shape.gpu_memory_mib):
            return f"its GPUs have {gpu.memory_mib} MiB"
        if gpu.capability < shape.capability_min:
            return f"its GPUs have compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    return ""
