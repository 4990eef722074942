"""The life cycle of jobs: every state change is one transaction, durable before anyone sees it.

The transaction changes the job and, where resources are taken or released, the node's allocations with it,
so a hold is released exactly once. Not responsible for choosing nodes (scheduler/) or for messages to agents
(nodes/agents.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import msgspec

from genie.config import ControllerConfig
from genie.controller.change_notifier import ChangeNotifier
from genie.controller.jobs.backoff import FailureCause, LaunchBackoff
from genie.controller.jobs.changes import (
    ERRORS_AFFECTING_ALL_WRITES,
    JobChange,
    JobChanges,
    raise_first_error_affecting_all_writes,
)
from genie.controller.jobs.history import HistoryExcess, select_jobs_to_delete
from genie.controller.jobs.index import JobIndex, StagedIndex
from genie.controller.jobs.outcomes import (
    STOPPING_PREFIX,
    can_be_requeued_after_end,
    failed_because_of_node,
    final_state_of_job,
    final_state_of_worker,
    is_current_placement,
    stopping_reason,
)
from genie.controller.jobs.queue_limits import QueueLimits
from genie.controller.jobs.space import JobSpace
from genie.controller.ledger import EPOCH_COUNTER, Ledger, TableRead, Transaction
from genie.errors import (
    FencedError,
    JobNotFoundError,
    RowTooLargeError,
    WorkersMissingError,
)
from genie.model.allocation import Hold, NodeHolds
from genie.model.job import (
    FINAL_STATES,
    Job,
    JobSpec,
    JobState,
    Placement,
    StopReason,
    Transition,
    is_shrunk_job,
    parse_worker_name,
    truncate_reason,
    with_state,
)
from genie.model.messages import ExitReport
from genie.model.names import validate_name
from genie.model.tenant import Identity, TokenKind
from genie.processes.clock import Clock
from genie.scheduler.decisions import Decision, Start
from genie.tenancy.masking import mask_job_ids

_log = logging.getLogger(__name__)

LAUNCH_ATTEMPTS_MAX = 5
WORKERS_WAIT_S_MAX = 3.0
JOB_NODES_MAX = 120
"""All holds of a job are written in one transaction, and the store limits the rows of a transaction."""
HOLDS_PER_TRANSACTION_MAX = 3000
"""Of all nodes of a job with several workers, at its start: about half of what a transaction can have."""
CHANGES_PER_TICK_MAX = 2000
"""Jobs that one kind of periodic work changes at once; the rest follows with the next tick."""
_DELETE_BATCH_JOBS = 100
_DELETE_BATCHES_MAX = 20
"""Transactions that are written together."""
_SAME_NAME_JOBS_SHOWN_MAX = 5
_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_ID_CHARACTER_PAIRS = tuple(first + second for first in _ID_ALPHABET for second in _ID_ALPHABET)
"""Two characters of a job ID for each ten random bits."""


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that its node no longer runs. `is_still_lost` is evaluated in the transaction: the node may
    have reconnected meanwhile."""

    worker_name: str
    node_id: str
    epoch: int
    reason: str
    is_still_lost: Callable[[], bool] = lambda: True


class JobPlacer(Protocol):
    """Decides where jobs start (placement/planner.py)."""

    def place(self, new_job: Job | None = None) -> Sequence[Decision]:
        """Place a job that is being submitted; without one, run a scheduling pass."""
        ...

    def undo_unrecorded_starts(self, job_ids: Iterable[str]) -> None:
        """Undo the starts of these jobs that were not recorded."""
        ...

    def free_disk_bytes_max(self, job: Job) -> int:
        """Return the largest free disk space of the nodes on which the job could run."""
        ...


