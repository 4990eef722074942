"""Writes changes of jobs: many in few transactions, and none that cannot be written harms the others.

A job that cannot be changed is quarantined. What a change does is decided in jobs/lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec

from genie.controller.jobs.outcomes import STOPPING_PREFIX
from genie.controller.ledger import Ledger, LedgerTable, Transaction
from genie.controller.store.protocol import TXN_BYTES_MAX
from genie.errors import LeadershipError, RowTooLargeError, StoreError
from genie.model.job import Job, JobState, StopReason, shrink_oversized_job

_Result = TypeVar("_Result")
_Output_co = TypeVar("_Output_co", covariant=True)

ERRORS_AFFECTING_ALL_WRITES = (StoreError, LeadershipError)
"""They concern every row, not only one."""
_CHANGES_PER_WRITE_MAX = 60
"""Each changes the rows of a job and of a node, and the store limits the rows of a transaction."""

_RELEASE_TXN_HOLDS_BYTES_MAX = TXN_BYTES_MAX // 2
"""Of the nodes of one part of a release; the rest is for the row of the job."""
_RELEASE_TXN_NODES_MAX = 100


@dataclass(frozen=True, slots=True)
class JobChange(Generic[_Output_co]):
    """A change of one job. `build` is called with the job, or None if there is none; see Ledger.write.
    `rank` is set if the change concerns one worker."""

    job_id: str
    build: Callable[[Job | None, Transaction], _Output_co]
    rank: int | None = None

    def stage_change(self, jobs: LedgerTable[Job], txn: Transaction) -> _Output_co:
        """Raise ReleaseSkewError for a job that a newer release wrote: what happens to it stays unsettled."""
        jobs.check_writable(self.job_id)
        return self.build(txn.get(jobs, self.job_id), txn)


class JobChanges:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def apply(self, change: JobChange[_Result]) -> _Result:
        """Change one job. If the transaction is too large, release its workers in parts first; if its own
        row is, change a shrunk job."""
        with suppress(RowTooLargeError):
            return await self._ledger.write(partial(change.stage_change, self._ledger.jobs))
        with suppress(RowTooLargeError):
            await self._release_workers_in_parts(change)
            return await self._ledger.write(partial(change.stage_change, self._ledger.jobs))
        return await self._ledger.write(partial(self._stage_with_shrunk_job, change))

    async def apply_each(self, changes: Sequence[JobChange[_Result]]) -> list[_Result | Exception]:
        """Change many jobs in few transactions; return the result of each, or the exception of a job that
        cannot be changed, which is quarantined."""
        parts = [
            changes[start : start + _CHANGES_PER_WRITE_MAX]
            for start in range(0, len(changes), _CHANGES_PER_WRITE_MAX)
        ]
        written = await self._ledger.write_each(partial(self._stage_all, part) for part in parts)
        raise_first_error_affecting_all_writes(written)
        outcomes: list[_Result | Exception] = []
        for part, results in zip(parts, written, strict=True):
            if isinstance(results, list):
                outcomes += results
            else:  # one of them has failed, and all others of this write with it
                outcomes += await self._apply_separately(part)
        return outcomes

    async def _apply_separately(self, changes: Sequence[JobChange[_Result]]) -> list[_Result | Exception]:
        written = await self._ledger.write_each(
            partial(change.stage_change, self._ledger.jobs) for change in changes
        )
        raise_first_error_affecting_all_writes(written)
        outcomes: list[_Result | Exception] = []
        for change, result in zip(changes, written, strict=True):
            if isinstance(result, BaseException):
                outcomes.append(await self._apply_or_quarantine(change))
            else:
                outcomes.append(result)
        return outcomes

    async def _apply_or_quarantine(self, change: JobChange[_Result]) -> _Result | Exception:
        try:
            return await self.apply(change)
        except ERRORS_AFFECTING_ALL_WRITES:
            raise
        except Exception as error:  # a task boundary: one bad row must not stop the others
            self._ledger.quarantine.add(self._ledger.jobs.prefix + change.job_id, error)
            return error

    async def _release_workers_in_parts(self, change: JobChange[object]) -> None:
        """Release what the workers of an unconfirmed job hold, on some nodes per transaction, except the
        worker that the change concerns.

        Nothing has started, and the first part marks the job, so that no launch can be confirmed any more. A
        job that stays in this state, because the controller ended or a write failed, is queued again by the
        next term or tick.
        """
        job = self._ledger.jobs.get(change.job_id)
        if job is None or job.state is not JobState.PLACING:
            return
        ranks_of_node: dict[str, list[int]] = {}
        for rank, placement in enumerate(job.placements):
            if rank != change.rank and placement.outcome is None:
                ranks_of_node.setdefault(placement.node_id, []).append(rank)
        part: list[int] = []
        part_bytes, nodes = 0, 0
        for node_id, ranks in ranks_of_node.items():
            size_bytes = self._ledger.holds.size_bytes(node_id)
            if part and (
                part_bytes + size_bytes > _RELEASE_TXN_HOLDS_BYTES_MAX or nodes == _RELEASE_TXN_NODES_MAX
            ):
                await self._ledger.write(partial(self._stage_release, job, part))
                part, part_bytes, nodes = [], 0, 0
            part += ranks
            part_bytes, nodes = part_bytes + size_bytes, nodes + 1
        if part:
            await self._ledger.write(partial(self._stage_release, job, part))

    def _stage_release(self, job_before: Job, ranks: Sequence[int], txn: Transaction) -> None:
        job = txn.get(self._ledger.jobs, job_before.job_id)
        if job is None or job.state is not JobState.PLACING or job.epoch != job_before.epoch:
            return
        placements = list(job.placements)
        for rank in ranks:
            placement = placements[rank]
            if placement.outcome is not None:
                continue
            placements[rank] = msgspec.structs.replace(placement, outcome=JobState.CANCELLED)
            self._ledger.holds.check_writable(placement.node_id)
            held = txn.get(self._ledger.holds, placement.node_id)
            if held is not None:
                kept = held.without_worker(job.worker_name(rank), epoch=placement.epoch)
                txn.put(self._ledger.holds, placement.node_id, kept)
        reason = f"{STOPPING_PREFIX}its launch is no longer valid"
        marked = msgspec.structs.replace(
            job, placements=tuple(placements), stop=StopReason.PREEMPT, reason=reason
        )
        txn.put(self._ledger.jobs, job.job_id, marked)

    def _stage_all(self, changes: Sequence[JobChange[_Result]], txn: Transaction) -> list[_Result]:
        return [change.stage_change(self._ledger.jobs, txn) for change in changes]

    def _stage_with_shrunk_job(self, change: JobChange[_Result], txn: Transaction) -> _Result:
        job = self._ledger.jobs.get(change.job_id)
        return change.build(shrink_oversized_job(job) if job is not None else None, txn)


def raise_first_error_affecting_all_writes(outcomes: Iterable[object]) -> None:
    """Raise the first error that concerns every row."""
    for outcome in outcomes:
        if isinstance(outcome, ERRORS_AFFECTING_ALL_WRITES):
            raise outcome
