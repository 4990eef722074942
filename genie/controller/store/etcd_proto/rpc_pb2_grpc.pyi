"""Types for the generated calls, by hand: protoc makes none. Only the client side and what tests serve."""

from __future__ import annotations

from typing import Any

import grpc.aio

from genie.controller.store.etcd_proto import rpc_pb2

class KVStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Range: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.RangeRequest, rpc_pb2.RangeResponse]
    Txn: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.TxnRequest, rpc_pb2.TxnResponse]
    Compact: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.CompactionRequest, rpc_pb2.CompactionResponse]

class WatchStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Watch: grpc.aio.StreamStreamMultiCallable[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse]

class LeaseStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    LeaseGrant: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.LeaseGrantRequest, rpc_pb2.LeaseGrantResponse]
    LeaseRevoke: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.LeaseRevokeRequest, rpc_pb2.LeaseRevokeResponse]
    LeaseKeepAlive: grpc.aio.StreamStreamMultiCallable[
        rpc_pb2.LeaseKeepAliveRequest, rpc_pb2.LeaseKeepAliveResponse
    ]

class MaintenanceStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Alarm: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.AlarmRequest, rpc_pb2.AlarmResponse]
    Status: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.StatusRequest, rpc_pb2.StatusResponse]
    Defragment: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.DefragmentRequest, rpc_pb2.DefragmentResponse]

class ClusterStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    MemberAdd: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.MemberAddRequest, rpc_pb2.MemberAddResponse]
    MemberRemove: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.MemberRemoveRequest, rpc_pb2.MemberRemoveResponse]
    MemberList: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.MemberListRequest, rpc_pb2.MemberListResponse]
    MemberPromote: grpc.aio.UnaryUnaryMultiCallable[
        rpc_pb2.MemberPromoteRequest, rpc_pb2.MemberPromoteResponse
    ]

class AuthStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Authenticate: grpc.aio.UnaryUnaryMultiCallable[rpc_pb2.AuthenticateRequest, rpc_pb2.AuthenticateResponse]

class KVServicer: ...
class WatchServicer: ...
class LeaseServicer: ...
class MaintenanceServicer: ...

# Any: a test's stand-in has only the methods it needs.
def add_KVServicer_to_server(servicer: Any, server: grpc.aio.Server) -> None: ...
def add_WatchServicer_to_server(servicer: Any, server: grpc.aio.Server) -> None: ...
def add_LeaseServicer_to_server(servicer: Any, server: grpc.aio.Server) -> None: ...
def add_MaintenanceServicer_to_server(servicer: Any, server: grpc.aio.Server) -> None: ...
