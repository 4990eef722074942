"""What the scheduler decides, and the known traps of the field by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from genie.errors import UsageError
from genie.model.job import Spread, Within
from genie.scheduler.order import FairShare, Fifo, Priority
from genie.scheduler.quota import Quota, Quotas, of_gpus
from genie.scheduler.request import GpuFacts, Request, Shape, WorkerPlace
from genie.scheduler.scheduler import Rules, Start
from tests.scheduler.clusters import Desk, node

FIFO = Rules(order=Fifo())
PRIORITY = Rules(order=Priority())


# --- order --------------------------------------------------------------------------------------


def test_first_in_first_out_across_tenants() -> None:
    desk = Desk(node("n", 2), rules=FIFO)
    for number, tenant in enumerate(["b", "a", "c"]):
        desk.submit(f"j{number}", tenant=tenant)
    assert desk.started() == ["j0", "j1"]


def test_a_higher_priority_and_then_a_nearer_deadline_come_first() -> None:
    desk = Desk(node("n", 2), rules=PRIORITY)
    desk.submit("plain")
    desk.submit("late", deadline_at=900.0)
    desk.submit("soon", deadline_at=100.0)
    desk.submit("high", priority=2)
    assert desk.started() == ["high", "soon"]


def test_who_has_waited_long_overtakes_a_stream_of_higher_priorities() -> None:
    desk = Desk(node("n", 1), rules=Rules(order=Priority(aging_s=10.0), preempts=False, backfills=False))
    desk.submit("running", time_limit_s=5.0)
    assert desk.started() == ["running"]
    desk.submit("low")
    started = []
    for number in range(6):
        desk.submit(f"high{number}", priority=2, time_limit_s=5.0)
        started += desk.pass_time(desk.now + 5.0)
    assert "low" in started
    assert started.index("low") >= 1


def test_the_tenant_with_the_smallest_dominant_share_comes_next() -> None:
    desk = Desk(node("n", 8))
    for number in range(8):
        desk.submit(f"many{number}", tenant="many")
    desk.submit("few0", tenant="few", shape=Shape(gpus=1, cpu_milli=32_000))
    desk.submit("few1", tenant="few", shape=Shape(gpus=1, cpu_milli=32_000))
    assert desk.started() == [
        "many0", "few0", "many1", "many2", "many3", "many4", "few1", "many5"
    ]  # fmt: skip


def test_a_reservation_moves_when_a_higher_job_takes_over_what_was_started_in_the_same_pass() -> None:
    desk = Desk(node("n", 1), rules=FIFO)
    desk.submit("small", shape=Shape(1, 100), preemptible=True, time_limit_s=1.0)
    desk.submit("next", time_limit_s=1.0)
    desk.submit("first", priority=1, time_limit_s=7.0)
    assert desk.started() == ["first"]
    assert desk.scheduler.reservation is not None
    assert (desk.scheduler.reservation.job_id, desk.scheduler.reservation.starts_at) == ("next", 7.0)


# --- gangs --------------------------------------------------------------------------------------


def test_a_gang_is_whole_or_absent() -> None:
    desk = Desk(node("a", 4), node("b", 4))
    desk.submit("gang", gpus=3, workers=3)
    assert desk.started() == []
    assert desk.book.held == {}
    desk.scheduler.set_node(node("c", 4))
    (start,) = [each for each in desk.decide() if isinstance(each, Start)]
    assert sorted(place.node_id for place in start.places) == ["a", "b", "c"]


def test_two_gangs_that_would_deadlock_run_one_after_the_other() -> None:
    desk = Desk(node("a", 4), node("b", 4), rules=FIFO)
    for name in ("one", "two"):
        desk.submit(name, gpus=2, workers=4, time_limit_s=10.0)
    assert desk.started() == ["one"]
    assert desk.why("two").starts_at == 10.0
    assert desk.pass_time(10.0) == ["two"]


def test_an_elastic_gang_starts_with_what_there_is_from_its_least_size_on() -> None:
    desk = Desk(node("a", 4), rules=FIFO)
    desk.submit("other")
    desk.submit("gang", workers=8, workers_min=2)
    starts = [each for each in desk.decide() if isinstance(each, Start)]
    assert [len(start.places) for start in starts] == [1, 3]
    desk.submit("large", workers=8, workers_min=4)
    assert desk.started() == []


def test_workers_on_one_node_in_one_rack_and_each_on_its_own() -> None:
    desk = Desk(*(node(f"{rack}{i}", 2, rack=rack) for rack in "xy" for i in range(2)))
    desk.submit("node", workers=2, within=Within.NODE)
    desk.submit("rack", gpus=2, workers=2, within=Within.RACK)
    desk.submit("spread", workers=3, spread=Spread.SPREAD)
    places = {each.job_id: each.places for each in desk.decide() if isinstance(each, Start)}
    assert len({place.node_id for place in places["node"]}) == 1
    assert {place.node_id[0] for place in places["rack"]} in ({"x"}, {"y"})
    assert "spread" not in places, "one node with room is left"
    desk.scheduler.ended("rack")
    (start,) = [each for each in desk.decide() if isinstance(each, Start)]
    assert len({place.node_id for place in start.places}) == 3


def test_near_and_apart() -> None:
    desk = Desk(node("n1", 4), node("n2", 4), rules=FIFO)
    desk.submit("server", gpus=2)
    desk.submit("client", near=frozenset({"server"}))
    desk.submit("spare", apart=frozenset({"server"}))
    places = {each.job_id: each.places[0].node_id for each in desk.decide() if isinstance(each, Start)}
    assert places["client"] == places["server"] != places["spare"]


@pytest.mark.parametrize(
    ("shape", "where"),
    [
        (Shape(gpus=1, models=frozenset({"A100"})), "old"),
        (Shape(gpus=1, gpu_memory_min_mib=100_000), "new"),
        (Shape(gpus=1, capability_min=(9, 0)), "new"),
        (Shape(gpus=1, vendor="amd"), "red"),
        (Shape(cpu_milli=1, labels=frozenset({("disk", "fast")})), "new"),
        (Shape(gpus=1, nodes=frozenset({"old"})), "old"),
    ],
)
def test_a_shape_goes_only_where_it_may(shape: Shape, where: str) -> None:
    desk = Desk(
        node("old", kinds=(GpuFacts("A100", "nvidia", 40_000, (8, 0)),)),
        node("red", kinds=(GpuFacts("MI300", "amd", 90_000),)),
        node("new", 1, labels=frozenset({("disk", "fast")})),
    )
    for number in range(2):
        desk.submit(f"j{number}", shape=shape)
    starts = [each for each in desk.decide() if isinstance(each, Start)]
    assert {place.node_id for start in starts for place in start.places} == {where}


# --- backfill -----------------------------------------------------------------------------------


def test_short_jobs_go_ahead_of_a_reservation_and_long_ones_do_not() -> None:
    desk = Desk(node("n", 4), rules=FIFO)
    desk.submit("first", gpus=3, time_limit_s=100.0)
    desk.submit("large", gpus=4, time_limit_s=100.0)
    desk.submit("long", gpus=1, time_limit_s=101.0)
    desk.submit("unknown", gpus=1)
    desk.submit("short", gpus=1, time_limit_s=100.0)
    assert desk.started() == ["first", "short"]
    assert desk.why("large").starts_at == 100.0
    assert "would delay large" in desk.why("long").reason
    assert desk.pass_time(100.0) == ["large"]


def test_a_long_job_goes_ahead_where_the_reservation_does_not_need_the_room() -> None:
    desk = Desk(node("a", 4), node("b", 2), rules=FIFO)
    desk.submit("first", gpus=3, time_limit_s=100.0)
    desk.submit("large", gpus=4)
    desk.submit("long", gpus=2)
    assert desk.started() == ["first", "long"]


def test_a_reservation_on_a_node_that_was_closed_meanwhile_goes_elsewhere() -> None:
    desk = Desk(node("a", 4), node("b", 4), rules=FIFO)
    desk.submit("one", shape=Shape(gpus=4, nodes=frozenset({"a"})), time_limit_s=10.0)
    desk.submit("two", shape=Shape(gpus=4, nodes=frozenset({"b"})), time_limit_s=20.0)
    desk.submit("next", gpus=4)
    assert len(desk.started()) == 2
    assert desk.why("next").starts_at == 10.0
    desk.scheduler.set_node(node("a", 4, closed="draining"))
    assert desk.pass_time(10.0) == []
    assert desk.pass_time(20.0) == ["next"]
    assert desk.book.held["next"].places[0].node_id == "b"


def test_without_backfill_nobody_goes_ahead() -> None:
    desk = Desk(node("n", 4), rules=Rules(order=Fifo(), backfills=False))
    desk.submit("first", gpus=3, time_limit_s=100.0)
    desk.submit("large", gpus=4)
    desk.submit("short", time_limit_s=1.0)
    assert desk.started() == ["first"]


def test_a_job_that_can_never_run_holds_nobody_back() -> None:
    desk = Desk(node("n", 4), rules=FIFO)
    desk.submit("impossible", gpus=8)
    desk.submit("next", gpus=4)
    assert desk.started() == ["next"]
    assert desk.why("impossible").reason == "no node will do: n: has 4 GPUs"


def test_a_large_job_is_not_starved_by_a_stream_of_small_ones() -> None:
    desk = Desk(node("n", 4), rules=FIFO)
    started: list[str] = []
    for number in range(40):
        desk.submit(f"small{number}", time_limit_s=7.0 + number % 3)
        if number == 4:
            desk.submit("large", gpus=4, time_limit_s=5.0)
        started += desk.pass_time(desk.now + 2.0)
    assert "large" in started


# --- preemption ---------------------------------------------------------------------------------


def test_the_cheapest_who_are_enough_make_room_and_get_their_grace() -> None:
    desk = Desk(node("n", 4), rules=PRIORITY)
    desk.submit("old", gpus=2, preemptible=True, priority=1)
    desk.submit("fixed")
    desk.submit("low", preemptible=True, grace_s=20.0)
    assert sorted(desk.started()) == ["fixed", "low", "old"]
    desk.submit("high", priority=5)
    assert desk.preempted() == ["low"]
    assert desk.preempted() == [], "it is on its way out already"
    assert desk.why("high").starts_at == 20.0
    assert desk.pass_time(20.0) == ["high"]
    assert [request.job_id for request in desk.scheduler.waiting] == ["low"]


def test_who_is_waited_for_is_still_named_when_others_come_and_go() -> None:
    desk = Desk(node("n", 4), node("m", 1), rules=PRIORITY)
    desk.submit("low", gpus=4, preemptible=True, grace_s=20.0)
    desk.submit("other")
    assert sorted(desk.started()) == ["low", "other"]
    desk.submit("high", gpus=4, priority=5)
    assert desk.preempted() == ["low"]
    desk.scheduler.ended("other")
    desk.decide()
    assert desk.why("high").reason == "waits for low to make room"


def test_equals_and_those_who_did_not_agree_are_not_preempted() -> None:
    desk = Desk(node("n", 2), rules=PRIORITY)
    desk.submit("equal", preemptible=True, priority=3)
    desk.submit("fixed")
    assert len(desk.started()) == 2
    desk.submit("high", priority=3)
    assert desk.preempted() == []


def test_nobody_is_preempted_when_that_would_not_be_enough() -> None:
    desk = Desk(node("n", 4), rules=PRIORITY)
    desk.submit("fixed", gpus=2, time_limit_s=50.0)
    desk.submit("low", preemptible=True, time_limit_s=50.0)
    assert len(desk.started()) == 2
    desk.submit("high", gpus=4, priority=5)
    assert desk.preempted() == []
    assert desk.why("high").starts_at == 50.0


def test_the_room_that_was_made_goes_to_the_one_it_was_made_for() -> None:
    desk = Desk(node("n", 2), rules=PRIORITY)
    desk.submit("low", gpus=2, preemptible=True, grace_s=10.0)
    desk.started()
    desk.submit("high", gpus=2, priority=5)
    assert desk.preempted() == ["low"]
    for number in range(3):
        desk.submit(f"thief{number}", priority=4)
    assert desk.pass_time(10.0) == ["high"]


def test_what_would_start_and_be_preempted_at_once_does_not_start() -> None:
    desk = Desk(node("n", 2), rules=FIFO)
    desk.submit("first", preemptible=True)
    desk.submit("high", gpus=2, priority=5)
    decisions = desk.decide()
    assert [(type(each).__name__, each.job_id) for each in decisions] == [
        ("Start", "high"),
        ("Wait", "first"),
    ]
    assert decisions[1].reason == "gives way to high"


def test_who_starts_before_others_are_gone_and_ends_in_time_is_not_sent_away_again() -> None:
    desk = Desk(node("n", 4))
    desk.submit("slow", 2, preemptible=True, grace_s=60.0)
    assert desk.started() == ["slow"]
    desk.submit("large", 4, priority=9)
    assert desk.preempted() == ["slow"]
    desk.submit("short", 2, preemptible=True, grace_s=0.0, time_limit_s=30.0)
    assert desk.started() == ["short"], "it ends before the other one is gone"
    desk.scheduler.set_node(node("n", 4, memory_mib=255_000))  # all are looked at again
    assert desk.preempted() == []
    assert desk.why("large").starts_at == 60.0
    desk.scheduler.ended("slow")
    assert desk.preempted() == ["short"], "now it is all that is in the way"


def test_no_endless_preemption_between_two_tenants() -> None:
    quotas = Quotas({"a": Quota(of_gpus(2)), "b": Quota(of_gpus(2))})
    desk = Desk(node("n", 4), rules=Rules(order=Priority(), quotas=quotas))
    for number in range(4):
        desk.submit(f"a{number}", preemptible=True, priority=9, grace_s=1.0, tenant="a")
        desk.submit(f"b{number}", preemptible=True, priority=1, grace_s=1.0, tenant="b")
    for _ in range(30):
        desk.pass_time(desk.now + 1.0)
    held = sorted(desk.book.held)
    preempted = [each for each in desk.log if type(each).__name__ == "Preempt"]
    assert len(held) == 4
    assert sum(job.startswith("b") for job in held) == 2, "each tenant has its own part"
    assert len(preempted) <= 2


# --- moving -------------------------------------------------------------------------------------


def scattered(**wishes: object) -> Desk:
    """Two free GPUs on each of two nodes; `moves`, on the second, may be interrupted."""
    desk = Desk(node("a", 4), node("b", 4), rules=FIFO)
    desk.submit("filler", shape=Shape(gpus=4, nodes=frozenset({"a"})))
    desk.started()
    desk.submit("moves", **{"gpus": 2, "preemptible": True, "grace_s": 3.0} | wishes)
    desk.started()
    desk.scheduler.ended("filler")
    desk.submit("fixed", shape=Shape(gpus=2, nodes=frozenset({"a"})))
    assert desk.started() == ["fixed"]
    desk.submit("large", gpus=4)
    return desk


def test_what_can_be_interrupted_moves_so_that_a_large_job_fits() -> None:
    desk = scattered()
    assert desk.preempted() == ["moves"]
    assert desk.pass_time(3.0) == ["large", "moves"]
    assert [desk.book.held[job].places[0].node_id for job in ("large", "moves")] == ["b", "a"]


def test_nobody_moves_who_would_fit_nowhere_else_or_did_not_agree() -> None:
    pinned = scattered(shape=Shape(gpus=2, nodes=frozenset({"b"})))
    assert pinned.preempted() == []
    assert scattered(preemptible=False).preempted() == []
    still = scattered()
    still.scheduler.set_rules(Rules(order=Fifo(), moves_max=0))
    assert still.preempted() == []


# --- stranded parts -----------------------------------------------------------------------------


def test_fractions_that_pend_find_room_when_fractions_end() -> None:
    desk = Desk(node("n", 2), rules=FIFO)
    for number in range(4):
        desk.submit(f"half{number}", shape=Shape(gpus=1, gpu_milli=500), time_limit_s=10.0 + number)
    assert len(desk.started()) == 4
    desk.submit("most", shape=Shape(gpus=1, gpu_milli=700), time_limit_s=5.0)
    for number in range(20):
        desk.submit(f"more{number}", shape=Shape(gpus=1, gpu_milli=500), time_limit_s=10.0)
    started = desk.pass_time(40.0)
    assert "most" in started[:4]


def test_a_gpu_whose_cpus_are_gone_is_not_given_out() -> None:
    desk = Desk(node("n", 2), rules=FIFO)
    desk.submit("greedy", shape=Shape(cpu_milli=63_500), time_limit_s=9.0)
    desk.submit("worker", shape=Shape(gpus=1, cpu_milli=1000))
    assert desk.started() == ["greedy"]
    assert desk.why("worker").starts_at == 9.0


# --- the book -----------------------------------------------------------------------------------


def test_what_runs_already_is_held_where_it_is_and_twice_is_an_error() -> None:
    desk = Desk(node("n", 2, closed="draining"))
    request = desk.submit("j")
    desk.scheduler.started(request, (WorkerPlace("n", (1,)),), at=0.0)
    assert desk.book.free_on("n")[2][1][0] == 0
    other = desk.submit("k")
    with pytest.raises(UsageError):
        desk.scheduler.started(other, (WorkerPlace("n", (0,)), WorkerPlace("n", (1,))), at=0.0)
    assert desk.book.free_on("n")[2][0][0] == 1000
    with pytest.raises(UsageError, match="there is a job j"):
        desk.submit("j")
    assert desk.started() == [], "a closed node takes nothing more"
    assert desk.why("k").reason == "no node will do: n: draining"
    desk.scheduler.set_node(node("n", 2))
    assert desk.started() == ["k"]


def test_a_job_that_would_delay_a_reservation_at_its_best_place_starts_at_another() -> None:
    desk = Desk(node("n1"), node("n2"))
    desk.submit("r1", gpus=3, time_limit_s=100.0, shape=Shape(gpus=3, nodes=frozenset({"n1"})))
    desk.submit("r2", gpus=2, time_limit_s=200.0, shape=Shape(gpus=2, nodes=frozenset({"n2"})))
    desk.submit("large", gpus=4, time_limit_s=10.0)
    assert desk.started() == ["r1", "r2"]
    assert desk.scheduler.reservation is not None
    assert {place.node_id for place in desk.scheduler.reservation.places} == {"n1"}
    desk.submit("long", gpus=1, time_limit_s=1000.0)
    assert desk.started() == ["long"]
    assert desk.book.held["long"].places[0].node_id == "n2"
    desk.submit("short", gpus=1, time_limit_s=50.0)
    assert desk.started() == ["short"]
    assert desk.book.held["short"].places[0].node_id == "n1"


def test_who_takes_the_place_of_a_start_of_the_same_pass_puts_the_reservation_off() -> None:
    """The reservation is of a lower rank, and counted on what is taken now."""
    desk = Desk(node("n"), rules=Rules(order=FairShare()))
    desk.submit("runs", gpus=2, time_limit_s=100.0)
    assert desk.started() == ["runs"]
    desk.submit("large", gpus=4, priority=1, time_limit_s=10.0)
    assert desk.started() == []
    desk.submit("short", gpus=2, tenant="b", preemptible=True, time_limit_s=50.0)
    desk.submit("urgent", gpus=2, tenant="c", priority=2, time_limit_s=1000.0)
    desk.submit("other", gpus=1, tenant="d", time_limit_s=5000.0)
    assert desk.started() == ["urgent"]
    assert desk.scheduler.reservation is not None
    assert (desk.scheduler.reservation.job_id, desk.scheduler.reservation.starts_at) == ("large", 1000.0)


def test_a_job_that_must_be_near_another_starts_once_that_runs() -> None:
    desk = Desk(node("n1"), node("n2"))
    desk.submit("follower", near=frozenset({"leader"}))
    assert desk.started() == []
    desk.submit("leader", tenant="a")
    assert desk.started() == ["leader"]
    assert desk.started() == ["follower"]


def test_those_who_wait_are_told_who_they_wait_for_now() -> None:
    """Also those who are passed over, since jobs like them could not start."""
    desk = Desk(node("n"))
    desk.submit("runs", gpus=4, time_limit_s=100.0)
    desk.submit("first", gpus=4, time_limit_s=100.0)
    for number in range(3):
        desk.submit(f"j{number}", gpus=1, time_limit_s=10.0 + number)
    desk.decide()
    assert {desk.why(f"j{number}").reason for number in range(3)} == {
        "no room now, and behind first, which has a reservation"
    }
    desk.submit("late", gpus=1, time_limit_s=50.0)
    assert desk.why("late").reason == "no room now, and behind first, which has a reservation"
    desk.scheduler.withdraw("first")
    desk.submit("second", gpus=4, time_limit_s=100.0)
    desk.decide()
    assert "reservation on n" in desk.why("j0").reason
    assert (
        desk.why("second").reason
        == desk.why("late").reason
        == "no room now, and behind j0, which has a reservation"
    )


# --- rules that change --------------------------------------------------------------------------


def test_another_order_holds_from_the_next_pass_on() -> None:
    desk = Desk(node("n", 2), rules=FIFO)
    desk.submit("runs", gpus=2, time_limit_s=10.0)
    desk.submit("low", gpus=2)
    desk.submit("high", gpus=2, deadline_at=99.0, time_limit_s=10.0)
    assert desk.started() == ["runs"]
    assert desk.why("low").starts_at == 10.0
    desk.scheduler.set_rules(Rules(order=Priority(), preempts=False))
    assert desk.why("high").starts_at == 10.0
    assert desk.pass_time(10.0) == ["high"]
    assert [request.job_id for request in desk.scheduler.waiting] == ["low"]
    desk.scheduler.withdraw("low")
    assert desk.pass_time(20.0) == []


def test_a_quota_that_changes_holds_for_those_who_wait_and_leaves_what_runs() -> None:
    desk = Desk(node("n", 4))
    desk.submit("one", gpus=2)
    assert desk.started() == ["one"]
    desk.scheduler.set_rules(Rules(quotas=Quotas({"a": Quota(of_gpus(1))})))
    desk.submit("two")
    assert desk.started() == []
    assert "its quota is 1 GPU" in desk.why("two").reason
    assert list(desk.book.held) == ["one"]
    desk.scheduler.set_rules(Rules(quotas=Quotas({"a": Quota(of_gpus(3))})))
    assert desk.started() == ["two"]


def test_how_long_a_job_without_a_limit_is_taken_to_run_may_change() -> None:
    desk = Desk(node("n", 1), rules=FIFO)
    desk.submit("runs")
    desk.submit("waits")
    assert desk.started() == ["runs"]
    desk.scheduler.set_rules(Rules(order=Fifo(), assumed_s=60.0))
    assert desk.why("waits").starts_at == 60.0


def test_what_was_kept_for_a_job_is_not_under_other_rules() -> None:
    desk = Desk(node("n", 1), rules=FIFO)
    desk.submit("half", shape=on(0, milli=500))
    desk.submit("pinned", shape=on(0))
    desk.submit("first", shape=Shape(gpus=1, gpu_milli=500), deadline_at=99.0)
    assert desk.started() == ["half"]
    desk.scheduler.set_rules(Rules(order=Priority(), preempts=False))
    assert desk.started() == ["first"]


# --- jobs that name their GPUs ------------------------------------------------------------------


def on(*gpu_ids: int, milli: int = 1000, **needs: int) -> Shape:
    return Shape(gpus=1, gpu_milli=milli, nodes=frozenset({"n"}), gpu_ids=gpu_ids, **needs)


def test_a_job_gets_the_gpu_that_it_names_or_waits_for_it() -> None:
    desk = Desk(node("m", 4), node("n", 4), rules=FIFO)
    desk.submit("first", shape=on(2), time_limit_s=10.0)
    desk.submit("second", shape=on(2))
    desk.submit("third", shape=on(1, 2))
    assert desk.started() == ["first", "third"]
    assert desk.book.held["first"].places == (WorkerPlace("n", (2,)),)
    assert desk.book.held["third"].places == (WorkerPlace("n", (1,)),)
    assert (desk.why("second").reason, desk.why("second").starts_at) == ("GPU 2 of n is held by first", 10.0)
    assert desk.pass_time(10.0) == ["second"]


@pytest.mark.parametrize(
    ("held", "wanted", "why"),
    [
        (on(1, milli=700), on(1, milli=500), "GPU 1 of n has a share of 0.3 free, and other the rest"),
        (on(1, milli=100), on(1, milli=500, gpu_memory_mib=90_000), "GPU 1 of n has 81000 MiB free"),
        (on(1, milli=100), on(5), "no node will do: n: has no GPU 5"),
        (on(1, milli=100), on(0), "no node will do: n: its GPU 0 takes nothing new"),
        (
            on(1, milli=100),
            replace(on(1), gpus=2),
            "no node will do: n: 2 GPUs are asked for, and 1 by number",
        ),
        (
            on(1, milli=100),
            replace(on(1), models=frozenset({"A100"})),
            "no node will do: n: its GPUs are H200",
        ),
    ],
)
def test_what_is_in_the_way_of_a_named_gpu_is_told(held: Shape, wanted: Shape, why: str) -> None:
    outside = (0, 60_000, 0, 0)
    desk = Desk(node("n", 4, memory_outside_mib=outside, closed_gpus=frozenset({0})), rules=FIFO)
    desk.submit("other", shape=held)
    desk.submit("waits", shape=wanted)
    assert desk.started() == ["other"]
    assert desk.why("waits").reason == why


def test_a_named_gpu_of_another_tenant_is_waited_for() -> None:
    desk = Desk(node("n", 2), rules=FIFO)
    desk.submit("theirs", tenant="b", shape=on(0, milli=100))
    desk.submit("mine", shape=on(0, milli=100))
    assert desk.started() == ["theirs"]
    assert desk.why("mine").reason == "GPU 0 of n is held by theirs"
    assert desk.why("mine").starts_at == 86_400.0


@pytest.mark.parametrize("backfills", [True, False])
def test_who_waits_for_a_gpu_that_never_gets_free_holds_up_nobody_else(backfills: bool) -> None:
    desk = Desk(node("n", 4), node("m", 4), rules=Rules(order=Fifo(), backfills=backfills))
    desk.submit("forever", shape=on(0))
    desk.submit("pinned", shape=on(0))
    desk.submit("endless", gpus=3)
    desk.submit("runs", gpus=2, time_limit_s=10.0)
    assert desk.started() == ["forever", "endless", "runs"]
    desk.submit("large", gpus=4, time_limit_s=5.0)
    desk.submit("small", time_limit_s=10.0)
    assert desk.started() == (["small"] if backfills else [])
    reservation = desk.scheduler.reservation
    assert reservation is not None
    assert (reservation.job_id, reservation.starts_at) == ("large", 10.0), "the reservation is another's"
    assert desk.pass_time(10.0) == ["large"]


def test_a_gpu_that_is_waited_for_by_name_is_given_to_nobody_else() -> None:
    desk = Desk(node("n", 2), rules=FIFO)
    desk.submit("half", shape=on(0, milli=500), time_limit_s=10.0)
    desk.submit("pinned", shape=on(0))
    desk.submit("whole", shape=on(1))
    assert desk.started() == ["half", "whole"]
    for number in range(3):
        desk.submit(f"thief{number}", shape=Shape(gpus=1, gpu_milli=100))
        desk.submit(f"next{number}", shape=on(0, milli=100))
    assert desk.started() == []
    assert desk.why("next1").reason == "GPU 0 of n is kept for pinned"
    assert desk.pass_time(10.0) == ["pinned"]


def test_who_needs_a_gpu_that_is_kept_for_another_is_told_so() -> None:
    desk = Desk(node("n", 2), rules=FIFO)
    desk.submit("holds", shape=on(0), time_limit_s=10.0)
    desk.submit("pinned", shape=on(0), time_limit_s=5.0)
    desk.submit("both", gpus=2)
    desk.submit("other")
    assert desk.started() == ["holds", "other"]
    why = "does not fit even when all is free but what is kept for pinned"
    assert desk.why("both").reason == why
    desk.scheduler.ended("other")
    assert desk.pass_time(15.0) == ["pinned", "both"]


def test_a_higher_job_passes_by_what_is_kept_for_a_lower_one() -> None:
    desk = Desk(node("n", 2), rules=PRIORITY)
    desk.submit("half", shape=on(0, milli=500), preemptible=True, grace_s=0.0)
    desk.submit("pinned", shape=on(0))
    assert desk.started() == ["half"]
    desk.submit("share", shape=Shape(gpus=2, gpu_milli=100), priority=5)
    assert desk.started() == ["share"]
    desk.scheduler.ended("share")
    desk.submit("both", gpus=2, priority=5)
    assert desk.preempted() == ["half"]
    desk.scheduler.ended("half", again=True)
    assert desk.started() == ["both"]
    assert desk.why("pinned").reason == "GPU 0 of n is held by both"


def test_a_job_that_names_a_gpu_sends_away_a_lower_one_from_there() -> None:
    desk = Desk(node("n", 2), rules=PRIORITY)
    desk.submit("low0", shape=on(0), preemptible=True, grace_s=5.0)
    desk.submit("low1", shape=on(1), preemptible=True, grace_s=5.0)
    assert len(desk.started()) == 2
    desk.submit("high", shape=on(1), priority=5)
    assert desk.preempted() == ["low1"]
    desk.submit("thief", priority=4)
    assert desk.pass_time(5.0) == ["high"]


def test_what_was_kept_is_open_when_nobody_waits_for_it() -> None:
    desk = Desk(node("n", 1), rules=FIFO)
    desk.submit("half", shape=on(0, milli=500))
    desk.submit("pinned", shape=on(0))
    assert desk.started() == ["half"]
    desk.submit("other", shape=Shape(gpus=1, gpu_milli=500))
    assert desk.started() == []
    desk.scheduler.withdraw("pinned")
    assert desk.started() == ["other"]
    assert (len(desk.scheduler.claims), desk.book.kept_on("n")) == (0, frozenset())


def test_a_job_that_names_a_gpu_and_waits_for_cpus_has_a_reservation_like_others() -> None:
    desk = Desk(node("n", 2), rules=FIFO)
    desk.submit("greedy", shape=Shape(cpu_milli=60_000), time_limit_s=9.0)
    desk.submit("pinned", shape=on(0, cpu_milli=9_000))
    desk.submit("long", shape=Shape(cpu_milli=2_000))
    desk.submit("more", shape=Shape(cpu_milli=60_000))
    assert desk.started() == ["greedy", "long"]
    assert desk.why("pinned").reason == "has a reservation on n"
    assert desk.pass_time(9.0) == ["pinned"]


def test_gpus_by_number_are_of_one_node() -> None:
    for nodes in (frozenset[str](), frozenset({"n", "m"})):
        with pytest.raises(UsageError, match="name one node"):
            Shape(gpus=1, nodes=nodes, gpu_ids=(0,))


def test_no_preemption_for_more_than_was_asked_back() -> None:
    """An elastic job gets back its least size. With more it would be on loan, and go again, and so on."""
    quotas = Quotas({"a": Quota(of_gpus(1))})
    desk = Desk(node("n", 2), rules=Rules(order=Priority(), quotas=quotas))
    desk.submit("elastic", workers=2, workers_min=1, preemptible=True, grace_s=0.0)
    desk.submit("pair", gpus=2, priority=5, preemptible=True, grace_s=0.0)
    for _ in range(20):
        desk.pass_time(desk.now + 1.0)
    assert len([each for each in desk.log if type(each).__name__ == "Preempt"]) <= 1
    assert len(desk.book.held["elastic"].places) == 1


def test_what_is_left_of_a_gpu_that_was_kept_goes_to_who_has_the_reservation() -> None:
    desk = Desk(node("n", 1), node("m", 1), rules=FIFO)
    desk.submit("other", shape=Shape(gpus=1, nodes=frozenset({"m"})), time_limit_s=50.0)
    desk.submit("most", shape=on(0, milli=800), time_limit_s=10.0)
    desk.submit("pinned", shape=on(0, milli=300))
    desk.submit("half", shape=Shape(gpus=1, gpu_milli=500))
    assert desk.started() == ["other", "most"]
    assert desk.why("half").starts_at == 50.0
    assert desk.pass_time(10.0) == ["pinned", "half"]


def test_behind_a_reservation_the_real_reason_is_told() -> None:
    desk = Desk(node("n", 2), node("shut", 4, closed="draining"), node("m", 1))
    desk.submit("runs", gpus=2, time_limit_s=50.0, shape=Shape(gpus=2, nodes=frozenset({"n"})))
    desk.submit("other", shape=Shape(gpus=1, nodes=frozenset({"m"})), time_limit_s=60.0)
    desk.started()
    desk.submit("first", gpus=2, time_limit_s=50.0)
    desk.submit("drained", gpus=4)
    desk.submit("lonely", near=frozenset({"nobody"}))
    desk.submit("shy", apart=frozenset({"runs", "other"}), shape=Shape(gpus=1, labels=frozenset()))
    desk.submit("torn", near=frozenset({"runs"}), apart=frozenset({"runs", "other"}))
    desk.submit("late")
    assert desk.why("first").reason == "has a reservation on n"
    assert desk.why("drained").reason == "no node will do: shut: draining; n: has 2 GPUs; m: has 1 GPU"
    assert desk.why("lonely").reason == "waits for a job named nobody to run"
    assert desk.why("late").reason == "no room now, and behind first, which has a reservation"
    assert desk.why("torn").reason == "a job named other or runs runs wherever one named runs does"
    desk.scheduler.remove_node("shut")
    assert desk.why("shy").reason == "waits for a node on which no job named other or runs runs"


def test_an_elastic_job_that_takes_what_is_kept_for_others_is_not_sent_away_for_them_again() -> None:
    desk = Desk(node("n", 2), node("m", 2), rules=Rules(quotas=Quotas({"a": Quota(of_gpus(2.5))})))
    desk.submit("runs", tenant="b", shape=Shape(gpus=1, nodes=frozenset({"n"}), gpu_ids=(1,)))
    desk.started()
    both = Shape(gpus=2, nodes=frozenset({"n"}), gpu_ids=(0, 1))
    desk.submit("pinned", tenant="b", shape=both)
    assert "GPU 1 of n is held by runs" in desk.why("pinned").reason
    desk.submit("elastic", priority=5, preemptible=True, workers=8, workers_min=2, grace_s=0.0)
    assert desk.started() == ["elastic"]
    assert len(desk.book.held["elastic"].places) == 2, "a third worker would be on loan"
    desk.scheduler.set_node(node("n", 2))
    assert desk.preempted() == []


def test_one_that_comes_while_nobody_waits_can_start_without_a_pass() -> None:
    desk = Desk(node("n", 2))
    first = request_like(desk, "first")
    start = desk.scheduler.start_now(first, 5.0)
    assert start == Start("first", (WorkerPlace("n", (0,)),), "it fits: n")
    assert desk.scheduler.is_running("first")
    assert desk.book.usage("a").gpu_milli == 1000
    assert desk.decide() == []
    assert desk.scheduler.start_now(request_like(desk, "large", gpus=2), 5.0) is None
    assert not desk.scheduler.is_running("large"), "nothing has changed"
    assert not desk.scheduler.is_waiting("large")
    desk.scheduler.ended("first")
    assert desk.book.usage("a").gpu_milli == 0


def test_nobody_starts_without_a_pass_past_those_who_wait_or_against_a_quota() -> None:
    desk = Desk(node("n", 2))
    desk.submit("large", 4)
    assert desk.scheduler.start_now(request_like(desk, "small"), 0.0) is None, "one has just come"
    desk.decide()
    assert desk.scheduler.start_now(request_like(desk, "small"), 0.0) is None, "one waits"
    desk.scheduler.withdraw("large")
    assert desk.scheduler.start_now(request_like(desk, "small"), 0.0) is not None

    bound = Rules(quotas=Quotas({"a": Quota(own=of_gpus(1))}))
    desk = Desk(node("n", 2), rules=bound)
    assert desk.scheduler.start_now(request_like(desk, "one"), 0.0) is not None
    assert desk.scheduler.start_now(request_like(desk, "two"), 0.0) is None


def request_like(desk: Desk, name: str, gpus: int = 1) -> Request:
    """What the desk would submit, without submitting it."""
    request = desk.submit(name, gpus)
    desk.scheduler.withdraw(name)
    return request
