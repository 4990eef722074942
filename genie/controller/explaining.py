"""The queue and the reasons in it, as people ask for them: GetQueue and ExplainJob.

A user sees its own tenant's jobs; those of others are counted and never named, in reasons neither.
Not for: deciding, and working out what a job lacks (scheduler/explain.py).
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from genie.controller.connection import Connection, Handler, Handlers
from genie.controller.jobs import sees
from genie.controller.users import Cluster, first_fitting
from genie.model.job import Job, JobState
from genie.model.messages import (
    LIST_MAX,
    ExplainJob,
    ExplainReply,
    GetQueue,
    Message,
    NodesRuledOut,
    QueuedJob,
    QueueReply,
)
from genie.model.tenant import Identity, TokenKind
from genie.scheduler.explain import Explanation, RuledOut
from genie.scheduler.scheduler import Wait
from genie.tenancy.masking import masked

NODES_NAMED_MAX = 20
REASONS_MAX = 64


class Planner(Protocol):
    """What decides knows this of the jobs that wait. Times are in seconds since the epoch."""

    def waiting(self) -> list[Wait]:
        """In the order in which they are considered, each with what it was told last."""
        ...

    def explained(self, job_id: str) -> Explanation | None:
        """None when it does not wait."""
        ...


class Explaining:
    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._cluster = cluster
        self._planner = planner
        self._turn = asyncio.Lock()

    def handlers(self) -> Handlers:
        return {GetQueue: self._paced(self.get_queue), ExplainJob: self._paced(self.explain_job)}

    def _paced(self, answer: Handler) -> Handler:
        """One at a time, and as long a rest afterwards as it took: however many ask, heartbeats come
        through."""

        async def paced(connection: Connection, request: Any) -> Message:
            async with self._turn:
                began_s = self._cluster.clock.monotonic_s()
                reply = await answer(connection, request)
                await self._cluster.clock.sleep(self._cluster.clock.monotonic_s() - began_s)
                return reply

        return paced

    async def get_queue(self, connection: Connection, request: GetQueue) -> QueueReply:
        self._cluster.check_readable()
        identity = connection.identity
        line = self._line()
        limit = min(max(request.limit, 1), LIST_MAX)
        shown = [(at, job, wait) for at, (job, wait) in enumerate(line, 1) if sees(identity, job)]
        jobs = [
            QueuedJob(
                position=position,
                job_id=job.job_id,
                name=job.spec.name,
                tenant=job.tenant,
                resources=job.spec.resources,
                wishes=job.spec.wishes,
                submitted_at=job.submitted_at,
                reason=self._masked(wait.reason, identity),
                starts_at=wait.starts_at,
            )
            for position, job, wait in shown[:limit]
        ]
        fitting, more = first_fitting(jobs)
        return QueueReply(jobs=fitting, waiting=len(line), more=more or len(shown) > limit)

    async def explain_job(self, connection: Connection, request: ExplainJob) -> ExplainReply:
        self._cluster.check_readable()
        jobs, identity = self._cluster.jobs, connection.identity
        job = jobs.find(request.job_id, identity)
        found = self._planner.explained(job.job_id) if job.state is JobState.QUEUED else None
        if found is None:
            return ExplainReply(job=jobs.told(job, identity))
        told = jobs.told(job, identity)
        return ExplainReply(
            job=msgspec.structs.replace(told, reason=self._masked(found.reason, identity)),
            ahead=found.ahead,
            starts_at=found.starts_at,
            starts_why=self._masked(found.starts_why, identity),
            ruled_out=tuple(_shortened(each) for each in found.ruled_out[:REASONS_MAX]),
            ruled_out_more=sum(len(each.nodes) for each in found.ruled_out[REASONS_MAX:]),
        )

    def _line(self) -> list[tuple[Job, Wait]]:
        """Every queued job, in order. Those of whom the planner does not know yet come last, as they came."""
        jobs = self._cluster.jobs
        queued = {job.job_id: job for job in jobs.in_states(JobState.QUEUED)}
        line = [(queued.pop(wait.job_id), wait) for wait in self._planner.waiting() if wait.job_id in queued]
        left = sorted(queued.values(), key=lambda job: job.sequence)
        return line + [(job, Wait(job.job_id, jobs.shown(job).reason)) for job in left]

    def _masked(self, text: str, identity: Identity) -> str:
        def is_shown(job_id: str) -> bool:
            job = self._cluster.jobs.get(job_id)
            return job is not None and sees(identity, job)

        return text if identity.kind is TokenKind.OWNER else masked(text, is_shown=is_shown)


def _shortened(several: RuledOut) -> NodesRuledOut:
    return NodesRuledOut(
        reason=several.reason,
        count=len(several.nodes),
        nodes=several.nodes[:NODES_NAMED_MAX],
        ever=several.ever,
    )
