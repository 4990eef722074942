"""How long a placement decision takes, on a cluster that is four fifths full and changes all the time.

    python benchmarks/bench_scheduler.py [--json] [--rounds N]

Nodes of 8 GPUs, with everything that a request can ask for in use: shares, GPU memory, CPU, memory, models,
labels (node sets), tenants, racks, islands, closed nodes and GPUs, memory used from outside. Before each
decision something ends, and refresh() prepares what is next, which is not on the clock; then the call of the
native placer from Python is timed. A figure is the median of the rounds' percentiles, its spread is theirs.
The garbage collector does not run meanwhile. One round is a look at the smallest cluster only. Not for: how
good the places are (bench_placement.py), and what a submitted job takes end to end (bench_placements.py).
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import report

GPUS = 8
FULL_SHARE = 0.8
GANG_NODES = 64
GANG_SHARE = 0.55
RACK_NODES = 250
TENANTS = 4
# Decisions a round and gangs a round, by the number of nodes. Only the middle one has goals.
SIZES = {125: (2000, 300), 1250: (2000, 500), 12_500: (300, 60)}
GOAL_NODES = 1250
GOALS = {
    ("single", "p50"): 2, ("single", "p99"): 10,
    ("fraction", "p50"): 2, ("fraction", "p99"): 10,
    ("supply", "p50"): 10, ("supply", "p99"): 50,
    ("gang", "p99"): 50, ("supply_gang", "p99"): 50,
}  # fmt: skip
QUEUED = 1000
MODELS = ({"gpu_memory_mib": 141_000}, {"gpu_memory_mib": 80_000}, {"gpu_memory_mib": 24_000})


@dataclass
class Held:
    """What is to be given back."""

    request_class: int
    places: list[tuple[int, tuple[int, ...]]]


class World:
    """A cluster with all that there can be, filled by chance from a seed."""

    def __init__(self, library: Any, policy: str, nodes: int, *, seed: int) -> None:
        self.placer = library.Placement(policy)
        self.chance = random.Random(seed)
        self.nodes = nodes
        self.used_milli = 0
        self.held: list[Held] = []
        self.gangs: list[Held] = []
        for number in range(nodes):
            self._add_node(number)
        size = nodes // max(nodes // RACK_NODES, 1)
        racks = [range(first, min(first + size, nodes)) for first in range(0, nodes, size)]
        self.racks = [self.placer.node_set(list(rack)) for rack in racks]
        labelled = [[n for n in range(nodes) if self.chance.random() < share] for share in (0.3, 0.7)]
        self.labels = [None, None, *map(self.placer.node_set, labelled)]
        self.volumes: dict[int, int] = {}
        self.singles, self.fractions, self.others = self._classes(labelled)
        self.gang = self._class(gpus=GPUS, gpu_milli=1000, cpu_milli=64_000, memory_mib=500_000)
        self._fill()

    def _add_node(self, number: int) -> None:
        model = self.chance.choices(range(len(MODELS)), [5, 3, 2])[0]
        islands = self.chance.choice([[0] * GPUS, [gpu // 4 for gpu in range(GPUS)], list(range(GPUS))])
        self.placer.add_node(
            cpu_milli=128_000,
            memory_mib=1_000_000,
            gpus=GPUS,
            model=model,
            islands=islands,
            numa=[gpu // 4 for gpu in range(GPUS)],
            **MODELS[model],
        )
        if self.chance.random() < 0.02:
            self.placer.set_open(number, is_open=False)
        for gpu in range(GPUS):
            kind = self.chance.random()
            if kind < 0.01:
                is_open, outside_mib = kind < 0.005, self.chance.choice([500, 20_000])
                self.placer.set_gpu(number, gpu, is_open=is_open, memory_outside_mib=outside_mib)

    def _classes(self, labelled: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
        """For one GPU, for a share of one, and for all the rest."""
        beside = [{"cpu_milli": 4000, "memory_mib": 30_000}, {"cpu_milli": 12_000, "memory_mib": 90_000}]
        limits: list[dict[str, Any]] = [{}, {"models": 0b001}, {"models": 0b011}]
        limits += [{"nodes": nodes} for nodes in labelled]
        singles = [
            self._class(gpus=1, gpu_milli=1000, **limit, **more) for limit in limits for more in beside
        ]
        shares = [(100, 2000), (250, 0), (300, 20_000), (500, 10_000), (700, 0)]
        fractions = [
            self._class(gpus=1, gpu_milli=milli, gpu_memory_mib=mib, **limit, **beside[0])
            for (milli, mib), limit in itertools.product(shares, limits[:3])
        ]
        others = [self._class(cpu_milli=2000, memory_mib=8000), self._class(cpu_milli=16_000)]
        for gpus, one_island in itertools.product((2, 4), (False, True)):
            more = {"cpu_milli": 6000 * gpus, "memory_mib": 50_000 * gpus}
            others.append(self._class(gpus=gpus, gpu_milli=1000, one_island=one_island, **more))
        return singles, fractions, others

    def _class(self, **wanted: Any) -> int:
        number: int = self.placer.request_class(**wanted)
        self.volumes[number] = wanted.get("gpus", 0) * wanted.get("gpu_milli", 0)
        return number

    def _fill(self) -> None:
        while self.used_milli < GANG_SHARE * self._all_milli and self.place_gang():
            pass
        while self.used_milli < FULL_SHARE * self._all_milli:
            for number in (*self.singles, *self.fractions, *self.others):
                self.place(number)

    @property
    def _all_milli(self) -> int:
        return self.nodes * GPUS * 1000

    def place(self, request_class: int) -> tuple[float, float]:
        """How long the decision and the preparation before it took, in microseconds."""
        tenant, among = self.chance.randrange(1, TENANTS + 1), self.chance.choice(self.labels)
        self.placer.observe(request_class, tenant)
        began = time.perf_counter_ns()
        self.placer.refresh()
        prepared = time.perf_counter_ns()
        place = self.placer.place(request_class, tenant, among=among)
        decided = time.perf_counter_ns()
        if place is not None:
            self.held.append(Held(request_class, [place]))
            self.used_milli += self.volumes[request_class]
        return (decided - prepared) / 1000, (prepared - began) / 1000

    def place_gang(self) -> float:
        """How long it took in microseconds; 0 when it fits nowhere."""
        tenant = self.chance.randrange(1, TENANTS + 1)
        self.placer.observe(self.gang, tenant)
        self.placer.refresh()
        began = time.perf_counter_ns()
        places = self.placer.place_gang(self.gang, tenant, workers=GANG_NODES, domains=self.racks)
        took_us = (time.perf_counter_ns() - began) / 1000
        if places is None:
            return 0.0
        self.gangs.append(Held(self.gang, places))
        self.used_milli += GANG_NODES * self.volumes[self.gang]
        return took_us

    def end_some(self) -> None:
        """Until it is no fuller than it should be."""
        while self.held and self.used_milli > FULL_SHARE * self._all_milli:
            self.end(self.held.pop(self.chance.randrange(len(self.held))))

    def end_gang(self) -> None:
        self.end(self.gangs.pop(self.chance.randrange(len(self.gangs))))

    def end(self, held: Held) -> None:
        for node, gpus in held.places:
            self.placer.release(held.request_class, node=node, gpus=gpus)
        self.used_milli -= len(held.places) * self.volumes[held.request_class]


def decisions(world: World, kinds: Sequence[int], count: int) -> tuple[list[float], list[float]]:
    took_us, prepared_us = [], []
    for _ in range(count):
        world.end_some()
        decided, prepared = world.place(world.chance.choice(kinds))
        took_us.append(decided)
        prepared_us.append(prepared)
    return took_us, prepared_us


def gangs(world: World, count: int) -> list[float]:
    took_us = []
    for _ in range(count):
        world.end_gang()
        took = world.place_gang()
        assert took, "a gang of that size has just ended in one of the racks"
        took_us.append(took)
    return took_us


def measured(library: Any, nodes: int, rounds: int) -> Iterator[report.Figure]:
    count, gang_count = SIZES[nodes]
    samples: dict[str, list[list[float]]] = {}
    for policy in ("bestfit", "supply"):
        world = World(library, policy, nodes, seed=nodes)
        everything = world.singles + world.fractions + world.others
        kinds = {"single": world.singles, "fraction": world.fractions}
        if policy == "supply":
            kinds = {"supply": everything}
        decisions(world, everything, count)
        gangs(world, gang_count)
        for _ in range(rounds):
            for name, classes in kinds.items():
                took_us, prepared_us = decisions(world, classes, count)
                samples.setdefault(name, []).append(took_us)
                samples.setdefault(f"{policy}_refresh", []).append(prepared_us)
            name = "gang" if policy == "bestfit" else "supply_gang"
            samples.setdefault(name, []).append(gangs(world, gang_count))
    for name, runs in samples.items():
        for share, text in ((0.5, "p50"), (0.99, "p99")):
            values = [report.percentile(run, share) for run in runs]
            limit = GOALS.get((name, text)) if nodes == GOAL_NODES else None
            yield report.figure(
                f"{name}_{nodes}_nodes_{text}",
                statistics.median(values),
                samples=values,
                unit="us",
                goal=None if limit is None else report.value_at_most(limit),
            )


def passes(library: Any, rounds: int) -> report.Figure:
    """The scheduler's pass in plain Python over native placers, for each of the jobs that wait."""
    from genie.scheduler.book import Book
    from genie.scheduler.request import GpuFacts, NodeFacts, Request, Shape
    from genie.scheduler.scheduler import Rules, Scheduler

    values = []
    for _ in range(rounds):
        book = Book(library.Placement, policy="supply")
        scheduler = Scheduler(book, Rules())
        chance = random.Random(0)
        gpus = tuple(GpuFacts("H200", "nvidia", 141_000, (9, 0)) for _ in range(GPUS))
        for number in range(QUEUED // (2 * GPUS)):
            scheduler.set_node(NodeFacts(f"n{number}", 128_000, 1_000_000, gpus, rack=f"r{number % 4}"))
        for number in range(QUEUED):
            shape = Shape(chance.choice([1, 1, 1, 2, 4]), chance.choice([1000, 1000, 500]), cpu_milli=4000)
            tenant = f"t{number % TENANTS}"
            scheduler.submit(Request(f"j{number}", tenant, number, shape, time_limit_s=3600.0))
        began = time.perf_counter_ns()
        scheduler.decide(0.0)
        values.append((time.perf_counter_ns() - began) / 1000 / QUEUED)
    name = f"pass_{QUEUED}_jobs_each"
    return report.figure(name, statistics.median(values), samples=values, unit="us")


def main() -> int:
    options = report.options(__doc__ or "", rounds=5).parse_args()
    with report.own_place():
        from genie.runtime import native

        library = native.load("genie_scheduler")
        gc.collect()
        gc.disable()
        sizes = list(SIZES)[: 1 if options.rounds == 1 else None]
        figures = [figure for nodes in sizes for figure in measured(library, nodes, options.rounds)]
        gc.enable()
        figures.append(passes(library, options.rounds))
        return report.conclude(figures, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
