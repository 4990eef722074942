"""The embedded engine: one SQLite file, one process, one writer thread.

Callers queue; the writer thread takes whatever is queued as one transaction with one sync
(group commit) and everyone in it is answered after the sync. Reads queue with the writes, so
that they see every write acknowledged before them. The queue is bounded: when it is full,
callers wait for room until their deadline.

Leases belong to the process that has the file open: their timers run here, and opening the
file revokes all that an earlier process left, because its holders died with its lock.

The blocking part is sqlite_file.py. Not for: more than one controller (etcd.py is).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from genie.controller.store.background import Background
from genie.controller.store.history import HistoryPosition
from genie.controller.store.leases import LeaseTimers
from genie.controller.store.limits import (
    check_after_revision,
    check_range_limit,
    check_transaction,
    check_ttl,
    encode_key,
    key_span,
)
from genie.controller.store.protocol import Compare, Delete, KeyValue, Put, RangeResult, TxnResult, WatchEvent
from genie.controller.store.sqlite_file import Ran, SqliteFile, Work
from genie.errors import StoreError, StoreUnavailableError
from genie.runtime.clock import Clock, SystemClock

log = logging.getLogger(__name__)

QUEUE_MAX = 512
GROUP_WORKS_MAX = 128
GROUP_BYTES_MAX = 8 * 1024 * 1024
SIZE_BYTES_MAX = 8 * 1024 * 1024 * 1024
WATCH_READ_TIMEOUT_S = 30.0
EXPIRE_RETRY_S = 1.0

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    work: Work
    answer: asyncio.Future[Any]  # Any: works of every kind share one queue
    size_bytes: int


class SqliteStore:
    """A `Store` on one file. Made by `open`; `close` gives the file back."""

    txn_ops_max = 1024

    def __init__(self, file: SqliteFile, *, thread: ThreadPoolExecutor, background: Background, clock: Clock):
        self._file = file
        self._thread = thread
        self._background = background
        self._clock = clock
        self._queue: asyncio.Queue[_Call] = asyncio.Queue(QUEUE_MAX)
        self._group: list[_Call] = []
        """What the thread has; empty while it has nothing."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._leases = LeaseTimers(clock=clock, background=background, expire=self._expire)
        self._watches: set[_Watch] = set()
        self._closing = False
        self._stopped = False
        """The thread gets nothing more but the file's close."""
        self._closed = False
        self._close_lock = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        clock: Clock | None = None,
        history_revisions: int = 10_000,
        size_bytes_max: int = SIZE_BYTES_MAX,
    ) -> SqliteStore:
        """Makes the file (0600) and its directory when they are not there.

        A watch can start at any of the last `history_revisions` since then, if those are not too large to be
        remembered. Past `size_bytes_max` writes are a StoreFullError. StoreUnavailableError when another
        process has the file open, StoreCorruptError when it is damaged, StoreVersionError when a newer Genie
        wrote it.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="genie-store")
        try:
            opening = partial(
                SqliteFile.open, path, history_revisions=history_revisions, size_bytes_max=size_bytes_max
            )
            file = await asyncio.get_running_loop().run_in_executor(thread, opening)
            background = await Background.open(f"store {path}")
        except BaseException:
            thread.shutdown(wait=True)
            raise
        return cls(file, thread=thread, background=background, clock=clock or SystemClock())

    @property
    def path(self) -> Path:
        return self._file.path

    async def range(
        self, prefix: str, *, start_after: str = "", limit: int = 1000, timeout_s: float = 5.0
    ) -> RangeResult:
        check_range_limit(limit)
        key_span(prefix, start_after=start_after)
        return await self._ask(
            lambda file: file.range(prefix, start_after=start_after, limit=limit), timeout_s=timeout_s
        )

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None:
        encode_key(key)
        return await self._ask(lambda file: file.get(key), timeout_s=timeout_s)

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float = 5.0
    ) -> TxnResult:
        compares, operations = tuple(compares), tuple(operations)
        size_bytes = check_transaction(compares, operations, ops_max=self.txn_ops_max)
        named = {op.lease_id for op in operations if isinstance(op, Put) and op.lease_id}
        lost = frozenset(lease_id for lease_id in named if self._leases.is_lost(lease_id))
        return await self._ask(
            lambda file: file.commit(compares, operations, lost_leases=lost),
            timeout_s=timeout_s,
            size_bytes=size_bytes,
        )

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = 5.0) -> int:
        check_ttl(ttl_s)
        self._leases.check_room()
        lease_id = await self._ask(SqliteFile.grant_lease, timeout_s=timeout_s)
        self._leases.start(lease_id, ttl_s=ttl_s)
        return lease_id

    async def keep_alive(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        # Time is kept in memory only: a lease does not outlive the process anyway.
        self._check_open()
        self._leases.renew(lease_id)

    async def revoke_lease(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        await self._ask(lambda file: file.revoke_lease(lease_id), timeout_s=timeout_s)
        self._leases.stop(lease_id)

    async def compact(self, revision: int, *, timeout_s: float = 5.0) -> None:
        """Forgets the changes up to `revision` at once. The store also does so by itself."""
        await self._ask(lambda file: file.compact(revision), timeout_s=timeout_s)

    @asynccontextmanager
    async def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        check_after_revision(after_revision)
        self._check_open()
        watch = _Watch(self, key_span(prefix), after_revision)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    async def close(self) -> None:
        """Answers what is queued, then gives the file back. Call again if a call was cancelled."""
        self._closing = True
        async with self._close_lock:
            if self._closed:
                return
            for watch in self._watches:
                watch.wake()
            while not self._idle.is_set():  # one that waited for room may come before this goes on
                await self._idle.wait()
            self._stopped = True
            await self._background.close()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
            self._thread.shutdown(wait=True)
            self._closed = True

    # -- the queue ----------------------------------------------------------------------------

    async def _ask(self, work: Callable[[SqliteFile], T], *, timeout_s: float, size_bytes: int = 0) -> T:
        self._check_open()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.put(_Call(work, answer, size_bytes))
                self._check_running()
                self._go_on()
                return await answer
        except TimeoutError:
            raise StoreUnavailableError(
                f"the store {self.path} did not answer within {timeout_s} s",
                hint="a write may have happened all the same: read to find out",
            ) from None

    def _check_open(self) -> None:
        if self._closing:
            raise StoreUnavailableError(f"the store {self.path} is closed")
        self._check_running()

    def _check_running(self) -> None:
        if self._stopped or self._background.is_over:
            raise StoreUnavailableError(
                f"the store {self.path} has stopped", hint="see the log for the cause"
            )

    def _go_on(self) -> None:
        """Gives the thread what is queued, unless it is busy. Not a task of its own: a busy loop comes to
        each of its tasks only after all the others, and a commit would wait for that twice more."""
        if self._group:
            return
        self._group = self._next_group()
        if not self._group:
            self._idle.set()
            return
        self._idle.clear()
        loop, works = asyncio.get_running_loop(), [call.work for call in self._group]
        self._thread.submit(lambda: loop.call_soon_threadsafe(self._settle, self._run(works)))

    def _next_group(self) -> list[_Call]:
        group: list[_Call] = []
        size_bytes = 0
        while not self._queue.empty() and len(group) < GROUP_WORKS_MAX and size_bytes <= GROUP_BYTES_MAX:
            call = self._queue.get_nowait()
            # A caller that has gone (cancelled, or past its deadline) wants nothing any more.
            if not call.answer.done():
                group.append(call)
                size_bytes += call.size_bytes
        return group

    def _run(self, works: Sequence[Work]) -> Ran | BaseException:
        """In the thread."""
        try:
            return self._file.run(works)
        # A thread boundary: whatever it is, those who wait are told and those behind them go on.
        except BaseException as error:
            log.exception("store %s: a group of %d failed", self.path, len(works))
            return error

    def _settle(self, ran: Ran | BaseException) -> None:
        group, self._group = self._group, []
        if isinstance(ran, Ran):
            self._announce(ran)
        outcomes = ran.outcomes if isinstance(ran, Ran) else [self._broken(ran) for _ in group]
        self._go_on()
        for call, outcome in zip(group, outcomes, strict=True):
            if call.answer.done():
                continue
            if isinstance(outcome, BaseException):
                call.answer.set_exception(outcome)
            else:
                call.answer.set_result(outcome)

    def _broken(self, error: BaseException) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the store {self.path} failed in a way it should not: {error!r}",
            hint="a write may have happened all the same: read to find out",
        )

    def _announce(self, ran: Ran) -> None:
        for watch in self._watches:
            watch.notice(ran)

    async def _expire(self, lease_id: int) -> None:
        """Tries until it works or the store closes: a full disk must not leave a dead lease's keys."""
        while not self._closing:
            try:
                await self._ask(lambda file: file.revoke_lease(lease_id), timeout_s=WATCH_READ_TIMEOUT_S)
                return
            except StoreError as error:
                log.warning("store %s: lease %d is over, its keys stay: %s", self.path, lease_id, error)
                await self._clock.sleep(EXPIRE_RETRY_S)


