"""Both placers: taking, releasing, invalid calls and isolation of tenants."""

from __future__ import annotations

import pytest

from genie.errors import UsageError
from genie.native import libraries
from genie.scheduler.placement.protocol import Placer
from genie.scheduler.placement.python_placer import PythonPlacer


@pytest.fixture(params=["native", "plain"])
def placer(request: pytest.FixtureRequest) -> Placer:
    if request.param == "plain":
        return PythonPlacer("supply")
    placement: Placer = libraries.load("genie_scheduler").Placer("supply")
    return placement


def add_node(placer: Placer, **changes: int) -> int:
    return placer.add_node(
        **{"cpu_milli": 8000, "memory_mib": 8000, "gpus": 2, "gpu_memory_mib": 100} | changes
    )


def test_taken_resources_are_not_free_until_released(placer: Placer) -> None:
    add_node(placer)
    half = placer.register_request_class(
        gpus=1, gpu_milli=500, gpu_memory_mib=40, cpu_milli=1000, memory_mib=10
    )
    assert placer.place(half, 1) == (0, (0,))
    assert placer.node_state(0) == (True, 7000, 7990, ((500, 60, 1), (1000, 100, 0)))
    placer.release(half, node=0, gpus=(0,))
    assert placer.node_state(0) == (True, 8000, 8000, ((1000, 100, 0), (1000, 100, 0)))


def test_choose_allocates_nothing(placer: Placer) -> None:
    add_node(placer)
    both = placer.register_request_class(gpus=2, gpu_milli=1000)
    assert placer.choose(both, 1) == placer.choose(both, 1) == (0, (0, 1))


def test_two_tenants_never_share_a_gpu(placer: Placer) -> None:
    add_node(placer)
    small = placer.register_request_class(gpus=1, gpu_milli=100)
    assert [placer.place(small, tenant) for tenant in (1, 2, 1, 3)] == [(0, (0,)), (0, (1,)), (0, (0,)), None]
    placer.release(small, node=0, gpus=(1,))
    assert placer.place(small, 3) == (0, (1,))  # nobody's again


def test_closed_node_is_not_used_and_keeps_its_holds(placer: Placer) -> None:
    add_node(placer)
    whole = placer.register_request_class(gpus=1, gpu_milli=1000)
    placer.place(whole, 1)
    placer.set_open(0, is_open=False)
    assert placer.place(whole, 1) is None
    assert placer.node_state(0)[3][0] == (0, 100, 1)
    placer.set_open(0, is_open=True)
    assert placer.place(whole, 1) == (0, (1,))


@pytest.mark.parametrize(
    "request_options",
    [
        {"gpus": 3, "gpu_milli": 1000},
        {"gpus": 1, "gpu_milli": 1000, "gpu_memory_mib": 101},
        {"gpus": 1, "gpu_milli": 1000, "models_mask": 0b10},
        {"gpus": 1, "gpu_milli": 1000, "only_gpus": [2]},
        {"cpu_milli": 8001},
        {"memory_mib": 8001},
        {"nodes": []},
    ],
)
def test_request_that_fits_nowhere_has_no_place(placer: Placer, request_options: dict[str, int]) -> None:
    add_node(placer)
    assert placer.place(placer.register_request_class(**request_options), 1) is None  # type: ignore[arg-type]


def test_request_gets_only_allowed_gpus(placer: Placer) -> None:
    add_node(placer, gpus=4)
    these = placer.register_request_class(gpus=1, gpu_milli=600, only_gpus=[1, 3])
    assert [placer.place(these, 1) for _ in range(3)] == [(0, (1,)), (0, (3,)), None]
    pair = placer.register_request_class(gpus=2, gpu_milli=400, only_gpus=[1, 3])
    gang = placer.place_gang(pair, 1, workers=2, workers_min=1)
    assert gang == [(0, (1, 3))]


def test_node_added_later_is_used_unless_the_request_names_nodes(placer: Placer) -> None:
    add_node(placer, gpus=0)
    anywhere = placer.register_request_class(gpus=1, gpu_milli=1000)
    there = placer.register_request_class(gpus=1, gpu_milli=1000, nodes=[0])
    assert (placer.choose(anywhere, 1), placer.choose(there, 1)) == (None, None)
    add_node(placer)
    assert (placer.choose(anywhere, 1), placer.choose(there, 1)) == ((1, (0,)), None)


