"""The interface of a placer. Nodes, models, tenants, request classes and node sets are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WHOLE_GPU_MILLI = 1000
NODE_GPUS_MAX = 16
MODELS_MAX = 64
ANY_MODEL = 2**64 - 1
"""A set of models is a bit mask; this one contains all."""

REQUEST_CLASSES_MAX = 2**16
NODE_SETS_MAX = 2**14
"""Maximum numbers; a registration beyond them is rejected until another is dropped."""

UNLIMITED_EVALUATIONS = 2**63 - 1

Place = tuple[int, tuple[int, ...]]
"""A node and some of its GPUs."""

GpuState = tuple[int, int, int]
"""Free thousandths, free memory in MiB, and the tenant that uses it or 0."""

NodeState = tuple[bool, int, int, tuple[GpuState, ...]]
"""Whether it is open, free CPU thousandths, free memory in MiB, GPUs."""


@dataclass(frozen=True)
class TypicalShape:
    """A common kind of request and its share of all requests; only the policy `fgd` uses it."""

    gpus: int
    gpu_milli: int
    cpu_milli: int
    models_mask: int = ANY_MODEL
    share: float = 0.0

    def as_tuple(self) -> tuple[int, int, int, int, float]:
        """As the native library expects it."""
        return (self.gpus, self.gpu_milli, self.cpu_milli, self.models_mask, self.share)


class PlacementState(Protocol):
    """Nodes and what is free on them. An invalid call raises UsageError and changes nothing."""

    def add_node(
        self,
        *,
        cpu_milli: int,
        memory_mib: int,
        gpus: int,
        gpu_memory_mib: int = 0,
        model: int = 0,
        tie_break_rank: int = -1,
        islands: Sequence[int] | None = None,
        numa: Sequence[int] | None = None,
    ) -> int:
        """Return the node's number, from 0; the lowest free number is reused first. The lower
        `tie_break_rank` wins a tie; -1 means the node's number.

        `islands` and `numa` are the NVLink island and the NUMA node of each GPU, as numbers from 0 to 15;
        None if all GPUs share one.
        """
        ...

    def drop_node(self, node: int) -> None:
        """Remove a node on which nothing is held, also from node sets and request classes. Its number may be
        reused."""
        ...

    def set_open(self, node: int, *, is_open: bool) -> None:
        """Nothing is placed on a closed node; what it holds stays."""
        ...

    def set_gpu(self, node: int, gpu: int, *, is_open: bool, memory_used_outside_cluster_mib: int) -> None:
        """Nothing is placed on a closed GPU; what it holds stays. Memory that processes outside the
        cluster use is not free either."""
        ...

    def take(self, request_class: int, tenant: int, *, node: int, gpus: Sequence[int]) -> None:
        """Record resources that are in use. Checks amounts and tenants only, not the other constraints."""
        ...

    def release(self, request_class: int, *, node: int, gpus: Sequence[int]) -> None:
        """Any class with the same amounts may be given."""
        ...

    def node_state(self, node: int) -> NodeState: ...


class Registrations(Protocol):
    """Request classes and node sets by number. Numbers of dropped ones are reused."""

    def register_request_class(
        self,
        *,
        gpus: int = 0,
        gpu_milli: int = 0,
        gpu_memory_mib: int = 0,
        cpu_milli: int = 0,
        memory_mib: int = 0,
        models_mask: int = ANY_MODEL,
        nodes: Sequence[int] | None = None,
        one_island: bool = False,
        only_gpus: Sequence[int] | None = None,
    ) -> int:
        """Register requests of this kind. `gpu_milli` and GPU memory are per GPU; `nodes` are the allowed
        nodes, None for all, including later ones; `one_island`: all GPUs in one island; `only_gpus` are the
        allowed GPUs of each node, None for all."""
        ...

    def drop_class(self, request_class: int) -> None:
        """Unregister it. What it holds, and what policies learned from it, stays."""
        ...

    def register_node_set(self, nodes: Sequence[int], *, all_but: bool = False) -> int:
        """Register a set of nodes to choose from; `all_but`: all current nodes except these."""
        ...

    def drop_node_set(self, node_set: int) -> None: ...


class Placer(PlacementState, Registrations, Protocol):
    """The same calls in the same order return the same results."""

    def observe(self, request_class: int, tenant: int) -> None:
        """Record the arrival of a request, once each. Learning policies learn from it, and precompute()
        prepares for it."""
        ...

    def choose(self, request_class: int, tenant: int, *, among: int | None = None) -> Place | None:
        """Return the best place without taking it; None if the request does not fit. Tenants count from 1.
        `among` is a node set; None for all nodes."""
        ...

    def place(self, request_class: int, tenant: int, *, among: int | None = None) -> Place | None:
        """Choose and take."""
        ...

    def place_gang(
        self,
        request_class: int,
        tenant: int,
        *,
        workers: int,
        workers_min: int = 0,
        spread: bool = False,
        domains: Sequence[int] | None = None,
        among: int | None = None,
    ) -> list[Place] | None:
        """Place all workers, each at the best place after those before it; None, and no change, if they do
        not fit.

        `workers_min`: the minimum if not all fit; 0 for all. `spread`: each on its own node. `domains`: node
        sets of which one must hold all workers: the sufficient one with the least capacity; if none is
        sufficient, the one that holds the most.
        """
        ...

    def precompute(self, evaluations_max: int = UNLIMITED_EVALUATIONS) -> bool:
        """Precompute what the next choices need, with at most `evaluations_max` evaluations; True if
        nothing is left.

        Call it between decisions to reduce their latency; results do not depend on it. After the first call,
        learning happens here and no longer in choose(), so keep calling it.
        """
        ...
