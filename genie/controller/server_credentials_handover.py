"""Handover of the cluster's CA to a new server: the cryptography of `JoinServer`.

The secret of a server token is never sent. It is the seed of a signing key, of which the controller stores
only the public part. The new server signs an ephemeral X25519 key; the controller encrypts certificate and
key of the CA to exactly that key. So neither a log, nor a reader of the store, nor a man in the middle inside
the TLS connection learns the key of the CA. The threat model is in docs/decisions/0027-servers-and-etcd.md.

Whether a token may be used is decided by the controller (controller/nodes/servers.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from genie.errors import ProtocolError, TlsError, TokenRefusedError
from genie.model.messages.handshake import JoinServer, ServerJoined
from genie.model.record import Record
from genie.runtime import tls
from genie.tenancy.access import Token, decode_base64url, encode_base64url

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

_DOMAIN_SEPARATOR = b"genie server join 1"
_KEY_BYTES = 32
_NONCE_BYTES = 12


class ServerCredentials(Record, frozen=True, kw_only=True):
    """What a server has and a node has not."""

    ca_pem: str
    ca_key_pem: str
    owner_token: str
    """An owner token of its own, for the commands on that machine."""
    etcd_endpoints: tuple[str, ...]
    """HOST:PORT of the members of the store, for clients."""


def public_key_of_server_token(token: Token) -> str:
    """The public part of the signing key of a server token, as the controller stores it."""
    return encode_base64url(_derive_signing_key(token).public_key().public_bytes_raw())


@dataclass(frozen=True, slots=True)
class ServerJoinAttempt:
    """One attempt to join as a server."""

    request: JoinServer
    _ephemeral_key: X25519PrivateKey
    _ca_pin: str

    @classmethod
    def create(cls, token: Token) -> ServerJoinAttempt:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        key = X25519PrivateKey.generate()
        public = key.public_key().public_bytes_raw()
        signature = _derive_signing_key(token).sign(
            _handshake_transcript(token.token_id, pin=token.pin, public=public)
        )
        request = JoinServer(
            token_id=token.token_id,
            public_key=encode_base64url(public),
            signature=encode_base64url(signature),
        )
        return cls(request, key, token.pin)

    def decrypt_credentials(self, reply: ServerJoined) -> ServerCredentials:
        """Raises ProtocolError if the reply was changed or is not for this request, or if the CA in it is not
        the one that the token pins."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        public = self._ephemeral_key.public_key().public_bytes_raw()
        transcript = _handshake_transcript(self.request.token_id, pin=self._ca_pin, public=public)
        try:
            theirs, sealed = decode_base64url(reply.public_key), decode_base64url(reply.sealed)
            shared = self._ephemeral_key.exchange(X25519PublicKey.from_public_bytes(theirs))
            nonce, ciphertext = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
            aad = transcript + theirs
            plain = ChaCha20Poly1305(_derive_key_hkdf(shared, info=aad)).decrypt(nonce, ciphertext, aad)
            found = msgspec.json.decode(plain, type=ServerCredentials)
        except (ValueError, InvalidTag, msgspec.MsgspecError) as error:
            raise ProtocolError(
                "the controller's reply to the server join cannot be decrypted: it was changed on the way "
                "or is for another request",
                hint="create another token with 'genie token create --server' and try again",
            ) from error
        try:
            is_pinned = tls.fingerprint(found.ca_pem) == self._ca_pin and tls.is_key_of_certificate(
                found.ca_key_pem, found.ca_pem
            )
        except TlsError:
            is_pinned = False
        if not is_pinned:
            raise ProtocolError("the controller sent another CA than the one that the token names")
        return found


def verify_join_request_signature(request: JoinServer, *, token_public_key: str, pin: str) -> None:
    """Raises TokenRefusedError unless the request was signed with the token."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = decode_base64url(request.public_key)
        key = Ed25519PublicKey.from_public_bytes(decode_base64url(token_public_key))
        if len(public) != _KEY_BYTES:
            raise ValueError("wrong length")
        key.verify(
            decode_base64url(request.signature),
            _handshake_transcript(request.token_id, pin=pin, public=public),
        )
    except (ValueError, InvalidSignature) as error:
        raise TokenRefusedError(
            f"token {request.token_id[:80]} is unknown here or its secret is wrong",
            hint="create one with 'genie token create --server'",
        ) from error


def encrypt_credentials(request: JoinServer, credentials: ServerCredentials, *, pin: str) -> ServerJoined:
    """Encrypts for the holder of the ephemeral key of a verified request. Raises TokenRefusedError for an
    invalid key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    public = decode_base64url(request.public_key)
    ours = X25519PrivateKey.generate()
    own_public = ours.public_key().public_bytes_raw()
    try:
        shared = ours.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # a point of low order
        raise TokenRefusedError(f"the key of the server join is invalid: {error}") from error
    aad = _handshake_transcript(request.token_id, pin=pin, public=public) + own_public
    nonce = os.urandom(_NONCE_BYTES)
    ciphertext = ChaCha20Poly1305(_derive_key_hkdf(shared, info=aad)).encrypt(
        nonce, msgspec.json.encode(credentials), aad
    )
    return ServerJoined(public_key=encode_base64url(own_public), sealed=encode_base64url(nonce + ciphertext))


def _derive_signing_key(token: Token) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    seed = _derive_key_hkdf(decode_base64url(token.secret), info=_DOMAIN_SEPARATOR + b" signing key")
    return Ed25519PrivateKey.from_private_bytes(seed)


def _handshake_transcript(token_id: str, *, pin: str, public: bytes) -> bytes:
    """Neither ID nor pin can contain a zero byte."""
    return b"\0".join((_DOMAIN_SEPARATOR, token_id.encode(), pin.encode(), public))


def _derive_key_hkdf(secret: bytes, *, info: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=hashes.SHA256(), length=_KEY_BYTES, salt=None, info=info).derive(secret)
