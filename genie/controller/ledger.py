"""The controller's in-memory copy of the store, and the only path for writes.

`write` takes a plain function that reads the tables, stages changes and returns a value. Writes that are
queued together are built one after another, each on top of the changes staged before it, and are
committed in one transaction that also compares the leader's fencing token; only then do the tables show
them. `run` does this, so a cancelled caller cannot leave a write half done. Only builds see changes
that are not durable yet: docs/decisions/0011-group-commit.md.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import deque
from collections.abc import Awaitable, Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from genie.controller.election import LEADER_KEY, Election, StoreHealth
from genie.controller.quarantine import Quarantine
from genie.controller.rows import ClusterRecord, Counter, NodeRecord
from genie.controller.store import Compare, Delete, KeyValue, Put, Store, WatchEvent
from genie.controller.store.limits import check_transaction_and_get_size_bytes, operation_size_bytes
from genie.controller.store.protocol import TXN_BYTES_MAX, TXN_OPS_MAX
from genie.errors import (
    GenieError,
    NotLeaderError,
    ReleaseSkewError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
)
from genie.model.allocation import NodeHolds
from genie.model.fencing import revision_of_token
from genie.model.job import Job
from genie.model.lock import LockRecord
from genie.model.messages import QuarantinedRow
from genie.model.release import OWN_RELEASE, Release, fields_newer_than, has_fields_with_since
from genie.model.tenant import QuotaRecord, TokenRecord
from genie.model.unknown_fields import find_unknown_parts
from genie.processes.clock import Clock, SystemClock
from genie.version import __version__

_log = logging.getLogger(__name__)
_Row = TypeVar("_Row", bound=msgspec.Struct)
_Result = TypeVar("_Result")

COMMIT_TIMEOUT_S = 3.0
"""Much longer than a commit takes. When the leader of etcd is lost, a commit that another member has already
forwarded to it is lost as well and never answered: only this timeout ends it."""
TABLES_AGE_S_MAX = 3600.0
"""Clients get no replies from older tables: these may contain tokens that were revoked since."""
WRITES_QUEUED_MAX = 1024
# The event loop is blocked while a batch is built. With 256 the rate under load is 10% lower.
BATCH_WRITES_MAX = 1024
_LOAD_PAGE_ROWS = 500
_LOAD_PAGE_TIMEOUT_S = 30.0
_DECODED_BYTES_PER_YIELD = 256 * 1024
"""Bytes to decode between two yields to the event loop: about 2 ms."""
_ROW_DECODE_OVERHEAD_BYTES = 500
"""Cost of a row in addition to its bytes."""
_BYTES_PER_CHARACTER_MAX = 4
_NEWER_FIELDS_NAMED_MAX = 8
_NEWER_ROW_HINT = (
    "the row is left unchanged, and a job continues to run; upgrade this server, or let a server of the "
    "newer release lead"
)
_TAKEOVER_RETRY_AFTER_S = 0.25
_row_encoder = msgspec.json.Encoder()


CLUSTER_KEY = "cluster"
RESTORE_MARK_KEY = "restoring"
"""In the store while a backup is being restored into it."""
COUNTER_KEY_PREFIX = "counter/"
EPOCH_COUNTER = "epoch"
"""Numbers the placements of all jobs."""


async def read_cluster_record(store: Store, *, timeout_s: float = 5.0) -> ClusterRecord | None:
    """Return the record of the cluster in the store; None in an empty store. Raises StoreCorruptError, and
    StoreVersionError if a newer release wrote it."""
    stored = await store.get(CLUSTER_KEY, timeout_s=timeout_s)
    if stored is not None:
        return LedgerTable(CLUSTER_KEY, ClusterRecord).decode("", stored.value)
    if await store.get(RESTORE_MARK_KEY, timeout_s=timeout_s) is not None:
        raise StoreUnavailableError(
            "a backup is being restored into the store, or its restore has failed",
            hint="wait for 'genie store restore', or run it again",
        )
    return None


# Arguments: row ID, row before, row after; None where there is none.
RowListener = Callable[[str, _Row | None, _Row | None], None]


class TableBeingLoaded(Generic[_Row]):
    """The rows of one table while they are being read."""

    def __init__(self) -> None:
        self.rows: dict[str, _Row] = {}
        self.revisions: dict[str, int] = {}
        self.row_sizes: dict[str, int] = {}
        """Stored bytes of each row."""
        self.unreadable_row_ids: set[str] = set()
        self.read_only_reasons: dict[str, str] = {}
        """Of the unreadable rows that a newer release wrote."""


TableLoader = Callable[[TableBeingLoaded[_Row]], Awaitable[None]]


class LedgerTable(Generic[_Row]):
    """The rows under one key prefix, by ID. Changed by committed transactions only."""

    def __init__(self, prefix: str, kind: type[_Row]) -> None:
        self.prefix = prefix
        self._indexes: list[RowListener[_Row]] = []
        self._listeners: list[RowListener[_Row]] = []
        self._loaders: list[TableLoader[_Row]] = []
        self._decoder = msgspec.json.Decoder(kind)
        self._rows: dict[str, _Row] = {}
        self._revisions: dict[str, int] = {}
        self._row_sizes: dict[str, int] = {}
        self._unreadable_row_ids: set[str] = set()
        self._read_only_reasons: dict[str, str] = {}
        self.kind = kind
        self.has_fields_with_since = has_fields_with_since(kind)
        """Whether rows may have fields that not all servers have."""

    def add_reversible_index(self, index: RowListener[_Row]) -> None:
        """Call `index` for each staged row before the next build runs, and with before and after exchanged
        before any other code runs. It must be reversible and have no other effects."""
        self._indexes.append(index)

    def add_listener(self, listener: RowListener[_Row]) -> None:
        """Call `listener` for each changed row, in order, once it is durable."""
        self._listeners.append(listener)

    def add_loader(self, loader: TableLoader[_Row]) -> None:
        """Call `loader` with what was read, before they replace those of the table. It may take
        long, but must yield to the event loop."""
        self._loaders.append(loader)

    def get(self, row_id: str) -> _Row | None:
        return self._rows.get(row_id)

    def items(self) -> ItemsView[str, _Row]:
        return self._rows.items()

    def values(self) -> list[_Row]:
        return list(self._rows.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __getitem__(self, row_id: str) -> _Row:
        return self._rows[row_id]

    def __contains__(self, row_id: object) -> bool:
        return row_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def is_unreadable(self, row_id: str) -> bool:
        """Whether the store has this row, but it cannot be read or must not be used."""
        return row_id in self._unreadable_row_ids

    def why_read_only(self, row_id: str) -> str:
        """Why this release cannot read the row and must not replace it; empty if it may be written."""
        return self._read_only_reasons.get(row_id, "")

    def check_writable(self, row_id: str) -> None:
        """Raise ReleaseSkewError for a row that a newer release wrote: replacing it would lose data."""
        if reason := self._read_only_reasons.get(row_id):
            raise ReleaseSkewError(reason, hint=_NEWER_ROW_HINT)

    def read_only_row_ids(self) -> list[str]:
        """The rows that a newer release wrote."""
        return list(self._read_only_reasons)

    def size_bytes(self, row_id: str) -> int:
        """Stored bytes of a row; 0 if there is none."""
        return self._row_sizes.get(row_id, 0)

    def revision(self, row_id: str) -> int:
        return self._revisions.get(row_id, 0)

    def decode(self, row_id: str, value: bytes) -> _Row:
        try:
            return self._decoder.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if unknown := _find_unknown_parts_of_row(self.kind, value):
                raise StoreVersionError(
                    f"store key {self.prefix + row_id!r} was written by a newer release of Genie: this one, "
                    f"{__version__}, does not know {', '.join(unknown)}",
                    hint=_NEWER_ROW_HINT,
                ) from error
            raise StoreCorruptError(
                f"store key {self.prefix + row_id!r} cannot be read: {error}",
                hint="it may have been written by another version of Genie",
            ) from error

    def _replace_rows(self, read: TableBeingLoaded[_Row]) -> None:
        self._rows, self._revisions = read.rows, read.revisions
        self._row_sizes, self._unreadable_row_ids = read.row_sizes, read.unreadable_row_ids
        self._read_only_reasons = read.read_only_reasons

    def _set_row(self, row_id: str, row: _Row | None) -> _Row | None:
        """Set or delete a row, update the indexes, and return the previous row. The revision stays that of
        the durable row."""
        before = self._rows.get(row_id)
        if row is not None:
            self._rows[row_id] = row
        elif before is not None:
            del self._rows[row_id]
        for index in self._indexes:
            index(row_id, before, row)
        return before

    def _record_stored_row(self, row_id: str, revision: int, operation: Put | Delete) -> None:
        self._unreadable_row_ids.discard(row_id)
        self._read_only_reasons.pop(row_id, None)
        if isinstance(operation, Put):
            self._revisions[row_id] = revision
            self._row_sizes[row_id] = len(operation.value)
        else:
            self._revisions.pop(row_id, None)
            self._row_sizes.pop(row_id, None)


class Transaction:
    """Changes that are committed together. Reads see the tables plus the staged changes."""

    def __init__(self, counters: LedgerTable[Counter], *, cluster_release: Release = OWN_RELEASE) -> None:
        self._cluster_release = cluster_release
        # Any: tables of every row type share one list of changes.
        self.staged_changes: dict[str, tuple[LedgerTable[Any], str, Any]] = {}
        self.rollback_callbacks: list[Callable[[], None]] = []
        self._counters = counters

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Call `undo` once if these changes are not committed, or if the outcome of the commit is unknown. It
        must not await or raise."""
        self.rollback_callbacks.append(undo)

    def put(self, table: LedgerTable[_Row], row_id: str, row: _Row) -> None:
        """Raise ReleaseSkewError for a row that a newer release wrote, and for one that would get a field
        that not all servers have."""
        if table._read_only_reasons:
            table.check_writable(row_id)
        if table.has_fields_with_since:
            self._check_fields_known_to_all_servers(table, row_id, row)
        self.staged_changes[table.prefix + row_id] = (table, row_id, row)

    def delete(self, table: LedgerTable[_Row], row_id: str) -> None:
        """Also a row that cannot be read."""
        if row_id in table or table.is_unreadable(row_id):
            self.staged_changes[table.prefix + row_id] = (table, row_id, None)

    def get(self, table: LedgerTable[_Row], row_id: str) -> _Row | None:
        staged = self.staged_changes.get(table.prefix + row_id)
        if staged is not None:
            row: _Row | None = staged[2]
            return row
        return table._rows.get(row_id)

    def _check_fields_known_to_all_servers(self, table: LedgerTable[_Row], row_id: str, row: _Row) -> None:
        newer = fields_newer_than(self._cluster_release, row)
        if not newer:
            return
        before = self.get(table, row_id)
        if before is None or not fields_newer_than(self._cluster_release, before):
            raise ReleaseSkewError(
                f"cannot store {', '.join(newer[:_NEWER_FIELDS_NAMED_MAX])}: a server of the cluster runs "
                f"Genie {self._cluster_release}, which does not have it",
                hint="'genie status' names the servers to upgrade; then try again",
            )

    def next_counter_value(self, counter: str) -> int:
        """Return a number higher than every number of this counter in a committed transaction."""
        last = self.get(self._counters, counter)
        value = 1 if last is None else last.value + 1
        self.put(self._counters, counter, Counter(value=value))
        return value


