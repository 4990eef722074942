"""One transaction: changes that are committed together, on top of the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from genie.controller.ledger.tables import LedgerTable
from genie.controller.rows import ClusterRecord, Counter
from genie.errors import ReleaseSkewError
from genie.model.release import OWN_RELEASE, Release, fields_newer_than

_Row = TypeVar("_Row", bound=msgspec.Struct)
_Result = TypeVar("_Result")

_NEWER_FIELDS_NAMED_MAX = 8


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
        return table.get(row_id)

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


RowChange = tuple[LedgerTable[Any], str, Any]  # Any: rows of every table
TransactionBuilder = Callable[[Transaction], _Result]


def request_gossip_key_change(txn: Transaction, cluster: LedgerTable[ClusterRecord]) -> None:
    """Stage the request for the next key of gossip, which the leader begins later."""
    record = cluster.get("")
    if record is not None:
        txn.put(cluster, "", msgspec.structs.replace(record, is_gossip_key_change_due=True))
