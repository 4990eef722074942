"""How jobs stop, end and are queued again: every change is one transaction, durable before anyone sees it.

The transaction changes the job and, where resources are released, the node's allocations with it, so a hold
is released exactly once. Starts are recorded in launches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from genie.controller.jobs.backoff import LaunchBackoff, LaunchFailureCause
from genie.controller.jobs.changes import JobChange, JobChanges
from genie.controller.jobs.outcomes import (
    can_be_requeued_after_end,
    failed_because_of_node,
    final_state_of_job,
    final_state_of_worker,
    is_current_placement,
    requeue_reason,
    stopping_reason,
)
from genie.controller.jobs.transitions import JobTransitions
from genie.controller.ledger import Ledger, Transaction
from genie.errors import JobNotFoundError
from genie.model.job import Job, JobState, Placement, StopReason, parse_worker_name
from genie.model.messages import ExitReport

LAUNCH_ATTEMPTS_MAX = 5
CHANGES_PER_TICK_MAX = 2000
"""Jobs that one kind of periodic work changes at once; the rest follows with the next tick."""


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that its node no longer runs. `is_still_lost` is evaluated in the transaction: the node may
    have reconnected meanwhile."""

    worker_name: str
    node_id: str
    epoch: int
    reason: str
    is_still_lost: Callable[[], bool] = lambda: True


class NodeDiskSpace(Protocol):
    """The free disk space of nodes (placement/planner.py)."""

    def free_disk_bytes_max(self, job: Job) -> int:
        """Return the largest free disk space of the nodes on which the job could run."""
        ...


