"""Backoff after rejected launches and after runs that nodes have ended: how often these happened, and when
the job may be placed again."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from genie.processes.clock import Clock

_BACKOFF_S_MIN = 0.5
_UNPLACEABLE_DELAY_S = 30.0
_NODE_BACKOFF_S_MAX = 60.0
_NODE_FAULT_COUNTED_S = 600.0
"""An older fault no longer increases the delay."""


class LaunchFailureCause(enum.Enum):
    """Why a launch was not confirmed."""

    NONE = enum.auto()
    """Neither the job nor the node, such as a lost connection."""
    JOB = enum.auto()
    """Possibly the job: it fails after LAUNCH_ATTEMPTS_MAX rejections."""
    NODE = enum.auto()
    """The node, such as a full disk; the job is placed again, however often."""


@dataclass(frozen=True, slots=True)
class _Rejections:
    last_epoch: int = 0
    """Of the last rejected launch."""
    job_fault_count: int = 0
    """Caused by the job, or of unknown cause."""
    node_fault_count: int = 0
    """Caused by nodes, before or after the start of the job."""
    last_node_fault_s: float = 0.0
    not_before_s: float = 0.0
    needed_disk_bytes: int = 0
    """Free disk space that its working directory needs, if a node had less."""


class LaunchBackoff:
    """Kept in memory only: a new leader starts without backoff."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rejections_by_job: dict[str, _Rejections] = {}

    def not_before_s(self, job_id: str) -> float:
        """Monotonic time before which the job must not be placed; 0.0 if it may be placed now."""
        return self._rejections_by_job.get(job_id, _Rejections()).not_before_s

    def record_rejection(self, job_id: str, epoch: int) -> int:
        """Count a rejected launch, once however many workers were rejected; return the count so far."""
        before = self._rejections_by_job.get(job_id, _Rejections())
        if before.last_epoch == epoch:
            return before.job_fault_count
        count = before.job_fault_count + 1
        not_before_s = self._clock.monotonic_s() + _BACKOFF_S_MIN * 2**count
        self._rejections_by_job[job_id] = replace(
            before, last_epoch=epoch, job_fault_count=count, not_before_s=not_before_s
        )
        return count

    def record_node_fault(self, job_id: str, epoch: int) -> None:
        """Count a launch that failed, or a run that ended, because of a node. The first time there is no
        delay: the job goes to another node."""
        before, now_s = self._rejections_by_job.get(job_id, _Rejections()), self._clock.monotonic_s()
        if before.last_epoch == epoch:
            return
        is_recent = now_s - before.last_node_fault_s < _NODE_FAULT_COUNTED_S
        count = before.node_fault_count if is_recent else 0
        delay_s = min(_BACKOFF_S_MIN * 2 ** min(count, 16), _NODE_BACKOFF_S_MAX)
        self._rejections_by_job[job_id] = replace(
            before,
            last_epoch=epoch,
            node_fault_count=count + 1,
            last_node_fault_s=now_s,
            not_before_s=now_s + (delay_s if count else 0.0),
        )

    def record_start(self, job_id: str) -> None:
        """Forget the rejections of a job that has started. Faults of nodes still count: a job that kills its
        shim ends like one whose node has failed, and would start again and again without a delay."""
        before = self._rejections_by_job.pop(job_id, None)
        if before is not None and before.node_fault_count:
            self._rejections_by_job[job_id] = _Rejections(
                last_epoch=before.last_epoch,
                node_fault_count=before.node_fault_count,
                last_node_fault_s=before.last_node_fault_s,
            )

    def needed_disk_bytes(self, job_id: str) -> int:
        """Free disk space that the job needs on its node; 0 unless a node had less."""
        return self._rejections_by_job.get(job_id, _Rejections()).needed_disk_bytes

    def record_needed_disk_bytes(self, job_id: str, needed_disk_bytes: int) -> None:
        before = self._rejections_by_job.get(job_id, _Rejections())
        if needed_disk_bytes > before.needed_disk_bytes:
            self._rejections_by_job[job_id] = replace(before, needed_disk_bytes=needed_disk_bytes)

    def delay_placement(self, job_id: str) -> None:
        """Delay the next placement of a job that could not be placed, which is not a rejection."""
        before = self._rejections_by_job.get(job_id, _Rejections())
        not_before_s = self._clock.monotonic_s() + _UNPLACEABLE_DELAY_S
        self._rejections_by_job[job_id] = replace(before, not_before_s=not_before_s)

    def job_ids(self) -> list[str]:
        """The jobs with rejected or delayed launches."""
        return list(self._rejections_by_job)

    def reset(self, job_id: str) -> None:
        self._rejections_by_job.pop(job_id, None)
