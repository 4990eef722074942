"""Admission of nodes, and the certificates of nodes, executors and the controller.

A joining node requests a node ID; the controller assigns it. User tokens are in tokens.py.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from genie.config import ControllerConfig
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.jobs.outcomes import is_current_placement
from genie.controller.ledger import Ledger, Transaction, request_gossip_key_change
from genie.controller.tokens import TokenRegistry
from genie.errors import (
    CertificateExpiredError,
    ConfigError,
    FencedError,
    NodeError,
    NodeNotFoundError,
    PermissionError_,
    TlsError,
    TokenRefusedError,
    UsageError,
)
from genie.model import failover
from genie.model.job import JobKind
from genie.model.limits import NAME_CHARS_MAX
from genie.model.messages.handshake import Certificate, Join, Joined, RecoverCertificate, SignExecutor
from genie.model.names import is_loopback, validate_node_id
from genie.model.tenant import TokenKind
from genie.processes import files
from genie.processes.clock import Clock
from genie.runtime import tls
from genie.runtime.credentials import is_wildcard
from genie.runtime.network import ClientTls
from genie.tenancy.access import NO_PIN, mark_revoked, mark_used, parse_token, verify_token

_log = logging.getLogger(__name__)
_RENEWAL_CHECK_INTERVAL_S = 60.0
"""A sleep of days would not follow the wall clock: it may be set, and the machine may be suspended."""


class Certificates:
    """The certificate authority of the cluster; issues nothing when TLS is off."""

    def __init__(
        self,
        authority: tls.CertificateAuthority | None,
        *,
        validity_days: float,
        grace_days: float,
        clock: Clock,
    ) -> None:
        self._authority = authority
        self._validity_days = validity_days
        self._grace_days = grace_days
        self._clock = clock

    @classmethod
    def open(cls, directory: Path, config: ControllerConfig, *, clock: Clock) -> Certificates:
        check_bind_address(config)
        authority = None
        if config.tls == "on":
            authority = tls.CertificateAuthority.load_or_create(directory, now=clock.wall_s())
        return cls(
            authority, validity_days=config.certificate_days, grace_days=config.node_grace_days, clock=clock
        )

    @property
    def pin(self) -> str:
        return NO_PIN if self._authority is None else self._authority.fingerprint

    @property
    def ca_pem(self) -> str:
        return "" if self._authority is None else self._authority.ca_pem

    @property
    def are_enabled(self) -> bool:
        return self._authority is not None

    def sign_request(self, csr_pem: str, *, name: str) -> str:
        """Sign a certificate request; empty when TLS is off."""
        if self._authority is None:
            return ""
        return self._authority.issue(csr_pem, name=name, days=self._validity_days, now=self._clock.wall_s())

    def write_etcd_certificate(self, certificate: Path, key: Path, *, addresses: Sequence[str]) -> None:
        """Write a certificate of the role `etcd` for this machine's IP addresses. An existing key is kept, so
        that certificate and key always match."""
        if self._authority is None:
            raise ConfigError("store 'etcd' requires TLS", hint="leave controller.tls on (the default)")
        try:
            csr_pem = tls.new_csr(key.read_bytes())
        except FileNotFoundError:
            key_pem, csr_pem = tls.new_key_and_csr()
            files.write_private(key, key_pem)
        certificate_pem = self._authority.issue(
            csr_pem,
            name=tls.ETCD_NAME,
            days=self._validity_days,
            now=self._clock.wall_s(),
            addresses=addresses,
        )
        files.write_private(certificate, certificate_pem.encode())

    def try_derive_secret(self, purpose: str) -> bytes | None:
        """A secret that every server of the cluster can compute, and no other machine; None without TLS."""
        return None if self._authority is None else self._authority.derive_secret(purpose)

    def export_authority(self) -> tuple[str, str]:
        """Return certificate and private key of the CA, for a new server only."""
        if self._authority is None:
            raise TlsError("this cluster does not use TLS; it has no CA")
        return self._authority.ca_pem, self._authority.private_key_pem()

    def check_recoverable(self, certificate_pem: str, *, node_id: str, csr_pem: str) -> None:
        """Raise CertificateExpiredError if this certificate of a node expired too long ago, TlsError if it
        does not belong to that node and to the key of the request."""
        if self._authority is None:
            raise TlsError("this cluster does not use TLS; its nodes have no certificates")
        self._authority.check_issued_by_this_ca(
            certificate_pem, name=tls.node_certificate_name(node_id), csr_pem=csr_pem
        )
        expired_days = (self._clock.wall_s() - tls.validity_period(certificate_pem)[1]) / 86400
        if expired_days > self._grace_days:
            raise CertificateExpiredError(
                f"the certificate of node {node_id} expired {expired_days:.0f} days ago; "
                f"the grace period is {self._grace_days:g} days",
                hint=f"run 'genie forget {node_id}' and 'genie token create --join' as the owner, "
                "then 'genie join' on the node with that token",
            )

    def server_context(self, directory: Path) -> ssl.SSLContext | None:
        """Return a TLS context with a certificate of the controller; None when TLS is off."""
        if self._authority is None:
            return None
        if not self._has_usable_certificate(directory):
            self._write_controller_certificate(directory)
        return tls.server_context(*_certificate_paths(directory), ca_pem=self.ca_pem)

    def client_tls(self, directory: Path) -> ClientTls:
        """TLS for a connection to another controller, with the certificate of this one. Call it after
        server_context(), and only when TLS is on."""
        certificate, key = _certificate_paths(directory)
        context = tls.client_context(self.ca_pem, certificate=certificate, key=key)
        return ClientTls(context, tls.CONTROLLER_NAME)

    async def renew_forever(self, context: ssl.SSLContext, directory: Path) -> None:
        """Renew the controller's certificate at half of its lifetime, until cancelled."""
        certificate, key = _certificate_paths(directory)
        while True:
            certificate_pem = certificate.read_text("utf-8")
            left_s = tls.renewal_due_in_s(certificate_pem, now=self._clock.wall_s())
            if left_s > 0:
                await self._clock.sleep(min(left_s, _RENEWAL_CHECK_INTERVAL_S))
                continue
            try:
                self._write_controller_certificate(directory)
                # New connections use it; open connections keep the old one.
                context.load_cert_chain(certificate, key)
                _log.info("renewed the controller's certificate")
            except Exception:  # a task boundary: the old certificate is still valid
                _log.exception("could not renew the controller's certificate")
                await self._clock.sleep(min(_RENEWAL_CHECK_INTERVAL_S, self._validity_days * 86400 / 10))

    def _has_usable_certificate(self, directory: Path) -> bool:
        """Whether the certificate of an earlier start can be used: a new one could not be written to a full
        disk."""
        if self._authority is None:
            return False
        certificate, key = _certificate_paths(directory)
        try:
            certificate_pem, csr_pem = certificate.read_text("utf-8"), tls.new_csr(key.read_bytes())
            self._authority.check_issued_by_this_ca(
                certificate_pem, name=tls.CONTROLLER_NAME, csr_pem=csr_pem
            )
        except (OSError, UnicodeDecodeError, TlsError):
            return False
        return tls.renewal_due_in_s(certificate_pem, now=self._clock.wall_s()) > 0

    def _write_controller_certificate(self, directory: Path) -> None:
        certificate, key = _certificate_paths(directory)
        key_pem, csr_pem = tls.new_key_and_csr()
        files.write_private(key, key_pem)
        files.write_private(certificate, self.sign_request(csr_pem, name=tls.CONTROLLER_NAME).encode())


