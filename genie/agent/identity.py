"""The files that make a directory a node's: token, certificate, key, the cluster's CA, where controllers are.

Not for: asking to join (joining.py) and what the node does afterwards (journal.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from genie.agent.journal import FENCE_FILE
from genie.agent.link import Link
from genie.errors import ConfigError, TlsError, TokenMissingError, UsageError
from genie.model.messages import RenewCertificate
from genie.model.names import address_text, parse_endpoint
from genie.runtime import files, tls
from genie.runtime.credentials import Access, is_loopback, with_certificate
from genie.runtime.network import ClientTls
from genie.tenancy.access import NO_PIN, parse_token

_log = logging.getLogger(__name__)

AGENTS_DIR = "agents"
_TOKEN, _CERTIFICATE, _KEY, _NEXT_KEY, _CA = "node.token", "node.pem", "node.key", "node.key.next", "ca.pem"
_CONTROLLERS = "controllers.json"

Address = tuple[str, int]


def write_identity(
    node_dir: Path, *, token: str, certificate_pem: str, key_pem: bytes, ca_pem: str, controller: Address
) -> None:
    """A node that has just been admitted. The token comes last: without it the directory is not a node."""
    files.write_private(node_dir / _KEY, key_pem)
    files.write_private(node_dir / _CERTIFICATE, certificate_pem.encode())
    files.write_private(node_dir / _CA, ca_pem.encode())
    (node_dir / _NEXT_KEY).unlink(missing_ok=True)
    # Tokens of leaders count within one cluster, and this may be another than before.
    (node_dir / FENCE_FILE).unlink(missing_ok=True)
    keep_controllers(node_dir, (), now=controller)
    files.write_private(node_dir / _TOKEN, token.encode())


def ca_path(node_dir: Path) -> Path:
    """The certificate of the cluster's CA. Only where the cluster has TLS."""
    return node_dir / _CA


def read_identity(node_dir: Path, *, controller: Address | None = None) -> Access:
    """How this node reaches its cluster. `controller` overrides the address that was kept."""
    try:
        token = parse_token((node_dir / _TOKEN).read_text("utf-8"))
    except FileNotFoundError:
        raise TokenMissingError(
            f"{node_dir} has no node's token", hint="join a cluster first: 'genie join ADDR --token T'"
        ) from None
    except OSError as error:
        raise TokenMissingError(f"the node's token cannot be read: {error}") from error
    host, port = controller or read_controllers(node_dir)[0]
    if token.pin == NO_PIN:
        if not is_loopback(host):
            raise TlsError(
                f"this node is of a cluster without TLS, and {host} is not this machine",
                hint="start the cluster with TLS (the default) and join again",
            )
        return Access(host=host, port=port, token=token, tls=None)
    _finish_renewal(node_dir)
    ca_pem = _ca_pem(node_dir, pin=token.pin)
    plain = ClientTls(tls.client_context(ca_pem), tls.CONTROLLER_NAME)
    return _with_own_certificate(Access(host=host, port=port, token=token, tls=plain), node_dir, ca_pem)


def find_node_dir(state_dir: Path, node_id: str | None) -> Path:
    """The node of this machine: the one that is named, or the only one there is."""
    agents = state_dir / AGENTS_DIR
    if node_id is not None:
        return agents / node_id
    found = sorted(path.parent for path in agents.glob(f"*/{_TOKEN}"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise TokenMissingError(
            f"no node of a cluster lives in {agents}", hint="join one first: 'genie join ADDR --token T'"
        )
    raise UsageError(
        f"{agents} holds several nodes: {', '.join(path.name for path in found)}",
        hint="say which with --node-id",
    )


def keep_controllers(node_dir: Path, told: Sequence[str], *, now: Address) -> tuple[Address, ...]:
    """Remembers where controllers are; the one that answers now comes first."""
    known = dict.fromkeys([now, *(parse_endpoint(text) for text in told)])
    body = json.dumps([address_text(host, port) for host, port in known]).encode()
    path = node_dir / _CONTROLLERS
    if not path.exists() or path.read_bytes() != body:
        files.write_private(path, body)
    return tuple(known)


def read_controllers(node_dir: Path) -> tuple[Address, ...]:
    """Where controllers were when the node last heard; the one that answered then comes first."""
    path = node_dir / _CONTROLLERS
    try:
        return tuple(parse_endpoint(str(text)) for text in json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", hint="say where the controller is with --controller HOST:PORT"
        ) from error


async def renew_certificate(node_dir: Path, link: Link, *, now: float, timeout_s: float) -> float:
    """Asks for a new certificate past half of the present one's life; seconds until it should look again."""
    due = tls.renew_at((node_dir / _CERTIFICATE).read_text("utf-8"))
    if now < due:
        return due - now
    key_pem, csr_pem = tls.new_key_and_csr()
    signed = await link.call(RenewCertificate(csr_pem=csr_pem), timeout_s=timeout_s)
    # In this order a crash leaves either the old pair, or the new certificate with its key beside it.
    files.write_private(node_dir / _NEXT_KEY, key_pem)
    files.write_private(node_dir / _CERTIFICATE, signed.certificate_pem.encode())
    _finish_renewal(node_dir)
    link.access = _with_own_certificate(link.access, node_dir, _ca_pem(node_dir, pin=link.access.token.pin))
    _log.info("the node's certificate was renewed")
    return max(tls.renew_at(signed.certificate_pem) - now, 0.0)


def _finish_renewal(node_dir: Path) -> None:
    following = node_dir / _NEXT_KEY
    if not following.exists():
        return
    try:
        tls.server_context(node_dir / _CERTIFICATE, following)
    except TlsError:
        following.unlink()
    else:
        following.replace(node_dir / _KEY)
    files.sync_directory(node_dir)


def _with_own_certificate(access: Access, node_dir: Path, ca_pem: str) -> Access:
    return with_certificate(access, ca_pem=ca_pem, certificate=node_dir / _CERTIFICATE, key=node_dir / _KEY)


def _ca_pem(node_dir: Path, *, pin: str) -> str:
    try:
        ca_pem = ca_path(node_dir).read_text("utf-8")
    except OSError as error:
        raise TlsError(f"the cluster's CA cannot be read: {error}", hint="join the node again") from error
    if tls.fingerprint(ca_pem) != pin:
        raise TlsError(f"{node_dir / _CA} is not the CA of this node's token", hint="join the node again")
    return ca_pem
