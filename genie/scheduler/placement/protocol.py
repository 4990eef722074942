"""What a placer is told and answers, and what may be relied on. Nodes, models and tenants are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

FULL_MILLI = 1000
GPUS_MAX = 16
MODELS_MAX = 64
ANY_MODEL = 2**64 - 1
"""A set of models is a number with a bit for each; this one has them all."""

CLASSES_MAX = 2**16
NODE_SETS_MAX = 2**14
"""At these bounds a new one is refused until another is dropped."""

UNLIMITED = 2**63 - 1

Place = tuple[int, tuple[int, ...]]
"""A node and GPUs of it."""

GpuState = tuple[int, int, int]
"""As accounted for: free share in thousandths, free memory in MiB, and whose requests are on it or 0."""

NodeState = tuple[bool, int, int, tuple[GpuState, ...]]
"""Whether it is open, its free CPU thousandths, its free memory in MiB, its GPUs."""


@dataclass(frozen=True)
class TypicalShape:
    """A shape of request that is common, with its share of all; only the policy `fgd` asks for it."""

    gpus: int
    gpu_milli: int
    cpu_milli: int
    models: int = ANY_MODEL
    share: float = 0.0

    def as_tuple(self) -> tuple[int, int, int, int, float]:
        """As the native library takes it."""
        return (self.gpus, self.gpu_milli, self.cpu_milli, self.models, self.share)


class ClusterState(Protocol):
    """Nodes and what is free on them. A call that is never right raises UsageError and changes nothing."""

    def add_node(
        self,
        *,
        cpu_milli: int,
        memory_mib: int,
        gpus: int,
        gpu_memory_mib: int = 0,
        model: int = 0,
        rank: int = -1,
        islands: Sequence[int] | None = None,
        numa: Sequence[int] | None = None,
    ) -> int:
        """The node's number, counted from 0; of those that were given back the lowest comes first. The lower
        rank wins a tie; -1 is the node's own number.

        `islands` and `numa` say for each GPU in which NVLink island and on which NUMA node it is, as numbers
        from 0 to 15; None when they are all together.
        """
        ...

    def drop_node(self, node: int) -> None:
        """It is gone, and nothing may be held there. Sets and classes that had it have it no longer, and its
        number may come back as that of another."""
        ...

    def set_open(self, node: int, *, is_open: bool) -> None:
        """Nothing is placed on a closed node; what is there stays."""
        ...

    def set_gpu(self, node: int, gpu: int, *, is_open: bool, memory_outside_mib: int) -> None:
        """Nothing is placed on a closed GPU; what is there stays. Memory that processes outside of the
        cluster use is not free, besides what is accounted for."""
        ...

    def take(self, request_class: int, tenant: int, *, node: int, gpus: Sequence[int]) -> None:
        """About what is there: amounts and tenants must be right, and nothing else that choosing minds."""
        ...

    def release(self, request_class: int, *, node: int, gpus: Sequence[int]) -> None:
        """Any class of the same amounts will do."""
        ...

    def node_state(self, node: int) -> NodeState: ...


class Vocabulary(Protocol):
    """What requests refer to by number. What is dropped may come back as the number of something else."""

    def request_class(
        self,
        *,
        gpus: int = 0,
        gpu_milli: int = 0,
        gpu_memory_mib: int = 0,
        cpu_milli: int = 0,
        memory_mib: int = 0,
        models: int = ANY_MODEL,
        nodes: Sequence[int] | None = None,
        one_island: bool = False,
        only_gpus: Sequence[int] | None = None,
    ) -> int:
        """A number for all requests of this kind. Share and GPU memory are of each GPU; `nodes` are those
        that will do, None for all, those that are added later too; `one_island`: all GPUs in one;
        `only_gpus` are those of each node that will do, None for all."""
        ...

    def drop_class(self, request_class: int) -> None:
        """Nobody will ask for it. What was learned from it, and what it holds, stays."""
        ...

    def node_set(self, nodes: Sequence[int], *, all_but: bool = False) -> int:
        """A number for these nodes, to choose among; `all_but`: for those of now that are not these."""
        ...

    def drop_node_set(self, node_set: int) -> None: ...


class Placer(ClusterState, Vocabulary, Protocol):
    """Chooses. The same calls in the same order give the same answers."""

    def observe(self, request_class: int, tenant: int) -> None:
        """A request has arrived: once each, however often it is tried. Policies that learn, learn from it,
        and refresh() prepares for it."""
        ...

    def choose(self, request_class: int, tenant: int, *, among: int | None = None) -> Place | None:
        """The best place, or None when it fits nowhere. Takes nothing. Tenants count from 1. `among` is a
        node set; None for all nodes."""
        ...

    def place(self, request_class: int, tenant: int, *, among: int | None = None) -> Place | None:
        """Chooses and takes."""
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
        """Places for all workers, each the best when those before it are there; None, and nothing is taken,
        when they do not fit.

        `workers_min`: so many will do, if no more fit; 0 for all of them. `spread`: each on its own node.
        `domains`: node sets of which one must take them all: of those that can, the one with room for the
        fewest; when none can, the one that takes the most.
        """
        ...

    def refresh(self, budget: int = UNLIMITED) -> bool:
        """Does ahead what the next choices would have to do, up to `budget` judgements; True when it is done.

        Between decisions, so that none of them waits for it. Answers are as good without it, only later. Who
        has called it once goes on: what is learned is then prepared here and not in choose().
        """
        ...
