"""Tokens: creating, listing and revoking them, and authenticating by them.

While this controller leads, the ledger has every token. Otherwise records are read from the store and cached
for a few seconds. Permissions are in tenancy/access.py.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from genie.config import ControllerConfig
from genie.controller.ledger import Ledger, LedgerTable, Transaction, request_gossip_key_change
from genie.controller.server_credentials_handover import public_key_of_server_token
from genie.controller.store import Store
from genie.controller.store.open import LOCAL_ETCD_STORE
from genie.errors import AccessError, StoreError, StoreVersionError, TokenRefusedError, UsageError
from genie.model.failover import TOKEN_READ_TIMEOUT_S
from genie.model.names import validate_name
from genie.model.tenant import DEFAULT_TENANT, Identity, TokenKind, TokenRecord
from genie.processes import files
from genie.processes.clock import Clock
from genie.runtime.credentials import OWNER_TOKEN_FILE
from genie.tenancy.access import (
    NO_PIN,
    SECRET_BYTES,
    Token,
    mark_revoked,
    new_token,
    new_token_record,
    parse_token,
    verify_token,
)

_log = logging.getLogger(__name__)

NON_NODE_TOKENS_MAX = 2000
"""Owner tokens, user tokens and unused join tokens."""
NODE_TOKENS_MAX = 20_000
_CACHED_TOKEN_RECORDS_MAX = 1024
_CACHED_TOKEN_RECORD_TTL_S = 5.0
_STALE_RECORD_ACCEPTED_S_MAX = 60.0
"""How long a cached token is accepted while the store does not respond: it may have been revoked since."""
_REVOKED_TOKEN_RETENTION_S = 86400.0
_REVOKED_NODE_TOKEN_RETENTION_S = 30 * 86400.0
REVOKED_NODE_TOKENS_KEPT = 5000
"""The newest of them are kept even longer: a removed node that was only isolated ends its jobs when it is
rejected because of a revoked token, but not because of one that is unknown."""
_JOIN_TOKEN_RETENTION_S = 3600.0
_TOKEN_TTL_S_MAX = 3650 * 86400.0
_SERVER_JOIN_TOKEN_TTL_S = 900.0
_SINGLE_USE_TOKEN_KINDS = (TokenKind.JOIN, TokenKind.SERVER_JOIN)

_NEWER_TOKEN_HINT = "use another token, or let a server of the newer release lead"
_NEW_TOKEN_HINT = "get a new token with 'genie token create' and store it with 'genie login'"


class TokenRegistry:
    """`pin` becomes part of every token of this cluster. `find_in_copy` returns the record of a token in a
    standby's copy of the ledger, for clients while the store does not respond."""

    def __init__(
        self,
        ledger: Ledger,
        store: Store,
        *,
        config: ControllerConfig,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        pin: str,
        find_in_copy: Callable[[str], TokenRecord | None] = lambda token_id: None,
    ) -> None:
        self._ledger = ledger
        self._find_in_copy = find_in_copy
        self._store = store
        self._config = config
        self._clock = clock
        self._random_bytes = random_bytes
        self._ca_pin = pin
        self._record_and_read_time_by_token_id: OrderedDict[str, tuple[TokenRecord | None, float]] = (
            OrderedDict()
        )
        self._token_index = TokenIndex()
        ledger.tokens.add_reversible_index(self._token_index.update)
        ledger.add_after_load_listener(lambda: self._token_index.rebuild(ledger.tokens.values()))

    async def authenticate_token(self, text: str) -> Identity:
        """Return the identity behind a token; raise TokenRefusedError if it is not valid."""
        token = parse_token(text)
        return verify_token(token, await self._find_token_record(token.token_id), now=self._clock.wall_s())

    def check_token_still_valid(self, identity: Identity) -> None:
        """Raise TokenRefusedError if the token of a connection has been revoked or has expired since."""
        if not self._ledger.is_loaded or identity.kind is TokenKind.SERVER:
            return
        record = self._ledger.tokens.get(identity.token_id)
        if record is not None and record.revoked_at is None and record.expires_at is None:
            return  # each request comes here: no call more than needed
        check_token_readable(self._ledger.tokens, identity.token_id)
        check_token_not_revoked(identity.token_id, record, now=self._clock.wall_s())

    def identify_forwarded_client(self, token_id: str) -> Identity:
        """Return the identity behind the ID of a token whose secret another controller has verified. Raise
        TokenRefusedError if the token is not valid, or not that of a client."""
        check_token_readable(self._ledger.tokens, token_id)
        record = self._ledger.tokens.get(token_id)
        check_token_not_revoked(token_id[:80], record, now=self._clock.wall_s())
        if record is None or record.kind not in (TokenKind.OWNER, TokenKind.USER):
            raise TokenRefusedError(f"token {token_id[:80]} is not that of a client")
        return Identity(token_id=record.token_id, kind=record.kind, tenant=record.tenant, name=record.name)

    async def create_token(
        self, kind: TokenKind, *, tenant: str, name: str, ttl_s: float | None
    ) -> tuple[Token, TokenRecord]:
        if kind is TokenKind.NODE:
            raise UsageError("node tokens are created when a node joins", hint="create a join token instead")
        if kind is TokenKind.SERVER:
            raise UsageError("controllers have no tokens", hint="they authenticate by their certificate")
        if kind is TokenKind.SERVER_JOIN and (
            self._config.store != LOCAL_ETCD_STORE or self._ca_pin == NO_PIN
        ):
            raise UsageError(
                f"no server can join this cluster: its store is {self._config.store.partition(':')[0]}",
                hint="to move a cluster from SQLite to etcd: 'genie down --keep-jobs', then 'genie store "
                "migrate --to etcd --bind ADDRESS'; with an external etcd, start every controller with its "
                "URL",
            )
        tenant = validate_name(tenant or DEFAULT_TENANT, what="tenant")
        if name:
            validate_name(name, what="token name")
        ttl_s = self._token_ttl_s_or_default(kind, ttl_s)

        def build(txn: Transaction) -> tuple[Token, TokenRecord]:
            return self.create_token_in_transaction(txn, kind, tenant=tenant, name=name, ttl_s=ttl_s)

        return await self._ledger.write(build)

    def create_token_in_transaction(
        self,
        txn: Transaction,
        kind: TokenKind,
        *,
        tenant: str = DEFAULT_TENANT,
        name: str = "",
        ttl_s: float | None = None,
    ) -> tuple[Token, TokenRecord]:
        """Create a token as part of a transaction."""
        if kind is not TokenKind.NODE and self._token_index.token_count_towards_limit >= NON_NODE_TOKENS_MAX:
            raise UsageError(
                f"the maximum of {NON_NODE_TOKENS_MAX} tokens is reached", hint="revoke some first"
            )
        if kind is TokenKind.NODE and len(self._token_index.token_ids_by_node) >= NODE_TOKENS_MAX:
            raise UsageError(
                f"the maximum of {NODE_TOKENS_MAX} nodes is reached", hint="remove nodes with 'genie forget'"
            )
        token = self._new_token(kind)
        record = new_token_record(token, now=self._clock.wall_s(), tenant=tenant, name=name, ttl_s=ttl_s)
        if kind is TokenKind.SERVER_JOIN:
            record = msgspec.structs.replace(record, public_key=public_key_of_server_token(token))
        txn.put(self._ledger.tokens, record.token_id, record)
        return token, record

    def has_node_token(self, node_id: str) -> bool:
        """Whether a node has a token that is not revoked."""
        return node_id in self._token_index.token_ids_by_node

    def unrevoked_tokens_of_node(self, node_id: str) -> list[TokenRecord]:
        """The tokens of a node that are not revoked."""
        return [
            self._ledger.tokens[token_id]
            for token_id in sorted(self._token_index.token_ids_by_node.get(node_id, ()))
        ]

    async def check_tokens_of_node_writable(self, node_id: str) -> None:
        """Raise ReleaseSkewError if a newer release wrote a token of this node that is not revoked: it would
        stay valid after a removal of the node."""
        tokens = self._ledger.tokens
        for token_id in tokens.read_only_row_ids():
            stored = await self._store.get(tokens.prefix + token_id, timeout_s=TOKEN_READ_TIMEOUT_S)
            if stored is not None and _may_be_unrevoked_token_of_node(stored.value, node_id):
                tokens.check_writable(token_id)

    async def revoke_token(self, token_id: str) -> None:
        """Revoke a token; idempotent. The last owner token cannot be revoked. Raise ReleaseSkewError for a
        token that a newer release wrote."""

        def build(txn: Transaction) -> None:
            self._ledger.tokens.check_writable(token_id)
            record = self._ledger.tokens.get(token_id)
            if record is None:
                raise AccessError(
                    f"there is no token {token_id[:80]!r}", hint="'genie token list' lists them"
                )
            if record.revoked_at is not None:
                return
            owners = [row for row in self._ledger.tokens.values() if _is_permanent_owner_token(row)]
            if owners == [record]:
                raise UsageError(
                    f"cannot revoke token {token_id}: it is the last owner token",
                    hint="without it no token could be created any more",
                )
            txn.put(self._ledger.tokens, token_id, mark_revoked(record, now=self._clock.wall_s()))
            if record.kind is TokenKind.NODE:
                request_gossip_key_change(txn, self._ledger.cluster)

        await self._ledger.write(build)

    def token_records_after(self, token_id: str) -> Iterator[TokenRecord]:
        """The tokens with greater IDs, by ID, without the hashes of their secrets."""
        return token_records_after(self._ledger.tokens, token_id)

    async def ensure_owner_token(self, state_dir: Path) -> None:
        """Make sure that the state directory has a valid owner token: keep the existing one or create one."""
        path = state_dir / OWNER_TOKEN_FILE
        token = self._try_read_valid_owner_token(path)
        if token is not None and token.pin == self._ca_pin:
            return
        if token is not None:
            token = Token(token.kind, token.token_id, token.secret, self._ca_pin)
            files.write_private(path, str(token).encode())
            return
        # Write the file first: after a crash in between, the token is unknown and replaced.
        token = self._new_token(TokenKind.OWNER)
        files.write_private(path, str(token).encode())
        record = new_token_record(token, now=self._clock.wall_s(), tenant=DEFAULT_TENANT, name="owner")
        await self._ledger.write(lambda txn: txn.put(self._ledger.tokens, record.token_id, record))
        _log.info("wrote the owner token to %s", path)

    async def delete_old_tokens(self) -> None:
        """Delete join and server tokens an hour after they were used or expired, tokens of nodes 30 days
        after they were revoked if there are too many, and any other token a day after it was revoked."""
        now = self._clock.wall_s()
        limit, join_limit = now - _REVOKED_TOKEN_RETENTION_S, now - _JOIN_TOKEN_RETENTION_S
        old = [
            row.token_id
            for row in self._ledger.tokens.values()
            if (
                row.kind in _SINGLE_USE_TOKEN_KINDS
                and min(row.used_at or now, row.expires_at or now) < join_limit
            )
            or (row.revoked_at is not None and row.kind is not TokenKind.NODE and row.revoked_at < limit)
        ]
        old = [*old, *_excess_revoked_node_tokens(self._ledger.tokens.values(), now=now)][:100]
        if not old:
            return

        def build(txn: Transaction) -> None:
            for token_id in old:
                txn.delete(self._ledger.tokens, token_id)

        await self._ledger.write(build)

    async def _find_token_record(self, token_id: str) -> TokenRecord | None:
        if self._ledger.is_loaded:
            check_token_readable(self._ledger.tokens, token_id)
            known = self._ledger.tokens.get(token_id)
            if known is not None or self._ledger.is_up_to_date:
                return known  # else another controller may have made it since
        copied = self._find_in_copy(token_id)
        if copied is not None and copied.revoked_at is not None:
            return copied
        now_s = self._clock.monotonic_s()
        cached = self._record_and_read_time_by_token_id.get(token_id)
        if cached is not None and now_s - cached[1] < _CACHED_TOKEN_RECORD_TTL_S:
            return cached[0]
        try:
            found = await self._store.get(
                self._ledger.tokens.prefix + token_id, timeout_s=TOKEN_READ_TIMEOUT_S
            )
        except StoreError:
            if (
                cached is not None
                and cached[0] is not None
                and now_s - cached[1] < _STALE_RECORD_ACCEPTED_S_MAX
            ):
                return cached[0]
            if copied is not None and copied.kind in (TokenKind.OWNER, TokenKind.USER):
                return copied
            raise
        try:
            record = None if found is None else self._ledger.tokens.decode(token_id, found.value)
        except StoreVersionError as error:
            raise TokenRefusedError(error.message, hint=_NEWER_TOKEN_HINT) from error
        self._record_and_read_time_by_token_id[token_id] = (record, now_s)
        self._record_and_read_time_by_token_id.move_to_end(token_id)
        while len(self._record_and_read_time_by_token_id) > _CACHED_TOKEN_RECORDS_MAX:
            self._record_and_read_time_by_token_id.popitem(last=False)
        return record

    def _try_read_valid_owner_token(self, path: Path) -> Token | None:
        try:
            token = parse_token(files.read_small_file(path))
            identity = verify_token(token, self._ledger.tokens.get(token.token_id), now=self._clock.wall_s())
        except (OSError, UnicodeDecodeError, TokenRefusedError):
            return None
        return token if identity.kind is TokenKind.OWNER else None

    def _new_token(self, kind: TokenKind) -> Token:
        token_id = self._random_bytes(6).hex()
        return new_token(kind, token_id=token_id, secret=self._random_bytes(SECRET_BYTES), pin=self._ca_pin)

    def _token_ttl_s_or_default(self, kind: TokenKind, ttl_s: float | None) -> float | None:
        is_single_use = kind in _SINGLE_USE_TOKEN_KINDS
        if ttl_s is None:
            default_s = min(self._config.join_token_s, _SERVER_JOIN_TOKEN_TTL_S)
            if kind is TokenKind.SERVER_JOIN:
                return default_s
            return self._config.join_token_s if is_single_use else None
        ttl_s_max = self._config.join_token_s if is_single_use else _TOKEN_TTL_S_MAX
        if ttl_s > ttl_s_max:
            raise UsageError(f"ttl_s = {ttl_s} is not allowed", hint=f"allowed: above 0 to {ttl_s_max:g}")
        return ttl_s


