"""Waiting in tests: ask again in small steps until it is true, and give up at a deadline.

Not for: measuring time, or sleeping a fixed while and hoping.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

_T = TypeVar("_T")

_STEP_S_MIN = 0.002
_STEP_S_MAX = 0.05


async def until(
    predicate: Callable[[], Awaitable[_T]] | Callable[[], _T], *, timeout_s: float = 10.0, what: str = ""
) -> _T:
    """Waits until `predicate`, plain or async, gives something true, and returns that.

    Fails the test with `what` when `timeout_s` passes first. What the predicate raises goes through.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            for step_s in _steps():
                answer = predicate()
                value = await answer if inspect.isawaitable(answer) else answer
                if value:
                    return value
                await asyncio.sleep(step_s)
    except TimeoutError:
        if not limit.expired():
            raise
    pytest.fail(_gave_up(predicate, timeout_s=timeout_s, what=what), pytrace=True)


def wait_until(predicate: Callable[[], _T], *, timeout_s: float = 10.0, what: str = "") -> _T:
    """The same for plain code. Blocks the thread: never call it on an event loop."""
    deadline = time.monotonic() + timeout_s
    for step_s in _steps():
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            break
        time.sleep(step_s)
    pytest.fail(_gave_up(predicate, timeout_s=timeout_s, what=what), pytrace=True)


def _steps() -> Iterator[float]:
    step_s = _STEP_S_MIN
    while True:
        yield step_s
        step_s = min(step_s * 1.5, _STEP_S_MAX)


def _gave_up(predicate: Callable[[], object], *, timeout_s: float, what: str) -> str:
    name = what or getattr(predicate, "__qualname__", repr(predicate))
    return f"waited {timeout_s:g} s for: {name}"
