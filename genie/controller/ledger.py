"""The one door for writes, and the memory of everything that was written.

`write` takes a plain function: it reads the tables, stages changes and returns a value; then all
of its changes are committed in one transaction that also compares the leader's token, and only
then do the tables show them. Writes run one after the other in `run`, so a caller that goes
away cannot leave one half done. Not for: what the rows mean (jobs.py, tokens.py, agents.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, ItemsView, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from genie.controller.election import LEADER_KEY, Election, StoreHealth
from genie.controller.store import Compare, Delete, Put, Store
from genie.errors import NotLeaderError, StoreCorruptError, StoreError, StoreFullError, StoreUnavailableError
from genie.model.allocation import NodeLedger
from genie.model.job import Job
from genie.model.node import NodeInfo
from genie.model.tenant import TokenRecord

_log = logging.getLogger(__name__)
_Row = TypeVar("_Row", bound=msgspec.Struct)
_Result = TypeVar("_Result")

WRITES_WAITING_MAX = 1024
_PAGE = 1000


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it last registered, and which controllers it certainly knows of."""

    info: NodeInfo
    controllers: tuple[str, ...] = ()
    ttl_s: float = 0.0
    """The time to live that it was granted."""
    left: bool = False
    """It went in good order; it may come back."""


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    value: int


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    cluster_id: str
    ca_pin: str


class Table(Generic[_Row]):
    """The rows under one prefix, by id. Changed by committed transactions only."""

    def __init__(self, prefix: str, kind: type[_Row]) -> None:
        self.prefix = prefix
        self._decoder = msgspec.json.Decoder(kind)
        self._rows: dict[str, _Row] = {}
        self._revisions: dict[str, int] = {}

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

    def revision(self, row_id: str) -> int:
        return self._revisions.get(row_id, 0)

    def decoded(self, row_id: str, value: bytes) -> _Row:
        try:
            return self._decoder.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreCorruptError(
                f"store key {self.prefix + row_id!r} cannot be read: {error}",
                hint="another version of Genie may have written it",
            ) from error

    def _replace(self, rows: dict[str, tuple[_Row, int]]) -> None:
        self._rows = {row_id: row for row_id, (row, _) in rows.items()}
        self._revisions = {row_id: revision for row_id, (_, revision) in rows.items()}

    def _apply(self, row_id: str, row: _Row | None, revision: int) -> _Row | None:
        before = self._rows.pop(row_id, None)
        self._revisions.pop(row_id, None)
        if row is not None:
            self._rows[row_id] = row
            self._revisions[row_id] = revision
        return before


class Transaction:
    """Changes that are to happen together. Reads see the tables as they stand plus what was staged."""

    def __init__(self, counters: Table[Counter]) -> None:
        # Any: tables of every row type share one list of changes.
        self.staged: dict[tuple[str, str], tuple[Table[Any], str, Any]] = {}
        self._counters = counters

    def put(self, table: Table[_Row], row_id: str, row: _Row) -> None:
        self.staged[table.prefix, row_id] = (table, row_id, row)

    def delete(self, table: Table[_Row], row_id: str) -> None:
        if row_id in table:
            self.staged[table.prefix, row_id] = (table, row_id, None)

    def get(self, table: Table[_Row], row_id: str) -> _Row | None:
        if (table.prefix, row_id) in self.staged:
            row: _Row | None = self.staged[table.prefix, row_id][2]
            return row
        return table.get(row_id)

    def next_number(self, counter: str) -> int:
        """Higher than every number that this counter has given in a transaction that was committed."""
        last = self.get(self._counters, counter)
        value = 1 if last is None else last.value + 1
        self.put(self._counters, counter, Counter(value=value))
        return value


# Any: a listener is told about rows of every type.
Listener = Callable[[Table[Any], str, Any, Any], None]


@dataclass(slots=True)
class _Write:
    build: Callable[[Transaction], Any]  # Any: writes of every result type share one queue
    answer: asyncio.Future[Any]


