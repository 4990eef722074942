"""Measures the space of the store, compacts its history, and raises an alarm before it is full.

Not responsible for rejecting submissions (jobs/space.py).
"""

from __future__ import annotations

import logging

from genie.config import ControllerConfig
from genie.controller.jobs.space import ALARM_SHARE, SUBMIT_SHARE, JobSpace
from genie.controller.store import Put, Store, StoreSpace
from genie.errors import StoreError
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

MARK_KEY = "compacted"
_MEASURE_S = 10.0
_COMPACT_S = 60.0
_WRITTEN_SHARE_MAX = 0.02
"""Measure early when this share of the store was written since the last time."""
REVISIONS_KEPT = 10_000
"""None are kept when space is low: each may be as large as a transaction."""
_MIB = 1024 * 1024


class StoreMonitor:
    def __init__(self, store: Store, space: JobSpace, *, config: ControllerConfig, clock: Clock) -> None:
        assert isinstance(store, StoreSpace), "every engine can measure its space"
        self._store: StoreSpace = store
        self._commit = store.commit
        self._space = space
        self._config = config
        self._clock = clock
        self._measure_at_s = 0.0
        self._compact_at_s = 0.0
        self._alarm = ""
        self._was_full = False

    def alarms(self) -> list[str]:
        return [self._alarm] if self._alarm else []

    async def update(self) -> None:
        """Measure and compact if it is time to."""
        now_s, space = self._clock.monotonic_s(), self._space
        has_written = space.written_bytes > _WRITTEN_SHARE_MAX * space.bytes_max
        if now_s >= self._measure_at_s or has_written or space.is_low:
            self._measure_at_s = now_s + _MEASURE_S
            await self._measure()

    async def free_space(self) -> None:
        """Drop the history of a full store: a new leader could not even be elected otherwise."""
        try:
            found = await self._store.space()
            await self._store.compact(found.revision)
        except StoreError as error:
            _log.warning("could not compact the store: %s", error)
            return
        if self._was_full:
            return
        self._was_full = True
        _log.warning(
            "the store is full; its history was compacted, which may not be enough: see 'Store full' in "
            "docs/USER_GUIDE.md"
        )

    async def _measure(self) -> None:
        found = await self._store.space()
        self._space.set_measured(found, bytes_max=self._config.store_bytes_max or found.bytes_max)
        now_s = self._clock.monotonic_s()
        if self._config.compact_store and (self._space.is_low or now_s >= self._compact_at_s):
            self._compact_at_s = now_s + _COMPACT_S
            kept = 0 if self._space.is_low else REVISIONS_KEPT
            if found.revision > kept:
                await self._store.compact(found.revision - kept)
            if self._space.is_low:
                # etcd counts the pages that a compaction freed as used until the next change.
                await self._commit([], [Put(MARK_KEY, b"")])
        self._was_full = False
        self._set_alarm()

    def _set_alarm(self) -> None:
        space, had_alarm = self._space, bool(self._alarm)
        self._alarm = ""
        if space.is_fragmented:
            self._alarm = "the store must be defragmented: see 'Store full' in docs/USER_GUIDE.md"
        elif space.is_low:
            self._alarm = (
                f"the store uses {space.used_bytes / _MIB:.0f} of {space.bytes_max / _MIB:.0f} MiB; above "
                f"{SUBMIT_SHARE:.0%} no job can be submitted"
            )
        if self._alarm and not had_alarm:
            _log.warning("%s", self._alarm)
        elif had_alarm and not self._alarm:
            _log.info("the store uses less than %.0f%% of its space again", 100 * ALARM_SHARE)