_RowChange = tuple[LedgerTable[Any], str, Any]  # Any: rows of every table
TransactionBuilder = Callable[[Transaction], _Result]


class _QueuedWrite(msgspec.Struct):
    build: TransactionBuilder[Any]  # Any: writes of every result type share one queue
    future: asyncio.Future[Any]


class _BuiltWrite(msgspec.Struct):
    """A write after its build: the staged changes in order, and the result or the error."""

    write: _QueuedWrite
    changes: list[_RowChange]
    outcome: Any  # Any: see _QueuedWrite
    failure: Exception | None = None
    rollback_callbacks: Sequence[Callable[[], None]] = ()


class _WriteBatch:
    """Writes that share one transaction. A row that several of them change is written once, with its last
    value."""

    def __init__(self, token: int, ops_max: int) -> None:
        self._ops_max = ops_max
        self._leadership_compare = Compare(LEADER_KEY, revision_of_token(token), field="create")
        self._row_by_key: dict[str, tuple[LedgerTable[Any], str]] = {}
        self._operation_by_key: dict[str, Put | Delete] = {}
        self.size_bytes = check_transaction_and_get_size_bytes([self._leadership_compare], [])
        self.built_writes: list[_BuiltWrite] = []

    @property
    def as_compares_and_operations(self) -> tuple[list[Compare], list[Put | Delete]]:
        compares = [Compare(key, table.revision(row_id)) for key, (table, row_id) in self._row_by_key.items()]
        return [self._leadership_compare, *compares], list(self._operation_by_key.values())

    def rows_with_operations(self) -> Iterator[tuple[LedgerTable[Any], str, Put | Delete]]:
        for key, (table, row_id) in self._row_by_key.items():
            yield table, row_id, self._operation_by_key[key]

    def try_add(self, built: _BuiltWrite) -> bool:
        """Add a write; False if it does not fit into this batch. RowTooLargeError if it exceeds the limits of
        a transaction on its own, so that only this write fails and not the whole batch."""
        known, operations = self._operation_by_key, []
        more_bytes = more_rows = 0
        for table, row_id, row in built.changes:
            key = table.prefix + row_id
            operation = Delete(key) if row is None else Put(key, _row_encoder.encode(row))
            operations.append(operation)
            # Each row is also compared.
            more_bytes += operation_size_bytes(operation) + len(key) * _BYTES_PER_CHARACTER_MAX
            more_rows += key not in known
        if len(operations) >= TXN_OPS_MAX or more_bytes > TXN_BYTES_MAX:
            # One compare is for the leader's key.
            check_transaction_and_get_size_bytes((), operations, ops_max=TXN_OPS_MAX - 1)
        # A row that is changed twice counts twice: an upper bound.
        is_full = len(known) + more_rows >= self._ops_max
        if self.built_writes and (is_full or self.size_bytes + more_bytes > TXN_BYTES_MAX):
            return False
        for operation, (table, row_id, _) in zip(operations, built.changes, strict=True):
            self._row_by_key[operation.key] = (table, row_id)
            known[operation.key] = operation
        self.size_bytes += more_bytes
        self.built_writes.append(built)
        return True


