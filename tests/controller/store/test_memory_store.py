"""The memory store only: injected faults, and several clients of one memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from genie.controller.store import Compare, Put
from genie.errors import CompactedError, StoreUnavailableError
from genie.sim.store import MemoryStore
from tests.fakes.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store(clock: FakeClock) -> AsyncIterator[MemoryStore]:
    store = await MemoryStore.open(clock=clock)
    yield store
    await store.close()


async def test_unavailable_store_rejects_calls_and_ends_watches_until_it_recovers(
    store: MemoryStore,
) -> None:
    start = (await store.commit([], [Put("a", b"")])).revision
    async with store.watch("", after_revision=start) as events:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        store.set_available(False)
        with pytest.raises(StoreUnavailableError):
            await waiting
    with pytest.raises(StoreUnavailableError):
        await store.commit([], [Put("b", b"")])
    with pytest.raises(StoreUnavailableError):
        async with store.watch("", after_revision=start):
            pass
    store.set_available(True)
    assert [item.key for item in (await store.range("")).items] == ["a"]


async def test_leases_expire_while_their_holder_is_disconnected(store: MemoryStore, clock: FakeClock) -> None:
    other = store.connect()
    lease_id = await store.grant_lease(5)
    await store.commit([], [Put("leader", b"", lease_id)])
    store.set_available(False)
    assert await other.get("leader") is not None
    await clock.advance(5)
    assert await other.get("leader") is None
    await other.close()


async def test_clients_share_one_memory_and_are_disconnected_individually(store: MemoryStore) -> None:
    other = store.connect()
    await store.commit([], [Put("a", b"")])
    assert await other.get("a") is not None
    other.set_available(False)
    assert await store.get("a") is not None
    await other.close()
    assert await store.get("a") is not None


async def test_commit_with_a_lost_response_was_applied(store: MemoryStore) -> None:
    store.lose_next_commit_reply()
    with pytest.raises(StoreUnavailableError):
        await store.commit([Compare("a", 0)], [Put("a", b"1")])
    assert not (await store.commit([Compare("a", 0)], [Put("a", b"2")])).succeeded
    item = await store.get("a")
    assert item is not None
    assert item.value == b"1"


async def test_call_lost_before_the_store_is_not_applied(store: MemoryStore) -> None:
    commit = asyncio.ensure_future(store.commit([], [Put("a", b"")]))
    await asyncio.sleep(0)
    store.set_available(False)
    with pytest.raises(StoreUnavailableError):
        await commit
    store.set_available(True)
    assert await store.get("a") is None


async def test_history_is_bounded_by_revisions(clock: FakeClock) -> None:
    store = await MemoryStore.open(clock=clock, history_revisions=20)
    for number in range(60):
        last = (await store.commit([], [Put("a", b"%d" % number)])).revision
    with pytest.raises(CompactedError):
        async with store.watch("a", after_revision=1) as events:
            await anext(events)
    async with store.watch("a", after_revision=last - 20) as events:
        assert (await anext(events)).revision == last - 19
    await store.close()


async def test_hanging_store_fails_after_the_timeout_and_then_responds(store: MemoryStore) -> None:
    other = store.connect()
    store.set_hanging(True)
    with pytest.raises(StoreUnavailableError, match="did not respond within"):
        await other.get("a", timeout_s=0.01)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(other.commit([], [Put("a", b"1")], timeout_s=60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        store.set_hanging(False)
    assert waiting.result().succeeded
    await other.close()


async def test_new_leader_of_the_store_extends_leases(store: MemoryStore, clock: FakeClock) -> None:
    lease_id = await store.grant_lease(3.0)
    await store.commit([], [Put("a", b"1", lease_id)])
    await clock.advance(2.0)
    store.extend_leases(by_s=1.0)
    await clock.advance(3.9)
    assert await store.get("a") is not None
    await clock.advance(0.2)
    assert await store.get("a") is None
