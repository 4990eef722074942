"""Tenants, their tokens and quotas, as the store keeps them: a secret's hash, never the secret."""

from __future__ import annotations

import enum

import msgspec

from genie.model.record import Record

DEFAULT_TENANT = "default"


class TokenKind(enum.StrEnum):
    """OWNER may do everything; USER works in one tenant; JOIN admits one node once; NODE is a node's own."""

    OWNER = "owner"
    USER = "user"
    JOIN = "join"
    NODE = "node"


class TokenRecord(Record, frozen=True, kw_only=True):
    token_id: str
    kind: TokenKind
    secret_sha256: str
    tenant: str = DEFAULT_TENANT
    name: str = ""
    """A label for people; for NODE the node id that the server gave."""
    created_at: float
    expires_at: float | None = None
    used_at: float | None = None
    """JOIN only: set by the one use it has."""
    revoked_at: float | None = None


class QuotaRecord(Record, frozen=True, kw_only=True):
    """What a tenant may hold. None is no bound."""

    tenant: str
    gpus: float | None = None
    """Its own part."""
    borrow_gpus: float | None = None
    """So many more may be held by its preemptible jobs, while nobody else needs them."""
    weight: float = 1.0
    """Its share beside those of others: who has 2 gets twice as much as who has 1."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asking, as the server established it. Never taken from what the asker says of itself."""

    token_id: str
    kind: TokenKind
    tenant: str
    name: str = ""
