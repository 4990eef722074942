"""Quotas, borrowing and reclaiming."""

from __future__ import annotations

from genie.scheduler.quota import Quota, Quotas, gpu_limit_amounts
from genie.scheduler.request import Shape
from genie.scheduler.rules import Rules
from tests.scheduler.clusters import SchedulerHarness, node


def test_borrowed_quota_is_reclaimed_behind_a_reservation() -> None:
    quotas = Quotas(
        {"a": Quota(gpu_limit_amounts(8)), "b": Quota(gpu_limit_amounts(4)), "c": Quota(gpu_limit_amounts(0))}
    )
    harness = SchedulerHarness(node("n1", 8), node("n2", 8), rules=Rules(quotas=quotas))
    for name, gpus, where in (("long", 8, "n1"), ("part", 4, "n2")):
        shape = Shape(gpus=gpus, nodes=frozenset({where}))
        harness.submit(name, tenant="other", shape=shape, time_limit_s=1000.0)
    loans = [f"loan{number}" for number in range(4)]
    for name in loans:
        harness.submit(name, tenant="c", preemptible=True, grace_s=30.0)
    assert len(harness.started()) == 6
    harness.submit("wide", tenant="a", gpus=8)
    assert harness.pending("wide").starts_at == 1000
    harness.submit("mine", tenant="b", gpus=4)
    assert sorted(harness.preempted()) == loans
    assert harness.pending("mine").starts_at == 30
    harness.submit("late", tenant="other", gpus=1, time_limit_s=5.0)
    assert harness.started() == [], "the freed GPUs are reserved for their owner"
    assert harness.preempted() == [], "no further job is preempted"
    assert harness.pending("wide").starts_at == 1000
    assert harness.advance(to=30.0) == ["mine"]
    assert "wide" in harness.advance(to=1000.0)


def test_borrowed_quota_on_reserved_nodes_is_not_reclaimed() -> None:
    quotas = Quotas(
        {"a": Quota(gpu_limit_amounts(8)), "b": Quota(gpu_limit_amounts(4)), "c": Quota(gpu_limit_amounts(0))}
    )
    harness = SchedulerHarness(node("n1", 8), rules=Rules(quotas=quotas))
    harness.submit("long", tenant="other", gpus=4, time_limit_s=1000.0)
    for number in range(4):
        harness.submit(f"loan{number}", tenant="c", preemptible=True, time_limit_s=900.0)
    assert len(harness.started()) == 5
    harness.submit("wide", tenant="a", gpus=8)
    assert harness.pending("wide").starts_at == 1000
    harness.submit("mine", tenant="b", gpus=4)
    assert harness.preempted() == []
    assert harness.pending("wide").starts_at == 1000


def test_borrowed_quota_is_reclaimed() -> None:
    quotas = Quotas({"a": Quota(gpu_limit_amounts(2)), "b": Quota(gpu_limit_amounts(2))})
    harness = SchedulerHarness(node("n", 4), rules=Rules(quotas=quotas))
    for number in range(3):
        harness.submit(f"fixed{number}", tenant="a")
    assert harness.started() == ["fixed0", "fixed1"]
    harness.submit("loan", tenant="a", gpus=2, preemptible=True, priority=50, grace_s=5.0)
    assert harness.started() == ["loan"]
    assert "only preemptible jobs may borrow" in harness.pending("fixed2").reason
    harness.submit("owner", tenant="b")
    assert harness.preempted() == ["loan"]
    assert harness.advance(5.0) == ["owner"]
    assert "loan" in [request.job_id for request in harness.scheduler.queued_requests]


def test_borrowing_is_limited() -> None:
    quotas = Quotas({"a": Quota(gpu_limit_amounts(1), borrowable=gpu_limit_amounts(1))})
    harness = SchedulerHarness(node("n", 4), rules=Rules(quotas=quotas))
    for number in range(3):
        harness.submit(f"j{number}", preemptible=True)
    assert harness.started() == ["j0", "j1"]
    assert "may borrow 1 GPU" in harness.pending("j2").reason


def test_job_within_quota_is_not_preempted_behind_a_reservation() -> None:
    quotas = Quotas(
        {"a": Quota(gpu_limit_amounts(8)), "b": Quota(gpu_limit_amounts(4)), "c": Quota(gpu_limit_amounts(4))}
    )
    harness = SchedulerHarness(node("n1", 8), node("n2", 8), rules=Rules(quotas=quotas))
    for name, gpus, where in (("long", 8, "n1"), ("part", 4, "n2")):
        shape = Shape(gpus=gpus, nodes=frozenset({where}))
        harness.submit(name, tenant="other", shape=shape, time_limit_s=1000.0)
    harness.submit("low", tenant="c", gpus=4, preemptible=True)
    assert len(harness.started()) == 3
    harness.submit("wide", tenant="a", gpus=8, priority=5)
    harness.decide()
    harness.submit("mine", tenant="b", gpus=4, priority=4)
    assert harness.preempted() == []
