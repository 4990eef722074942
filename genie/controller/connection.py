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
from genie.runtime.connection_limits import ConnectionLimits
from genie.runtime.rpc import TRUSTED_IN_FLIGHT_MAX, Peer
from genie.runtime.wire import FRAME_BYTES_MAX

CONNECTIONS_OF_TOKEN_MAX = {TokenKind.OWNER: 256, TokenKind.USER: 256, TokenKind.NODE: 4}
"""An owner may have more while the connections of users are below their limit."""
_RETRY_AFTER_S = 5.0
_SHRUNK_CONNECTIONS = 256
_SETTLED_CALLS = 2


@dataclass(slots=True, eq=False)
class Connection:
    """One connection, unauthenticated until `authenticate`."""

    peer: Peer
    authenticated_as: Identity | None = None
    controllers: tuple[str, ...] = ()
    """Addresses of the controllers that the reply to Hello contained."""
    usage: TokenUsage | None = None
    """Set after Hello; None for a node."""
    _checked_spec: JobSpec | None = None

    @property
    def identity(self) -> Identity:
        assert self.authenticated_as is not None, "the service rejects requests before Hello"
        return self.authenticated_as

    def authenticate(self, identity: Identity, *, controllers: tuple[str, ...]) -> None:
        """Accept the Hello of this connection; from now on it may send large frames."""
        self.authenticated_as = identity
        self.controllers = controllers
        self.peer.channel.set_authenticated()
        self.peer.channel.set_frame_limit(FRAME_BYTES_MAX)
        if identity.kind is TokenKind.NODE:
            self.peer.set_in_flight_max(TRUSTED_IN_FLIGHT_MAX)

    def checked_spec(self, spec: JobSpec) -> JobSpec:
        """Return `spec` after check_job. Equal specs in a row are checked once and share one object."""
        if spec != self._checked_spec:
            check_job(spec)
            self._checked_spec = spec
        assert self._checked_spec is not None
        return self._checked_spec

    def require_node(self, node_id: str) -> str:
        """Return `node_id`; raise PermissionError_ unless this is the connection of that node."""
        if node_id != self.identity.name:
            raise PermissionError_(
                f"permission denied: this connection belongs to node {self.identity.name}, not {node_id[:80]}"
            )
        return node_id


class Connections:
    """The open connections of this controller, within limits per token and for all users and nodes together.

    Connections of strangers are limited before the handshake (runtime/connection_limits.py).
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[Connection] = set()
        self._by_token: dict[str, dict[Connection, None]] = {}
        """Authenticated connections, oldest first."""
        self._by_kind: Counter[TokenKind] = Counter()
        self._of_owners_beyond = 0
        """Connections of owner tokens beyond their limit, which count as those of users."""
        self._peak = 0
        self._closed = 0
        """Number of connections that were closed so far."""
        self._closed_at_calls: deque[int] = deque(maxlen=_SETTLED_CALLS + 1)
        """That number at the last calls of `has_shrunk`."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        self._open.add(connection)
        self._peak = max(self._peak, len(self._open))

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._closed += 1
        identity = connection.authenticated_as
        if identity is None:
            return
        group = self._by_token[identity.token_id]
        self._of_owners_beyond -= _is_owner_beyond(identity.kind, len(group) - 1)
        del group[connection]
        self._by_kind[identity.kind] -= 1
        if not group:
            del self._by_token[identity.token_id]

    def authenticate(
        self, connection: Connection, identity: Identity, *, controllers: tuple[str, ...]
    ) -> None:
        """Authenticate a connection; raise OverloadedError if a limit is reached.

        Beyond its limit, a node replaces its oldest connection, preferably an idle one: the older ones are
        dead. So does an owner, which must be able to connect, but only if the users have used theirs up:
        clients that replace each other would reconnect again and again.
        """
        if connection not in self._open:
            raise ConnectionLostError("the connection was closed during the handshake")
        group = self._by_token.get(identity.token_id, {})
        if len(group) >= CONNECTIONS_OF_TOKEN_MAX[identity.kind]:
            if identity.kind is TokenKind.USER:
                raise OverloadedError(
                    f"the limit of {len(group)} connections with token {identity.token_id} is reached",
                    hint="close some, or use another token",
                    retry_after_s=_RETRY_AFTER_S,
                )
            if identity.kind is TokenKind.NODE or self._users >= self._limits.users_max:
                next((one for one in group if one.peer.is_idle), next(iter(group))).peer.close()
        self._check_total(identity.kind)
        self._of_owners_beyond += _is_owner_beyond(identity.kind, len(group))
        self._by_token.setdefault(identity.token_id, {})[connection] = None
        self._by_kind[identity.kind] += 1
        connection.authenticate(identity, controllers=controllers)

    @property
    def _users(self) -> int:
        """Connections that count towards the limit of all users."""
        return self._by_kind[TokenKind.USER] + self._of_owners_beyond

    def _check_total(self, kind: TokenKind) -> None:
        limits = self._limits
        if kind is TokenKind.OWNER:
            return
        if kind is TokenKind.USER and self._users >= limits.users_max:
            raise OverloadedError(
                f"the limit of {limits.users_max} connections of users is reached",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self._users + self._by_kind[TokenKind.NODE] >= limits.authenticated_max:
            raise OverloadedError(
                f"the limit of {limits.authenticated_max} connections is reached",
                retry_after_s=_RETRY_AFTER_S,
            )

    def close_token(self, token_id: str) -> None:
        """Close every connection that was opened with this token."""
        for connection in list(self._by_token.get(token_id, ())):
            connection.peer.close()

    def has_shrunk(self) -> bool:
        """Whether many connections were closed since `reset_peak`, but hardly any during the last calls: a
        connection keeps its memory for a while after it was closed. Call it every few seconds."""
        self._closed_at_calls.append(self._closed)
        if len(self._closed_at_calls) <= _SETTLED_CALLS:
            return False
        is_settled = self._closed - self._closed_at_calls[0] <= _SHRUNK_CONNECTIONS // 8
        return is_settled and self._peak - len(self._open) >= _SHRUNK_CONNECTIONS

    def reset_peak(self) -> None:
        """Count closed connections from now on."""
        self._peak = len(self._open)


def _is_owner_beyond(kind: TokenKind, others: int) -> bool:
    """Whether a connection is beyond the limit of its owner token, which has `others`."""
    return kind is TokenKind.OWNER and others >= CONNECTIONS_OF_TOKEN_MAX[kind]


# Any: each handler takes its own type of request; the table that holds them is keyed by that type.
Handler = Callable[[Connection, Any], Awaitable[Message]]
Handlers = dict[type[Message], Handler]
