"""A clock that moves only when a test says so."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    """Sleepers wake in the order of their deadlines, each at its own time."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return 1_700_000_000.0 + self._now_s

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._order), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        end_s = self._now_s + seconds
        await _let_others_run()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self._now_s, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await _let_others_run()
        self._now_s = end_s
        await _let_others_run()


async def _let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
