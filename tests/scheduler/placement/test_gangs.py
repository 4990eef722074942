"""Both placers: gangs, node sets, single GPUs and reused numbers."""

from __future__ import annotations

from typing import Any

import pytest

from genie.errors import UsageError
from genie.native import libraries
from genie.scheduler.placement.protocol import Placer
from genie.scheduler.placement.python_placer import PythonPlacer


@pytest.fixture(params=["native", "plain"])
def placer(request: pytest.FixtureRequest) -> Placer:
    if request.param == "plain":
        return PythonPlacer("bestfit")
    placement: Placer = libraries.load("genie_scheduler").Placer("bestfit")
    return placement


def add_nodes(placer: Placer, count: int, **changes: Any) -> list[int]:
    facts = {"cpu_milli": 8000, "memory_mib": 8000, "gpus": 4, "gpu_memory_mib": 100} | changes
    return [placer.add_node(**facts) for _ in range(count)]


def register_whole_gpu_class(placer: Placer, gpus: int, **more: Any) -> int:
    return placer.register_request_class(gpus=gpus, gpu_milli=1000, **more)


def node_states(placer: Placer, count: int) -> list[Any]:
    return [placer.node_state(node) for node in range(count)]


def test_gang_is_placed_as_a_whole_or_not_at_all(placer: Placer) -> None:
    add_nodes(placer, 3)
    pair = register_whole_gpu_class(placer, 2)
    placer.take(register_whole_gpu_class(placer, 3), 1, node=1, gpus=[0, 1, 2])
    before = node_states(placer, 3)
    assert placer.place_gang(pair, 1, workers=5) is None
    assert node_states(placer, 3) == before
    assert placer.place_gang(pair, 1, workers=4) == [(0, (0, 1)), (0, (2, 3)), (2, (0, 1)), (2, (2, 3))]


def test_gang_with_a_minimum_uses_what_is_free(placer: Placer) -> None:
    add_nodes(placer, 2)
    pair = register_whole_gpu_class(placer, 2)
    assert placer.place_gang(pair, 1, workers=9, workers_min=5) is None
    found = placer.place_gang(pair, 1, workers=9, workers_min=3)
    assert found is not None and len(found) == 4


def test_spread_gang_has_a_node_for_each_worker(placer: Placer) -> None:
    add_nodes(placer, 3)
    one = register_whole_gpu_class(placer, 1)
    assert placer.place_gang(one, 1, workers=4, spread=True) is None
    found = placer.place_gang(one, 1, workers=3, spread=True)
    assert found is not None and [node for node, _ in found] == [0, 1, 2]
    assert placer.place_gang(one, 1, workers=3, spread=True) is not None, "the first gang left nothing closed"


def test_gang_uses_the_smallest_sufficient_rack(placer: Placer) -> None:
    """The other rack has more free in total, but fragmented."""
    large, small = (
        placer.register_node_set(add_nodes(placer, 4)),
        placer.register_node_set(add_nodes(placer, 6)),
    )
    for node in (4, 5, 6, 7):
        placer.take(register_whole_gpu_class(placer, 1), 1, node=node, gpus=[0])
    assert (
        placer.place_gang(register_whole_gpu_class(placer, 4), 1, workers=5, domains=[large, small]) is None
    )
    gang = placer.place_gang(register_whole_gpu_class(placer, 4), 1, workers=2, domains=[large, small])
    assert gang == [(8, (0, 1, 2, 3)), (9, (0, 1, 2, 3))]
    larger = placer.place_gang(register_whole_gpu_class(placer, 4), 1, workers=3, domains=[large, small])
    assert larger is not None and [node for node, _ in larger] == [0, 1, 2]


def test_gang_uses_the_largest_rack_if_none_is_sufficient(placer: Placer) -> None:
    racks = [placer.register_node_set(add_nodes(placer, count)) for count in (1, 3, 2)]
    found = placer.place_gang(register_whole_gpu_class(placer, 4), 1, workers=5, workers_min=1, domains=racks)
    assert found is not None and [node for node, _ in found] == [1, 2, 3]
    assert (
        placer.place_gang(register_whole_gpu_class(placer, 4), 1, workers=2, domains=racks, among=racks[0])
        is None
    )


def test_placement_is_restricted_to_a_node_set(placer: Placer) -> None:
    add_nodes(placer, 3)
    some = placer.register_node_set([1, 2])
    one = register_whole_gpu_class(placer, 4)
    assert [placer.place(one, 1, among=some) for _ in range(3)] == [
        (1, (0, 1, 2, 3)),
        (2, (0, 1, 2, 3)),
        None,
    ]
    assert placer.choose(one, 1) == (0, (0, 1, 2, 3))
    assert placer.choose(one, 1, among=placer.register_node_set([])) is None


def test_number_of_a_dropped_class_or_node_set_is_reused(placer: Placer) -> None:
    add_nodes(placer, 1)
    first, second = register_whole_gpu_class(placer, 1), register_whole_gpu_class(placer, 2)
    placer.place(first, 1)
    placer.drop_class(first)
    assert register_whole_gpu_class(placer, 4) == first
    assert placer.choose(first, 1) is None, "it needs four GPUs now, and one is taken"
    assert placer.choose(second, 1) == (0, (1, 2))
    some = placer.register_node_set([0])
    placer.drop_node_set(some)
    for call in (lambda: placer.drop_node_set(some), lambda: placer.choose(second, 1, among=some)):
        with pytest.raises(UsageError, match="unknown node set"):
            call()
    assert placer.register_node_set([]) == some
    placer.release(
        register_whole_gpu_class(placer, 1), node=0, gpus=[0]
    )  # a class of the same amounts will do


