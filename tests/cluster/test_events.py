"""The event bus: delivery to plain and async handlers, bounds, failing handlers."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Iterator

import pytest

from genie.cluster import events as module
from genie.cluster.events import ClusterEvent, EventBus, EventType
from genie.errors import SessionError, UsageError
from genie.model import event as model
from tests.waiting import until, wait_until


class FixedClock:
    def monotonic_s(self) -> float:
        return 1.0

    def wall_s(self) -> float:
        return 1234.5

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("the bus does not wait")


@pytest.fixture
def bus() -> Iterator[EventBus]:
    made = EventBus(clock=FixedClock(), queue_max=4, history_max=10)
    yield made
    made.close()


def publish(bus: EventBus, reason: str, event_type: EventType = EventType.GPU_AVAILABLE) -> ClusterEvent:
    return bus.publish(event_type, node_id="n", reason=reason)


def test_event_types_are_those_of_the_model() -> None:
    assert module.ClusterEvent is model.ClusterEvent
    assert module.EventType is model.EventType


def test_plain_handler_gets_events_in_order_on_the_bus_thread(bus: EventBus) -> None:
    got: list[tuple[str, str]] = []
    bus.subscribe(None, lambda event: got.append((event.reason, threading.current_thread().name)))
    for reason in ("a", "b", "c"):
        publish(bus, reason)
    wait_until(lambda: len(got) == 3)
    assert got == [("a", "genie-events"), ("b", "genie-events"), ("c", "genie-events")]


def test_published_event_has_time_node_reason_and_facts(bus: EventBus) -> None:
    event = bus.publish(EventType.GPU_OVERHEATED, node_id="n1", reason="hot", facts={"gpu_id": 3})
    assert event == ClusterEvent(
        type=EventType.GPU_OVERHEATED, node_id="n1", at=1234.5, reason="hot", facts={"gpu_id": 3}
    )
    assert bus.history() == [event]


def test_handler_gets_only_the_subscribed_type(bus: EventBus) -> None:
    got: list[str] = []
    bus.subscribe(EventType.GPU_OVERHEATED, lambda event: got.append(event.reason))
    publish(bus, "cool", EventType.GPU_AVAILABLE)
    publish(bus, "hot", EventType.GPU_OVERHEATED)
    wait_until(lambda: got)
    assert got == ["hot"]


async def test_async_handler_runs_on_the_loop_that_subscribed_it(bus: EventBus) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    done = asyncio.Event()

    async def handler(event: ClusterEvent) -> None:
        loops.append(asyncio.get_running_loop())
        done.set()

    bus.subscribe(None, handler)
    emitter = threading.Thread(target=publish, args=(bus, "from another thread"))
    emitter.start()
    async with asyncio.timeout(20):
        await done.wait()
    emitter.join()
    assert loops == [asyncio.get_running_loop()]


async def test_async_handler_gets_events_in_order_without_overlap(bus: EventBus) -> None:
    log: list[str] = []

    async def handler(event: ClusterEvent) -> None:
        log.append(f"begin {event.reason}")
        await asyncio.sleep(0)
        log.append(f"end {event.reason}")

    bus.subscribe(None, handler)
    publish(bus, "a")
    publish(bus, "b")
    await until(lambda: len(log) == 4)
    publish(bus, "c")
    await until(lambda: len(log) == 6)
    assert log == ["begin a", "end a", "begin b", "end b", "begin c", "end c"]


@pytest.mark.parametrize("shape", ["partial", "object"])
async def test_all_kinds_of_async_handlers_are_detected(bus: EventBus, shape: str) -> None:
    got: list[str] = []

    async def append_prefixed_reason(prefix: str, event: ClusterEvent) -> None:
        got.append(prefix + event.reason)

    class Called:
        async def __call__(self, event: ClusterEvent) -> None:
            got.append("x" + event.reason)

    bus.subscribe(None, functools.partial(append_prefixed_reason, "x") if shape == "partial" else Called())
    publish(bus, "a")
    await until(lambda: got == ["xa"])


def test_async_handler_requires_a_running_loop(bus: EventBus) -> None:
    async def handler(event: ClusterEvent) -> None: ...

    with pytest.raises(UsageError, match=r"requires a running event loop .*plain function"):
        bus.subscribe(None, handler)


def test_handler_must_be_callable(bus: EventBus) -> None:
    with pytest.raises(UsageError, match="must be callable"):
        bus.subscribe(None, "print")  # type: ignore[arg-type]


def test_failing_handler_is_logged_and_does_not_affect_others(
    bus: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[str] = []

    def failing_handler(event: ClusterEvent) -> None:
        raise ValueError("boom")

    bus.subscribe(None, failing_handler)
    bus.subscribe(None, lambda event: got.append(event.reason))
    publish(bus, "a")
    publish(bus, "b")
    wait_until(lambda: got == ["a", "b"])
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert "boom" in caplog.text


async def test_failing_async_handler_gets_the_next_event(
    bus: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[str] = []

    async def handler(event: ClusterEvent) -> None:
        got.append(event.reason)
        raise ValueError("boom")

    bus.subscribe(None, handler)
    publish(bus, "a")
    publish(bus, "b")
    await until(lambda: got == ["a", "b"])
    await until(lambda: caplog.text.count("ValueError: boom") == 2)


def test_handler_that_returns_a_coroutine_is_logged(bus: EventBus, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(event: ClusterEvent) -> None: ...

    bus.subscribe(None, lambda event: handler(event))  # noqa: PLW0108 - the wrapper is the point
    publish(bus, "a")
    wait_until(lambda: "subscribe the async function" in caplog.text)


def test_slow_plain_handler_loses_its_oldest_events(bus: EventBus) -> None:
    gate, entered = threading.Event(), threading.Event()
    got: list[str] = []

    def slow_handler(event: ClusterEvent) -> None:
        entered.set()
        gate.wait(30)
        got.append(event.reason)

    subscription = bus.subscribe(None, slow_handler)
    publish(bus, "0")
    assert entered.wait(30)
    for number in range(1, 8):  # 4 of these 7 fit
        publish(bus, str(number))
    assert subscription.dropped_count == 3
    gate.set()
    wait_until(lambda: got == ["0", "4", "5", "6", "7"])


async def test_slow_async_handler_loses_its_oldest_events(bus: EventBus) -> None:
    got: list[str] = []

    async def handler(event: ClusterEvent) -> None:
        got.append(event.reason)

    subscription = bus.subscribe(None, handler)
    for number in range(7):  # all before the loop can run anything
        publish(bus, str(number))
    assert subscription.dropped_count == 3
    await until(lambda: got == ["3", "4", "5", "6"])


def test_unsubscribe_stops_delivery_and_is_idempotent(bus: EventBus) -> None:
    got: list[str] = []
    with bus.subscribe(None, lambda event: got.append(event.reason)) as subscription:
        publish(bus, "a")
        wait_until(lambda: got == ["a"])
    subscription.unsubscribe()
    publish(bus, "b")
    bus.close()
    assert got == ["a"]


def test_handler_can_unsubscribe_itself(bus: EventBus) -> None:
    got: list[str] = []

    def handler_that_unsubscribes(event: ClusterEvent) -> None:
        got.append(event.reason)
        subscription.unsubscribe()

    subscription = bus.subscribe(None, handler_that_unsubscribes)
    publish(bus, "a")
    publish(bus, "b")
    wait_until(lambda: got)
    bus.close()
    assert got == ["a"]


def test_handler_can_emit(bus: EventBus) -> None:
    got: list[str] = []

    def handler(event: ClusterEvent) -> None:
        got.append(event.reason)
        if event.reason == "a":
            publish(bus, "b")

    bus.subscribe(None, handler)
    publish(bus, "a")
    wait_until(lambda: got == ["a", "b"])


def test_subscription_ends_when_its_loop_is_closed(bus: EventBus) -> None:
    async def handler(event: ClusterEvent) -> None: ...

    async def main() -> None:
        bus.subscribe(None, handler)
        publish(bus, "never delivered: the loop ends now")

    asyncio.run(main())
    publish(bus, "late")
    assert [event.reason for event in bus.history()][-1] == "late"
    assert bus._subscriptions == []


async def test_cancelled_delivery_does_not_end_the_subscription(bus: EventBus) -> None:
    """As by a program that cancels all tasks."""
    got: list[str] = []

    async def handler(event: ClusterEvent) -> None:
        got.append(event.reason)
        if event.reason == "a":
            await asyncio.Event().wait()

    before = asyncio.all_tasks()
    bus.subscribe(None, handler)
    publish(bus, "a")
    await until(lambda: got == ["a"])
    (delivery,) = asyncio.all_tasks() - before
    delivery.cancel()
    await until(delivery.cancelled)
    publish(bus, "b")
    await until(lambda: got == ["a", "b"])


def test_history_is_bounded_and_ordered_oldest_first(bus: EventBus) -> None:
    for number in range(12):
        publish(bus, str(number))
    assert [event.reason for event in bus.history()] == [str(number) for number in range(2, 12)]
    assert [event.reason for event in bus.history(limit=2)] == ["10", "11"]
    assert bus.history(limit=0) == []


def test_close_delivers_queued_events_and_ends_the_thread(bus: EventBus) -> None:
    got: list[str] = []
    bus.subscribe(None, lambda event: got.append(event.reason))
    for reason in "abcd":
        publish(bus, reason)
    bus.close()
    assert got == ["a", "b", "c", "d"]
    assert not [one for one in threading.enumerate() if one.name == "genie-events"]


def test_closed_bus_ignores_events_and_rejects_subscriptions(bus: EventBus) -> None:
    bus.close()
    bus.close()
    publish(bus, "late")
    assert bus.history() == []
    with pytest.raises(SessionError, match="the event bus is closed"):
        bus.subscribe(None, print)


def test_close_does_not_wait_for_a_stuck_handler(bus: EventBus, caplog: pytest.LogCaptureFixture) -> None:
    gate, entered = threading.Event(), threading.Event()

    def stuck_handler(event: ClusterEvent) -> None:
        entered.set()
        gate.wait(30)

    bus.subscribe(None, stuck_handler)
    publish(bus, "a")
    assert entered.wait(30)
    with caplog.at_level(logging.WARNING):
        bus.close(timeout_s=0.01)
    assert "did not return" in caplog.text
    gate.set()


def test_emit_is_thread_safe() -> None:
    bus = EventBus(queue_max=10_000, history_max=10_000)
    got: list[str] = []
    bus.subscribe(None, lambda event: got.append(event.reason))
    threads = [threading.Thread(target=lambda: [publish(bus, "x") for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bus.close(timeout_s=10)
    assert len(got) == 800
