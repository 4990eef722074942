"""The membership of an etcd cluster: list, add, promote and remove members, their status, defragmentation.

    async with open_etcd_cluster(address) as cluster:
        members = await cluster.list_members()

Does not start processes (supervisor/etcd_member.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import urlsplit

import grpc.aio

from genie.controller.store.etcd_address import EtcdAddress
from genie.controller.store.etcd_channels import EtcdChannels, EtcdMember, EtcdResponse
from genie.controller.store.etcd_errors import NO_LEADER_MESSAGE
from genie.controller.store.etcd_proto import rpc_pb2
from genie.errors import (
    GenieError,
    OtherStoreClusterError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from genie.processes.clock import Clock, SystemClock

ETCD_CALL_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 2.0
_DEFRAGMENT_TIMEOUT_S = 120.0
_TRANSIENT_ERROR_RETRY_S = 0.2
# Conditions that end by themselves: another server is joining, or the learner is still catching up.
_TRANSIENT_ERROR_TEXTS = (
    "in sync with leader",
    "too many learner",
    "not enough started members",
    "unhealthy cluster",
)

_Request = TypeVar("_Request")
_Response = TypeVar("_Response", bound=EtcdResponse)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberInfo:
    member_id: int
    name: str
    """Empty until the member has started once."""
    peer_url: str
    endpoint: str
    """HOST:PORT for clients; empty until the member has started once."""
    is_learner: bool

    @property
    def label(self) -> str:
        """The name, or the ID in hexadecimal digits as etcd prints it."""
        return self.name or f"{self.member_id:x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """`problem` says why the member did not answer, or that it belongs to another cluster; the other values
    are empty then."""

    info: MemberInfo
    problem: str = ""
    belongs_to_other_cluster: bool = False
    version: str = ""
    is_leader: bool = False
    size_bytes: int = 0
    used_bytes: int = 0
    revision: int = 0
    alarms: tuple[str, ...] = ()

    @property
    def fragmented_bytes(self) -> int:
        """Free pages inside the file, which defragmentation returns to the file system."""
        return max(self.size_bytes - self.used_bytes, 0)


class EtcdCluster:
    """Created by `open_etcd_cluster` inside the running event loop."""

    def __init__(self, address: EtcdAddress, channels: EtcdChannels, clock: Clock) -> None:
        self._address = address
        self._channels = channels
        self._clock = clock

    async def list_members(
        self, *, timeout_s: float = ETCD_CALL_TIMEOUT_S, linearizable: bool = True
    ) -> tuple[MemberInfo, ...]:
        """Without `linearizable`, the list as the first member that responds knows it, also without a
        majority."""
        response = await self._fetch_member_list(timeout_s=timeout_s, linearizable=linearizable)
        return _to_member_infos(response.members)

    async def fetch_cluster_id(self, *, timeout_s: float = ETCD_CALL_TIMEOUT_S) -> str:
        """The ID that etcd gave the cluster when it was created, in hexadecimal digits."""
        response = await self._fetch_member_list(timeout_s=timeout_s, linearizable=False)
        return f"{response.header.cluster_id:x}"

    async def _fetch_member_list(self, *, timeout_s: float, linearizable: bool) -> rpc_pb2.MemberListResponse:
        return await self._call_any_member(
            lambda member: member.cluster_stub.MemberList,
            rpc_pb2.MemberListRequest(linearizable=linearizable),
            action="list members",
            timeout_s=timeout_s,
            requires_leader=linearizable,
        )

    async def add_learner(
        self, peer_url: str, *, timeout_s: float
    ) -> tuple[MemberInfo, tuple[MemberInfo, ...]]:
        """Adds a member that does not vote yet. Returns it and all members."""
        response = await self._retry_while_transient(
            lambda remaining_s: self._call_any_member(
                lambda member: member.cluster_stub.MemberAdd,
                rpc_pb2.MemberAddRequest(peerURLs=[peer_url], isLearner=True),
                action="add member",
                timeout_s=remaining_s,
                idempotent=False,
            ),
            timeout_s=timeout_s,
        )
        return _to_member_info(response.member), _to_member_infos(response.members)

    async def promote_learner(self, member_id: int, *, timeout_s: float) -> None:
        """Makes a learner a voting member as soon as it has caught up with the leader."""
        try:
            await self._retry_while_transient(
                lambda remaining_s: self._call_any_member(
                    lambda member: member.cluster_stub.MemberPromote,
                    rpc_pb2.MemberPromoteRequest(ID=member_id),
                    action="promote member",
                    timeout_s=remaining_s,
                    idempotent=False,
                ),
                timeout_s=timeout_s,
            )
        except StoreError:
            # A lost reply: the promotion may have been applied.
            if any(each.member_id == member_id and not each.is_learner for each in await self.list_members()):
                return
            raise

    async def remove_member(self, member_id: int, *, timeout_s: float = ETCD_CALL_TIMEOUT_S) -> None:
        """Idempotent."""
        try:
            await self._call_any_member(
                lambda member: member.cluster_stub.MemberRemove,
                rpc_pb2.MemberRemoveRequest(ID=member_id),
                action="remove member",
                timeout_s=timeout_s,
            )
        except StoreError:
            if any(each.member_id == member_id for each in await self.list_members()):
                raise

    async def fetch_statuses(self) -> tuple[MemberStatus, ...]:
        """Status of every member, read from the member itself. Without a majority, the list is that of any
        member that responds; if none does, only the addresses are known."""
        try:
            members = await self.list_members()
        except StoreUnavailableError:
            members = await self._list_known_members()
        return tuple(await asyncio.gather(*(self._fetch_status(member) for member in members)))

    async def _list_known_members(self) -> tuple[MemberInfo, ...]:
        try:
            return await self.list_members(linearizable=False)
        except StoreUnavailableError:
            return tuple(_member_known_by_endpoint(endpoint) for endpoint in self._address.endpoints)

    async def defragment(self, endpoint: str) -> None:
        """Defragments one member, which does not serve requests meanwhile."""
        async with open_etcd_cluster(self._address_with_only(endpoint), clock=self._clock) as one:
            await one._call_any_member(
                lambda member: member.maintenance_stub.Defragment,
                rpc_pb2.DefragmentRequest(),
                action="defragment",
                timeout_s=_DEFRAGMENT_TIMEOUT_S,
                idempotent=False,
            )

    async def clear_space_alarm(self) -> None:
        """Allows writes again after a member has reached its quota and was compacted and defragmented."""
        await self._call_any_member(
            lambda member: member.maintenance_stub.Alarm,
            rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.DEACTIVATE, alarm=rpc_pb2.NOSPACE),
            action="clear alarm",
            timeout_s=ETCD_CALL_TIMEOUT_S,
        )

    async def _fetch_status(self, member: MemberInfo) -> MemberStatus:
        if not member.endpoint:
            return MemberStatus(info=member, problem="has not started yet")
        try:
            async with open_etcd_cluster(self._address_with_only(member.endpoint), clock=self._clock) as one:
                status = await one._call_any_member(
                    lambda each: each.maintenance_stub.Status,
                    rpc_pb2.StatusRequest(),
                    action="status",
                    timeout_s=_STATUS_TIMEOUT_S,
                    requires_leader=False,
                )
        except OtherStoreClusterError:
            problem = "belongs to another etcd cluster"
            return MemberStatus(info=member, problem=problem, belongs_to_other_cluster=True)
        except GenieError as error:
            return MemberStatus(info=member, problem=_shorten_problem(error))
        return MemberStatus(
            info=member,
            version=status.version,
            is_leader=status.leader == member.member_id,
            size_bytes=status.dbSize,
            used_bytes=status.dbSizeInUse,
            revision=status.header.revision,
            alarms=tuple(status.errors),
        )

    def _address_with_only(self, endpoint: str) -> EtcdAddress:
        return replace(self._address, endpoints=(endpoint,))

    async def _call_any_member(
        self,
        select: Callable[[EtcdMember], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]],
        request: _Request,
        *,
        action: str,
        timeout_s: float,
        idempotent: bool = True,
        requires_leader: bool = True,
    ) -> _Response:
        return await self._channels.call_unary(
            select,
            request,
            action=action,
            timeout_s=timeout_s,
            idempotent=idempotent,
            requires_leader=requires_leader,
        )

    async def _retry_while_transient(
        self, call: Callable[[float], Awaitable[_Response]], *, timeout_s: float
    ) -> _Response:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            remaining_s = deadline_s - loop.time()
            try:
                return await call(max(min(remaining_s, ETCD_CALL_TIMEOUT_S), 0.001))
            except (StoreError, StoreUnavailableError) as error:
                is_transient = any(text in error.message for text in _TRANSIENT_ERROR_TEXTS)
                if not is_transient or remaining_s < _TRANSIENT_ERROR_RETRY_S:
                    raise
            await self._clock.sleep(_TRANSIENT_ERROR_RETRY_S)


@asynccontextmanager
async def open_etcd_cluster(
    address: EtcdAddress, *, clock: Clock | None = None
) -> AsyncIterator[EtcdCluster]:
    clock = clock or SystemClock()
    channels = EtcdChannels(address, clock=clock)
    try:
        yield EtcdCluster(address, channels, clock)
    finally:
        await channels.close()


def _shorten_problem(error: GenieError) -> str:
    if isinstance(error, StoreAccessError):
        return error.message.partition(":")[0]  # the rest is the text of gRPC
    if not isinstance(error, StoreUnavailableError):
        return error.message
    if NO_LEADER_MESSAGE in error.message:
        return "has no leader"
    return "refused the connection" if "connection refused" in error.message.lower() else "no response"


def _member_known_by_endpoint(endpoint: str) -> MemberInfo:
    return MemberInfo(member_id=0, name=endpoint, peer_url="", endpoint=endpoint, is_learner=False)


def _to_member_infos(members: Iterable[rpc_pb2.Member]) -> tuple[MemberInfo, ...]:
    return tuple(sorted(map(_to_member_info, members), key=lambda member: (member.name, member.member_id)))


def _to_member_info(member: rpc_pb2.Member) -> MemberInfo:
    client_urls = [urlsplit(url).netloc for url in member.clientURLs]
    return MemberInfo(
        member_id=member.ID,
        name=member.name,
        peer_url=next(iter(member.peerURLs), ""),
        endpoint=next(iter(client_urls), ""),
        is_learner=member.isLearner,
    )
