"""Limits on the connections of a server, checked before the TLS handshake.

Each accepted socket counts, in total and by address, until its peer has authenticated itself. Silent peers
and failed handshakes therefore exhaust neither file descriptors nor CPU time. Limits per token are in
controller/connection.py. Pure: time is an argument.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from genie.tenancy.rate_limits import RateLimits

CONNECTIONS_MAX = 16384
CONNECTIONS_WARNING_THRESHOLD = 4096
"""A server that may open fewer connections reports it."""
_RESERVED_FILE_DESCRIPTORS = 256
"""File descriptors of a server for everything but connections."""
HANDSHAKES_PER_S = 200.0
"""From one address."""
HANDSHAKES_BURST = 1000.0
UNAUTHENTICATED_GRACE_S = 1.0
"""A connection that is not authenticated after this time may be replaced by a new one."""
_TRACKED_ADDRESSES_MAX = 4096


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`unauthenticated_max` connections remain available to new peers and `owner_connections_reserved` to the
    owner. Nodes and users share the rest; `user_connections_max` is the limit of all users together."""

    connections_max: int
    unauthenticated_max: int
    unauthenticated_per_address_max: int
    user_connections_max: int
    owner_connections_reserved: int
    handshakes_per_s: float = HANDSHAKES_PER_S
    handshakes_burst: float = HANDSHAKES_BURST

    @classmethod
    def for_open_file_limit(cls, files: int) -> ConnectionLimits:
        """The limits of a process that may open this number of files."""
        connections = max(min(CONNECTIONS_MAX, files - _RESERVED_FILE_DESCRIPTORS), 64)
        unauthenticated = min(1024, connections // 4)
        return cls(
            connections_max=connections,
            unauthenticated_max=unauthenticated,
            unauthenticated_per_address_max=min(128, unauthenticated // 2),
            user_connections_max=connections // 2,
            owner_connections_reserved=min(64, connections // 16),
        )

    @property
    def tenant_connections_max(self) -> int:
        """Of all users of one tenant, so that one tenant cannot use all connections of users."""
        return max(self.user_connections_max // 2, 1)

    @property
    def authenticated_max(self) -> int:
        """Of nodes and users together."""
        return self.connections_max - self.unauthenticated_max - self.owner_connections_reserved


def open_file_limit_for(connections: int) -> int:
    """The limit on open files with which a server can have this number of connections."""
    return connections + _RESERVED_FILE_DESCRIPTORS


class OpenConnection:
    """One accepted connection. Released once, when its socket is closed."""

    __slots__ = ("_limiter", "accepted_at_s", "address", "close", "is_authenticated")

    def __init__(
        self, limiter: ConnectionLimiter, address: str, *, accepted_at_s: float, close: Callable[[], None]
    ) -> None:
        self._limiter = limiter
        self.address = address
        self.accepted_at_s = accepted_at_s
        self.close = close
        self.is_authenticated = False

    def set_authenticated(self) -> None:
        self.is_authenticated = True
        self._limiter.remove_unauthenticated(self)

    def release(self) -> None:
        self._limiter.release(self)


class ConnectionLimiter:
    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.open_count = 0
        self.unauthenticated_count = 0
        self._unauthenticated_by_address: dict[str, dict[OpenConnection, None]] = {}
        """Unauthenticated connections by address, oldest first."""
        self._handshake_rates = RateLimits(
            units_per_s=limits.handshakes_per_s,
            burst_units=limits.handshakes_burst,
            keys_max=_TRACKED_ADDRESSES_MAX,
        )

    def accept(self, host: str, *, now_s: float, close: Callable[[], None]) -> OpenConnection | str:
        """Returns the connection, or why it is rejected. `close` is called when another peer replaces it."""
        limits, address = self.limits, address_rate_limit_key(host)
        if self.open_count >= limits.connections_max:
            return f"the limit of {limits.connections_max} open connections is reached"
        replaced: OpenConnection | None = None
        if len(self._unauthenticated_by_address.get(address, ())) >= limits.unauthenticated_per_address_max:
            replaced = self._find_replaceable_connection(address, now_s)
            if replaced is None:
                return f"the limit of unauthenticated connections of {address} is reached"
        elif self.unauthenticated_count >= limits.unauthenticated_max:
            largest = max(
                self._unauthenticated_by_address, key=lambda each: len(self._unauthenticated_by_address[each])
            )
            replaced = self._find_replaceable_connection(largest, now_s)
            if replaced is None:
                return f"the limit of {limits.unauthenticated_max} unauthenticated connections is reached"
        # Last: a rejected connection costs no handshake. Many nodes behind one address retry at once.
        if self._handshake_rates.get_limit(address, now_s=now_s).take_units_or_get_wait_s(1.0, now_s=now_s):
            return (
                f"the limit of {limits.handshakes_per_s:g} new connections per second of {address} is reached"
            )
        if replaced is not None:
            self.remove_unauthenticated(replaced)
            replaced.close()
        connection = OpenConnection(self, address, accepted_at_s=now_s, close=close)
        self.open_count += 1
        self.unauthenticated_count += 1
        self._unauthenticated_by_address.setdefault(address, {})[connection] = None
        return connection

    def remove_unauthenticated(self, connection: OpenConnection) -> None:
        group = self._unauthenticated_by_address.get(connection.address, {})
        if connection in group:
            del group[connection]
            self.unauthenticated_count -= 1
            if not group:
                del self._unauthenticated_by_address[connection.address]

    def release(self, connection: OpenConnection) -> None:
        self.remove_unauthenticated(connection)
        self.open_count -= 1

    def _find_replaceable_connection(self, address: str, now_s: float) -> OpenConnection | None:
        """The oldest unauthenticated connection of an address, unless it may be in its handshake."""
        oldest = next(iter(self._unauthenticated_by_address[address]))
        return oldest if now_s - oldest.accepted_at_s >= UNAUTHENTICATED_GRACE_S else None


@functools.lru_cache(maxsize=_TRACKED_ADDRESSES_MAX)
def address_rate_limit_key(host: str) -> str:
    """The address, or for IPv6 its /64 network, which usually belongs to one machine or customer."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
