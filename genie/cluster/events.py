"""Events for user code: who wants to know of something subscribes here, and whoever saw it emits it.

Emitting never blocks and never fails, from any thread. Plain handlers run one after the other on a
thread of the bus; async ones run on the event loop that subscribed them. A handler that is too slow
loses its oldest events, which are counted; one that raises is logged. Not for: records that must not
be lost (those are in the store).
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
from genie.runtime.clock import Clock, SystemClock

__all__ = ["ClusterEvent", "EventBus", "EventType", "Handler", "Subscription"]

_log = logging.getLogger(__name__)

QUEUE_MAX = 256
HISTORY_MAX = 1000
CLOSE_TIMEOUT_S = 2.0

Handler = Callable[[ClusterEvent], object] | Callable[[ClusterEvent], Awaitable[object]]


class EventBus:
    """Its owner closes it. `queue_max` events wait for each subscriber, `history_max` are remembered."""

    def __init__(
        self, *, clock: Clock | None = None, queue_max: int = QUEUE_MAX, history_max: int = HISTORY_MAX
    ) -> None:
        assert queue_max > 0
        self._clock = clock or SystemClock()
        self._queue_max = queue_max
        self._history: deque[ClusterEvent] = deque(maxlen=history_max)
        self._subscriptions: list[Subscription] = []
        self._changed = threading.Condition()
        # One entry for each event that waits for a plain handler, in the order of emitting.
        self._due: deque[Subscription] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def subscribe(self, event_type: EventType | None, handler: Handler) -> Subscription:
        """Calls `handler` with each event of that type from now on; None stands for every type.

        An async handler needs a running event loop here, and runs on that one. UsageError without.
        """
        if not callable(handler):
            raise UsageError(f"an event handler must be callable, not {handler!r}")
        loop = _loop_for(handler)
        subscription = Subscription(self, event_type, handler, loop=loop, queue_max=self._queue_max)
        with self._changed:
            if self._closed:
                raise SessionError("the event bus is closed", hint="subscribe before shutdown()")
            self._subscriptions.append(subscription)
            if loop is None and self._thread is None:
                self._thread = threading.Thread(target=self._deliver, name="genie-events", daemon=True)
                self._thread.start()
        return subscription

    def emit(self, event: ClusterEvent) -> None:
        """Hands the event to everyone who wants it and returns at once. Ignored after close()."""
        with self._changed:
            if self._closed:
                return
            self._history.append(event)
            for subscription in list(self._subscriptions):
                subscription.push(event)
            self._changed.notify_all()

    def publish(
        self,
        event_type: EventType,
        *,
        node_id: str,
        reason: str,
        facts: Mapping[str, str | int | float | bool | None] | None = None,
    ) -> ClusterEvent:
        """Emits a new event with the bus's own time, and returns it."""
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
        with self._changed:
            kept = list(self._history)
        return kept if limit is None else kept[max(0, len(kept) - limit) :]

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Delivers what waits, for `timeout_s` at most, and ends the thread. Idempotent; blocks."""
        with self._changed:
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning("an event handler did not come back within %g s of closing", timeout_s)

    def _deliver(self) -> None:
        """The thread of the plain handlers."""
        while True:
            with self._changed:
                while not self._due and not self._closed:
                    self._changed.wait()
                if not self._due:
                    return
                subscription = self._due.popleft()
                event = subscription.pop()
            if event is not None:
                subscription.call(event)


class Subscription:
    """One handler's place on the bus. Ends with unsubscribe(), or with the block it is used as."""

    def __init__(
        self,
        bus: EventBus,
        event_type: EventType | None,
        handler: Handler,
        *,
        loop: asyncio.AbstractEventLoop | None,
        queue_max: int,
    ) -> None:
        self.dropped = 0
        """Events that were lost because the handler was too slow."""
        self._bus = bus
        self._event_type = event_type
        self._handler = handler
        self._loop = loop
        self._queue: deque[ClusterEvent] = deque()
        self._queue_max = queue_max
        self._draining = False
        self._drained: object = None

    def unsubscribe(self) -> None:
        """No further call begins. Idempotent, and allowed in the handler itself."""
        with self._bus._changed:
            if self in self._bus._subscriptions:
                self._bus._subscriptions.remove(self)
            self._bus._due = deque(due for due in self._bus._due if due is not self)
            self._queue.clear()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unsubscribe()

    # The rest is the bus's, which holds its lock around push() and pop().

    def push(self, event: ClusterEvent) -> None:
        if self._event_type not in (None, event.type):
            return
        if self._loop is not None and self._loop.is_closed():
            self.unsubscribe()  # nobody can want this any more
            return
        self._queue.append(event)
        if len(self._queue) > self._queue_max:
            self._queue.popleft()
            self.dropped += 1
        elif self._loop is None:
            self._bus._due.append(self)
        if self._loop is not None and not self._draining:
            self._start_draining(self._loop)

    def pop(self) -> ClusterEvent | None:
        return self._queue.popleft() if self._queue else None

    def call(self, event: ClusterEvent) -> None:
        try:
            answer = self._handler(event)
        except Exception:  # user code: its trouble must not reach the others
            _log.exception("event handler %r failed on %s", self._handler, event.type)
            return
        if inspect.iscoroutine(answer):
            answer.close()
            _log.error("event handler %r gave back a coroutine: subscribe the async function", self._handler)

    def _start_draining(self, loop: asyncio.AbstractEventLoop) -> None:
        work = self._drain()
        try:
            self._drained = asyncio.run_coroutine_threadsafe(work, loop)  # kept, or it may be collected
            self._draining = True
        except RuntimeError:  # the loop was closed just now
            work.close()
            self.unsubscribe()

    async def _drain(self) -> None:
        try:
            while True:
                with self._bus._changed:
                    event = self.pop()
                    if event is None:
                        self._draining = False
                        return
                await self._call_async(event)
        except asyncio.CancelledError:
            with self._bus._changed:
                self._draining = False
            raise

    async def _call_async(self, event: ClusterEvent) -> None:
        try:
            answer = self._handler(event)
            assert inspect.isawaitable(answer), "_loop_for() let only async handlers through"
            await answer
        except Exception:  # user code: its trouble must not reach the others
            _log.exception("event handler %r failed on %s", self._handler, event.type)


def _loop_for(handler: Handler) -> asyncio.AbstractEventLoop | None:
    """The loop that an async handler will run on; None for a plain one."""
    if not inspect.iscoroutinefunction(handler) and not inspect.iscoroutinefunction(type(handler).__call__):
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "an async event handler needs a running event loop",
            hint="subscribe inside an async function, or give a plain function",
        ) from None
