"""Tokens and quotas of tenants, as stored; of a secret only the hash is stored."""

from __future__ import annotations

import enum

import msgspec

from genie.model.record import Record

DEFAULT_TENANT = "default"


class TokenKind(enum.StrEnum):
    """OWNER has all permissions; USER has one tenant; JOIN admits one node once; NODE identifies a node.

    SERVER is the identity of another controller, which has a certificate instead of a token.
    SERVER_JOIN admits one server once.
    """

    OWNER = "owner"
    USER = "user"
    JOIN = "join"
    NODE = "node"
    SERVER = "server"
    SERVER_JOIN = "server-join"

    @property
    def with_article(self) -> str:
        name = "server" if self is TokenKind.SERVER_JOIN else str(self)
        return f"{'an' if self is TokenKind.OWNER else 'a'} {name}"


def server_token_name(host: str) -> str:
    """The name of the owner token of a server that has joined from this address."""
    return f"server-{host}"


class TokenRecord(Record, frozen=True, kw_only=True):
    token_id: str
    kind: TokenKind
    secret_sha256: str
    tenant: str = DEFAULT_TENANT
    name: str = ""
    """Display name; of a NODE token the node ID."""
    created_at: float
    expires_at: float | None = None
    used_at: float | None = None
    """JOIN and SERVER_JOIN only: when it was used."""
    revoked_at: float | None = None
    public_key: str = ""
    """SERVER_JOIN only: verifies what was signed with the token."""


class QuotaRecord(Record, frozen=True, kw_only=True):
    """The quota of a tenant. None: unlimited."""

    tenant: str
    gpus: float | None = None
    """Guaranteed GPUs."""
    borrow_gpus: float | None = None
    """Additional GPUs for its preemptible jobs, while no other tenant needs them."""
    weight: float = 1.0
    """Fair-share weight."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The authenticated identity of a peer, determined by the server."""

    token_id: str
    kind: TokenKind
    tenant: str
    name: str = ""
