"""The SQLite file under SqliteStore: schema and transactions. Plain blocking code for one thread.

    meta(name, value)      format, revision
    kv(key, value, …)      current values
    lease(id)              leases of the process that has the file open

Write-ahead log with a full sync at every commit: results of `run` survive a kill and a power
failure. One process at a time: an flock on `<path>.lock`, and SQLite's exclusive mode, which
also keeps the index of the log in memory instead of in a third file. Queues, deadlines and lease
timers are in sqlite.py, changes for watches in history.py.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from genie.controller.store.file_lock import acquire_store_file_lock, make_private_file
from genie.controller.store.history import HistoryPage, HistoryPosition, KeyChange, RevisionHistory
from genie.controller.store.limits import encode_key, key_range
from genie.controller.store.protocol import (
    RANGE_BYTES_MAX,
    Compare,
    Delete,
    KeyValue,
    Put,
    RangeResult,
    SpaceUsage,
    TxnResult,
)
from genie.controller.store.sqlite_snapshot import SqliteSnapshot
from genie.errors import (
    GenieError,
    LeaseLostError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
)
from genie.processes.files import FileLock

log = logging.getLogger(__name__)

FILE_FORMAT = 2
SQLITE_APPLICATION_ID = 0x47454E45
# A page that changes often is copied from the log once per checkpoint: 32 MiB of 4 KiB pages.
WAL_CHECKPOINT_PAGES = 8192
PAGE_CACHE_KIB = 32 * 1024

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE kv (
    key BLOB PRIMARY KEY, value BLOB NOT NULL,
    create_rev INTEGER NOT NULL, mod_rev INTEGER NOT NULL, lease INTEGER NOT NULL
);
CREATE INDEX kv_lease ON kv (lease) WHERE lease != 0;
CREATE TABLE lease (id INTEGER PRIMARY KEY AUTOINCREMENT);
"""

FileCall = Callable[["SqliteFile"], object]
_Item = TypeVar("_Item")

