"""Rules for the end of workers and jobs: which report counts, which final state follows, and why. Pure.

The transactions are in jobs/lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from genie.model.job import CLIENT_LOST_EXIT_CODE, Job, JobKind, JobState, Placement, StopReason
from genie.model.messages import ExitReport

STOPPING_PREFIX = "being stopped: "
_MOVING_PREFIX = "moving from "


def is_current_placement(job: Job, rank: int, node_id: str, epoch: int) -> bool:
    """Whether `epoch` is the current placement of this worker, on this node, and has not ended."""
    if job.state.is_final or job.epoch != epoch or rank >= len(job.placements):
        return False
    placement = job.placements[rank]
    return placement.node_id == node_id and placement.outcome is None


def stopping_reason(job: Job) -> str:
    """Why a running job is being stopped."""
    return job.reason.removeprefix(STOPPING_PREFIX)


def reason_of_move(node_id: str, drain_status: str) -> str:
    """Why a job is moved, as `moving from a1: draining (new fans)`."""
    state, colon, reason = drain_status.partition(": ")
    return f"{_MOVING_PREFIX}{node_id}: {state}{f' ({reason})' if colon else ''}"


def requeue_reason(why_stopped: str) -> str:
    """Why a job is queued again that was stopped for another job, or that is moved. Moves are recognized by
    their text: another StopReason could not be read by controllers of earlier versions."""
    if why_stopped.startswith(_MOVING_PREFIX):
        return f"moved from {why_stopped.removeprefix(_MOVING_PREFIX)}"
    return f"was preempted: {why_stopped}"


def failed_because_of_node(job: Job, report: ExitReport) -> bool:
    """Whether this worker has not started because of its node. A disk that is too small for the working
    directory is no fault: it has space for other jobs."""
    return (
        report.is_caused_by_node
        and not report.needed_disk_bytes
        and not report.started
        and not _stop_reason_of_running_job(job)
    )


def _stop_reason_of_running_job(job: Job) -> StopReason:
    """Why the workers are being stopped; of a job that is not running, the mark says that it is being
    released (jobs/changes.py), which ends no worker."""
    return job.stop if job.state is JobState.RUNNING else StopReason.NONE


def final_state_of_worker(job: Job, report: ExitReport) -> tuple[JobState, str]:
    """Return the final state of a worker after this exit, and the reason."""
    code = report.exit_code
    if code is None:
        reason = report.reason or "ended without an exit code"
    else:
        reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    how = "" if code is None else f" ({reason})"
    stop = _stop_reason_of_running_job(job)
    if stop is StopReason.PREEMPT and code == 0:
        # It ended by itself before it was stopped: a worker that was stopped has no exit code.
        return JobState.SUCCEEDED, reason
    if stop in (StopReason.CANCEL, StopReason.WORKER_ENDED, StopReason.PREEMPT):
        return JobState.CANCELLED, f"cancelled: {stopping_reason(job)}{how}"
    if stop is StopReason.CLOSED:
        return JobState.SUCCEEDED, stopping_reason(job)
    if stop is StopReason.TIME_LIMIT:
        return JobState.FAILED, f"{stopping_reason(job)}{how}"
    if code == CLIENT_LOST_EXIT_CODE and job.spec.kind is JobKind.SESSION:
        return JobState.CANCELLED, f"cancelled: {report.reason or 'the client did not return'}"
    if code == 0:
        # A launch that was never confirmed cannot have succeeded.
        return (JobState.SUCCEEDED if job.state is JobState.RUNNING else JobState.FAILED), reason
    if code is None and (report.started or report.is_caused_by_node) and job.state is JobState.RUNNING:
        # Not a failure of the job: the node lost its connection or was stopped.
        return JobState.LOST, reason
    return JobState.FAILED, reason


def can_be_requeued_after_end(job: Job, placements: Sequence[Placement]) -> bool:
    """Whether a job whose workers have all ended can be queued again: nodes are the cause of its end, and it
    is restartable or no command has run."""
    is_by_node = final_state_of_job(placements) is JobState.LOST
    is_stopped = job.stop not in (StopReason.NONE, StopReason.WORKER_ENDED)
    has_run = not all(placement.never_started for placement in placements)
    can_run_again = job.spec.is_restartable or (not has_run and job.spec.kind is JobKind.COMMAND)
    return is_by_node and not is_stopped and can_run_again


def final_state_of_job(placements: Sequence[Placement]) -> JobState:
    """Return the final state of a job whose workers have all ended."""
    outcomes = {placement.outcome for placement in placements}
    for state in (JobState.FAILED, JobState.LOST, JobState.CANCELLED):
        if state in outcomes:
            return state
    return JobState.SUCCEEDED
