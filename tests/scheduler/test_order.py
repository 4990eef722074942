"""Lines of those who wait: in which order they are gone through, and who is passed over."""

from __future__ import annotations

from genie.scheduler.order import FairShare, Fifo, Lines, Order, Priority, Scales
from genie.scheduler.request import Amounts, Request, Shape


def lines_of(order: Order, *jobs: tuple[str, str, int]) -> tuple[Lines, dict[str, Request]]:
    """Each a name, a tenant and a priority, in order of arrival."""
    lines, requests = Lines(order), {}
    for number, (name, tenant, priority) in enumerate(jobs):
        requests[name] = Request(name, tenant, number, Shape(gpus=1), priority=priority)
        lines.add(requests[name], (number % 2, priority))
    return lines, requests


def walk(lines: Lines, held: dict[str, Amounts] | None = None, passed: str = "") -> list[str]:
    told: list[str] = []
    usage = held if held is not None else {}
    scales = Scales(0.0, Amounts(8000), lambda tenant: usage.get(tenant, Amounts()), {})
    found = []
    for request in lines.walk(
        scales,
        why_all=lambda tenant, _: "no" if tenant == passed else "",
        tell=lambda job, _: told.append(job),
    ):
        found.append(request.job_id)
        usage[request.tenant] = usage.get(request.tenant, Amounts()) + Amounts(1000)
    return [*found, *(f"not {job}" for job in told)]


JOBS = (("a1", "a", 0), ("a2", "a", 1), ("a3", "a", 0), ("b1", "b", 0), ("b2", "b", 2))


def test_one_order_over_lines_of_all_kinds() -> None:
    assert walk(lines_of(Fifo(), *JOBS)[0]) == ["a1", "a2", "a3", "b1", "b2"]
    assert walk(lines_of(Priority(), *JOBS)[0]) == ["b2", "a2", "a1", "a3", "b1"]


def test_what_starts_meanwhile_counts_for_the_next() -> None:
    assert walk(lines_of(FairShare(), *JOBS)[0], {"a": Amounts(500)}) == ["b2", "a2", "b1", "a1", "a3"]


def test_a_line_is_passed_over_and_its_jobs_are_told() -> None:
    found = walk(lines_of(Fifo(), *JOBS)[0], passed="a")
    assert found[:2] == ["b1", "b2"]
    assert sorted(found[2:]) == ["not a1", "not a2", "not a3"]


def test_who_left_is_not_gone_through_even_when_that_happens_meanwhile() -> None:
    lines, requests = lines_of(Fifo(), *JOBS)
    lines.remove(requests["a2"], (1, 1))
    assert walk(lines) == ["a1", "a3", "b1", "b2"]
    scales = Scales(0.0, Amounts(8000), lambda tenant: Amounts(), {})
    found = []
    for request in lines.walk(scales, why_all=lambda *_: "", tell=lambda *_: None):
        found.append(request.job_id)
        if request.job_id == "a1":
            lines.remove(requests["b1"], (1, 0))
    assert found == ["a1", "a3", "b2"]


def test_a_deadline_brings_a_job_forward_by_one_priority_at_most() -> None:
    def turn(came: float, priority: int = 0, deadline_at: float | None = None) -> tuple[float, ...]:
        request = Request("j", "t", 9, Shape(gpus=1), came, priority=priority, deadline_at=deadline_at)
        return Priority(aging_s=100.0).within(request)

    assert turn(1000.0, deadline_at=1050.0) < turn(951.0) < turn(1000.0, deadline_at=1060.0)
    assert turn(1000.0, deadline_at=5000.0)[0] == turn(1000.0)[0], "it is far away"
    assert turn(1000.0, deadline_at=0.0)[0] == turn(900.0)[0] == turn(1000.0, priority=1)[0]
