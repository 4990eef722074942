"""Nodes, tenants, request classes and node sets by name, over three placers that know only numbers.

All placers get the same calls in the same order, so a number means the same in each. `main_placer` chooses by
the cluster's policy; `dry_run_placer` and `projection_placer` are changed and reverted by dry runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from genie.errors import UsageError
from genie.model.job import Spread, Within
from genie.scheduler.cluster.filters import NodeFilter, NodeFilterCache, without_volatile_facts
from genie.scheduler.cluster.registration_cache import RegistrationCache
from genie.scheduler.placement.protocol import ANY_MODEL, MODELS_MAX, NODE_GPUS_MAX, Placer
from genie.scheduler.request import (
    JobRequest,
    NodeFacts,
    Shape,
    WorkerPlace,
    why_gpus_unsuitable,
    why_unsuitable,
)

PlacerFactory = Callable[[str], Placer]
"""Returns an empty placer of that policy."""

CACHED_REQUEST_CLASSES_MAX = 1024
"""Request classes registered at a time."""
CACHED_NODE_SETS_MAX = 256
"""Node sets registered at a time."""
_DRY_RUN_POLICY = "bestfit"

PlacedHold: TypeAlias = tuple[Shape, WorkerPlace]
"""What one worker holds, and where."""

HoldChange: TypeAlias = tuple[bool, str, PlacedHold]
"""Whether the tenant takes (True) or releases the hold."""

_RequestClassKey: TypeAlias = tuple[Shape, bool, JobRequest | None]
"""A shape, whether in one island, and the job class if there is a filter."""

_RegisterWithPlacer: TypeAlias = Callable[[Placer], int]


@dataclass
class PlacerNode:
    node_number: int
    facts: NodeFacts
    workers_by_job_name: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of workers by tenant and job name."""
    workers_by_job: dict[str, int] = field(default_factory=dict)
    """Number of workers by job."""
    worker_count: int = 0
    """Of all jobs, including those without resources."""