class LedgerTables:
    """The tables as they were last read from the store. `Ledger` also writes them."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self.cluster = LedgerTable(CLUSTER_KEY, ClusterRecord)
        self.counters = LedgerTable(COUNTER_KEY_PREFIX, Counter)
        self.jobs = LedgerTable("job/", Job)
        self.nodes = LedgerTable("node/", NodeRecord)
        self.holds = LedgerTable("ledger/", NodeHolds)
        self.tokens = LedgerTable("token/", TokenRecord)
        self.quotas = LedgerTable("quota/", QuotaRecord)
        self.locks = LedgerTable("lock/", LockRecord)
        self._cluster_release = Release(OWN_RELEASE.major, max(OWN_RELEASE.minor - 1, 0))
        self._tables: tuple[LedgerTable[Any], ...] = (
            self.cluster,
            self.counters,
            self.jobs,
            self.nodes,
            self.holds,
            self.tokens,
            self.quotas,
            self.locks,
        )
        self.load_count = 0
        """Number of times that all tables were read."""
        self._after_load_listeners: list[Callable[[], None]] = []
        self.quarantine = Quarantine(clock)
        self.unreadable_required_row: KeyValue | None = None
        """The row because of which the tables could not be read the last time."""

    @property
    def quarantined(self) -> Mapping[str, QuarantinedRow]:
        """Rows that could not be read or changed, by store key."""
        return self.quarantine.rows

    def add_after_load_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each time that all tables were read."""
        self._after_load_listeners.append(listener)

    async def read_all_tables(self) -> None:
        """Replace all rows by those of the store."""
        self.quarantine.clear()
        self.unreadable_required_row = None
        fresh = [await self._read_table(table) for table in self._tables]
        for table, read in zip(self._tables, fresh, strict=True):
            for loader in table._loaders:
                await loader(read)
        for table, read in zip(self._tables, fresh, strict=True):
            table._replace_rows(read)
        for node_id in filter(self.holds.is_unreadable, list(self.nodes)):
            # Nothing may be placed on a node whose allocations are unknown.
            del self.nodes._rows[node_id]
            self.nodes._unreadable_row_ids.add(node_id)
        self._on_tables_replaced()
        self.load_count += 1
        for listener in self._after_load_listeners:
            listener()

    def _on_tables_replaced(self) -> None:
        """Called before the listeners."""

    def apply_stored_change(self, event: WatchEvent) -> None:
        """Apply a change that another controller has written. Changes may be applied again, in order; those
        of keys that belong to no table are ignored."""
        for table in self._tables:
            if event.key.startswith(table.prefix):
                if event.revision > table.revision(event.key.removeprefix(table.prefix)):
                    self._apply_change_of_row(table, event)
                return

    def _apply_change_of_row(self, table: LedgerTable[_Row], event: WatchEvent) -> None:
        row_id = event.key.removeprefix(table.prefix)
        row: _Row | None = None
        if event.value is None and row_id not in table and not table.is_unreadable(row_id):
            return
        self.quarantine.discard(event.key)
        table._record_stored_row(
            row_id, event.revision, Delete(event.key) if event.value is None else Put(event.key, event.value)
        )
        if event.value is not None:
            try:
                row = table.decode(row_id, event.value)
            except (StoreCorruptError, StoreVersionError) as error:
                table._unreadable_row_ids.add(row_id)
                if isinstance(error, StoreVersionError):
                    table._read_only_reasons[row_id] = error.message
                self.quarantine.add(event.key, error)
        before = table._set_row(row_id, row)
        if row is not None or before is not None:
            for listener in table._listeners:
                listener(row_id, before, row)

    async def _read_table(self, table: LedgerTable[_Row]) -> TableBeingLoaded[_Row]:
        """Read a table. Yields to the event loop: the lease must be renewed and heartbeats answered while
        many rows are decoded."""
        read: TableBeingLoaded[_Row] = TableBeingLoaded()
        after, more = "", True
        unyielded_bytes = 0
        while more:
            page = await self._store.range(
                table.prefix, start_after=after, limit=_LOAD_PAGE_ROWS, timeout_s=_LOAD_PAGE_TIMEOUT_S
            )
            for item in page.items:
                self._decode_or_quarantine_row(read, table, item)
                unyielded_bytes += len(item.value) + _ROW_DECODE_OVERHEAD_BYTES
                if unyielded_bytes > _DECODED_BYTES_PER_YIELD:
                    unyielded_bytes = 0
                    await asyncio.sleep(0)
                after = item.key
            more = page.more
        return read

    def _decode_or_quarantine_row(
        self, read: TableBeingLoaded[_Row], table: LedgerTable[_Row], item: KeyValue
    ) -> None:
        """Add a row. One that cannot be read is quarantined; StoreCorruptError or StoreVersionError if
        nothing could be done without it."""
        row_id = item.key.removeprefix(table.prefix)
        read.revisions[row_id] = item.mod_revision
        read.row_sizes[row_id] = len(item.value)
        try:
            read.rows[row_id] = table.decode(row_id, item.value)
        except StoreVersionError as error:
            if table in (self.cluster, self.counters):
                self.unreadable_required_row = item
                raise
            read.unreadable_row_ids.add(row_id)
            read.read_only_reasons[row_id] = error.message
            self.quarantine.add(item.key, error)
        except StoreCorruptError as error:
            if table in (self.cluster, self.counters, self.tokens):
                self.unreadable_required_row = item
                raise
            read.unreadable_row_ids.add(row_id)
            self.quarantine.add(item.key, error)


