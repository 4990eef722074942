"""The protocol with agents: registration, heartbeats, launches, kills and removal.

Every heartbeat compares the jobs that the agent runs with the ledger: a process without a hold is killed,
a hold without a process is released. The failure detector is in membership.py, drains are in drains.py, state
changes of jobs are in jobs/lifecycle.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import msgspec

from genie.config import ControllerConfig
from genie.controller.checks import check_node
from genie.controller.connection import Connection, Handlers
from genie.controller.election import Election
from genie.controller.jobs.backoff import LaunchFailureCause
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.jobs.launches import JobLaunches
from genie.controller.jobs.lifecycle import CHANGES_PER_TICK_MAX, JobLifecycle, LostWorker
from genie.controller.jobs.outcomes import failed_because_of_node, is_current_placement, stopping_reason
from genie.controller.jobs.sessions import Sessions
from genie.controller.ledger import Ledger, Transaction
from genie.controller.nodes.faults import NodeFaults
from genie.controller.nodes.membership import Membership
from genie.controller.nodes.orders import AgentOrders
from genie.controller.nodes.run_times import RunTimes
from genie.controller.rows import NodeRecord
from genie.errors import (
    FencedError,
    GenieError,
    LeadershipError,
    NodeError,
    NodeUnfitError,
    ProtocolError,
    StoreError,
    TransportError,
    UnreachableError,
    VersionError,
)
from genie.model.allocation import Hold, NodeHolds
from genie.model.job import Job, JobKind, JobState, StopReason, parse_worker_name
from genie.model.messages import (
    ConfirmLaunch,
    Done,
    ExecutorReady,
    ExitReport,
    Heartbeat,
    HeartbeatAck,
    JobOrder,
    Kill,
    Launch,
    Leave,
    LogChunk,
    ReadLog,
    Register,
    Registered,
    RemoveNode,
    RunningJob,
)
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

ORDER_TIMEOUT_S = 5.0
# One heartbeat may have been in flight while the launch was confirmed; two cannot.
_HEARTBEATS_NOT_LISTING_WORKER_MAX = 2
_EXITS_WRITE_TIMEOUT_TTL_SHARE = 0.1
_LATE_NODES_NAMED_MAX = 3


class Agents:
    """`controllers` returns HOST:PORT of every controller, this one first; `refresh_controllers` reads them
    from the store. `check_rows_of_node_writable` raises ReleaseSkewError if a newer release wrote what the
    store has of a node; `forget_node` removes a node and revokes its tokens; `wake` triggers a scheduling
    pass."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        jobs: JobCatalog,
        launches: JobLaunches,
        lifecycle: JobLifecycle,
        sessions: Sessions,
        membership: Membership,
        election: Election,
        orders: AgentOrders,
        faults: NodeFaults,
        config: ControllerConfig,
        clock: Clock,
        controllers: Callable[[], tuple[str, ...]],
        refresh_controllers: Callable[[], Awaitable[None]],
        check_rows_of_node_writable: Callable[[str], Awaitable[None]],
        forget_node: Callable[[str], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._launches = launches
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._membership = membership
        self._election = election
        self._orders = orders
        self._node_faults = faults
        self._clock = clock
        self._get_controllers = controllers
        self._refresh_controllers = refresh_controllers
        self._check_rows_of_node_writable = check_rows_of_node_writable
        self._forget_node = forget_node
        self._run_times = RunTimes(clock)
        self._unreclaimable_nodes_warned: set[str] = set()
        self._wake = wake
        self._node_ttl_s = config.node_ttl_s
        self._confirm_timeout_s = config.node_ttl_s + config.node_reclaim_grace_s
        self._confirm_deadlines_s: dict[str, float] = {}
        """Deadline of each unconfirmed launch, by worker."""
        self._unlisted_worker_counts_by_node: dict[str, dict[tuple[str, int], int]] = {}
        """By node: heartbeats in a row that did not list a worker which the ledger has there."""

    def handlers(self) -> Handlers:
        return {
            Register: self.register,
            Heartbeat: self.heartbeat,
            Leave: self.leave,
            RemoveNode: self.remove_node,
            ConfirmLaunch: self.confirm_launch,
            ExecutorReady: self.executor_ready,
        }

    # -- requests of agents -----------------------------------------------------------------

    async def register(self, connection: Connection, request: Register) -> Registered:
        node = request.node
        node_id = connection.require_connection_of_node(node.node_id)
        check_node(node)
        self._ledger.check_leading_and_up_to_date()
        self._check_incarnation(node_id, node.incarnation)
        self._check_holds_readable(node_id)
        await self._end_jobs_of_earlier_incarnations(node_id, request)
        async with self._election.end_with_term():
            await self._refresh_controllers()
        # The reply to this request may get lost; the reply to Hello has certainly been read.
        record = NodeRecord(
            info=node, controllers=connection.announced_controller_addresses, ttl_s=self._node_ttl_s
        )

        def build(txn: Transaction) -> None:
            self._check_incarnation(node_id, node.incarnation)
            if self._ledger.nodes.why_read_only(node_id) or self._ledger.holds.why_read_only(node_id):
                return  # its jobs keep running; nothing is placed there
            before = self._ledger.nodes.get(node_id) or record
            kept = msgspec.structs.replace(
                record, drain_status=before.drain_status, moves_jobs=before.moves_jobs
            )
            txn.put(self._ledger.nodes, node_id, kept)
            if node_id not in self._ledger.holds:
                txn.put(self._ledger.holds, node_id, NodeHolds(node_id=node_id))

        await self._ledger.write(build)
        replaced = self._membership.register_node(
            node, connection.peer, now_s=self._clock.monotonic_s(), now_wall_s=self._clock.wall_s()
        )
        self._unlisted_worker_counts_by_node.pop(node_id, None)
        if replaced is not None:
            replaced.close()
        _log.info("node %s registered, incarnation %d", node_id, node.incarnation)
        self._wake()
        return Registered(
            leader_token=self._election.fencing_token,
            ttl_s=self._node_ttl_s,
            controllers=self._get_controllers(),
        )

    async def heartbeat(self, connection: Connection, request: Heartbeat) -> HeartbeatAck:
        node_id = connection.require_connection_of_node(request.node_id)
        member, info = self._membership.get(node_id), request.node
        if member is not None and member.reported_info == info:
            info = member.reported_info  # unchanged, and already validated
        else:
            check_node(info)
        is_registered = member is not None and member.peer is connection.peer
        is_first = member is not None and not member.has_sent_heartbeat
        if is_registered:
            self._check_incarnation(node_id, request.incarnation, must_equal_known=True)
            if (info.node_id, info.incarnation) != (node_id, request.incarnation):
                info = msgspec.structs.replace(info, node_id=node_id, incarnation=request.incarnation)
            self._membership.record_heartbeat(
                info, now_s=self._clock.monotonic_s(), now_wall_s=self._clock.wall_s()
            )
        if not self._ledger.is_up_to_date:
            return HeartbeatAck(leading=False, leader_token=self._election.fencing_token)
        if not is_registered:
            raise FencedError(f"node {node_id} is not registered on this connection", hint="register first")
        settled, kill = await self._settle_exits_and_find_kills(node_id, request)
        if is_first:
            self._wake()
        leading = self._election.is_leading
        return HeartbeatAck(
            leading=leading,
            leader_token=self._election.fencing_token,
            jobs_to_kill=tuple(kill),
            settled_exits=tuple(settled),
        )

    async def leave(self, connection: Connection, request: Leave) -> Done:
        node_id = connection.require_connection_of_node(request.node_id)

        def build(txn: Transaction) -> None:
            self._check_incarnation(node_id, request.incarnation, must_equal_known=True)
            held = self._ledger.holds.get(node_id)
            if held is not None and held.holds:
                raise NodeError(
                    f"node {node_id} cannot leave: it still has {len(held.holds)} workers of jobs"
                )
            record = self._ledger.nodes.get(node_id)
            if record is not None:
                # The record is kept for its hardware and its last incarnation.
                txn.put(self._ledger.nodes, node_id, msgspec.structs.replace(record, has_left=True))

        await self._ledger.write(build)
        self._membership.remove_node(node_id)
        self._unlisted_worker_counts_by_node.pop(node_id, None)
        _log.info("node %s has left the cluster", node_id)
        self._wake()
        return Done()

    async def confirm_launch(self, connection: Connection, request: ConfirmLaunch) -> Done:
        await self._launches.confirm_launch(
            connection.identity.name,
            request.job_id,
            epoch=request.epoch,
            incarnation=request.incarnation,
            wait_s=request.wait_s,
        )
        self._confirm_deadlines_s.pop(request.job_id, None)
        self._node_faults.unblock_node(connection.identity.name)
        return Done()

    async def executor_ready(self, connection: Connection, request: ExecutorReady) -> Done:
        job = self._jobs.get(request.job_id)
        if job is None or not is_current_placement(job, 0, connection.identity.name, request.epoch):
            raise FencedError(f"launch {request.epoch} of job {request.job_id[:80]} is no longer valid")
        self._sessions.set_endpoint(job, request.epoch, request.endpoint)
        return Done()

    # -- requests to agents -----------------------------------------------------------------

    def send_launches(self, jobs: Iterable[Job]) -> None:
        """Send the launches of placed jobs; those for one node in one message."""
        confirm_by_s = self._clock.monotonic_s() + self._confirm_timeout_s
        by_node: dict[str, list[tuple[Job, int]]] = {}
        for job in jobs:
            for rank, placement in enumerate(job.placements):
                self._confirm_deadlines_s[job.worker_name(rank)] = confirm_by_s
                by_node.setdefault(placement.node_id, []).append((job, rank))
        for node_id, workers in by_node.items():
            order = self._deliver_launches(node_id, workers)
            self._orders.send(order, name=f"launches on {node_id}", order_count=len(workers))

    def send_kills(self, job: Job) -> None:
        """Send the kill of a job to its agents. Heartbeats repeat it until the job has ended."""
        for rank, placement in enumerate(job.placements):
            if placement.outcome is None and self._orders.free_capacity > 0:
                self._orders.send(self._deliver_kill(job, rank), name=f"kill of {job.worker_name(rank)}")

    async def read_log(self, worker_name: str, node_id: str, request: ReadLog) -> LogChunk:
        """Read a log from the agent that has it."""
        peer = self._membership.get_connection(node_id)
        if peer is None:
            raise UnreachableError(
                f"the log of {worker_name} is on node {node_id}, which is not connected",
                hint="try again when the node is connected",
            )
        forwarded = msgspec.structs.replace(request, job_id=worker_name)
        return await peer.call(forwarded, timeout_s=request.wait_s + ORDER_TIMEOUT_S)

    def find_blob_tenant(self, node_id: str, digest: str) -> str | None:
        """Find the tenant whose unfinished job on this node needs that blob; extends the job's confirmation
        deadline, because the node is downloading."""
        held = self._ledger.holds.get(node_id)
        workers = [parse_worker_name(hold.job_id) for hold in held.holds] if held else []
        jobs = [(self._jobs.get(job_id), rank) for job_id, rank in workers]
        matching = [(job, rank) for job, rank in jobs if job and _needs_blob(job, digest)]
        for job, rank in matching:
            self._extend_confirmation_deadline(job, rank)
        return matching[0][0].tenant if matching else None

    # -- periodic work ----------------------------------------------------------------------

    def is_in_contact(self, job: Job) -> bool:
        """Whether a node of this job sends heartbeats; otherwise the job may have ended or be lost."""
        now_s = self._clock.monotonic_s()
        node_ids = {placement.node_id for placement in job.placements if placement.outcome is None}
        return any(self._membership.is_in_contact(node_id, now_s) for node_id in node_ids)

    def jobs_exceeding_time_limit(self) -> list[Job]:
        """Running jobs that have reached their time limit, on nodes that send heartbeats."""
        running = self._jobs.jobs_in_states(JobState.RUNNING)
        return list(filter(self.is_in_contact, self._run_times.jobs_exceeding_limit(running)))

    async def begin_term(self) -> None:
        """Start a term: queue jobs again whose launches were not confirmed in an earlier one."""
        now_s = self._clock.monotonic_s()
        self._membership.begin_term(now_s)
        self._sessions.begin_term(now_s)
        self._run_times.clear()
        self._unlisted_worker_counts_by_node.clear()
        self._node_faults.clear()
        self._confirm_deadlines_s.clear()
        reason = "the controller was replaced before the launch was confirmed"
        await self._lifecycle.requeue_unconfirmed_jobs(
            (job, reason) for job in self._jobs.jobs_in_states(JobState.PLACING)
        )

    async def requeue_unconfirmed(self) -> None:
        now_s = self._clock.monotonic_s()
        unconfirmed: list[tuple[Job, str]] = []
        for job in self._jobs.jobs_in_states(JobState.PLACING):
            late = {
                placement.node_id
                for rank, placement in enumerate(job.placements)
                if now_s
                >= self._confirm_deadlines_s.setdefault(
                    job.worker_name(rank), now_s + self._confirm_timeout_s
                )
            }
            if job.stop:  # its release was interrupted
                unconfirmed.append((job, stopping_reason(job)))
            elif late:
                nodes = ", ".join(sorted(late)[:_LATE_NODES_NAMED_MAX])
                unconfirmed.append((job, f"the launch was not confirmed before the timeout on {nodes}"))
        await self._lifecycle.requeue_unconfirmed_jobs(unconfirmed[:CHANGES_PER_TICK_MAX])
        placing = {
            job.worker_name(rank)
            for job in self._jobs.jobs_in_states(JobState.PLACING)
            for rank in range(len(job.placements))
        }
        self._confirm_deadlines_s = {
            key: by_s for key, by_s in self._confirm_deadlines_s.items() if key in placing
        }

    async def reclaim_jobs(self) -> None:
        """Reclaim the jobs of nodes without heartbeats whose dead-man timers have certainly expired. Jobs
        without one may still run; they keep their resources until the node returns or is removed."""
        this_controller = self._get_controllers()[0]
        lost: list[LostWorker] = []
        for node_id, held in list(self._ledger.holds.items()):
            record = self._ledger.nodes.get(node_id)
            if (
                not held.reclaimable_holds
                or record is None
                or not self._is_reclaimable(node_id, record.ttl_s)
            ):
                continue
            if this_controller not in record.controllers:
                # Its agent does not know this controller, so it may keep its jobs until a leader is found.
                if node_id not in self._unreclaimable_nodes_warned:
                    self._unreclaimable_nodes_warned.add(node_id)
                    _log.warning(
                        "node %s sends no heartbeats, and its jobs are not reclaimed because it does not "
                        "know the controller at %s; if it is down permanently, run 'genie forget %s'",
                        node_id,
                        this_controller,
                        node_id,
                    )
                continue
            silence_s = self._membership.time_since_heartbeat_s(node_id, self._clock.monotonic_s())
            reason = f"node {node_id} sent no heartbeat for {silence_s:.0f} s"
            lost += self._make_lost_workers(node_id, held.reclaimable_holds, reason, ttl_s=record.ttl_s)
        if count := await self._lifecycle.record_lost_workers(lost[:CHANGES_PER_TICK_MAX]):
            _log.warning("released the resources of %d lost workers: %s", count, lost[0].reason)

    async def remove_node(self, connection: Connection, request: RemoveNode) -> Done:
        """Remove a disconnected node: its jobs are lost, or queued again if they are restartable, and its
        tokens are revoked. If it is only isolated, it ends its jobs when it is rejected. A node of which a
        newer release wrote a row is not removed."""
        node_id = request.node_id
        await self._check_rows_of_node_writable(node_id)
        record, held = self._ledger.nodes.get(node_id), self._ledger.holds.get(node_id)
        is_unreadable = self._ledger.nodes.is_unreadable(node_id) or self._ledger.holds.is_unreadable(node_id)
        if is_unreadable or (record is not None and not record.has_left):
            ttl_s = self._node_ttl_s if record is None else record.ttl_s
            self._check_removable(node_id, ttl_s=ttl_s)
            reason = f"node {node_id} was removed (genie forget)"
            if held is not None:
                lost = self._make_lost_workers(node_id, held.holds, reason, ttl_s=ttl_s)
                await self._lifecycle.record_lost_workers(lost)
            else:
                await self._record_unreadable_workers_lost(node_id, reason)
        await self._forget_node(node_id)
        self._membership.remove_node(node_id)
        self._node_faults.unblock_node(node_id)
        return Done()

    def _check_removable(self, node_id: str, *, ttl_s: float) -> None:
        now_s = self._clock.monotonic_s()
        # The connection of a node that is isolated or hangs may stay open for a long time.
        is_silent = self._membership.is_disconnected(node_id, now_s)
        if self._membership.get_connection(node_id) is not None and not is_silent:
            raise NodeError(
                f"cannot remove node {node_id}: it is connected",
                hint="stop its agent with 'genie down' on that machine, then try again",
            )
        left_s = self._membership.reclaimable_in_s(node_id, now_s, deadman_timeout_s=ttl_s)
        if left_s > 0:
            silence_s = self._membership.time_since_heartbeat_s(node_id, now_s)
            raise NodeError(
                f"node {node_id} is disconnected, but its jobs may still run: {silence_s:.0f} s without a "
                "heartbeat",
                hint=f"try again in {math.ceil(left_s)} s",
            )

    def _is_reclaimable(self, node_id: str, ttl_s: float) -> bool:
        now_s = self._clock.monotonic_s()
        return self._membership.is_reclaimable(node_id, now_s, deadman_timeout_s=ttl_s)

    def _make_lost_workers(
        self, node_id: str, holds: Iterable[Hold], reason: str, *, ttl_s: float
    ) -> list[LostWorker]:
        """The workers with these holds, which are lost unless the node sends a heartbeat before that is
        recorded."""
        return [
            LostWorker(hold.job_id, node_id, hold.epoch, reason, lambda: self._is_reclaimable(node_id, ttl_s))
            for hold in holds
        ]

    async def _record_unreadable_workers_lost(self, node_id: str, reason: str) -> None:
        """Lose the jobs of a node whose stored allocations cannot be read."""
        await self._lifecycle.record_lost_workers(
            LostWorker(job.worker_name(rank), node_id, placement.epoch, reason)
            for job in self._jobs.jobs_in_states(JobState.PLACING, JobState.RUNNING)
            for rank, placement in enumerate(job.placements)
            if placement.node_id == node_id and placement.outcome is None
        )

    def disconnect_outdated_nodes(self) -> None:
        """Close the connections of nodes with an outdated list of controllers: they register again and get
        the current one."""
        controllers = self._get_controllers()
        for member in self._membership.registered_nodes():
            record = self._ledger.nodes.get(member.info.node_id)
            if record is not None and set(record.controllers) != set(controllers):
                member.peer.close()

    # -- details ----------------------------------------------------------------------------

    def _check_incarnation(self, node_id: str, incarnation: int, *, must_equal_known: bool = False) -> None:
        record = self._ledger.nodes.get(node_id) if self._ledger.is_loaded else None
        known = record.info.incarnation if record is not None else incarnation
        if incarnation < known or (must_equal_known and incarnation != known):
            raise FencedError(
                f"incarnation {incarnation} of node {node_id} was replaced by {known}",
                hint="another agent with this node's identity is running",
            )

    def _check_holds_readable(self, node_id: str) -> None:
        if self._ledger.holds.is_unreadable(node_id) and not self._ledger.holds.why_read_only(node_id):
            raise NodeError(
                f"the stored allocations of node {node_id} cannot be read",
                hint=f"run 'genie forget {node_id}' as the owner, then let the node join again",
            )

    def _isolate_errors_of_job(self, worker_name: str) -> AbstractContextManager[None]:
        """A failed change of this job affects no other job."""
        return self._ledger.quarantine.quarantine_row_on_error(
            self._ledger.jobs.prefix + parse_worker_name(worker_name)[0]
        )

    async def _end_jobs_of_earlier_incarnations(self, node_id: str, request: Register) -> None:
        """End them except those that the agent has adopted."""
        await self._lifecycle.record_exits(node_id, request.exits)
        held = self._ledger.holds.get(node_id)
        running = {(job.job_id, job.epoch) for job in request.running}
        await self._lifecycle.record_lost_workers(
            LostWorker(hold.job_id, node_id, hold.epoch, f"node {node_id} restarted")
            for hold in (held.holds if held else ())
            if hold.incarnation < request.node.incarnation and (hold.job_id, hold.epoch) not in running
        )

    async def _settle_exits_and_find_kills(
        self, node_id: str, request: Heartbeat
    ) -> tuple[list[JobOrder], list[JobOrder]]:
        """Return the settled exits and the jobs to kill. If the store fails nothing is settled, and the agent
        reports the exits again."""
        settled: list[JobOrder] = []
        try:
            # The reply must not wait for a slow store: it refreshes the dead-man timers of the node's jobs.
            async with asyncio.timeout(self._node_ttl_s * _EXITS_WRITE_TIMEOUT_TTL_SHARE):
                faults = [report for report in request.exits if self._is_node_fault(node_id, report)]
                reports = await self._lifecycle.record_exits(node_id, request.exits)
                for report in faults:
                    if report in reports:
                        self._node_faults.record_fault(node_id, report.reason)
                settled += [JobOrder(job_id=report.job_id, epoch=report.epoch) for report in reports]
                await self._release_unlisted_workers(node_id, request)
        except TimeoutError:
            _log.warning("could not store the exits reported by %s in time; the store is slow", node_id)
        except (StoreError, LeadershipError) as error:
            _log.warning("could not store the exits reported by %s: %s", node_id, error)
        return settled, self._jobs_to_kill(node_id, request.running)

    def _is_node_fault(self, node_id: str, report: ExitReport) -> bool:
        job_id, rank = parse_worker_name(report.job_id)
        job = self._jobs.get(job_id)
        is_current = job is not None and is_current_placement(job, rank, node_id, report.epoch)
        return job is not None and is_current and failed_because_of_node(job, report)

    async def _release_unlisted_workers(self, node_id: str, request: Heartbeat) -> None:
        reported = {(job.job_id, job.epoch) for job in request.running}
        reported |= {(report.job_id, report.epoch) for report in request.exits}
        held = self._ledger.holds.get(node_id) or NodeHolds(node_id=node_id)
        before = self._unlisted_worker_counts_by_node.get(node_id, {})
        missing: dict[tuple[str, int], int] = {}
        for hold in held.holds:
            key = (hold.job_id, hold.epoch)
            if key not in reported and not self._is_being_launched(node_id, hold):
                missing[key] = before.get(key, 0) + 1
        self._unlisted_worker_counts_by_node[node_id] = missing
        reason = f"the agent of node {node_id} no longer runs it"
        await self._lifecycle.record_lost_workers(
            LostWorker(unit, node_id, epoch, reason)
            for (unit, epoch), count in missing.items()
            if count >= _HEARTBEATS_NOT_LISTING_WORKER_MAX
        )

    def _is_being_launched(self, node_id: str, hold: Hold) -> bool:
        """Whether the agent may not list the worker yet."""
        job_id, rank = parse_worker_name(hold.job_id)
        job = self._jobs.get(job_id)
        if job is None or job.state is not JobState.PLACING:
            return False
        return is_current_placement(job, rank, node_id, hold.epoch)

    def _jobs_to_kill(self, node_id: str, running: Sequence[RunningJob]) -> list[JobOrder]:
        orders = []
        for item in running:
            job_id, rank = parse_worker_name(item.job_id)
            job = self._jobs.get(job_id)
            if job is None and self._ledger.jobs.is_unreadable(job_id):
                continue  # it may be another version's; its hold stays while it runs
            if job is None or not is_current_placement(job, rank, node_id, item.epoch):
                orders.append(JobOrder(job_id=item.job_id, epoch=item.epoch, reason="not in the ledger"))
                continue
            self._run_times.record(job, item.elapsed_s)
            if job.state is JobState.RUNNING and (job.stop or job.spec.kind is JobKind.COMMAND):
                self._jobs.set_unkillable_reason(job, rank, item.status_note)
            if job.stop:
                orders.append(
                    JobOrder(
                        job_id=item.job_id,
                        epoch=item.epoch,
                        reason=stopping_reason(job),
                        grace_s=self._kill_grace_s(job),
                    )
                )
            elif job.state is JobState.PLACING:
                self._extend_confirmation_deadline(job, rank)
            elif item.endpoint is not None and job.spec.kind is JobKind.SESSION:
                with self._isolate_errors_of_job(item.job_id):
                    self._sessions.set_endpoint(job, item.epoch, item.endpoint)
            elif job.spec.kind is JobKind.SESSION:
                self._sessions.set_executor_status(job, item.status_note)
        return orders

    def _extend_confirmation_deadline(self, job: Job, rank: int) -> None:
        if job.state is JobState.PLACING:
            self._confirm_deadlines_s[job.worker_name(rank)] = (
                self._clock.monotonic_s() + self._confirm_timeout_s
            )

    def _kill_grace_s(self, job: Job) -> float | None:
        """The job's own grace period if it is preempted, up to its time limit; otherwise None, the
        default."""
        if job.stop is not StopReason.PREEMPT:
            return None
        return min(job.spec.constraints.grace_s, max(self._run_times.remaining_s(job), 0.0))

    def _worker_hosts(self, job: Job) -> tuple[str, ...]:
        """Addresses at which the workers reach each other, by rank."""
        records = [self._ledger.nodes.get(placement.node_id) for placement in job.placements]
        return tuple(record.info.host if record is not None else "" for record in records)

    async def _deliver_launches(self, node_id: str, workers: Sequence[tuple[Job, int]]) -> None:
        token = self._election.require_fencing_token()
        node_holds = self._ledger.holds.get(node_id) or NodeHolds(node_id=node_id)
        withheld = {(hold.job_id, hold.epoch) for hold in node_holds.withheld_holds}
        orders = [
            Launch(
                job_id=job.worker_name(rank),
                tenant=job.tenant,
                spec=job.spec,
                placement=job.placements[rank],
                leader_token=token,
                ticket_sha256=job.ticket_sha256,
                rank=rank,
                hosts=self._worker_hosts(job),
                has_deadman_timer=(job.worker_name(rank), job.epoch) not in withheld,
            )
            for job, rank in workers
        ]
        peer = self._membership.get_connection(node_id)
        outcomes: Sequence[Done | GenieError]
        if peer is not None:
            outcomes = await peer.call_each(orders, timeout_s=ORDER_TIMEOUT_S)
        else:
            outcomes = [UnreachableError(f"node {node_id} is not connected")] * len(orders)
        for (job, rank), error in zip(workers, outcomes, strict=True):
            if not isinstance(error, GenieError):
                continue
            try:
                await self._handle_failed_launch(job, node_id, error)
            except GenieError as failure:  # continue with the other launches
                _log.info("could not record the failed launch of %s: %s", job.worker_name(rank), failure)

    async def _handle_failed_launch(self, job: Job, node_id: str, error: GenieError) -> None:
        reason = f"node {node_id} rejected the launch: {error}"
        if isinstance(error, VersionError):
            # The node runs another release: the job waits for another node, or for its upgrade.
            await self._lifecycle.requeue_unconfirmed(
                job.job_id, epoch=job.epoch, reason=reason, cause=LaunchFailureCause.NODE
            )
            return
        # A ProtocolError has reached the agent: sending it again would not help.
        if isinstance(error, TransportError) and not isinstance(error, ProtocolError):
            reason = f"the launch on node {node_id} could not be delivered: {error}"
            await self._lifecycle.requeue_unconfirmed(job.job_id, epoch=job.epoch, reason=reason)
            return
        if isinstance(error, FencedError):
            await self._election.step_down_if_replaced()
        cause = LaunchFailureCause.JOB
        if isinstance(error, NodeUnfitError):
            cause = LaunchFailureCause.NODE
            self._node_faults.record_fault(node_id, error.message)
        await self._lifecycle.requeue_unconfirmed(job.job_id, epoch=job.epoch, reason=reason, cause=cause)

    async def _deliver_kill(self, job: Job, rank: int) -> None:
        placement = job.placements[rank]
        peer = self._membership.get_connection(placement.node_id)
        if peer is None:
            return
        token = self._election.require_fencing_token()
        order = Kill(
            job_id=job.worker_name(rank),
            epoch=placement.epoch,
            leader_token=token,
            reason=stopping_reason(job),
            grace_s=self._kill_grace_s(job),
        )
        await peer.call(order, timeout_s=ORDER_TIMEOUT_S)


def _needs_blob(job: Job, digest: str) -> bool:
    return job.spec.workdir is not None and job.spec.workdir.digest == digest
