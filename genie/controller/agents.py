"""What agents say and are told: registration, heartbeats, launches, kills.

Every heartbeat compares what the agent runs with what the ledger says it holds, and either side
yields: a process without a hold is killed, a hold without a process is released. Not for: the
failure detector (membership.py) and the steps of a job (jobs.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from genie.config import ControllerConfig
from genie.controller.checks import check_node
from genie.controller.connection import Connection, Handlers
from genie.controller.election import Election
from genie.controller.jobs import Jobs, ends_at, is_at, stop_reason
from genie.controller.ledger import Ledger, NodeRecord, Transaction
from genie.controller.membership import Membership
from genie.controller.orders import Orders
from genie.controller.sessions import Sessions
from genie.errors import (
    FencedError,
    GenieError,
    LeadershipError,
    NodeError,
    NodeNotFoundError,
    ProtocolError,
    StoreError,
    TransportError,
    UnreachableError,
    UsageError,
)
from genie.model.allocation import NodeLedger
from genie.model.job import Job, JobKind, JobState, Stop, parse_unit
from genie.model.messages import (
    ConfirmLaunch,
    Done,
    DrainNode,
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
    UndrainNode,
)
from genie.runtime.clock import Clock

_log = logging.getLogger(__name__)

REASON_CHARS_MAX = 200

ORDER_TIMEOUT_S = 5.0
# One heartbeat may have been on its way while the launch was confirmed; two cannot.
_MISSED_HEARTBEATS = 2
_SETTLE_SHARE = 0.1
_NAMED = 3


class Agents:
    """`controllers` gives host:port of every controller; the first is this one."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        jobs: Jobs,
        sessions: Sessions,
        membership: Membership,
        election: Election,
        orders: Orders,
        config: ControllerConfig,
        clock: Clock,
        controllers: Callable[[], tuple[str, ...]],
        refresh_controllers: Callable[[], Awaitable[None]],
        forget: Callable[[str], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._sessions = sessions
        self._membership = membership
        self._election = election
        self._orders = orders
        self._clock = clock
        self._controllers = controllers
        self._refresh_controllers = refresh_controllers
        self._forget = forget
        self._left_alone: set[str] = set()
        self._wake = wake
        self._ttl_s = config.node_ttl_s
        self._confirm_s = config.node_ttl_s + config.reclaim_grace_s
        self._confirm_by_s: dict[str, float] = {}
        """By worker: one that is being prepared must not make up for another that nobody has."""
        self._missing: dict[str, dict[tuple[str, int], int]] = {}

    def handlers(self) -> Handlers:
        return {
            Register: self.register,
            Heartbeat: self.heartbeat,
            Leave: self.leave,
            RemoveNode: self.remove,
            DrainNode: self.drain,
            UndrainNode: self.undrain,
            ConfirmLaunch: self.confirm_launch,
            ExecutorReady: self.executor_ready,
        }

    # -- what agents say ----------------------------------------------------------------------

    async def register(self, connection: Connection, request: Register) -> Registered:
        node = request.node
        node_id = connection.check_is(node.node_id)
        check_node(node)
        self._election.require_token()
        self._check_incarnation(node_id, node.incarnation)
        await self._end_earlier_lives(node_id, node.incarnation, request.exits)
        await self._refresh_controllers()
        # What it is told now it may never read; that it asks proves that it has read the answer to Hello.
        record = NodeRecord(info=node, controllers=connection.told, ttl_s=self._ttl_s)

        def build(txn: Transaction) -> None:
            self._check_incarnation(node_id, node.incarnation)
            before = self._ledger.nodes.get(node_id)
            drained = before.drained if before is not None else ""
            txn.put(self._ledger.nodes, node_id, msgspec.structs.replace(record, drained=drained))
            if node_id not in self._ledger.holds:
                txn.put(self._ledger.holds, node_id, NodeLedger(node_id=node_id))

        await self._ledger.write(build)
        replaced = self._membership.attach(
            node, connection.peer, now_s=self._clock.monotonic_s(), now_at=self._clock.wall_s()
        )
        self._missing.pop(node_id, None)
        if replaced is not None:
            replaced.close()
        _log.info("node %s registered, incarnation %d", node_id, node.incarnation)
        self._wake()
        return Registered(
            leader_token=self._election.token, ttl_s=self._ttl_s, controllers=self._controllers()
        )

    async def heartbeat(self, connection: Connection, request: Heartbeat) -> HeartbeatAck:
        node_id = connection.check_is(request.node_id)
        member, info = self._membership.get(node_id), request.node
        if member is not None and member.said == info:
            info = member.said  # nothing new, and looked at before
        else:
            check_node(info)
        registered = member is not None and member.peer is connection.peer
        first = member is not None and not member.has_beaten
        if registered:
            self._check_incarnation(node_id, request.incarnation, exactly=True)
            if (info.node_id, info.incarnation) != (node_id, request.incarnation):
                info = msgspec.structs.replace(info, node_id=node_id, incarnation=request.incarnation)
            self._membership.heard(info, now_s=self._clock.monotonic_s(), now_at=self._clock.wall_s())
        if not self._election.is_leading or not self._ledger.is_loaded:
            return HeartbeatAck(leading=False, leader_token=self._election.token)
        if not registered:
            raise FencedError(f"node {node_id} is not registered on this connection", hint="register first")
        settled, kill = await self._reconcile(node_id, request)
        if first:
            self._wake()
        leading = self._election.is_leading
        return HeartbeatAck(
            leading=leading, leader_token=self._election.token, kill=tuple(kill), settled=tuple(settled)
        )

    async def leave(self, connection: Connection, request: Leave) -> Done:
        node_id = connection.check_is(request.node_id)

        def build(txn: Transaction) -> None:
            self._check_incarnation(node_id, request.incarnation, exactly=True)
            held = self._ledger.holds.get(node_id)
            if held is not None and held.holds:
                raise NodeError(f"node {node_id} still holds jobs: {len(held.holds)}")
            record = self._ledger.nodes.get(node_id)
            if record is not None:
                # Kept: what the cluster can ever run, and which incarnation was the last, are still known.
                txn.put(self._ledger.nodes, node_id, msgspec.structs.replace(record, left=True))

        await self._ledger.write(build)
        self._membership.detach(node_id)
        self._missing.pop(node_id, None)
        _log.info("node %s has left", node_id)
        self._wake()
        return Done()

    async def confirm_launch(self, connection: Connection, request: ConfirmLaunch) -> Done:
        await self._jobs.confirm(
            connection.identity.name, request.job_id, epoch=request.epoch, incarnation=request.incarnation
        )
        self._confirm_by_s.pop(request.job_id, None)
        return Done()

    async def executor_ready(self, connection: Connection, request: ExecutorReady) -> Done:
        job = self._jobs.get(request.job_id)
        if job is None or not is_at(job, 0, connection.identity.name, request.epoch):
            raise FencedError(f"launch {request.epoch} of job {request.job_id[:80]} is void")
        self._sessions.ready(job, request.epoch, request.endpoint)
        return Done()

    # -- what agents are told -----------------------------------------------------------------

    def launch(self, jobs: Iterable[Job]) -> None:
        """Sends jobs that were just placed on their way; those for one node together."""
        confirm_by_s = self._clock.monotonic_s() + self._confirm_s
        by_node: dict[str, list[tuple[Job, int]]] = {}
        for job in jobs:
            for rank, placement in enumerate(job.placements):
                self._confirm_by_s[job.unit(rank)] = confirm_by_s
                by_node.setdefault(placement.node_id, []).append((job, rank))
        for node_id, workers in by_node.items():
            order = self._deliver(node_id, workers)
            self._orders.send(order, name=f"launches on {node_id}", count=len(workers))

    def kill(self, job: Job) -> None:
        """Asks the agents to end it now. Heartbeats ask again until it is gone."""
        for rank, placement in enumerate(job.placements):
            if placement.outcome is None and self._orders.has_room:
                self._orders.send(self._kill(job, rank), name=f"kill of {job.unit(rank)}")

    async def read_log(self, unit: str, node_id: str, request: ReadLog) -> LogChunk:
        """From the agent that has it."""
        peer = self._membership.connection(node_id)
        if peer is None:
            raise UnreachableError(
                f"the log of {unit} is on node {node_id}, which is not connected",
                hint="try again when the node is back",
            )
        ask = msgspec.structs.replace(request, job_id=unit)
        return await peer.call(ask, timeout_s=request.wait_s + ORDER_TIMEOUT_S)

    def preparing(self, node_id: str, digest: str) -> str | None:
        """The tenant whose unfinished job on this node needs that blob; its time to confirm starts anew."""
        held = self._ledger.holds.get(node_id)
        units = [parse_unit(hold.job_id) for hold in held.holds] if held else []
        jobs = [(self._jobs.get(job_id), rank) for job_id, rank in units]
        mine = [(job, rank) for job, rank in jobs if job and _needs(job, digest)]
        for job, rank in mine:
            self._extend(job, rank)
        return mine[0][0].tenant if mine else None

    # -- what the clock asks for --------------------------------------------------------------

    def hears_of(self, job: Job) -> bool:
        """Whether a node that has some of it is in contact. Of what is on silent nodes alone nobody knows
        whether it still runs: it may be over for long, or lost."""
        now_s = self._clock.monotonic_s()
        there = {placement.node_id for placement in job.placements if placement.outcome is None}
        return any(self._membership.is_in_contact(node_id, now_s) for node_id in there)

    async def begin_term(self) -> None:
        """Launches of an earlier term that were not confirmed are void: nothing of them has started."""
        now_s = self._clock.monotonic_s()
        self._membership.begin_term(now_s)
        self._sessions.begin_term(now_s)
        self._missing.clear()
        self._confirm_by_s.clear()
        for job in self._jobs.in_states(JobState.PLACING):
            await self._jobs.requeue(
                job.job_id,
                epoch=job.epoch,
                reason="the controller was replaced before the launch was confirmed",
            )

    async def requeue_unconfirmed(self) -> None:
        now_s = self._clock.monotonic_s()
        for job in self._jobs.in_states(JobState.PLACING):
            late = {
                placement.node_id
                for rank, placement in enumerate(job.placements)
                if now_s >= self._confirm_by_s.setdefault(job.unit(rank), now_s + self._confirm_s)
            }
            if late:
                reason = f"the launch was not confirmed in time on {', '.join(sorted(late)[:_NAMED])}"
                await self._jobs.requeue(job.job_id, epoch=job.epoch, reason=reason)
        placing = {
            job.unit(rank)
            for job in self._jobs.in_states(JobState.PLACING)
            for rank in range(len(job.placements))
        }
        self._confirm_by_s = {key: by_s for key, by_s in self._confirm_by_s.items() if key in placing}

    async def reclaim(self) -> None:
        """Ends what silent nodes hold, after their own dead-man timers have ended it for certain."""
        this_one = self._controllers()[0]
        for node_id, held in list(self._ledger.holds.items()):
            record = self._ledger.nodes.get(node_id)
            if not held.holds or record is None or not self._is_reclaimable(record):
                continue
            if this_one not in record.controllers:
                # Its agent does not ask us whether we lead, so it may rightly believe that nobody does.
                if node_id not in self._left_alone:
                    self._left_alone.add(node_id)
                    _log.warning(
                        "node %s is silent and keeps what it holds: it does not know the controller at %s; "
                        "if it is gone for good, remove it with 'genie forget %s'",
                        node_id,
                        this_one,
                        node_id,
                    )
                continue
            await self._lose_holds(record, held)

    async def remove(self, connection: Connection, request: RemoveNode) -> Done:
        """The owner's word that a silent node is gone: its holds end, and its tokens open nothing."""
        node_id = request.node_id
        record, held = self._ledger.nodes.get(node_id), self._ledger.holds.get(node_id)
        if record is not None and not record.left:
            if self._membership.connection(node_id) is not None or not self._is_reclaimable(record):
                raise NodeError(
                    f"node {node_id} is connected, or was until a moment ago",
                    hint="stop its agent with 'genie down' there, then try again",
                )
            if held is not None:
                await self._lose_holds(record, held)
        await self._forget(node_id)
        self._membership.detach(node_id)
        return Done()

    async def drain(self, connection: Connection, request: DrainNode) -> Done:
        """Asked again, the newest reason counts; without one, what was said before stays."""
        reason = request.reason.strip()
        if len(reason) > REASON_CHARS_MAX or not reason.isprintable():
            raise UsageError(f"a reason is one line of at most {REASON_CHARS_MAX} characters")
        if reason:
            await self._set_drained(request.node_id, f"draining: {reason}")
        else:
            await self._set_drained(request.node_id, "draining", unless_drained=True)
        return Done()

    async def undrain(self, connection: Connection, request: UndrainNode) -> Done:
        await self._set_drained(request.node_id, "")
        return Done()

    async def _set_drained(self, node_id: str, drained: str, *, unless_drained: bool = False) -> None:
        def build(txn: Transaction) -> None:
            record = self._ledger.nodes.get(node_id)
            if record is None:
                raise NodeNotFoundError(f"there is no node {node_id[:80]!r}", hint="'genie nodes' lists them")
            kept = record.drained if unless_drained else ""
            txn.put(self._ledger.nodes, node_id, msgspec.structs.replace(record, drained=kept or drained))

        await self._ledger.write(build)
        _log.info("node %s is %s", node_id, drained or "open again")
        self._wake()

    def _is_reclaimable(self, record: NodeRecord) -> bool:
        now_s = self._clock.monotonic_s()
        return self._membership.is_reclaimable(record.info.node_id, now_s, granted_s=record.ttl_s)

    async def _lose_holds(self, record: NodeRecord, held: NodeLedger) -> None:
        node_id = held.node_id
        silence_s = self._membership.silence_s(node_id, self._clock.monotonic_s())
        for hold in held.holds:
            reason = f"node {node_id} was silent for {silence_s:.0f} s"
            await self._jobs.lose(
                hold.job_id, epoch=hold.epoch, reason=reason, still=lambda: self._is_reclaimable(record)
            )
            _log.warning("reclaimed job %s: %s", hold.job_id, reason)

    def hang_up_uninformed(self) -> None:
        """Nodes that were told of other controllers than there are register anew, and so learn of them."""
        controllers = self._controllers()
        for member in self._membership.members():
            record = self._ledger.nodes.get(member.info.node_id)
            if record is not None and set(record.controllers) != set(controllers):
                member.peer.close()

    # -- parts --------------------------------------------------------------------------------

    def _check_incarnation(self, node_id: str, incarnation: int, *, exactly: bool = False) -> None:
        record = self._ledger.nodes.get(node_id) if self._ledger.is_loaded else None
        known = record.info.incarnation if record is not None else incarnation
        if incarnation < known or (exactly and incarnation != known):
            raise FencedError(
                f"incarnation {incarnation} of node {node_id} was replaced by {known}",
                hint="another agent runs with this node's identity",
            )

    async def _end_earlier_lives(self, node_id: str, incarnation: int, exits: Sequence[ExitReport]) -> None:
        await self._jobs.exited(node_id, exits)
        held = self._ledger.holds.get(node_id)
        for hold in held.holds if held else ():
            if hold.incarnation < incarnation:
                await self._jobs.lose(hold.job_id, epoch=hold.epoch, reason=f"node {node_id} restarted")

    async def _reconcile(self, node_id: str, request: Heartbeat) -> tuple[list[JobOrder], list[JobOrder]]:
        """What is settled and what is to be killed. A store that fails settles nothing: it comes again."""
        settled: list[JobOrder] = []
        try:
            # The answer must not wait for a slow store: the node's jobs live by it.
            async with asyncio.timeout(self._ttl_s * _SETTLE_SHARE):
                await self._jobs.exited(node_id, request.exits)
                settled += [JobOrder(job_id=report.job_id, epoch=report.epoch) for report in request.exits]
                await self._release_missing(node_id, request)
        except TimeoutError:
            _log.warning("heartbeat of %s: the store is slow", node_id)
        except (StoreError, LeadershipError) as error:
            _log.warning("heartbeat of %s: %s", node_id, error)
        return settled, self._to_kill(node_id, request.running)

    async def _release_missing(self, node_id: str, request: Heartbeat) -> None:
        there = {(job.job_id, job.epoch) for job in request.running}
        there |= {(report.job_id, report.epoch) for report in request.exits}
        held = self._ledger.holds.get(node_id) or NodeLedger(node_id=node_id)
        before = self._missing.get(node_id, {})
        missing: dict[tuple[str, int], int] = {}
        for hold in held.holds:
            key, job = (hold.job_id, hold.epoch), self._jobs.get(parse_unit(hold.job_id)[0])
            if key not in there and job is not None and job.state is JobState.RUNNING:
                missing[key] = before.get(key, 0) + 1
        self._missing[node_id] = missing
        for (unit, epoch), times in missing.items():
            if times >= _MISSED_HEARTBEATS:
                reason = f"the agent of node {node_id} no longer has it"
                await self._jobs.lose(unit, epoch=epoch, reason=reason)

    def _to_kill(self, node_id: str, running: Sequence[RunningJob]) -> list[JobOrder]:
        orders = []
        for item in running:
            job_id, rank = parse_unit(item.job_id)
            job = self._jobs.get(job_id)
            if job is None or not is_at(job, rank, node_id, item.epoch):
                orders.append(JobOrder(job_id=item.job_id, epoch=item.epoch, reason="not in the ledger"))
            elif job.stop:
                orders.append(
                    JobOrder(
                        job_id=item.job_id,
                        epoch=item.epoch,
                        reason=stop_reason(job),
                        grace_s=self._grace_s(job),
                    )
                )
            elif job.state is JobState.PLACING:
                self._extend(job, rank)
            elif item.endpoint is not None and job.spec.kind is JobKind.SESSION:
                self._sessions.ready(job, item.epoch, item.endpoint)
            elif job.spec.kind is JobKind.SESSION:
                self._sessions.noted(job, item.note)
        return orders

    def _extend(self, job: Job, rank: int) -> None:
        if job.state is JobState.PLACING:
            self._confirm_by_s[job.unit(rank)] = self._clock.monotonic_s() + self._confirm_s

    def _grace_s(self, job: Job) -> float | None:
        """What a job asked for counts when it is preempted, up to its time limit; not when it is cancelled or
        its time is over."""
        if job.stop is not Stop.PREEMPT:
            return None
        return min(job.spec.wishes.grace_s, max(ends_at(job) - self._clock.wall_s(), 0.0))

    def _hosts(self, job: Job) -> tuple[str, ...]:
        """Under which addresses the workers reach each other, by rank."""
        records = [self._ledger.nodes.get(placement.node_id) for placement in job.placements]
        return tuple(record.info.host if record is not None else "" for record in records)

    async def _deliver(self, node_id: str, workers: Sequence[tuple[Job, int]]) -> None:
        token = self._election.require_token()
        orders = [
            Launch(
                job_id=job.unit(rank),
                tenant=job.tenant,
                spec=job.spec,
                placement=job.placements[rank],
                leader_token=token,
                ticket_sha256=job.ticket_sha256,
                rank=rank,
                hosts=self._hosts(job),
            )
            for job, rank in workers
        ]
        peer = self._membership.connection(node_id)
        outcomes: Sequence[Done | GenieError]
        if peer is not None:
            outcomes = await peer.call_each(orders, timeout_s=ORDER_TIMEOUT_S)
        else:
            outcomes = [UnreachableError(f"node {node_id} is not connected")] * len(orders)
        for (job, rank), error in zip(workers, outcomes, strict=True):
            if not isinstance(error, GenieError):
                continue
            try:
                await self._undelivered(job, node_id, error)
            except GenieError as failure:  # the others have theirs to come yet
                _log.info("launch of %s: %s", job.unit(rank), failure)

    async def _undelivered(self, job: Job, node_id: str, error: GenieError) -> None:
        # What an agent cannot read has reached it, and would do so again and again.
        if isinstance(error, TransportError) and not isinstance(error, ProtocolError):
            reason = f"the launch on node {node_id} could not be delivered: {error}"
            await self._jobs.requeue(job.job_id, epoch=job.epoch, reason=reason)
            return
        if isinstance(error, FencedError):
            await self._election.check()
        reason = f"node {node_id} refused the launch: {error}"
        await self._jobs.requeue(job.job_id, epoch=job.epoch, reason=reason, refused=True)

    async def _kill(self, job: Job, rank: int) -> None:
        placement = job.placements[rank]
        peer = self._membership.connection(placement.node_id)
        if peer is None:
            return
        token = self._election.require_token()
        order = Kill(
            job_id=job.unit(rank),
            epoch=placement.epoch,
            leader_token=token,
            reason=stop_reason(job),
            grace_s=self._grace_s(job),
        )
        await peer.call(order, timeout_s=ORDER_TIMEOUT_S)


def _needs(job: Job, digest: str) -> bool:
    return job.spec.workdir is not None and job.spec.workdir.digest == digest
