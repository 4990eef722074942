"""The handover of the CA to a new server: only the holder of the token can read it."""

from __future__ import annotations

import os

import msgspec
import pytest

from genie.controller.server_credentials_handover import (
    ServerCredentials,
    ServerJoinAttempt,
    encrypt_credentials,
    public_key_of_server_token,
    verify_join_request_signature,
)
from genie.errors import ProtocolError, TokenRefusedError
from genie.model.messages.handshake import JoinServer, ServerJoined
from genie.model.tenant import TokenKind
from genie.runtime.tls import CertificateAuthority
from genie.tenancy.access import Token, decode_base64url, encode_base64url, new_token

AUTHORITY = CertificateAuthority.create(now=1_800_000_000.0)
CREDENTIALS = ServerCredentials(
    ca_pem=AUTHORITY.ca_pem,
    ca_key_pem=AUTHORITY.private_key_pem(),
    owner_token="genie.owner.x",
    etcd_endpoints=("10.0.0.1:2379",),
)


def make_token(*, token_id: str = "abcd", pin: str = AUTHORITY.fingerprint) -> Token:
    return new_token(TokenKind.SERVER_JOIN, token_id=token_id, secret=os.urandom(32), pin=pin)


def hand_over(
    token: Token, request: JoinServer, credentials: ServerCredentials = CREDENTIALS
) -> ServerJoined:
    verify_join_request_signature(
        request, token_public_key=public_key_of_server_token(token), pin=AUTHORITY.fingerprint
    )
    return encrypt_credentials(request, credentials, pin=AUTHORITY.fingerprint)


def flip_bit(text: str, at: int) -> str:
    raw = bytearray(decode_base64url(text))
    raw[at] ^= 1
    return encode_base64url(bytes(raw))


def test_holder_of_the_token_gets_the_ca() -> None:
    token = make_token()
    client = ServerJoinAttempt.create(token)
    assert client.decrypt_credentials(hand_over(token, client.request)) == CREDENTIALS


def test_request_contains_no_secret_and_reply_no_key() -> None:
    token = make_token()
    client = ServerJoinAttempt.create(token)
    sent = msgspec.json.encode(client.request) + msgspec.json.encode(hand_over(token, client.request))
    assert token.secret.encode() not in sent
    assert public_key_of_server_token(token).encode() not in sent
    key_line = CREDENTIALS.ca_key_pem.splitlines()[1]
    assert key_line.encode() not in sent


def test_request_with_another_secret_is_refused() -> None:
    request = ServerJoinAttempt.create(make_token()).request
    with pytest.raises(TokenRefusedError, match="secret is wrong"):
        hand_over(make_token(), request)


@pytest.mark.parametrize("field", ["token_id", "public_key", "signature"])
def test_changed_request_is_refused(field: str) -> None:
    token = make_token()
    request = ServerJoinAttempt.create(token).request
    text = getattr(request, field)
    changed = "abce" if field == "token_id" else flip_bit(text, 5)
    with pytest.raises(TokenRefusedError):
        hand_over(token, msgspec.structs.replace(request, **{field: changed}))


@pytest.mark.parametrize("text", ["", "AAAA", "not base64!", "\u0000", "A" * 5000])
def test_malformed_request_is_refused(text: str) -> None:
    token = make_token()
    request = ServerJoinAttempt.create(token).request
    for field in ("public_key", "signature"):
        with pytest.raises(TokenRefusedError):
            hand_over(token, msgspec.structs.replace(request, **{field: text}))


def test_request_for_another_cluster_is_refused() -> None:
    token = make_token(pin="x" * 43)
    with pytest.raises(TokenRefusedError):
        hand_over(token, ServerJoinAttempt.create(token).request)


def test_key_of_low_order_is_refused() -> None:
    """Its shared secret would be known to everyone."""
    request = msgspec.structs.replace(
        ServerJoinAttempt.create(make_token()).request, public_key=encode_base64url(bytes(32))
    )
    with pytest.raises(TokenRefusedError, match="invalid"):
        encrypt_credentials(request, CREDENTIALS, pin=AUTHORITY.fingerprint)


def test_every_changed_byte_of_the_reply_is_detected() -> None:
    token = make_token()
    client = ServerJoinAttempt.create(token)
    reply = hand_over(token, client.request)
    for at in range(len(decode_base64url(reply.sealed))):
        with pytest.raises(ProtocolError, match="cannot be decrypted"):
            client.decrypt_credentials(msgspec.structs.replace(reply, sealed=flip_bit(reply.sealed, at)))
    with pytest.raises(ProtocolError, match="cannot be decrypted"):
        client.decrypt_credentials(msgspec.structs.replace(reply, public_key=flip_bit(reply.public_key, 3)))
    for sealed in ("", "AAAA", "!"):
        with pytest.raises(ProtocolError, match="cannot be decrypted"):
            client.decrypt_credentials(msgspec.structs.replace(reply, sealed=sealed))


def test_reply_to_another_request_is_useless_even_with_the_token() -> None:
    token = make_token()
    reply = hand_over(token, ServerJoinAttempt.create(token).request)
    with pytest.raises(ProtocolError, match="cannot be decrypted"):
        ServerJoinAttempt.create(token).decrypt_credentials(reply)


def test_another_ca_than_the_pinned_one_is_refused() -> None:
    other = CertificateAuthority.create(now=1_800_000_000.0)
    token = make_token()
    client = ServerJoinAttempt.create(token)
    forged = [
        msgspec.structs.replace(CREDENTIALS, ca_pem=other.ca_pem, ca_key_pem=other.private_key_pem()),
        msgspec.structs.replace(CREDENTIALS, ca_key_pem=other.private_key_pem()),
        msgspec.structs.replace(CREDENTIALS, ca_key_pem="no key"),
        msgspec.structs.replace(CREDENTIALS, ca_pem="no certificate"),
    ]
    for credentials in forged:
        with pytest.raises(ProtocolError, match="another CA"):
            client.decrypt_credentials(hand_over(token, client.request, credentials))
