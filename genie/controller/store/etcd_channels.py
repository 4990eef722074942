"""gRPC channels to the endpoints of one etcd cluster: which to use, log in, try the next one.

An endpoint is used only after it has told its version on this connection. Reads may be sent
again to another endpoint. A write is sent once: when its answer is lost nobody can know
whether it happened, and sending it again could report a conflict with itself.

Not for: what the calls mean (etcd.py), the watch stream (etcd_watch.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from genie.controller.store.etcd_address import EtcdAddress, read_file
from genie.controller.store.etcd_faults import (
    NO_LEADER,
    check_version,
    is_tls_failure,
    is_token_refused,
    translate,
)
from genie.controller.store.etcd_proto import rpc_pb2, rpc_pb2_grpc
from genie.errors import ConfigError, StoreUnavailableError, TlsError
from genie.runtime.clock import Clock

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 1.0
RETRY_S = 0.05
SETTLE_S = 0.5
RANGE_PAGE_KEYS = 256
# A page of the largest requests that a server takes by default, with room for framing.
_ANSWER_BYTES_MAX = RANGE_PAGE_KEYS * 1600 * 1024
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _ANSWER_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Finds a peer that vanished without a word. etcd closes connections that ask more than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Else two channels of one process to one endpoint share a connection and its fate.
    ("grpc.use_local_subchannel_pool", 1),
]

T = TypeVar("T")
Q = TypeVar("Q")
A = TypeVar("A")
Metadata = tuple[tuple[str, str], ...]


class Member:
    """One endpoint: its channel and the calls that can be made on it."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.kv = rpc_pb2_grpc.KVStub(channel)
        self.lease = rpc_pb2_grpc.LeaseStub(channel)
        self.watch = rpc_pb2_grpc.WatchStub(channel)
        self.maintenance = rpc_pb2_grpc.MaintenanceStub(channel)
        self.auth = rpc_pb2_grpc.AuthStub(channel)
        self.checked = False

    def is_ready(self) -> bool:
        return self.checked and self.channel.get_state() is grpc.ChannelConnectivity.READY


