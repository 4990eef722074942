"""Measures the space of the store, compacts its history, and raises an alarm before it is full.

Not responsible for rejecting submissions (jobs/space.py).
"""

from __future__ import annotations

import logging

from genie.config import ControllerConfig
from genie.controller.jobs.space import ALARM_STORE_SHARE_MIN, SUBMISSION_STORE_SHARE_MAX, JobSpace
from genie.controller.store import MeasurableStore, Put, Store
from genie.errors import StoreError
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

POST_COMPACTION_WRITE_KEY = "compacted"
_MEASURE_INTERVAL_S = 10.0
_COMPACTION_INTERVAL_S = 60.0
_UNMEASURED_STORE_SHARE_MAX = 0.02
"""Measure early when this share of the store was written since the last time."""
HISTORY_REVISIONS_KEPT = 10_000
"""None are kept when space is low: each may be as large as a transaction."""
_MIB = 1024 * 1024


class StoreMonitor:
    def __init__(self, store: Store, space: JobSpace, *, config: ControllerConfig, clock: Clock) -> None:
        assert isinstance(store, MeasurableStore), "every engine can measure its space"
        self._store: MeasurableStore = store
        self._commit_to_store = store.commit
        self._job_space = space
        self._config = config
        self._clock = clock
        self._next_measurement_s = 0.0
        self._next_compaction_s = 0.0
        self._space_alarm = ""
        self._is_full_store_logged = False

    def alarms(self) -> list[str]:
        return [self._space_alarm] if self._space_alarm else []

    async def measure_and_compact_if_due(self) -> None:
        """Measure and compact if it is time to."""
        now_s, space = self._clock.monotonic_s(), self._job_space
        has_written = (
            space.bytes_written_since_measurement > _UNMEASURED_STORE_SHARE_MAX * space.store_bytes_max
        )
        if now_s >= self._next_measurement_s or has_written or space.is_space_low:
            self._next_measurement_s = now_s + _MEASURE_INTERVAL_S
            await self._measure_and_compact()

    async def compact_full_store(self) -> None:
        """Drop the history of a full store: a new leader could not even be elected otherwise."""
        try:
            found = await self._store.measure_space()
            await self._store.compact(found.revision)
        except StoreError as error:
            _log.warning("could not compact the store: %s", error)
            return
        if self._is_full_store_logged:
            return
        self._is_full_store_logged = True
        _log.warning(
            "the store is full; its history was compacted, which may not be enough: see 'Store full' in "
            "docs/USER_GUIDE.md"
        )

    async def _measure_and_compact(self) -> None:
        before_bytes = self._job_space.bytes_written_since_measurement
        found = await self._store.measure_space()
        self._job_space.record_measurement(
            found,
            bytes_max=self._config.store_bytes_max or found.bytes_max,
            unmeasured_bytes=self._job_space.bytes_written_since_measurement - before_bytes,
        )
        now_s = self._clock.monotonic_s()
        if self._config.compact_store and (self._job_space.is_space_low or now_s >= self._next_compaction_s):
            self._next_compaction_s = now_s + _COMPACTION_INTERVAL_S
            kept = 0 if self._job_space.is_space_low else HISTORY_REVISIONS_KEPT
            if found.revision > kept:
                await self._store.compact(found.revision - kept)
            if self._job_space.is_space_low:
                # etcd counts the pages that a compaction freed as used until the next change.
                await self._commit_to_store([], [Put(POST_COMPACTION_WRITE_KEY, b"")])
        self._is_full_store_logged = False
        self._update_space_alarm()

    def _update_space_alarm(self) -> None:
        space, had_alarm = self._job_space, bool(self._space_alarm)
        self._space_alarm = ""
        if space.is_fragmented:
            self._space_alarm = "the store must be defragmented: see 'Store full' in docs/USER_GUIDE.md"
        elif space.is_space_low:
            self._space_alarm = (
                f"the store uses {space.used_bytes / _MIB:.0f} of {space.store_bytes_max / _MIB:.0f} MiB; "
                f"above {SUBMISSION_STORE_SHARE_MAX:.0%} no job can be submitted"
            )
        if self._space_alarm and not had_alarm:
            _log.warning("store alarm: %s", self._space_alarm)
        elif had_alarm and not self._space_alarm:
            _log.info("the store uses less than %.0f%% of its space again", 100 * ALARM_STORE_SHARE_MIN)
