"""The controller's front door: connections, Hello, and who handles which request.

Nobody is anybody before a Hello with a good token. A stranger may send small frames only, may ask
only for the CA and to join, and is dropped after ten seconds. Not for: what the answers are
(users.py, agents.py, admission.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import genie
from genie.controller.admission import Admission, Certificates
from genie.controller.checks import check_label
from genie.controller.connection import Connection, Handlers
from genie.controller.election import Election
from genie.controller.ledger import Ledger
from genie.controller.tokens import Tokens
from genie.controller.waiting import wait_event
from genie.errors import (
    AccessError,
    NotLeaderError,
    ProtocolError,
    StoreError,
    TokenMissingError,
    TokenRefusedError,
)
from genie.model.messages import (
    BEFORE_HELLO,
    CONTROLLER_REQUESTS,
    Certificate,
    FetchTrust,
    Hello,
    Join,
    Joined,
    Message,
    RenewCertificate,
    SignExecutor,
    TrustAnchor,
    Welcome,
)
from genie.model.tenant import Identity, TokenKind
from genie.runtime.clock import Clock
from genie.runtime.network import Channel
from genie.runtime.rpc import Peer
from genie.runtime.wire import FRAME_BYTES_MAX
from genie.tenancy.access import check_allowed

_log = logging.getLogger(__name__)

HELLO_WITHIN_S = 10.0
_READY_WITHIN_S = 1.0
_STRANGERS_ASK_MAX = 16


class Service:
    """`ready` is set once this controller knows whether it leads; the first Hello waits for that."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        election: Election,
        tokens: Tokens,
        admission: Admission,
        certificates: Certificates,
        clock: Clock,
        ready: asyncio.Event,
        controllers: Callable[[], tuple[str, ...]],
    ) -> None:
        self._ledger = ledger
        self._election = election
        self._tokens = tokens
        self._admission = admission
        self._certificates = certificates
        self._clock = clock
        self._ready = ready
        self._controllers = controllers
        self._connections: set[Connection] = set()
        admission.on_revoked = self.hang_up
        self._handlers: Handlers = {
            Hello: self._hello,
            FetchTrust: self._fetch_trust,
            Join: self._join,
            RenewCertificate: self._renew,
            SignExecutor: self._sign_executor,
        }

    def add(self, handlers: Handlers) -> None:
        assert not self._handlers.keys() & handlers.keys()
        self._handlers.update(handlers)

    async def accept(self, channel: Channel) -> None:
        """One connection, from the greeting to its end."""
        asked_early = 0

        def handle(peer: Peer, request: Message) -> Awaitable[Message]:
            nonlocal asked_early
            if connection.who is None:
                asked_early += 1
                if asked_early > _STRANGERS_ASK_MAX:
                    peer.close()
            return self._answer(connection, request)

        connection = Connection(Peer(channel, requests=CONTROLLER_REQUESTS, handler=handle))
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                limit = group.create_task(self._drop_stranger(connection))
                await connection.peer.run()
                limit.cancel()
        finally:
            self._connections.discard(connection)

    def hang_up(self, token_id: str) -> None:
        """Closes every connection that was opened with this token."""
        for connection in list(self._connections):
            if connection.who is not None and connection.who.token_id == token_id:
                connection.peer.close()

    async def _drop_stranger(self, connection: Connection) -> None:
        await self._clock.sleep(HELLO_WITHIN_S)
        if connection.who is None:
            _log.info("dropped %s: no Hello within %g s", connection.peer.name, HELLO_WITHIN_S)
            connection.peer.close()

    def _answer(self, connection: Connection, request: Message) -> Awaitable[Message]:
        if type(request) not in BEFORE_HELLO:
            if connection.who is None:
                raise TokenMissingError(
                    "this connection has not shown a token", hint="say Hello with a token first"
                )
            check_allowed(connection.who, request)
            self._tokens.check_still_good(connection.who)
        return self._handlers[type(request)](connection, request)

    async def _hello(self, connection: Connection, request: Hello) -> Welcome:
        if connection.who is not None:
            raise ProtocolError("Hello was said on this connection already")
        check_label(request.program, what="program")
        check_label(request.version, what="version")
        await wait_event(self._ready, clock=self._clock, timeout_s=_READY_WITHIN_S)
        identity = await self._identify(connection, request.token)
        connection.who = identity
        connection.told = self._controllers()
        connection.peer.channel.cap_bytes = FRAME_BYTES_MAX
        record = self._ledger.cluster.get("")
        return Welcome(
            cluster_id=record.cluster_id if record else "",
            version=genie.__version__,
            tenant=identity.tenant,
            kind=identity.kind,
            leading=self._election.is_leading,
            controllers=connection.told,
        )

    async def _identify(self, connection: Connection, token: str) -> Identity:
        try:
            identity = await self._tokens.identify(token)
            if identity.kind is TokenKind.NODE:
                self._admission.check_certificate(identity.name, connection.peer.channel.certificate_name)
            if identity.kind is TokenKind.JOIN:
                raise TokenRefusedError("a join token only joins a node", hint="use 'genie join'")
        except AccessError as error:
            _log.info("refused %s: %s", connection.peer.name, error)
            raise
        except StoreError as error:
            # An agent must be able to tell this from silence: who does not lead reclaims nothing.
            raise NotLeaderError(
                f"this controller does not lead, and cannot check tokens: {error.message}",
                hint="try again when its store is back",
            ) from error
        return identity

    async def _fetch_trust(self, connection: Connection, request: FetchTrust) -> TrustAnchor:
        return TrustAnchor(ca_pem=self._certificates.ca_pem)

    async def _join(self, connection: Connection, request: Join) -> Joined:
        await wait_event(self._ready, clock=self._clock, timeout_s=_READY_WITHIN_S)
        return await self._admission.join(request)

    async def _renew(self, connection: Connection, request: RenewCertificate) -> Certificate:
        return self._admission.renew(connection.identity.name, request.csr_pem)

    async def _sign_executor(self, connection: Connection, request: SignExecutor) -> Certificate:
        return self._admission.sign_executor(connection.identity.name, request)
