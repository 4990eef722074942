"""Names over numbers: what the book tells its placers, and that it does not grow without bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from genie.errors import UsageError
from genie.model.job import Within
from genie.scheduler import book
from genie.scheduler.book import Book
from genie.scheduler.facts import GPU_UNKNOWN
from genie.scheduler.numbers import Numbers
from genie.scheduler.placement.plain import PlainPlacer
from genie.scheduler.request import GpuFacts, Request, Shape, WorkerPlace
from tests.scheduler.clusters import H200, Desk, node

PAIRS = tuple(replace(H200, island=10 + gpu // 2, numa=gpu // 2) for gpu in range(4))


def request(name: str, shape: Shape | None = None, **wishes: object) -> Request:
    made = Request(name, "a", 0, shape or Shape(gpus=1), name=name)
    return msgspec.structs.replace(made, **wishes)


def test_workers_within_an_island_share_one_nvlink_island() -> None:
    desk = Desk(node("n", kinds=PAIRS))
    desk.submit("other")
    desk.submit("island", workers=2, within=Within.ISLAND)
    desk.submit("larger", workers=3, within=Within.ISLAND)
    desk.submit("second", workers=2, within=Within.ISLAND)
    assert desk.started() == ["other", "island"]
    held = desk.book.held
    assert held["other"].places == (WorkerPlace("n", (0,)),)
    assert held["island"].places == (WorkerPlace("n", (2,)), WorkerPlace("n", (3,)))
    desk.scheduler.ended("other")
    assert desk.started() == ["second"]


def test_a_worker_within_an_island_has_all_its_gpus_there() -> None:
    desk = Desk(node("n", kinds=PAIRS))
    desk.scheduler.started(request("there"), (WorkerPlace("n", (1,)),), at=0.0)
    desk.scheduler.started(request("here"), (WorkerPlace("n", (2,)),), at=0.0)
    desk.submit("pair", gpus=2, within=Within.ISLAND)
    assert desk.started() == []
    desk.scheduler.ended("here")
    assert desk.started() == ["pair"]


def test_an_elastic_job_in_an_island_takes_what_the_largest_has() -> None:
    desk = Desk(node("n", kinds=PAIRS))
    desk.submit("island", workers=4, workers_min=1, within=Within.ISLAND)
    assert desk.started() == ["island"]
    assert len(desk.book.held["island"].places) == 2


def test_a_gpu_that_is_closed_takes_nothing_new_and_keeps_what_it_has() -> None:
    facts = node("n", 2)
    desk = Desk(facts)
    desk.submit("early")
    assert desk.started() == ["early"]
    desk.scheduler.set_node(replace(facts, closed_gpus=frozenset({0, 1})))
    desk.submit("late")
    assert desk.started() == []
    assert "early" in desk.book.held
    desk.scheduler.set_node(replace(facts, closed_gpus=frozenset({0})))
    assert desk.started() == ["late"]
    assert desk.book.held["late"].places == (WorkerPlace("n", (1,)),)


def test_memory_used_from_outside_is_not_given_away() -> None:
    facts = node("n", 1)
    desk = Desk(replace(facts, memory_outside_mib=(100_000,)))
    desk.submit("model", shape=Shape(1, 500, gpu_memory_mib=80_000))
    assert desk.started() == []
    desk.scheduler.set_node(facts)
    assert desk.started() == ["model"]


def test_what_runs_on_a_closed_node_is_held_there() -> None:
    made = Book(PlainPlacer, policy="bestfit")
    made.set_node(node("n", 1, closed="draining"))
    made.hold(request("job"), [WorkerPlace("n", (0,))])
    with pytest.raises(UsageError):
        made.hold(request("second"), [WorkerPlace("n", (0,))])
    assert made.free_on("n")[2] == ((0, 141_000),)


def test_a_node_that_moves_to_another_rack_counts_there() -> None:
    desk = Desk(node("a", 1, rack="x"), node("b", 1, rack="y"))
    desk.submit("gang", workers=2, within=Within.RACK)
    assert desk.started() == []
    desk.scheduler.set_node(node("b", 1, rack="x"))
    assert desk.started() == ["gang"]


def test_near_a_job_and_in_one_rack() -> None:
    desk = Desk(*(node(f"{rack}{i}", 2, rack=rack) for rack in "xy" for i in range(2)))
    desk.book.place(request("server", Shape(nodes=frozenset({"y1"}))), 1)
    desk.submit("gang", workers=2, within=Within.RACK, near=frozenset({"server"}))
    desk.submit("other", workers=3, within=Within.RACK, near=frozenset({"server"}))
    assert desk.started() == ["gang"]
    assert {place.node_id for place in desk.book.held["gang"].places} == {"y1"}


def test_nodes_that_are_to_be_avoided_are_not_chosen_and_one_set_is_enough_for_that() -> None:
    made = Book(PlainPlacer, policy="bestfit")
    for name in ("a", "b", "c"):
        made.set_node(node(name, 2))
    made.hold(request("server"), [WorkerPlace("b", (0,))])
    places = [made.place(request(f"j{n}"), 1, avoiding={"a", "b"}) for n in range(3)]
    assert places == [(WorkerPlace("c", (0,)),), (WorkerPlace("c", (1,)),), None]
    assert len(made._sets) == 1
    near = request("near", near=frozenset({"server"}))
    assert made.place(near, 1, avoiding={"b"}) is None
    assert made.place(near, 1, avoiding={"a"}) == (WorkerPlace("b", (1,)),)
    made.set_node(node("d", 1))
    assert made.place(request("last"), 1, avoiding={"a", "b"}) == (WorkerPlace("d", (0,)),), (
        "a new node counts"
    )


@pytest.mark.parametrize(
    "picky", [{"models": frozenset({"old"})}, {"vendor": "red"}, {"capability_min": (9, 9)}]
)
def test_gpus_that_only_some_can_use_are_left_to_them(picky: dict[str, Any]) -> None:
    made = Book(PlainPlacer, policy="supply")
    kinds = {
        "scarce": GpuFacts("old", "red", 9_000, (9, 9)),
        "common": GpuFacts("new", "green", 9_000, (9, 0)),
    }
    for number, (name, kind) in enumerate(kinds.items()):
        made.set_node(node(name, kinds=(kind, kind), cpu_milli=8_000 + 1_000 * number))
    for shape in (Shape(gpus=1), Shape(gpus=1, **picky)) * 20:
        made.observe(request("job", shape))
    places = [made.place(request(f"any{number}"), 1) for number in range(2)]
    assert [place[0].node_id for place in places if place] == ["common", "common"]
    assert made.place(request("picky", Shape(gpus=1, **picky)), 1) == (WorkerPlace("scarce", (0,)),)


def test_one_gpu_of_a_node_with_several_kinds_is_had_by_its_number() -> None:
    mixed = (replace(H200, model="old"), H200)
    desk = Desk(node("n", kinds=mixed), policy="supply")
    wanted = Shape(gpus=1, models=frozenset({"H200"}))
    desk.submit("any", shape=wanted)
    desk.submit("named", shape=replace(wanted, nodes=frozenset({"n"}), gpu_ids=(1,)))
    assert desk.started() == ["named"]


def test_shapes_come_and_go_and_no_number_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "CLASSES_MAX", 3)
    monkeypatch.setattr(book, "NODE_SETS_MAX", 2)
    made = Book(PlainPlacer, policy="supply")
    for name in ("n", "m"):
        made.set_node(node(name, 4))
    before = [made.free_on(name) for name in ("n", "m")]
    for number in range(1, 20):
        job = request(
            f"j{number}", Shape(1, 10 * number, cpu_milli=number), apart=frozenset({f"j{number - 4}"})
        )
        made.observe(job)
        assert made.place(job, 1) is not None
    for number in range(1, 20):
        made.release(f"j{number}")
    assert [made.free_on(name) for name in ("n", "m")] == before
    assert [len(numbers) for numbers in (made._classes, made._amounts, made._sets)] == [3, 3, 2]
    assert made._real.request_class() == 6, "none but those is known to the placers"


def test_the_number_unused_for_longest_makes_room() -> None:
    placers = [PlainPlacer("bestfit"), PlainPlacer("bestfit")]
    numbers = Numbers[int](
        placers,
        register=lambda cpus: lambda placer: placer.request_class(cpu_milli=cpus),
        drop=lambda placer, number: placer.drop_class(number),
        count_max=2,
    )
    first, second = numbers.of(10), numbers.of(20)
    assert numbers.of(10) == first
    assert numbers.of(30) == second, "20 was unused for longest"
    assert (numbers.of(10), len(numbers)) == (first, 2)
    numbers.clear()
    assert (len(numbers), numbers.of(40)) == (0, 0)


# --- nodes that come, go and change -------------------------------------------------------------


def test_a_node_with_other_gpus_keeps_what_runs_on_those_that_are_left() -> None:
    desk = Desk(node("n", 4))
    for number in range(4):
        desk.submit(f"j{number}")
    desk.submit("wide", gpus=4)
    assert len(desk.started()) == 4
    desk.scheduler.set_node(node("n", 2, cpu_milli=32_000))
    assert desk.book.free_on("n") == (32_000, 256_000, ((0, 141_000), (0, 141_000)))
    assert desk.book.usage("a").gpu_milli == 4000, "it counts all the same"
    assert desk.book.capacity.gpu_milli == 2000
    for job_id in ("j3", "j2", "j0"):
        desk.scheduler.ended(job_id)
    desk.submit("late")
    assert desk.started() == ["late"]
    assert desk.book.held["late"].places == (WorkerPlace("n", (0,)),), "j1 is on the other one"
    assert desk.book.usage("a").gpu_milli == 2000
    assert desk.why("wide").reason == "no node will do: n: has 2 GPUs"


def test_a_job_over_several_gpus_keeps_those_of_them_that_are_left() -> None:
    made = Book(PlainPlacer, policy="bestfit")
    made.set_node(node("n", 4))
    wide = Shape(gpus=4, gpu_memory_mib=100_000, cpu_milli=20_000, memory_mib=9_000)
    made.hold(request("wide", wide), [WorkerPlace("n", (0, 1, 2, 3))])
    small = replace(H200, memory_mib=80_000)
    made.set_node(node("n", kinds=(small, small), cpu_milli=10_000, memory_mib=8_000))
    assert made.free_on("n") == (0, 0, ((0, 0), (0, 0)))
    with made.supposing() as then:
        then.release(made.held["wide"])
        assert then.place(request("two", Shape(gpus=2)), 1) == (WorkerPlace("n", (0, 1)),)
    made.set_node(node("n", 4))
    assert made.free_on("n") == (44_000, 247_000, ((0, 41_000),) * 4), "all of it, when all is there again"
    made.set_node(node("n", 0))
    made.release("wide")
    assert made.free_on("n") == (64_000, 256_000, ())
    assert (made.usage("a"), made._parts) == (made.usage("nobody"), {})


def test_workers_at_one_place_share_what_is_left_of_it() -> None:
    made = Book(PlainPlacer, policy="bestfit")
    made.set_node(node("n", 1))
    made.hold(request("two", Shape(1, 400, cpu_milli=3_000), workers=2), [WorkerPlace("n", (0,))] * 2)
    made.set_node(node("n", 1, cpu_milli=5_000))
    assert made.free_on("n") == (0, 256_000, ((200, 141_000),))
    made.release("two")
    assert made.free_on("n") == (5_000, 256_000, ((1000, 141_000),))


def test_another_island_or_model_is_another_node_too() -> None:
    desk = Desk(node("n", kinds=PAIRS))
    desk.submit("trio", workers=3, within=Within.ISLAND)
    desk.submit("old", shape=Shape(gpus=1, models=frozenset({"A100"})))
    assert desk.started() == []
    desk.scheduler.set_node(node("n", 4))
    assert desk.started() == ["trio"]
    desk.scheduler.set_node(node("n", kinds=(replace(H200, model="A100"),) * 4))
    assert desk.started() == ["old"]


def test_a_node_is_forgotten_when_nothing_runs_there() -> None:
    desk = Desk(node("n", 1), node("m", 1))
    desk.submit("job", shape=Shape(gpus=1, nodes=frozenset({"n"})))
    assert desk.started() == ["job"]
    with pytest.raises(UsageError, match="job runs on node n"):
        desk.scheduler.remove_node("n")
    desk.scheduler.ended("job")
    desk.scheduler.remove_node("n")
    with pytest.raises(UsageError, match="there is no node n"):
        desk.scheduler.remove_node("n")
    assert [facts.node_id for facts in desk.book.nodes] == ["m"]
    assert desk.book.capacity.gpu_milli == 1000
    desk.submit("again", shape=Shape(gpus=1, nodes=frozenset({"n"})))
    desk.submit("any")
    assert desk.started() == ["any"]
    desk.scheduler.set_node(node("n", 1))
    assert desk.started() == ["again"]


def test_a_reservation_on_a_node_that_is_gone_goes_elsewhere() -> None:
    desk = Desk(node("n", 2), node("m", 2))
    desk.submit("here", shape=Shape(gpus=2, nodes=frozenset({"n"})), time_limit_s=10.0)
    desk.submit("there", shape=Shape(gpus=2, nodes=frozenset({"m"})), time_limit_s=20.0)
    desk.submit("next", gpus=2)
    assert len(desk.started()) == 2
    desk.scheduler.ended("here")
    desk.scheduler.remove_node("n")
    assert desk.why("next").starts_at == 20.0
    assert desk.pass_time(20.0) == ["next"]


def test_nodes_come_and_go_and_no_number_is_lost() -> None:
    made = Book(PlainPlacer, policy="supply")
    for number in range(300):
        name = f"n{number}"
        made.set_node(node(name, kinds=(replace(H200, model=name, memory_mib=1000 + number),)))
        made.observe(request("job", Shape(gpus=1, nodes=frozenset({name}), models=frozenset({name}))))
        made.hold(request(name), [WorkerPlace(name, (0,))])
        made.set_node(node(name, 2))
        if number > 4:
            made.release(f"n{number - 4}")
            made.remove_node(f"n{number - 4}")
    assert len(made.nodes) == 5
    assert len(made._ids) <= 6
    assert len(made._models) <= 2


def test_what_runs_at_a_place_that_is_not_all_there_is_held_as_far_as_it_is() -> None:
    made = Book(PlainPlacer, policy="bestfit")
    made.set_node(node("n", 2))
    made.set_node(node("m", 1))
    gone = WorkerPlace("n", (GPU_UNKNOWN,))
    places = (gone, WorkerPlace("m", (0,)), gone, WorkerPlace("n", (1,)))
    with pytest.raises(UsageError):
        made.hold(request("gang", workers=4), places)
    assert made.free_on("m")[2] == ((1000, 141_000),)
    made.hold(request("gang", workers=4), places, is_there=True)
    assert made.free_on("m")[2] == ((0, 141_000),)
    assert made.free_on("n")[2] == ((1000, 141_000), (0, 141_000))
    assert made.usage("a").gpu_milli == 4000, "as much as it was given"
    made.set_node(node("n", 3))
    assert made.free_on("n")[2] == ((1000, 141_000), (0, 141_000), (1000, 141_000))
    made.release("gang")
    assert (made.usage("a"), made._parts) == (made.usage("nobody"), {})
    assert made.free_on("n")[2] == ((1000, 141_000),) * 3


# --- jobs of nothing ----------------------------------------------------------------------------


def test_a_node_takes_so_many_workers_and_no_more_whatever_they_hold() -> None:
    made = Book(PlainPlacer, policy="bestfit", workers_max=2)
    made.set_node(node("n", 4))
    for number in range(2):
        assert made.place(Request(f"j{number}", "t", number, Shape()), 1) is not None
    assert made.place(Request("more", "t", 9, Shape(gpus=1)), 1) is None
    assert made.why_crowded(made.nodes[0]).startswith("runs 2 workers, the most on one node")
    made.set_node(node("n", 4, labels=frozenset({("a", "b")})))
    assert made.place(Request("more", "t", 9, Shape()), 1) is None, "what changes of a node does not open it"
    made.release("j0")
    assert made.why_crowded(made.nodes[0]) == ""
    assert made.place(Request("more", "t", 9, Shape(gpus=1)), 1) is not None


def test_a_gang_of_nothing_does_not_crowd_a_node_either() -> None:
    made = Book(PlainPlacer, policy="bestfit", workers_max=3)
    for name in ("a", "b"):
        made.set_node(node(name, 4))
    places = made.place(Request("two", "t", 1, Shape(), workers=2), 2)
    assert places is not None
    gang = made.place(Request("gang", "t", 2, Shape(), workers=3), 3)
    assert gang is not None and {place.node_id for place in gang}.isdisjoint(p.node_id for p in places)
    assert made.place(Request("last", "t", 3, Shape(), workers=2), 2) is None
    with pytest.raises(UsageError, match="more than 3 workers"):
        made.hold(Request("last", "t", 3, Shape(), workers=2), places)
