"""GPU allocation that each placement policy reaches before requests stop fitting, and its decision time.

    python benchmarks/bench_placement.py [--json] [--traces DIR] [--workload W] [--policy P] [--seeds A:B]

DIR contains the openb node list and pod lists, or a subfolder openb with them, and optionally published.csv.
For each workload and policy: the allocated percentage at the point where requests reach 100% of all GPUs,
averaged over the seeds, with the published value as the baseline. The default seeds are those of the
published runs: requests arrive and nodes are ranked in the same order, and only the policy `random` is
random. The default policy, supply, is also compared with FGD: the published value and our own FGD on the
same arrivals.
Without DIR, the workload is synthetic, decisions are timed, and --rounds is the number of seeds.

Does not simulate the end of jobs.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import report

PUBLISHED_POLICIES = ("random", "dotprod", "clustering", "packing", "bestfit", "fgd")
# Variants of supply with one part disabled. Run only if selected with --policy.
ABLATIONS: dict[str, dict[str, Any]] = {
    "supply": {},
    "supply-no-room": {"gamma": 0.0},
    "supply-one-pressure": {"by_model": False},
    "supply-one-step": {"sequence_length_max": 1},
}
DISTANCE_MAX_BY_POLICY = {"fgd": 0.2}
GAIN_GOAL_MIN = 1.6
DROPS_OVER_FGD_MAX = 5
LATENCY_NODES = 1250


class PlacementBenchmark:
    """Replays workloads; the result of each workload and policy is cached."""

    def __init__(self, seeds: Sequence[int], published: dict[tuple[str, str], float]) -> None:
        from genie.native import libraries

        self._scheduler_library = libraries.load("genie_scheduler")
        self._seeds = seeds
        self._published_figures = published
        self._cached_replays: dict[tuple[str, str], list[Any]] = {}
        self.gains: list[float] = []

    def replay_all_seeds(self, name: str, workload: Any, policy: str) -> list[Any]:
        from genie.sim.replay import replay

        def make_placement(seed: int, typical: Sequence[Any]) -> Any:
            shapes = [shape.as_tuple() for shape in typical]
            kind, options = policy.partition("-")[0], ABLATIONS.get(policy, {})
            return self._scheduler_library.Placer(kind, seed=seed, typical=shapes, **options)

        if (name, policy) not in self._cached_replays:
            runs = [replay(workload, make_placement, seed=seed) for seed in self._seeds]
            self._cached_replays[name, policy] = runs
        return self._cached_replays[name, policy]

    def measure_policy(self, name: str, workload: Any, policy: str) -> Iterator[report.Figure]:
        filled = [run.allocated_pct for run in self.replay_all_seeds(name, workload, policy)]
        ours = policy in ABLATIONS
        baseline = self._published_figures.get((name, "fgd" if ours else policy))
        goal = None
        if baseline is not None and not ours:
            goal = report.distance_at_most(DISTANCE_MAX_BY_POLICY.get(policy, 0.5))
        yield report.make_figure(
            f"{name}_{policy}",
            statistics.fmean(filled),
            unit="%",
            samples=filled,
            baseline=baseline,
            goal=goal,
        )
        if ours:
            yield from self._compare_with_fgd(name, workload, policy)

    def _compare_with_fgd(self, name: str, workload: Any, policy: str) -> Iterator[report.Figure]:
        runs, fgd = (
            self.replay_all_seeds(name, workload, policy),
            self.replay_all_seeds(name, workload, "fgd"),
        )
        pairs = list(zip(runs, fgd, strict=True))
        over_own = [one.allocated_pct - other.allocated_pct for one, other in pairs]
        drops = [one.dropped_multi_gpu - other.dropped_multi_gpu for one, other in pairs]
        judged = policy == "supply"
        published = self._published_figures.get((name, "fgd"))
        if published is not None:
            gains = [run.allocated_pct - published for run in runs]
            if judged:
                self.gains.append(statistics.fmean(gains))
            goal = report.value_at_least(0) if judged else None
            yield points_figure(f"{name}_{policy}_over_published_fgd_min", min(gains), gains, goal)
        yield points_figure(f"{name}_{policy}_over_own_fgd_min", min(over_own), over_own, None)
        goal = report.value_at_most(DROPS_OVER_FGD_MAX) if judged and published is not None else None
        yield report.make_figure(
            f"{name}_{policy}_multi_gpu_drops_over_fgd_max",
            max(drops),
            samples=drops,
            unit="requests",
            goal=goal,
        )


def points_figure(
    name: str, value: float, samples: Sequence[float], goal: report.Goal | None
) -> report.Figure:
    return report.make_figure(name, value, samples=samples, unit="points", goal=goal)


def measure_latency(policy: str, *, decisions: int) -> Iterator[report.Figure]:
    """Decision time with 1,250 nodes of 8 GPUs that are 75% allocated; refresh() runs between decisions."""
    from genie.native import libraries
    from genie.sim.workloads.synthetic import synthetic_workload

    workload = synthetic_workload(nodes=LATENCY_NODES, pods=decisions * 4, seed=0)
    placer = libraries.load("genie_scheduler").Placer(policy)
    for number in range(LATENCY_NODES):
        cpu, memory = ((96000, 400000), (128000, 800000))[number % 2]
        placer.add_node(cpu_milli=cpu, memory_mib=memory, gpus=8, gpu_memory_mib=80000, model=number % 3)
    classes: dict[Any, int] = {}
    for pod in dict.fromkeys(workload.pods):
        other = {
            "cpu_milli": pod.cpu_milli,
            "memory_mib": pod.memory_mib,
            "models_mask": workload.allowed_models_mask(pod),
        }
        memory = pod.gpu_milli * 70 if 0 < pod.gpu_milli < 1000 else 0
        classes[pod] = placer.register_request_class(
            gpus=pod.gpus, gpu_milli=pod.gpu_milli, gpu_memory_mib=memory, **other
        )
    placed: list[tuple[int, Any]] = []
    durations_us: list[float] = []
    volume = 0
    for pod in workload.pods:
        number = classes[pod]
        placer.observe(number, 1)
        placer.precompute(20000)
        start_ns = time.perf_counter_ns()
        place = placer.place(number, 1)
        durations_us.append((time.perf_counter_ns() - start_ns) / 1000)
        if place is not None:
            placed.append((pod, place))
            volume += pod.total_gpu_milli
        while volume > LATENCY_NODES * 8 * 750:
            ended, (node, gpus) = placed.pop(len(placed) // 2)
            placer.release(classes[ended], node=node, gpus=gpus)
            volume -= ended.total_gpu_milli
    full = durations_us[len(durations_us) // 2 :]
    for label, share, samples in (("p50", 0.5, full), ("p99", 0.99, report.p99_samples(full))):
        value = report.percentile(full, share)
        yield report.make_figure(f"decision_{policy}_{label}", value, samples=samples, unit="us")


def read_published(folder: Path) -> dict[tuple[str, str], float]:
    path = next(
        (at for at in (folder / "published.csv", folder.parent / "published.csv") if at.is_file()), None
    )
    if path is None:
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {(row["workload"], row["policy"]): float(row["allocated_pct_mean"]) for row in rows}


def load_workloads(folder: Path | None, wanted: str | None) -> Iterator[tuple[str, Any]]:
    from genie.errors import UsageError
    from genie.sim.workloads import traces
    from genie.sim.workloads.synthetic import synthetic_workload
    from genie.sim.workloads.traces import Workload

    if folder is None:
        yield "synthetic", synthetic_workload(nodes=60, pods=1000, seed=0)
        return
    openb = folder / "openb" if (folder / "openb").is_dir() else folder
    nodes = traces.read_openb_nodes(openb / traces.NODE_LIST_FILE)
    found = traces.find_openb_pod_lists(openb)
    if not found:
        raise UsageError(f"no openb pod list found in {str(openb)!r}")
    if wanted is not None and wanted not in found:
        raise UsageError(f"unknown workload {wanted!r} in {str(openb)!r} (available: {', '.join(found)})")
    for name, path in found.items():
        if wanted in (None, name):
            yield name, Workload(nodes, traces.read_openb_pods(path))


def parse_seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range A:B of whole numbers with A < B")
    return range(int(first), int(end))


def _default_seeds(given: argparse.Namespace) -> range:
    from genie.sim.replay import PUBLISHED_SEEDS

    return PUBLISHED_SEEDS if given.traces else range(given.rounds)


def measure_all(given: argparse.Namespace) -> Iterator[report.Figure]:
    published = read_published(given.traces) if given.traces else {}
    bench = PlacementBenchmark(given.seeds or _default_seeds(given), published)
    chosen = [given.policy] if given.policy else [*PUBLISHED_POLICIES, "supply"]
    names = set()
    for name, workload in load_workloads(given.traces, given.workload):
        names.add(name)
        for policy in chosen:
            yield from bench.measure_policy(name, workload, policy)
    if bench.gains:
        whole = names >= {workload for workload, _ in published}
        goal = report.value_at_least(GAIN_GOAL_MIN) if whole else None
        yield points_figure(
            "supply_over_published_fgd_mean", statistics.fmean(bench.gains), bench.gains, goal
        )
    if given.traces is None:
        for policy in ("bestfit", "supply"):
            yield from measure_latency(policy, decisions=3000 if given.rounds > 1 else 200)


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=10)
    parser.add_argument("--traces", type=Path, help="folder of the openb lists (default: synthetic workload)")
    parser.add_argument("--workload", help="run only this workload, such as default or gpuspec33")
    parser.add_argument("--policy", choices=[*PUBLISHED_POLICIES, *ABLATIONS], help="run only this policy")
    parser.add_argument(
        "--seeds", type=parse_seeds, help="seeds A to B-1, as A:B (default: the published ones)"
    )
    given = parser.parse_args()
    from genie.errors import UsageError

    try:
        return report.print_figures(measure_all(given), as_json=given.json)
    except UsageError as error:
        parser.error(f"--traces {given.traces}: {error}")


if __name__ == "__main__":
    sys.exit(main())
