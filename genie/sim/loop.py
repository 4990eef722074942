"""An event loop whose time is simulated: asyncio code runs unchanged, and an hour takes milliseconds.

When nothing is ready, the clock jumps to the next timer. There are no sockets and no threads in
such a loop, so the same seed gives the same run. Not for: anything that talks to the world.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

_Result = TypeVar("_Result")


TURNS_MAX = 10_000
"""Of the loop at one moment. A cluster that does what it should takes less than a hundred."""


class StuckError(AssertionError):
    """Nothing is ready and no timer is set: the simulated program waits for something that cannot come. Or
    something is always ready: it goes round in circles, and time never moves."""


class _JumpingSelector(selectors.BaseSelector):
    """Never waits: being asked to wait moves the time instead."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._turns = 0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StuckError("nothing is ready and no timer is set")
        if timeout > 0:
            self.now_s += timeout
            self._turns = 0
        self._turns += 1
        if self._turns > TURNS_MAX:
            self._turns = 0  # those that are cancelled for this need some, too
            raise StuckError(f"time stands still at {self.now_s:.3f} s: {TURNS_MAX} turns, and no end")
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        # The loop registers its own wake-up pipe; nothing else may.
        key = selectors.SelectorKey(fileobj, fileobj, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class SimulatedLoop(asyncio.SelectorEventLoop):
    """asyncio on simulated time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs to the end on a fresh simulated loop; leftover tasks are cancelled and awaited."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
