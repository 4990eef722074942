"""What holds for a placer, native or plain: what is taken, given back, refused, and kept apart."""

from __future__ import annotations

import pytest

from genie.errors import UsageError
from genie.runtime import native
from genie.scheduler.placement.plain import PlainPlacer
from genie.scheduler.placement.protocol import Placer


@pytest.fixture(params=["native", "plain"])
def placer(request: pytest.FixtureRequest) -> Placer:
    if request.param == "plain":
        return PlainPlacer("supply")
    made: Placer = native.load("genie_scheduler").Placement("supply")
    return made


def node(placer: Placer, **changes: int) -> int:
    return placer.add_node(
        **{"cpu_milli": 8000, "memory_mib": 8000, "gpus": 2, "gpu_memory_mib": 100} | changes
    )


def test_what_is_taken_is_not_free_until_it_is_released(placer: Placer) -> None:
    node(placer)
    half = placer.request_class(gpus=1, gpu_milli=500, gpu_memory_mib=40, cpu_milli=1000, memory_mib=10)
    assert placer.place(half, 1) == (0, (0,))
    assert placer.node_state(0) == (True, 7000, 7990, ((500, 60, 1), (1000, 100, 0)))
    placer.release(half, node=0, gpus=(0,))
    assert placer.node_state(0) == (True, 8000, 8000, ((1000, 100, 0), (1000, 100, 0)))


def test_choosing_takes_nothing(placer: Placer) -> None:
    node(placer)
    both = placer.request_class(gpus=2, gpu_milli=1000)
    assert placer.choose(both, 1) == placer.choose(both, 1) == (0, (0, 1))


def test_two_tenants_never_share_a_gpu(placer: Placer) -> None:
    node(placer)
    small = placer.request_class(gpus=1, gpu_milli=100)
    assert [placer.place(small, tenant) for tenant in (1, 2, 1, 3)] == [(0, (0,)), (0, (1,)), (0, (0,)), None]
    placer.release(small, node=0, gpus=(1,))
    assert placer.place(small, 3) == (0, (1,))  # nobody's again


def test_nothing_goes_to_a_closed_node_and_what_is_there_stays(placer: Placer) -> None:
    node(placer)
    whole = placer.request_class(gpus=1, gpu_milli=1000)
    placer.place(whole, 1)
    placer.set_open(0, is_open=False)
    assert placer.place(whole, 1) is None
    assert placer.node_state(0)[3][0] == (0, 100, 1)
    placer.set_open(0, is_open=True)
    assert placer.place(whole, 1) == (0, (1,))


@pytest.mark.parametrize(
    "wanted",
    [
        {"gpus": 3, "gpu_milli": 1000},
        {"gpus": 1, "gpu_milli": 1000, "gpu_memory_mib": 101},
        {"gpus": 1, "gpu_milli": 1000, "models": 0b10},
        {"gpus": 1, "gpu_milli": 1000, "only_gpus": [2]},
        {"cpu_milli": 8001},
        {"memory_mib": 8001},
        {"nodes": []},
    ],
)
def test_a_request_that_fits_nowhere_has_no_place(placer: Placer, wanted: dict[str, int]) -> None:
    node(placer)
    assert placer.place(placer.request_class(**wanted), 1) is None  # type: ignore[arg-type]


def test_a_request_for_some_gpus_gets_no_others(placer: Placer) -> None:
    node(placer, gpus=4)
    these = placer.request_class(gpus=1, gpu_milli=600, only_gpus=[1, 3])
    assert [placer.place(these, 1) for _ in range(3)] == [(0, (1,)), (0, (3,)), None]
    pair = placer.request_class(gpus=2, gpu_milli=400, only_gpus=[1, 3])
    gang = placer.place_gang(pair, 1, workers=2, workers_min=1)
    assert gang == [(0, (1, 3))]


def test_a_node_that_is_added_later_is_used_unless_the_request_names_others(placer: Placer) -> None:
    node(placer, gpus=0)
    anywhere = placer.request_class(gpus=1, gpu_milli=1000)
    there = placer.request_class(gpus=1, gpu_milli=1000, nodes=[0])
    assert (placer.choose(anywhere, 1), placer.choose(there, 1)) == (None, None)
    node(placer)
    assert (placer.choose(anywhere, 1), placer.choose(there, 1)) == ((1, (0,)), None)


def test_wrong_calls_are_refused_and_change_nothing(placer: Placer) -> None:
    node(placer)
    whole = placer.request_class(gpus=1, gpu_milli=1000)
    nothing = placer.request_class(cpu_milli=1)
    wrong = [
        lambda: node(placer, gpus=17),
        lambda: node(placer, model=64),
        lambda: node(placer, cpu_milli=-1),
        lambda: placer.request_class(gpus=1),
        lambda: placer.request_class(gpus=1, gpu_milli=1001),
        lambda: placer.request_class(gpu_milli=5),
        lambda: placer.request_class(cpu_milli=-1),
        lambda: placer.request_class(nodes=[1]),
        lambda: placer.request_class(gpus=1, gpu_milli=1000, only_gpus=[0, 0]),
        lambda: placer.request_class(gpus=1, gpu_milli=1000, only_gpus=[16]),
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


def test_room_for_requests_of_several_gpus_is_kept(placer: Placer) -> None:
    """A share goes beside another one, though a wholly free GPU on another node would do as well."""
    node(placer, gpus=2)
    node(placer, gpus=2)
    half, pair = placer.request_class(gpus=1, gpu_milli=500), placer.request_class(gpus=2, gpu_milli=1000)
    for number in (half, pair) * 20:
        placer.observe(number, 1)
    assert [placer.place(half, 1) for _ in range(4)] == [(0, (0,)), (0, (0,)), (0, (1,)), (0, (1,))]
    assert placer.place(pair, 1) == (1, (0, 1))


def test_nodes_that_only_some_can_use_are_left_to_them(placer: Placer) -> None:
    scarce, common = node(placer, model=0), node(placer, model=1, cpu_milli=9000)
    anyone = placer.request_class(gpus=1, gpu_milli=1000)
    picky = placer.request_class(gpus=1, gpu_milli=1000, models=0b01)
    for number in (anyone, picky) * 20:
        placer.observe(number, 1)
    assert [placer.place(anyone, 1) for _ in range(2)] == [(common, (0,)), (common, (1,))]
    assert placer.place(picky, 1) == (scarce, (0,))


def test_a_refresh_in_small_steps_ends_where_one_at_once_does() -> None:
    library = native.load("genie_scheduler")
    answers = []
    for budget in (1, 2**40):
        placer = library.Placement("supply")
        for number in range(20):
            node(placer, model=number % 2)
        kinds = [placer.request_class(gpus=1, gpu_milli=milli, cpu_milli=500) for milli in (1000, 300, 700)]
        places = []
        for number in range(60):
            placer.observe(kinds[number % 3], 1)
            while not placer.refresh(budget):
                pass
            places.append(placer.place(kinds[number % 3], 1))
        answers.append(places)
    assert answers[0] == answers[1]


def test_an_unknown_policy_is_refused() -> None:
    for make in (PlainPlacer, native.load("genie_scheduler").Placement):
        with pytest.raises(UsageError, match="there is no policy 'magic'"):
            make("magic")
