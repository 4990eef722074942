"""The contract of every engine: leases. For etcd, time is real, so these tests take seconds."""

from __future__ import annotations

import asyncio

import pytest

from genie.controller.store import Delete, Put, WatchEvent
from genie.errors import LeaseLostError
from tests.controller.store.conftest import ContractStore, Engine


async def test_expired_lease_deletes_its_keys_at_one_revision_and_watches_see_it(
    engine: Engine,
) -> None:
    store = engine.store
    lease_id = await store.grant_lease(0.7)
    put = await store.commit([], [Put("b", b"1", lease_id), Put("a", b"2", lease_id), Put("kept", b"3")])
    item = await store.get("a")
    assert item is not None
    assert item.lease_id == lease_id
    await engine.pass_time(1.0)
    async with store.watch("", after_revision=put.revision) as events:
        seen = [await anext(events), await anext(events)]
    over = seen[0].revision
    assert seen == [WatchEvent("a", None, over), WatchEvent("b", None, over)]
    assert over > put.revision
    assert [item.key for item in (await store.range("")).items] == ["kept"]
    with pytest.raises(LeaseLostError):
        await store.keep_alive(lease_id)
    with pytest.raises(LeaseLostError):
        await store.commit([], [Put("c", b"", lease_id)])


@pytest.mark.parametrize("how", ["expires", "is revoked"])
async def test_reader_that_waits_is_woken_when_the_lease_of_a_key_ends(engine: Engine, how: str) -> None:
    """A standby waits for the end of the leader's lease this way."""
    store = engine.store
    lease_id = await store.grant_lease(2)
    put = await store.commit([], [Put("leader", b"one", lease_id)])
    async with store.watch("", after_revision=put.revision) as events, asyncio.TaskGroup() as group:
        waiting = group.create_task(asyncio.wait_for(anext(events), 20))
        await asyncio.sleep(0)
        if how == "expires":
            await engine.pass_time(2.5)
        else:
            await store.revoke_lease(lease_id)
        event = await waiting
    assert (event.key, event.value) == ("leader", None)
    assert event.revision > put.revision
    assert await store.get("leader") is None


async def test_renewed_lease_outlives_its_ttl(engine: Engine) -> None:
    lease_id = await engine.store.grant_lease(2)
    await engine.store.commit([], [Put("a", b"", lease_id)])
    for _ in range(2):
        await engine.pass_time(1.3)
        await engine.store.keep_alive(lease_id)
    assert await engine.store.get("a") is not None
    await engine.store.revoke_lease(lease_id)


async def test_revoking_a_lease_deletes_its_keys_immediately(store: ContractStore) -> None:
    lease_id = await store.grant_lease(60)
    await store.commit([], [Put("a", b"", lease_id), Put("kept", b"")])
    await store.revoke_lease(lease_id)
    assert [item.key for item in (await store.range("")).items] == ["kept"]
    with pytest.raises(LeaseLostError):
        await store.keep_alive(lease_id)
    with pytest.raises(LeaseLostError):
        await store.commit([], [Put("b", b"", lease_id)])


async def test_revoking_a_lost_lease_is_ignored(store: ContractStore) -> None:
    lease_id = await store.grant_lease(60)
    await store.revoke_lease(lease_id)
    await store.revoke_lease(lease_id)
    await store.revoke_lease(987654321)


async def test_renewing_an_unknown_lease_raises_lease_lost(store: ContractStore) -> None:
    with pytest.raises(LeaseLostError):
        await store.keep_alive(987654321)


async def test_lease_without_keys_expires_without_a_change(store: ContractStore) -> None:
    before = (await store.commit([], [Put("a", b"")])).revision
    await store.revoke_lease(await store.grant_lease(60))
    assert (await store.range("")).revision == before


async def test_overwritten_key_is_detached_from_its_old_lease(store: ContractStore) -> None:
    one, two = await store.grant_lease(60), await store.grant_lease(60)
    assert one != two
    await store.commit([], [Put("free", b"", one), Put("moved", b"", one), Put("gone", b"", one)])
    await store.commit([], [Put("free", b""), Put("moved", b"", two)])
    await store.commit([], [Delete("gone")])
    await store.commit([], [Put("gone", b"")])
    await store.revoke_lease(one)
    assert [item.key for item in (await store.range("")).items] == ["free", "gone", "moved"]
    await store.revoke_lease(two)
    assert [item.key for item in (await store.range("")).items] == ["free", "gone"]


# Not for etcd: slow in real time, and its leases are not our code.
@pytest.mark.parametrize("engine", ["memory", "sqlite"], indirect=True)
async def test_many_leases_expire_independently(engine: Engine) -> None:
    for number, ttl_s in enumerate([3.0, 1.0, 2.0]):
        lease_id = await engine.store.grant_lease(ttl_s)
        await engine.store.commit([], [Put(f"k/{number}", b"", lease_id)])
    left: list[list[str]] = []
    for _ in range(3):
        await engine.pass_time(1.0)
        left.append([item.key for item in (await engine.store.range("k/")).items])
    assert left == [["k/0", "k/2"], ["k/0"], []]
