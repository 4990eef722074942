"""The default policy: keep up the supply of what is asked for.

Each request goes where it takes the least of the supplies that others depend on. docs/PLACEMENT.md has the
idea, native/scheduler/supply.cpp the fast version; every number here is one there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genie.scheduler.placement.gpus import nearest_like, tightest
from genie.scheduler.placement.protocol import ANY_MODEL, FULL_MILLI, MODELS_MAX
from genie.scheduler.placement.state import Cluster, Cost, Node, Policy, Request

SEQUENCES = 32
DRAWS = 60
# How far ahead to look: so many arrivals, and so many more for each free GPU.
ARRIVALS = 10
ARRIVALS_PER_GPU = 5
# Half a request is believed to have been there besides what was; counts are in halves to stay whole.
DOUBT = 2
STALE_PARTS = 10
_WORD = 2**64 - 1


@dataclass(frozen=True)
class Free:
    """What is free on a node, as a request without a tenant can see it; the largest GPUs first."""

    model: int
    gpu_memory_mib: int
    cpu_milli: int
    memory_mib: int
    gpu_milli: tuple[int, ...]

    @property
    def whole_gpus(self) -> int:
        return self.gpu_milli.count(FULL_MILLI)


@dataclass(frozen=True)
class Value:
    """What a node's free parts are good for: thousandths that will be filled, and room for several GPUs."""

    fill: int
    room: tuple[int, ...]


@dataclass
class Group:
    """Requests for so many GPUs of these models: what was asked for, and the supply when it was weighed."""

    models: int
    gpus: int
    volume: int
    supply: int = 0