class JobLifecycle:
    """`placer` places jobs at submission. On every change of a job, `notifier` is notified with the job ID
    and `wake` is called."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        config: ControllerConfig,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        notifier: ChangeNotifier,
        wake: Callable[[], None],
        placer: JobPlacer,
        backoff: LaunchBackoff,
    ) -> None:
        self._ledger = ledger
        self._config = config
        self._clock = clock
        self._random_bytes = random_bytes
        self._notifier = notifier
        self._wake = wake
        self._placer = placer
        self._launch_backoff = backoff
        self._changes = JobChanges(ledger)
        self._index = JobIndex()
        self._staged_index = StagedIndex()
        self._loading_indexes = (self._index, self._staged_index)
        """The indexes of the rows that are being loaded."""
        self._pending_reasons: dict[str, str] = {}
        self._unkillable_reasons_by_job: dict[str, dict[int, str]] = {}
        """By running job and rank: which of its processes cannot be killed."""
        self._ready_ranks_by_job: dict[str, tuple[int, set[int]]] = {}
        """By job with several workers: the epoch and the ranks that are ready to start."""
        self.space = JobSpace(ledger, config)
        self._queue_limits = QueueLimits(config, self._staged_index, clock=clock)
        ledger.jobs.add_loader(self._index_loading_rows)
        ledger.add_load_listener(self._replace_indexes)
        ledger.jobs.add_index(self._staged_index.update)
        ledger.jobs.add_listener(self._on_job_changed)
        ledger.jobs.add_listener(self._queue_limits.on_job_changed)

    # -- reading ----------------------------------------------------------------------------

    def get(self, job_id: str) -> Job | None:
        return self._ledger.jobs.get(job_id)

    def find(self, id_or_name: str, identity: Identity) -> Job:
        """Find a job by ID or by a unique name. Raise JobNotFoundError, also for jobs of other tenants."""
        job = self.get(id_or_name)
        if job is not None and can_see(identity, job):
            return job
        tenant = None if identity.kind is TokenKind.OWNER else identity.tenant
        named, count = self._index.find_ids_by_name(id_or_name, tenant, limit=_SAME_NAME_JOBS_SHOWN_MAX)
        if count == 1:
            return self._ledger.jobs[named[0]]
        if count:
            ids = ", ".join(sorted(named))
            raise JobNotFoundError(f"{count} jobs are named {id_or_name[:80]!r}", hint=f"use a job ID: {ids}")
        raise JobNotFoundError(
            f"there is no job {id_or_name[:80]!r}", hint="'genie jobs --all' lists all jobs"
        )

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
            return _without_ticket(self._with_unkillable_reasons(self.with_pending_reason(job)))
        return self.visible_to_tenant(job)

    def visible_to_tenant(self, job: Job) -> Job:
        """As `visible_to`, for a user of the job's own tenant."""
        job = _without_ticket(self._with_unkillable_reasons(self.with_pending_reason(job)))

        def is_shown(job_id: str) -> bool:
            other = self.get(job_id)
            return other is not None and other.tenant == job.tenant

        steps = (
            msgspec.structs.replace(step, reason=mask_job_ids(step.reason, is_visible=is_shown))
            for step in job.history
        )
        reason = mask_job_ids(job.reason, is_visible=is_shown)
        return msgspec.structs.replace(job, reason=reason, history=tuple(steps))

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

    def is_blob_needed(self, name: str) -> bool:
        """Whether an unfinished job needs the blob with this name."""
        return self._index.is_blob_needed(name)

    def session_jobs(self) -> list[Job]:
        """All unfinished session jobs."""
        return self._index.session_jobs()

    def session_jobs_of_client(self, tenant: str, client: str) -> list[Job]:
        """The unfinished session jobs of a client."""
        return self._index.session_jobs_of_client(tenant, client)

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

    # -- state changes ----------------------------------------------------------------------

    async def submit(
        self,
        spec: JobSpec,
        identity: Identity,
        request_id: str,
        *,
        session_node_id: str = "",
        ticket_sha256: str = "",
    ) -> Job:
        """Create a job, or return the one that this request ID created before. QueueFullError when the queue
        is full. The job is placed in the same transaction if it can start at once."""
        validate_name(request_id, what="request id")

        def build(txn: Transaction) -> Job:
            again = self.find_by_request_id(identity.tenant, request_id)
            if again is not None:
                return again
            self._queue_limits.check_submission(identity.tenant)
            self.space.check_submission(identity.tenant)
            now, reason = self._clock.wall_s(), "submitted"
            job = Job(
                job_id=self._new_job_id(),
                tenant=identity.tenant,
                owner=identity.token_id,
                spec=spec,
                state=JobState.QUEUED,
                reason=reason,
                submitted_at=now,
                sequence=txn.next_number("sequence"),
                history=(Transition(state=JobState.QUEUED, at=now, reason=reason),),
                request_id=request_id,
                session=session_node_id,
                ticket_sha256=ticket_sha256,
            )
            # Only if no other job is queued; earlier jobs of this transaction count as queued.
            if not self._staged_index.queued_count:
                for start in self._placer.place(job):
                    if isinstance(start, Start):
                        job = self._record_new_job(txn, job, start)
            if job.state is JobState.QUEUED:
                txn.put(self._ledger.jobs, job.job_id, job)
            return job

        # Refused here already: in a full queue, refusals must not wait for the writes of others.
        if self.find_by_request_id(identity.tenant, request_id) is None:
            self._queue_limits.check_submission(identity.tenant)
        return await self._ledger.write(build)

    def _record_new_job(self, txn: Transaction, job: Job, start: Start) -> Job:
        undo = partial(self._placer.undo_unrecorded_starts, (job.job_id,))
        txn.on_rollback(undo)
        recorded = self._record_start(txn, job, start)
        if recorded is None:
            undo()
            return job
        return recorded

    def find_by_request_id(self, tenant: str, request_id: str) -> Job | None:
        """Find the job that a request ID created."""
        job_id = self._staged_index.job_id_by_request.get((tenant, request_id))
        return self.get(job_id) if job_id is not None else None

    async def cancel(self, job_id: str, reason: str) -> Job:
        """End a job that has not started; mark a running one, which ends when its agent reports the exit.

        The confirmation of a launch that is in progress will be rejected.
        """

        def build(job: Job | None, txn: Transaction) -> Job:
            if job is None:
                raise JobNotFoundError(f"there is no job {job_id!r}")
            if job.state.is_final or job.stop not in (StopReason.NONE, StopReason.PREEMPT):
                return job
            if job.state is JobState.RUNNING:
                return self._stage_stop(txn, job, StopReason.CANCEL, reason)
            return self._stage_end(txn, job, JobState.CANCELLED, f"cancelled: {reason}")

        return await self._changes.apply(JobChange(job_id, build))

    async def mark_jobs_stopping(self, jobs: Iterable[tuple[Job, str]], stop_kind: StopReason) -> list[Job]:
        """Mark running jobs, each with a reason, so that their agents end them. Return those that were
        marked: not those whose placement is no longer running."""

        def build(epoch: int, reason: str, job: Job | None, txn: Transaction) -> Job | None:
            if job is None or job.state is not JobState.RUNNING or job.epoch != epoch or job.stop:
                return None
            return self._stage_stop(txn, job, stop_kind, reason)

        changes = [JobChange(job.job_id, partial(build, job.epoch, reason)) for job, reason in jobs]
        return [job for job in await self._changes.apply_each(changes) if isinstance(job, Job)]

    async def record_starts(self, starts: Iterable[Start], *, on_placed: Callable[[Job], None]) -> None:
        """Record the starts of a scheduling pass; call `on_placed` with each job once all are durable. Starts
        whose job or node has changed since the decision are dropped. A start that cannot be recorded delays
        its own job only. Accelerators are given by ID."""
        loads, starts = self._ledger.load_count, list(starts)
        outcomes = await self._ledger.write_each(
            partial(self._record_start_if_current, start, loads) for start in starts
        )
        for start, outcome in zip(starts, outcomes, strict=True):
            if isinstance(outcome, Job) and outcome.state is JobState.PLACING:
                on_placed(outcome)
            elif isinstance(outcome, Exception) and not isinstance(outcome, ERRORS_AFFECTING_ALL_WRITES):
                _log.error("job %s could not be placed: %s", start.job_id, outcome, exc_info=outcome)
                self._launch_backoff.delay_placement(start.job_id)
                self.set_pending_reason(start.job_id, f"could not be placed: {truncate_reason(str(outcome))}")
        raise_first_error_affecting_all_writes(outcomes)

    def _record_start_if_current(self, start: Start, load_count: int, txn: Transaction) -> Job | None:
        job = self.get(start.job_id)
        if job is None or job.state is not JobState.QUEUED:
            return None
        if self._ledger.load_count != load_count:
            return None  # an earlier write was committed after all, and may have taken these accelerators
        return self._record_start(txn, job, start)

    def _record_start(self, txn: Transaction, job: Job, start: Start) -> Job | None:
        """Stage the placing of a job and a hold for each worker. Every start is recorded here: of a
        submission and of a scheduling pass. None if a node has been removed; cancels a job on too many
        nodes."""
        nodes = [self._ledger.nodes.get(place.node_id) for place in start.places]
        if len(nodes) > JOB_NODES_MAX:
            count = len({place.node_id for place in start.places})
            if count > JOB_NODES_MAX:
                why = f"its workers would need {count} nodes; the maximum is {JOB_NODES_MAX}"
                return self._stage_end(txn, job, JobState.CANCELLED, f"cancelled: {why}")
        if None in nodes:
            return None
        if len(nodes) > 1:
            self._check_transaction_fits(start)
        epoch = txn.next_number(EPOCH_COUNTER)
        placements = tuple(
            Placement(
                node_id=place.node_id, incarnation=node.info.incarnation, gpu_ids=place.gpu_ids, epoch=epoch
            )
            for place, node in zip(start.places, nodes, strict=True)
            if node is not None
        )
        step = with_state(
            job, JobState.PLACING, reason=start.reason, at=self._clock.wall_s(), placements=placements
        )
        for rank, placement in enumerate(placements):
            held = txn.get(self._ledger.holds, placement.node_id) or NodeHolds(node_id=placement.node_id)
            txn.put(self._ledger.holds, placement.node_id, held.with_hold(_make_hold(step, rank)))
        txn.put(self._ledger.jobs, job.job_id, step)
        return step

    def _check_transaction_fits(self, start: Start) -> None:
        """Raise RowTooLargeError if the holds on the nodes of these workers leave too little space in the
        transaction."""
        node_ids = {place.node_id for place in start.places}
        held = [self._ledger.holds.get(node_id) for node_id in node_ids]
        count = len(start.places) + sum(len(each.holds) for each in held if each is not None)
        if count > HOLDS_PER_TRANSACTION_MAX:
            raise RowTooLargeError(
                f"the {len(node_ids)} nodes of the job would have {count} workers in all; the maximum for a "
                f"job on several nodes is {HOLDS_PER_TRANSACTION_MAX}"
            )

    async def confirm_launch(
        self, node_id: str, worker_name: str, *, epoch: int, incarnation: int, wait_s: float = 0.0
    ) -> None:
        """Confirm the launch of a worker; the job runs when all workers are confirmed. FencedError if the
        launch is no longer valid, WorkersMissingError if other workers are not ready after `wait_s`.
        Idempotent: a reply may be lost."""
        job_id, rank = parse_worker_name(worker_name)

        def require_valid() -> Job:
            job = self.get(job_id)
            is_void = job is None or not is_current_placement(job, rank, node_id, epoch) or bool(job.stop)
            if is_void or job is None or job.placements[rank].incarnation != incarnation:
                raise FencedError(f"launch {epoch} of job {worker_name} is no longer valid")
            return job

        def build(txn: Transaction) -> None:
            job = require_valid()
            if job.state is JobState.RUNNING:
                return
            nodes = {placement.node_id for placement in job.placements}
            where = f"node {node_id}" if len(nodes) == 1 else f"{len(nodes)} nodes"
            step = with_state(job, JobState.RUNNING, reason=f"started on {where}", at=self._clock.wall_s())
            txn.put(self._ledger.jobs, job_id, step)

        known = self.get(job_id)
        if known is not None and len(known.placements) > 1:
            # No write before all workers are ready: a gang waits for its slowest worker.
            try:
                self._mark_worker_ready(require_valid(), rank)
            except WorkersMissingError:
                waiting = partial(self._waits_for_workers, job_id, epoch)
                await self._notifier.wait_while(job_id, waiting, timeout_s=min(wait_s, WORKERS_WAIT_S_MAX))
                self._mark_worker_ready(require_valid(), rank)
        await self._ledger.write(build)
        self._launch_backoff.reset(job_id)
        self._ready_ranks_by_job.pop(job_id, None)

    def _waits_for_workers(self, job_id: str, epoch: int) -> bool:
        job = self.get(job_id)
        if job is None or job.state is not JobState.PLACING or job.epoch != epoch:
            return False
        ready_epoch, ranks = self._ready_ranks_by_job.get(job_id, (0, set()))
        return ready_epoch == epoch and len(ranks) < len(job.placements)

    def _mark_worker_ready(self, job: Job, rank: int) -> None:
        """Note that a worker is ready; raise WorkersMissingError until all are. In memory only: launches do
        not outlive a leader's term."""
        if job.state is not JobState.PLACING:
            return
        epoch, ranks = self._ready_ranks_by_job.get(job.job_id, (0, set()))
        if epoch != job.epoch:
            epoch, ranks = self._ready_ranks_by_job[job.job_id] = (job.epoch, set())
        ranks.add(rank)
        missing = len(job.placements) - len(ranks)
        if missing:
            raise WorkersMissingError(f"{missing} of the {len(job.placements)} workers are not ready yet")
        self._notifier.notify(job.job_id)

    async def record_exits(self, node_id: str, reports: Sequence[ExitReport]) -> list[ExitReport]:
        """Record exits of workers and release what they held; the job ends with its last worker. Reports
        about an earlier placement are ignored. Return the settled reports: all but those whose job cannot be
        changed, which is quarantined."""
        changes = []
        for report in reports:
            job_id, rank = parse_worker_name(report.job_id)
            changes.append(JobChange(job_id, partial(self._stage_exit, node_id, report, rank), rank))
        outcomes = await self._changes.apply_each(changes)
        return [
            report
            for report, outcome in zip(reports, outcomes, strict=True)
            if not isinstance(outcome, Exception)
        ]

    def _stage_exit(
        self, node_id: str, report: ExitReport, rank: int, job: Job | None, txn: Transaction
    ) -> None:
        if job is None or not is_current_placement(job, rank, node_id, report.epoch):
            return
        state, reason = final_state_of_worker(job, report)
        cause = FailureCause.NODE if failed_because_of_node(job, report) else FailureCause.JOB
        if report.needed_disk_bytes and job.state is JobState.PLACING:
            cause, reason = self._find_cause_of_full_disk(job, report)
        ended = msgspec.structs.replace(
            job.placements[rank],
            outcome=state,
            exit_code=report.exit_code,
            never_started=not report.started,
        )
        self._stage_worker_end(txn, job, rank, ended, reason=reason, cause=cause)

    def _find_cause_of_full_disk(self, job: Job, report: ExitReport) -> tuple[FailureCause, str]:
        """Decide who is to blame for a disk without space for the working directory: the job, if no node has
        that much space."""
        needed_disk_bytes = report.needed_disk_bytes
        self._launch_backoff.record_needed_disk_bytes(job.job_id, needed_disk_bytes)
        free_bytes = self._placer.free_disk_bytes_max(job)
        if needed_disk_bytes <= free_bytes:
            return FailureCause.NODE, report.reason
        return FailureCause.JOB, (
            f"its working directory needs {needed_disk_bytes} bytes of free disk space "
            f"({needed_disk_bytes / 2**30:.2f} GiB), packed and unpacked; the largest free space of a node "
            f"is {free_bytes} bytes ({free_bytes / 2**30:.2f} GiB)"
        )

    def _stage_worker_end(
        self,
        txn: Transaction,
        job: Job,
        rank: int,
        ended: Placement,
        *,
        reason: str,
        cause: FailureCause = FailureCause.JOB,
    ) -> None:
        self._release_hold(txn, job, rank)
        state, exit_code = ended.outcome, ended.exit_code
        placements = (*job.placements[:rank], ended, *job.placements[rank + 1 :])
        is_first_failure = state is not JobState.SUCCEEDED and not job.stop
        job = msgspec.structs.replace(
            job,
            placements=placements,
            exit_code=exit_code if is_first_failure or job.exit_code is None else job.exit_code,
        )
        is_named = len(placements) > 1 and state is not JobState.SUCCEEDED
        full_reason = f"worker {rank} on node {ended.node_id}: {reason}" if is_named else reason
        if job.state is JobState.PLACING:
            self._requeue_rejected(txn, msgspec.structs.replace(job, exit_code=None), full_reason, cause)
        elif any(placement.outcome is None for placement in placements):
            if is_first_failure:
                self._stage_stop(txn, job, StopReason.WORKER_ENDED, full_reason)
            else:
                txn.put(self._ledger.jobs, job.job_id, job)
        elif job.stop is StopReason.PREEMPT:
            job = msgspec.structs.replace(job, exit_code=None)
            self._stage_requeue(txn, job, f"was preempted: {stopping_reason(job)}")
        elif can_be_requeued_after_end(job, placements):
            why = full_reason if is_first_failure else stopping_reason(job)
            self._requeue_rejected(txn, msgspec.structs.replace(job, exit_code=None), why, FailureCause.NODE)
        else:
            last = full_reason if is_first_failure or not job.stop else reason
            reason = stopping_reason(job) if job.stop is StopReason.WORKER_ENDED else last
            self._stage_end(txn, job, final_state_of_job(placements), reason)

    async def requeue_unconfirmed(
        self, job_id: str, *, epoch: int, reason: str, cause: FailureCause = FailureCause.NONE
    ) -> None:
        """Queue a job again whose launch is not confirmed. Safe at any time: nothing has started."""
        await self._changes.apply(JobChange(job_id, partial(self._requeue_launch, epoch, reason, cause)))

    async def requeue_unconfirmed_jobs(self, jobs: Iterable[tuple[Job, str]]) -> None:
        """Like `requeue_unconfirmed` for many jobs. One that cannot be changed is quarantined."""
        await self._changes.apply_each(
            [
                JobChange(job.job_id, partial(self._requeue_launch, job.epoch, reason, FailureCause.NONE))
                for job, reason in jobs
            ]
        )

    def _requeue_launch(
        self, epoch: int, reason: str, cause: FailureCause, job: Job | None, txn: Transaction
    ) -> None:
        if job is None or job.state is not JobState.PLACING or job.epoch != epoch:
            return  # the launch was void before it was rejected
        if cause is FailureCause.NONE:
            self._stage_requeue(txn, job, reason)
        else:
            self._requeue_rejected(txn, job, reason, cause)

    def _requeue_rejected(self, txn: Transaction, job: Job, reason: str, cause: FailureCause) -> None:
        """Queue a job again after a rejected or failed launch, or fail it after LAUNCH_ATTEMPTS_MAX of
        them that nodes have not caused."""
        if cause is FailureCause.NODE:
            self._launch_backoff.record_node_fault(job.job_id, job.epoch)
            self._stage_requeue(txn, job, reason)
            return
        count = self._launch_backoff.record_rejection(job.job_id, job.epoch)
        if count >= LAUNCH_ATTEMPTS_MAX:
            self._stage_end(txn, job, JobState.FAILED, f"rejected {count} times, most recently: {reason}")
        else:
            self._stage_requeue(txn, job, reason)

    async def record_lost_workers(self, workers: Iterable[LostWorker]) -> int:
        """Record that nodes no longer run these workers: each is lost, or its job is queued again if it had
        not started. If there is no such job, its hold on the node is released. A job that cannot be changed
        is quarantined. Return the number of lost workers."""
        changes = []
        for worker in workers:
            job_id, rank = parse_worker_name(worker.worker_name)
            changes.append(JobChange(job_id, partial(self._stage_lost_worker, worker, rank), rank))
        outcomes = await self._changes.apply_each(changes)
        return sum(outcome is True for outcome in outcomes)

    def _stage_lost_worker(self, worker: LostWorker, rank: int, job: Job | None, txn: Transaction) -> bool:
        reason = worker.reason
        if not worker.is_still_lost():
            return False
        if job is None:
            self._release_orphaned_hold(txn, worker)
            return True
        if job.epoch != worker.epoch or job.state.is_final:
            return False
        if rank >= len(job.placements) or job.placements[rank].outcome is not None:
            return False
        if job.state is JobState.PLACING:
            self._stage_requeue(txn, job, reason)
            return True
        state = JobState.LOST
        if job.stop is StopReason.CANCEL:
            state, reason = JobState.CANCELLED, f"cancelled: {stopping_reason(job)} ({reason})"
        elif job.stop is StopReason.TIME_LIMIT:
            state, reason = JobState.FAILED, f"{stopping_reason(job)} ({reason})"
        ended = msgspec.structs.replace(job.placements[rank], outcome=state)
        self._stage_worker_end(txn, job, rank, ended, reason=reason)
        return True

    async def delete_old_jobs(self) -> None:
        """Delete finished jobs beyond the limits of the history: age, number and bytes."""
        while excess := self._find_jobs_to_delete(limit=_DELETE_BATCH_JOBS * _DELETE_BATCHES_MAX):
            parts = [
                excess[start : start + _DELETE_BATCH_JOBS]
                for start in range(0, len(excess), _DELETE_BATCH_JOBS)
            ]
            for outcome in await self._ledger.write_each(partial(self._delete_jobs, part) for part in parts):
                if isinstance(outcome, Exception):
                    raise outcome

    def _find_jobs_to_delete(self, *, limit: int) -> list[Job]:
        excess = HistoryExcess(
            delete_ended_before=self._clock.wall_s() - self._config.history_days * 86400,
            job_count=sum(self._index.count_in_state(state) for state in FINAL_STATES)
            - self._config.jobs_kept,
            size_bytes=self.space.excess_history_bytes(),
        )
        return select_jobs_to_delete(
            self._index,
            excess,
            bytes_by_tenant=self.space.finished_bytes_by_tenant,
            get_size_bytes=self.space.job_size_bytes,
            limit=limit,
        )

    def _delete_jobs(self, jobs: list[Job], txn: Transaction) -> None:
        for job in jobs:
            txn.delete(self._ledger.jobs, job.job_id)

    # -- staging ----------------------------------------------------------------------------

    def _stage_end(self, txn: Transaction, job: Job, state: JobState, reason: str) -> Job:
        self._release_all_holds(txn, job)
        step = with_state(job, state, reason=reason, at=self._clock.wall_s())
        txn.put(self._ledger.jobs, job.job_id, step)
        return step

    def _stage_stop(self, txn: Transaction, job: Job, stop: StopReason, reason: str) -> Job:
        job = msgspec.structs.replace(job, stop=stop, reason=truncate_reason(f"{STOPPING_PREFIX}{reason}"))
        txn.put(self._ledger.jobs, job.job_id, job)
        return job

    def _stage_requeue(self, txn: Transaction, job: Job, reason: str) -> None:
        if is_shrunk_job(job):
            why = f"it cannot run again, because its stored record is too large ({reason})"
            self._stage_end(txn, job, JobState.FAILED, why)
            return
        self._release_all_holds(txn, job)
        step = with_state(job, JobState.QUEUED, reason=reason, at=self._clock.wall_s())
        txn.put(self._ledger.jobs, job.job_id, step)

    def _release_all_holds(self, txn: Transaction, job: Job) -> None:
        for rank, placement in enumerate(job.placements):
            if placement.outcome is None:
                self._release_hold(txn, job, rank)

    def _release_hold(self, txn: Transaction, job: Job, rank: int) -> None:
        node_id = job.placements[rank].node_id
        held = txn.get(self._ledger.holds, node_id)
        if held is not None:
            txn.put(self._ledger.holds, node_id, held.without_job(job.worker_name(rank)))

    def _release_orphaned_hold(self, txn: Transaction, worker: LostWorker) -> None:
        held = txn.get(self._ledger.holds, worker.node_id)
        key = (worker.worker_name, worker.epoch)
        if held is not None and any((hold.job_id, hold.epoch) == key for hold in held.holds):
            txn.put(self._ledger.holds, worker.node_id, held.without_job(worker.worker_name))

    def _new_job_id(self) -> str:
        while True:
            number = int.from_bytes(self._random_bytes(5))
            job_id = "j-" + "".join(
                [_ID_CHARACTER_PAIRS[number >> shift & 1023] for shift in (30, 20, 10, 0)]
            )
            if job_id not in self._ledger.jobs:
                return job_id

    # -- indexes ----------------------------------------------------------------------------

    async def _index_loading_rows(self, read: TableRead[Job]) -> None:
        self._loading_indexes = (await JobIndex.build(read.rows.values()), await StagedIndex.build(read.rows))

    def _replace_indexes(self) -> None:
        self._index, staged = self._loading_indexes
        self._staged_index.replace_with(staged)
        # Another controller may have changed jobs since the last load.
        for job_id in {
            *self._pending_reasons,
            *self._unkillable_reasons_by_job,
            *self._ready_ranks_by_job,
            *self._launch_backoff.job_ids(),
        }:
            self._discard_outdated_job_info(job_id, self.get(job_id))
        self._notifier.notify_all()
        self._wake()

    def _on_job_changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        self._index.update(before, after)
        self._discard_outdated_job_info(job_id, after)
        self._notifier.notify(job_id)
        self._wake()

    def _discard_outdated_job_info(self, job_id: str, job: Job | None) -> None:
        """Discard what is kept in memory about a job, as far as its state has outdated it."""
        state = None if job is None else job.state
        if state is not _QUEUED:
            self._pending_reasons.pop(job_id, None)
        if state is not _RUNNING:
            self._unkillable_reasons_by_job.pop(job_id, None)
        if state is not _PLACING:
            self._ready_ranks_by_job.pop(job_id, None)
        if state is None or state.is_final:
            self._launch_backoff.reset(job_id)


# Members of an enum are slow to look up, and every change of a job compares them.
_QUEUED, _PLACING, _RUNNING = JobState.QUEUED, JobState.PLACING, JobState.RUNNING


def _without_ticket(job: Job) -> Job:
    """No reply has the hash of a ticket: only its executor needs it."""
    return msgspec.structs.replace(job, ticket_sha256="") if job.ticket_sha256 else job


def can_see(identity: Identity, job: Job) -> bool:
    """Whether this identity may see the job: a user sees its own tenant, the owner sees all."""
    return identity.kind is TokenKind.OWNER or identity.tenant == job.tenant


def _make_hold(job: Job, rank: int) -> Hold:
    """Return what a worker holds on its node."""
    resources, placement = job.spec.resources, job.placements[rank]
    return Hold(
        job_id=job.worker_name(rank),
        tenant=job.tenant,
        epoch=placement.epoch,
        incarnation=placement.incarnation,
        gpu_ids=placement.gpu_ids,
        gpu_milli=resources.gpu_milli,
        cpus=resources.cpus,
        memory_bytes=resources.memory_bytes,
    )
