"""A fake job placer that places nothing at submission."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from genie.model.job import Job
from genie.scheduler.decisions import Decision


class NoOpPlacer:
    """Leaves every submitted job to the scheduling pass."""

    def place(self, new_job: Job | None = None) -> Sequence[Decision]:
        return ()

    def undo_unrecorded_starts(self, job_ids: Iterable[str]) -> None:
        pass

    def free_disk_bytes_max(self, job: Job) -> int:
        return 0