class PlacerGroup:
    def __init__(self, make_placer: PlacerFactory, *, policy: str) -> None:
        self.main_placer = make_placer(policy)
        self.dry_run_placer, self.projection_placer = (
            make_placer(_DRY_RUN_POLICY),
            make_placer(_DRY_RUN_POLICY),
        )
        self.all_placers = (self.main_placer, self.dry_run_placer, self.projection_placer)
        self._deferred_changes: list[HoldChange] | None = None
        """Changes that `projection_placer` gets after the current projection; None without one."""
        self.nodes: dict[str, PlacerNode] = {}
        self.node_id_by_number: list[str] = []
        self.gpu_model_numbers: dict[str, int] = {}
        self.filter_cache = NodeFilterCache()
        self.request_classes = RegistrationCache[_RequestClassKey](
            self.all_placers,
            register=self._make_request_class_registration,
            drop=_drop_request_class,
            count_max=CACHED_REQUEST_CLASSES_MAX,
        )
        self.unconstrained_request_classes = RegistrationCache[Shape](
            self.all_placers,
            register=_make_unconstrained_registration,
            drop=_drop_request_class,
            count_max=CACHED_REQUEST_CLASSES_MAX,
        )
        self.node_sets = RegistrationCache[tuple[frozenset[int], bool]](
            self.all_placers,
            register=_make_node_set_registration,
            drop=_drop_node_set,
            count_max=CACHED_NODE_SETS_MAX,
        )
        self._tenant_numbers: dict[str, int] = {}
        self._rack_node_sets: list[int] | None = None

    # -- nodes --------------------------------------------------------------------------------

    def get_node(self, node_id: str) -> PlacerNode:
        if (node := self.nodes.get(node_id)) is None:
            raise UsageError(f"node {node_id} not found")
        return node

    def add_node(self, facts: NodeFacts) -> int:
        """Return its number, which may be that of a dropped node."""
        memory_mib = min((gpu.memory_mib for gpu in facts.gpus), default=0)
        model = self._gpu_model_number(facts)
        numbers = {
            placer.add_node(
                cpu_milli=facts.cpu_milli,
                memory_mib=facts.memory_mib,
                gpus=len(facts.gpus),
                gpu_memory_mib=memory_mib,
                model=model,
                islands=_renumber_from_zero([gpu.island for gpu in facts.gpus]),
                numa=_renumber_from_zero([gpu.numa for gpu in facts.gpus]),
            )
            for placer in self.all_placers
        }
        assert len(numbers) == 1, "placers differ"
        number = numbers.pop()
        self.node_id_by_number[number : number + 1] = [facts.node_id]
        return number

    def drop_node(self, node: PlacerNode) -> None:
        for placer in self.all_placers:
            placer.drop_node(node.node_number)
        self.node_id_by_number[node.node_number] = ""

    def set_node_open(self, node: PlacerNode, *, is_open: bool) -> None:
        for placer in self.all_placers:
            placer.set_open(node.node_number, is_open=is_open)

    def update_gpus_open(self, node: PlacerNode, *, reserved_gpus: Collection[int]) -> None:
        """Update which GPUs accept placements, and the memory that other processes use."""
        facts = node.facts
        outside_mib = facts.memory_used_outside_cluster_mib or (0,) * len(facts.gpus)
        for gpu, mib in enumerate(outside_mib[: len(facts.gpus)]):
            is_open = gpu not in facts.blocked_gpus and gpu not in reserved_gpus
            for placer in self.all_placers:
                placer.set_gpu(node.node_number, gpu, is_open=is_open, memory_used_outside_cluster_mib=mib)

    def drop_rack_node_sets(self) -> None:
        for number in self._rack_node_sets or ():
            for placer in self.all_placers:
                placer.drop_node_set(number)
        self._rack_node_sets = None

    def _gpu_model_number(self, facts: NodeFacts) -> int:
        """Return the lowest unused number; if all are used, two models share one."""
        model = _gpu_model_of(facts)
        if model not in self.gpu_model_numbers:
            present = {_gpu_model_of(node.facts) for node in self.nodes.values()}
            self.gpu_model_numbers = {
                name: number for name, number in self.gpu_model_numbers.items() if name in present
            }
            used = set(self.gpu_model_numbers.values())
            free = (number for number in range(MODELS_MAX) if number not in used)
            self.gpu_model_numbers[model] = next(free, len(self.gpu_model_numbers) % MODELS_MAX)
        return self.gpu_model_numbers[model]

    # -- resources ----------------------------------------------------------------------------

    def take_hold(self, placer: Placer, tenant: str, hold: PlacedHold) -> None:
        """UsageError if the place is not free."""
        shape, place = hold
        number = self.get_node(place.node_id).node_number
        placer.take(
            self.unconstrained_request_classes.get_number(shape),
            self._tenant_number(tenant),
            node=number,
            gpus=place.gpu_ids,
        )

    def release_hold(self, placer: Placer, hold: PlacedHold) -> None:
        shape, place = hold
        placer.release(
            self.unconstrained_request_classes.get_number(shape),
            node=self.get_node(place.node_id).node_number,
            gpus=place.gpu_ids,
        )

    def change_hold_in_all_placers(
        self, tenant: str, hold: PlacedHold, *, is_taken: bool, skip: Placer | None = None
    ) -> None:
        """Take or release it in all placers but `skip`; in `projection_placer` after the current
        projection."""
        shape, place = hold
        node, number = (
            self.get_node(place.node_id).node_number,
            self.unconstrained_request_classes.get_number(shape),
        )
        for placer in self.all_placers:
            if placer is skip:
                continue
            if placer is self.projection_placer and self._deferred_changes is not None:
                self._deferred_changes.append((is_taken, tenant, hold))
            elif is_taken:
                placer.take(number, self._tenant_number(tenant), node=node, gpus=place.gpu_ids)
            else:
                placer.release(number, node=node, gpus=place.gpu_ids)

    @property
    def is_projecting(self) -> bool:
        return self._deferred_changes is not None

    def begin_projection(self) -> list[HoldChange]:
        """From now on `change_hold_in_all_placers` adds the changes of `projection_placer` to this list
        instead."""
        assert self._deferred_changes is None, "one projection at a time"
        self._deferred_changes = []
        return self._deferred_changes

    def end_projection(self) -> None:
        """The caller has reverted the projection and applied the deferred changes."""
        assert not self._deferred_changes
        self._deferred_changes = None

    def set_node_filter(self, node_filter: NodeFilter | None) -> None:
        self.filter_cache = NodeFilterCache(node_filter)
        self.request_classes.clear()

    def record_arrival(self, request: JobRequest) -> None:
        self.main_placer.observe(
            self._request_class_number(request, request.shape), self._tenant_number(request.tenant)
        )

    def _tenant_number(self, tenant: str) -> int:
        return self._tenant_numbers.setdefault(tenant, len(self._tenant_numbers) + 1)

    # -- placing ------------------------------------------------------------------------------

    def place(
        self,
        placer: Placer,
        request: JobRequest,
        workers: int,
        workers_min: int,
        excluded_nodes: Collection[str] = (),
    ) -> tuple[WorkerPlace, ...] | None:
        """Choose and take places in one placer for at most `workers` and at least `workers_min` workers."""
        among = self._candidate_node_set(request, excluded_nodes)
        if request.within in (Within.NODE, Within.ISLAND):
            tries = (
                self._place_on_one_node(placer, request, count, among)
                for count in range(workers, workers_min - 1, -1)
            )
            return next((found for found in tries if found is not None), None)
        found = placer.place_gang(
            self._request_class_number(request, request.shape),
            self._tenant_number(request.tenant),
            workers=workers,
            workers_min=workers_min,
            spread=request.spread is Spread.SPREAD,
            domains=self._get_rack_node_sets() if request.within is Within.RACK else None,
            among=among,
        )
        return (
            None
            if found is None
            else tuple(WorkerPlace(self.node_id_by_number[node], gpus) for node, gpus in found)
        )

    def _place_on_one_node(
        self, placer: Placer, request: JobRequest, workers: int, node_set: int | None
    ) -> tuple[WorkerPlace, ...] | None:
        """Place all workers as one request of their total size."""
        shape, each = request.shape.multiplied_by(workers), request.shape.gpus
        if shape.gpus > NODE_GPUS_MAX:
            return None
        number = self._request_class_number(request, shape, one_island=request.within is Within.ISLAND)
        found = placer.choose(number, self._tenant_number(request.tenant), among=node_set)
        if found is None:
            return None
        node_id, gpus = self.node_id_by_number[found[0]], found[1]
        places = tuple(WorkerPlace(node_id, gpus[i * each : (i + 1) * each]) for i in range(workers))
        for place in places:
            self.take_hold(placer, request.tenant, (request.shape.without_constraints, place))
        return places

    def _get_rack_node_sets(self) -> list[int]:
        """Node sets of the racks, the same in all placers."""
        if self._rack_node_sets is None:
            racks: dict[str, list[int]] = {}
            for node in self.nodes.values():
                racks.setdefault(node.facts.rack, []).append(node.node_number)
            for placer in self.all_placers:
                self._rack_node_sets = [placer.register_node_set(numbers) for numbers in racks.values()]
        assert self._rack_node_sets is not None
        return self._rack_node_sets

    def _candidate_node_set(self, request: JobRequest, excluded_nodes: Collection[str]) -> int | None:
        """The set of nodes to choose from; None for all."""
        if not excluded_nodes and not request.near_job_names and not request.apart_job_names:
            return None
        avoided = frozenset(self.nodes[node_id].node_number for node_id in excluded_nodes)
        if not request.near_job_names and not request.apart_job_names:
            return self.node_sets.get_number((avoided, True)) if avoided else None
        matches = make_affinity_filter(request)
        numbers = frozenset(node.node_number for node in self.nodes.values() if matches(node))
        return self.node_sets.get_number((numbers - avoided, False))

    # -- request classes ----------------------------------------------------------------------

    def _request_class_number(self, request: JobRequest, shape: Shape, *, one_island: bool = False) -> int:
        return self.request_classes.get_number(
            (shape, one_island, self.filter_cache.to_filter_request(request))
        )

    def _make_request_class_registration(self, key: _RequestClassKey) -> _RegisterWithPlacer:
        """For choosing: amounts, whether in one island, and the suitable nodes and models."""
        shape, one_island, filtered = key
        named = (self.nodes.get(node_id) for node_id in sorted(shape.nodes))
        candidates = [node for node in named if node is not None] if shape.nodes else self.nodes.values()
        suitable = [
            node
            for node in candidates
            if not why_unsuitable(shape, without_volatile_facts(node.facts))
            and not self.filter_cache.why_node_excluded(filtered, node.facts)
        ]
        allowed = None if len(suitable) == len(self.nodes) else [node.node_number for node in suitable]
        return _make_shape_registration(
            shape,
            self._suitable_models_mask(shape, suitable),
            nodes=allowed,
            one_island=one_island and shape.gpus > 0,
        )

    def _suitable_models_mask(self, shape: Shape, suitable: Iterable[PlacerNode]) -> int:
        """A request for certain GPUs competes only for these models: policies weigh supply by model."""
        if not shape.constrains_gpus:
            return ANY_MODEL
        with_gpus = [node.facts for node in self.nodes.values() if node.facts.gpus]
        models = {_gpu_model_of(facts) for facts in with_gpus if not why_gpus_unsuitable(shape, facts.gpus)}
        models |= {_gpu_model_of(node.facts) for node in suitable}
        if models >= {_gpu_model_of(facts) for facts in with_gpus}:
            return ANY_MODEL
        return sum({1 << self.gpu_model_numbers[model] for model in models})


