"""gRPC channels to the endpoints of one etcd cluster: endpoint selection, login and retries.

An endpoint is used only after its version was checked on this connection, and that it belongs to the etcd
cluster of the address, or to the one that was used first: after a restore, two clusters can have members at
known endpoints. If TLS or the login fails, the files that the URL names are read again, so that a replaced
certificate or password takes effect: a password from the next login on, certificates on new channels, and
pending calls on the old ones fail. Reads are retried on another endpoint. A write is sent once: if its
response is lost, it is unknown whether it was applied, and a retry could conflict with itself.

The calls are in etcd.py, the watch stream in etcd_watch.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from genie.controller.store.etcd_address import EtcdAddress, read_parameter_file
from genie.controller.store.etcd_errors import (
    NO_LEADER_MESSAGE,
    check_etcd_version,
    is_rejected_by_learner,
    is_tls_failure,
    is_token_rejected,
    to_genie_error,
    without_grpc_address,
)
from genie.controller.store.etcd_proto import rpc_pb2, rpc_pb2_grpc
from genie.errors import ConfigError, OtherStoreClusterError, StoreAccessError, StoreUnavailableError
from genie.processes.call_thread import DaemonPool
from genie.processes.clock import Clock

log = logging.getLogger(__name__)

MEMBER_PROBE_TIMEOUT_S = 1.0
CALL_RETRY_INTERVAL_S = 0.05
CALL_END_WAIT_TIMEOUT_S = 0.5
REPLACED_CHANNEL_GRACE_S = 2.0
"""For calls of other tasks on the channels to endpoints that were replaced."""
SECRETS_READ_INTERVAL_S = 1.0
"""Minimum time between two reads of the certificate and password files."""
SECRETS_READ_TIMEOUT_S = 0.25
"""The caller has a deadline of its own, and the files may be on a network disk that does not respond."""
RANGE_PAGE_KEYS = 256
# One page of the largest values that a server accepts by default, plus framing.
_RESPONSE_BYTES_MAX = RANGE_PAGE_KEYS * 1600 * 1024
_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _RESPONSE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Detects a lost peer. etcd closes connections that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Otherwise channels of one process to the same endpoint share a connection and its failures.
    ("grpc.use_local_subchannel_pool", 1),
]

_Result = TypeVar("_Result")
_GrpcRequest = TypeVar("_GrpcRequest")
_GrpcResponse = TypeVar("_GrpcResponse", bound="EtcdResponse")
GrpcMetadata = tuple[tuple[str, str], ...]


class EtcdResponse(Protocol):
    @property
    def header(self) -> rpc_pb2.ResponseHeader: ...


class EtcdMember:
    """One endpoint: its channel and stubs."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.kv_stub = rpc_pb2_grpc.KVStub(channel)
        self.lease_stub = rpc_pb2_grpc.LeaseStub(channel)
        self.watch_stub = rpc_pb2_grpc.WatchStub(channel)
        self.maintenance_stub = rpc_pb2_grpc.MaintenanceStub(channel)
        self.auth_stub = rpc_pb2_grpc.AuthStub(channel)
        self.cluster_stub = rpc_pb2_grpc.ClusterStub(channel)
        self.is_checked = False
        self.is_replaced = False
        """Its channel is closed, because others with new endpoints or certificates replace it."""

    def is_checked_and_connected(self) -> bool:
        return self.is_checked and self.channel.get_state() is grpc.ChannelConnectivity.READY


