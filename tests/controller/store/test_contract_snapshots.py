"""Contract test of every engine: snapshots at one revision, while the store is written to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from genie.controller.store import Delete, Put, Snapshot
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.sqlite import SqliteStore
from genie.errors import CompactedError, StoreUnavailableError
from tests.controller.store.conftest import ContractStore


async def _read_rest(snapshot: Snapshot) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    while page := await snapshot.read_page():
        keys = [item.key for item in page]
        assert keys == sorted(keys)
        assert not found or keys[0] > max(found)
        found |= {item.key: item.value for item in page}
    return found


async def _fill(store: ContractStore, rows: dict[str, bytes]) -> None:
    keys = sorted(rows)
    for start in range(0, len(keys), 100):
        await store.commit([], [Put(key, rows[key]) for key in keys[start : start + 100]])


async def test_snapshot_contains_the_keys_of_its_revision(store: ContractStore) -> None:
    rows = {f"row/{number:04}": b"x" * number for number in range(700)}
    await _fill(store, rows)
    async with store.snapshot() as snapshot:
        revision = (await store.range("", limit=1)).revision
        assert snapshot.revision == revision
        assert await _read_rest(snapshot) == rows
        assert await snapshot.read_page() == ()


async def test_snapshot_of_an_empty_store_is_empty(store: ContractStore) -> None:
    async with store.snapshot() as snapshot:
        assert await snapshot.read_page() == ()


@pytest.mark.parametrize("seed", range(3))
async def test_changes_after_the_snapshot_are_not_in_it(store: ContractStore, seed: int) -> None:
    chance = random.Random(seed)
    rows = {f"row/{number:04}": b"old" for number in range(1200)}
    await _fill(store, rows)
    found: dict[str, bytes] = {}
    async with store.snapshot() as snapshot:
        while page := await snapshot.read_page():
            found |= {item.key: item.value for item in page}
            keys = [f"row/{number:04}" for number in chance.sample(range(1300), 60)]
            changes = [Delete(key) if chance.random() < 0.5 else Put(key, b"new") for key in keys]
            await store.commit([], changes)
    assert found == rows


async def test_keys_on_a_lease_are_not_in_the_snapshot(store: ContractStore) -> None:
    lease_id = await store.grant_lease(60)
    await store.commit([], [Put("leader", b"me", lease_id), Put("row", b"1")])
    async with store.snapshot() as snapshot:
        await store.revoke_lease(lease_id)
        assert await _read_rest(snapshot) == {"row": b"1"}


async def test_a_second_snapshot_shows_the_later_revision(store: ContractStore) -> None:
    await store.commit([], [Put("row", b"1")])
    async with store.snapshot() as snapshot:
        await store.commit([], [Put("row", b"2")])
        assert await _read_rest(snapshot) == {"row": b"1"}
    async with store.snapshot() as snapshot:
        assert await _read_rest(snapshot) == {"row": b"2"}


async def test_a_compacted_snapshot_is_an_error(etcd_url: str) -> None:
    store = await EtcdStore.open(etcd_url)
    try:
        await _fill(store, {f"row/{number:04}": b"1" for number in range(300)})
        async with store.snapshot() as snapshot:
            await snapshot.read_page()
            result = await store.commit([], [Put("row/0000", b"2")])
            await store.compact(result.revision)
            with pytest.raises(CompactedError):
                await _read_rest(snapshot)
    finally:
        await store.close()


async def test_the_embedded_store_allows_one_snapshot_at_a_time(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite3")
    try:
        async with store.snapshot():
            with pytest.raises(StoreUnavailableError, match="another backup"):
                async with store.snapshot():
                    pass
        async with store.snapshot() as snapshot:
            assert await _read_rest(snapshot) == {}
    finally:
        await store.close()


async def test_the_embedded_store_can_be_closed_during_a_snapshot(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store.sqlite3")
    async with store.snapshot():
        await store.close()