def make_affinity_filter(request: JobRequest) -> Callable[[PlacerNode], bool]:
    """Whether a node runs a job that the request must be near to, and none that it must be apart from."""

    def matches(node: PlacerNode) -> bool:
        names = {name for tenant, name in node.workers_by_job_name if tenant == request.tenant}
        return (
            not request.near_job_names or bool(names & request.near_job_names)
        ) and not names & request.apart_job_names

    return matches


def _make_unconstrained_registration(shape: Shape) -> _RegisterWithPlacer:
    return _make_shape_registration(shape, ANY_MODEL)


def _make_shape_registration(
    shape: Shape, models_mask: int, *, nodes: Sequence[int] | None = None, one_island: bool = False
) -> _RegisterWithPlacer:
    only_gpus = [gpu for gpu in shape.gpu_ids if 0 <= gpu < NODE_GPUS_MAX] if shape.gpu_ids else None
    return lambda placer: placer.register_request_class(
        gpus=shape.gpus,
        gpu_milli=shape.gpu_milli if shape.gpus else 0,
        gpu_memory_mib=shape.gpu_memory_mib if shape.gpus else 0,
        cpu_milli=shape.cpu_milli,
        memory_mib=shape.memory_mib,
        models_mask=models_mask,
        nodes=nodes,
        one_island=one_island,
        only_gpus=only_gpus,
    )


def _drop_request_class(placer: Placer, number: int) -> None:
    placer.drop_class(number)


def _make_node_set_registration(nodes: tuple[frozenset[int], bool]) -> _RegisterWithPlacer:
    """These nodes, or all but these."""
    numbers = sorted(nodes[0])
    return lambda placer: placer.register_node_set(numbers, all_but=nodes[1])


def _drop_node_set(placer: Placer, number: int) -> None:
    placer.drop_node_set(number)


def _gpu_model_of(facts: NodeFacts) -> str:
    """The model of the first GPU; whether the GPUs of a node are suitable is decided per node."""
    return facts.gpus[0].model if facts.gpus else ""


def _renumber_from_zero(numbers: Sequence[int]) -> list[int]:
    """Renumber from 0, keeping equal numbers equal."""
    indices = {number: index for index, number in enumerate(dict.fromkeys(numbers))}
    return [indices[number] for number in numbers]
