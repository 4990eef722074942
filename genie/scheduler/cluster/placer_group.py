"""Nodes, tenants, request classes and node sets by name, over three placers that know only numbers.

All placers get the same calls in the same order, so a number means the same in each. `main` chooses by the
cluster's policy; `trial` and `projected` are changed and reverted by dry runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from genie.errors import UsageError
from genie.model.job import Spread, Within
from genie.scheduler.cluster.filters import Filter, Filters, without_current_state
from genie.scheduler.cluster.registration_cache import RegistrationCache
from genie.scheduler.placement.protocol import ANY_MODEL, MODELS_MAX, NODE_GPUS_MAX, Placer
from genie.scheduler.request import JobRequest, NodeFacts, Shape, WorkerPlace, why_not, why_not_gpus

PlacerFactory = Callable[[str], Placer]
"""Returns an empty placer of that policy."""

CLASSES_MAX = 1024
"""Request classes registered at a time."""
NODE_SETS_MAX = 256
"""Node sets registered at a time."""
_DRY_RUN_POLICY = "bestfit"

Hold: TypeAlias = tuple[Shape, WorkerPlace]
"""What one worker holds, and where."""

Change: TypeAlias = tuple[bool, str, Hold]
"""Whether the tenant takes (True) or releases the hold."""

_Class: TypeAlias = tuple[Shape, bool, JobRequest | None]
"""A shape, whether in one island, and the kind of jobs if there is a filter."""

_Register: TypeAlias = Callable[[Placer], int]


@dataclass
class PlacerNode:
    number: int
    facts: NodeFacts
    names: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of workers by tenant and job name."""
    jobs: dict[str, int] = field(default_factory=dict)
    """Number of workers by job."""
    workers: int = 0
    """Of all jobs, including those without resources."""


