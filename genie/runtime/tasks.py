"""What every asyncio program of Genie needs once: a loop, a thread for files, one error of a group."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

_Error = TypeVar("_Error", bound=BaseException)
_Result = TypeVar("_Result")

# Allocations that are not freed until the youngest are looked at, and how often then the older ones.
_COLLECT_AFTER = (20_000, 20, 50)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def tune_for_serving() -> None:
    """For a server, once it has loaded what it needs.

    Collect seldom: its requests are tasks and futures that end by themselves, and looking through all of
    them every few hundred allocations costs a third of its time. What is there by now is not looked at
    again; cycles that are made later wait a little longer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


class Offload(Protocol):
    """Runs file work that may take long, and gives back its result."""

    async def __call__(self, work: Callable[[], _Result]) -> _Result: ...


@contextmanager
def file_thread(name: str) -> Iterator[Offload]:
    """A thread of this name for the length of the block. It does one piece of work at a time."""
    with ThreadPoolExecutor(1, thread_name_prefix=name) as thread:

        async def offload(work: Callable[[], _Result]) -> _Result:
            return await asyncio.get_running_loop().run_in_executor(thread, work)

        yield offload


async def run_inline(work: Callable[[], _Result]) -> _Result:
    """An Offload on the loop itself; for simulation, which has no threads."""
    return work()


@contextmanager
def paused(limit: asyncio.Timeout) -> Iterator[None]:
    """Inside `limit`, a stretch whose time does not count."""
    loop, when = asyncio.get_running_loop(), limit.when()
    assert when is not None, "a limit that was not set cannot be paused"
    left_s = when - loop.time()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(loop.time() + left_s)


async def all_of(work: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """What all of it gives, side by side, in order. The first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as several:
        raise first_error(several) from None
    return [task.result() for task in tasks]


async def either(work: Coroutine[Any, Any, object], other: Coroutine[Any, Any, object]) -> None:
    """Until one of the two is over; the other is cancelled. Raises what one of them raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work), group.create_task(other)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as several:
        raise first_error(several) from None


def first_error(group: BaseExceptionGroup[_Error]) -> _Error:
    """The first error of a group, however deep: what a person is told when several tasks failed together."""
    error: BaseExceptionGroup[_Error] | _Error = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
