"""Stages single transitions of a job: its next row, and the release of what it holds, in one transaction.

Not responsible for when a transition is due (lifecycle.py, launches.py).
"""

from __future__ import annotations

import msgspec

from genie.controller.jobs.outcomes import STOPPING_PREFIX
from genie.controller.ledger import Ledger, Transaction
from genie.model.job import Job, JobState, StopReason, is_shrunk_job, truncate_reason, with_state
from genie.processes.clock import Clock


class JobTransitions:
    def __init__(self, ledger: Ledger, *, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    def stage_end(self, txn: Transaction, job: Job, state: JobState, reason: str) -> Job:
        """Stage the end of a job and the release of what it holds; return the ended job."""
        self._release_all_holds(txn, job)
        step = with_state(job, state, reason=reason, at=self._clock.wall_s())
        txn.put(self._ledger.jobs, job.job_id, step)
        return step

    def stage_stop(self, txn: Transaction, job: Job, stop: StopReason, reason: str) -> Job:
        """Stage the mark of a running job that its agents must end; return the marked job."""
        job = msgspec.structs.replace(job, stop=stop, reason=truncate_reason(f"{STOPPING_PREFIX}{reason}"))
        txn.put(self._ledger.jobs, job.job_id, job)
        return job

    def stage_requeue(self, txn: Transaction, job: Job, reason: str) -> None:
        """Stage that a job is queued again and what it holds is released; one that was shrunk fails."""
        if is_shrunk_job(job):
            why = f"it cannot run again, because its stored record is too large ({reason})"
            self.stage_end(txn, job, JobState.FAILED, why)
            return
        self._release_all_holds(txn, job)
        step = with_state(job, JobState.QUEUED, reason=reason, at=self._clock.wall_s())
        txn.put(self._ledger.jobs, job.job_id, step)

    def _release_all_holds(self, txn: Transaction, job: Job) -> None:
        for rank, placement in enumerate(job.placements):
            if placement.outcome is None:
                self.release_hold(txn, job, rank)

    def release_hold(self, txn: Transaction, job: Job, rank: int) -> None:
        """Stage the release of what one worker holds. Raise ReleaseSkewError if a newer release wrote the
        allocations of its node: a job that ended without the release would leave them behind."""
        placement = job.placements[rank]
        self.release_hold_of_worker(
            txn, node_id=placement.node_id, worker_name=job.worker_name(rank), epoch=placement.epoch
        )

    def release_hold_of_worker(self, txn: Transaction, *, node_id: str, worker_name: str, epoch: int) -> bool:
        """Stage the release of what a placement of a worker holds, whether or not its job exists; return
        whether it held anything. Raise ReleaseSkewError as `release_hold`."""
        self._ledger.holds.check_writable(node_id)
        held = txn.get(self._ledger.holds, node_id)
        kept = None if held is None else held.without_worker(worker_name, epoch=epoch)
        if kept is None or kept is held:
            return False
        txn.put(self._ledger.holds, node_id, kept)
        return True
