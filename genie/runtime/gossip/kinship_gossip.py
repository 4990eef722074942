"""Gossip with the library kinship: SWIM with Lifeguard, encrypted, on a thread of the library.

Uses the blocking interface of kinship on threads of its own. With the asyncio interface, version 0.4.0 calls
into Python from the thread of the library, which aborts some processes while the interpreter exits.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from genie.config import GossipConfig
from genie.errors import AddressInUseError, ConfigError, GossipError
from genie.model.member import Member, MemberRole, MemberState
from genie.model.names import address_text, is_loopback
from genie.processes.clock import Clock
from genie.runtime.credentials import is_wildcard
from genie.runtime.gossip.member_table import MemberTable
from genie.runtime.gossip.protocol import (
    GossipIdentity,
    GossipSupport,
    controller_address_in_metadata,
    machine_name_in_metadata,
    parse_gossip_name,
    release_in_metadata,
)

if TYPE_CHECKING:
    import kinship
    import kinship.blocking

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

PROBE_INTERVAL_S = 0.5
"""Half of the default of kinship: a suspicion takes 0.5 to 1.5 s (benchmarks/bench_gossip.py)."""
PROBE_TIMEOUT_S = 0.25
_ADDRESS_RECLAIM_S = 5.0
"""After this time, a member that was declared dead may return with another address."""
_CALL_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 1.5
_EVENT_WAIT_S = 1.0
_ADDRESS_IN_USE_TEXT = "Address already in use"  # the library sets no errno
_CLUSTER_LABEL = "genie"
_MEMBERS_OF_LIBRARY_MAX = 4096


def why_kinship_is_missing() -> str:
    """Why gossip is not possible on this machine; empty if it is."""
    try:
        importlib.import_module("kinship.blocking")
    except ImportError as error:
        return f"the package kinship cannot be imported ({error}); pip install 'genie-gpu[gossip]'"
    return ""


class KinshipGossip:
    """Implements Gossip. `host` is the address to bind, `advertised_host` the one for other members if that
    is another one; host names are resolved at the start. Port 0 selects a free port."""

    def __init__(
        self, identity: GossipIdentity, *, host: str, port: int, clock: Clock, advertised_host: str = ""
    ) -> None:
        self._identity = identity
        self._host = host
        self._port = port
        self._advertised_host = advertised_host
        self._clock = clock
        self._table = MemberTable()
        self._listeners: list[Callable[[], None]] = []
        self._cluster: kinship.blocking.Cluster | None = None
        self._keys: list[bytes] = []
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="genie-gossip-call")
        self._event_thread: threading.Thread | None = None
        self._is_stopping = threading.Event()
        self._is_refresh_pending = False
        self._has_failed = False
        self._conflicting_names: set[str] = set()

    @property
    def address(self) -> str:
        return "" if self._cluster is None else self._cluster.local.addr

    @property
    def is_running(self) -> bool:
        return self._cluster is not None and not self._has_failed

    def members(self) -> tuple[Member, ...]:
        return self._table.sorted_members()

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def start(self, keys: Sequence[bytes]) -> None:
        self._check_encrypted_or_loopback(keys)
        try:
            self._cluster = await self._call(partial(self._start_cluster, list(keys)))
            self._keys = list(keys)
        except OSError as error:
            where = address_text(self._host, self._port)
            if error.errno == errno.EADDRINUSE or _ADDRESS_IN_USE_TEXT in str(error):
                raise AddressInUseError(
                    f"gossip cannot listen on {where}: the port is in use",
                    hint="set GENIE_GOSSIP_SERVER_PORT or GENIE_GOSSIP_NODE_PORT to another port",
                ) from error
            raise GossipError(f"gossip cannot listen on {where}: {error}") from error
        loop = asyncio.get_running_loop()
        stream = self._cluster.events(timeout=_EVENT_WAIT_S)
        self._refresh_members()
        self._event_thread = threading.Thread(
            target=self._read_events, args=(stream, loop), name="genie-gossip-events"
        )
        self._event_thread.start()

    async def stop(self, *, leave: bool) -> None:
        if self._is_stopping.is_set():
            return
        self._is_stopping.set()
        cluster, self._cluster = self._cluster, None
        try:
            if cluster is not None and leave:
                await self._call(partial(_close_cluster, cluster))
            del cluster  # without leave: the library closes its sockets
            if self._event_thread is not None:
                await self._call(self._event_thread.join)
        finally:
            self._calls.shutdown(wait=False)

    async def join(self, seeds: Sequence[str]) -> int:
        from kinship import JoinError

        cluster = self._require_cluster()
        try:
            return await self._call(partial(cluster.join, list(seeds), timeout=_CALL_TIMEOUT_S))
        except (JoinError, GossipError):
            return 0

    async def use_keys(self, keys: Sequence[bytes]) -> None:
        keyring, wanted = self._require_cluster().keyring, list(keys)

        def replace_keys() -> None:
            """Other members may use any of the keys meanwhile, so none is missing at any time."""
            for key in wanted:
                keyring.install(key, timeout=_CALL_TIMEOUT_S)
            keyring.use(wanted[0], timeout=_CALL_TIMEOUT_S)
            for key in self._keys:
                if key not in wanted:
                    keyring.remove(key, timeout=_CALL_TIMEOUT_S)

        if wanted and wanted != self._keys:
            await self._call(replace_keys)
            self._keys = wanted

    # --- the library ------------------------------------------------------------------------

    async def _call(self, work: Callable[[], _Result]) -> _Result:
        """Runs a call of the library, one at a time. Raises GossipError for its errors."""
        from kinship import JoinError, KinshipError

        try:
            return await asyncio.get_running_loop().run_in_executor(self._calls, work)
        except JoinError:
            raise
        except (KinshipError, TimeoutError) as error:
            raise GossipError(f"gossip failed: {error!r}") from error

    def _require_cluster(self) -> kinship.blocking.Cluster:
        if self._cluster is None:
            raise GossipError("gossip is not running")
        return self._cluster

    def _check_encrypted_or_loopback(self, keys: Sequence[bytes]) -> None:
        if not keys and not is_loopback(self._host):
            raise ConfigError(
                f"gossip on {self._host} without a key would be readable and forgeable by others",
                hint="start the cluster with TLS (the default), or set GENIE_GOSSIP_ENABLED=off",
            )

    def _start_cluster(self, keys: list[bytes]) -> kinship.blocking.Cluster:
        import kinship
        import kinship.blocking

        host = _resolve_host(self._host)
        port = self._port
        advertise: str | None = None
        if self._advertised_host and self._advertised_host != self._host:
            port = port or _find_free_port(host)
            advertise = address_text(_resolve_host(self._advertised_host), port)
        settings = kinship.Config.lan(
            name=self._identity.gossip_name,
            bind=address_text(host, port),
            advertise=advertise,
            cluster=_CLUSTER_LABEL,
            meta=self._identity.metadata,
            keys=keys,
            insecure_plaintext=not keys,
            probe_interval=PROBE_INTERVAL_S,
            probe_timeout=PROBE_TIMEOUT_S,
            dead_reclaim=_ADDRESS_RECLAIM_S,
            max_members=_MEMBERS_OF_LIBRARY_MAX,
        )
        return kinship.blocking.Cluster(settings).start(timeout=_CALL_TIMEOUT_S)

    def _read_events(self, stream: kinship.blocking.EventStream, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on its own thread. An event only triggers reading the members, so none is queued."""
        import kinship

        try:
            for event in stream:
                if self._is_stopping.is_set():
                    return
                if isinstance(event, kinship.NameConflict):
                    self._log_name_conflict_once(event)
                if event is not None and not self._is_refresh_pending:
                    self._is_refresh_pending = True
                    loop.call_soon_threadsafe(self._refresh_members)
        except kinship.KinshipClosed as error:
            self._has_failed = True
            _log.warning("gossip has stopped: %s", error)
        except RuntimeError:
            if not loop.is_closed():
                raise

    def _log_name_conflict_once(self, event: kinship.NameConflict) -> None:
        name = event.member.name
        if name not in self._conflicting_names and len(self._conflicting_names) < _MEMBERS_OF_LIBRARY_MAX:
            self._conflicting_names.add(name)
            _log.warning(
                "gossip: %r at %s is ignored, because that name has the address %s",
                name,
                event.other_addr,
                event.member.addr,
            )

    def _refresh_members(self) -> None:
        self._is_refresh_pending = False
        cluster = self._cluster
        if cluster is None:
            return
        found = [member for each in cluster.members() if (member := _convert_member(each)) is not None]
        present = {member.key for member in found}
        for key in self._table.known_keys():
            gone = None if key in present else cluster.member(_gossip_name(*key))
            if gone is not None and (member := _convert_member(gone)) is not None:
                found.append(member)
        if self._table.update(found, now=self._clock.wall_s()):
            for listener in self._listeners:
                listener()


