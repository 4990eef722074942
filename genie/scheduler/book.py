"""Who holds what, by name: nodes, jobs and tenants over a placer, which knows numbers only.

Three placers are kept in step. One chooses by the cluster's policy; the others are for suppositions: they are
changed to see what would be, and changed back. Not for: which job comes next (scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from genie.errors import UsageError
from genie.scheduler.placement.protocol import MODELS_MAX, Place, Placer
from genie.scheduler.request import Amounts, NodeFacts, Request, Shape, Spread, Within, WorkerPlace, why_not

MakePlacer = Callable[[str], Placer]
"""Gives an empty placer of that policy."""

_SUPPOSING = "bestfit"

_Change: TypeAlias = tuple[bool, Request, WorkerPlace]
"""Whether it is taken or given back, by whom, where."""


@dataclass(frozen=True)
class Held:
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


class Book:
    """The same calls in the same order give the same answers."""

    def __init__(self, make_placer: MakePlacer, *, policy: str) -> None:
        self._real = make_placer(policy)
        self._scratch, self._ahead = make_placer(_SUPPOSING), make_placer(_SUPPOSING)
        self._placers = (self._real, self._scratch, self._ahead)
        self._foresight: Foresight | None = None
        self._nodes: dict[str, _Node] = {}
        self._ids: list[str] = []
        self._tenants: dict[str, int] = {}
        self._models: dict[str, int] = {}
        self._classes: dict[tuple[Shape, frozenset[str] | None], int] = {}
        self._amounts: dict[Shape, int] = {}
        self._held: dict[str, Held] = {}
        self._usage: dict[str, Amounts] = {}
        self.capacity = Amounts()

    # -- reading ------------------------------------------------------------------------------

    @property
    def held(self) -> dict[str, Held]:
        """By job; not to be changed."""
        return self._held

    @property
    def nodes(self) -> list[NodeFacts]:
        return [node.facts for node in self._nodes.values()]

    def usage(self, tenant: str) -> Amounts:
        return self._usage.get(tenant, Amounts())

    def free_on(self, node_id: str) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """Free CPU thousandths and memory, and of each GPU the free share and memory."""
        _, cpu_milli, memory_mib, gpus = self._real.node_state(self._nodes[node_id].number)
        return cpu_milli, memory_mib, tuple((milli, mib) for milli, mib, _ in gpus)

    # -- nodes --------------------------------------------------------------------------------

    def set_node(self, facts: NodeFacts) -> None:
        """A node that joined, or what changed of one. What it has is fixed; whether it is open is not."""
        known = self._nodes.get(facts.node_id)
        is_new = known is None
        if known is None:
            number = self._add(facts)
            self._nodes[facts.node_id] = known = _Node(number, facts)
            self._ids.append(facts.node_id)
            self.capacity += facts.amounts
        elif (known.facts.amounts, known.facts.gpus) != (facts.amounts, facts.gpus):
            raise UsageError(f"node {facts.node_id} cannot change what it has; give it another id")
        was_alike = (known.facts.labels, known.facts.rack) == (facts.labels, facts.rack)
        known.facts = facts
        if not was_alike or is_new:
            self._classes.clear()
        for placer in self._placers:
            placer.set_open(known.number, is_open=not facts.closed)

    def _add(self, facts: NodeFacts) -> int:
        memory_mib = min((gpu.memory_mib for gpu in facts.gpus), default=0)
        first = facts.gpus[0].model if facts.gpus else ""
        model = self._models.setdefault(first, len(self._models) % MODELS_MAX)
        numbers = [
            placer.add_node(
                cpu_milli=facts.cpu_milli,
                memory_mib=facts.memory_mib,
                gpus=len(facts.gpus),
                gpu_memory_mib=memory_mib,
                model=model,
            )
            for placer in self._placers
        ]
        assert set(numbers) == {len(self._ids)}
        return numbers[0]

    # -- jobs ---------------------------------------------------------------------------------

    def observe(self, request: Request) -> None:
        """It has arrived; policies learn from that."""
        self._real.observe(self._class_of(request.shape, None), self._tenant(request.tenant))

    def place(self, request: Request, workers: int) -> tuple[WorkerPlace, ...] | None:
        """All workers or none; they are held from now on."""
        places = self._placed(self._real, request, workers)
        if places is None:
            return None
        for place in places:
            self._follow(request, place, taken=True, but=self._real)
        self._note(request, places)
        return places

    @contextmanager
    def avoiding(self, node_ids: Iterable[str]) -> Iterator[None]:
        """place() chooses none of these meanwhile."""
        known = (self._nodes[node_id] for node_id in node_ids)
        numbers = [node.number for node in known if not node.facts.closed]
        for number in numbers:
            self._real.set_open(number, is_open=False)
        try:
            yield
        finally:
            for number in numbers:
                self._real.set_open(number, is_open=True)

    def hold(self, request: Request, places: Sequence[WorkerPlace]) -> None:
        """At these places and no others. UsageError, and nothing is held, when they are not free."""
        taken: list[WorkerPlace] = []
        try:
            for place in places:
                self._take(self._real, request, place)
                taken.append(place)
        except UsageError:
            for place in reversed(taken):
                self._give_back(self._real, request, place)
            raise
        for place in places:
            self._follow(request, place, taken=True, but=self._real)
        self._note(request, tuple(places))

    def release(self, job_id: str) -> Held:
        held = self._held.pop(job_id)
        for place in held.places:
            self._follow(held.request, place, taken=False)
            self._count(held.request, place, -1)
        tenant = held.request.tenant
        self._usage[tenant] -= held.amounts
        return held

    def _note(self, request: Request, places: tuple[WorkerPlace, ...]) -> None:
        held = Held(request, places)
        self._held[request.job_id] = held
        self._usage[request.tenant] = self.usage(request.tenant) + held.amounts
        for place in places:
            self._count(request, place, 1)

    def _count(self, request: Request, place: WorkerPlace, more: int) -> None:
        names, key = self._nodes[place.node_id].names, (request.tenant, request.name)
        names[key] = names.get(key, 0) + more
        if not names[key]:
            del names[key]

    def _follow(
        self, request: Request, place: WorkerPlace, *, taken: bool, but: Placer | None = None
    ) -> None:
        """All placers do it; the one that is ahead of time later."""
        change = self._take if taken else self._give_back
        for placer in self._placers:
            if placer is but:
                continue
            if placer is self._ahead and self._foresight is not None:
                self._foresight.later.append((taken, request, place))
            else:
                change(placer, request, place)

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

    def _take(self, placer: Placer, request: Request, place: WorkerPlace) -> None:
        """On a closed node, too: it is about what is there already."""
        node = self._nodes[place.node_id]
        number, tenant = self._class_of_amounts(request.shape), self._tenant(request.tenant)
        if node.facts.closed:
            placer.set_open(node.number, is_open=True)
        try:
            placer.take(number, tenant, node=node.number, gpus=place.gpu_ids)
        finally:
            if node.facts.closed:
                placer.set_open(node.number, is_open=False)

    def _give_back(self, placer: Placer, request: Request, place: WorkerPlace) -> None:
        number = self._class_of_amounts(request.shape)
        placer.release(number, node=self._nodes[place.node_id].number, gpus=place.gpu_ids)

    def _tenant(self, tenant: str) -> int:
        return self._tenants.setdefault(tenant, len(self._tenants) + 1)

    def _class_of(self, shape: Shape, among: frozenset[str] | None) -> int:
        """For choosing. `among`: only these nodes; None for all that will do for the shape."""
        key = (shape, among)
        if key not in self._classes:
            allowed = [
                node.number
                for node_id, node in self._nodes.items()
                if not why_not(shape, replace(node.facts, closed="")) and (among is None or node_id in among)
            ]
            every = len(allowed) == len(self._nodes)
            self._classes[key] = (
                self._class_of_amounts(shape) if every else self._register(shape, nodes=allowed)
            )
        return self._classes[key]

    def _class_of_amounts(self, shape: Shape) -> int:
        """For holding, whatever else was asked for."""
        bare = shape.bare
        if bare not in self._amounts:
            self._amounts[bare] = self._register(bare, nodes=None)
        return self._amounts[bare]

    def _register(self, shape: Shape, *, nodes: Sequence[int] | None) -> int:
        numbers = {
            placer.request_class(
                gpus=shape.gpus,
                gpu_milli=shape.gpu_milli if shape.gpus else 0,
                gpu_memory_mib=shape.gpu_memory_mib if shape.gpus else 0,
                cpu_milli=shape.cpu_milli,
                memory_mib=shape.memory_mib,
                nodes=nodes,
            )
            for placer in self._placers
        }
        assert len(numbers) == 1, "the two placers are out of step"
        return numbers.pop()

    # -- placing ------------------------------------------------------------------------------

    def _placed(self, placer: Placer, request: Request, workers: int) -> tuple[WorkerPlace, ...] | None:
        """Chosen and taken in this placer."""
        for among in self._neighbourhoods(request):
            if request.within is Within.NODE and workers > 1:
                found = self._on_one_node(placer, request, workers, among)
            else:
                found = self._one_by_one(placer, request, workers, among)
            if found is not None:
                return found
        return None

    def _neighbourhoods(self, request: Request) -> Iterable[frozenset[str] | None]:
        """Sets of nodes, in each of which the whole job may go; None for all nodes."""
        allowed = self._near_and_apart(request)
        if request.within is not Within.RACK:
            yield allowed
            return
        racks: dict[str, set[str]] = {}
        for node_id, node in self._nodes.items():
            if allowed is None or node_id in allowed:
                racks.setdefault(node.facts.rack, set()).add(node_id)
        # The rack with the least room first: what is large stays whole.
        yield from map(frozenset, sorted(racks.values(), key=self._free_milli))

    def _free_milli(self, node_ids: Iterable[str]) -> int:
        return sum(milli for node_id in node_ids for milli, _ in self.free_on(node_id)[2])

    def _near_and_apart(self, request: Request) -> frozenset[str] | None:
        if not request.near and not request.apart:
            return None

        def will_do(node: _Node) -> bool:
            here = {name for tenant, name in node.names if tenant == request.tenant}
            return (not request.near or bool(here & request.near)) and not here & request.apart

        return frozenset(node_id for node_id, node in self._nodes.items() if will_do(node))

    def _on_one_node(
        self, placer: Placer, request: Request, workers: int, among: frozenset[str] | None
    ) -> tuple[WorkerPlace, ...] | None:
        try:
            number = self._class_of(request.shape.times(workers), among)
        except UsageError:  # more GPUs than any node can have
            return None
        tenant, each = self._tenant(request.tenant), request.shape.gpus
        found = placer.choose(number, tenant)
        if found is None:
            return None
        node_id, gpus = self._ids[found[0]], found[1]
        places = tuple(WorkerPlace(node_id, gpus[i * each : (i + 1) * each]) for i in range(workers))
        for place in places:
            self._take(placer, request, place)
        return places

    def _one_by_one(
        self, placer: Placer, request: Request, workers: int, among: frozenset[str] | None
    ) -> tuple[WorkerPlace, ...] | None:
        number, tenant = self._class_of(request.shape, among), self._tenant(request.tenant)
        found: list[Place] = []
        used: list[int] = []
        try:
            while len(found) < workers:
                place = placer.place(number, tenant)
                if place is None:
                    for node, gpus in reversed(found):
                        placer.release(number, node=node, gpus=gpus)
                    return None
                found.append(place)
                if request.spread is Spread.SPREAD:
                    placer.set_open(place[0], is_open=False)
                    used.append(place[0])
        finally:
            for node in used:
                placer.set_open(node, is_open=True)
        return tuple(WorkerPlace(self._ids[node], gpus) for node, gpus in found)


class Supposition:
    """What would be. Made by Book.supposing."""

    def __init__(self, book: Book, placer: Placer) -> None:
        self._book = book
        self._placer = placer
        self._done: list[_Change] = []

    def release(self, held: Held) -> None:
        for place in held.places:
            self._change((False, held.request, place))

    def place(self, request: Request, workers: int) -> tuple[WorkerPlace, ...] | None:
        places = self._book._placed(self._placer, request, workers)
        self._done += [(True, request, place) for place in places or ()]
        return places

    def hold(self, request: Request, places: Sequence[WorkerPlace]) -> bool:
        """Whether these places are free then; they are held if so."""
        mark = self.mark
        try:
            for place in places:
                self._change((True, request, place))
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
            taken, request, place = self._done.pop()
            self._carry_out((not taken, request, place))

    def _change(self, change: _Change) -> None:
        self._carry_out(change)
        self._done.append(change)

    def _carry_out(self, change: _Change) -> None:
        taken, request, place = change
        carry_out = self._book._take if taken else self._book._give_back
        carry_out(self._placer, request, place)


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