def test_take_ignores_placement_constraints(placer: Placer) -> None:
    add_nodes(placer, 2)
    picky = register_whole_gpu_class(placer, 1, nodes=[1], models_mask=0b10)
    placer.set_open(0, is_open=False)
    placer.set_gpu(0, 0, is_open=False, memory_used_outside_cluster_mib=100)
    placer.take(picky, 1, node=0, gpus=[0])
    assert placer.node_state(0)[3][0] == (0, 100, 1)
    with pytest.raises(UsageError):
        placer.take(picky, 1, node=0, gpus=[0])


def test_closed_gpu_is_not_used(placer: Placer) -> None:
    add_nodes(placer, 1)
    one = register_whole_gpu_class(placer, 1)
    placer.take(one, 1, node=0, gpus=[1])
    for gpu in (0, 1):
        placer.set_gpu(0, gpu, is_open=False, memory_used_outside_cluster_mib=0)
    assert [placer.place(one, 1) for _ in range(3)] == [(0, (2,)), (0, (3,)), None]
    placer.release(one, node=0, gpus=[1])
    assert placer.place(one, 1) is None
    placer.set_gpu(0, 1, is_open=True, memory_used_outside_cluster_mib=0)
    assert placer.place(one, 1) == (0, (1,))


def test_memory_of_other_processes_is_not_free(placer: Placer) -> None:
    add_nodes(placer, 1, gpus=1)
    half = placer.register_request_class(gpus=1, gpu_milli=100, gpu_memory_mib=50)
    placer.set_gpu(0, 0, is_open=True, memory_used_outside_cluster_mib=10)
    assert [placer.place(half, 1), placer.place(half, 1)] == [(0, (0,)), None]
    placer.set_gpu(0, 0, is_open=True, memory_used_outside_cluster_mib=0)
    assert placer.place(half, 1) == (0, (0,))


def test_gpus_on_one_numa_node_are_preferred(placer: Placer) -> None:
    """Two GPUs are free on each NUMA node: both are chosen on one."""
    for islands in (None, [0, 1, 2, 3]):
        (node,) = add_nodes(placer, 1, islands=islands, numa=[0, 1, 1, 0])
        assert placer.place(register_whole_gpu_class(placer, 2, nodes=[node]), 1) == (node, (0, 3))
        assert placer.place(register_whole_gpu_class(placer, 2, nodes=[node]), 1) == (node, (1, 2))


def test_smallest_sufficient_island_is_used(placer: Placer) -> None:
    add_nodes(placer, 1, gpus=8, islands=[0, 1, 0, 1, 0, 1, 0, 1])
    one, pair, four = (register_whole_gpu_class(placer, gpus) for gpus in (1, 2, 4))
    assert placer.place(pair, 1) == (0, (0, 2))
    assert placer.place(one, 1) == (0, (4,)), "from the island that is in use already"
    assert placer.place(four, 1) == (0, (1, 3, 5, 7))


def test_request_within_one_island_does_not_span_two_islands(placer: Placer) -> None:
    add_nodes(placer, 1, islands=[0, 0, 1, 1])
    placer.take(register_whole_gpu_class(placer, 1), 1, node=0, gpus=[0])
    assert placer.choose(register_whole_gpu_class(placer, 3), 1) == (0, (1, 2, 3))
    assert placer.choose(register_whole_gpu_class(placer, 3, one_island=True), 1) is None
    assert placer.choose(register_whole_gpu_class(placer, 2, one_island=True), 1) == (0, (2, 3))


def test_invalid_calls_are_rejected_without_changes(placer: Placer) -> None:
    add_nodes(placer, 1)
    one = register_whole_gpu_class(placer, 1)
    wrong = [
        lambda: add_nodes(placer, 1, islands=[0]),
        lambda: add_nodes(placer, 1, numa=[0, 0, 0, 16]),
        lambda: placer.set_gpu(0, 4, is_open=True, memory_used_outside_cluster_mib=0),
        lambda: placer.set_gpu(0, 0, is_open=True, memory_used_outside_cluster_mib=-1),
        lambda: placer.register_request_class(one_island=True),
        lambda: placer.register_node_set([1]),
        lambda: placer.register_node_set([1], all_but=True),
        lambda: placer.drop_class(7),
        lambda: placer.place(one, 1, among=0),
        lambda: placer.place_gang(one, 1, workers=0),
        lambda: placer.place_gang(one, 1, workers=1, workers_min=2),
        lambda: placer.place_gang(one, 1, workers=1, domains=[0]),
        lambda: placer.place_gang(one, 0, workers=1),
        lambda: placer.place_gang(7, 1, workers=1),
    ]
    for call in wrong:
        with pytest.raises(UsageError):
            call()
    assert node_states(placer, 1) == [(True, 8000, 8000, ((1000, 100, 0),) * 4)]
    with pytest.raises(UsageError):
        placer.node_state(1)


def test_number_of_node_sets_is_limited(placer: Placer) -> None:
    for _ in range(2**14):
        last = placer.register_node_set([])
    with pytest.raises(UsageError, match="drop one first"):
        placer.register_node_set([])
    placer.drop_node_set(last)
    assert placer.register_node_set([]) == last
