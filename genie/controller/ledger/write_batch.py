"""Writes that share one transaction: its limits, and what becomes of each write."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from genie.controller.election import LEADER_KEY
from genie.controller.ledger.tables import LedgerTable
from genie.controller.ledger.transaction import RowChange, TransactionBuilder
from genie.controller.store import Compare, Delete, Put
from genie.controller.store.limits import check_transaction_and_get_size_bytes, operation_size_bytes
from genie.controller.store.protocol import TXN_BYTES_MAX, TXN_OPS_MAX
from genie.errors import GenieError
from genie.model.fencing import revision_of_token

_log = logging.getLogger(__name__)

_BYTES_PER_CHARACTER_MAX = 4
_row_encoder = msgspec.json.Encoder()


class QueuedWrite(msgspec.Struct):
    build: TransactionBuilder[Any]  # Any: writes of every result type share one queue
    future: asyncio.Future[Any]


class BuiltWrite(msgspec.Struct):
    """A write after its build: the staged changes in order, and the result or the error."""

    write: QueuedWrite
    changes: list[RowChange]
    outcome: Any  # Any: see QueuedWrite
    failure: Exception | None = None
    rollback_callbacks: Sequence[Callable[[], None]] = ()


class WriteBatch:
    """Writes that share one transaction. A row that several of them change is written once, with its last
    value."""

    def __init__(self, token: int, ops_max: int) -> None:
        self._ops_max = ops_max
        self._leadership_compare = Compare(LEADER_KEY, revision_of_token(token), field="create")
        self._row_by_key: dict[str, tuple[LedgerTable[Any], str]] = {}
        self._operation_by_key: dict[str, Put | Delete] = {}
        self.size_bytes = check_transaction_and_get_size_bytes([self._leadership_compare], [])
        self.built_writes: list[BuiltWrite] = []

    @property
    def as_compares_and_operations(self) -> tuple[list[Compare], list[Put | Delete]]:
        compares = [Compare(key, table.revision(row_id)) for key, (table, row_id) in self._row_by_key.items()]
        return [self._leadership_compare, *compares], list(self._operation_by_key.values())

    def rows_with_operations(self) -> Iterator[tuple[LedgerTable[Any], str, Put | Delete]]:
        for key, (table, row_id) in self._row_by_key.items():
            yield table, row_id, self._operation_by_key[key]

    def try_add(self, built: BuiltWrite) -> bool:
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


def resolve_write(built: BuiltWrite) -> None:
    future = built.write.future
    if future.done():
        if built.failure is not None:
            _log.warning("a write failed after its caller was cancelled: %s", built.failure)
    elif built.failure is not None:
        future.set_exception(built.failure)
    else:
        future.set_result(built.outcome)


def fail_writes(writes: Iterable[QueuedWrite], error: Exception) -> None:
    for write in writes:
        if write.future.done():
            _log.warning("a write failed after its caller was cancelled: %s", error)
            continue
        # One copy per caller: a shared exception would collect the tracebacks of all.
        own = copy.copy(error) if isinstance(error, GenieError) else error
        own.__cause__ = None if own is error else error
        write.future.set_exception(own)


def run_rollback_callbacks(rollbacks: Sequence[Callable[[], None]]) -> None:
    for undo in reversed(rollbacks):
        undo()
