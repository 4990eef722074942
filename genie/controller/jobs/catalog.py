"""What is known about jobs: the ledger's rows by state, name and tenant, and what is derived from them.

Pending reasons and the reasons why processes cannot be killed are kept in memory only. Not responsible for
changing jobs (lifecycle.py, launches.py, submission.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from genie.controller.change_notifier import ChangeNotifier
from genie.controller.jobs.index import JobIndex
from genie.controller.ledger import LedgerTables, TableBeingLoaded
from genie.errors import JobNotFoundError, ReleaseSkewError
from genie.model.job import Job, JobState, parse_worker_name, truncate_reason
from genie.model.tenant import Identity, TokenKind
from genie.tenancy.masking import mask_job_ids

_SAME_NAME_JOBS_SHOWN_MAX = 5
_UNFINISHED_STATES = tuple(state for state in JobState if not state.is_final)


class JobCatalog:
    """On every change of a job, `notifier` is notified with the job ID and `wake` is called.
    `describe_unresponsive_node` returns what follows for a job from a node that does not respond, empty if
    all respond."""

    def __init__(
        self,
        ledger: LedgerTables,
        *,
        notifier: ChangeNotifier,
        wake: Callable[[], None],
        describe_unresponsive_node: Callable[[Job], str] = lambda job: "",
    ) -> None:
        self._ledger = ledger
        self._notifier = notifier
        self._wake = wake
        self._describe_unresponsive_node = describe_unresponsive_node
        self._index = JobIndex()
        self._loading_index = self._index
        """The index of the rows that are being loaded."""
        self._pending_reasons: dict[str, str] = {}
        self._unkillable_reasons_by_job: dict[str, dict[int, str]] = {}
        """By running job and rank: which of its processes cannot be killed."""
        ledger.jobs.add_loader(self._index_loading_rows)
        ledger.add_after_load_listener(self._replace_index)
        ledger.jobs.add_listener(self._on_job_changed)

    def get(self, job_id: str) -> Job | None:
        return self._ledger.jobs.get(job_id)

    def find(self, id_or_name: str, identity: Identity) -> Job:
        """Find a job by ID or by a unique name. Raise JobNotFoundError, also for jobs of other tenants, and
        ReleaseSkewError for a job that only a newer release can read."""
        job = self.get(id_or_name)
        if job is not None and can_see(identity, job):
            return job
        tenant = _tenant_filter(identity)
        named, count = self._index.find_ids_by_name(id_or_name, tenant, limit=_SAME_NAME_JOBS_SHOWN_MAX)
        if count == 1:
            return self._ledger.jobs[named[0]]
        if count:
            shown = [self._ledger.jobs[job_id] for job_id in sorted(named)]
            raise _ambiguous_name_error(f"{count} jobs", id_or_name, shown)
        self._check_job_readable(id_or_name, identity)
        raise JobNotFoundError(
            f"there is no job {id_or_name[:80]!r}", hint="'genie jobs --all' lists all jobs"
        )

    def _check_job_readable(self, job_id: str, identity: Identity) -> None:
        """Raise ReleaseSkewError for a job that only a newer release can read. Its tenant is unknown, so only
        owners get the names of its fields."""
        if identity.kind is TokenKind.OWNER:
            self._ledger.jobs.check_writable(job_id)
        elif self._ledger.jobs.why_read_only(job_id):
            raise ReleaseSkewError(
                f"job {job_id} cannot be read: it was written by a newer release of Genie",
                hint="it continues to run; try again when a server of the newer release leads",
            )

    def find_to_cancel(self, id_or_name: str, identity: Identity) -> Job:
        """Like `find`, but a name has to be unique only among unfinished jobs, if there are any."""
        job = self.get(id_or_name)
        if (job is None or not can_see(identity, job)) and self._index.has_name(id_or_name):
            unfinished = self._index.jobs_newest_first(_UNFINISHED_STATES, tenant=_tenant_filter(identity))
            named = [job for job in unfinished if job.spec.name == id_or_name]
            if len(named) == 1:
                return named[0]
            if named:
                shown = named[:_SAME_NAME_JOBS_SHOWN_MAX]
                raise _ambiguous_name_error(f"{len(named)} unfinished jobs", id_or_name, shown)
        return self.find(id_or_name, identity)

    def find_worker(self, worker_or_job: str, identity: Identity) -> tuple[Job, int]:
        """Find the job and rank of JOB.RANK; JOB alone is rank 0."""
        job_id, rank = parse_worker_name(worker_or_job)
        has_name = self._index.has_name
        if not has_name(worker_or_job) and (job_id in self._ledger.jobs or has_name(job_id)):
            return self.find(job_id, identity), rank
        return self.find(worker_or_job, identity), 0

    def with_pending_reason(self, job: Job) -> Job:
        """Return the job with its latest pending reason; unchanged if it is not queued or has none yet."""
        reason = self._pending_reasons.get(job.job_id)
        if job.state is not JobState.QUEUED or reason is None:
            return job
        return msgspec.structs.replace(job, reason=reason)

    def visible_to(self, job: Job, identity: Identity) -> Job:
        """Return the job with its pending reason; for users, reasons do not name jobs of other tenants."""
        if identity.kind is TokenKind.OWNER:
            return _without_ticket(self._with_latest_reason(job))
        return self.visible_to_tenant(job)

    def visible_to_tenant(self, job: Job) -> Job:
        """As `visible_to`, for a user of the job's own tenant."""
        job = _without_ticket(self._with_latest_reason(job))

        def is_shown(job_id: str) -> bool:
            other = self.get(job_id)
            return other is not None and other.tenant == job.tenant

        steps = (
            msgspec.structs.replace(step, reason=mask_job_ids(step.reason, is_visible=is_shown))
            for step in job.history
        )
        reason = mask_job_ids(job.reason, is_visible=is_shown)
        return msgspec.structs.replace(job, reason=reason, history=tuple(steps))

    def _with_latest_reason(self, job: Job) -> Job:
        job = self._with_unkillable_reasons(self.with_pending_reason(job))
        why = self._describe_unresponsive_node(job)
        if not why:
            return job
        return msgspec.structs.replace(
            job, reason=truncate_reason(f"{job.reason}; {why}" if job.stop else why)
        )

    def _with_unkillable_reasons(self, job: Job) -> Job:
        notes = self._unkillable_reasons_by_job.get(job.job_id)
        if not notes or job.state is not JobState.RUNNING:
            return job
        rank, note = min(notes.items())
        more = f" (and {len(notes) - 1} other workers)" if len(notes) > 1 else ""
        reason = f"{job.reason}; node {job.placements[rank].node_id}: {note}{more}"
        return msgspec.structs.replace(job, reason=truncate_reason(reason))

    def jobs_in_states(self, *states: JobState) -> list[Job]:
        return self._index.jobs_in_states(states)

    def visible_jobs_newest_first(
        self, states: Iterable[JobState], identity: Identity, *, before: int | None, limit: int
    ) -> list[Job]:
        """The newest jobs in these states (default: all) that this identity may see, at most `limit`."""
        tenant = None if identity.kind is TokenKind.OWNER else identity.tenant
        found = self._index.jobs_newest_first(set(states) or JobState, before=before, tenant=tenant)
        return list(islice(found, limit))

    def count_by_state(self) -> dict[str, int]:
        return {str(state): self._index.count_in_state(state) for state in JobState}

    def count_pending(self) -> int:
        return self._index.count_in_state(JobState.QUEUED)

    def needed_blobs(self) -> Collection[str]:
        """The names of the blobs that unfinished jobs need; a view."""
        return self._index.needed_blobs()

    def session_jobs(self) -> list[Job]:
        """All unfinished session jobs."""
        return self._index.session_jobs()

    def session_jobs_of_client(self, tenant: str, client: str) -> list[Job]:
        """The unfinished session jobs of a client."""
        return self._index.session_jobs_of_client(tenant, client)

    def count_in_states(self, states: Iterable[JobState]) -> int:
        return sum(self._index.count_in_state(state) for state in states)

    def finished_count_by_tenant(self) -> Mapping[str, int]:
        return self._index.finished_count_by_tenant()

    def jobs_oldest_first(self, states: Iterable[JobState], *, tenant: str | None = None) -> Iterator[Job]:
        return self._index.jobs_oldest_first(states, tenant=tenant)

    def set_pending_reason(self, job_id: str, reason: str) -> None:
        """Keep the pending reason of a queued job, in memory only: it changes often and is derived."""
        if self._pending_reasons.get(job_id) != reason:
            self._pending_reasons[job_id] = reason
            self._notifier.notify(job_id)

    def set_unkillable_reason(self, job: Job, rank: int, reason: str) -> None:
        """Keep which processes of a worker cannot be killed, in memory only; empty to clear."""
        notes = self._unkillable_reasons_by_job.get(job.job_id, {})
        if notes.get(rank, "") == reason:
            return
        others = {key: text for key, text in notes.items() if key != rank}
        self._unkillable_reasons_by_job[job.job_id] = {**others, rank: reason} if reason else others
        self._notifier.notify(job.job_id)

    def notify_waiters(self, job_id: str) -> None:
        """Wake up waiters after a change of the job that is not in the ledger."""
        self._notifier.notify(job_id)

    async def wait_while(self, job_id: str, condition: Callable[[Job], bool], *, timeout_s: float) -> None:
        """Wait until `condition` is false, the job is deleted, or the timeout expires."""

        def is_true() -> bool:
            job = self.get(job_id)
            return job is not None and condition(job)

        await self._notifier.wait_while(job_id, is_true, timeout_s=timeout_s)

    async def _index_loading_rows(self, read: TableBeingLoaded[Job]) -> None:
        self._loading_index = await JobIndex.build(read.rows.values())

    def _replace_index(self) -> None:
        self._index = self._loading_index
        # Another controller may have changed jobs since the last load.
        for job_id in {*self._pending_reasons, *self._unkillable_reasons_by_job}:
            self._discard_outdated_reasons(job_id, self.get(job_id))
        self._notifier.notify_all()
        self._wake()

    def _on_job_changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        self._index.update(before, after)
        self._discard_outdated_reasons(job_id, after)
        self._notifier.notify(job_id)
        self._wake()

    def _discard_outdated_reasons(self, job_id: str, job: Job | None) -> None:
        state = None if job is None else job.state
        if state is not _QUEUED:
            self._pending_reasons.pop(job_id, None)
        if state is not _RUNNING:
            self._unkillable_reasons_by_job.pop(job_id, None)


# Members of an enum are slow to look up, and every change of a job compares them.
_QUEUED, _RUNNING = JobState.QUEUED, JobState.RUNNING


def _tenant_filter(identity: Identity) -> str | None:
    """The tenant whose jobs this identity sees; None for all tenants."""
    return None if identity.kind is TokenKind.OWNER else identity.tenant


def _ambiguous_name_error(count: str, name: str, jobs: Iterable[Job]) -> JobNotFoundError:
    ids = ", ".join(f"{job.job_id} ({job.state})" for job in jobs)
    return JobNotFoundError(f"{count} are named {name[:80]!r}", hint=f"use a job ID: {ids}")


def can_see(identity: Identity, job: Job) -> bool:
    """Whether this identity may see the job: a user sees its own tenant, the owner sees all."""
    return identity.kind is TokenKind.OWNER or identity.tenant == job.tenant


def _without_ticket(job: Job) -> Job:
    """No reply has the hash of a ticket: only its executor needs it."""
    return msgspec.structs.replace(job, ticket_sha256="") if job.ticket_sha256 else job