class Supply(Policy):
    """See judge(); `gamma` is the weight of room for requests of several GPUs."""

    def __init__(self, cluster: Cluster, *, gamma: float) -> None:
        self._gamma = gamma
        self._cluster = cluster
        self._learn_history([])

    def judge(self, node: Node, wanted: Request, tenant: int) -> tuple[Cost, tuple[int, ...]] | None:
        if not node.fits_beside_gpus(wanted):
            return None
        usable = node.usable(wanted, tenant)
        places = [tightest(node, wanted, tenant)]
        if wanted.gpus == 1:
            places = [(number,) for number in usable]
        before = self._worth(_free(node), node.model)
        best: tuple[Cost, tuple[int, ...]] | None = None
        for gpus in places:
            if gpus is None:
                continue
            cost = before - self._worth(_free(node, wanted, gpus), node.model)
            if best is None or cost < best[0][0]:
                best = (cost, _tie(node, wanted)), gpus
        if best is None or wanted.gpus != 1:
            return best
        chosen = node.gpus[best[1][0]]
        alike = [
            number
            for number in usable
            if node.gpus[number].free_milli == chosen.free_milli
            and node.gpus[number].usable_memory_mib == chosen.usable_memory_mib
        ]
        return best[0], nearest_like(node, alike)

    def is_stale(self) -> bool:
        totals = self._totals()
        return any(
            abs(self._supply(group, totals) - group.supply) * STALE_PARTS > group.supply
            for group in self._groups
        )

    def learn(self, history: Sequence[Request] | None) -> None:
        if history is None:
            self._weigh()
        else:
            self._learn_history(list(history))

    def _learn_history(self, history: list[Request]) -> None:
        self._values: dict[Free, Value] = {}
        self._sequences = _drawn([wanted for wanted in history if wanted.gpus])
        self._drawn = list(dict.fromkeys(wanted for sequence in self._sequences for wanted in sequence))
        self._kinds = {(node.model, node.gpu_memory_mib) for node in self._cluster.nodes}
        self._asked = [wanted for wanted in history if wanted.gpus > 1]
        gpus_max = max((len(node.gpus) for node in self._cluster.nodes), default=0)
        powers = [gpus for gpus in (2, 4, 8, 16) if history and gpus <= gpus_max]
        self._several = list(dict.fromkeys(powers + [wanted.gpus for wanted in self._asked]))
        self._gather(history)
        self._weigh()

    def _gather(self, history: list[Request]) -> None:
        """What is asked for, in groups, in the order in which they first came."""
        self._groups: list[Group] = []
        for wanted in history:
            if wanted.gpus:
                self._ask(wanted.models, wanted.gpus, DOUBT * wanted.gpu_volume)
        if not history:
            return
        models = sorted({node.model for node in self._cluster.nodes if node.gpus})
        for gpus in self._several:
            if gpus.bit_count() == 1:
                self._ask(ANY_MODEL, gpus, gpus * FULL_MILLI)
                for model in models:
                    self._ask(1 << model, gpus, gpus * FULL_MILLI // len(models))
        shares = [wanted.gpu_milli for wanted in history if wanted.gpus == 1]
        for model in models if shares else ():
            self._ask(1 << model, 1, sum(shares) // len(shares))

    def _ask(self, models: int, gpus: int, volume: int) -> None:
        for group in self._groups:
            if (group.models, group.gpus) == (models, gpus):
                group.volume += volume
                return
        self._groups.append(Group(models, gpus, volume))

    def _weigh(self) -> None:
        """The pressure on a model: what each group asks for divided by what the group can still be given."""
        totals = self._totals()
        self._fill_weights = [0.0] * MODELS_MAX
        self._room_weights = [[0.0] * len(self._several) for _ in range(MODELS_MAX)]
        for group in self._groups:
            group.supply = self._supply(group, totals)
            if group.supply == 0:
                continue
            pressure = group.volume / group.supply
            for model in range(MODELS_MAX):
                if not group.models >> model & 1:
                    continue
                if group.gpus > 1:
                    self._room_weights[model][self._several.index(group.gpus)] += pressure
                else:
                    self._fill_weights[model] += pressure

    def _totals(self) -> dict[int, list[Value]]:
        totals: dict[int, list[Value]] = {}
        for node in self._cluster.nodes:
            if node.is_open:
                totals.setdefault(node.model, []).append(self._value(_free(node)))
        return totals

    def _supply(self, group: Group, totals: dict[int, list[Value]]) -> int:
        values = [value for model in totals if group.models >> model & 1 for value in totals[model]]
        if group.gpus == 1:
            return sum(value.fill for value in values)
        index = self._several.index(group.gpus)
        return sum(value.room[index] for value in values)

    def _worth(self, free: Free, model: int) -> float:
        value = self._value(free)
        room = 0.0
        for weight, amount in zip(self._room_weights[model], value.room, strict=True):
            room += weight * amount
        return self._fill_weights[model] * value.fill + self._gamma * room

    def _value(self, free: Free) -> Value:
        if free not in self._values:
            room = tuple(self._room(gpus, free) for gpus in self._several)
            self._values[free] = Value(self._fill(free), room)
        return self._values[free]

    def _room(self, gpus: int, free: Free) -> int:
        """The GPUs that requests for so many could have now, added up over the history's requests."""
        whole = free.whole_gpus
        slots = whole // gpus if gpus.bit_count() == 1 else 0
        for wanted in self._asked:
            if wanted.gpus != gpus or not wanted.models >> free.model & 1:
                continue
            fit = whole // gpus
            if wanted.cpu_milli:
                fit = min(fit, free.cpu_milli // wanted.cpu_milli)
            if wanted.memory_mib:
                fit = min(fit, free.memory_mib // wanted.memory_mib)
            slots += DOUBT * fit
        return slots * gpus * FULL_MILLI

    def _fill(self, free: Free) -> int:
        """The thousandths that the imagined arrivals put on such a node, all sequences together."""
        if (free.model, free.gpu_memory_mib) not in self._kinds:  # came after the last lesson
            return 0
        allowed = [(wanted, _need(wanted, free)) for wanted in self._drawn]
        needs = {wanted: need for wanted, need in allowed if need is not None}
        least = min(needs.values(), default=FULL_MILLI + 1)
        steps = ARRIVALS + ARRIVALS_PER_GPU * sum(m for m in free.gpu_milli if m >= least) // FULL_MILLI
        return sum(_filled(sequence[:steps], needs, free) for sequence in self._sequences)


def _tie(node: Node, wanted: Request) -> int:
    """The best fit: the least GPU left over, then the least CPU, then the rank."""
    gpu_left = node.free_gpu_milli - wanted.gpu_volume
    cpu_left = min((node.free_cpu_milli - wanted.cpu_milli) // 16, 0xFFFF)
    return gpu_left << 48 | cpu_left << 32 | node.rank


def _free(node: Node, wanted: Request | None = None, gpus: tuple[int, ...] = ()) -> Free:
    """The node, or the node as it will be when the request is on these GPUs."""
    left = []
    for number, gpu in enumerate(node.gpus):
        milli, memory_mib = gpu.free_milli, gpu.usable_memory_mib
        if wanted is not None and number in gpus:
            milli, memory_mib = milli - wanted.gpu_milli, memory_mib - wanted.gpu_memory_mib
        left.append(_usable_milli(milli, memory_mib, of_mib=node.gpu_memory_mib) if gpu.is_open else 0)
    return Free(
        model=node.model,
        gpu_memory_mib=node.gpu_memory_mib,
        cpu_milli=node.free_cpu_milli - (wanted.cpu_milli if wanted else 0),
        memory_mib=node.free_memory_mib - (wanted.memory_mib if wanted else 0),
        gpu_milli=tuple(sorted((milli for milli in left if milli > 0), reverse=True)),
    )


def _usable_milli(milli: int, memory_mib: int, *, of_mib: int) -> int:
    """A GPU with less memory than share free counts as the lesser."""
    return min(milli, memory_mib * FULL_MILLI // of_mib) if of_mib else milli


def _need(wanted: Request, free: Free) -> int | None:
    """The share that it needs on such a GPU, for memory's sake too; None when such a GPU will not do."""
    if not wanted.models >> free.model & 1 or wanted.gpu_memory_mib > free.gpu_memory_mib:
        return None
    if free.gpu_memory_mib == 0 or not wanted.is_fraction:
        return wanted.gpu_milli
    by_memory = -(-wanted.gpu_memory_mib * FULL_MILLI // free.gpu_memory_mib)
    return max(wanted.gpu_milli, by_memory)


def _filled(sequence: list[Request], needs: dict[Request, int], free: Free) -> int:
    """One sequence of arrivals, each to the tightest GPU; those of several GPUs to the first that will do."""
    gpus = list(free.gpu_milli)
    cpu_milli, memory_mib = free.cpu_milli, free.memory_mib
    for wanted in sequence:
        need = needs.get(wanted)
        if need is None or cpu_milli < wanted.cpu_milli or memory_mib < wanted.memory_mib:
            continue
        fitting = [number for number, milli in enumerate(gpus) if milli >= need]
        if len(fitting) < wanted.gpus:
            continue
        if wanted.gpus == 1:
            fitting = [min(fitting, key=lambda number: gpus[number])]
        for number in fitting[: wanted.gpus]:
            gpus[number] -= need
        cpu_milli -= wanted.cpu_milli
        memory_mib -= wanted.memory_mib
    return sum(free.gpu_milli) - sum(gpus)


def _drawn(deck: list[Request]) -> list[list[Request]]:
    """Sequences from one shuffled deck, so that each request of the history comes as often as any other."""
    state, deck = 0, list(deck)
    drawn: list[Request] = []
    while deck and len(drawn) < SEQUENCES * DRAWS:
        for left in range(len(deck), 1, -1):
            state = (state + 0x9E3779B97F4A7C15) & _WORD
            mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
            chosen = (mixed ^ (mixed >> 31)) % left
            deck[left - 1], deck[chosen] = deck[chosen], deck[left - 1]
        drawn += deck
    return [drawn[start : start + DRAWS] for start in range(0, SEQUENCES * DRAWS, DRAWS)] if drawn else []
