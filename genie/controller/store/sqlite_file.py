"""The SQLite file under SqliteStore: schema and transactions. Plain blocking code for one thread.

    meta(name, value)      format, revision
    kv(key, value, …)      what stands now
    lease(id)              leases of the process that has the file open

Write-ahead log with a full sync at every commit: what `run` returned survives a kill and a
power cut. One process at a time: an flock on `<path>.lock`, and SQLite's own exclusive mode,
which also keeps the log's index in memory instead of in a third file. Not for: queues,
deadlines and lease timers (sqlite.py), changes for watches (history.py).
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

from genie.controller.store.file_lock import make_private_file, take_lock
from genie.controller.store.history import Change, History, HistoryPage, HistoryPosition
from genie.controller.store.limits import encode_key, key_span
from genie.controller.store.protocol import (
    RANGE_BYTES_MAX,
    Compare,
    Delete,
    KeyValue,
    Put,
    RangeResult,
    TxnResult,
)
from genie.errors import (
    GenieError,
    LeaseLostError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
)
from genie.runtime.files import FileLock

log = logging.getLogger(__name__)

FORMAT = 2
APPLICATION_ID = 0x47454E45
# A page that changes often is copied from the log once for all of that: 32 MiB of 4 KiB pages.
CHECKPOINT_PAGES = 8192
CACHE_KIB = 32 * 1024

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE kv (
    key BLOB PRIMARY KEY, value BLOB NOT NULL,
    create_rev INTEGER NOT NULL, mod_rev INTEGER NOT NULL, lease INTEGER NOT NULL
);
CREATE INDEX kv_lease ON kv (lease) WHERE lease != 0;
CREATE TABLE lease (id INTEGER PRIMARY KEY AUTOINCREMENT);
"""

Work = Callable[["SqliteFile"], object]
_Item = TypeVar("_Item")

