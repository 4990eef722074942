"""Jobs: every step of their life, each durable before anyone is told of it.

A step is one transaction that moves the job and, where it begins or ends to hold something, the
node's ledger with it: so a hold is released exactly once. Not for: which job goes where
(scheduler/), and talking to agents (agents.py).
"""

from __future__ import annotations

import base64
import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter

import msgspec

from genie.config import ControllerConfig
from genie.controller.blobs import blob_name
from genie.controller.ledger import Ledger, Transaction
from genie.controller.waiting import Bell
from genie.errors import FencedError, JobNotFoundError, JobRefusedError
from genie.model.allocation import NodeLedger
from genie.model.job import FINAL_STATES, Job, JobSpec, JobState, Placement, Transition, moved
from genie.model.messages import ExitReport
from genie.model.names import checked_name
from genie.model.tenant import Identity, TokenKind
from genie.runtime.clock import Clock
from genie.scheduler import Place
from genie.scheduler.fit import hold_of

LAUNCH_ATTEMPTS_MAX = 5
_BACKOFF_S = 0.5
_DROP_AT_ONCE = 100
_STOPPING = "being stopped: "


class Jobs:
    """`bell` is rung with a job's id at each of its changes, and `wake` is called."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        config: ControllerConfig,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        bell: Bell,
        wake: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._config = config
        self._clock = clock
        self._random_bytes = random_bytes
        self._bell = bell
        self._wake = wake
        self._by_state: dict[JobState, dict[str, Job]] = {state: {} for state in JobState}
        self._by_name: dict[str, set[str]] = {}
        self._by_request: dict[tuple[str, str], str] = {}
        self._waits_for: dict[str, str] = {}
        self._refusals: dict[str, tuple[int, float]] = {}
        ledger.on_load.append(self._index_all)
        ledger.jobs.indexes.append(self._follow)
        ledger.jobs.on_change.append(self._row_changed)

    # -- reading ------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job | None:
        return self._ledger.jobs.get(job_id)

    def find(self, key: str, identity: Identity) -> Job:
        """By id or by a name that one job only has. What another tenant has does not exist."""
        job = self.get(key)
        if job is not None and sees(identity, job):
            return job
        named = [self._ledger.jobs.get(job_id) for job_id in self._by_name.get(key, ())]
        mine = [job for job in named if job is not None and sees(identity, job)]
        if len(mine) == 1:
            return mine[0]
        shown = key[:80]
        if mine:
            ids = ", ".join(sorted(job.job_id for job in mine)[:5])
            raise JobNotFoundError(f"{len(mine)} jobs are named {shown!r}", hint=f"give an id: {ids}")
        raise JobNotFoundError(f"there is no job {shown!r}", hint="'genie jobs' lists them")

    def shown(self, job: Job) -> Job:
        """The job as people see it: while it is queued, with what it waits for now."""
        reason = self._waits_for.get(job.job_id)
        if job.state is not JobState.QUEUED or reason is None:
            return job
        return msgspec.structs.replace(job, reason=reason)

    def in_states(self, *states: JobState) -> list[Job]:
        return [job for state in states for job in self._by_state[state].values()]

    def newest_first(self, states: Iterable[JobState], before: int | None) -> list[Job]:
        found = self.in_states(*(set(states) or JobState))
        if before is not None:
            found = [job for job in found if job.sequence < before]
        return sorted(found, key=lambda job: -job.sequence)

    def counts(self) -> dict[str, int]:
        return {str(state): len(jobs) for state, jobs in self._by_state.items()}

    def queue(self, now_s: float) -> list[Job]:
        """In order of arrival, without those whose launch was refused a moment ago."""
        jobs = self._by_state[JobState.QUEUED].values()
        ready = [job for job in jobs if self._refusals.get(job.job_id, (0, 0.0))[1] <= now_s]
        return sorted(ready, key=lambda job: job.sequence)

    def needed_blobs(self) -> set[str]:
        unfinished = self.in_states(JobState.QUEUED, JobState.PLACING, JobState.RUNNING)
        return {
            blob_name(job.spec.workdir.digest, job.tenant)
            for job in unfinished
            if job.spec.workdir is not None
        }

    def explain(self, job_id: str, reason: str) -> None:
        """What a queued job waits for. Kept in memory: it changes often and can be found out again."""
        if self._waits_for.get(job_id) != reason:
            self._waits_for[job_id] = reason
            self._bell.ring(job_id)

    def ring(self, job_id: str) -> None:
        """Something about the job changed that the ledger does not have."""
        self._bell.ring(job_id)

    async def wait_while(self, job_id: str, condition: Callable[[Job], bool], *, timeout_s: float) -> None:
        def holds() -> bool:
            job = self.get(job_id)
            return job is not None and condition(job)

        await self._bell.wait_while(job_id, holds, timeout_s=timeout_s)

    # -- steps --------------------------------------------------------------------------------

    async def submit(
        self,
        spec: JobSpec,
        identity: Identity,
        request_id: str,
        *,
        session: str = "",
        ticket_sha256: str = "",
    ) -> Job:
        """Queued, or the job that this request made before. JobRefusedError when the queue is full."""
        checked_name(request_id, what="request id")

        def build(txn: Transaction) -> Job:
            again = self.requested(identity.tenant, request_id)
            if again is not None:
                return again
            if len(self._by_state[JobState.QUEUED]) >= self._config.queue_max:
                raise JobRefusedError(
                    f"the queue is full: {self._config.queue_max} jobs wait", hint="try again later"
                )
            now, reason = self._clock.wall_s(), "submitted"
            job = Job(
                job_id=self._new_id(),
                tenant=identity.tenant,
                owner=identity.token_id,
                spec=spec,
                state=JobState.QUEUED,
                reason=reason,
                submitted_at=now,
                sequence=txn.next_number("sequence"),
                history=(Transition(state=JobState.QUEUED, at=now, reason=reason),),
                request_id=request_id,
                session=session,
                ticket_sha256=ticket_sha256,
            )
            txn.put(self._ledger.jobs, job.job_id, job)
            return job

        return await self._ledger.write(build)

    def requested(self, tenant: str, request_id: str) -> Job | None:
        job_id = self._by_request.get((tenant, request_id))
        return self.get(job_id) if job_id is not None else None

    async def cancel(self, job_id: str, reason: str) -> Job:
        """What has not started ends at once; what runs is marked, and ends when its agent says so.

        A launch that is under way becomes void: its confirmation will be refused.
        """

        def build(txn: Transaction) -> Job:
            job = self._require(job_id)
            if job.state.is_final or job.cancel_requested:
                return job
            if job.state is JobState.RUNNING:
                job = msgspec.structs.replace(job, cancel_requested=True, reason=f"{_STOPPING}{reason}")
                txn.put(self._ledger.jobs, job_id, job)
                return job
            marked = msgspec.structs.replace(job, cancel_requested=True)
            return self._end(txn, marked, JobState.CANCELLED, f"cancelled: {reason}")

        return await self._ledger.write(build)

    async def place(self, decisions: Iterable[Place], *, placed: Callable[[Job], None]) -> None:
        """Placing, each with a hold on its node; `placed` is told of each when all that could be are durable.
        Those whose job or node is not as it was decided on are left out."""
        outcomes = await self._ledger.write_each(partial(self._place, decision) for decision in decisions)
        for job in outcomes:
            if isinstance(job, Job):
                placed(job)
        _raise_first(outcomes)

    def _place(self, decision: Place, txn: Transaction) -> Job | None:
        job = self.get(decision.job_id)
        node = self._ledger.nodes.get(decision.node_id)
        if job is None or job.state is not JobState.QUEUED or node is None:
            return None
        epoch = txn.next_number("epoch")
        placement = Placement(
            node_id=decision.node_id,
            incarnation=node.info.incarnation,
            gpu_ids=decision.gpu_ids,
            epoch=epoch,
        )
        step = moved(job, JobState.PLACING, reason=decision.reason, at=self._clock.wall_s())
        step = msgspec.structs.replace(step, placement=placement)
        hold = hold_of(job, decision.gpu_ids, epoch=epoch, incarnation=node.info.incarnation)
        held = self._ledger.holds.get(decision.node_id) or NodeLedger(node_id=decision.node_id)
        txn.put(self._ledger.holds, decision.node_id, held.with_hold(hold))
        txn.put(self._ledger.jobs, job.job_id, step)
        return step

    async def confirm(self, node_id: str, job_id: str, *, epoch: int, incarnation: int) -> None:
        """Running. FencedError when that launch is void. Asking twice is fine: an answer may be lost."""

        def build(txn: Transaction) -> None:
            job = self.get(job_id)
            if job is None or not is_at(job, node_id, epoch) or job.placement is None:
                raise FencedError(f"launch {epoch} of job {job_id} is void")
            if job.placement.incarnation != incarnation or job.cancel_requested:
                raise FencedError(f"launch {epoch} of job {job_id} is void")
            if job.state is JobState.RUNNING:
                return
            reason = f"started on node {node_id}"
            step = moved(job, JobState.RUNNING, reason=reason, at=self._clock.wall_s())
            txn.put(self._ledger.jobs, job_id, step)

        await self._ledger.write(build)
        self._refusals.pop(job_id, None)

    async def exited(self, node_id: str, reports: Sequence[ExitReport]) -> None:
        """Final, and the hold released. A report on something that is over already changes nothing."""
        builds = (partial(self._exit, node_id, report) for report in reports)
        _raise_first(await self._ledger.write_each(builds))

    def _exit(self, node_id: str, report: ExitReport, txn: Transaction) -> None:
        job = self.get(report.job_id)
        if job is None or not is_at(job, node_id, report.epoch):
            return
        state, reason = outcome(job, report)
        ended = msgspec.structs.replace(job, exit_code=report.exit_code)
        self._end(txn, ended, state, reason)

    async def requeue(self, job_id: str, *, epoch: int, reason: str, refused: bool = False) -> None:
        """Placing becomes queued again. Safe at any time: nothing starts before it is confirmed.

        `refused` says that the agent said no: after a few of those the job fails.
        """
        count = self._refusals.get(job_id, (0, 0.0))[0] + 1
        if refused:
            not_before_s = self._clock.monotonic_s() + _BACKOFF_S * 2**count
            self._refusals[job_id] = (count, not_before_s)

        def build(txn: Transaction) -> None:
            job = self.get(job_id)
            if job is None or job.state is not JobState.PLACING or job.placement is None:
                return
            if job.placement.epoch != epoch:
                return
            if refused and count >= LAUNCH_ATTEMPTS_MAX:
                self._end(txn, job, JobState.FAILED, f"refused {count} times, the last time: {reason}")
                return
            self._release(txn, job)
            step = moved(job, JobState.QUEUED, reason=reason, at=self._clock.wall_s())
            txn.put(self._ledger.jobs, job_id, step)

        await self._ledger.write(build)

    async def lose(
        self, job_id: str, *, epoch: int, reason: str, still: Callable[[], bool] = lambda: True
    ) -> None:
        """Its node is gone or no longer has it: lost if it ran, queued again if it had not started.

        `still` is asked at the last moment: a node may have come back while the write was waiting.
        """

        def build(txn: Transaction) -> None:
            job = self.get(job_id) if still() else None
            if job is None or job.placement is None or job.placement.epoch != epoch or job.state.is_final:
                return
            if job.state is JobState.PLACING:
                self._release(txn, job)
                step = moved(job, JobState.QUEUED, reason=reason, at=self._clock.wall_s())
                txn.put(self._ledger.jobs, job_id, step)
            elif job.cancel_requested:
                self._end(txn, job, JobState.CANCELLED, f"cancelled: {stop_reason(job)} ({reason})")
            else:
                self._end(txn, job, JobState.LOST, reason)

        await self._ledger.write(build)

    async def drop_old(self) -> None:
        """Forgets the oldest finished jobs beyond the number that is kept."""
        finished = self.in_states(*FINAL_STATES)
        excess = len(finished) - self._config.jobs_kept
        if excess <= 0:
            return
        oldest = heapq.nsmallest(excess, finished, key=attrgetter("sequence"))
        parts = [oldest[start : start + _DROP_AT_ONCE] for start in range(0, excess, _DROP_AT_ONCE)]
        _raise_first(await self._ledger.write_each(partial(self._drop, part) for part in parts))

    def _drop(self, jobs: list[Job], txn: Transaction) -> None:
        for job in jobs:
            txn.delete(self._ledger.jobs, job.job_id)

    # -- parts of steps -----------------------------------------------------------------------

    def _require(self, job_id: str) -> Job:
        job = self.get(job_id)
        if job is None:
            raise JobNotFoundError(f"there is no job {job_id!r}")
        return job

    def _end(self, txn: Transaction, job: Job, state: JobState, reason: str) -> Job:
        self._release(txn, job)
        step = moved(job, state, reason=reason, at=self._clock.wall_s())
        txn.put(self._ledger.jobs, job.job_id, step)
        return step

    def _release(self, txn: Transaction, job: Job) -> None:
        if job.placement is None:
            return
        node_id = job.placement.node_id
        held = txn.get(self._ledger.holds, node_id)
        if held is not None:
            txn.put(self._ledger.holds, node_id, held.without_job(job.job_id))

    def _new_id(self) -> str:
        while True:
            job_id = "j-" + base64.b32encode(self._random_bytes(5)).decode().lower()
            if job_id not in self._ledger.jobs:
                return job_id

    # -- indexes ------------------------------------------------------------------------------

    def _index_all(self) -> None:
        self._by_state = {state: {} for state in JobState}
        self._by_name.clear()
        self._by_request.clear()
        for job in self._ledger.jobs.values():
            self._index(job)
        queued = self._by_state[JobState.QUEUED]
        self._waits_for = {key: reason for key, reason in self._waits_for.items() if key in queued}
        self._bell.ring_all()
        self._wake()

    def _follow(self, job_id: str, before: Job | None, after: Job | None) -> None:
        if before is not None:
            self._by_state[before.state].pop(job_id, None)
            if after is None:
                self._forget(before)
                return
            # Only where it stands changes in a job's life.
            self._by_state[after.state][job_id] = after
        elif after is not None:
            self._index(after)

    def _row_changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        if after is None or after.state is not JobState.QUEUED:
            self._waits_for.pop(job_id, None)
        if after is None or after.state.is_final:
            self._refusals.pop(job_id, None)
        self._bell.ring(job_id)
        self._wake()

    def _index(self, job: Job) -> None:
        self._by_state[job.state][job.job_id] = job
        self._by_name.setdefault(job.spec.name, set()).add(job.job_id)
        if job.request_id:
            self._by_request[job.tenant, job.request_id] = job.job_id

    def _forget(self, job: Job) -> None:
        names = self._by_name.get(job.spec.name, set())
        names.discard(job.job_id)
        if not names:
            self._by_name.pop(job.spec.name, None)
        self._by_request.pop((job.tenant, job.request_id), None)


def _raise_first(outcomes: Iterable[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def sees(identity: Identity, job: Job) -> bool:
    """A user's world is its tenant; the owner's is everything."""
    return identity.kind is TokenKind.OWNER or identity.tenant == job.tenant


def is_at(job: Job, node_id: str, epoch: int) -> bool:
    """Whether this launch on this node is the one that counts."""
    return (
        not job.state.is_final
        and job.placement is not None
        and job.placement.node_id == node_id
        and job.placement.epoch == epoch
    )


def stop_reason(job: Job) -> str:
    """Why a running job that is being stopped is."""
    return job.reason.removeprefix(_STOPPING)


def outcome(job: Job, report: ExitReport) -> tuple[JobState, str]:
    """The final state that an exit means, in words."""
    code = report.exit_code
    if code is None:
        words = report.reason[:1000] or "ended without an exit code"
    else:
        words = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    if job.cancel_requested:
        how = "" if code is None else f" ({words})"
        return JobState.CANCELLED, f"cancelled: {stop_reason(job)}{how}"
    if code == 0:
        # A launch that was never confirmed cannot have succeeded.
        return (JobState.SUCCEEDED if job.state is JobState.RUNNING else JobState.FAILED), words
    if code is None and report.started and job.state is JobState.RUNNING:
        # It did not fail: the node ended it, because it lost contact or was stopped.
        return JobState.LOST, words
    return JobState.FAILED, words
