"""Serves connections: the handshake, access checks, and the dispatch of requests to their handlers.

A connection is unauthenticated until a Hello with a valid token. Until then it may send small frames only,
may only fetch the CA, join or recover a certificate, and is closed after HELLO_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from genie.controller.change_notifier import wait_event
from genie.controller.connection import Connection, Connections, Handlers
from genie.controller.election import Election
from genie.controller.ledger import Ledger
from genie.controller.nodes.admission import Admission, Certificates
from genie.controller.request_limits import LIST_REQUESTS, RequestLimits, TokenUsage
from genie.controller.tokens import TokenRegistry
from genie.errors import (
    AccessError,
    BlobSpaceError,
    GenieError,
    NotLeaderError,
    OverloadedError,
    ProtocolError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    TokenMissingError,
    TokenRefusedError,
)
from genie.model.failover import HELLO_READY_TIMEOUT_S
from genie.model.limits import check_text
from genie.model.messages import (
    CONTROLLER_REQUESTS,
    COPY_REQUESTS,
    FORWARDED_REQUESTS,
    NOT_FORWARDED_REQUESTS,
    UNAUTHENTICATED_REQUESTS,
    Done,
    ForwardedReply,
    ForwardedRequest,
    GetGossipSettings,
    GetStatus,
    Heartbeat,
    ListMembers,
    Message,
    Ping,
    StatusReply,
)
from genie.model.messages.handshake import (
    Certificate,
    FetchTrust,
    Hello,
    Join,
    Joined,
    RecoverCertificate,
    RenewCertificate,
    ServerHello,
    SignExecutor,
    TrustAnchor,
    Welcome,
)
from genie.model.names import validate_name
from genie.model.release import check_releases_work_together
from genie.model.tenant import Identity, TokenKind
from genie.processes.clock import Clock
from genie.runtime import wire
from genie.runtime.network import Channel
from genie.runtime.rpc import Peer
from genie.tenancy.access import check_request_allowed
from genie.version import __version__

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
STORE_RETRY_AFTER_S = 1.0
"""Retry time that clients get while the store is unavailable: an election of etcd takes a second or two."""
_READY_TIMEOUT_S = 1.0
_ALLOWED_WHILE_LOADING = (Heartbeat, GetGossipSettings, GetStatus, ListMembers, RenewCertificate)
"""Requests that a new leader answers before it has read the tables; the others would see old ones."""
_REQUESTS_BEFORE_HELLO_MAX = 16


class StandbyResponder(Protocol):
    """Replies to clients of a controller that does not lead (standby/requests.py)."""

    async def respond(self, connection: Connection, request: Message) -> Message:
        """Return the reply of the leader, or that of the copy of the ledger."""
        ...

    async def complete_status(self, connection: Connection, own: StatusReply) -> StatusReply:
        """Return the status of this controller with what concerns the whole cluster."""
        ...

    def can_answer_from_copy(self, kind: type[Message]) -> bool: ...


class RequestService:
    """`ready` is set once this controller knows whether it leads; the first Hello waits for it. `handlers`
    are those of all other requests, each type once."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        election: Election,
        tokens: TokenRegistry,
        admission: Admission,
        certificates: Certificates,
        connections: Connections,
        clock: Clock,
        ready: asyncio.Event,
        controllers: Callable[[], tuple[str, ...]],
        handlers: Iterable[Handlers],
        standby_requests: StandbyResponder,
    ) -> None:
        self._ledger = ledger
        self._election = election
        self._tokens = tokens
        self._admission = admission
        self._certificates = certificates
        self._connections = connections
        self._clock = clock
        self._request_limits = RequestLimits(clock)
        self._ready_event = ready
        self._get_controllers = controllers
        self._standby_requests = standby_requests
        self._forwarded_request_decoder = wire.RequestDecoder(FORWARDED_REQUESTS)
        self._handlers: Handlers = {
            Hello: self._handle_hello,
            ServerHello: self._handle_server_hello,
            ForwardedRequest: self._handle_forwarded_request,
            Ping: self._handle_ping,
            FetchTrust: self._handle_fetch_trust,
            Join: self._handle_join,
            RecoverCertificate: self._handle_recover_certificate,
            RenewCertificate: self._handle_renew_certificate,
            SignExecutor: self._handle_sign_executor,
        }
        for more in handlers:
            assert not self._handlers.keys() & more.keys()
            self._handlers.update(more)

    async def serve_connection(self, channel: Channel) -> None:
        """Serve one connection until it is closed."""
        early_requests = 0

        def handle(peer: Peer, request: Message) -> Awaitable[Message]:
            nonlocal early_requests
            if connection.authenticated_as is None:
                early_requests += 1
                if early_requests > _REQUESTS_BEFORE_HELLO_MAX:
                    peer.close()
            return self._dispatch(connection, request)

        connection = Connection(Peer(channel, requests=CONTROLLER_REQUESTS, handler=handle))
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                timeout = group.create_task(self._close_if_unauthenticated(connection))
                await connection.peer.run()
                timeout.cancel()
        finally:
            self._connections.discard(connection)

    async def _close_if_unauthenticated(self, connection: Connection) -> None:
        await self._clock.sleep(HELLO_TIMEOUT_S)
        if connection.authenticated_as is None:
            _log.info(
                "closed the connection of %s: no Hello within %g s", connection.peer.name, HELLO_TIMEOUT_S
            )
            connection.peer.close()

    def _dispatch(self, connection: Connection, request: Message) -> Awaitable[Message]:
        kind = type(request)
        if kind not in UNAUTHENTICATED_REQUESTS:
            if connection.authenticated_as is None:
                raise TokenMissingError(
                    "this connection is not authenticated", hint="send Hello with a token first"
                )
            if connection.token_usage is not None:
                self._charge_request(connection, connection.token_usage, request)
            check_request_allowed(connection.authenticated_as, request)
            self._tokens.check_token_still_valid(connection.authenticated_as)
            if not self._ledger.is_up_to_date:
                if (reply := self._try_respond_without_leading(connection, request)) is not None:
                    return reply
                if kind not in _ALLOWED_WHILE_LOADING:
                    self._check_not_loading()
        return self._handle_within_limits(connection, request)

    def _handle_within_limits(self, connection: Connection, request: Message) -> Awaitable[Message]:
        kind = type(request)
        handler, usage = self._handlers[kind], connection.token_usage
        if usage is None:
            reply = handler(connection, request)
            return _without_store_details(reply) if connection.authenticated_as is None else reply
        size_bytes = connection.peer.request_bytes
        reply = (
            self._request_limits.run_list_request(usage, request, lambda: handler(connection, request))
            if kind in LIST_REQUESTS
            else handler(connection, request)
        )
        return self._request_limits.await_reply_counted_in_flight(
            usage,
            _with_store_cause(reply) if usage.is_owner else _without_store_details(reply),
            size_bytes=size_bytes,
        )

    def _try_respond_without_leading(
        self, connection: Connection, request: Message
    ) -> Awaitable[Message] | None:
        """Return the reply to a client on a controller that does not lead, or has not read the tables yet.
        None if the request is handled as by a leader."""
        kind, usage = type(request), connection.token_usage
        if connection.is_forwarded:
            self._ledger.check_leading_and_up_to_date()
        if usage is None or kind in NOT_FORWARDED_REQUESTS:
            return None
        is_answered_by_standby = kind in COPY_REQUESTS or kind is GetStatus
        if self._ledger.is_loaded and (self._election.is_leading or not is_answered_by_standby):
            return None
        if kind is GetStatus:
            reply = self._respond_with_status(connection, request)
        elif self._election.is_leading and not self._standby_requests.can_answer_from_copy(kind):
            return None
        else:
            reply = self._standby_requests.respond(connection, request)
        if kind in LIST_REQUESTS:
            reply = self._request_limits.await_list_counted_in_flight(usage, reply)
        return self._request_limits.await_reply_counted_in_flight(
            usage, reply, size_bytes=connection.peer.request_bytes
        )

    async def _respond_with_status(self, connection: Connection, request: Message) -> Message:
        own = await self._handlers[GetStatus](connection, request)
        assert isinstance(own, StatusReply)
        return await self._standby_requests.complete_status(connection, own)

    def _charge_request(self, connection: Connection, usage: TokenUsage, request: Message) -> None:
        try:
            self._request_limits.check_and_charge_request(
                usage, request, size_bytes=connection.peer.request_bytes
            )
        except OverloadedError:
            if usage.rate_limit.is_debt_at_max and not connection.is_forwarded:
                _log.info(
                    "closed the connection of %s: it ignores the rate limit of its token",
                    connection.peer.name,
                )
                connection.peer.close()
            raise

    def _check_not_loading(self) -> None:
        if self._election.is_leading:
            self._ledger.check_leading_and_up_to_date()

    async def _handle_hello(self, connection: Connection, request: Hello) -> Welcome:
        if connection.authenticated_as is not None:
            raise ProtocolError("this connection has already sent Hello")
        check_text(request.program, what="program")
        check_text(request.version, what="version")
        await wait_event(self._ready_event, clock=self._clock, timeout_s=HELLO_READY_TIMEOUT_S)
        identity = await self._verify_identity(connection, request.token)
        usage = self._request_limits.get_token_usage(identity)
        if usage is not None:
            self._request_limits.check_and_charge_request(usage, request)
        _check_release(connection, request.version, peer=request.program or "the client")
        self._connections.authenticate(connection, identity, controllers=self._get_controllers())
        connection.token_usage = usage
        record = self._ledger.cluster.get("")
        return Welcome(
            cluster_id=record.cluster_id if record else "",
            version=__version__,
            tenant=identity.tenant,
            kind=identity.kind,
            leading=self._ledger.is_up_to_date,
            controllers=connection.announced_controller_addresses,
            generation=self._election.cluster_generation,
        )

    async def _handle_server_hello(self, connection: Connection, request: ServerHello) -> Done:
        if connection.authenticated_as is not None:
            raise ProtocolError("this connection has already sent Hello")
        name = validate_name(request.name, what="controller name")
        check_text(request.version, what="version")
        self._admission.check_server_certificate(connection.peer.channel.certificate_name)
        _check_release(connection, request.version, peer=f"controller {name}")
        identity = Identity(token_id=f"server-{name}", kind=TokenKind.SERVER, tenant="", name=name)
        self._connections.authenticate(connection, identity, controllers=())
        return Done()

    async def _handle_forwarded_request(
        self, connection: Connection, request: ForwardedRequest
    ) -> ForwardedReply:
        """Handle a request of a client of another controller as if the client was connected to this one. It
        is never forwarded again. An error of the request is part of the reply: errors of this call mean that
        the request was not carried out."""
        self._ledger.check_leading_and_up_to_date()
        inner = self._forwarded_request_decoder.decode(request.request, peer=connection.peer.name)
        try:
            identity = self._tokens.identify_forwarded_client(request.token_id)
            usage = self._request_limits.get_token_usage(identity)
            client = Connection(connection.peer, identity, token_usage=usage, is_forwarded=True)
            reply = await self._dispatch(client, inner)
        except GenieError as error:
            return ForwardedReply(error=wire.encode_error(error))
        return ForwardedReply(reply=wire.encode_message(reply))

    async def _handle_ping(self, connection: Connection, request: Ping) -> Done:
        return Done()

    async def _verify_identity(self, connection: Connection, token: str) -> Identity:
        try:
            identity = await self._tokens.authenticate_token(token)
            if identity.kind is TokenKind.NODE:
                self._admission.check_node_certificate(
                    identity.name, connection.peer.channel.certificate_name
                )
            if identity.kind in (TokenKind.JOIN, TokenKind.SERVER_JOIN):
                raise TokenRefusedError(
                    f"{identity.kind.with_article} token only admits a machine", hint="use 'genie join'"
                )
        except AccessError as error:
            _log.info("rejected the login of %s: %s", connection.peer.name, error)
            raise
        except StoreError as error:
            # Agents must be able to distinguish this from a timeout: a controller that does not lead
            # reclaims nothing.
            _log.info("cannot check the token of %s: %s", connection.peer.name, error)
            raise NotLeaderError(
                "this controller does not lead and cannot check tokens: its store is unavailable",
                retry_after_s=STORE_RETRY_AFTER_S,
            ) from error
        return identity

    async def _handle_fetch_trust(self, connection: Connection, request: FetchTrust) -> TrustAnchor:
        return TrustAnchor(ca_pem=self._certificates.ca_pem)

    async def _handle_join(self, connection: Connection, request: Join) -> Joined:
        await wait_event(self._ready_event, clock=self._clock, timeout_s=_READY_TIMEOUT_S)
        return await self._admission.admit_node(request)

    async def _handle_recover_certificate(
        self, connection: Connection, request: RecoverCertificate
    ) -> Certificate:
        await wait_event(self._ready_event, clock=self._clock, timeout_s=_READY_TIMEOUT_S)
        return await self._admission.recover_certificate(request)

    async def _handle_renew_certificate(
        self, connection: Connection, request: RenewCertificate
    ) -> Certificate:
        return self._admission.renew_certificate(connection.identity.name, request.csr_pem)

    async def _handle_sign_executor(self, connection: Connection, request: SignExecutor) -> Certificate:
        return self._admission.sign_executor(connection.identity.name, request)


