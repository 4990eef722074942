"""Waiting in tests: poll a condition until it is true or a timeout expires."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

_T = TypeVar("_T")

TIMEOUT_S = 30.0
"""Much longer than any condition takes, even on a busy machine, and less than the timeout of a test."""
_STEP_S_MIN = 0.002
_STEP_S_MAX = 0.05


async def until(
    predicate: Callable[[], Awaitable[_T]] | Callable[[], _T], *, timeout_s: float = TIMEOUT_S, what: str = ""
) -> _T:
    """Polls `predicate`, sync or async, and returns its first truthy result.

    Fails the test with `what` after `timeout_s`. Exceptions of the predicate are not caught.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            for step_s in _poll_intervals_s():
                result = predicate()
                value = await result if inspect.isawaitable(result) else result
                if value:
                    return value
                await asyncio.sleep(step_s)
    except TimeoutError:
        if not limit.expired():
            raise
    pytest.fail(_timeout_message(predicate, timeout_s=timeout_s, what=what), pytrace=True)


def wait_until(predicate: Callable[[], _T], *, timeout_s: float = TIMEOUT_S, what: str = "") -> _T:
    """Like until() for synchronous code. Blocks the thread: never call it on an event loop."""
    deadline = time.monotonic() + timeout_s
    for step_s in _poll_intervals_s():
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            break
        time.sleep(step_s)
    pytest.fail(_timeout_message(predicate, timeout_s=timeout_s, what=what), pytrace=True)


def _poll_intervals_s() -> Iterator[float]:
    step_s = _STEP_S_MIN
    while True:
        yield step_s
        step_s = min(step_s * 1.5, _STEP_S_MAX)


def _timeout_message(predicate: Callable[[], object], *, timeout_s: float, what: str) -> str:
    name = what or getattr(predicate, "__qualname__", repr(predicate))
    return f"timed out after {timeout_s:g} s waiting for: {name}"
