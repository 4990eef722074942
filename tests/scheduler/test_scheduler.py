"""Decisions of the scheduler, including known pitfalls of cluster scheduling."""

from __future__ import annotations

import pytest

from genie.errors import UsageError
from genie.model.job import Spread, Within
from genie.scheduler.decisions import Start
from genie.scheduler.explain import explain_pending_job
from genie.scheduler.order import FairShare, Fifo, Priority
from genie.scheduler.quota import Quota, Quotas, gpu_limit_amounts
from genie.scheduler.request import GpuFacts, JobRequest, Shape, WorkerPlace
from genie.scheduler.rules import Rules
from tests.scheduler.clusters import SchedulerHarness, node

FIFO = Rules(order=Fifo())
PRIORITY = Rules(order=Priority())


# --- order --------------------------------------------------------------------------------------


def test_fifo_starts_jobs_of_all_tenants_in_order_of_submission() -> None:
    harness = SchedulerHarness(node("n", 2), rules=FIFO)
    for number, tenant in enumerate(["b", "a", "c"]):
        harness.submit(f"j{number}", tenant=tenant)
    assert harness.started() == ["j0", "j1"]


def test_priority_orders_before_deadline() -> None:
    harness = SchedulerHarness(node("n", 2), rules=PRIORITY)
    harness.submit("plain")
    harness.submit("late", deadline_at=900.0)
    harness.submit("soon", deadline_at=100.0)
    harness.submit("high", priority=2)
    assert harness.started() == ["high", "soon"]


def test_aging_prevents_starvation_by_higher_priorities() -> None:
    harness = SchedulerHarness(
        node("n", 1),
        rules=Rules(order=Priority(aging_s=10.0), allows_preemption=False, allows_backfill=False),
    )
    harness.submit("running", time_limit_s=5.0)
    assert harness.started() == ["running"]
    harness.submit("low")
    started = []
    for number in range(6):
        harness.submit(f"high{number}", priority=2, time_limit_s=5.0)
        started += harness.advance(harness.now + 5.0)
    assert "low" in started
    assert started.index("low") >= 1


def test_tenant_with_the_smallest_dominant_share_is_next() -> None:
    harness = SchedulerHarness(node("n", 8))
    for number in range(8):
        harness.submit(f"many{number}", tenant="many")
    harness.submit("few0", tenant="few", shape=Shape(gpus=1, cpu_milli=32_000))
    harness.submit("few1", tenant="few", shape=Shape(gpus=1, cpu_milli=32_000))
    assert harness.started() == [
        "many0", "few0", "many1", "many2", "many3", "many4", "few1", "many5"
    ]  # fmt: skip


def test_job_displaced_by_one_of_higher_priority_gets_a_reservation() -> None:
    harness = SchedulerHarness(node("n", 1), rules=FIFO)
    harness.submit("small", shape=Shape(1, 100), preemptible=True, time_limit_s=1.0)
    harness.submit("next", time_limit_s=1.0)
    harness.submit("first", priority=1, time_limit_s=7.0)
    assert harness.started() == ["first"]
    assert harness.scheduler.reservation is not None
    assert (harness.scheduler.reservation.job_id, harness.scheduler.reservation.starts_at) == ("next", 7.0)


# --- gangs --------------------------------------------------------------------------------------


def test_gang_is_placed_as_a_whole_or_not_at_all() -> None:
    harness = SchedulerHarness(node("a", 4), node("b", 4))
    harness.submit("gang", gpus=3, workers=3)
    assert harness.started() == []
    assert harness.allocations.allocations_by_job == {}
    harness.scheduler.set_node(node("c", 4))
    (start,) = [each for each in harness.decide() if isinstance(each, Start)]
    assert sorted(place.node_id for place in start.places) == ["a", "b", "c"]


def test_two_gangs_do_not_deadlock() -> None:
    harness = SchedulerHarness(node("a", 4), node("b", 4), rules=FIFO)
    for name in ("one", "two"):
        harness.submit(name, gpus=2, workers=4, time_limit_s=10.0)
    assert harness.started() == ["one"]
    assert harness.pending("two").starts_at == 10.0
    assert harness.advance(10.0) == ["two"]


def test_elastic_gang_starts_with_its_minimum_or_more() -> None:
    harness = SchedulerHarness(node("a", 4), rules=FIFO)
    harness.submit("other")
    harness.submit("gang", workers=8, workers_min=2)
    starts = [each for each in harness.decide() if isinstance(each, Start)]
    assert [len(start.places) for start in starts] == [1, 3]
    harness.submit("large", workers=8, workers_min=4)
    assert harness.started() == []


