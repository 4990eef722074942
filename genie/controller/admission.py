"""Who belongs to the cluster: nodes that join, and the certificates of nodes, executors and the controller.

An identity is what this file says it is; what a node calls itself is a wish. Not for: tokens of
people (tokens.py).
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from genie.config import ControllerConfig
from genie.controller.jobs import Jobs, is_at
from genie.controller.ledger import Ledger, Transaction
from genie.controller.tokens import Tokens
from genie.errors import (
    ConfigError,
    FencedError,
    NodeError,
    NodeNotFoundError,
    PermissionError_,
    TlsError,
    TokenRefusedError,
    UsageError,
)
from genie.model.job import JobKind
from genie.model.messages import Certificate, Join, Joined, SignExecutor
from genie.model.names import checked_node_id
from genie.model.tenant import TokenKind
from genie.runtime import files, tls
from genie.runtime.clock import Clock
from genie.runtime.credentials import is_loopback
from genie.tenancy.access import NO_PIN, parse_token, revoked, used, verify

_log = logging.getLogger(__name__)
_RETRY_S = 60.0


class Certificates:
    """The CA and what it signs; without TLS, one that signs nothing."""

    def __init__(self, authority: tls.CertificateAuthority | None, *, days: float, clock: Clock) -> None:
        self._authority = authority
        self._days = days
        self._clock = clock

    @classmethod
    def open(cls, directory: Path, config: ControllerConfig, *, clock: Clock) -> Certificates:
        check_bind(config)
        authority = None
        if config.tls == "on":
            authority = tls.CertificateAuthority.load_or_create(directory, now=clock.wall_s())
        return cls(authority, days=config.certificate_days, clock=clock)

    @property
    def pin(self) -> str:
        return NO_PIN if self._authority is None else self._authority.fingerprint

    @property
    def ca_pem(self) -> str:
        return "" if self._authority is None else self._authority.ca_pem

    @property
    def are_on(self) -> bool:
        return self._authority is not None

    def issue(self, csr_pem: str, *, name: str) -> str:
        """Empty where TLS is off."""
        if self._authority is None:
            return ""
        return self._authority.issue(csr_pem, name=name, days=self._days, now=self._clock.wall_s())

    def server_context(self, directory: Path) -> ssl.SSLContext | None:
        """With a fresh certificate of the controller's own; None where TLS is off."""
        if self._authority is None:
            return None
        self._write_own(directory)
        return tls.server_context(*_own_paths(directory), ca_pem=self.ca_pem)

    async def keep_fresh(self, context: ssl.SSLContext, directory: Path) -> None:
        """Replaces the controller's certificate at half of its life, for ever."""
        while True:
            certificate, key = _own_paths(directory)
            due_at = tls.renew_at(certificate.read_text("utf-8"))
            if (left_s := due_at - self._clock.wall_s()) > 0:
                await self._clock.sleep(left_s)
            try:
                self._write_own(directory)
                # New connections use it from now on; those that are open go on as they are.
                context.load_cert_chain(certificate, key)
                _log.info("the controller's certificate was renewed")
            except Exception:  # a task boundary: the old one is good for as long again
                _log.exception("the controller's certificate could not be renewed")
                await self._clock.sleep(min(_RETRY_S, self._days * 86400 / 10))

    def _write_own(self, directory: Path) -> None:
        certificate, key = _own_paths(directory)
        key_pem, csr_pem = tls.new_key_and_csr()
        files.write_private(key, key_pem)
        files.write_private(certificate, self.issue(csr_pem, name=tls.CONTROLLER_NAME).encode())


def check_bind(config: ControllerConfig) -> None:
    """TlsError for an address that others can reach when TLS is off."""
    if config.tls == "off" and not is_loopback(config.bind):
        raise TlsError(
            f"controller.bind = {config.bind!r} is open to other machines, and controller.tls is off",
            hint="leave TLS on (the default), or bind 127.0.0.1",
        )


def check_times(config: ControllerConfig) -> None:
    """ConfigError for a failure detector that could not work."""
    if config.node_suspect_s >= config.node_ttl_s:
        raise ConfigError(
            f"controller.node_suspect_s = {config.node_suspect_s:g} is not below "
            f"controller.node_ttl_s = {config.node_ttl_s:g}",
            hint="a node is suspect before it is down",
        )


