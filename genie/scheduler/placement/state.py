"""The state of the Python placer: nodes, GPUs, request classes; and the base class of policies."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from genie.errors import UsageError
from genie.scheduler.placement.protocol import WHOLE_GPU_MILLI

Item = TypeVar("Item")

NODES_MAX = 2**31


@dataclass(frozen=True)
class PlacementRequest:
    """A request class."""

    gpus: int
    gpu_milli: int
    gpu_memory_mib: int
    cpu_milli: int
    memory_mib: int
    models_mask: int
    nodes: frozenset[int] | None
    one_island: bool
    only_gpus: frozenset[int] | None

    @property
    def total_gpu_milli(self) -> int:
        return self.gpus * self.gpu_milli

    @property
    def requests_gpu_fraction(self) -> bool:
        return self.gpus > 0 and self.gpu_milli < WHOLE_GPU_MILLI


@dataclass
class Gpu:
    """`tenant` is the tenant of the requests on it; 0 for none. Free amounts are as accounted for."""

    free_milli: int
    free_memory_mib: int
    tenant: int = 0
    island: int = 0
    numa: int = 0
    is_open: bool = True
    memory_used_outside_cluster_mib: int = 0

    @property
    def usable_memory_mib(self) -> int:
        return max(self.free_memory_mib - self.memory_used_outside_cluster_mib, 0)

    def fits(self, request: PlacementRequest, tenant: int) -> bool:
        return (
            self.is_open
            and self.usable_memory_mib >= request.gpu_memory_mib
            and self.has_unallocated_capacity(request, tenant)
        )

    def has_unallocated_capacity(self, request: PlacementRequest, tenant: int) -> bool:
        """By the accounted amounts. Two tenants never share a GPU."""
        if self.free_milli < request.gpu_milli or self.free_memory_mib < request.gpu_memory_mib:
            return False
        return self.tenant in (0, tenant)


@dataclass
class Node:
    number: int
    cpu_milli: int
    memory_mib: int
    gpu_memory_mib: int
    model: int
    tie_break_rank: int
    gpus: list[Gpu]
    is_open: bool = True
    free_cpu_milli: int = field(init=False)
    free_memory_mib: int = field(init=False)
    held_requests_by_gpu_count: dict[int, int] = field(default_factory=dict)
    """Number of requests on the node by their number of whole GPUs; 0 for fractions."""

    def __post_init__(self) -> None:
        self.free_cpu_milli, self.free_memory_mib = self.cpu_milli, self.memory_mib

    @property
    def free_gpu_milli(self) -> int:
        return sum(gpu.free_milli for gpu in self.gpus if gpu.is_open)

    def fits_except_gpus(self, request: PlacementRequest) -> bool:
        if not self.is_open or (request.nodes is not None and self.number not in request.nodes):
            return False
        return self.has_cpu_and_memory(request) and (
            request.gpus == 0 or bool(request.models_mask >> self.model & 1)
        )

    def has_cpu_and_memory(self, request: PlacementRequest) -> bool:
        return self.free_cpu_milli >= request.cpu_milli and self.free_memory_mib >= request.memory_mib

    def usable_gpus(self, request: PlacementRequest, tenant: int) -> list[int]:
        """Return the GPUs that are suitable and free enough."""
        return [
            number
            for number, gpu in enumerate(self.gpus)
            if (request.only_gpus is None or number in request.only_gpus) and gpu.fits(request, tenant)
        ]


class SlotTable(Generic[Item]):
    """Items by number. The lowest free number is reused first."""

    def __init__(self, *, item_name: str, count_max: int) -> None:
        self._items: list[Item | None] = []
        self._free_numbers: list[int] = []
        self._item_name = item_name
        self._count_max = count_max

    def add(self, item: Item) -> int:
        if self._free_numbers:
            number = heapq.heappop(self._free_numbers)
            self._items[number] = item
            return number
        if len(self._items) >= self._count_max:
            raise UsageError(f"{self._item_name} limit of {self._count_max} reached; drop one first")
        self._items.append(item)
        return len(self._items) - 1

    def get(self, number: int) -> Item:
        item = self._items[number] if 0 <= number < len(self._items) else None
        if item is None:
            raise UsageError(f"unknown {self._item_name}: {number}")
        return item

    @property
    def next_number(self) -> int:
        return self._free_numbers[0] if self._free_numbers else len(self._items)

    @property
    def items(self) -> list[Item]:
        """Ordered by number."""
        return [item for item in self._items if item is not None]

    def drop(self, number: int) -> None:
        self.get(number)
        self._items[number] = None
        heapq.heappush(self._free_numbers, number)

    def replace_each(self, change: Callable[[Item], Item]) -> None:
        self._items = [None if item is None else change(item) for item in self._items]


class PlacementCluster:
    def __init__(self) -> None:
        self.node_slots = SlotTable[Node](item_name="node", count_max=NODES_MAX)

    @property
    def nodes(self) -> list[Node]:
        return self.node_slots.items


PlacementCost = tuple[float, int]
"""Cost and tie break; lower is better."""


class PlacementPolicy:
    """Rates the places on a node."""

    def evaluate(
        self, node: Node, request: PlacementRequest, tenant: int
    ) -> tuple[PlacementCost, tuple[int, ...]] | None:
        """Return the best place on this node with its cost; None if the request does not fit."""
        raise NotImplementedError

    def are_weights_stale(self) -> bool:
        """Whether the cluster has changed so much that the weights should be updated."""
        return False

    def learn(self, history: Sequence[PlacementRequest] | None) -> None:
        """Learn from the last requests, oldest first; None: only update the weights to the cluster."""
