"""Locks: grants, leases, releases and expiry. Only the leader of the cluster decides.

The row of a lock is written when the lock is granted or released; leases are renewed in memory. A lease that
is not renewed within its time to live, by the monotonic clock of the leader, has expired for good: it cannot
be renewed any more, even if the row is deleted later. A new leader knows no renewals, so it grants every lock
a full lease from the moment at which it has read the tables.

Not responsible for permissions (tenancy/) or for what a client does after its lease has expired: nothing here
can stop it. See docs/LOCKS.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from genie.controller.change_notifier import ChangeNotifier
from genie.controller.election import Election
from genie.controller.jobs.lifecycle import CHANGES_PER_TICK_MAX
from genie.controller.ledger import Ledger, Transaction
from genie.controller.locks.ended_acquisitions import EndedAcquisitions
from genie.controller.locks.waiters import LockWaiter, LockWaiters
from genie.errors import LockError, LockLimitError, LockLostError, LockNotFoundError
from genie.model.fencing import make_fencing_token
from genie.model.lock import LockRecord
from genie.model.messages.locks import LockView
from genie.model.tenant import Identity, TokenKind
from genie.processes.clock import Clock

LOCKS_MAX = 10_000
LOCKS_PER_TENANT_MAX = 1000
LOCK_COUNTER = "lock"
"""Counts the acquisitions of all locks; the low part of their fencing tokens."""


def lock_row_id(tenant: str, name: str) -> str:
    """Neither part contains a slash."""
    return f"{tenant}/{name}"


class LockTable:
    """Methods raise NotLeaderError unless this controller leads and has read the tables."""

    def __init__(self, ledger: Ledger, election: Election, *, clock: Clock) -> None:
        self._ledger = ledger
        self._election = election
        self._clock = clock
        self._rows = ledger.locks
        self._waiters = LockWaiters()
        self._notifier = ChangeNotifier(clock)
        self._lease_deadline_s_by_token: dict[int, float] = {}
        """By fencing token. Entries of grants that were not committed are overwritten by the next grant."""
        self._ended_acquisitions = EndedAcquisitions()
        self._released_before_request = EndedAcquisitions()
        """Acquisitions whose release has overtaken the request. Separate, because any client can add them."""
        self._count_by_tenant: Counter[str] = Counter()
        self._term_token = 0
        self._term_began_s = 0.0
        self._rows.add_reversible_index(self._count_row)
        self._rows.add_listener(self._on_row_changed)
        ledger.add_after_load_listener(self._on_tables_loaded)

    # --- requests -----------------------------------------------------------------------------

    async def acquire(self, waiter: LockWaiter, *, wait_s: float) -> LockRecord | None:
        """Grant the lock to the client, or return the grant of its earlier poll; wait up to `wait_s`. Returns
        the record of the holder, which may be another one; None if the lock was not free because another
        client is to get it. Raises LockLostError if this acquisition was released."""
        row_id = lock_row_id(waiter.tenant, waiter.name)
        self._check_usable(row_id, waiter)
        if wait_s <= 0:
            return await self._grant_if_free(row_id, waiter)
        deadline_s = self._clock.monotonic_s() + wait_s
        with self._waiters.poll(row_id, waiter, now_s=self._clock.monotonic_s()) as queued:
            try:
                while True:
                    record = await self._grant_if_free(row_id, queued)
                    left_s = deadline_s - self._clock.monotonic_s()
                    if record is not None and record.acquisition_id == waiter.acquisition_id:
                        self._waiters.remove(row_id, waiter.acquisition_id)
                        return record
                    if left_s <= 0:
                        return record
                    await self._wait_for_change(row_id, record, timeout_s=left_s)
                    self._check_usable(row_id, waiter)
            finally:
                queued.last_poll_ended_s = self._clock.monotonic_s()

    def renew(self, tenant: str, name: str, *, acquisition_id: str, fencing_token: int) -> str:
        """Extend the lease of a holder by its time to live. Return "", or why it does not hold the lock.
        Raises LockError for a record that a newer release wrote."""
        self._ledger.check_leading_and_up_to_date()
        row_id = lock_row_id(tenant, name)
        self._check_not_of_newer_release(row_id, name)
        row = self._rows.get(row_id)
        if row is None or row.acquisition_id != acquisition_id or row.fencing_token != fencing_token:
            ended = self._find_end_of_acquisition(tenant, name, acquisition_id)
            return ended or "its lease expired before it was renewed"
        if not self._try_extend_lease(row):
            return "its lease expired before it was renewed"
        return ""

    async def release(self, tenant: str, name: str, *, acquisition_id: str) -> bool:
        """Release the lock, or stop waiting for it. Return whether the client held the lock until now.
        Raises LockError for a record that a newer release wrote: the client may hold the lock."""
        row_id = lock_row_id(tenant, name)
        self._ledger.check_leading_and_up_to_date()
        self._check_not_of_newer_release(row_id, name)
        if self._waiters.remove(row_id, acquisition_id):
            self._add_ended_acquisition(tenant, name, acquisition_id, "it was released")

        def build(txn: Transaction) -> bool:
            row = txn.get(self._rows, row_id)
            if row is None or row.acquisition_id != acquisition_id:
                self._refuse_late_request(tenant, name, acquisition_id)
                return False
            self._add_ended_acquisition(tenant, name, acquisition_id, "it was released")
            was_held = not self._is_expired(row)
            self._stage_next_holder(txn, row_id)
            return was_held

        return await self._ledger.write(build)

    async def break_lock(self, tenant: str, name: str, *, identity: Identity) -> LockRecord | None:
        """Release a lock whoever holds it. Return the record of the holder, None if it could not be read.
        Raises LockNotFoundError if the lock is free."""
        row_id = lock_row_id(tenant, name)
        self._ledger.check_leading_and_up_to_date()

        def build(txn: Transaction) -> LockRecord | None:
            row = txn.get(self._rows, row_id)
            if row is None and not self._rows.is_unreadable(row_id):
                raise LockNotFoundError(
                    f"lock {name!r} of tenant {tenant} is not held", hint="'genie lock list' lists the locks"
                )
            self._stage_next_holder(txn, row_id)
            return row

        row = await self._ledger.write(build)
        if row is not None:
            reason = f"it was released with 'genie lock release --force' (token {identity.token_id})"
            self._add_ended_acquisition(tenant, name, row.acquisition_id, reason)
        return row

    def visible_locks(self, identity: Identity) -> Iterator[LockView]:
        """The held locks, by tenant and name: of all tenants for an owner, else of its own."""
        self._ledger.check_leading_and_up_to_date()
        now_s = self._clock.monotonic_s()
        for row_id, row in sorted(self._rows.items()):
            if identity.kind is not TokenKind.OWNER and row.tenant != identity.tenant:
                continue
            if (expires_in_s := self._lease_deadline_s(row) - now_s) <= 0:
                continue
            yield LockView(
                name=row.name,
                tenant=row.tenant,
                holder=row.holder,
                fencing_token=row.fencing_token,
                ttl_s=row.ttl_s,
                acquired_at=row.acquired_at,
                expires_in_s=expires_in_s,
                waiting=self._waiters.count(row_id),
            )

    # --- expiry -------------------------------------------------------------------------------

    async def end_expired_leases(self) -> None:
        """Delete locks whose lease has expired, or grant them to the next client; forget clients that have
        stopped waiting."""
        now_s = self._clock.monotonic_s()
        self._waiters.remove_abandoned(now_s=now_s)
        expired = [row_id for row_id, row in self._rows.items() if now_s >= self._lease_deadline_s(row)]
        # A client that was disconnected when the lock became free, and is back.
        unclaimed = [
            row_id
            for row_id in self._waiters.waiting_row_ids()
            if row_id not in self._rows and not self._rows.is_unreadable(row_id)
        ]
        row_ids = [*expired, *unclaimed][:CHANGES_PER_TICK_MAX]
        builds = [partial(self._stage_next_holder_if_expired, row_id=row_id) for row_id in row_ids]
        for outcome in await self._ledger.write_each(builds):
            if isinstance(outcome, Exception):
                raise outcome

    def _stage_next_holder_if_expired(self, txn: Transaction, *, row_id: str) -> None:
        row = txn.get(self._rows, row_id)
        if row is None or self._is_expired(row):
            with suppress(LockLimitError):  # each client that waits gets the error itself
                self._stage_next_holder(txn, row_id)

    # --- grants -------------------------------------------------------------------------------

    async def _grant_if_free(self, row_id: str, waiter: LockWaiter) -> LockRecord | None:
        """Return the record of the holder after granting the lock if it was free: to the first client that
        waits, or else to `waiter`."""
        row = self._rows.get(row_id)
        if row is not None and not self._is_expired(row):
            if row.acquisition_id == waiter.acquisition_id:
                self._try_extend_lease(row)  # the client counts its lease from this request on
            return row

        def build(txn: Transaction) -> LockRecord | None:
            row = txn.get(self._rows, row_id)
            if row is not None and not self._is_expired(row):
                return row
            return self._stage_next_holder(txn, row_id, or_else=waiter)

        return await self._ledger.write(build)

    async def _wait_for_change(self, row_id: str, record: LockRecord | None, *, timeout_s: float) -> None:
        """Wait until the row is no longer `record`."""
        await self._notifier.wait_while(row_id, lambda: self._rows.get(row_id) is record, timeout_s=timeout_s)

    def _stage_next_holder(
        self, txn: Transaction, row_id: str, *, or_else: LockWaiter | None = None
    ) -> LockRecord | None:
        """Grant the lock to the first client that waits, or else to `or_else`, or else delete its row. Return
        the new record."""
        now_s = self._clock.monotonic_s()
        winner = self._waiters.first_ready(row_id, now_s=now_s) or or_else
        if winner is not None and self._find_end_of_waiter(winner) is not None:
            winner = None
        if winner is None:
            txn.delete(self._rows, row_id)
            return None
        if txn.get(self._rows, row_id) is None:
            self._check_limits(winner.tenant)
        record = LockRecord(
            tenant=winner.tenant,
            name=winner.name,
            acquisition_id=winner.acquisition_id,
            holder=winner.holder,
            owner=winner.owner,
            fencing_token=self._next_fencing_token(txn),
            ttl_s=winner.ttl_s,
            acquired_at=self._clock.wall_s(),
        )
        txn.put(self._rows, row_id, record)
        # Already here: the next builds see this row before it is durable.
        self._lease_deadline_s_by_token[record.fencing_token] = now_s + record.ttl_s
        return record

    def _next_fencing_token(self, txn: Transaction) -> int:
        cluster = self._ledger.cluster.get("")
        generation = cluster.generation if cluster is not None else 0
        return make_fencing_token(generation=generation, revision=txn.next_counter_value(LOCK_COUNTER))

    def _check_limits(self, tenant: str) -> None:
        if self._count_by_tenant[tenant] >= LOCKS_PER_TENANT_MAX:
            raise LockLimitError(f"tenant {tenant} holds {LOCKS_PER_TENANT_MAX} locks, which is the maximum")
        if len(self._rows) >= LOCKS_MAX:
            raise LockLimitError(f"{LOCKS_MAX} locks are held in the cluster, which is the maximum")

    def _check_usable(self, row_id: str, waiter: LockWaiter) -> None:
        self._ledger.check_leading_and_up_to_date()
        self._check_not_of_newer_release(row_id, waiter.name)
        if self._rows.is_unreadable(row_id):
            raise LockError(
                f"the record of lock {waiter.name!r} cannot be read",
                hint=f"delete it with 'genie lock release {waiter.name} --force'",
            )
        ended = self._find_end_of_waiter(waiter)
        if ended is not None:
            raise LockLostError(f"could not acquire lock {waiter.name!r}: {ended}")

    def _check_not_of_newer_release(self, row_id: str, name: str) -> None:
        """Raise LockError for a record that a newer release wrote. Its lease is unknown, so it does not
        expire."""
        if reason := self._rows.why_read_only(row_id):
            raise LockError(
                f"lock {name!r} may be held, but its record cannot be read: {reason}",
                hint="let a server of the newer release lead; if it has no holder any more, an owner can "
                f"delete the record with 'genie lock release {name} --force'",
            )

    # --- leases -------------------------------------------------------------------------------

    def _lease_deadline_s(self, row: LockRecord) -> float:
        return self._lease_deadline_s_by_token.get(row.fencing_token, self._term_began_s + row.ttl_s)

    def _is_expired(self, row: LockRecord) -> bool:
        return self._clock.monotonic_s() >= self._lease_deadline_s(row)

    def _try_extend_lease(self, row: LockRecord) -> bool:
        """Extend the lease from now on; False if it has expired, which is final."""
        if self._is_expired(row):
            return False
        self._lease_deadline_s_by_token[row.fencing_token] = self._clock.monotonic_s() + row.ttl_s
        return True

    # --- ended acquisitions -------------------------------------------------------------------

    def _add_ended_acquisition(self, tenant: str, name: str, acquisition_id: str, reason: str) -> None:
        self._ended_acquisitions.add(tenant, name, acquisition_id, reason, now_s=self._clock.monotonic_s())

    def _refuse_late_request(self, tenant: str, name: str, acquisition_id: str) -> None:
        """Refuse a request for this acquisition, which may arrive later than its release."""
        if self._find_end_of_acquisition(tenant, name, acquisition_id) is None:
            self._released_before_request.add(
                tenant,
                name,
                acquisition_id,
                "it was released before its request arrived",
                now_s=self._clock.monotonic_s(),
            )

    def _find_end_of_waiter(self, waiter: LockWaiter) -> str | None:
        return self._find_end_of_acquisition(waiter.tenant, waiter.name, waiter.acquisition_id)

    def _find_end_of_acquisition(self, tenant: str, name: str, acquisition_id: str) -> str | None:
        """Return why the acquisition ended; None if it is not known to have ended."""
        now_s = self._clock.monotonic_s()
        return self._ended_acquisitions.find_reason(
            tenant, name, acquisition_id, now_s=now_s
        ) or self._released_before_request.find_reason(tenant, name, acquisition_id, now_s=now_s)

    # --- the ledger ---------------------------------------------------------------------------

    def _on_tables_loaded(self) -> None:
        """Begin a term if another controller may have led since the tables were last read. It begins here and
        not later, because requests are handled from now on."""
        self._count_by_tenant = Counter(row.tenant for row in self._rows.values())
        token = self._election.fencing_token
        if token != self._term_token:
            self._term_token, self._term_began_s = token, self._clock.monotonic_s()
            self._lease_deadline_s_by_token.clear()
            self._waiters.clear()
            return
        held = {row.fencing_token for row in self._rows.values()}
        self._lease_deadline_s_by_token = {
            token: deadline_s
            for token, deadline_s in self._lease_deadline_s_by_token.items()
            if token in held
        }

    def _count_row(self, row_id: str, before: LockRecord | None, after: LockRecord | None) -> None:
        if before is not None:
            self._count_by_tenant[before.tenant] -= 1
        if after is not None:
            self._count_by_tenant[after.tenant] += 1

    def _on_row_changed(self, row_id: str, before: LockRecord | None, after: LockRecord | None) -> None:
        if before is not None and (after is None or after.fencing_token != before.fencing_token):
            self._lease_deadline_s_by_token.pop(before.fencing_token, None)
        self._notifier.notify(row_id)
