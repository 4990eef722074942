"""Logs of jobs, as people ask for them: which run of which worker, and which node has it.

A job that was queued again has run several times, each time perhaps elsewhere. Not for: the bytes, which the
agents have (agent/logs.py).
"""

from __future__ import annotations

import msgspec

from genie.controller.checks import checked_wait_s
from genie.controller.connection import Connection, Handlers
from genie.controller.users import Cluster
from genie.errors import JobNotFoundError, UsageError
from genie.model.job import Job, Run, unit_name
from genie.model.messages import CHUNK_BYTES_MAX, LogChunk, ReadLog


class Logs:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def handlers(self) -> Handlers:
        return {ReadLog: self.read_log}

    async def read_log(self, connection: Connection, request: ReadLog) -> LogChunk:
        """Waits for a run that has not begun; there is none when the job is over before."""
        self._cluster.check_readable()
        jobs = self._cluster.jobs
        job, rank = jobs.find_worker(request.job_id, connection.identity)
        _check(request, job)
        wait_s, clock = checked_wait_s(request.wait_s), self._cluster.clock
        until_s = clock.monotonic_s() + wait_s
        if wait_s and _is_to_come(job, request.run):
            await jobs.wait_while(job.job_id, lambda now: _is_to_come(now, request.run), timeout_s=wait_s)
            job = jobs.find(job.job_id, connection.identity)
        run = _run_of(job, request.run)
        if run is None and request.run and not wait_s:
            raise _no_run(request, job)
        if run is None:
            offset, is_over = request.offset, job.state.is_final
            return LogChunk(data=b"", start=offset, next_offset=offset, eof=is_over, runs=_numbers(job))
        if rank >= len(run.nodes):
            raise JobNotFoundError(
                f"job {job.job_id} has no worker of rank {rank}: the last is {len(run.nodes) - 1}"
            )
        chunk = await self._cluster.agents.read_log(
            unit_name(job.job_id, rank, workers=len(run.nodes)),
            run.nodes[rank],
            msgspec.structs.replace(request, wait_s=max(until_s - clock.monotonic_s(), 0.0), epoch=run.epoch),
        )
        return msgspec.structs.replace(chunk, run=run.number, runs=_numbers(job))


def _check(request: ReadLog, job: Job) -> None:
    if request.offset < 0 or not 1 <= request.bytes_max <= CHUNK_BYTES_MAX:
        raise UsageError(f"offset must be 0 or more and bytes_max from 1 to {CHUNK_BYTES_MAX}")
    is_past = 0 < request.run < job.run
    if not 0 <= request.run <= job.run + 1 or (is_past and request.run not in _numbers(job)):
        raise _no_run(request, job)


def _is_to_come(job: Job, number: int) -> bool:
    if job.state.is_final:
        return False
    if number == 0:
        return job.started_at is None and not job.earlier
    return number > job.run or (number == job.run and job.started_at is None)


def _run_of(job: Job, number: int) -> Run | None:
    """None when there was none, or it is to come. The last is the one before, while the next is to come."""
    runs = _runs(job)
    if number == 0:
        return runs[-1] if runs else None
    return next((run for run in runs if run.number == number), None)


def _runs(job: Job) -> tuple[Run, ...]:
    if job.started_at is None or not job.placements:
        return job.earlier
    last = Run(
        number=job.run,
        epoch=job.epoch,
        nodes=tuple(placement.node_id for placement in job.placements),
        started_at=job.started_at,
        ended_at=0.0,
    )
    return (*job.earlier, last)


def _numbers(job: Job) -> tuple[int, ...]:
    return tuple(run.number for run in _runs(job))


def _no_run(request: ReadLog, job: Job) -> JobNotFoundError:
    numbers = _numbers(job)
    there = f"there are logs of {', '.join(map(str, numbers))}" if numbers else "it has not run yet"
    return JobNotFoundError(f"there is no log of run {request.run} of job {job.job_id}", hint=there)
