"""The start of jobs: records placements with their holds, and confirms launches.

Not responsible for choosing nodes (scheduler/) or for messages to agents (nodes/agents.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from genie.controller.change_notifier import ChangeNotifier
from genie.controller.jobs.backoff import LaunchBackoff
from genie.controller.jobs.catalog import JobCatalog
from genie.controller.jobs.changes import ERRORS_AFFECTING_ALL_WRITES, raise_first_error_affecting_all_writes
from genie.controller.jobs.outcomes import is_current_placement
from genie.controller.jobs.transitions import JobTransitions
from genie.controller.ledger import EPOCH_COUNTER, Ledger, Transaction
from genie.errors import FencedError, RowTooLargeError, WorkersMissingError
from genie.model.allocation import Hold, NodeHolds
from genie.model.job import Job, JobState, Placement, parse_worker_name, truncate_reason, with_state
from genie.processes.clock import Clock
from genie.scheduler.decisions import Start

_log = logging.getLogger(__name__)

WORKERS_WAIT_S_MAX = 3.0
JOB_NODES_MAX = 120
"""All holds of a job are written in one transaction, and the store limits the rows of a transaction."""
HOLDS_PER_TRANSACTION_MAX = 3000
"""Of all nodes of a job with several workers, at its start: about half of what a transaction can have."""


class JobLaunches:
    def __init__(
        self,
        ledger: Ledger,
        catalog: JobCatalog,
        transitions: JobTransitions,
        *,
        clock: Clock,
        notifier: ChangeNotifier,
        backoff: LaunchBackoff,
    ) -> None:
        self._ledger = ledger
        self._catalog = catalog
        self._transitions = transitions
        self._clock = clock
        self._notifier = notifier
        self._launch_backoff = backoff
        self._ready_ranks_by_job: dict[str, tuple[int, set[int]]] = {}
        """By job with several workers: the epoch and the ranks that are ready to start."""
        ledger.add_after_load_listener(self._discard_outdated)
        ledger.jobs.add_listener(self._on_job_changed)

    async def record_starts(self, starts: Iterable[Start], *, on_placed: Callable[[Job], None]) -> None:
        """Record the starts of a scheduling pass; call `on_placed` with each job once all are durable. Starts
        whose job or node has changed since the decision are dropped. A start that cannot be recorded delays
        its own job only. Accelerators are given by ID."""
        loads, starts = self._ledger.load_count, list(starts)
        outcomes = await self._ledger.write_each(
            partial(self._record_start_if_current, start, loads) for start in starts
        )
        for start, outcome in zip(starts, outcomes, strict=True):
            if isinstance(outcome, Job) and outcome.state is JobState.PLACING:
                on_placed(outcome)
            elif isinstance(outcome, Exception) and not isinstance(outcome, ERRORS_AFFECTING_ALL_WRITES):
                _log.error("job %s could not be placed: %s", start.job_id, outcome, exc_info=outcome)
                self._launch_backoff.delay_placement(start.job_id)
                why = truncate_reason(str(outcome))
                self._catalog.set_pending_reason(start.job_id, f"could not be placed: {why}")
        raise_first_error_affecting_all_writes(outcomes)

    def _record_start_if_current(self, start: Start, load_count: int, txn: Transaction) -> Job | None:
        job = self._ledger.jobs.get(start.job_id)
        if job is None or job.state is not JobState.QUEUED:
            return None
        if self._ledger.load_count != load_count:
            return None  # an earlier write was committed after all, and may have taken these accelerators
        return self.stage_start(txn, job, start)

    def stage_start(self, txn: Transaction, job: Job, start: Start) -> Job | None:
        """Stage the placing of a job and a hold for each worker. Every start is recorded here: of a
        submission and of a scheduling pass. None if a node has been removed; cancels a job on too many
        nodes."""
        nodes = [self._ledger.nodes.get(place.node_id) for place in start.places]
        if len(nodes) > JOB_NODES_MAX:
            count = len({place.node_id for place in start.places})
            if count > JOB_NODES_MAX:
                why = f"its workers would need {count} nodes; the maximum is {JOB_NODES_MAX}"
                return self._transitions.stage_end(txn, job, JobState.CANCELLED, f"cancelled: {why}")
        if None in nodes:
            return None
        if len(nodes) > 1:
            self._check_transaction_fits(start)
        epoch = txn.next_counter_value(EPOCH_COUNTER)
        placements = tuple(
            Placement(
                node_id=place.node_id, incarnation=node.info.incarnation, gpu_ids=place.gpu_ids, epoch=epoch
            )
            for place, node in zip(start.places, nodes, strict=True)
            if node is not None
        )
        step = with_state(
            job, JobState.PLACING, reason=start.reason, at=self._clock.wall_s(), placements=placements
        )
        for rank, placement in enumerate(placements):
            held = txn.get(self._ledger.holds, placement.node_id) or NodeHolds(node_id=placement.node_id)
            txn.put(self._ledger.holds, placement.node_id, held.with_hold(_make_hold(step, rank)))
        txn.put(self._ledger.jobs, job.job_id, step)
        return step

    def _check_transaction_fits(self, start: Start) -> None:
        """Raise RowTooLargeError if the holds on the nodes of these workers leave too little space in the
        transaction."""
        node_ids = {place.node_id for place in start.places}
        held = [self._ledger.holds.get(node_id) for node_id in node_ids]
        count = len(start.places) + sum(len(each.holds) for each in held if each is not None)
        if count > HOLDS_PER_TRANSACTION_MAX:
            raise RowTooLargeError(
                f"the {len(node_ids)} nodes of the job would have {count} workers in all; the maximum for a "
                f"job on several nodes is {HOLDS_PER_TRANSACTION_MAX}"
            )

    async def confirm_launch(
        self, node_id: str, worker_name: str, *, epoch: int, incarnation: int, wait_s: float = 0.0
    ) -> None:
        """Confirm the launch of a worker; the job runs when all workers are confirmed. FencedError if the
        launch is no longer valid, WorkersMissingError if other workers are not ready after `wait_s`.
        Idempotent: a reply may be lost."""
        job_id, rank = parse_worker_name(worker_name)

        def require_valid() -> Job:
            job = self._ledger.jobs.get(job_id)
            is_void = job is None or not is_current_placement(job, rank, node_id, epoch) or bool(job.stop)
            if is_void or job is None or job.placements[rank].incarnation != incarnation:
                raise FencedError(f"launch {epoch} of job {worker_name} is no longer valid")
            return job

        def build(txn: Transaction) -> None:
            job = require_valid()
            if job.state is JobState.RUNNING:
                return
            nodes = {placement.node_id for placement in job.placements}
            where = f"node {node_id}" if len(nodes) == 1 else f"{len(nodes)} nodes"
            step = with_state(job, JobState.RUNNING, reason=f"started on {where}", at=self._clock.wall_s())
            txn.put(self._ledger.jobs, job_id, step)

        known = self._ledger.jobs.get(job_id)
        if known is not None and len(known.placements) > 1:
            # No write before all workers are ready: a gang waits for its slowest worker.
            try:
                self._mark_worker_ready(require_valid(), rank)
            except WorkersMissingError:
                waiting = partial(self._waits_for_workers, job_id, epoch)
                await self._notifier.wait_while(job_id, waiting, timeout_s=min(wait_s, WORKERS_WAIT_S_MAX))
                self._mark_worker_ready(require_valid(), rank)
        await self._ledger.write(build)
        self._launch_backoff.record_start(job_id)
        self._ready_ranks_by_job.pop(job_id, None)

    def _waits_for_workers(self, job_id: str, epoch: int) -> bool:
        job = self._ledger.jobs.get(job_id)
        if job is None or job.state is not JobState.PLACING or job.epoch != epoch:
            return False
        ready_epoch, ranks = self._ready_ranks_by_job.get(job_id, (0, set()))
        return ready_epoch == epoch and len(ranks) < len(job.placements)

    def _mark_worker_ready(self, job: Job, rank: int) -> None:
        """Note that a worker is ready; raise WorkersMissingError until all are. In memory only: launches do
        not outlive a leader's term."""
        if job.state is not JobState.PLACING:
            return
        epoch, ranks = self._ready_ranks_by_job.get(job.job_id, (0, set()))
        if epoch != job.epoch:
            epoch, ranks = self._ready_ranks_by_job[job.job_id] = (job.epoch, set())
        ranks.add(rank)
        missing = len(job.placements) - len(ranks)
        if missing:
            raise WorkersMissingError(f"{missing} of the {len(job.placements)} workers are not ready yet")
        self._notifier.notify(job.job_id)

    def _discard_outdated(self) -> None:
        """Another controller may have changed jobs since the last load."""
        for job_id in {*self._ready_ranks_by_job, *self._launch_backoff.job_ids()}:
            self._on_job_changed(job_id, None, self._ledger.jobs.get(job_id))

    def _on_job_changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        state = None if after is None else after.state
        if state is not _PLACING:
            self._ready_ranks_by_job.pop(job_id, None)
        if state is None or state.is_final:
            self._launch_backoff.reset(job_id)


# Members of an enum are slow to look up, and every change of a job compares them.
_PLACING = JobState.PLACING


def _make_hold(job: Job, rank: int) -> Hold:
    """Return what a worker holds on its node."""
    resources, placement = job.spec.resources, job.placements[rank]
    return Hold(
        job_id=job.worker_name(rank),
        tenant=job.tenant,
        epoch=placement.epoch,
        incarnation=placement.incarnation,
        gpu_ids=placement.gpu_ids,
        gpu_milli=resources.gpu_milli,
        cpus=resources.cpus,
        memory_bytes=resources.memory_bytes,
        has_deadman_timer=job.spec.is_restartable,
    )
