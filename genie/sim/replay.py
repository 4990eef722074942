"""Places requests that arrive and never end, and measures how much of the cluster they fill.

Arrivals are the shuffled workload, followed by random requests of it, until the requested GPUs, including
those of rejected requests, reach `FINAL_REQUESTED_PCT`; a larger workload is randomly reduced to that. With
`PUBLISHED_SEEDS` and a published list, arrivals and ranks equal those of the published runs. For jobs that
end see events.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from genie.errors import UsageError
from genie.scheduler.placement.protocol import Placer, TypicalShape
from genie.sim.workloads.go_random import GoRandom
from genie.sim.workloads.traces import TracePod, Workload

FINAL_REQUESTED_PCT = 130.0
MEASURED_AT_REQUESTED_PCT = 100
PUBLISHED_SEEDS = range(42, 52)
# Random numbers that the published program uses for other purposes. Before the arrivals it logs one. Those
# before the ranks are probably timeouts of its watches; the number was found by trying 0 to 59 on two runs,
# and the other runs confirm it.
_RANDOM_DRAWS_BEFORE_ARRIVALS = 1
_RANDOM_DRAWS_BEFORE_RANKS = 10
_REPLAY_TENANT = 1

ReplayPlacerFactory = Callable[[int, Sequence[TypicalShape]], Placer]
"""Creates an empty placer from a seed and the typical request shapes, which FGD needs in advance."""


@dataclass(frozen=True)
class ReplayOutcome:
    """`allocated_pct` is the mean over the arrivals at which requests round to 100% of all GPUs."""

    allocated_pct: float
    arrivals: int
    dropped: int
    dropped_multi_gpu: int


def replay(
    workload: Workload,
    make_placer: ReplayPlacerFactory,
    *,
    seed: int,
    final_requested_pct: float = FINAL_REQUESTED_PCT,
) -> ReplayOutcome:
    """Run one replay. Equal seeds give equal arrivals, whatever the placer."""
    draws = GoRandom(seed)
    draws.skip_outputs(_RANDOM_DRAWS_BEFORE_ARRIVALS)
    capacity = workload.total_gpu_milli
    arrivals = _draw_arrivals(workload, draws, final_requested_milli=final_requested_pct * capacity / 100)
    draws.skip_outputs(_RANDOM_DRAWS_BEFORE_RANKS)
    placer = make_placer(seed, workload.typical_shapes())
    _add_nodes(placer, workload, draws.permutation(len(workload.nodes)))
    classes = _register_request_classes(placer, workload)
    requested = allocated = dropped = dropped_multi = 0
    readings: dict[int, list[float]] = {}
    for pod in arrivals:
        requested += pod.total_gpu_milli
        number = classes[pod]
        placer.observe(number, _REPLAY_TENANT)
        if placer.place(number, _REPLAY_TENANT) is not None:
            allocated += pod.total_gpu_milli
        else:
            dropped += 1
            dropped_multi += pod.gpus > 1
        if abs(off := round(requested * 100 / capacity) - MEASURED_AT_REQUESTED_PCT) <= 1:
            readings.setdefault(off, []).append(allocated * 100 / capacity)
    return ReplayOutcome(_mean_allocated_pct(readings), len(arrivals), dropped, dropped_multi)


def _mean_allocated_pct(allocated_by_requested_pct: dict[int, list[float]]) -> float:
    """Return the mean at 100%, or within one percent of it if a large request skips 100%."""
    found = allocated_by_requested_pct.get(0) or [
        value for values in allocated_by_requested_pct.values() for value in values
    ]
    if not found:
        raise UsageError(
            "cannot measure how many GPUs are allocated when 100% are requested: "
            "no arrival brings the requested total within 1% of that",
            hint="use smaller requests or more nodes",
        )
    return sum(found) / len(found)


def _add_nodes(placer: Placer, workload: Workload, ranks: Sequence[int]) -> None:
    for node, rank in zip(workload.nodes, ranks, strict=True):
        placer.add_node(
            cpu_milli=node.cpu_milli,
            memory_mib=node.memory_mib,
            gpus=node.gpus,
            model=workload.model_numbers[node.model],
            tie_break_rank=rank,
        )


def _register_request_classes(placer: Placer, workload: Workload) -> dict[TracePod, int]:
    return {
        pod: placer.register_request_class(
            gpus=pod.gpus,
            gpu_milli=pod.gpu_milli,
            cpu_milli=pod.cpu_milli,
            memory_mib=pod.memory_mib,
            models_mask=workload.allowed_models_mask(pod),
        )
        for pod in dict.fromkeys(workload.pods)
    }


def _draw_arrivals(
    workload: Workload, go_random: GoRandom, *, final_requested_milli: float
) -> list[TracePod]:
    """Return the shuffled workload, reduced or extended to `final_requested_milli`."""
    arrivals = go_random.shuffled_copy(workload.pods)
    requested = sum(pod.total_gpu_milli for pod in arrivals)
    if requested > final_requested_milli:
        while requested > final_requested_milli:
            requested -= arrivals.pop(go_random.random_below(len(arrivals))).total_gpu_milli
        return arrivals
    while True:
        pod = go_random.choice(workload.pods)
        # Counts one GPU of the next request, not all of them: as published.
        if requested + pod.gpu_milli > final_requested_milli:
            return arrivals
        requested += pod.total_gpu_milli
        arrivals.append(pod)