# Rows in one statement. The thread lets the program go on at each, and then has to wait for its turn.
_PART_SIZES = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of the works: a value or a GenieError each, the keys that changed, the revision after."""

    outcomes: list[object]
    changed: list[bytes]
    revision: int


class SqliteFile:
    """Only the thread that opened it may call it. `run` is the door; the works call the rest."""

    def __init__(self, path: Path, *, lock: FileLock, history_revisions: int) -> None:
        self.path = path
        self._lock = lock
        self._history_revisions = history_revisions
        self._db: sqlite3.Connection
        self._history: History
        self._revision = 0
        self._changed: list[Sequence[Change]] = []
        """By the last transaction, revision by revision."""

    @classmethod
    def open(cls, path: Path, *, history_revisions: int, size_bytes_max: int) -> SqliteFile:
        """StoreUnavailableError when another process has it, StoreCorruptError, StoreVersionError."""
        lock = take_lock(path.with_name(path.name + ".lock"))
        try:
            make_private_file(path)
            file = cls(path, lock=lock, history_revisions=history_revisions)
            file._connect(size_bytes_max)
        except BaseException:
            lock.release()
            raise
        return file

    def close(self) -> None:
        self._db.close()
        self._lock.release()

    def run(self, works: Sequence[Work]) -> Ran:
        """All in one transaction and one sync. If that fails, each alone, so that each has its own answer:
        a read still works on a full disk, and one large write does not take small ones with it."""
        changed: list[Sequence[Change]] = []
        outcomes: list[object] = []
        try:
            outcomes = self._transact(works)
            changed += self._changed
        except Exception:
            if len(works) > 1:
                log.info("store %s: a group of %d failed, running each alone", self.path, len(works))
            for work in works:
                outcomes.append(self._alone(work))
                changed += self._changed
        return Ran(outcomes, [key for changes in changed for key, _ in changes], self._revision)

    def get(self, key: str) -> KeyValue | None:
        row = self._db.execute(
            "SELECT key, value, create_rev, mod_rev, lease FROM kv WHERE key = ?", (encode_key(key),)
        ).fetchone()
        return None if row is None else self._key_value(row)

    def range(self, prefix: str, *, start_after: str, limit: int) -> RangeResult:
        first, end = key_span(prefix, start_after=start_after)
        rows = self._db.execute(
            "SELECT key, value, create_rev, mod_rev, lease FROM kv"
            " WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
            (first, end, limit + 1),
        )
        items: list[KeyValue] = []
        left_bytes = RANGE_BYTES_MAX
        for row in rows:
            if len(items) == limit or left_bytes <= 0:
                rows.close()
                return RangeResult(tuple(items), self._revision, more=True)
            items.append(self._key_value(row))
            left_bytes -= len(row[1])
        return RangeResult(tuple(items), self._revision, more=False)

    def commit(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Put | Delete],
        *,
        lost_leases: frozenset[int] = frozenset(),
    ) -> TxnResult:
        """`lost_leases` are over by the clock though their keys may still stand."""
        if not self._hold(compares):
            return TxnResult(succeeded=False, revision=self._revision)
        for lease_id in {op.lease_id for op in operations if isinstance(op, Put) and op.lease_id}:
            if lease_id in lost_leases or not self._has_lease(lease_id):
                raise LeaseLostError(f"lease {lease_id} has expired or was revoked", hint="grant a new one")
        revision = self._revision + 1
        keyed = [(encode_key(op.key), op) for op in operations]
        gone = self._delete([key for key, op in keyed if isinstance(op, Delete)])
        self._put([(key, op.value, op.lease_id) for key, op in keyed if isinstance(op, Put)], revision)
        changes = [
            (key, op.value if isinstance(op, Put) else None)
            for key, op in keyed
            if isinstance(op, Put) or key in gone
        ]
        if changes:
            self._record(revision, changes)
        return TxnResult(succeeded=True, revision=self._revision)

    def grant_lease(self) -> int:
        lease_id = self._db.execute("INSERT INTO lease DEFAULT VALUES").lastrowid
        assert lease_id is not None
        return lease_id

    def revoke_lease(self, lease_id: int) -> None:
        self._db.execute("DELETE FROM lease WHERE id = ?", (lease_id,))
        self._delete_keys("lease = ? AND lease != 0", (lease_id,))

    def history(self, span: tuple[bytes, bytes], position: HistoryPosition) -> HistoryPage:
        return self._history.page(span, position)

    def compact(self, revision: int) -> None:
        self._history.compact(revision)

    # -- opening ------------------------------------------------------------------------------

    def _connect(self, size_bytes_max: int) -> None:
        try:
            # mode=rw: the file is there by now, with the right permissions.
            uri = f"file:{quote(str(self.path))}?mode=rw"
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=0)
        except sqlite3.Error as error:
            raise self._translate(error) from error
        try:
            self._check_identity()
            self._prepare(size_bytes_max)
        except sqlite3.Error as error:
            self._db.close()
            raise self._translate(error) from error
        except BaseException:
            self._db.close()
            raise

    def _check_identity(self) -> None:
        """Before anything is changed: is it ours, is it whole, and can this program read it?"""
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        if self._is_new():
            return
        if self._pragma("application_id") != APPLICATION_ID:
            raise self._corrupt("it is a SQLite file of another program")
        found = self._pragma("quick_check(1)")
        if found != "ok":
            raise self._corrupt(str(found))
        file_format = self._meta("format")
        if file_format > FORMAT:
            raise StoreVersionError(
                f"the store file {self.path} has format {file_format}; this Genie reads up to {FORMAT}",
                hint="install the newer Genie that wrote it, or give another state directory",
            )

    def _prepare(self, size_bytes_max: int) -> None:
        if self._pragma("journal_mode = WAL") != "wal":
            raise StoreUnavailableError(f"the file system under {self.path} does not allow a write-ahead log")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(f"PRAGMA journal_size_limit = {64 * 1024 * 1024}")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        self._db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        page_bytes = self._pragma("page_size")
        self._db.execute(f"PRAGMA max_page_count = {max(1, size_bytes_max // page_bytes)}")
        is_new = self._is_new()
        if is_new:
            self._make_schema()
        elif self._meta("format") == 1:
            self._drop_stored_history()
        self._revision = self._meta("revision")
        known = 0 if is_new else self._revision
        self._history = History(revision=known, revisions_max=self._history_revisions)
        if is_new:
            self._history.add(())  # the first revision changed nothing
        # Their holders died with the process that had the file open.
        (cleared,) = self._transact([SqliteFile._revoke_all])
        if isinstance(cleared, GenieError):
            raise cleared

    def _is_new(self) -> bool:
        # Not "has no pages": a kill between the switch to the log and the schema leaves a page.
        return self._db.execute("SELECT 1 FROM sqlite_master").fetchone() is None

    def _make_schema(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            self._db.execute(statement)
        first_rows = [("format", FORMAT), ("revision", 1)]
        self._db.executemany("INSERT INTO meta VALUES (?, ?)", first_rows)
        self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self._db.execute("COMMIT")

    def _drop_stored_history(self) -> None:
        """Files of format 1 had their changes in a table."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("DROP TABLE history")
        self._db.execute("DELETE FROM meta WHERE name = 'compacted'")
        self._set_meta("format", FORMAT)
        self._db.execute("COMMIT")

    def _revoke_all(self) -> None:
        self._db.execute("DELETE FROM lease")
        self._delete_keys("lease != 0", ())

    # -- transactions -------------------------------------------------------------------------

    def _transact(self, works: Sequence[Work]) -> list[object]:
        """Outcomes after the commit. StoreError when SQLite failed; then nothing has changed."""
        before = self._revision
        self._changed = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            outcomes = [self._attempt(work) for work in works]
            if self._revision != before:
                self._set_meta("revision", self._revision)
            self._db.execute("COMMIT")
        except BaseException as error:
            self._revision = before
            self._changed = []
            self._roll_back()
            if isinstance(error, sqlite3.Error):
                raise self._translate(error) from error
            raise
        for changes in self._changed:
            self._history.add(changes)
        return outcomes

    def _attempt(self, work: Work) -> object:
        # Works raise GenieError only before they have changed anything, so the others may go on.
        try:
            return work(self)
        except GenieError as error:
            return error

    def _alone(self, work: Work) -> object:
        try:
            return self._transact([work])[0]
        except GenieError as error:
            return error
        except Exception as error:
            # A request boundary: a mistake in one work must not end the thread that serves all.
            log.exception("store %s: a work failed", self.path)
            return StoreError(f"the store failed in a way it should not: {error!r}", hint="see the log")

    def _roll_back(self) -> None:
        # SQLite rolls back by itself after some errors, a full disk among them.
        if not self._db.in_transaction:
            return
        try:
            self._db.execute("ROLLBACK")
        except sqlite3.Error:
            log.exception("store %s: rollback failed", self.path)

    # -- rows ---------------------------------------------------------------------------------

    def _hold(self, compares: Sequence[Compare]) -> bool:
        absent = [encode_key(compare.key) for compare in compares if compare.revision == 0]
        if self._standing(absent):
            return False
        for column in ("create", "mod"):
            pairs = [
                (encode_key(compare.key), compare.revision)
                for compare in compares
                if compare.field == column and compare.revision > 0
            ]
            for part in _parts(pairs):
                # Counted over there: every row that comes back here is a change of threads.
                row = self._db.execute(
                    f"WITH wanted (key, rev) AS (VALUES {_rows(len(part), 2)})"  # noqa: S608
                    " SELECT count(*) FROM wanted CROSS JOIN kv"
                    f" WHERE kv.key = wanted.key AND kv.{column}_rev = wanted.rev",
                    list(chain.from_iterable(part)),
                ).fetchone()
                if row[0] != len(part):
                    return False
        return True

    def _standing(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of these keys that there are."""
        found: set[bytes] = set()
        for part in _parts(keys):
            places = _places(len(part))
            row = self._db.execute(
                f"SELECT group_concat(hex(key)) FROM kv WHERE key IN {places}",  # noqa: S608
                part,
            ).fetchone()
            found.update(bytes.fromhex(key) for key in (row[0] or "").split(",") if key)
        return found

    def _has_lease(self, lease_id: int) -> bool:
        return self._db.execute("SELECT 1 FROM lease WHERE id = ?", (lease_id,)).fetchone() is not None

    def _put(self, rows: Sequence[tuple[bytes, bytes, int]], revision: int) -> None:
        for part in _parts(rows):
            values = [(key, value, revision, revision, lease_id) for key, value, lease_id in part]
            self._db.execute(
                f"INSERT INTO kv VALUES {_rows(len(part), 5)} ON CONFLICT (key) DO UPDATE"  # noqa: S608
                " SET value = excluded.value, mod_rev = excluded.mod_rev, lease = excluded.lease",
                list(chain.from_iterable(values)),
            )

    def _delete(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those that were there."""
        gone = self._standing(keys)
        for part in _parts(keys):
            self._db.execute(f"DELETE FROM kv WHERE key IN {_places(len(part))}", part)  # noqa: S608
        return gone

    def _delete_keys(self, condition: str, values: tuple[int, ...]) -> None:
        """All at one revision. `condition` is a constant of this file, never a caller's text."""
        keys = self._db.execute(f"SELECT key FROM kv WHERE {condition} ORDER BY key", values).fetchall()  # noqa: S608
        if not keys:
            return
        revision = self._revision + 1
        self._delete([key for (key,) in keys])
        self._record(revision, [(key, None) for (key,) in keys])

    def _record(self, revision: int, changes: Sequence[Change]) -> None:
        """The revision is written to the file once a transaction, in _transact."""
        self._changed.append(changes)
        self._revision = revision

    def _set_meta(self, name: str, value: int) -> None:
        self._db.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))

    def _meta(self, name: str) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if row is None or not isinstance(row[0], int):
            raise self._corrupt(f"the row {name!r} of its meta table is missing")
        return row[0]

    def _key_value(self, row: tuple[bytes, bytes, int, int, int]) -> KeyValue:
        key, value, create_revision, mod_revision, lease_id = row
        return KeyValue(self._decode(key), value, create_revision, mod_revision, lease_id)

    def _decode(self, key: bytes) -> str:
        try:
            return key.decode()
        except UnicodeDecodeError as error:
            raise self._corrupt(f"a key is not UTF-8: {error}") from error

    def _pragma(self, text: str) -> Any:  # Any: SQLite's pragmas return whatever they like
        row = self._db.execute(f"PRAGMA {text}").fetchone()
        return None if row is None else row[0]

    def _corrupt(self, what: str) -> StoreCorruptError:
        return StoreCorruptError(
            f"the store file {self.path} is damaged: {what}",
            hint="stop the controller, put a backup of the file (and no old -wal file) in its place, "
            "or try `sqlite3 FILE .recover`; move it away to start with an empty store",
        )

    def _translate(self, error: sqlite3.Error) -> StoreError:
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
        name = getattr(error, "sqlite_errorname", "no SQLite code")
        if primary == sqlite3.SQLITE_FULL:
            return StoreFullError(
                f"no space for the store file {self.path}; nothing was changed",
                hint="free space on its disk; the store goes on by itself",
            )
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self._corrupt(str(error))
        return StoreUnavailableError(f"the store file {self.path} does not answer: {error} ({name})")


def _parts(rows: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """All of them, in as few statements as possible. Sizes are few, so that each is compiled once."""
    start = 0
    for size in _PART_SIZES:
        while len(rows) - start >= size:
            yield rows[start : start + size]
            start += size


@cache
def _places(count: int) -> str:
    return "(" + ", ".join("?" * count) + ")"


@cache
def _rows(count: int, columns: int) -> str:
    return ", ".join([_places(columns)] * count)
