"""Named threads for calls that may block: vendor libraries, dead network disks, name lookups.

They are daemons: a call that never comes back does not keep the interpreter from ending. Not for: work
that takes processor time, or anything that has an async form.
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
    """A pool for an event loop, which takes only this class, with threads that nothing waits for at exit.

    The threads of its base class are joined when the interpreter ends, however stuck they are.
    """

    def __init__(self, threads_max: int, *, name: str) -> None:
        super().__init__(threads_max)
        self._name = name
        self._threads_max = threads_max
        # Bounded by who hands in: each piece has someone who waits for it.
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._daemons: list[threading.Thread] = []
        self._unfinished: set[concurrent.futures.Future[Any]] = set()  # Any: results of every type
        self._guard = threading.Lock()
        self._is_closed = False

    def submit(
        self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> concurrent.futures.Future[_T]:
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        work = functools.partial(fn, *args, **kwargs)
        with self._guard:
            if self._is_closed:
                raise RuntimeError(f"the threads {self._name} are closed")
            self._unfinished.add(future)
            self._waiting.put(functools.partial(_carry_out, future, work))
            if len(self._daemons) < min(len(self._unfinished), self._threads_max):
                name = f"{self._name}_{len(self._daemons)}"
                self._daemons.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._daemons[-1].start()
        future.add_done_callback(self._forget)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._guard:
            left = list(self._unfinished) if cancel_futures else []
            if not self._is_closed:
                self._is_closed = True
                for _ in self._daemons:
                    self._waiting.put(None)
        for future in left:
            future.cancel()
        if wait:
            for thread in self._daemons:
                thread.join()

    def close(self, *, timeout_s: float) -> None:
        """Idempotent. Joins the threads, except one that is stuck: that one ends with its call."""
        self.shutdown(wait=False, cancel_futures=True)
        stuck = concurrent.futures.wait(list(self._unfinished), timeout=timeout_s).not_done
        if not stuck:
            self.shutdown(wait=True)

    def _forget(self, future: concurrent.futures.Future[Any]) -> None:
        with self._guard:
            self._unfinished.discard(future)

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()


def _carry_out(future: concurrent.futures.Future[_T], work: Callable[[], _T]) -> None:
    """The boundary of one call: what it raises goes to whoever waits for it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class CallThread:
    """Runs calls one after the other, off the event loop. The thread starts with the first call.

    A call that has outlived its deadline cannot be stopped. Until it comes back, further calls fail
    at once instead of queueing up behind it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: DaemonPool | None = None
        self._overdue: concurrent.futures.Future[Any] | None = None

    async def call(self, work: Callable[[], _T], *, what: str, timeout_s: float) -> _T:
        """HardwareError when `work` does not come back in time; what it raises goes through."""
        if self._overdue is not None and not self._overdue.done():
            raise HardwareError(f"{what}: an earlier call has not come back yet")
        if self._pool is None:
            self._pool = DaemonPool(1, name=self._name)
        future = self._pool.submit(work)
        try:
            # not wait_for(): until Python 3.12 it loses a cancelling that comes together with the answer
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # the work's own
            self._overdue = future
            raise HardwareError(f"{what}: no answer within {timeout_s:g} s") from None

    def close(self) -> None:
        """Idempotent. Joins the thread, unless it is stuck: then it is left to end with its call."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(timeout_s=CLOSE_TIMEOUT_S)