class JobLifecycle:
    def __init__(
        self,
        ledger: Ledger,
        transitions: JobTransitions,
        *,
        backoff: LaunchBackoff,
        disk_space: NodeDiskSpace,
    ) -> None:
        self._ledger = ledger
        self._transitions = transitions
        self._launch_backoff = backoff
        self._disk_space = disk_space
        self._changes = JobChanges(ledger)

    async def cancel(self, job_id: str, reason: str, *, stop: StopReason = StopReason.CANCEL) -> Job:
        """End a job that has not started; mark a running one, which ends when its agent reports the exit.
        `stop`: CANCEL, or CLOSED for a session.

        The confirmation of a launch that is in progress will be rejected.
        """

        def build(job: Job | None, txn: Transaction) -> Job:
            if job is None:
                raise JobNotFoundError(f"there is no job {job_id!r}")
            if job.state.is_final or job.stop not in (StopReason.NONE, StopReason.PREEMPT):
                return job
            if job.state is JobState.RUNNING:
                return self._transitions.stage_stop(txn, job, stop, reason)
            return self._transitions.stage_end(txn, job, JobState.CANCELLED, f"cancelled: {reason}")

        return await self._changes.apply(JobChange(job_id, build))

    async def mark_jobs_stopping(self, jobs: Iterable[tuple[Job, str]], stop_kind: StopReason) -> list[Job]:
        """Mark running jobs, each with a reason, so that their agents end them. Return those that were
        marked: not those whose placement is no longer running."""

        def build(epoch: int, reason: str, job: Job | None, txn: Transaction) -> Job | None:
            if job is None or job.state is not JobState.RUNNING or job.epoch != epoch or job.stop:
                return None
            return self._transitions.stage_stop(txn, job, stop_kind, reason)

        changes = [JobChange(job.job_id, partial(build, job.epoch, reason)) for job, reason in jobs]
        return [job for job in await self._changes.apply_each(changes) if isinstance(job, Job)]

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
        cause = LaunchFailureCause.NODE if failed_because_of_node(job, report) else LaunchFailureCause.JOB
        if report.needed_disk_bytes and job.state is JobState.PLACING:
            cause, reason = self._find_cause_of_full_disk(job, report)
        ended = msgspec.structs.replace(
            job.placements[rank],
            outcome=state,
            # A session that its client has closed may have been ended by a signal.
            exit_code=0 if state is JobState.SUCCEEDED else report.exit_code,
            never_started=not report.started,
        )
        self._stage_worker_end(txn, job, rank, ended, reason=reason, cause=cause)

    def _find_cause_of_full_disk(self, job: Job, report: ExitReport) -> tuple[LaunchFailureCause, str]:
        """Decide who is to blame for a disk without space for the working directory: the job, if no node has
        that much space."""
        needed_disk_bytes = report.needed_disk_bytes
        self._launch_backoff.record_needed_disk_bytes(job.job_id, needed_disk_bytes)
        free_bytes = self._disk_space.free_disk_bytes_max(job)
        if needed_disk_bytes <= free_bytes:
            return LaunchFailureCause.NODE, report.reason
        return LaunchFailureCause.JOB, (
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
        cause: LaunchFailureCause = LaunchFailureCause.JOB,
    ) -> None:
        self._transitions.release_hold(txn, job, rank)
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
                self._transitions.stage_stop(txn, job, StopReason.WORKER_ENDED, full_reason)
            else:
                txn.put(self._ledger.jobs, job.job_id, job)
        elif job.stop is StopReason.PREEMPT and final_state_of_job(placements) is not JobState.SUCCEEDED:
            job = msgspec.structs.replace(job, exit_code=None)
            self._transitions.stage_requeue(txn, job, requeue_reason(stopping_reason(job)))
        elif can_be_requeued_after_end(job, placements):
            why = full_reason if is_first_failure else stopping_reason(job)
            if job.spec.is_restartable:
                why = f"queued again: {why}"
            self._requeue_rejected(
                txn, msgspec.structs.replace(job, exit_code=None), why, LaunchFailureCause.NODE
            )
        else:
            last = full_reason if is_first_failure or not job.stop else reason
            reason = stopping_reason(job) if job.stop is StopReason.WORKER_ENDED else last
            self._transitions.stage_end(txn, job, final_state_of_job(placements), reason)

    async def requeue_unconfirmed(
        self, job_id: str, *, epoch: int, reason: str, cause: LaunchFailureCause = LaunchFailureCause.NONE
    ) -> None:
        """Queue a job again whose launch is not confirmed. Safe at any time: nothing has started."""
        await self._changes.apply(JobChange(job_id, partial(self._requeue_launch, epoch, reason, cause)))

    async def requeue_unconfirmed_jobs(self, jobs: Iterable[tuple[Job, str]]) -> list[Job]:
        """Like `requeue_unconfirmed` for many jobs. One that cannot be changed is quarantined. Return those
        that were queued again, as they were before."""
        changes = [
            JobChange(job.job_id, partial(self._requeue_launch, job.epoch, reason, LaunchFailureCause.NONE))
            for job, reason in jobs
        ]
        return [job for job in await self._changes.apply_each(changes) if isinstance(job, Job)]

    def _requeue_launch(
        self, epoch: int, reason: str, cause: LaunchFailureCause, job: Job | None, txn: Transaction
    ) -> Job | None:
        """Stage that the job is queued again; return it as it was, None if it was not placed any more."""
        if job is None or job.state is not JobState.PLACING or job.epoch != epoch:
            return None  # the launch was void before it was rejected
        if cause is LaunchFailureCause.NONE:
            self._transitions.stage_requeue(txn, job, reason)
        else:
            self._requeue_rejected(txn, job, reason, cause)
        return job

    def _requeue_rejected(self, txn: Transaction, job: Job, reason: str, cause: LaunchFailureCause) -> None:
        """Queue a job again after a rejected or failed launch, or fail it after LAUNCH_ATTEMPTS_MAX of
        them that nodes have not caused."""
        if cause is LaunchFailureCause.NODE:
            self._launch_backoff.record_node_fault(job.job_id, job.epoch)
            self._transitions.stage_requeue(txn, job, reason)
            return
        count = self._launch_backoff.record_rejection(job.job_id, job.epoch)
        if count >= LAUNCH_ATTEMPTS_MAX:
            why = f"rejected {count} times, most recently: {reason}"
            self._transitions.stage_end(txn, job, JobState.FAILED, why)
        else:
            self._transitions.stage_requeue(txn, job, reason)

    async def record_lost_workers(self, workers: Iterable[LostWorker]) -> int:
        """Record that nodes no longer run these workers: each is lost, or its job is queued again if it is
        restartable or had not started. A hold that is not of the current placement of a job is released.
        A job that cannot be changed is quarantined. Return the number of lost workers."""
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
        if job is None or not is_current_placement(job, rank, worker.node_id, worker.epoch):
            return self._transitions.release_hold_of_worker(
                txn, node_id=worker.node_id, worker_name=worker.worker_name, epoch=worker.epoch
            )
        if job.state is JobState.PLACING:
            self._transitions.stage_requeue(txn, job, reason)
            return True
        state = JobState.LOST
        if job.stop is StopReason.CANCEL:
            state, reason = JobState.CANCELLED, f"cancelled: {stopping_reason(job)} ({reason})"
        elif job.stop is StopReason.CLOSED:
            state, reason = JobState.SUCCEEDED, f"{stopping_reason(job)} ({reason})"
        elif job.stop is StopReason.TIME_LIMIT:
            state, reason = JobState.FAILED, f"{stopping_reason(job)} ({reason})"
        ended = msgspec.structs.replace(job.placements[rank], outcome=state)
        self._stage_worker_end(txn, job, rank, ended, reason=reason)
        return True
