"""A fake clock on which each sleep() returns when the test calls step()."""

from __future__ import annotations

import asyncio


class StepClock:
    def __init__(self, *, wall_s: float = 1000.0) -> None:
        self.now_s = wall_s
        self.slept_s: list[float] = []
        self._steps = asyncio.Semaphore(0)

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await self._steps.acquire()
        self.now_s += seconds

    def step(self) -> None:
        self._steps.release()
