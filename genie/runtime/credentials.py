"""How a process finds its cluster and authenticates: address, token, trusted CA, then Hello.

Sources of the token, in this order: arguments and settings, a stored login (`genie login`), the owner token
that `genie up` writes to the state directory. The pin of the token determines the trusted CA, so the token
is only sent to a server of its own cluster. Does not issue tokens or certificates.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from genie.config import ClusterConfig
from genie.errors import (
    ConfigError,
    GenieError,
    OutdatedLeaderError,
    TlsError,
    TokenMissingError,
    TokenRefusedError,
    UsageError,
)
from genie.model.messages import Message
from genie.model.messages.handshake import FetchTrust, Hello, Welcome
from genie.model.names import address_text, is_loopback, parse_endpoint
from genie.model.release import check_releases_work_together
from genie.model.tenant import TokenKind
from genie.processes import files
from genie.runtime import logins, rpc, tls
from genie.runtime.known_servers import generation_path, read_generation, read_known_servers
from genie.runtime.network import ClientTls, Network
from genie.tenancy.access import NO_PIN, Token, parse_token
from genie.version import __version__

OWNER_TOKEN_FILE = "owner.token"
LOCAL_CLUSTER_FILE = "local.json"
DEFAULT_PORT = ClusterConfig().master_port


class TokenSource(StrEnum):
    CONFIGURED = "configured"
    LOGIN = "login"
    OWNER_FILE = "owner file"
    """The owner token that `genie up` wrote. Another cluster may listen at the address."""


@dataclass(frozen=True, slots=True)
class Access:
    """Address, token and trusted CA of one cluster."""

    host: str
    port: int
    token: Token
    tls: ClientTls | None
    source: TokenSource = TokenSource.CONFIGURED
    other_servers: tuple[tuple[str, int], ...] = ()
    """Further known controllers of the cluster, used when the first cannot be reached."""
    generation: int = 0
    """The highest known generation of the cluster; servers of a lower one are rejected."""
    generation_file: Path | None = None
    """Where this machine stores that generation; None if it does not."""


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """The cluster that this machine hosts, as `genie up` recorded it."""

    host: str
    port: int
    cluster_id: str

    @classmethod
    def read(cls, state_dir: Path) -> LocalCluster | None:
        try:
            body = json.loads(files.read_small_file(state_dir / LOCAL_CLUSTER_FILE))
            host, port = parse_endpoint(address_text(str(body["host"]), int(body["port"])))
            return cls(host=host, port=port, cluster_id=str(body["cluster_id"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, UsageError) as error:
            reason = error.message if isinstance(error, UsageError) else str(error)
            raise ConfigError(
                f"{state_dir / LOCAL_CLUSTER_FILE} cannot be read: {reason}",
                hint="run 'genie up' again, or remove the file",
            ) from error

    def write(self, state_dir: Path) -> None:
        body = {"host": self.host, "port": self.port, "cluster_id": self.cluster_id}
        files.write_private(state_dir / LOCAL_CLUSTER_FILE, json.dumps(body).encode())


async def find_access(
    config: ClusterConfig,
    *,
    state_dir: Path,
    network: Network,
    timeout_s: float,
    is_address_fixed: bool = False,
) -> Access:
    """Returns address, token and trusted CA for this configuration; the error names what is missing.

    With `is_address_fixed`, without the other controllers that earlier connections have stored.
    """
    host, port = find_address(config, state_dir)
    found = find_token(config, state_dir, host=host, port=port)
    if found is None:
        raise _token_missing_error(host, port, state_dir=state_dir)
    token, source = found
    # The local owner token is valid at another address only if the same cluster listens there.
    needs_check = source is TokenSource.OWNER_FILE and not _is_local_cluster(host, port, state_dir)
    if needs_check and not await _server_has_ca_fingerprint(
        network, host, port, pin=token.pin, timeout_s=timeout_s
    ):
        raise _token_missing_error(host, port, state_dir=state_dir)
    try:
        trusted = await make_pinned_client_tls(
            network, host, port, pin=token.pin, state_dir=state_dir, timeout_s=timeout_s
        )
    except TlsError as error:
        if source is not TokenSource.LOGIN:
            raise
        raise _login_failed_error(host, port, error) from error
    others = () if is_address_fixed else read_known_servers(state_dir, token.pin)
    return Access(
        host=host,
        port=port,
        token=token,
        tls=trusted,
        source=source,
        other_servers=others,
        generation=read_generation(state_dir, token.pin),
        generation_file=generation_path(state_dir, token.pin),
    )


async def log_in(
    host: str, port: int, text: str, *, state_dir: Path, network: Network, timeout_s: float
) -> Welcome:
    """Verifies a token with the cluster at this address and stores it on this machine as a login.

    Raises TokenRefusedError if it is neither a user token nor the owner token, or if the cluster rejects it;
    TlsError if it belongs to another cluster. On an error nothing is stored.
    """
    token = parse_token(text)
    if token.kind not in (TokenKind.OWNER, TokenKind.USER):
        raise TokenRefusedError(
            f"this is a {token.kind} token: it admits a machine to the cluster and cannot be used to log in",
            hint=f"run 'genie token create' on {host}, without --join, and log in with that token",
        )
    trusted = await make_pinned_client_tls(
        network, host, port, pin=token.pin, state_dir=state_dir, timeout_s=timeout_s
    )
    access = Access(host=host, port=port, token=token, tls=trusted)
    async with connect_authenticated(network, access, timeout_s=timeout_s, program="genie login") as (
        _,
        welcome,
    ):
        logins.store_login(state_dir, host, port, token)
        return welcome


async def make_pinned_client_tls(
    network: Network, host: str, port: int, *, pin: str, state_dir: Path, timeout_s: float
) -> ClientTls | None:
    """TLS that trusts only the CA with this fingerprint, which is fetched from the server once and stored."""
    if pin == NO_PIN:
        if not is_loopback(host):
            raise TlsError(
                f"this token belongs to a cluster without TLS, and {host} is not this machine",
                hint="start the cluster with TLS (the default) and create a token there",
            )
        return None
    path = state_dir / "trust" / f"{pin}.pem"
    try:
        ca_pem = files.read_small_file(path)
        if tls.fingerprint(ca_pem) == pin:
            return ClientTls(tls.client_context(ca_pem), tls.CONTROLLER_NAME)
    except (OSError, TlsError, UnicodeDecodeError):
        pass  # missing or invalid: fetch it again
    ca_pem = await _fetch_ca(network, host, port, timeout_s=timeout_s)
    if tls.fingerprint(ca_pem) != pin:
        raise TlsError(
            f"{address_text(host, port)} is not the cluster that this token is for: "
            "its CA has another fingerprint",
            hint="check the address, or get a token from that cluster",
        )
    files.write_private(path, ca_pem.encode())
    return ClientTls(tls.client_context(ca_pem), tls.CONTROLLER_NAME)


def store_trusted_ca(ca_pem: str, *, state_dir: Path) -> None:
    """Stores the CA of the cluster on this machine, so that local commands need not fetch it."""
    files.write_private(state_dir / "trust" / f"{tls.fingerprint(ca_pem)}.pem", ca_pem.encode())


def with_client_certificate(access: Access, *, ca_pem: str, certificate: Path, key: Path) -> Access:
    """Returns `access` with a client certificate."""
    if access.tls is None:
        return access
    context = tls.client_context(ca_pem, certificate=certificate, key=key)
    return replace(access, tls=ClientTls(context, access.tls.server_name))


@asynccontextmanager
async def connect_authenticated(
    network: Network,
    access: Access,
    *,
    timeout_s: float,
    program: str,
    requests: Sequence[type[Message]] = (),
    handler: rpc.Handler | None = None,
) -> AsyncIterator[tuple[rpc.Peer, Welcome]]:
    """Opens an authenticated connection: it sends Hello and yields the peer and its Welcome."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with AsyncExitStack() as stack:
        try:
            peer = await stack.enter_async_context(
                rpc.dial(
                    network,
                    access.host,
                    access.port,
                    tls=access.tls,
                    timeout_s=timeout_s,
                    requests=requests,
                    handler=handler,
                )
            )
            hello = Hello(token=str(access.token), version=__version__, program=program)
            remaining_s = max(deadline - asyncio.get_running_loop().time(), 0.001)
            welcome = await peer.call(hello, timeout_s=remaining_s)
            check_releases_work_together(
                peer_version=welcome.version, peer=f"the controller {peer.name}", this_side="this side"
            )
            _check_generation(welcome, peer.name, access)
            peer.set_release(welcome.version)
        except (TokenRefusedError, TlsError) as error:
            remaining_s = max(deadline - asyncio.get_running_loop().time(), 0.001)
            explained = await _explain_stored_token_rejection(error, network, access, timeout_s=remaining_s)
            if explained is None:
                raise
            raise explained from error
        yield peer, welcome