class PlacerGroup:
    def __init__(self, make_placer: PlacerFactory, *, policy: str) -> None:
        self.main = make_placer(policy)
        self.trial, self.projected = make_placer(_DRY_RUN_POLICY), make_placer(_DRY_RUN_POLICY)
        self.all = (self.main, self.trial, self.projected)
        self._deferred: list[Change] | None = None
        """Changes that `projected` gets after the current projection; None without one."""
        self.nodes: dict[str, PlacerNode] = {}
        self.node_ids: list[str] = []
        self.models: dict[str, int] = {}
        self.filters = Filters()
        self.classes = RegistrationCache[_Class](
            self.all, register=self._register_class, drop=_drop_class, count_max=CLASSES_MAX
        )
        self.amounts = RegistrationCache[Shape](
            self.all, register=_register_amounts, drop=_drop_class, count_max=CLASSES_MAX
        )
        self.node_sets = RegistrationCache[tuple[frozenset[int], bool]](
            self.all, register=_register_node_set, drop=_drop_node_set, count_max=NODE_SETS_MAX
        )
        self._tenants: dict[str, int] = {}
        self._racks: list[int] | None = None

    # -- nodes --------------------------------------------------------------------------------

    def node(self, node_id: str) -> PlacerNode:
        if (node := self.nodes.get(node_id)) is None:
            raise UsageError(f"node {node_id} not found")
        return node

    def add_node(self, facts: NodeFacts) -> int:
        """Return its number, which may be that of a dropped node."""
        memory_mib = min((gpu.memory_mib for gpu in facts.gpus), default=0)
        model = self._model_number(facts)
        numbers = {
            placer.add_node(
                cpu_milli=facts.cpu_milli,
                memory_mib=facts.memory_mib,
                gpus=len(facts.gpus),
                gpu_memory_mib=memory_mib,
                model=model,
                islands=_renumber([gpu.island for gpu in facts.gpus]),
                numa=_renumber([gpu.numa for gpu in facts.gpus]),
            )
            for placer in self.all
        }
        assert len(numbers) == 1, "placers differ"
        number = numbers.pop()
        self.node_ids[number : number + 1] = [facts.node_id]
        return number

    def drop_node(self, node: PlacerNode) -> None:
        for placer in self.all:
            placer.drop_node(node.number)
        self.node_ids[node.number] = ""

    def set_open(self, node: PlacerNode, *, is_open: bool) -> None:
        for placer in self.all:
            placer.set_open(node.number, is_open=is_open)

    def set_gpus(self, node: PlacerNode, *, reserved: Collection[int]) -> None:
        """Update which GPUs accept placements, and the memory that other processes use."""
        facts = node.facts
        outside_mib = facts.memory_outside_mib or (0,) * len(facts.gpus)
        for gpu, mib in enumerate(outside_mib[: len(facts.gpus)]):
            is_open = gpu not in facts.closed_gpus and gpu not in reserved
            for placer in self.all:
                placer.set_gpu(node.number, gpu, is_open=is_open, memory_outside_mib=mib)

    def forget_racks(self) -> None:
        for number in self._racks or ():
            for placer in self.all:
                placer.drop_node_set(number)
        self._racks = None

    def _model_number(self, facts: NodeFacts) -> int:
        """Return the lowest unused number; if all are used, two models share one."""
        model = _model_of(facts)
        if model not in self.models:
            present = {_model_of(node.facts) for node in self.nodes.values()}
            self.models = {name: number for name, number in self.models.items() if name in present}
            used = set(self.models.values())
            free = (number for number in range(MODELS_MAX) if number not in used)
            self.models[model] = next(free, len(self.models) % MODELS_MAX)
        return self.models[model]

    # -- resources ----------------------------------------------------------------------------

    def take(self, placer: Placer, tenant: str, hold: Hold) -> None:
        """UsageError if the place is not free."""
        shape, place = hold
        number = self.node(place.node_id).number
        placer.take(self.amounts.number(shape), self._tenant(tenant), node=number, gpus=place.gpu_ids)

    def release(self, placer: Placer, hold: Hold) -> None:
        shape, place = hold
        placer.release(self.amounts.number(shape), node=self.node(place.node_id).number, gpus=place.gpu_ids)

    def apply(self, tenant: str, hold: Hold, *, taken: bool, skip: Placer | None = None) -> None:
        """Take or release it in all placers but `skip`; in `projected` after the current projection."""
        shape, place = hold
        node, number = self.node(place.node_id).number, self.amounts.number(shape)
        for placer in self.all:
            if placer is skip:
                continue
            if placer is self.projected and self._deferred is not None:
                self._deferred.append((taken, tenant, hold))
            elif taken:
                placer.take(number, self._tenant(tenant), node=node, gpus=place.gpu_ids)
            else:
                placer.release(number, node=node, gpus=place.gpu_ids)

    @property
    def is_projecting(self) -> bool:
        return self._deferred is not None

    def begin_projection(self) -> list[Change]:
        """From now on `apply` adds the changes of `projected` to this list instead."""
        assert self._deferred is None, "one projection at a time"
        self._deferred = []
        return self._deferred

    def end_projection(self) -> None:
        """The caller has reverted the projection and applied the deferred changes."""
        assert not self._deferred
        self._deferred = None

    def set_filter(self, allowed: Filter | None) -> None:
        self.filters = Filters(allowed)
        self.classes.clear()

    def observe(self, request: JobRequest) -> None:
        self.main.observe(self._class(request, request.shape), self._tenant(request.tenant))

    def _tenant(self, tenant: str) -> int:
        return self._tenants.setdefault(tenant, len(self._tenants) + 1)

    # -- placing ------------------------------------------------------------------------------

    def place(
        self, placer: Placer, request: JobRequest, workers: int, least: int, avoiding: Collection[str] = ()
    ) -> tuple[WorkerPlace, ...] | None:
        """Choose and take places in one placer for at most `workers` and at least `least` workers."""
        among = self._among(request, avoiding)
        if request.within in (Within.NODE, Within.ISLAND):
            tries = (
                self._place_on_one_node(placer, request, count, among)
                for count in range(workers, least - 1, -1)
            )
            return next((found for found in tries if found is not None), None)
        found = placer.place_gang(
            self._class(request, request.shape),
            self._tenant(request.tenant),
            workers=workers,
            workers_min=least,
            spread=request.spread is Spread.SPREAD,
            domains=self._rack_sets() if request.within is Within.RACK else None,
            among=among,
        )
        return (
            None if found is None else tuple(WorkerPlace(self.node_ids[node], gpus) for node, gpus in found)
        )

    def _place_on_one_node(
        self, placer: Placer, request: JobRequest, workers: int, among: int | None
    ) -> tuple[WorkerPlace, ...] | None:
        """Place all workers as one request of their total size."""
        shape, each = request.shape.times(workers), request.shape.gpus
        if shape.gpus > NODE_GPUS_MAX:
            return None
        number = self._class(request, shape, one_island=request.within is Within.ISLAND)
        found = placer.choose(number, self._tenant(request.tenant), among=among)
        if found is None:
            return None
        node_id, gpus = self.node_ids[found[0]], found[1]
        places = tuple(WorkerPlace(node_id, gpus[i * each : (i + 1) * each]) for i in range(workers))
        for place in places:
            self.take(placer, request.tenant, (request.shape.without_constraints, place))
        return places

    def _rack_sets(self) -> list[int]:
        """Node sets of the racks, the same in all placers."""
        if self._racks is None:
            racks: dict[str, list[int]] = {}
            for node in self.nodes.values():
                racks.setdefault(node.facts.rack, []).append(node.number)
            for placer in self.all:
                self._racks = [placer.node_set(numbers) for numbers in racks.values()]
        assert self._racks is not None
        return self._racks

    def _among(self, request: JobRequest, avoiding: Collection[str]) -> int | None:
        """The set of nodes to choose from; None for all."""
        if not avoiding and not request.near and not request.apart:
            return None
        avoided = frozenset(self.nodes[node_id].number for node_id in avoiding)
        if not request.near and not request.apart:
            return self.node_sets.number((avoided, True)) if avoided else None
        matches = neighbour_filter(request)
        numbers = frozenset(node.number for node in self.nodes.values() if matches(node))
        return self.node_sets.number((numbers - avoided, False))

    # -- request classes ----------------------------------------------------------------------

    def _class(self, request: JobRequest, shape: Shape, *, one_island: bool = False) -> int:
        return self.classes.number((shape, one_island, self.filters.kind(request)))

    def _register_class(self, key: _Class) -> _Register:
        """For choosing: amounts, whether in one island, and the suitable nodes and models."""
        shape, one_island, filtered = key
        named = (self.nodes.get(node_id) for node_id in sorted(shape.nodes))
        candidates = [node for node in named if node is not None] if shape.nodes else self.nodes.values()
        suitable = [
            node
            for node in candidates
            if not why_not(shape, without_current_state(node.facts))
            and not self.filters.why_not(filtered, node.facts)
        ]
        allowed = None if len(suitable) == len(self.nodes) else [node.number for node in suitable]
        return _register_shape(
            shape, self._model_set(shape, suitable), nodes=allowed, one_island=one_island and shape.gpus > 0
        )

    def _model_set(self, shape: Shape, suitable: Iterable[PlacerNode]) -> int:
        """A request for certain GPUs competes only for these models: policies weigh supply by model."""
        if not shape.constrains_gpus:
            return ANY_MODEL
        with_gpus = [node.facts for node in self.nodes.values() if node.facts.gpus]
        models = {_model_of(facts) for facts in with_gpus if not why_not_gpus(shape, facts.gpus)}
        models |= {_model_of(node.facts) for node in suitable}
        if models >= {_model_of(facts) for facts in with_gpus}:
            return ANY_MODEL
        return sum({1 << self.models[model] for model in models})


