"""Health of this process and its machine: six checks, one status, and an event when the status changes.

The check functions are pure: each takes readings and returns a status with its reason. The checker runs them
periodically; `worst_status` combines them into one status.

| check   | degraded                  | unhealthy               | critical             |
|---------|---------------------------|-------------------------|----------------------|
| gpu     | one is overheated         | one does not respond    | none responds        |
| cpu     | load over 2 per core      | over 8 per core         |                      |
| network | round trip over 1 s, or   | no connection           |                      |
|         | interface over 95% used   |                         |                      |
| peers   | one is unresponsive       | all are                 |                      |
| memory  | over 90% used             | over 95%                | over 98%             |
| disk    | under 10% free            | under 5%                | under 1%             |

A check that fails or times out is degraded.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from genie.cluster.events import EventBus
from genie.errors import GenieError
from genie.hardware import CpuMeter, CpuReading, HostFacts, host_facts, is_busy, is_overheated
from genie.model.event import EventType
from genie.model.node import GPUInfo, NodeInfo, NodeStatus
from genie.processes.call_thread import CallThread
from genie.processes.clock import Clock, SystemClock
from genie.runtime.network_interfaces import Interface, Throughput

_log = logging.getLogger(__name__)

HEALTH_CHECK_INTERVAL_S = 30.0
CHECK_TIMEOUT_S = 5.0
RTT_MS_HEALTHY_MAX = 1000.0
LINK_UTILIZATION_PCT_HEALTHY_MAX = 95.0
LOAD_PER_CORE_DEGRADED, LOAD_PER_CORE_UNHEALTHY = 2.0, 8.0

STATUSES_BY_SEVERITY = (NodeStatus.HEALTHY, NodeStatus.DEGRADED, NodeStatus.UNHEALTHY, NodeStatus.CRITICAL)
"""The statuses that a check can return, from best to worst."""

_UNRESPONSIVE_STATUSES = (NodeStatus.SUSPECT, NodeStatus.DISCONNECTED)


CheckReadings = Mapping[str, float | None]
"""The measured values of a check, by name with unit; None if not available on this system."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    name: str
    status: NodeStatus
    reason: str
    readings: CheckReadings = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.status in STATUSES_BY_SEVERITY


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """`status` is the worst of the checks."""

    status: NodeStatus
    checks: tuple[CheckResult, ...]
    at: float

    def check(self, name: str) -> CheckResult | None:
        """The result of one check; None if it is not part of the report."""
        return next((check for check in self.checks if check.name == name), None)

    @property
    def reason(self) -> str:
        """The reasons of all checks that are not healthy."""
        bad = [check for check in self.checks if check.status is not NodeStatus.HEALTHY]
        return "; ".join(f"{check.name}: {check.reason}" for check in bad) or "all checks passed"


@dataclass(frozen=True, kw_only=True)
class NetworkReading:
    """State of the connection to the controller, with a `reason` if it is lost, and of its network interface.
    `throughput` is that of the interface since the last check."""

    connected: bool
    rtt_ms: float | None = None
    reason: str = ""
    interface: Interface | None = None
    throughput: Throughput | None = None


@dataclass(frozen=True, kw_only=True)
class DiskReading:
    free_bytes: int
    total_bytes: int


HealthCheck = Callable[[], Awaitable[CheckResult]]


# --- checks (pure) --------------------------------------------------------------------------------


def worst_status(checks: Iterable[CheckResult]) -> NodeStatus:
    """The worst status of the checks; healthy without any."""
    return max((check.status for check in checks), key=STATUSES_BY_SEVERITY.index, default=NodeStatus.HEALTHY)


def check_gpus(gpus: Sequence[GPUInfo]) -> CheckResult:
    """A GPU that is in use counts as healthy."""
    unresponsive = [gpu for gpu in gpus if not gpu.available and not is_busy(gpu)]
    hot = [gpu for gpu in gpus if is_overheated(gpu)]
    if unresponsive:
        status = NodeStatus.CRITICAL if len(unresponsive) == len(gpus) else NodeStatus.UNHEALTHY
        reason = ", ".join(f"GPU {gpu.gpu_id}: {gpu.reason}" for gpu in unresponsive)
    elif hot:
        status = NodeStatus.DEGRADED
        reason = ", ".join(f"GPU {gpu.gpu_id} is at {gpu.temperature_c:.0f} C" for gpu in hot)
    else:
        status, reason = NodeStatus.HEALTHY, f"{len(gpus)} of {len(gpus)} responding" if gpus else "no GPUs"
    return CheckResult(name="gpu", status=status, reason=reason)


