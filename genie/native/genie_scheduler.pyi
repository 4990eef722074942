"""The compiled placer (native/scheduler/bindings.cpp). See genie/scheduler/placement/protocol.py."""

from __future__ import annotations

from collections.abc import Sequence

class Placer:
    """Implements genie.scheduler.placement.protocol.Placer."""

    def __init__(
        self,
        policy: str,
        *,
        seed: int = 0,
        typical: Sequence[tuple[int, int, int, int, float]] = (),
        gamma: float = 0.05,
        by_model: bool = True,
        sequence_length_max: int = 60,
    ) -> None: ...
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
    ) -> int: ...
    def drop_node(self, node: int) -> None: ...
    def set_open(self, node: int, *, is_open: bool) -> None: ...
    def set_gpu(
        self, node: int, gpu: int, *, is_open: bool, memory_used_outside_cluster_mib: int
    ) -> None: ...
    def register_request_class(
        self,
        *,
        gpus: int = 0,
        gpu_milli: int = 0,
        gpu_memory_mib: int = 0,
        cpu_milli: int = 0,
        memory_mib: int = 0,
        models_mask: int = ...,
        nodes: Sequence[int] | None = None,
        one_island: bool = False,
        only_gpus: Sequence[int] | None = None,
    ) -> int: ...
    def drop_class(self, request_class: int) -> None: ...
    def register_node_set(self, nodes: Sequence[int], *, all_but: bool = False) -> int: ...
    def drop_node_set(self, node_set: int) -> None: ...
    def observe(self, request_class: int, tenant: int) -> None: ...
    def choose(
        self, request_class: int, tenant: int, *, among: int | None = None
    ) -> tuple[int, tuple[int, ...]] | None: ...
    def place(
        self, request_class: int, tenant: int, *, among: int | None = None
    ) -> tuple[int, tuple[int, ...]] | None: ...
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
    ) -> list[tuple[int, tuple[int, ...]]] | None: ...
    def take(self, request_class: int, tenant: int, *, node: int, gpus: Sequence[int]) -> None: ...
    def release(self, request_class: int, *, node: int, gpus: Sequence[int]) -> None: ...
    def precompute(self, evaluations_max: int = ...) -> bool: ...
    def node_state(self, node: int) -> tuple[bool, int, int, tuple[tuple[int, int, int], ...]]: ...
