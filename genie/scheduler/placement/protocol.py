"""What a placer is told and answers, and what may be relied on. Nodes, models and tenants are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

FULL_MILLI = 1000
GPUS_MAX = 16
MODELS_MAX = 64
ANY_MODEL = 2**64 - 1
"""A set of models is a number with a bit for each; this one has them all."""

UNLIMITED = 2**63 - 1

Place = tuple[int, tuple[int, ...]]
"""A node and GPUs of it."""

GpuState = tuple[int, int, int]
"""Free share in thousandths, free memory in MiB, and the tenant whose requests are on it or 0."""

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

    def with_share(self, share: float) -> TypicalShape:
        return replace(self, share=share)

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
    ) -> int:
        """The node's number, counted from 0. The lower rank wins a tie; -1 is the node's own number."""
        ...

    def set_open(self, node: int, *, is_open: bool) -> None:
        """Nothing is placed on a closed node; what is there stays."""
        ...

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
    ) -> int:
        """A number for all requests of this kind. Share and GPU memory are of each GPU; `nodes` are those
        that will do, None for all, those that are added later too."""
        ...

    def take(self, request_class: int, tenant: int, *, node: int, gpus: Sequence[int]) -> None: ...

    def release(self, request_class: int, *, node: int, gpus: Sequence[int]) -> None: ...

    def node_state(self, node: int) -> NodeState: ...


class Placer(ClusterState, Protocol):
    """Chooses. The same calls in the same order give the same answers."""

    def observe(self, request_class: int, tenant: int) -> None:
        """A request has arrived: once each, however often it is tried. Policies that learn, learn from it,
        and refresh() prepares for it."""
        ...

    def choose(self, request_class: int, tenant: int) -> Place | None:
        """The best place, or None when it fits nowhere. Takes nothing. Tenants count from 1."""
        ...

    def place(self, request_class: int, tenant: int) -> Place | None:
        """Chooses and takes."""
        ...

    def refresh(self, budget: int = UNLIMITED) -> bool:
        """Does ahead what the next choices would have to do, up to `budget` judgements; True when it is done.

        Between decisions, so that none of them waits for it. Answers are as good without it, only later. Who
        has called it once goes on: what is learned is then prepared here and not in choose().
        """
        ...
