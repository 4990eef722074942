"""The resource monitor: periodic readings, events on change, failed readings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from genie.cluster.events import EventBus, EventType
from genie.cluster.monitoring import ResourceMonitor, create_resource_monitor, find_gpu_changes
from genie.errors import HardwareError
from genie.hardware import HostFacts
from genie.model.node import GPUInfo, NodeInfo, NodeRole, Vendor
from tests.fakes.step_clock import StepClock
from tests.waiting import until

HOST_FACTS = HostFacts(cpus=2.0, memory_total_bytes=100, memory_used_bytes=30, hostname="box")


def make_gpu(gpu_id: int = 0, *, reason: str = "", temp: float | None = 40.0) -> GPUInfo:
    return GPUInfo(
        gpu_id=gpu_id,
        name="X1",
        vendor=Vendor.NVIDIA,
        temperature_c=temp,
        available=not reason,
        reason=reason,
    )


NODE = NodeInfo(node_id="n1", hostname="box", role=NodeRole.CLIENT, host="127.0.0.1", gpus=(make_gpu(),))


class ScriptedGpuSource:
    """Returns the readings in order, raises exceptions among them, then repeats the last one."""

    def __init__(self, *readings: tuple[GPUInfo, ...] | Exception) -> None:
        self._readings = list(readings)
        self.reads = 0
        self.closed = 0

    async def read_async(self, *, timeout_s: float) -> tuple[GPUInfo, ...]:
        assert timeout_s > 0
        self.reads += 1
        reading = self._readings[0] if len(self._readings) == 1 else self._readings.pop(0)
        if isinstance(reading, Exception):
            raise reading
        return reading

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def events() -> Iterator[EventBus]:
    bus = EventBus()
    yield bus
    bus.close()


def make_monitor(
    source: ScriptedGpuSource,
    *,
    events: EventBus | None = None,
    clock: StepClock | None = None,
    history_max: int = 10,
) -> ResourceMonitor:
    return create_resource_monitor(
        NODE,
        events=events,
        source=source,
        clock=clock or StepClock(),
        host=lambda: HOST_FACTS,
        history_max=history_max,
    )


def list_published_events(events: EventBus) -> list[tuple[EventType, str]]:
    return [(event.type, event.reason) for event in events.history()]


async def test_poll_updates_snapshot_and_local_node(events: EventBus) -> None:
    monitor = make_monitor(ScriptedGpuSource((make_gpu(temp=55.0),)), events=events)
    assert monitor.snapshot() is None
    await monitor.poll()
    snapshot = monitor.snapshot()
    assert snapshot is not None
    assert (snapshot.at, snapshot.gpus[0].temperature_c, snapshot.host) == (1000.0, 55.0, HOST_FACTS)
    assert monitor.local_node.gpus == snapshot.gpus
    assert (monitor.local_node.memory_used_bytes, monitor.local_node.node_id) == (30, "n1")
    assert list_published_events(events) == []


async def test_events_are_published_only_on_change(events: EventBus) -> None:
    busy = make_gpu(reason="utilisation 97% is above 90%")
    monitor = make_monitor(
        ScriptedGpuSource((make_gpu(),), (busy,), (busy,), (make_gpu(),), (make_gpu(),)), events=events
    )
    for _ in range(5):
        await monitor.poll()
    assert list_published_events(events) == [
        (EventType.GPU_UNAVAILABLE, "GPU 0 (X1): utilisation 97% is above 90%"),
        (EventType.GPU_AVAILABLE, "GPU 0 (X1) is available again"),
    ]


async def test_overheating_is_published_once_until_the_gpu_cooled_down(events: EventBus) -> None:
    hot, cool = make_gpu(temp=86.0), make_gpu(temp=85.0)
    monitor = make_monitor(ScriptedGpuSource((hot,), (hot,), (cool,), (hot,)), events=events)
    for _ in range(4):
        await monitor.poll()
    assert list_published_events(events) == [(EventType.GPU_OVERHEATED, "GPU 0 (X1): 86 C is above 85 C")] * 2
    assert events.history()[0].facts == {"gpu_id": 0, "utilization_pct": None, "temperature_c": 86.0}
    assert events.history()[0].node_id == "n1"


def test_first_reading_reports_only_errors() -> None:
    changes = find_gpu_changes(None, [make_gpu(0), make_gpu(1, reason="lost"), make_gpu(2, temp=90.0)])
    assert [(change.type, change.gpu.gpu_id) for change in changes] == [
        (EventType.GPU_UNAVAILABLE, 1),
        (EventType.GPU_OVERHEATED, 2),
    ]


def test_appearing_and_disappearing_gpus_are_reported() -> None:
    changes = find_gpu_changes([make_gpu(0)], [make_gpu(1)])
    assert [(change.type, change.reason) for change in changes] == [
        (EventType.GPU_AVAILABLE, "GPU 1 (X1) is available"),
        (EventType.GPU_UNAVAILABLE, "GPU 0 (X1): no longer listed"),
    ]


async def test_failed_reading_is_published_once_and_polling_continues(
    events: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = HardwareError("no response within 10 s")
    monitor = make_monitor(
        ScriptedGpuSource(stuck, stuck, RuntimeError("odd"), (make_gpu(temp=41.0),)), events=events
    )
    assert await monitor.poll() is None
    assert monitor.last_error == "no response within 10 s"
    assert await monitor.poll() is None
    assert await monitor.poll() is None
    assert await monitor.poll() is not None
    assert monitor.last_error == ""
    assert list_published_events(events) == [
        (EventType.MONITOR_ERROR, "no response within 10 s"),
        (EventType.MONITOR_ERROR, "odd"),
    ]
    assert "Traceback" in caplog.text, "an unexpected error is logged with its traceback"


async def test_repeated_error_after_a_good_reading_is_published_again(events: EventBus) -> None:
    stuck = HardwareError("no answer")
    monitor = make_monitor(ScriptedGpuSource(stuck, (make_gpu(),), stuck), events=events)
    for _ in range(3):
        await monitor.poll()
    assert [event.type for event in events.history()] == [EventType.MONITOR_ERROR] * 2


async def test_history_is_bounded_and_oldest_first() -> None:
    clock = StepClock()
    monitor = make_monitor(ScriptedGpuSource((make_gpu(),)), clock=clock, history_max=3)
    for at in range(5):
        clock.now_s = float(at)
        await monitor.poll()
    assert [snapshot.at for snapshot in monitor.history()] == [2.0, 3.0, 4.0]
    assert [snapshot.at for snapshot in monitor.history(limit=1)] == [4.0]


async def test_run_reads_immediately_and_then_every_interval() -> None:
    clock, source = StepClock(), ScriptedGpuSource((make_gpu(),))
    monitor = make_monitor(source, clock=clock)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(monitor.run())
        await until(lambda: source.reads == 1)
        clock.step()
        await until(lambda: source.reads == 2)
        task.cancel()
    assert clock.slept_s[0] == 5.0
    assert source.closed == 0, "a given source is not closed"


async def test_start_reads_in_the_background_until_stop() -> None:
    source = ScriptedGpuSource((make_gpu(),))
    monitor = make_monitor(source)
    await monitor.start()
    assert monitor.snapshot() is not None, "the first reading is there"
    await monitor.start()
    assert len([task for task in asyncio.all_tasks() if task.get_name() == "genie-monitor"]) == 1
    await monitor.stop()
    await monitor.stop()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "genie-monitor"] == []


async def test_stopped_monitor_can_be_started_again() -> None:
    source = ScriptedGpuSource((make_gpu(),))
    monitor = make_monitor(source)
    async with monitor:
        assert source.reads == 1
    async with monitor:
        assert source.reads == 2


async def test_start_returns_when_the_first_reading_fails() -> None:
    async with make_monitor(ScriptedGpuSource(HardwareError("no"))) as monitor:
        assert (monitor.snapshot(), monitor.last_error) == (None, "no")


async def test_start_returns_when_stopped_during_the_first_reading() -> None:
    class Endless(ScriptedGpuSource):
        async def read_async(self, *, timeout_s: float) -> tuple[GPUInfo, ...]:
            await asyncio.Event().wait()
            raise AssertionError

    monitor = make_monitor(Endless())
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        starting = group.create_task(monitor.start())
        await until(lambda: any(task.get_name() == "genie-monitor" for task in asyncio.all_tasks()))
        await monitor.stop()
        await starting


async def test_default_source_is_closed_with_the_monitor() -> None:
    cpu = GPUInfo(gpu_id=0, name="cpu", vendor=Vendor.CPU)
    node = NodeInfo(node_id="n", hostname="h", role=NodeRole.WORKER, host="127.0.0.1", gpus=(cpu,))
    async with create_resource_monitor(local_node=node, interval_s=60) as monitor:
        snapshot = monitor.snapshot()
        assert snapshot is not None
        assert len(snapshot.gpus) >= 1
        assert any(one.name.startswith("genie-hardware") for one in threading.enumerate())
    assert not any(one.name.startswith("genie-hardware") for one in threading.enumerate())
