"""token create, list and revoke."""

from __future__ import annotations

import json

import pytest

from genie.errors import TokenRefusedError
from genie.model.messages import CreateToken, Done, ListTokens, RevokeToken, TokenCreated, TokensReply
from genie.model.tenant import TokenKind, TokenRecord

TOKEN_HASH = "5" * 64


def make_token_record(kind: TokenKind = TokenKind.USER, **fields) -> TokenRecord:
    return TokenRecord(token_id="tok1", kind=kind, secret_sha256=TOKEN_HASH, created_at=1.0, **fields)


def make_created_token(kind: TokenKind = TokenKind.USER) -> TokenCreated:
    return TokenCreated(token=f"genie.{kind}.tok1.secret.-", record=make_token_record(kind))


def test_create_prints_only_the_token_to_standard_output(genie, controller) -> None:
    controller.replies[CreateToken] = make_created_token()
    ran = genie("token", "create", "--name", "alice", "--tenant", "lab", "--ttl", "30d")
    assert (ran.code, ran.out) == (0, "genie.user.tok1.secret.-\n")
    assert "GENIE_TOKEN" in ran.err and "secret" not in ran.err
    assert f"genie login 127.0.0.1:{controller.port}" in ran.err, "the port belongs to the address"
    (requests,) = controller.requests
    assert (requests.kind, requests.name, requests.tenant, requests.ttl_s) == (
        "user",
        "alice",
        "lab",
        30 * 86400,
    )


@pytest.mark.parametrize(
    ("expires_at", "message"),
    [(31.0, "token tok1 expires in 30 s (19"), (None, "token tok1 does not expire\n")],
)
def test_create_prints_when_the_token_expires(genie, controller, expires_at, message) -> None:
    record = make_token_record(expires_at=expires_at)
    controller.replies[CreateToken] = TokenCreated(token="genie.user.tok1.secret.-", record=record)
    ran = genie("token", "create", "--ttl", "30")
    assert message in ran.err
    assert ran.out == "genie.user.tok1.secret.-\n"


def test_join_token_prints_the_join_command(genie, controller) -> None:
    controller.replies[CreateToken] = make_created_token(TokenKind.JOIN)
    ran = genie("token", "create", "--join")
    assert controller.requests[0].kind == "join"
    assert f"genie join 127.0.0.1:{controller.port} --token-file join.token" in ran.err
    assert "(umask 077; genie token create --join > join.token)" in ran.err
    assert "--bind" in ran.err, "nobody else reaches a loopback address"


def test_create_prints_json_without_the_hash(genie, controller) -> None:
    controller.replies[CreateToken] = make_created_token()
    document = json.loads(genie("token", "create", "--json").out)
    assert document["token"].startswith("genie.user.")
    assert document["record"]["token_id"] == "tok1"
    assert "secret_sha256" not in document["record"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--name", "a b"], "--name"),
        (["--tenant", "../up"], "--tenant"),
        (["--tenant", ""], "--tenant"),
        (["--ttl", "soon"], "--ttl"),
        (["--ttl", "0"], "--ttl"),
        (["--name", "n\x07"], "--name"),
    ],
)
def test_invalid_option_is_named(genie, controller, argv, named) -> None:
    ran = genie("token", "create", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.err
    assert controller.requests == []


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "valid"),
        ({"expires_at": 9e12}, "valid for"),
        ({"expires_at": 2.0}, "expired"),
        ({"used_at": 2.0}, "used"),
        ({"revoked_at": 2.0, "used_at": 2.0}, "revoked"),
    ],
)
def test_list_shows_the_state_of_tokens(genie, controller, fields, state) -> None:
    controller.replies[ListTokens] = TokensReply(tokens=(make_token_record(**fields),))
    ran = genie("token", "list")
    assert state in ran.out.splitlines()[1]
    assert TOKEN_HASH not in ran.out


def test_list_prints_json_without_hashes(genie, controller) -> None:
    controller.replies[ListTokens] = TokensReply(tokens=(make_token_record(name="alice"),))
    ran = genie("token", "list", "--json")
    assert json.loads(ran.out)["tokens"][0]["name"] == "alice"
    assert TOKEN_HASH not in ran.out


def test_revoke_continues_after_a_failure(genie, controller) -> None:
    def revoke(request) -> Done:
        if request.token_id == "nope":
            raise TokenRefusedError("there is no token nope")
        return Done()

    controller.replies[RevokeToken] = revoke
    ran = genie("token", "revoke", "nope", "tok1")
    assert (ran.code, ran.out) == (1, "tok1: revoked\n")
    assert "no token nope" in ran.err


def test_setting_whose_name_ends_like_an_option_keeps_its_name(genie, monkeypatch) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_LEADER_TTL_S", "nan")
    assert "controller.leader_ttl_s = 'nan'" in genie("token", "list").err