def check_bind_address(config: ControllerConfig) -> None:
    """Raise ConfigError if TLS is off and the address is not loopback."""
    if config.tls == "off" and not is_loopback(config.bind):
        raise ConfigError(
            f"controller.bind = {config.bind!r} is reachable from other machines, but controller.tls is off",
            hint="leave TLS on (the default), or bind 127.0.0.1",
        )


def advertised_host(config: ControllerConfig) -> str:
    """Host name under which other machines reach this controller."""
    if config.advertise:
        return config.advertise
    return socket.gethostname() if is_wildcard(config.bind) else config.bind


def local_host(config: ControllerConfig) -> str:
    """Host name under which this machine reaches this controller."""
    if not is_wildcard(config.bind):
        return config.bind
    return "::1" if ":" in config.bind else "127.0.0.1"


def check_failure_timeouts(config: ControllerConfig) -> None:
    """Raise ConfigError for timeouts of the failure detector that contradict each other."""
    if config.node_suspect_s >= config.node_ttl_s:
        raise ConfigError(
            f"controller.node_suspect_s = {config.node_suspect_s:g} is not below "
            f"controller.node_ttl_s = {config.node_ttl_s:g}",
            hint="a node must become suspect before it is disconnected",
        )
    if config.store.startswith("etcd"):
        _check_deadman_covers_failover(config)