def token_records_after(tokens: LedgerTable[TokenRecord], token_id: str) -> Iterator[TokenRecord]:
    """The tokens with greater IDs, by ID, without the hashes of their secrets."""
    for each in sorted(other for other in tokens if other > token_id):
        yield msgspec.structs.replace(tokens[each], secret_sha256="")


def check_token_readable(tokens: LedgerTable[TokenRecord], token_id: str) -> None:
    """Raise TokenRefusedError for a token that a newer release wrote: it may have restrictions that this one
    does not know."""
    if reason := tokens.why_read_only(token_id):
        raise TokenRefusedError(reason, hint=_NEWER_TOKEN_HINT)


def check_token_not_revoked(token_id: str, record: TokenRecord | None, *, now: float) -> None:
    """Raise TokenRefusedError if a token has been revoked or has expired since its secret was verified."""
    if record is None or record.revoked_at is not None:
        raise TokenRefusedError(f"token {token_id} was revoked", hint=_NEW_TOKEN_HINT)
    if record.expires_at is not None and now >= record.expires_at:
        raise TokenRefusedError(f"token {token_id} has expired", hint=_NEW_TOKEN_HINT)


class TokenIndex:
    """What builds of tokens read, so that creating one takes constant time. Reversible."""

    def __init__(self) -> None:
        self.token_count_towards_limit = 0
        """Tokens that count towards NON_NODE_TOKENS_MAX."""
        self.token_ids_by_node: dict[str, set[str]] = {}
        """By node: the IDs of its tokens that are not revoked."""

    def rebuild(self, rows: Iterable[TokenRecord]) -> None:
        self.token_count_towards_limit, self.token_ids_by_node = 0, {}
        for row in rows:
            self.update(row.token_id, None, row)

    def update(self, token_id: str, before: TokenRecord | None, after: TokenRecord | None) -> None:
        self.token_count_towards_limit += _counts_towards_limit(after) - _counts_towards_limit(before)
        if before is not None and _is_unrevoked_node_token(before):
            ids = self.token_ids_by_node[before.name]
            ids.discard(token_id)
            if not ids:
                del self.token_ids_by_node[before.name]
        if after is not None and _is_unrevoked_node_token(after):
            self.token_ids_by_node.setdefault(after.name, set()).add(token_id)