def test_gang_is_placed_according_to_within_and_spread() -> None:
    harness = SchedulerHarness(*(node(f"{rack}{i}", 2, rack=rack) for rack in "xy" for i in range(2)))
    harness.submit("node", workers=2, within=Within.NODE)
    harness.submit("rack", gpus=2, workers=2, within=Within.RACK)
    harness.submit("spread", workers=3, spread=Spread.SPREAD)
    places = {each.job_id: each.places for each in harness.decide() if isinstance(each, Start)}
    assert len({place.node_id for place in places["node"]}) == 1
    assert {place.node_id[0] for place in places["rack"]} in ({"x"}, {"y"})
    assert "spread" not in places, "only one node fits"
    harness.scheduler.record_end("rack")
    (start,) = [each for each in harness.decide() if isinstance(each, Start)]
    assert len({place.node_id for place in start.places}) == 3


def test_job_is_placed_near_and_apart_from_named_jobs() -> None:
    harness = SchedulerHarness(node("n1", 4), node("n2", 4), rules=FIFO)
    harness.submit("server", gpus=2)
    harness.submit("client", near_job_names=frozenset({"server"}))
    harness.submit("spare", apart_job_names=frozenset({"server"}))
    places = {each.job_id: each.places[0].node_id for each in harness.decide() if isinstance(each, Start)}
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
def test_job_is_placed_only_on_nodes_that_suit_its_shape(shape: Shape, where: str) -> None:
    harness = SchedulerHarness(
        node("old", kinds=(GpuFacts("A100", "nvidia", 40_000, (8, 0)),)),
        node("red", kinds=(GpuFacts("MI300", "amd", 90_000),)),
        node("new", 1, labels=frozenset({("disk", "fast")})),
    )
    for number in range(2):
        harness.submit(f"j{number}", shape=shape)
    starts = [each for each in harness.decide() if isinstance(each, Start)]
    assert {place.node_id for start in starts for place in start.places} == {where}


# --- backfill -----------------------------------------------------------------------------------


def test_short_jobs_are_backfilled_and_long_ones_are_not() -> None:
    harness = SchedulerHarness(node("n", 4), rules=FIFO)
    harness.submit("first", gpus=3, time_limit_s=100.0)
    harness.submit("large", gpus=4, time_limit_s=100.0)
    harness.submit("long", gpus=1, time_limit_s=101.0)
    harness.submit("unknown", gpus=1)
    harness.submit("short", gpus=1, time_limit_s=100.0)
    assert harness.started() == ["first", "short"]
    assert harness.pending("large").starts_at == 100.0
    assert "would delay large" in harness.pending("long").reason
    assert harness.advance(100.0) == ["large"]


def test_long_job_is_backfilled_outside_the_reservation() -> None:
    harness = SchedulerHarness(node("a", 4), node("b", 2), rules=FIFO)
    harness.submit("first", gpus=3, time_limit_s=100.0)
    harness.submit("large", gpus=4)
    harness.submit("long", gpus=2)
    assert harness.started() == ["first", "long"]


def test_reservation_moves_from_a_closed_node() -> None:
    harness = SchedulerHarness(node("a", 4), node("b", 4), rules=FIFO)
    harness.submit("one", shape=Shape(gpus=4, nodes=frozenset({"a"})), time_limit_s=10.0)
    harness.submit("two", shape=Shape(gpus=4, nodes=frozenset({"b"})), time_limit_s=20.0)
    harness.submit("next", gpus=4)
    assert len(harness.started()) == 2
    assert harness.pending("next").starts_at == 10.0
    harness.scheduler.set_node(node("a", 4, blocked_reason="draining"))
    assert harness.advance(10.0) == []
    assert harness.advance(20.0) == ["next"]
    assert harness.allocations.allocations_by_job["next"].places[0].node_id == "b"


def test_no_job_is_backfilled_when_backfill_is_disabled() -> None:
    harness = SchedulerHarness(node("n", 4), rules=Rules(order=Fifo(), allows_backfill=False))
    harness.submit("first", gpus=3, time_limit_s=100.0)
    harness.submit("large", gpus=4)
    harness.submit("short", time_limit_s=1.0)
    assert harness.started() == ["first"]


