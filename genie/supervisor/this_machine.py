"""The addresses and ports of this machine, and hints in errors that name the cluster of this machine.

    async with add_local_cluster_hint("127.0.0.1", 5555, state_dir=state_dir):
        ...  # the hint of an UnreachableError or TokenMissingError names the right address

Does not choose the cluster to connect to (runtime/credentials.py).
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from genie.errors import (
    AddressInUseError,
    ConfigError,
    DeadlineError,
    GenieError,
    HardwareError,
    TokenMissingError,
    UnreachableError,
)
from genie.model.names import address_text, is_loopback
from genie.processes import files
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster, is_wildcard
from genie.supervisor import process_records
from genie.tenancy.access import parse_token

LOCAL_CLUSTER_HINT_TIMEOUT_S = 2.0
_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@asynccontextmanager
async def add_local_cluster_hint(host: str, port: int, *, state_dir: Path) -> AsyncIterator[None]:
    """Adds the address of the local cluster to an error about another address of this machine, and its
    process to an error about a controller of this machine that does not respond.

    Delays the error by at most LOCAL_CLUSTER_HINT_TIMEOUT_S.
    """
    try:
        yield
    except DeadlineError as error:
        hint = find_unresponsive_controller_hint(host, port, state_dir=state_dir)
        if not hint:
            raise
        raise DeadlineError(error.message, hint=hint) from error
    except (UnreachableError, TokenMissingError) as error:
        hint = await _find_local_cluster_hint_with_timeout(host, port, state_dir=state_dir)
        if not hint:
            raise
        raise type(error)(error.message, hint=hint) from error


async def _find_local_cluster_hint_with_timeout(host: str, port: int, *, state_dir: Path) -> str:
    """Runs on a thread that is abandoned on timeout: a failed name server blocks for half a minute."""
    from genie.processes.call_thread import (
        CallThread,  # imported here: only needed for an error, and it loads psutil
    )

    thread = CallThread("genie-hint")
    find_hint = partial(find_local_cluster_hint, host, port, state_dir=state_dir)
    try:
        return await thread.call(find_hint, what=f"looking up {host}", timeout_s=LOCAL_CLUSTER_HINT_TIMEOUT_S)
    except HardwareError:
        return ""
    finally:
        thread.close()


def find_local_cluster_hint(host: str, port: int, *, state_dir: Path) -> str:
    """Returns a hint with the address of the local cluster; empty if `host` is another machine or no other
    address is known. May block on a name lookup."""
    if not is_own_address(host):
        return ""
    try:
        local = LocalCluster.read(state_dir)
    except GenieError:
        local = None
    if local is not None and not _is_same_endpoint((local.host, local.port), (host, port)):
        where = address_text(local.host, local.port)
        return f"a cluster of this machine listens on {where}: use master_addr={where!r}"
    joined = _address_of_joined_cluster(state_dir)
    if local is None and joined is not None and not _is_same_endpoint(joined, (host, port)):
        where = address_text(*joined)
        return f"this machine is a node of the cluster at {where}: use master_addr={where!r}"
    return ""


def find_unresponsive_controller_hint(host: str, port: int, *, state_dir: Path) -> str:
    """Returns a hint with the process and the log of the controller of this state directory; empty if it is
    not running or has another address."""
    try:
        local = LocalCluster.read(state_dir)
    except GenieError:
        return ""
    record = process_records.read_process_record(state_dir, process_records.CONTROLLER)
    if local is None or record is None or not _is_same_endpoint((local.host, local.port), (host, port)):
        return ""
    return (
        f"the controller on this machine, process {record.pid}, is running but does not respond: see "
        f"{process_records.log_path(state_dir, process_records.CONTROLLER)}, or restart it: 'genie down "
        "--keep-jobs', then 'genie up'"
    )


def _is_same_endpoint(one: tuple[str, int], other: tuple[str, int]) -> bool:
    hosts = one[0] == other[0] or (is_loopback(one[0]) and is_loopback(other[0]))
    return hosts and one[1] == other[1]


def is_own_address(host: str) -> bool:
    """Whether this name or IP address is that of this machine. May block on a name lookup."""
    if is_loopback(host):
        return True
    found = resolve_host(host)
    # Not tested with bind(): that accepts broadcast addresses and, with ip_nonlocal_bind, all others.
    own = _interface_addresses()
    return any(
        is_loopback(address) or is_wildcard(address) or _try_parse_ip(address) in own for address in found
    )


def resolve_host(host: str) -> list[str]:
    """The IP addresses of a name or address; empty if it cannot be resolved. May block."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def list_own_addresses(among: Iterable[str] | None = None) -> list[str]:
    """IP addresses that other machines can connect to, IPv4 first; none that are loopback or link-local.

    With `among`, only addresses in it.
    """
    reachable = [ip for ip in _interface_addresses() if not (ip.is_loopback or ip.is_link_local)]
    if among is not None:
        wanted = {_try_parse_ip(address) for address in among}
        reachable = [ip for ip in reachable if ip in wanted]
    return [str(ip) for ip in sorted(reachable, key=lambda ip: ip.version)]


def normalize_ip(text: str) -> str:
    """Removes the zone and unmaps IPv4-mapped addresses. A name is returned unchanged."""
    ip = _try_parse_ip(text)
    return text if ip is None else str(ip)


def check_port_free(host: str, port: int, *, hint: str) -> None:
    """Raises AddressInUseError, or ConfigError if this machine does not have the address, here; the child
    would only write it to its log. Port 0 stands for any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(f"port {port} on {host} is in use", hint=hint) from error
            if error.errno == errno.EADDRNOTAVAIL:
                own = ", ".join(list_own_addresses()) or "none that other machines can reach"
                raise ConfigError(
                    f"{host} is not an address of this machine",
                    hint=f"give one with --bind; this machine has: {own}",
                ) from error


def _interface_addresses() -> list[_IpAddress]:
    import psutil  # imported here: only needed for an error or by a server

    found = [address.address for listed in psutil.net_if_addrs().values() for address in listed]
    return [ip for ip in map(_try_parse_ip, found) if ip is not None]


def _try_parse_ip(text: str) -> _IpAddress | None:
    """Ignores the zone; an IPv4-mapped IPv6 address becomes the IPv4 address."""
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:  # an Ethernet address
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _address_of_joined_cluster(state_dir: Path) -> tuple[str, int] | None:
    """The address of a cluster that this machine has joined, except one that it hosted itself."""
    from genie.agent.identity import (
        AGENTS_DIR,
        read_controller_addresses,
    )  # imported here: only needed for an error

    own_pin = _read_ca_pin(state_dir / OWNER_TOKEN_FILE)
    for path in sorted((state_dir / AGENTS_DIR).glob("*/node.token")):
        if own_pin is not None and _read_ca_pin(path) == own_pin:
            continue
        try:
            return read_controller_addresses(path.parent)[0]
        except (GenieError, IndexError):
            continue
    return None


def _read_ca_pin(path: Path) -> str | None:
    """The pin of a token, which identifies its cluster; None if the file cannot be read."""
    try:
        return parse_token(files.read_small_file(path)).pin
    except (OSError, UnicodeDecodeError, GenieError):
        return None
