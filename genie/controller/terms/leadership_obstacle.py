"""Why this controller cannot lead although the store responds: a row that it cannot read, or newer releases.

Without the counters, the tokens or the record of the cluster nothing can be decided safely. A controller that
has found such a row unreadable does not campaign again until the row has changed: otherwise the controllers
would win elections in turn, and fail each time. Running jobs continue meanwhile.
"""

from __future__ import annotations

import logging

from genie.controller.store import KeyValue, Store
from genie.errors import GenieError, StoreCorruptError

_log = logging.getLogger(__name__)

_CORRUPT_ROW_REMEDY = (
    "no controller can lead, and no job starts; running jobs continue. Restore a backup with 'genie store "
    "restore', or correct the row"
)


class LeadershipObstacle:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._row: KeyValue | None = None
        self._error: GenieError | None = None

    @property
    def alarm(self) -> str:
        """For the owner; empty while nothing prevents this controller from leading."""
        if self._error is None:
            return ""
        remedy = f"; {self._error.hint}" if self._error.hint else ""
        return f"this server cannot lead: {self._error.message}{remedy}"

    def set_error(self, error: GenieError, row: KeyValue | None = None) -> None:
        """Record the error; `row` is the unreadable row that has caused it, if it is known."""
        if error is self._error:
            return
        if isinstance(error, StoreCorruptError):
            error = StoreCorruptError(error.message, hint=_CORRUPT_ROW_REMEDY)
        if self._error is None or self._error.message != error.message:
            _log.error("cannot lead: %s", error)
        self._error, self._row = error, row

    async def check_row_has_changed(self) -> None:
        """Raise the recorded error while the row has not changed."""
        if self._row is not None and self._error is not None:
            found = await self._store.get(self._row.key)
            if found is not None and found.mod_revision == self._row.mod_revision:
                raise self._error
            self.clear()

    def clear(self) -> None:
        """Nothing prevents this controller from leading."""
        self._row = self._error = None