def _counts_towards_limit(record: TokenRecord | None) -> bool:
    if record is None or record.kind is TokenKind.NODE:
        return False
    return record.revoked_at is None and record.used_at is None


def _is_unrevoked_node_token(record: TokenRecord) -> bool:
    return record.kind is TokenKind.NODE and record.revoked_at is None


def _may_be_unrevoked_token_of_node(value: bytes, node_id: str) -> bool:
    """Whether a stored token that a newer release wrote may be one of this node."""
    fields = msgspec.json.decode(value, type=dict[str, object])
    return (
        fields.get("kind") == TokenKind.NODE
        and fields.get("name") == node_id
        and fields.get("revoked_at") is None
    )


def _excess_revoked_node_tokens(rows: Iterable[TokenRecord], *, now: float) -> list[str]:
    """The oldest revoked tokens of nodes beyond the number to keep."""
    revoked = sorted(
        (row.revoked_at, row.token_id)
        for row in rows
        if row.kind is TokenKind.NODE and row.revoked_at is not None
    )
    limit = now - _REVOKED_NODE_TOKEN_RETENTION_S
    excess = revoked[: max(len(revoked) - REVOKED_NODE_TOKENS_KEPT, 0)]
    return [token_id for revoked_at, token_id in excess if revoked_at < limit]


def _is_permanent_owner_token(record: TokenRecord) -> bool:
    return record.kind is TokenKind.OWNER and record.revoked_at is None and record.expires_at is None
