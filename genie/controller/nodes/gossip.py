"""Gossip on a server: settings for itself and for nodes, and suspicion of nodes.

Gossip marks nodes as suspect earlier than missing heartbeats alone (membership.py). It never frees an
accelerator and never ends a job.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import msgspec

from genie.controller.connection import Connection, Handlers
from genie.controller.ledger import Ledger, Transaction, read_cluster_record
from genie.controller.nodes import gossip_keys
from genie.controller.nodes.admission import Certificates
from genie.controller.nodes.membership import Membership
from genie.controller.rows import ClusterRecord
from genie.controller.store import Store
from genie.errors import GossipError
from genie.model.member import MemberRole, MemberState
from genie.model.messages import GetGossipSettings, GossipSettings, MembersReply
from genie.model.names import address_text, parse_endpoint
from genie.processes.clock import Clock
from genie.processes.tasks import Offload
from genie.runtime.gossip.participant import GossipParticipant
from genie.runtime.gossip.protocol import GossipIdentity, GossipSupport
from genie.version import __version__

_UNRESPONSIVE_STATES = (MemberState.SUSPECT, MemberState.DEAD)


class ServerGossip:
    """`own_address` and `controllers` are HOST:PORT of this controller and of all; `server_port` is the port
    of gossip on all servers."""

    def __init__(
        self,
        support: GossipSupport,
        *,
        name: str,
        store: Store,
        ledger: Ledger,
        certificates: Certificates,
        membership: Membership,
        clock: Clock,
        offload: Offload,
        directory: Path,
        server_port: int,
        own_address: Callable[[], str],
        controllers: Callable[[], tuple[str, ...]],
    ) -> None:
        self._name = name
        self._is_disabled = support.is_disabled
        self._machine_name = support.machine_name
        self._store = store
        self._ledger = ledger
        self._certificates = certificates
        self._membership = membership
        self._clock = clock
        self._server_port = server_port
        self._get_own_address = own_address
        self._get_controllers = controllers
        self._participant = GossipParticipant(
            support=support,
            identity=self._make_identity,
            fetch_settings=self._fetch_settings,
            directory=directory,
            clock=clock,
            offload=offload,
        )
        self._participant.add_listener(self._update_suspicions)

    def handlers(self) -> Handlers:
        return {GetGossipSettings: self.get_gossip_settings}

    async def run(self) -> None:
        """Take part until cancelled."""
        await self._participant.run()

    async def get_gossip_settings(self, connection: Connection, request: GetGossipSettings) -> GossipSettings:
        """Return what a node needs to take part. The keys are for nodes only, which have authenticated.

        Raise GossipError while this server cannot take part: that says nothing about the cluster, so nodes go
        on with the settings that they have."""
        own_address, settings = self._participant.address, self._participant.settings
        if self._is_disabled:
            return GossipSettings()
        if not own_address:
            raise GossipError(f"server {self._name} takes no part in gossip: {self._participant.off_reason}")
        return msgspec.structs.replace(settings, seeds=(own_address, *settings.seeds))

    def members_reply(self) -> MembersReply:
        """Return all members as this server knows them."""
        return self._participant.members_reply()

    async def change_key_if_due(self) -> None:
        """Begin a change of the key if a node was removed; only while leading."""
        record = self._ledger.cluster.get("")
        if record is None or not gossip_keys.can_change_key(record, now=self._clock.wall_s()):
            return

        def build(txn: Transaction) -> None:
            current = self._ledger.cluster.get("")
            now = self._clock.wall_s()
            if current is not None and gossip_keys.can_change_key(current, now=now):
                txn.put(self._ledger.cluster, "", gossip_keys.with_next_key(current, now=now))

        await self._ledger.write(build)

    def _make_identity(self) -> GossipIdentity:
        return GossipIdentity(
            name=self._name,
            role=MemberRole.SERVER,
            release=__version__,
            controller_address=self._get_own_address(),
            machine_name=self._machine_name,
        )

    async def _fetch_settings(self) -> GossipSettings:
        record = await read_cluster_record(self._store)
        others = set(self._get_controllers()) - {self._get_own_address()}
        hosts = sorted({parse_endpoint(address)[0] for address in others})
        return GossipSettings(
            is_enabled=True,
            keys=self._derive_keys(record),
            seeds=tuple(address_text(host, self._server_port) for host in hosts if self._server_port),
        )

    def _derive_keys(self, record: ClusterRecord | None) -> tuple[str, ...]:
        record = record or ClusterRecord(cluster_id="", ca_pin="")
        numbers = gossip_keys.current_key_numbers(record, now=self._clock.wall_s())
        secrets = [
            self._certificates.try_derive_secret(
                gossip_keys.gossip_key_purpose(generation=record.generation, number=number)
            )
            for number in numbers
        ]
        return tuple(base64.b64encode(secret).decode() for secret in secrets if secret is not None)

    def _update_suspicions(self) -> None:
        self._membership.set_unresponsive_members(
            {
                member.name: member.state
                for member in self._participant.members()
                if member.role is MemberRole.NODE and member.state in _UNRESPONSIVE_STATES
            },
            now_s=self._clock.monotonic_s(),
        )
