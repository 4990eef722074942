"""Admission of servers: which tokens hand over the CA, and how often."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec
import pytest

from genie.controller.server_credentials_handover import ServerCredentials, ServerJoinAttempt
from genie.errors import GenieError, ProtocolError, TokenRefusedError, UsageError
from genie.model.messages import CreateToken, ListTokens, RevokeToken
from genie.model.messages.handshake import JoinServer, ServerJoined
from genie.model.tenant import TokenKind
from genie.runtime import rpc
from genie.tenancy.access import Token, new_token, parse_token
from tests.controller.running_controller import CALL_S, RunningController, running_controller
from tests.fakes.clock import FakeClock

ENDPOINTS = ("10.0.0.1:2379", "10.0.0.2:2379")
SERVER_CLUSTER = {"tls": "on", "store_setting": "etcd", "etcd_endpoints": ENDPOINTS}


async def send(one: RunningController, request: JoinServer) -> ServerJoined:
    access = await one.access()
    async with rpc.dial(one.network, access.host, access.port, tls=access.tls, timeout_s=CALL_S) as peer:
        return await peer.call(request, timeout_s=CALL_S)


async def join(one: RunningController, token: Token) -> ServerCredentials:
    client = ServerJoinAttempt.create(token)
    return client.decrypt_credentials(await send(one, client.request))


async def test_server_token_hands_over_the_ca_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_controller(tmp_path, **SERVER_CLUSTER) as one:  # type: ignore[arg-type]
        token = parse_token(await one.token(TokenKind.SERVER_JOIN))
        found = await join(one, token)
        ca_key = (one.state_dir / "controller" / "ca.key").read_text()
        assert found.ca_pem == (one.state_dir / "controller" / "ca.pem").read_text()
        assert (found.ca_key_pem, found.etcd_endpoints) == (ca_key, ENDPOINTS)
        async with one.client(found.owner_token) as owner:
            tokens = (await owner.ask(ListTokens())).tokens
        names = {record.name for record in tokens if record.kind is TokenKind.OWNER}
        assert names == {"owner", "server-127.0.0.1"}
        with pytest.raises(TokenRefusedError, match="was used already"):
            await join(one, token)
    assert "the CA of the cluster was handed over" in caplog.text
    assert token.secret not in caplog.text
    assert ca_key.splitlines()[1] not in caplog.text


async def test_replayed_request_is_refused(tmp_path: Path) -> None:
    async with running_controller(tmp_path, **SERVER_CLUSTER) as one:  # type: ignore[arg-type]
        request = ServerJoinAttempt.create(parse_token(await one.token(TokenKind.SERVER_JOIN))).request
        await send(one, request)
        with pytest.raises(TokenRefusedError, match="was used already"):
            await send(one, request)


async def test_failed_attempt_does_not_consume_the_token(tmp_path: Path) -> None:
    async with running_controller(tmp_path, **SERVER_CLUSTER) as one:  # type: ignore[arg-type]
        token = parse_token(await one.token(TokenKind.SERVER_JOIN))
        secret = os.urandom(32)
        guessed = new_token(TokenKind.SERVER_JOIN, token_id=token.token_id, secret=secret, pin=token.pin)
        with pytest.raises(TokenRefusedError, match="secret is wrong"):
            await join(one, guessed)
        assert (await join(one, token)).etcd_endpoints == ENDPOINTS


@pytest.mark.parametrize("kind", [TokenKind.OWNER, TokenKind.USER, TokenKind.JOIN, TokenKind.NODE])
async def test_other_kinds_of_tokens_do_not_admit_a_server(tmp_path: Path, kind: TokenKind) -> None:
    async with running_controller(tmp_path, **SERVER_CLUSTER) as one:  # type: ignore[arg-type]
        if kind is TokenKind.NODE:
            token = (await one.join("n1")).token
        elif kind is TokenKind.OWNER:
            token = (await one.access()).token
        else:
            token = parse_token(await one.token(kind))
        with pytest.raises(TokenRefusedError, match="unknown here"):
            await join(one, token)


async def test_expired_and_revoked_server_tokens_are_refused(tmp_path: Path) -> None:
    clock = FakeClock(wall_s=time.time())
    async with (
        running_controller(tmp_path, clock=clock, **SERVER_CLUSTER) as one,  # type: ignore[arg-type]
        one.client() as owner,
    ):
        token = parse_token(await one.token(TokenKind.SERVER_JOIN))
        revoked = parse_token(await one.token(TokenKind.SERVER_JOIN))
        await owner.ask(RevokeToken(token_id=revoked.token_id))
        with pytest.raises(TokenRefusedError, match="was revoked"):
            await join(one, revoked)
        await clock.advance(901.0)
        with pytest.raises(TokenRefusedError, match="has expired"):
            await join(one, token)


async def test_server_token_cannot_log_in_or_join_as_a_node(tmp_path: Path) -> None:
    async with running_controller(tmp_path, **SERVER_CLUSTER) as one:  # type: ignore[arg-type]
        token = await one.token(TokenKind.SERVER_JOIN)
        with pytest.raises(TokenRefusedError, match="a server token only admits a machine"):
            async with one.client(token):
                pass


async def test_only_the_owner_creates_server_tokens(tmp_path: Path) -> None:
    async with running_controller(tmp_path, **SERVER_CLUSTER) as one:  # type: ignore[arg-type]
        user = await one.token(TokenKind.USER, tenant="team")
        async with one.client(user) as client:
            with pytest.raises(GenieError, match="user tokens cannot create tokens"):
                await client.ask(CreateToken(kind=TokenKind.SERVER_JOIN))


async def test_server_tokens_have_a_short_lifetime(tmp_path: Path) -> None:
    async with running_controller(tmp_path, **SERVER_CLUSTER) as one, one.client() as owner:  # type: ignore[arg-type]
        await one.token(TokenKind.SERVER_JOIN)
        rows = (await owner.ask(ListTokens())).tokens
        (record,) = [row for row in rows if row.kind is TokenKind.SERVER_JOIN]
        assert record.expires_at is not None
        assert record.expires_at - record.created_at == pytest.approx(900.0)
        with pytest.raises(UsageError, match="not allowed"):
            await one.token(TokenKind.SERVER_JOIN, ttl_s=86400.0)


@pytest.mark.parametrize(
    "settings", [{"tls": "on", "store_setting": "sqlite"}, {"tls": "off", "store_setting": "etcd"}]
)
async def test_cluster_without_its_own_etcd_creates_no_server_tokens(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    async with running_controller(tmp_path, **settings) as one:  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no server can join") as caught:
            await one.token(TokenKind.SERVER_JOIN)
        assert "genie store migrate --to etcd --bind ADDRESS" in caught.value.hint
        with pytest.raises(UsageError, match="does not run its own etcd"):
            await send(one, ServerJoinAttempt.create(_unknown_token()).request)


async def test_reply_changed_on_the_way_is_refused(tmp_path: Path) -> None:
    async with running_controller(tmp_path, **SERVER_CLUSTER) as one:  # type: ignore[arg-type]
        client = ServerJoinAttempt.create(parse_token(await one.token(TokenKind.SERVER_JOIN)))
        reply = await send(one, client.request)
        swapped = "B" if reply.sealed[40] == "A" else "A"
        changed = reply.sealed[:40] + swapped + reply.sealed[41:]
        with pytest.raises(ProtocolError, match="cannot be decrypted"):
            client.decrypt_credentials(msgspec.structs.replace(reply, sealed=changed))


def _unknown_token() -> Token:
    return new_token(TokenKind.SERVER_JOIN, token_id="abcd", secret=os.urandom(32), pin="-")
