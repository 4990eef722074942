"""A fake etcd server for faults that a real one cannot produce: bad versions, lost responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import grpc.aio

from genie.controller.store.etcd_proto import kv_pb2, rpc_pb2, rpc_pb2_grpc

Context = grpc.aio.ServicerContext[object, object]
# One response of a watch stream, or None: the connection is cut here.
Script = list[rpc_pb2.WatchResponse | None]


@dataclass
class FakeEtcd(
    rpc_pb2_grpc.KVServicer,
    rpc_pb2_grpc.LeaseServicer,
    rpc_pb2_grpc.WatchServicer,
    rpc_pb2_grpc.MaintenanceServicer,
):
    """Records every call by name in `calls`. `fail` maps names to statuses to return, in order; after
    that, calls succeed. Calls in `silent` get no response."""

    version: str = "3.4.23"
    fail: dict[str, list[tuple[grpc.StatusCode, str]]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    stored: list[kv_pb2.KeyValue] = field(default_factory=list)
    watches: list[Script] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    requests: list[object] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    endpoint: str = ""
    _server: grpc.aio.Server | None = None

    async def __aenter__(self) -> FakeEtcd:
        self._server = grpc.aio.server()
        rpc_pb2_grpc.add_MaintenanceServicer_to_server(self, self._server)
        rpc_pb2_grpc.add_KVServicer_to_server(self, self._server)
        rpc_pb2_grpc.add_LeaseServicer_to_server(self, self._server)
        rpc_pb2_grpc.add_WatchServicer_to_server(self, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await self._server.stop(0)
        self._server = None

    async def Status(self, request: rpc_pb2.StatusRequest, context: Context) -> rpc_pb2.StatusResponse:  # noqa: N802
        return rpc_pb2.StatusResponse(version=self.version)

    async def Range(self, request: rpc_pb2.RangeRequest, context: Context) -> rpc_pb2.RangeResponse:  # noqa: N802
        await self._note("Range", request, context)
        found = [kv for kv in self.stored if kv.key == request.key]
        return rpc_pb2.RangeResponse(header=rpc_pb2.ResponseHeader(revision=7), kvs=found)

    async def Txn(self, request: rpc_pb2.TxnRequest, context: Context) -> rpc_pb2.TxnResponse:  # noqa: N802
        await self._note("Txn", request, context)
        return rpc_pb2.TxnResponse(header=rpc_pb2.ResponseHeader(revision=8), succeeded=True)

    async def LeaseGrant(  # noqa: N802
        self, request: rpc_pb2.LeaseGrantRequest, context: Context
    ) -> rpc_pb2.LeaseGrantResponse:
        await self._note("LeaseGrant", request, context)
        return rpc_pb2.LeaseGrantResponse(ID=11, TTL=request.TTL)

    async def Watch(  # noqa: N802
        self, requests: AsyncIterator[rpc_pb2.WatchRequest], context: Context
    ) -> AsyncIterator[rpc_pb2.WatchResponse]:
        await self._note("Watch", await anext(aiter(requests)), context)
        yield rpc_pb2.WatchResponse(created=True)
        for answer in self.watches.pop(0):
            if answer is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the test breaks the stream")
            else:
                yield answer
        await asyncio.Event().wait()

    async def _note(self, name: str, request: object, context: Context) -> None:
        self.calls.append(name)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if name in self.silent:
            await asyncio.Event().wait()
        planned = self.fail.get(name, [])
        if planned:
            await context.abort(*planned.pop(0))


class TcpProxy:
    """A proxy to `target` until it is cut."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    @property
    def endpoint(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        """Rejects new connections and closes the open ones."""
        assert self._server is not None
        self._server.close()
        await self._close_connections()

    async def redirect(self, target: str) -> None:
        """Closes the open connections; new ones are to `target`."""
        self._target = target
        await self._close_connections()

    async def _close_connections(self) -> None:
        for relay in list(self._relays):
            relay.cancel()
        if self._relays:
            await asyncio.wait(self._relays)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        self.connections += 1
        host, port = self._target.rsplit(":", 1)
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, there_writer))
                group.create_task(_pump(there_reader, writer))
        except asyncio.CancelledError:
            # created by start_server; awaited only by cut().
            pass
        finally:
            for end in (writer, there_writer):
                end.transport.abort()
            self._relays.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.transport.abort()
