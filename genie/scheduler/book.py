"""Who holds what, by name: nodes, jobs and tenants over a placer, which knows numbers only.

Three placers are kept in step. One chooses by the cluster's policy; the others are for suppositions: they are
changed to see what would be, and changed back. Not for: which job comes next (scheduler.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import msgspec

from genie.errors import UsageError
from genie.model.job import Spread, Within
from genie.scheduler.filters import Filter, Filters, as_open
from genie.scheduler.numbers import Numbers
from genie.scheduler.placement.plain import PlainPlacer
from genie.scheduler.placement.protocol import ANY_MODEL, GPUS_MAX, MODELS_MAX, Placer
from genie.scheduler.quota import UNBOUNDED, Claim
from genie.scheduler.request import Amounts, NodeFacts, Request, Shape, WorkerPlace, why_not, why_not_gpus

MakePlacer = Callable[[str], Placer]
"""Gives an empty placer of that policy."""

_Name = TypeVar("_Name", bound=Hashable)

_NOTHING = Amounts()
_SUPPOSING = "bestfit"
_TRIES_MAX = 8
"""So often another place is looked for, where one would have too many workers."""
CLASSES_MAX = 1024
NODE_SETS_MAX = 256
"""Kinds of requests, and sets of nodes that jobs are near to or apart from, that are known at a time."""

_Tell: TypeAlias = Callable[[Placer], int]

_Kind: TypeAlias = tuple[Shape, bool, Request | None]
"""A shape, whether in one island, and for which kind of jobs, where there is a filter."""

_Part: TypeAlias = tuple[Shape, WorkerPlace]
"""What one worker holds, and where."""

_Change: TypeAlias = tuple[bool, str, _Part]
"""Whether it is taken or given back, by which tenant, what."""


class Held(msgspec.Struct, frozen=True):
    """What a running job holds."""

    request: Request
    places: tuple[WorkerPlace, ...]

    @property
    def amounts(self) -> Amounts:
        return self.request.amounts(len(self.places))


@dataclass
class _Node:
    number: int
    facts: NodeFacts
    names: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many workers of a tenant's job with that name run there."""
    jobs: dict[str, int] = field(default_factory=dict)
    """How many workers of a job run there."""
    workers: int = 0
    """Of all jobs, also of those that hold nothing."""