def test_invalid_calls_are_rejected_without_changes(placer: Placer) -> None:
    add_node(placer)
    whole = placer.register_request_class(gpus=1, gpu_milli=1000)
    nothing = placer.register_request_class(cpu_milli=1)
    wrong = [
        lambda: add_node(placer, gpus=17),
        lambda: add_node(placer, model=64),
        lambda: add_node(placer, cpu_milli=-1),
        lambda: placer.register_request_class(gpus=1),
        lambda: placer.register_request_class(gpus=1, gpu_milli=1001),
        lambda: placer.register_request_class(gpu_milli=5),
        lambda: placer.register_request_class(cpu_milli=-1),
        lambda: placer.register_request_class(nodes=[1]),
        lambda: placer.register_request_class(gpus=1, gpu_milli=1000, only_gpus=[0, 0]),
        lambda: placer.register_request_class(gpus=1, gpu_milli=1000, only_gpus=[16]),
        lambda: placer.take(whole, 1, node=1, gpus=[0]),
        lambda: placer.take(whole, 0, node=0, gpus=[0]),
        lambda: placer.take(whole, 1, node=0, gpus=[2]),
        lambda: placer.take(whole, 1, node=0, gpus=[0, 1]),
        lambda: placer.take(whole, 1, node=0, gpus=[16]),
        lambda: placer.release(whole, node=0, gpus=[0]),
        lambda: placer.release(nothing, node=0, gpus=[]),
        lambda: placer.observe(7, 1),
        lambda: placer.observe(whole, 0),
        lambda: placer.place(7, 1),
        lambda: placer.place(whole, 0),
        lambda: placer.node_state(-1),
    ]
    for call in wrong:
        with pytest.raises(UsageError):
            call()
    assert placer.node_state(0) == (True, 8000, 8000, ((1000, 100, 0), (1000, 100, 0)))


def test_capacity_for_multi_gpu_requests_is_preserved(placer: Placer) -> None:
    """A fraction shares a used GPU instead of a free one on another node."""
    add_node(placer, gpus=2)
    add_node(placer, gpus=2)
    half, pair = (
        placer.register_request_class(gpus=1, gpu_milli=500),
        placer.register_request_class(gpus=2, gpu_milli=1000),
    )
    for number in (half, pair) * 20:
        placer.observe(number, 1)
    assert [placer.place(half, 1) for _ in range(4)] == [(0, (0,)), (0, (0,)), (0, (1,)), (0, (1,))]
    assert placer.place(pair, 1) == (1, (0, 1))


def test_scarce_nodes_are_left_to_requests_that_need_them(placer: Placer) -> None:
    scarce, common = add_node(placer, model=0), add_node(placer, model=1, cpu_milli=9000)
    anyone = placer.register_request_class(gpus=1, gpu_milli=1000)
    picky = placer.register_request_class(gpus=1, gpu_milli=1000, models_mask=0b01)
    for number in (anyone, picky) * 20:
        placer.observe(number, 1)
    assert [placer.place(anyone, 1) for _ in range(2)] == [(common, (0,)), (common, (1,))]
    assert placer.place(picky, 1) == (scarce, (0,))


def test_refresh_of_placer_caches_in_small_steps_equals_one_refresh() -> None:
    library = libraries.load("genie_scheduler")
    answers = []
    for budget in (1, 2**40):
        placer = library.Placer("supply")
        for number in range(20):
            add_node(placer, model=number % 2)
        kinds = [
            placer.register_request_class(gpus=1, gpu_milli=milli, cpu_milli=500)
            for milli in (1000, 300, 700)
        ]
        places = []
        for number in range(60):
            placer.observe(kinds[number % 3], 1)
            while not placer.precompute(budget):
                pass
            places.append(placer.place(kinds[number % 3], 1))
        answers.append(places)
    assert answers[0] == answers[1]


_CLASSES = 20


def _observe_until_an_update_is_due(placer: Placer, kinds: list[int]) -> None:
    for number in range(200):
        placer.observe(kinds[number % _CLASSES], 1)


def _count_slices(placer: Placer) -> int:
    count = 1
    while not placer.precompute(1):
        count += 1
    return count


def test_table_that_was_replaced_is_freed_within_the_budget_even_if_the_next_one_is_ready() -> None:
    """Dropping a class of a replaced table takes one slice each; the last slices of an update do that."""
    library, unfreed = libraries.load("genie_scheduler"), _CLASSES // 2
    slices = {}
    for left_over in (0, unfreed):
        placer = library.Placer("supply")
        for number in range(64):
            add_node(placer, model=number % 2)
        kinds = [
            placer.register_request_class(gpus=1, gpu_milli=1000, cpu_milli=100 + number)
            for number in range(_CLASSES)
        ]
        placer.precompute()
        _observe_until_an_update_is_due(placer, kinds)
        placer.precompute()
        _observe_until_an_update_is_due(placer, kinds)
        if left_over:
            for _ in range(slices[0][0] - left_over):
                assert not placer.precompute(1)
            first = 0
        else:
            first = _count_slices(placer)
        _observe_until_an_update_is_due(placer, kinds)
        slices[left_over] = (first, _count_slices(placer))
    assert slices[unfreed][1] >= slices[0][1] + unfreed - 1


def test_unknown_policy_is_rejected() -> None:
    for make in (PythonPlacer, libraries.load("genie_scheduler").Placer):
        with pytest.raises(UsageError, match="unknown placement policy 'magic'"):
            make("magic")