class Ledger(LedgerTables):
    """`write` completes only while `run` is running."""

    def __init__(
        self, store: Store, election: Election, health: StoreHealth, *, clock: Clock | None = None
    ) -> None:
        super().__init__(store, clock=clock or SystemClock())
        self._election = election
        self._store_health = health
        self._write_queue: deque[_QueuedWrite] = deque()
        """At most WRITES_QUEUED_MAX; beyond that callers wait."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Cached, because get_running_loop makes a system call."""
        self._has_queued_writes = asyncio.Event()
        self._has_queue_space = asyncio.Event()
        self._dequeued_writes: deque[_QueuedWrite] = deque()
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
        self._write_queue.append(_QueuedWrite(build, future))
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
            _fail_writes([*self._dequeued_writes, *self._write_queue], _controller_stopping_error())
            self._dequeued_writes.clear()
            self._write_queue.clear()

    async def _commit_next_batch(self) -> None:
        """Commit one transaction of as many writes as fit; the rest stay in `_dequeued_writes`."""
        batch: _WriteBatch | None = None
        try:
            async with self._store_lock:
                token = self._election.require_fencing_token()
                if self._needs_reload:
                    await self._reload_or_step_down_locked()
                batch = _WriteBatch(token, self._store.txn_ops_max)
                self._build_writes_into_batch(batch)
                await self._commit_batch(batch)
        except asyncio.CancelledError:
            _fail_writes(self._roll_back_and_list_writes(batch), _controller_stopping_error())
            raise
        # A request boundary: the callers get the error and log it.
        except Exception as error:
            _fail_writes(self._roll_back_and_list_writes(batch), error)
            return
        for built in batch.built_writes:
            _resolve_write(built)

    async def _reload_or_step_down_locked(self) -> None:
        """Read the tables again; step down if that is impossible, because no write could succeed then."""
        try:
            await self._load_tables_locked()
        except StoreError as error:
            if self.unreadable_required_row is not None:
                self._election.step_down(str(error))
            raise

    def _roll_back_and_list_writes(self, batch: _WriteBatch | None) -> list[_QueuedWrite]:
        """Roll back a failed batch and return its writes; without a batch, all dequeued writes."""
        if batch is not None:
            for built in reversed(batch.built_writes):
                _run_rollback_callbacks(built.rollback_callbacks)
            return [built.write for built in batch.built_writes]
        writes = list(self._dequeued_writes)
        self._dequeued_writes.clear()
        return writes

    def _build_writes_into_batch(self, batch: _WriteBatch) -> None:
        """Fill the batch. Only in here do the tables show changes that are not durable: they are reverted
        before anything awaits, so only the builds see them."""
        applied: list[_RowChange] = []
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
                        applied.append((table, row_id, table._set_row(row_id, row)))
        finally:
            for table, row_id, before in reversed(applied):
                table._set_row(row_id, before)

    def _try_build_write_into_batch(self, write: _QueuedWrite, batch: _WriteBatch) -> _BuiltWrite | None:
        """Run the build and add it to the batch; None if it does not fit."""
        transaction = Transaction(self.counters, cluster_release=self._cluster_release)
        try:
            outcome = write.build(transaction)
            built = _BuiltWrite(
                write,
                list(transaction.staged_changes.values()),
                outcome,
                None,
                transaction.rollback_callbacks,
            )
            if batch.try_add(built):
                return built
            _run_rollback_callbacks(transaction.rollback_callbacks)
            return None
        # A request boundary. Answered after the commit: it may have failed because of earlier staged changes.
        except Exception as error:
            _run_rollback_callbacks(transaction.rollback_callbacks)
            built = _BuiltWrite(write, [], None, error)
            batch.built_writes.append(built)
            return built

    async def _commit_batch(self, batch: _WriteBatch) -> None:
        compares, operations = batch.as_compares_and_operations
        if not operations:
            return
        try:
            result = await self._store.commit(compares, operations, timeout_s=COMMIT_TIMEOUT_S)
        except StoreError as error:
            # Unless the disk is full, the commit may have happened: the next write reloads first.
            self._needs_reload |= not isinstance(error, StoreFullError)
            self._store_health.record_failure(error)
            raise
        self._store_health.record_success()
        if not result.succeeded:
            self._needs_reload = True
            await self._election.step_down_if_replaced()
            raise NotLeaderError("the write was rejected: the store has newer data", hint="try again")
        # Apply all changes first: listeners must see the final tables.
        changes = [change for built in batch.built_writes for change in built.changes]
        befores = [table._set_row(row_id, row) for table, row_id, row in changes]
        for table, row_id, operation in batch.rows_with_operations():
            table._record_stored_row(row_id, result.revision, operation)
        self.written_bytes += batch.size_bytes
        if self.quarantined:
            for table, row_id, _ in changes:
                self.quarantine.discard(table.prefix + row_id)
        for (table, row_id, row), before in zip(changes, befores, strict=True):
            for listener in table._listeners:
                try:
                    listener(row_id, before, row)
                except Exception as error:  # the change is durable: the other writes must not fail
                    self.quarantine.add(table.prefix + row_id, error)


