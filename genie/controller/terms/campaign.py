"""Campaigning for leadership: what must be true before this controller may acquire the leader key.

Its release must work with those of the other servers, its CA must be that of the cluster, agents must know
its address, and no copy of it may be running. The key and its lease are in election.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from genie.controller.election import ControllerAddresses, Election, StoreHealth
from genie.controller.ledger import read_cluster_record
from genie.controller.nodes.admission import Certificates
from genie.controller.nodes.releases import ServerReleases
from genie.controller.rows import ClusterRecord
from genie.controller.store import Store
from genie.controller.terms.leadership_obstacle import LeadershipObstacle
from genie.errors import (
    GenieError,
    LeadershipError,
    ReleaseSkewError,
    StoreCorruptError,
    StoreError,
    StoreVersionError,
    TlsError,
)

_log = logging.getLogger(__name__)


class Campaign:
    """`obstacle`: what prevents this controller from leading; a term that cannot begin records it there."""

    def __init__(
        self,
        store: Store,
        election: Election,
        health: StoreHealth,
        *,
        addresses: ControllerAddresses,
        releases: ServerReleases,
        certificates: Certificates,
        state_dir: Path,
        get_own_address: Callable[[], str],
    ) -> None:
        self.obstacle = LeadershipObstacle(store)
        self._store = store
        self._election = election
        self._store_health = health
        self._addresses = addresses
        self._releases = releases
        self._certificates = certificates
        self._state_dir = state_dir
        self._get_own_address = get_own_address
        self._is_announced = False
        """Whether agents and the other servers knew this controller at the last attempt."""

    async def try_win_election(self, *, was_leader_lost: bool) -> bool:
        """Acquire the leader key if this controller may lead; False if another one leads or it may not.
        `was_leader_lost`: the key was just deleted, so what the last attempt announced is still valid."""
        try:
            try:
                return await self._announce_and_campaign(was_leader_lost=was_leader_lost)
            except (ReleaseSkewError, StoreCorruptError, StoreVersionError) as error:
                self.obstacle.set_error(error)
                with contextlib.suppress(StoreCorruptError):  # perhaps that of the leader key, which is set
                    await self._election.read_leader()  # to follow it
                await self._addresses.refresh()
                return False
        except (StoreError, LeadershipError) as error:
            self.record_failure(error)
            return False

    async def _announce_and_campaign(self, *, was_leader_lost: bool) -> bool:
        """Raise ReleaseSkewError if only servers of other releases can lead."""
        unreadable: StoreVersionError | None = None
        record: ClusterRecord | None = None
        try:
            record = await self._read_cluster_record()
        except StoreVersionError as error:
            unreadable = error
        must_announce = not (was_leader_lost and self._is_announced)
        self._is_announced = False
        if must_announce:
            if await self._election.has_duplicate_controller():
                return False  # and do not replace its address
            await self._releases.announce(self._get_own_address())
        if unreadable is not None:
            raise ReleaseSkewError(unreadable.message, hint=unreadable.hint)
        await self.obstacle.check_row_has_changed()
        if must_announce:
            await self._addresses.register()
        self._is_announced = True
        has_won = await self._election.try_win_election(
            self._get_own_address(), generation=record.generation if record else 0
        )
        self.obstacle.clear()
        return has_won

    def record_failure(self, error: GenieError) -> None:
        """Log why a term could not begin."""
        if isinstance(error, StoreError):
            self._store_health.record_failure(error)  # which logs it once
        else:
            _log.warning("cannot become leader: %s", error)

    async def _read_cluster_record(self) -> ClusterRecord | None:
        """Return the record of the cluster; None in an empty store.

        Raise TlsError if this controller's CA is not that of the cluster: nodes would reject it."""
        record = await read_cluster_record(self._store)
        if (
            record is not None
            and self._certificates.are_enabled
            and record.ca_pin not in (self._certificates.pin, "-")
        ):
            raise TlsError(
                "the CA of this controller differs from that of the cluster in its store",
                hint=f"copy controller/ca.pem, controller/ca.key and owner.token from the state directory of "
                f"the first controller to {self._state_dir}",
            )
        return record
