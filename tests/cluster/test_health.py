"""Health checks, the overall status, and the checker."""

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
    STATUSES_BY_SEVERITY,
    CheckResult,
    DiskReading,
    HealthCheck,
    HealthChecker,
    HealthReport,
    NetworkReading,
    check_cpu,
    check_disk,
    check_gpus,
    check_memory,
    check_network,
    check_peers,
    create_health_checker,
    read_disk_usage,
    worst_status,
)
from genie.errors import HardwareError
from genie.hardware import CpuReading, HostFacts
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus, Vendor
from genie.runtime.network_interfaces import Interface, Throughput
from tests.fakes.step_clock import StepClock
from tests.waiting import until

HEALTHY, DEGRADED, UNHEALTHY, CRITICAL = STATUSES_BY_SEVERITY


def make_gpu(*, reason: str = "", util: float | None = None, temp: float | None = None) -> GPUInfo:
    return GPUInfo(
        gpu_id=0,
        name="x",
        vendor=Vendor.NVIDIA,
        utilization_pct=util,
        temperature_c=temp,
        available=not reason,
        reason=reason,
    )


def make_peer(name: str, status: NodeStatus = NodeStatus.HEALTHY) -> NodeInfo:
    return NodeInfo(node_id=name, hostname=name, role=NodeRole.WORKER, host="127.0.0.1", status=status)


def make_check_result(status: NodeStatus, name: str = "x") -> CheckResult:
    return CheckResult(name=name, status=status, reason="why")


# --- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "status"),
    [
        ([], HEALTHY),
        ([make_gpu()], HEALTHY),
        ([make_gpu(util=97.0, reason="utilisation 97% is above 90%")], HEALTHY),
        ([make_gpu(), make_gpu(temp=86.0)], DEGRADED),
        ([make_gpu(), make_gpu(reason="lost")], UNHEALTHY),
        ([make_gpu(temp=99.0), make_gpu(reason="lost")], UNHEALTHY),
        ([make_gpu(reason="lost"), make_gpu(reason="lost")], CRITICAL),
    ],
)
def test_gpu_check_status_depends_on_temperature_and_lost_gpus(
    gpus: list[GPUInfo], status: NodeStatus
) -> None:
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
def test_network_check_status_depends_on_connection_and_round_trip(
    reading: NetworkReading, status: NodeStatus
) -> None:
    assert check_network(reading).status is status


def make_network_reading(*, sent_gbps: float, speed_gbps: float | None = 10.0) -> NetworkReading:
    return NetworkReading(
        connected=True,
        rtt_ms=0.5,
        interface=Interface(name="eth0", speed_gbps=speed_gbps),
        throughput=Throughput(received_bytes_per_s=2e6, sent_bytes_per_s=sent_gbps * 1e9 / 8, over_s=30.0),
    )


def test_network_check_reports_interface_speed_and_throughput() -> None:
    found = check_network(make_network_reading(sent_gbps=1.0))
    assert found.reason == "connected through eth0, 10 Gbit/s, 2.0 MB/s in, 125.0 MB/s out"
    assert found.readings == {
        "rtt_ms": 0.5,
        "link_speed_gbps": 10.0,
        "received_bytes_per_s": 2e6,
        "sent_bytes_per_s": 125e6,
    }


@pytest.mark.parametrize(
    ("sent_gbps", "speed_gbps", "status"),
    [(9.4, 10.0, HEALTHY), (9.6, 10.0, DEGRADED), (90.0, None, HEALTHY)],
)
def test_saturated_interface_is_degraded(
    sent_gbps: float, speed_gbps: float | None, status: NodeStatus
) -> None:
    found = check_network(make_network_reading(sent_gbps=sent_gbps, speed_gbps=speed_gbps))
    assert found.status is status
    assert ("saturated: eth0, 10 Gbit/s" in found.reason) is (status is DEGRADED)


@pytest.mark.parametrize(
    ("load_1m", "busy_pct", "status"),
    [
        (0.0, 0.0, HEALTHY),
        (4.0, 100.0, HEALTHY),
        (8.0, 100.0, HEALTHY),
        (8.1, 100.0, DEGRADED),
        (32.1, 100.0, UNHEALTHY),
        (None, 100.0, HEALTHY),
    ],
)
def test_cpu_check_status_depends_on_load_per_core(
    load_1m: float | None, busy_pct: float, status: NodeStatus
) -> None:
    assert check_cpu(CpuReading(cores=4, load_1m=load_1m, busy_pct=busy_pct)).status is status


