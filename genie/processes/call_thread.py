"""Named threads for calls that may block: vendor libraries, dead network disks, name lookups.

They are daemon threads: a call that never returns does not keep the interpreter from exiting. Not meant for
CPU-bound work or calls with an async equivalent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from genie.errors import HardwareError

_P = ParamSpec("_P")
_T = TypeVar("_T")

CLOSE_TIMEOUT_S = 1.0


class DaemonPool(concurrent.futures.ThreadPoolExecutor):
    """A ThreadPoolExecutor with daemon threads.

    The interpreter joins the threads of the base class at exit, even if they are stuck. An event loop accepts
    only subclasses of it as its default executor.
    """

    def __init__(self, threads_max: int, *, name: str) -> None:
        super().__init__(threads_max)
        self._name = name
        self._threads_max = threads_max
        # Bounded by the callers: each call has one that awaits it.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._daemon_threads: list[threading.Thread] = []
        self._unfinished_futures: set[concurrent.futures.Future[Any]] = set()  # Any: results of every type
        self._state_lock = threading.Lock()
        self._is_closed = False

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> concurrent.futures.Future[_T]:
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        work = functools.partial(fn, *args, **kwargs)
        with self._state_lock:
            if self._is_closed:
                raise RuntimeError(f"the thread pool {self._name} is closed")
            self._unfinished_futures.add(future)
            self._queue.put(functools.partial(_run_call, future, work))
            if len(self._daemon_threads) < min(len(self._unfinished_futures), self._threads_max):
                name = f"{self._name}_{len(self._daemon_threads)}"
                self._daemon_threads.append(
                    threading.Thread(target=self._run_queued_calls, name=name, daemon=True)
                )
                self._daemon_threads[-1].start()
        future.add_done_callback(self._discard_finished_future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._state_lock:
            cancelled = list(self._unfinished_futures) if cancel_futures else []
            if not self._is_closed:
                self._is_closed = True
                for _ in self._daemon_threads:
                    self._queue.put(None)
        for future in cancelled:
            future.cancel()
        if wait:
            for thread in self._daemon_threads:
                thread.join()

    def close(self, *, timeout_s: float) -> None:
        """Cancels queued calls and joins the threads, unless one is stuck. Idempotent."""
        self.shutdown(wait=False, cancel_futures=True)
        stuck = concurrent.futures.wait(list(self._unfinished_futures), timeout=timeout_s).not_done
        if not stuck:
            self.shutdown(wait=True)

    def _discard_finished_future(self, future: concurrent.futures.Future[Any]) -> None:
        with self._state_lock:
            self._unfinished_futures.discard(future)

    def _run_queued_calls(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


def _run_call(future: concurrent.futures.Future[_T], work: Callable[[], _T]) -> None:
    """Runs one call; its error is raised to the caller that awaits the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class CallThread:
    """Runs blocking calls one at a time, off the event loop. The thread starts with the first call.

    A call that timed out cannot be stopped. Until it returns, further calls fail immediately.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: DaemonPool | None = None
        self._overdue_call: concurrent.futures.Future[Any] | None = None

    async def call(self, work: Callable[[], _T], *, what: str, timeout_s: float) -> _T:
        """Runs `work` and returns its result. Raises HardwareError on timeout, and the errors of `work`."""
        if self._overdue_call is not None and not self._overdue_call.done():
            raise HardwareError(f"{what}: an earlier call has not returned yet")
        if self._pool is None:
            self._pool = DaemonPool(1, name=self._name)
        future = self._pool.submit(work)
        try:
            # not wait_for(): before Python 3.12 it loses a cancellation that arrives with the result
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # raised by `work`
            self._overdue_call = future
            raise HardwareError(f"{what}: no response within {timeout_s:g} s") from None

    def close(self) -> None:
        """Joins the thread unless it is stuck. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(timeout_s=CLOSE_TIMEOUT_S)
