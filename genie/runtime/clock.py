"""Time, as an argument. Controller and agent never ask the system for it themselves.

`SystemClock` is the real one; genie/sim has the simulated one.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """Seconds that never go back; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch, for records that people read."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
