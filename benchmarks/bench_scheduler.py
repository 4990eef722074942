"""Duration of a placement decision on a cluster that is 80% allocated and changes between decisions.

    python benchmarks/bench_scheduler.py [--json] [--rounds N]

Nodes have 8 GPUs, and requests use every kind of constraint: GPU fractions, GPU memory, CPU, memory, models,
labels (node sets), tenants, racks, islands, blocked nodes and GPUs, GPU memory used by other programs. Before
each decision a job ends and refresh() runs once, with the budget of the controller; then the call of the
native placer from Python is timed. The figures of refresh() are the CPU time of one call: a call takes long
enough to be interrupted by other processes. A figure is the median of the percentiles of the rounds, its
spread theirs. The garbage collector is disabled.
With --rounds 1 only the smallest cluster is measured. Does not measure the quality of placements
(bench_placement.py) or the end-to-end latency of a job (bench_placements.py).
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

GPUS_PER_NODE = 8
ALLOCATED_SHARE_MAX = 0.8
GANG_NODES = 64
GANG_ALLOCATED_SHARE_MAX = 0.55
RACK_NODES = 250
TENANTS = 4
# Decisions and gangs per round, by number of nodes.
DECISIONS_BY_NODE_COUNT = {125: (2000, 300), 1250: (2000, 500), 12_500: (1000, 60)}
GOALS_US = {
    (1250, "single", "p50"): 2, (1250, "single", "p99"): 10,
    (1250, "fraction", "p50"): 2, (1250, "fraction", "p99"): 10,
    (1250, "supply", "p50"): 10, (1250, "supply", "p99"): 50,
    (1250, "gang", "p99"): 50, (1250, "supply_gang", "p99"): 50,
    (1250, "supply_refresh", "p99"): 1000,
    (12_500, "single", "p50"): 2, (12_500, "single", "p99"): 10,
    (12_500, "supply_single", "p50"): 2, (12_500, "supply_single", "p99"): 10,
    (12_500, "bestfit_refresh", "p99"): 1000, (12_500, "supply_refresh", "p99"): 1000,
}  # fmt: skip
PERCENTILES = ((0.5, "p50"), (0.99, "p99"), (1.0, "max"))
QUEUED_JOBS = 1000
GPU_MODELS = ({"gpu_memory_mib": 141_000}, {"gpu_memory_mib": 80_000}, {"gpu_memory_mib": 24_000})


@dataclass
class Allocation:
    """A placement to release later."""

    request_class: int
    places: list[tuple[int, tuple[int, ...]]]


class BenchmarkCluster:
    """A cluster with every kind of node, filled at random from a seed."""

    def __init__(self, library: Any, policy: str, nodes: int, *, seed: int, refresh_budget: int) -> None:
        self.placement = library.Placer(policy)
        self.refresh_budget = refresh_budget
        self.rng = random.Random(seed)
        self.nodes = nodes
        self.used_milli = 0
        self.allocations: list[Allocation] = []
        self.gangs: list[Allocation] = []
        for number in range(nodes):
            self._add_node(number)
        size = nodes // max(nodes // RACK_NODES, 1)
        racks = [range(first, min(first + size, nodes)) for first in range(0, nodes, size)]
        self.rack_node_sets = [self.placement.register_node_set(list(rack)) for rack in racks]
        labelled = [[n for n in range(nodes) if self.rng.random() < share] for share in (0.3, 0.7)]
        self.label_node_sets = [None, None, *map(self.placement.register_node_set, labelled)]
        self.volumes: dict[int, int] = {}
        self.single_gpu_classes, self.fraction_classes, self.other_classes = self._add_request_classes(
            labelled
        )
        self.gang_class = self._add_request_class(
            gpus=GPUS_PER_NODE, gpu_milli=1000, cpu_milli=64_000, memory_mib=500_000
        )
        self._allocate_until_full()

    def _add_node(self, number: int) -> None:
        model = self.rng.choices(range(len(GPU_MODELS)), [5, 3, 2])[0]
        islands = self.rng.choice(
            [[0] * GPUS_PER_NODE, [gpu // 4 for gpu in range(GPUS_PER_NODE)], list(range(GPUS_PER_NODE))]
        )
        self.placement.add_node(
            cpu_milli=128_000,
            memory_mib=1_000_000,
            gpus=GPUS_PER_NODE,
            model=model,
            islands=islands,
            numa=[gpu // 4 for gpu in range(GPUS_PER_NODE)],
            **GPU_MODELS[model],
        )
        if self.rng.random() < 0.02:
            self.placement.set_open(number, is_open=False)
        for gpu in range(GPUS_PER_NODE):
            kind = self.rng.random()
            if kind < 0.01:
                is_open, outside_mib = kind < 0.005, self.rng.choice([500, 20_000])
                self.placement.set_gpu(
                    number, gpu, is_open=is_open, memory_used_outside_cluster_mib=outside_mib
                )

    def _add_request_classes(
        self, labelled: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[int], list[int]]:
        """Request classes for one GPU, for a fraction of one, and for everything else."""
        host = [
            {"cpu_milli": 4000, "memory_mib": 30_000},
            {"cpu_milli": 12_000, "memory_mib": 90_000},
        ]
        limits: list[dict[str, Any]] = [{}, {"models_mask": 0b001}, {"models_mask": 0b011}]
        limits += [{"nodes": nodes} for nodes in labelled]
        singles = [
            self._add_request_class(gpus=1, gpu_milli=1000, **limit, **more)
            for limit in limits
            for more in host
        ]
        shares = [(100, 2000), (250, 0), (300, 20_000), (500, 10_000), (700, 0)]
        fractions = [
            self._add_request_class(gpus=1, gpu_milli=milli, gpu_memory_mib=mib, **limit, **host[0])
            for (milli, mib), limit in itertools.product(shares, limits[:3])
        ]
        others = [
            self._add_request_class(cpu_milli=2000, memory_mib=8000),
            self._add_request_class(cpu_milli=16_000),
        ]
        for gpus, one_island in itertools.product((2, 4), (False, True)):
            more = {"cpu_milli": 6000 * gpus, "memory_mib": 50_000 * gpus}
            others.append(self._add_request_class(gpus=gpus, gpu_milli=1000, one_island=one_island, **more))
        return singles, fractions, others

    def _add_request_class(self, **request: Any) -> int:
        number: int = self.placement.register_request_class(**request)
        self.volumes[number] = request.get("gpus", 0) * request.get("gpu_milli", 0)
        return number

    def _allocate_until_full(self) -> None:
        while self.used_milli < GANG_ALLOCATED_SHARE_MAX * self._total_gpu_milli and self.place_gang():
            pass
        while self.used_milli < ALLOCATED_SHARE_MAX * self._total_gpu_milli:
            for number in (*self.single_gpu_classes, *self.fraction_classes, *self.other_classes):
                self.place(number)

    @property
    def _total_gpu_milli(self) -> int:
        return self.nodes * GPUS_PER_NODE * 1000

    def place(self, request_class: int) -> tuple[float, float]:
        """Returns the duration of the decision and the CPU time of the refresh before it, in microseconds."""
        tenant, among = self.rng.randrange(1, TENANTS + 1), self.rng.choice(self.label_node_sets)
        self.placement.observe(request_class, tenant)
        refresh_us = self._refresh()
        began = time.perf_counter_ns()
        place = self.placement.place(request_class, tenant, among=among)
        decided = time.perf_counter_ns()
        if place is not None:
            self.allocations.append(Allocation(request_class, [place]))
            self.used_milli += self.volumes[request_class]
        return (decided - began) / 1000, refresh_us

    def _refresh(self) -> float:
        began = time.thread_time_ns()
        self.placement.precompute(self.refresh_budget)
        return (time.thread_time_ns() - began) / 1000

    def place_gang(self) -> float:
        """Returns the duration in microseconds; 0 if the gang does not fit."""
        tenant = self.rng.randrange(1, TENANTS + 1)
        self.placement.observe(self.gang_class, tenant)
        self._refresh()
        began = time.perf_counter_ns()
        places = self.placement.place_gang(
            self.gang_class, tenant, workers=GANG_NODES, domains=self.rack_node_sets
        )
        took_us = (time.perf_counter_ns() - began) / 1000
        if places is None:
            return 0.0
        self.gangs.append(Allocation(self.gang_class, places))
        self.used_milli += GANG_NODES * self.volumes[self.gang_class]
        return took_us

    def release_excess(self) -> None:
        """Ends random jobs until the allocation is at most ALLOCATED_SHARE_MAX."""
        while self.allocations and self.used_milli > ALLOCATED_SHARE_MAX * self._total_gpu_milli:
            self.release(self.allocations.pop(self.rng.randrange(len(self.allocations))))

    def release_gang(self) -> None:
        self.release(self.gangs.pop(self.rng.randrange(len(self.gangs))))

    def release(self, allocated: Allocation) -> None:
        for node, gpus in allocated.places:
            self.placement.release(allocated.request_class, node=node, gpus=gpus)
        self.used_milli -= len(allocated.places) * self.volumes[allocated.request_class]


def time_decisions(
    cluster: BenchmarkCluster, kinds: Sequence[int], count: int
) -> tuple[list[float], list[float]]:
    took_us, refreshes_us = [], []
    for _ in range(count):
        cluster.release_excess()
        decided_us, refresh_us = cluster.place(cluster.rng.choice(kinds))
        took_us.append(decided_us)
        refreshes_us.append(refresh_us)
    return took_us, refreshes_us


def time_gangs(cluster: BenchmarkCluster, count: int) -> list[float]:
    took_us = []
    for _ in range(count):
        cluster.release_gang()
        duration_us = cluster.place_gang()
        assert duration_us, "the gang must fit: one of the same size has just ended"
        took_us.append(duration_us)
    return took_us


def measure(library: Any, nodes: int, rounds: int) -> Iterator[report.Figure]:
    from genie.controller.placement.planner import CACHE_REFRESH_EVALUATIONS_MAX

    count, gang_count = DECISIONS_BY_NODE_COUNT[nodes]
    samples: dict[str, list[list[float]]] = {}
    for policy in ("bestfit", "supply"):
        cluster = BenchmarkCluster(
            library, policy, nodes, seed=nodes, refresh_budget=CACHE_REFRESH_EVALUATIONS_MAX
        )
        all_classes = cluster.single_gpu_classes + cluster.fraction_classes + cluster.other_classes
        kinds = {"single": cluster.single_gpu_classes, "fraction": cluster.fraction_classes}
        if policy == "supply":
            kinds = {"supply": all_classes, "supply_single": cluster.single_gpu_classes}
        time_decisions(cluster, all_classes, count)
        time_gangs(cluster, gang_count)
        for _ in range(rounds):
            for name, classes in kinds.items():
                took_us, refreshes_us = time_decisions(cluster, classes, count)
                samples.setdefault(name, []).append(took_us)
                samples.setdefault(f"{policy}_refresh", []).append(refreshes_us)
            name = "gang" if policy == "bestfit" else "supply_gang"
            samples.setdefault(name, []).append(time_gangs(cluster, gang_count))
    for name, runs in samples.items():
        for share, text in PERCENTILES:
            if text == "max" and not name.endswith("_refresh"):
                continue
            values = [report.percentile(run, share) for run in runs]
            limit = GOALS_US.get((nodes, name, text))
            yield report.make_figure(
                f"{name}_{nodes}_nodes_{text}",
                statistics.median(values),
                samples=values,
                unit="us",
                goal=None if limit is None else report.value_at_most(limit),
            )


def measure_pass(library: Any, rounds: int) -> report.Figure:
    """Duration of a scheduling pass (Python, with native placers) per queued job."""
    from genie.scheduler.cluster.allocations import ClusterAllocations
    from genie.scheduler.request import GpuFacts, JobRequest, NodeFacts, Shape
    from genie.scheduler.rules import Rules
    from genie.scheduler.scheduler import Scheduler

    values = []
    for _ in range(rounds):
        allocations = ClusterAllocations(library.Placer, policy="supply")
        scheduler = Scheduler(allocations, Rules())
        rng = random.Random(0)
        gpus = tuple(GpuFacts("H200", "nvidia", 141_000, (9, 0)) for _ in range(GPUS_PER_NODE))
        for number in range(QUEUED_JOBS // (2 * GPUS_PER_NODE)):
            scheduler.set_node(NodeFacts(f"n{number}", 128_000, 1_000_000, gpus, rack=f"r{number % 4}"))
        for number in range(QUEUED_JOBS):
            shape = Shape(rng.choice([1, 1, 1, 2, 4]), rng.choice([1000, 1000, 500]), cpu_milli=4000)
            tenant = f"t{number % TENANTS}"
            scheduler.submit(JobRequest(f"j{number}", tenant, number, shape, time_limit_s=3600.0))
        began = time.perf_counter_ns()
        scheduler.decide(0.0)
        values.append((time.perf_counter_ns() - began) / 1000 / QUEUED_JOBS)
    name = f"pass_{QUEUED_JOBS}_jobs_each"
    return report.make_figure(name, statistics.median(values), samples=values, unit="us")


def main() -> int:
    options = report.make_parser((__doc__ or "").splitlines()[0], rounds=5).parse_args()
    with report.use_temporary_state():
        from genie.native import libraries

        library = libraries.load("genie_scheduler")
        gc.collect()
        gc.disable()
        sizes = list(DECISIONS_BY_NODE_COUNT)[: 1 if options.rounds == 1 else None]
        figures = [figure for nodes in sizes for figure in measure(library, nodes, options.rounds)]
        gc.enable()
        figures.append(measure_pass(library, options.rounds))
        return report.print_figures(figures, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
