"""Connections to the controller: the identity behind each, limits, and closing those of a revoked token."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from genie.controller.checks import check_job
from genie.controller.request_limits import TokenUsage
from genie.errors import ConnectionLostError, OverloadedError, PermissionError_
from genie.model.job import JobSpec
from genie.model.messages import Message
from genie.model.tenant import Identity, TokenKind
from genie.runtime.connection_limits import (
    CONNECTIONS_WARNING_THRESHOLD,
    ConnectionLimits,
    open_file_limit_for,
)
from genie.runtime.rpc import CLUSTER_PEER_REQUESTS_IN_FLIGHT_MAX, Peer
from genie.runtime.wire import FRAME_BYTES_MAX

CONNECTIONS_PER_TOKEN_MAX = {
    TokenKind.OWNER: 256,
    TokenKind.USER: 256,
    TokenKind.NODE: 4,
    TokenKind.SERVER: 4,
}
"""An owner may have more while the connections of users are below their limit."""
_CONNECTION_RETRY_AFTER_S = 5.0
_MEMORY_RETURN_CLOSED_CONNECTIONS_MIN = 256
_MEMORY_RETURN_QUIET_CHECKS_MIN = 2


@dataclass(slots=True, eq=False)
class Connection:
    """One connection, unauthenticated until `authenticate`."""

    peer: Peer
    authenticated_as: Identity | None = None
    announced_controller_addresses: tuple[str, ...] = ()
    """Addresses of the controllers that the reply to Hello contained."""
    token_usage: TokenUsage | None = None
    """Set after Hello; None for a node."""
    is_forwarded: bool = False
    """Whether this is the client behind a request that another controller has forwarded; `peer` is that
    controller."""
    _last_checked_spec: JobSpec | None = None

    @property
    def identity(self) -> Identity:
        assert self.authenticated_as is not None, "the service rejects requests before Hello"
        return self.authenticated_as

    def authenticate(self, identity: Identity, *, controllers: tuple[str, ...]) -> None:
        """Accept the Hello of this connection; from now on it may send large frames."""
        self.authenticated_as = identity
        self.announced_controller_addresses = controllers
        self.peer.channel.set_authenticated()
        self.peer.channel.set_frame_limit(FRAME_BYTES_MAX)
        if identity.kind in (TokenKind.NODE, TokenKind.SERVER):
            self.peer.set_in_flight_max(CLUSTER_PEER_REQUESTS_IN_FLIGHT_MAX)

    def check_job_spec_once(self, spec: JobSpec) -> JobSpec:
        """Return `spec` after check_job. Equal specs in a row are checked once and share one object."""
        if spec != self._last_checked_spec:
            check_job(spec)
            self._last_checked_spec = spec
        assert self._last_checked_spec is not None
        return self._last_checked_spec

    def require_connection_of_node(self, node_id: str) -> str:
        """Return `node_id`; raise PermissionError_ unless this is the connection of that node."""
        if node_id != self.identity.name:
            raise PermissionError_(
                f"permission denied: this connection belongs to node {self.identity.name}, not {node_id[:80]}"
            )
        return node_id


class Connections:
    """The open connections of this controller, within limits per token, per tenant, and for all users and
    nodes together.

    Connections of strangers are limited before the handshake (runtime/connection_limits.py).
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open_connections: set[Connection] = set()
        self._connections_by_token: dict[str, dict[Connection, None]] = {}
        """Authenticated connections, oldest first."""
        self._authenticated_count_by_token_kind: Counter[TokenKind] = Counter()
        self._user_count_by_tenant: Counter[str] = Counter()
        self._excess_owner_connection_count = 0
        """Connections of owner tokens beyond their limit, which count as those of users."""
        self._peak_open_count = 0
        self._closed_count = 0
        """Number of connections that were closed so far."""
        self._closed_counts_at_last_checks: deque[int] = deque(maxlen=_MEMORY_RETURN_QUIET_CHECKS_MIN + 1)
        """That number at the last calls of `is_memory_return_worthwhile`."""

    def __len__(self) -> int:
        return len(self._open_connections)

    def add(self, connection: Connection) -> None:
        self._open_connections.add(connection)
        self._peak_open_count = max(self._peak_open_count, len(self._open_connections))

    def discard(self, connection: Connection) -> None:
        self._open_connections.discard(connection)
        self._closed_count += 1
        identity = connection.authenticated_as
        if identity is None:
            return
        group = self._connections_by_token[identity.token_id]
        self._excess_owner_connection_count -= _exceeds_owner_limit(identity.kind, len(group) - 1)
        del group[connection]
        self._authenticated_count_by_token_kind[identity.kind] -= 1
        if identity.kind is TokenKind.USER:
            self._user_count_by_tenant[identity.tenant] -= 1
            if not self._user_count_by_tenant[identity.tenant]:
                del self._user_count_by_tenant[identity.tenant]
        if not group:
            del self._connections_by_token[identity.token_id]

    def authenticate(
        self, connection: Connection, identity: Identity, *, controllers: tuple[str, ...]
    ) -> None:
        """Authenticate a connection; raise OverloadedError if a limit is reached.

        Beyond its limit, a node or controller replaces its oldest connection, preferably an idle one: the
        older ones are dead. So does an owner, which must be able to connect, but only if the users have used
        theirs up: clients that replace each other would reconnect again and again.
        """
        if connection not in self._open_connections:
            raise ConnectionLostError("the connection was closed during the handshake")
        group = self._connections_by_token.get(identity.token_id, {})
        if len(group) >= CONNECTIONS_PER_TOKEN_MAX[identity.kind]:
            if identity.kind is TokenKind.USER:
                raise OverloadedError(
                    f"the limit of {len(group)} connections with token {identity.token_id} is reached",
                    hint="close some, or use another token",
                    retry_after_s=_CONNECTION_RETRY_AFTER_S,
                )
            is_machine = identity.kind in (TokenKind.NODE, TokenKind.SERVER)
            if is_machine or self._user_connection_count >= self._limits.user_connections_max:
                next((one for one in group if one.peer.is_idle), next(iter(group))).peer.close()
        self._check_limit_of_all_tokens(identity)
        self._excess_owner_connection_count += _exceeds_owner_limit(identity.kind, len(group))
        self._connections_by_token.setdefault(identity.token_id, {})[connection] = None
        self._authenticated_count_by_token_kind[identity.kind] += 1
        if identity.kind is TokenKind.USER:
            self._user_count_by_tenant[identity.tenant] += 1
        connection.authenticate(identity, controllers=controllers)

    @property
    def _user_connection_count(self) -> int:
        """Connections that count towards the limit of all users."""
        return self._authenticated_count_by_token_kind[TokenKind.USER] + self._excess_owner_connection_count

    def _check_limit_of_all_tokens(self, identity: Identity) -> None:
        limits, kind = self._limits, identity.kind
        if kind in (TokenKind.OWNER, TokenKind.SERVER):
            return
        tenant_count = self._user_count_by_tenant[identity.tenant] if kind is TokenKind.USER else 0
        if tenant_count >= limits.tenant_connections_max:
            raise OverloadedError(
                f"the limit of {tenant_count} connections of tenant {identity.tenant} is reached",
                hint="close some of its connections",
                retry_after_s=_CONNECTION_RETRY_AFTER_S,
            )
        if kind is TokenKind.USER and self._user_connection_count >= limits.user_connections_max:
            raise OverloadedError(
                f"the limit of {limits.user_connections_max} connections of users is reached",
                retry_after_s=_CONNECTION_RETRY_AFTER_S,
            )
        if (
            self._user_connection_count + self._authenticated_count_by_token_kind[TokenKind.NODE]
            >= limits.authenticated_max
        ):
            raise OverloadedError(
                f"the limit of {limits.authenticated_max} connections of users and nodes is reached",
                retry_after_s=_CONNECTION_RETRY_AFTER_S,
            )

    def close_connections_of_token(self, token_id: str) -> None:
        """Close every connection that was opened with this token."""
        for connection in list(self._connections_by_token.get(token_id, ())):
            connection.peer.close()

    def is_memory_return_worthwhile(self) -> bool:
        """Whether many connections were closed since `reset_peak_count`, but hardly any during the last
        calls: a connection keeps its memory for a while after it was closed. Call it every few seconds."""
        self._closed_counts_at_last_checks.append(self._closed_count)
        if len(self._closed_counts_at_last_checks) <= _MEMORY_RETURN_QUIET_CHECKS_MIN:
            return False
        is_settled = (
            self._closed_count - self._closed_counts_at_last_checks[0]
            <= _MEMORY_RETURN_CLOSED_CONNECTIONS_MIN // 8
        )
        return (
            is_settled
            and self._peak_open_count - len(self._open_connections) >= _MEMORY_RETURN_CLOSED_CONNECTIONS_MIN
        )

    def reset_peak_count(self) -> None:
        """Count closed connections from now on."""
        self._peak_open_count = len(self._open_connections)


def _exceeds_owner_limit(kind: TokenKind, other_connections: int) -> bool:
    """Whether a connection is beyond the limit of its owner token, which has `other_connections`."""
    return kind is TokenKind.OWNER and other_connections >= CONNECTIONS_PER_TOKEN_MAX[kind]


# Any: each handler takes its own type of request; the table that holds them is keyed by that type.
Handler = Callable[[Connection, Any], Awaitable[Message]]
Handlers = dict[type[Message], Handler]


def open_file_limit_alarm(files_max: int) -> str:
    """Describe for the owner that the limit on open files is low; empty if it is not."""
    if files_max >= open_file_limit_for(CONNECTIONS_WARNING_THRESHOLD):
        return ""
    connections = ConnectionLimits.for_open_file_limit(files_max).connections_max
    return (
        f"the controller may open {files_max} files, which allows {connections} connections; raise the hard "
        "limit (ulimit -Hn, or LimitNOFILE of systemd) and restart it"
    )
