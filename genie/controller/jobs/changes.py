"""Writes changes of jobs: many in few transactions, and none that cannot be written harms the others.

A job that cannot be changed is quarantined. What a change does is decided in jobs/lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from genie.controller.ledger import Ledger, Table, Transaction
from genie.errors import LeadershipError, RowTooLargeError, StoreError
from genie.model.job import Job, shrunk

_Result = TypeVar("_Result")
_Output_co = TypeVar("_Output_co", covariant=True)

ERRORS_OF_ALL_ROWS = (StoreError, LeadershipError)
"""They concern every row, not only one."""
_CHANGES_OF_WRITE_MAX = 60
"""Each changes the rows of a job and of a node, and the store limits the rows of a transaction."""


@dataclass(frozen=True, slots=True)
class JobChange(Generic[_Output_co]):
    """A change of one job. `build` is called with the job, or None if there is none; see Ledger.write."""

    job_id: str
    build: Callable[[Job | None, Transaction], _Output_co]

    def stage(self, jobs: Table[Job], txn: Transaction) -> _Output_co:
        return self.build(txn.get(jobs, self.job_id), txn)


class JobChanges:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def apply(self, change: JobChange[_Result]) -> _Result:
        """Change one job; a shrunk one if its row is too large."""
        try:
            return await self._ledger.write(partial(change.stage, self._ledger.jobs))
        except RowTooLargeError:
            return await self._ledger.write(partial(self._stage_shrunk, change))

    async def apply_each(self, changes: Sequence[JobChange[_Result]]) -> list[_Result | Exception]:
        """Change many jobs in few transactions; return the result of each, or the exception of a job that
        cannot be changed, which is quarantined."""
        parts = [
            changes[start : start + _CHANGES_OF_WRITE_MAX]
            for start in range(0, len(changes), _CHANGES_OF_WRITE_MAX)
        ]
        written = await self._ledger.write_each(partial(self._stage_all, part) for part in parts)
        raise_first_of_all_rows(written)
        outcomes: list[_Result | Exception] = []
        for part, results in zip(parts, written, strict=True):
            if isinstance(results, list):
                outcomes += results
            else:  # one of them has failed, and all others of this write with it
                outcomes += await self._apply_separately(part)
        return outcomes

    async def _apply_separately(self, changes: Sequence[JobChange[_Result]]) -> list[_Result | Exception]:
        written = await self._ledger.write_each(
            partial(change.stage, self._ledger.jobs) for change in changes
        )
        raise_first_of_all_rows(written)
        outcomes: list[_Result | Exception] = []
        for change, result in zip(changes, written, strict=True):
            if isinstance(result, BaseException):
                outcomes.append(await self._apply_isolated(change))
            else:
                outcomes.append(result)
        return outcomes

    async def _apply_isolated(self, change: JobChange[_Result]) -> _Result | Exception:
        try:
            return await self.apply(change)
        except ERRORS_OF_ALL_ROWS:
            raise
        except Exception as error:  # a task boundary: one bad row must not stop the others
            self._ledger.quarantine.add(self._ledger.jobs.prefix + change.job_id, error)
            return error

    def _stage_all(self, changes: Sequence[JobChange[_Result]], txn: Transaction) -> list[_Result]:
        return [change.stage(self._ledger.jobs, txn) for change in changes]

    def _stage_shrunk(self, change: JobChange[_Result], txn: Transaction) -> _Result:
        job = self._ledger.jobs.get(change.job_id)
        return change.build(shrunk(job) if job is not None else None, txn)


def raise_first_of_all_rows(outcomes: Iterable[object]) -> None:
    """Raise the first error that concerns every row."""
    for outcome in outcomes:
        if isinstance(outcome, ERRORS_OF_ALL_ROWS):
            raise outcome
