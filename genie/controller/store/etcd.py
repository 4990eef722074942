"""The engine for several controllers: an etcd cluster, through its v3 API over gRPC.

A thin wrapper: etcd orders transactions, expires leases and keeps the history. All keys are
under one namespace, so that an etcd cluster can be shared. Two differences to SQLite: lease
TTLs are whole seconds, rounded up, and etcd raises short ones to its minimum (2 s by default);
history is compacted by the server (`--auto-compaction-retention`) or by `compact`, which the leading
controller calls.

controller/etcd/ changes the membership; supervisor/etcd_member.py starts etcd servers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from genie.controller.store.etcd_address import EtcdAddress, parse_etcd_url
from genie.controller.store.etcd_channels import RANGE_PAGE_KEYS, EtcdChannels, EtcdMember
from genie.controller.store.etcd_proto import kv_pb2, rpc_pb2
from genie.controller.store.etcd_watch import EtcdWatch
from genie.controller.store.limits import (
    check_after_revision,
    check_range_limit,
    check_transaction_and_get_size_bytes,
    check_ttl,
    encode_key,
    key_range,
)
from genie.controller.store.protocol import (
    RANGE_BYTES_MAX,
    TXN_OPS_MAX,
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
from genie.errors import (
    CompactedError,
    LeaseLostError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from genie.processes.clock import Clock, SystemClock

_RANGE_ATTEMPTS_MAX = 3
SNAPSHOT_PAGE_KEYS = 64
"""Each may be as large as VALUE_BYTES_MAX, and a page is held in memory."""
ETCD_DEFAULT_SPACE_BYTES_MAX = 2 * 1024**3
"""Default of `--quota-backend-bytes`; etcd before 3.6 does not report its value."""


class EtcdStore:
    """A `Store` on an etcd cluster. Created by `open` inside the running event loop."""

    txn_ops_max = TXN_OPS_MAX

    def __init__(self, address: EtcdAddress, *, channels: EtcdChannels, clock: Clock) -> None:
        self.address = address
        self._channels = channels
        self._clock = clock
        self._namespace = address.namespace.encode()
        self._highest_revision_seen = 0

    @classmethod
    async def open(cls, url: str, *, clock: Clock | None = None, timeout_s: float = 5.0) -> EtcdStore:
        """Returns when one endpoint has reported a supported version; the others are checked before
        their first use. Raises ConfigError for a bad URL or an unreadable file, StoreAccessError for a failed
        login or TLS handshake, StoreVersionError, and StoreUnavailableError when no endpoint responds within
        `timeout_s`."""
        return await cls.open_address(parse_etcd_url(url), clock=clock, timeout_s=timeout_s)

    @classmethod
    async def open_address(
        cls, address: EtcdAddress, *, clock: Clock | None = None, timeout_s: float = 5.0
    ) -> EtcdStore:
        """As `open`, with a parsed address."""
        clock = clock or SystemClock()
        channels = EtcdChannels(address, clock=clock)
        try:
            await channels.get_ready_member(asyncio.get_running_loop().time() + timeout_s)
        except BaseException:
            await channels.close()
            raise
        return cls(address, channels=channels, clock=clock)

    async def range(
        self, prefix: str, *, start_after: str = "", limit: int = 1000, timeout_s: float = 5.0
    ) -> RangeResult:
        check_range_limit(limit)
        first, end = key_range(prefix, start_after=start_after)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        for _ in range(_RANGE_ATTEMPTS_MAX):
            try:
                return await self._read_range_pages(
                    self._namespace + first, self._namespace + end, limit, deadline_s
                )
            except CompactedError:
                # Compacted past the first page's revision between two pages: start over.
                continue
        raise StoreUnavailableError(
            f"could not read the keys under {prefix!r} at one revision: etcd compacts too often"
        )

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None:
        request = rpc_pb2.RangeRequest(key=self._namespace + encode_key(key))
        response = await self._send_range(request, timeout_s=timeout_s)
        return self._from_etcd_key_value(response.kvs[0]) if response.kvs else None

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float = 5.0
    ) -> TxnResult:
        check_transaction_and_get_size_bytes(compares, operations)
        request = rpc_pb2.TxnRequest(
            compare=[self._to_etcd_compare(compare) for compare in compares],
            success=[self._to_etcd_operation(operation) for operation in operations],
        )
        before = self._highest_revision_seen
        try:
            response = await self._channels.call_unary(
                lambda member: member.kv_stub.Txn,
                request,
                action="commit",
                timeout_s=timeout_s,
                idempotent=False,
            )
        except StoreFullError as error:
            return await self._result_if_applied_despite_no_space(
                error, operations, revision_before=before, timeout_s=timeout_s
            )
        self._record_highest_revision_seen(response.header)
        return TxnResult(succeeded=response.succeeded, revision=response.header.revision)

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = 5.0) -> int:
        check_ttl(ttl_s)
        request = rpc_pb2.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        # Safe to retry: a lease whose response was lost has no keys and expires.
        response = await self._channels.call_unary(
            lambda member: member.lease_stub.LeaseGrant,
            request,
            action="grant lease",
            timeout_s=timeout_s,
            idempotent=True,
        )
        if response.error or response.ID <= 0:
            raise StoreError(f"etcd did not grant a lease of {ttl_s} s: {response.error!r}")
        return response.ID

    async def keep_alive(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        async def send(member: EtcdMember, remaining_s: float) -> int:
            stream = member.lease_stub.LeaseKeepAlive(
                None, timeout=remaining_s, metadata=self._channels.call_metadata()
            )
            try:
                await stream.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease_id))
                response = await stream.read()
            finally:
                stream.cancel()
            if not isinstance(response, rpc_pb2.LeaseKeepAliveResponse):
                raise StoreUnavailableError(
                    f"etcd at {member.endpoint} did not respond to a lease keep-alive"
                )
            self._channels.check_cluster(member, response.header)
            return response.TTL

        ttl_s = await self._channels.call_with_retries(
            send, action="keep lease alive", timeout_s=timeout_s, idempotent=True
        )
        if ttl_s <= 0:
            raise LeaseLostError(f"lease {lease_id} has expired or was revoked", hint="grant a new one")

    async def revoke_lease(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        request = rpc_pb2.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._channels.call_unary(
                lambda member: member.lease_stub.LeaseRevoke,
                request,
                action="revoke lease",
                timeout_s=timeout_s,
                idempotent=True,
            )
        except LeaseLostError:
            pass

    async def compact(self, revision: int, *, timeout_s: float = 5.0) -> None:
        """Drops the history up to `revision`, also that of other users of this etcd cluster."""
        request = rpc_pb2.CompactionRequest(revision=revision)
        try:
            await self._channels.call_unary(
                lambda member: member.kv_stub.Compact,
                request,
                action="compact",
                timeout_s=timeout_s,
                idempotent=True,
            )
        except CompactedError:
            pass

    async def measure_space(self, *, timeout_s: float = 5.0) -> SpaceUsage:
        status = await self._channels.call_unary(
            lambda member: member.maintenance_stub.Status,
            rpc_pb2.StatusRequest(),
            action="status",
            timeout_s=timeout_s,
            idempotent=True,
        )
        return SpaceUsage(
            used_bytes=status.dbSizeInUse,
            bytes_max=status.dbSizeQuota or ETCD_DEFAULT_SPACE_BYTES_MAX,
            revision=status.header.revision,
            fragmented_bytes=status.dbSize - status.dbSizeInUse,
        )

    @asynccontextmanager
    async def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        check_after_revision(after_revision)
        first, end = key_range(prefix)
        watch = EtcdWatch(
            self._channels,
            key_range=(self._namespace + first, self._namespace + end),
            namespace_bytes=len(self._namespace),
            after_revision=after_revision,
            clock=self._clock,
        )
        try:
            yield watch
        finally:
            watch.close()

    @asynccontextmanager
    async def snapshot(self, *, timeout_s: float = 5.0) -> AsyncIterator[Snapshot]:
        first, end = key_range("")
        # Nothing is read: only the current revision is needed.
        response = await self._send_range(
            rpc_pb2.RangeRequest(key=self._namespace + b"\0"), timeout_s=timeout_s
        )
        request = rpc_pb2.RangeRequest(
            key=self._namespace + first,
            range_end=self._namespace + end,
            limit=SNAPSHOT_PAGE_KEYS,
            revision=response.header.revision,
        )
        yield _EtcdSnapshot(self, request)

    async def replace_address(self, address: EtcdAddress) -> None:
        """Uses these endpoints, and the current contents of the certificate files."""
        await self._channels.replace_address(address)
        self.address = address

    async def close(self) -> None:
        await self._channels.close()

    async def _result_if_applied_despite_no_space(
        self,
        error: StoreFullError,
        operations: Sequence[Put | Delete],
        *,
        revision_before: int,
        timeout_s: float,
    ) -> TxnResult:
        """Finds out whether a commit that failed with "no space" was applied.

        etcd applies the one request that exceeds its quota and reports the error all the same. A put that
        was applied has a new revision."""
        put = next((operation for operation in operations if isinstance(operation, Put)), None)
        item = await self.get(put.key, timeout_s=timeout_s) if put is not None else None
        if put is None or item is None or item.mod_revision <= revision_before:
            raise error
        if revision_before and (item.value, item.lease_id) == (put.value, put.lease_id):
            return TxnResult(succeeded=True, revision=item.mod_revision)
        raise StoreUnavailableError(
            f"etcd is out of space, and {put.key!r} was changed at the same time",
            hint="the write may have been applied: read the key to find out",
        ) from error

    async def _read_range_pages(self, first: bytes, end: bytes, limit: int, deadline_s: float) -> RangeResult:
        """Reads pages at the revision of the first one, up to `limit` keys or RANGE_BYTES_MAX."""
        items: list[KeyValue] = []
        size_bytes = 0
        request = rpc_pb2.RangeRequest(key=first, range_end=end)
        while True:
            request.limit = min(limit - len(items), RANGE_PAGE_KEYS)
            remaining_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
            response = await self._send_range(request, timeout_s=remaining_s)
            request.revision = request.revision or response.header.revision
            for kv in response.kvs:
                if size_bytes >= RANGE_BYTES_MAX:
                    return RangeResult(tuple(items), request.revision, more=True)
                items.append(self._from_etcd_key_value(kv))
                size_bytes += len(kv.value)
            if not response.more or len(items) == limit:
                return RangeResult(tuple(items), request.revision, more=response.more)
            request.key = response.kvs[-1].key + b"\0"

    async def _send_range(self, request: rpc_pb2.RangeRequest, *, timeout_s: float) -> rpc_pb2.RangeResponse:
        response = await self._channels.call_unary(
            lambda member: member.kv_stub.Range, request, action="range", timeout_s=timeout_s, idempotent=True
        )
        self._record_highest_revision_seen(response.header)
        return response

    def _record_highest_revision_seen(self, header: rpc_pb2.ResponseHeader) -> None:
        self._highest_revision_seen = max(self._highest_revision_seen, header.revision)

    def _to_etcd_compare(self, compare: Compare) -> rpc_pb2.Compare:
        key = self._namespace + encode_key(compare.key)
        if compare.field == "create":
            return rpc_pb2.Compare(key=key, target=rpc_pb2.Compare.CREATE, create_revision=compare.revision)
        return rpc_pb2.Compare(key=key, target=rpc_pb2.Compare.MOD, mod_revision=compare.revision)

    def _to_etcd_operation(self, operation: Put | Delete) -> rpc_pb2.RequestOp:
        key = self._namespace + encode_key(operation.key)
        if isinstance(operation, Delete):
            return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
        put = rpc_pb2.PutRequest(key=key, value=operation.value, lease=operation.lease_id)
        return rpc_pb2.RequestOp(request_put=put)

    def _from_etcd_key_value(self, kv: kv_pb2.KeyValue) -> KeyValue:
        try:
            key = kv.key[len(self._namespace) :].decode()
        except UnicodeDecodeError as error:
            raise StoreCorruptError(f"{self.address} contains a key that is not UTF-8: {error}") from error
        return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)


class _EtcdSnapshot:
    """Pages of a range at one revision. etcd keeps that revision until it is compacted."""

    def __init__(self, store: EtcdStore, request: rpc_pb2.RangeRequest) -> None:
        self.revision: int = request.revision
        self._store = store
        self._next_request: rpc_pb2.RangeRequest | None = request

    async def read_page(self, *, timeout_s: float = 30.0) -> tuple[KeyValue, ...]:
        while (request := self._next_request) is not None:
            response = await self._store._send_range(request, timeout_s=timeout_s)
            if response.more:
                request.key = response.kvs[-1].key + b"\0"
            else:
                self._next_request = None
            items = (self._store._from_etcd_key_value(kv) for kv in response.kvs)
            if page := tuple(item for item in items if item.lease_id == 0):
                return page
        return ()
