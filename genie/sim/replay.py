"""Replays a workload in which requests arrive and never leave, and says how much of the cluster they fill.

The order of arrival is the workload shuffled, then requests drawn from it at random, until what was asked
for, dropped requests too, reaches `REQUESTED_PCT_END` of the GPUs; where the workload itself asks for more
than that, some of it is left out at random. Chance is drawn as the published runs drew it: with
`PUBLISHED_SEEDS` and a published list the arrivals and the ranks are theirs, one by one. The loop is here;
the decisions are the placer's. Not for: jobs that end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from genie.errors import UsageError
from genie.scheduler.placement.protocol import ANY_MODEL, Placer, TypicalShape
from genie.sim.draws import Draws
from genie.sim.traces import TraceNode, TracePod

REQUESTED_PCT_END = 130.0
READ_AT_PCT = 100
TYPICAL_PCT = 95
PUBLISHED_SEEDS = range(42, 52)
# Numbers that the published program draws for other ends. Before the arrivals it logs one. Those before the
# ranks are likely the time-outs of its watches; that they are ten was found by trying 0 to 59 on two runs,
# and the other runs agree with it.
_DRAWN_BEFORE_ARRIVALS = 1
_DRAWN_BEFORE_RANKS = 10
_TENANT = 1

MakePlacer = Callable[[int, Sequence[TypicalShape]], Placer]
"""Makes an empty placer from a seed and the typical requests, which published FGD is told beforehand."""


@dataclass(frozen=True)
class Outcome:
    """`allocated_pct` is the mean over the arrivals with which requests round to 100% of all GPUs."""

    allocated_pct: float
    arrivals: int
    dropped: int
    dropped_multi_gpu: int


@dataclass(frozen=True)
class Workload:
    """Nodes, and the requests that come to them."""

    nodes: Sequence[TraceNode]
    pods: Sequence[TracePod]
    model_ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        if not any(node.gpus for node in self.nodes) or not any(pod.gpus for pod in self.pods):
            raise UsageError("a workload needs nodes with GPUs and requests for them")
        models = sorted({node.model for node in self.nodes})
        object.__setattr__(self, "model_ids", {model: number for number, model in enumerate(models)})

    @property
    def gpu_milli(self) -> int:
        return 1000 * sum(node.gpus for node in self.nodes)

    def model_set(self, pod: TracePod) -> int:
        """The admissible models as bits. A model that no node has is no bit."""
        if not pod.models:
            return ANY_MODEL
        return sum(1 << self.model_ids[model] for model in set(pod.models) if model in self.model_ids)

    def typical(self, percent: int = TYPICAL_PCT) -> list[TypicalShape]:
        """The most frequent shapes that together make up so much of the workload, with their shares of it.

        The last bit of a share and the order in which shares are added decide some of FGD's scores, so both
        are as published: models that are written differently make two shapes.
        """
        counts = Counter(
            (pod.cpu_milli, pod.gpu_milli, pod.gpus, "|".join(pod.models), self.model_set(pod))
            for pod in self.pods
        )
        order = sorted(counts, key=lambda shape: (counts[shape], shape), reverse=True)
        sums = list(accumulate(counts[shape] for shape in order))
        needed = sum(1 for total in sums if total * 100 < percent * len(self.pods)) + 1
        covered = sums[min(needed, len(sums)) - 1] / len(self.pods)
        return [
            TypicalShape(
                gpus=shape[2],
                gpu_milli=shape[1],
                cpu_milli=shape[0],
                models=shape[4],
                share=counts[shape] / len(self.pods) / covered,
            )
            for shape in order[:needed]
        ]


def replay(
    workload: Workload, make_placer: MakePlacer, *, seed: int, requested_pct_end: float = REQUESTED_PCT_END
) -> Outcome:
    """One run. The same seed gives the same arrivals whatever the placer."""
    draws = Draws(seed)
    draws.skip(_DRAWN_BEFORE_ARRIVALS)
    capacity = workload.gpu_milli
    arrivals = _arrivals(workload, draws, requested_milli_end=requested_pct_end * capacity / 100)
    draws.skip(_DRAWN_BEFORE_RANKS)
    placer = make_placer(seed, workload.typical())
    _add_nodes(placer, workload, draws.permutation(len(workload.nodes)))
    classes = _register(placer, workload)
    requested = allocated = dropped = dropped_multi = 0
    readings: dict[int, list[float]] = {}
    for pod in arrivals:
        requested += pod.gpu_volume_milli
        number = classes[pod]
        placer.observe(number, _TENANT)
        if placer.place(number, _TENANT) is not None:
            allocated += pod.gpu_volume_milli
        else:
            dropped += 1
            dropped_multi += pod.gpus > 1
        if abs(off := round(requested * 100 / capacity) - READ_AT_PCT) <= 1:
            readings.setdefault(off, []).append(allocated * 100 / capacity)
    return Outcome(_read_off(readings), len(arrivals), dropped, dropped_multi)


def _read_off(readings: dict[int, list[float]]) -> float:
    """At 100%, or, where a large request steps over that, within one percent of it."""
    found = readings.get(0) or [value for values in readings.values() for value in values]
    if not found:
        raise UsageError("requests step over 100% of the GPUs; the workload is too coarse for its cluster")
    return sum(found) / len(found)


def _add_nodes(placer: Placer, workload: Workload, ranks: Sequence[int]) -> None:
    for node, rank in zip(workload.nodes, ranks, strict=True):
        placer.add_node(
            cpu_milli=node.cpu_milli,
            memory_mib=node.memory_mib,
            gpus=node.gpus,
            model=workload.model_ids[node.model],
            rank=rank,
        )


def _register(placer: Placer, workload: Workload) -> dict[TracePod, int]:
    return {
        pod: placer.request_class(
            gpus=pod.gpus,
            gpu_milli=pod.gpu_milli,
            cpu_milli=pod.cpu_milli,
            memory_mib=pod.memory_mib,
            models=workload.model_set(pod),
        )
        for pod in dict.fromkeys(workload.pods)
    }


def _arrivals(workload: Workload, draws: Draws, *, requested_milli_end: float) -> list[TracePod]:
    """The workload shuffled, less some of it where it is too much, and some again where it is too little."""
    arrivals = draws.shuffled(workload.pods)
    requested = sum(pod.gpu_volume_milli for pod in arrivals)
    if requested > requested_milli_end:
        while requested > requested_milli_end:
            requested -= arrivals.pop(draws.below(len(arrivals))).gpu_volume_milli
        return arrivals
    while True:
        pod = draws.one_of(workload.pods)
        # One GPU of the next request counts here, not all that it asks for: as published.
        if requested + pod.gpu_milli > requested_milli_end:
            return arrivals
        requested += pod.gpu_volume_milli
        arrivals.append(pod)
