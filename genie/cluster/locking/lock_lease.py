"""One acquisition of a lock by this process: waiting for it, renewing its lease, and losing it.

The lease counts from the time at which the last successful request was sent, by the clock of this machine,
and is shorter than that of the leader: `is_held` becomes false before the leader may grant the lock to
another client. That does not stop a process that is paused after it has checked `is_held`: see docs/LOCKS.md.

Runs on one event loop; `is_held` and the other properties may be read by any thread. Not responsible for
threads and sessions (locks.py).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from genie.errors import GenieError, LockBusyError, LockLimitError, LockLostError, LockTimeoutError
from genie.model.lock import (
    HOLDER_LEASE_SHARE,
    check_lock_holder,
    check_lock_ttl_s,
    lock_renewal_interval_s,
    validate_lock_name,
)
from genie.model.messages import Message, Request
from genie.model.messages.locks import AcquireLock, ReleaseLock, RenewLock
from genie.processes.clock import Clock, SystemClock

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

_POLL_S_MAX = 10.0
_CALL_TIMEOUT_S = 20.0
LOCK_REPLY_ALLOWANCE_S = 3.0
"""How long the reply to the last request may arrive after the timeout of an acquisition."""
LOCK_WITHDRAW_TIMEOUT_S = 2.0
_RETRY_INTERVAL_S_MAX = 0.5
_RETRIES_PER_TTL = 15


class LockRequestSender(Protocol):
    """A connection to the controllers, such as ControllerConnection."""

    async def call(self, request: Request[_Reply], *, timeout_s: float, idempotent: bool = True) -> _Reply:
        """Return the reply; retry an idempotent request after a lost connection or a change of leader."""
        ...


class LeaseClock(SystemClock):
    """Its monotonic clock continues while the machine is suspended, where the system has such a clock."""

    def monotonic_s(self) -> float:
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class _LeaseState(enum.Enum):
    ACQUIRING = enum.auto()
    HELD = enum.auto()
    RELEASED = enum.auto()
    LOST = enum.auto()


class LockLease:
    """Used for one acquisition. `on_lost` is called once, on the event loop, with the reason."""

    def __init__(
        self,
        name: str,
        *,
        ttl_s: float,
        holder: str,
        sender: LockRequestSender,
        clock: Clock,
        on_lost: Callable[[str], None] = lambda _reason: None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.name = validate_lock_name(name)
        self.ttl_s = check_lock_ttl_s(ttl_s)
        self.fencing_token = 0
        """0 until the lock was acquired."""
        self.lost_reason = ""
        self.other_holder = ""
        """The holder for which this acquisition last waited, if it is known."""
        self.last_error: GenieError | None = None
        """Why the last request had no reply; None if it had one."""
        self._holder = check_lock_holder(holder)
        self._sender = sender
        self._clock = clock
        self._on_lost = on_lost
        self._random_bytes = random_bytes
        self._acquisition_id = self._new_acquisition_id()
        self._state = _LeaseState.ACQUIRING
        self._deadline_s = 0.0
        self._ended = asyncio.Event()
        self._owner_process_id = os.getpid()

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock, and no other client can have it by this machine's clock."""
        is_owner_process = os.getpid() == self._owner_process_id  # a forked child does not hold it
        return self._state is _LeaseState.HELD and not self._is_deadline_reached and is_owner_process

    @property
    def is_lost(self) -> bool:
        """Whether the lock was acquired and then lost, not released."""
        return self._state is _LeaseState.LOST or (
            self._state is _LeaseState.HELD and self._is_deadline_reached
        )

    @property
    def has_reply(self) -> bool:
        """Whether the last request of the acquisition was answered or has failed."""
        return bool(self.other_holder) or self.last_error is not None

    @property
    def deadline_s(self) -> float:
        """When the lease ends unless it is renewed, by the clock of this acquisition."""
        return self._deadline_s

    def make_lost_error(self) -> LockLostError:
        reason = self.lost_reason or "its lease expired before it was renewed"
        return LockLostError(
            f"lost lock {self.name!r} (fencing token {self.fencing_token}): {reason}",
            hint="another client may hold it; stop using what it protects",
        )

    async def acquire(self, *, timeout_s: float | None, on_waiting: Callable[[], None] | None = None) -> bool:
        """Acquire the lock; wait for it until the timeout, None: without a limit, 0: do not wait. Return
        whether it was acquired. After an error or a cancellation the lock is not held.

        The last reply and the withdrawal may take up to LOCK_REPLY_ALLOWANCE_S + LOCK_WITHDRAW_TIMEOUT_S
        more. `on_waiting` is called once if another client holds the lock.
        """
        deadline_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        try:
            if on_waiting is not None and timeout_s != 0:
                if await self._poll_once(deadline_s, waits=False):
                    return True
                if self.last_error is None:
                    on_waiting()
            while not await self._poll_once(deadline_s):
                if deadline_s is not None and self._clock.monotonic_s() >= deadline_s:
                    await self._withdraw()
                    return False
            return True
        except BaseException:
            await self._withdraw()
            raise

    async def keep_until_ended(self) -> None:
        """Renew the lease until the lock is released or lost."""
        interval_s = lock_renewal_interval_s(self.ttl_s)
        retry_s = min(self.ttl_s / _RETRIES_PER_TTL, _RETRY_INTERVAL_S_MAX)
        wait_s = interval_s
        while True:
            await self._sleep_until_ended(min(wait_s, self._deadline_s - self._clock.monotonic_s()))
            if self._ended.is_set():
                return
            wait_s = interval_s if await self._try_renew() else retry_s

    async def release(self, *, timeout_s: float = _CALL_TIMEOUT_S) -> bool:
        """Release the lock; return whether a controller has confirmed it. If none can be reached, the lock is
        released when its lease expires, so this does not wait for longer than its time to live. Raises
        LockLostError if the lock was lost before."""
        if self.is_lost:
            self._lose("its lease expired before it was renewed")
            raise self.make_lost_error()
        self._end(_LeaseState.RELEASED)
        try:
            await self._sender.call(self._release_request(), timeout_s=min(timeout_s, self.ttl_s))
        except GenieError as error:
            _log.warning("could not release lock %s, it expires in %g s: %s", self.name, self.ttl_s, error)
            return False
        return True

    async def end_with_session(self, *, timeout_s: float) -> None:
        """Release the lock because the session ends; for its user it is lost."""
        if self.is_held:
            self._lose("the session has ended")
            with suppress(GenieError):
                await self._sender.call(self._release_request(), timeout_s=timeout_s)

    # --- implementation -----------------------------------------------------------------------

    @property
    def _is_deadline_reached(self) -> bool:
        return self._clock.monotonic_s() >= self._deadline_s

    async def _poll_once(self, deadline_s: float | None, *, waits: bool = True) -> bool:
        """Request the lock once; return whether it was acquired. Retryable errors count as no grant while
        there is time left."""
        sent_s = self._clock.monotonic_s()
        left_s = math.inf if deadline_s is None else max(deadline_s - sent_s, 0.0)
        # A short poll: the lease counts from the time at which the request was sent.
        wait_s = min(left_s, _POLL_S_MAX, lock_renewal_interval_s(self.ttl_s)) if waits else 0.0
        request = AcquireLock(
            name=self.name,
            acquisition_id=self._acquisition_id,
            holder=self._holder,
            ttl_s=self.ttl_s,
            wait_s=wait_s,
        )
        try:
            reply_timeout_s = min(wait_s + _CALL_TIMEOUT_S, left_s + LOCK_REPLY_ALLOWANCE_S)
            grant = await self._sender.call(request, timeout_s=reply_timeout_s)
        except LockLimitError:
            raise
        except GenieError as error:
            if not error.retryable or left_s <= 0:
                raise
            _log.info("could not request lock %s, trying again: %s", self.name, error)
            self.last_error = error
            left_s = math.inf if deadline_s is None else deadline_s - self._clock.monotonic_s()
            await self._clock.sleep(max(min(_RETRY_INTERVAL_S_MAX, left_s), 0.0))
            return False
        self.last_error = None
        if not grant.fencing_token:
            self.other_holder = grant.holder
            return False
        return await self._begin_lease(grant.fencing_token, sent_s)

    async def _begin_lease(self, fencing_token: int, sent_s: float) -> bool:
        """Begin the lease; False if it is over already, because the reply took too long."""
        self.fencing_token, self._state = fencing_token, _LeaseState.HELD
        self._set_lease_from(sent_s)
        is_short = self._deadline_s - self._clock.monotonic_s() < lock_renewal_interval_s(self.ttl_s)
        if not is_short or await self._is_renewed_before_use():
            return True
        await self._withdraw()
        self._state, self.fencing_token = _LeaseState.ACQUIRING, 0
        self._acquisition_id = self._new_acquisition_id()
        return False

    async def _is_renewed_before_use(self) -> bool:
        """Renew the lease, even after its end by the clock of this machine: it was not used yet."""
        sent_s = self._clock.monotonic_s()
        with suppress(GenieError):
            renewal = await self._sender.call(self._renewal_request(), timeout_s=self.ttl_s)
            self._set_lease_from(sent_s)
            return not renewal.lost_reason and not self._is_deadline_reached
        return False

    async def _try_renew(self) -> bool:
        """Renew the lease once; return whether it succeeded. Ends the lease when it is lost."""
        sent_s = self._clock.monotonic_s()
        if sent_s >= self._deadline_s:
            self._lose("its lease expired before it was renewed")
            return False
        timeout_s = min(self._deadline_s - sent_s, lock_renewal_interval_s(self.ttl_s))
        try:
            renewal = await self._sender.call(self._renewal_request(), timeout_s=timeout_s)
        except GenieError as error:
            _log.info("could not renew the lease of lock %s: %s", self.name, error)
            if self._is_deadline_reached:
                self._lose(f"its lease could not be renewed in time: {error.message}")
            return False
        if self._state is not _LeaseState.HELD:
            return False
        if renewal.lost_reason or self._is_deadline_reached:
            self._lose(renewal.lost_reason or "its lease expired before it was renewed")
            return False
        self._set_lease_from(sent_s)
        return True

    def _set_lease_from(self, sent_s: float) -> None:
        self._deadline_s = sent_s + HOLDER_LEASE_SHARE * self.ttl_s

    def _lose(self, reason: str) -> None:
        if self._state is not _LeaseState.HELD:
            return
        self.lost_reason = reason
        self._end(_LeaseState.LOST)
        _log.warning("%s", self.make_lost_error())
        self._on_lost(reason)

    def _end(self, state: _LeaseState) -> None:
        self._state = state
        self._ended.set()

    async def _withdraw(self) -> None:
        """Stop waiting for the lock, and release it if it was granted. Otherwise it would be held until its
        lease expires."""
        self._state = _LeaseState.RELEASED
        with suppress(GenieError):
            await self._sender.call(self._release_request(), timeout_s=LOCK_WITHDRAW_TIMEOUT_S)

    async def _sleep_until_ended(self, seconds: float) -> None:
        """Sleep, or return earlier when the lease has ended."""
        async with asyncio.TaskGroup() as group:
            sleep = group.create_task(self._clock.sleep(max(seconds, 0.0)))
            end = group.create_task(self._wait_ended())
            await asyncio.wait({sleep, end}, return_when=asyncio.FIRST_COMPLETED)
            sleep.cancel()
            end.cancel()

    async def _wait_ended(self) -> None:
        await self._ended.wait()

    def _renewal_request(self) -> RenewLock:
        return RenewLock(
            name=self.name, acquisition_id=self._acquisition_id, fencing_token=self.fencing_token
        )

    def _release_request(self) -> ReleaseLock:
        return ReleaseLock(name=self.name, acquisition_id=self._acquisition_id)

    def _new_acquisition_id(self) -> str:
        return self._random_bytes(16).hex()


def make_timeout_error(lease: LockLease, timeout_s: float) -> LockTimeoutError:
    """The error of an acquisition that timed out: LockBusyError if it did not wait."""
    if lease.last_error is not None:
        return LockTimeoutError(
            f"could not acquire lock {lease.name!r} within {timeout_s:g} s: {lease.last_error.message}",
            hint=lease.last_error.hint,
        )
    holder = f": {lease.other_holder} holds it" if lease.other_holder else ""
    kind = LockTimeoutError if timeout_s > 0 else LockBusyError
    return kind(
        f"could not acquire lock {lease.name!r} within {timeout_s:g} s{holder}",
        hint="'genie lock list' shows the holders; wait longer, or try again",
    )
