"""Requests about jobs: submit, get, list, cancel.

A user sees the jobs of its own tenant, the owner sees all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from genie.controller.blobs.replication import BLOB_FETCH_WAIT_S_MAX, BlobReplication
from genie.controller.blobs.storage import BlobStorage, blob_name
from genie.controller.checks import clamp_wait_s
from genie.controller.connection import Connection, Handlers
from genie.controller.election import Election
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.jobs.lifecycle import JobLifecycle
from genie.controller.jobs.submission import JobSubmission
from genie.controller.placement.planner import PENDING_QUEUE_GROUPS_MAX, Planner
from genie.controller.requests.open_waits import OpenWaits, too_many_open_error
from genie.controller.requests.reply_size import truncate_to_reply
from genie.errors import JobRefusedError, QueueFullError, WorkdirError
from genie.model.job import Job, JobSpec, JobState, Workdir
from genie.model.limits import LIST_MAX
from genie.model.messages import CancelJob, GetJob, JobReply, JobsReply, ListJobs, SubmitJob
from genie.model.tenant import Identity
from genie.processes.tasks import Offload

_PLACEMENT_DECISION_WAIT_S_MAX = 0.25
LONG_QUEUE_JOBS = 1000
"""With more pending jobs, a scheduling pass takes long, and submissions are answered before it."""


class JobReads:
    """Requests that change nothing. `check_readable` raises NotLeaderError where another controller must
    respond."""

    def __init__(self, jobs: JobCatalog, *, waits: OpenWaits, check_readable: Callable[[], None]) -> None:
        self._jobs = jobs
        self._open_waits = waits
        self._check_readable = check_readable

    def handlers(self) -> Handlers:
        return {GetJob: self.get_job, ListJobs: self.list_jobs}

    async def get_job(self, connection: Connection, request: GetJob) -> JobReply:
        self._check_readable()
        jobs, identity = self._jobs, connection.identity
        job = jobs.find(request.job_id, identity)
        if request.while_state is job.state and (wait_s := clamp_wait_s(request.wait_s)):
            with self._open_waits.try_open_wait(identity.tenant) as is_allowed:
                if not is_allowed:
                    raise too_many_open_error(f"waits of tenant {identity.tenant}")
                await jobs.wait_while(
                    job.job_id, lambda now: now.state is request.while_state, timeout_s=wait_s
                )
        return JobReply(job=jobs.visible_to(jobs.find(job.job_id, identity), identity))

    async def list_jobs(self, connection: Connection, request: ListJobs) -> JobsReply:
        self._check_readable()
        limit = min(request.limit, LIST_MAX)
        identity = connection.identity
        newest = self._jobs.visible_jobs_newest_first(
            request.states, identity, before=request.before_sequence, limit=limit + 1
        )
        found = [self._jobs.visible_to(job, identity) for job in newest]
        fitting, more = truncate_to_reply(found[:limit])
        return JobsReply(jobs=fitting, more=more or len(found) > limit)


class JobRequests:
    """Requests that change jobs. `kill` sends the kill of a stopped job to its agents."""

    def __init__(
        self,
        jobs: JobCatalog,
        submission: JobSubmission,
        lifecycle: JobLifecycle,
        planner: Planner,
        blobs: BlobStorage,
        replication: BlobReplication,
        election: Election,
        *,
        offload: Offload,
        kill: Callable[[Job], None],
    ) -> None:
        self._jobs = jobs
        self._submission = submission
        self._lifecycle = lifecycle
        self._planner = planner
        self._blobs = blobs
        self._replication = replication
        self._election = election
        self._offload = offload
        self._send_kills = kill

    def handlers(self) -> Handlers:
        return {
            SubmitJob: self.submit_job,
            CancelJob: self.cancel_job,
        }

    async def submit_job(self, connection: Connection, request: SubmitJob) -> JobReply:
        """The job is durable when this returns; a job that stays queued has its pending reason, unless the
        queue is long."""
        jobs, identity = self._jobs, connection.identity
        spec = connection.check_job_spec_once(request.spec)
        self._election.require_fencing_token()
        if self._submission.find_by_request_id(identity.tenant, request.request_id) is None:
            await self._check_can_run(spec, identity)
        job = await self._submission.submit(spec, identity, request.request_id)

        def is_undecided(job: Job) -> bool:
            return job.state is JobState.QUEUED and jobs.with_pending_reason(job) is job

        if is_undecided(job) and jobs.count_pending() <= LONG_QUEUE_JOBS:
            await jobs.wait_while(job.job_id, is_undecided, timeout_s=_PLACEMENT_DECISION_WAIT_S_MAX)
        return JobReply(job=jobs.visible_to(jobs.get(job.job_id) or job, identity))

    async def _check_can_run(self, spec: JobSpec, identity: Identity) -> None:
        if reason := self._planner.why_infeasible(spec):
            raise JobRefusedError(
                f"job {spec.name!r} can never run here: {reason}",
                hint="change the request; 'genie nodes' lists the nodes and their hardware",
            )
        check_quota_allows(self._planner, spec, tenant=identity.tenant)
        if not self._planner.accepts_queue_group_of(spec, identity.tenant):
            raise QueueFullError(
                f"{PENDING_QUEUE_GROUPS_MAX} different kinds of jobs are pending already",
                hint="use the same resource request as other jobs, or try again later",
            )
        if spec.workdir is not None:
            await self._check_workdir_uploaded(spec.workdir, spec.name, tenant=identity.tenant)

    async def _check_workdir_uploaded(self, workdir: Workdir, job_name: str, *, tenant: str) -> None:
        name = blob_name(workdir.digest, tenant)
        stat = partial(self._blobs.get_status, workdir.digest, tenant=tenant)
        status = await self._offload(stat)
        if not status.complete:  # perhaps uploaded to an earlier leader
            await self._replication.fetch_from_other_controllers(name, timeout_s=BLOB_FETCH_WAIT_S_MAX)
            status = await self._offload(stat)
        if not status.complete or status.received_bytes != workdir.size_bytes:
            raise WorkdirError(
                f"the working directory {workdir.digest[:12]} of job {job_name!r} has not been uploaded",
                hint="upload it first",
            )
        await self._replication.wait_for_first_copy(name)

    async def cancel_job(self, connection: Connection, request: CancelJob) -> JobReply:
        self._election.require_fencing_token()
        job = self._jobs.find_to_cancel(request.job_id, connection.identity)
        reason = f"requested with token {connection.identity.token_id}"
        was_placed = bool(job.placements) and not job.state.is_final
        after = await self._lifecycle.cancel(job.job_id, reason)
        if was_placed:
            self._send_kills(after)
        return JobReply(job=self._jobs.visible_to(after, connection.identity))


def check_quota_allows(planner: Planner, spec: JobSpec, *, tenant: str) -> None:
    """Raise JobRefusedError if the tenant's quota does not allow this job even when nothing else runs."""
    if reason := planner.why_over_quota(spec, tenant):
        raise JobRefusedError(
            f"job {spec.name!r} can never start under the current quota: {reason}",
            hint="request less, submit it with --preemptible where that may borrow, or request a larger "
            "quota from the cluster's owner ('genie quota' shows yours)",
        )
