"""The arrival-only protocol: what arrives, what is counted, and when the fill is read off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from genie.errors import UsageError
from genie.runtime import native
from genie.scheduler.placement.plain import PlainPlacer
from genie.scheduler.placement.protocol import ANY_MODEL, Placer, TypicalShape
from genie.sim.replay import Workload, replay
from genie.sim.synthetic import synthetic_workload
from genie.sim.traces import TraceNode, TracePod

ONE = TracePod(0, 0, 1, 1000, ())
HALF = TracePod(0, 0, 1, 500, ())


def nodes(count: int, *, gpus: int = 8) -> list[TraceNode]:
    return [TraceNode(f"n{number}", 64000, 64000, gpus, "A") for number in range(count)]


def plain(seed: int, typical: Sequence[TypicalShape]) -> Placer:
    return PlainPlacer("bestfit", typical=typical)


def test_a_workload_that_fits_fills_the_cluster() -> None:
    outcome = replay(Workload(nodes(10), [HALF] * 20), plain, seed=0)
    # 80 GPUs; 200% of half GPUs ask for 130% of them, and what rounds to 100% is between 99.5 and 100.5.
    assert (outcome.arrivals, outcome.dropped) == (208, 48)
    assert outcome.allocated_pct == pytest.approx(100.0, abs=0.3)


def test_dropped_requests_count_as_requested() -> None:
    pods = [TracePod(0, 0, 1, 1000, ("B",)), ONE]
    outcome = replay(Workload(nodes(25), pods), plain, seed=3)
    assert outcome.dropped > 100
    assert 40 < outcome.allocated_pct < 60  # nobody has model B


def test_where_a_large_request_steps_over_100_percent_the_nearest_readings_count() -> None:
    outcome = replay(Workload(nodes(1, gpus=3), [ONE, TracePod(0, 0, 2, 1000, ())]), plain, seed=1)
    assert outcome.allocated_pct == 100.0
    outcome = replay(Workload(nodes(33, gpus=3), [TracePod(0, 0, 2, 1000, ())]), plain, seed=0)
    assert outcome.allocated_pct == pytest.approx(66 / 99 * 100)  # 98 and 100 of 99 GPUs were asked for


def test_drops_of_several_gpus_are_counted_apart() -> None:
    outcome = replay(Workload(nodes(100, gpus=4), [TracePod(0, 0, 8, 1000, ()), ONE]), plain, seed=0)
    assert 0 < outcome.dropped_multi_gpu <= outcome.dropped


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    workload = synthetic_workload(nodes=60, pods=300, seed=1)
    runs = [replay(workload, plain, seed=seed) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


def test_typical_requests_are_the_most_frequent_ones_up_to_95_percent() -> None:
    rare = TracePod(1, 0, 2, 1000, ("A",))
    typical = Workload(nodes(1), [ONE] * 16 + [HALF] * 3 + [rare]).typical()
    # To the last bit: 16 / 19 is another number than 0.8 / 0.95.
    assert [(shape.gpu_milli, shape.share) for shape in typical] == [(1000, 0.8 / 0.95), (500, 0.15 / 0.95)]
    assert len(Workload(nodes(1), [ONE] * 50 + [HALF] * 44 + [rare] * 6).typical()) == 3


def test_models_that_are_written_differently_are_two_shapes_with_the_same_models() -> None:
    spellings = [("A",), ("A", "A"), ("B", "A"), ()]
    workload = Workload(nodes(1), [TracePod(0, 0, 1, 1000, models) for models in spellings])
    # Equally frequent, so in the order of what is written; nobody has model B.
    assert [shape.models for shape in workload.typical()] == [1, 1, 1, ANY_MODEL]
    assert [shape.share for shape in workload.typical()] == [0.25] * 4


@dataclass
class Told:
    """Notes what it is told, and places nothing."""

    ranks: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)

    def make(self, seed: int, typical: Sequence[TypicalShape]) -> Placer:
        return self  # type: ignore[return-value]

    def add_node(self, *, rank: int, **_: int) -> int:
        self.ranks.append(rank)
        return len(self.ranks) - 1

    def request_class(self, **wanted: int) -> int:
        self.classes.append(wanted["gpu_milli"])
        return len(self.classes) - 1

    def observe(self, request_class: int, tenant: int) -> None:
        self.arrivals.append(request_class)

    def place(self, request_class: int, tenant: int) -> None: ...


def test_ranks_are_drawn_for_each_run_and_each_shape_is_one_class() -> None:
    first, second = Told(), Told()
    for seed, told in enumerate((first, second)):
        replay(Workload(nodes(50), [ONE, HALF] * 5), told.make, seed=seed)
    assert sorted(first.ranks) == sorted(second.ranks) == list(range(50))
    assert first.ranks != second.ranks
    assert first.classes == [1000, 500]


def told_of(count: int, *, gpu_milli: int = 1000, seed: int) -> Told:
    """Of so many requests that are all different, for 8 GPUs."""
    told = Told()
    pods = [TracePod(number, 0, 1, gpu_milli, ()) for number in range(count)]
    replay(Workload(nodes(8, gpus=1), pods), told.make, seed=seed)
    return told


def test_arrivals_and_ranks_are_drawn_in_the_published_order() -> None:
    few, many = told_of(5, seed=42), told_of(14, seed=42)
    assert few.arrivals == [1, 3, 4, 2, 0, 0, 2, 1, 3, 3]
    assert few.ranks == [3, 4, 6, 7, 0, 1, 5, 2]
    assert many.arrivals == [6, 4, 1, 10, 8, 11, 9, 13, 2, 0]
    assert many.ranks == [5, 6, 7, 0, 2, 4, 1, 3]


def test_of_the_last_request_one_gpu_counts_for_the_end() -> None:
    told = Told()
    replay(Workload(nodes(8, gpus=1), [TracePod(0, 0, 4, 1000, ())]), told.make, seed=1)
    assert len(told.arrivals) == 3  # 8 + 1 GPUs are less than 10.4, and 8 + 4 are not


def test_of_a_workload_that_asks_for_more_some_is_left_out() -> None:
    told = told_of(50, gpu_milli=500, seed=1)
    # 130% of 8 GPUs are 10.4, so 20 halves: none of them twice, and not only the first ones.
    assert len(told.arrivals) == len(set(told.arrivals)) == 20
    assert max(told.arrivals) > 40


def test_supply_fills_more_than_fgd_from_what_it_has_seen() -> None:
    library = native.load("genie_scheduler")
    workload = synthetic_workload(nodes=60, pods=1000, seed=0)

    def filled(policy: str) -> float:
        def make(seed: int, typical: Sequence[TypicalShape]) -> Placer:
            placer: Placer = library.Placement(policy, typical=[shape.as_tuple() for shape in typical])
            return placer

        return replay(workload, make, seed=0).allocated_pct

    assert filled("supply") > filled("fgd") + 1


@pytest.mark.parametrize(
    ("machines", "pods"), [([], [ONE]), (nodes(1), []), (nodes(1), [TracePod(1, 1, 0, 0, ())])]
)
def test_a_workload_without_gpus_is_refused(machines: list[TraceNode], pods: list[TracePod]) -> None:
    with pytest.raises(UsageError, match="needs nodes with GPUs"):
        Workload(machines, pods)


def test_a_workload_that_is_too_coarse_is_refused() -> None:
    with pytest.raises(UsageError, match="too coarse"):
        replay(Workload(nodes(1, gpus=3), [TracePod(0, 0, 2, 1000, ())]), plain, seed=0)
