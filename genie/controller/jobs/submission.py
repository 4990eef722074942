"""The submission of jobs: limits of the queue and of space, job IDs, and repeated requests.

Not responsible for validating a request (requests/jobs.py) or for choosing nodes (scheduler/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from genie.config import ControllerConfig
from genie.controller.jobs.index import StagedIndex
from genie.controller.jobs.launches import JobLaunches
from genie.controller.jobs.queue_limits import QueueLimits
from genie.controller.jobs.space import JobSpace
from genie.controller.ledger import Ledger, TableBeingLoaded, Transaction
from genie.model.job import Job, JobSpec, JobState, Transition
from genie.model.names import validate_name
from genie.model.tenant import Identity
from genie.processes.clock import Clock
from genie.scheduler.decisions import Decision, Start

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_ID_CHARACTER_PAIRS = tuple(first + second for first in _ID_ALPHABET for second in _ID_ALPHABET)
"""Two characters of a job ID for each ten random bits."""


class SubmissionPlacer(Protocol):
    """Decides where a new job starts (placement/planner.py)."""

    def place(self, new_job: Job | None = None) -> Sequence[Decision]:
        """Place a job that is being submitted; without one, run a scheduling pass."""
        ...

    def undo_unrecorded_starts(self, job_ids: Iterable[str]) -> None:
        """Undo the starts of these jobs that were not recorded."""
        ...


class JobSubmission:
    """`placer` places jobs at submission."""

    def __init__(
        self,
        ledger: Ledger,
        launches: JobLaunches,
        space: JobSpace,
        *,
        config: ControllerConfig,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        placer: SubmissionPlacer,
    ) -> None:
        self._ledger = ledger
        self._launches = launches
        self._space = space
        self._clock = clock
        self._random_bytes = random_bytes
        self._placer = placer
        self._staged_index = StagedIndex()
        self._loading_index = self._staged_index
        """The index of the rows that are being loaded."""
        self._queue_limits = QueueLimits(config, self._staged_index, clock=clock)
        ledger.jobs.add_loader(self._index_loading_rows)
        ledger.add_after_load_listener(self._replace_index)
        ledger.jobs.add_reversible_index(self._staged_index.update)
        ledger.jobs.add_listener(self._queue_limits.on_job_changed)

    async def submit(
        self,
        spec: JobSpec,
        identity: Identity,
        request_id: str,
        *,
        session_node_id: str = "",
        ticket_sha256: str = "",
    ) -> Job:
        """Create a job, or return the one that this request ID created before. QueueFullError when the queue
        is full. The job is placed in the same transaction if it can start at once."""
        validate_name(request_id, what="request id")

        def build(txn: Transaction) -> Job:
            again = self.find_by_request_id(identity.tenant, request_id)
            if again is not None:
                return again
            self._queue_limits.check_submission(identity.tenant)
            self._space.check_submission(identity.tenant)
            now, reason = self._clock.wall_s(), "submitted"
            job = Job(
                job_id=self._new_job_id(),
                tenant=identity.tenant,
                owner=identity.token_id,
                spec=spec,
                state=JobState.QUEUED,
                reason=reason,
                submitted_at=now,
                sequence=txn.next_counter_value("sequence"),
                history=(Transition(state=JobState.QUEUED, at=now, reason=reason),),
                request_id=request_id,
                session=session_node_id,
                ticket_sha256=ticket_sha256,
            )
            # Only if no other job is queued; earlier jobs of this transaction count as queued.
            if not self._staged_index.queued_count:
                for start in self._placer.place(job):
                    if isinstance(start, Start):
                        job = self._record_new_job(txn, job, start)
            if job.state is JobState.QUEUED:
                txn.put(self._ledger.jobs, job.job_id, job)
            return job

        # Refused here already: in a full queue, refusals must not wait for the writes of others.
        if self.find_by_request_id(identity.tenant, request_id) is None:
            self._queue_limits.check_submission(identity.tenant)
        return await self._ledger.write(build)

    def _record_new_job(self, txn: Transaction, job: Job, start: Start) -> Job:
        undo = partial(self._placer.undo_unrecorded_starts, (job.job_id,))
        txn.on_rollback(undo)
        recorded = self._launches.stage_start(txn, job, start)
        if recorded is None:
            undo()
            return job
        return recorded

    def find_by_request_id(self, tenant: str, request_id: str) -> Job | None:
        """Find the job that a request ID created."""
        job_id = self._staged_index.job_id_by_request.get((tenant, request_id))
        return self._ledger.jobs.get(job_id) if job_id is not None else None

    def _new_job_id(self) -> str:
        while True:
            number = int.from_bytes(self._random_bytes(5))
            job_id = "j-" + "".join(
                [_ID_CHARACTER_PAIRS[number >> shift & 1023] for shift in (30, 20, 10, 0)]
            )
            if job_id not in self._ledger.jobs:
                return job_id

    async def _index_loading_rows(self, read: TableBeingLoaded[Job]) -> None:
        self._loading_index = await StagedIndex.build(read.rows)

    def _replace_index(self) -> None:
        self._staged_index.replace_with(self._loading_index)
