"""How long jobs with a time limit have been running, by the monotonic clocks of their nodes.

Agents report the elapsed time with each heartbeat. The wall clock decides nothing here: it may be set at any
time. A new leader knows the elapsed time of a job after the first heartbeat of one of its nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from genie.model.job import Job
from genie.processes.clock import Clock

_ELAPSED_S_MAX = 100 * 365 * 86400.0


class RunTimes:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_by_job: dict[str, tuple[int, float]] = {}
        """By job: the epoch, and when its first worker started, in monotonic time of this controller."""

    def record(self, job: Job, elapsed_s: float) -> None:
        """Record the elapsed time of a worker, from a heartbeat; 0 if it has not started. Ignores one that
        cannot be."""
        if job.spec.constraints.time_limit_s is None or not 0 < elapsed_s <= _ELAPSED_S_MAX:
            return
        began_s = self._clock.monotonic_s() - elapsed_s
        epoch, earliest_s = self._start_by_job.get(job.job_id, (job.epoch, began_s))
        # The earliest value has the least delay of the network in it.
        self._start_by_job[job.job_id] = (
            job.epoch,
            min(earliest_s, began_s) if epoch == job.epoch else began_s,
        )

    def remaining_s(self, job: Job) -> float:
        """The time until the job reaches its time limit: all of it before the first report of a node,
        infinity without a limit."""
        limit_s = job.spec.constraints.time_limit_s
        if limit_s is None:
            return math.inf
        epoch, began_s = self._start_by_job.get(job.job_id, (0, 0.0))
        return limit_s if epoch != job.epoch else began_s + limit_s - self._clock.monotonic_s()

    def jobs_exceeding_limit(self, running: Iterable[Job]) -> list[Job]:
        """Those of all running jobs that have reached their time limit and are not being stopped."""
        known = {job.job_id: job for job in running if job.job_id in self._start_by_job}
        if len(known) < len(self._start_by_job):
            self._start_by_job = {job_id: self._start_by_job[job_id] for job_id in known}
        return [job for job in known.values() if not job.stop and self.remaining_s(job) <= 0]

    def clear(self) -> None:
        """Forget all jobs, at the start of a term."""
        self._start_by_job.clear()
