"""The last changes of the embedded store, for watches. In memory: whoever watches is in this process, too.

A revision has one entry with all that it changed, and revisions follow each other without a gap. Not for:
what stands now (sqlite_file.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from genie.controller.store.protocol import WatchEvent
from genie.errors import CompactedError, UsageError

PAGE_EVENTS = 500
PAGE_BYTES = 4 * 1024 * 1024
BYTES_MAX = 32 * 1024 * 1024
_CHANGE_BYTES = 150
"""What an entry costs beside its key and its value, about."""

Change = tuple[bytes, bytes | None]
"""A key and its new value; None when it was deleted."""


@dataclass(frozen=True, slots=True)
class HistoryPosition:
    """Changes still to be read: those of `revision` but for the first ones, and those of later revisions."""

    revision: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class HistoryPage:
    events: tuple[WatchEvent, ...]
    next: HistoryPosition
    complete: bool


class History:
    def __init__(self, *, revision: int, revisions_max: int) -> None:
        """Nothing is known of what happened up to `revision`."""
        self.compacted = revision
        self._revisions_max = revisions_max
        self._entries: deque[tuple[Sequence[Change], int]] = deque()
        """Of each revision after `compacted`: its changes, and what they cost in bytes."""
        self._size_bytes = 0

    def add(self, changes: Sequence[Change]) -> None:
        """Those of the next revision. The oldest go when there are a tenth too many."""
        size_bytes = sum(len(key) + len(value or b"") + _CHANGE_BYTES for key, value in changes)
        self._entries.append((changes, size_bytes))
        self._size_bytes += size_bytes
        if len(self._entries) > self._revisions_max + max(1, self._revisions_max // 10):
            self.compact(self.compacted + len(self._entries) - self._revisions_max)
        while self._size_bytes > BYTES_MAX:
            self._drop_oldest()

    def compact(self, revision: int) -> None:
        """Forgets what happened up to that revision."""
        latest = self.compacted + len(self._entries)
        if revision > latest:
            raise UsageError(f"cannot compact to revision {revision}; the store is at {latest}")
        while self.compacted < revision:
            self._drop_oldest()

    def page(self, span: tuple[bytes, bytes], position: HistoryPosition) -> HistoryPage:
        """Changes of keys in the span from that position on, as many as are read at a time."""
        if self.compacted >= position.revision:
            raise CompactedError(
                f"changes up to revision {self.compacted} are no longer kept, "
                f"and those from {position.revision} on were asked for",
                hint="range again and watch from the revision it gives",
            )
        first, end = span
        events: list[WatchEvent] = []
        left_bytes, skipped = PAGE_BYTES, position.skipped
        start = position.revision - self.compacted - 1
        for revision, (changes, _) in enumerate(islice(self._entries, start, None), position.revision):
            for number, (key, value) in enumerate(changes[skipped:], skipped + 1):
                if not first <= key < end:
                    continue
                events.append(WatchEvent(key.decode(), value, revision))
                left_bytes -= len(value or b"")
                if len(events) == PAGE_EVENTS or left_bytes <= 0:
                    return HistoryPage(tuple(events), HistoryPosition(revision, number), complete=False)
            skipped = 0
        behind = max(position.revision, self.compacted + len(self._entries) + 1)
        return HistoryPage(tuple(events), HistoryPosition(behind), complete=True)

    def _drop_oldest(self) -> None:
        _, size_bytes = self._entries.popleft()
        self._size_bytes -= size_bytes
        self.compacted += 1
