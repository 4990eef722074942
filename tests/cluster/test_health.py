"""Health: what each check finds, how they become one verdict, and who hears of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.cluster.events import EventBus, EventType
from genie.cluster.health import (
    SEVERITY,
    Check,
    CheckResult,
    DiskReading,
    HealthChecker,
    NetworkReading,
    check_disk,
    check_gpus,
    check_memory,
    check_network,
    check_peers,
    create_health_checker,
    overall,
    read_disk,
)
from genie.errors import HardwareError
from genie.hardware import HostFacts
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus, Vendor
from tests.fakes.step_clock import StepClock
from tests.waiting import until

HEALTHY, DEGRADED, UNHEALTHY, CRITICAL = SEVERITY


def gpu(*, reason: str = "", util: float | None = None, temp: float | None = None) -> GPUInfo:
    return GPUInfo(
        gpu_id=0,
        name="x",
        vendor=Vendor.NVIDIA,
        utilization_pct=util,
        temperature_c=temp,
        available=not reason,
        reason=reason,
    )


def peer(name: str, status: NodeStatus = NodeStatus.HEALTHY) -> NodeInfo:
    return NodeInfo(node_id=name, hostname=name, role=NodeRole.WORKER, host="127.0.0.1", status=status)


def result(status: NodeStatus, name: str = "x") -> CheckResult:
    return CheckResult(name=name, status=status, reason="why")


# --- Each check -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "status"),
    [
        ([], HEALTHY),
        ([gpu()], HEALTHY),
        ([gpu(util=97.0, reason="utilisation 97% is above 90%")], HEALTHY),
        ([gpu(), gpu(temp=86.0)], DEGRADED),
        ([gpu(), gpu(reason="lost")], UNHEALTHY),
        ([gpu(temp=99.0), gpu(reason="lost")], UNHEALTHY),
        ([gpu(reason="lost"), gpu(reason="lost")], CRITICAL),
    ],
)
def test_gpus(gpus: list[GPUInfo], status: NodeStatus) -> None:
    assert check_gpus(gpus).status is status


@pytest.mark.parametrize(
    ("reading", "status"),
    [
        (NetworkReading(connected=True), HEALTHY),
        (NetworkReading(connected=True, rtt_ms=1000.0), HEALTHY),
        (NetworkReading(connected=True, rtt_ms=1001.0), DEGRADED),
        (NetworkReading(connected=False, reason="refused"), UNHEALTHY),
    ],
)
def test_network(reading: NetworkReading, status: NodeStatus) -> None:
    assert check_network(reading).status is status


@pytest.mark.parametrize(
    ("silent", "speaking", "status"),
    [(0, 0, HEALTHY), (0, 2, HEALTHY), (1, 1, DEGRADED), (2, 1, DEGRADED), (1, 0, UNHEALTHY)],
)
def test_peers(silent: int, speaking: int, status: NodeStatus) -> None:
    gone = [peer(f"gone-{n}", NodeStatus.DISCONNECTED) for n in range(silent)]
    assert check_peers([*gone, *(peer(f"here-{n}") for n in range(speaking))]).status is status


@pytest.mark.parametrize(
    ("used", "status"), [(0, HEALTHY), (90, HEALTHY), (91, DEGRADED), (96, UNHEALTHY), (99, CRITICAL)]
)
def test_memory(used: int, status: NodeStatus) -> None:
    facts = HostFacts(cpus=1.0, memory_total_bytes=100, memory_used_bytes=used, hostname="h")
    assert check_memory(facts).status is status


@pytest.mark.parametrize(
    ("free", "status"), [(100, HEALTHY), (10, HEALTHY), (9, DEGRADED), (4, UNHEALTHY), (0, CRITICAL)]
)
def test_disk(free: int, status: NodeStatus) -> None:
    assert check_disk(DiskReading(free_bytes=free, total_bytes=100)).status is status


def test_the_reason_names_what_is_wrong() -> None:
    assert check_gpus([gpu(reason="GPU is lost")]).reason == "GPU 0: GPU is lost"
    assert check_network(NetworkReading(connected=False, reason="refused")).reason == "refused"
    assert check_peers([peer("b", NodeStatus.SUSPECT), peer("a", NodeStatus.DISCONNECTED)]).reason == (
        "silent: a, b"
    )


def test_the_disk_of_a_folder_that_is_not_there_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    assert read_disk(tmp_path / "not" / "yet").total_bytes == read_disk(tmp_path).total_bytes > 0


# --- One verdict ----------------------------------------------------------------------------------

STATUSES = st.lists(st.sampled_from(SEVERITY), max_size=8)


@given(STATUSES)
def test_the_verdict_is_one_of_the_checks_and_none_is_worse(statuses: list[NodeStatus]) -> None:
    verdict = overall([result(status) for status in statuses])
    assert verdict in (statuses or [HEALTHY])
    assert all(SEVERITY.index(status) <= SEVERITY.index(verdict) for status in statuses)


@given(STATUSES, st.sampled_from(SEVERITY), st.randoms())
def test_a_further_check_never_improves_the_verdict_and_order_does_not_matter(
    statuses: list[NodeStatus], more: NodeStatus, chance: object
) -> None:
    before = overall([result(status) for status in statuses])
    mixed = [*statuses, more]
    chance.shuffle(mixed)  # type: ignore[attr-defined]
    assert SEVERITY.index(overall([result(status) for status in mixed])) >= SEVERITY.index(before)


def test_a_check_cannot_find_a_status_that_is_not_about_health() -> None:
    with pytest.raises(AssertionError):
        result(NodeStatus.DISCONNECTED)


# --- The checker ----------------------------------------------------------------------------------


@pytest.fixture
def events() -> Iterator[EventBus]:
    bus = EventBus()
    yield bus
    bus.close()


def always(*statuses: NodeStatus, name: str = "x") -> Check:
    """One status a round; the last one stays."""
    left = list(statuses)

    async def check() -> CheckResult:
        return result(left[0] if len(left) == 1 else left.pop(0), name)

    return check


async def test_a_round_reports_every_check_with_the_time_and_the_reasons() -> None:
    checker = HealthChecker(
        "n1", checks={"a": always(HEALTHY, name="a"), "b": always(UNHEALTHY, name="b")}, clock=StepClock()
    )
    assert (checker.report, checker.status) == (None, NodeStatus.INITIALIZING)
    report = await checker.check()
    assert (report.status, report.at, report.reason) == (UNHEALTHY, 1000.0, "b: why")
    assert [check.name for check in report.checks] == ["a", "b"]
    assert (checker.report, checker.status) == (report, UNHEALTHY)


async def test_a_change_of_the_verdict_is_told_once(events: EventBus) -> None:
    check = always(HEALTHY, HEALTHY, DEGRADED, DEGRADED, HEALTHY)
    checker = HealthChecker("n1", checks={"x": check}, clock=StepClock(), events=events)
    for _ in range(5):
        await checker.check()
    assert [event.type for event in events.history()] == [EventType.HEALTH_CHANGED] * 3
    assert [event.facts for event in events.history()] == [
        {"status": "healthy", "before": "initializing"},
        {"status": "degraded", "before": "healthy"},
        {"status": "healthy", "before": "degraded"},
    ]
    assert [event.reason for event in events.history()] == [
        "all checks passed",
        "x: why",
        "all checks passed",
    ]


async def test_a_check_that_fails_is_degraded_itself_and_hides_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken() -> CheckResult:
        raise KeyError("oops")

    async def expected() -> CheckResult:
        raise HardwareError("the disk does not answer")

    checks = {"broken": broken, "expected": expected, "fine": always(HEALTHY, name="fine")}
    report = await HealthChecker("n", checks=checks, clock=StepClock()).check()
    assert [(check.name, check.status) for check in report.checks] == [
        ("broken", DEGRADED),
        ("expected", DEGRADED),
        ("fine", HEALTHY),
    ]
    assert report.checks[1].reason == "could not be checked: the disk does not answer"
    assert caplog.text.count("Traceback") == 1


async def test_a_check_that_takes_too_long_is_degraded_itself() -> None:
    async def endless() -> CheckResult:
        await asyncio.Event().wait()
        raise AssertionError

    checker = HealthChecker("n", checks={"x": endless}, check_timeout_s=0.01, clock=StepClock())
    report = await checker.check()
    assert (report.status, report.reason) == (DEGRADED, "x: no answer within 0.01 s")


async def test_run_checks_at_once_and_then_at_every_interval() -> None:
    clock, rounds = StepClock(), []

    async def counted() -> CheckResult:
        rounds.append(1)
        return result(HEALTHY)

    stopped: list[int] = []
    checker = HealthChecker("n", checks={"x": counted}, clock=clock, on_stop=lambda: stopped.append(1))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(checker.run())
        await until(lambda: len(rounds) == 1)
        clock.step()
        await until(lambda: len(rounds) == 2)
        task.cancel()
    assert clock.slept_s[0] == 30.0
    assert stopped == [1]


async def test_the_five_checks_run_over_their_readers(tmp_path: Path) -> None:
    checker = create_health_checker(
        "n",
        gpus=lambda: [gpu(temp=90.0)],
        network=lambda: NetworkReading(connected=True, rtt_ms=1.0),
        peers=lambda: [peer("a")],
        host=lambda: HostFacts(cpus=1.0, memory_total_bytes=100, memory_used_bytes=10, hostname="h"),
        disk_path=tmp_path,
        clock=StepClock(),
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(checker.run())
        await until(lambda: checker.report)
        task.cancel()
    assert checker.report is not None
    assert [check.name for check in checker.report.checks] == ["gpu", "network", "peers", "memory", "disk"]
    found = {check.name: check.status for check in checker.report.checks}
    assert found["gpu"] is DEGRADED
    assert {found["network"], found["peers"], found["memory"]} == {HEALTHY}
    assert "free" in checker.report.checks[-1].reason
    assert not [one for one in threading.enumerate() if one.name.startswith("genie-health")]
