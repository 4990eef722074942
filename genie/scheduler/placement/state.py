"""What the plain placer and its policies look at: nodes, GPUs, request classes; and what a policy is."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from genie.errors import UsageError
from genie.scheduler.placement.protocol import FULL_MILLI

Thing = TypeVar("Thing")

NODES_MAX = 2**31


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
    one_island: bool
    only_gpus: frozenset[int] | None

    @property
    def gpu_volume(self) -> int:
        return self.gpus * self.gpu_milli

    @property
    def is_fraction(self) -> bool:
        return self.gpus > 0 and self.gpu_milli < FULL_MILLI


@dataclass
class Gpu:
    """What is free of it as accounted for, whose requests are on it, and what is known of it besides."""

    free_milli: int
    free_memory_mib: int
    tenant: int = 0
    island: int = 0
    numa: int = 0
    is_open: bool = True
    memory_outside_mib: int = 0

    @property
    def usable_memory_mib(self) -> int:
        return max(self.free_memory_mib - self.memory_outside_mib, 0)

    def fits(self, wanted: Request, tenant: int) -> bool:
        return (
            self.is_open and self.usable_memory_mib >= wanted.gpu_memory_mib and self.has_room(wanted, tenant)
        )

    def has_room(self, wanted: Request, tenant: int) -> bool:
        """As accounted for. Two tenants never share a GPU."""
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
        return sum(gpu.free_milli for gpu in self.gpus if gpu.is_open)

    def fits_beside_gpus(self, wanted: Request) -> bool:
        if not self.is_open or (wanted.nodes is not None and self.number not in wanted.nodes):
            return False
        return self.has_room(wanted) and (wanted.gpus == 0 or bool(wanted.models >> self.model & 1))

    def has_room(self, wanted: Request) -> bool:
        return self.free_cpu_milli >= wanted.cpu_milli and self.free_memory_mib >= wanted.memory_mib

    def usable(self, wanted: Request, tenant: int) -> list[int]:
        """The GPUs that will do."""
        return [
            number
            for number, gpu in enumerate(self.gpus)
            if (wanted.only_gpus is None or number in wanted.only_gpus) and gpu.fits(wanted, tenant)
        ]


class Numbered(Generic[Thing]):
    """Things by number. Of the numbers that were given back the lowest is given out first."""

    def __init__(self, *, what: str, count_max: int) -> None:
        self._things: list[Thing | None] = []
        self._free: list[int] = []
        self._what = what
        self._count_max = count_max

    def add(self, thing: Thing) -> int:
        if self._free:
            number = heapq.heappop(self._free)
            self._things[number] = thing
            return number
        if len(self._things) >= self._count_max:
            raise UsageError(f"there are {self._count_max} of {self._what} already; drop one first")
        self._things.append(thing)
        return len(self._things) - 1

    def get(self, number: int) -> Thing:
        thing = self._things[number] if 0 <= number < len(self._things) else None
        if thing is None:
            raise UsageError(f"there is no such {self._what}")
        return thing

    @property
    def next_number(self) -> int:
        return self._free[0] if self._free else len(self._things)

    @property
    def all(self) -> list[Thing]:
        """In the order of their numbers."""
        return [thing for thing in self._things if thing is not None]

    def drop(self, number: int) -> None:
        self.get(number)
        self._things[number] = None
        heapq.heappush(self._free, number)

    def change(self, change: Callable[[Thing], Thing]) -> None:
        self._things = [None if thing is None else change(thing) for thing in self._things]


class Cluster:
    """All nodes."""

    def __init__(self) -> None:
        self.numbered = Numbered[Node](what="node", count_max=NODES_MAX)

    @property
    def nodes(self) -> list[Node]:
        return self.numbered.all


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

    def learn(self, history: Sequence[Request] | None) -> None:
        """From the last requests, the oldest first; None: only look at the cluster again."""
