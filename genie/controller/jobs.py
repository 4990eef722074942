"""Jobs: every step of their life, each durable before anyone is told of it.

A step is one transaction that moves the job and, where it begins or ends to hold something, the
node's ledger with it: so a hold is released exactly once. Not for: which job goes where
(scheduler/), and talking to agents (agents.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol

import msgspec

from genie.config import ControllerConfig
from genie.controller.blobs import blob_name
from genie.controller.ledger import Ledger, Transaction
from genie.controller.waiting import Bell
from genie.errors import FencedError, JobNotFoundError, JobRefusedError, WorkersMissingError
from genie.model.allocation import Hold, NodeLedger
from genie.model.job import (
    FINAL_STATES,
    Job,
    JobSpec,
    JobState,
    Placement,
    Stop,
    Transition,
    moved,
    parse_unit,
)
from genie.model.messages import ExitReport
from genie.model.names import checked_name
from genie.model.tenant import Identity, TokenKind
from genie.runtime.clock import Clock
from genie.scheduler.scheduler import Start
from genie.tenancy.masking import masked

LAUNCH_ATTEMPTS_MAX = 5
NODES_OF_JOB_MAX = 120
"""What a job begins to hold is written at once, and a store takes so many rows in one transaction."""
_BACKOFF_S = 0.5
_DROP_AT_ONCE = 100
_DIGITS = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = tuple(first + second for first in _DIGITS for second in _DIGITS)
"""Two digits of an id, by ten bits."""
_FOR_OTHERS = 10
_STOPPING = "being stopped: "


class _Refusal(NamedTuple):
    """How often launches of a job were refused, the last of them, and until when it is left alone."""

    epoch: int = 0
    times: int = 0
    not_before_s: float = 0.0


class Starter(Protocol):
    """Places jobs with their submission."""

    def start_now(self, job: Job) -> Start | None:
        """Where it goes; None when it has to wait for its turn."""
        ...

    def take_back(self, job_id: str) -> None:
        """It was not submitted after all."""
        ...


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
        self.starter: Starter | None = None
        self._by_state: dict[JobState, dict[str, Job]] = {state: {} for state in JobState}
        self._by_name: dict[str, set[str]] = {}
        self._by_request: dict[tuple[str, str], str] = {}
        self._waits_for: dict[str, str] = {}
        self._refusals: dict[str, _Refusal] = {}
        self._arrived: dict[str, tuple[int, set[int]]] = {}
        """Of jobs with several workers: the launch, and which of them are ready to start."""
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

    def find_worker(self, key: str, identity: Identity) -> tuple[Job, int]:
        """A job and a rank; JOB.RANK is one of its workers, and the job alone its first."""
        job_id, rank = parse_unit(key)
        if key not in self._by_name and (job_id in self._ledger.jobs or job_id in self._by_name):
            return self.find(job_id, identity), rank
        return self.find(key, identity), 0

    def shown(self, job: Job) -> Job:
        """The job as people see it: while it is queued, with what it waits for now."""
        reason = self._waits_for.get(job.job_id)
        if job.state is not JobState.QUEUED or reason is None:
            return job
        return msgspec.structs.replace(job, reason=reason)

    def told(self, job: Job, identity: Identity) -> Job:
        """As `shown`, with no job named in the reasons that this one may not see."""
        return self.shown(job) if identity.kind is TokenKind.OWNER else self.told_tenant(job)

    def told_tenant(self, job: Job) -> Job:
        """As `shown`, for its own tenant."""
        job = self.shown(job)

        def is_shown(job_id: str) -> bool:
            other = self.get(job_id)
            return other is not None and other.tenant == job.tenant

        steps = (
            msgspec.structs.replace(step, reason=masked(step.reason, is_shown=is_shown))
            for step in job.history
        )
        reason = masked(job.reason, is_shown=is_shown)
        return msgspec.structs.replace(job, reason=reason, history=tuple(steps))

    def in_states(self, *states: JobState) -> list[Job]:
        return [job for state in states for job in self._by_state[state].values()]

    def newest_first(self, states: Iterable[JobState], before: int | None) -> list[Job]:
        found = self.in_states(*(set(states) or JobState))
        if before is not None:
            found = [job for job in found if job.sequence < before]
        return sorted(found, key=lambda job: -job.sequence)

    def counts(self) -> dict[str, int]:
        return {str(state): len(jobs) for state, jobs in self._by_state.items()}

    def not_before_s(self, job_id: str) -> float:
        """Until then a job whose launch was refused a moment ago is not to be placed again."""
        return self._refusals.get(job_id, _Refusal()).not_before_s

    def overdue(self, now: float) -> list[Job]:
        """Those that run and have had their time."""
        running = self._by_state[JobState.RUNNING].values()
        return [job for job in running if not job.stop and ends_at(job) <= now]

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
            self._check_share(identity.tenant)
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
            job = self._started_now(txn, job)
            txn.put(self._ledger.jobs, job.job_id, job)
            return job

        return await self._ledger.write(build)

    def _started_now(self, txn: Transaction, job: Job) -> Job:
        """Placed where nobody waits, so that a job which need not wait is one step and not two. Those that
        are not durable yet are among those who wait."""
        if self.starter is None or self._by_state[JobState.QUEUED]:
            return job
        start = self.starter.start_now(job)
        if start is None:
            return job
        txn.otherwise(partial(self.starter.take_back, job.job_id))
        placements = self._placements(txn, start)
        if placements is None:
            self.starter.take_back(job.job_id)
            return job
        return self._placed(txn, job, placements, start.reason)

    def _check_share(self, tenant: str) -> None:
        """No tenant fills the queue alone."""
        queued, most = self._by_state[JobState.QUEUED], self._config.queue_max
        if len(queued) < most - most // _FOR_OTHERS:
            return
        mine = sum(job.tenant == tenant for job in queued.values())
        if mine >= most - most // _FOR_OTHERS:
            raise JobRefusedError(
                f"{mine} jobs of tenant {tenant} wait, and a tenth of the queue is for others",
                hint="try again later",
            )

    def requested(self, tenant: str, request_id: str) -> Job | None:
        job_id = self._by_request.get((tenant, request_id))
        return self.get(job_id) if job_id is not None else None

    async def cancel(self, job_id: str, reason: str) -> Job:
        """What has not started ends at once; what runs is marked, and ends when its agent says so.

        A launch that is under way becomes void: its confirmation will be refused.
        """

        def build(txn: Transaction) -> Job:
            job = self._require(job_id)
            if job.state.is_final or job.stop not in (Stop.NO, Stop.PREEMPT):
                return job
            if job.state is JobState.RUNNING:
                return self._stop(txn, job, Stop.CANCEL, reason)
            return self._end(txn, job, JobState.CANCELLED, f"cancelled: {reason}")

        return await self._ledger.write(build)

    async def stop(self, job_id: str, *, epoch: int, stop: Stop, reason: str) -> Job | None:
        """Marks one that runs, so that its agents end it; None when that launch is not running any more."""

        def build(txn: Transaction) -> Job | None:
            job = self.get(job_id)
            if job is None or job.state is not JobState.RUNNING or job.epoch != epoch or job.stop:
                return None
            return self._stop(txn, job, stop, reason)

        return await self._ledger.write(build)

    async def place(self, starts: Iterable[Start], *, placed: Callable[[Job], None]) -> None:
        """Placing, with a hold for each worker; `placed` is told of each when all that could be are durable.
        Those whose job or node is not as it was decided on are left out. Accelerators go by their ids."""
        loads = self._ledger.loads
        outcomes = await self._ledger.write_each(partial(self._place, start, loads) for start in starts)
        for job in outcomes:
            if isinstance(job, Job):
                placed(job)
        _raise_first(outcomes)

    def _place(self, start: Start, loads: int, txn: Transaction) -> Job | None:
        job = self.get(start.job_id)
        if job is None or job.state is not JobState.QUEUED:
            return None
        if self._ledger.loads != loads:
            return None  # a write before this one was made after all, and may have taken the place
        nodes = len({place.node_id for place in start.places})
        if nodes > NODES_OF_JOB_MAX:
            why = f"its workers would be on {nodes} nodes, and {NODES_OF_JOB_MAX} are the most"
            self._end(txn, job, JobState.CANCELLED, f"cancelled: {why}")
            return None
        placements = self._placements(txn, start)
        if placements is None:
            return None
        step = self._placed(txn, job, placements, start.reason)
        txn.put(self._ledger.jobs, job.job_id, step)
        return step

    def _placements(self, txn: Transaction, start: Start) -> tuple[Placement, ...] | None:
        """None when a node is not there any more."""
        nodes = [self._ledger.nodes.get(place.node_id) for place in start.places]
        if None in nodes:
            return None
        epoch = txn.next_number("epoch")
        return tuple(
            Placement(
                node_id=place.node_id, incarnation=node.info.incarnation, gpu_ids=place.gpu_ids, epoch=epoch
            )
            for place, node in zip(start.places, nodes, strict=True)
            if node is not None
        )

    def _placed(self, txn: Transaction, job: Job, placements: tuple[Placement, ...], reason: str) -> Job:
        """The job with what it holds from now on; its own row is left to the caller."""
        step = moved(job, JobState.PLACING, reason=reason, at=self._clock.wall_s(), placements=placements)
        for rank, placement in enumerate(placements):
            held = txn.get(self._ledger.holds, placement.node_id) or NodeLedger(node_id=placement.node_id)
            txn.put(self._ledger.holds, placement.node_id, held.with_hold(_hold_of(step, rank)))
        return step

    async def confirm(self, node_id: str, unit: str, *, epoch: int, incarnation: int) -> None:
        """Running. FencedError when that launch is void; WorkersMissingError while other workers are not
        ready: they start together. Asking twice is fine: an answer may be lost."""
        job_id, rank = parse_unit(unit)

        def build(txn: Transaction) -> None:
            job = self.get(job_id)
            is_void = job is None or not is_at(job, rank, node_id, epoch) or bool(job.stop)
            if is_void or job is None or job.placements[rank].incarnation != incarnation:
                raise FencedError(f"launch {epoch} of job {unit} is void")
            if job.state is JobState.RUNNING:
                return
            self._arrive(job, rank)
            nodes = {placement.node_id for placement in job.placements}
            where = f"node {node_id}" if len(nodes) == 1 else f"{len(nodes)} nodes"
            step = moved(job, JobState.RUNNING, reason=f"started on {where}", at=self._clock.wall_s())
            txn.put(self._ledger.jobs, job_id, step)

        await self._ledger.write(build)
        self._refusals.pop(job_id, None)
        self._arrived.pop(job_id, None)

    def _arrive(self, job: Job, rank: int) -> None:
        """One worker is ready to start. Kept in memory: launches do not outlive a controller's term."""
        if len(job.placements) == 1:
            return
        epoch, ranks = self._arrived.get(job.job_id, (0, set()))
        if epoch != job.epoch:
            epoch, ranks = self._arrived[job.job_id] = (job.epoch, set())
        ranks.add(rank)
        missing = len(job.placements) - len(ranks)
        if missing:
            raise WorkersMissingError(f"{missing} of the {len(job.placements)} workers are not ready yet")

    async def exited(self, node_id: str, reports: Sequence[ExitReport]) -> None:
        """What a worker held is released; the job is over when the last one is. A report on something that is
        over already changes nothing."""
        builds = (partial(self._exit, node_id, report) for report in reports)
        _raise_first(await self._ledger.write_each(builds))

    def _exit(self, node_id: str, report: ExitReport, txn: Transaction) -> None:
        job_id, rank = parse_unit(report.job_id)
        job = self.get(job_id)
        if job is None or not is_at(job, rank, node_id, report.epoch):
            return
        state, reason = outcome(job, report)
        self._worker_over(txn, job, rank, state=state, reason=reason, exit_code=report.exit_code)

    def _worker_over(
        self, txn: Transaction, job: Job, rank: int, *, state: JobState, reason: str, exit_code: int | None
    ) -> None:
        self._release(txn, job, rank)
        over = msgspec.structs.replace(job.placements[rank], outcome=state, exit_code=exit_code)
        placements = (*job.placements[:rank], over, *job.placements[rank + 1 :])
        is_first_bad = state is not JobState.SUCCEEDED and not job.stop
        job = msgspec.structs.replace(
            job,
            placements=placements,
            exit_code=exit_code if is_first_bad or job.exit_code is None else job.exit_code,
        )
        is_named = len(placements) > 1 and state is not JobState.SUCCEEDED
        words = f"worker {rank} on node {over.node_id}: {reason}" if is_named else reason
        if job.state is JobState.PLACING:  # none of them has started
            self._requeue_refused(txn, msgspec.structs.replace(job, exit_code=None), words)
        elif any(placement.outcome is None for placement in placements):
            if is_first_bad:
                self._stop(txn, job, Stop.WORKER, words)
            else:
                txn.put(self._ledger.jobs, job.job_id, job)
        elif job.stop is Stop.PREEMPT:
            job = msgspec.structs.replace(job, exit_code=None)
            self._requeue(txn, job, f"was preempted: {stop_reason(job)}")
        else:
            last = words if is_first_bad or not job.stop else reason
            self._end(txn, job, _together(placements), stop_reason(job) if job.stop is Stop.WORKER else last)

    async def requeue(self, job_id: str, *, epoch: int, reason: str, refused: bool = False) -> None:
        """Placing becomes queued again. Safe at any time: nothing starts before it is confirmed.

        `refused` says that the agent said no: after a few of those the job fails.
        """

        def build(txn: Transaction) -> None:
            job = self.get(job_id)
            if job is None or job.state is not JobState.PLACING or job.epoch != epoch:
                return  # a launch that was void before it was refused says nothing about the job
            if refused:
                self._requeue_refused(txn, job, reason)
            else:
                self._requeue(txn, job, reason)

        await self._ledger.write(build)

    def _requeue_refused(self, txn: Transaction, job: Job, reason: str) -> None:
        """A launch that an agent did not take, or could not start: after a few of those the job fails."""
        count = self._note_refusal(job.job_id, job.epoch)
        if count >= LAUNCH_ATTEMPTS_MAX:
            self._end(txn, job, JobState.FAILED, f"refused {count} times, the last time: {reason}")
        else:
            self._requeue(txn, job, reason)

    def _note_refusal(self, job_id: str, epoch: int) -> int:
        """Once for a launch, however many of its workers were refused; how often it has happened."""
        before = self._refusals.get(job_id, _Refusal())
        if before.epoch == epoch:
            return before.times
        count = before.times + 1
        not_before_s = self._clock.monotonic_s() + _BACKOFF_S * 2**count
        self._refusals[job_id] = _Refusal(epoch, count, not_before_s)
        return count

    async def lose(
        self, unit: str, *, epoch: int, reason: str, still: Callable[[], bool] = lambda: True
    ) -> None:
        """Its node is gone or no longer has it: that worker is lost if it ran, and the job is queued again if
        it had not started.

        `still` is asked at the last moment: a node may have come back while the write was waiting.
        """
        job_id, rank = parse_unit(unit)

        def build(txn: Transaction) -> None:
            job = self.get(job_id) if still() else None
            if job is None or job.epoch != epoch or job.state.is_final:
                return
            if rank >= len(job.placements) or job.placements[rank].outcome is not None:
                return
            if job.state is JobState.PLACING:
                self._requeue(txn, job, reason)
                return
            state, words = JobState.LOST, reason
            if job.stop is Stop.CANCEL:
                state, words = JobState.CANCELLED, f"cancelled: {stop_reason(job)} ({reason})"
            elif job.stop is Stop.LIMIT:
                state, words = JobState.FAILED, f"{stop_reason(job)} ({reason})"
            self._worker_over(txn, job, rank, state=state, reason=words, exit_code=None)

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
        self._release_all(txn, job)
        step = moved(job, state, reason=reason, at=self._clock.wall_s())
        txn.put(self._ledger.jobs, job.job_id, step)
        return step

    def _stop(self, txn: Transaction, job: Job, stop: Stop, reason: str) -> Job:
        job = msgspec.structs.replace(job, stop=stop, reason=f"{_STOPPING}{reason}")
        txn.put(self._ledger.jobs, job.job_id, job)
        return job

    def _requeue(self, txn: Transaction, job: Job, reason: str) -> None:
        self._release_all(txn, job)
        step = moved(job, JobState.QUEUED, reason=reason, at=self._clock.wall_s())
        txn.put(self._ledger.jobs, job.job_id, step)

    def _release_all(self, txn: Transaction, job: Job) -> None:
        for rank, placement in enumerate(job.placements):
            if placement.outcome is None:
                self._release(txn, job, rank)

    def _release(self, txn: Transaction, job: Job, rank: int) -> None:
        node_id = job.placements[rank].node_id
        held = txn.get(self._ledger.holds, node_id)
        if held is not None:
            txn.put(self._ledger.holds, node_id, held.without_job(job.unit(rank)))

    def _new_id(self) -> str:
        while True:
            number = int.from_bytes(self._random_bytes(5))
            job_id = "j-" + "".join([_PAIRS[number >> shift & 1023] for shift in (30, 20, 10, 0)])
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
        if after is None or after.state is not JobState.PLACING:
            self._arrived.pop(job_id, None)
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


