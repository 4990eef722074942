"""genie.lock(): locks of the cluster, with fencing tokens, for asynchronous and synchronous code.

    async with genie.lock("checkpoint") as lock:
        storage.write(data, fencing_token=lock.fencing_token)

A lock is held by the session of this process, whose thread renews its lease. It is lost when the lease cannot
be renewed in time, and the loss cannot stop a process that is paused: only storage that rejects lower fencing
tokens can. See docs/LOCKS.md. The protocol is in lock_lease.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from genie.cluster import init
from genie.cluster.locking.lock_lease import LockLease, make_timeout_error
from genie.cluster.locking.session_locks import SessionLocks
from genie.errors import DeadlineError, LockLostError, NotInitializedError, UsageError
from genie.model.lock import LOCK_TTL_S_DEFAULT, check_lock_ttl_s, validate_lock_name

_log = logging.getLogger(__name__)


def lock(
    name: str,
    *,
    ttl_s: float = LOCK_TTL_S_DEFAULT,
    timeout_s: float | None = None,
    on_lost: Callable[[LockLostError], object] | None = None,
) -> Lock:
    """Return a lock of the tenant with this name, not yet acquired. Use it as a context manager, with `async
    with` or `with`.

    `ttl_s`: after how long without a renewal others can get the lock, 1 to 3600 seconds. `timeout_s`: how
    long to wait for the lock; None waits without a limit, otherwise DeadlineError is raised. `on_lost` is
    called on a thread of the session when the lock is lost. Requires a session (genie.init()).
    """
    locks = init.get_cluster_state().locks
    if locks is None:
        raise NotInitializedError("this session is not connected", hint="call 'await genie.init(...)' first")
    return Lock(name, ttl_s=ttl_s, timeout_s=timeout_s, on_lost=on_lost, locks=locks)


class Lock:
    """Created by `genie.lock`. It can be acquired again after its release, but is not reentrant; use one
    object per task or thread.

    When the lock is lost, an `async with` block is cancelled and raises LockLostError. A `with` block raises
    it at its end; `check_held` raises it earlier.
    """

    def __init__(
        self,
        name: str,
        *,
        ttl_s: float,
        timeout_s: float | None,
        on_lost: Callable[[LockLostError], object] | None,
        locks: SessionLocks,
    ) -> None:
        self.name = validate_lock_name(name)
        self.ttl_s = check_lock_ttl_s(ttl_s)
        self._timeout_s = _check_timeout_s(timeout_s)
        self._on_lost = on_lost
        self._locks = locks
        self._lease: LockLease | None = None
        self._is_busy = threading.Lock()
        self._block: _CancellableBlock | None = None

    def __repr__(self) -> str:
        state = f"held, fencing token {self.fencing_token}" if self.is_held else "not held"
        return f"<genie.lock {self.name!r}: {state}>"

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock and its lease has not expired by the clock of this machine."""
        return self._lease is not None and self._lease.is_held

    @property
    def fencing_token(self) -> int:
        """The fencing token of the last acquisition, also after the lock was lost. Each acquisition has a
        higher one than all before. Raises UsageError if the lock was never acquired."""
        if self._lease is None:
            raise UsageError(f"lock {self.name!r} was not acquired", hint="acquire it first")
        return self._lease.fencing_token

    def check_held(self) -> None:
        """Raise LockLostError if the lock was lost, UsageError if it is not acquired."""
        if self.is_held:
            return
        if self._lease is not None and self._lease.is_lost:
            raise self._lease.make_lost_error()
        raise UsageError(f"lock {self.name!r} is not held", hint="acquire it first")

    # --- asynchronous -------------------------------------------------------------------------

    async def acquire(self, *, timeout_s: float | None = None) -> None:
        """Wait for the lock. Raises DeadlineError after `timeout_s`, by default that of the lock."""
        limit_s = self._timeout_s if timeout_s is None else _check_timeout_s(timeout_s)
        if not await self._acquire(limit_s):
            raise self._timeout_error(limit_s)

    async def try_acquire(self) -> bool:
        """Acquire the lock if it is free; return whether it was acquired. Does not enter the queue."""
        return await self._acquire(0.0)

    async def release(self) -> None:
        """Release the lock. Raises LockLostError if it was lost before."""
        await self._locks.start(self._get_lease_to_release().release).wait()

    async def __aenter__(self) -> Self:
        await self.acquire()
        self._block = _CancellableBlock()
        if self._lease is not None and self._lease.is_lost:
            self._block.cancel()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block, self._block = self._block, None
        assert block is not None
        was_cancelled_by_loss = block.end(exc_type)
        try:
            await self.release()
        except LockLostError as lost:
            if was_cancelled_by_loss or error is None:
                raise lost from error

    # --- synchronous --------------------------------------------------------------------------

    def acquire_blocking(self, *, timeout_s: float | None = None) -> None:
        """Blocking variant of `acquire`."""
        limit_s = self._timeout_s if timeout_s is None else _check_timeout_s(timeout_s)
        if not self._acquire_and_block(limit_s):
            raise self._timeout_error(limit_s)

    def try_acquire_blocking(self) -> bool:
        """Blocking variant of `try_acquire`."""
        return self._acquire_and_block(0.0)

    def release_blocking(self) -> None:
        """Blocking variant of `release`."""
        self._locks.start(self._get_lease_to_release().release).future.result()

    def __enter__(self) -> Self:
        self.acquire_blocking()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.release_blocking()
        except LockLostError:
            if error is None:
                raise

    # --- implementation -----------------------------------------------------------------------

    async def _acquire(self, timeout_s: float | None) -> bool:
        lease = self._begin_acquisition()
        work = self._locks.start_acquisition(lease, timeout_s)
        try:
            return await work.wait()
        except BaseException:
            self._locks.abandon(work, lease)
            raise
        finally:
            self._is_busy.release()

    def _acquire_and_block(self, timeout_s: float | None) -> bool:
        lease = self._begin_acquisition()
        work = self._locks.start_acquisition(lease, timeout_s)
        try:
            return work.future.result()
        except BaseException:
            self._locks.abandon(work, lease)
            raise
        finally:
            self._is_busy.release()

    def _begin_acquisition(self) -> LockLease:
        """Return the lease of a new acquisition; the caller releases `_is_busy`."""
        if self.is_held or not self._is_busy.acquire(blocking=False):
            raise UsageError(
                f"this object holds lock {self.name!r} or is acquiring it",
                hint="locks are not reentrant; create one object per task with genie.lock()",
            )
        self._lease = self._locks.make_lease(self.name, ttl_s=self.ttl_s, on_lost=self._report_loss)
        return self._lease

    def _get_lease_to_release(self) -> LockLease:
        self.check_held()
        assert self._lease is not None
        return self._lease

    def _timeout_error(self, timeout_s: float | None) -> DeadlineError:
        assert self._lease is not None
        assert timeout_s is not None, "an acquisition without a timeout ends with a grant or an error"
        return make_timeout_error(self._lease, timeout_s)

    def _report_loss(self, _reason: str) -> None:
        """Runs on the event loop of the session."""
        assert self._lease is not None
        error = self._lease.make_lost_error()
        if (block := self._block) is not None:
            block.cancel()
        if self._on_lost is not None:
            self._locks.run_callback(self._on_lost, error)


class _CancellableBlock:
    """An `async with` block in the current task that another thread can cancel."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] | None = task
        self._loop = asyncio.get_running_loop()
        self._cancel_requests_before = task.cancelling()
        self._was_cancelled = False

    def cancel(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._cancel_task)
        except RuntimeError:  # the loop of the caller is closed
            _log.debug("could not cancel a block: its event loop is closed")

    def end(self, exc_type: type[BaseException] | None) -> bool:
        """End the block; return whether `cancel`, and no other caller, has cancelled it."""
        task, self._task = self._task, None
        assert task is not None
        if not self._was_cancelled:
            return False
        is_only_cancel_request = task.uncancel() <= self._cancel_requests_before
        return is_only_cancel_request and exc_type is asyncio.CancelledError

    def _cancel_task(self) -> None:
        if self._task is not None and not self._was_cancelled:
            self._was_cancelled = True
            self._task.cancel()


def _check_timeout_s(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not timeout_s >= 0:
        raise UsageError(f"timeout_s = {timeout_s} is not allowed", hint="allowed: 0 or more, or None")
    return timeout_s
