"""The files that identify a node: token, certificate, key, the cluster's CA, addresses of the controllers."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from genie.agent.journal import LEADER_TOKEN_FILE
from genie.agent.leader_connection import LeaderConnection
from genie.errors import ConfigError, TlsError, TokenMissingError, UsageError
from genie.model.messages.handshake import RecoverCertificate, RenewCertificate
from genie.model.names import address_text, is_loopback, parse_endpoint
from genie.processes import files
from genie.processes.tasks import Offload
from genie.runtime import tls
from genie.runtime.credentials import Access, with_client_certificate
from genie.runtime.network import ClientTls
from genie.tenancy.access import NO_PIN, parse_token

_log = logging.getLogger(__name__)

AGENTS_DIR = "agents"
_TOKEN_FILE, _CERTIFICATE_FILE, _KEY_FILE, _NEXT_KEY_FILE, _CA_FILE = (
    "node.token",
    "node.pem",
    "node.key",
    "node.key.next",
    "ca.pem",
)
_CONTROLLER_ADDRESSES_FILE = "controllers.json"
_NEXT_IDENTITY_DIR = "identity.next"
"""The complete files of a new identity, until each has replaced the one of the previous identity."""
_UNFINISHED_IDENTITY_DIR = ".identity.new"

ControllerAddress = tuple[str, int]


def write_identity(
    node_dir: Path,
    *,
    token: str,
    certificate_pem: str,
    key_pem: bytes,
    ca_pem: str,
    controller: ControllerAddress,
) -> None:
    """Writes the files of a new node, or replaces those of a node that joins again. Blocks.

    After a crash, or on a full disk, the node has either its previous identity or the new one. Raises
    StoreFullError.
    """
    _finish_interrupted_join(node_dir)
    unfinished = node_dir / _UNFINISHED_IDENTITY_DIR
    shutil.rmtree(unfinished, ignore_errors=True)
    files.write_private(unfinished / _KEY_FILE, key_pem)
    files.write_private(unfinished / _CERTIFICATE_FILE, certificate_pem.encode())
    files.write_private(unfinished / _CA_FILE, ca_pem.encode())
    write_controller_addresses(unfinished, (controller,))
    files.write_private(unfinished / _TOKEN_FILE, token.encode())
    unfinished.rename(node_dir / _NEXT_IDENTITY_DIR)
    files.sync_directory(node_dir)
    _finish_interrupted_join(node_dir)


def _finish_interrupted_join(node_dir: Path) -> None:
    """Replaces the previous identity by the new one that write_identity() has written completely."""
    next_dir = node_dir / _NEXT_IDENTITY_DIR
    if not next_dir.exists():
        return
    (node_dir / _NEXT_KEY_FILE).unlink(missing_ok=True)
    # Leader tokens are only comparable within one cluster, and this may be another cluster.
    (node_dir / LEADER_TOKEN_FILE).unlink(missing_ok=True)
    # The token comes last: without it the directory is not a node.
    for name in (_KEY_FILE, _CERTIFICATE_FILE, _CA_FILE, _CONTROLLER_ADDRESSES_FILE, _TOKEN_FILE):
        with suppress(FileNotFoundError):  # it was replaced before the interruption
            (next_dir / name).replace(node_dir / name)
    files.sync_directory(node_dir)
    with suppress(FileNotFoundError):  # another process has finished it as well
        next_dir.rmdir()
    files.sync_directory(node_dir)


def ca_path(node_dir: Path) -> Path:
    """Path of the CA certificate of the cluster; the file exists only if the cluster uses TLS."""
    return node_dir / _CA_FILE


def read_identity(node_dir: Path, *, controller: ControllerAddress | None = None) -> Access:
    """Returns the access of this node to its cluster, with all stored controllers. `controller` is tried
    before those."""
    _finish_interrupted_join(node_dir)
    try:
        token = parse_token((node_dir / _TOKEN_FILE).read_text("utf-8"))
    except FileNotFoundError:
        raise TokenMissingError(
            f"{node_dir} has no node token", hint="join a cluster first: 'genie join ADDR --token T'"
        ) from None
    except OSError as error:
        raise TokenMissingError(f"could not read the node token: {error}") from error
    known = (
        read_controller_addresses(node_dir)
        if controller is None
        else _try_read_controller_addresses(node_dir)
    )
    host, port = controller or known[0]
    if token.pin == NO_PIN:
        if not is_loopback(host):
            raise TlsError(
                f"the cluster of this node has no TLS, and {host} is not a loopback address",
                hint="start the cluster with TLS (the default) and join again",
            )
        known = tuple(server for server in known if is_loopback(server[0]))
        return Access(host=host, port=port, token=token, tls=None, other_servers=known)
    _finish_interrupted_renewal(node_dir)
    ca_pem = _read_ca_pem(node_dir, pin=token.pin)
    plain = ClientTls(tls.client_context(ca_pem), tls.CONTROLLER_NAME)
    access = Access(host=host, port=port, token=token, tls=plain, other_servers=known)
    return _with_node_certificate(access, node_dir, ca_pem)


def find_node_dir(state_dir: Path, node_id: str | None) -> Path:
    """Returns the directory of this node, or of the only node if `node_id` is None."""
    agents = state_dir / AGENTS_DIR
    if node_id is not None:
        return agents / node_id
    found = list_node_dirs(state_dir)
    if len(found) == 1:
        return found[0]
    if not found:
        raise TokenMissingError(
            f"{agents} contains no node", hint="join a cluster first: 'genie join ADDR --token T'"
        )
    raise UsageError(
        f"{agents} contains several nodes: {', '.join(path.name for path in found)}",
        hint="choose one with --node-id",
    )


def list_node_dirs(state_dir: Path) -> list[Path]:
    """Returns the directories of all nodes of this machine that have joined a cluster, by name. Blocks."""
    agents = state_dir / AGENTS_DIR
    for path in agents.glob(f"*/{_NEXT_IDENTITY_DIR}"):
        _finish_interrupted_join(path.parent)
    return sorted(path.parent for path in agents.glob(f"*/{_TOKEN_FILE}"))


def write_controller_addresses(node_dir: Path, controllers: Sequence[ControllerAddress]) -> None:
    """Stores the addresses of the controllers, that of the current leader first. Blocks."""
    body = json.dumps([address_text(host, port) for host, port in controllers]).encode()
    path = node_dir / _CONTROLLER_ADDRESSES_FILE
    if not path.exists() or path.read_bytes() != body:
        files.write_private(path, body)


def read_controller_addresses(node_dir: Path) -> tuple[ControllerAddress, ...]:
    """Returns the stored addresses of the controllers, that of the last leader first."""
    path = node_dir / _CONTROLLER_ADDRESSES_FILE
    try:
        return tuple(parse_endpoint(str(text)) for text in json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"could not read {path}: {error}",
            hint="pass the controller's address with --controller HOST:PORT",
        ) from error


def _try_read_controller_addresses(node_dir: Path) -> tuple[ControllerAddress, ...]:
    """As read_controller_addresses(); empty if the file cannot be read, because another address is given."""
    try:
        return read_controller_addresses(node_dir)
    except ConfigError:
        return ()


async def renew_certificate_if_due_and_get_wait_s(
    node_dir: Path, connection: LeaderConnection, *, now: float, timeout_s: float, offload: Offload
) -> float:
    """Renews the certificate after half of its validity. Returns the seconds until the next check."""
    certificate_pem = await offload(partial((node_dir / _CERTIFICATE_FILE).read_text, "utf-8"))
    left_s = tls.renewal_due_in_s(certificate_pem, now=now)
    if left_s > 0:
        return left_s
    if now > tls.validity_period(certificate_pem)[1]:
        await renew_expired_certificate(node_dir, connection, timeout_s=timeout_s, offload=offload)
        return 0.0
    key_pem, csr_pem = tls.new_key_and_csr()
    signed = await connection.call_leader(RenewCertificate(csr_pem=csr_pem), timeout_s=timeout_s)
    certificate_pem = signed.certificate_pem
    store = partial(_store_certificate, node_dir, connection.access, certificate_pem, key_pem)
    connection.replace_access(await offload(store, writes=True))
    _log.info("renewed the node's certificate")
    return tls.renewal_due_in_s(certificate_pem, now=now)


def _store_certificate(node_dir: Path, access: Access, certificate_pem: str, key_pem: bytes) -> Access:
    # In this order a crash leaves either the old pair, or the new certificate and its key in node.key.next.
    files.write_private(node_dir / _NEXT_KEY_FILE, key_pem)
    files.write_private(node_dir / _CERTIFICATE_FILE, certificate_pem.encode())
    _finish_interrupted_renewal(node_dir)
    return _with_node_certificate(access, node_dir, _read_ca_pem(node_dir, pin=access.token.pin))


async def has_certificate_expired(node_dir: Path, *, now: float, offload: Offload) -> bool:
    """Whether the certificate of the node has expired."""
    certificate_pem = await offload(partial((node_dir / _CERTIFICATE_FILE).read_text, "utf-8"))
    return now > tls.validity_period(certificate_pem)[1]


async def renew_expired_certificate(
    node_dir: Path, connection: LeaderConnection, *, timeout_s: float, offload: Offload
) -> None:
    """Gets a new certificate for the same key after the old one has expired. Raises CertificateExpiredError
    after the grace period."""
    access = connection.access
    request, ca_pem = await offload(partial(_make_recovery_request, node_dir, access))
    # The server would reject a connection with the expired certificate.
    plain = ClientTls(tls.client_context(ca_pem), tls.CONTROLLER_NAME)
    signed = await connection.call_unauthenticated(request, tls=plain, timeout_s=timeout_s)

    def store() -> Access:
        files.write_private(node_dir / _CERTIFICATE_FILE, signed.certificate_pem.encode())
        return _with_node_certificate(access, node_dir, ca_pem)

    connection.replace_access(await offload(store, writes=True))
    _log.info("renewed the node's certificate, which had expired")


def _make_recovery_request(node_dir: Path, access: Access) -> tuple[RecoverCertificate, str]:
    request = RecoverCertificate(
        token=str(access.token),
        certificate_pem=(node_dir / _CERTIFICATE_FILE).read_text("utf-8"),
        csr_pem=tls.new_csr((node_dir / _KEY_FILE).read_bytes()),
    )
    return request, _read_ca_pem(node_dir, pin=access.token.pin)


def _finish_interrupted_renewal(node_dir: Path) -> None:
    next_key = node_dir / _NEXT_KEY_FILE
    if not next_key.exists():
        return
    try:
        tls.server_context(node_dir / _CERTIFICATE_FILE, next_key)
    except TlsError:
        next_key.unlink()
    else:
        next_key.replace(node_dir / _KEY_FILE)
    files.sync_directory(node_dir)


def _with_node_certificate(access: Access, node_dir: Path, ca_pem: str) -> Access:
    return with_client_certificate(
        access, ca_pem=ca_pem, certificate=node_dir / _CERTIFICATE_FILE, key=node_dir / _KEY_FILE
    )


def _read_ca_pem(node_dir: Path, *, pin: str) -> str:
    try:
        ca_pem = ca_path(node_dir).read_text("utf-8")
    except OSError as error:
        raise TlsError(f"could not read the cluster's CA: {error}", hint="join the node again") from error
    if tls.fingerprint(ca_pem) != pin:
        raise TlsError(f"{node_dir / _CA_FILE} does not match the node token", hint="join the node again")
    return ca_pem
