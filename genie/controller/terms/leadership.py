"""Alternates between standing by and leading: campaigns, leads a term, and campaigns again.

Losing the store ends the term. What must be true before a term is in campaign.py, what happens during one in
leader_work.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from genie.config import ControllerConfig
from genie.controller.blobs.replication import BlobReplication
from genie.controller.change_notifier import wait_event
from genie.controller.election import Election, LeaderRecord, StoreHealth
from genie.controller.ledger import Ledger, Transaction
from genie.controller.nodes.agents import Agents
from genie.controller.nodes.releases import ServerReleases
from genie.controller.rows import ClusterRecord
from genie.controller.standby.requests import StandbyRequests
from genie.controller.store_monitor import StoreMonitor
from genie.controller.terms.campaign import Campaign
from genie.controller.terms.leader_work import LeaderWork
from genie.controller.tokens import TokenRegistry
from genie.errors import LeadershipError, StoreError
from genie.model.failover import campaign_interval_s
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

_CAMPAIGN_SPREAD_S = 0.05
"""Standbys campaign within this time after the leader key is deleted, at random: the first one wins, and the
others need not write."""


class Leadership:
    """`ready_event` is set as soon as this controller knows whether it leads. `leader_lost_event` is set by a
    watch when the leader key is deleted; a watch can be lost, so the key is also polled. `ca_pin` is that of
    the CA of this controller."""

    def __init__(
        self,
        config: ControllerConfig,
        *,
        name: str,
        state_dir: Path,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        election: Election,
        health: StoreHealth,
        campaign: Campaign,
        ledger: Ledger,
        tokens: TokenRegistry,
        agents: Agents,
        releases: ServerReleases,
        standby_requests: StandbyRequests,
        store_monitor: StoreMonitor,
        leader_work: LeaderWork,
        blob_replication: BlobReplication,
        ready_event: asyncio.Event,
        leader_lost_event: asyncio.Event,
        ca_pin: str,
        write_local_access_files: Callable[[], Awaitable[None]],
    ) -> None:
        self._leader_ttl_s = config.leader_ttl_s
        self._controller_name = name
        self._state_dir = state_dir
        self._clock = clock
        self._random_bytes = random_bytes
        self._election = election
        self._store_health = health
        self._campaign = campaign
        self._ledger = ledger
        self._tokens = tokens
        self._agents = agents
        self._releases = releases
        self._standby_requests = standby_requests
        self._store_monitor = store_monitor
        self._leader_work = leader_work
        self._blob_replication = blob_replication
        self._ready_event = ready_event
        self._leader_lost_event = leader_lost_event
        self._ca_pin = ca_pin
        self._write_local_access_files = write_local_access_files
        self._has_term_begun = False
        self._logged_leader: LeaderRecord | None = None

    async def campaign_and_lead_forever(self) -> None:
        """Campaign, lead a term, and campaign again, until cancelled."""
        was_leader_lost = False
        while True:
            self._leader_lost_event.clear()
            has_won = await self._campaign.try_win_election(was_leader_lost=was_leader_lost)
            if has_won and await self._lead_one_term():
                was_leader_lost = False
                continue
            other = self._election.leader
            if self._store_health.is_ok and other is not None and other.name != self._controller_name:
                self._ledger.mark_outdated()
                self._log_new_leader(other)
                self._standby_requests.follow(other.address)
                await self._write_local_access_files()
            self._ready_event.set()
            if self._store_health.is_full:
                await self._store_monitor.compact_full_store()
            was_leader_lost = await self._wait_to_campaign_again(has_failed_to_lead=has_won)

    async def _wait_to_campaign_again(self, *, has_failed_to_lead: bool) -> bool:
        """Wait until the leader key is deleted, but no longer than the campaign interval; return whether it
        was. A controller that has failed to lead always waits: it has deleted the key itself."""
        interval_s = campaign_interval_s(self._leader_ttl_s)
        if has_failed_to_lead:
            await self._clock.sleep(interval_s)
            return False
        if not await wait_event(self._leader_lost_event, clock=self._clock, timeout_s=interval_s):
            return False
        _log.info("the leader has resigned or its lease has expired: trying to lead")
        self._logged_leader = None
        await self._clock.sleep(_CAMPAIGN_SPREAD_S * self._random_bytes(1)[0] / 256)
        return True

    def _log_new_leader(self, leader: LeaderRecord) -> None:
        if leader != self._logged_leader:
            self._logged_leader = leader
            _log.info("standby: controller %s at %s leads", leader.name, leader.address)

    async def _try_begin_term(self) -> bool:
        try:
            await self._releases.refresh()
            await self._ledger.load_tables()
            await self._store_cluster_record()
            await self._tokens.ensure_owner_token(self._state_dir)
            await self._agents.begin_term()
        except (StoreError, LeadershipError) as error:
            if (unreadable := self._ledger.unreadable_required_row) is not None:
                self._campaign.obstacle.set_error(error, unreadable)
            else:
                self._campaign.record_failure(error)
            return False
        self._logged_leader = None
        _log.info("became leader, fencing token %d", self._election.fencing_token)
        return True

    async def _store_cluster_record(self) -> None:
        """Create the cluster's ID in the first term; record the current CA."""
        pin = self._ca_pin
        record = self._ledger.cluster.get("")
        if record is None:
            record = ClusterRecord(cluster_id=self._random_bytes(8).hex(), ca_pin=pin)
        elif record.ca_pin == pin:
            return
        record = msgspec.structs.replace(record, ca_pin=pin)

        def build(txn: Transaction) -> None:
            txn.put(self._ledger.cluster, "", record)

        await self._ledger.write(build)

    async def _lead_one_term(self) -> bool:
        """Lead until the lease is lost; False if the term could not begin. The lease is renewed from the
        start, because reading the tables may take longer than the lease lasts."""
        self._has_term_begun = False
        async with asyncio.TaskGroup() as group:
            term = group.create_task(self._run_term(), name="term")
            await self._election.hold_leadership_until_term_ends()
            term.cancel()
        if self._has_term_begun:
            ended_at_s = self._clock.monotonic_s() - self._election.since_leading_s
            self._standby_requests.follow_from_ended_term(self._ledger, ended_at_s=ended_at_s)
        return self._has_term_begun

    async def _run_term(self) -> None:
        if not await self._try_begin_term():
            await self._election.resign()
            return
        self._has_term_begun = True
        self._standby_requests.stop_following()
        await self._write_local_access_files()
        self._ready_event.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._leader_work.run(), name="work of the leader")
            group.create_task(self._blob_replication.run(), name="blob replication")