class Admission:
    """Lets nodes in and signs for those that are."""

    def __init__(
        self,
        ledger: Ledger,
        tokens: Tokens,
        certificates: Certificates,
        jobs: Jobs,
        *,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._tokens = tokens
        self._certificates = certificates
        self._jobs = jobs
        self._clock = clock
        self.on_revoked: Callable[[str], None] = _nobody

    async def join(self, request: Join) -> Joined:
        """A node's identity for a join token, which is used up by it."""
        wish = checked_node_id(request.node_id_wish)
        token = parse_token(request.token)
        if token.kind is not TokenKind.JOIN:
            raise TokenRefusedError(
                f"a {token.kind} token does not admit a node", hint="make one: 'genie token create --join'"
            )

        def build(txn: Transaction) -> Joined:
            now = self._clock.wall_s()
            record = self._ledger.tokens.get(token.token_id)
            verify(token, record, now=now)
            assert record is not None
            node_id = self._free_id(wish)
            if request.exact and node_id != wish:
                raise UsageError(f"node id {wish!r} is taken", hint=f"choose another, such as {node_id!r}")
            # Signed before anything is staged: a bad request must not use the token up.
            certificate = self._certificates.issue(request.csr_pem, name=tls.node_name(node_id))
            txn.put(self._ledger.tokens, record.token_id, used(record, now=now))
            node_token, _ = self._tokens.stage(txn, TokenKind.NODE, name=node_id)
            return Joined(
                node_id=node_id,
                token=str(node_token),
                certificate_pem=certificate,
                ca_pem=self._certificates.ca_pem,
            )

        joined = await self._ledger.write(build)
        _log.info("node %s joined", joined.node_id)
        return joined

    async def forget(self, node_id: str) -> None:
        """Takes a node that holds nothing out of the books and revokes its tokens."""

        def build(txn: Transaction) -> list[str]:
            rows = self._ledger.tokens.values()
            tokens = [row for row in rows if row.kind is TokenKind.NODE and row.name == node_id]
            held = self._ledger.holds.get(node_id)
            if node_id not in self._ledger.nodes and not any(row.revoked_at is None for row in tokens):
                raise NodeNotFoundError(f"there is no node {node_id[:80]!r}", hint="see 'genie nodes'")
            if held is not None and held.holds:
                raise NodeError(f"node {node_id} still holds {len(held.holds)} jobs", hint="try again")
            txn.delete(self._ledger.nodes, node_id)
            txn.delete(self._ledger.holds, node_id)
            for row in tokens:
                txn.put(self._ledger.tokens, row.token_id, revoked(row, now=self._clock.wall_s()))
            return [row.token_id for row in tokens]

        for token_id in await self._ledger.write(build):
            self.on_revoked(token_id)
        _log.info("node %s was removed", node_id)

    def check_certificate(self, node_id: str, shown_name: str) -> None:
        """With TLS, a node's token counts only together with that node's certificate."""
        if self._certificates.are_on and shown_name != tls.node_name(node_id):
            raise TlsError(
                f"the token is of node {node_id}, but the connection does not show its certificate",
                hint="connect with node.pem of that node, or join again",
            )

    def renew(self, node_id: str, csr_pem: str) -> Certificate:
        return Certificate(certificate_pem=self._certificates.issue(csr_pem, name=tls.node_name(node_id)))

    def sign_executor(self, node_id: str, request: SignExecutor) -> Certificate:
        """Only for a session that the ledger has on that node with that epoch."""
        job = self._jobs.get(request.job_id)
        if job is None or not is_at(job, 0, node_id, request.epoch):
            raise FencedError(f"launch {request.epoch} of job {request.job_id[:80]} is not on node {node_id}")
        if job.spec.kind is not JobKind.SESSION:
            raise PermissionError_(f"job {request.job_id} is not a session and has no executor")
        name = tls.executor_name(job.job_id)
        return Certificate(certificate_pem=self._certificates.issue(request.csr_pem, name=name))

    def _free_id(self, wish: str) -> str:
        rows = self._ledger.tokens.values()
        # A revoked token is nobody's: a machine that was forgotten comes back under its name.
        taken = {row.name for row in rows if row.kind is TokenKind.NODE and row.revoked_at is None}
        taken |= set(self._ledger.nodes)
        candidate, number = wish, 1
        while candidate in taken:
            number += 1
            suffix = f"-{number}"
            candidate = wish[: 63 - len(suffix)].rstrip("-") + suffix
        return candidate


def _nobody(token_id: str) -> None:
    """Until someone has connections to close."""


def _own_paths(directory: Path) -> tuple[Path, Path]:
    return directory / "controller.pem", directory / "controller.key"
