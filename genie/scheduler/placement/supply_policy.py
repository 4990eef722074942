"""The default policy: preserve the supply of resources that recent requests need.

Each request is placed where it reduces that supply the least. docs/PLACEMENT.md explains the idea;
native/scheduler/supply_policy.cpp is the fast version, with the same constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genie.scheduler.placement.gpus import choose_one_of_equal_gpus, choose_tightest_gpus
from genie.scheduler.placement.protocol import ANY_MODEL, MODELS_MAX, WHOLE_GPU_MILLI
from genie.scheduler.placement.state import (
    Node,
    PlacementCluster,
    PlacementCost,
    PlacementPolicy,
    PlacementRequest,
)

SIMULATED_SEQUENCE_COUNT = 32
REQUESTS_PER_SEQUENCE = 60
# Length of a simulated sequence: SIMULATED_ARRIVALS_BASE, and SIMULATED_ARRIVALS_PER_FREE_GPU more for each.
SIMULATED_ARRIVALS_BASE = 10
SIMULATED_ARRIVALS_PER_FREE_GPU = 5
# Additive smoothing: half a request is added to each count. Counts are in halves, to stay integers.
SMOOTHING_SCALE = 2
STALE_SUPPLY_DIVISOR = 10
_UINT64_MASK = 2**64 - 1


@dataclass(frozen=True)
class FreeResources:
    """What is free on a node, regardless of tenants; the largest GPUs first."""

    model: int
    gpu_memory_mib: int
    cpu_milli: int
    memory_mib: int
    gpu_milli: tuple[int, ...]

    @property
    def whole_gpus(self) -> int:
        return self.gpu_milli.count(WHOLE_GPU_MILLI)


@dataclass(frozen=True)
class ExpectedNodeFill:
    """Expected use of a node's free resources: fill in GPU thousandths, and multi-GPU capacities."""

    expected_fill_milli: int
    multi_gpu_capacities: tuple[int, ...]


@dataclass
class DemandGroup:
    """Requests for a number of GPUs of these models: their volume, and the supply at the last update."""

    models_mask: int
    gpus: int
    requested_gpu_milli: int
    supplied_gpu_milli: int = 0


