"""The controller's in-memory copy of the store, and the only path for writes.

`write` takes a plain function that reads the tables, stages changes and returns a value. Writes that are
queued together are built one after another, each on top of the changes staged before it, and are
committed in one transaction that also compares the leader's fencing token; only then do the tables show
them. `run` does this, so a cancelled caller cannot leave a write half done. Only builds see changes
that are not durable yet: docs/decisions/0011-group-commit.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from genie.controller.election import Election, StoreHealth
from genie.controller.ledger.tables import LedgerTables
from genie.controller.ledger.transaction import RowChange, Transaction, TransactionBuilder
from genie.controller.ledger.write_batch import (
    BuiltWrite,
    QueuedWrite,
    WriteBatch,
    fail_writes,
    resolve_write,
    run_rollback_callbacks,
)
from genie.controller.store import Store
from genie.errors import NotLeaderError, StoreError, StoreFullError, StoreUnavailableError
from genie.model.release import Release
from genie.processes.clock import Clock, SystemClock

_Result = TypeVar("_Result")

COMMIT_TIMEOUT_S = 3.0
"""Much longer than a commit takes. When the leader of etcd is lost, a commit that another member has already
forwarded to it is lost as well and never answered: only this timeout ends it."""
WRITES_QUEUED_MAX = 1024
# The event loop is blocked while a batch is built. With 256 the rate under load is 10% lower.
BATCH_WRITES_MAX = 1024
_TAKEOVER_RETRY_AFTER_S = 0.25


class Ledger(LedgerTables):
    """`write` completes only while `run` is running."""

    def __init__(
        self, store: Store, election: Election, health: StoreHealth, *, clock: Clock | None = None
    ) -> None:
        super().__init__(store, clock=clock or SystemClock())
        self._election = election
        self._store_health = health
        self._write_queue: deque[QueuedWrite] = deque()
        """At most WRITES_QUEUED_MAX; beyond that callers wait."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Cached, because get_running_loop makes a system call."""
        self._has_queued_writes = asyncio.Event()
        self._has_queue_space = asyncio.Event()
        self._dequeued_writes: deque[QueuedWrite] = deque()
        """Removed from the queue and not yet in a transaction; at most BATCH_WRITES_MAX."""
        self._needs_reload = False
        """The outcome of a commit is unknown: reload before the next one."""
        self._store_lock = asyncio.Lock()
        """Held while loading or committing: a load would overwrite the rows of a concurrent commit."""
        self.is_loaded = False
        self._loaded_fencing_token = 0
        """Fencing token of the term in which the tables were read."""
        self._fencing_token_of_load = 0
        """Fencing token of the term in which they are being read."""
        self.written_bytes = 0
        """Sum of the sizes of all transactions of this process."""

    def set_cluster_release(self, release: Release) -> None:
        """Set the release that every server has at least: fields of later ones are not written."""
        self._cluster_release = release

    async def load_tables(self) -> None:
        """Read all tables. Call it as leader only: then no other controller writes meanwhile."""
        if self._loaded_fencing_token != self._election.fencing_token:
            # Another controller may have led since: the tables must not be read before they are replaced.
            self.is_loaded = False
        async with self._store_lock:
            await self._load_tables_locked()

    async def _load_tables_locked(self) -> None:
        self._fencing_token_of_load = self._election.require_fencing_token()
        await self.read_all_tables()

    def _on_tables_replaced(self) -> None:
        self.is_loaded, self._needs_reload = True, False
        self._loaded_fencing_token = self._fencing_token_of_load

    @property
    def is_up_to_date(self) -> bool:
        """Whether no other controller can have written since the tables were read."""
        return self.is_loaded and self._election.is_leading_with_token(self._loaded_fencing_token)

    def check_leading_and_up_to_date(self) -> None:
        """Raise NotLeaderError unless this controller leads and has read the tables in this term."""
        self._election.require_fencing_token()
        if not self.is_up_to_date:
            raise NotLeaderError(
                "this controller is taking over leadership",
                hint="try again in a moment",
                retry_after_s=_TAKEOVER_RETRY_AFTER_S,
            )

    def check_readable(self) -> None:
        """Raise NotLeaderError if the tables are not loaded: another controller must respond."""
        if not self.is_loaded:
            self.check_leading_and_up_to_date()

    def mark_outdated(self) -> None:
        """Mark the tables as outdated, because another controller leads."""
        self.is_loaded = False

    async def write(self, build: TransactionBuilder[_Result]) -> _Result:
        """Return the result of `build` once its changes are durable. If `build` raises, nothing changes and
        its exception is raised here; StoreError and NotLeaderError are raised too.

        `build` must not await, and may be called again if its changes were not committed.
        """
        if len(self._write_queue) >= WRITES_QUEUED_MAX:
            await self._wait_for_queue_space()
        return await self._enqueue_write(build)

    async def write_each(
        self, builds: Iterable[TransactionBuilder[_Result]]
    ) -> list[_Result | BaseException]:
        """Like `write` for several builds: return the result or the exception of each. They share
        transactions where they fit; one that fails does not fail the others unless their common commit
        fails."""
        futures: list[asyncio.Future[_Result]] = []
        try:
            for build in builds:
                if len(self._write_queue) >= WRITES_QUEUED_MAX:
                    await self._wait_for_queue_space()
                futures.append(self._enqueue_write(build))
            outcomes: list[_Result | BaseException] = []
            for future in futures:
                # Usually all complete at once, so only the first await suspends.
                try:
                    outcomes.append(await future)
                except Exception as error:
                    outcomes.append(error)
            return outcomes
        finally:
            for future in futures:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # mark as retrieved

    async def _wait_for_queue_space(self) -> None:
        while len(self._write_queue) >= WRITES_QUEUED_MAX:
            self._has_queue_space.clear()
            await self._has_queue_space.wait()

    def _enqueue_write(self, build: TransactionBuilder[_Result]) -> asyncio.Future[_Result]:
        self._election.require_fencing_token()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        future: asyncio.Future[_Result] = self._loop.create_future()
        self._write_queue.append(QueuedWrite(build, future))
        self._has_queued_writes.set()
        return future

    async def run(self) -> None:
        """Commit writes until cancelled; those still queued then fail."""
        try:
            while True:
                # A batch is what is queued now; it does not wait for more writes.
                while self._write_queue and len(self._dequeued_writes) < BATCH_WRITES_MAX:
                    self._dequeued_writes.append(self._write_queue.popleft())
                self._has_queue_space.set()
                if self._dequeued_writes:
                    await self._commit_next_batch()
                else:
                    self._has_queued_writes.clear()
                    await self._has_queued_writes.wait()
        finally:
            fail_writes([*self._dequeued_writes, *self._write_queue], _controller_stopping_error())
            self._dequeued_writes.clear()
            self._write_queue.clear()

    async def _commit_next_batch(self) -> None:
        """Commit one transaction of as many writes as fit; the rest stay in `_dequeued_writes`."""
        batch: WriteBatch | None = None
        try:
            async with self._store_lock:
                token = self._election.require_fencing_token()
                if self._needs_reload:
                    async with self._election.end_with_term():
                        await self._reload_or_step_down_locked()
                batch = WriteBatch(token, self._store.txn_ops_max)
                self._build_writes_into_batch(batch)
                await self._commit_batch(batch)
        except asyncio.CancelledError:
            fail_writes(self._roll_back_and_list_writes(batch), _controller_stopping_error())
            raise
        # A request boundary: the callers get the error and log it.
        except Exception as error:
            fail_writes(self._roll_back_and_list_writes(batch), error)
            return
        for built in batch.built_writes:
            resolve_write(built)

    async def _reload_or_step_down_locked(self) -> None:
        """Read the tables again; step down if that is impossible, because no write could succeed then."""
        try:
            await self._load_tables_locked()
        except StoreError as error:
            if self.unreadable_required_row is not None:
                self._election.step_down(str(error))
            raise

    def _roll_back_and_list_writes(self, batch: WriteBatch | None) -> list[QueuedWrite]:
        """Roll back a failed batch and return its writes; without a batch, all dequeued writes."""
        if batch is not None:
            for built in reversed(batch.built_writes):
                run_rollback_callbacks(built.rollback_callbacks)
            return [built.write for built in batch.built_writes]
        writes = list(self._dequeued_writes)
        self._dequeued_writes.clear()
        return writes

    def _build_writes_into_batch(self, batch: WriteBatch) -> None:
        """Fill the batch. Only in here do the tables show changes that are not durable: they are reverted
        before anything awaits, so only the builds see them."""
        applied: list[RowChange] = []
        try:
            while self._dequeued_writes:
                write = self._dequeued_writes.popleft()
                if write.future.done():
                    continue
                built = self._try_build_write_into_batch(write, batch)
                if built is None:
                    self._dequeued_writes.appendleft(write)
                    return
                if self._dequeued_writes:
                    for table, row_id, row in built.changes:
                        applied.append((table, row_id, table.set_row(row_id, row)))
        finally:
            for table, row_id, before in reversed(applied):
                table.set_row(row_id, before)

    def _try_build_write_into_batch(self, write: QueuedWrite, batch: WriteBatch) -> BuiltWrite | None:
        """Run the build and add it to the batch; None if it does not fit."""
        transaction = Transaction(self.counters, cluster_release=self._cluster_release)
        try:
            outcome = write.build(transaction)
            built = BuiltWrite(
                write,
                list(transaction.staged_changes.values()),
                outcome,
                None,
                transaction.rollback_callbacks,
            )
            if batch.try_add(built):
                return built
            run_rollback_callbacks(transaction.rollback_callbacks)
            return None
        # A request boundary. Answered after the commit: it may have failed because of earlier staged changes.
        except Exception as error:
            run_rollback_callbacks(transaction.rollback_callbacks)
            built = BuiltWrite(write, [], None, error)
            batch.built_writes.append(built)
            return built

    async def _commit_batch(self, batch: WriteBatch) -> None:
        compares, operations = batch.as_compares_and_operations
        if not operations:
            return
        try:
            async with self._election.end_with_term():
                result = await self._store.commit(compares, operations, timeout_s=COMMIT_TIMEOUT_S)
        except NotLeaderError as error:
            self._needs_reload = True
            raise StoreUnavailableError(
                "this controller no longer leads; the write may or may not have been committed",
                hint="try again",
            ) from error
        except StoreError as error:
            # Unless the disk is full, the commit may have happened: the next write reloads first.
            self._needs_reload |= not isinstance(error, StoreFullError)
            self._store_health.record_failure(error)
            raise
        self._store_health.record_success()
        if not result.succeeded:
            self._needs_reload = True
            async with self._election.end_with_term():
                await self._election.step_down_if_replaced()
            raise NotLeaderError("the write was rejected: the store has newer data", hint="try again")
        # Apply all changes first: listeners must see the final tables.
        changes = [change for built in batch.built_writes for change in built.changes]
        befores = [table.set_row(row_id, row) for table, row_id, row in changes]
        for table, row_id, operation in batch.rows_with_operations():
            table.record_stored_row(row_id, result.revision, operation)
        self.written_bytes += batch.size_bytes
        if self.quarantined:
            for table, row_id, _ in changes:
                self.quarantine.discard(table.prefix + row_id)
        for (table, row_id, row), before in zip(changes, befores, strict=True):
            for listener in table.listeners:
                try:
                    listener(row_id, before, row)
                except Exception as error:  # the change is durable: the other writes must not fail
                    self.quarantine.add(table.prefix + row_id, error)


def _controller_stopping_error() -> StoreUnavailableError:
    return StoreUnavailableError(
        "the controller is stopping; the write may or may not have been committed", hint="try again"
    )