def check_cpu(reading: CpuReading) -> CheckResult:
    """Checks the load, not the utilization: full utilization is normal for a compute node."""
    per_core = 0.0 if reading.load_1m is None else reading.load_1m / reading.cores
    limits = (LOAD_PER_CORE_DEGRADED, LOAD_PER_CORE_UNHEALTHY)
    parts = [
        "" if reading.busy_pct is None else f"{reading.busy_pct:.0f}% used",
        "" if reading.load_1m is None else f"load {reading.load_1m:.1f} on {reading.cores} cores",
    ]
    return CheckResult(
        name="cpu",
        status=STATUSES_BY_SEVERITY[sum(per_core > limit for limit in limits)],
        reason=", ".join(filter(None, parts)) or "no reading on this system",
        readings={
            "cores": float(reading.cores),
            "load_1m": reading.load_1m,
            "utilization_pct": reading.busy_pct,
        },
    )


def check_network(reading: NetworkReading) -> CheckResult:
    used_pct = _link_utilization_pct(reading)
    if not reading.connected:
        status, reason = NodeStatus.UNHEALTHY, reading.reason or "no connection to the controller"
    elif reading.rtt_ms is not None and reading.rtt_ms > RTT_MS_HEALTHY_MAX:
        status, reason = NodeStatus.DEGRADED, f"round trip time is {reading.rtt_ms:.0f} ms"
    elif used_pct is not None and used_pct > LINK_UTILIZATION_PCT_HEALTHY_MAX:
        status, reason = (
            NodeStatus.DEGRADED,
            f"the interface is saturated: {_format_interface_and_throughput(reading)}",
        )
    else:
        link = _format_interface_and_throughput(reading)
        status, reason = NodeStatus.HEALTHY, f"connected through {link}" if link else "connected"
    throughput = reading.throughput
    return CheckResult(
        name="network",
        status=status,
        reason=reason,
        readings={
            "rtt_ms": reading.rtt_ms,
            "link_speed_gbps": reading.interface.speed_gbps if reading.interface else None,
            "received_bytes_per_s": throughput.received_bytes_per_s if throughput else None,
            "sent_bytes_per_s": throughput.sent_bytes_per_s if throughput else None,
        },
    )


def _link_utilization_pct(reading: NetworkReading) -> float | None:
    """Utilization of the interface in its busier direction; links are full duplex."""
    if reading.throughput is None or reading.interface is None or reading.interface.speed_gbps is None:
        return None
    return 100.0 * reading.throughput.gbps_max / reading.interface.speed_gbps


def _format_interface_and_throughput(reading: NetworkReading) -> str:
    if reading.interface is None:
        return ""
    speed, throughput = reading.interface.speed_gbps, reading.throughput
    parts = [
        reading.interface.name,
        "" if speed is None else f"{speed:g} Gbit/s",
        "" if throughput is None else f"{throughput.received_bytes_per_s / 1e6:.1f} MB/s in",
        "" if throughput is None else f"{throughput.sent_bytes_per_s / 1e6:.1f} MB/s out",
    ]
    return ", ".join(filter(None, parts))


def check_peers(peers: Iterable[NodeInfo]) -> CheckResult:
    """`peers` must not include this node."""
    known = list(peers)
    unresponsive = [peer.node_id for peer in known if peer.status in _UNRESPONSIVE_STATUSES]
    if not unresponsive:
        reason = f"{len(known)} of {len(known)} responding" if known else "no peers"
        return CheckResult(name="peers", status=NodeStatus.HEALTHY, reason=reason)
    status = NodeStatus.UNHEALTHY if len(unresponsive) == len(known) else NodeStatus.DEGRADED
    return CheckResult(name="peers", status=status, reason=f"unresponsive: {', '.join(sorted(unresponsive))}")


def check_memory(facts: HostFacts) -> CheckResult:
    used_pct = 100.0 * facts.memory_used_bytes / max(1, facts.memory_total_bytes)
    return CheckResult(
        name="memory",
        status=_status_for_usage(used_pct, degraded=90.0, unhealthy=95.0, critical=98.0),
        reason=f"{used_pct:.0f}% used",
        readings={"used_pct": used_pct},
    )


def check_disk(reading: DiskReading) -> CheckResult:
    free_pct = 100.0 * reading.free_bytes / max(1, reading.total_bytes)
    return CheckResult(
        name="disk",
        status=_status_for_usage(100.0 - free_pct, degraded=90.0, unhealthy=95.0, critical=99.0),
        reason=f"{free_pct:.0f}% free",
        readings={"free_pct": free_pct},
    )


def _status_for_usage(used_pct: float, *, degraded: float, unhealthy: float, critical: float) -> NodeStatus:
    return STATUSES_BY_SEVERITY[sum(used_pct > limit for limit in (degraded, unhealthy, critical))]


