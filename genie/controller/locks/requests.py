"""Requests about locks: acquire, renew, release, list, and the release by an owner.

Grants and leases are in lock_table.py, permissions in tenancy/access.py.
"""

from __future__ import annotations

from genie.controller.checks import clamp_wait_s
from genie.controller.connection import Connection, Handlers
from genie.controller.locks.lock_table import LockTable
from genie.controller.locks.waiters import LockWaiter
from genie.controller.requests.open_waits import OpenWaits, too_many_open_error
from genie.controller.requests.reply_size import truncate_to_reply
from genie.model.lock import check_lock_holder, validate_lock_name
from genie.model.messages.locks import (
    AcquireLock,
    BreakLock,
    ListLocks,
    LockBroken,
    LockGrant,
    LockReleased,
    LockRenewal,
    LocksReply,
    ReleaseLock,
    RenewLock,
)
from genie.model.names import validate_name


class LockRequests:
    def __init__(self, locks: LockTable, *, waits: OpenWaits) -> None:
        self._locks = locks
        self._open_waits = waits

    def handlers(self) -> Handlers:
        return {
            AcquireLock: self.acquire_lock,
            RenewLock: self.renew_lock,
            ReleaseLock: self.release_lock,
            ListLocks: self.list_locks,
            BreakLock: self.break_lock,
        }

    async def acquire_lock(self, connection: Connection, request: AcquireLock) -> LockGrant:
        identity, wait_s = connection.identity, clamp_wait_s(request.wait_s)
        waiter = LockWaiter(
            tenant=identity.tenant,
            name=validate_lock_name(request.name),
            acquisition_id=_validate_acquisition_id(request.acquisition_id),
            holder=check_lock_holder(request.holder),
            owner=identity.token_id,
            ttl_s=request.ttl_s,
            peer=connection.peer,
        )
        if not wait_s:
            return await self._acquire(waiter, wait_s=0.0)
        with self._open_waits.try_open_wait(identity.tenant) as is_allowed:
            if not is_allowed:
                raise too_many_open_error(f"waits of tenant {identity.tenant}")
            return await self._acquire(waiter, wait_s=wait_s)

    async def _acquire(self, waiter: LockWaiter, *, wait_s: float) -> LockGrant:
        record = await self._locks.acquire(waiter, wait_s=wait_s)
        if record is None:
            return LockGrant()
        if record.acquisition_id != waiter.acquisition_id:
            return LockGrant(holder=record.holder)
        return LockGrant(fencing_token=record.fencing_token, holder=record.holder)

    async def renew_lock(self, connection: Connection, request: RenewLock) -> LockRenewal:
        lost_reason = self._locks.renew(
            connection.identity.tenant,
            validate_lock_name(request.name),
            acquisition_id=_validate_acquisition_id(request.acquisition_id),
            fencing_token=request.fencing_token,
        )
        return LockRenewal(lost_reason=lost_reason)

    async def release_lock(self, connection: Connection, request: ReleaseLock) -> LockReleased:
        was_held = await self._locks.release(
            connection.identity.tenant,
            validate_lock_name(request.name),
            acquisition_id=_validate_acquisition_id(request.acquisition_id),
        )
        return LockReleased(was_held=was_held)

    async def list_locks(self, connection: Connection, request: ListLocks) -> LocksReply:
        locks, more = truncate_to_reply(self._locks.visible_locks(connection.identity))
        return LocksReply(locks=locks, more=more)

    async def break_lock(self, connection: Connection, request: BreakLock) -> LockBroken:
        tenant, name = validate_name(request.tenant, what="tenant"), validate_lock_name(request.name)
        record = await self._locks.break_lock(tenant, name, identity=connection.identity)
        if record is None:
            return LockBroken()
        return LockBroken(holder=record.holder, fencing_token=record.fencing_token)


def _validate_acquisition_id(text: str) -> str:
    return validate_name(text, what="acquisition ID")
