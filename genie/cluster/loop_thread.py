"""An event loop on a thread of its own, for work that must go on while the user's code blocks.

One coroutine is the main one; other threads hand in more with `submit`, and those are children of the
same TaskGroup. The order at the end is: stop asked for, main returns, children cancelled and awaited,
loop closed, thread joined. Not for: what runs there (session_run.py).
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
from genie.hardware.call_thread import DaemonPool

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_BLOCKING_THREADS = 4
_EXECUTOR_CLOSE_S = 2.0
"""A name lookup that hangs may outlive the loop by more than this; nothing waits for it then."""


class LoopThread:
    """Started once, stopped once. `finished` is done when the loop is closed."""

    def __init__(self, *, name: str) -> None:
        self.finished: Future[None] = Future()
        self._name = name
        # A daemon, so that a loop that cannot be stopped never keeps the interpreter from ending. It is
        # stopped in order before that: see genie.cluster.init.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._main: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._task: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._children: set[asyncio.Task[None]] = set()
        self._handed_in: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._open = True
        self._is_cancelled = False
        self._process_id = os.getpid()

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._main is None, "a loop thread is started once"
        self._main = main
        self._loop = asyncio.new_event_loop()  # here: one that is never started has nobody to close it
        self._thread.start()

    def submit(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> Future[_T]:
        """Runs `work()` on the loop. The future always gets a result: an error when the loop has ended, or
        belongs to the process that this one was forked from."""
        future: Future[_T] = Future()
        if not self._is_here:
            future.set_exception(_forked())
            return future
        with self._lock:
            if not self._open:
                future.set_exception(_ended())
                return future
            self._handed_in.add(future)
            self._loop.call_soon_threadsafe(self._begin, work, future)
        return future

    def call_soon(self, function: Callable[[], object]) -> None:
        """Runs `function` on the loop; does nothing when the loop has ended."""
        if not self._is_here:
            return
        with self._lock:
            if self._open:
                self._loop.call_soon_threadsafe(function)

    def cancel(self) -> None:
        """Cancels the main coroutine, once: another would cut its cleaning up short. Returns at once."""
        self.call_soon(self._cancel_once)

    def join(self, *, timeout_s: float) -> bool:
        """Whether the thread has ended. True at once on the thread itself, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _is_here(self) -> bool:
        """A forked child has a copy of the loop and of the lock, but not the thread."""
        return os.getpid() == self._process_id

    def _cancel_once(self) -> None:
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def _run(self) -> None:
        executor = DaemonPool(_BLOCKING_THREADS, name=f"{self._name}-blocking")
        self._loop.set_default_executor(executor)
        try:
            self._loop.run_until_complete(self._everything())
        except asyncio.CancelledError:
            pass
        except Exception:
            _log.exception("%s ended with an error", self._name)
        finally:
            with self._lock:
                self._open = False
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            executor.close(timeout_s=_EXECUTOR_CLOSE_S)
            for future in list(self._handed_in):
                if not future.done():
                    future.set_exception(_ended())
            self.finished.set_result(None)

    async def _everything(self) -> None:
        assert self._main is not None
        self._task = asyncio.current_task()
        async with asyncio.TaskGroup() as self._group:
            try:
                await self._main()
            finally:
                for task in self._children:
                    task.cancel()

    def _begin(self, work: Callable[[], Coroutine[Any, Any, _T]], future: Future[_T]) -> None:
        if self._group is None or self._task is None or self._task.cancelling() or self._task.done():
            self._finish(future, error=_ended())
            return
        task = self._group.create_task(self._carry_out(work, future))
        self._children.add(task)
        task.add_done_callback(self._children.discard)

    async def _carry_out(self, work: Callable[[], Coroutine[Any, Any, _T]], future: Future[_T]) -> None:
        """The boundary of one piece of work: its error goes to who handed it in, and no further."""
        try:
            result = await work()
        except asyncio.CancelledError:
            self._finish(future, error=_ended())
            raise
        except Exception as error:
            self._finish(future, error=error)
        else:
            self._handed_in.discard(future)
            if not future.done():
                future.set_result(result)

    def _finish(self, future: Future[_T], *, error: BaseException) -> None:
        self._handed_in.discard(future)
        if not future.done():
            future.set_exception(error)


def _ended() -> NotInitializedError:
    return NotInitializedError("the session has ended", hint="call genie.init() again")


def _forked() -> NotInitializedError:
    return NotInitializedError(
        "the session belongs to the process that this one was forked from", hint="call genie.init() here"
    )
