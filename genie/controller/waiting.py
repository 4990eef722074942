"""Waiting for a change, for a bounded time, on the injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from genie.runtime.clock import Clock


class Bell:
    """Rung for one key; whoever waits for that key wakes up. Waiting takes memory only while it lasts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def ring(self, key: str) -> None:
        for waiter in self._waiting.get(key, ()):
            _wake(waiter)

    def ring_all(self) -> None:
        for key in list(self._waiting):
            self.ring(key)

    async def wait_while(self, key: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Returns when `condition` is false or the time is over. `condition` is asked at each ring."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while condition() and (left_s := deadline_s - self._clock.monotonic_s()) > 0:
            await self._wait(key, left_s)

    async def _wait(self, key: str, timeout_s: float) -> None:
        """Until the next ring, or until the time is over."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = self._loop.create_future()
        group = self._waiting.setdefault(key, [])
        group.append(waiter)
        timer = self._clock.call_later(timeout_s, partial(_wake, waiter))
        try:
            await waiter
        finally:
            timer.cancel()
            group.remove(waiter)
            if not group:
                self._waiting.pop(key, None)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


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
