"""Clients that use locks and jobs of a real cluster, and record what they did as a history."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable

from genie.cluster.locking.lock_lease import LockLease, LockRequestSender
from genie.errors import GenieError, LockLostError
from genie.model.job import JobSpec, JobState, Resources
from genie.model.messages import CancelJob, GetJob, SubmitJob
from genie.model.messages.locks import ListLocks, LockView
from genie.processes.clock import SystemClock
from tests.linearizability.checker import Operation
from tests.linearizability.models import Acquire, Cancel, Expire, ReadJob, ReadLock, Release, Submit
from tests.linearizability.recorder import HistoryRecorder

_CALL_TIMEOUT_S = 20.0
_PAUSE_S_MAX = 0.02


class LockClient:
    """Acquires and releases random locks. After `abandoned_share` of the acquisitions it behaves as if it had
    been killed: it neither renews nor releases. `steps` counts its finished rounds."""

    def __init__(
        self,
        name: str,
        sender: LockRequestSender,
        recorder: HistoryRecorder,
        *,
        locks: tuple[str, ...],
        ttl_s: float,
        abandoned_share: float,
        seed: int,
    ) -> None:
        self.steps = 0
        self.is_holding = False
        self._name = name
        self._sender = sender
        self._recorder = recorder
        self._abandoned_share = abandoned_share
        self._lock_names = locks
        self._ttl_s = ttl_s
        self._random = random.Random(seed)
        self._holder_numbers = itertools.count(1)

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            lock = self._random.choice(self._lock_names)
            if self._random.random() < 0.2:
                await self._read(lock)
            else:
                timeout_s = self._random.choice((0.0, 1.0, 30.0))
                await self._acquire_and_end(lock, timeout_s=timeout_s, use=self._use_for_a_moment)
            self.steps += 1
            await asyncio.sleep(self._random.uniform(0.0, _PAUSE_S_MAX))

    async def hold_until(self, lock: str, releasing: asyncio.Event) -> None:
        """Acquire a lock and hold it until `releasing` is set."""
        await self._acquire_and_end(lock, timeout_s=30.0, use=releasing.wait)

    async def _use_for_a_moment(self) -> None:
        await asyncio.sleep(self._random.uniform(0.0, _PAUSE_S_MAX))

    async def _read(self, lock: str) -> None:
        def find_holder(locks: tuple[LockView, ...]) -> tuple[str, int] | None:
            return next(((each.holder, each.fencing_token) for each in locks if each.name == lock), None)

        await self._recorder.record(
            self._name,
            ReadLock(lock),
            lambda: self._sender.call(ListLocks(), timeout_s=_CALL_TIMEOUT_S),
            to_output=lambda reply: find_holder(reply.locks),
            outcome_unknown=(GenieError,),
        )

    async def _acquire_and_end(
        self, lock: str, *, timeout_s: float, use: Callable[[], Awaitable[object]]
    ) -> None:
        """One acquisition, under a name of its own, so that each has its own `Expire`."""
        holder = f"{self._name}.{next(self._holder_numbers)}"
        # The clock of the history.
        lease = LockLease(lock, ttl_s=self._ttl_s, holder=holder, sender=self._sender, clock=SystemClock())
        called_s = time.monotonic()
        is_acquired = await self._recorder.record(
            self._name,
            Acquire(lock, holder),
            lambda: lease.acquire(timeout_s=timeout_s),
            to_output=lambda acquired: lease.fencing_token if acquired else None,
            outcome_unknown=(GenieError,),
        )
        if time.monotonic() - called_s > self._ttl_s / 2:
            # A grant whose reply was late may have expired before the one that was returned.
            for request in (Acquire(lock, holder), Expire(lock, holder)):
                self._recorder.operations.append(Operation(self._name, request, None, called_s))
        if is_acquired is None:
            self._recorder.record_pending(self._name, Expire(lock, holder))
        elif is_acquired:
            self.is_holding = True
            await self._hold_and_end(lease, holder, use)
            self.is_holding = False

    async def _hold_and_end(
        self, lease: LockLease, holder: str, use: Callable[[], Awaitable[object]]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(lease.keep_until_ended())
            await use()
            is_abandoned = self._random.random() < self._abandoned_share
            if is_abandoned:
                keeping.cancel()
            else:
                await self._release(lease, holder)
        if is_abandoned or lease.is_lost:
            # Not before: until then this client could rely on the lock.
            expired_s = lease.deadline_s if is_abandoned else min(lease.deadline_s, time.monotonic())
            expiry = Expire(lease.name, holder, lease.fencing_token)
            self._recorder.operations.append(Operation(self._name, expiry, None, expired_s))

    async def _release(self, lease: LockLease, holder: str) -> None:
        request = Release(lease.name, holder, lease.fencing_token)

        async def release() -> bool:
            if not await lease.release(timeout_s=_CALL_TIMEOUT_S):
                raise _UnconfirmedReleaseError
            return True

        try:
            await self._recorder.record(
                self._name, request, release, outcome_unknown=(_UnconfirmedReleaseError,)
            )
        except LockLostError:
            assert lease.is_lost


class _UnconfirmedReleaseError(Exception):
    """No controller has confirmed the release."""


class JobClient:
    """Submits jobs, some of them twice, reads and cancels those of all clients. `job_ids` is shared by them:
    by request ID."""

    def __init__(
        self,
        name: str,
        sender: LockRequestSender,
        recorder: HistoryRecorder,
        *,
        job_ids: dict[str, str],
        seed: int,
    ) -> None:
        self.steps = 0
        self._name = name
        self._sender = sender
        self._recorder = recorder
        self._job_ids = job_ids
        self._random = random.Random(seed)
        self._request_numbers = itertools.count(1)

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            await self._random.choice((self._submit_new, self._submit_again, self._read, self._cancel))()
            self.steps += 1
            await asyncio.sleep(self._random.uniform(0.0, 5 * _PAUSE_S_MAX))

    async def _submit_new(self) -> None:
        await self._submit(f"{self._name}-{next(self._request_numbers)}")

    async def _submit_again(self) -> None:
        if self._job_ids:
            await self._submit(self._random.choice(list(self._job_ids)))

    async def _submit(self, request_id: str) -> None:
        spec = JobSpec(name="job", command=("true",), resources=Resources(gpus=1))
        request = SubmitJob(spec=spec, request_id=request_id)
        reply = await self._recorder.record(
            self._name,
            Submit(request_id),
            lambda: self._sender.call(request, timeout_s=_CALL_TIMEOUT_S),
            to_output=lambda reply: reply.job.job_id,
            outcome_unknown=(GenieError,),
        )
        if reply is not None:
            self._job_ids[request_id] = reply.job.job_id

    async def _read(self) -> None:
        if self._job_ids:
            request_id, job_id = self._random.choice(list(self._job_ids.items()))
            await self._record_job_state(ReadJob(request_id), GetJob(job_id=job_id))

    async def _cancel(self) -> None:
        if self._job_ids:
            request_id, job_id = self._random.choice(list(self._job_ids.items()))
            await self._record_job_state(Cancel(request_id), CancelJob(job_id=job_id))

    async def _record_job_state(self, operation: ReadJob | Cancel, request: GetJob | CancelJob) -> None:
        async def fetch_state() -> tuple[str, JobState]:
            job = (await self._sender.call(request, timeout_s=_CALL_TIMEOUT_S)).job
            return job.job_id, job.state

        await self._recorder.record(self._name, operation, fetch_state, outcome_unknown=(GenieError,))
