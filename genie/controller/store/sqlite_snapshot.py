"""A snapshot of the embedded store at one revision, while writes continue. Blocking code for one thread.

The file has one connection in exclusive mode, so a second read transaction is not possible. Instead, a row
that was not read yet is copied to a temporary table before it is changed. That table is on disk, not in
memory, and its changes are rolled back together with those of the transaction.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Sequence
from itertools import groupby

SNAPSHOT_PAGE_ROWS_MAX = 500
SNAPSHOT_PAGE_BYTES_MAX = 4 * 1024 * 1024

SnapshotRow = tuple[bytes, bytes, int, int]
"""Key, value, create revision, revision."""


class SqliteSnapshot:
    """Created inside a transaction. Rows on a lease are not part of it.

    `owner` identifies the caller: a transaction that failed may be executed again.
    """

    def __init__(self, database: sqlite3.Connection, *, owner: object, revision: int) -> None:
        self.owner = owner
        self.revision = revision
        self._database = database
        self._last_delivered_key = b""
        """Rows up to this key have been delivered and need not be preserved."""
        database.execute(
            "CREATE TEMP TABLE IF NOT EXISTS snapshot_row"
            " (key BLOB PRIMARY KEY, value BLOB, create_rev INTEGER, mod_rev INTEGER) WITHOUT ROWID"
        )
        database.execute("DELETE FROM temp.snapshot_row")

    def preserve_rows(self, keys: Sequence[bytes]) -> None:
        """Call it before these keys are changed or deleted."""
        self._database.executemany(
            "INSERT OR IGNORE INTO temp.snapshot_row SELECT key, value, create_rev, mod_rev FROM main.kv"
            " WHERE key = ? AND mod_rev <= ? AND lease = 0",
            [(key, self.revision) for key in keys if key > self._last_delivered_key],
        )

    def read_page(self, start_after: bytes) -> list[SnapshotRow]:
        """Returns the next rows after a key, ascending; empty at the end. Rows up to that key are not read
        again."""
        self._last_delivered_key = start_after
        unchanged = self._database.execute(
            "SELECT key, value, create_rev, mod_rev FROM main.kv"
            " WHERE key > ? AND mod_rev <= ? AND lease = 0 ORDER BY key",
            (start_after, self.revision),
        )
        preserved = self._database.execute(
            "SELECT key, value, create_rev, mod_rev FROM temp.snapshot_row WHERE key > ? ORDER BY key",
            (start_after,),
        )
        page: list[SnapshotRow] = []
        size_bytes = 0
        try:
            for _, same in groupby(heapq.merge(unchanged, preserved), key=lambda row: row[0]):
                row: SnapshotRow = next(same)
                page.append(row)
                size_bytes += len(row[1])
                if len(page) == SNAPSHOT_PAGE_ROWS_MAX or size_bytes >= SNAPSHOT_PAGE_BYTES_MAX:
                    break
        finally:
            unchanged.close()
            preserved.close()
        return page

    def close(self) -> None:
        self._database.execute("DROP TABLE IF EXISTS temp.snapshot_row")
