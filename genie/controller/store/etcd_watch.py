"""One watch on etcd: a stream that is resumed without a gap when it breaks.

Only the response being read is buffered here; etcd keeps the history.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from genie.controller.store.etcd_channels import CALL_RETRY_INTERVAL_S, EtcdChannels, EtcdMember
from genie.controller.store.etcd_errors import is_watch_denied, to_genie_error
from genie.controller.store.etcd_proto import kv_pb2, rpc_pb2
from genie.controller.store.protocol import WatchEvent
from genie.errors import (
    CompactedError,
    GenieError,
    StoreAccessError,
    StoreCorruptError,
    StoreError,
    StoreUnavailableError,
)
from genie.processes.clock import Clock

log = logging.getLogger(__name__)

WATCH_START_TIMEOUT_S = 5.0
# How long a broken stream is retried before the reader gets an error.
WATCH_RECONNECT_S_MAX = 10.0

_WatchStream = grpc.aio.StreamStreamCall[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse]


class EtcdWatch:
    """`span` and event keys include the namespace prefix of `namespace_bytes` bytes."""

    def __init__(
        self,
        channels: EtcdChannels,
        *,
        key_range: tuple[bytes, bytes],
        namespace_bytes: int,
        after_revision: int,
        clock: Clock,
    ) -> None:
        self._channels = channels
        self._key_range = key_range
        self._namespace_bytes = namespace_bytes
        self._clock = clock
        self._stream: _WatchStream | None = None
        self._member: EtcdMember | None = None
        self._received_events: deque[WatchEvent] = deque()
        # Seen: everything before `_last_revision`, and of `_last_revision` itself the first
        # `_seen_changes_of_last_revision` changes. The changes of one transaction can arrive in fragments,
        # with a reconnect between them.
        self._last_revision = after_revision
        self._seen_changes_of_last_revision = sys.maxsize
        self._changes_to_skip = self._seen_changes_of_last_revision
        self._stream_broken_since_s: float | None = None
        self._has_reauthenticated = False

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._received_events:
            await self._receive_response_or_reconnect()
        return self._received_events.popleft()

    async def _receive_response_or_reconnect(self) -> None:
        """Reads one response, or makes one attempt to reconnect after a transient error."""
        if self._stream is None:
            self._member = await self._channels.get_ready_member(self._reconnect_deadline_s())
        fault: GenieError
        try:
            if self._stream is None:
                response = await self._open_stream()
            else:
                response = await self._read_response(self._stream)
            self._handle_watch_response(response)
            return
        except grpc.aio.AioRpcError as error:
            fault = to_genie_error(error, action="watch", endpoint=self._endpoint, idempotent=True)
        except TimeoutError:
            fault = StoreUnavailableError(f"etcd at {self._endpoint}: starting a watch timed out")
        except StoreUnavailableError as error:
            fault = error
        except BaseException:
            # A cancelled reader may read again: grpc.aio has ended the stream, so start another.
            self.close()
            raise
        self.close()
        await self._back_off_or_raise_fault(fault)

    @property
    def _endpoint(self) -> str:
        return self._member.endpoint if self._member else "no endpoint"

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    async def _open_stream(self) -> rpc_pb2.WatchResponse:
        assert self._member is not None
        self._stream = stream = self._member.watch_stub.Watch(None, metadata=self._channels.call_metadata())
        first, end = self._key_range
        # One revision early, skipping known events: compaction to the revision of a delete can drop that
        # delete from etcd's history, and a watch from exactly there would miss it.
        create = rpc_pb2.WatchCreateRequest(
            key=first, range_end=end, start_revision=max(1, self._last_revision), fragment=True
        )
        self._changes_to_skip = self._seen_changes_of_last_revision
        async with asyncio.timeout(WATCH_START_TIMEOUT_S):
            await self._channels.await_translating_channel_close(
                self._member, stream.write(rpc_pb2.WatchRequest(create_request=create))
            )
            return await self._read_response(stream)

    async def _read_response(self, stream: _WatchStream) -> rpc_pb2.WatchResponse:
        assert self._member is not None
        response = await self._channels.await_translating_channel_close(self._member, stream.read())
        if not isinstance(response, rpc_pb2.WatchResponse):
            raise StoreUnavailableError(f"etcd at {self._endpoint} closed a watch stream")
        self._channels.check_cluster(self._member, response.header)
        return response

    async def _back_off_or_raise_fault(self, fault: GenieError) -> None:
        """Sleeps before the next attempt; raises `fault` if permanent or older than WATCH_RECONNECT_S_MAX."""
        self._channels.check_channels_open()
        if self._member is not None:
            self._channels.move_member_to_end(self._member)
        if not isinstance(fault, StoreUnavailableError) or isinstance(fault, StoreAccessError):
            raise fault
        now_s = asyncio.get_running_loop().time()
        if self._stream_broken_since_s is None:
            self._stream_broken_since_s = now_s
            log.info("watch on %r was interrupted, reconnecting: %s", self._key_range[0], fault)
        elif now_s - self._stream_broken_since_s > WATCH_RECONNECT_S_MAX:
            self._stream_broken_since_s = None
            raise fault
        await self._clock.sleep(CALL_RETRY_INTERVAL_S)

    def _reconnect_deadline_s(self) -> float:
        now_s = asyncio.get_running_loop().time()
        since_s = now_s if self._stream_broken_since_s is None else self._stream_broken_since_s
        return max(now_s + CALL_RETRY_INTERVAL_S, since_s + WATCH_RECONNECT_S_MAX)

    def _handle_watch_response(self, response: rpc_pb2.WatchResponse) -> None:
        if response.compact_revision > 0:
            raise CompactedError(
                f"cannot watch after revision {self._last_revision}: etcd is compacted up to revision "
                f"{response.compact_revision}",
                hint="range again and watch from the returned revision",
            )
        if response.canceled:
            if is_watch_denied(response.cancel_reason):
                self._reset_login_or_raise(response.cancel_reason)
            raise StoreUnavailableError(f"etcd at {self._endpoint} ended a watch: {response.cancel_reason!r}")
        if response.created:
            self._stream_broken_since_s = None
            self._has_reauthenticated = False
        for event in response.events:
            if self._record_change_and_check_is_new(event.kv.mod_revision):
                self._received_events.append(self._decode_event(event))

    def _reset_login_or_raise(self, reason: str) -> None:
        if self._has_reauthenticated or self._member is None:
            raise StoreError(
                f"etcd at {self._endpoint} rejected a watch: {reason!r}",
                hint="grant the user a role with read and write on the namespace",
            )
        self._has_reauthenticated = True
        self._channels.forget_login_token(self._member)

    def _record_change_and_check_is_new(self, revision: int) -> bool:
        if revision < self._last_revision:
            return False
        if revision > self._last_revision:
            self._last_revision, self._seen_changes_of_last_revision, self._changes_to_skip = revision, 1, 0
            return True
        if self._changes_to_skip > 0:
            self._changes_to_skip -= 1
            return False
        self._seen_changes_of_last_revision += 1
        return True

    def _decode_event(self, event: kv_pb2.Event) -> WatchEvent:
        try:
            key = event.kv.key[self._namespace_bytes :].decode()
        except UnicodeDecodeError as error:
            raise StoreCorruptError(
                f"etcd at {self._endpoint} contains a key that is not UTF-8: {error}"
            ) from error
        value = None if event.type == kv_pb2.Event.DELETE else event.kv.value
        return WatchEvent(key, value, event.kv.mod_revision)