def test_cpu_check_reports_utilization_and_load() -> None:
    found = check_cpu(CpuReading(cores=4, load_1m=9.0, busy_pct=98.4))
    assert found.reason == "98% used, load 9.0 on 4 cores"
    assert found.readings == {"cores": 4.0, "load_1m": 9.0, "utilization_pct": 98.4}
    report = HealthReport(status=found.status, checks=(found,), at=0.0)
    assert report.reason == "cpu: 98% used, load 9.0 on 4 cores"
    assert report.check("cpu") is found
    assert report.check("unknown") is None
    assert check_cpu(CpuReading(cores=4, load_1m=None, busy_pct=None)).reason == "no reading on this system"


@pytest.mark.parametrize(
    ("unresponsive", "responsive", "status"),
    [(0, 0, HEALTHY), (0, 2, HEALTHY), (1, 1, DEGRADED), (2, 1, DEGRADED), (1, 0, UNHEALTHY)],
)
def test_peer_check_status_depends_on_disconnected_peers(
    unresponsive: int, responsive: int, status: NodeStatus
) -> None:
    disconnected = [make_peer(f"gone-{n}", NodeStatus.DISCONNECTED) for n in range(unresponsive)]
    assert check_peers([*disconnected, *(make_peer(f"here-{n}") for n in range(responsive))]).status is status


@pytest.mark.parametrize(
    ("used", "status"), [(0, HEALTHY), (90, HEALTHY), (91, DEGRADED), (96, UNHEALTHY), (99, CRITICAL)]
)
def test_memory_check_status_depends_on_used_memory(used: int, status: NodeStatus) -> None:
    facts = HostFacts(cpus=1.0, memory_total_bytes=100, memory_used_bytes=used, hostname="h")
    assert check_memory(facts).status is status


@pytest.mark.parametrize(
    ("free", "status"), [(100, HEALTHY), (10, HEALTHY), (9, DEGRADED), (4, UNHEALTHY), (0, CRITICAL)]
)
def test_disk_check_status_depends_on_free_space(free: int, status: NodeStatus) -> None:
    assert check_disk(DiskReading(free_bytes=free, total_bytes=100)).status is status


def test_report_reason_lists_failed_checks() -> None:
    assert check_gpus([make_gpu(reason="GPU is lost")]).reason == "GPU 0: GPU is lost"
    assert check_network(NetworkReading(connected=False, reason="refused")).reason == "refused"
    assert check_peers(
        [make_peer("b", NodeStatus.SUSPECT), make_peer("a", NodeStatus.DISCONNECTED)]
    ).reason == ("unresponsive: a, b")


def test_read_disk_uses_the_nearest_existing_parent(tmp_path: Path) -> None:
    assert read_disk_usage(tmp_path / "not" / "yet").total_bytes == read_disk_usage(tmp_path).total_bytes > 0


# --- overall status -------------------------------------------------------------------------------

STATUSES = st.lists(st.sampled_from(STATUSES_BY_SEVERITY), max_size=8)


@given(STATUSES)
def test_overall_status_is_the_worst_of_all_checks(statuses: list[NodeStatus]) -> None:
    verdict = worst_status([make_check_result(status) for status in statuses])
    assert verdict in (statuses or [HEALTHY])
    assert all(
        STATUSES_BY_SEVERITY.index(status) <= STATUSES_BY_SEVERITY.index(verdict) for status in statuses
    )


@given(STATUSES, st.sampled_from(STATUSES_BY_SEVERITY), st.randoms())
def test_overall_status_is_monotonic_and_independent_of_order(
    statuses: list[NodeStatus], more: NodeStatus, chance: object
) -> None:
    before = worst_status([make_check_result(status) for status in statuses])
    mixed = [*statuses, more]
    chance.shuffle(mixed)  # type: ignore[attr-defined]
    assert STATUSES_BY_SEVERITY.index(
        worst_status([make_check_result(status) for status in mixed])
    ) >= STATUSES_BY_SEVERITY.index(before)


def test_check_result_rejects_the_status_disconnected() -> None:
    with pytest.raises(AssertionError):
        make_check_result(NodeStatus.DISCONNECTED)


# --- checker --------------------------------------------------------------------------------------


@pytest.fixture
def events() -> Iterator[EventBus]:
    bus = EventBus()
    yield bus
    bus.close()


def make_scripted_check(*statuses: NodeStatus, name: str = "x") -> HealthCheck:
    """Returns one status per round, then repeats the last one."""
    left = list(statuses)

    async def check() -> CheckResult:
        return make_check_result(left[0] if len(left) == 1 else left.pop(0), name)

    return check


