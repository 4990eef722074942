"""Retries with exponential backoff and jitter: the decorator `retry` and the pause between two attempts.

Does not decide what may be retried: the caller lists the errors.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import operator
import random
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from genie.errors import GenieError, UsageError

BACKOFF_BASE_S = 0.1
BACKOFF_MAX_S = 5.0
RETRIES_MAX = 1000
_EXPONENT_MAX = 16
_P = ParamSpec("_P")
_T = TypeVar("_T")
RetryCondition = Callable[[Exception], bool] | type[Exception] | tuple[type[Exception], ...]
"""The errors that are retried."""
OnRetry = Callable[[Exception, float], None]
"""Called with the error and the pause in seconds before the next attempt."""


def backoff_s(attempt: int, *, base_s: float = BACKOFF_BASE_S, max_s: float = BACKOFF_MAX_S) -> float:
    """Return the seconds to wait after attempt 0, 1, 2, ...: base_s, doubled each time, at most max_s.

    The result is random between half and all of that, so that clients do not retry in step.
    """
    jitter = random.uniform(0.5, 1.0)  # noqa: S311 - not a secret
    return min(max_s, base_s * 2.0 ** min(attempt, _EXPONENT_MAX)) * jitter


def is_retryable(error: Exception) -> bool:
    """True for Genie's errors that are `retryable`, and for Python's ConnectionError and TimeoutError."""
    if isinstance(error, GenieError):
        return error.retryable
    return isinstance(error, ConnectionError | TimeoutError)


@overload
def retry(function: Callable[_P, _T], /) -> Callable[_P, _T]: ...


@overload
def retry(
    *,
    max_retries: int = 3,
    base_s: float = BACKOFF_BASE_S,
    max_s: float = BACKOFF_MAX_S,
    when: RetryCondition = is_retryable,
    on_retry: OnRetry | None = None,
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...


def retry(
    function: Callable[..., Any] | None = None,
    /,
    *,
    max_retries: int = 3,
    base_s: float = BACKOFF_BASE_S,
    max_s: float = BACKOFF_MAX_S,
    when: RetryCondition = is_retryable,
    on_retry: OnRetry | None = None,
) -> Any:  # Any: see the overloads
    """Retry a plain or async function when it raises, up to `max_retries` times.

    `when` is an exception type, a tuple of them, or a predicate; by default `is_retryable`. The last error is
    raised unchanged. A plain function sleeps in the calling thread, so do not call it on an event loop.

        @retry(max_retries=5, when=(OSError,))
        def fetch() -> bytes: ...
    """
    try:
        is_allowed = 0 <= operator.index(max_retries) <= RETRIES_MAX
    except TypeError:
        is_allowed = False
    if not is_allowed:
        raise UsageError(f"retry: max_retries must be 0 to {RETRIES_MAX}")
    if not (base_s >= 0 and max_s >= 0):  # also rejects NaN
        raise UsageError("retry: base_s and max_s must not be negative")
    if function is not None and not callable(function):
        raise UsageError("retry: options are keyword arguments", hint="write @retry(max_retries=3)")
    matches = _to_predicate(when)

    def backoff_after(error: Exception, attempt: int) -> float | None:
        if attempt >= max_retries or not matches(error):
            return None
        wait_s = backoff_s(attempt, base_s=base_s, max_s=max_s)
        if on_retry is not None:
            on_retry(error, wait_s)
        return wait_s

    decorate = functools.partial(_with_retries, backoff_after=backoff_after)
    return decorate if function is None else decorate(function)


def _to_predicate(when: RetryCondition) -> Callable[[Exception], bool]:
    """Convert `when` to a predicate. Exception types come first: they are callable, and always truthy."""
    types = when if isinstance(when, tuple) else (when,)
    if all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
        return lambda error: isinstance(error, types)  # type: ignore[arg-type]
    if isinstance(when, type | tuple) or not callable(when):
        raise UsageError("retry: when must be an exception type, a tuple of them, or a predicate")
    return when


def _with_retries(
    function: Callable[..., Any], *, backoff_after: Callable[[Exception, int], float | None]
) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async_with_retries(*args: Any, **kwargs: Any) -> Any:
            attempt = 0
            while True:
                try:
                    return await function(*args, **kwargs)
                except Exception as error:
                    wait_s = backoff_after(error, attempt)
                    if wait_s is None:
                        raise
                attempt += 1
                await asyncio.sleep(wait_s)

        return call_async_with_retries

    @functools.wraps(function)
    def call_with_retries(*args: Any, **kwargs: Any) -> Any:
        attempt = 0
        while True:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                wait_s = backoff_after(error, attempt)
                if wait_s is None:
                    raise
            attempt += 1
            time.sleep(wait_s)

    return call_with_retries
