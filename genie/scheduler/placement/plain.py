"""The placer in plain Python: clear and slow. native/scheduler does the same fast.

Every choice looks at every node anew, so there is nothing here that could be out of date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from genie.errors import UsageError
from genie.scheduler.placement import published, supply
from genie.scheduler.placement.protocol import (
    ANY_MODEL,
    FULL_MILLI,
    GPUS_MAX,
    MODELS_MAX,
    UNLIMITED,
    NodeState,
    Place,
    TypicalShape,
)
from genie.scheduler.placement.state import Cluster, Cost, Gpu, Node, Policy, Request

HISTORY = 200
FIRST_LESSON = 25
LESSON_EVERY = 200


class PlainPlacer:
    """See protocol.Placer."""

    def __init__(self, policy: str, *, typical: Sequence[TypicalShape] = (), gamma: float = 0.05) -> None:
        self._cluster = Cluster()
        makers = published.POLICIES | {"supply": lambda _: supply.Supply(self._cluster, gamma=gamma)}
        if policy not in makers:
            raise UsageError(f"there is no policy '{policy}'")
        self._policy: Policy = makers[policy](typical)
        self._learns = policy == "supply"
        self._history: deque[int] = deque(maxlen=HISTORY)
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
    ) -> int:
        if min(cpu_milli, memory_mib, gpu_memory_mib) < 0 or not 0 <= gpus <= GPUS_MAX:
            raise UsageError("a node has 0 to 16 GPUs, and no amount of it is negative")
        if not 0 <= model < MODELS_MAX:
            raise UsageError("a GPU model is a number from 0 to 63")
        number = len(self._cluster.nodes)
        devices = [Gpu(FULL_MILLI, gpu_memory_mib) for _ in range(gpus)]
        rank = number if rank < 0 else rank
        node = Node(number, cpu_milli, memory_mib, gpu_memory_mib, model, rank, devices)
        self._cluster.nodes.append(node)
        return number

    def set_open(self, node: int, *, is_open: bool) -> None:
        self._node(node).is_open = is_open

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
        if not 0 <= gpus <= GPUS_MAX:
            raise UsageError("a request has 0 to 16 GPUs of one node")
        if gpus > 0 and not 1 <= gpu_milli <= FULL_MILLI:
            raise UsageError("the share of a GPU is 1 to 1000 thousandths")
        if gpus == 0 and (gpu_milli or gpu_memory_mib):
            raise UsageError("a request without GPUs has no share and no memory of them")
        if min(gpu_memory_mib, cpu_milli, memory_mib) < 0:
            raise UsageError("no amount of a request is negative")
        allowed = None if nodes is None else frozenset(self._node(node).number for node in nodes)
        self._cluster.classes.append(
            Request(gpus, gpu_milli, gpu_memory_mib, cpu_milli, memory_mib, models, allowed)
        )
        return len(self._cluster.classes) - 1

    def take(self, request_class: int, tenant: int, *, node: int, gpus: Sequence[int]) -> None:
        wanted, target = self._class(request_class), self._node(node)
        if tenant < 1:
            raise UsageError("tenants are numbers from 1")
        chosen = _chosen(gpus)
        fits = target.fits_beside_gpus(wanted) and len(chosen) == wanted.gpus
        fits = fits and all(g < len(target.gpus) and target.gpus[g].fits(wanted, tenant) for g in chosen)
        if not fits:
            raise UsageError("the request does not fit there")
        _move(target, wanted, chosen, sign=-1)
        for number in chosen:
            target.gpus[number].tenant = tenant

    def release(self, request_class: int, *, node: int, gpus: Sequence[int]) -> None:
        wanted, target = self._class(request_class), self._node(node)
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
        self._class(request_class)
        if tenant < 1:
            raise UsageError("tenants are numbers from 1")
        if self._learns:
            self._history.append(request_class)
            self._observed += 1

    def choose(self, request_class: int, tenant: int) -> Place | None:
        wanted = self._class(request_class)
        if tenant < 1:
            raise UsageError("tenants are numbers from 1")
        if self._observed >= self._due + LESSON_EVERY if self._is_refreshed else self._is_lesson_due():
            self._learn()
        best: tuple[Cost, int, tuple[int, ...]] | None = None
        for node in self._cluster.nodes:
            found = self._policy.judge(node, wanted, tenant)
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], node.number, found[1])
        return None if best is None else best[1:]

    def place(self, request_class: int, tenant: int) -> Place | None:
        chosen = self.choose(request_class, tenant)
        if chosen is not None:
            self.take(request_class, tenant, node=chosen[0], gpus=chosen[1])
        return chosen

    def refresh(self, budget: int = UNLIMITED) -> bool:
        """All at once: a budget is for those who are in a hurry."""
        self._is_refreshed = True
        if self._is_lesson_due():
            self._learn()
        return True

    def _is_lesson_due(self) -> bool:
        return self._learns and (self._observed >= self._due or self._policy.is_stale())

    def _learn(self) -> None:
        if self._observed < self._due:
            self._policy.learn(self._cluster, None)
            return
        while self._due <= self._observed:
            self._due += min(self._due, LESSON_EVERY)
        self._policy.learn(self._cluster, list(self._history))

    def _node(self, number: int) -> Node:
        if not 0 <= number < len(self._cluster.nodes):
            raise UsageError("there is no such node")
        return self._cluster.nodes[number]

    def _class(self, number: int) -> Request:
        if not 0 <= number < len(self._cluster.classes):
            raise UsageError("there is no such request class")
        return self._cluster.classes[number]


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
