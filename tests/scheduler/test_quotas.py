"""What tenants may hold and borrow, and how it comes back."""

from __future__ import annotations

from genie.scheduler.quota import Quota, Quotas, of_gpus
from genie.scheduler.request import Shape
from genie.scheduler.scheduler import Rules
from tests.scheduler.clusters import Desk, node


def test_what_is_borrowed_can_be_taken_back_behind_a_reservation_that_is_not_delayed() -> None:
    quotas = Quotas({"a": Quota(of_gpus(8)), "b": Quota(of_gpus(4)), "c": Quota(of_gpus(0))})
    desk = Desk(node("n1", 8), node("n2", 8), rules=Rules(quotas=quotas))
    for name, gpus, where in (("long", 8, "n1"), ("part", 4, "n2")):
        shape = Shape(gpus=gpus, nodes=frozenset({where}))
        desk.submit(name, tenant="other", shape=shape, time_limit_s=1000.0)
    loans = [f"loan{number}" for number in range(4)]
    for name in loans:
        desk.submit(name, tenant="c", preemptible=True, grace_s=30.0)
    assert len(desk.started()) == 6
    desk.submit("wide", tenant="a", gpus=8)
    assert desk.why("wide").starts_at == 1000
    desk.submit("mine", tenant="b", gpus=4)
    assert sorted(desk.preempted()) == loans
    assert desk.why("mine").starts_at == 30
    desk.submit("late", tenant="other", gpus=1, time_limit_s=5.0)
    assert desk.started() == [], "what comes back is kept for whom it belongs to"
    assert desk.preempted() == [], "and nobody else has to go for it"
    assert desk.why("wide").starts_at == 1000
    assert desk.pass_time(to=30.0) == ["mine"]
    assert "wide" in desk.pass_time(to=1000.0)


def test_what_is_on_loan_where_somebody_has_a_reservation_stays() -> None:
    quotas = Quotas({"a": Quota(of_gpus(8)), "b": Quota(of_gpus(4)), "c": Quota(of_gpus(0))})
    desk = Desk(node("n1", 8), rules=Rules(quotas=quotas))
    desk.submit("long", tenant="other", gpus=4, time_limit_s=1000.0)
    for number in range(4):
        desk.submit(f"loan{number}", tenant="c", preemptible=True, time_limit_s=900.0)
    assert len(desk.started()) == 5
    desk.submit("wide", tenant="a", gpus=8)
    assert desk.why("wide").starts_at == 1000
    desk.submit("mine", tenant="b", gpus=4)
    assert desk.preempted() == []
    assert desk.why("wide").starts_at == 1000


def test_what_is_borrowed_can_be_taken_back() -> None:
    quotas = Quotas({"a": Quota(of_gpus(2)), "b": Quota(of_gpus(2))})
    desk = Desk(node("n", 4), rules=Rules(quotas=quotas))
    for number in range(3):
        desk.submit(f"fixed{number}", tenant="a")
    assert desk.started() == ["fixed0", "fixed1"]
    desk.submit("loan", tenant="a", gpus=2, preemptible=True, priority=50, grace_s=5.0)
    assert desk.started() == ["loan"]
    assert "only preemptible jobs may borrow" in desk.why("fixed2").reason
    desk.submit("owner", tenant="b")
    assert desk.preempted() == ["loan"]
    assert desk.pass_time(5.0) == ["owner"]
    assert "loan" in [request.job_id for request in desk.scheduler.waiting]


def test_a_loan_has_a_bound() -> None:
    quotas = Quotas({"a": Quota(of_gpus(1), borrowed=of_gpus(1))})
    desk = Desk(node("n", 4), rules=Rules(quotas=quotas))
    for number in range(3):
        desk.submit(f"j{number}", preemptible=True)
    assert desk.started() == ["j0", "j1"]
    assert "may borrow 1 GPU" in desk.why("j2").reason


def test_behind_a_reservation_nobody_goes_who_is_within_his_own_part() -> None:
    quotas = Quotas({"a": Quota(of_gpus(8)), "b": Quota(of_gpus(4)), "c": Quota(of_gpus(4))})
    desk = Desk(node("n1", 8), node("n2", 8), rules=Rules(quotas=quotas))
    for name, gpus, where in (("long", 8, "n1"), ("part", 4, "n2")):
        shape = Shape(gpus=gpus, nodes=frozenset({where}))
        desk.submit(name, tenant="other", shape=shape, time_limit_s=1000.0)
    desk.submit("low", tenant="c", gpus=4, preemptible=True)
    assert len(desk.started()) == 3
    desk.submit("wide", tenant="a", gpus=8, priority=5)
    desk.decide()
    desk.submit("mine", tenant="b", gpus=4, priority=4)
    assert desk.preempted() == []
