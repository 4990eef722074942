"""The reference implementation of a placer in Python. native/scheduler is the fast one, with equal results.

Every choice evaluates every node again: there is no index that could be stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from genie.errors import UsageError
from genie.scheduler.placement import baseline_policies, supply_policy
from genie.scheduler.placement.gpus import request_capacity_bound
from genie.scheduler.placement.protocol import (
    ANY_MODEL,
    MODELS_MAX,
    NODE_GPUS_MAX,
    NODE_SETS_MAX,
    REQUEST_CLASSES_MAX,
    UNLIMITED_EVALUATIONS,
    WHOLE_GPU_MILLI,
    NodeState,
    Place,
    TypicalShape,
)
from genie.scheduler.placement.state import (
    Gpu,
    Node,
    PlacementCluster,
    PlacementCost,
    PlacementPolicy,
    PlacementRequest,
    SlotTable,
)

HISTORY_REQUESTS_MAX = 200
"""Number of requests that a policy learns from."""
REQUESTS_BEFORE_FIRST_POLICY_UPDATE = 25
REQUESTS_BETWEEN_POLICY_UPDATES = 200
"""Requests before the first update of a learning policy, and between later ones."""


class PythonPlacer:
    """See protocol.Placer."""

    def __init__(self, policy: str, *, typical: Sequence[TypicalShape] = (), gamma: float = 0.05) -> None:
        self._cluster = PlacementCluster()
        self._request_classes = SlotTable[PlacementRequest](
            item_name="request class", count_max=REQUEST_CLASSES_MAX
        )
        self._node_sets = SlotTable[frozenset[int]](item_name="node set", count_max=NODE_SETS_MAX)
        factories = baseline_policies.POLICY_FACTORIES | {
            "supply": lambda _: supply_policy.SupplyPolicy(self._cluster, gamma=gamma)
        }
        if policy not in factories:
            raise UsageError(f"unknown placement policy '{policy}'")
        self._policy: PlacementPolicy = factories[policy](typical)
        self._policy_learns = policy == "supply"
        self._recent_requests: deque[PlacementRequest] = deque(maxlen=HISTORY_REQUESTS_MAX)
        self._observed_request_count = 0
        self._next_update_request_count = REQUESTS_BEFORE_FIRST_POLICY_UPDATE
        self._was_precompute_called = False

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
        if min(cpu_milli, memory_mib, gpu_memory_mib) < 0 or not 0 <= gpus <= NODE_GPUS_MAX:
            raise UsageError("a node must have 0 to 16 GPUs and no negative amounts")
        if not 0 <= model < MODELS_MAX:
            raise UsageError("a GPU model must be a number from 0 to 63")
        number = self._cluster.node_slots.next_number
        localities = zip(
            _validated_locality_numbers(islands, gpus), _validated_locality_numbers(numa, gpus), strict=True
        )
        devices = [
            Gpu(WHOLE_GPU_MILLI, gpu_memory_mib, island=island, numa=numa) for island, numa in localities
        ]
        rank = number if tie_break_rank < 0 else tie_break_rank
        node = Node(number, cpu_milli, memory_mib, gpu_memory_mib, model, rank, devices)
        return self._cluster.node_slots.add(node)

    def drop_node(self, node: int) -> None:
        dropped = self._get_node(node)
        free = (dropped.free_cpu_milli, dropped.free_memory_mib)
        if free != (dropped.cpu_milli, dropped.memory_mib) or any(
            dropped.held_requests_by_gpu_count.values()
        ):
            raise UsageError(f"cannot drop node {node}: resources are held there")
        self._cluster.node_slots.drop(node)
        self._node_sets.replace_each(lambda nodes: nodes - {node})
        self._request_classes.replace_each(
            lambda request: (
                request if request.nodes is None else replace(request, nodes=request.nodes - {node})
            )
        )

    def set_open(self, node: int, *, is_open: bool) -> None:
        self._get_node(node).is_open = is_open

    def set_gpu(self, node: int, gpu: int, *, is_open: bool, memory_used_outside_cluster_mib: int) -> None:
        gpus = self._get_node(node).gpus
        if not 0 <= gpu < len(gpus) or memory_used_outside_cluster_mib < 0:
            raise UsageError(f"node {node} has no GPU {gpu}, or the memory is negative")
        gpus[gpu].is_open, gpus[gpu].memory_used_outside_cluster_mib = (
            is_open,
            memory_used_outside_cluster_mib,
        )

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
        if not 0 <= gpus <= NODE_GPUS_MAX:
            raise UsageError("a request must have 0 to 16 GPUs of one node")
        if gpus > 0 and not 1 <= gpu_milli <= WHOLE_GPU_MILLI:
            raise UsageError("the fraction of a GPU must be 1 to 1000 thousandths")
        if gpus == 0 and (gpu_milli or gpu_memory_mib or one_island):
            raise UsageError("a request without GPUs cannot have a GPU fraction, GPU memory or an island")
        if min(gpu_memory_mib, cpu_milli, memory_mib) < 0:
            raise UsageError("a request cannot have negative amounts")
        allowed = None if nodes is None else self._validated_node_numbers(nodes)
        amounts = (gpus, gpu_milli, gpu_memory_mib, cpu_milli, memory_mib)
        these = None if only_gpus is None else frozenset(_validated_gpu_numbers(only_gpus))
        return self._request_classes.add(PlacementRequest(*amounts, models_mask, allowed, one_island, these))

    def drop_class(self, request_class: int) -> None:
        self._request_classes.drop(request_class)

    def register_node_set(self, nodes: Sequence[int], *, all_but: bool = False) -> int:
        these = self._validated_node_numbers(nodes)
        return self._node_sets.add(self._nodes_of_set(None) - these if all_but else these)

    def drop_node_set(self, node_set: int) -> None:
        self._node_sets.drop(node_set)

    def take(self, request_class: int, tenant: int, *, node: int, gpus: Sequence[int]) -> None:
        request, target = self._get_request_class(request_class, tenant), self._get_node(node)
        chosen = _validated_gpu_numbers(gpus)
        fits = target.has_cpu_and_memory(request) and len(chosen) == request.gpus
        fits = fits and all(
            g < len(target.gpus) and target.gpus[g].has_unallocated_capacity(request, tenant) for g in chosen
        )
        if not fits:
            raise UsageError(f"the request does not fit on node {node}")
        _change_free_resources(target, request, chosen, sign=-1)
        for number in chosen:
            target.gpus[number].tenant = tenant

    def release(self, request_class: int, *, node: int, gpus: Sequence[int]) -> None:
        request, target = self._request_classes.get(request_class), self._get_node(node)
        chosen = _validated_gpu_numbers(gpus)
        if len(chosen) != request.gpus or not _can_release(target, request, chosen):
            raise UsageError(f"no such request is held on node {node}")
        _change_free_resources(target, request, chosen, sign=1)
        for number in chosen:
            if target.gpus[number].free_milli == WHOLE_GPU_MILLI:
                target.gpus[number].tenant = 0

    def node_state(self, node: int) -> NodeState:
        found = self._get_node(node)
        gpus = tuple((gpu.free_milli, gpu.free_memory_mib, gpu.tenant) for gpu in found.gpus)
        return (found.is_open, found.free_cpu_milli, found.free_memory_mib, gpus)

    def observe(self, request_class: int, tenant: int) -> None:
        request = self._get_request_class(request_class, tenant)
        if self._policy_learns:
            self._recent_requests.append(request)
            self._observed_request_count += 1

    def choose(self, request_class: int, tenant: int, *, among: int | None = None) -> Place | None:
        request = self._get_request_class(request_class, tenant)
        allowed = self._nodes_of_set(among)
        self._update_policy_if_overdue()
        return self._find_best_place(request, tenant, allowed)

    def place(self, request_class: int, tenant: int, *, among: int | None = None) -> Place | None:
        chosen = self.choose(request_class, tenant, among=among)
        if chosen is not None:
            self.take(request_class, tenant, node=chosen[0], gpus=chosen[1])
        return chosen

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
        request = self._get_request_class(request_class, tenant)
        if workers < 1 or not 0 <= workers_min <= workers:
            raise UsageError("a gang needs at least 1 worker, and a minimum that is not above its size")
        allowed = self._nodes_of_set(among)
        sets = [allowed] if domains is None else [self._node_sets.get(number) & allowed for number in domains]
        self._update_policy_if_overdue()
        least = workers_min or workers
        capacities = [self._worker_capacity(request, tenant, nodes, spread=spread) for nodes in sets]
        order = sorted((capacity, index) for index, capacity in enumerate(capacities) if capacity >= least)

        def fill_domain(index: int, count: int) -> list[Place]:
            return self._place_workers(request_class, tenant, sets[index], workers=count, spread=spread)

        most, where = 0, -1
        enough = [item for item in order if item[0] >= workers]
        for capacity, index in enough + (order[::-1] if least < workers else []):
            if capacity < max(most, least):
                break
            found = fill_domain(index, workers)
            if len(found) == workers:
                return found
            self._release_places(request_class, found)
            if len(found) >= most:
                most, where = len(found), index
        return fill_domain(where, most) if most >= least else None

    def precompute(self, evaluations_max: int = UNLIMITED_EVALUATIONS) -> bool:
        """The budget is ignored."""
        self._was_precompute_called = True
        if self._is_policy_update_due():
            self._update_policy()
        return True

    def _place_workers(
        self, request_class: int, tenant: int, nodes: frozenset[int], *, workers: int, spread: bool
    ) -> list[Place]:
        """Place as many workers as fit on these nodes, one after the other."""
        found: list[Place] = []
        while len(found) < workers:
            place = self._find_best_place(self._request_classes.get(request_class), tenant, nodes)
            if place is None:
                break
            self.take(request_class, tenant, node=place[0], gpus=place[1])
            found.append(place)
            if spread:
                nodes -= {place[0]}
        return found

    def _release_places(self, request_class: int, places: list[Place]) -> None:
        for node, gpus in reversed(places):
            self.release(request_class, node=node, gpus=gpus)

    def _worker_capacity(
        self, request: PlacementRequest, tenant: int, nodes: frozenset[int], *, spread: bool
    ) -> int:
        """Return an upper bound of the number of workers that fit on these nodes."""
        fitting = [self._get_node(number) for number in nodes]
        fitting = [node for node in fitting if self._policy.evaluate(node, request, tenant) is not None]
        return (
            len(fitting) if spread else sum(request_capacity_bound(node, request, tenant) for node in fitting)
        )

    def _find_best_place(
        self, request: PlacementRequest, tenant: int, allowed_nodes: frozenset[int]
    ) -> Place | None:
        best: tuple[PlacementCost, int, tuple[int, ...]] | None = None
        for node in self._cluster.nodes:
            found = self._policy.evaluate(node, request, tenant) if node.number in allowed_nodes else None
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], node.number, found[1])
        return None if best is None else best[1:]

    def _update_policy_if_overdue(self) -> None:
        if (
            self._observed_request_count >= self._next_update_request_count + REQUESTS_BETWEEN_POLICY_UPDATES
            if self._was_precompute_called
            else self._is_policy_update_due()
        ):
            self._update_policy()

    def _is_policy_update_due(self) -> bool:
        return self._policy_learns and (
            self._observed_request_count >= self._next_update_request_count
            or self._policy.are_weights_stale()
        )

    def _update_policy(self) -> None:
        if self._observed_request_count < self._next_update_request_count:
            self._policy.learn(None)
            return
        while self._next_update_request_count <= self._observed_request_count:
            self._next_update_request_count += min(
                self._next_update_request_count, REQUESTS_BETWEEN_POLICY_UPDATES
            )
        self._policy.learn(list(self._recent_requests))

    def _get_node(self, number: int) -> Node:
        return self._cluster.node_slots.get(number)

    def _validated_node_numbers(self, nodes: Sequence[int]) -> frozenset[int]:
        return frozenset(self._get_node(node).number for node in nodes)

    def _nodes_of_set(self, node_set: int | None) -> frozenset[int]:
        if node_set is not None:
            return self._node_sets.get(node_set)
        return frozenset(node.number for node in self._cluster.nodes)

    def _get_request_class(self, request_class: int, tenant: int) -> PlacementRequest:
        if tenant < 1:
            raise UsageError("a tenant must be a number from 1")
        return self._request_classes.get(request_class)


def _validated_locality_numbers(numbers: Sequence[int] | None, gpus: int) -> Sequence[int]:
    if numbers is None:
        return [0] * gpus
    if len(numbers) != gpus or not all(0 <= number < NODE_GPUS_MAX for number in numbers):
        raise UsageError("islands and numa must have a number from 0 to 15 for each GPU")
    return numbers


def _validated_gpu_numbers(gpus: Sequence[int]) -> tuple[int, ...]:
    if len(set(gpus)) != len(gpus) or not all(0 <= number < NODE_GPUS_MAX for number in gpus):
        raise UsageError("GPUs must be different numbers from 0 to 15")
    return tuple(gpus)


def _can_release(node: Node, request: PlacementRequest, gpus: tuple[int, ...]) -> bool:
    if request.gpus and not node.held_requests_by_gpu_count.get(
        0 if request.requests_gpu_fraction else request.gpus
    ):
        return False
    if node.free_cpu_milli + request.cpu_milli > node.cpu_milli:
        return False
    if node.free_memory_mib + request.memory_mib > node.memory_mib:
        return False
    return all(
        number < len(node.gpus)
        and node.gpus[number].free_milli + request.gpu_milli <= WHOLE_GPU_MILLI
        and node.gpus[number].free_memory_mib + request.gpu_memory_mib <= node.gpu_memory_mib
        for number in gpus
    )


def _change_free_resources(
    node: Node, request: PlacementRequest, gpus: tuple[int, ...], *, sign: int
) -> None:
    """Release (sign 1) or take (sign -1) the resources of the request."""
    node.free_cpu_milli += sign * request.cpu_milli
    node.free_memory_mib += sign * request.memory_mib
    for number in gpus:
        node.gpus[number].free_milli += sign * request.gpu_milli
        node.gpus[number].free_memory_mib += sign * request.gpu_memory_mib
    if request.gpus:
        kind = 0 if request.requests_gpu_fraction else request.gpus
        node.held_requests_by_gpu_count[kind] = node.held_requests_by_gpu_count.get(kind, 0) - sign
