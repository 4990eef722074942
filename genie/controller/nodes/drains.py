"""Drains of nodes: the owner's requests, and moving restartable jobs off draining nodes.

A drain is part of the stored record of its node, and every tick compares the jobs on draining nodes with it,
so a new leader continues a drain. A moved job is stopped like a preempted one (jobs/lifecycle.py): with its
own grace period, by orders that heartbeats repeat. Not responsible for keeping new jobs away (snapshots.py).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator

import msgspec

from genie.controller.connection import Connection, Handlers
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.jobs.lifecycle import JobLifecycle
from genie.controller.jobs.outcomes import reason_of_move, requeue_reason
from genie.controller.ledger import Ledger, Transaction
from genie.controller.rows import NodeRecord
from genie.errors import NodeNotFoundError, UsageError
from genie.model.job import Job, JobKind, JobState, StopReason, parse_worker_name
from genie.model.messages import Done, DrainNode, DrainStarted, EmptyNode, UndrainNode

_log = logging.getLogger(__name__)

DRAIN_REASON_CHARS_MAX = 200
_REASON_CHARS_SHOWN = 60
MOVED_JOBS_PER_TICK_MAX = 200
"""Jobs that one tick moves from all draining nodes together, so that they are placed again in their order and
do not fill the queue at once."""

StopJobs = Callable[[Iterable[tuple[Job, str]], StopReason], Awaitable[list[Job]]]


class NodeDrains:
    """`stop_jobs` marks running jobs, each with a reason, sends the kills and returns the marked jobs;
    `is_in_contact` returns whether a node of a job sends heartbeats; `wake` triggers a scheduling pass."""

    def __init__(
        self,
        ledger: Ledger,
        jobs: JobCatalog,
        lifecycle: JobLifecycle,
        *,
        stop_jobs: StopJobs,
        is_in_contact: Callable[[Job], bool],
        wake: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._jobs = jobs
        self._lifecycle = lifecycle
        self._stop_jobs = stop_jobs
        self._is_in_contact = is_in_contact
        self._wake = wake

    def handlers(self) -> Handlers:
        return {
            DrainNode: self.drain_node,
            EmptyNode: self.empty_node,
            UndrainNode: self.undrain_node,
        }

    async def drain_node(self, connection: Connection, request: DrainNode) -> Done:
        """Stop placing jobs on a node; those there stay. The latest reason counts; without one, the previous
        reason stays."""
        await self._start_drain(request.node_id, request.reason, moves_jobs=False)
        return Done()

    async def empty_node(self, connection: Connection, request: EmptyNode) -> DrainStarted:
        """Like `drain_node`, and move the restartable jobs to other nodes."""
        await self._start_drain(request.node_id, request.reason, moves_jobs=True)
        moving = sorted(filter(_is_movable_or_moving, self._jobs_on_node(request.node_id)), key=_move_order)
        moving_ids = tuple(job.job_id for job in moving)
        staying_ids = self._job_ids_on_node(request.node_id).difference(moving_ids)
        return DrainStarted(
            moving_job_ids=moving_ids,
            staying_job_ids=tuple(sorted(staying_ids)),
            grace_s_max=max(
                (job.spec.constraints.grace_s for job in moving if _has_started(job)), default=0.0
            ),
        )

    async def undrain_node(self, connection: Connection, request: UndrainNode) -> Done:
        await self._set_drain(request.node_id, "", moves_jobs=False)
        return Done()

    async def move_jobs(self) -> None:
        """Move restartable jobs off draining nodes, at most MOVED_JOBS_PER_TICK_MAX: those of the highest
        priority first, then in the order of their arrival. A job on a node without heartbeats is not stopped:
        it may have ended, and it is queued again when its node is lost. Nor is a quarantined job, which could
        not be changed."""
        moves = sorted(self._due_moves(), key=lambda move: _move_order(move[0]))[:MOVED_JOBS_PER_TICK_MAX]
        if not moves:
            return
        moving = await self._lifecycle.requeue_unconfirmed_jobs(
            (job, requeue_reason(reason)) for job, reason in moves if job.state is JobState.PLACING
        )
        # A launch that is confirmed meanwhile is moved by the next tick.
        moving += await self._stop_jobs(
            [(job, reason) for job, reason in moves if job.state is JobState.RUNNING], StopReason.PREEMPT
        )
        if moving:
            why = next(reason for job, reason in moves if job.job_id == moving[0].job_id)
            _log.info("moving %d jobs off draining nodes, first %s: %s", len(moving), moving[0].job_id, why)

    def _due_moves(self) -> Iterator[tuple[Job, str]]:
        seen: set[str] = set()
        for node_id, record in self._ledger.nodes.items():
            if not record.moves_jobs or not record.drain_status:
                continue
            for job in self._jobs_on_node(node_id):
                if job.job_id in seen or job.stop or not _is_movable_or_moving(job):
                    continue
                if self._ledger.jobs.prefix + job.job_id in self._ledger.quarantined:
                    continue
                if not _has_started(job) or self._is_in_contact(job):
                    seen.add(job.job_id)
                    yield job, reason_of_move(node_id, record.drain_status)

    def _jobs_on_node(self, node_id: str) -> Iterator[Job]:
        """The jobs with a worker on this node, except unreadable ones."""
        found = (self._jobs.get(job_id) for job_id in self._job_ids_on_node(node_id))
        return (job for job in found if job is not None)

    def _job_ids_on_node(self, node_id: str) -> set[str]:
        held = self._ledger.holds.get(node_id)
        return {parse_worker_name(hold.job_id)[0] for hold in held.holds} if held is not None else set()

    async def _start_drain(self, node_id: str, reason: str, *, moves_jobs: bool) -> None:
        reason = reason.strip()
        if len(reason) > DRAIN_REASON_CHARS_MAX or not reason.isprintable():
            raise UsageError(
                f"the reason {reason[:_REASON_CHARS_SHOWN]!r} with {len(reason)} characters is not allowed",
                hint=f"give one line of at most {DRAIN_REASON_CHARS_MAX} printable characters",
            )
        await self._set_drain(
            node_id,
            f"draining: {reason}" if reason else "draining",
            moves_jobs=moves_jobs,
            keeps_reason=not reason,
        )

    async def _set_drain(
        self, node_id: str, drain_status: str, *, moves_jobs: bool, keeps_reason: bool = False
    ) -> None:
        def build(txn: Transaction) -> NodeRecord:
            self._ledger.nodes.check_writable(node_id)
            self._ledger.holds.check_writable(node_id)  # such a node is not listed either
            record = self._ledger.nodes.get(node_id)
            if record is None:
                raise NodeNotFoundError(f"there is no node {node_id[:80]!r}", hint="'genie nodes' lists them")
            kept = record.drain_status if keeps_reason else ""
            changed = msgspec.structs.replace(
                record, drain_status=kept or drain_status, moves_jobs=moves_jobs
            )
            txn.put(self._ledger.nodes, node_id, changed)
            return changed

        record = await self._ledger.write(build)
        if record.drain_status:
            moved = "moved" if moves_jobs else "kept"
            _log.info("node %s is %s; its restartable jobs are %s", node_id, record.drain_status, moved)
        else:
            _log.info("node %s accepts jobs again", node_id)
        self._wake()


def _has_started(job: Job) -> bool:
    return job.state is not JobState.PLACING


def _is_movable_or_moving(job: Job) -> bool:
    """Whether a drain moves the job: it is restartable, or a command that has not started; and it is not
    being stopped for another reason."""
    is_queued_again = job.spec.is_restartable or (not _has_started(job) and job.spec.kind is JobKind.COMMAND)
    return is_queued_again and job.stop in (StopReason.NONE, StopReason.PREEMPT)


def _move_order(job: Job) -> tuple[int, int]:
    return (-job.spec.constraints.priority, job.sequence)
