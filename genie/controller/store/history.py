"""The recent changes of the embedded store, for watches. In memory: all watchers are in this process.

Each revision has one entry with all its changes, without gaps. Current values are in sqlite_file.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from genie.controller.store.protocol import WatchEvent
from genie.errors import CompactedError, UsageError

HISTORY_PAGE_EVENTS_MAX = 500
HISTORY_PAGE_BYTES_MAX = 4 * 1024 * 1024
HISTORY_BYTES_MAX = 32 * 1024 * 1024
_CHANGE_MEMORY_OVERHEAD_BYTES = 150
"""Approximate overhead of an entry in addition to its key and value."""

KeyChange = tuple[bytes, bytes | None]
"""A key and its new value; None for a deletion."""


@dataclass(frozen=True, slots=True)
class HistoryPosition:
    """Where to continue reading: at `revision`, after its first `skipped_changes` changes."""

    revision: int
    skipped_changes: int = 0


@dataclass(frozen=True, slots=True)
class HistoryPage:
    events: tuple[WatchEvent, ...]
    next_position: HistoryPosition
    is_last_page: bool


class RevisionHistory:
    def __init__(self, *, revision: int, revisions_max: int) -> None:
        """Starts empty: history up to `revision` is not available."""
        self.compacted_revision = revision
        self._revisions_max = revisions_max
        self._changes_and_size_by_revision: deque[tuple[Sequence[KeyChange], int]] = deque()
        """For each revision after `compacted_revision`: its changes and their size in bytes."""
        self._size_bytes = 0

    def append_revision(self, changes: Sequence[KeyChange]) -> None:
        """Appends the next revision. Drops the oldest ones when the limit is exceeded by a tenth."""
        size_bytes = sum(
            len(key) + len(value or b"") + _CHANGE_MEMORY_OVERHEAD_BYTES for key, value in changes
        )
        self._changes_and_size_by_revision.append((changes, size_bytes))
        self._size_bytes += size_bytes
        if len(self._changes_and_size_by_revision) > self._revisions_max + max(1, self._revisions_max // 10):
            self.compact(
                self.compacted_revision + len(self._changes_and_size_by_revision) - self._revisions_max
            )
        while self._size_bytes > HISTORY_BYTES_MAX:
            self._drop_oldest_revision()

    def compact(self, revision: int) -> None:
        """Drops the changes up to `revision`."""
        latest = self.compacted_revision + len(self._changes_and_size_by_revision)
        if revision > latest:
            raise UsageError(f"cannot compact to revision {revision}; the store is at {latest}")
        while self.compacted_revision < revision:
            self._drop_oldest_revision()

    def read_page(self, key_range: tuple[bytes, bytes], position: HistoryPosition) -> HistoryPage:
        """Returns one page of changes of keys in the span, from `position` on."""
        if self.compacted_revision >= position.revision:
            raise CompactedError(
                f"cannot watch from revision {position.revision}: history is compacted up to revision "
                f"{self.compacted_revision}",
                hint="range again and watch from the returned revision",
            )
        first, end = key_range
        events: list[WatchEvent] = []
        remaining_bytes, skipped = HISTORY_PAGE_BYTES_MAX, position.skipped_changes
        start = position.revision - self.compacted_revision - 1
        for revision, (changes, _) in enumerate(
            islice(self._changes_and_size_by_revision, start, None), position.revision
        ):
            for number, (key, value) in enumerate(changes[skipped:], skipped + 1):
                if not first <= key < end:
                    continue
                events.append(WatchEvent(key.decode(), value, revision))
                remaining_bytes -= len(value or b"")
                if len(events) == HISTORY_PAGE_EVENTS_MAX or remaining_bytes <= 0:
                    return HistoryPage(tuple(events), HistoryPosition(revision, number), is_last_page=False)
            skipped = 0
        behind = max(position.revision, self.compacted_revision + len(self._changes_and_size_by_revision) + 1)
        return HistoryPage(tuple(events), HistoryPosition(behind), is_last_page=True)

    def _drop_oldest_revision(self) -> None:
        _, size_bytes = self._changes_and_size_by_revision.popleft()
        self._size_bytes -= size_bytes
        self.compacted_revision += 1
