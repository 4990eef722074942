"""What the plain placer and its policies look at: nodes, GPUs, request classes; and what a policy is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from genie.scheduler.placement.protocol import FULL_MILLI


@dataclass(frozen=True)
class Request:
    """A request class."""

    gpus: int
    gpu_milli: int
    gpu_memory_mib: int
    cpu_milli: int
    memory_mib: int
    models: int
    nodes: frozenset[int] | None

    @property
    def gpu_volume(self) -> int:
        return self.gpus * self.gpu_milli

    @property
    def is_fraction(self) -> bool:
        return self.gpus > 0 and self.gpu_milli < FULL_MILLI


@dataclass
class Gpu:
    """What is free of it, and whose requests are on it."""

    free_milli: int
    free_memory_mib: int
    tenant: int = 0

    def fits(self, wanted: Request, tenant: int) -> bool:
        """Two tenants never share a GPU."""
        room = self.free_milli >= wanted.gpu_milli and self.free_memory_mib >= wanted.gpu_memory_mib
        return room and self.tenant in (0, tenant)


@dataclass
class Node:
    """One machine."""

    number: int
    cpu_milli: int
    memory_mib: int
    gpu_memory_mib: int
    model: int
    rank: int
    gpus: list[Gpu]
    is_open: bool = True
    free_cpu_milli: int = field(init=False)
    free_memory_mib: int = field(init=False)
    held: dict[int, int] = field(default_factory=dict)
    """How many requests are on it, by their number of whole GPUs; 0 for fractions."""

    def __post_init__(self) -> None:
        self.free_cpu_milli, self.free_memory_mib = self.cpu_milli, self.memory_mib

    @property
    def free_gpu_milli(self) -> int:
        return sum(gpu.free_milli for gpu in self.gpus)

    def fits_beside_gpus(self, wanted: Request) -> bool:
        if not self.is_open or (wanted.nodes is not None and self.number not in wanted.nodes):
            return False
        if self.free_cpu_milli < wanted.cpu_milli or self.free_memory_mib < wanted.memory_mib:
            return False
        return wanted.gpus == 0 or bool(wanted.models >> self.model & 1)

    def usable(self, wanted: Request, tenant: int) -> list[int]:
        """The GPUs with room, those with the least of it first."""
        found = [number for number, gpu in enumerate(self.gpus) if gpu.fits(wanted, tenant)]
        return sorted(found, key=lambda number: self.gpus[number].free_milli)

    def tightest(self, wanted: Request, tenant: int) -> tuple[int, ...] | None:
        found = self.usable(wanted, tenant)[: wanted.gpus]
        return tuple(sorted(found)) if len(found) == wanted.gpus else None


@dataclass
class Cluster:
    """All nodes and request classes."""

    nodes: list[Node] = field(default_factory=list)
    classes: list[Request] = field(default_factory=list)


Cost = tuple[float, int]
"""The lower one is better: what it costs, then what decides ties."""


class Policy:
    """How good the places on a node are. One that learns has lessons."""

    def judge(self, node: Node, wanted: Request, tenant: int) -> tuple[Cost, tuple[int, ...]] | None:
        """The best place on this node with its cost; None when it does not fit."""
        raise NotImplementedError

    def is_stale(self) -> bool:
        """Whether the cluster is so different that the policy should look at it again."""
        return False

    def learn(self, cluster: Cluster, history: Sequence[int] | None) -> None:
        """From the last requests, the oldest first; None: only look at the cluster again."""