class _Watch:
    """Pulls pages of history. Nothing is buffered for a slow reader but the page it is reading: one
    that falls behind what history keeps gets CompactedError."""

    def __init__(self, store: SqliteStore, span: tuple[bytes, bytes], after_revision: int) -> None:
        self._store = store
        self._span = span
        self._next = HistoryPosition(after_revision + 1)
        self._page: deque[WatchEvent] = deque()
        self._changed = asyncio.Event()
        self._changed.set()
        self._reading = False

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._page:
            await self._changed.wait()
            await self._read()
        return self._page.popleft()

    def wake(self) -> None:
        self._changed.set()

    def notice(self, ran: Ran) -> None:
        """Wakes the reader when a key of its span changed. When none did and all before was read,
        moves on, so that history trimmed meanwhile is not missed by a watch that never needed it."""
        first, end = self._span
        if any(first <= key < end for key in ran.changed):
            self._changed.set()
        elif not self._reading and not self._changed.is_set():
            self._next = HistoryPosition(max(self._next.revision, ran.revision + 1))

    async def _read(self) -> None:
        self._changed.clear()
        self._reading = True
        span, position = self._span, self._next
        try:
            page = await self._store._ask(
                lambda file: file.history(span, position), timeout_s=WATCH_READ_TIMEOUT_S
            )
        except BaseException:
            # Whatever it was, the reader may come back, and what it waited for is still unread.
            self._changed.set()
            raise
        finally:
            self._reading = False
        self._page.extend(page.events)
        self._next = page.next
        if not page.complete:
            self._changed.set()
