"""The locks of one session: acquisitions and renewals on the event loop of its thread.

The public API is in genie/cluster/locks.py, the protocol in genie/cluster/locking/lock_lease.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from genie.cluster.locking.lock_lease import LeaseClock, LockLease, LockRequestSender
from genie.errors import LockLostError

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_RELEASE_AT_END_TIMEOUT_S = 2.0


class SubmitToLoop(Protocol):
    """Runs a coroutine on the event loop of the session."""

    def __call__(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> Future[_Result]: ...


class SessionLocks:
    """The locks of one session. `start` may be called by any thread, the other methods run on its loop."""

    def __init__(self, sender: LockRequestSender, *, submit: SubmitToLoop, holder: str) -> None:
        self._sender = sender
        self._submit_to_loop = submit
        self._holder = holder
        self._clock = LeaseClock()
        self._held_leases: set[LockLease] = set()
        self._acquisitions: set[asyncio.Task[Any]] = set()

    def make_lease(self, name: str, *, ttl_s: float, on_lost: Callable[[str], None]) -> LockLease:
        return LockLease(
            name, ttl_s=ttl_s, holder=self._holder, sender=self._sender, clock=self._clock, on_lost=on_lost
        )

    def start(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> SessionWork[_Result]:
        """Run `work` on the loop of the session."""
        return SessionWork(self._submit_to_loop, work)

    def run_callback(self, callback: Callable[[LockLostError], object], error: LockLostError) -> None:
        """Call `callback` on another thread of the session; its errors are logged."""

        async def call() -> None:
            try:
                await asyncio.to_thread(callback, error)
            except Exception:
                _log.exception("the on_lost callback of a lock failed")

        self._submit_to_loop(call)

    def start_acquisition(self, lease: LockLease, timeout_s: float | None) -> SessionWork[bool]:
        """Acquire the lock, wait at most `timeout_s`, and renew its lease from then on. The result is whether
        it was acquired."""
        return self.start(lambda: self._acquire(lease, timeout_s))

    def abandon(self, acquisition: SessionWork[bool], lease: LockLease) -> None:
        """Stop an acquisition, or release the lock if it has just been acquired. Does not wait."""

        async def cancel_or_release() -> None:
            acquisition.cancel_task()
            if lease.is_held:
                await lease.release(timeout_s=_RELEASE_AT_END_TIMEOUT_S)

        self._submit_to_loop(cancel_or_release)

    async def _acquire(self, lease: LockLease, timeout_s: float | None) -> bool:
        task = asyncio.current_task()
        assert task is not None
        self._acquisitions.add(task)
        try:
            if not await lease.acquire(timeout_s=timeout_s):
                return False
        finally:
            self._acquisitions.discard(task)
        self._held_leases.add(lease)
        self._submit_to_loop(lambda: self._keep(lease))
        return True

    async def release_all(self) -> None:
        """Release all locks at the end of the session, and stop waiting for others."""
        for task in self._acquisitions:
            task.cancel()
        if self._acquisitions:
            await asyncio.wait(set(self._acquisitions), timeout=_RELEASE_AT_END_TIMEOUT_S)
        async with asyncio.TaskGroup() as group:
            for lease in self._held_leases:
                group.create_task(lease.end_with_session(timeout_s=_RELEASE_AT_END_TIMEOUT_S))

    async def _keep(self, lease: LockLease) -> None:
        try:
            await lease.keep_until_ended()
        finally:
            self._held_leases.discard(lease)


class SessionWork(Generic[_Result]):
    """A coroutine on the loop of the session that another thread waits for and may cancel."""

    def __init__(self, submit: SubmitToLoop, work: Callable[[], Coroutine[Any, Any, _Result]]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self.future = submit(self._run)

    async def wait(self) -> _Result:
        """Wait on the loop of the caller. Cancelling the wait does not cancel the work."""
        inner = asyncio.wrap_future(self.future)
        # Retrieves the exception even if the wait was cancelled, so that asyncio does not warn about it.
        inner.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(inner)

    def cancel_task(self) -> None:
        """Cancel the coroutine; call it on the loop of the session."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> _Result:
        self._task = asyncio.current_task()
        return await self._work()
