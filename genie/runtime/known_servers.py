"""The controllers of one cluster that a client knows: in memory with their last failures, and in a file.

    STATE/servers/PIN.json         addresses of all controllers of the cluster with this CA; no secrets
    STATE/servers/PIN.generation   the highest generation of the cluster that a server has reported

The pin of the token names the file, so an address never leads to another cluster: TLS rejects its server. A
cluster without TLS has no pin and no file, and of its controllers only those on this machine are used. Does
not connect (controller_connection.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from genie.errors import (
    GenieError,
    NothingListensError,
    NotLeaderError,
    StoreError,
    StoreUnavailableError,
    UnreachableError,
    UsageError,
)
from genie.model.names import address_text, is_loopback, parse_endpoint
from genie.processes import files
from genie.tenancy.access import NO_PIN

SERVERS_MAX = 16
_KNOWN_SERVERS_FOLDER = "servers"

Address = tuple[str, int]


def read_known_servers(state_dir: Path, pin: str) -> tuple[Address, ...]:
    """The stored addresses; empty if there are none or the file cannot be read: it is only a cache."""
    if pin == NO_PIN:
        return ()
    try:
        stored = json.loads(files.read_small_file(_known_servers_path(state_dir, pin)))
        return tuple(parse_endpoint(str(text)) for text in stored[:SERVERS_MAX])
    except (OSError, ValueError, TypeError, KeyError, RecursionError, UsageError):
        return ()


def store_known_servers(state_dir: Path, pin: str, servers: tuple[Address, ...]) -> None:
    """Replaces the stored addresses if they differ. Blocks. One server alone is not stored: commands know it
    already."""
    servers = servers[:SERVERS_MAX]
    path = _known_servers_path(state_dir, pin)
    if pin == NO_PIN or (len(servers) < 2 and not path.exists()):
        return
    if read_known_servers(state_dir, pin) != servers:
        body = json.dumps([address_text(*server) for server in servers])
        files.write_private(path, body.encode())


def read_generation(state_dir: Path, pin: str) -> int:
    """The highest stored generation; 0 if there is none or the file cannot be read."""
    if pin == NO_PIN:
        return 0
    try:
        text = files.read_small_file(generation_path(state_dir, pin)).strip()
        return int(text) if text.isascii() and text.isdecimal() else 0
    except (OSError, ValueError):
        return 0


def store_generation(state_dir: Path, pin: str, generation: int) -> None:
    """Stores the generation if it is higher than the stored one. Blocks."""
    if pin != NO_PIN and generation > read_generation(state_dir, pin):
        files.write_private(generation_path(state_dir, pin), f"{generation}\n".encode())


class ServerList:
    """The controllers that one connection may use, at most SERVERS_MAX, and why each last failed.

    `now_s` is the time of the event loop of the connection.
    """

    def __init__(self, given: Address, others: Iterable[Address], *, has_tls: bool) -> None:
        self.given = given
        """The configured address."""
        self.current = given
        """The server in use, or that was used last."""
        self._has_tls = has_tls
        self._servers: tuple[Address, ...] = (given,)
        self._announced_servers: tuple[Address, ...] = ()
        self._server_to_try_first: Address | None = None
        self._last_failure_by_server: dict[Address, tuple[float, GenieError]] = {}
        self._add(others)

    def __len__(self) -> int:
        return len(self._servers)

    @property
    def announced(self) -> tuple[Address, ...]:
        """The controllers that the cluster announced last, in a stable order."""
        return self._announced_servers

    def add_announced(self, controllers: Iterable[str]) -> None:
        """Adds the addresses that a controller announced. Removes none; ignores those that are invalid."""
        found = [address for text in controllers if (address := _try_parse_address(text)) is not None]
        if found:
            self._announced_servers = tuple(sorted(found)[:SERVERS_MAX])
            self._add(found)

    def list_in_connect_order(self) -> list[Address]:
        """All servers, the preferred one first, then by the time of their last failure."""
        failed_s = {server: failure[0] for server, failure in self._last_failure_by_server.items()}
        order = sorted(self._servers, key=lambda server: failed_s.get(server, -1.0))
        if self._server_to_try_first in order:
            order.remove(self._server_to_try_first)
            order.insert(0, self._server_to_try_first)
        return order

    def list_leader_candidates(
        self, leader: str, *, failed_before_s: float, named_failed_before_s: float
    ) -> list[Address]:
        """Other servers than the current one that have not failed since: that of `leader` first, for which
        the second time applies."""
        named = _try_parse_address(leader) if leader else None
        if named is not None:
            self._add([named])
        candidates = [
            server
            for server in self._servers
            if server != self.current
            and (
                server not in self._last_failure_by_server
                or self._last_failure_by_server[server][0]
                < (named_failed_before_s if server == named else failed_before_s)
            )
        ]
        return sorted(candidates, key=lambda server: server != named)

    def try_server_first_next(self, server: Address) -> None:
        """The next connection tries this server first."""
        self._server_to_try_first = server

    def record_connected(self, server: Address) -> None:
        self.current, self._server_to_try_first = server, None
        self._last_failure_by_server.pop(server, None)

    def record_failure(self, server: Address, error: GenieError, *, now_s: float) -> None:
        self._last_failure_by_server[server] = (now_s, error)
        if self._server_to_try_first == server:
            self._server_to_try_first = None

    def error_naming_all_failed_servers(self, error: GenieError) -> GenieError:
        """`error`, or, if there are several servers, one that names every server that failed."""
        if len(self._servers) == 1 or not self._last_failure_by_server:
            return error
        failures = [
            self._last_failure_by_server[server][1]
            for server in self._servers
            if server in self._last_failure_by_server
        ]
        kind = type(error) if isinstance(error, NotLeaderError | StoreError) else UnreachableError
        if all(isinstance(failure, NothingListensError) for failure in failures):
            kind = NothingListensError
        reasons = "; ".join(
            _with_server_address(self._last_failure_by_server[server][1].message, server)
            for server in self._servers
            if server in self._last_failure_by_server
        )
        if kind in (NotLeaderError, StoreUnavailableError):
            return kind(
                f"no leader of the cluster was found: {reasons}",
                hint="'genie status --address HOST:PORT' of a server shows why; with etcd run by Genie, also "
                "'genie etcd status' on a server",
            )
        return kind(
            f"no controller of the cluster accepted the request: {reasons}",
            hint="check the network and the machines of the controllers; "
            "'genie status --address HOST:PORT' shows the state of one",
        )

    def _add(self, servers: Iterable[Address]) -> None:
        usable = (server for server in servers if self._has_tls or is_loopback(server[0]))
        self._servers = tuple(dict.fromkeys((*self._servers, *usable)))[:SERVERS_MAX]


def _with_server_address(message: str, server: Address) -> str:
    where = address_text(*server)
    return message if where in message else f"{where}: {message}"


def _try_parse_address(text: str) -> Address | None:
    try:
        return parse_endpoint(text)
    except UsageError:
        return None


def generation_path(state_dir: Path, pin: str) -> Path:
    """The file of the highest generation of this cluster."""
    return state_dir / _KNOWN_SERVERS_FOLDER / f"{pin}.generation"


def _known_servers_path(state_dir: Path, pin: str) -> Path:
    return state_dir / _KNOWN_SERVERS_FOLDER / f"{pin}.json"
