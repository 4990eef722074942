"""Requests about the queue: GetQueue and ExplainJob.

A user sees the jobs of its own tenant; those of other tenants are counted but never named, not even in
pending reasons. Not responsible for working out the reasons (scheduler/explain.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from genie.controller.connection import Connection, Handler, Handlers
from genie.controller.jobs.catalog import JobCatalog, can_see
from genie.controller.requests.reply_size import truncate_to_reply
from genie.model.job import Job, JobState
from genie.model.limits import LIST_MAX
from genie.model.messages import (
    ExplainJob,
    ExplainReply,
    GetQueue,
    Message,
    NodesRuledOut,
    QueuedJob,
    QueueReply,
)
from genie.model.tenant import Identity, TokenKind
from genie.processes.clock import Clock
from genie.scheduler.decisions import Wait
from genie.scheduler.explain import BlockedNodes, PendingJobExplanation
from genie.tenancy.masking import mask_job_ids

NODES_PER_REASON_MAX = 20
RULED_OUT_REASONS_MAX = 64


class QueuePlanner(Protocol):
    """The part of the planner that knows the pending jobs. Times are in seconds since 1970."""

    def pending_jobs(self) -> list[Wait]:
        """The pending jobs in scheduling order, each with its latest pending reason."""
        ...

    def explain(self, job_id: str) -> PendingJobExplanation | None:
        """Explain why a job is pending; None when it is not."""
        ...


class QueueRequests:
    """`check_readable` raises NotLeaderError where another controller must respond."""

    def __init__(
        self,
        jobs: JobCatalog,
        planner: QueuePlanner,
        *,
        clock: Clock,
        check_readable: Callable[[], None],
    ) -> None:
        self._jobs = jobs
        self._planner = planner
        self._clock = clock
        self._check_readable = check_readable
        self._tenants_lock = asyncio.Lock()
        self._owner_lock = asyncio.Lock()

    def handlers(self) -> Handlers:
        return {
            GetQueue: self._serialize_and_throttle(self.get_queue),
            ExplainJob: self._serialize_and_throttle(self.explain_job),
        }

    def _serialize_and_throttle(self, handler: Handler) -> Handler:
        """Serialize calls and pause after each for as long as it took, so that heartbeats are not delayed.
        Calls of the owner do not wait for those of tenants."""

        async def handle(connection: Connection, request: Any) -> Message:
            is_owner = connection.identity.kind is TokenKind.OWNER
            async with self._owner_lock if is_owner else self._tenants_lock:
                began_s = self._clock.monotonic_s()
                reply = await handler(connection, request)
                await self._clock.sleep(self._clock.monotonic_s() - began_s)
                return reply

        return handle

    async def get_queue(self, connection: Connection, request: GetQueue) -> QueueReply:
        self._check_readable()
        identity = connection.identity
        queue = self._queued_jobs_in_order()
        limit = min(request.limit, LIST_MAX)
        visible = [(at, job, wait) for at, (job, wait) in enumerate(queue, 1) if can_see(identity, job)]
        jobs = [
            QueuedJob(
                position=position,
                job_id=job.job_id,
                name=job.spec.name,
                tenant=job.tenant,
                resources=job.spec.resources,
                constraints=job.spec.constraints,
                submitted_at=job.submitted_at,
                reason=self._mask_hidden_job_ids(wait.reason, identity),
                starts_at=wait.starts_at,
            )
            for position, job, wait in visible[:limit]
        ]
        fitting, more = truncate_to_reply(jobs)
        return QueueReply(jobs=fitting, waiting=len(queue), more=more or len(visible) > limit)

    async def explain_job(self, connection: Connection, request: ExplainJob) -> ExplainReply:
        self._check_readable()
        jobs, identity = self._jobs, connection.identity
        job = jobs.find(request.job_id, identity)
        found = self._planner.explain(job.job_id) if job.state is JobState.QUEUED else None
        visible = jobs.visible_to(job, identity)
        if found is None:
            return ExplainReply(job=visible)
        return ExplainReply(
            job=msgspec.structs.replace(visible, reason=self._mask_hidden_job_ids(found.reason, identity)),
            ahead=found.jobs_ahead,
            starts_at=found.starts_at,
            starts_why=self._mask_hidden_job_ids(found.starts_at_note, identity),
            ruled_out=tuple(
                _to_nodes_ruled_out(each) for each in found.blocked_nodes[:RULED_OUT_REASONS_MAX]
            ),
            ruled_out_more=sum(len(each.nodes) for each in found.blocked_nodes[RULED_OUT_REASONS_MAX:]),
        )

    def _queued_jobs_in_order(self) -> list[tuple[Job, Wait]]:
        """Every queued job in scheduling order; jobs that the planner has not seen yet come last, by age."""
        jobs = self._jobs
        queued = {job.job_id: job for job in jobs.jobs_in_states(JobState.QUEUED)}
        pending = self._planner.pending_jobs()
        known = [(queued.pop(wait.job_id), wait) for wait in pending if wait.job_id in queued]
        unknown = sorted(queued.values(), key=lambda job: job.sequence)
        return known + [(job, Wait(job.job_id, jobs.with_pending_reason(job).reason)) for job in unknown]

    def _mask_hidden_job_ids(self, text: str, identity: Identity) -> str:
        def is_shown(job_id: str) -> bool:
            job = self._jobs.get(job_id)
            return job is not None and can_see(identity, job)

        return text if identity.kind is TokenKind.OWNER else mask_job_ids(text, is_visible=is_shown)


def _to_nodes_ruled_out(group: BlockedNodes) -> NodesRuledOut:
    return NodesRuledOut(
        reason=group.reason,
        count=len(group.nodes),
        nodes=group.nodes[:NODES_PER_REASON_MAX],
        is_permanent=group.is_permanent,
    )
