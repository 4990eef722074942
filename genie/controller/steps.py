"""Runs the steps of periodic work: one that fails does not prevent the next ones."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from genie.errors import LeadershipError, StoreError
from genie.model.job import truncate_reason
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0

Step = Callable[[], Awaitable[None]]


class PeriodicSteps:
    """Remembers which steps failed in their last run. Errors of the store and of leadership are raised:
    they concern all steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._faults: dict[str, str] = {}
        self._logged_s: dict[str, float] = {}

    async def run(self, steps: dict[str, Step]) -> None:
        """Run the steps in order. The keys name them in logs and alarms."""
        for name, step in steps.items():
            try:
                await step()
            except (StoreError, LeadershipError):
                raise
            except Exception as error:  # a task boundary: the other steps must run
                self._record(name, error)
            else:
                self._faults.pop(name, None)

    def alarms(self) -> list[str]:
        return [f"{name} fails: {reason}" for name, reason in self._faults.items()]

    def _record(self, name: str, error: Exception) -> None:
        self._faults[name] = truncate_reason(str(error) or type(error).__name__)
        now_s = self._clock.monotonic_s()
        if now_s - self._logged_s.get(name, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            self._logged_s[name] = now_s
            _log.error("%s failed", name, exc_info=error)
