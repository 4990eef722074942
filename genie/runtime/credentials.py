"""How a process finds its cluster and proves who it is: address, token, trusted CA, then Hello.

A token is looked for in the arguments and settings, then in the state directory, where `genie
up` leaves the owner's. The token's pin decides which CA is trusted, so the token itself is never
sent to a server that has not proved to be of its cluster. Not for: issuing either.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import genie
from genie.config import ClusterConfig
from genie.errors import ConfigError, TlsError, TokenMissingError
from genie.model.messages import FetchTrust, Hello, Message, Welcome
from genie.model.names import parse_endpoint
from genie.runtime import files, rpc, tls
from genie.runtime.network import ClientTls, Network
from genie.tenancy.access import NO_PIN, Token, parse_token

OWNER_TOKEN_FILE = "owner.token"
LOCAL_CLUSTER_FILE = "local.json"


@dataclass(frozen=True, slots=True)
class Access:
    """Everything that a connection to one cluster needs."""

    host: str
    port: int
    token: Token
    tls: ClientTls | None


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """The cluster that this machine hosts, as `genie up` recorded it."""

    host: str
    port: int
    cluster_id: str

    @classmethod
    def read(cls, state_dir: Path) -> LocalCluster | None:
        try:
            body = json.loads((state_dir / LOCAL_CLUSTER_FILE).read_text("utf-8"))
            return cls(host=str(body["host"]), port=int(body["port"]), cluster_id=str(body["cluster_id"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{state_dir / LOCAL_CLUSTER_FILE} cannot be read: {error}",
                hint="run 'genie up' again, or remove the file",
            ) from error

    def write(self, state_dir: Path) -> None:
        body = {"host": self.host, "port": self.port, "cluster_id": self.cluster_id}
        files.write_private(state_dir / LOCAL_CLUSTER_FILE, json.dumps(body).encode())


async def find_access(
    config: ClusterConfig, *, state_dir: Path, network: Network, timeout_s: float
) -> Access:
    """Address, token and trust for this configuration, or an error that says which is missing."""
    host, port = _find_address(config, state_dir)
    token = _find_token(config, state_dir, where=f"{host}:{port}")
    trusted = await trust(network, host, port, pin=token.pin, state_dir=state_dir, timeout_s=timeout_s)
    return Access(host=host, port=port, token=token, tls=trusted)


async def trust(
    network: Network, host: str, port: int, *, pin: str, state_dir: Path, timeout_s: float
) -> ClientTls | None:
    """TLS that trusts exactly the CA with this fingerprint; fetched from the server once, then kept."""
    if pin == NO_PIN:
        if not is_loopback(host):
            raise TlsError(
                f"this token is of a cluster without TLS, and {host} is not this machine",
                hint="start the cluster with TLS (the default) and use a token made there",
            )
        return None
    kept = state_dir / "trust" / f"{pin}.pem"
    try:
        ca_pem = kept.read_text("utf-8")
        if tls.fingerprint(ca_pem) == pin:
            return ClientTls(tls.client_context(ca_pem), tls.CONTROLLER_NAME)
    except (FileNotFoundError, TlsError, UnicodeDecodeError):
        pass  # not there, or not a certificate: asked for again
    ca_pem = await _fetch_ca(network, host, port, pin=pin, timeout_s=timeout_s)
    files.write_private(kept, ca_pem.encode())
    return ClientTls(tls.client_context(ca_pem), tls.CONTROLLER_NAME)


def keep_trust(ca_pem: str, *, state_dir: Path) -> None:
    """Lets local commands trust the cluster that this machine hosts without asking it."""
    files.write_private(state_dir / "trust" / f"{tls.fingerprint(ca_pem)}.pem", ca_pem.encode())


def with_certificate(access: Access, *, ca_pem: str, certificate: Path, key: Path) -> Access:
    """The same access, with a client certificate to show."""
    if access.tls is None:
        return access
    context = tls.client_context(ca_pem, certificate=certificate, key=key)
    return replace(access, tls=ClientTls(context, access.tls.server_name))


@asynccontextmanager
async def greet(
    network: Network,
    access: Access,
    *,
    timeout_s: float,
    program: str,
    requests: Sequence[type[Message]] = (),
    handler: rpc.Handler | None = None,
) -> AsyncIterator[tuple[rpc.Peer, Welcome]]:
    """A connection on which Hello has been answered."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with rpc.dial(
        network,
        access.host,
        access.port,
        tls=access.tls,
        timeout_s=timeout_s,
        requests=requests,
        handler=handler,
    ) as peer:
        hello = Hello(token=str(access.token), version=genie.__version__, program=program)
        left_s = max(deadline - asyncio.get_running_loop().time(), 0.001)
        yield peer, await peer.call(hello, timeout_s=left_s)


def is_loopback(host: str) -> bool:
    """Whether this address can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _find_address(config: ClusterConfig, state_dir: Path) -> tuple[str, int]:
    if config.master_addr is not None and config.discovery_method != "local":
        return parse_endpoint(config.master_addr, what="master_addr", port=config.master_port)
    local = LocalCluster.read(state_dir) if config.discovery_method != "address" else None
    if local is None:
        raise ConfigError(
            "no cluster: master_addr is not given, and this machine hosts none",
            hint="pass master_addr, set GENIE_MASTER_ADDR, or start one here with 'genie up'",
        )
    return local.host, local.port


def _find_token(config: ClusterConfig, state_dir: Path, *, where: str) -> Token:
    if config.token is not None:
        return parse_token(config.token)
    try:
        return parse_token((state_dir / OWNER_TOKEN_FILE).read_text("utf-8"))
    except FileNotFoundError:
        raise TokenMissingError(
            f"no token for {where}: none was given, and {state_dir / OWNER_TOKEN_FILE} is not there",
            hint="on the cluster's machine run 'genie token create'; then set GENIE_TOKEN here",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenMissingError(
            f"the token file {state_dir / OWNER_TOKEN_FILE} cannot be read: {error}",
            hint="remove it and run 'genie up' again, or set GENIE_TOKEN",
        ) from error


async def _fetch_ca(network: Network, host: str, port: int, *, pin: str, timeout_s: float) -> str:
    unverified = ClientTls(tls.unverified_context(), tls.CONTROLLER_NAME)
    async with rpc.dial(network, host, port, tls=unverified, timeout_s=timeout_s) as peer:
        anchor = await peer.call(FetchTrust(), timeout_s=timeout_s)
    if tls.fingerprint(anchor.ca_pem) != pin:
        raise TlsError(
            f"{host}:{port} is not the cluster that this token is for: its CA has another fingerprint",
            hint="check the address, or get a token from that cluster",
        )
    return anchor.ca_pem
