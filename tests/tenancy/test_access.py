"""Tokens: text form, verification and permissions."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.errors import PermissionError_, TokenRefusedError
from genie.model.messages import (
    CONTROLLER_REQUESTS,
    NODE_REQUESTS,
    OWNER_REQUESTS,
    SERVER_REQUESTS,
    UNAUTHENTICATED_REQUESTS,
    USER_REQUESTS,
    DrainNode,
    Heartbeat,
    Leave,
    ListJobs,
    ListTokens,
)
from genie.model.tenant import Identity, TokenKind
from genie.tenancy.access import (
    NO_PIN,
    check_request_allowed,
    check_unused,
    mark_revoked,
    mark_used,
    new_token,
    new_token_record,
    parse_token,
    verify_token,
)

TOKEN = new_token(TokenKind.USER, token_id="abcd1234", secret=bytes(range(32)), pin=NO_PIN)


@given(
    kind=st.sampled_from([kind for kind in TokenKind if kind is not TokenKind.SERVER]),
    token_id=st.from_regex(r"[a-z0-9]{4,32}", fullmatch=True),
    secret=st.binary(min_size=32, max_size=32),
)
def test_token_text_round_trips(kind: TokenKind, token_id: str, secret: bytes) -> None:
    token = new_token(kind, token_id=token_id, secret=secret, pin=NO_PIN)
    assert parse_token(f" {token}\n") == token


@given(text=st.text(max_size=200))
def test_invalid_token_is_rejected_and_not_repeated(text: str) -> None:
    with pytest.raises(TokenRefusedError) as caught:
        parse_token("genie.user.x." + text)
    assert text not in str(caught.value) or len(text) < 40


def test_secret_is_neither_in_the_repr_nor_in_the_record() -> None:
    record = new_token_record(TOKEN, now=0.0, tenant="t")
    assert TOKEN.secret not in repr(TOKEN)
    assert TOKEN.secret not in msgspec.json.encode(record).decode()


def test_valid_token_has_the_recorded_identity() -> None:
    record = new_token_record(TOKEN, now=0.0, tenant="blue", name="ann")
    assert verify_token(TOKEN, record, now=1.0) == Identity(
        token_id="abcd1234", kind=TokenKind.USER, tenant="blue", name="ann"
    )


def test_invalid_tokens_are_rejected() -> None:
    record = new_token_record(TOKEN, now=0.0, tenant="t", ttl_s=10.0)
    other = new_token(TokenKind.USER, token_id="abcd1234", secret=bytes(32), pin=NO_PIN)
    promoted = replace(TOKEN, kind=TokenKind.OWNER)
    for token, kept, now, words in [
        (TOKEN, None, 1.0, "unknown here"),
        (other, record, 1.0, "unknown here or its secret is wrong"),
        (promoted, record, 1.0, "unknown here"),
        (TOKEN, record, 10.0, "has expired"),
        (TOKEN, mark_revoked(record, now=1.0), 2.0, "was revoked"),
        (TOKEN, mark_used(record, now=1.0), 2.0, "was used already"),
    ]:
        with pytest.raises(TokenRefusedError, match=words):
            verify_token(token, kept, now=now)


def test_record_of_another_kind_is_refused() -> None:
    record = new_token_record(TOKEN, now=0.0, tenant="t")
    assert check_unused(TOKEN.token_id, record, TokenKind.USER, now=1.0) == record
    with pytest.raises(TokenRefusedError, match="unknown here"):
        check_unused(TOKEN.token_id, record, TokenKind.SERVER_JOIN, now=1.0)


def test_each_token_kind_may_send_only_its_requests() -> None:
    def allowed(kind: TokenKind) -> set[type]:
        identity = Identity(token_id="x", kind=kind, tenant="t")
        found = set()
        for request in CONTROLLER_REQUESTS:
            try:
                # Only the type counts, so no fields are needed.
                check_request_allowed(identity, Mock(spec=request))
            except PermissionError_:
                continue
            found.add(request)
        return found

    assert allowed(TokenKind.OWNER) == {*USER_REQUESTS, *OWNER_REQUESTS}
    assert allowed(TokenKind.USER) == set(USER_REQUESTS)
    assert allowed(TokenKind.NODE) == set(NODE_REQUESTS)
    assert allowed(TokenKind.JOIN) == set()
    assert allowed(TokenKind.SERVER) == set(SERVER_REQUESTS)
    assert not {Heartbeat, ListTokens} & allowed(TokenKind.USER)
    assert ListJobs in allowed(TokenKind.USER)


def test_permission_error_describes_the_request() -> None:
    user = Identity(token_id="x", kind=TokenKind.USER, tenant="t")
    for request, action in (
        (DrainNode(node_id="n"), "drain nodes"),
        (ListTokens(), "list tokens"),
        (Leave(node_id="n", incarnation=1), "remove nodes"),
    ):
        with pytest.raises(PermissionError_, match=f"permission denied: user tokens cannot {action}"):
            check_request_allowed(user, request)


def test_every_request_is_allowed_for_exactly_one_kind_of_token() -> None:
    lists = (UNAUTHENTICATED_REQUESTS, SERVER_REQUESTS, NODE_REQUESTS, USER_REQUESTS, OWNER_REQUESTS)
    assert sum(len(group) for group in lists) == len(set(CONTROLLER_REQUESTS)) == len(CONTROLLER_REQUESTS)
