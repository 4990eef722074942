"""The one door for writes, and the memory of everything that was written.

`write` takes a plain function: it reads the tables, stages changes and returns a value. Writes
that wait together are built one after the other, each on what those before it staged, and are
committed in one transaction that also compares the leader's token; only then do the tables show
them. That happens in `run`, so a caller that goes away cannot leave a write half done. How a
build sees what is not durable yet, and nobody else does: docs/decisions/0011-group-commit.md.
Not for: what the rows mean (jobs.py, tokens.py, agents.py, quotas.py).
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from genie.controller.election import LEADER_KEY, Election, StoreHealth
from genie.controller.store import Compare, Delete, Put, Store
from genie.controller.store.limits import check_transaction, operation_bytes
from genie.controller.store.protocol import TXN_BYTES_MAX, TXN_OPS_MAX
from genie.errors import (
    GenieError,
    NotLeaderError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from genie.model.allocation import NodeLedger
from genie.model.job import Job
from genie.model.node import NodeInfo
from genie.model.tenant import QuotaRecord, TokenRecord

_log = logging.getLogger(__name__)
_Row = TypeVar("_Row", bound=msgspec.Struct)
_Result = TypeVar("_Result")

WRITES_WAITING_MAX = 1024
# Nothing else is answered while a batch is built. With 256 the rate under load is a tenth lower.
BATCH_WRITES_MAX = 1024
_PAGE = 1000
_BYTES_PER_CHARACTER_MAX = 4
_encoder = msgspec.json.Encoder()


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it last registered, and which controllers it certainly knows of."""

    info: NodeInfo
    controllers: tuple[str, ...] = ()
    ttl_s: float = 0.0
    """The time to live that it was granted."""
    left: bool = False
    """It went in good order; it may come back."""
    drained: str = ""
    """Why the owner wants nothing new placed there; empty when he does not mind. It outlives the agent."""


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    value: int


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    cluster_id: str
    ca_pin: str


# The row's id, what was there before, and what is now; None where there is none.
Listener = Callable[[str, _Row | None, _Row | None], None]


class Table(Generic[_Row]):
    """The rows under one prefix, by id. Changed by committed transactions only."""

    def __init__(self, prefix: str, kind: type[_Row]) -> None:
        self.prefix = prefix
        self.indexes: list[Listener[_Row]] = []
        """Told of each row before the next build runs, and told the reverse before anyone else does. They
        follow the rows and do nothing else: told the reverse, they take back what they did."""
        self.on_change: list[Listener[_Row]] = []
        """Told of each row, in order, once it is durable."""
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

    def _show(self, row_id: str, row: _Row | None) -> _Row | None:
        """Puts a row in its place, and what follows from it; what stood there before. The revision is left
        as it is: it is that of the durable row."""
        before = self._rows.get(row_id)
        if row is not None:
            self._rows[row_id] = row
        elif before is not None:
            del self._rows[row_id]
        for index in self.indexes:
            index(row_id, before, row)
        return before

    def _note_revision(self, row_id: str, revision: int) -> None:
        if row_id in self._rows:
            self._revisions[row_id] = revision
        else:
            self._revisions.pop(row_id, None)


class Transaction:
    """Changes that are to happen together. Reads see the tables as they stand plus what was staged."""

    def __init__(self, counters: Table[Counter]) -> None:
        # Any: tables of every row type share one list of changes.
        self.staged: dict[str, tuple[Table[Any], str, Any]] = {}
        self.undo: list[Callable[[], None]] = []
        self._counters = counters

    def otherwise(self, undo: Callable[[], None]) -> None:
        """Called once if these changes are not committed, or if nobody knows whether they are: for a build
        that has to count on them before they are durable. It does not await and does not raise."""
        self.undo.append(undo)

    def put(self, table: Table[_Row], row_id: str, row: _Row) -> None:
        self.staged[table.prefix + row_id] = (table, row_id, row)

    def delete(self, table: Table[_Row], row_id: str) -> None:
        if row_id in table:
            self.staged[table.prefix + row_id] = (table, row_id, None)

    def get(self, table: Table[_Row], row_id: str) -> _Row | None:
        staged = self.staged.get(table.prefix + row_id)
        if staged is not None:
            row: _Row | None = staged[2]
            return row
        return table.get(row_id)

    def next_number(self, counter: str) -> int:
        """Higher than every number that this counter has given in a transaction that was committed."""
        last = self.get(self._counters, counter)
        value = 1 if last is None else last.value + 1
        self.put(self._counters, counter, Counter(value=value))
        return value


_Change = tuple[Table[Any], str, Any]  # Any: rows of every table
Build = Callable[[Transaction], _Result]


class _Write(msgspec.Struct):
    build: Build[Any]  # Any: writes of every result type share one queue
    answer: asyncio.Future[Any]


