"""Rows of the store that could not be read or changed. They are isolated, so that the rest continues.

A row is listed until it was changed successfully or the tables were read again. Nothing that it holds is
released because of the listing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from genie.errors import LeadershipError, StoreError
from genie.model.job import truncate_reason
from genie.model.messages import QuarantinedRow
from genie.processes.clock import Clock

_log = logging.getLogger(__name__)

QUARANTINED_ROWS_MAX = 1000


class Quarantine:
    """At most QUARANTINED_ROWS_MAX rows; further ones are only logged."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: dict[str, QuarantinedRow] = {}

    @property
    def rows(self) -> Mapping[str, QuarantinedRow]:
        """By store key, oldest first."""
        return self._rows

    def add(self, key: str, error: Exception) -> None:
        if key in self._rows:
            return
        _log.error("quarantined store row %s: %s", key, error, exc_info=error)
        if len(self._rows) < QUARANTINED_ROWS_MAX:
            reason = truncate_reason(str(error) or type(error).__name__)
            self._rows[key] = QuarantinedRow(key=key, reason=reason, at=self._clock.wall_s())

    def discard(self, key: str) -> None:
        self._rows.pop(key, None)

    def clear(self) -> None:
        self._rows.clear()

    @contextmanager
    def quarantine_row_on_error(self, key: str) -> Iterator[None]:
        """Quarantine `key` if the block raises; errors of the store and of leadership pass through, because
        they concern every row."""
        try:
            yield
        except (StoreError, LeadershipError):
            raise
        except Exception as error:  # a task boundary: one bad row must not stop the others
            self.add(key, error)
