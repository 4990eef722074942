"""Time, as an argument. Controller and agent never ask the system for it themselves.

`SystemClock` is the real one; genie/sim has the simulated one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> object: ...


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """Seconds that never go back; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch, for records that people read."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls it on the running loop when that time is over, unless the timer was cancelled."""
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
