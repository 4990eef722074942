"""The messages that begin a connection, let a machine join, and issue certificates."""

from __future__ import annotations

import msgspec

from genie.model.messages.base import Done, Message, Report, Request
from genie.model.messages.numbers import Counter
from genie.model.tenant import TokenKind


class Welcome(Message, frozen=True, kw_only=True):
    cluster_id: str
    version: str
    tenant: str
    kind: TokenKind
    leading: bool
    controllers: tuple[str, ...] = ()
    """host:port of all known controllers, this one included."""
    generation: int | None = None
    """Of the cluster in the store of this controller; None if it has not read it yet."""


class Hello(Report[Welcome], frozen=True, kw_only=True):
    """First request of a connection. The token authenticates; `version` decides whether the releases work
    together, `program` is for logs."""

    token: str
    version: str
    program: str = ""


class ServerHello(Report[Done], frozen=True, kw_only=True):
    """First request of a connection from another controller. Its certificate authenticates; `version` decides
    whether the releases work together."""

    name: str
    version: str


class TrustAnchor(Message, frozen=True, kw_only=True):
    """The CA of the cluster. The client compares its fingerprint with the pin of its token."""

    ca_pem: str


class FetchTrust(Request[TrustAnchor], frozen=True, kw_only=True):
    """Allowed before Hello."""


class Joined(Message, frozen=True, kw_only=True):
    """The identity of a node, set by the server. `certificate_pem` is empty without TLS."""

    node_id: str
    token: str
    certificate_pem: str
    ca_pem: str


class Join(Request[Joined], frozen=True, kw_only=True):
    """Allowed before Hello: it has a single-use token."""

    token: str
    requested_node_id: str = msgspec.field(name="node_id_wish")
    csr_pem: str
    must_get_requested_id: bool = msgspec.field(default=False, name="exact")
    """Fail if the ID is in use, instead of choosing a similar one."""


class ServerJoined(Message, frozen=True, kw_only=True):
    """The CA of the cluster, encrypted for the key of the request. Binary values in base64url."""

    public_key: str
    sealed: str


class JoinServer(Request[ServerJoined], frozen=True, kw_only=True):
    """Allowed before Hello: it is signed with a single-use server token, whose secret is not sent."""

    token_id: str
    public_key: str
    """Ephemeral key of the new server."""
    signature: str


class Certificate(Message, frozen=True, kw_only=True):
    certificate_pem: str


class RenewCertificate(Request[Certificate], frozen=True, kw_only=True):
    csr_pem: str


class RecoverCertificate(Request[Certificate], frozen=True, kw_only=True):
    """Allowed before Hello: a node whose certificate has expired requests a new one.

    `csr_pem` is signed with the key of `certificate_pem`, which proves that the node still has the key.
    """

    token: str
    certificate_pem: str
    csr_pem: str


class SignExecutor(Request[Certificate], frozen=True, kw_only=True):
    """An agent requests the certificate of an executor before it starts it."""

    job_id: str
    epoch: Counter
    csr_pem: str
