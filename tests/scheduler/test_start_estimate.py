"""Estimated start times, compared with the actual decisions."""

from __future__ import annotations

import random

import pytest

from genie.scheduler import start_estimate as module
from genie.scheduler.order import FairShare, Fifo
from genie.scheduler.quota import Quota, Quotas, gpu_limit_amounts
from genie.scheduler.request import JobRequest, Shape
from genie.scheduler.rules import Rules
from genie.scheduler.start_estimate import StartEstimate, estimate_start
from tests.scheduler.clusters import SchedulerHarness, node


def estimate(harness: SchedulerHarness, request: JobRequest) -> StartEstimate:
    harness.decide()
    return estimate_start(harness.scheduler, request, harness.now)


def queue_with_time_limits(*, limits: list[float | None]) -> tuple[SchedulerHarness, list[JobRequest]]:
    """One job runs on the only GPU, and the others are queued behind it."""
    harness = SchedulerHarness(node("n", 1), rules=Rules(order=Fifo()))
    jobs = [harness.submit(f"j{number}", time_limit_s=limit_s) for number, limit_s in enumerate(limits)]
    harness.decide()
    return harness, jobs


def test_estimate_adds_up_time_limits_of_jobs_ahead() -> None:
    harness, jobs = queue_with_time_limits(limits=[10.0, 20.0, 40.0, None])
    assert [estimate(harness, job) for job in jobs[1:]] == [
        StartEstimate(10.0),
        StartEstimate(30.0),
        StartEstimate(70.0),
    ]


def test_estimate_names_a_job_without_a_time_limit() -> None:
    harness, jobs = queue_with_time_limits(limits=[10.0, None, 5.0, 5.0])
    assert estimate(harness, jobs[1]) == StartEstimate(10.0)
    why = "j1 has no time limit, and must end first"
    assert estimate(harness, jobs[2]) == estimate(harness, jobs[3]) == StartEstimate(None, why)


def test_estimate_of_a_reservation_states_its_assumption() -> None:
    harness, jobs = queue_with_time_limits(limits=[None, 5.0, 5.0])
    why = "j0 has no time limit, and must end first"
    held = estimate(harness, jobs[1])
    assert held == StartEstimate(
        86_400.0, f"{why}; jobs without a time limit are assumed to run for 24 hours"
    )
    assert estimate(harness, jobs[2]) == StartEstimate(None, why)


def test_unrelated_job_without_a_time_limit_does_not_matter() -> None:
    harness = SchedulerHarness(node("n", 2), node("m", 2), rules=Rules(order=Fifo()))
    harness.submit("endless", shape=Shape(gpus=1, nodes=frozenset({"m"})))
    harness.submit("short", shape=Shape(gpus=2, nodes=frozenset({"n"})), time_limit_s=7.0)
    harness.started()
    assert estimate(harness, harness.submit("wide", gpus=2)) == StartEstimate(7.0)


def test_estimate_respects_quotas() -> None:
    harness = SchedulerHarness(
        node("n", 4), rules=Rules(order=Fifo(), quotas=Quotas({"a": Quota(gpu_limit_amounts(1))}))
    )
    jobs = [harness.submit(f"j{number}", time_limit_s=10.0) for number in range(3)]
    harness.started()
    assert [estimate(harness, job) for job in jobs[1:]] == [StartEstimate(10.0), StartEstimate(20.0)]


def test_infeasible_job_has_no_estimate_and_blocks_no_other() -> None:
    harness = SchedulerHarness(
        node("n", 1), node("shut", 2, blocked_reason="draining"), rules=Rules(order=Fifo())
    )
    harness.submit("runs", time_limit_s=10.0)
    harness.started()
    never = harness.submit("never", gpus=2)
    behind = harness.submit("behind", gpus=1)
    assert (estimate(harness, never), estimate(harness, behind)) == (StartEstimate(None), StartEstimate(10.0))


def test_estimate_considers_named_gpus_in_queue_order() -> None:
    harness = SchedulerHarness(node("n", 2), rules=Rules(order=Fifo()))
    mine = Shape(gpus=1, nodes=frozenset({"n"}), gpu_ids=(1,))
    harness.submit("holds", shape=mine, time_limit_s=30.0)
    harness.started()
    first = harness.submit("first", shape=mine, time_limit_s=5.0)
    second = harness.submit("second", shape=mine)
    assert (estimate(harness, first), estimate(harness, second)) == (StartEstimate(30.0), StartEstimate(35.0))
    kept = harness.allocations.reserved_gpus("n")
    estimate(harness, second)
    assert harness.allocations.reserved_gpus("n") == kept == {1}


def test_estimate_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ESTIMATE_COST_IN_PLACEMENTS_MAX", 5)
    harness, jobs = queue_with_time_limits(limits=[10.0] * 9)
    found = estimate(harness, jobs[-1])
    assert found == StartEstimate(None, "too many jobs are ahead to estimate the start")


def test_estimate_is_bounded_if_no_job_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ESTIMATE_COST_IN_PLACEMENTS_MAX", 5)
    quotas = Quotas({"a": Quota(gpu_limit_amounts(2), gpu_limit_amounts(0))})
    harness = SchedulerHarness(node("n", 16), rules=Rules(order=Fifo(), quotas=quotas))
    harness.submit("own", gpus=2)
    for number in range(8):
        harness.submit(f"b{number}", tenant="b", time_limit_s=1.0 + number)
    harness.started()
    found = estimate(harness, harness.submit("more", gpus=2))
    assert found == StartEstimate(None, "too many jobs are ahead to estimate the start")


@pytest.mark.parametrize("seed", range(20))
def test_scheduler_starts_jobs_at_the_estimated_times(seed: int) -> None:
    """For jobs of one size, whose places do not matter."""
    rng = random.Random(seed)
    nodes = [node(f"n{number}", rng.choice((1, 2, 4))) for number in range(rng.randint(1, 3))]
    harness = SchedulerHarness(*nodes, rules=Rules(order=rng.choice((Fifo(), FairShare()))))
    for number in range(rng.randint(5, 20)):
        harness.submit(f"j{number}", tenant=rng.choice("abc"), time_limit_s=float(rng.randint(1, 40)))
    harness.decide()
    waiting = harness.scheduler.queued_requests
    expected = {job.job_id: estimate(harness, job).starts_at for job in waiting}
    began: dict[str, float] = {}
    while harness.scheduler.running_jobs:
        at = min(running.ends_at for running in harness.scheduler.running_jobs)
        began |= dict.fromkeys(harness.advance(at), at)
    assert began == expected, f"seed {seed}"