# --- checker --------------------------------------------------------------------------------------


def create_health_checker(
    node_id: str,
    *,
    gpus: Callable[[], Sequence[GPUInfo]],
    network: Callable[[], NetworkReading],
    peers: Callable[[], Iterable[NodeInfo]],
    disk_path: Path,
    host: Callable[[], HostFacts] = host_facts,
    cpu: Callable[[], CpuReading] | None = None,
    interval_s: float = HEALTH_CHECK_INTERVAL_S,
    events: EventBus | None = None,
    clock: Clock | None = None,
) -> HealthChecker:
    """A checker with the six checks over the given readers, which must not block.

    `disk_path` is the state directory; its disk is read on a thread.
    """
    thread = CallThread("genie-health")
    read_cpu = CpuMeter().read if cpu is None else cpu

    async def run_disk_check() -> CheckResult:
        what = f"the disk under {disk_path}"
        reading = await thread.call(partial(read_disk_usage, disk_path), what=what, timeout_s=CHECK_TIMEOUT_S)
        return check_disk(reading)

    async def run_immediate_check(result: Callable[[], CheckResult]) -> CheckResult:
        return result()

    return HealthChecker(
        node_id,
        checks={
            "gpu": lambda: run_immediate_check(lambda: check_gpus(gpus())),
            "cpu": lambda: run_immediate_check(lambda: check_cpu(read_cpu())),
            "network": lambda: run_immediate_check(lambda: check_network(network())),
            "peers": lambda: run_immediate_check(lambda: check_peers(peers())),
            "memory": lambda: run_immediate_check(lambda: check_memory(host())),
            "disk": run_disk_check,
        },
        interval_s=interval_s,
        events=events,
        clock=clock or SystemClock(),
        on_close=thread.close,
    )


def read_disk_usage(path: Path) -> DiskReading:
    """Reads the file system of `path`, or of its nearest existing parent. Blocks."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return DiskReading(free_bytes=usage.free, total_bytes=usage.total)


class HealthChecker:
    """Runs its checks every `interval_s`. `report` is the last one; None before the first."""

    def __init__(
        self,
        node_id: str,
        *,
        checks: Mapping[str, HealthCheck],
        interval_s: float = HEALTH_CHECK_INTERVAL_S,
        check_timeout_s: float = CHECK_TIMEOUT_S,
        events: EventBus | None = None,
        clock: Clock | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.report: HealthReport | None = None
        self._node_id = node_id
        self._check_by_name = dict(checks)
        self._interval_s = interval_s
        self._check_timeout_s = check_timeout_s
        self._events = events
        self._clock = clock or SystemClock()
        self._on_close = on_close

    @property
    def status(self) -> NodeStatus:
        return NodeStatus.INITIALIZING if self.report is None else self.report.status

    async def run(self) -> None:
        """Checks every interval until cancelled; immediately if there is no report yet."""
        try:
            if self.report is None:
                await self.check()
            while True:
                await self._clock.sleep(self._interval_s)
                await self.check()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the thread of the checks. Idempotent; a later check starts another one."""
        self._on_close()

    async def check(self, *, timeout_s: float | None = None) -> HealthReport:
        """Runs all checks now, each for at most `timeout_s`. Never raises: the report includes failed
        checks."""
        each_s = self._check_timeout_s if timeout_s is None else timeout_s
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._run_check_with_timeout(name, check, timeout_s=each_s))
                for name, check in self._check_by_name.items()
            ]
        results = tuple(task.result() for task in tasks)
        report = HealthReport(status=worst_status(results), checks=results, at=self._clock.wall_s())
        before, self.report = self.status, report
        if report.status is not before:
            self._publish_status_change(report, before)
        return report

    async def _run_check_with_timeout(
        self, name: str, check: HealthCheck, *, timeout_s: float
    ) -> CheckResult:
        try:
            async with asyncio.timeout(timeout_s):
                return await check()
        except TimeoutError:
            reason = f"no response within {timeout_s:g} s"
        except Exception as error:  # a failed check must not hide the others
            _log.warning("the %s health check failed", name, exc_info=not isinstance(error, GenieError))
            reason = f"check failed: {error}"
        return CheckResult(name=name, status=NodeStatus.DEGRADED, reason=reason)

    def _publish_status_change(self, report: HealthReport, before: NodeStatus) -> None:
        _log.log(
            logging.INFO if report.status is NodeStatus.HEALTHY else logging.WARNING,
            "health: %s (%s)",
            report.status,
            report.reason,
        )
        if self._events is not None:
            facts = {"status": str(report.status), "before": str(before)}
            self._events.publish(
                EventType.HEALTH_CHANGED, node_id=self._node_id, reason=report.reason, facts=facts
            )
