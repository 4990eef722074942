"""When a job that waits would start, against what the scheduler then does."""

from __future__ import annotations

import random

import pytest

from genie.scheduler import outlook as module
from genie.scheduler.order import FairShare, Fifo
from genie.scheduler.outlook import Outlook, outlook
from genie.scheduler.quota import Quota, Quotas, of_gpus
from genie.scheduler.request import Request, Shape
from genie.scheduler.scheduler import Rules
from tests.scheduler.clusters import Desk, node


def foreseen(desk: Desk, request: Request) -> Outlook:
    desk.decide()
    return outlook(desk.scheduler, request, desk.now)


def line(*, limits: list[float | None]) -> tuple[Desk, list[Request]]:
    """One job runs on the only GPU, and the others wait for it one behind the other."""
    desk = Desk(node("n", 1), rules=Rules(order=Fifo()))
    jobs = [desk.submit(f"j{number}", time_limit_s=limit_s) for number, limit_s in enumerate(limits)]
    desk.decide()
    return desk, jobs


def test_who_stands_behind_others_with_limits_is_told_when_they_are_over() -> None:
    desk, jobs = line(limits=[10.0, 20.0, 40.0, None])
    assert [foreseen(desk, job) for job in jobs[1:]] == [Outlook(10.0), Outlook(30.0), Outlook(70.0)]


def test_a_job_ahead_without_a_limit_is_named_instead_of_a_time() -> None:
    desk, jobs = line(limits=[10.0, None, 5.0, 5.0])
    assert foreseen(desk, jobs[1]) == Outlook(10.0)
    why = "j1 has no time limit, and must be over first"
    assert foreseen(desk, jobs[2]) == foreseen(desk, jobs[3]) == Outlook(None, why)


def test_what_is_kept_has_its_time_and_says_when_that_rests_on_nothing_but_a_guess() -> None:
    desk, jobs = line(limits=[None, 5.0, 5.0])
    why = "j0 has no time limit, and must be over first"
    held = foreseen(desk, jobs[1])
    assert held == Outlook(86_400.0, f"{why}; one without is taken to run for 24 hours")
    assert foreseen(desk, jobs[2]) == Outlook(None, why)


def test_one_without_a_limit_that_is_not_in_the_way_prevents_no_time() -> None:
    desk = Desk(node("n", 2), node("m", 2), rules=Rules(order=Fifo()))
    desk.submit("endless", shape=Shape(gpus=1, nodes=frozenset({"m"})))
    desk.submit("short", shape=Shape(gpus=2, nodes=frozenset({"n"})), time_limit_s=7.0)
    desk.started()
    assert foreseen(desk, desk.submit("wide", gpus=2)) == Outlook(7.0)


def test_quotas_hold_in_what_is_foreseen() -> None:
    desk = Desk(node("n", 4), rules=Rules(order=Fifo(), quotas=Quotas({"a": Quota(of_gpus(1))})))
    jobs = [desk.submit(f"j{number}", time_limit_s=10.0) for number in range(3)]
    desk.started()
    assert [foreseen(desk, job) for job in jobs[1:]] == [Outlook(10.0), Outlook(20.0)]


def test_what_can_never_start_has_no_time_and_is_in_nobodys_way() -> None:
    desk = Desk(node("n", 1), node("shut", 2, closed="draining"), rules=Rules(order=Fifo()))
    desk.submit("runs", time_limit_s=10.0)
    desk.started()
    never = desk.submit("never", gpus=2)
    behind = desk.submit("behind", gpus=1)
    assert (foreseen(desk, never), foreseen(desk, behind)) == (Outlook(None), Outlook(10.0))


def test_a_gpu_that_is_kept_for_one_that_named_it_is_taken_in_turn() -> None:
    desk = Desk(node("n", 2), rules=Rules(order=Fifo()))
    mine = Shape(gpus=1, nodes=frozenset({"n"}), gpu_ids=(1,))
    desk.submit("holds", shape=mine, time_limit_s=30.0)
    desk.started()
    first = desk.submit("first", shape=mine, time_limit_s=5.0)
    second = desk.submit("second", shape=mine)
    assert (foreseen(desk, first), foreseen(desk, second)) == (Outlook(30.0), Outlook(35.0))
    kept = desk.book.kept_on("n")
    foreseen(desk, second)
    assert desk.book.kept_on("n") == kept == {1}


def test_looking_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIES_MAX", 5)
    desk, jobs = line(limits=[10.0] * 9)
    found = foreseen(desk, jobs[-1])
    assert found == Outlook(None, "too many jobs are in between to look so far ahead")


def test_looking_ahead_is_bounded_too_where_nobody_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIES_MAX", 5)
    quotas = Quotas({"a": Quota(of_gpus(2), of_gpus(0))})
    desk = Desk(node("n", 16), rules=Rules(order=Fifo(), quotas=quotas))
    desk.submit("own", gpus=2)
    for number in range(8):
        desk.submit(f"b{number}", tenant="b", time_limit_s=1.0 + number)
    desk.started()
    found = foreseen(desk, desk.submit("more", gpus=2))
    assert found == Outlook(None, "too many jobs are in between to look so far ahead")


@pytest.mark.parametrize("seed", range(20))
def test_where_all_run_to_their_limits_the_scheduler_does_what_was_foreseen(seed: int) -> None:
    """Of jobs of one size, whatever the order: where they go makes no difference then."""
    rng = random.Random(seed)
    nodes = [node(f"n{number}", rng.choice((1, 2, 4))) for number in range(rng.randint(1, 3))]
    desk = Desk(*nodes, rules=Rules(order=rng.choice((Fifo(), FairShare()))))
    for number in range(rng.randint(5, 20)):
        desk.submit(f"j{number}", tenant=rng.choice("abc"), time_limit_s=float(rng.randint(1, 40)))
    desk.decide()
    waiting = desk.scheduler.waiting
    expected = {job.job_id: foreseen(desk, job).starts_at for job in waiting}
    began: dict[str, float] = {}
    while desk.scheduler.running:
        at = min(running.ends_at for running in desk.scheduler.running)
        began |= dict.fromkeys(desk.pass_time(at), at)
    assert began == expected, f"seed {seed}"