def test_infeasible_job_does_not_block_the_queue() -> None:
    harness = SchedulerHarness(node("n", 4), rules=FIFO)
    harness.submit("impossible", gpus=8)
    harness.submit("next", gpus=4)
    assert harness.started() == ["next"]
    assert harness.pending("impossible").reason == "no suitable node: n: has 4 GPUs"


def test_large_job_is_not_starved_by_small_jobs() -> None:
    harness = SchedulerHarness(node("n", 4), rules=FIFO)
    started: list[str] = []
    for number in range(40):
        harness.submit(f"small{number}", time_limit_s=7.0 + number % 3)
        if number == 4:
            harness.submit("large", gpus=4, time_limit_s=5.0)
        started += harness.advance(harness.now + 2.0)
    assert "large" in started


# --- preemption ---------------------------------------------------------------------------------


def test_cheapest_sufficient_victims_get_their_grace_period() -> None:
    harness = SchedulerHarness(node("n", 4), rules=PRIORITY)
    harness.submit("old", gpus=2, preemptible=True, priority=1)
    harness.submit("fixed")
    harness.submit("low", preemptible=True, grace_s=20.0)
    assert sorted(harness.started()) == ["fixed", "low", "old"]
    harness.submit("high", priority=5)
    assert harness.preempted() == ["low"]
    assert harness.preempted() == [], "it is stopping already"
    assert harness.pending("high").starts_at == 20.0
    assert harness.advance(20.0) == ["high"]
    assert [request.job_id for request in harness.scheduler.queued_requests] == ["low"]


def test_pending_reason_names_the_stopping_job() -> None:
    harness = SchedulerHarness(node("n", 4), node("m", 1), rules=PRIORITY)
    harness.submit("low", gpus=4, preemptible=True, grace_s=20.0)
    harness.submit("other")
    assert sorted(harness.started()) == ["low", "other"]
    harness.submit("high", gpus=4, priority=5)
    assert harness.preempted() == ["low"]
    harness.scheduler.record_end("other")
    harness.decide()
    assert harness.pending("high").reason == "waiting for low to stop"


def test_equal_rank_and_non_preemptible_jobs_are_not_preempted() -> None:
    harness = SchedulerHarness(node("n", 2), rules=PRIORITY)
    harness.submit("equal", preemptible=True, priority=3)
    harness.submit("fixed")
    assert len(harness.started()) == 2
    harness.submit("high", priority=3)
    assert harness.preempted() == []


def test_no_preemption_if_it_would_not_suffice() -> None:
    harness = SchedulerHarness(node("n", 4), rules=PRIORITY)
    harness.submit("fixed", gpus=2, time_limit_s=50.0)
    harness.submit("low", preemptible=True, time_limit_s=50.0)
    assert len(harness.started()) == 2
    harness.submit("high", gpus=4, priority=5)
    assert harness.preempted() == []
    assert harness.pending("high").starts_at == 50.0


def test_freed_resources_go_to_the_preempting_job() -> None:
    harness = SchedulerHarness(node("n", 2), rules=PRIORITY)
    harness.submit("low", gpus=2, preemptible=True, grace_s=10.0)
    harness.started()
    harness.submit("high", gpus=2, priority=5)
    assert harness.preempted() == ["low"]
    for number in range(3):
        harness.submit(f"thief{number}", priority=4)
    assert harness.advance(10.0) == ["high"]


def test_job_that_would_be_preempted_at_once_does_not_start() -> None:
    harness = SchedulerHarness(node("n", 2), rules=FIFO)
    harness.submit("first", preemptible=True)
    harness.submit("high", gpus=2, priority=5)
    decisions = harness.decide()
    assert [(type(each).__name__, each.job_id) for each in decisions] == [
        ("Start", "high"),
        ("Wait", "first"),
    ]
    assert decisions[1].reason == "displaced by high"


def test_backfilled_job_that_ends_in_time_is_not_preempted() -> None:
    harness = SchedulerHarness(node("n", 4))
    harness.submit("slow", 2, preemptible=True, grace_s=60.0)
    assert harness.started() == ["slow"]
    harness.submit("large", 4, priority=9)
    assert harness.preempted() == ["slow"]
    harness.submit("short", 2, preemptible=True, grace_s=0.0, time_limit_s=30.0)
    assert harness.started() == ["short"], "it ends before the other one stops"
    harness.scheduler.set_node(node("n", 4, memory_mib=255_000))  # all are looked at again
    assert harness.preempted() == []
    assert harness.pending("large").starts_at == 60.0
    harness.scheduler.record_end("slow")
    assert harness.preempted() == ["short"], "now only it blocks the job"