class SupplyPolicy(PlacementPolicy):
    """`gamma` is the weight of the capacity for multi-GPU requests."""

    def __init__(self, cluster: PlacementCluster, *, gamma: float) -> None:
        self._multi_gpu_weight = gamma
        self._cluster = cluster
        self._learn_history([])

    def evaluate(
        self, node: Node, request: PlacementRequest, tenant: int
    ) -> tuple[PlacementCost, tuple[int, ...]] | None:
        if not node.fits_except_gpus(request):
            return None
        usable = node.usable_gpus(request, tenant)
        places = [choose_tightest_gpus(node, request, tenant)]
        if request.gpus == 1:
            places = [(number,) for number in usable]
        before = self._weighted_node_value(_free_resources_of_node(node), node.model)
        best: tuple[PlacementCost, tuple[int, ...]] | None = None
        for gpus in places:
            if gpus is None:
                continue
            cost = before - self._weighted_node_value(
                _free_resources_of_node(node, request, gpus), node.model
            )
            if best is None or cost < best[0][0]:
                best = (cost, _tie_break_key(node, request)), gpus
        if best is None or request.gpus != 1:
            return best
        chosen = node.gpus[best[1][0]]
        alike = [
            number
            for number in usable
            if node.gpus[number].free_milli == chosen.free_milli
            and node.gpus[number].usable_memory_mib == chosen.usable_memory_mib
        ]
        return best[0], choose_one_of_equal_gpus(node, alike)

    def are_weights_stale(self) -> bool:
        totals = self._expected_node_fills_by_model()
        return any(
            abs(self._supply_for_group(group, totals) - group.supplied_gpu_milli) * STALE_SUPPLY_DIVISOR
            > group.supplied_gpu_milli
            for group in self._demand_groups
        )

    def learn(self, history: Sequence[PlacementRequest] | None) -> None:
        if history is None:
            self._update_weights()
        else:
            self._learn_history(list(history))

    def _learn_history(self, history: list[PlacementRequest]) -> None:
        self._expected_node_fill_cache: dict[FreeResources, ExpectedNodeFill] = {}
        self._drawn_sequences = _draw_request_sequences([request for request in history if request.gpus])
        self._drawn_requests = list(
            dict.fromkeys(request for sequence in self._drawn_sequences for request in sequence)
        )
        self._node_kinds = {(node.model, node.gpu_memory_mib) for node in self._cluster.nodes}
        self._multi_gpu_requests = [request for request in history if request.gpus > 1]
        gpus_max = max((len(node.gpus) for node in self._cluster.nodes), default=0)
        powers = [gpus for gpus in (2, 4, 8, 16) if history and gpus <= gpus_max]
        self._multi_gpu_counts = list(
            dict.fromkeys(powers + [request.gpus for request in self._multi_gpu_requests])
        )
        self._estimate_demand(history)
        self._update_weights()

    def _estimate_demand(self, history: list[PlacementRequest]) -> None:
        """Estimate the demand from earlier requests: groups in the order of first arrival."""
        self._demand_groups: list[DemandGroup] = []
        for request in history:
            if request.gpus:
                self._add_demand(request.models_mask, request.gpus, SMOOTHING_SCALE * request.total_gpu_milli)
        if not history:
            return
        models = sorted({node.model for node in self._cluster.nodes if node.gpus})
        for gpus in self._multi_gpu_counts:
            if gpus.bit_count() == 1:
                self._add_demand(ANY_MODEL, gpus, gpus * WHOLE_GPU_MILLI)
                for model in models:
                    self._add_demand(1 << model, gpus, gpus * WHOLE_GPU_MILLI // len(models))
        shares = [request.gpu_milli for request in history if request.gpus == 1]
        for model in models if shares else ():
            self._add_demand(1 << model, 1, sum(shares) // len(shares))

    def _add_demand(self, models_mask: int, gpus: int, requested_gpu_milli: int) -> None:
        for group in self._demand_groups:
            if (group.models_mask, group.gpus) == (models_mask, gpus):
                group.requested_gpu_milli += requested_gpu_milli
                return
        self._demand_groups.append(DemandGroup(models_mask, gpus, requested_gpu_milli))

    def _update_weights(self) -> None:
        """Compute the pressure on each model: the demand of each group divided by its supply."""
        totals = self._expected_node_fills_by_model()
        self._fill_weights = [0.0] * MODELS_MAX
        self._capacity_weights = [[0.0] * len(self._multi_gpu_counts) for _ in range(MODELS_MAX)]
        for group in self._demand_groups:
            group.supplied_gpu_milli = self._supply_for_group(group, totals)
            if group.supplied_gpu_milli == 0:
                continue
            pressure = group.requested_gpu_milli / group.supplied_gpu_milli
            for model in range(MODELS_MAX):
                if not group.models_mask >> model & 1:
                    continue
                if group.gpus > 1:
                    self._capacity_weights[model][self._multi_gpu_counts.index(group.gpus)] += pressure
                else:
                    self._fill_weights[model] += pressure

    def _expected_node_fills_by_model(self) -> dict[int, list[ExpectedNodeFill]]:
        totals: dict[int, list[ExpectedNodeFill]] = {}
        for node in self._cluster.nodes:
            if node.is_open:
                totals.setdefault(node.model, []).append(
                    self._get_expected_node_fill(_free_resources_of_node(node))
                )
        return totals

    def _supply_for_group(self, group: DemandGroup, fills_by_model: dict[int, list[ExpectedNodeFill]]) -> int:
        fills = [
            fill
            for model in fills_by_model
            if group.models_mask >> model & 1
            for fill in fills_by_model[model]
        ]
        if group.gpus == 1:
            return sum(fill.expected_fill_milli for fill in fills)
        index = self._multi_gpu_counts.index(group.gpus)
        return sum(fill.multi_gpu_capacities[index] for fill in fills)

    def _weighted_node_value(self, free: FreeResources, model: int) -> float:
        fill = self._get_expected_node_fill(free)
        capacity = 0.0
        for weight, amount in zip(self._capacity_weights[model], fill.multi_gpu_capacities, strict=True):
            capacity += weight * amount
        return self._fill_weights[model] * fill.expected_fill_milli + self._multi_gpu_weight * capacity

    def _get_expected_node_fill(self, free: FreeResources) -> ExpectedNodeFill:
        if free not in self._expected_node_fill_cache:
            capacity = tuple(self._multi_gpu_capacity(gpus, free) for gpus in self._multi_gpu_counts)
            self._expected_node_fill_cache[free] = ExpectedNodeFill(self._expected_fill_milli(free), capacity)
        return self._expected_node_fill_cache[free]

    def _multi_gpu_capacity(self, gpus: int, free: FreeResources) -> int:
        """Return the GPU thousandths that requests for `gpus` GPUs could use now, summed over the history."""
        whole = free.whole_gpus
        slots = whole // gpus if gpus.bit_count() == 1 else 0
        for request in self._multi_gpu_requests:
            if request.gpus != gpus or not request.models_mask >> free.model & 1:
                continue
            fit = whole // gpus
            if request.cpu_milli:
                fit = min(fit, free.cpu_milli // request.cpu_milli)
            if request.memory_mib:
                fit = min(fit, free.memory_mib // request.memory_mib)
            slots += SMOOTHING_SCALE * fit
        return slots * gpus * WHOLE_GPU_MILLI

    def _expected_fill_milli(self, free: FreeResources) -> int:
        """Return the GPU thousandths that simulated arrivals fill on such a node, over all sequences."""
        if (free.model, free.gpu_memory_mib) not in self._node_kinds:  # joined after the last update
            return 0
        allowed = [(request, _needed_gpu_milli(request, free)) for request in self._drawn_requests]
        needs = {request: need for request, need in allowed if need is not None}
        least = min(needs.values(), default=WHOLE_GPU_MILLI + 1)
        steps = (
            SIMULATED_ARRIVALS_BASE
            + SIMULATED_ARRIVALS_PER_FREE_GPU
            * sum(m for m in free.gpu_milli if m >= least)
            // WHOLE_GPU_MILLI
        )
        return sum(
            _simulate_filled_gpu_milli(sequence[:steps], needs, free) for sequence in self._drawn_sequences
        )


def _tie_break_key(node: Node, request: PlacementRequest) -> int:
    """Best fit: the least GPU left over, then the least CPU, then the rank."""
    gpu_left = node.free_gpu_milli - request.total_gpu_milli
    cpu_left = min((node.free_cpu_milli - request.cpu_milli) // 16, 0xFFFF)
    return gpu_left << 48 | cpu_left << 32 | node.tie_break_rank


def _free_resources_of_node(
    node: Node, request: PlacementRequest | None = None, gpus: tuple[int, ...] = ()
) -> FreeResources:
    """Return the free resources of the node, after placing the request on these GPUs if given."""
    left = []
    for number, gpu in enumerate(node.gpus):
        milli, memory_mib = gpu.free_milli, gpu.usable_memory_mib
        if request is not None and number in gpus:
            milli, memory_mib = milli - request.gpu_milli, memory_mib - request.gpu_memory_mib
        left.append(
            _usable_gpu_milli(milli, memory_mib, gpu_memory_mib=node.gpu_memory_mib) if gpu.is_open else 0
        )
    return FreeResources(
        model=node.model,
        gpu_memory_mib=node.gpu_memory_mib,
        cpu_milli=node.free_cpu_milli - (request.cpu_milli if request else 0),
        memory_mib=node.free_memory_mib - (request.memory_mib if request else 0),
        gpu_milli=tuple(sorted((milli for milli in left if milli > 0), reverse=True)),
    )


def _usable_gpu_milli(milli: int, memory_mib: int, *, gpu_memory_mib: int) -> int:
    """The smaller of the free share and the free share of memory."""
    return min(milli, memory_mib * WHOLE_GPU_MILLI // gpu_memory_mib) if gpu_memory_mib else milli


def _needed_gpu_milli(request: PlacementRequest, free: FreeResources) -> int | None:
    """Return the thousandths that it needs of such a GPU, also for memory; None if it is not suitable."""
    if not request.models_mask >> free.model & 1 or request.gpu_memory_mib > free.gpu_memory_mib:
        return None
    if free.gpu_memory_mib == 0 or not request.requests_gpu_fraction:
        return request.gpu_milli
    by_memory = -(-request.gpu_memory_mib * WHOLE_GPU_MILLI // free.gpu_memory_mib)
    return max(request.gpu_milli, by_memory)


def _simulate_filled_gpu_milli(
    sequence: list[PlacementRequest], needs: dict[PlacementRequest, int], free: FreeResources
) -> int:
    """Place one sequence of arrivals: each on the tightest GPU, multi-GPU requests on the first that fit."""
    gpus = list(free.gpu_milli)
    cpu_milli, memory_mib = free.cpu_milli, free.memory_mib
    for request in sequence:
        need = needs.get(request)
        if need is None or cpu_milli < request.cpu_milli or memory_mib < request.memory_mib:
            continue
        fitting = [number for number, milli in enumerate(gpus) if milli >= need]
        if len(fitting) < request.gpus:
            continue
        if request.gpus == 1:
            fitting = [min(fitting, key=lambda number: gpus[number])]
        for number in fitting[: request.gpus]:
            gpus[number] -= need
        cpu_milli -= request.cpu_milli
        memory_mib -= request.memory_mib
    return sum(free.gpu_milli) - sum(gpus)


def _draw_request_sequences(requests: list[PlacementRequest]) -> list[list[PlacementRequest]]:
    """Draw sequences from repeated shuffles, so that each request of the history occurs equally often."""
    state, requests = 0, list(requests)
    drawn: list[PlacementRequest] = []
    while requests and len(drawn) < SIMULATED_SEQUENCE_COUNT * REQUESTS_PER_SEQUENCE:
        for left in range(len(requests), 1, -1):
            state = (state + 0x9E3779B97F4A7C15) & _UINT64_MASK
            mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
            chosen = (mixed ^ (mixed >> 31)) % left
            requests[left - 1], requests[chosen] = requests[chosen], requests[left - 1]
        drawn += requests
    return (
        [
            drawn[start : start + REQUESTS_PER_SEQUENCE]
            for start in range(0, SIMULATED_SEQUENCE_COUNT * REQUESTS_PER_SEQUENCE, REQUESTS_PER_SEQUENCE)
        ]
        if drawn
        else []
    )
