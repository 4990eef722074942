"""Waiting for a change, for a bounded time, on the injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from genie.runtime.clock import Clock


class Bell:
    """Rung for one key; whoever waits for that key wakes up. Waiting takes memory only while it lasts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def ring(self, key: str) -> None:
        for event in self._waiting.get(key, ()):
            event.set()

    def ring_all(self) -> None:
        for key in list(self._waiting):
            self.ring(key)

    async def wait_while(self, key: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Returns when `condition` is false or the time is over. `condition` is asked at each ring."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        with self._event(key) as event:
            while condition() and (left_s := deadline_s - self._clock.monotonic_s()) > 0:
                await wait_event(event, clock=self._clock, timeout_s=left_s)
                event.clear()

    @contextmanager
    def _event(self, key: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        group = self._waiting.setdefault(key, set())
        group.add(event)
        try:
            yield event
        finally:
            group.discard(event)
            if not group:
                self._waiting.pop(key, None)


async def wait_event(event: asyncio.Event, *, clock: Clock, timeout_s: float) -> bool:
    """Whether the event is set before the time is over. The event itself is not touched."""
    if event.is_set():
        return True
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_wait(event)), group.create_task(clock.sleep(timeout_s))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
    return event.is_set()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
