"""Limits on the number of pending jobs, and when a submission that they refuse may be tried again."""

from __future__ import annotations

from collections import deque

from genie.config import ControllerConfig
from genie.controller.jobs.index import StagedIndex
from genie.errors import QueueFullError
from genie.model.job import Job, JobState
from genie.processes.clock import Clock

RETRY_AFTER_S_MIN = 0.5
RETRY_AFTER_S_MAX = 5.0
_DEPARTURE_RATE_WINDOW_S = 5.0
"""The rate at which jobs leave the queue is an average over this time."""
_DEPARTURE_BUCKETS_PER_S = 2
_RETRY_FREED_QUEUE_DIVISOR = 100
"""Retry a refused submission when 1/_RETRY_FREED_QUEUE_DIVISOR of the queue has become free."""
_QUEUE_FOR_OTHER_TENANTS_DIVISOR = 10
"""1/_QUEUE_FOR_OTHER_TENANTS_DIVISOR of the queue is reserved for other tenants."""


class QueueLimits:
    """`staged_index` counts the pending jobs; within a build, those of earlier writes of the batch, too."""

    def __init__(self, config: ControllerConfig, staged_index: StagedIndex, *, clock: Clock) -> None:
        self._queue_max = config.queue_max
        self._staged_index = staged_index
        self._clock = clock
        self._departures_by_bucket: deque[tuple[int, int]] = deque(
            maxlen=int(_DEPARTURE_RATE_WINDOW_S * _DEPARTURE_BUCKETS_PER_S)
        )
        """Number of the bucket, and jobs that left the queue in it."""

    def check_submission(self, tenant: str) -> None:
        """Raise QueueFullError if the queue is full, or this tenant would fill it alone."""
        queue_max = self._queue_max
        if self._staged_index.queued_count >= queue_max:
            raise QueueFullError(
                f"the queue is full: {queue_max} jobs are pending", retry_after_s=self._retry_after_s()
            )
        own_count = self._staged_index.queued_count_by_tenant[tenant]
        if own_count >= queue_max - queue_max // _QUEUE_FOR_OTHER_TENANTS_DIVISOR:
            raise QueueFullError(
                f"{own_count} jobs of tenant {tenant} are pending; "
                "a tenth of the queue is kept for other tenants",
                retry_after_s=self._retry_after_s(),
            )

    def on_job_changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        """Count a job that has left the queue. A listener of the job table."""
        if before is None or before.state is not JobState.QUEUED:
            return
        if after is not None and after.state is JobState.QUEUED:
            return
        bucket = self._current_bucket()
        count = (
            self._departures_by_bucket.pop()[1]
            if self._departures_by_bucket and self._departures_by_bucket[-1][0] == bucket
            else 0
        )
        self._departures_by_bucket.append((bucket, count + 1))

    def _retry_after_s(self) -> float:
        """When there will be room, at the rate at which jobs leave the queue now."""
        first = self._current_bucket() - int(_DEPARTURE_RATE_WINDOW_S * _DEPARTURE_BUCKETS_PER_S)
        left = sum(count for bucket, count in self._departures_by_bucket if bucket > first)
        needed = max(self._queue_max // _RETRY_FREED_QUEUE_DIVISOR, 1)
        wait_s = needed * _DEPARTURE_RATE_WINDOW_S / left if left else RETRY_AFTER_S_MAX
        return round(min(max(wait_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX), 1)

    def _current_bucket(self) -> int:
        return int(self._clock.monotonic_s() * _DEPARTURE_BUCKETS_PER_S)