def find_kinship_support(
    config: GossipConfig, *, host: str, port: int, advertised_host: str, clock: Clock
) -> GossipSupport:
    """Support for gossip with kinship, unless it is disabled or not installed. `port`: 0 selects a free one,
    preferably that of the last start."""
    if config.enabled == "off":
        return GossipSupport(
            off_reason="it is disabled on this machine (gossip.enabled = off)", is_disabled=True
        )
    if reason := why_kinship_is_missing():
        return GossipSupport(off_reason=reason)

    def make_gossip(identity: GossipIdentity, last_port: int) -> KinshipGossip:
        return KinshipGossip(
            identity, host=host, port=port or last_port, advertised_host=advertised_host, clock=clock
        )

    return GossipSupport(make_gossip, "")


def _convert_member(found: kinship.Member) -> Member | None:
    """The member as Genie describes it; None for one that Genie did not start."""
    parsed = parse_gossip_name(found.name)
    if parsed is None:
        return None
    role, name = parsed
    return Member(
        name=name,
        role=role,
        address=found.addr,
        state=MemberState[found.state.name],
        since=0.0,
        release=release_in_metadata(found.meta),
        controller_address=controller_address_in_metadata(found.meta) if role is MemberRole.SERVER else "",
        machine_name=machine_name_in_metadata(found.meta) if role is MemberRole.SERVER else "",
    )


def _gossip_name(role: MemberRole, name: str) -> str:
    return GossipIdentity(name=name, role=role, release="").gossip_name


def _close_cluster(cluster: kinship.blocking.Cluster) -> None:
    cluster.close(timeout=_LEAVE_TIMEOUT_S)


def _resolve_host(host: str) -> str:
    """The IP address of a host name. Blocks. Raises GossipError."""
    if is_wildcard(host):
        return "::" if ":" in host else "0.0.0.0"  # noqa: S104 - the user's choice for the controller
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise GossipError(f"gossip cannot resolve {host}: {error}") from error


def _find_free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
