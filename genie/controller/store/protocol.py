"""What a store engine promises. Values only; the engines are beside this file.

Limits that every engine holds, so that code written against one runs on the other:
a key is 1 byte to 1 KiB of UTF-8, a value at most 1 MiB, a transaction at most 128
compares and 128 operations and 1.375 MiB of keys and values in all, a lease at most a day.
Over a limit is a UsageError. One limit may be higher: who can make use of longer transactions
asks the engine (`txn_ops_max`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

KEY_BYTES_MAX = 1024
VALUE_BYTES_MAX = 1024 * 1024
TXN_OPS_MAX = 128
# etcd refuses a request over 1.5 MiB by default; the difference is room for its framing.
TXN_BYTES_MAX = 1408 * 1024
RANGE_LIMIT_MAX = 10_000
RANGE_BYTES_MAX = 64 * 1024 * 1024
LEASE_TTL_S_MAX = 86_400.0


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as it stands: `create_revision` is the fencing token where one is needed."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys in ascending order as of `revision`; `more` when a limit cut the answer.

    Pages that follow one another are read at different revisions. To miss nothing, watch
    after the revision of the first page.
    """

    items: tuple[KeyValue, ...]
    revision: int
    more: bool


class Compare(msgspec.Struct, frozen=True):
    """The key must have this revision; 0 means: the key must not exist."""

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
    """`succeeded` is False when a compare did not hold: then nothing was changed.

    `revision` is that of the transaction itself when it changed something (it becomes the
    mod_revision of every key it put), and the store's current one otherwise.
    """

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change. A delete (or a lease's end) has value None and the revision of the deletion."""

    key: str
    value: bytes | None
    revision: int


class Store(Protocol):
    """Linearizable. Every method raises StoreUnavailableError past `timeout_s`; a commit that
    timed out may or may not have happened, and the caller finds out by reading."""

    txn_ops_max: int
    """Compares, and operations, that this engine takes in one transaction: TXN_OPS_MAX or more."""

    async def range(
        self, prefix: str, *, start_after: str = "", limit: int = 1000, timeout_s: float = 5.0
    ) -> RangeResult:
        """Keys that start with `prefix`, ascending, after `start_after`. At most `limit` of them,
        and no more once RANGE_BYTES_MAX of values are reached."""
        ...

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None: ...

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float = 5.0
    ) -> TxnResult:
        """Durable on return. One key at most once among the operations. When all compares hold,
        LeaseLostError if a Put names a lease that is gone; StoreFullError when there is no space,
        and nothing changed. Deleting a key that does not exist changes nothing."""
        ...

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = 5.0) -> int:
        """A new lease id (> 0). When it is not kept alive for `ttl_s`, its keys are deleted, all at
        one revision. An engine may give more time than asked (etcd counts whole seconds)."""
        ...

    async def keep_alive(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        """Starts the lease's time anew. LeaseLostError when it is gone."""
        ...

    async def revoke_lease(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        """Ends the lease and deletes its keys. Revoking a lease that is gone is fine."""
        ...

    def watch(
        self, prefix: str, *, after_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Every change of keys under `prefix` after that revision, in order, none left out.
        CompactedError when that revision is no longer kept or the reader fell too far behind:
        range again and watch from there. StoreUnavailableError when the engine went away.
        Both may come on entering or from the iterator. For one reader; cancelling a wait for
        the next event loses none."""
        ...

    async def close(self) -> None:
        """Idempotent. Open watches end with StoreUnavailableError, and so does every later call."""
        ...