def test_preemption_between_two_tenants_terminates() -> None:
    quotas = Quotas({"a": Quota(gpu_limit_amounts(2)), "b": Quota(gpu_limit_amounts(2))})
    harness = SchedulerHarness(node("n", 4), rules=Rules(order=Priority(), quotas=quotas))
    for number in range(4):
        harness.submit(f"a{number}", preemptible=True, priority=9, grace_s=1.0, tenant="a")
        harness.submit(f"b{number}", preemptible=True, priority=1, grace_s=1.0, tenant="b")
    for _ in range(30):
        harness.advance(harness.now + 1.0)
    held = sorted(harness.allocations.allocations_by_job)
    preempted = [each for each in harness.log if type(each).__name__ == "Preempt"]
    assert len(held) == 4
    assert sum(job.startswith("b") for job in held) == 2, "each tenant has its own quota"
    assert len(preempted) <= 2


# --- migration ----------------------------------------------------------------------------------


def fragmented_cluster(**options: object) -> SchedulerHarness:
    """Two free GPUs on each of two nodes; `moves`, on the second, is preemptible."""
    harness = SchedulerHarness(node("a", 4), node("b", 4), rules=FIFO)
    harness.submit("filler", shape=Shape(gpus=4, nodes=frozenset({"a"})))
    harness.started()
    harness.submit("moves", **{"gpus": 2, "preemptible": True, "grace_s": 3.0} | options)
    harness.started()
    harness.scheduler.record_end("filler")
    harness.submit("fixed", shape=Shape(gpus=2, nodes=frozenset({"a"})))
    assert harness.started() == ["fixed"]
    harness.submit("large", gpus=4)
    return harness


def test_preemptible_jobs_move_so_that_a_large_job_fits() -> None:
    harness = fragmented_cluster()
    assert harness.preempted() == ["moves"]
    assert harness.advance(3.0) == ["large", "moves"]
    assert [harness.allocations.allocations_by_job[job].places[0].node_id for job in ("large", "moves")] == [
        "b",
        "a",
    ]


def test_job_that_fits_nowhere_else_or_is_not_preemptible_is_not_moved_to_defragment() -> None:
    pinned = fragmented_cluster(shape=Shape(gpus=2, nodes=frozenset({"b"})))
    assert pinned.preempted() == []
    assert fragmented_cluster(preemptible=False).preempted() == []
    still = fragmented_cluster()
    still.scheduler.set_rules(Rules(order=Fifo(), migrations_per_job_max=0))
    assert still.preempted() == []


# --- fragmentation ------------------------------------------------------------------------------


def test_pending_job_for_a_fraction_of_a_gpu_is_not_starved_by_smaller_ones() -> None:
    harness = SchedulerHarness(node("n", 2), rules=FIFO)
    for number in range(4):
        harness.submit(f"half{number}", shape=Shape(gpus=1, gpu_milli=500), time_limit_s=10.0 + number)
    assert len(harness.started()) == 4
    harness.submit("most", shape=Shape(gpus=1, gpu_milli=700), time_limit_s=5.0)
    for number in range(20):
        harness.submit(f"more{number}", shape=Shape(gpus=1, gpu_milli=500), time_limit_s=10.0)
    started = harness.advance(40.0)
    assert "most" in started[:4]


def test_gpu_without_free_cpus_is_not_used() -> None:
    harness = SchedulerHarness(node("n", 2), rules=FIFO)
    harness.submit("greedy", shape=Shape(cpu_milli=63_500), time_limit_s=9.0)
    harness.submit("worker", shape=Shape(gpus=1, cpu_milli=1000))
    assert harness.started() == ["greedy"]
    assert harness.pending("worker").starts_at == 9.0


# --- events -------------------------------------------------------------------------------------