# Rows per statement. SQLite releases the GIL in each statement, and the thread then waits to get it back.
_ROWS_PER_STATEMENT_CHOICES = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Results of the calls (a value or a GenieError each), the changed keys, and the revision after."""

    outcomes: list[object]
    changed_keys: list[bytes]
    revision: int


class SqliteFile:
    """Only for the thread that opened it. Callers use `run_group`; the other methods are for the calls it
    runs."""

    def __init__(self, path: Path, *, lock: FileLock, history_revisions: int) -> None:
        self.path = path
        self._lock = lock
        self._history_revisions = history_revisions
        self._database: sqlite3.Connection
        self._history: RevisionHistory
        self._revision = 0
        self._changes_by_revision: list[Sequence[KeyChange]] = []
        """Changes of the last transaction, one entry per revision."""
        self._snapshot: SqliteSnapshot | None = None

    @classmethod
    def open(cls, path: Path, *, history_revisions: int, size_bytes_max: int) -> SqliteFile:
        """Raises StoreUnavailableError if another process has it, StoreCorruptError, StoreVersionError."""
        lock = acquire_store_file_lock(path.with_name(path.name + ".lock"))
        try:
            make_private_file(path)
            file = cls(path, lock=lock, history_revisions=history_revisions)
            file._open_database(size_bytes_max)
        except BaseException:
            lock.release()
            raise
        return file

    def close(self) -> None:
        self._database.close()
        self._lock.release()

    def run_group(self, calls: Sequence[FileCall]) -> GroupResult:
        """Runs all calls in one transaction with one sync. If that fails, runs each one separately, so that
        reads still work on a full disk and one large write does not fail small ones."""
        changed: list[Sequence[KeyChange]] = []
        outcomes: list[object] = []
        try:
            outcomes = self._run_transaction(calls)
            changed += self._changes_by_revision
        except Exception:
            if len(calls) > 1:
                log.info(
                    "store %s: a group of %d requests failed, running each separately", self.path, len(calls)
                )
            for call in calls:
                outcomes.append(self._run_call_in_own_transaction(call))
                changed += self._changes_by_revision
        return GroupResult(outcomes, [key for changes in changed for key, _ in changes], self._revision)

    def get(self, key: str) -> KeyValue | None:
        row = self._database.execute(
            "SELECT key, value, create_rev, mod_rev, lease FROM kv WHERE key = ?", (encode_key(key),)
        ).fetchone()
        return None if row is None else self._to_key_value(row)

    def range(self, prefix: str, *, start_after: str, limit: int) -> RangeResult:
        first, end = key_range(prefix, start_after=start_after)
        rows = self._database.execute(
            "SELECT key, value, create_rev, mod_rev, lease FROM kv"
            " WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
            (first, end, limit + 1),
        )
        items: list[KeyValue] = []
        remaining_bytes = RANGE_BYTES_MAX
        for row in rows:
            if len(items) == limit or remaining_bytes <= 0:
                rows.close()
                return RangeResult(tuple(items), self._revision, more=True)
            items.append(self._to_key_value(row))
            remaining_bytes -= len(row[1])
        return RangeResult(tuple(items), self._revision, more=False)

    def commit(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        *,
        lost_leases: frozenset[int] = frozenset(),
    ) -> TxnResult:
        """`lost_leases` have expired, although their keys may not be deleted yet."""
        if not self._compares_succeed(compares):
            return TxnResult(succeeded=False, revision=self._revision)
        for lease_id in {op.lease_id for op in operations if isinstance(op, Put) and op.lease_id}:
            if lease_id in lost_leases or not self._has_lease(lease_id):
                raise LeaseLostError(f"lease {lease_id} has expired or was revoked", hint="grant a new one")
        revision = self._revision + 1
        keyed = [(encode_key(op.key), op) for op in operations]
        deleted = self._delete_existing_keys([key for key, op in keyed if isinstance(op, Delete)])
        self._put_rows([(key, op.value, op.lease_id) for key, op in keyed if isinstance(op, Put)], revision)
        changes = [
            (key, op.value if isinstance(op, Put) else None)
            for key, op in keyed
            if isinstance(op, Put) or key in deleted
        ]
        if changes:
            self._record_revision(revision, changes)
        return TxnResult(succeeded=True, revision=self._revision)

    def grant_lease(self) -> int:
        lease_id = self._database.execute("INSERT INTO lease DEFAULT VALUES").lastrowid
        assert lease_id is not None
        return lease_id

    def revoke_lease(self, lease_id: int) -> None:
        self._database.execute("DELETE FROM lease WHERE id = ?", (lease_id,))
        self._delete_keys_where("lease = ? AND lease != 0", (lease_id,))

    def read_history(self, key_range: tuple[bytes, bytes], position: HistoryPosition) -> HistoryPage:
        return self._history.read_page(key_range, position)

    def compact(self, revision: int) -> None:
        self._history.compact(revision)

    def begin_snapshot(self, owner: object) -> int:
        """Begins the only snapshot and returns its revision. `owner` identifies the caller."""
        if self._snapshot is not None and self._snapshot.owner is not owner:
            raise StoreUnavailableError(
                f"another backup of the store {self.path} is running", hint="try again when it has finished"
            )
        self._snapshot = SqliteSnapshot(self._database, owner=owner, revision=self._revision)
        return self._revision

    def read_snapshot(self, *, start_after: str) -> tuple[KeyValue, ...]:
        assert self._snapshot is not None, "no snapshot was begun"
        return tuple(self._to_key_value((*row, 0)) for row in self._snapshot.read_page(start_after.encode()))

    def end_snapshot(self, owner: object) -> None:
        if self._snapshot is not None and self._snapshot.owner is owner:
            self._snapshot.close()
            self._snapshot = None

    def measure_space(self) -> SpaceUsage:
        page_bytes = self._execute_pragma("page_size")
        used_pages = self._execute_pragma("page_count") - self._execute_pragma("freelist_count")
        return SpaceUsage(
            used_pages * page_bytes, self._execute_pragma("max_page_count") * page_bytes, self._revision
        )

    # -- opening ------------------------------------------------------------------------------

    def _open_database(self, size_bytes_max: int) -> None:
        try:
            # mode=rw: the file exists, with the right permissions.
            uri = f"file:{quote(str(self.path))}?mode=rw"
            self._database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=0)
        except sqlite3.Error as error:
            raise self._to_store_error(error) from error
        try:
            self._check_is_genie_store()
            self._set_pragmas(size_bytes_max)
            self._create_or_migrate_schema()
            self._revoke_leases_of_last_process()
        except sqlite3.Error as error:
            self._database.close()
            raise self._to_store_error(error) from error
        except BaseException:
            self._database.close()
            raise

    def _check_is_genie_store(self) -> None:
        """Checks, before any change, that the file is a Genie store, undamaged and of a known format."""
        self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
        if self._is_new_file():
            return
        if self._execute_pragma("application_id") != SQLITE_APPLICATION_ID:
            raise self._corrupt_file_error("it is an SQLite file of another program")
        found = self._execute_pragma("quick_check(1)")
        if found != "ok":
            raise self._corrupt_file_error(str(found))
        file_format = self._get_meta_value("format")
        if file_format > FILE_FORMAT:
            raise StoreVersionError(
                f"the store file {self.path} has format {file_format}; this Genie supports up to "
                f"{FILE_FORMAT}",
                hint="install the newer Genie that wrote it, or use another state directory",
            )

    def _set_pragmas(self, size_bytes_max: int) -> None:
        if self._execute_pragma("journal_mode = WAL") != "wal":
            raise StoreUnavailableError(f"the file system of {self.path} does not support a write-ahead log")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute(f"PRAGMA journal_size_limit = {64 * 1024 * 1024}")
        self._database.execute(f"PRAGMA wal_autocheckpoint = {WAL_CHECKPOINT_PAGES}")
        self._database.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        page_bytes = self._execute_pragma("page_size")
        self._database.execute(f"PRAGMA max_page_count = {max(1, size_bytes_max // page_bytes)}")

    def _create_or_migrate_schema(self) -> None:
        """Also reads the revision, and begins the history with it."""
        is_new = self._is_new_file()
        if is_new:
            self._create_schema()
        elif self._get_meta_value("format") == 1:
            self._migrate_format_1()
        self._revision = self._get_meta_value("revision")
        known = 0 if is_new else self._revision
        self._history = RevisionHistory(revision=known, revisions_max=self._history_revisions)
        if is_new:
            self._history.append_revision(())  # the first revision changed nothing

    def _revoke_leases_of_last_process(self) -> None:
        (cleared,) = self._run_transaction([SqliteFile._revoke_all_leases])
        if isinstance(cleared, GenieError):
            raise cleared

    def _is_new_file(self) -> bool:
        # Not "has no pages": a kill between switching to WAL and creating the schema leaves a page.
        return self._database.execute("SELECT 1 FROM sqlite_master").fetchone() is None

    def _create_schema(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            self._database.execute(statement)
        first_rows = [("format", FILE_FORMAT), ("revision", 1)]
        self._database.executemany("INSERT INTO meta VALUES (?, ?)", first_rows)
        self._database.execute(f"PRAGMA application_id = {SQLITE_APPLICATION_ID}")
        self._database.execute("COMMIT")

    def _migrate_format_1(self) -> None:
        """Migrates a file of format 1, which stored the history in a table."""
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute("DROP TABLE history")
        self._database.execute("DELETE FROM meta WHERE name = 'compacted'")
        self._set_meta_value("format", FILE_FORMAT)
        self._database.execute("COMMIT")

    def _revoke_all_leases(self) -> None:
        self._database.execute("DELETE FROM lease")
        self._delete_keys_where("lease != 0", ())

    # -- transactions -------------------------------------------------------------------------

    def _run_transaction(self, calls: Sequence[FileCall]) -> list[object]:
        """Runs the calls and commits; returns their outcomes. Raises StoreError, with nothing changed."""
        before = self._revision
        self._changes_by_revision = []
        try:
            self._database.execute("BEGIN IMMEDIATE")
            outcomes = [self._run_call_or_get_error(call) for call in calls]
            if self._revision != before:
                self._set_meta_value("revision", self._revision)
            self._database.execute("COMMIT")
        except BaseException as error:
            self._revision = before
            self._changes_by_revision = []
            self._roll_back()
            if isinstance(error, sqlite3.Error):
                raise self._to_store_error(error) from error
            raise
        for changes in self._changes_by_revision:
            self._history.append_revision(changes)
        return outcomes

    def _run_call_or_get_error(self, call: FileCall) -> object:
        # Calls raise GenieError only before they change anything, so the others can proceed.
        try:
            return call(self)
        except GenieError as error:
            return error

    def _run_call_in_own_transaction(self, call: FileCall) -> object:
        try:
            return self._run_transaction([call])[0]
        except GenieError as error:
            return error
        except Exception as error:
            # A request boundary: a bug in one call must not end the thread that serves all.
            log.exception("store %s: a request failed", self.path)
            return StoreError(f"internal error in the store: {error!r}", hint="see the log")

    def _roll_back(self) -> None:
        # SQLite rolls back automatically after some errors, such as a full disk.
        if not self._database.in_transaction:
            return
        try:
            self._database.execute("ROLLBACK")
        except sqlite3.Error:
            log.exception("store %s: rollback failed", self.path)

    # -- rows ---------------------------------------------------------------------------------

    def _compares_succeed(self, compares: Sequence[Compare]) -> bool:
        absent = [encode_key(compare.key) for compare in compares if compare.revision == 0]
        if self._existing_keys(absent):
            return False
        for column in ("create", "mod"):
            pairs = [
                (encode_key(compare.key), compare.revision)
                for compare in compares
                if compare.field == column and compare.revision > 0
            ]
            for batch in _split_into_statement_batches(pairs):
                # Counted in SQL: fetching each row would release and reacquire the GIL.
                row = self._database.execute(
                    f"WITH wanted (key, rev) AS (VALUES {_sql_row_placeholders(len(batch), 2)})"  # noqa: S608
                    " SELECT count(*) FROM wanted CROSS JOIN kv"
                    f" WHERE kv.key = wanted.key AND kv.{column}_rev = wanted.rev",
                    list(chain.from_iterable(batch)),
                ).fetchone()
                if row[0] != len(batch):
                    return False
        return True

    def _existing_keys(self, keys: Sequence[bytes]) -> set[bytes]:
        """Returns those of `keys` that exist."""
        found: set[bytes] = set()
        for batch in _split_into_statement_batches(keys):
            placeholders = _sql_placeholders(len(batch))
            row = self._database.execute(
                f"SELECT group_concat(hex(key)) FROM kv WHERE key IN {placeholders}",  # noqa: S608
                batch,
            ).fetchone()
            found.update(bytes.fromhex(key) for key in (row[0] or "").split(",") if key)
        return found

    def _has_lease(self, lease_id: int) -> bool:
        return self._database.execute("SELECT 1 FROM lease WHERE id = ?", (lease_id,)).fetchone() is not None

    def _put_rows(self, rows: Sequence[tuple[bytes, bytes, int]], revision: int) -> None:
        if self._snapshot is not None:
            self._snapshot.preserve_rows([key for key, _, _ in rows])
        for batch in _split_into_statement_batches(rows):
            values = [(key, value, revision, revision, lease_id) for key, value, lease_id in batch]
            self._database.execute(
                f"INSERT INTO kv VALUES {_sql_row_placeholders(len(batch), 5)} ON CONFLICT (key) DO UPDATE"  # noqa: S608
                " SET value = excluded.value, mod_rev = excluded.mod_rev, lease = excluded.lease",
                list(chain.from_iterable(values)),
            )

    def _delete_existing_keys(self, keys: Sequence[bytes]) -> set[bytes]:
        """Deletes `keys`; returns those that existed."""
        if self._snapshot is not None:
            self._snapshot.preserve_rows(keys)
        deleted = self._existing_keys(keys)
        for batch in _split_into_statement_batches(keys):
            self._database.execute(f"DELETE FROM kv WHERE key IN {_sql_placeholders(len(batch))}", batch)  # noqa: S608
        return deleted

    def _delete_keys_where(self, condition: str, values: tuple[int, ...]) -> None:
        """Deletes matching keys at one revision. `condition` is always a constant of this file."""
        keys = self._database.execute(f"SELECT key FROM kv WHERE {condition} ORDER BY key", values).fetchall()  # noqa: S608
        if not keys:
            return
        revision = self._revision + 1
        self._delete_existing_keys([key for (key,) in keys])
        self._record_revision(revision, [(key, None) for (key,) in keys])

    def _record_revision(self, revision: int, changes: Sequence[KeyChange]) -> None:
        """The revision is written to the file once per transaction, in _run_transaction."""
        self._changes_by_revision.append(changes)
        self._revision = revision

    def _set_meta_value(self, name: str, value: int) -> None:
        self._database.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))

    def _get_meta_value(self, name: str) -> int:
        row = self._database.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if row is None or not isinstance(row[0], int):
            raise self._corrupt_file_error(f"the row {name!r} of its meta table is missing")
        return row[0]

    def _to_key_value(self, row: tuple[bytes, bytes, int, int, int]) -> KeyValue:
        key, value, create_revision, mod_revision, lease_id = row
        return KeyValue(self._decode_key(key), value, create_revision, mod_revision, lease_id)

    def _decode_key(self, key: bytes) -> str:
        try:
            return key.decode()
        except UnicodeDecodeError as error:
            raise self._corrupt_file_error(f"a key is not UTF-8: {error}") from error

    def _execute_pragma(self, text: str) -> Any:  # Any: the type depends on the pragma
        row = self._database.execute(f"PRAGMA {text}").fetchone()
        return None if row is None else row[0]

    def _corrupt_file_error(self, problem: str) -> StoreCorruptError:
        return StoreCorruptError(
            f"the store file {self.path} is damaged: {problem}",
            hint="stop the controller, restore a backup of the file (without an old -wal file), "
            "or try `sqlite3 FILE .recover`; move the file away to start with an empty store",
        )

    def _to_store_error(self, error: sqlite3.Error) -> StoreError:
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
        name = getattr(error, "sqlite_errorname", "no SQLite code")
        if primary == sqlite3.SQLITE_FULL:
            return StoreFullError(
                f"no space left for the store file {self.path}; nothing was changed",
                hint="free space on its disk; the store then continues without a restart",
            )
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self._corrupt_file_error(str(error))
        return StoreUnavailableError(f"could not access the store file {self.path}: {error} ({name})")


def _split_into_statement_batches(rows: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Splits rows into batches of a few fixed sizes, so that each statement is compiled once."""
    start = 0
    for size in _ROWS_PER_STATEMENT_CHOICES:
        while len(rows) - start >= size:
            yield rows[start : start + size]
            start += size


@cache
def _sql_placeholders(count: int) -> str:
    return "(" + ", ".join("?" * count) + ")"


@cache
def _sql_row_placeholders(count: int, columns: int) -> str:
    return ", ".join([_sql_placeholders(columns)] * count)
