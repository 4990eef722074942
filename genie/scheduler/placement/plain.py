"""The placer in plain Python: clear and slow. native/scheduler does the same fast.

Every choice looks at every node anew, so there is nothing here that could be out of date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from genie.errors import UsageError
from genie.scheduler.placement import published, supply
from genie.scheduler.placement.gpus import room
from genie.scheduler.placement.protocol import (
    ANY_MODEL,
    CLASSES_MAX,
    FULL_MILLI,
    GPUS_MAX,
    MODELS_MAX,
    NODE_SETS_MAX,
    UNLIMITED,
    NodeState,
    Place,
    TypicalShape,
)
from genie.scheduler.placement.state import Cluster, Cost, Gpu, Node, Numbered, Policy, Request

HISTORY = 200
FIRST_LESSON = 25
LESSON_EVERY = 200


class PlainPlacer:
    """See protocol.Placer."""

    def __init__(self, policy: str, *, typical: Sequence[TypicalShape] = (), gamma: float = 0.05) -> None:
        self._cluster = Cluster()
        self._classes = Numbered[Request](what="request class", count_max=CLASSES_MAX)
        self._sets = Numbered[frozenset[int]](what="node set", count_max=NODE_SETS_MAX)
        makers = published.POLICIES | {"supply": lambda _: supply.Supply(self._cluster, gamma=gamma)}
        if policy not in makers:
            raise UsageError(f"there is no policy '{policy}'")
        self._policy: Policy = makers[policy](typical)
        self._learns = policy == "supply"
        self._history: deque[Request] = deque(maxlen=HISTORY)
        self._observed = 0
        self._due = FIRST_LESSON
        self._is_refreshed = False

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
        if min(cpu_milli, memory_mib, gpu_memory_mib) < 0 or not 0 <= gpus <= GPUS_MAX:
            raise UsageError("a node has 0 to 16 GPUs, and no amount of it is negative")
        if not 0 <= model < MODELS_MAX:
            raise UsageError("a GPU model is a number from 0 to 63")
        number = self._cluster.numbered.next_number
        sides = zip(_positions(islands, gpus), _positions(numa, gpus), strict=True)
        devices = [Gpu(FULL_MILLI, gpu_memory_mib, island=island, numa=numa) for island, numa in sides]
        rank = number if rank < 0 else rank
        node = Node(number, cpu_milli, memory_mib, gpu_memory_mib, model, rank, devices)
        return self._cluster.numbered.add(node)

    def drop_node(self, node: int) -> None:
        dropped = self._node(node)
        free = (dropped.free_cpu_milli, dropped.free_memory_mib)
        if free != (dropped.cpu_milli, dropped.memory_mib) or any(dropped.held.values()):
            raise UsageError("something is held there")
        self._cluster.numbered.drop(node)
        self._sets.change(lambda nodes: nodes - {node})
        self._classes.change(
            lambda wanted: wanted if wanted.nodes is None else replace(wanted, nodes=wanted.nodes - {node})
        )

    def set_open(self, node: int, *, is_open: bool) -> None:
        self._node(node).is_open = is_open

    def set_gpu(self, node: int, gpu: int, *, is_open: bool, memory_outside_mib: int) -> None:
        gpus = self._node(node).gpus
        if not 0 <= gpu < len(gpus) or memory_outside_mib < 0:
            raise UsageError("there is no such GPU, or memory is negative")
        gpus[gpu].is_open, gpus[gpu].memory_outside_mib = is_open, memory_outside_mib

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
        if not 0 <= gpus <= GPUS_MAX:
            raise UsageError("a request has 0 to 16 GPUs of one node")
        if gpus > 0 and not 1 <= gpu_milli <= FULL_MILLI:
            raise UsageError("the share of a GPU is 1 to 1000 thousandths")
        if gpus == 0 and (gpu_milli or gpu_memory_mib or one_island):
            raise UsageError("a request without GPUs has no share, no memory and no island of them")
        if min(gpu_memory_mib, cpu_milli, memory_mib) < 0:
            raise UsageError("no amount of a request is negative")
        allowed = None if nodes is None else self._numbers(nodes)
        amounts = (gpus, gpu_milli, gpu_memory_mib, cpu_milli, memory_mib)
        these = None if only_gpus is None else frozenset(_chosen(only_gpus))
        return self._classes.add(Request(*amounts, models, allowed, one_island, these))

    def drop_class(self, request_class: int) -> None:
        self._classes.drop(request_class)

    def node_set(self, nodes: Sequence[int], *, all_but: bool = False) -> int:
        these = self._numbers(nodes)
        return self._sets.add(self._all_of(None) - these if all_but else these)

    def drop_node_set(self, node_set: int) -> None:
        self._sets.drop(node_set)

    def take(self, request_class: int, tenant: int, *, node: int, gpus: Sequence[int]) -> None:
        wanted, target = self._asked(request_class, tenant), self._node(node)
        chosen = _chosen(gpus)
        fits = target.has_room(wanted) and len(chosen) == wanted.gpus
        fits = fits and all(g < len(target.gpus) and target.gpus[g].has_room(wanted, tenant) for g in chosen)
        if not fits:
            raise UsageError("the request does not fit there")
        _move(target, wanted, chosen, sign=-1)
        for number in chosen:
            target.gpus[number].tenant = tenant

    def release(self, request_class: int, *, node: int, gpus: Sequence[int]) -> None:
        wanted, target = self._classes.get(request_class), self._node(node)
        chosen = _chosen(gpus)
        if len(chosen) != wanted.gpus or not _was_taken(target, wanted, chosen):
            raise UsageError("nothing like that was taken there")
        _move(target, wanted, chosen, sign=1)
        for number in chosen:
            if target.gpus[number].free_milli == FULL_MILLI:
                target.gpus[number].tenant = 0

    def node_state(self, node: int) -> NodeState:
        found = self._node(node)
        gpus = tuple((gpu.free_milli, gpu.free_memory_mib, gpu.tenant) for gpu in found.gpus)
        return (found.is_open, found.free_cpu_milli, found.free_memory_mib, gpus)

    def observe(self, request_class: int, tenant: int) -> None:
        wanted = self._asked(request_class, tenant)
        if self._learns:
            self._history.append(wanted)
            self._observed += 1

    def choose(self, request_class: int, tenant: int, *, among: int | None = None) -> Place | None:
        wanted = self._asked(request_class, tenant)
        allowed = self._all_of(among)
        self._learn_if_late()
        return self._best(wanted, tenant, allowed)

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
        wanted = self._asked(request_class, tenant)
        if workers < 1 or not 0 <= workers_min <= workers:
            raise UsageError("a gang has 1 worker at least, and its minimum is not above its number")
        allowed = self._all_of(among)
        sets = [allowed] if domains is None else [self._sets.get(number) & allowed for number in domains]
        self._learn_if_late()
        least = workers_min or workers
        rooms = [self._room(wanted, tenant, nodes, spread=spread) for nodes in sets]
        order = sorted((room, index) for index, room in enumerate(rooms) if room >= least)

        def filled(index: int, count: int) -> list[Place]:
            return self._fill(request_class, tenant, sets[index], workers=count, spread=spread)

        most, where = 0, -1
        enough = [item for item in order if item[0] >= workers]
        for room_, index in enough + (order[::-1] if least < workers else []):
            if room_ < max(most, least):
                break
            found = filled(index, workers)
            if len(found) == workers:
                return found
            self._give_back(request_class, found)
            if len(found) >= most:
                most, where = len(found), index
        return filled(where, most) if most >= least else None

    def refresh(self, budget: int = UNLIMITED) -> bool:
        """All at once: a budget is for those who are in a hurry."""
        self._is_refreshed = True
        if self._is_lesson_due():
            self._learn()
        return True

    def _fill(
        self, request_class: int, tenant: int, nodes: frozenset[int], *, workers: int, spread: bool
    ) -> list[Place]:
        """Places for as many workers as fit on these nodes, one after the other."""
        found: list[Place] = []
        while len(found) < workers:
            place = self._best(self._classes.get(request_class), tenant, nodes)
            if place is None:
                break
            self.take(request_class, tenant, node=place[0], gpus=place[1])
            found.append(place)
            if spread:
                nodes -= {place[0]}
        return found

    def _give_back(self, request_class: int, places: list[Place]) -> None:
        for node, gpus in reversed(places):
            self.release(request_class, node=node, gpus=gpus)

    def _room(self, wanted: Request, tenant: int, nodes: frozenset[int], *, spread: bool) -> int:
        """So many workers fit there at most."""
        fitting = [self._node(number) for number in nodes]
        fitting = [node for node in fitting if self._policy.judge(node, wanted, tenant) is not None]
        return len(fitting) if spread else sum(room(node, wanted, tenant) for node in fitting)

    def _best(self, wanted: Request, tenant: int, allowed: frozenset[int]) -> Place | None:
        best: tuple[Cost, int, tuple[int, ...]] | None = None
        for node in self._cluster.nodes:
            found = self._policy.judge(node, wanted, tenant) if node.number in allowed else None
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], node.number, found[1])
        return None if best is None else best[1:]

    def _learn_if_late(self) -> None:
        if self._observed >= self._due + LESSON_EVERY if self._is_refreshed else self._is_lesson_due():
            self._learn()

    def _is_lesson_due(self) -> bool:
        return self._learns and (self._observed >= self._due or self._policy.is_stale())

    def _learn(self) -> None:
        if self._observed < self._due:
            self._policy.learn(None)
            return
        while self._due <= self._observed:
            self._due += min(self._due, LESSON_EVERY)
        self._policy.learn(list(self._history))

    def _node(self, number: int) -> Node:
        return self._cluster.numbered.get(number)

    def _numbers(self, nodes: Sequence[int]) -> frozenset[int]:
        return frozenset(self._node(node).number for node in nodes)

    def _all_of(self, node_set: int | None) -> frozenset[int]:
        if node_set is not None:
            return self._sets.get(node_set)
        return frozenset(node.number for node in self._cluster.nodes)

    def _asked(self, request_class: int, tenant: int) -> Request:
        if tenant < 1:
            raise UsageError("tenants are numbers from 1")
        return self._classes.get(request_class)


def _positions(numbers: Sequence[int] | None, gpus: int) -> Sequence[int]:
    if numbers is None:
        return [0] * gpus
    if len(numbers) != gpus or not all(0 <= number < GPUS_MAX for number in numbers):
        raise UsageError("there is an island and a NUMA node for each GPU, each a number from 0 to 15")
    return numbers


def _chosen(gpus: Sequence[int]) -> tuple[int, ...]:
    if len(set(gpus)) != len(gpus) or not all(0 <= number < GPUS_MAX for number in gpus):
        raise UsageError("GPUs are different numbers from 0 to 15")
    return tuple(gpus)


def _was_taken(node: Node, wanted: Request, gpus: tuple[int, ...]) -> bool:
    if wanted.gpus and not node.held.get(0 if wanted.is_fraction else wanted.gpus):
        return False
    if node.free_cpu_milli + wanted.cpu_milli > node.cpu_milli:
        return False
    if node.free_memory_mib + wanted.memory_mib > node.memory_mib:
        return False
    return all(
        number < len(node.gpus)
        and node.gpus[number].free_milli + wanted.gpu_milli <= FULL_MILLI
        and node.gpus[number].free_memory_mib + wanted.gpu_memory_mib <= node.gpu_memory_mib
        for number in gpus
    )


def _move(node: Node, wanted: Request, gpus: tuple[int, ...], *, sign: int) -> None:
    """What the request holds becomes free (1) or is taken (-1)."""
    node.free_cpu_milli += sign * wanted.cpu_milli
    node.free_memory_mib += sign * wanted.memory_mib
    for number in gpus:
        node.gpus[number].free_milli += sign * wanted.gpu_milli
        node.gpus[number].free_memory_mib += sign * wanted.gpu_memory_mib
    if wanted.gpus:
        kind = 0 if wanted.is_fraction else wanted.gpus
        node.held[kind] = node.held.get(kind, 0) - sign
