"""Admission of servers: hands the cluster's CA to a machine with a server token, encrypted, once."""

from __future__ import annotations

import logging
from collections.abc import Callable

from genie.controller import server_credentials_handover
from genie.controller.connection import Connection, Handlers
from genie.controller.ledger import Ledger, Transaction
from genie.controller.nodes.admission import Certificates
from genie.controller.server_credentials_handover import ServerCredentials
from genie.controller.tokens import TokenRegistry
from genie.errors import GenieError, UsageError
from genie.model.messages.handshake import JoinServer, ServerJoined
from genie.model.names import parse_endpoint
from genie.model.tenant import TokenKind, server_token_name
from genie.processes.clock import Clock
from genie.tenancy.access import check_unused, mark_used

_log = logging.getLogger(__name__)


class ServerAdmission:
    """`etcd_endpoints` returns the members of the store; empty if Genie does not manage it."""

    def __init__(
        self,
        ledger: Ledger,
        tokens: TokenRegistry,
        certificates: Certificates,
        *,
        clock: Clock,
        etcd_endpoints: Callable[[], tuple[str, ...]],
    ) -> None:
        self._ledger = ledger
        self._tokens = tokens
        self._certificates = certificates
        self._clock = clock
        self._get_etcd_endpoints = etcd_endpoints

    def handlers(self) -> Handlers:
        return {JoinServer: self.join_server}

    async def join_server(self, connection: Connection, request: JoinServer) -> ServerJoined:
        """Allowed before Hello: the request is signed with a single-use token."""
        endpoints = self._get_etcd_endpoints()
        if not endpoints:
            raise UsageError(
                "this cluster does not run its own etcd, so no server can join it",
                hint="start the first server with 'genie up --store etcd'",
            )

        def build(txn: Transaction) -> ServerJoined:
            now, pin = self._clock.wall_s(), self._certificates.pin
            record = check_unused(
                request.token_id, self._ledger.tokens.get(request.token_id), TokenKind.SERVER_JOIN, now=now
            )
            server_credentials_handover.verify_join_request_signature(
                request, token_public_key=record.public_key, pin=pin
            )
            ca_pem, ca_key_pem = self._certificates.export_authority()
            # Marked first: the limit of tokens does not count used ones.
            txn.put(self._ledger.tokens, record.token_id, mark_used(record, now=now))
            owner_token, _ = self._tokens.create_token_in_transaction(
                txn, TokenKind.OWNER, name=server_token_name(_host_of_peer(connection.peer.name))
            )
            credentials = ServerCredentials(
                ca_pem=ca_pem,
                ca_key_pem=ca_key_pem,
                owner_token=str(owner_token),
                etcd_endpoints=endpoints,
            )
            return server_credentials_handover.encrypt_credentials(request, credentials, pin=pin)

        reply = await self._ledger.write(build)
        _log.warning(
            "server token %s was used by %s: the CA of the cluster was handed over, encrypted",
            request.token_id,
            connection.peer.name,
        )
        return reply


def _host_of_peer(name: str) -> str:
    """The IP address of a peer, which is named by HOST:PORT."""
    try:
        return parse_endpoint(name)[0]
    except GenieError:
        return name
