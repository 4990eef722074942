"""Tokens: making, listing, revoking, and finding out who one stands for.

While this controller leads, the tables in memory have every token. Otherwise records are read
from the store and kept for a few seconds. Not for: what a token may do (tenancy/access.py).
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from genie.config import ControllerConfig
from genie.controller.ledger import Ledger, Transaction
from genie.controller.store import Store
from genie.errors import AccessError, StoreError, TokenRefusedError, UsageError
from genie.model.names import checked_name
from genie.model.tenant import DEFAULT_TENANT, Identity, TokenKind, TokenRecord
from genie.runtime import files
from genie.runtime.clock import Clock
from genie.runtime.credentials import OWNER_TOKEN_FILE
from genie.tenancy.access import SECRET_BYTES, Token, new_record, new_token, parse_token, revoked, verify

_log = logging.getLogger(__name__)

TOKENS_MAX = 2000
"""All of them fit into one reply."""
_CACHE_MAX = 1024
_CACHE_S = 5.0
_JOIN_KEPT_S = 86400.0
_TTL_S_MAX = 3650 * 86400.0


class Tokens:
    """`pin` is what every token of this cluster carries."""

    def __init__(
        self,
        ledger: Ledger,
        store: Store,
        *,
        config: ControllerConfig,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        pin: str,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._config = config
        self._clock = clock
        self._random_bytes = random_bytes
        self._pin = pin
        self._cache: OrderedDict[str, tuple[TokenRecord | None, float]] = OrderedDict()

    async def identify(self, text: str) -> Identity:
        """Who holds this token, or TokenRefusedError."""
        token = parse_token(text)
        return verify(token, await self._record(token.token_id), now=self._clock.wall_s())

    def check_still_good(self, identity: Identity) -> None:
        """A connection outlives neither the revocation nor the expiry of its token."""
        if not self._ledger.is_loaded:
            return
        record = self._ledger.tokens.get(identity.token_id)
        if record is None or record.revoked_at is not None:
            raise TokenRefusedError(f"token {identity.token_id} was revoked")
        if record.expires_at is not None and self._clock.wall_s() >= record.expires_at:
            raise TokenRefusedError(f"token {identity.token_id} has expired")

    async def create(
        self, kind: TokenKind, *, tenant: str, name: str, ttl_s: float | None
    ) -> tuple[Token, TokenRecord]:
        if kind is TokenKind.NODE:
            raise UsageError("a node's token is made when it joins", hint="make a join token instead")
        tenant = checked_name(tenant or DEFAULT_TENANT, what="tenant")
        if name:
            checked_name(name, what="token name")
        ttl_s = self._checked_ttl(kind, ttl_s)

        def build(txn: Transaction) -> tuple[Token, TokenRecord]:
            return self.stage(txn, kind, tenant=tenant, name=name, ttl_s=ttl_s)

        return await self._ledger.write(build)

    def stage(
        self,
        txn: Transaction,
        kind: TokenKind,
        *,
        tenant: str = DEFAULT_TENANT,
        name: str = "",
        ttl_s: float | None = None,
    ) -> tuple[Token, TokenRecord]:
        """A new token as part of a larger change."""
        if sum(row.revoked_at is None for row in self._ledger.tokens.values()) >= TOKENS_MAX:
            raise UsageError(f"there are {TOKENS_MAX} tokens already", hint="revoke some first")
        token = self._new(kind)
        record = new_record(token, now=self._clock.wall_s(), tenant=tenant, name=name, ttl_s=ttl_s)
        txn.put(self._ledger.tokens, record.token_id, record)
        return token, record

    async def revoke(self, token_id: str) -> None:
        """Revoking twice is fine. The last owner's token stays: nobody could make another."""

        def build(txn: Transaction) -> None:
            record = self._ledger.tokens.get(token_id)
            if record is None:
                raise AccessError(f"there is no token {token_id[:80]!r}", hint="see 'genie token list'")
            if record.revoked_at is not None:
                return
            owners = [row for row in self._ledger.tokens.values() if _is_good_owner(row)]
            if owners == [record]:
                raise UsageError(
                    f"token {token_id} is the last owner's token",
                    hint="without it nobody could make tokens any more",
                )
            txn.put(self._ledger.tokens, token_id, revoked(record, now=self._clock.wall_s()))

        await self._ledger.write(build)

    def listed(self) -> tuple[TokenRecord, ...]:
        """Newest first, without the hashes."""
        rows = sorted(self._ledger.tokens.values(), key=lambda row: (-row.created_at, row.token_id))
        return tuple(msgspec.structs.replace(row, secret_sha256="") for row in rows)

    async def ensure_owner(self, state_dir: Path) -> None:
        """Leaves a good owner's token in the state directory: the one that is there, or a new one."""
        path = state_dir / OWNER_TOKEN_FILE
        token = self._kept_owner(path)
        if token is not None and token.pin == self._pin:
            return
        if token is not None:
            token = Token(token.kind, token.token_id, token.secret, self._pin)
            files.write_private(path, str(token).encode())
            return
        # The file comes first: after a crash in between, it is found to be unknown and made anew.
        token = self._new(TokenKind.OWNER)
        files.write_private(path, str(token).encode())
        record = new_record(token, now=self._clock.wall_s(), tenant=DEFAULT_TENANT, name="owner")
        await self._ledger.write(lambda txn: txn.put(self._ledger.tokens, record.token_id, record))
        _log.info("wrote the owner's token to %s", path)

    async def drop_old(self) -> None:
        """Forgets join tokens a day after they ran out, and any token a day after it was revoked."""
        limit = self._clock.wall_s() - _JOIN_KEPT_S
        old = [
            row.token_id
            for row in self._ledger.tokens.values()
            if (row.kind is TokenKind.JOIN and (row.expires_at or limit) < limit)
            or (row.revoked_at is not None and row.revoked_at < limit)
        ][:100]
        if not old:
            return

        def build(txn: Transaction) -> None:
            for token_id in old:
                txn.delete(self._ledger.tokens, token_id)

        await self._ledger.write(build)

    async def _record(self, token_id: str) -> TokenRecord | None:
        if self._ledger.is_loaded:
            known = self._ledger.tokens.get(token_id)
            if known is not None or self._ledger.is_current:
                return known  # else another controller may have made it since
        now_s = self._clock.monotonic_s()
        kept = self._cache.get(token_id)
        if kept is not None and now_s - kept[1] < _CACHE_S:
            return kept[0]
        try:
            found = await self._store.get(self._ledger.tokens.prefix + token_id)
        except StoreError:
            if kept is not None:
                return kept[0]
            raise
        record = None if found is None else self._ledger.tokens.decoded(token_id, found.value)
        self._cache[token_id] = (record, now_s)
        self._cache.move_to_end(token_id)
        while len(self._cache) > _CACHE_MAX:
            self._cache.popitem(last=False)
        return record

    def _kept_owner(self, path: Path) -> Token | None:
        try:
            token = parse_token(path.read_text("utf-8"))
            identity = verify(token, self._ledger.tokens.get(token.token_id), now=self._clock.wall_s())
        except (OSError, UnicodeDecodeError, TokenRefusedError):
            return None
        return token if identity.kind is TokenKind.OWNER else None

    def _new(self, kind: TokenKind) -> Token:
        token_id = self._random_bytes(6).hex()
        return new_token(kind, token_id=token_id, secret=self._random_bytes(SECRET_BYTES), pin=self._pin)

    def _checked_ttl(self, kind: TokenKind, ttl_s: float | None) -> float | None:
        if ttl_s is None:
            return self._config.join_token_s if kind is TokenKind.JOIN else None
        most = self._config.join_token_s if kind is TokenKind.JOIN else _TTL_S_MAX
        if not math.isfinite(ttl_s) or not 0 < ttl_s <= most:
            raise UsageError(f"ttl_s = {ttl_s} is not allowed", hint=f"allowed: above 0 to {most:g}")
        return ttl_s


def _is_good_owner(record: TokenRecord) -> bool:
    return record.kind is TokenKind.OWNER and record.revoked_at is None and record.expires_at is None
