"""Tokens: text form, stored record, verification and permissions.

A token has the form `genie.KIND.ID.SECRET.PIN`. The ID identifies the record, the secret has 256 bits and is
stored only as SHA-256, the pin is the SHA-256 of the CA certificate of the cluster ("-" without TLS), so that
a client needs nothing but the token to authenticate the cluster. Pure: secret, ID and time are arguments.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass

import msgspec

from genie.errors import NodeRemovedError, PermissionError_, TokenRefusedError
from genie.model.messages import NODE_REQUESTS, OWNER_REQUESTS, SERVER_REQUESTS, USER_REQUESTS, Message
from genie.model.tenant import Identity, TokenKind, TokenRecord

SECRET_BYTES = 32
NO_PIN = "-"

_TOKEN_PATTERN = re.compile(
    r"genie\.(owner|user|join|node|server-join)\.([a-z0-9]{4,32})\.([A-Za-z0-9_-]{43})\.([A-Za-z0-9_-]{43}|-)"
)
_ALLOWED_REQUESTS: dict[TokenKind, frozenset[type[Message]]] = {
    TokenKind.OWNER: frozenset((*USER_REQUESTS, *OWNER_REQUESTS)),
    TokenKind.USER: frozenset(USER_REQUESTS),
    TokenKind.NODE: frozenset(NODE_REQUESTS),
    TokenKind.JOIN: frozenset(),
    TokenKind.SERVER: frozenset(SERVER_REQUESTS),
    TokenKind.SERVER_JOIN: frozenset(),
}
_JOIN_AGAIN_HINT = "to join again, create a join token: 'genie token create --join'"
# Requests whose name does not describe what they do.
_REQUEST_DESCRIPTIONS = {
    "ConfirmLaunch": "confirm launches",
    "ExecutorReady": "report executors",
    "EmptyNode": "drain nodes",
    "ForwardedRequest": "forward requests",
    "GetQueue": "read the queue",
    "GetReplica": "read replicas",
    "GetStatus": "read the status",
    "Heartbeat": "send heartbeats of nodes",
    "Leave": "remove nodes",
    "PutReplica": "store replicas",
    "Register": "register nodes",
    "SessionEnd": "end sessions",
    "SessionHeartbeat": "open sessions",
    "SignExecutor": "request certificates of executors",
    "StatReplica": "read replicas",
    "WaitDevice": "wait for devices",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its secret, which the repr hides."""

    kind: TokenKind
    token_id: str
    secret: str
    pin: str

    def __str__(self) -> str:
        return f"genie.{self.kind}.{self.token_id}.{self.secret}.{self.pin}"

    def __repr__(self) -> str:
        return f"Token({self.kind}, {self.token_id})"


def parse_token(text: str) -> Token:
    """Raises TokenRefusedError, which does not repeat the text."""
    match = _TOKEN_PATTERN.fullmatch(text.strip())
    if match is None:
        raise TokenRefusedError(
            "this is not a Genie token",
            hint="a token has the form genie.KIND.ID.SECRET.PIN; create one with 'genie token create'",
        )
    kind, token_id, secret, pin = match.groups()
    return Token(TokenKind(kind), token_id, secret, pin)


def new_token(kind: TokenKind, *, token_id: str, secret: bytes, pin: str) -> Token:
    assert len(secret) == SECRET_BYTES
    return Token(kind, token_id, encode_base64url(secret), pin)


def new_token_record(
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


def verify_token(token: Token, record: TokenRecord | None, *, now: float) -> Identity:
    """Returns the identity of this token. Raises TokenRefusedError with the reason."""
    wrong = record is None or not hmac.compare_digest(secret_hash(token.secret), record.secret_sha256)
    record = check_unused(token.token_id, None if wrong else record, token.kind, now=now)
    return Identity(token_id=record.token_id, kind=record.kind, tenant=record.tenant, name=record.name)


def check_unused(token_id: str, record: TokenRecord | None, kind: TokenKind, *, now: float) -> TokenRecord:
    """Returns the record if it is that of a valid token of this kind. Does not verify the secret.

    Raises TokenRefusedError with the reason.
    """
    if record is None or record.kind is not kind:
        raise TokenRefusedError(
            f"token {token_id[:80]} is unknown here or its secret is wrong",
            hint=_JOIN_AGAIN_HINT
            if kind is TokenKind.NODE
            else "run 'genie token list' on the cluster, or create one with 'genie token create'",
        )
    if record.revoked_at is not None and kind is TokenKind.NODE:
        raise NodeRemovedError(
            f"node {record.name} was removed from the cluster (genie forget), or its token {token_id} was "
            "revoked",
            hint=_JOIN_AGAIN_HINT,
        )
    if record.revoked_at is not None:
        raise TokenRefusedError(f"token {token_id} was revoked", hint=_new_token_hint(kind))
    if record.expires_at is not None and now >= record.expires_at:
        raise TokenRefusedError(f"token {token_id} has expired", hint=_new_token_hint(kind))
    if record.used_at is not None:
        raise TokenRefusedError(f"token {token_id} was used already", hint=_new_token_hint(kind))
    return record


def check_request_allowed(identity: Identity, request: Message) -> None:
    """Raises PermissionError_ if this kind of token may not send this request."""
    if request.__class__ not in _ALLOWED_REQUESTS[identity.kind]:
        raise PermissionError_(
            f"permission denied: {identity.kind} tokens cannot {_describe_request(type(request).__name__)}",
            hint="use the owner token, or contact the owner of the cluster",
        )


def mark_used(record: TokenRecord, *, now: float) -> TokenRecord:
    return msgspec.structs.replace(record, used_at=now)


def mark_revoked(record: TokenRecord, *, now: float) -> TokenRecord:
    return msgspec.structs.replace(record, revoked_at=now)


def secret_hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def encode_base64url(raw: bytes) -> str:
    """Base64 for URLs, without padding: 32 bytes are 43 characters."""
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decode_base64url(text: str) -> bytes:
    """The inverse of `encode_base64url`. Raises ValueError."""
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


def _new_token_hint(kind: TokenKind) -> str:
    option = {TokenKind.JOIN: " --join", TokenKind.SERVER_JOIN: " --server"}.get(kind, "")
    command = f"genie token create{option}"
    return f"request a new one: '{command}'"


def _describe_request(request_name: str) -> str:
    """What a request does: `ListTokens` is 'list tokens', `DrainNode` is 'drain nodes'."""
    if request_name in _REQUEST_DESCRIPTIONS:
        return _REQUEST_DESCRIPTIONS[request_name]
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", request_name).lower()
    return words if words.endswith("s") else f"{words}s"