class Ledger:
    """`run` must be running for `write` to be answered."""

    def __init__(self, store: Store, election: Election, health: StoreHealth) -> None:
        self._store = store
        self._election = election
        self._health = health
        self.cluster = Table("cluster", ClusterRecord)
        self.counters = Table("counter/", Counter)
        self.jobs = Table("job/", Job)
        self.nodes = Table("node/", NodeRecord)
        self.holds = Table("ledger/", NodeLedger)
        self.tokens = Table("token/", TokenRecord)
        self._tables: tuple[Table[Any], ...] = (
            self.cluster,
            self.counters,
            self.jobs,
            self.nodes,
            self.holds,
            self.tokens,
        )
        self._queue: asyncio.Queue[_Write] = asyncio.Queue(WRITES_WAITING_MAX)
        self._uncertain = False
        self._reading_or_writing = asyncio.Lock()
        """A write that is committed while everything is read would be overwritten in memory."""
        self.is_loaded = False
        self.on_change: list[Listener] = []
        """Told of each committed row: table, id, before, after (None where there is none)."""
        self.on_load: list[Callable[[], None]] = []
        """Told when all tables were read anew."""

    async def load(self) -> None:
        """Reads everything. Call it as leader only: then no other controller writes meanwhile."""
        async with self._reading_or_writing:
            await self._load()

    async def _load(self) -> None:
        fresh = [await self._read(table) for table in self._tables]
        for table, rows in zip(self._tables, fresh, strict=True):
            table._replace(rows)
        self.is_loaded, self._uncertain = True, False
        for told in self.on_load:
            told()

    def forget(self) -> None:
        """Another controller leads: what is in memory here grows stale."""
        self.is_loaded = False

    async def write(self, build: Callable[[Transaction], _Result]) -> _Result:
        """The result of `build` once its changes are durable. What it raises, nothing having changed,
        comes out here; so do StoreError and NotLeaderError."""
        self._election.require_token()
        answer: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        await self._queue.put(_Write(build, answer))
        return await answer

    async def run(self) -> None:
        """Carries out writes until cancelled; those still waiting then are told."""
        try:
            while True:
                write = await self._queue.get()
                if not write.answer.done():
                    await self._carry_out(write)
        finally:
            while not self._queue.empty():
                write = self._queue.get_nowait()
                if not write.answer.done():
                    write.answer.set_exception(_stopping())

    async def _carry_out(self, write: _Write) -> None:
        try:
            async with self._reading_or_writing:
                result = await self._done(write)
        except asyncio.CancelledError:
            if not write.answer.done():
                write.answer.set_exception(_stopping())
            raise
        # A request boundary: whatever goes wrong belongs to the one who asked, who logs it.
        except Exception as error:
            if not write.answer.done():
                write.answer.set_exception(error)
            else:
                _log.warning("a write failed after its caller had gone: %s", error)
            return
        if not write.answer.done():
            write.answer.set_result(result)

    async def _done(self, write: _Write) -> Any:  # Any: see _Write
        token = self._election.require_token()
        if self._uncertain:
            await self._load()
        transaction = Transaction(self.counters)
        result = write.build(transaction)
        if transaction.staged:
            await self._commit(transaction, token)
        return result

    async def _commit(self, transaction: Transaction, token: int) -> None:
        changes = list(transaction.staged.values())
        compares = [Compare(LEADER_KEY, token, field="create")]
        compares += [Compare(table.prefix + row_id, table.revision(row_id)) for table, row_id, _ in changes]
        operations = [
            Delete(table.prefix + row_id)
            if row is None
            else Put(table.prefix + row_id, msgspec.json.encode(row))
            for table, row_id, row in changes
        ]
        try:
            result = await self._store.commit(compares, operations)
        except StoreError as error:
            # Except on a full disk it may have happened all the same: the next write reads everything first.
            self._uncertain |= not isinstance(error, StoreFullError)
            self._health.bad(error)
            raise
        self._health.good()
        if not result.succeeded:
            self._uncertain = True
            await self._election.check()
            raise NotLeaderError(
                "the change was refused: the store holds something newer", hint="try it again"
            )
        befores = [table._apply(row_id, row, result.revision) for table, row_id, row in changes]
        for (table, row_id, row), before in zip(changes, befores, strict=True):
            for told in self.on_change:
                told(table, row_id, before, row)

    async def _read(self, table: Table[_Row]) -> dict[str, tuple[_Row, int]]:
        rows: dict[str, tuple[_Row, int]] = {}
        after, more = "", True
        while more:
            page = await self._store.range(table.prefix, start_after=after, limit=_PAGE)
            for item in page.items:
                row_id = item.key.removeprefix(table.prefix)
                rows[row_id] = (table.decoded(row_id, item.value), item.mod_revision)
                after = item.key
            more = page.more
        return rows


def _stopping() -> StoreUnavailableError:
    return StoreUnavailableError(
        "the controller is stopping; the change may or may not have been made", hint="ask again"
    )
