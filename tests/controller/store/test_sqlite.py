# ruff: noqa: ASYNC220, ASYNC240 - a test may block its own loop
"""The SQLite engine only: its file, lock, writer thread and history."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from genie.controller.store import Compare, Put, WatchEvent
from genie.controller.store.sqlite import QUEUED_REQUESTS_MAX, SqliteStore
from genie.controller.store.sqlite_file import FileCall, GroupResult, SqliteFile
from genie.errors import (
    CompactedError,
    LeaseLostError,
    StoreCorruptError,
    StoreUnavailableError,
    StoreVersionError,
)
from tests.fakes.clock import FakeClock
from tests.waiting import until

_ROOT = Path(__file__).parents[3]
_HOLD = """
import asyncio, sys
from pathlib import Path
from genie.controller.store.sqlite import SqliteStore
asyncio.run(SqliteStore.open(Path(sys.argv[1])))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store.sqlite3"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(path)
    yield store
    await store.close()


async def test_committed_data_and_revisions_survive_reopening(path: Path) -> None:
    store = await SqliteStore.open(path)
    revision = (await store.commit([], [Put("a", b"1")])).revision
    await store.close()
    store = await SqliteStore.open(path)
    item = await store.get("a")
    assert item is not None
    assert (item.value, item.mod_revision) == (b"1", revision)
    assert (await store.commit([Compare("a", revision)], [Put("a", b"2")])).revision == revision + 1
    async with store.watch("", after_revision=revision) as events:
        assert await anext(events) == WatchEvent("a", b"2", revision + 1)
    with pytest.raises(CompactedError):  # no history from before it was opened
        async with store.watch("", after_revision=revision - 1) as events:
            await anext(events)
    await store.close()


async def test_file_of_format_1_is_migrated(path: Path) -> None:
    store = await SqliteStore.open(path)
    revision = (await store.commit([], [Put("a", b"1")])).revision
    await store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE history (seq INTEGER PRIMARY KEY, rev INTEGER, key BLOB, value BLOB)")
        db.execute("INSERT INTO history VALUES (1, 2, 'a', '1')")
        db.execute("INSERT INTO meta VALUES ('compacted', 0)")
        db.execute("UPDATE meta SET value = 1 WHERE name = 'format'")
        db.commit()
    for _ in range(2):
        store = await SqliteStore.open(path)
        item = await store.get("a")
        assert item is not None
        assert (item.value, item.mod_revision) == (b"1", revision)
        await store.close()
    with closing(sqlite3.connect(path)) as db:
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert "history" not in names
        assert dict(db.execute("SELECT name, value FROM meta")) == {"format": 2, "revision": revision}


async def test_opening_revokes_the_leases_of_the_previous_process(path: Path) -> None:
    store = await SqliteStore.open(path)
    lease_id = await store.grant_lease(3600)
    revision = (await store.commit([], [Put("held", b"", lease_id), Put("kept", b"")])).revision
    await store.close()
    store = await SqliteStore.open(path)
    assert [item.key for item in (await store.range("")).items] == ["kept"]
    async with store.watch("", after_revision=revision) as events:
        assert await anext(events) == WatchEvent("held", None, revision + 1)
    with pytest.raises(LeaseLostError):
        await store.keep_alive(lease_id)
    assert await store.grant_lease(5) > lease_id
    await store.close()


async def test_only_the_owner_can_read_the_files(store: SqliteStore, path: Path) -> None:
    await store.commit([], [Put("a", b"")])
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == {"store.sqlite3": 0o600, "store.sqlite3-wal": 0o600, "store.sqlite3.lock": 0o600}


async def test_file_readable_by_others_is_made_private(path: Path) -> None:
    path.parent.mkdir()
    path.touch(mode=0o644)
    store = await SqliteStore.open(path)
    assert path.stat().st_mode & 0o777 == 0o600
    await store.close()


async def test_every_commit_is_fully_synced(store: SqliteStore) -> None:
    settings = await store._execute_in_store_thread(
        lambda file: [file._execute_pragma(name) for name in ("journal_mode", "synchronous", "locking_mode")],
        timeout_s=5,
    )
    assert settings == ["wal", 2, "exclusive"]


async def test_second_open_fails_with_the_pid_of_the_holder(store: SqliteStore, path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match=rf"pid {os.getpid()}\b"):
        await SqliteStore.open(path)
    assert await store.get("a") is None


