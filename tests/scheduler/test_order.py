"""The job queue: order of iteration and skipped groups."""

from __future__ import annotations

from genie.scheduler.order import FairShare, Fifo, JobQueue, OrderInputs, Priority, QueuePolicy
from genie.scheduler.request import Amounts, JobRequest, Shape


def make_queue(order: QueuePolicy, *jobs: tuple[str, str, int]) -> tuple[JobQueue, dict[str, JobRequest]]:
    """Each a name, a tenant and a priority, in order of arrival."""
    queue, requests = JobQueue(order), {}
    for number, (name, tenant, priority) in enumerate(jobs):
        requests[name] = JobRequest(name, tenant, number, Shape(gpus=1), priority=priority)
        queue.add(requests[name], (number % 2, priority))
    return queue, requests


def iteration_order(queue: JobQueue, held: dict[str, Amounts] | None = None, skipped: str = "") -> list[str]:
    notified: list[str] = []
    usage = held if held is not None else {}
    inputs = OrderInputs(0.0, Amounts(8000), lambda tenant: usage.get(tenant, Amounts()), {})
    found = []
    for request in queue.iterate(
        inputs,
        why_skip_queue_group=lambda tenant, _: "no" if tenant == skipped else "",
        on_skip=lambda job, _: notified.append(job),
    ):
        found.append(request.job_id)
        usage[request.tenant] = usage.get(request.tenant, Amounts()) + Amounts(1000)
    return [*found, *(f"not {job}" for job in notified)]


JOBS = (("a1", "a", 0), ("a2", "a", 1), ("a3", "a", 0), ("b1", "b", 0), ("b2", "b", 2))


def test_jobs_of_all_tenants_are_merged_in_one_order() -> None:
    assert iteration_order(make_queue(Fifo(), *JOBS)[0]) == ["a1", "a2", "a3", "b1", "b2"]
    assert iteration_order(make_queue(Priority(), *JOBS)[0]) == ["b2", "a2", "a1", "a3", "b1"]


def test_started_job_changes_the_order_of_following_jobs() -> None:
    assert iteration_order(make_queue(FairShare(), *JOBS)[0], {"a": Amounts(500)}) == [
        "b2",
        "a2",
        "b1",
        "a1",
        "a3",
    ]


def test_jobs_of_a_skipped_tenant_are_reported() -> None:
    found = iteration_order(make_queue(Fifo(), *JOBS)[0], skipped="a")
    assert found[:2] == ["b1", "b2"]
    assert sorted(found[2:]) == ["not a1", "not a2", "not a3"]


def test_job_removed_during_iteration_is_not_yielded() -> None:
    queue, requests = make_queue(Fifo(), *JOBS)
    queue.remove(requests["a2"], (1, 1))
    assert iteration_order(queue) == ["a1", "a3", "b1", "b2"]
    inputs = OrderInputs(0.0, Amounts(8000), lambda tenant: Amounts(), {})
    found = []
    for request in queue.iterate(inputs, why_skip_queue_group=lambda *_: "", on_skip=lambda *_: None):
        found.append(request.job_id)
        if request.job_id == "a1":
            queue.remove(requests["b1"], (1, 0))
    assert found == ["a1", "a3", "b2"]


def test_deadline_raises_the_order_by_one_priority_at_most() -> None:
    def turn(submitted_at: float, priority: int = 0, deadline_at: float | None = None) -> tuple[float, ...]:
        request = JobRequest(
            "j", "t", 9, Shape(gpus=1), submitted_at, priority=priority, deadline_at=deadline_at
        )
        return Priority(aging_s=100.0).within(request)

    assert turn(1000.0, deadline_at=1050.0) < turn(951.0) < turn(1000.0, deadline_at=1060.0)
    assert turn(1000.0, deadline_at=5000.0)[0] == turn(1000.0)[0], "the deadline is too far away to matter"
    assert turn(1000.0, deadline_at=0.0)[0] == turn(900.0)[0] == turn(1000.0, priority=1)[0]