def _check_generation(welcome: Welcome, peer: str, access: Access) -> None:
    """Raises OutdatedLeaderError for a server whose store was replaced by a restored backup."""
    known, path = access.generation, access.generation_file
    forget = "" if path is None else f"if the other one was only a test, remove {path} on this machine; "
    if welcome.generation is not None and welcome.generation < known:
        raise OutdatedLeaderError(
            f"{peer} has generation {welcome.generation} of the cluster, but generation {known} exists: "
            "a backup was restored on other servers, which replace this one",
            hint=f"stop that server with 'genie down', and connect to a restored one; {forget}if this "
            f"server is the right one, restore a backup of it with 'genie store restore --generation "
            f"{known + 1}'",
        )


def is_wildcard(host: str) -> bool:
    """Whether a server that binds to this address listens on all interfaces."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return _is_abbreviated_wildcard(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_unspecified


def _is_abbreviated_wildcard(host: str) -> bool:
    """Whether it is '0', '0x0' or the like, which `ipaddress` does not parse."""
    try:
        return not any(socket.inet_aton(host))
    except (OSError, ValueError):
        return False


def find_address(config: ClusterConfig, state_dir: Path) -> tuple[str, int]:
    """Address of the controller: configured, or of the local cluster, or of the last login."""
    if config.master_addr is not None and config.discovery_method != "local":
        return parse_endpoint(config.master_addr, what="master_addr", port=config.master_port)
    if config.discovery_method != "address" and (local := LocalCluster.read(state_dir)) is not None:
        return local.host, local.port
    if config.discovery_method == "auto" and (last := logins.default_login(state_dir)) is not None:
        return last
    stored = [login.address for login in logins.list_logins(state_dir)]
    raise ConfigError(
        "no cluster: master_addr is not given, and this machine hosts none",
        hint="pass master_addr, set GENIE_MASTER_ADDR, log in to a cluster with 'genie login ADDRESS', "
        "or start one here with 'genie up'" + (f"; stored logins: {', '.join(stored)}" if stored else ""),
    )


def find_token(
    config: ClusterConfig, state_dir: Path, *, host: str, port: int
) -> tuple[Token, TokenSource] | None:
    """The token for this address, and its source; None if there is no token.

    In order of precedence: the configured token, that of the login, the owner token of the local cluster.
    """
    if config.token is not None:
        return _parse_configured_token(config.token), TokenSource.CONFIGURED
    if (token := logins.read_login(state_dir, host, port)) is not None:
        return token, TokenSource.LOGIN
    owner = read_owner_token(state_dir)
    return None if owner is None else (owner, TokenSource.OWNER_FILE)


def _parse_configured_token(text: str) -> Token:
    try:
        return parse_token(text)
    except TokenRefusedError as error:
        raise TokenRefusedError(
            "the given token is not a Genie token: its form is genie.KIND.ID.SECRET.PIN",
            hint="check --token-file, GENIE_TOKEN, or 'token' in the settings file or genie.init; "
            "without them, the token of 'genie login' is used",
        ) from error


def read_owner_token(state_dir: Path) -> Token | None:
    """The token that `genie up` wrote, or None. Raises TokenMissingError if it cannot be read."""
    try:
        return parse_token(files.read_small_file(state_dir / OWNER_TOKEN_FILE))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, TokenRefusedError) as error:
        reason = error.message if isinstance(error, TokenRefusedError) else str(error)
        raise TokenMissingError(
            f"the token file {state_dir / OWNER_TOKEN_FILE} cannot be read: {reason}",
            hint="remove it and run 'genie up' again, or set GENIE_TOKEN",
        ) from error


def find_owner_token_id(state_dir: Path) -> str:
    """The ID of the token that `genie up` wrote; empty if there is none or it cannot be read."""
    try:
        token = read_owner_token(state_dir)
    except TokenMissingError:
        return ""
    return "" if token is None else token.token_id


def _is_local_cluster(host: str, port: int, state_dir: Path) -> bool:
    local = LocalCluster.read(state_dir)
    return is_loopback(host) or (local is not None and (host, port) == (local.host, local.port))


def _token_missing_error(host: str, port: int, *, state_dir: Path | None = None) -> TokenMissingError:
    hint = login_hint(host, port)
    other = None if state_dir is None else logins.find_login_on_other_port(state_dir, host, port)
    if other is not None:
        hint = f"use master_addr={other!r} for the stored login, or {hint}"
    return TokenMissingError(f"no token for {address_text(host, port)}", hint=hint)


def login_hint(host: str, port: int) -> str:
    """A hint with the commands that create a token and log in."""
    where = address_text(host, port) if port != DEFAULT_PORT else host
    there = "as the user who runs the cluster" if is_loopback(host) else f"on {host}"
    return f"run 'genie token create' {there}, then 'genie login {where}' here and paste the token"


def _login_failed_error(host: str, port: int, error: TokenRefusedError | TlsError) -> GenieError:
    """The error for a token of a stored login, which the user may not be aware of."""
    name = logins.login_name(host, port)
    if isinstance(error, TokenRefusedError):
        return TokenRefusedError(
            f"the stored login to {name} was refused: {error.message}", hint=login_hint(host, port)
        )
    return TlsError(
        f"the stored login to {name} failed: {error.message}",
        hint=f"if the cluster was recreated, {login_hint(host, port)}; "
        f"'genie logout {name}' removes the login",
    )


async def _explain_stored_token_rejection(
    error: TokenRefusedError | TlsError, network: Network, access: Access, *, timeout_s: float
) -> GenieError | None:
    """A clearer error for a stored token, which the user may not be aware of; None if there is none."""
    host, port = access.host, access.port
    if access.source is TokenSource.LOGIN:
        return _login_failed_error(host, port, error)
    if access.source is TokenSource.OWNER_FILE and isinstance(error, TlsError):
        try:
            is_same = await _server_has_ca_fingerprint(
                network, host, port, pin=access.token.pin, timeout_s=timeout_s
            )
        except GenieError:  # not a cluster: the first error explains that
            return None
        return None if is_same else _token_missing_error(host, port)
    return None


async def _server_has_ca_fingerprint(
    network: Network, host: str, port: int, *, pin: str, timeout_s: float
) -> bool:
    """Whether the server presents the CA with this fingerprint."""
    if pin == NO_PIN:
        return False
    return tls.fingerprint(await _fetch_ca(network, host, port, timeout_s=timeout_s)) == pin


async def _fetch_ca(network: Network, host: str, port: int, *, timeout_s: float) -> str:
    """Returns the CA certificate that the server presents, unverified."""
    unverified = ClientTls(tls.unverified_context(), tls.CONTROLLER_NAME)
    async with rpc.dial(network, host, port, tls=unverified, timeout_s=timeout_s) as peer:
        return (await peer.call(FetchTrust(), timeout_s=timeout_s)).ca_pem