def test_job_running_on_a_closed_node_is_recorded_and_cannot_be_added_twice() -> None:
    harness = SchedulerHarness(node("n", 2, blocked_reason="draining"))
    request = harness.submit("j")
    harness.scheduler.record_start(request, (WorkerPlace("n", (1,)),), started_at=0.0)
    assert harness.allocations.free_resources_of_node("n")[2][1][0] == 0
    other = harness.submit("k")
    with pytest.raises(UsageError):
        harness.scheduler.record_start(
            other, (WorkerPlace("n", (0,)), WorkerPlace("n", (1,))), started_at=0.0
        )
    assert harness.allocations.free_resources_of_node("n")[2][0][0] == 1000
    with pytest.raises(UsageError, match="job j already exists"):
        harness.submit("j")
    assert harness.started() == [], "a closed node accepts no jobs"
    assert harness.pending("k").reason == "no suitable node: n: draining"
    harness.scheduler.set_node(node("n", 2))
    assert harness.started() == ["k"]


def test_job_that_would_delay_a_reservation_starts_elsewhere() -> None:
    harness = SchedulerHarness(node("n1"), node("n2"))
    harness.submit("r1", gpus=3, time_limit_s=100.0, shape=Shape(gpus=3, nodes=frozenset({"n1"})))
    harness.submit("r2", gpus=2, time_limit_s=200.0, shape=Shape(gpus=2, nodes=frozenset({"n2"})))
    harness.submit("large", gpus=4, time_limit_s=10.0)
    assert harness.started() == ["r1", "r2"]
    assert harness.scheduler.reservation is not None
    assert {place.node_id for place in harness.scheduler.reservation.places} == {"n1"}
    harness.submit("long", gpus=1, time_limit_s=1000.0)
    assert harness.started() == ["long"]
    assert harness.allocations.allocations_by_job["long"].places[0].node_id == "n2"
    harness.submit("short", gpus=1, time_limit_s=50.0)
    assert harness.started() == ["short"]
    assert harness.allocations.allocations_by_job["short"].places[0].node_id == "n1"


def test_job_that_displaces_a_start_of_the_same_pass_delays_the_reservation_of_another_job() -> None:
    """The reservation has a lower rank, and its places are taken now."""
    harness = SchedulerHarness(node("n"), rules=Rules(order=FairShare()))
    harness.submit("runs", gpus=2, time_limit_s=100.0)
    assert harness.started() == ["runs"]
    harness.submit("large", gpus=4, priority=1, time_limit_s=10.0)
    assert harness.started() == []
    harness.submit("short", gpus=2, tenant="b", preemptible=True, time_limit_s=50.0)
    harness.submit("urgent", gpus=2, tenant="c", priority=2, time_limit_s=1000.0)
    harness.submit("other", gpus=1, tenant="d", time_limit_s=5000.0)
    assert harness.started() == ["urgent"]
    assert harness.scheduler.reservation is not None
    assert (harness.scheduler.reservation.job_id, harness.scheduler.reservation.starts_at) == (
        "large",
        1000.0,
    )


def test_near_job_starts_after_its_neighbour() -> None:
    harness = SchedulerHarness(node("n1"), node("n2"))
    harness.submit("follower", near_job_names=frozenset({"leader"}))
    assert harness.started() == []
    harness.submit("leader", tenant="a")
    assert harness.started() == ["leader"]
    assert harness.started() == ["follower"]


def test_pending_reasons_follow_the_current_reservation() -> None:
    """Including jobs that were skipped with their group."""
    harness = SchedulerHarness(node("n"))
    harness.submit("runs", gpus=4, time_limit_s=100.0)
    harness.submit("first", gpus=4, time_limit_s=100.0)
    for number in range(3):
        harness.submit(f"j{number}", gpus=1, time_limit_s=10.0 + number)
    harness.decide()
    assert {harness.pending(f"j{number}").reason for number in range(3)} == {
        "not enough free resources, and behind first, which has a reservation"
    }
    harness.submit("late", gpus=1, time_limit_s=50.0)
    assert (
        harness.pending("late").reason
        == "not enough free resources, and behind first, which has a reservation"
    )
    harness.scheduler.withdraw("first")
    harness.submit("second", gpus=4, time_limit_s=100.0)
    harness.decide()
    assert "waiting for resources on n (reserved for this job)" in harness.pending("j0").reason
    assert (
        harness.pending("second").reason
        == harness.pending("late").reason
        == "not enough free resources, and behind j0, which has a reservation"
    )


# --- changed rules ------------------------------------------------------------------------------


