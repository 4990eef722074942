"""Runs the steps of periodic work: one that fails does not prevent the next ones."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from genie.errors import LeadershipError, StoreError
from genie.model.job import truncate_reason
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

_STEP_FAILURE_LOG_INTERVAL_S = 60.0

PeriodicStep = Callable[[], Awaitable[None]]


class PeriodicStepRunner:
    """Remembers which steps failed in their last run. Errors of the store and of leadership are raised:
    they concern all steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._error_by_step: dict[str, str] = {}
        self._last_logged_s_by_step: dict[str, float] = {}

    async def run_steps(self, steps: dict[str, PeriodicStep]) -> None:
        """Run the steps in order. The keys name them in logs and alarms."""
        for name, step in steps.items():
            try:
                await step()
            except (StoreError, LeadershipError):
                raise
            except Exception as error:  # a task boundary: the other steps must run
                self._record_step_failure(name, error)
            else:
                self._error_by_step.pop(name, None)

    def alarms(self) -> list[str]:
        return [f"{name} fails: {reason}" for name, reason in self._error_by_step.items()]

    def _record_step_failure(self, name: str, error: Exception) -> None:
        self._error_by_step[name] = truncate_reason(str(error) or type(error).__name__)
        now_s = self._clock.monotonic_s()
        if (
            now_s - self._last_logged_s_by_step.get(name, -_STEP_FAILURE_LOG_INTERVAL_S)
            >= _STEP_FAILURE_LOG_INTERVAL_S
        ):
            self._last_logged_s_by_step[name] = now_s
            _log.error("periodic step of the controller failed: %s", name, exc_info=error)
