"""Monitors the accelerators of this machine: reads them periodically and emits an event on every change.

Run `run()` in a TaskGroup, or use `start()` and `stop()`, which manage a background task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import msgspec

from genie.cluster.events import EventBus
from genie.errors import GenieError
from genie.hardware import (
    TEMPERATURE_C_MAX,
    HostFacts,
    Inventory,
    host_facts,
    is_overheated,
)
from genie.model.event import EventType
from genie.model.node import GPUInfo, NodeInfo, Vendor
from genie.processes.clock import Clock, SystemClock

_log = logging.getLogger(__name__)

GPU_POLL_INTERVAL_S = 5.0
GPU_READ_TIMEOUT_S = 10.0
SNAPSHOT_HISTORY_MAX = 720
"""An hour at the default interval."""


class GpuSource(Protocol):
    """The source of readings, such as genie.hardware.Inventory. Usable again after close()."""

    async def read_async(self, *, timeout_s: float) -> tuple[GPUInfo, ...]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ResourceSnapshot:
    """One successful reading."""

    at: float
    gpus: tuple[GPUInfo, ...]
    host: HostFacts


@dataclass(frozen=True, kw_only=True)
class GpuChange:
    """A difference between two readings that is published as an event."""

    type: EventType
    gpu: GPUInfo
    reason: str


def create_resource_monitor(
    local_node: NodeInfo,
    *,
    interval_s: float = GPU_POLL_INTERVAL_S,
    events: EventBus | None = None,
    clock: Clock | None = None,
    source: GpuSource | None = None,
    host: Callable[[], HostFacts] = host_facts,
    history_max: int = SNAPSHOT_HISTORY_MAX,
) -> ResourceMonitor:
    """Creates a monitor of the machine of `local_node`, whose GPUs are the first state for detecting changes.

    Without a `source` it opens the hardware itself and closes it when it stops; a given source is not closed.
    """
    cpu_accelerators = sum(gpu.vendor is Vendor.CPU for gpu in local_node.gpus)
    return ResourceMonitor(
        local_node,
        source=Inventory(cpu_accelerators) if source is None else source,
        closes_source=source is None,
        host=host,
        interval_s=interval_s,
        events=events,
        clock=clock or SystemClock(),
        history_max=history_max,
    )


class ResourceMonitor:
    """Created by create_resource_monitor(). Runs on one event loop; readings can be read on any thread."""

    def __init__(
        self,
        local_node: NodeInfo,
        *,
        source: GpuSource,
        closes_source: bool,
        host: Callable[[], HostFacts],
        interval_s: float,
        events: EventBus | None,
        clock: Clock,
        history_max: int,
    ) -> None:
        self._local_node = local_node
        self._gpu_source = source
        self._closes_source = closes_source
        self._read_host_facts = host
        self._interval_s = interval_s
        self._events = events
        self._clock = clock
        self._history: deque[ResourceSnapshot] = deque(maxlen=history_max)
        self._last_gpus: tuple[GPUInfo, ...] | None = local_node.gpus or None
        self._last_error = ""
        self._poll_task: asyncio.Task[None] | None = None
        self._first_poll_done = asyncio.Event()

    @property
    def local_node(self) -> NodeInfo:
        """The node with its latest readings."""
        return self._local_node

    @property
    def last_error(self) -> str:
        """Error of the last reading; empty if it succeeded."""
        return self._last_error

    def snapshot(self) -> ResourceSnapshot | None:
        """The latest reading; None before the first."""
        return self._history[-1] if self._history else None

    def history(self, limit: int | None = None) -> list[ResourceSnapshot]:
        """Past readings, oldest first; at most `limit` of them."""
        kept = list(self._history)
        return kept if limit is None else kept[max(0, len(kept) - limit) :]

    async def run(self) -> None:
        """Reads every interval until cancelled."""
        try:
            while True:
                await self.poll()
                self._first_poll_done.set()
                await self._clock.sleep(self._interval_s)
        finally:
            self._first_poll_done.set()  # wakes start() if there was no reading
            if self._closes_source:
                self._gpu_source.close()

    async def start(self) -> None:
        """Starts reading in the background; returns after the first reading. Idempotent."""
        if self._poll_task is None or self._poll_task.done():
            self._first_poll_done = asyncio.Event()
            # Not in a TaskGroup: the monitor owns the task, and stop() awaits it.
            self._poll_task = asyncio.create_task(self.run(), name="genie-monitor")
        await self._first_poll_done.wait()

    async def stop(self) -> None:
        """Ends the background task and waits for it. Idempotent; start() may follow."""
        task, self._poll_task = self._poll_task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def __aenter__(self) -> ResourceMonitor:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def poll(self) -> ResourceSnapshot | None:
        """Takes one reading. On failure emits an event with the reason and returns None."""
        try:
            gpus = await self._gpu_source.read_async(timeout_s=GPU_READ_TIMEOUT_S)
            snapshot = ResourceSnapshot(at=self._clock.wall_s(), gpus=gpus, host=self._read_host_facts())
        except Exception as error:  # a driver error must not end the monitor
            _log.warning(
                "could not read the accelerators: %s", error, exc_info=not isinstance(error, GenieError)
            )
            self._publish_new_failure(str(error) or type(error).__name__)
            return None
        self._last_error = ""
        self._record_snapshot_and_publish_changes(snapshot)
        return snapshot

    def _record_snapshot_and_publish_changes(self, snapshot: ResourceSnapshot) -> None:
        changes = find_gpu_changes(self._last_gpus, snapshot.gpus)
        self._last_gpus = snapshot.gpus
        self._history.append(snapshot)
        self._local_node = msgspec.structs.replace(
            self._local_node,
            gpus=snapshot.gpus,
            memory_total_bytes=snapshot.host.memory_total_bytes,
            memory_used_bytes=snapshot.host.memory_used_bytes,
        )
        for change in changes:
            self._publish_gpu_change(change)

    def _publish_gpu_change(self, change: GpuChange) -> None:
        _log.info("accelerator event %s: %s", change.type, change.reason)
        if self._events is not None:
            facts = {
                "gpu_id": change.gpu.gpu_id,
                "utilization_pct": change.gpu.utilization_pct,
                "temperature_c": change.gpu.temperature_c,
            }
            self._events.publish(
                change.type, node_id=self._local_node.node_id, reason=change.reason, facts=facts
            )

    def _publish_new_failure(self, reason: str) -> None:
        """Emits one event per new reason, not per attempt."""
        known, self._last_error = self._last_error, reason
        if reason != known and self._events is not None:
            self._events.publish(EventType.MONITOR_ERROR, node_id=self._local_node.node_id, reason=reason)


def find_gpu_changes(before: Sequence[GPUInfo] | None, after: Sequence[GPUInfo]) -> list[GpuChange]:
    """Returns the changes between two readings; without `before`, only the errors. Pure."""
    known = {gpu.gpu_id: gpu for gpu in before or ()}
    changes: list[GpuChange] = []
    for gpu in after:
        old = known.pop(gpu.gpu_id, None)
        was_available = before is None if old is None else old.available
        name = f"GPU {gpu.gpu_id} ({gpu.name})"
        if gpu.available and not was_available:
            reason = f"{name} is available" + (" again" if old else "")
            changes.append(GpuChange(type=EventType.GPU_AVAILABLE, gpu=gpu, reason=reason))
        if not gpu.available and (was_available or old is None):
            reason = f"{name}: {gpu.reason}"
            changes.append(GpuChange(type=EventType.GPU_UNAVAILABLE, gpu=gpu, reason=reason))
        if is_overheated(gpu) and not (old is not None and is_overheated(old)):
            reason = f"{name}: {gpu.temperature_c:.0f} C is above {TEMPERATURE_C_MAX:.0f} C"
            changes.append(GpuChange(type=EventType.GPU_OVERHEATED, gpu=gpu, reason=reason))
    missing = [gpu for gpu in known.values() if gpu.available]
    return changes + [
        GpuChange(
            type=EventType.GPU_UNAVAILABLE, gpu=gpu, reason=f"GPU {gpu.gpu_id} ({gpu.name}): no longer listed"
        )
        for gpu in missing
    ]
