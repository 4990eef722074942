"""An in-memory store for seeded simulation: single-threaded and deterministic.

Several controllers can share one memory, each through its own `MemoryStore`, which can be made unavailable
individually. Every call yields to other tasks before and after it takes effect, as a network would. Passes
the same contract test as the real stores.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from genie.controller.store import (
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
from genie.controller.store.background import BackgroundTasks
from genie.controller.store.leases import LeaseTimers
from genie.controller.store.limits import (
    check_after_revision,
    check_range_limit,
    check_transaction_and_get_size_bytes,
    check_ttl,
    encode_key,
    key_range,
)
from genie.controller.store.protocol import RANGE_BYTES_MAX, TXN_OPS_MAX
from genie.errors import (
    CompactedError,
    LeaseLostError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    UsageError,
)
from genie.processes.clock import Clock

VALUE_BYTES_TOTAL_MAX = 1 << 40
_SNAPSHOT_PAGE_KEYS = 100
_CUT_LINK_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class StoreLink:
    """The network between a client and the store. While requests are cut, calls wait and fail after their
    timeout; a commit that has failed so arrives when the link heals, as TCP would deliver it. While replies
    are cut, calls take effect and then fail."""

    are_requests_cut: Callable[[], bool] = lambda: False
    are_replies_cut: Callable[[], bool] = lambda: False


class MemoryStore:
    """A `Store`. `open` creates the memory; `connect` returns another client of it."""

    txn_ops_max = TXN_OPS_MAX

    def __init__(self, memory: _SharedMemory, link: StoreLink) -> None:
        self._memory = memory
        self._link = link
        self._is_available = True
        self._commit_replies_to_lose = 0
        self.lost_commit_reply_count = 0
        self._call_delay_s = self._range_delay_s = 0.0
        self._is_closed = False
        memory.client_count += 1

    @classmethod
    async def open(
        cls, *, clock: Clock, history_revisions: int = 10_000, bytes_max: int = VALUE_BYTES_TOTAL_MAX
    ) -> MemoryStore:
        """Values above `bytes_max` in total raise StoreFullError, and so does granting a lease then."""
        background = await BackgroundTasks.open("memory store")
        memory = _SharedMemory(
            clock=clock, background=background, history_revisions=history_revisions, bytes_max=bytes_max
        )
        return cls(memory, StoreLink())

    def connect(self, link: StoreLink | None = None) -> MemoryStore:
        return MemoryStore(self._memory, link or StoreLink())

    @property
    def is_available(self) -> bool:
        is_link_cut = self._link.are_requests_cut() or self._link.are_replies_cut()
        return self._is_available and not self._memory.is_hanging and not is_link_cut

    def set_available(self, available: bool) -> None:
        """While False, calls and watches of this client raise StoreUnavailableError. Leases still expire."""
        self._is_available = available
        self._memory.wake_watches()

    def set_hanging(self, hanging: bool) -> None:
        """While True, calls of all clients wait, and fail after their timeout. May be nested."""
        self._memory.set_hanging(hanging)

    def extend_leases(self, *, by_s: float) -> None:
        """Restart every lease with its lifetime and `by_s`, as a new leader of etcd does."""
        self._memory.lease_timers.extend_all_timers(by_s=by_s)

    def add_commit_listener(self, listener: Callable[[Sequence[Put | Delete]], None]) -> None:
        """Register a callback for every transaction of any client, called when it takes effect."""
        self._memory.commit_listeners.append(listener)

    def move_commit_listeners_to(self, other: MemoryStore) -> None:
        """Call the listeners for transactions of the other memory from now on, and no longer for this one's.
        They replace those of the other memory."""
        other._memory.commit_listeners, self._memory.commit_listeners = self._memory.commit_listeners, []

    def set_response_delay(self, seconds: float, *, range_delay_s: float | None = None) -> None:
        """Let each call of this client take this time; `range` takes `range_delay_s`, if given."""
        self._call_delay_s = seconds
        self._range_delay_s = seconds if range_delay_s is None else range_delay_s

    def lose_next_commit_reply(self) -> None:
        """Let the next commit take effect but raise StoreUnavailableError."""
        self._commit_replies_to_lose += 1

    async def range(
        self, prefix: str, *, start_after: str = "", limit: int = 1000, timeout_s: float = 5.0
    ) -> RangeResult:
        check_range_limit(limit)
        first, end = key_range(prefix, start_after=start_after)
        await self._simulate_latency(self._range_delay_s, timeout_s=timeout_s)
        result = self._memory.range(first, end, limit)
        await self._simulate_reply(timeout_s)
        return result

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None:
        key_bytes = encode_key(key)
        await self._simulate_latency(timeout_s=timeout_s)
        found = self._memory.value_by_key.get(key_bytes)
        await self._simulate_reply(timeout_s)
        return found

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float = 5.0
    ) -> TxnResult:
        check_transaction_and_get_size_bytes(compares, operations)
        async with self._arriving_late(compares, operations):
            await self._wait_link_healed(self._link.are_requests_cut, timeout_s)
        await self._simulate_latency(timeout_s=timeout_s)
        result = self._memory.commit(compares, operations)
        await self._simulate_reply(timeout_s)
        if self._commit_replies_to_lose:
            self._commit_replies_to_lose -= 1
            self.lost_commit_reply_count += 1
            raise StoreUnavailableError("the memory store lost the reply (injected fault)")
        return result

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = 5.0) -> int:
        check_ttl(ttl_s)
        await self._simulate_latency(timeout_s=timeout_s)
        lease_id = self._memory.grant_lease(ttl_s)
        await self._simulate_reply(timeout_s)
        return lease_id

    async def keep_alive(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        await self._simulate_latency(timeout_s=timeout_s)
        self._memory.lease_timers.renew_timer(lease_id)
        await self._simulate_reply(timeout_s)

    async def revoke_lease(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        await self._simulate_latency(timeout_s=timeout_s)
        self._memory.lease_timers.stop_timer(lease_id)
        self._memory.delete_keys_of_lease(lease_id)
        await self._simulate_reply(timeout_s)

    async def compact(self, revision: int, *, timeout_s: float = 5.0) -> None:
        await self._simulate_latency(timeout_s=timeout_s)
        self._memory.compact(revision)
        await self._simulate_reply(timeout_s)

    async def measure_space(self, *, timeout_s: float = 5.0) -> SpaceUsage:
        await self._simulate_latency(timeout_s=timeout_s)
        return self._memory.measure_space()

    @asynccontextmanager
    async def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        check_after_revision(after_revision)
        span = key_range(prefix)
        await self._simulate_latency()
        yield self._open_watch(span, after_revision)

    @asynccontextmanager
    async def snapshot(self, *, timeout_s: float = 5.0) -> AsyncIterator[Snapshot]:
        await self._simulate_latency()
        yield _MemorySnapshot(self, self._memory)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._memory.wake_watches()
        self._memory.client_count -= 1
        if self._memory.client_count == 0:
            await self._memory.background.close()

    def check_reachable(self) -> None:
        if self._is_closed:
            raise StoreUnavailableError("the memory store is closed")
        if not self._is_available:
            raise StoreUnavailableError("the memory store is unavailable (injected fault)")

    async def _simulate_latency(self, delay_s: float | None = None, *, timeout_s: float = 0.0) -> None:
        """`timeout_s`: how long to wait for a store that hangs."""
        self.check_reachable()
        if timeout_s:
            await self._wait_link_healed(self._link.are_requests_cut, timeout_s)
            await self._memory.wait_responding(timeout_s)
        await asyncio.sleep(self._call_delay_s if delay_s is None else delay_s)
        self.check_reachable()

    async def _simulate_reply(self, timeout_s: float) -> None:
        await self._wait_link_healed(self._link.are_replies_cut, timeout_s)
        await self._simulate_latency(0.0)

    async def _wait_link_healed(self, is_cut: Callable[[], bool], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while is_cut():
            if loop.time() >= end_s:
                raise _no_response_error(timeout_s)
            self.check_reachable()
            await asyncio.sleep(_CUT_LINK_POLL_INTERVAL_S)

    @asynccontextmanager
    async def _arriving_late(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> AsyncIterator[None]:
        """If the caller gives up while requests are cut, the commit arrives when the link heals."""
        try:
            yield
        except (StoreUnavailableError, asyncio.CancelledError):
            late = self._commit_when_link_heals(compares, operations)
            self._memory.background.start_task(late, name="late commit")
            raise

    async def _commit_when_link_heals(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> None:
        while self._link.are_requests_cut():
            await asyncio.sleep(_CUT_LINK_POLL_INTERVAL_S)
        with suppress(StoreError):
            self._memory.commit(compares, operations)

    def _open_watch(self, key_range: tuple[bytes, bytes], after_revision: int) -> _MemoryWatch:
        return _MemoryWatch(self, self._memory, key_range, after_revision)


class _SharedMemory:
    """State shared by all clients. Calls take effect immediately."""

    def __init__(
        self, *, clock: Clock, background: BackgroundTasks, history_revisions: int, bytes_max: int
    ) -> None:
        self.background = background
        self._bytes_max = bytes_max
        self._used_bytes = 0
        self.lease_timers = LeaseTimers(clock=clock, background=background, expire=self._expire_lease)
        self.value_by_key: dict[bytes, KeyValue] = {}
        self.history: list[tuple[bytes, WatchEvent]] = []
        self.dropped_history_entries = 0
        self.compacted_revision = 0
        self.client_count = 0
        self.commit_listeners: list[Callable[[Sequence[Put | Delete]], None]] = []
        self._history_revisions_max = history_revisions
        self._sorted_keys: list[bytes] = []
        self._revision = 1
        self._last_lease_id = 0
        self._change_event = asyncio.Event()
        self._hang_count = 0
        self._responding_event = asyncio.Event()
        self._responding_event.set()

    @property
    def is_hanging(self) -> bool:
        return self._hang_count > 0

    def set_hanging(self, hanging: bool) -> None:
        self._hang_count += 1 if hanging else -1
        if self._hang_count:
            self._responding_event.clear()
        else:
            self._responding_event.set()

    async def wait_responding(self, timeout_s: float) -> None:
        if self._responding_event.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._responding_event.wait()
        except TimeoutError:
            raise _no_response_error(timeout_s) from None

    def range(self, first: bytes, end: bytes, limit: int) -> RangeResult:
        items: list[KeyValue] = []
        left_bytes = RANGE_BYTES_MAX
        keys = self._sorted_keys[bisect_left(self._sorted_keys, first) : bisect_left(self._sorted_keys, end)]
        for key in keys:
            if len(items) == limit or left_bytes <= 0:
                break
            items.append(self.value_by_key[key])
            left_bytes -= len(self.value_by_key[key].value)
        return RangeResult(tuple(items), self._revision, more=len(items) < len(keys))

    def commit(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        if not all(self._compare_succeeds(compare) for compare in compares):
            return TxnResult(succeeded=False, revision=self._revision)
        for operation in operations:
            if (
                isinstance(operation, Put)
                and operation.lease_id
                and self.lease_timers.is_expired_or_revoked(operation.lease_id)
            ):
                raise LeaseLostError(f"lease {operation.lease_id} has expired or was revoked")
        self._check_space_for(operations)
        before = len(self.history) + self.dropped_history_entries
        for operation in operations:
            self._apply_operation(operation)
        if len(self.history) + self.dropped_history_entries > before:
            self._advance_revision_and_drop_old_history()
        for listener in self.commit_listeners:
            listener(operations)
        return TxnResult(succeeded=True, revision=self._revision)

    def measure_space(self) -> SpaceUsage:
        return SpaceUsage(self._used_bytes, self._bytes_max, self._revision)

    def _check_space_for(self, operations: Sequence[Put | Delete]) -> None:
        more_bytes = sum(len(each.value) for each in operations if isinstance(each, Put))
        if more_bytes and self._used_bytes + more_bytes > self._bytes_max:
            raise StoreFullError("the memory store is full; nothing was changed")

    def grant_lease(self, ttl_s: float) -> int:
        if self._used_bytes >= self._bytes_max:
            raise StoreFullError("the memory store is full; no lease was granted")
        self.lease_timers.check_lease_limit()
        self._last_lease_id += 1
        self.lease_timers.start_timer(self._last_lease_id, ttl_s=ttl_s)
        return self._last_lease_id

    def delete_keys_of_lease(self, lease_id: int) -> None:
        keys = [item.key for item in self.value_by_key.values() if item.lease_id == lease_id != 0]
        for key in sorted(keys):
            self._apply_operation(Delete(key))
        if keys:
            self._advance_revision_and_drop_old_history()

    def compact(self, revision: int) -> None:
        if revision > self._revision:
            raise UsageError(f"cannot compact to revision {revision}; the store is at {self._revision}")
        if revision <= self.compacted_revision:
            return
        self.compacted_revision = revision
        kept = [entry for entry in self.history if entry[1].revision > revision]
        self.dropped_history_entries += len(self.history) - len(kept)
        self.history = kept

    def wake_watches(self) -> None:
        changed, self._change_event = self._change_event, asyncio.Event()
        changed.set()

    async def wait_for_change(self) -> None:
        await self._change_event.wait()

    async def _expire_lease(self, lease_id: int) -> None:
        self.delete_keys_of_lease(lease_id)

    def _compare_succeeds(self, compare: Compare) -> bool:
        item = self.value_by_key.get(encode_key(compare.key))
        if item is None:
            return compare.revision == 0
        return compare.revision == (item.create_revision if compare.field == "create" else item.mod_revision)

    def _apply_operation(self, operation: Put | Delete) -> None:
        key, revision = encode_key(operation.key), self._revision + 1
        old = self.value_by_key.get(key)
        self._used_bytes -= len(old.value) if old is not None else 0
        if isinstance(operation, Put):
            self._used_bytes += len(operation.value)
            if old is None:
                insort(self._sorted_keys, key)
            created = revision if old is None else old.create_revision
            self.value_by_key[key] = KeyValue(
                operation.key, operation.value, created, revision, operation.lease_id
            )
            self.history.append((key, WatchEvent(operation.key, operation.value, revision)))
        elif old is not None:
            del self.value_by_key[key]
            del self._sorted_keys[bisect_left(self._sorted_keys, key)]
            self.history.append((key, WatchEvent(operation.key, None, revision)))

    def _advance_revision_and_drop_old_history(self) -> None:
        self._revision += 1
        slack = max(1, self._history_revisions_max // 10)
        if self._revision - self.compacted_revision > self._history_revisions_max + slack:
            self.compact(self._revision - self._history_revisions_max)
        self.wake_watches()


class _MemorySnapshot:
    def __init__(self, store: MemoryStore, memory: _SharedMemory) -> None:
        found = memory.range(*key_range(""), limit=len(memory.value_by_key))
        self.revision = found.revision
        self._store = store
        self._items = [item for item in found.items if item.lease_id == 0]

    async def read_page(self, *, timeout_s: float = 30.0) -> tuple[KeyValue, ...]:
        self._store.check_reachable()
        page, self._items = self._items[:_SNAPSHOT_PAGE_KEYS], self._items[_SNAPSHOT_PAGE_KEYS:]
        return tuple(page)


class _MemoryWatch:
    """Reads the shared history. `_history_position` counts entries since the creation of the memory."""

    def __init__(
        self, store: MemoryStore, memory: _SharedMemory, key_range: tuple[bytes, bytes], after_revision: int
    ) -> None:
        self._store = store
        self._memory = memory
        self._key_range = key_range
        self._after_revision = after_revision
        self._history_position: int | None = None

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self

    async def __anext__(self) -> WatchEvent:
        while True:
            self._store.check_reachable()
            event = self._try_read_next()
            if event is not None:
                return event
            await self._memory.wait_for_change()

    def _try_read_next(self) -> WatchEvent | None:
        memory = self._memory
        if self._history_position is None:
            if self._after_revision < memory.compacted_revision:
                raise self._compacted_error()
            self._history_position = memory.dropped_history_entries
        if self._history_position < memory.dropped_history_entries:
            raise self._compacted_error()
        first, end = self._key_range
        while self._history_position - memory.dropped_history_entries < len(memory.history):
            key, event = memory.history[self._history_position - memory.dropped_history_entries]
            self._history_position += 1
            if first <= key < end and event.revision > self._after_revision:
                return event
        return None

    def _compacted_error(self) -> CompactedError:
        return CompactedError(
            f"changes up to revision {self._memory.compacted_revision} are no longer kept",
            hint="range again and watch from the revision it gives",
        )


def _no_response_error(timeout_s: float) -> StoreUnavailableError:
    return StoreUnavailableError(f"the memory store did not respond within {timeout_s:g} s (injected fault)")
