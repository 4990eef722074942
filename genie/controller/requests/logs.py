"""Requests for job logs: finds the run and the worker, and reads from the agent that has the log.

A job that was queued again has several runs, possibly on different nodes. Agents store the logs
(agent/logs.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from genie.controller.checks import clamp_wait_s
from genie.controller.connection import Connection, Handlers
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.requests.open_waits import OpenWaits, too_many_open_error
from genie.errors import JobNotFoundError
from genie.model.job import Job, PastRun, make_worker_name
from genie.model.messages import LogChunk, ReadLog
from genie.model.tenant import Identity
from genie.processes.clock import Clock


class LogRequests:
    """`read_from_agent(worker_name, node_id, request)` forwards a request to the agent of that node;
    `check_readable` raises NotLeaderError where another controller must respond."""

    def __init__(
        self,
        jobs: JobCatalog,
        *,
        clock: Clock,
        waits: OpenWaits,
        read_from_agent: Callable[[str, str, ReadLog], Awaitable[LogChunk]],
        check_readable: Callable[[], None],
    ) -> None:
        self._jobs = jobs
        self._clock = clock
        self._open_waits = waits
        self._read_from_agent = read_from_agent
        self._check_readable = check_readable

    def handlers(self) -> Handlers:
        return {ReadLog: self.read_log}

    async def read_log(self, connection: Connection, request: ReadLog) -> LogChunk:
        """Read a part of a log, waiting up to `wait_s` for a run that has not started yet."""
        self._check_readable()
        jobs, clock, identity = self._jobs, self._clock, connection.identity
        job, rank = jobs.find_worker(request.job_id, identity)
        _check_run_exists(request, job)
        wait_s = clamp_wait_s(request.wait_s)
        deadline_s = clock.monotonic_s() + wait_s
        if wait_s and _is_future_run(job, request.run_number):
            job = await self._wait_for_run(job, request.run_number, identity, wait_s=wait_s)
        run = _find_run(job, request.run_number)
        if run is None and request.run_number and not wait_s:
            raise _no_run_error(request, job)
        if run is None:
            offset, is_final = request.offset, job.state.is_final
            return LogChunk(
                data=b"", start_offset=offset, next_offset=offset, eof=is_final, run_numbers=_run_numbers(job)
            )
        if rank >= len(run.nodes):
            raise JobNotFoundError(
                f"job {job.job_id} has no worker of rank {rank}: the highest rank is {len(run.nodes) - 1}"
            )
        left_s = max(deadline_s - clock.monotonic_s(), 0.0)
        chunk = await self._read_from_node(
            make_worker_name(job.job_id, rank, workers=len(run.nodes)),
            run.nodes[rank],
            msgspec.structs.replace(request, wait_s=left_s, epoch=run.epoch),
            tenant=identity.tenant,
        )
        return msgspec.structs.replace(chunk, run_number=run.number, run_numbers=_run_numbers(job))

    async def _wait_for_run(self, job: Job, run_number: int, identity: Identity, *, wait_s: float) -> Job:
        """Wait until the run starts or the job ends, and return the job as it is then."""
        with self._open_waits.try_open_wait(identity.tenant) as is_allowed:
            if not is_allowed:
                raise too_many_open_error(f"waits of tenant {identity.tenant}")
            await self._jobs.wait_while(
                job.job_id, lambda now: _is_future_run(now, run_number), timeout_s=wait_s
            )
        return self._jobs.find(job.job_id, identity)

    async def _read_from_node(
        self, worker_name: str, node_id: str, request: ReadLog, *, tenant: str
    ) -> LogChunk:
        """Read from the agent. Above the limit on waits, the reply contains the output that exists."""
        waits = self._open_waits
        if request.wait_s:
            with waits.try_open_wait(tenant, node_id=node_id) as is_allowed:
                if is_allowed:
                    return await self._read_from_agent(worker_name, node_id, request)
        with waits.try_open_log_read(tenant, node_id=node_id) as is_allowed:
            if not is_allowed:
                raise too_many_open_error(f"reads of logs on node {node_id}")
            chunk = await self._read_from_agent(
                worker_name, node_id, msgspec.structs.replace(request, wait_s=0.0)
            )
        if request.wait_s and not chunk.data and not chunk.eof:
            raise too_many_open_error(f"waits for output of node {node_id}")
        return chunk


def _check_run_exists(request: ReadLog, job: Job) -> None:
    is_past = 0 < request.run_number < job.run_number
    if not 0 <= request.run_number <= job.run_number + 1 or (
        is_past and request.run_number not in _run_numbers(job)
    ):
        raise _no_run_error(request, job)


def _is_future_run(job: Job, run_number: int) -> bool:
    if job.state.is_final:
        return False
    if run_number == 0:
        return job.started_at is None and not job.earlier
    return run_number > job.run_number or (run_number == job.run_number and job.started_at is None)


def _find_run(job: Job, run_number: int) -> PastRun | None:
    """Find a run that has started, or None. Number 0 is the latest one."""
    runs = _started_runs(job)
    if run_number == 0:
        return runs[-1] if runs else None
    return next((run for run in runs if run.number == run_number), None)


def _started_runs(job: Job) -> tuple[PastRun, ...]:
    if job.started_at is None or not job.placements:
        return job.earlier
    last = PastRun(
        number=job.run_number,
        epoch=job.epoch,
        nodes=tuple(placement.node_id for placement in job.placements),
        started_at=job.started_at,
        ended_at=0.0,
    )
    return (*job.earlier, last)


def _run_numbers(job: Job) -> tuple[int, ...]:
    return tuple(run.number for run in _started_runs(job))


def _no_run_error(request: ReadLog, job: Job) -> JobNotFoundError:
    numbers = _run_numbers(job)
    hint = f"runs with logs: {', '.join(map(str, numbers))}" if numbers else "the job has not run yet"
    return JobNotFoundError(f"job {job.job_id} has no log of run {request.run_number}", hint=hint)
