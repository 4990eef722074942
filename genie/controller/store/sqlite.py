"""The embedded engine: one SQLite file, one process, one writer thread.

Requests are queued. The writer thread executes all queued requests as one transaction with one
fsync (group commit); their callers get results after the fsync. Reads share the queue with
writes, so that they see every write acknowledged before them. The queue is bounded: when it is
full, callers wait until their deadline.

Leases belong to the process that has the file open: their timers run here, and opening the
file revokes leases of an earlier process, whose holders ended with it.

The blocking part is sqlite_file.py. For several controllers, use etcd.py.
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

from genie.controller.store.background import BackgroundTasks
from genie.controller.store.history import HistoryPosition
from genie.controller.store.leases import LeaseTimers
from genie.controller.store.limits import (
    check_after_revision,
    check_range_limit,
    check_transaction_and_get_size_bytes,
    check_ttl,
    encode_key,
    key_range,
)
from genie.controller.store.protocol import (
    Compare,
    Delete,
    KeyValue,
    Put,
    RangeResult,
    Snapshot,
    SpaceUsage,
    TxnResult,
    WatchEvent,
)
from genie.controller.store.sqlite_file import FileCall, GroupResult, SqliteFile
from genie.errors import StoreError, StoreUnavailableError
from genie.processes.clock import Clock, SystemClock

log = logging.getLogger(__name__)

QUEUED_REQUESTS_MAX = 512
GROUP_REQUESTS_MAX = 128
GROUP_BYTES_MAX = 8 * 1024 * 1024
STORE_FILE_BYTES_MAX = 8 * 1024 * 1024 * 1024
HISTORY_REVISIONS_MAX = 1000
"""In memory, and only for watches: the leader, the only process with this file open, needs none."""
INTERNAL_CALL_TIMEOUT_S = 30.0
LEASE_EXPIRY_RETRY_INTERVAL_S = 1.0

_Result = TypeVar("_Result")


@dataclass(slots=True)
class _QueuedCall:
    call: FileCall
    response: asyncio.Future[Any]  # Any: requests of every kind share one queue
    size_bytes: int


class SqliteStore:
    """A `Store` on one file. Created by `open`; `close` releases the file."""

    txn_ops_max = 1024

    def __init__(
        self, file: SqliteFile, *, thread: ThreadPoolExecutor, background: BackgroundTasks, clock: Clock
    ):
        self._file = file
        self._thread = thread
        self._background = background
        self._clock = clock
        self._queue: asyncio.Queue[_QueuedCall] = asyncio.Queue(QUEUED_REQUESTS_MAX)
        self._executing_group: list[_QueuedCall] = []
        """The requests being executed by the thread."""
        self._idle_event = asyncio.Event()
        self._idle_event.set()
        self._lease_timers = LeaseTimers(clock=clock, background=background, expire=self._expire_lease)
        self._watches: set[_SqliteWatch] = set()
        self._is_closing = False
        self._is_thread_stopped = False
        """True when the thread accepts nothing but the close of the file."""
        self._is_closed = False
        self._close_lock = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        clock: Clock | None = None,
        history_revisions: int = HISTORY_REVISIONS_MAX,
        size_bytes_max: int = STORE_FILE_BYTES_MAX,
    ) -> SqliteStore:
        """Opens the file; creates it (0600) and its directory if missing.

        A watch can start at any of the last `history_revisions` since then, unless they exceed the memory
        limit of the history. Above `size_bytes_max`, writes raise StoreFullError. Raises
        StoreUnavailableError when another process has the file open, StoreCorruptError when it is damaged,
        StoreVersionError when a newer Genie wrote it.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="genie-store")
        try:
            opening = partial(
                SqliteFile.open, path, history_revisions=history_revisions, size_bytes_max=size_bytes_max
            )
            file = await asyncio.get_running_loop().run_in_executor(thread, opening)
            background = await BackgroundTasks.open(f"store {path}")
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
        key_range(prefix, start_after=start_after)
        return await self._execute_in_store_thread(
            lambda file: file.range(prefix, start_after=start_after, limit=limit), timeout_s=timeout_s
        )

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None:
        encode_key(key)
        return await self._execute_in_store_thread(lambda file: file.get(key), timeout_s=timeout_s)

    async def measure_space(self, *, timeout_s: float = 5.0) -> SpaceUsage:
        return await self._execute_in_store_thread(lambda file: file.measure_space(), timeout_s=timeout_s)

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float = 5.0
    ) -> TxnResult:
        compares, operations = tuple(compares), tuple(operations)
        size_bytes = check_transaction_and_get_size_bytes(compares, operations, ops_max=self.txn_ops_max)
        named = {op.lease_id for op in operations if isinstance(op, Put) and op.lease_id}
        lost = frozenset(lease_id for lease_id in named if self._lease_timers.is_expired_or_revoked(lease_id))
        return await self._execute_in_store_thread(
            lambda file: file.commit(compares, operations, lost_leases=lost),
            timeout_s=timeout_s,
            size_bytes=size_bytes,
        )

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = 5.0) -> int:
        check_ttl(ttl_s)
        self._lease_timers.check_lease_limit()
        lease_id = await self._execute_in_store_thread(SqliteFile.grant_lease, timeout_s=timeout_s)
        self._lease_timers.start_timer(lease_id, ttl_s=ttl_s)
        return lease_id

    async def keep_alive(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        # In memory only: a lease does not outlive the process.
        self._check_not_closing()
        self._lease_timers.renew_timer(lease_id)

    async def revoke_lease(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        await self._execute_in_store_thread(lambda file: file.revoke_lease(lease_id), timeout_s=timeout_s)
        self._lease_timers.stop_timer(lease_id)

    async def compact(self, revision: int, *, timeout_s: float = 5.0) -> None:
        """Drops the history up to `revision` now. The store also compacts automatically."""
        await self._execute_in_store_thread(lambda file: file.compact(revision), timeout_s=timeout_s)

    @asynccontextmanager
    async def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        check_after_revision(after_revision)
        self._check_not_closing()
        watch = _SqliteWatch(self, key_range(prefix), after_revision)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    @asynccontextmanager
    async def snapshot(self, *, timeout_s: float = 5.0) -> AsyncIterator[Snapshot]:
        owner = object()
        try:
            revision = await self._execute_in_store_thread(
                lambda file: file.begin_snapshot(owner), timeout_s=timeout_s
            )
            yield _SqliteSnapshotReader(self, revision)
        finally:
            if not self._is_closing:
                # Shielded: otherwise each later write would be preserved for a reader that is gone.
                await asyncio.shield(
                    self._execute_in_store_thread(
                        lambda file: file.end_snapshot(owner), timeout_s=INTERNAL_CALL_TIMEOUT_S
                    )
                )

    async def close(self) -> None:
        """Executes queued requests, then releases the file. Call it again if it was cancelled."""
        self._is_closing = True
        async with self._close_lock:
            if self._is_closed:
                return
            for watch in self._watches:
                watch.wake()
            while not self._idle_event.is_set():  # a caller that waited for the queue may come first
                await self._idle_event.wait()
            self._is_thread_stopped = True
            await self._background.close()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
            self._thread.shutdown(wait=True)
            self._is_closed = True

    # -- the queue ----------------------------------------------------------------------------

    async def _execute_in_store_thread(
        self, call: Callable[[SqliteFile], _Result], *, timeout_s: float, size_bytes: int = 0
    ) -> _Result:
        self._check_not_closing()
        response: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.put(_QueuedCall(call, response, size_bytes))
                self._check_background_running()
                self._submit_next_group()
                return await response
        except TimeoutError:
            raise StoreUnavailableError(
                f"the store {self.path} timed out after {timeout_s} s",
                hint="a write may have been applied: read the key to find out",
            ) from None

    def _check_not_closing(self) -> None:
        if self._is_closing:
            raise StoreUnavailableError(f"the store {self.path} is closed")
        self._check_background_running()

    def _check_background_running(self) -> None:
        if self._is_thread_stopped or self._background.has_ended:
            raise StoreUnavailableError(
                f"the store {self.path} has stopped", hint="see the log for the cause"
            )

    def _submit_next_group(self) -> None:
        """Submits the queued requests to the thread unless it is busy. Not a task: on a busy event loop,
        each commit would wait for two more iterations."""
        if self._executing_group:
            return
        self._executing_group = self._dequeue_next_group()
        if not self._executing_group:
            self._idle_event.set()
            return
        self._idle_event.clear()
        loop, calls = asyncio.get_running_loop(), [request.call for request in self._executing_group]
        self._thread.submit(
            lambda: loop.call_soon_threadsafe(self._deliver_group_results, self._run_group_in_thread(calls))
        )

    def _dequeue_next_group(self) -> list[_QueuedCall]:
        group: list[_QueuedCall] = []
        size_bytes = 0
        while not self._queue.empty() and len(group) < GROUP_REQUESTS_MAX and size_bytes <= GROUP_BYTES_MAX:
            request = self._queue.get_nowait()
            # Skip requests whose caller was cancelled or timed out.
            if not request.response.done():
                group.append(request)
                size_bytes += request.size_bytes
        return group

    def _run_group_in_thread(self, calls: Sequence[FileCall]) -> GroupResult | BaseException:
        """Runs in the thread."""
        try:
            return self._file.run_group(calls)
        # A thread boundary: every error is delivered to the waiting callers; later groups still run.
        except BaseException as error:
            log.exception("store %s: a group of %d requests failed", self.path, len(calls))
            return error

    def _deliver_group_results(self, result: GroupResult | BaseException) -> None:
        group, self._executing_group = self._executing_group, []
        if isinstance(result, GroupResult):
            self._notify_watches(result)
        outcomes = (
            result.outcomes
            if isinstance(result, GroupResult)
            else [self._to_internal_error(result) for _ in group]
        )
        self._submit_next_group()
        for request, outcome in zip(group, outcomes, strict=True):
            if request.response.done():
                continue
            if isinstance(outcome, BaseException):
                request.response.set_exception(outcome)
            else:
                request.response.set_result(outcome)

    def _to_internal_error(self, error: BaseException) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"internal error in the store {self.path}: {error!r}",
            hint="a write may have been applied: read the key to find out",
        )

    def _notify_watches(self, result: GroupResult) -> None:
        for watch in self._watches:
            watch.on_group_result(result)

    async def _expire_lease(self, lease_id: int) -> None:
        """Retries until it succeeds or the store closes: a full disk must not keep keys of expired leases."""
        while not self._is_closing:
            try:
                await self._execute_in_store_thread(
                    lambda file: file.revoke_lease(lease_id), timeout_s=INTERNAL_CALL_TIMEOUT_S
                )
                return
            except StoreError as error:
                log.warning(
                    "store %s: lease %d has expired, but its keys could not be deleted: %s",
                    self.path,
                    lease_id,
                    error,
                )
                await self._clock.sleep(LEASE_EXPIRY_RETRY_INTERVAL_S)


class _SqliteSnapshotReader:
    def __init__(self, store: SqliteStore, revision: int) -> None:
        self.revision = revision
        self._store = store
        self._last_key = ""

    async def read_page(self, *, timeout_s: float = 30.0) -> tuple[KeyValue, ...]:
        after = self._last_key
        page = await self._store._execute_in_store_thread(
            lambda file: file.read_snapshot(start_after=after), timeout_s=timeout_s
        )
        self._last_key = page[-1].key if page else after
        return page


class _SqliteWatch:
    """Reads pages of the history. Only the current page is buffered; a reader that is slower than the
    history's compaction gets CompactedError."""

    def __init__(self, store: SqliteStore, key_range: tuple[bytes, bytes], after_revision: int) -> None:
        self._store = store
        self._key_range = key_range
        self._next_position = HistoryPosition(after_revision + 1)
        self._page_events: deque[WatchEvent] = deque()
        self._change_event = asyncio.Event()
        self._change_event.set()
        self._is_reading_page = False

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._page_events:
            await self._change_event.wait()
            await self._read_page()
        return self._page_events.popleft()

    def wake(self) -> None:
        self._change_event.set()

    def on_group_result(self, result: GroupResult) -> None:
        """Wakes the reader when a key of its span changed. Otherwise advances a reader that is up to
        date, so that it does not depend on history that may be compacted."""
        first, end = self._key_range
        if any(first <= key < end for key in result.changed_keys):
            self._change_event.set()
        elif not self._is_reading_page and not self._change_event.is_set():
            self._next_position = HistoryPosition(max(self._next_position.revision, result.revision + 1))

    async def _read_page(self) -> None:
        self._change_event.clear()
        self._is_reading_page = True
        span, position = self._key_range, self._next_position
        try:
            page = await self._store._execute_in_store_thread(
                lambda file: file.read_history(span, position), timeout_s=INTERNAL_CALL_TIMEOUT_S
            )
        except BaseException:
            # The reader may read again, and the events it waited for are still unread.
            self._change_event.set()
            raise
        finally:
            self._is_reading_page = False
        self._page_events.extend(page.events)
        self._next_position = page.next_position
        if not page.is_last_page:
            self._change_event.set()
