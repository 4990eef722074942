"""What every asyncio program of Genie needs once: which loop to run on, and the one error in a group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def first_error(group: BaseExceptionGroup[_Error]) -> _Error:
    """The first error of a group, however deep: what a person is told when several tasks failed together."""
    error: BaseExceptionGroup[_Error] | _Error = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
