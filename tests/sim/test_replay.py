"""Replay of requests that never end: arrivals, counts and the measured allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from genie.errors import UsageError
from genie.native import libraries
from genie.scheduler.placement.protocol import ANY_MODEL, Placer, TypicalShape
from genie.scheduler.placement.python_placer import PythonPlacer
from genie.sim.replay import replay
from genie.sim.workloads.synthetic import synthetic_workload
from genie.sim.workloads.traces import TraceNode, TracePod, Workload

ONE = TracePod(0, 0, 1, 1000, ())
HALF = TracePod(0, 0, 1, 500, ())


def make_nodes(count: int, *, gpus: int = 8) -> list[TraceNode]:
    return [TraceNode(f"n{number}", 64000, 64000, gpus, "A") for number in range(count)]


def make_plain_placer(seed: int, typical: Sequence[TypicalShape]) -> Placer:
    return PythonPlacer("bestfit", typical=typical)


def test_workload_that_fits_fills_the_cluster() -> None:
    outcome = replay(Workload(make_nodes(10), [HALF] * 20), make_plain_placer, seed=0)
    # 80 GPUs; requests for half GPUs up to 130% of them; 99.5 to 100.5 round to 100%.
    assert (outcome.arrivals, outcome.dropped) == (208, 48)
    assert outcome.allocated_pct == pytest.approx(100.0, abs=0.3)


def test_rejected_requests_count_as_requested() -> None:
    pods = [TracePod(0, 0, 1, 1000, ("B",)), ONE]
    outcome = replay(Workload(make_nodes(25), pods), make_plain_placer, seed=3)
    assert outcome.dropped > 100
    assert 40 < outcome.allocated_pct < 60  # no node has model B


def test_nearest_readings_are_used_if_a_request_skips_100_percent() -> None:
    outcome = replay(
        Workload(make_nodes(1, gpus=3), [ONE, TracePod(0, 0, 2, 1000, ())]), make_plain_placer, seed=1
    )
    assert outcome.allocated_pct == 100.0
    outcome = replay(
        Workload(make_nodes(33, gpus=3), [TracePod(0, 0, 2, 1000, ())]), make_plain_placer, seed=0
    )
    assert outcome.allocated_pct == pytest.approx(66 / 99 * 100)  # 98 and 100 of 99 GPUs were requested


def test_rejected_multi_gpu_requests_are_counted_separately() -> None:
    outcome = replay(
        Workload(make_nodes(100, gpus=4), [TracePod(0, 0, 8, 1000, ()), ONE]), make_plain_placer, seed=0
    )
    assert 0 < outcome.dropped_multi_gpu <= outcome.dropped


def test_runs_depend_on_the_seed() -> None:
    workload = synthetic_workload(nodes=60, pods=300, seed=1)
    runs = [replay(workload, make_plain_placer, seed=seed) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


def test_typical_shapes_cover_95_percent_of_requests() -> None:
    rare = TracePod(1, 0, 2, 1000, ("A",))
    typical = Workload(make_nodes(1), [ONE] * 16 + [HALF] * 3 + [rare]).typical_shapes()
    # Exact: 16 / 19 differs from 0.8 / 0.95 in the last bit.
    assert [(shape.gpu_milli, shape.share) for shape in typical] == [(1000, 0.8 / 0.95), (500, 0.15 / 0.95)]
    assert len(Workload(make_nodes(1), [ONE] * 50 + [HALF] * 44 + [rare] * 6).typical_shapes()) == 3


def test_differently_written_models_are_separate_shapes() -> None:
    spellings = [("A",), ("A", "A"), ("B", "A"), ()]
    workload = Workload(make_nodes(1), [TracePod(0, 0, 1, 1000, models) for models in spellings])
    # Equally frequent, so ordered by the written models; no node has model B.
    assert [shape.models_mask for shape in workload.typical_shapes()] == [1, 1, 1, ANY_MODEL]
    assert [shape.share for shape in workload.typical_shapes()] == [0.25] * 4


@dataclass
class RecordingPlacer:
    """Records its calls and places nothing."""

    ranks: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)

    def make(self, seed: int, typical: Sequence[TypicalShape]) -> Placer:
        return self  # type: ignore[return-value]

    def add_node(self, *, tie_break_rank: int, **_: int) -> int:
        self.ranks.append(tie_break_rank)
        return len(self.ranks) - 1

    def register_request_class(self, **wanted: int) -> int:
        self.classes.append(wanted["gpu_milli"])
        return len(self.classes) - 1

    def observe(self, request_class: int, tenant: int) -> None:
        self.arrivals.append(request_class)

    def place(self, request_class: int, tenant: int) -> None: ...


def test_node_ranks_are_random_and_each_shape_is_one_request_class() -> None:
    first, second = RecordingPlacer(), RecordingPlacer()
    for seed, placer in enumerate((first, second)):
        replay(Workload(make_nodes(50), [ONE, HALF] * 5), placer.make, seed=seed)
    assert sorted(first.ranks) == sorted(second.ranks) == list(range(50))
    assert first.ranks != second.ranks
    assert first.classes == [1000, 500]


def replay_distinct(count: int, *, gpu_milli: int = 1000, seed: int) -> RecordingPlacer:
    """Replay `count` distinct requests on 8 GPUs and return the calls."""
    placer = RecordingPlacer()
    pods = [TracePod(number, 0, 1, gpu_milli, ()) for number in range(count)]
    replay(Workload(make_nodes(8, gpus=1), pods), placer.make, seed=seed)
    return placer


def test_arrivals_and_ranks_match_the_published_runs() -> None:
    few, many = replay_distinct(5, seed=42), replay_distinct(14, seed=42)
    assert few.arrivals == [1, 3, 4, 2, 0, 0, 2, 1, 3, 3]
    assert few.ranks == [3, 4, 6, 7, 0, 1, 5, 2]
    assert many.arrivals == [6, 4, 1, 10, 8, 11, 9, 13, 2, 0]
    assert many.ranks == [5, 6, 7, 0, 2, 4, 1, 3]


def test_replay_ends_when_one_gpu_of_the_next_request_exceeds_the_limit() -> None:
    placer = RecordingPlacer()
    replay(Workload(make_nodes(8, gpus=1), [TracePod(0, 0, 4, 1000, ())]), placer.make, seed=1)
    assert len(placer.arrivals) == 3  # 8 + 1 GPUs are less than 10.4, 8 + 4 are not


def test_oversized_workload_is_reduced_at_random() -> None:
    placer = replay_distinct(50, gpu_milli=500, seed=1)
    # 130% of 8 GPUs are 10.4, so 20 halves: distinct, and not only the first ones.
    assert len(placer.arrivals) == len(set(placer.arrivals)) == 20
    assert max(placer.arrivals) > 40


def test_supply_policy_allocates_more_than_fgd_policy() -> None:
    library = libraries.load("genie_scheduler")
    workload = synthetic_workload(nodes=60, pods=1000, seed=0)

    def allocated_pct(policy: str) -> float:
        def make(seed: int, typical: Sequence[TypicalShape]) -> Placer:
            placer: Placer = library.Placer(policy, typical=[shape.as_tuple() for shape in typical])
            return placer

        return replay(workload, make, seed=0).allocated_pct

    assert allocated_pct("supply") > allocated_pct("fgd") + 1


@pytest.mark.parametrize(
    ("machines", "pods"), [([], [ONE]), (make_nodes(1), []), (make_nodes(1), [TracePod(1, 1, 0, 0, ())])]
)
def test_workload_without_gpus_is_rejected(machines: list[TraceNode], pods: list[TracePod]) -> None:
    with pytest.raises(UsageError, match="needs nodes with GPUs"):
        Workload(machines, pods)


def test_workload_that_is_too_coarse_is_rejected() -> None:
    with pytest.raises(UsageError, match="within 1% of that"):
        replay(Workload(make_nodes(1, gpus=3), [TracePod(0, 0, 2, 1000, ())]), make_plain_placer, seed=0)
