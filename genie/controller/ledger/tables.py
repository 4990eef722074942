"""The tables of the ledger as they were last read from the store, and their rows.

A row that cannot be read is quarantined; one that a newer release wrote is kept, and never replaced. Writes
are in ledger.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, ItemsView, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from genie.controller.ledger.quarantine import Quarantine
from genie.controller.rows import ClusterRecord, Counter, NodeRecord
from genie.controller.store import Delete, KeyValue, Put, Store, WatchEvent
from genie.errors import ReleaseSkewError, StoreCorruptError, StoreUnavailableError, StoreVersionError
from genie.model.allocation import NodeHolds
from genie.model.job import Job
from genie.model.lock import LockRecord
from genie.model.messages import QuarantinedRow
from genie.model.release import OWN_RELEASE, Release, has_fields_with_since
from genie.model.tenant import QuotaRecord, TokenRecord
from genie.model.unknown_fields import find_unknown_parts
from genie.processes.clock import Clock
from genie.version import __version__

_Row = TypeVar("_Row", bound=msgspec.Struct)

TABLES_AGE_S_MAX = 3600.0
"""Clients get no replies from older tables: these may contain tokens that were revoked since."""
CLUSTER_KEY = "cluster"
RESTORE_MARK_KEY = "restoring"
"""In the store while a backup is being restored into it."""
COUNTER_KEY_PREFIX = "counter/"
EPOCH_COUNTER = "epoch"
"""Numbers the placements of all jobs."""
_LOAD_PAGE_ROWS = 500
_LOAD_PAGE_TIMEOUT_S = 30.0
_DECODED_BYTES_PER_YIELD = 256 * 1024
"""Bytes to decode between two yields to the event loop: about 2 ms."""
_ROW_DECODE_OVERHEAD_BYTES = 500
"""Cost of a row in addition to its bytes."""
_NEWER_ROW_HINT = (
    "the row is left unchanged, and a job continues to run; upgrade this server, or let a server of the "
    "newer release lead"
)


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
        self.listeners: list[RowListener[_Row]] = []
        """Called by those that change the table."""
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
        self.listeners.append(listener)

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

    def copy_rows(self) -> TableBeingLoaded[_Row]:
        """Return the durable rows, to load them into another table of this kind."""
        copied: TableBeingLoaded[_Row] = TableBeingLoaded()
        copied.rows, copied.revisions = self._rows.copy(), self._revisions.copy()
        copied.row_sizes, copied.unreadable_row_ids = self._row_sizes.copy(), self._unreadable_row_ids.copy()
        copied.read_only_reasons = self._read_only_reasons.copy()
        return copied

    @property
    def last_revision(self) -> int:
        """The highest revision of a row; 0 without rows."""
        return max(self._revisions.values(), default=0)

    def _replace_rows(self, read: TableBeingLoaded[_Row]) -> None:
        self._rows, self._revisions = read.rows, read.revisions
        self._row_sizes, self._unreadable_row_ids = read.row_sizes, read.unreadable_row_ids
        self._read_only_reasons = read.read_only_reasons

    def set_row(self, row_id: str, row: _Row | None) -> _Row | None:
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

    def record_stored_row(self, row_id: str, revision: int, operation: Put | Delete) -> None:
        """Record revision and size of a row that was stored or deleted."""
        self._unreadable_row_ids.discard(row_id)
        self._read_only_reasons.pop(row_id, None)
        if isinstance(operation, Put):
            self._revisions[row_id] = revision
            self._row_sizes[row_id] = len(operation.value)
        else:
            self._revisions.pop(row_id, None)
            self._row_sizes.pop(row_id, None)


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
        await self._replace_all_rows([await self._read_table(table) for table in self._tables])

    async def copy_all_tables(self, source: LedgerTables) -> int:
        """Replace all rows by those of `source`; return the revision of the newest one."""
        revision = max(table.last_revision for table in source._tables)
        await self._replace_all_rows([table.copy_rows() for table in source._tables])
        return revision

    async def _replace_all_rows(self, fresh: list[TableBeingLoaded[Any]]) -> None:
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
        table.record_stored_row(
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
        before = table.set_row(row_id, row)
        if row is not None or before is not None:
            for listener in table.listeners:
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


def _find_unknown_parts_of_row(kind: type[msgspec.Struct], value: bytes) -> list[str]:
    """What only a newer release knows in a row that could not be decoded."""
    try:
        return find_unknown_parts(kind, msgspec.json.decode(value))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
