"""Which releases of Genie the servers and nodes run, while they are upgraded one after another.

Each server stores its release. The lowest of them is the release of the cluster: a leader writes no field
that it does not have, so that every server can lead. It follows the servers in both directions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from genie.controller.store import Put, Store
from genie.errors import ReleaseSkewError, VersionError
from genie.model.node import NodeInfo, NodeStatus
from genie.model.record import Facts
from genie.model.release import OWN_RELEASE, Release, parse_release
from genie.processes.clock import Clock
from genie.processes.tasks import Offload, run_inline
from genie.version import __version__

_log = logging.getLogger(__name__)

SERVER_RELEASE_KEY_PREFIX = "release/"
"""Prefix of the keys with the releases of all servers, by name."""
_ANNOUNCE_INTERVAL_S = 3600.0
_ANNOUNCEMENT_VALID_S = 24 * 3600.0
"""A server that has not been running for longer is ignored: it announces its release when it starts."""
_NODES_NAMED_MAX = 3


class ServerRelease(Facts, frozen=True, kw_only=True):
    """The release of one server, as stored."""

    version: str
    address: str
    """HOST:PORT."""
    announced_at: float
    etcd_member: str = ""
    """Name of the member of etcd on its machine; empty if Genie does not manage etcd."""
    owner_token_id: str = ""
    """ID of the owner token on its machine, which is revoked with the server; empty if it is not known."""


class ServerReleases:
    """`set_cluster_release` is called with the lowest release of all servers; `offload` runs
    `get_owner_token_id`."""

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        clock: Clock,
        set_cluster_release: Callable[[Release], None],
        etcd_member: str = "",
        get_owner_token_id: Callable[[], str] = str,
        offload: Offload = run_inline,
    ) -> None:
        self._store = store
        self._etcd_member = etcd_member
        self._get_owner_token_id = get_owner_token_id
        self._offload = offload
        self._key = SERVER_RELEASE_KEY_PREFIX + name
        self._clock = clock
        self._set_cluster_release = set_cluster_release
        self._announced: ServerRelease | None = None
        self._cluster_alarm = ""

    async def announce(self, address: str) -> None:
        """Store the release of this server before it may lead. Raise ReleaseSkewError if another server runs
        one that does not work with it, unless this server is already one of the cluster."""
        now = self._clock.wall_s()
        before = self._announced
        owner_token_id = before.owner_token_id if before else ""
        if not owner_token_id:
            owner_token_id = await self._offload(self._get_owner_token_id)
        if (
            before is not None
            and before.address == address
            and before.owner_token_id == owner_token_id
            and abs(now - before.announced_at) < _ANNOUNCE_INTERVAL_S
        ):
            return
        if before is None:
            await self._check_works_with_other_servers()
        record = ServerRelease(
            version=__version__,
            address=address,
            announced_at=now,
            etcd_member=self._etcd_member,
            owner_token_id=owner_token_id,
        )
        await self._store.commit([], [Put(self._key, msgspec.json.encode(record))])
        self._announced = record

    async def refresh(self) -> None:
        """Read the releases of all servers and set that of the cluster."""
        servers = await self._read_servers()
        lowest = min((release for release, _ in servers), default=OWN_RELEASE)
        self._set_cluster_release(min(lowest, OWN_RELEASE))
        others = [
            f"{server.address} ({server.version})" for release, server in servers if release != OWN_RELEASE
        ]
        alarm = ""
        if others:
            alarm = (
                f"the servers run different releases of Genie: this one {__version__}, {', '.join(others)}; "
                "new features are used when all servers have them: complete the upgrade"
            )
        if alarm and alarm != self._cluster_alarm:
            _log.warning("%s", alarm)
        self._cluster_alarm = alarm

    def alarms(self, nodes: Iterable[NodeInfo]) -> list[str]:
        """What the owner should know: servers and connected nodes with another release than this server."""
        others = sorted(
            f"{node.node_id} ({node.version})"
            for node in nodes
            if node.status is not NodeStatus.DISCONNECTED and is_other_release(node.version)
        )
        alarms = [self._cluster_alarm] if self._cluster_alarm else []
        if others:
            more = f" and {len(others) - _NODES_NAMED_MAX} more" if len(others) > _NODES_NAMED_MAX else ""
            nodes_run = "1 node runs" if len(others) == 1 else f"{len(others)} nodes run"
            alarms.append(
                f"{nodes_run} another release of Genie than this controller ({__version__}): "
                f"{', '.join(others[:_NODES_NAMED_MAX])}{more}; upgrade nodes when all servers are upgraded"
            )
        return alarms

    async def _check_works_with_other_servers(self) -> None:
        for release, server in await self._read_servers():
            if not release.works_with(OWN_RELEASE):
                raise ReleaseSkewError(
                    f"this server runs Genie {__version__}, the server at {server.address} runs "
                    f"{server.version}: these releases do not work together",
                    hint="upgrade or downgrade one minor version at a time, all servers before the next "
                    "step; a server that no longer exists is ignored after a day",
                )

    async def _read_servers(self) -> list[tuple[Release, ServerRelease]]:
        """The other servers and their releases, except those that have not run for a day."""
        found = await self._store.range(SERVER_RELEASE_KEY_PREFIX)
        servers: list[tuple[Release, ServerRelease]] = []
        for item in found.items:
            if item.key == self._key:
                continue
            try:
                server = msgspec.json.decode(item.value, type=ServerRelease)
                release = parse_release(server.version)
            except (msgspec.DecodeError, VersionError) as error:
                _log.warning("ignoring the unreadable release of a server, %s: %s", item.key, error)
                continue
            if abs(self._clock.wall_s() - server.announced_at) < _ANNOUNCEMENT_VALID_S:
                servers.append((release, server))
        return servers


def is_other_release(version: str) -> bool:
    """Whether a node's version is of another release than this one; patch versions do not count."""
    try:
        return parse_release(version) != OWN_RELEASE
    except VersionError:
        return bool(version)
