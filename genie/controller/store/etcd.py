"""The engine for more than one controller: an etcd cluster, through its v3 API over gRPC.

A thin wrapper. etcd orders the transactions, runs the leases and keeps the history; all keys
are under one namespace, so that an etcd can be shared. Two differences to know: lease times
are whole seconds, rounded up, and etcd raises short ones to its own least (2 s by default);
and history is trimmed by the server (`--auto-compaction-retention`) or by `compact`.

Not for: starting etcd servers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from genie.controller.store.etcd_address import EtcdAddress, parse_etcd_url
from genie.controller.store.etcd_channels import RANGE_PAGE_KEYS, EtcdChannels, Member
from genie.controller.store.etcd_proto import kv_pb2, rpc_pb2
from genie.controller.store.etcd_watch import EtcdWatch
from genie.controller.store.limits import (
    check_after_revision,
    check_range_limit,
    check_transaction,
    check_ttl,
    encode_key,
    key_span,
)
from genie.controller.store.protocol import (
    RANGE_BYTES_MAX,
    TXN_OPS_MAX,
    Compare,
    Delete,
    KeyValue,
    Put,
    RangeResult,
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
from genie.runtime.clock import Clock, SystemClock

_RANGE_STARTS_MAX = 3


class EtcdStore:
    """A `Store` on an etcd cluster. Made by `open` inside the running loop."""

    txn_ops_max = TXN_OPS_MAX

    def __init__(self, address: EtcdAddress, *, channels: EtcdChannels, clock: Clock) -> None:
        self.address = address
        self._channels = channels
        self._clock = clock
        self._namespace = address.namespace.encode()
        self._revision_seen = 0

    @classmethod
    async def open(cls, url: str, *, clock: Clock | None = None, timeout_s: float = 5.0) -> EtcdStore:
        """Returns once one endpoint has told a version that may be used; the others are asked before
        their first use. ConfigError for a bad URL or login, TlsError, StoreVersionError,
        StoreUnavailableError when no endpoint answers within `timeout_s`."""
        address = parse_etcd_url(url)
        clock = clock or SystemClock()
        channels = EtcdChannels(address, clock=clock)
        try:
            await channels.usable(asyncio.get_running_loop().time() + timeout_s)
        except BaseException:
            await channels.close()
            raise
        return cls(address, channels=channels, clock=clock)

    async def range(
        self, prefix: str, *, start_after: str = "", limit: int = 1000, timeout_s: float = 5.0
    ) -> RangeResult:
        check_range_limit(limit)
        first, end = key_span(prefix, start_after=start_after)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        for _ in range(_RANGE_STARTS_MAX):
            try:
                return await self._pages(self._namespace + first, self._namespace + end, limit, deadline_s)
            except CompactedError:
                # Someone compacted past the first page's revision between two pages: begin anew.
                continue
        raise StoreUnavailableError(
            f"the keys under {prefix!r} could not be read at one revision: etcd compacts too often"
        )

    async def get(self, key: str, *, timeout_s: float = 5.0) -> KeyValue | None:
        request = rpc_pb2.RangeRequest(key=self._namespace + encode_key(key))
        answer = await self._range(request, timeout_s=timeout_s)
        return self._key_value(answer.kvs[0]) if answer.kvs else None

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete], *, timeout_s: float = 5.0
    ) -> TxnResult:
        check_transaction(compares, operations)
        request = rpc_pb2.TxnRequest(
            compare=[self._compare(compare) for compare in compares],
            success=[self._operation(operation) for operation in operations],
        )
        before = self._revision_seen
        try:
            answer = await self._channels.ask(
                lambda member: member.kv.Txn, request, doing="a commit", timeout_s=timeout_s, send_again=False
            )
        except StoreFullError as error:
            return await self._after_full(error, operations, before=before, timeout_s=timeout_s)
        self._saw(answer.header)
        return TxnResult(succeeded=answer.succeeded, revision=answer.header.revision)

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = 5.0) -> int:
        check_ttl(ttl_s)
        request = rpc_pb2.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        # A lease whose answer was lost has no keys and ends by itself, so asking twice does no harm.
        answer = await self._channels.ask(
            lambda member: member.lease.LeaseGrant,
            request,
            doing="a lease grant",
            timeout_s=timeout_s,
            send_again=True,
        )
        if answer.error or answer.ID <= 0:
            raise StoreError(f"etcd granted no lease of {ttl_s} s: {answer.error!r}")
        return answer.ID

    async def keep_alive(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        async def send(member: Member, left_s: float) -> int:
            stream = member.lease.LeaseKeepAlive(None, timeout=left_s, metadata=self._channels.metadata())
            try:
                await stream.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease_id))
                answer = await stream.read()
            finally:
                stream.cancel()
            if not isinstance(answer, rpc_pb2.LeaseKeepAliveResponse):
                raise StoreUnavailableError(f"etcd at {member.endpoint} ended a keep-alive without an answer")
            return answer.TTL

        left_s = await self._channels.call(send, doing="a keep-alive", timeout_s=timeout_s, send_again=True)
        if left_s <= 0:
            raise LeaseLostError(f"lease {lease_id} has expired or was revoked", hint="grant a new one")

    async def revoke_lease(self, lease_id: int, *, timeout_s: float = 5.0) -> None:
        request = rpc_pb2.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._channels.ask(
                lambda member: member.lease.LeaseRevoke,
                request,
                doing="a lease's end",
                timeout_s=timeout_s,
                send_again=True,
            )
        except LeaseLostError:
            pass

    async def compact(self, revision: int, *, timeout_s: float = 5.0) -> None:
        """Forgets the changes up to `revision`, those of other users of this etcd too."""
        request = rpc_pb2.CompactionRequest(revision=revision)
        try:
            await self._channels.ask(
                lambda member: member.kv.Compact,
                request,
                doing="a compaction",
                timeout_s=timeout_s,
                send_again=True,
            )
        except CompactedError:
            pass

    @asynccontextmanager
    async def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        check_after_revision(after_revision)
        first, end = key_span(prefix)
        watch = EtcdWatch(
            self._channels,
            span=(self._namespace + first, self._namespace + end),
            namespace_bytes=len(self._namespace),
            after_revision=after_revision,
            clock=self._clock,
        )
        try:
            yield watch
        finally:
            watch.close()

    async def close(self) -> None:
        await self._channels.close()

    async def _after_full(
        self, error: StoreFullError, operations: Sequence[Put | Delete], *, before: int, timeout_s: float
    ) -> TxnResult:
        """The one request that takes etcd over its quota is carried out and answered with "no space" all
        the same. A key that it puts tells which it was: a put that happened has a new revision."""
        put = next((operation for operation in operations if isinstance(operation, Put)), None)
        item = await self.get(put.key, timeout_s=timeout_s) if put is not None else None
        if put is None or item is None or item.mod_revision <= before:
            raise error
        if before and (item.value, item.lease_id) == (put.value, put.lease_id):
            return TxnResult(succeeded=True, revision=item.mod_revision)
        raise StoreUnavailableError(
            f"etcd is out of space, and {put.key!r} was changed meanwhile",
            hint="the write may have happened: read to find out",
        ) from error

    async def _pages(self, first: bytes, end: bytes, limit: int, deadline_s: float) -> RangeResult:
        """All pages at the first one's revision, until `limit` keys or RANGE_BYTES_MAX are reached."""
        items: list[KeyValue] = []
        size_bytes = 0
        request = rpc_pb2.RangeRequest(key=first, range_end=end)
        while True:
            request.limit = min(limit - len(items), RANGE_PAGE_KEYS)
            left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
            answer = await self._range(request, timeout_s=left_s)
            request.revision = request.revision or answer.header.revision
            for kv in answer.kvs:
                if size_bytes >= RANGE_BYTES_MAX:
                    return RangeResult(tuple(items), request.revision, more=True)
                items.append(self._key_value(kv))
                size_bytes += len(kv.value)
            if not answer.more or len(items) == limit:
                return RangeResult(tuple(items), request.revision, more=answer.more)
            request.key = answer.kvs[-1].key + b"\0"

    async def _range(self, request: rpc_pb2.RangeRequest, *, timeout_s: float) -> rpc_pb2.RangeResponse:

        answer = await self._channels.ask(
            lambda member: member.kv.Range, request, doing="a read", timeout_s=timeout_s, send_again=True
        )
        self._saw(answer.header)
        return answer

    def _saw(self, header: rpc_pb2.ResponseHeader) -> None:
        self._revision_seen = max(self._revision_seen, header.revision)

    def _compare(self, compare: Compare) -> rpc_pb2.Compare:
        key = self._namespace + encode_key(compare.key)
        if compare.field == "create":
            return rpc_pb2.Compare(key=key, target=rpc_pb2.Compare.CREATE, create_revision=compare.revision)
        return rpc_pb2.Compare(key=key, target=rpc_pb2.Compare.MOD, mod_revision=compare.revision)

    def _operation(self, operation: Put | Delete) -> rpc_pb2.RequestOp:
        key = self._namespace + encode_key(operation.key)
        if isinstance(operation, Delete):
            return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
        put = rpc_pb2.PutRequest(key=key, value=operation.value, lease=operation.lease_id)
        return rpc_pb2.RequestOp(request_put=put)

    def _key_value(self, kv: kv_pb2.KeyValue) -> KeyValue:
        try:
            key = kv.key[len(self._namespace) :].decode()
        except UnicodeDecodeError as error:
            raise StoreCorruptError(f"{self.address} holds a key that is not UTF-8: {error}") from error
        return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)
