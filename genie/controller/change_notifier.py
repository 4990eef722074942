"""Waiting for a change with a timeout, on the injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from genie.processes.clock import Clock


class ChangeNotifier:
    """Wakes up the waiters of a key. A key takes memory only while it has waiters."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify(self, key: str) -> None:
        for waiter in self._waiters.get(key, ()):
            _wake_waiter(waiter)

    def notify_all(self) -> None:
        for key in list(self._waiters):
            self.notify(key)

    async def wait_while(self, key: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait until `condition` is false or the timeout expires. Evaluated at each notification."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while condition() and (left_s := deadline_s - self._clock.monotonic_s()) > 0:
            await self._wait_for_notification(key, left_s)

    async def _wait_for_notification(self, key: str, timeout_s: float) -> None:
        """Wait for the next notification or the timeout."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = self._loop.create_future()
        group = self._waiters.setdefault(key, [])
        group.append(waiter)
        timer = self._clock.call_later(timeout_s, partial(_wake_waiter, waiter))
        try:
            await waiter
        finally:
            timer.cancel()
            group.remove(waiter)
            if not group:
                self._waiters.pop(key, None)


def _wake_waiter(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def wait_event(event: asyncio.Event, *, clock: Clock, timeout_s: float) -> bool:
    """Wait for the event; return whether it was set before the timeout. Does not clear it."""
    if event.is_set():
        return True
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_wait_until_set(event)), group.create_task(clock.sleep(timeout_s))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
    return event.is_set()


async def _wait_until_set(event: asyncio.Event) -> None:
    await event.wait()