class EtcdChannels:
    """Create it inside the running event loop: grpc.aio binds channels to the current loop."""

    def __init__(self, address: EtcdAddress, *, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._secrets = _read_secrets(address)
        self._members = self._open_members()
        self._cluster_id = int(address.cluster_id or "0", 16)
        """0 until a member has responded, if the address has none."""
        self._login_token = ""
        self._secrets_read_threads = DaemonPool(1, name="genie-etcd-files")
        self._secrets_read_at_s = -math.inf
        self.is_closed = False

    def call_metadata(self, *, requires_leader: bool = True) -> GrpcMetadata:
        # hasleader: a partitioned member fails the request instead of letting it time out.
        always = (("hasleader", "true"),) if requires_leader else ()
        return (*always, ("token", self._login_token)) if self._login_token else always

    async def call_unary(
        self,
        select_stub: Callable[[EtcdMember], grpc.aio.UnaryUnaryMultiCallable[_GrpcRequest, _GrpcResponse]],
        request: _GrpcRequest,
        *,
        action: str,
        timeout_s: float,
        idempotent: bool,
        requires_leader: bool = True,
    ) -> _GrpcResponse:
        """Sends a unary request on the stub that `select_stub` selects. Retries and errors as in
        `call_with_retries`. Without `requires_leader`, a member answers also while etcd has no leader."""

        async def send(member: EtcdMember, remaining_s: float) -> _GrpcResponse:
            metadata = self.call_metadata(requires_leader=requires_leader)
            response = await select_stub(member)(request, timeout=remaining_s, metadata=metadata)
            self.check_cluster(member, response.header)
            return response

        return await self.call_with_retries(send, action=action, timeout_s=timeout_s, idempotent=idempotent)

    async def call_with_retries(
        self,
        send: Callable[[EtcdMember, float], Awaitable[_Result]],
        *,
        action: str,
        timeout_s: float,
        idempotent: bool,
    ) -> _Result:
        """Calls `send` with a member and a timeout in seconds; retries on other members if `idempotent`."""
        deadline_s = self._now_s() + timeout_s
        login_was_reset = False
        while True:
            member = await self.get_ready_member(deadline_s)
            try:
                return await self.await_translating_channel_close(
                    member, send(member, self._single_attempt_timeout_s(deadline_s, idempotent))
                )
            except StoreUnavailableError:
                self.check_channels_open()
                is_overdue = self._now_s() + CALL_RETRY_INTERVAL_S >= deadline_s
                is_usable = member.is_checked and not member.is_replaced
                if is_usable or not idempotent or is_overdue:
                    raise
            except grpc.aio.AioRpcError as error:
                if is_token_rejected(error) and not login_was_reset:
                    login_was_reset = True
                    self.forget_login_token(member)
                    continue
                may_retry = self._can_retry_call(error, member, idempotent)
                if not may_retry or self._now_s() + CALL_RETRY_INTERVAL_S >= deadline_s:
                    raise to_genie_error(
                        error, action=action, endpoint=member.endpoint, idempotent=idempotent
                    ) from error
            await self._clock.sleep(CALL_RETRY_INTERVAL_S)

    async def get_ready_member(self, deadline_s: float) -> EtcdMember:
        """Returns a connected member of a supported version; the last one that worked is preferred."""
        while True:
            self.check_channels_open()
            reasons: dict[str, str] = {}
            of_other_clusters: list[OtherStoreClusterError] = []
            members = self._members
            for member in list(members):
                try:
                    await self._connect_and_check_member(member, deadline_s)
                    return member
                except grpc.aio.AioRpcError as error:
                    self.check_channels_open()
                    reasons[member.endpoint] = error.details() or error.code().name
                    self.move_member_to_end(member)
                except OtherStoreClusterError as error:
                    of_other_clusters.append(error)
                    reasons[member.endpoint] = error.message.removeprefix(f"etcd at {member.endpoint}: ")
                    self.move_member_to_end(member)
                except StoreUnavailableError:
                    if not member.is_replaced or self.is_closed:
                        raise
                if members is not self._members:
                    break
            else:
                await self._raise_if_all_failed_on_tls(reasons, deadline_s)
            if self._now_s() + CALL_RETRY_INTERVAL_S >= deadline_s:
                raise _make_unreachable_error(reasons, of_other_clusters)
            await self._clock.sleep(CALL_RETRY_INTERVAL_S)

    async def replace_address(self, address: EtcdAddress) -> None:
        """Connects to these endpoints with the current contents of the certificate files.

        Calls under way get a moment to finish; watches reconnect."""
        loop = asyncio.get_running_loop()
        secrets = await loop.run_in_executor(self._secrets_read_threads, _read_secrets, address)
        self.check_channels_open()
        self._address, self._secrets, self._login_token = address, secrets, ""
        await self._replace_member_channels(grace_s=REPLACED_CHANNEL_GRACE_S)

    def move_member_to_end(self, member: EtcdMember) -> None:
        """Moves the member to the end of the preference order."""
        if member in self._members:
            self._members.remove(member)
            self._members.append(member)

    def forget_login_token(self, member: EtcdMember) -> None:
        """Makes the next call log in again. Raises StoreAccessError when the URL has no user."""
        if not self._address.user:
            raise StoreAccessError(
                f"etcd at {member.endpoint} requires a user",
                hint="add ?user=NAME&password_file=FILE to the store URL",
            )
        self._login_token = ""

    def check_channels_open(self) -> None:
        if self.is_closed:
            raise StoreUnavailableError(f"the store {self._address} is closed")

    async def await_translating_channel_close(
        self, member: EtcdMember, response: Awaitable[_Result]
    ) -> _Result:
        """Raises StoreUnavailableError instead of the CancelledError that grpc.aio raises in a call whose
        channel is closed by another task."""
        try:
            return await response
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                self._check_channel_open(member)
            raise

    def check_cluster(self, member: EtcdMember, header: rpc_pb2.ResponseHeader) -> None:
        """Raises OtherStoreClusterError if the member that sent this header belongs to another etcd cluster.

        gRPC reconnects by itself, so every response is checked, except those without a header (to
        Defragment). A write that was sent while the connection was replaced may have been applied there: that
        of a leader fails on its fencing token, and a campaign on its lease, which does not exist there."""
        if header.cluster_id not in (0, self._cluster_id):
            member.is_checked = False
            raise OtherStoreClusterError(
                f"etcd at {member.endpoint}: belongs to etcd cluster {header.cluster_id:x} instead of "
                f"{self._cluster_id:x}, which this process uses",
                hint="if the store was restored into the other cluster, restart this process",
            )

    async def close(self) -> None:
        """Idempotent. Pending calls fail with StoreUnavailableError."""
        self.is_closed = True
        # Drop the references: grpc.aio keeps a thread and two sockets while any channel is referenced.
        members, self._members = self._members, []
        for member in members:
            await member.channel.close(None)
        self._secrets_read_threads.shutdown(wait=False, cancel_futures=True)
        await _wait_for_grpc_call_tasks()

    async def _connect_and_check_member(self, member: EtcdMember, deadline_s: float) -> None:
        # Another task may close the channel during each await; grpc.aio then raises UsageError for new calls.
        self._check_channel_open(member)
        # In this order: a deprioritized member may still be connected.
        if not member.is_checked_and_connected():
            await self._check_member(member, deadline_s)
            self._check_channel_open(member)
        if self._address.user and not self._login_token:
            await self._log_in(member, deadline_s)
            self._check_channel_open(member)

    def _check_channel_open(self, member: EtcdMember) -> None:
        self.check_channels_open()
        if member.is_replaced:
            raise StoreUnavailableError(
                f"etcd at {member.endpoint}: the connection was replaced because the endpoints or the "
                "certificate files of the store have changed"
            )

    async def _check_member(self, member: EtcdMember, deadline_s: float) -> None:
        member.is_checked = False  # for concurrent calls: the channel may have connected to another server
        remaining_s = max(0.001, min(MEMBER_PROBE_TIMEOUT_S, deadline_s - self._now_s()))
        status = await self.await_translating_channel_close(
            member, member.maintenance_stub.Status(rpc_pb2.StatusRequest(), timeout=remaining_s)
        )
        check_etcd_version(status.version, endpoint=member.endpoint)
        self._cluster_id = self._cluster_id or status.header.cluster_id
        self.check_cluster(member, status.header)
        log.debug("store %s: endpoint %s is etcd %s", self._address, member.endpoint, status.version)
        member.is_checked = True

    async def _log_in(self, member: EtcdMember, deadline_s: float) -> None:
        request = rpc_pb2.AuthenticateRequest(name=self._address.user, password=self._secrets.password)
        remaining_s = max(0.001, deadline_s - self._now_s())
        try:
            response = await self.await_translating_channel_close(
                member, member.auth_stub.Authenticate(request, timeout=remaining_s)
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                await self._reload_secrets(deadline_s)
                raise StoreAccessError(
                    f"etcd at {member.endpoint} rejected user {self._address.user!r}: {error.details()}",
                    hint=f"check ?user= and the password in {self._address.password_file}",
                ) from error
            raise
        self._login_token = response.token

    def _can_retry_call(self, error: grpc.aio.AioRpcError, member: EtcdMember, idempotent: bool) -> bool:
        lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if lost:
            self.move_member_to_end(member)
        if is_rejected_by_learner(error):
            self.move_member_to_end(member)
            return True
        # Without a leader, the member rejects the request before applying it.
        return lost and (idempotent or error.details() == NO_LEADER_MESSAGE)

    def _single_attempt_timeout_s(self, deadline_s: float, idempotent: bool) -> float:
        remaining_s = max(0.001, deadline_s - self._now_s())
        # Reserve time for another endpoint in case this one does not respond.
        return remaining_s / 2 if idempotent and len(self._members) > 1 else remaining_s

    async def _raise_if_all_failed_on_tls(self, reasons: dict[str, str], deadline_s: float) -> None:
        if reasons and all(is_tls_failure(reason) for reason in reasons.values()):
            await self._reload_secrets(deadline_s)
            raise StoreAccessError(
                f"TLS handshake with etcd failed: {_format_failure_reasons(reasons)}",
                hint="check ?ca=, ?cert= and ?key= of the store URL and the server's certificate",
            )

    def _open_members(self) -> list[EtcdMember]:
        credentials = self._secrets.channel_credentials() if self._address.uses_tls else None
        return [
            EtcdMember(endpoint, _open_channel(endpoint, credentials, server_name=self._address.server_name))
            for endpoint in self._address.endpoints
        ]

    async def _reload_secrets(self, deadline_s: float) -> None:
        """Uses the password and certificates that the files contain now, from the next call on. Files that
        cannot be read change nothing."""
        secrets = await self._try_read_secrets(deadline_s)
        self.check_channels_open()
        if secrets is None or secrets == self._secrets:
            return
        log.info("store %s: its certificate or password files have changed", self._address)
        is_only_password = replace(secrets, password=self._secrets.password) == self._secrets
        self._secrets, self._login_token = secrets, ""
        if not is_only_password:
            # Without a grace period: the caller has a deadline, and the old credentials do not work.
            await self._replace_member_channels(grace_s=None)

    async def _replace_member_channels(self, *, grace_s: float | None) -> None:
        """Opens new channels. Calls on the old ones that take longer than `grace_s` fail as unavailable."""
        replaced, self._members = self._members, self._open_members()
        for member in replaced:
            member.is_replaced = True
        await asyncio.gather(*(member.channel.close(grace_s) for member in replaced))

    async def _try_read_secrets(self, deadline_s: float) -> _Secrets | None:
        """None if the files were read a moment ago or cannot be read in time."""
        now_s = self._now_s()
        if now_s - self._secrets_read_at_s < SECRETS_READ_INTERVAL_S:
            return None
        self._secrets_read_at_s = now_s
        reading = asyncio.get_running_loop().run_in_executor(
            self._secrets_read_threads, _read_secrets, self._address
        )
        try:
            async with asyncio.timeout(min(SECRETS_READ_TIMEOUT_S, max(0.0, deadline_s - now_s))):
                return await reading
        except (ConfigError, TimeoutError) as error:
            log.debug("store %s: cannot read its certificate and password files: %s", self._address, error)
            return None

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def _wait_for_grpc_call_tasks() -> None:
    """Waits for grpc.aio's per-call tasks, which outlive their call for a moment.

    There is no handle on them, so they are identified by name; if the name changes, close() only returns
    a little earlier."""
    current = asyncio.current_task()
    ending = [
        task
        for task in asyncio.all_tasks()
        if task is not current and "_AioCall." in getattr(task.get_coro(), "__qualname__", "")
    ]
    if ending:
        await asyncio.wait(ending, timeout=CALL_END_WAIT_TIMEOUT_S)


def _open_channel(
    endpoint: str, credentials: grpc.ChannelCredentials | None, *, server_name: str
) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
    name = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return grpc.aio.secure_channel(endpoint, credentials, options=[*_CHANNEL_OPTIONS, *name])


@dataclass(frozen=True)
class _Secrets:
    """The content of the files that the store URL names; None or empty where it names none."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None
    password: str

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca, private_key=self.key, certificate_chain=self.certificate
        )


def _read_secrets(address: EtcdAddress) -> _Secrets:
    def read(path: Path | None, parameter: str) -> bytes | None:
        return None if path is None else read_parameter_file(path, parameter=parameter)

    raw_password = read(address.password_file, "password_file") or b""
    try:
        password = raw_password.decode().strip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"the password file {address.password_file} is not valid UTF-8") from None
    return _Secrets(
        ca=read(address.ca_file, "ca"),
        certificate=read(address.certificate_file, "cert"),
        key=read(address.key_file, "key"),
        password=password,
    )


def _format_failure_reasons(reasons: dict[str, str]) -> str:
    return "; ".join(f"{endpoint}: {without_grpc_address(reason)}" for endpoint, reason in reasons.items())


def _make_unreachable_error(
    reasons: dict[str, str], of_other_clusters: list[OtherStoreClusterError]
) -> StoreUnavailableError:
    if of_other_clusters and len(of_other_clusters) == len(reasons):
        return of_other_clusters[0]
    return StoreUnavailableError(
        f"could not reach any etcd endpoint: {_format_failure_reasons(reasons)}",
        hint=of_other_clusters[0].hint if of_other_clusters else "is etcd running and reachable?",
    )
