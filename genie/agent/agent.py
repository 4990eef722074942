"""The agent: registers the node, sends heartbeats, and runs its jobs.

One TaskGroup runs the connection with its heartbeats, the lease check, changes of the journal, exit
collection, the inventory, certificate renewal and shutdown. Clock, network, randomness, disk access and
launcher are arguments, so that genie/sim runs the same code. Processes are started by launcher.py; placement
is decided by the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from genie.agent import job_files
from genie.agent.disk import DiskAccess, DiskMonitor, JournalWriteQueue
from genie.agent.heartbeats import NodeLease, actions_from_heartbeat_reply
from genie.agent.identity import (
    ca_path,
    has_certificate_expired,
    renew_certificate_if_due_and_get_wait_s,
    renew_expired_certificate,
    write_controller_addresses,
)
from genie.agent.jobs import JobLaunchContext, NodeJobs
from genie.agent.journal import Journal
from genie.agent.launcher import JobLauncher
from genie.agent.leader_connection import LeaderConnection
from genie.agent.logs import wait_for_log_chunk
from genie.config import AgentConfig
from genie.errors import (
    FencedError,
    GenieError,
    HardwareError,
    JobNotFoundError,
    OutdatedLeaderError,
    ProtocolError,
    StoreFullError,
)
from genie.hardware import HostFacts, host_facts
from genie.model import failover
from genie.model.job import RUNS_KEPT
from genie.model.member import MemberRole, MemberState
from genie.model.messages import (
    Done,
    ExitReport,
    GetGossipSettings,
    Heartbeat,
    Kill,
    Launch,
    Leave,
    Message,
    ReadLog,
    Register,
    Registered,
    Request,
)
from genie.model.names import parse_endpoint
from genie.model.node import GPUInfo, NodeInfo, NodeRole, NodeStatus
from genie.processes import process_table
from genie.processes.clock import Clock
from genie.processes.tasks import first_error
from genie.runtime import rpc, wire
from genie.runtime.credentials import Access
from genie.runtime.gossip.participant import GossipParticipant
from genie.runtime.gossip.protocol import GossipIdentity, GossipSupport
from genie.runtime.network import Network
from genie.version import __version__

_log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=Message)

LEADER_CALL_TIMEOUT_S = 5.0
HARDWARE_POLL_INTERVAL_S_MIN = 1.0
CERTIFICATE_CHECK_INTERVAL_S = 60.0
CERTIFICATE_RENEWAL_RETRY_S = 30.0
EXPIRED_CERTIFICATE_RENEWAL_RETRY_S = 1.0
EXIT_REPORTS_PER_MESSAGE_BYTES_MAX = wire.FRAME_BYTES_MAX // 2
SHUTDOWN_TIMEOUT_AFTER_GRACE_S = 5.0
LEAVE_REQUEST_TIMEOUT_S = 2.0
DISK_RETRY_INTERVAL_S = 1.0
FULL_DISK_LOG_INTERVAL_S = 60.0
_CONDITION_POLL_INTERVAL_S = 0.02


class AcceleratorInventory(Protocol):
    """The part of genie.hardware.Inventory that the agent uses."""

    async def read_async(self, held: Collection[int] = ()) -> tuple[GPUInfo, ...]: ...


class Agent:
    """Call `run` once; `stop`, called on the same event loop, shuts it down gracefully.

    Heartbeats and the lease never wait for the disk.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        node_dir: Path,
        access: Access,
        network: Network,
        clock: Clock,
        rng: random.Random,
        inventory: AcceleratorInventory,
        launcher: JobLauncher,
        base_env: Mapping[str, str] | None = None,
        listen_host: str = "127.0.0.1",
        disk: DiskAccess | None = None,
        facts: Callable[[], HostFacts] = host_facts,
        boot_id: str = "",
        gossip: GossipSupport = GossipSupport(),  # noqa: B008 - frozen
    ) -> None:
        self._config = config
        self._clock = clock
        self._inventory = inventory
        self._launcher = launcher
        self._read_host_facts = facts
        self._disk_access = disk = disk or DiskAccess()
        self._journal = Journal(node_dir)
        self._journal_writes = JournalWriteQueue(disk.run_journal_call, clock)
        self._disk_monitor = DiskMonitor(config.disk_free_min_bytes)
        self._lease = NodeLease()
        self._connection = LeaderConnection(
            access, network=network, clock=clock, rng=rng, handler=self._handle_request
        )
        self._heartbeat_due_event = asyncio.Event()
        self._stop_requested = asyncio.Event()
        self._keeps_jobs = False
        self._task_group: asyncio.TaskGroup | None = None
        self._is_job_file_cleanup_due = True
        advertised = config.host or listen_host
        self._node_info = _initial_node_info(config, node_id=node_dir.name, host=advertised)
        launch_context = JobLaunchContext(
            base_env=dict(base_env or {}),
            listen_host=listen_host,
            advertised_host=advertised,
            ca_path=None if access.tls is None else ca_path(node_dir),
            offload=disk.run_job_file_call,
            get_node_info=lambda: self._node_info,
            boot_id=boot_id or process_table.boot_id(),
        )
        self._jobs = NodeJobs(
            config,
            journal=self._journal,
            launcher=launcher,
            lease=self._lease,
            writes=self._journal_writes,
            clock=clock,
            call_leader=self._call_leader,
            launch_context=launch_context,
            request_heartbeat=self._heartbeat_due_event.set,
        )
        self._gossip = self._make_gossip_participant(gossip)

    def _make_gossip_participant(self, support: GossipSupport) -> GossipParticipant:
        node_dir = self._journal.node_dir
        participant = GossipParticipant(
            support=support,
            identity=lambda: GossipIdentity(name=node_dir.name, role=MemberRole.NODE, release=__version__),
            fetch_settings=lambda: self._call_leader(GetGossipSettings()),
            directory=node_dir,
            clock=self._clock,
            offload=self._disk_access.run_job_file_call,
        )
        participant.add_listener(self._use_controllers_known_by_gossip)
        return participant

    @property
    def node_info(self) -> NodeInfo:
        """The node as of the last inventory."""
        return self._node_info

    def stop(self, *, keep_jobs: bool = False) -> None:
        """Ends all jobs (SIGTERM, then SIGKILL), notifies the controller and makes `run` return. With
        `keep_jobs`, the jobs keep running until the next agent of the node adopts them. Only the first call
        counts.
        """
        if not self._stop_requested.is_set():
            self._keeps_jobs = keep_jobs
        self._stop_requested.set()

    async def run(self) -> None:
        """Runs until stopped. Raises AgentRunningError, NodeError, and the errors of
        LeaderConnection.keep_connected_to_leader."""
        await self._disk_access.run_journal_call(self._journal.open)
        try:
            if count := await self._jobs.adopt_jobs_and_kill_leftovers():
                _log.warning("killed %d leftover processes of an earlier agent", count)
            await self._disk_access.run_journal_call(self._jobs.load_journal)
            await self._run_tasks()
        finally:
            self._launcher.close()
            self._journal.close()

    async def _run_tasks(self) -> None:
        fatal: GenieError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                self._task_group = group
                for work in (
                    self._keep_connected_to_leader(),
                    self._trigger_heartbeats_and_enforce_lease(),
                    self._journal_writes.run(),
                    self._free_disk_space_periodically(),
                    self._collect_exits_forever(),
                    self._update_node_info_periodically(),
                    self._renew_certificate_periodically(),
                    self._shut_down_when_requested(),
                    self._gossip.run(),
                ):
                    group.create_task(work)
                for job in self._jobs.live_jobs.values():
                    group.create_task(self._jobs.continue_job_of_earlier_agent(job))
        except* _AgentStoppedError:
            pass
        except* GenieError as errors:
            fatal = first_error(errors)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_AFTER_GRACE_S):
                await self._journal_writes.run_pending_work()
        if fatal is not None:
            self._jobs.kill_all_jobs(f"ended by Genie: {fatal.message}")
            await self._wait_for_condition(
                lambda: not self._launcher.running_jobs_and_kill_errors(),
                self._config.stop_grace_s + SHUTDOWN_TIMEOUT_AFTER_GRACE_S,
            )
            raise fatal

    async def _begin_incarnation(self) -> None:
        """Waits for disk space if even the number of the incarnation cannot be stored: without it, launches
        for an earlier agent could not be rejected."""
        warned_s = float("-inf")
        while True:
            try:
                incarnation = await self._disk_access.run_journal_call(self._journal.begin_incarnation)
                self._node_info = msgspec.structs.replace(self._node_info, incarnation=incarnation)
                return
            except StoreFullError as error:
                if self._clock.monotonic_s() >= warned_s + FULL_DISK_LOG_INTERVAL_S:
                    warned_s = self._clock.monotonic_s()
                    _log.error("waiting for disk space: %s", error)
            await self._clock.sleep(DISK_RETRY_INTERVAL_S)

    # --- the controller ---------------------------------------------------------------------

    async def _keep_connected_to_leader(self) -> None:
        await self._begin_incarnation()
        await self._measure_disk_space()
        await self._update_node_info()
        await self._recover_expired_certificate()
        await self._connection.keep_connected_to_leader(
            self._register_and_send_heartbeats, self._extend_lease_without_leader
        )

    async def _recover_expired_certificate(self) -> None:
        """Returns when the certificate is valid: the controllers reject connections with an expired one."""
        if self._connection.access.tls is None:
            return
        node_dir, offload = self._journal.node_dir, self._disk_access.run_job_file_call
        while await has_certificate_expired(node_dir, now=self._clock.wall_s(), offload=offload):
            try:
                await renew_expired_certificate(
                    node_dir, self._connection, timeout_s=LEADER_CALL_TIMEOUT_S, offload=offload
                )
            except GenieError as error:
                if not error.retryable:
                    raise
                _log.warning("could not renew the node's expired certificate: %s", error)
                await self._clock.sleep(EXPIRED_CERTIFICATE_RENEWAL_RETRY_S)

    async def _register_and_send_heartbeats(self, peer: rpc.Peer) -> None:
        """Registers with the leader and sends heartbeats until it no longer leads."""
        register = Register(
            node=self._node_info, exits=self._exits_for_next_message(), running=self._jobs.running_jobs()
        )
        self._apply_registration_reply(await peer.call(register, timeout_s=LEADER_CALL_TIMEOUT_S))
        record = partial(self._journal.record_registration, peer.name, registered_at=self._clock.wall_s())
        self._journal_writes.add_work(record, action="record the registration")
        _log.info(
            "registered with controller %s as node %s, incarnation %d",
            peer.name,
            self._node_info.node_id,
            self._node_info.incarnation,
        )
        while await self._send_heartbeat_and_check_leading(peer):
            await self._heartbeat_due_event.wait()
            self._heartbeat_due_event.clear()

    def _apply_registration_reply(self, registered: Registered) -> None:
        try:
            self._jobs.accept_leader_token(registered.leader_token, message_name="a registration")
        except FencedError as error:
            # Not final, unlike FencedError from the controller: another controller leads by now.
            raise OutdatedLeaderError(error.message, hint=error.hint) from error
        self._lease.set_ttl(registered.ttl_s)
        known = [self._connection.endpoints[0], *map(parse_endpoint, registered.controllers)]
        endpoints = tuple(dict.fromkeys(known))
        write = partial(write_controller_addresses, self._journal.node_dir, endpoints)
        self._journal_writes.add_work(write, action="store the addresses of the controllers")
        self._connection.apply_registration_reply(
            endpoints,
            timeout_s=failover.attempt_timeout_s(registered.ttl_s),
            backoff_s_max=failover.backoff_s_max(registered.ttl_s),
        )

    async def _send_heartbeat_and_check_leading(self, peer: rpc.Peer) -> bool:
        """Sends one heartbeat and carries out the reply. Returns whether the peer still leads."""
        sent_at_s = self._clock.monotonic_s()
        heartbeat = Heartbeat(
            node_id=self._node_info.node_id,
            incarnation=self._node_info.incarnation,
            node=self._node_info,
            running=self._jobs.running_jobs(),
            exits=self._exits_for_next_message(),
        )
        try:
            with self._jobs.delay_launch_confirmations():
                timeout_s = failover.heartbeat_timeout_s(
                    node_ttl_s=self._lease.ttl_s, configured_interval_s=self._config.heartbeat_s
                )
                ack = await peer.call(heartbeat, timeout_s=timeout_s)
        except FencedError as error:
            # Registering again shows whether this incarnation has been replaced.
            _log.warning("controller %s rejected a heartbeat: %s", peer.name, error)
            return False
        actions = actions_from_heartbeat_reply(
            ack,
            live_epochs={job_id: job.epoch for job_id, job in self._jobs.live_jobs.items()},
            ended_epochs={job_id: report.epoch for job_id, report in self._jobs.unsettled_exits.items()},
            leader_token_seen=self._journal.leader_token,
        )
        if not actions.is_leader:
            _log.info("disconnecting from controller %s: %s", peer.name, actions.not_leader_reason)
            return False
        self._jobs.accept_leader_token(ack.leader_token, message_name="a heartbeat reply")
        self._lease.extend(sent_at_s=sent_at_s)
        self._launcher.extend_deadman_timers(self._lease.expires_at_s)
        for order in actions.jobs_to_kill:
            self._jobs.kill_job(
                order.job_id,
                epoch=order.epoch,
                reason=f"ended by Genie: {order.reason or 'not in the ledger'}",
                grace_s=order.grace_s,
            )
        self._jobs.settle_exits(actions.settled_job_ids)
        self._is_job_file_cleanup_due |= bool(actions.settled_job_ids)
        return True

    def _use_controllers_known_by_gossip(self) -> None:
        self._connection.set_controllers_known_by_gossip(
            member.controller_address
            for member in self._gossip.members()
            if member.controller_address and member.state in (MemberState.ALIVE, MemberState.SUSPECT)
        )

    def _extend_lease_without_leader(self, requested_at_s: float) -> None:
        self._lease.extend_without_leader(requested_at_s=requested_at_s)
        self._launcher.extend_deadman_timers(self._lease.expires_at_s)

    async def _call_leader(self, request: Request[_Reply]) -> _Reply:
        return await self._connection.call_leader(request, timeout_s=LEADER_CALL_TIMEOUT_S)

    async def _handle_request(self, peer: rpc.Peer, request: Message) -> Message:
        match request:
            case Launch():
                assert self._task_group is not None
                job = await self._jobs.accept_launch(request)
                self._task_group.create_task(self._jobs.prepare_and_start_job(job, request))
                return Done()
            case Kill():
                self._jobs.accept_leader_token(
                    request.leader_token, message_name=f"the kill of {request.job_id}"
                )
                self._jobs.kill_job(
                    request.job_id, epoch=request.epoch, reason=request.reason, grace_s=request.grace_s
                )
                return Done()
            case ReadLog():
                return await self._handle_read_log(request)
        raise ProtocolError(f"an agent does not serve {type(request).__name__}")

    async def _handle_read_log(self, request: ReadLog) -> Message:
        directory = await self._disk_access.run_job_file_call(partial(self._find_run_directory, request))
        if directory is None:
            raise JobNotFoundError(
                f"node {self._node_info.node_id} has no log of {request.job_id}",
                hint=f"a node keeps logs of the last {self._config.jobs_kept} jobs (GENIE_AGENT_JOBS_KEPT), "
                f"and of the last {RUNS_KEPT + 1} runs of each",
            )

        def is_live() -> bool:
            job = self._jobs.live_jobs.get(request.job_id)
            return job is not None and request.epoch in (0, job.epoch)

        return await wait_for_log_chunk(
            request,
            directory,
            is_live=is_live,
            clock=self._clock,
            offload=self._disk_access.run_job_file_call,
        )

    def _find_run_directory(self, request: ReadLog) -> Path | None:
        directory = self._journal.run_dir(request.job_id, request.epoch)
        return directory if directory.is_dir() else None

    # --- other tasks ------------------------------------------------------------------------

    def _exits_for_next_message(self) -> tuple[ExitReport, ...]:
        """Exits for the next message, up to its size limit; the rest follow when these are settled."""
        reports: list[ExitReport] = []
        size_bytes = 0
        for report in self._jobs.unsettled_exits.values():
            size_bytes += len(msgspec.msgpack.encode(report))
            if size_bytes > EXIT_REPORTS_PER_MESSAGE_BYTES_MAX:
                break
            reports.append(report)
        return tuple(reports)

    def _heartbeat_interval_s(self) -> float:
        if self._lease.ttl_s <= 0:
            return self._config.heartbeat_s
        return min(self._config.heartbeat_s, failover.heartbeat_interval_s_max(self._lease.ttl_s))

    async def _trigger_heartbeats_and_enforce_lease(self) -> None:
        while True:
            await self._clock.sleep(self._heartbeat_interval_s())
            self._heartbeat_due_event.set()
            if self._jobs.live_jobs and self._lease.has_expired(self._clock.monotonic_s()):
                self._jobs.kill_jobs_that_end_with_lease()

    async def _free_disk_space_periodically(self) -> None:
        """Measures free space, and removes files of finished jobs."""
        while True:
            await self._measure_disk_space()
            bytes_to_free = self._disk_monitor.bytes_to_free
            if self._is_job_file_cleanup_due or self._journal.has_discarded_directories or bytes_to_free:
                self._is_job_file_cleanup_due = False
                await self._remove_old_job_files(bytes_to_free)
            await self._clock.sleep(self._heartbeat_interval_s())

    async def _remove_old_job_files(self, bytes_to_free: int) -> None:
        """Removes files of finished jobs. A disk that fails must not end the running ones."""
        try:
            for directory in await self._jobs.discard_old_runs_and_list_discarded(
                bytes_to_free=bytes_to_free
            ):
                await self._disk_access.run_job_file_call(partial(job_files.try_remove_tree, directory))
        except (GenieError, OSError) as error:
            _log.warning("could not remove the files of finished jobs: %s", error)
            self._is_job_file_cleanup_due = True
            await self._clock.sleep(DISK_RETRY_INTERVAL_S)

    async def _measure_disk_space(self) -> None:
        try:
            self._disk_monitor.record_reading(
                await self._disk_access.run_job_file_call(
                    partial(self._disk_access.measure_space, self._journal.node_dir)
                )
            )
        except OSError as error:
            _log.warning("could not read the free disk space: %s", error)

    async def _collect_exits_forever(self) -> None:
        while True:
            await self._launcher.wait_for_exit_report()
            await self._jobs.collect_exits()

    async def _update_node_info_periodically(self) -> None:
        while True:
            await self._clock.sleep(max(self._config.heartbeat_s, HARDWARE_POLL_INTERVAL_S_MIN))
            await self._update_node_info()

    async def _update_node_info(self) -> None:
        try:
            gpus = await self._inventory.read_async(self._jobs.gpu_ids_in_use())
        except HardwareError as error:
            _log.warning("could not read the accelerators: %s", error)
            gpus = tuple(
                msgspec.structs.replace(gpu, available=False, reason=error.message)
                for gpu in self._node_info.gpus
            )
        gpus = tuple(
            msgspec.structs.replace(gpu, available=False, reason=stuck) if stuck else gpu
            for gpu in gpus
            for stuck in (self._jobs.describe_unkillable_processes_on_gpu(gpu.gpu_id),)
        )
        facts = self._read_host_facts()
        closed = self._disk_monitor.why_node_is_blocked(self._journal_writes.current_write_elapsed_s())
        bad = [closed] if closed else []
        bad += [f"accelerator {gpu.gpu_id}: {gpu.reason}" for gpu in gpus if not gpu.available]
        self._node_info = msgspec.structs.replace(
            self._node_info,
            hostname=facts.hostname,
            cpus=facts.cpus,
            memory_total_bytes=facts.memory_total_bytes,
            memory_used_bytes=facts.memory_used_bytes,
            gpus=gpus,
            closed=closed,
            disk_total_bytes=self._disk_monitor.last_reading.total_bytes,
            disk_free_bytes=self._disk_monitor.last_reading.free_bytes,
            status=NodeStatus.DEGRADED if bad else NodeStatus.HEALTHY,
            status_reason="; ".join(bad)[:200],
            last_heartbeat=self._clock.wall_s(),
        )

    async def _renew_certificate_periodically(self) -> None:
        while self._connection.access.tls is not None:
            try:
                wait_s = await renew_certificate_if_due_and_get_wait_s(
                    self._journal.node_dir,
                    self._connection,
                    now=self._clock.wall_s(),
                    timeout_s=LEADER_CALL_TIMEOUT_S,
                    offload=self._disk_access.run_job_file_call,
                )
            except (GenieError, OSError, ValueError) as error:  # also: its file cannot be read
                _log.warning("could not renew the node's certificate: %s", error)
                wait_s = CERTIFICATE_RENEWAL_RETRY_S
            await self._clock.sleep(min(max(wait_s, 0.05), CERTIFICATE_CHECK_INTERVAL_S))

    async def _shut_down_when_requested(self) -> None:
        await self._stop_requested.wait()
        self._jobs.stop_accepting_launches("the agent is stopping")
        if self._keeps_jobs:
            # The next agent starts those that have not started by then.
            await self._wait_for_condition(
                lambda: all(job.has_started for job in self._jobs.live_jobs.values()),
                SHUTDOWN_TIMEOUT_AFTER_GRACE_S,
            )
            raise _AgentStoppedError
        self._jobs.kill_all_jobs("ended by Genie: the agent was stopped")
        await self._wait_for_condition(
            lambda: not self._jobs.live_jobs, self._config.stop_grace_s + SHUTDOWN_TIMEOUT_AFTER_GRACE_S
        )
        self._heartbeat_due_event.set()
        await self._wait_for_condition(
            lambda: not (self._jobs.unsettled_exits and self._connection.is_connected),
            LEAVE_REQUEST_TIMEOUT_S,
        )
        await self._notify_controller_of_shutdown()
        raise _AgentStoppedError

    async def _notify_controller_of_shutdown(self) -> None:
        """Notifies the controller; otherwise it lists the node as unresponsive until it is removed."""
        if not self._connection.is_connected:
            return
        request = Leave(node_id=self._node_info.node_id, incarnation=self._node_info.incarnation)
        try:
            await self._connection.call_leader(request, timeout_s=LEAVE_REQUEST_TIMEOUT_S)
        except GenieError as error:
            _log.warning("could not notify the controller of the shutdown: %s", error)

    async def _wait_for_condition(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Waits until the condition is true or the timeout expires."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        while not condition() and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(_CONDITION_POLL_INTERVAL_S)


def _initial_node_info(config: AgentConfig, *, node_id: str, host: str) -> NodeInfo:
    """The node before its first inventory."""
    return NodeInfo(
        node_id=node_id,
        hostname="",
        role=NodeRole.WORKER,
        host=host,
        version=__version__,
        labels=dict(config.labels),
        rack=config.rack or "",
    )


class _AgentStoppedError(Exception):
    """Ends the TaskGroup; not raised outside this module."""
