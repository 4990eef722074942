"""An event loop on its own thread, for work that must continue while user code blocks.

It runs one main coroutine; other threads submit more, which run in the same TaskGroup. It ends in this
order: the main coroutine is cancelled or returns, children are cancelled and awaited, the loop is closed,
the thread is joined.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from genie.errors import NotInitializedError
from genie.processes.call_thread import DaemonPool

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_THREAD_POOL_THREADS_MAX = 4
_THREAD_POOL_CLOSE_TIMEOUT_S = 2.0
"""Blocking calls that take longer, such as a hanging name lookup, are abandoned."""


class LoopThread:
    """Can be started once. `finished` is done when the loop is closed."""

    def __init__(self, *, name: str) -> None:
        self.finished: Future[None] = Future()
        self._name = name
        # A daemon thread, so that a stuck loop never keeps the interpreter from exiting. Normally
        # genie.cluster.init stops it before that.
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._main_function: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._main_task: asyncio.Task[None] | None = None
        self._task_group: asyncio.TaskGroup | None = None
        self._submitted_tasks: set[asyncio.Task[None]] = set()
        self._submitted_futures: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._accepts_work = True
        self._is_main_task_cancelled = False
        self._owner_process_id = os.getpid()

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._main_function is None, "a loop thread is started once"
        self._main_function = main
        self._loop = (
            asyncio.new_event_loop()
        )  # created here: a loop that is never started would not be closed
        self._thread.start()

    def submit(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> Future[_T]:
        """Runs `work()` on the loop. The future always completes: with an error if the loop has ended or
        belongs to the parent of a forked process."""
        future: Future[_T] = Future()
        if not self._is_in_owner_process:
            future.set_exception(_session_of_parent_error())
            return future
        with self._lock:
            if not self._accepts_work:
                future.set_exception(_session_ended_error())
                return future
            self._submitted_futures.add(future)
            self._loop.call_soon_threadsafe(self._start_submitted_task, work, future)
        return future

    def call_soon(self, function: Callable[[], object]) -> None:
        """Runs `function` on the loop; does nothing if the loop has ended."""
        if not self._is_in_owner_process:
            return
        with self._lock:
            if self._accepts_work:
                self._loop.call_soon_threadsafe(function)

    def cancel_main_task(self) -> None:
        """Cancels the main coroutine; later calls do nothing, so that its cleanup is not interrupted."""
        self.call_soon(self._cancel_main_task_once)

    def join(self, *, timeout_s: float) -> bool:
        """Waits for the thread; returns whether it has ended. Returns True on the thread itself."""
        if threading.current_thread() is self._thread:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _is_in_owner_process(self) -> bool:
        """A forked child has a copy of the loop and of the lock, but not the thread."""
        return os.getpid() == self._owner_process_id

    def _cancel_main_task_once(self) -> None:
        if self._main_task is not None and not self._is_main_task_cancelled:
            self._is_main_task_cancelled = True
            self._main_task.cancel()

    def _run_loop(self) -> None:
        executor = DaemonPool(_THREAD_POOL_THREADS_MAX, name=f"{self._name}-blocking")
        self._loop.set_default_executor(executor)
        try:
            self._loop.run_until_complete(self._run_main())
        except asyncio.CancelledError:
            pass
        except Exception:
            _log.exception("event loop thread %s ended with an error", self._name)
        finally:
            with self._lock:
                self._accepts_work = False
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            executor.close(timeout_s=_THREAD_POOL_CLOSE_TIMEOUT_S)
            for future in list(self._submitted_futures):
                if not future.done():
                    future.set_exception(_session_ended_error())
            self.finished.set_result(None)

    async def _run_main(self) -> None:
        assert self._main_function is not None
        self._main_task = asyncio.current_task()
        async with asyncio.TaskGroup() as self._task_group:
            try:
                await self._main_function()
            finally:
                for task in self._submitted_tasks:
                    task.cancel()

    def _start_submitted_task(self, work: Callable[[], Coroutine[Any, Any, _T]], future: Future[_T]) -> None:
        if (
            self._task_group is None
            or self._main_task is None
            or self._main_task.cancelling()
            or self._main_task.done()
        ):
            self._complete_future_with_error(future, error=_session_ended_error())
            return
        task = self._task_group.create_task(self._run_submitted_work(work, future))
        self._submitted_tasks.add(task)
        task.add_done_callback(self._submitted_tasks.discard)

    async def _run_submitted_work(
        self, work: Callable[[], Coroutine[Any, Any, _T]], future: Future[_T]
    ) -> None:
        """Runs submitted work; its error is set on the future and not raised."""
        try:
            result = await work()
        except asyncio.CancelledError:
            self._complete_future_with_error(future, error=_session_ended_error())
            raise
        except Exception as error:
            self._complete_future_with_error(future, error=error)
        else:
            self._submitted_futures.discard(future)
            if not future.done():
                future.set_result(result)

    def _complete_future_with_error(self, future: Future[_T], *, error: BaseException) -> None:
        self._submitted_futures.discard(future)
        if not future.done():
            future.set_exception(error)


def _session_ended_error() -> NotInitializedError:
    return NotInitializedError("the session has ended", hint="call genie.init() again")


def _session_of_parent_error() -> NotInitializedError:
    return NotInitializedError(
        "the session belongs to the parent process of this fork", hint="call genie.init() in this process"
    )
