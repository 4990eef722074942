"""An asyncio event loop on simulated time: asyncio code runs unchanged, and an hour takes milliseconds.

When no task is ready, the clock jumps to the next timer. The loop supports no sockets and no threads, so runs
are deterministic.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

_Result = TypeVar("_Result")


ITERATIONS_WITHOUT_PROGRESS_MAX = 10_000
"""Maximum loop iterations without progress of time; a working cluster needs fewer than 100."""


class SimulationStuckError(AssertionError):
    """Deadlock (no task is ready and no timer is set) or livelock (tasks are always ready, so time never
    advances)."""


class _SimulatedSelector(selectors.BaseSelector):
    """A selector that advances the simulated time instead of waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._iterations_without_progress = 0
        self._selector_keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise SimulationStuckError("deadlock: no task is ready and no timer is set")
        if timeout > 0:
            self.now_s += timeout
            self._iterations_without_progress = 0
        self._iterations_without_progress += 1
        if self._iterations_without_progress > ITERATIONS_WITHOUT_PROGRESS_MAX:
            self._iterations_without_progress = 0  # cancelling the tasks needs iterations, too
            raise SimulationStuckError(
                f"livelock at {self.now_s:.3f} s: {ITERATIONS_WITHOUT_PROGRESS_MAX} iterations without "
                "progress"
            )
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        # Only the loop's wake-up pipe is registered.
        key = selectors.SelectorKey(fileobj, fileobj, events, data)
        self._selector_keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector_keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector_keys


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number, not its address: asyncio cancels the tasks of a group in the order of
    a set, which must be the same in each run."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(asyncio.SelectorEventLoop):
    """asyncio on simulated time."""

    def __init__(self) -> None:
        self._selector = _SimulatedSelector()
        self._task_numbers = itertools.count()
        super().__init__(self._selector)
        self.set_task_factory(self._create_numbered_task)

    def _create_numbered_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return _NumberedTask(coroutine, loop=loop, number=next(self._task_numbers), **options)

    def time(self) -> float:
        return self._selector.now_s


def run_simulated(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on a new simulated loop; remaining tasks are cancelled and awaited."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