def _check_release(connection: Connection, version: str, *, peer: str) -> None:
    """Raise VersionError unless a peer of this version works with this release."""
    check_releases_work_together(
        peer_version=version, peer=f"{peer} at {connection.peer.name}", this_side="this controller"
    )
    connection.peer.set_release(version)


async def _with_store_cause(reply: Awaitable[Message]) -> Message:
    """Await a reply to the owner, to whom errors of the store may show addresses and file names."""
    try:
        return await reply
    except StoreUnavailableError as error:
        raise _store_unavailable_error(cause=error.message) from error


async def _without_store_details(reply: Awaitable[Message]) -> Message:
    """Await a reply to a peer that is neither the owner nor a node. Errors of the store contain its address,
    user and files, which are not for this peer."""
    try:
        return await reply
    except StoreUnavailableError as error:
        raise _store_unavailable_error() from error
    except BlobSpaceError:
        raise
    except StoreFullError as error:
        raise StoreFullError(
            "the cluster cannot make changes: its store is full",
            hint="running jobs continue; the owner must free space",
            retry_after_s=error.retry_after_s or STORE_RETRY_AFTER_S,
        ) from error
    except StoreError as error:
        raise type(error)(
            "the cluster cannot make changes: its store has failed",
            hint="running jobs continue; 'genie status' shows the cause to the owner",
        ) from error


def _store_unavailable_error(*, cause: str = "") -> StoreUnavailableError:
    return StoreUnavailableError(
        "the cluster cannot make changes: its store is unavailable",
        hint="running jobs continue; try again when the store responds, which 'genie status' shows"
        + (f"; the cause: {cause}" if cause else ""),
        retry_after_s=STORE_RETRY_AFTER_S,
    )