class _Built(msgspec.Struct):
    """A write after its build: what it changes, in order, and what came of it."""

    write: _Write
    changes: list[_Change]
    outcome: Any  # Any: see _Write
    failure: Exception | None = None
    undo: Sequence[Callable[[], None]] = ()


class _Batch:
    """Writes that share one transaction. A row that several of them change is written once, as the last
    of them left it."""

    def __init__(self, token: int, ops_max: int) -> None:
        self._ops_max = ops_max
        self._leader = Compare(LEADER_KEY, token, field="create")
        self._rows: dict[str, tuple[Table[Any], str]] = {}
        self._operations: dict[str, Put | Delete] = {}
        self._size_bytes = check_transaction([self._leader], [])
        self.writes: list[_Built] = []

    @property
    def transaction(self) -> tuple[list[Compare], list[Put | Delete]]:
        compares = [Compare(key, table.revision(row_id)) for key, (table, row_id) in self._rows.items()]
        return [self._leader, *compares], list(self._operations.values())

    def try_add(self, built: _Built) -> bool:
        """False when it does not fit beside those that are here. Alone it is only checked as every
        transaction is: UsageError, so that it is the bad write that fails and not its neighbours."""
        known, operations = self._operations, []
        more_bytes = more_rows = 0
        for table, row_id, row in built.changes:
            key = table.prefix + row_id
            operation = Delete(key) if row is None else Put(key, _encoder.encode(row))
            operations.append(operation)
            # Each row is compared, too.
            more_bytes += operation_bytes(operation) + len(key) * _BYTES_PER_CHARACTER_MAX
            more_rows += key not in known
        if len(operations) >= TXN_OPS_MAX or more_bytes > TXN_BYTES_MAX:
            # The leader's key is one compare more.
            check_transaction((), operations, ops_max=TXN_OPS_MAX - 1)
        # What is changed a second time is counted a second time: that is only on the safe side.
        is_full = len(known) + more_rows >= self._ops_max
        if self.writes and (is_full or self._size_bytes + more_bytes > TXN_BYTES_MAX):
            return False
        for operation, (table, row_id, _) in zip(operations, built.changes, strict=True):
            self._rows[operation.key] = (table, row_id)
            known[operation.key] = operation
        self._size_bytes += more_bytes
        self.writes.append(built)
        return True


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
        self.quotas = Table("quota/", QuotaRecord)
        self._tables: tuple[Table[Any], ...] = (
            self.cluster,
            self.counters,
            self.jobs,
            self.nodes,
            self.holds,
            self.tokens,
            self.quotas,
        )
        self._queue: deque[_Write] = deque()
        """At most WRITES_WAITING_MAX; beyond that callers wait for room."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Asked for once: Python makes a system call of it."""
        self._has_work = asyncio.Event()
        self._has_room = asyncio.Event()
        self._taken: deque[_Write] = deque()
        """Off the queue and not yet in a transaction; at most BATCH_WRITES_MAX."""
        self._uncertain = False
        self._reading_or_writing = asyncio.Lock()
        """A write that is committed while everything is read would be overwritten in memory."""
        self.is_loaded = False
        self.loads = 0
        """How often all tables were read."""
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
        self.loads += 1
        for told in self.on_load:
            told()

    @property
    def is_current(self) -> bool:
        """Whether nobody else can have written since it was read."""
        return self.is_loaded and self._election.is_leading

    def forget(self) -> None:
        """Another controller leads: what is in memory here grows stale."""
        self.is_loaded = False

    async def write(self, build: Build[_Result]) -> _Result:
        """The result of `build` once its changes are durable. What it raises, nothing having changed,
        comes out here; so do StoreError and NotLeaderError.

        `build` must not await, and may be called again when its changes were not committed.
        """
        if len(self._queue) >= WRITES_WAITING_MAX:
            await self._wait_room()
        return await self._begin(build)

    async def write_each(self, builds: Iterable[Build[_Result]]) -> list[_Result | BaseException]:
        """What came of each, as `write` would have it, when all are answered. They go together where they
        fit, and one that fails takes no other with it unless they shared a transaction."""
        answers: list[asyncio.Future[_Result]] = []
        try:
            for build in builds:
                if len(self._queue) >= WRITES_WAITING_MAX:
                    await self._wait_room()
                answers.append(self._begin(build))
            outcomes: list[_Result | BaseException] = []
            for answer in answers:
                # Mostly all are answered at once, so that only the first is really waited for.
                try:
                    outcomes.append(await answer)
                except Exception as error:
                    outcomes.append(error)
            return outcomes
        finally:
            for answer in answers:
                if not answer.cancel() and not answer.cancelled():
                    answer.exception()  # nobody else will ask

    async def _wait_room(self) -> None:
        while len(self._queue) >= WRITES_WAITING_MAX:
            self._has_room.clear()
            await self._has_room.wait()

    def _begin(self, build: Build[_Result]) -> asyncio.Future[_Result]:
        self._election.require_token()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Result] = self._loop.create_future()
        self._queue.append(_Write(build, answer))
        self._has_work.set()
        return answer

    async def run(self) -> None:
        """Carries out writes until cancelled; those still waiting then are told."""
        try:
            while True:
                # What waits now goes together; nothing is waited for to make a batch larger.
                while self._queue and len(self._taken) < BATCH_WRITES_MAX:
                    self._taken.append(self._queue.popleft())
                self._has_room.set()
                if self._taken:
                    await self._carry_out()
                else:
                    self._has_work.clear()
                    await self._has_work.wait()
        finally:
            _refuse([*self._taken, *self._queue], _stopping())
            self._taken.clear()
            self._queue.clear()

    async def _carry_out(self) -> None:
        """One transaction of as many as fit; those left over stay in `_taken`."""
        batch: _Batch | None = None
        try:
            async with self._reading_or_writing:
                token = self._election.require_token()
                if self._uncertain:
                    await self._load()
                batch = _Batch(token, self._store.txn_ops_max)
                self._build(batch)
                await self._commit(batch)
        except asyncio.CancelledError:
            _refuse(self._asked(batch), _stopping())
            raise
        # A request boundary: whatever goes wrong belongs to those who asked, who log it.
        except Exception as error:
            _refuse(self._asked(batch), error)
            return
        for built in batch.writes:
            _answer(built)

    def _asked(self, batch: _Batch | None) -> list[_Write]:
        """The writes of a transaction that failed, or all that waited when it did not come to one."""
        if batch is not None:
            for built in reversed(batch.writes):
                _undo(built.undo)
            return [built.write for built in batch.writes]
        asked = list(self._taken)
        self._taken.clear()
        return asked

    def _build(self, batch: _Batch) -> None:
        """Fills the batch. In here, and nowhere else, the tables show what is not durable: nothing awaits
        before it is taken back, so only the builds can see it."""
        shown: list[_Change] = []
        try:
            while self._taken:
                write = self._taken.popleft()
                if write.answer.done():
                    continue
                built = self._built(write, batch)
                if built is None:
                    self._taken.appendleft(write)
                    return
                if self._taken:
                    for table, row_id, row in built.changes:
                        shown.append((table, row_id, table._show(row_id, row)))
        finally:
            for table, row_id, before in reversed(shown):
                table._show(row_id, before)

    def _built(self, write: _Write, batch: _Batch) -> _Built | None:
        """What came of the build, added to the batch; None when it does not fit."""
        transaction = Transaction(self.counters)
        try:
            outcome = write.build(transaction)
            built = _Built(write, list(transaction.staged.values()), outcome, None, transaction.undo)
            if batch.try_add(built):
                return built
            _undo(transaction.undo)
            return None
        # A request boundary. It is answered with the others: it may have failed because of what they staged.
        except Exception as error:
            _undo(transaction.undo)
            built = _Built(write, [], None, error)
            batch.writes.append(built)
            return built

    async def _commit(self, batch: _Batch) -> None:
        compares, operations = batch.transaction
        if not operations:
            return
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
        # All of it first: whoever is told finds the tables as they are from now on.
        changes = [change for built in batch.writes for change in built.changes]
        befores = [table._show(row_id, row) for table, row_id, row in changes]
        for table, row_id, _ in changes:
            table._note_revision(row_id, result.revision)
        for (table, row_id, row), before in zip(changes, befores, strict=True):
            for told in table.on_change:
                told(row_id, before, row)

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


def _undo(several: Sequence[Callable[[], None]]) -> None:
    for undo in reversed(several):
        undo()


def _answer(built: _Built) -> None:
    answer = built.write.answer
    if answer.done():
        if built.failure is not None:
            _log.warning("a write failed after its caller had gone: %s", built.failure)
    elif built.failure is not None:
        answer.set_exception(built.failure)
    else:
        answer.set_result(built.outcome)


def _refuse(writes: Iterable[_Write], error: Exception) -> None:
    for write in writes:
        if write.answer.done():
            _log.warning("a write failed after its caller had gone: %s", error)
            continue
        # Each its own: an error that several raise would collect the tracebacks of all.
        own = copy.copy(error) if isinstance(error, GenieError) else error
        own.__cause__ = None if own is error else error
        write.answer.set_exception(own)


def _stopping() -> StoreUnavailableError:
    return StoreUnavailableError(
        "the controller is stopping; the change may or may not have been made", hint="ask again"
    )
