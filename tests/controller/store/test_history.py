"""Pages of the history: complete, without duplicates, within their limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genie.controller.store import history
from genie.controller.store.history import HistoryPosition, KeyChange, RevisionHistory
from genie.controller.store.limits import key_range
from genie.controller.store.protocol import WatchEvent
from genie.errors import UsageError

# "b" is outside the span of the prefix "a".
changes = st.tuples(st.sampled_from([b"a", b"aa", b"b"]), st.sampled_from([None, b"", b"x" * 40]))
revisions = st.lists(st.lists(changes, max_size=7), max_size=12)


def read_pages(
    kept: RevisionHistory, span: tuple[bytes, bytes], position: HistoryPosition
) -> list[list[WatchEvent]]:
    pages: list[list[WatchEvent]] = []
    while True:
        assert len(pages) < 100, "it goes round in circles"
        page = kept.read_page(span, position)
        pages.append(list(page.events))
        position = page.next_position
        if page.is_last_page:
            assert position == HistoryPosition(
                max(position.revision, kept.compacted_revision + len(kept._changes_and_size_by_revision) + 1)
            )
            return pages


@settings(max_examples=200)
@given(revisions, st.integers(0, 14), st.integers(0, 4))
def test_pages_contain_every_change_of_the_span_once(
    entries: list[list[KeyChange]], after: int, compacted: int
) -> None:
    kept = RevisionHistory(revision=0, revisions_max=100)
    for each in entries:
        kept.append_revision(each)
    kept.compact(min(compacted, after, len(entries)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "HISTORY_PAGE_EVENTS_MAX", 4)
        patch.setattr(history, "HISTORY_PAGE_BYTES_MAX", 100)
        pages = read_pages(kept, key_range("a"), HistoryPosition(after + 1))
    wanted = [
        WatchEvent(key.decode(), value, revision)
        for revision, each in enumerate(entries, 1)
        for key, value in each
        if revision > after and key.startswith(b"a")
    ]
    assert [event for page in pages for event in page] == wanted
    assert all(len(page) <= 4 for page in pages)
    assert all(sum(len(event.value or b"") for event in page[:-1]) < 100 for page in pages)


def test_page_from_a_future_revision_is_empty() -> None:
    kept = RevisionHistory(revision=3, revisions_max=10)
    assert kept.read_page(key_range(""), HistoryPosition(9)).next_position == HistoryPosition(9)


def test_compacting_a_future_revision_is_rejected() -> None:
    kept = RevisionHistory(revision=3, revisions_max=10)
    kept.append_revision([(b"a", b"1")])
    with pytest.raises(UsageError, match="the store is at 4"):
        kept.compact(5)
    assert kept.compacted_revision == 3
