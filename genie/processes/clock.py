"""The clock that controller and agent receive as an argument; genie/sim has a simulated one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> object: ...


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """Seconds of a monotonic clock; only differences are meaningful."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970-01-01 UTC, for records."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls `callback` on the running loop after this time unless the timer is cancelled."""
        ...


class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)