def _check_deadman_covers_failover(config: ControllerConfig) -> None:
    """Raise ConfigError if agents could end their jobs before they find the next leader."""
    bounds = failover.etcd_failover_bounds(
        node_ttl_s=config.node_ttl_s,
        leader_ttl_s=config.leader_ttl_s,
        etcd_election_timeout_s=config.etcd_election_timeout_s,
    )
    deadman_s = failover.deadman_s(config.node_ttl_s)
    if deadman_s >= bounds.total_s:
        return
    smallest_s = failover.smallest_node_ttl_s(
        leader_ttl_s=config.leader_ttl_s, etcd_election_timeout_s=config.etcd_election_timeout_s
    )
    raise ConfigError(
        f"controller.node_ttl_s = {config.node_ttl_s:g} is too low: jobs would end {deadman_s:g} s after the "
        f"last contact to a controller, but a failover takes up to {bounds.total_s:g} s: "
        f"{bounds.describe()}",
        hint=f"set controller.node_ttl_s to {smallest_s:g} or more, or lower controller.leader_ttl_s "
        f"({config.leader_ttl_s:g}) or controller.etcd_election_timeout_s "
        f"({config.etcd_election_timeout_s:g}, as --election-timeout of etcd)",
    )


class Admission:
    """Admits and removes nodes, and signs certificates for them. `disconnect` closes the connections of a
    token."""

    def __init__(
        self,
        ledger: Ledger,
        tokens: TokenRegistry,
        certificates: Certificates,
        jobs: JobCatalog,
        *,
        clock: Clock,
        disconnect: Callable[[str], None],
    ) -> None:
        self._ledger = ledger
        self._tokens = tokens
        self._certificates = certificates
        self._jobs = jobs
        self._clock = clock
        self._disconnect = disconnect

    async def admit_node(self, request: Join) -> Joined:
        """Exchange a join token for the identity of a new node. The token can be used once."""
        requested_id = validate_node_id(request.requested_node_id)
        token = parse_token(request.token)
        if token.kind is not TokenKind.JOIN:
            raise TokenRefusedError(
                f"{token.kind.with_article} token does not admit a node",
                hint="create one with 'genie token create --join'",
            )

        def build(txn: Transaction) -> Joined:
            now = self._clock.wall_s()
            record = self._ledger.tokens.get(token.token_id)
            verify_token(token, record, now=now)
            assert record is not None
            node_id = self._unused_node_id(requested_id)
            if request.must_get_requested_id and node_id != requested_id:
                raise UsageError(
                    f"node ID {requested_id!r} is already in use",
                    hint=f"choose another, such as {node_id!r}; or, if it is the same machine, 'genie forget "
                    f"{requested_id}' first",
                )
            # Sign before staging: an invalid request must not consume the token.
            certificate = self._certificates.sign_request(
                request.csr_pem, name=tls.node_certificate_name(node_id)
            )
            txn.put(self._ledger.tokens, record.token_id, mark_used(record, now=now))
            node_token, _ = self._tokens.create_token_in_transaction(txn, TokenKind.NODE, name=node_id)
            return Joined(
                node_id=node_id,
                token=str(node_token),
                certificate_pem=certificate,
                ca_pem=self._certificates.ca_pem,
            )

        joined = await self._ledger.write(build)
        _log.info("node %s joined", joined.node_id)
        return joined

    async def check_rows_of_node_writable(self, node_id: str) -> None:
        """Raise ReleaseSkewError if a newer release wrote the record, the allocations or a token of a
        node."""
        self._ledger.nodes.check_writable(node_id)
        self._ledger.holds.check_writable(node_id)
        await self._tokens.check_tokens_of_node_writable(node_id)

    async def forget_node(self, node_id: str) -> None:
        """Delete a node that holds nothing and revoke its tokens."""

        def build(txn: Transaction) -> list[str]:
            tokens = self._tokens.unrevoked_tokens_of_node(node_id)
            held = self._ledger.holds.get(node_id)
            if node_id not in self._ledger.nodes and not tokens:
                raise NodeNotFoundError(f"there is no node {node_id[:80]!r}", hint="'genie nodes' lists them")
            if held is not None and held.holds:
                raise NodeError(
                    f"cannot remove node {node_id}: it still has {len(held.holds)} workers of jobs",
                    hint="try again",
                )
            txn.delete(self._ledger.nodes, node_id)
            txn.delete(self._ledger.holds, node_id)
            for row in tokens:
                txn.put(self._ledger.tokens, row.token_id, mark_revoked(row, now=self._clock.wall_s()))
            # Also without a token to revoke: it may have been revoked before, and the node has the key.
            request_gossip_key_change(txn, self._ledger.cluster)
            return [row.token_id for row in tokens]

        for token_id in await self._ledger.write(build):
            self._disconnect(token_id)
        _log.info("node %s was removed", node_id)

    def check_node_certificate(self, node_id: str, certificate_name: str) -> None:
        """With TLS, raise TlsError unless the connection uses the certificate of this node."""
        if self._certificates.are_enabled and certificate_name != tls.node_certificate_name(node_id):
            raise TlsError(
                f"the token belongs to node {node_id}, but the connection does not use its certificate",
                hint="connect with node.pem of that node, or join again",
            )

    def check_server_certificate(self, certificate_name: str) -> None:
        """Raise TlsError unless the connection uses the certificate of a controller of this cluster."""
        if not self._certificates.are_enabled or certificate_name != tls.CONTROLLER_NAME:
            raise TlsError("the connection does not use the certificate of a controller of this cluster")

    def renew_certificate(self, node_id: str, csr_pem: str) -> Certificate:
        return Certificate(
            certificate_pem=self._certificates.sign_request(csr_pem, name=tls.node_certificate_name(node_id))
        )

    async def recover_certificate(self, request: RecoverCertificate) -> Certificate:
        """Issue a new certificate for a node whose certificate has expired, if it still has its token and
        its key."""
        identity = await self._tokens.authenticate_token(request.token)
        if identity.kind is not TokenKind.NODE:
            raise TokenRefusedError(f"{identity.kind.with_article} token has no certificate")
        node_id = identity.name
        self._certificates.check_recoverable(
            request.certificate_pem, node_id=node_id, csr_pem=request.csr_pem
        )
        _log.info("node %s renewed its expired certificate", node_id)
        return self.renew_certificate(node_id, request.csr_pem)

    def sign_executor(self, node_id: str, request: SignExecutor) -> Certificate:
        """Sign a certificate for an executor; only for a session that is placed on that node with that
        epoch."""
        job = self._jobs.get(request.job_id)
        if job is None or not is_current_placement(job, 0, node_id, request.epoch):
            raise FencedError(f"launch {request.epoch} of job {request.job_id[:80]} is not on node {node_id}")
        if job.spec.kind is not JobKind.SESSION:
            raise PermissionError_(f"job {request.job_id} is not a session and has no executor")
        name = tls.executor_certificate_name(job.job_id)
        return Certificate(certificate_pem=self._certificates.sign_request(request.csr_pem, name=name))

    def _unused_node_id(self, requested_id: str) -> str:
        candidate, number = requested_id, 1
        # Revoked tokens do not count: a machine that was removed may join again with its old ID.
        while candidate in self._ledger.nodes or self._tokens.has_node_token(candidate):
            number += 1
            suffix = f"-{number}"
            candidate = requested_id[: NAME_CHARS_MAX - len(suffix)].rstrip("-") + suffix
        return candidate


def _certificate_paths(directory: Path) -> tuple[Path, Path]:
    return directory / "controller.pem", directory / "controller.key"
