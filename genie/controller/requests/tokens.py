"""Requests about tokens: list, create, revoke."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from genie.controller.connection import Connection, Handlers
from genie.controller.requests.reply_size import truncate_to_reply
from genie.controller.tokens import TokenRegistry
from genie.model.messages import CreateToken, Done, ListTokens, RevokeToken, TokenCreated, TokensReply


class TokenRequests:
    """`disconnect` closes the connections that were opened with a token ID."""

    def __init__(
        self, tokens: TokenRegistry, *, disconnect: Callable[[str], None], check_readable: Callable[[], None]
    ) -> None:
        self._tokens = tokens
        self._disconnect_token = disconnect
        self._check_readable = check_readable

    def handlers(self) -> Handlers:
        return {
            ListTokens: self.list_tokens,
            CreateToken: self.create_token,
            RevokeToken: self.revoke_token,
        }

    async def list_tokens(self, connection: Connection, request: ListTokens) -> TokensReply:
        self._check_readable()
        tokens, more = truncate_to_reply(self._tokens.token_records_after(request.after_token_id))
        return TokensReply(tokens=tokens, more=more)

    async def create_token(self, connection: Connection, request: CreateToken) -> TokenCreated:
        token, record = await self._tokens.create_token(
            request.kind, tenant=request.tenant, name=request.name, ttl_s=request.ttl_s
        )
        return TokenCreated(token=str(token), record=msgspec.structs.replace(record, secret_sha256=""))

    async def revoke_token(self, connection: Connection, request: RevokeToken) -> Done:
        await self._tokens.revoke_token(request.token_id)
        self._disconnect_token(request.token_id)
        return Done()