def is_at(job: Job, rank: int, node_id: str, epoch: int) -> bool:
    """Whether this worker's launch on this node is the one that counts, and is not over."""
    if job.state.is_final or job.epoch != epoch or rank >= len(job.placements):
        return False
    placement = job.placements[rank]
    return placement.node_id == node_id and placement.outcome is None


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
    how = "" if code is None else f" ({words})"
    if job.stop in (Stop.CANCEL, Stop.WORKER, Stop.PREEMPT):
        return JobState.CANCELLED, f"cancelled: {stop_reason(job)}{how}"
    if job.stop is Stop.LIMIT:
        return JobState.FAILED, f"{stop_reason(job)}{how}"
    if code == 0:
        # A launch that was never confirmed cannot have succeeded.
        return (JobState.SUCCEEDED if job.state is JobState.RUNNING else JobState.FAILED), words
    if code is None and (report.started or report.by_node) and job.state is JobState.RUNNING:
        # It did not fail: the node ended it or did not start it, because it lost contact or was stopped.
        return JobState.LOST, words
    return JobState.FAILED, words


def _together(placements: Sequence[Placement]) -> JobState:
    """What a job has come to, of which every worker is over."""
    outcomes = {placement.outcome for placement in placements}
    for state in (JobState.FAILED, JobState.LOST, JobState.CANCELLED):
        if state in outcomes:
            return state
    return JobState.SUCCEEDED


def _hold_of(job: Job, rank: int) -> Hold:
    """What this worker takes where it is placed."""
    wish, placement = job.spec.resources, job.placements[rank]
    return Hold(
        job_id=job.unit(rank),
        tenant=job.tenant,
        epoch=placement.epoch,
        incarnation=placement.incarnation,
        gpu_ids=placement.gpu_ids,
        gpu_milli=wish.gpu_milli,
        cpus=wish.cpus,
        memory_bytes=wish.memory_bytes,
    )


def ends_at(job: Job) -> float:
    """When its time is up."""
    limit_s = job.spec.wishes.time_limit_s
    return math.inf if limit_s is None or job.started_at is None else job.started_at + limit_s
