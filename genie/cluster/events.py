"""The event bus of a session.

emit() never blocks and never fails, from any thread. Plain handlers run in sequence on a thread of the bus;
async handlers run on the event loop that subscribed them. A slow handler loses its oldest events, which are
counted; an error of a handler is logged. Events are not durable.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType

from genie.errors import SessionError, UsageError
from genie.model.event import ClusterEvent, EventType
from genie.processes.clock import Clock, SystemClock

__all__ = ["ClusterEvent", "EventBus", "EventHandler", "EventType", "Subscription"]

_log = logging.getLogger(__name__)

SUBSCRIBER_QUEUE_MAX = 256
EVENT_HISTORY_MAX = 1000
CLOSE_DELIVERY_TIMEOUT_S = 2.0

EventHandler = Callable[[ClusterEvent], object] | Callable[[ClusterEvent], Awaitable[object]]


class EventBus:
    """Queues up to `queue_max` events per subscriber and keeps the last `history_max`. Close it after use."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        queue_max: int = SUBSCRIBER_QUEUE_MAX,
        history_max: int = EVENT_HISTORY_MAX,
    ) -> None:
        assert queue_max > 0
        self._clock = clock or SystemClock()
        self._queue_max = queue_max
        self._history: deque[ClusterEvent] = deque(maxlen=history_max)
        self._subscriptions: list[Subscription] = []
        self._delivery_condition = threading.Condition()
        # One entry per queued event of a plain handler, in the order of emission.
        self._subscriptions_to_deliver: deque[Subscription] = deque()
        self._delivery_thread: threading.Thread | None = None
        self._is_closed = False

    def subscribe(self, event_type: EventType | None, handler: EventHandler) -> Subscription:
        """Calls `handler` with each event of that type; None means every type.

        An async handler runs on the event loop that is running here; raises UsageError without one.
        """
        if not callable(handler):
            raise UsageError(f"an event handler must be callable, not {handler!r}")
        loop = _find_event_loop_for(handler)
        subscription = Subscription(self, event_type, handler, loop=loop, queue_max=self._queue_max)
        with self._delivery_condition:
            if self._is_closed:
                raise SessionError("the event bus is closed", hint="subscribe before shutdown()")
            self._subscriptions.append(subscription)
            if loop is None and self._delivery_thread is None:
                self._delivery_thread = threading.Thread(
                    target=self._run_delivery_thread, name="genie-events", daemon=True
                )
                self._delivery_thread.start()
        return subscription

    def emit(self, event: ClusterEvent) -> None:
        """Queues the event for all subscribers; never blocks. Ignored after close()."""
        with self._delivery_condition:
            if self._is_closed:
                return
            self._history.append(event)
            for subscription in list(self._subscriptions):
                subscription.queue_event(event)
            self._delivery_condition.notify_all()

    def publish(
        self,
        event_type: EventType,
        *,
        node_id: str,
        reason: str,
        facts: Mapping[str, str | int | float | bool | None] | None = None,
    ) -> ClusterEvent:
        """Emits a new event with the current time, and returns it."""
        event = ClusterEvent(
            type=event_type,
            node_id=node_id,
            at=self._clock.wall_s(),
            reason=reason,
            facts=dict(facts or {}),
        )
        self.emit(event)
        return event

    def history(self, limit: int | None = None) -> list[ClusterEvent]:
        """The last events, oldest first; at most `limit` of them."""
        with self._delivery_condition:
            kept = list(self._history)
        return kept if limit is None else kept[max(0, len(kept) - limit) :]

    def close(self, *, timeout_s: float = CLOSE_DELIVERY_TIMEOUT_S) -> None:
        """Delivers queued events for at most `timeout_s` and ends the thread. Idempotent; blocks."""
        with self._delivery_condition:
            self._is_closed = True
            thread, self._delivery_thread = self._delivery_thread, None
            self._delivery_condition.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning("an event handler did not return within %g s of closing", timeout_s)

    def remove_subscription(self, subscription: Subscription) -> None:
        """Ends a subscription and discards its queued events. Idempotent."""
        with self._delivery_condition:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
            self._subscriptions_to_deliver = deque(
                each for each in self._subscriptions_to_deliver if each is not subscription
            )
            subscription.clear_queue()

    def _schedule_delivery(self, subscription: Subscription) -> None:
        self._subscriptions_to_deliver.append(subscription)

    def _run_delivery_thread(self) -> None:
        """Runs on the thread of the plain handlers."""
        while True:
            with self._delivery_condition:
                while not self._subscriptions_to_deliver and not self._is_closed:
                    self._delivery_condition.wait()
                if not self._subscriptions_to_deliver:
                    return
                subscription = self._subscriptions_to_deliver.popleft()
                event = subscription.pop_queued_event()
            if event is not None:
                subscription.call_plain_handler(event)