class EtcdChannels:
    """Make it inside the running loop: grpc.aio binds channels to the loop they are made in."""

    def __init__(self, address: EtcdAddress, *, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._password = _read_password(address)
        credentials = _credentials(address)
        self._members = [Member(endpoint, _channel(endpoint, credentials)) for endpoint in address.endpoints]
        self._token = ""
        self.closed = False

    def metadata(self) -> Metadata:
        # hasleader: a member that is cut off from the rest says so instead of keeping us waiting.
        always = (("hasleader", "true"),)
        return (*always, ("token", self._token)) if self._token else always

    async def ask(
        self,
        pick: Callable[[Member], grpc.aio.UnaryUnaryMultiCallable[Q, A]],
        request: Q,
        *,
        doing: str,
        timeout_s: float,
        send_again: bool,
    ) -> A:
        """One request, one answer, on the call that `pick` names. Else as `call`."""

        def send(member: Member, left_s: float) -> Awaitable[A]:
            return pick(member)(request, timeout=left_s, metadata=self.metadata())

        return await self.call(send, doing=doing, timeout_s=timeout_s, send_again=send_again)

    async def call(
        self,
        send: Callable[[Member, float], Awaitable[T]],
        *,
        doing: str,
        timeout_s: float,
        send_again: bool,
    ) -> T:
        """`send` is given a member and the seconds it may take. `send_again` for what may happen twice."""
        deadline_s = self._now_s() + timeout_s
        logged_in_again = False
        while True:
            member = await self.usable(deadline_s)
            try:
                return await self._guard(send(member, self._attempt_s(deadline_s, send_again)))
            except grpc.aio.AioRpcError as error:
                if is_token_refused(error) and not logged_in_again:
                    logged_in_again = True
                    self.forget_login(member)
                    continue
                again = self._may_repeat(error, member, send_again)
                if not again or self._now_s() + RETRY_S >= deadline_s:
                    raise translate(error, doing=doing, endpoint=member.endpoint) from error
            await self._clock.sleep(RETRY_S)

    async def usable(self, deadline_s: float) -> Member:
        """A member that is connected and may be used, the last good one first."""
        while True:
            self.check_open()
            reasons: dict[str, str] = {}
            for member in list(self._members):
                try:
                    # In this order, and not any that is connected: one that we turned from may still be.
                    if not member.is_ready():
                        await self._probe(member, deadline_s)
                    if self._address.user and not self._token:
                        await self._log_in(member, deadline_s)
                    return member
                except grpc.aio.AioRpcError as error:
                    self.check_open()
                    reasons[member.endpoint] = error.details() or error.code().name
                    self.turn_from(member)
            self._raise_when_hopeless(reasons)
            if self._now_s() + RETRY_S >= deadline_s:
                raise StoreUnavailableError(
                    f"no etcd endpoint answers: {_listed(reasons)}", hint="is etcd running and reachable?"
                )
            await self._clock.sleep(RETRY_S)

    def turn_from(self, member: Member) -> None:
        """Others are asked before this one from now on."""
        if member in self._members:
            self._members.remove(member)
            self._members.append(member)

    def forget_login(self, member: Member) -> None:
        """The next use logs in anew. ConfigError when there is no user to log in."""
        if not self._address.user:
            raise ConfigError(
                f"etcd at {member.endpoint} wants a user",
                hint="give ?user=NAME&password_file=FILE in the store URL",
            )
        self._token = ""

    def check_open(self) -> None:
        if self.closed:
            raise StoreUnavailableError(f"the store {self._address} is closed")

    async def close(self) -> None:
        """Idempotent. Calls under way end with StoreUnavailableError."""
        self.closed = True
        # Let go of them: grpc.aio keeps a thread and two sockets as long as one channel is referenced.
        members, self._members = self._members, []
        for member in members:
            await member.channel.close(None)
        await _wait_for_ended_calls()

    async def _probe(self, member: Member, deadline_s: float) -> None:
        left_s = max(0.001, min(PROBE_TIMEOUT_S, deadline_s - self._now_s()))
        status = await self._guard(member.maintenance.Status(rpc_pb2.StatusRequest(), timeout=left_s))
        check_version(status.version, endpoint=member.endpoint)
        if not member.checked:
            log.info("store %s: endpoint %s is etcd %s", self._address, member.endpoint, status.version)
        member.checked = True

    async def _log_in(self, member: Member, deadline_s: float) -> None:
        request = rpc_pb2.AuthenticateRequest(name=self._address.user, password=self._password)
        left_s = max(0.001, deadline_s - self._now_s())
        try:
            answer = await self._guard(member.auth.Authenticate(request, timeout=left_s))
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                raise ConfigError(
                    f"etcd at {member.endpoint} refuses user {self._address.user!r}: {error.details()}",
                    hint=f"check ?user= and the password in {self._address.password_file}",
                ) from error
            raise
        self._token = answer.token

    async def _guard(self, answer: Awaitable[T]) -> T:
        """grpc.aio raises CancelledError in callers when their channel is closed; nobody cancelled them."""
        try:
            return await answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.closed and task is not None and not task.cancelling():
                self.check_open()
            raise

    def _may_repeat(self, error: grpc.aio.AioRpcError, member: Member, send_again: bool) -> bool:
        lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if lost:
            self.turn_from(member)
        # Without a leader the member refuses before it takes the request in.
        return lost and (send_again or error.details() == NO_LEADER)

    def _attempt_s(self, deadline_s: float, send_again: bool) -> float:
        left_s = max(0.001, deadline_s - self._now_s())
        # Leave time for another endpoint, should this one be silent.
        return left_s / 2 if send_again and len(self._members) > 1 else left_s

    def _raise_when_hopeless(self, reasons: dict[str, str]) -> None:
        if reasons and all(is_tls_failure(reason) for reason in reasons.values()):
            raise TlsError(
                f"no TLS connection to etcd: {_listed(reasons)}",
                hint="check ?ca=, ?cert= and ?key= of the store URL and the server's certificate",
            )

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def _wait_for_ended_calls() -> None:
    """grpc.aio has a task for each call, also for a moment after the call's end. It gives no handle on
    them, so they are known by name; should the name change, we only leave a little earlier."""
    current = asyncio.current_task()
    ending = [
        task
        for task in asyncio.all_tasks()
        if task is not current and "_AioCall." in getattr(task.get_coro(), "__qualname__", "")
    ]
    if ending:
        await asyncio.wait(ending, timeout=SETTLE_S)


def _channel(endpoint: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
    return grpc.aio.secure_channel(endpoint, credentials, options=_OPTIONS)


def _credentials(address: EtcdAddress) -> grpc.ChannelCredentials | None:
    if not address.tls:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=read_file(address.ca, parameter="ca") if address.ca else None,
        private_key=read_file(address.key, parameter="key") if address.key else None,
        certificate_chain=read_file(address.cert, parameter="cert") if address.cert else None,
    )


def _read_password(address: EtcdAddress) -> str:
    if address.password_file is None:
        return ""
    raw = read_file(address.password_file, parameter="password_file")
    try:
        return raw.decode().strip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"the password file {address.password_file} is not UTF-8 text") from None


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{endpoint}: {reason}" for endpoint, reason in reasons.items())