def _find_unknown_parts_of_row(kind: type[msgspec.Struct], value: bytes) -> list[str]:
    """What only a newer release knows in a row that could not be decoded."""
    try:
        return find_unknown_parts(kind, msgspec.json.decode(value))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def _run_rollback_callbacks(rollbacks: Sequence[Callable[[], None]]) -> None:
    for undo in reversed(rollbacks):
        undo()


def request_gossip_key_change(txn: Transaction, cluster: LedgerTable[ClusterRecord]) -> None:
    """Stage the request for the next key of gossip, which the leader begins later."""
    record = cluster.get("")
    if record is not None:
        txn.put(cluster, "", msgspec.structs.replace(record, is_gossip_key_change_due=True))


def _resolve_write(built: _BuiltWrite) -> None:
    future = built.write.future
    if future.done():
        if built.failure is not None:
            _log.warning("a write failed after its caller was cancelled: %s", built.failure)
    elif built.failure is not None:
        future.set_exception(built.failure)
    else:
        future.set_result(built.outcome)


def _fail_writes(writes: Iterable[_QueuedWrite], error: Exception) -> None:
    for write in writes:
        if write.future.done():
            _log.warning("a write failed after its caller was cancelled: %s", error)
            continue
        # One copy per caller: a shared exception would collect the tracebacks of all.
        own = copy.copy(error) if isinstance(error, GenieError) else error
        own.__cause__ = None if own is error else error
        write.future.set_exception(own)


def _controller_stopping_error() -> StoreUnavailableError:
    return StoreUnavailableError(
        "the controller is stopping; the write may or may not have been committed", hint="try again"
    )