class Subscription:
    """The subscription of one handler. Ends with unsubscribe(), or at the end of a `with` block."""

    def __init__(
        self,
        bus: EventBus,
        event_type: EventType | None,
        handler: EventHandler,
        *,
        loop: asyncio.AbstractEventLoop | None,
        queue_max: int,
    ) -> None:
        self.dropped_count = 0
        """Number of events lost because the handler was too slow."""
        self._bus = bus
        self._event_type = event_type
        self._handler = handler
        self._handler_loop = loop
        self._queue: deque[ClusterEvent] = deque()
        self._queue_max = queue_max
        self._is_delivery_running = False
        self._delivery_future: object = None

    def unsubscribe(self) -> None:
        """Starts no further call of the handler. Idempotent; may be called by the handler itself."""
        self._bus.remove_subscription(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unsubscribe()

    # For the bus, which holds its lock around queue_event(), pop_queued_event() and clear_queue().

    def queue_event(self, event: ClusterEvent) -> None:
        if self._event_type not in (None, event.type):
            return
        if self._handler_loop is not None and self._handler_loop.is_closed():
            self.unsubscribe()
            return
        self._queue.append(event)
        if len(self._queue) > self._queue_max:
            self._queue.popleft()
            self.dropped_count += 1
        elif self._handler_loop is None:
            self._bus._schedule_delivery(self)
        if self._handler_loop is not None and not self._is_delivery_running:
            self._start_delivery_on_loop(self._handler_loop)

    def pop_queued_event(self) -> ClusterEvent | None:
        return self._queue.popleft() if self._queue else None

    def clear_queue(self) -> None:
        self._queue.clear()

    def call_plain_handler(self, event: ClusterEvent) -> None:
        try:
            result = self._handler(event)
        except Exception:  # user code: an error must not affect other handlers
            _log.exception("event handler %r failed on %s", self._handler, event.type)
            return
        if inspect.iscoroutine(result):
            result.close()
            _log.error("event handler %r returned a coroutine: subscribe the async function", self._handler)

    def _start_delivery_on_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        work = self._deliver_queued_events()
        try:
            self._delivery_future = asyncio.run_coroutine_threadsafe(
                work, loop
            )  # referenced, or it may be garbage-collected
            self._is_delivery_running = True
        except RuntimeError:  # the loop was closed meanwhile
            work.close()
            self.unsubscribe()

    async def _deliver_queued_events(self) -> None:
        try:
            while True:
                with self._bus._delivery_condition:
                    event = self.pop_queued_event()
                    if event is None:
                        self._is_delivery_running = False
                        return
                await self._call_async_handler(event)
        except asyncio.CancelledError:
            with self._bus._delivery_condition:
                self._is_delivery_running = False
            raise

    async def _call_async_handler(self, event: ClusterEvent) -> None:
        try:
            result = self._handler(event)
            assert inspect.isawaitable(result), "only async handlers have a loop"
            await result
        except Exception:  # user code: an error must not affect other handlers
            _log.exception("event handler %r failed on %s", self._handler, event.type)


def _find_event_loop_for(handler: EventHandler) -> asyncio.AbstractEventLoop | None:
    """Returns the event loop for an async handler; None for a plain one."""
    if not inspect.iscoroutinefunction(handler) and not inspect.iscoroutinefunction(type(handler).__call__):
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "an async event handler requires a running event loop",
            hint="subscribe inside an async function, or pass a plain function",
        ) from None
