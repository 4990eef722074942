"""Is this process well? Five checks, one verdict, and an event when the verdict changes.

The checks of this file are pure: each takes readings and returns a status with its reason. The
checker runs them on a schedule. `overall` is the rule that makes one verdict of them. Not for:
taking the readings (monitoring.py, the session), or acting on the verdict.

| check   | degraded                  | unhealthy               | critical             |
|---------|---------------------------|-------------------------|----------------------|
| gpu     | one is overheated         | one does not answer     | none answers         |
| network | round trip over 1 s       | no connection           |                      |
| peers   | one is silent             | all are                 |                      |
| memory  | over 90% used             | over 95%                | over 98%             |
| disk    | under 10% free            | under 5%                | under 1%             |

A check that fails or takes too long is degraded itself: not knowing is some trouble, not the worst.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from genie.cluster.events import EventBus
from genie.errors import GenieError
from genie.hardware import HostFacts, host_facts, is_busy, is_overheated
from genie.hardware.call_thread import CallThread
from genie.model.event import EventType
from genie.model.node import GPUInfo, NodeInfo, NodeStatus
from genie.runtime.clock import Clock, SystemClock

_log = logging.getLogger(__name__)

INTERVAL_S = 30.0
CHECK_TIMEOUT_S = 5.0
RTT_MS_MAX = 1000.0

SEVERITY = (NodeStatus.HEALTHY, NodeStatus.DEGRADED, NodeStatus.UNHEALTHY, NodeStatus.CRITICAL)
"""The four that a check can find, from best to worst."""

_SILENT = (NodeStatus.SUSPECT, NodeStatus.DISCONNECTED)


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    name: str
    status: NodeStatus
    reason: str

    def __post_init__(self) -> None:
        assert self.status in SEVERITY


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """`status` is the worst of the checks."""

    status: NodeStatus
    checks: tuple[CheckResult, ...]
    at: float

    @property
    def reason(self) -> str:
        """Every check that is not healthy, in words."""
        bad = [check for check in self.checks if check.status is not NodeStatus.HEALTHY]
        return "; ".join(f"{check.name}: {check.reason}" for check in bad) or "all checks passed"


@dataclass(frozen=True, kw_only=True)
class NetworkReading:
    """The connection to the controller, as its owner last saw it. `reason` when there is none."""

    connected: bool
    rtt_ms: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DiskReading:
    free_bytes: int
    total_bytes: int


Check = Callable[[], Awaitable[CheckResult]]


# --- Judging: values in, values out ---------------------------------------------------------------


def overall(checks: Iterable[CheckResult]) -> NodeStatus:
    """The worst wins: one critical check is not made up for by four good ones. Healthy without any."""
    return max((check.status for check in checks), key=SEVERITY.index, default=NodeStatus.HEALTHY)


def check_gpus(gpus: Sequence[GPUInfo]) -> CheckResult:
    """A busy GPU is well: being used is what it is for."""
    silent = [gpu for gpu in gpus if not gpu.available and not is_busy(gpu)]
    hot = [gpu for gpu in gpus if is_overheated(gpu)]
    if silent:
        status = NodeStatus.CRITICAL if len(silent) == len(gpus) else NodeStatus.UNHEALTHY
        reason = ", ".join(f"GPU {gpu.gpu_id}: {gpu.reason}" for gpu in silent)
    elif hot:
        status = NodeStatus.DEGRADED
        reason = ", ".join(f"GPU {gpu.gpu_id} is at {gpu.temperature_c:.0f} C" for gpu in hot)
    else:
        status, reason = NodeStatus.HEALTHY, f"{len(gpus)} answer" if gpus else "there are none"
    return CheckResult(name="gpu", status=status, reason=reason)


def check_network(reading: NetworkReading) -> CheckResult:
    if not reading.connected:
        status, reason = NodeStatus.UNHEALTHY, reading.reason or "no connection to the controller"
    elif reading.rtt_ms is not None and reading.rtt_ms > RTT_MS_MAX:
        status, reason = NodeStatus.DEGRADED, f"a round trip takes {reading.rtt_ms:.0f} ms"
    else:
        status, reason = NodeStatus.HEALTHY, "connected"
    return CheckResult(name="network", status=status, reason=reason)


def check_peers(peers: Iterable[NodeInfo]) -> CheckResult:
    """`peers` without this node itself."""
    known = list(peers)
    silent = [peer.node_id for peer in known if peer.status in _SILENT]
    if not silent:
        reason = f"{len(known)} answer" if known else "there are none"
        return CheckResult(name="peers", status=NodeStatus.HEALTHY, reason=reason)
    status = NodeStatus.UNHEALTHY if len(silent) == len(known) else NodeStatus.DEGRADED
    return CheckResult(name="peers", status=status, reason=f"silent: {', '.join(sorted(silent))}")


def check_memory(facts: HostFacts) -> CheckResult:
    used_pct = 100.0 * facts.memory_used_bytes / max(1, facts.memory_total_bytes)
    return CheckResult(
        name="memory",
        status=_graded(used_pct, degraded=90.0, unhealthy=95.0, critical=98.0),
        reason=f"{used_pct:.0f}% used",
    )


def check_disk(reading: DiskReading) -> CheckResult:
    free_pct = 100.0 * reading.free_bytes / max(1, reading.total_bytes)
    return CheckResult(
        name="disk",
        status=_graded(100.0 - free_pct, degraded=90.0, unhealthy=95.0, critical=99.0),
        reason=f"{free_pct:.0f}% free",
    )


def _graded(used_pct: float, *, degraded: float, unhealthy: float, critical: float) -> NodeStatus:
    return SEVERITY[sum(used_pct > limit for limit in (degraded, unhealthy, critical))]


# --- Doing ----------------------------------------------------------------------------------------


def create_health_checker(
    node_id: str,
    *,
    gpus: Callable[[], Sequence[GPUInfo]],
    network: Callable[[], NetworkReading],
    peers: Callable[[], Iterable[NodeInfo]],
    disk_path: Path,
    host: Callable[[], HostFacts] = host_facts,
    interval_s: float = INTERVAL_S,
    events: EventBus | None = None,
    clock: Clock | None = None,
) -> HealthChecker:
    """The five checks over the given readers, which must be cheap; only the disk is asked on a thread.

    `disk_path` is the state directory: that is what Genie needs space for.
    """
    thread = CallThread("genie-health")

    async def disk() -> CheckResult:
        what = f"the disk under {disk_path}"
        reading = await thread.call(partial(read_disk, disk_path), what=what, timeout_s=CHECK_TIMEOUT_S)
        return check_disk(reading)

    async def ready(result: Callable[[], CheckResult]) -> CheckResult:
        return result()

    return HealthChecker(
        node_id,
        checks={
            "gpu": lambda: ready(lambda: check_gpus(gpus())),
            "network": lambda: ready(lambda: check_network(network())),
            "peers": lambda: ready(lambda: check_peers(peers())),
            "memory": lambda: ready(lambda: check_memory(host())),
            "disk": disk,
        },
        interval_s=interval_s,
        events=events,
        clock=clock or SystemClock(),
        on_stop=thread.close,
    )


def read_disk(path: Path) -> DiskReading:
    """The file system under `path`, or under its nearest parent that exists. Blocks."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return DiskReading(free_bytes=usage.free, total_bytes=usage.total)