async def test_report_contains_all_checks_time_and_reasons() -> None:
    checker = HealthChecker(
        "n1",
        checks={"a": make_scripted_check(HEALTHY, name="a"), "b": make_scripted_check(UNHEALTHY, name="b")},
        clock=StepClock(),
    )
    assert (checker.report, checker.status) == (None, NodeStatus.INITIALIZING)
    report = await checker.check()
    assert (report.status, report.at, report.reason) == (UNHEALTHY, 1000.0, "b: why")
    assert [check.name for check in report.checks] == ["a", "b"]
    assert (checker.report, checker.status) == (report, UNHEALTHY)


async def test_status_change_is_published_once(events: EventBus) -> None:
    check = make_scripted_check(HEALTHY, HEALTHY, DEGRADED, DEGRADED, HEALTHY)
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


async def test_failing_check_is_degraded_and_does_not_hide_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check_with_key_error() -> CheckResult:
        raise KeyError("oops")

    async def check_with_hardware_error() -> CheckResult:
        raise HardwareError("the disk does not answer")

    checks = {
        "broken": check_with_key_error,
        "expected": check_with_hardware_error,
        "fine": make_scripted_check(HEALTHY, name="fine"),
    }
    report = await HealthChecker("n", checks=checks, clock=StepClock()).check()
    assert [(check.name, check.status) for check in report.checks] == [
        ("broken", DEGRADED),
        ("expected", DEGRADED),
        ("fine", HEALTHY),
    ]
    assert report.checks[1].reason == "check failed: the disk does not answer"
    assert caplog.text.count("Traceback") == 1


async def test_check_that_times_out_is_degraded() -> None:
    async def check_that_never_ends() -> CheckResult:
        await asyncio.Event().wait()
        raise AssertionError

    checker = HealthChecker("n", checks={"x": check_that_never_ends}, check_timeout_s=0.01, clock=StepClock())
    report = await checker.check()
    assert (report.status, report.reason) == (DEGRADED, "x: no response within 0.01 s")


async def test_run_checks_immediately_and_then_every_interval() -> None:
    clock, rounds = StepClock(), []

    async def counted_check() -> CheckResult:
        rounds.append(1)
        return make_check_result(HEALTHY)

    stopped: list[int] = []
    checker = HealthChecker("n", checks={"x": counted_check}, clock=clock, on_close=lambda: stopped.append(1))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(checker.run())
        await until(lambda: len(rounds) == 1)
        clock.step()
        await until(lambda: len(rounds) == 2)
        task.cancel()
    assert clock.slept_s[0] == 30.0
    assert stopped == [1]


async def test_run_waits_one_interval_if_there_is_a_report() -> None:
    clock, rounds = StepClock(), []

    async def counted_check() -> CheckResult:
        rounds.append(1)
        return make_check_result(HEALTHY)

    checker = HealthChecker("n", checks={"x": counted_check}, interval_s=30.0, clock=clock)
    await checker.check()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(checker.run())
        await until(lambda: clock.slept_s == [30.0])
        assert len(rounds) == 1
        clock.step()
        await until(lambda: len(rounds) == 2)
        task.cancel()


async def test_hanging_check_ends_at_the_timeout() -> None:
    async def check_that_hangs() -> CheckResult:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    checker = HealthChecker("n", checks={"disk": check_that_hangs}, check_timeout_s=3600.0)
    report = await checker.check(timeout_s=0.01)
    assert report.reason == "disk: no response within 0.01 s"


async def test_create_health_checker_runs_six_checks(tmp_path: Path) -> None:
    checker = create_health_checker(
        "n",
        gpus=lambda: [make_gpu(temp=90.0)],
        network=lambda: NetworkReading(connected=True, rtt_ms=1.0),
        peers=lambda: [make_peer("a")],
        host=lambda: HostFacts(cpus=1.0, memory_total_bytes=100, memory_used_bytes=10, hostname="h"),
        cpu=lambda: CpuReading(cores=1, load_1m=2.5, busy_pct=None),
        disk_path=tmp_path,
        clock=StepClock(),
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(checker.run())
        await until(lambda: checker.report)
        task.cancel()
    assert checker.report is not None
    names = [check.name for check in checker.report.checks]
    assert names == ["gpu", "cpu", "network", "peers", "memory", "disk"]
    found = {check.name: check.status for check in checker.report.checks}
    assert (found["gpu"], found["cpu"]) == (DEGRADED, DEGRADED)
    assert {found["network"], found["peers"], found["memory"]} == {HEALTHY}
    assert "free" in checker.report.checks[-1].reason
    assert not [one for one in threading.enumerate() if one.name.startswith("genie-health")]
