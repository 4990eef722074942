"""One named thread for calls that may block: vendor libraries, dead network disks.

Not for: work that takes processor time, or anything that has an async form.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

from genie.errors import HardwareError

_T = TypeVar("_T")

CLOSE_TIMEOUT_S = 1.0


class CallThread:
    """Runs calls one after the other, off the event loop. The thread starts with the first call.

    A call that has outlived its deadline cannot be stopped. Until it comes back, further calls fail
    at once instead of queueing up behind it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._unfinished: set[concurrent.futures.Future[Any]] = set()  # Any: results of every type
        self._overdue: concurrent.futures.Future[Any] | None = None

    async def call(self, work: Callable[[], _T], *, what: str, timeout_s: float) -> _T:
        """HardwareError when `work` does not come back in time; what it raises goes through."""
        if self._overdue is not None and not self._overdue.done():
            raise HardwareError(f"{what}: an earlier call has not come back yet")
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=self._name)
        future = self._pool.submit(work)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
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
        if pool is None:
            return
        pool.shutdown(wait=False, cancel_futures=True)
        stuck = concurrent.futures.wait(list(self._unfinished), timeout=CLOSE_TIMEOUT_S).not_done
        if not stuck:
            pool.shutdown(wait=True)
