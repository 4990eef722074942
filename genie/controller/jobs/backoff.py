"""Backoff after rejected launches: how often a job was rejected, and when it may be placed again."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from genie.processes.clock import Clock

_BACKOFF_S_MIN = 0.5
_UNPLACEABLE_DELAY_S = 30.0
_NODE_BACKOFF_S_MAX = 60.0


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
    """Caused by nodes."""
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
        """Count a launch that failed because of a node. The first time there is no delay: the job goes to
        another node."""
        before = self._rejections_by_job.get(job_id, _Rejections())
        if before.last_epoch == epoch:
            return
        delay_s = min(_BACKOFF_S_MIN * 2 ** min(before.node_fault_count, 16), _NODE_BACKOFF_S_MAX)
        not_before_s = self._clock.monotonic_s() + (delay_s if before.node_fault_count else 0.0)
        self._rejections_by_job[job_id] = replace(
            before, last_epoch=epoch, node_fault_count=before.node_fault_count + 1, not_before_s=not_before_s
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
