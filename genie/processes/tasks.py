"""asyncio helpers: event loop choice, a thread for file work, task groups that raise a single error."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

_Error = TypeVar("_Error", bound=BaseException)
_Result = TypeVar("_Result")

# Thresholds of gc.set_threshold() for the three generations.
_GC_THRESHOLDS = (20_000, 20, 50)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's factory if it is installed, else None (asyncio's default loop)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def reduce_garbage_collection() -> None:
    """Reduces garbage collection; call it in a server after its modules are loaded.

    Tasks and futures of requests are freed by reference counting, and scanning all of them every few hundred
    allocations costs a third of the server's time. Objects that exist now are never scanned again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class Offload(Protocol):
    """Runs blocking file work off the event loop and returns its result.

    `writes`: it needs space on the disk; only simulated disks use this.
    """

    async def __call__(self, work: Callable[[], _Result], *, writes: bool = False) -> _Result: ...


@contextmanager
def file_io_threads(name: str, *, threads: int = 1) -> Iterator[Offload]:
    """Runs threads with this name until the block ends. One thread does one call at a time, in order."""
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:

        async def offload(work: Callable[[], _Result], *, writes: bool = False) -> _Result:
            return await asyncio.get_running_loop().run_in_executor(pool, work)

        yield offload


async def run_inline(work: Callable[[], _Result], *, writes: bool = False) -> _Result:
    """An Offload that runs on the event loop itself; for the simulation, which has no threads."""
    return work()


@contextmanager
def pause_timeout(limit: asyncio.Timeout) -> Iterator[None]:
    """Suspends the timeout `limit` for the block; the remaining time counts again afterwards."""
    loop, when = asyncio.get_running_loop(), limit.when()
    assert when is not None, "a timeout without a deadline cannot be paused"
    remaining_s = when - loop.time()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(loop.time() + remaining_s)


async def run_all_concurrently(work: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Runs the coroutines concurrently; returns the results in order. The first error cancels the rest."""
    async with unwrapped_task_group() as group:
        tasks = [group.create_task(each) for each in work]
    return [task.result() for task in tasks]


async def wait_first_completed(work: Coroutine[Any, Any, object], other: Coroutine[Any, Any, object]) -> None:
    """Waits until one of the two has finished and cancels the other. Raises the error of either."""
    async with unwrapped_task_group() as group:
        tasks = [group.create_task(work), group.create_task(other)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def unwrapped_task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Opens an asyncio.TaskGroup that raises a single error instead of an ExceptionGroup.

    An error of the block takes precedence over those of the tasks.
    """
    block_error: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            try:
                yield group
            except Exception as error:
                block_error = error
                raise
    except BaseExceptionGroup as errors:
        single = block_error or first_error(errors)
        raise single from single.__cause__  # hides the group and keeps the cause of the error


def first_error(group: BaseExceptionGroup[_Error]) -> _Error:
    """Returns the first error of a group that is not a group itself."""
    error: BaseExceptionGroup[_Error] | _Error = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
