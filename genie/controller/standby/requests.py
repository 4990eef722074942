"""Requests of clients to a controller that does not lead: forwarded, or answered from the copy.

Everything is forwarded while the leader responds, so replies are those of the leader. Without it, reads are
answered from the copy of the ledger, with its age; other requests are rejected with the address of the
leader, if one is known. The leader never forwards a forwarded request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from genie.controller.checks import clamp_wait_s
from genie.controller.connection import Connection
from genie.controller.ledger import LedgerTables
from genie.controller.request_limits import RequestLimits
from genie.controller.requests.open_waits import OpenWaits
from genie.controller.standby.copy_reads import CopyReads
from genie.controller.standby.forward_limits import ForwardLimits
from genie.controller.standby.leader_link import LeaderLink
from genie.controller.standby.ledger_copy import LedgerCopy
from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    NotLeaderError,
    ProtocolError,
    ReplyLostError,
    StoreUnavailableError,
)
from genie.model.messages import (
    COPY_REQUESTS,
    ForwardedReply,
    ForwardedRequest,
    GetStatus,
    Message,
    Request,
    StatusReply,
    reply_type,
)
from genie.model.tenant import Identity, TokenKind, TokenRecord
from genie.processes.clock import Clock
from genie.runtime import rpc, wire

READ_TIMEOUT_S = 2.0
"""A read that takes longer, in addition to its `wait_s`, is answered from the copy."""
WRITE_TIMEOUT_S = 15.0
"""Less than clients wait."""
_LOST_REPLY_RETRY_AFTER_S = 0.1
"""After the loss of the connection: usually another controller leads. Clients wait up to half longer."""
_OVERDUE_REPLY_RETRY_AFTER_S = 0.5
_NO_LEADER_ERRORS = (NotLeaderError, ReplyLostError, StoreUnavailableError)
"""Errors after which a read is answered from the copy."""


class StandbyRequests:
    """`make_copy` returns a new copy of the ledger; `disconnect` closes the connections that were opened with
    a token ID. `leader_key_ttl_s`: the leader key is absent after this time without a leader."""

    def __init__(
        self,
        link: LeaderLink,
        *,
        clock: Clock,
        make_copy: Callable[[], LedgerCopy],
        disconnect: Callable[[str], None],
        leader_key_ttl_s: float,
    ) -> None:
        self._link = link
        self._clock = clock
        self._make_copy = make_copy
        self._disconnect_token = disconnect
        self._leader_key_ttl_s = leader_key_ttl_s
        self._open_waits = OpenWaits()
        self._copy: LedgerCopy | None = None
        self._copy_reads: CopyReads | None = None
        self._is_following = asyncio.Event()
        self._follow_task: asyncio.Task[None] | None = None
        self._copy_turns = RequestLimits(clock)
        """Lists from the copy take turns, as those of a leader; forwarded ones take turns there."""
        self._forward_limits = ForwardLimits(clock)
        self._limited_connection: rpc.Peer | None = None
        """The connection to which `_forward_limits` applies."""
        self._last_reply_s = 0.0
        """When the leader last replied to a forwarded request."""

    # -- following the leader ---------------------------------------------------------------

    def follow(self, leader_address: str) -> None:
        """Another controller leads: copy the ledger, and forward requests to it."""
        self._link.set_leader(leader_address)
        if self._copy is None:
            self._use_copy(self._make_copy())
        self._is_following.set()

    def follow_from_ended_term(self, ledger: LedgerTables, *, ended_at_s: float) -> None:
        """This controller no longer leads, and no other one is known to: continue with a copy of its ledger,
        because the store may not respond."""
        copy = self._make_copy()
        copy.start_from_ended_term(ledger, ended_at_s=ended_at_s)
        self._use_copy(copy)
        self._is_following.set()

    def _use_copy(self, copy: LedgerCopy) -> None:
        self._copy = copy
        copy.tables.tokens.add_listener(self._on_token_changed)
        copy.tables.add_after_load_listener(self._disconnect_revoked_tokens)
        self._copy_reads = CopyReads(copy, clock=self._clock, waits=self._open_waits)

    def stop_following(self) -> None:
        """This controller leads: drop the copy."""
        self._link.set_leader("")
        self._is_following.clear()
        self._copy, self._copy_reads = None, None
        if self._follow_task is not None:
            self._follow_task.cancel()

    async def run(self) -> None:
        """Keep the copy current while following, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._link.run(), name="link to the leader")
            while True:
                await self._is_following.wait()
                assert self._copy is not None
                self._follow_task = group.create_task(self._copy.follow(), name="copy of the ledger")
                await asyncio.wait([self._follow_task])
                self._follow_task = None

    def find_token_in_copy(self, token_id: str) -> TokenRecord | None:
        """Find a token in the copy; None if there is no usable copy."""
        if self._copy is None or not self._copy.is_usable:
            return None
        return self._copy.tables.tokens.get(token_id)

    def _on_token_changed(self, token_id: str, before: TokenRecord | None, after: TokenRecord | None) -> None:
        if after is None or after.revoked_at is not None:
            self._disconnect_token(token_id)

    def _disconnect_revoked_tokens(self) -> None:
        tokens = self._copy.tables.tokens.values() if self._copy is not None else []
        for record in tokens:
            if record.revoked_at is not None:
                self._disconnect_token(record.token_id)

    def can_answer_from_copy(self, kind: type[Message]) -> bool:
        return kind in COPY_REQUESTS and self._copy is not None and self._copy.is_usable

    # -- requests ---------------------------------------------------------------------------

    async def respond(self, connection: Connection, request: Message) -> Message:
        """Return the reply of the leader, or that of the copy if the leader does not respond."""
        try:
            return await self._forward(connection.identity, request)
        except _NO_LEADER_ERRORS:
            reads = self._copy_reads
            if reads is None or type(request) not in COPY_REQUESTS or self._must_client_ask_leader():
                raise
        usage = connection.token_usage
        assert usage is not None, "requests of nodes are never answered from the copy"
        return await self._copy_turns.run_in_turn(usage, request, lambda: reads.respond(connection, request))

    async def complete_status(self, connection: Connection, own: StatusReply) -> StatusReply:
        """Return the status of this controller with the leader's view of the cluster, or that of the copy."""
        try:
            leaders = await self._forward(connection.identity, GetStatus())
        except _NO_LEADER_ERRORS:
            own = _with_no_leader_alarm(own, connection.identity)
            reads, copy = self._copy_reads, self._copy
            if reads is None or copy is None or not copy.is_usable:
                return own
            return await self._complete_status_from_copy(reads, connection, own)
        assert isinstance(leaders, StatusReply)
        return _with_cluster_data_of(leaders, own)

    async def _complete_status_from_copy(
        self, reads: CopyReads, connection: Connection, own: StatusReply
    ) -> StatusReply:
        async def add_cluster_data() -> Message:
            return reads.add_cluster_data(own, connection.identity)

        usage = connection.token_usage
        assert usage is not None, "requests of nodes are never answered from the copy"
        reply = await self._copy_turns.run_in_turn(usage, GetStatus(), add_cluster_data)
        assert isinstance(reply, StatusReply)
        return reply

    def _must_client_ask_leader(self) -> bool:
        """Whether a controller leads to which requests cannot be forwarded, because TLS is off."""
        copy = self._copy
        if self._link.is_enabled or copy is None:
            return False
        return copy.has_leader_key and copy.age_s < self._leader_key_ttl_s

    async def _forward(self, identity: Identity, request: Message) -> Message:
        """Return the reply of the leader or raise its error. Raise NotLeaderError if the request was not
        carried out, ReplyLostError if that is unknown."""
        if self._limited_connection is not self._link.open_connection:
            self._limited_connection = self._link.open_connection
            self._forward_limits.release_unanswered()
        wait_s = _wait_s(request)
        with self._forward_limits.count_in_flight(
            identity, is_wait=wait_s > 0, handled_s_max=wait_s + WRITE_TIMEOUT_S
        ):
            peer = await self._link.get_connection()
            frame = ForwardedRequest(token_id=identity.token_id, request=wire.encode_message(request))
            try:
                answer = await self._call_leader(peer, frame, timeout_s=_timeout_s(request))
            except ProtocolError as error:  # too large with its envelope, or unknown to an older leader
                raise NotLeaderError.naming_leader(
                    f"the request cannot be forwarded to the leader: {error.message}",
                    leader=self._link.leader_address,
                ) from error
        if answer.error:
            raise wire.decode_error(answer.error, peer=peer.name)
        assert isinstance(request, Request)
        reply: Message = wire.decode_reply(reply_type(type(request)), answer.reply, peer=peer.name)
        return reply

    async def _call_leader(
        self, peer: rpc.Peer, frame: ForwardedRequest, *, timeout_s: float
    ) -> ForwardedReply:
        sent_s = self._clock.monotonic_s()
        try:
            answer = await peer.call(frame, timeout_s=timeout_s)
        except (ConnectionLostError, DeadlineError) as error:
            is_overdue = isinstance(error, DeadlineError)
            if is_overdue and self._last_reply_s < sent_s:
                self._link.request_ping(peer)
            raise ReplyLostError(
                f"the leader was lost before its reply to a forwarded request: {error.message}",
                hint="the request may have been carried out; check before you retry",
                retry_after_s=_OVERDUE_REPLY_RETRY_AFTER_S if is_overdue else _LOST_REPLY_RETRY_AFTER_S,
            ) from error
        self._last_reply_s = self._clock.monotonic_s()
        return answer


