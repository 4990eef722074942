"""How much of the store jobs use, by tenant, and whether more may be submitted.

Submissions are rejected well before the store is full: the rest is reserved for the controller's own writes,
which end jobs and release accelerators. The size of a job is that of its row when it was first stored or
loaded. The size of the whole store is measured by store_monitor.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from genie.config import ControllerConfig
from genie.controller.ledger import Ledger, TableBeingLoaded
from genie.controller.store import SpaceUsage
from genie.errors import SpaceQuotaError
from genie.model.job import Job

ALARM_STORE_SHARE_MIN = 0.5
"""Share of the store from which on there is an alarm, and less history is kept."""
SUBMISSION_STORE_SHARE_MAX = 0.7
"""Share of the store up to which jobs can be submitted."""
STORE_GROWTH_PER_WRITTEN_BYTE_MAX = 2.2
"""By which a store grows at most per written byte: pages are not full."""
FRAGMENTED_STORE_SHARE_MAX = 0.9
"""Share of the store, with free space inside, from which on jobs cannot be submitted."""
HISTORY_STORE_SHARE_MAX = 0.1
"""Maximum share of finished jobs, however large `history_bytes_max` is."""
_HISTORY_DIVISOR_IF_SPACE_LOW = 4
_JOBS_PER_YIELD = 1000
_MIB = 1024 * 1024


class JobSpace:
    def __init__(self, ledger: Ledger, config: ControllerConfig) -> None:
        self._ledger = ledger
        self._config = config
        self._size_by_job: dict[str, int] = {}
        self._unfinished_bytes_by_tenant: Counter[str] = Counter()
        """Of unfinished jobs."""
        self._finished_bytes_by_tenant: Counter[str] = Counter()
        self._finished_bytes = 0
        self.store_bytes_max = 0
        """Maximum size of the store; 0 before it was measured."""
        self._measured_bytes = self._fragmented_bytes = 0
        self._written_at_measurement_bytes = 0
        ledger.jobs.add_loader(self._load_sizes)
        ledger.jobs.add_listener(self._on_job_changed)

    @property
    def used_bytes(self) -> int:
        """Of the store: as measured, plus what was written since."""
        return self._measured_bytes + self.bytes_written_since_measurement

    @property
    def bytes_written_since_measurement(self) -> int:
        """Bytes written since the last measurement."""
        return self._ledger.written_bytes - self._written_at_measurement_bytes

    @property
    def is_space_low(self) -> bool:
        """Whether the store has little free space."""
        return self.store_bytes_max > 0 and self.used_bytes >= ALARM_STORE_SHARE_MIN * self.store_bytes_max

    @property
    def is_fragmented(self) -> bool:
        """Whether the store must be defragmented before it can grow. Small writes use the free space."""
        return (
            self._measured_bytes + self._fragmented_bytes
            >= FRAGMENTED_STORE_SHARE_MAX * self.store_bytes_max
            > 0
        )

    def record_measurement(self, measured: SpaceUsage, *, bytes_max: int, unmeasured_bytes: int = 0) -> None:
        """`unmeasured_bytes`: written during the measurement, which may not include them."""
        self._measured_bytes, self._fragmented_bytes = measured.used_bytes, measured.fragmented_bytes
        self.store_bytes_max = bytes_max
        self._written_at_measurement_bytes = self._ledger.written_bytes - unmeasured_bytes

    def check_submission(self, tenant: str) -> None:
        """Raise SpaceQuotaError if the tenant or all together use too much of the store."""
        if not self.store_bytes_max:
            return
        own_bytes, own_max = (
            self._unfinished_bytes_by_tenant[tenant],
            self._config.tenant_store_share * self.store_bytes_max,
        )
        if own_bytes >= own_max:
            raise SpaceQuotaError(
                f"the unfinished jobs of tenant {tenant} use {own_bytes / _MIB:.0f} MiB of the store; the "
                f"maximum is {own_max / _MIB:.0f} MiB",
                hint="wait until jobs have ended, cancel some, or send files as a working directory instead "
                "of arguments and environment variables",
            )
        most_bytes = (
            self._measured_bytes + STORE_GROWTH_PER_WRITTEN_BYTE_MAX * self.bytes_written_since_measurement
        )
        if self.is_fragmented or most_bytes >= SUBMISSION_STORE_SHARE_MAX * self.store_bytes_max:
            raise SpaceQuotaError(
                f"the store is almost full: {self.used_bytes / _MIB:.0f} of "
                f"{self.store_bytes_max / _MIB:.0f} MiB are used"
                + (", and it must be defragmented" if self.is_fragmented else ""),
                hint="try again later; the cluster's owner finds what to do under 'Store full' in "
                "docs/USER_GUIDE.md",
            )

    def excess_history_bytes(self) -> int:
        """By how much finished jobs exceed their space."""
        limit_bytes = self._config.history_bytes_max
        if self.store_bytes_max:
            limit_bytes = min(limit_bytes, int(HISTORY_STORE_SHARE_MAX * self.store_bytes_max))
        return self._finished_bytes - limit_bytes // (
            _HISTORY_DIVISOR_IF_SPACE_LOW if self.is_space_low else 1
        )

    @property
    def finished_bytes_by_tenant(self) -> Mapping[str, int]:
        """Space of the finished jobs of each tenant that has any."""
        return self._finished_bytes_by_tenant

    def job_size_bytes(self, job_id: str) -> int:
        return self._size_by_job.get(job_id, 0)

    async def _load_sizes(self, read: TableBeingLoaded[Job]) -> None:
        self._size_by_job, self._unfinished_bytes_by_tenant = {}, Counter()
        self._finished_bytes_by_tenant, self._finished_bytes = Counter(), 0
        for count, (job_id, job) in enumerate(read.rows.items()):
            self._add_job(job_id, job, read.row_sizes[job_id])
            if count % _JOBS_PER_YIELD == 0:
                await asyncio.sleep(0)

    def _on_job_changed(self, job_id: str, before: Job | None, after: Job | None) -> None:
        if before is None:
            if after is not None:
                self._add_job(job_id, after, self._ledger.jobs.size_bytes(job_id))
        elif after is None:
            self._remove_job(job_id, before)
        elif after.state.is_final and not before.state.is_final:
            size_bytes = self._remove_job(job_id, before)
            self._add_job(job_id, after, size_bytes)

    def _add_job(self, job_id: str, job: Job, size_bytes: int) -> None:
        self._size_by_job[job_id] = size_bytes
        if job.state.is_final:
            self._finished_bytes += size_bytes
        self._bytes_counter_for(job)[job.tenant] += size_bytes

    def _remove_job(self, job_id: str, job: Job) -> int:
        size_bytes = self._size_by_job.pop(job_id, 0)
        if job.state.is_final:
            self._finished_bytes -= size_bytes
        counter = self._bytes_counter_for(job)
        counter[job.tenant] -= size_bytes
        if counter[job.tenant] <= 0:
            del counter[job.tenant]
        return size_bytes

    def _bytes_counter_for(self, job: Job) -> Counter[str]:
        return self._finished_bytes_by_tenant if job.state.is_final else self._unfinished_bytes_by_tenant
