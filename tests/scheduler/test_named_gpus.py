"""Decisions of the scheduler on jobs that request GPUs by number, and GPU reservations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from genie.errors import UsageError
from genie.scheduler.order import Fifo, Priority
from genie.scheduler.quota import Quota, Quotas, gpu_limit_amounts
from genie.scheduler.request import Shape, WorkerPlace
from genie.scheduler.rules import Rules
from tests.scheduler.clusters import SchedulerHarness, node

FIFO = Rules(order=Fifo())
PRIORITY = Rules(order=Priority())


def on_gpus(*gpu_ids: int, milli: int = 1000, **needs: int) -> Shape:
    return Shape(gpus=1, gpu_milli=milli, nodes=frozenset({"n"}), gpu_ids=gpu_ids, **needs)


def test_job_gets_the_gpu_it_names_or_waits() -> None:
    harness = SchedulerHarness(node("m", 4), node("n", 4), rules=FIFO)
    harness.submit("first", shape=on_gpus(2), time_limit_s=10.0)
    harness.submit("second", shape=on_gpus(2))
    harness.submit("third", shape=on_gpus(1, 2))
    assert harness.started() == ["first", "third"]
    assert harness.allocations.allocations_by_job["first"].places == (WorkerPlace("n", (2,)),)
    assert harness.allocations.allocations_by_job["third"].places == (WorkerPlace("n", (1,)),)
    assert (harness.pending("second").reason, harness.pending("second").starts_at) == (
        "GPU 2 of n is held by first",
        10.0,
    )
    assert harness.advance(10.0) == ["second"]


@pytest.mark.parametrize(
    ("held", "wanted", "why"),
    [
        (
            on_gpus(1, milli=700),
            on_gpus(1, milli=500),
            "GPU 1 of n is 0.3 free, the rest is held by other",
        ),
        (
            on_gpus(1, milli=100),
            on_gpus(1, milli=500, gpu_memory_mib=90_000),
            "GPU 1 of n has 79.1 GiB of memory free",
        ),
        (on_gpus(1, milli=100), on_gpus(5), "no suitable node: n: has no GPU 5"),
        (on_gpus(1, milli=100), on_gpus(0), "no suitable node: n: GPU 0 accepts no new jobs"),
        (
            on_gpus(1, milli=100),
            replace(on_gpus(1), gpus=2),
            "no suitable node: n: 2 GPUs are requested, but 1 by number",
        ),
        (
            on_gpus(1, milli=100),
            replace(on_gpus(1), models=frozenset({"A100"})),
            "no suitable node: n: GPU model is H200",
        ),
    ],
)
def test_pending_reason_states_why_a_requested_gpu_is_not_free(held: Shape, wanted: Shape, why: str) -> None:
    outside = (0, 60_000, 0, 0)
    harness = SchedulerHarness(
        node("n", 4, memory_used_outside_cluster_mib=outside, blocked_gpus=frozenset({0})), rules=FIFO
    )
    harness.submit("other", shape=held)
    harness.submit("waits", shape=wanted)
    assert harness.started() == ["other"]
    assert harness.pending("waits").reason == why


def test_job_waits_for_a_named_gpu_of_another_tenant() -> None:
    harness = SchedulerHarness(node("n", 2), rules=FIFO)
    harness.submit("theirs", tenant="b", shape=on_gpus(0, milli=100))
    harness.submit("mine", shape=on_gpus(0, milli=100))
    assert harness.started() == ["theirs"]
    assert harness.pending("mine").reason == "GPU 0 of n is held by theirs"
    assert harness.pending("mine").starts_at == 86_400.0


@pytest.mark.parametrize("backfills", [True, False])
def test_job_waiting_for_a_named_gpu_does_not_block_others(backfills: bool) -> None:
    harness = SchedulerHarness(
        node("n", 4), node("m", 4), rules=Rules(order=Fifo(), allows_backfill=backfills)
    )
    harness.submit("forever", shape=on_gpus(0))
    harness.submit("pinned", shape=on_gpus(0))
    harness.submit("endless", gpus=3)
    harness.submit("runs", gpus=2, time_limit_s=10.0)
    assert harness.started() == ["forever", "endless", "runs"]
    harness.submit("large", gpus=4, time_limit_s=5.0)
    harness.submit("small", time_limit_s=10.0)
    assert harness.started() == (["small"] if backfills else [])
    reservation = harness.scheduler.reservation
    assert reservation is not None
    assert (reservation.job_id, reservation.starts_at) == ("large", 10.0), "another job has the reservation"
    assert harness.advance(10.0) == ["large"]


def test_named_gpu_is_reserved_for_the_waiting_job() -> None:
    harness = SchedulerHarness(node("n", 2), rules=FIFO)
    harness.submit("half", shape=on_gpus(0, milli=500), time_limit_s=10.0)
    harness.submit("pinned", shape=on_gpus(0))
    harness.submit("whole", shape=on_gpus(1))
    assert harness.started() == ["half", "whole"]
    for number in range(3):
        harness.submit(f"thief{number}", shape=Shape(gpus=1, gpu_milli=100))
        harness.submit(f"next{number}", shape=on_gpus(0, milli=100))
    assert harness.started() == []
    assert harness.pending("next1").reason == "GPU 0 of n is reserved for pinned"
    assert harness.advance(10.0) == ["pinned"]


def test_pending_reason_names_the_job_with_the_gpu_reservation() -> None:
    harness = SchedulerHarness(node("n", 2), rules=FIFO)
    harness.submit("holds", shape=on_gpus(0), time_limit_s=10.0)
    harness.submit("pinned", shape=on_gpus(0), time_limit_s=5.0)
    harness.submit("both", gpus=2)
    harness.submit("other")
    assert harness.started() == ["holds", "other"]
    why = "does not fit on an empty cluster without the GPUs reserved for pinned"
    assert harness.pending("both").reason == why
    harness.scheduler.record_end("other")
    assert harness.advance(15.0) == ["pinned", "both"]


def test_job_of_higher_rank_overrides_a_gpu_reservation() -> None:
    harness = SchedulerHarness(node("n", 2), rules=PRIORITY)
    harness.submit("half", shape=on_gpus(0, milli=500), preemptible=True, grace_s=0.0)
    harness.submit("pinned", shape=on_gpus(0))
    assert harness.started() == ["half"]
    harness.submit("share", shape=Shape(gpus=2, gpu_milli=100), priority=5)
    assert harness.started() == ["share"]
    harness.scheduler.record_end("share")
    harness.submit("both", gpus=2, priority=5)
    assert harness.preempted() == ["half"]
    harness.scheduler.record_end("half", requeue=True)
    assert harness.started() == ["both"]
    assert harness.pending("pinned").reason == "GPU 0 of n is held by both"


def test_job_that_names_a_gpu_preempts_a_lower_one() -> None:
    harness = SchedulerHarness(node("n", 2), rules=PRIORITY)
    harness.submit("low0", shape=on_gpus(0), preemptible=True, grace_s=5.0)
    harness.submit("low1", shape=on_gpus(1), preemptible=True, grace_s=5.0)
    assert len(harness.started()) == 2
    harness.submit("high", shape=on_gpus(1), priority=5)
    assert harness.preempted() == ["low1"]
    harness.submit("thief", priority=4)
    assert harness.advance(5.0) == ["high"]


def test_gpu_reservation_ends_when_its_job_is_withdrawn() -> None:
    harness = SchedulerHarness(node("n", 1), rules=FIFO)
    harness.submit("half", shape=on_gpus(0, milli=500))
    harness.submit("pinned", shape=on_gpus(0))
    assert harness.started() == ["half"]
    harness.submit("other", shape=Shape(gpus=1, gpu_milli=500))
    assert harness.started() == []
    harness.scheduler.withdraw("pinned")
    assert harness.started() == ["other"]
    assert (len(harness.scheduler.gpu_reservations), harness.allocations.reserved_gpus("n")) == (
        0,
        frozenset(),
    )


def test_job_with_a_named_gpu_that_lacks_cpus_gets_the_reservation() -> None:
    harness = SchedulerHarness(node("n", 2), rules=FIFO)
    harness.submit("greedy", shape=Shape(cpu_milli=60_000), time_limit_s=9.0)
    harness.submit("pinned", shape=on_gpus(0, cpu_milli=9_000))
    harness.submit("long", shape=Shape(cpu_milli=2_000))
    harness.submit("more", shape=Shape(cpu_milli=60_000))
    assert harness.started() == ["greedy", "long"]
    assert harness.pending("pinned").reason == "waiting for resources on n (reserved for this job)"
    assert harness.advance(9.0) == ["pinned"]


def test_shape_with_gpu_numbers_must_name_one_node() -> None:
    for nodes in (frozenset[str](), frozenset({"n", "m"})):
        with pytest.raises(UsageError, match="name the node"):
            Shape(gpus=1, nodes=nodes, gpu_ids=(0,))


def test_reclaiming_preempts_no_more_than_requested() -> None:
    """An elastic job reclaims its minimum. More workers would be on borrowed quota and preempted again."""
    quotas = Quotas({"a": Quota(gpu_limit_amounts(1))})
    harness = SchedulerHarness(node("n", 2), rules=Rules(order=Priority(), quotas=quotas))
    harness.submit("elastic", workers=2, workers_min=1, preemptible=True, grace_s=0.0)
    harness.submit("pair", gpus=2, priority=5, preemptible=True, grace_s=0.0)
    for _ in range(20):
        harness.advance(harness.now + 1.0)
    assert len([each for each in harness.log if type(each).__name__ == "Preempt"]) <= 1
    assert len(harness.allocations.allocations_by_job["elastic"].places) == 1


def test_reserved_gpu_is_shared_by_the_reservation_holder_and_a_later_fraction() -> None:
    harness = SchedulerHarness(node("n", 1), node("m", 1), rules=FIFO)
    harness.submit("other", shape=Shape(gpus=1, nodes=frozenset({"m"})), time_limit_s=50.0)
    harness.submit("most", shape=on_gpus(0, milli=800), time_limit_s=10.0)
    harness.submit("pinned", shape=on_gpus(0, milli=300))
    harness.submit("half", shape=Shape(gpus=1, gpu_milli=500))
    assert harness.started() == ["other", "most"]
    assert harness.pending("half").starts_at == 50.0
    assert harness.advance(10.0) == ["pinned", "half"]


def test_job_behind_a_reservation_has_its_own_reason() -> None:
    harness = SchedulerHarness(node("n", 2), node("shut", 4, blocked_reason="draining"), node("m", 1))
    harness.submit("runs", gpus=2, time_limit_s=50.0, shape=Shape(gpus=2, nodes=frozenset({"n"})))
    harness.submit("other", shape=Shape(gpus=1, nodes=frozenset({"m"})), time_limit_s=60.0)
    harness.started()
    harness.submit("first", gpus=2, time_limit_s=50.0)
    harness.submit("drained", gpus=4)
    harness.submit("lonely", near_job_names=frozenset({"nobody"}))
    harness.submit(
        "shy", apart_job_names=frozenset({"runs", "other"}), shape=Shape(gpus=1, labels=frozenset())
    )
    harness.submit("torn", near_job_names=frozenset({"runs"}), apart_job_names=frozenset({"runs", "other"}))
    harness.submit("late")
    assert harness.pending("first").reason == "waiting for resources on n (reserved for this job)"
    assert (
        harness.pending("drained").reason
        == "only node shut matches, but it accepts no jobs (draining); n: has 2 GPUs; m: has 1 GPU"
    )
    assert harness.pending("lonely").reason == "no job named nobody is running"
    assert (
        harness.pending("late").reason
        == "not enough free resources, and behind first, which has a reservation"
    )
    assert (
        harness.pending("torn").reason
        == "every node with a job named runs also runs a job named other or runs"
    )
    harness.scheduler.remove_node("shut")
    assert harness.pending("shy").reason == "every node runs a job named other or runs"


def test_elastic_job_on_a_reserved_gpu_is_not_preempted_again() -> None:
    harness = SchedulerHarness(
        node("n", 2), node("m", 2), rules=Rules(quotas=Quotas({"a": Quota(gpu_limit_amounts(2.5))}))
    )
    harness.submit("runs", tenant="b", shape=Shape(gpus=1, nodes=frozenset({"n"}), gpu_ids=(1,)))
    harness.started()
    both = Shape(gpus=2, nodes=frozenset({"n"}), gpu_ids=(0, 1))
    harness.submit("pinned", tenant="b", shape=both)
    assert "GPU 1 of n is held by runs" in harness.pending("pinned").reason
    harness.submit("elastic", priority=5, preemptible=True, workers=8, workers_min=2, grace_s=0.0)
    assert harness.started() == ["elastic"]
    assert len(harness.allocations.allocations_by_job["elastic"].places) == 2, (
        "a third worker would be on borrowed quota"
    )
    harness.scheduler.set_node(node("n", 2))
    assert harness.preempted() == []


def test_new_scheduling_rules_drop_gpu_reservations() -> None:
    harness = SchedulerHarness(node("n", 1), rules=FIFO)
    harness.submit("half", shape=on_gpus(0, milli=500))
    harness.submit("pinned", shape=on_gpus(0))
    harness.submit("first", shape=Shape(gpus=1, gpu_milli=500), deadline_at=99.0)
    assert harness.started() == ["half"]
    harness.scheduler.set_rules(Rules(order=Priority(), allows_preemption=False))
    assert harness.started() == ["first"]
