"""A fake clock that a test advances; sleepers wake in order."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from genie.processes.clock import Timer


class FakeClock:
    """A `Clock` whose wall time and monotonic time advance together, unless the wall clock is set."""

    def __init__(self, *, wall_s: float = 1_700_000_000.0) -> None:
        self._start_wall_s = wall_s
        self._now_s = 1000.0
        self._numbers = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._start_wall_s + self._now_s - 1000.0

    @property
    def is_sleeping(self) -> bool:
        """Whether something waits until this clock is advanced."""
        return any(not woken.done() for _, _, woken in self._sleepers)

    def step_wall(self, seconds: float) -> None:
        """Sets the wall clock forward, or back if negative."""
        self._start_wall_s += seconds

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._numbers), woken))
        await woken

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        woken.add_done_callback(lambda done: None if done.cancelled() else callback())
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._numbers), woken))
        return woken

    async def advance(self, seconds: float) -> None:
        """Wakes the due sleepers one at a time; each gets a few loop iterations before the next."""
        end_s = self._now_s + seconds
        while self._sleepers and self._sleepers[0][0] <= end_s:
            due_s, _, woken = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, due_s)
            if not woken.done():
                woken.set_result(None)
                await _run_loop_iterations()
        self._now_s = end_s
        await _run_loop_iterations()


async def _run_loop_iterations() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