class HealthChecker:
    """Runs its checks every `interval_s`. `report` is the newest; None before the first round."""

    def __init__(
        self,
        node_id: str,
        *,
        checks: Mapping[str, Check],
        interval_s: float = INTERVAL_S,
        check_timeout_s: float = CHECK_TIMEOUT_S,
        events: EventBus | None = None,
        clock: Clock | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.report: HealthReport | None = None
        self._node_id = node_id
        self._checks = dict(checks)
        self._interval_s = interval_s
        self._check_timeout_s = check_timeout_s
        self._events = events
        self._clock = clock or SystemClock()
        self._on_stop = on_stop

    @property
    def status(self) -> NodeStatus:
        return NodeStatus.INITIALIZING if self.report is None else self.report.status

    async def run(self) -> None:
        """Checks until cancelled. For an owner with a TaskGroup."""
        try:
            while True:
                await self.check()
                await self._clock.sleep(self._interval_s)
        finally:
            self._on_stop()

    async def check(self) -> HealthReport:
        """One round now. Never raises: a check that fails is part of the report."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._guarded(name, check)) for name, check in self._checks.items()]
        results = tuple(task.result() for task in tasks)
        report = HealthReport(status=overall(results), checks=results, at=self._clock.wall_s())
        before, self.report = self.status, report
        if report.status is not before:
            self._tell(report, before)
        return report

    async def _guarded(self, name: str, check: Check) -> CheckResult:
        try:
            async with asyncio.timeout(self._check_timeout_s):
                return await check()
        except TimeoutError:
            reason = f"no answer within {self._check_timeout_s:g} s"
        except Exception as error:  # one check's trouble must not hide the others
            _log.warning("the %s check failed", name, exc_info=not isinstance(error, GenieError))
            reason = f"could not be checked: {error}"
        return CheckResult(name=name, status=NodeStatus.DEGRADED, reason=reason)

    def _tell(self, report: HealthReport, before: NodeStatus) -> None:
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