class Book:
    """The same calls in the same order give the same answers."""

    def __init__(self, make_placer: MakePlacer, *, policy: str, workers_max: int = UNBOUNDED) -> None:
        """A node that runs `workers_max` workers takes no more, whatever they hold."""
        self.workers_max = workers_max
        self.crowds = 0
        """Grows whenever a node has so many, or has not any more."""
        self._real = make_placer(policy)
        self._scratch, self._ahead = make_placer(_SUPPOSING), make_placer(_SUPPOSING)
        self._placers = (self._real, self._scratch, self._ahead)
        self._foresight: Foresight | None = None
        self._nodes: dict[str, _Node] = {}
        self._ids: list[str] = []
        self._tenants: dict[str, int] = {}
        self._models: dict[str, int] = {}
        self._filters = Filters()
        self._classes = Numbers[_Kind](
            self._placers, register=self._register, drop=_drop_class, count_max=CLASSES_MAX
        )
        self._amounts = Numbers[Shape](
            self._placers, register=_register_amounts, drop=_drop_class, count_max=CLASSES_MAX
        )
        self._sets = Numbers[tuple[frozenset[int], bool]](
            self._placers, register=_register_set, drop=_drop_set, count_max=NODE_SETS_MAX
        )
        self._racks: list[int] | None = None
        self._kept: dict[str, set[int]] = {}
        self._held: dict[str, Held] = {}
        self._parts: dict[tuple[str, WorkerPlace], _Part] = {}
        """Of jobs at places that are not all there any more: what is left of them."""
        self._usage: dict[str, Amounts] = {}
        self._fixed: dict[str, Amounts] = {}
        self.capacity = Amounts()

    # -- reading ------------------------------------------------------------------------------

    @property
    def held(self) -> dict[str, Held]:
        """By job; not to be changed."""
        return self._held

    @property
    def is_plain(self) -> bool:
        """Whether each choice looks at every node."""
        return isinstance(self._real, PlainPlacer)

    @property
    def nodes(self) -> list[NodeFacts]:
        return [node.facts for node in self._nodes.values()]

    def usage(self, tenant: str) -> Amounts:
        return self._usage.get(tenant, _NOTHING)

    def fixed(self, tenant: str) -> Amounts:
        """Of the tenant's usage, what cannot be taken back."""
        return self._fixed.get(tenant, _NOTHING)

    def claims(self, tenant: str) -> list[Claim]:
        return [(held.request, held.amounts) for held in self._held.values() if held.request.tenant == tenant]

    def facts(self, node_id: str) -> NodeFacts | None:
        node = self._nodes.get(node_id)
        return None if node is None else node.facts

    def jobs_on(self, node_id: str) -> list[str]:
        """Those with a worker there."""
        node = self._nodes.get(node_id)
        return [] if node is None else list(node.jobs)

    def holders(self, node_id: str, gpu: int) -> list[Request]:
        """Who has a part of that GPU."""
        several = [self._held[job_id] for job_id in self.jobs_on(node_id)]
        return [
            held.request
            for held in several
            if any(place.node_id == node_id and gpu in place.gpu_ids for place in held.places)
        ]

    def kept_on(self, node_id: str) -> frozenset[int]:
        """GPUs on which nothing is placed for now."""
        return frozenset(self._kept.get(node_id, ()))

    def why_not(self, request: Request, facts: NodeFacts) -> str:
        """Why the node could not hold one such worker, were it all free; empty when it could."""
        return why_not(request.shape, facts) or self._filters.why_not(self._filters.kind(request), facts)

    def why_not_beside(self, request: Request) -> str:
        """Why there is no node beside or apart from the jobs that it names; empty when there is one."""
        if (not request.near and not request.apart) or any(map(_neighbours(request), self._nodes.values())):
            return ""
        near, apart = (" or ".join(sorted(names)) for names in (request.near, request.apart))
        if not near:
            return f"waits for a node on which no job named {apart} runs"
        there = {name for node in self._nodes.values() for name in node.names}
        if not any((request.tenant, name) in there for name in request.near):
            return f"waits for a job named {near} to run"
        return f"a job named {apart} runs wherever one named {near} does"

    def why_not_among(self, request: Request, facts: NodeFacts) -> str:
        """Why the jobs that run on the node keep it away, or do not draw it there; empty when they do not."""
        if (not request.near and not request.apart) or _neighbours(request)(self._nodes[facts.node_id]):
            return ""
        here = {name for tenant, name in self._nodes[facts.node_id].names if tenant == request.tenant}
        if unwanted := sorted(here & request.apart):
            return f"a job named {unwanted[0]} runs there"
        return f"no job named {' or '.join(sorted(request.near))} runs there"

    def why_crowded(self, facts: NodeFacts) -> str:
        """Why the node takes nothing now, though it would have room; empty when it does."""
        if not self._is_crowded(self._nodes[facts.node_id]):
            return ""
        return f"runs {self.workers_max} workers, the most on one node (controller.node_workers_max)"

    def _is_crowded(self, node: _Node) -> bool:
        return node.workers >= self.workers_max

    def is_open(self, place: WorkerPlace) -> bool:
        """Whether something new may go there, were it free."""
        if (node := self._nodes.get(place.node_id)) is None or self._is_crowded(node):
            return False
        return not node.facts.closed and not node.facts.closed_gpus & set(place.gpu_ids)

    def free_on(self, node_id: str) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """Free CPU thousandths and memory, and of each GPU the free share and memory."""
        _, cpu_milli, memory_mib, gpus = self._real.node_state(self._nodes[node_id].number)
        return cpu_milli, memory_mib, tuple((milli, mib) for milli, mib, _ in gpus)

    def set_filter(self, allowed: Filter | None) -> None:
        self._filters = Filters(allowed)
        self._classes.clear()

    # -- nodes --------------------------------------------------------------------------------

    def set_node(self, facts: NodeFacts) -> None:
        """A node that joined, or what changed of one.

        Where it has something else than before, what runs there is held on as far as it still exists: of GPUs
        that are gone nothing is, and of other things not more than there is. It counts as used all the same.
        """
        known = self._nodes.get(facts.node_id)
        if known is None:
            known = self._nodes[facts.node_id] = _Node(self._add(facts), facts)
            self.capacity += facts.amounts
            is_other = True
        else:
            is_other = (known.facts.amounts, known.facts.gpus) != (facts.amounts, facts.gpus)
            if is_other:
                self._exchange(known, facts)
        was, known.facts = known.facts, facts
        if is_other:
            self._sets.clear()
        if is_other or as_open(was) != as_open(facts):
            self._filters.forget(facts.node_id)
            self._classes.clear()
        if is_other or was.rack != facts.rack:
            self._forget_racks()
        self._set_open(known)
        self._set_gpus(known)

    def _set_open(self, node: _Node) -> None:
        for placer in self._placers:
            placer.set_open(node.number, is_open=not node.facts.closed and not self._is_crowded(node))

    def remove_node(self, node_id: str) -> None:
        """It is forgotten. UsageError when there is none, or something is held there."""
        node = self._known(node_id)
        if node.jobs:
            raise UsageError(
                f"{next(iter(node.jobs))} runs on node {node_id}", hint="end what runs there first"
            )
        self._drop(node)
        del self._nodes[node_id]
        self._kept.pop(node_id, None)
        self._filters.forget(node_id)
        self.capacity -= node.facts.amounts
        self._sets.clear()
        self._classes.clear()
        self._forget_racks()

    def _known(self, node_id: str) -> _Node:
        if (node := self._nodes.get(node_id)) is None:
            raise UsageError(f"there is no node {node_id}")
        return node

    def _add(self, facts: NodeFacts) -> int:
        """Its number, which may have been another node's."""
        memory_mib = min((gpu.memory_mib for gpu in facts.gpus), default=0)
        model = self._model_number(facts)
        numbers = {
            placer.add_node(
                cpu_milli=facts.cpu_milli,
                memory_mib=facts.memory_mib,
                gpus=len(facts.gpus),
                gpu_memory_mib=memory_mib,
                model=model,
                islands=_counted([gpu.island for gpu in facts.gpus]),
                numa=_counted([gpu.numa for gpu in facts.gpus]),
            )
            for placer in self._placers
        }
        assert len(numbers) == 1, "the placers are out of step"
        number = numbers.pop()
        self._ids[number : number + 1] = [facts.node_id]
        return number

    def _drop(self, node: _Node) -> None:
        for placer in self._placers:
            placer.drop_node(node.number)
        self._ids[node.number] = ""

    def _model_number(self, facts: NodeFacts) -> int:
        """The lowest that no node's model has; when there is none left, two models are one."""
        model = _model_of(facts)
        if model not in self._models:
            there = {_model_of(node.facts) for node in self._nodes.values()}
            self._models = {name: number for name, number in self._models.items() if name in there}
            taken = set(self._models.values())
            free = (number for number in range(MODELS_MAX) if number not in taken)
            self._models[model] = next(free, len(self._models) % MODELS_MAX)
        return self._models[model]

    def _exchange(self, node: _Node, facts: NodeFacts) -> None:
        """Another machine under the same name: what runs there is held in it, as far as that can be."""
        assert self._foresight is None, "nodes do not change within a pass"
        running = [(self._held[job_id].request, place) for job_id, place in self._workers_on(node)]
        for request, place in running:
            self._follow(request.tenant, self._part(request, place), taken=False)
        for request, place in running:
            self._parts.pop((request.job_id, place), None)
        self._drop(node)
        self.capacity += facts.amounts - node.facts.amounts
        node.number = self._add(facts)
        for (request, place), count in Counter(running).items():
            part = self._left(request, place, facts, count)
            if part != (request.shape.bare, place):
                self._parts[request.job_id, place] = part
            for _ in range(count):
                self._follow(request.tenant, part, taken=True)

    def _workers_on(self, node: _Node) -> list[tuple[str, WorkerPlace]]:
        node_id = node.facts.node_id
        return [
            (job_id, place)
            for job_id in node.jobs
            for place in self._held[job_id].places
            if place.node_id == node_id
        ]

    def _left(self, request: Request, place: WorkerPlace, facts: NodeFacts, count: int) -> _Part:
        """What each of so many workers at one place can have there now; they get the same."""
        cpu_milli, memory_mib, gpus = self.free_on(place.node_id)
        kept = tuple(gpu for gpu in place.gpu_ids if gpu < len(facts.gpus))
        free_mib = min((gpus[gpu][1] for gpu in kept), default=0)
        whole = request.shape.bare
        shape = replace(
            whole,
            gpus=len(kept),
            gpu_memory_mib=min(whole.gpu_memory_mib, free_mib // count),
            cpu_milli=min(whole.cpu_milli, cpu_milli // count),
            memory_mib=min(whole.memory_mib, memory_mib // count),
        )
        return (whole, place) if shape == whole else (shape, WorkerPlace(place.node_id, kept))

    def _set_gpus(self, node: _Node) -> None:
        facts = node.facts
        outside_mib = facts.memory_outside_mib or (0,) * len(facts.gpus)
        for gpu, mib in enumerate(outside_mib[: len(facts.gpus)]):
            is_open = gpu not in facts.closed_gpus and gpu not in self._kept.get(facts.node_id, ())
            for placer in self._placers:
                placer.set_gpu(node.number, gpu, is_open=is_open, memory_outside_mib=mib)

    def keep(self, places: Iterable[WorkerPlace], *, is_kept: bool) -> None:
        """Nothing is placed on these GPUs, or it may be again; what is held there stays, and hold() may."""
        for place in places:
            if (node := self._nodes.get(place.node_id)) is None:
                continue
            kept, gpus = self._kept.pop(place.node_id, set()), set(place.gpu_ids)
            if kept := kept | gpus if is_kept else kept - gpus:
                self._kept[place.node_id] = kept
            self._set_gpus(node)

    # -- jobs ---------------------------------------------------------------------------------

    def refresh(self, budget: int) -> bool:
        """Prepares the next choices, up to so many judgements; True when that is done."""
        return self._real.refresh(budget)

    def observe(self, request: Request) -> None:
        """It has arrived; policies learn from that."""
        self._real.observe(self._class(request, request.shape), self._tenant(request.tenant))

    def place(
        self, request: Request, workers: int, *, least: int | None = None, avoiding: Collection[str] = ()
    ) -> tuple[WorkerPlace, ...] | None:
        """All workers, or as many as fit if those are `least` or more, or none; they are held from now on.
        None of them is on a node that is to be avoided."""
        places = self._placed_apart(request, workers, least or workers, set(avoiding))
        if places is None:
            return None
        for place in places:
            self._follow(request.tenant, (request.shape.bare, place), taken=True, but=self._real)
        self._note(request, places)
        return places

    def _placed_apart(
        self, request: Request, workers: int, least: int, avoided: set[str]
    ) -> tuple[WorkerPlace, ...] | None:
        """Chosen and taken in the real placer, with no more workers on a node than it may run."""
        for _ in range(_TRIES_MAX):
            places = self._placed(self._real, request, workers, least, avoided)
            if places is None or not (too_many := self._overcrowded(places)):
                return places
            for place in places:
                self._give_back(self._real, (request.shape.bare, place))
            avoided |= too_many
        return None

    def _overcrowded(self, places: Sequence[WorkerPlace]) -> set[str]:
        """Nodes that would run too many workers with these."""
        if len(places) == 1:  # a node that has no room for one more is not chosen
            return set()
        more = Counter(place.node_id for place in places)
        return {name for name, count in more.items() if self._nodes[name].workers + count > self.workers_max}

    def hold(self, request: Request, places: Sequence[WorkerPlace], *, is_there: bool = False) -> None:
        """At these places and no others. UsageError, and nothing is held, when they are not free.

        `is_there`: it runs there already. Of GPUs that its nodes have lost nothing is held, and of other
        things not more than there is, as when a node changes. It counts as used all the same.
        """
        if not is_there and self._overcrowded(places):
            raise UsageError(f"a node would run more than {self.workers_max} workers")
        counts = Counter(places) if is_there else {}
        parts: dict[WorkerPlace, _Part] = {}
        taken: list[_Part] = []
        try:
            for place in sorted(places):  # equal ones together: they get the same
                if place not in parts:
                    facts, whole = self._known(place.node_id).facts, (request.shape.bare, place)
                    parts[place] = self._left(request, place, facts, counts[place]) if is_there else whole
                self._take(self._real, request.tenant, parts[place])
                taken.append(parts[place])
        except UsageError:
            for part in reversed(taken):
                self._give_back(self._real, part)
            raise
        for part in taken:
            self._follow(request.tenant, part, taken=True, but=self._real)
        for place, part in parts.items():
            if part != (request.shape.bare, place):
                self._parts[request.job_id, place] = part
        self._note(request, tuple(places))

    def release(self, job_id: str) -> Held:
        held = self._held.pop(job_id)
        for place in held.places:
            self._follow(held.request.tenant, self._part(held.request, place), taken=False)
            self._count(held.request, place, -1)
        if self._parts:
            for place in held.places:
                self._parts.pop((job_id, place), None)
        self._add_usage(held.request, held.amounts.times(-1))
        return held

    def _part(self, request: Request, place: WorkerPlace) -> _Part:
        """What a worker of a running job really holds there."""
        whole = (request.shape.bare, place)
        return self._parts.get((request.job_id, place), whole) if self._parts else whole

    def _note(self, request: Request, places: tuple[WorkerPlace, ...]) -> None:
        held = Held(request, places)
        self._held[request.job_id] = held
        self._add_usage(request, held.amounts)
        for place in places:
            self._count(request, place, 1)

    def _add_usage(self, request: Request, more: Amounts) -> None:
        self._usage[request.tenant] = self.usage(request.tenant) + more
        if not request.preemptible:
            self._fixed[request.tenant] = self.fixed(request.tenant) + more

    def _count(self, request: Request, place: WorkerPlace, more: int) -> None:
        node = self._nodes[place.node_id]
        _add_to(node.names, (request.tenant, request.name), more)
        _add_to(node.jobs, request.job_id, more)
        before, node.workers = node.workers, node.workers + more
        if (before >= self.workers_max) is not (node.workers >= self.workers_max):
            self.crowds += 1
            self._set_open(node)

    def _follow(self, tenant: str, part: _Part, *, taken: bool, but: Placer | None = None) -> None:
        """All placers do it; the one that is ahead of time later."""
        shape, place = part
        node, number = self._known(place.node_id).number, self._amounts.of(shape)
        for placer in self._placers:
            if placer is but:
                continue
            if placer is self._ahead and self._foresight is not None:
                self._foresight.later.append((taken, tenant, part))
            elif taken:
                placer.take(number, self._tenant(tenant), node=node, gpus=place.gpu_ids)
            else:
                placer.release(number, node=node, gpus=place.gpu_ids)

    # -- suppositions -------------------------------------------------------------------------

    @contextmanager
    def supposing(self) -> Iterator[Supposition]:
        """As things stand, but. One at a time; the book stays as it is meanwhile."""
        supposition = Supposition(self, self._scratch)
        try:
            yield supposition
        finally:
            supposition.undo()

    @contextmanager
    def foreseeing(self) -> Iterator[Foresight]:
        """As things will be. The book may change meanwhile, and other suppositions may be made."""
        assert self._foresight is None, "one at a time"
        self._foresight = foresight = Foresight(self, self._ahead)
        try:
            yield foresight
        finally:
            foresight.catch_up()
            self._foresight = None

    # -- numbers ------------------------------------------------------------------------------

    def _take(self, placer: Placer, tenant: str, part: _Part) -> None:
        shape, place = part
        number = self._known(place.node_id).number
        placer.take(self._amounts.of(shape), self._tenant(tenant), node=number, gpus=place.gpu_ids)

    def _give_back(self, placer: Placer, part: _Part) -> None:
        shape, place = part
        placer.release(self._amounts.of(shape), node=self._known(place.node_id).number, gpus=place.gpu_ids)

    def _tenant(self, tenant: str) -> int:
        return self._tenants.setdefault(tenant, len(self._tenants) + 1)

    def _class(self, request: Request, shape: Shape, *, one_island: bool = False) -> int:
        return self._classes.of((shape, one_island, self._filters.kind(request)))

    def _register(self, kind: _Kind) -> _Tell:
        """For choosing: amounts, whether in one island, the nodes and models that will do for the shape."""
        shape, one_island, filtered = kind
        named = (self._nodes.get(node_id) for node_id in sorted(shape.nodes))
        several = [node for node in named if node is not None] if shape.nodes else self._nodes.values()
        will_do = [
            node
            for node in several
            if not why_not(shape, as_open(node.facts)) and not self._filters.why_not(filtered, node.facts)
        ]
        allowed = None if len(will_do) == len(self._nodes) else [node.number for node in will_do]
        return _class_of(
            shape, self._model_set(shape, will_do), nodes=allowed, one_island=one_island and shape.gpus > 0
        )

    def _model_set(self, shape: Shape, will_do: Iterable[_Node]) -> int:
        """Who asks for some GPUs competes only with those who could use these: the placer must know that."""
        if not shape.asks_for_gpus:
            return ANY_MODEL
        those = [node.facts for node in self._nodes.values() if node.facts.gpus]
        models = {_model_of(facts) for facts in those if not why_not_gpus(shape, facts.gpus)}
        models |= {_model_of(node.facts) for node in will_do}
        if models >= {_model_of(facts) for facts in those}:
            return ANY_MODEL
        return sum({1 << self._models[model] for model in models})

    # -- placing ------------------------------------------------------------------------------

    def _placed(
        self, placer: Placer, request: Request, workers: int, least: int, avoiding: Collection[str] = ()
    ) -> tuple[WorkerPlace, ...] | None:
        """Chosen and taken in this placer."""
        among = self._among(request, avoiding)
        if request.within in (Within.NODE, Within.ISLAND):
            tries = (
                self._on_one_node(placer, request, count, among) for count in range(workers, least - 1, -1)
            )
            return next((found for found in tries if found is not None), None)
        found = placer.place_gang(
            self._class(request, request.shape),
            self._tenant(request.tenant),
            workers=workers,
            workers_min=least,
            spread=request.spread is Spread.SPREAD,
            domains=self._all_racks() if request.within is Within.RACK else None,
            among=among,
        )
        return None if found is None else tuple(WorkerPlace(self._ids[node], gpus) for node, gpus in found)

    def _all_racks(self) -> list[int]:
        """Node sets, the same in all placers."""
        if self._racks is None:
            racks: dict[str, list[int]] = {}
            for node in self._nodes.values():
                racks.setdefault(node.facts.rack, []).append(node.number)
            for placer in self._placers:
                self._racks = [placer.node_set(numbers) for numbers in racks.values()]
        assert self._racks is not None
        return self._racks

    def _forget_racks(self) -> None:
        for number in self._racks or ():
            for placer in self._placers:
                placer.drop_node_set(number)
        self._racks = None

    def _among(self, request: Request, avoiding: Collection[str]) -> int | None:
        """The set of nodes that will do; None for all."""
        if not avoiding and not request.near and not request.apart:
            return None
        avoided = frozenset(self._nodes[node_id].number for node_id in avoiding)
        if not request.near and not request.apart:
            return self._sets.of((avoided, True)) if avoided else None
        will_do = _neighbours(request)
        numbers = frozenset(node.number for node in self._nodes.values() if will_do(node))
        return self._sets.of((numbers - avoided, False))

    def _on_one_node(
        self, placer: Placer, request: Request, workers: int, among: int | None
    ) -> tuple[WorkerPlace, ...] | None:
        """As one request: so near, it is one."""
        shape, each = request.shape.times(workers), request.shape.gpus
        if shape.gpus > GPUS_MAX:
            return None
        number = self._class(request, shape, one_island=request.within is Within.ISLAND)
        found = placer.choose(number, self._tenant(request.tenant), among=among)
        if found is None:
            return None
        node_id, gpus = self._ids[found[0]], found[1]
        places = tuple(WorkerPlace(node_id, gpus[i * each : (i + 1) * each]) for i in range(workers))
        for place in places:
            self._take(placer, request.tenant, (request.shape.bare, place))
        return places


def _neighbours(request: Request) -> Callable[[_Node], bool]:
    """Whether a node has those jobs that it wants to be near to, and none from which it wants to be apart."""

    def will_do(node: _Node) -> bool:
        here = {name for tenant, name in node.names if tenant == request.tenant}
        return (not request.near or bool(here & request.near)) and not here & request.apart

    return will_do


def _register_amounts(shape: Shape) -> _Tell:
    return _class_of(shape, ANY_MODEL)


def _class_of(
    shape: Shape, models: int, *, nodes: Sequence[int] | None = None, one_island: bool = False
) -> _Tell:
    only_gpus = [gpu for gpu in shape.gpu_ids if 0 <= gpu < GPUS_MAX] if shape.gpu_ids else None
    return lambda placer: placer.request_class(
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


def _register_set(nodes: tuple[frozenset[int], bool]) -> _Tell:
    """These nodes, or all but these."""
    numbers = sorted(nodes[0])
    return lambda placer: placer.node_set(numbers, all_but=nodes[1])


def _drop_set(placer: Placer, number: int) -> None:
    placer.drop_node_set(number)


def _add_to(counts: dict[_Name, int], name: _Name, more: int) -> None:
    """Only what is not 0 is kept."""
    counts[name] = counts.get(name, 0) + more
    if not counts[name]:
        del counts[name]


def _model_of(facts: NodeFacts) -> str:
    """Of the first GPU; which GPUs of a node will do is decided by node."""
    return facts.gpus[0].model if facts.gpus else ""


def _counted(numbers: Sequence[int]) -> list[int]:
    """The same differences, as numbers from 0."""
    known = {number: index for index, number in enumerate(dict.fromkeys(numbers))}
    return [known[number] for number in numbers]


class Supposition:
    """What would be. Made by Book.supposing."""

    def __init__(self, book: Book, placer: Placer) -> None:
        self._book = book
        self._placer = placer
        self._done: list[_Change] = []

    def release(self, held: Held) -> None:
        for place in held.places:
            self._change((False, held.request.tenant, self._book._part(held.request, place)))

    def place(
        self, request: Request, workers: int, *, avoiding: Collection[str] = ()
    ) -> tuple[WorkerPlace, ...] | None:
        places = self._book._placed(self._placer, request, workers, workers, avoiding)
        self._done += [(True, request.tenant, (request.shape.bare, place)) for place in places or ()]
        return places

    def hold(self, request: Request, places: Sequence[WorkerPlace]) -> bool:
        """Whether these places are free then; they are held if so."""
        mark = self.mark
        try:
            for place in places:
                self._change((True, request.tenant, (request.shape.bare, place)))
        except UsageError:
            self.undo(mark)
            return False
        return True

    @property
    def mark(self) -> int:
        """For undo()."""
        return len(self._done)

    def undo(self, mark: int = 0) -> None:
        while len(self._done) > mark:
            taken, tenant, part = self._done.pop()
            self._carry_out((not taken, tenant, part))

    def fewest_gone(self, request: Request, ends: Sequence[Held]) -> int | None:
        """How many of the first must be gone so that it fits; None when all are not enough.

        Who fits fits with more gone, too: the number is doubled and then halved. Leaves exactly those gone.
        """
        marks = [self.mark]

        def fits(gone: int) -> bool:
            self.undo(marks[min(gone, len(marks) - 1)])
            del marks[gone + 1 :]
            for held in ends[len(marks) - 1 : gone]:
                self.release(held)
                marks.append(self.mark)
            places = self.place(request, request.least_workers)
            self.undo(marks[gone])
            return places is not None

        low, high = 0, min(1, len(ends))
        while not fits(high):
            if high == len(ends):
                return None
            low, high = high, min(2 * high, len(ends))
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        assert fits(high)
        return high

    def _change(self, change: _Change) -> None:
        self._carry_out(change)
        self._done.append(change)

    def _carry_out(self, change: _Change) -> None:
        taken, tenant, part = change
        if taken:
            self._book._take(self._placer, tenant, part)
        else:
            self._book._give_back(self._placer, part)


class Foresight(Supposition):
    """What will be at some time. What changes in the book meanwhile waits until it is asked to catch up."""

    def __init__(self, book: Book, placer: Placer) -> None:
        super().__init__(book, placer)
        self.later: list[_Change] = []

    def catch_up(self) -> None:
        """Supposes nothing any more, and stands where the book stands."""
        self.undo()
        for change in self.later:
            self._carry_out(change)
        self.later.clear()
