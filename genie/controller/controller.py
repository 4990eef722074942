"""The controller: builds its parts and runs them.

One TaskGroup runs everything: the server, the ledger's writer, orders to agents, and the loop that campaigns,
leads a term, and campaigns again (terms/). Losing the store ends the term: no decisions are made, reads are
answered from a copy of the ledger (standby/), and running jobs continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from genie.config import ControllerConfig
from genie.controller.blobs.replication import BlobReplication
from genie.controller.blobs.storage import BlobStorage
from genie.controller.change_notifier import ChangeNotifier
from genie.controller.connection import Connections, Handlers, open_file_limit_alarm
from genie.controller.controller_directory import LocalAccessFiles
from genie.controller.election import ControllerAddresses, Election, StoreHealth
from genie.controller.jobs.backoff import LaunchBackoff
from genie.controller.jobs.services import build_job_services
from genie.controller.jobs.sessions import Sessions
from genie.controller.ledger import Ledger
from genie.controller.locks.lock_table import LockTable
from genie.controller.locks.requests import LockRequests
from genie.controller.nodes.admission import Admission, Certificates, advertised_host, local_host
from genie.controller.nodes.agents import Agents
from genie.controller.nodes.drains import NodeDrains
from genie.controller.nodes.faults import NodeFaults
from genie.controller.nodes.gossip import ServerGossip
from genie.controller.nodes.membership import Membership
from genie.controller.nodes.orders import AgentOrders
from genie.controller.nodes.releases import ServerReleases
from genie.controller.nodes.servers import ServerAdmission
from genie.controller.nodes.snapshots import NodeSnapshots
from genie.controller.nodes.unresponsive import UnresponsiveNodes
from genie.controller.placement.launch_queue import LaunchQueue
from genie.controller.placement.pass_runner import PassRunner
from genie.controller.placement.placers import placer_factory
from genie.controller.placement.planner import Planner
from genie.controller.placement.policy import make_configured_policy
from genie.controller.requests.backups import BackupRequests
from genie.controller.requests.blobs import BlobRequests
from genie.controller.requests.jobs import JobReads, JobRequests
from genie.controller.requests.logs import LogRequests
from genie.controller.requests.members import MemberRequests
from genie.controller.requests.nodes import NodeList, NodeRequests, StatusRequests
from genie.controller.requests.open_waits import OpenWaits
from genie.controller.requests.queue import QueueRequests
from genie.controller.requests.quotas import QuotaRequests, QuotaTable
from genie.controller.requests.service import RequestService
from genie.controller.requests.sessions import SessionRequests
from genie.controller.requests.tokens import TokenRequests
from genie.controller.standby.leader_link import LeaderLink
from genie.controller.standby.ledger_copy import LedgerCopy
from genie.controller.standby.requests import StandbyRequests
from genie.controller.store import Store
from genie.controller.store.open import CONTROLLER_DIRECTORY
from genie.controller.store_monitor import StoreMonitor
from genie.controller.terms.campaign import Campaign
from genie.controller.terms.leader_work import LeaderWork
from genie.controller.terms.leadership import Leadership
from genie.controller.tokens import TokenRegistry
from genie.errors import (
    GenieError,
    StoreError,
)
from genie.model.names import address_text
from genie.model.node import NodeStatus
from genie.processes import files
from genie.processes.clock import Clock
from genie.processes.file_limit import get_open_file_limit
from genie.processes.tasks import Offload, first_error, run_inline, unwrapped_task_group
from genie.runtime.credentials import LocalCluster, find_owner_token_id
from genie.runtime.gossip.protocol import GossipSupport
from genie.runtime.network import Network
from genie.scheduler.rules import Rules

_log = logging.getLogger(__name__)

_PLACEMENT_POLICY = "supply"


class Controller:
    """One controller. `name` stays the same across restarts and is unique among running controllers;
    `instance` tells copies of a controller apart (election.py).

    The caller opens and closes `store`. `offload` runs blocking file operations, one at a time.
    `etcd_endpoints` returns the members of an etcd cluster that Genie manages, `etcd_alarms` those that do
    not respond, `etcd_member` is the name of that on this machine. `gossip_port` is that of all servers.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        state_dir: Path,
        store: Store,
        network: Network,
        clock: Clock,
        name: str,
        instance: str = "",
        random_bytes: Callable[[int], bytes] = os.urandom,
        offload: Offload = run_inline,
        etcd_endpoints: Callable[[], tuple[str, ...]] = lambda: (),
        etcd_member: str = "",
        etcd_alarms: Callable[[], list[str]] = list,
        gossip: GossipSupport = GossipSupport(),  # noqa: B008 - frozen
        gossip_port: int = 0,
    ) -> None:
        self._get_etcd_endpoints, self._get_etcd_alarms = etcd_endpoints, etcd_alarms
        self._config = config
        self._state_dir = state_dir
        self._store = store
        self._network = network
        self._clock = clock
        self._name = name
        self._random_bytes = random_bytes
        self._offload = offload
        self._controller_dir = files.make_private_directory(state_dir / CONTROLLER_DIRECTORY)
        self._pass_wake_event = asyncio.Event()
        self._ready_event = asyncio.Event()
        self._leader_lost_event = asyncio.Event()
        self.port = 0
        self._certificates = Certificates.open(self._controller_dir, config, clock=clock)
        self._store_health = StoreHealth()
        self._election = self._make_election(instance)
        self._open_files_alarm = open_file_limit_alarm(get_open_file_limit())
        self._connections = Connections(network.connection_limits)
        self._ledger = Ledger(store, self._election, self._store_health, clock=clock)
        self._local_access_files = LocalAccessFiles(state_dir)
        self._locks = LockTable(self._ledger, self._election, clock=clock)
        self._controller_addresses = ControllerAddresses(store, name=name, get_own=lambda: self.address)
        self._server_releases = self._build_server_releases(etcd_member)
        self._campaign = self._build_campaign()
        self._orders = AgentOrders()
        self._standby_requests = self._build_standby_requests(offload)
        self._build_scheduling_services()
        self._build_node_services()
        self._gossip = self._build_gossip(gossip, server_port=gossip_port)
        self._request_service = self._build_request_service(self._build_request_handlers(offload))
        self._leader_work = self._build_leader_work()
        self._leadership = self._build_leadership()

    def _make_election(self, instance: str) -> Election:
        return Election(
            self._store,
            clock=self._clock,
            name=self._name,
            ttl_s=self._config.leader_ttl_s,
            health=self._store_health,
            instance=instance,
        )

    def _build_server_releases(self, etcd_member: str) -> ServerReleases:
        return ServerReleases(
            self._store,
            name=self._name,
            etcd_member=etcd_member,
            get_owner_token_id=partial(find_owner_token_id, self._state_dir),
            offload=self._offload,
            clock=self._clock,
            set_cluster_release=self._ledger.set_cluster_release,
        )

    def _build_campaign(self) -> Campaign:
        return Campaign(
            self._store,
            self._election,
            self._store_health,
            addresses=self._controller_addresses,
            releases=self._server_releases,
            certificates=self._certificates,
            state_dir=self._state_dir,
            get_own_address=lambda: self.address,
        )

    def _build_scheduling_services(self) -> None:
        config, clock = self._config, self._clock
        self._membership = Membership(config)
        self._node_faults = NodeFaults(clock)
        self._node_snapshots = NodeSnapshots(self._ledger, self._membership, self._node_faults, clock=clock)
        self._unresponsive_nodes = UnresponsiveNodes(self._ledger, self._membership, clock=clock)
        self._quota_table = QuotaTable(self._ledger)
        self._policy = make_configured_policy(config, clock=clock)
        self._make_placer, _ = placer_factory(build=False)
        self._launch_queue = LaunchQueue(self._orders)
        self._launch_backoff = LaunchBackoff(clock)
        self._planner = self._build_planner()
        self._jobs = build_job_services(
            self._ledger,
            config=config,
            clock=clock,
            random_bytes=self._random_bytes,
            notifier=ChangeNotifier(clock),
            wake=self._pass_wake_event.set,
            placer=self._planner,
            backoff=self._launch_backoff,
            describe_unresponsive_node=self._unresponsive_nodes.describe_effect_on_job,
        )
        self._store_monitor = StoreMonitor(self._store, self._jobs.space, config=config, clock=clock)

    def _build_planner(self) -> Planner:
        return Planner(
            self._ledger,
            self._node_snapshots,
            clock=self._clock,
            make_placer=lambda policy: self._make_placer(policy, 0, ()),
            policy=_PLACEMENT_POLICY,
            rules=self._make_scheduling_rules,
            workers_per_node_max=self._config.node_workers_max,
            launch_capacity=lambda: self._launch_queue.worker_capacity,
            not_before_s=self._launch_backoff.not_before_s,
            needed_bytes=self._launch_backoff.needed_disk_bytes,
        )

    def _make_scheduling_rules(self) -> Rules:
        quotas, weights = self._quota_table.quotas_and_weights()
        return Rules(quotas=quotas, weights=weights).with_order(self._policy)

    def _build_node_services(self) -> None:
        ledger, jobs, clock = self._ledger, self._jobs, self._clock
        self._tokens = TokenRegistry(
            ledger,
            self._store,
            config=self._config,
            clock=clock,
            random_bytes=self._random_bytes,
            pin=self._certificates.pin,
            find_in_copy=self._standby_requests.find_token_in_copy,
        )
        self._sessions = Sessions(
            ledger,
            jobs.catalog,
            jobs.submission,
            jobs.lifecycle,
            clock=clock,
            random_bytes=self._random_bytes,
            reconnect_grace_s=self._config.session_grace_s,
        )
        self._admission = Admission(
            ledger,
            self._tokens,
            self._certificates,
            jobs.catalog,
            clock=clock,
            disconnect=self._connections.close_connections_of_token,
        )
        self._agents = Agents(
            ledger=ledger,
            jobs=jobs.catalog,
            launches=jobs.launches,
            lifecycle=jobs.lifecycle,
            sessions=self._sessions,
            membership=self._membership,
            election=self._election,
            orders=self._orders,
            faults=self._node_faults,
            config=self._config,
            clock=clock,
            controllers=lambda: self._controller_addresses.known,
            refresh_controllers=self._controller_addresses.refresh,
            check_rows_of_node_writable=self._admission.check_rows_of_node_writable,
            forget_node=self._admission.forget_node,
            wake=self._pass_wake_event.set,
        )
        self._pass_runner = PassRunner(
            ledger,
            self._planner,
            jobs.catalog,
            jobs.launches,
            jobs.lifecycle,
            self._agents,
            self._launch_queue,
        )
        self._drains = self._build_drains()

    def _build_drains(self) -> NodeDrains:
        return NodeDrains(
            self._ledger,
            self._jobs.catalog,
            self._jobs.lifecycle,
            stop_jobs=self._pass_runner.stop_jobs,
            is_in_contact=self._agents.is_in_contact,
            wake=self._pass_wake_event.set,
        )

    def _build_leader_work(self) -> LeaderWork:
        return LeaderWork(
            self._config,
            clock=self._clock,
            offload=self._offload,
            wake_event=self._pass_wake_event,
            pass_runner=self._pass_runner,
            agents=self._agents,
            sessions=self._sessions,
            locks=self._locks,
            drains=self._drains,
            node_snapshots=self._node_snapshots,
            job_history=self._jobs.history,
            tokens=self._tokens,
            store_monitor=self._store_monitor,
            addresses=self._controller_addresses,
            releases=self._server_releases,
            backup_requests=self._backup_requests,
            gossip=self._gossip,
            connections=self._connections,
            get_own_address=lambda: self.address,
            write_local_access_files=self._write_local_access_files,
        )

    def _build_leadership(self) -> Leadership:
        return Leadership(
            self._config,
            name=self._name,
            state_dir=self._state_dir,
            clock=self._clock,
            random_bytes=self._random_bytes,
            election=self._election,
            health=self._store_health,
            campaign=self._campaign,
            ledger=self._ledger,
            tokens=self._tokens,
            agents=self._agents,
            releases=self._server_releases,
            standby_requests=self._standby_requests,
            store_monitor=self._store_monitor,
            leader_work=self._leader_work,
            blob_replication=self._blob_replication,
            ready_event=self._ready_event,
            leader_lost_event=self._leader_lost_event,
            ca_pin=self._certificates.pin,
            write_local_access_files=self._write_local_access_files,
        )

    def _build_request_handlers(self, offload: Offload) -> list[Handlers]:
        clock, jobs, planner = self._clock, self._jobs, self._planner
        election, kill, check_readable = self._election, self._agents.send_kills, self._ledger.check_readable
        blobs = self._open_blob_storage()
        replication = self._blob_replication = self._build_blob_replication(blobs, offload)
        nodes, waits = NodeList(self._ledger, self._node_snapshots), OpenWaits()
        self._backup_requests = BackupRequests(self._store, self._ledger, clock=clock)
        return [
            self._agents.handlers(),
            self._drains.handlers(),
            self._build_job_requests(blobs, replication, offload).handlers(),
            JobReads(jobs.catalog, waits=waits, check_readable=check_readable).handlers(),
            BlobRequests(
                blobs,
                replication,
                election,
                offload=offload,
                is_needed=lambda name: name in jobs.catalog.needed_blobs(),
                find_tenant=self._agents.find_blob_tenant,
            ).handlers(),
            NodeRequests(nodes, check_readable=check_readable).handlers(),
            self._build_status_requests(nodes).handlers(),
            SessionRequests(
                self._sessions,
                nodes,
                planner,
                election,
                waits=waits,
                kill=kill,
                check_readable=check_readable,
            ).handlers(),
            self._build_server_admission().handlers(),
            TokenRequests(
                self._tokens,
                disconnect=self._connections.close_connections_of_token,
                check_readable=check_readable,
            ).handlers(),
            LogRequests(
                jobs.catalog,
                clock=clock,
                waits=waits,
                read_from_agent=self._agents.read_log,
                check_readable=self._ledger.check_leading_and_up_to_date,
            ).handlers(),
            QueueRequests(jobs.catalog, planner, clock=clock, check_readable=check_readable).handlers(),
            QuotaRequests(self._quota_table, check_readable=check_readable).handlers(),
            LockRequests(self._locks, waits=waits).handlers(),
            self._backup_requests.handlers(),
            self._gossip.handlers(),
            MemberRequests(self._gossip.members_reply).handlers(),
        ]

    def _build_job_requests(
        self, blobs: BlobStorage, replication: BlobReplication, offload: Offload
    ) -> JobRequests:
        return JobRequests(
            self._jobs.catalog,
            self._jobs.submission,
            self._jobs.lifecycle,
            self._planner,
            blobs,
            replication,
            self._election,
            offload=offload,
            kill=self._agents.send_kills,
        )

    def _build_server_admission(self) -> ServerAdmission:
        return ServerAdmission(
            self._ledger,
            self._tokens,
            self._certificates,
            clock=self._clock,
            etcd_endpoints=self._get_etcd_endpoints,
        )

    def _build_gossip(self, support: GossipSupport, *, server_port: int) -> ServerGossip:
        return ServerGossip(
            support,
            name=self._name,
            store=self._store,
            ledger=self._ledger,
            certificates=self._certificates,
            membership=self._membership,
            clock=self._clock,
            offload=self._offload,
            directory=self._controller_dir,
            server_port=server_port,
            own_address=lambda: self.address,
            controllers=lambda: self._controller_addresses.known,
        )

    def _open_blob_storage(self) -> BlobStorage:
        return BlobStorage(
            self._controller_dir / "blobs",
            bytes_max=self._config.blobs_bytes_max,
            tenant_bytes_max=self._config.blobs_tenant_bytes_max,
            clock=self._clock,
        )

    def _build_blob_replication(self, blobs: BlobStorage, offload: Offload) -> BlobReplication:
        client_tls = partial(self._certificates.client_tls, self._controller_dir)
        return BlobReplication(
            blobs,
            name=self._name,
            network=self._network,
            clock=self._clock,
            offload=offload,
            own_address=lambda: self.address,
            controllers=lambda: self._controller_addresses.known,
            needed=self._jobs.catalog.needed_blobs,
            client_tls=client_tls if self._certificates.are_enabled else None,
        )

    def _build_standby_requests(self, offload: Offload) -> StandbyRequests:
        client_tls = partial(self._certificates.client_tls, self._controller_dir)
        link = LeaderLink(
            name=self._name,
            network=self._network,
            clock=self._clock,
            offload=offload,
            client_tls=client_tls if self._certificates.are_enabled else None,
        )

        def make_copy() -> LedgerCopy:
            return LedgerCopy(
                self._store,
                clock=self._clock,
                write_mark=self._controller_addresses.write_own,
                on_leader_lost=self._leader_lost_event.set,
            )

        return StandbyRequests(
            link,
            clock=self._clock,
            make_copy=make_copy,
            disconnect=self._connections.close_connections_of_token,
            leader_key_ttl_s=self._config.leader_ttl_s,
        )

    def _build_status_requests(self, nodes: NodeList) -> StatusRequests:
        return StatusRequests(
            self._ledger,
            nodes,
            self._election,
            self._store_health,
            count_jobs=self._jobs.catalog.count_by_state,
            count_clients=self._sessions.count_clients,
            policy_fault=lambda: self._planner.policy_fault,
            policy_name=self._config.policy,
            store_name=self._config.store.partition(":")[0],
            store_members=self._get_etcd_endpoints,
            started_at=self._clock.wall_s(),
            alarms=self._alarms,
            space=self._jobs.space,
        )

    def _build_request_service(self, handlers: list[Handlers]) -> RequestService:
        return RequestService(
            ledger=self._ledger,
            election=self._election,
            tokens=self._tokens,
            admission=self._admission,
            certificates=self._certificates,
            connections=self._connections,
            clock=self._clock,
            ready=self._ready_event,
            controllers=lambda: self._controller_addresses.known,
            handlers=handlers,
            standby_requests=self._standby_requests,
        )

    def _alarms(self) -> list[str]:
        """What the owner should look at, in words."""
        file_alarms = [alarm for alarm in (self._open_files_alarm, self._local_access_files.alarm) if alarm]
        nodes = (node.info for node in self._node_snapshots.current_snapshots().values())
        return [
            *file_alarms,
            *filter(None, [self._campaign.obstacle.alarm]),
            *self._server_releases.alarms(nodes),
            *self._store_monitor.alarms(),
            *self._get_etcd_alarms(),
            *self._unresponsive_nodes.alarms(),
            *self._blob_replication.alarms(),
            *self._leader_work.alarms(),
        ]

    @property
    def address(self) -> str:
        """HOST:PORT at which others reach this controller."""
        return address_text(advertised_host(self._config), self.port)

    @property
    def is_leading(self) -> bool:
        """Whether it leads and has read the tables."""
        return self._ledger.is_up_to_date

    @property
    def fencing_token(self) -> int:
        """That of its current or last term; 0 before the first."""
        return self._election.fencing_token

    def node_statuses(self) -> dict[str, NodeStatus]:
        """The current status of each registered node."""
        now_s = self._clock.monotonic_s()
        return {
            node_id: self._membership.current_info(record.info, now_s).status
            for node_id, record in self._ledger.nodes.items()
        }

    def try_use_compiled_scheduler(self) -> bool:
        """Use the compiled scheduler from the next pass on; False if it is not built."""
        make, kind = placer_factory(build=False)
        if kind != "native":
            return False
        self._make_placer = make
        self._planner.invalidate()
        self._pass_wake_event.set()
        return True

    async def wait_ready(self) -> None:
        """Wait until it listens and knows whether it leads."""
        await self._ready_event.wait()

    async def run(self) -> None:
        """Serve until cancelled. Raises the first GenieError of any part."""
        async with unwrapped_task_group() as group:
            gossip = group.create_task(self._run_gossip_once_ready(), name="gossip")
            try:
                await self._serve_and_lead()
            finally:
                gossip.cancel()  # it leaves after the leader has resigned: another one can lead meanwhile

    async def _run_gossip_once_ready(self) -> None:
        await self._ready_event.wait()
        await self._gossip.run()

    async def _serve_and_lead(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                listening = asyncio.Event()
                group.create_task(self._serve_connections(listening, group), name="serve")
                group.create_task(self._ledger.run(), name="ledger")
                group.create_task(self._orders.run(), name="orders")
                group.create_task(self._standby_requests.run(), name="standby")
                await listening.wait()
                group.create_task(self._leadership.campaign_and_lead_forever(), name="lead")
        except* GenieError as errors:
            raise first_error(errors) from None
        finally:
            with contextlib.suppress(StoreError):  # it ends with the store
                await self._backup_requests.close()
            await self._election.resign()

    async def _serve_connections(self, listening: asyncio.Event, group: asyncio.TaskGroup) -> None:
        context = self._certificates.server_context(self._controller_dir)
        if context is not None:
            renewal = self._certificates.renew_forever(context, self._controller_dir)
            group.create_task(renewal, name="certificate")

        def on_listening(port: int) -> None:
            self.port = port
            where = address_text(self._config.bind, port)
            _log.info("listening on %s, TLS %s", where, self._config.tls)
            listening.set()

        await self._network.serve(
            self._config.bind,
            self._config.port,
            self._request_service.serve_connection,
            tls=context,
            on_listening=on_listening,
        )

    async def _write_local_access_files(self) -> None:
        record = self._ledger.cluster.get("")
        cluster_id = record.cluster_id if record is not None else ""
        local = LocalCluster(host=local_host(self._config), port=self.port, cluster_id=cluster_id)
        ca_pem = self._certificates.ca_pem if self._certificates.are_enabled else ""
        self._local_access_files.try_write(local, trusted_ca=ca_pem)
