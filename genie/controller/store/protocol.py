"""The contract of a store engine: the protocol, its value types and its limits.

Limits of every engine, so that code written for one works on the other: a key is 1 byte to
1 KiB of UTF-8, a value at most 1 MiB, a transaction at most 128 compares, 128 operations and
1.375 MiB of keys and values in total, a lease TTL at most one day. Exceeding a limit is a
UsageError. An engine may accept more compares and operations (`txn_ops_max`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import msgspec

KEY_BYTES_MAX = 1024
VALUE_BYTES_MAX = 1024 * 1024
TXN_OPS_MAX = 128
# etcd rejects requests over 1.5 MiB by default; the difference is for framing.
TXN_BYTES_MAX = 1408 * 1024
RANGE_LIMIT_MAX = 10_000
RANGE_BYTES_MAX = 64 * 1024 * 1024
LEASE_TTL_S_MAX = 86_400.0


@dataclass(frozen=True, slots=True)
class KeyValue:
    """The current value of one key. `create_revision` can serve as a fencing token."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys in ascending order as of `revision`; `more` if a limit truncated the result.

    Successive pages are read at different revisions. To miss no change, watch after the
    revision of the first page.
    """

    items: tuple[KeyValue, ...]
    revision: int
    more: bool


class Compare(msgspec.Struct, frozen=True):
    """Condition: the key has this revision; 0 means that the key does not exist."""

    key: str
    revision: int
    field: Literal["mod", "create"] = "mod"


class Put(msgspec.Struct, frozen=True):
    key: str
    value: bytes
    lease_id: int = 0


class Delete(msgspec.Struct, frozen=True):
    key: str


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`succeeded` is False when a compare failed; nothing was changed then.

    `revision` is that of the transaction if it changed something (and the mod_revision of every
    key it put), otherwise the current revision of the store.
    """

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change. For a deletion or an expired lease, value is None and revision that of the deletion."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class SpaceUsage:
    """The space that a store uses, including its history, and the most that it can use."""

    used_bytes: int
    bytes_max: int
    revision: int
    """The current one."""
    fragmented_bytes: int = 0
    """Free space that counts against the maximum until the store is defragmented."""


@runtime_checkable
class MeasurableStore(Protocol):
    """What every engine has besides `Store`, to keep it from filling up."""

    async def measure_space(self, *, timeout_s: float = 5.0) -> SpaceUsage: ...

    async def compact(self, revision: int, *, timeout_s: float = 5.0) -> None:
        """Drops the history up to `revision`. Also possible when there is no space."""
        ...


class Snapshot(Protocol):
    """The keys of a store at one revision, read in pages. Keys on a lease are left out: they belong to the
    process that holds the lease."""

    revision: int

    async def read_page(self, *, timeout_s: float = 30.0) -> tuple[KeyValue, ...]:
        """Returns the next keys, ascending; empty at the end. Raises CompactedError when the store no longer
        has that revision: start over with a new snapshot."""
        ...


@runtime_checkable
class SnapshotStore(Protocol):
    """What every engine has besides `Store`, to back it up while it is written to."""

    def snapshot(self, *, timeout_s: float = 5.0) -> AbstractAsyncContextManager[Snapshot]:
        """Opens a snapshot at the current revision. An engine may allow only one at a time and raises
        StoreUnavailableError for another."""
        ...


class Store(Protocol):
    """Linearizable. Every method raises StoreUnavailableError after `timeout_s`. A commit that timed
    out may have been applied; the caller has to read to find out."""

    txn_ops_max: int
    """Maximum compares, and maximum operations, in one transaction: TXN_OPS_MAX or more."""

    async def range(
        self, prefix: str, *, start_after: str = "", limit: int = 1000, timeout_s: float = 5.0
    ) -> RangeResult:
        """Returns the keys that start with `prefix`, ascending, after `start_after`: at most `limit`,
        and none after RANGE_BYTES_MAX of values."""
        ...

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None: ...

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float = 5.0
    ) -> TxnResult:
        """Applies the operations if all compares succeed; durable on return. Keys of the operations are
        unique. Raises LeaseLostError if a Put names a lost lease, and StoreFullError when there is no
        space; nothing was changed then. Deleting a missing key changes nothing."""
        ...

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = 5.0) -> int:
        """Returns a new lease ID (> 0). If the lease is not renewed within `ttl_s`, its keys are deleted
        at one revision. An engine may round the TTL up (etcd: whole seconds)."""
        ...

    async def keep_alive(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        """Restarts the TTL. Raises LeaseLostError if the lease has expired or was revoked."""
        ...

    async def revoke_lease(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        """Ends the lease and deletes its keys. Ignores a lost lease."""
        ...

    def watch(
        self, prefix: str, *, after_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Iterates over all changes of keys under `prefix` after that revision, in order.
        Raises CompactedError when that revision is no longer in the history or the reader is too
        slow (range again and watch from there), and StoreUnavailableError when the engine is lost;
        both on entering or from the iterator. For one reader; cancelling a wait for the next event
        loses none."""
        ...

    async def close(self) -> None:
        """Idempotent. Open watches and later calls raise StoreUnavailableError."""
        ...