def test_new_queue_order_applies_from_the_next_pass() -> None:
    harness = SchedulerHarness(node("n", 2), rules=FIFO)
    harness.submit("runs", gpus=2, time_limit_s=10.0)
    harness.submit("low", gpus=2)
    harness.submit("high", gpus=2, deadline_at=99.0, time_limit_s=10.0)
    assert harness.started() == ["runs"]
    assert harness.pending("low").starts_at == 10.0
    harness.scheduler.set_rules(Rules(order=Priority(), allows_preemption=False))
    assert harness.pending("high").starts_at == 10.0
    assert harness.advance(10.0) == ["high"]
    assert [request.job_id for request in harness.scheduler.queued_requests] == ["low"]
    harness.scheduler.withdraw("low")
    assert harness.advance(20.0) == []


def test_new_quota_applies_to_queued_jobs_only() -> None:
    harness = SchedulerHarness(node("n", 4))
    harness.submit("one", gpus=2)
    assert harness.started() == ["one"]
    harness.scheduler.set_rules(Rules(quotas=Quotas({"a": Quota(gpu_limit_amounts(1))})))
    harness.submit("two")
    assert harness.started() == []
    assert "its quota of 1 GPU" in harness.pending("two").reason
    assert list(harness.allocations.allocations_by_job) == ["one"]
    harness.scheduler.set_rules(Rules(quotas=Quotas({"a": Quota(gpu_limit_amounts(3))})))
    assert harness.started() == ["two"]


def test_changed_assumed_run_time_changes_the_estimated_start() -> None:
    harness = SchedulerHarness(node("n", 1), rules=FIFO)
    harness.submit("runs")
    harness.submit("waits")
    assert harness.started() == ["runs"]
    harness.scheduler.set_rules(Rules(order=Fifo(), assumed_runtime_s=60.0))
    assert harness.pending("waits").starts_at == 60.0


def test_job_starts_without_a_pass_if_the_queue_is_empty() -> None:
    harness = SchedulerHarness(node("n", 2))
    first = new_request(harness, "first")
    start = harness.scheduler.try_start_now(first, 5.0)
    assert start == Start("first", (WorkerPlace("n", (0,)),), "fits: n")
    assert harness.scheduler.is_running("first")
    assert harness.allocations.usage("a").gpu_milli == 1000
    assert harness.decide() == []
    assert harness.scheduler.try_start_now(new_request(harness, "large", gpus=2), 5.0) is None
    assert not harness.scheduler.is_running("large"), "nothing has changed"
    assert not harness.scheduler.is_queued("large")
    harness.scheduler.record_end("first")
    assert harness.allocations.usage("a").gpu_milli == 0


def test_job_does_not_start_without_a_pass_if_jobs_are_queued_or_over_quota() -> None:
    harness = SchedulerHarness(node("n", 2))
    harness.submit("large", 4)
    assert harness.scheduler.try_start_now(new_request(harness, "small"), 0.0) is None, (
        "another job has arrived"
    )
    harness.decide()
    assert harness.scheduler.try_start_now(new_request(harness, "small"), 0.0) is None, "a job is queued"
    harness.scheduler.withdraw("large")
    assert harness.scheduler.try_start_now(new_request(harness, "small"), 0.0) is not None

    bound = Rules(quotas=Quotas({"a": Quota(guaranteed=gpu_limit_amounts(1))}))
    harness = SchedulerHarness(node("n", 2), rules=bound)
    assert harness.scheduler.try_start_now(new_request(harness, "one"), 0.0) is not None
    assert harness.scheduler.try_start_now(new_request(harness, "two"), 0.0) is None


def new_request(harness: SchedulerHarness, name: str, gpus: int = 1) -> JobRequest:
    """What the harness would submit, without submitting it."""
    request = harness.submit(name, gpus)
    harness.scheduler.withdraw(name)
    return request


# --- nodes that have left ---------------------------------------------------------------------


def test_pending_reason_names_a_node_that_has_left_only_if_the_job_needs_it() -> None:
    gone: dict[str, object] = {"blocked_reason": "it has left the cluster", "has_left": True}
    harness = SchedulerHarness(node("n", 2), node("gone-4", 4, **gone), node("gone-8", 8, **gone))
    harness.submit("needs-8", 8)
    harness.submit("needs-16", 16)
    harness.decide()
    assert harness.pending("needs-8").reason == (
        "no suitable node: gone-8: it has left the cluster; n: has 2 GPUs"
    )
    assert harness.pending("needs-16").reason == "no suitable node: n: has 2 GPUs"
    found = explain_pending_job(harness.scheduler, "needs-8", reason="", now=0.0)
    assert {name for group in found.blocked_nodes for name in group.nodes} == {"n", "gone-8"}
