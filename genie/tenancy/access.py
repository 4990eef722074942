"""Tokens: their text, their record, and whether one opens a door now.

A token reads `genie.KIND.ID.SECRET.PIN`: the id names the record, the secret is 256 bits that
the store keeps only as SHA-256, the pin is the SHA-256 of the cluster's CA certificate ("-"
where TLS is off), so that one string is enough to reach a cluster safely. Pure: the secret, the
id and the time are arguments.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass

import msgspec

from genie.errors import PermissionError_, TokenRefusedError
from genie.model.messages import FOR_NODES, FOR_OWNERS, FOR_USERS, Message
from genie.model.tenant import Identity, TokenKind, TokenRecord

SECRET_BYTES = 32
NO_PIN = "-"

_TOKEN = re.compile(
    r"genie\.(owner|user|join|node)\.([a-z0-9]{4,32})\.([A-Za-z0-9_-]{43})\.([A-Za-z0-9_-]{43}|-)"
)
_ALLOWED: dict[TokenKind, frozenset[type[Message]]] = {
    TokenKind.OWNER: frozenset((*FOR_USERS, *FOR_OWNERS)),
    TokenKind.USER: frozenset(FOR_USERS),
    TokenKind.NODE: frozenset(FOR_NODES),
    TokenKind.JOIN: frozenset(),
}
_NOT_ORDERS = {
    "Heartbeat": "send heartbeats of a node",
    "ExecutorReady": "report executors",
    "SessionHeartbeat": "hold a session",
    "SessionEnd": "end a session",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token as its holder has it. Its repr hides the secret."""

    kind: TokenKind
    token_id: str
    secret: str
    pin: str

    def __str__(self) -> str:
        return f"genie.{self.kind}.{self.token_id}.{self.secret}.{self.pin}"

    def __repr__(self) -> str:
        return f"Token({self.kind}, {self.token_id})"


def parse_token(text: str) -> Token:
    """TokenRefusedError, without repeating the text, when it is not a token at all."""
    match = _TOKEN.fullmatch(text.strip())
    if match is None:
        raise TokenRefusedError(
            "this is not a Genie token",
            hint="a token reads genie.KIND.ID.SECRET.PIN; make one with 'genie token create'",
        )
    kind, token_id, secret, pin = match.groups()
    return Token(TokenKind(kind), token_id, secret, pin)


def new_token(kind: TokenKind, *, token_id: str, secret: bytes, pin: str) -> Token:
    assert len(secret) == SECRET_BYTES
    return Token(kind, token_id, encoded(secret), pin)


def new_record(
    token: Token, *, now: float, tenant: str, name: str = "", ttl_s: float | None = None
) -> TokenRecord:
    return TokenRecord(
        token_id=token.token_id,
        kind=token.kind,
        secret_sha256=secret_hash(token.secret),
        tenant=tenant,
        name=name,
        created_at=now,
        expires_at=None if ttl_s is None else now + ttl_s,
    )


def verify(token: Token, record: TokenRecord | None, *, now: float) -> Identity:
    """Who this token stands for, or TokenRefusedError that says why it opens nothing."""
    wrong = record is None or not hmac.compare_digest(secret_hash(token.secret), record.secret_sha256)
    if record is None or wrong or record.kind is not token.kind:
        raise TokenRefusedError(
            f"token {token.token_id} is unknown here or its secret is wrong",
            hint="see 'genie token list' on the cluster, or make one with 'genie token create'",
        )
    if record.revoked_at is not None:
        raise TokenRefusedError(f"token {token.token_id} was revoked", hint=_another(token.kind))
    if record.expires_at is not None and now >= record.expires_at:
        raise TokenRefusedError(f"token {token.token_id} has expired", hint=_another(token.kind))
    if record.used_at is not None:
        raise TokenRefusedError(f"token {token.token_id} was used already", hint=_another(token.kind))
    return Identity(token_id=record.token_id, kind=record.kind, tenant=record.tenant, name=record.name)


def check_allowed(identity: Identity, request: Message) -> None:
    """PermissionError_ when this kind of identity may not ask this."""
    if request.__class__ not in _ALLOWED[identity.kind]:
        raise PermissionError_(
            f"{_a(identity.kind)} token may not {_words(type(request).__name__)}",
            hint="use the owner's token, or ask the owner of the cluster",
        )


def used(record: TokenRecord, *, now: float) -> TokenRecord:
    return msgspec.structs.replace(record, used_at=now)


def revoked(record: TokenRecord, *, now: float) -> TokenRecord:
    return msgspec.structs.replace(record, revoked_at=now)


def secret_hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def encoded(raw: bytes) -> str:
    """32 bytes as 43 characters."""
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _another(kind: TokenKind) -> str:
    command = "genie token create --join" if kind is TokenKind.JOIN else "genie token create"
    return f"ask for another: '{command}'"


def _a(kind: TokenKind) -> str:
    return f"an {kind}" if kind is TokenKind.OWNER else f"a {kind}"


def _words(request_name: str) -> str:
    """`ListTokens` as people say it: list tokens. Most requests are named as orders, so this reads well."""
    return _NOT_ORDERS.get(request_name) or re.sub(r"(?<!^)(?=[A-Z])", " ", request_name).lower()