def _timeout_s(request: Message) -> float:
    is_read = type(request) in COPY_REQUESTS or isinstance(request, GetStatus)
    return _wait_s(request) + (READ_TIMEOUT_S if is_read else WRITE_TIMEOUT_S)


def _wait_s(request: Message) -> float:
    """How long the leader may wait for a change before it replies."""
    return clamp_wait_s(float(getattr(request, "wait_s", 0.0)))


def _with_no_leader_alarm(own: StatusReply, identity: Identity) -> StatusReply:
    """The status of a controller that reaches no leader; why, for the owner, if it is the store."""
    if own.store_ok or identity.kind is not TokenKind.OWNER:
        return own
    count = len(own.store_members)
    members = f" (of {count} etcd members, {count // 2 + 1} must run: see 'genie etcd status')"
    alarm = f"no leader: the store does not respond{members if count else ''}"
    return msgspec.structs.replace(own, alarms=(alarm, *own.alarms))


def _with_cluster_data_of(leaders: StatusReply, own: StatusReply) -> StatusReply:
    """The status of this controller; what concerns the whole cluster is that of the leader."""
    return msgspec.structs.replace(
        leaders,
        version=own.version,
        leading=False,
        leader=own.leader,
        store_ok=own.store_ok,
        store_reason=own.store_reason,
        started_at=own.started_at,
        has_cluster_data=True,
        alarms=(*own.alarms, *(alarm for alarm in leaders.alarms if alarm not in own.alarms)),
    )