async def test_file_is_locked_until_its_process_ends(path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StoreUnavailableError, match=rf"pid {holder.pid}\b"):
            await SqliteStore.open(path)
        holder.kill()
    store = await SqliteStore.open(path)
    await store.close()


async def test_error_names_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreUnavailableError, match=r"file/store"):
        await SqliteStore.open(tmp_path / "file" / "store.sqlite3")
    (tmp_path / "folder.sqlite3").mkdir()
    with pytest.raises(StoreUnavailableError, match=r"folder\.sqlite3"):
        await SqliteStore.open(tmp_path / "folder.sqlite3")


async def _write_keys_and_close(path: Path, keys: int = 400) -> None:
    store = await SqliteStore.open(path)
    for start in range(0, keys, 100):
        await store.commit([], [Put(f"k/{number:04}", b"x" * 200) for number in range(start, start + 100)])
    await store.close()


@pytest.mark.parametrize("damage", ["header", "pages", "last page", "cut", "text"])
async def test_damaged_file_is_rejected_with_its_path_and_a_hint(path: Path, damage: str) -> None:
    await _write_keys_and_close(path)
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[:100] = b"\xa5" * 100
    elif damage == "pages":
        content[4096 * 3 : 4096 * 8] = b"\xa5" * (4096 * 5)
    elif damage == "last page":
        content[-4096:] = b"\xa5" * 4096
    elif damage == "cut":
        content = content[: len(content) // 2]
    else:
        content = bytearray(b"this is a text file, and long enough to be taken for a header\n" * 100)
    path.write_bytes(content)
    with pytest.raises(StoreCorruptError, match="backup") as caught:
        await SqliteStore.open(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == bytes(content)


async def test_sqlite_file_of_another_program_is_rejected_and_unchanged(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreCorruptError, match="another program"):
        await SqliteStore.open(path)
    assert path.read_bytes() == before


async def test_file_of_a_newer_format_is_rejected_and_unchanged(path: Path) -> None:
    await _write_keys_and_close(path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = 99 WHERE name = 'format'")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreVersionError, match="format 99"):
        await SqliteStore.open(path)
    assert path.read_bytes() == before


async def test_file_whose_creation_was_interrupted_is_recreated(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
    db.close()
    assert path.stat().st_size > 0
    store = await SqliteStore.open(path)
    await store.commit([], [Put("a", b"")])
    await store.close()


async def test_lock_is_released_after_a_failed_open(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(StoreCorruptError):
        await SqliteStore.open(path)
    path.unlink()
    store = await SqliteStore.open(path)
    await store.close()


async def test_writer_is_one_named_thread_that_ends_with_the_store(path: Path) -> None:
    def writers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("genie-store")]

    store = await SqliteStore.open(path)
    await asyncio.gather(*(store.commit([], [Put(str(number), b"")]) for number in range(10)))
    assert len(writers()) == 1
    await store.close()
    assert writers() == []


async def test_concurrent_commits_share_a_sync(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    run = SqliteFile.run_group

    def counted(file: SqliteFile, calls: Sequence[FileCall]) -> GroupResult:
        groups.append(len(calls))
        return run(file, calls)

    monkeypatch.setattr(SqliteFile, "run_group", counted)
    results = await asyncio.gather(*(store.commit([], [Put(f"{number:03}", b"")]) for number in range(100)))
    assert sum(groups) == 100
    assert len(groups) < 10
    assert len({result.revision for result in results}) == 100


class WriterStall:
    """Blocks the writer thread in a read of the key "stall"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        get = SqliteFile.get

        def stalling(file: SqliteFile, key: str) -> object:
            if key == "stall":
                self.reached.set()
                assert self.go_on.wait(30)
            return get(file, key)

        monkeypatch.setattr(SqliteFile, "get", stalling)

    async def begin(self, store: SqliteStore) -> asyncio.Future[object]:
        stalled = asyncio.ensure_future(store.get("stall", timeout_s=30))
        await until(self.reached.is_set)
        return stalled


async def test_call_past_its_deadline_raises_and_is_not_executed_later(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = WriterStall(monkeypatch)
    stalled = await stall.begin(store)
    with pytest.raises(StoreUnavailableError, match=r"0\.02 s"):
        await store.commit([], [Put("late", b"")], timeout_s=0.02)
    stall.go_on.set()
    await stalled
    assert await store.get("late") is None


async def test_callers_wait_until_their_deadline_while_the_queue_is_full(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = WriterStall(monkeypatch)
    stalled = await stall.begin(store)
    queued = [
        asyncio.ensure_future(store.commit([], [Put(f"q/{n:04}", b"")])) for n in range(QUEUED_REQUESTS_MAX)
    ]
    await until(store._queue.full)
    with pytest.raises(StoreUnavailableError):
        await store.get("a", timeout_s=0.02)
    stall.go_on.set()
    await stalled
    await asyncio.gather(*queued)
    assert len((await store.range("q/")).items) == QUEUED_REQUESTS_MAX


async def test_store_works_after_a_caller_was_cancelled(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall = WriterStall(monkeypatch)
    stalled = await stall.begin(store)
    cancelled = asyncio.ensure_future(store.commit([], [Put("cancelled", b"")]))
    waiting = asyncio.ensure_future(store.commit([], [Put("waiting", b"")]))
    await until(lambda: store._queue.qsize() == 2)
    cancelled.cancel()
    stall.go_on.set()
    await asyncio.wait([stalled, cancelled, waiting])
    assert cancelled.cancelled()
    assert [item.key for item in (await store.range("")).items] == ["waiting"]


async def test_close_executes_queued_requests(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    stall = WriterStall(monkeypatch)
    stalled = await stall.begin(store)
    queued = [asyncio.ensure_future(store.commit([], [Put(f"q/{n}", b"")])) for n in range(5)]
    await until(lambda: store._queue.qsize() == 5)
    closing = asyncio.ensure_future(store.close())
    for _ in range(20):  # until it waits for them
        await asyncio.sleep(0)
    with pytest.raises(StoreUnavailableError):
        await store.get("a")
    stall.go_on.set()
    await asyncio.gather(stalled, closing, *queued)
    store = await SqliteStore.open(path)
    assert len((await store.range("q/")).items) == 5
    await store.close()


async def test_close_executes_requests_that_wait_for_the_queue(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if all earlier requests were cancelled, so that the thread is idle for a moment."""
    stall = WriterStall(monkeypatch)
    stalled = await stall.begin(store)
    gone = [asyncio.ensure_future(store.get("a")) for _ in range(QUEUED_REQUESTS_MAX)]
    await until(store._queue.full)
    go_on = threading.Event()
    waiting = [
        asyncio.ensure_future(store._execute_in_store_thread(lambda file: go_on.wait(30), timeout_s=30))
        for _ in range(3)
    ]
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    for each in gone:
        each.cancel()
    await asyncio.wait(gone)
    stall.go_on.set()
    await stalled
    for _ in range(20):
        await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*waiting) == [True] * 3
    await closing


@pytest.mark.parametrize("turns", range(8))
async def test_cancelled_close_can_be_repeated(path: Path, turns: int) -> None:
    store = await SqliteStore.open(path)
    closing = asyncio.ensure_future(store.close())
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await store.close()
    await (await SqliteStore.open(path)).close()


async def test_bug_in_one_call_fails_only_that_call_and_is_logged(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(file: SqliteFile, key: str) -> object:
        raise ZeroDivisionError(key)

    monkeypatch.setattr(SqliteFile, "get", broken)
    put, got = await asyncio.gather(store.commit([], [Put("a", b"")]), store.get("b"), return_exceptions=True)
    assert not isinstance(put, BaseException)
    assert "ZeroDivisionError" in str(got)
    assert "Traceback" in caplog.text
    assert [item.key for item in (await store.range("")).items] == ["a"]


async def test_failed_commit_group_fails_its_requests_and_the_next_group_runs(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(file: SqliteFile, key: str) -> object:
        raise KeyboardInterrupt(key)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteFile, "get", broken)
        with pytest.raises(StoreUnavailableError, match="KeyboardInterrupt"):
            await store.get("a")
    assert "Traceback" in caplog.text
    assert await store.get("a") is None


@pytest.mark.parametrize(
    ("name", "bound", "sizes"),
    [("GROUP_REQUESTS_MAX", 3, [1, 3, 3, 1]), ("GROUP_BYTES_MAX", 15, [1, 2, 2, 2, 1])],
)
async def test_commit_groups_are_bounded(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, name: str, bound: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(f"genie.controller.store.sqlite.{name}", bound)
    ran: list[int] = []
    run = SqliteFile.run_group

    def counted(file: SqliteFile, calls: Sequence[FileCall]) -> GroupResult:
        ran.append(len(calls))
        return run(file, calls)

    monkeypatch.setattr(SqliteFile, "run_group", counted)
    stall = WriterStall(monkeypatch)
    stalled = await stall.begin(store)
    queued = [asyncio.ensure_future(store.commit([], [Put(f"{n}", b"x" * 9)])) for n in range(7)]
    await until(lambda: store._queue.qsize() == 7)
    stall.go_on.set()
    await asyncio.gather(stalled, *queued)
    assert ran == sizes


async def test_history_is_bounded_by_revisions(path: Path) -> None:
    store = await SqliteStore.open(path, history_revisions=20)
    first = (await store.commit([], [Put("a", b"0")])).revision
    for number in range(60):
        last = (await store.commit([], [Put("a", b"%d" % number)])).revision
    with pytest.raises(CompactedError):
        async with store.watch("a", after_revision=first) as events:
            await anext(events)
    async with store.watch("a", after_revision=last - 20) as events:
        assert (await anext(events)).revision == last - 19
    assert 20 <= last - store._file._history.compacted_revision <= 22
    await store.close()


async def test_history_has_about_a_thousand_revisions_by_default(path: Path) -> None:
    """It is in the memory of the controller."""
    store = await SqliteStore.open(path)
    for number in range(1200):
        last = (await store.commit([], [Put("a", b"%d" % number)])).revision
    assert last - store._file._history.compacted_revision <= 1100
    await store.close()


async def test_history_is_bounded_by_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genie.controller.store.history.HISTORY_BYTES_MAX", 80_000)
    store = await SqliteStore.open(path)
    for _ in range(40):
        last = (await store.commit([], [Put("a", b"x" * 10_000)])).revision
    assert last - store._file._history.compacted_revision == 7
    await store.close()


async def test_reader_slower_than_compaction_gets_compacted_error(path: Path) -> None:
    store = await SqliteStore.open(path, history_revisions=10)
    start = (await store.commit([], [Put("a", b"")])).revision
    async with store.watch("a", after_revision=start - 1) as events:
        await anext(events)
        for number in range(40):
            await store.commit([], [Put("a", b"%d" % number)])
        with pytest.raises(CompactedError):
            async with asyncio.timeout(20):
                while True:
                    await anext(events)
    await store.close()


async def test_idle_watch_survives_compaction_of_other_keys(path: Path) -> None:
    store = await SqliteStore.open(path, history_revisions=10)
    start = (await store.commit([], [Put("quiet/1", b"")])).revision
    async with store.watch("quiet/", after_revision=start) as events:
        waiting = asyncio.ensure_future(anext(events))
        for number in range(50):
            await store.commit([], [Put("loud", b"%d" % number)])
        await store.commit([], [Put("quiet/2", b"")])
        assert (await waiting).key == "quiet/2"
    await store.close()


async def test_expired_lease_is_lost_before_its_timer_runs(path: Path) -> None:
    clock = FakeClock()
    store = await SqliteStore.open(path, clock=clock)
    lease_id = await store.grant_lease(5)
    clock._now_s += 6  # as after SIGSTOP: no timer has run yet
    with pytest.raises(LeaseLostError):
        await store.keep_alive(lease_id)
    with pytest.raises(LeaseLostError):
        await store.commit([], [Put("a", b"", lease_id)])
    await store.close()


async def test_leases_expire_with_the_system_clock(store: SqliteStore) -> None:
    lease_id = await store.grant_lease(0.05)
    await store.commit([], [Put("a", b"", lease_id)])

    async def is_gone() -> bool:
        return await store.get("a") is None

    await until(is_gone)


async def test_commit_queued_after_its_lease_expired_raises_lease_lost(store: SqliteStore) -> None:
    lease_id = await store.grant_lease(60)
    _, late = await asyncio.gather(
        store.revoke_lease(lease_id), store.commit([], [Put("a", b"", lease_id)]), return_exceptions=True
    )
    assert isinstance(late, LeaseLostError)
    assert await store.get("a") is None


class BrokenClock(FakeClock):
    async def sleep(self, seconds: float) -> None:
        raise ZeroDivisionError("the clock is broken")


async def test_store_with_a_failed_background_task_rejects_calls_and_can_be_closed(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await SqliteStore.open(path, clock=BrokenClock())
    await store.grant_lease(5)
    await until(lambda: store._background.has_ended)
    with pytest.raises(StoreUnavailableError, match="has stopped"):
        await store.get("a")
    assert "the clock is broken" in caplog.text
    await store.close()
    store = await SqliteStore.open(path)
    await store.close()
