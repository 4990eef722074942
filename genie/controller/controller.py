"""The controller: builds its parts and runs them.

One TaskGroup runs everything: the server, the ledger's writer, orders to agents, and the loop that campaigns,
leads a term, and campaigns again. While it leads, a scheduling pass runs at every change and at every tick; a
tick also reclaims jobs of lost nodes, queues unconfirmed launches again, enforces time limits and drops
clients whose lease has expired. Losing the store ends the term: no decisions are made, reads are served
from memory, and running jobs continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from genie.config import ControllerConfig
from genie.controller.blobs.replication import BlobReplication
from genie.controller.blobs.storage import BlobStorage
from genie.controller.change_notifier import ChangeNotifier, wait_event
from genie.controller.connection import Connections, Handlers
from genie.controller.controller_directory import LocalAccessFiles
from genie.controller.election import ControllerAddresses, Election, StoreHealth
from genie.controller.jobs.backoff import LaunchBackoff
from genie.controller.jobs.lifecycle import CHANGES_PER_TICK_MAX
from genie.controller.jobs.services import build_job_services
from genie.controller.jobs.sessions import Sessions
from genie.controller.ledger import Ledger, Transaction, read_cluster_record
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
from genie.controller.nodes.status_log import NodeStatusLog
from genie.controller.nodes.unresponsive import UnresponsiveNodes
from genie.controller.periodic_steps import PeriodicStepRunner
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
from genie.controller.rows import ClusterRecord
from genie.controller.standby.leader_link import LeaderLink
from genie.controller.standby.ledger_copy import LedgerCopy
from genie.controller.standby.requests import StandbyRequests
from genie.controller.store import Store
from genie.controller.store.open import CONTROLLER_DIRECTORY
from genie.controller.store_monitor import StoreMonitor
from genie.controller.tokens import TokenRegistry
from genie.errors import (
    GenieError,
    LeadershipError,
    ReleaseSkewError,
    StoreError,
    StoreVersionError,
    TlsError,
)
from genie.model.failover import campaign_interval_s
from genie.model.job import StopReason
from genie.model.names import address_text
from genie.processes import files, memory
from genie.processes.clock import Clock
from genie.processes.file_limit import get_open_file_limit
from genie.processes.tasks import Offload, first_error, run_inline, unwrapped_task_group
from genie.runtime.connection_limits import (
    CONNECTIONS_WARNING_THRESHOLD,
    ConnectionLimits,
    open_file_limit_for,
)
from genie.runtime.credentials import LocalCluster
from genie.runtime.gossip.protocol import GossipSupport
from genie.runtime.network import Network
from genie.scheduler.rules import Rules

_log = logging.getLogger(__name__)

_TICK_INTERVAL_S_MAX = 0.5
# Until an agent knows about a new controller, it cannot switch to it when this one fails.
_HOUSEKEEPING_INTERVAL_S = 2.0
_FAILED_PASS_RETRY_S = 1.0
_MEMORY_RETURN_INTERVAL_S = 60.0
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
        self._tick_interval_s = min(_TICK_INTERVAL_S_MAX, config.node_suspect_s / 4)
        self._node_status_log = NodeStatusLog()
        self._next_tick_s = 0.0
        self._has_term_begun = False
        self.port = 0
        self._certificates = Certificates.open(self._controller_dir, config, clock=clock)
        self._store_health = StoreHealth()
        self._election = self._make_election(instance)
        files_max = get_open_file_limit()
        self._open_files_alarm = _open_file_limit_alarm(files_max)
        self._connections = Connections(ConnectionLimits.for_open_file_limit(files_max))
        self._last_memory_return_s = -_MEMORY_RETURN_INTERVAL_S
        self._ledger = Ledger(store, self._election, self._store_health, clock=clock)
        self._local_access_files = LocalAccessFiles(state_dir)
        self._locks = LockTable(self._ledger, self._election, clock=clock)
        self._controller_addresses = ControllerAddresses(store, name=name, get_own=lambda: self.address)
        self._server_releases = self._build_server_releases(etcd_member)
        self._release_skew_alarm = ""
        self._periodic_step_runner = PeriodicStepRunner(clock)
        self._orders = AgentOrders()
        self._standby_requests = self._build_standby_requests(offload)
        self._build_scheduling_services()
        self._build_node_services()
        self._gossip = self._build_gossip(gossip, server_port=gossip_port)
        self._request_service = self._build_request_service(self._build_request_handlers(offload))

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
            clock=self._clock,
            set_cluster_release=self._ledger.set_cluster_release,
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
                check_readable=check_readable,
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
            return LedgerCopy(self._store, clock=self._clock, write_mark=self._controller_addresses.write_own)

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
            *([self._release_skew_alarm] if self._release_skew_alarm else []),
            *self._server_releases.alarms(nodes),
            *self._store_monitor.alarms(),
            *self._get_etcd_alarms(),
            *self._unresponsive_nodes.alarms(),
            *self._blob_replication.alarms(),
            *self._periodic_step_runner.alarms(),
        ]

    @property
    def address(self) -> str:
        """HOST:PORT at which others reach this controller."""
        return address_text(advertised_host(self._config), self.port)

    @property
    def is_leading(self) -> bool:
        """Whether it leads and has read the tables."""
        return self._ledger.is_up_to_date

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
                group.create_task(self._campaign_and_lead_forever(), name="lead")
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

    # -- terms ------------------------------------------------------------------------------

    async def _campaign_and_lead_forever(self) -> None:
        while True:
            if await self._try_win_election() and await self._lead_one_term():
                continue
            other = self._election.leader
            if self._store_health.is_ok and other is not None and other.name != self._name:
                self._ledger.mark_outdated()
                self._standby_requests.follow(other.address)
                await self._write_local_access_files()
            self._ready_event.set()
            if self._store_health.is_full:
                await self._store_monitor.compact_full_store()
            await self._clock.sleep(campaign_interval_s(self._config.leader_ttl_s))

    async def _try_win_election(self) -> bool:
        try:
            try:
                return await self._announce_and_campaign()
            except ReleaseSkewError as error:
                if not self._release_skew_alarm:
                    _log.error("cannot lead: %s", error)
                self._release_skew_alarm = f"this server cannot lead: {error.message}"
                await self._election.read_leader()  # to follow it
                await self._controller_addresses.refresh()
                return False
        except (StoreError, LeadershipError) as error:
            self._record_failed_term_start(error)
            return False

    async def _announce_and_campaign(self) -> bool:
        """Raise ReleaseSkewError if only servers of other releases can lead."""
        unreadable: StoreVersionError | None = None
        record: ClusterRecord | None = None
        try:
            record = await self._read_cluster_record()
        except StoreVersionError as error:
            unreadable = error
        if await self._election.has_duplicate_controller():
            return False  # and do not replace its address
        await self._server_releases.announce(self.address)
        if unreadable is not None:
            raise ReleaseSkewError(unreadable.message, hint=unreadable.hint)
        self._release_skew_alarm = ""
        await self._controller_addresses.register()
        return await self._election.try_win_election(
            self.address, generation=record.generation if record else 0
        )

    async def _try_begin_term(self) -> bool:
        try:
            await self._server_releases.refresh()
            await self._ledger.load_tables()
            await self._store_cluster_record()
            await self._tokens.ensure_owner_token(self._state_dir)
            await self._agents.begin_term()
        except (StoreError, LeadershipError) as error:
            self._record_failed_term_start(error)
            return False
        _log.info("became leader, fencing token %d", self._election.fencing_token)
        return True

    def _record_failed_term_start(self, error: GenieError) -> None:
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

    async def _store_cluster_record(self) -> None:
        """Create the cluster's ID in the first term; record the current CA."""
        pin = self._certificates.pin
        record = self._ledger.cluster.get("")
        if record is None:
            record = ClusterRecord(cluster_id=self._random_bytes(8).hex(), ca_pin=pin)
        elif record.ca_pin == pin:
            return
        record = msgspec.structs.replace(record, ca_pin=pin)

        def build(txn: Transaction) -> None:
            txn.put(self._ledger.cluster, "", record)

        await self._ledger.write(build)

    async def _write_local_access_files(self) -> None:
        record = self._ledger.cluster.get("")
        cluster_id = record.cluster_id if record is not None else ""
        local = LocalCluster(host=local_host(self._config), port=self.port, cluster_id=cluster_id)
        ca_pem = self._certificates.ca_pem if self._certificates.are_enabled else ""
        self._local_access_files.try_write(local, trusted_ca=ca_pem)

    async def _lead_one_term(self) -> bool:
        """Lead until the lease is lost; False if the term could not begin. The lease is renewed from the
        start, because reading the tables may take longer than the lease lasts."""
        self._has_term_begun = False
        async with asyncio.TaskGroup() as group:
            term = group.create_task(self._run_term(), name="term")
            await self._election.hold_leadership_until_term_ends()
            term.cancel()
        return self._has_term_begun

    async def _run_term(self) -> None:
        if not await self._try_begin_term():
            await self._election.resign()
            return
        self._has_term_begun = True
        self._standby_requests.stop_following()
        await self._write_local_access_files()
        self._ready_event.set()
        self._next_tick_s = 0.0
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_passes_forever(), name="passes")
            group.create_task(self._housekeep_forever(), name="housekeeping")
            group.create_task(self._blob_replication.run(), name="blob replication")

    # -- passes -----------------------------------------------------------------------------

    async def _run_passes_forever(self) -> None:
        while True:
            self._pass_wake_event.clear()
            try:
                await self._run_due_tick_and_pass()
            except (StoreError, LeadershipError) as error:
                _log.warning("scheduling pass postponed: %s", error)
                await self._clock.sleep(self._tick_interval_s)
            except Exception:  # a task boundary: a failed pass must not end the controller
                _log.exception("scheduling pass failed")
                await self._clock.sleep(_FAILED_PASS_RETRY_S)
            await wait_event(self._pass_wake_event, clock=self._clock, timeout_s=self._tick_interval_s)

    async def _run_due_tick_and_pass(self) -> None:
        if self._clock.monotonic_s() >= self._next_tick_s:
            self._next_tick_s = self._clock.monotonic_s() + self._tick_interval_s
            self._pass_runner.log_launches()
            await self._run_tick_steps()
        await self._pass_runner.run()

    async def _run_tick_steps(self) -> None:
        """Do the work that depends on time alone, not on changes."""
        await self._periodic_step_runner.run_steps(
            {
                "logging node states": self._log_node_statuses,
                "reclaiming jobs of lost nodes": self._agents.reclaim_jobs,
                "requeueing unconfirmed launches": self._agents.requeue_unconfirmed,
                "ending expired sessions": self._end_expired_sessions,
                "ending expired leases of locks": self._locks.end_expired_leases,
                "enforcing time limits": self._enforce_time_limits,
                "moving jobs off draining nodes": self._drains.move_jobs,
            }
        )

    async def _end_expired_sessions(self) -> None:
        for job in await self._sessions.cancel_expired():
            self._agents.send_kills(job)

    async def _enforce_time_limits(self) -> None:
        expired = [
            (job, f"exceeded its time limit of {job.spec.constraints.time_limit_s:g} s")
            for job in self._agents.jobs_exceeding_time_limit()[:CHANGES_PER_TICK_MAX]
        ]
        await self._pass_runner.stop_jobs(expired, StopReason.TIME_LIMIT)

    async def _housekeep_forever(self) -> None:
        """Runs concurrently with the passes: deleting many old jobs must not delay new ones."""
        while True:
            try:
                await self._housekeep()
            except (StoreError, LeadershipError) as error:
                _log.warning("housekeeping postponed: %s", error)
            except Exception:  # a task boundary: as in _run_passes_forever
                _log.exception("housekeeping failed")
            await self._clock.sleep(_HOUSEKEEPING_INTERVAL_S)

    async def _housekeep(self) -> None:
        await self._periodic_step_runner.run_steps(
            {
                "measuring the store": self._store_monitor.measure_and_compact_if_due,
                "deleting old jobs": self._jobs.history.delete_old_jobs,
                "deleting old tokens": self._tokens.delete_old_tokens,
                "storing and reading the addresses of controllers": self._controller_addresses.register,
                "reading the releases of the servers": self._server_releases.refresh,
                "announcing the release of this server": self._announce_release,
                "disconnecting outdated nodes": self._disconnect_outdated_nodes,
                "writing the files of this cluster": self._write_local_access_files,
                "closing abandoned backups": self._backup_requests.close_if_idle,
                "changing the key of gossip": self._gossip.change_key_if_due,
                "returning memory": self._return_freed_memory_to_system,
            }
        )

    async def _announce_release(self) -> None:
        await self._server_releases.announce(self.address)

    async def _disconnect_outdated_nodes(self) -> None:
        self._agents.disconnect_outdated_nodes()

    async def _return_freed_memory_to_system(self) -> None:
        """Return the memory of many closed connections to the system."""
        now_s = self._clock.monotonic_s()
        has_shrunk = self._connections.is_memory_return_worthwhile()
        if not has_shrunk or now_s - self._last_memory_return_s < _MEMORY_RETURN_INTERVAL_S:
            return
        self._connections.reset_peak_count()
        self._last_memory_return_s = now_s
        memory.collect_garbage()
        await self._offload(memory.trim_heap)

    async def _log_node_statuses(self) -> None:
        nodes = self._node_snapshots.current_snapshots().values()
        self._node_status_log.log_changes(node.info for node in nodes)


def _open_file_limit_alarm(files_max: int) -> str:
    if files_max >= open_file_limit_for(CONNECTIONS_WARNING_THRESHOLD):
        return ""
    connections = ConnectionLimits.for_open_file_limit(files_max).connections_max
    return (
        f"the controller may open {files_max} files, which allows {connections} connections; raise the hard "
        "limit (ulimit -Hn, or LimitNOFILE of systemd) and restart it"
    )
