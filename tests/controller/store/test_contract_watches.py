"""The contract of every engine: watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from genie.controller.store import Delete, Put, WatchEvent
from genie.errors import CompactedError, StoreUnavailableError
from tests.controller.store.conftest import ContractStore
from tests.waiting import until


async def take_events(events: AsyncIterator[WatchEvent], count: int) -> list[WatchEvent]:
    async with asyncio.timeout(20):
        return [await anext(events) for _ in range(count)]


async def current_revision(store: ContractStore) -> int:
    return (await store.range("", limit=1)).revision


async def test_watch_replays_from_a_revision_and_then_follows(store: ContractStore) -> None:
    first = (await store.commit([], [Put("a", b"1")])).revision
    second = (await store.commit([], [Put("a", b"2")])).revision
    async with store.watch("a", after_revision=first) as events:
        assert await take_events(events, 1) == [WatchEvent("a", b"2", second)]
        third = (await store.commit([], [Delete("a")])).revision
        assert await take_events(events, 1) == [WatchEvent("a", None, third)]


async def test_watch_sees_only_its_prefix(store: ContractStore) -> None:
    start = await current_revision(store)
    async with store.watch("w/", after_revision=start) as events:
        for key in ["w", "w/1", "x/1", "w0", "w/2", "v/\u00ff"]:
            await store.commit([], [Put(key, b"")])
        assert [event.key for event in await take_events(events, 2)] == ["w/1", "w/2"]


async def test_watch_delivers_a_transaction_in_the_order_of_its_operations(
    store: ContractStore,
) -> None:
    start = (await store.commit([], [Put("gone", b"")])).revision
    result = await store.commit([], [Put("z", b"1"), Delete("gone"), Put("a", b"2"), Delete("never")])
    async with store.watch("", after_revision=start) as events:
        assert await take_events(events, 3) == [
            WatchEvent("z", b"1", result.revision),
            WatchEvent("gone", None, result.revision),
            WatchEvent("a", b"2", result.revision),
        ]


async def test_watch_delivers_all_changes_in_order_under_concurrent_writers(store: ContractStore) -> None:
    start = await current_revision(store)
    writers, each = 5, 40
    revisions: dict[str, int] = {}

    async def write(writer: int) -> None:
        for number in range(each):
            key = f"w/{writer}/{number}"
            revisions[key] = (await store.commit([], [Put(key, b"x"), Put(f"other/{writer}", b"")])).revision

    async with asyncio.TaskGroup() as group:
        for writer in range(writers):
            group.create_task(write(writer))
        await until(lambda: len(revisions) > 20)
        # One reader from the start, one from the middle.
        middle = revisions["w/0/2"]
        async with (
            store.watch("w/", after_revision=start) as all_events,
            store.watch("w/", after_revision=middle) as late_events,
        ):
            seen = await take_events(all_events, writers * each)
            expected_late = [event for event in seen if event.revision > middle]
            assert await take_events(late_events, len(expected_late)) == expected_late
    assert {event.key: event.revision for event in seen} == revisions
    assert [event.revision for event in seen] == sorted(revisions.values())


async def test_watch_delivers_a_long_backlog_completely(store: ContractStore) -> None:
    start = await current_revision(store)
    for batch in range(15):
        await store.commit([], [Put(f"b/{batch:03}/{number:03}", b"x" * 100) for number in range(100)])
    async with store.watch("b/", after_revision=start) as events:
        seen = await take_events(events, 1500)
    assert [event.key for event in seen] == [f"b/{n // 100:03}/{n % 100:03}" for n in range(1500)]


async def test_watch_delivers_large_values_completely(store: ContractStore) -> None:
    start = await current_revision(store)
    values = [bytes([number]) * 700_000 for number in range(12)]
    for number, value in enumerate(values):
        await store.commit([], [Put(f"v/{number}", value)])
    async with store.watch("v/", after_revision=start) as events:
        assert [event.value for event in await take_events(events, len(values))] == values


async def test_watch_from_a_compacted_revision_is_rejected(store: ContractStore) -> None:
    first = (await store.commit([], [Put("a", b"1")])).revision
    second = (await store.commit([], [Delete("a")])).revision
    third = (await store.commit([], [Put("a", b"3")])).revision
    await store.compact(second)
    await store.compact(second)
    with pytest.raises(CompactedError):
        async with store.watch("a", after_revision=first) as events:
            await take_events(events, 1)
    async with store.watch("a", after_revision=second) as events:
        assert await take_events(events, 1) == [WatchEvent("a", b"3", third)]


async def test_watch_that_is_up_to_date_survives_compaction(store: ContractStore) -> None:
    start = (await store.commit([], [Put("quiet/1", b"")])).revision
    async with store.watch("quiet/", after_revision=start - 1) as events:
        await take_events(events, 1)
        waiting = asyncio.ensure_future(take_events(events, 1))
        for number in range(5):
            last = (await store.commit([], [Put("loud", b"%d" % number)])).revision
        await store.compact(last)
        await store.commit([], [Put("quiet/2", b"")])
        assert [event.key for event in await waiting] == ["quiet/2"]


async def test_cancelled_wait_loses_no_event(store: ContractStore) -> None:
    start = await current_revision(store)
    seen: list[str] = []
    async with store.watch("c/", after_revision=start) as events:
        for number in range(6):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    while True:
                        seen.append((await anext(events)).key)
            await store.commit([], [Put(f"c/{number}", b"")])
        async with asyncio.timeout(20):
            while len(seen) < 6:
                seen.append((await anext(events)).key)
    assert seen == [f"c/{number}" for number in range(6)]


async def test_exiting_a_watch_leaks_no_task(store: ContractStore) -> None:
    start = await current_revision(store)
    before = asyncio.all_tasks()

    async def follow() -> None:
        async with store.watch("", after_revision=start) as events:
            async for _ in events:
                pass

    readers = [asyncio.ensure_future(follow()) for _ in range(3)]
    await store.commit([], [Put("a", b"")])
    await asyncio.sleep(0)
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    assert all(reader.cancelled() for reader in readers)
    await until(lambda: asyncio.all_tasks() <= before)


async def test_closing_the_store_ends_its_watches(store: ContractStore) -> None:
    start = await current_revision(store)
    async with store.watch("", after_revision=start) as events:
        await store.commit([], [Put("a", b"")])
        await take_events(events, 1)
        waiting = asyncio.ensure_future(take_events(events, 1))
        await asyncio.sleep(0)
        await store.close()
        with pytest.raises(StoreUnavailableError):
            await waiting
        with pytest.raises(StoreUnavailableError):
            await anext(events)


async def test_watch_from_a_future_revision_starts_there(store: ContractStore) -> None:
    start = await current_revision(store)
    async with store.watch("f/", after_revision=start + 2) as events:
        for number in range(3):
            result = await store.commit([], [Put(f"f/{number}", b"")])
        assert await take_events(events, 1) == [WatchEvent("f/2", b"", result.revision)]