def neighbour_filter(request: JobRequest) -> Callable[[PlacerNode], bool]:
    """Whether a node runs a job that the request must be near to, and none that it must be apart from."""

    def matches(node: PlacerNode) -> bool:
        names = {name for tenant, name in node.names if tenant == request.tenant}
        return (not request.near or bool(names & request.near)) and not names & request.apart

    return matches


def _register_amounts(shape: Shape) -> _Register:
    return _register_shape(shape, ANY_MODEL)


def _register_shape(
    shape: Shape, models: int, *, nodes: Sequence[int] | None = None, one_island: bool = False
) -> _Register:
    only_gpus = [gpu for gpu in shape.gpu_ids if 0 <= gpu < NODE_GPUS_MAX] if shape.gpu_ids else None
    return lambda placer: placer.register_request_class(
        gpus=shape.gpus,
        gpu_milli=shape.gpu_milli if shape.gpus else 0,
        gpu_memory_mib=shape.gpu_memory_mib if shape.gpus else 0,
        cpu_milli=shape.cpu_milli,
        memory_mib=shape.memory_mib,
        models=models,
        nodes=nodes,
        one_island=one_island,
        only_gpus=only_gpus,
    )


def _drop_class(placer: Placer, number: int) -> None:
    placer.drop_class(number)


def _register_node_set(nodes: tuple[frozenset[int], bool]) -> _Register:
    """These nodes, or all but these."""
    numbers = sorted(nodes[0])
    return lambda placer: placer.node_set(numbers, all_but=nodes[1])


def _drop_node_set(placer: Placer, number: int) -> None:
    placer.drop_node_set(number)


def _model_of(facts: NodeFacts) -> str:
    """The model of the first GPU; whether the GPUs of a node are suitable is decided per node."""
    return facts.gpus[0].model if facts.gpus else ""


def _renumber(numbers: Sequence[int]) -> list[int]:
    """Renumber from 0, keeping equal numbers equal."""
    indices = {number: index for index, number in enumerate(dict.fromkeys(numbers))}
    return [indices[number] for number in numbers]
