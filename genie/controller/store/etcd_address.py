"""Endpoints and credentials of an etcd cluster, parsed from one URL.

    etcd://HOST[:PORT][,HOST[:PORT]…]        plaintext, for loopback and isolated networks
    etcds://HOST[:PORT][,…]?ca=FILE&cert=FILE&key=FILE

Query parameters: `ca`, `cert`, `key` (PEM files), `user` with `password_file`, `namespace`.
Connections are opened by etcd_channels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from genie.errors import ConfigError
from genie.model.names import address_text, is_loopback

DEFAULT_PORT = 2379
DEFAULT_NAMESPACE = "/genie/"
NAMESPACE_BYTES_MAX = 128
_URL_PARAMETERS = ("ca", "cert", "key", "user", "password_file", "namespace")
_TLS_URL_PARAMETERS = ("ca", "cert", "key")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """`endpoints` are host:port. Without `ca_file`, servers are verified against the system's CAs."""

    endpoints: tuple[str, ...]
    uses_tls: bool = False
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    user: str = ""
    password_file: Path | None = None
    namespace: str = DEFAULT_NAMESPACE
    server_name: str = ""
    """Name that the servers' certificates must have; empty: the host of the endpoint."""
    cluster_id: str = ""
    """ID of the etcd cluster in hexadecimal digits; empty: that of the first member that responds."""

    def __str__(self) -> str:
        return f"{'etcds' if self.uses_tls else 'etcd'}://{','.join(self.endpoints)}"


def parse_etcd_url(url: str) -> EtcdAddress:
    """Raises ConfigError that names the invalid part and what is allowed."""
    parts = urlsplit(url)
    if parts.scheme not in ("etcd", "etcds"):
        raise ConfigError(f"store {url!r} is not an etcd URL", hint="etcd://HOST:PORT or etcds://HOST:PORT")
    if "@" in parts.netloc:
        raise ConfigError(
            "the store URL contains a user name or password before the host",
            hint="use ?user=NAME&password_file=FILE, so that the password stays out of command lines",
        )
    if parts.path.strip("/") or parts.fragment:
        raise ConfigError(
            f"store {url!r} has a path, which etcd does not support",
            hint="for a key prefix, use ?namespace=/NAME/",
        )
    tls = parts.scheme == "etcds"
    endpoints = tuple(_parse_endpoint(text, url) for text in parts.netloc.split(","))
    given = _parse_parameters(parts.query, url)
    _check_tls_parameters(given, tls=tls, url=url)
    _check_user_parameters(given, tls=tls, endpoints=endpoints, url=url)
    return EtcdAddress(
        endpoints=endpoints,
        uses_tls=tls,
        ca_file=_path_parameter(given, "ca"),
        certificate_file=_path_parameter(given, "cert"),
        key_file=_path_parameter(given, "key"),
        user=given.get("user", ""),
        password_file=_path_parameter(given, "password_file"),
        namespace=_parse_namespace(given.get("namespace", DEFAULT_NAMESPACE)),
    )


def read_parameter_file(path: Path, *, parameter: str) -> bytes:
    """Reads a file that the URL names. Raises ConfigError that names the parameter."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"could not read the file of ?{parameter}= in the store URL: {path}: {error.strerror}"
        ) from error


def _parse_endpoint(text: str, url: str) -> str:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"store {url!r}: {text!r} is not HOST:PORT: {error}") from None
    if not host or port == 0:
        raise ConfigError(
            f"store {url!r}: {text!r} is not HOST:PORT",
            hint=f"the port is optional (default: {DEFAULT_PORT})",
        )
    return address_text(host, port or DEFAULT_PORT)


def _parse_parameters(query: str, url: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"store {url!r}: invalid query string: {error}") from None
    for name, value in pairs:
        if name not in _URL_PARAMETERS:
            raise ConfigError(
                f"store {url!r}: unknown parameter {name!r}", hint=f"known: {', '.join(_URL_PARAMETERS)}"
            )
        if not value:
            raise ConfigError(f"store {url!r}: parameter {name!r} is empty")
    if len({name for name, _ in pairs}) != len(pairs):
        raise ConfigError(f"store {url!r}: a parameter is repeated")
    return dict(pairs)


def _check_tls_parameters(given: dict[str, str], *, tls: bool, url: str) -> None:
    named = [name for name in _TLS_URL_PARAMETERS if name in given]
    if named and not tls:
        raise ConfigError(
            f"store {url!r}: {', '.join(named)} requires TLS", hint="use etcds:// instead of etcd://"
        )
    if ("cert" in given) != ("key" in given):
        raise ConfigError(f"store {url!r}: cert and key are required together", hint="set both or neither")


def _check_user_parameters(given: dict[str, str], *, tls: bool, endpoints: tuple[str, ...], url: str) -> None:
    if ("user" in given) != ("password_file" in given):
        raise ConfigError(
            f"store {url!r}: user and password_file are required together", hint="set both or neither"
        )
    if (
        "user" in given
        and not tls
        and not all(is_loopback(_host_of_endpoint(endpoint)) for endpoint in endpoints)
    ):
        raise ConfigError(
            f"store {url!r} would send a password over a network without TLS", hint="use etcds:// instead"
        )


def _host_of_endpoint(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")


def _path_parameter(given: dict[str, str], name: str) -> Path | None:
    return Path(given[name]) if name in given else None


def _parse_namespace(text: str) -> str:
    if not text.startswith("/") or not text.endswith("/") or len(text.encode()) > NAMESPACE_BYTES_MAX:
        raise ConfigError(
            f"invalid etcd namespace {text!r}",
            hint=f"it must start and end with / and have at most {NAMESPACE_BYTES_MAX} bytes",
        )
    return text
