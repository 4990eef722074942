# ruff: noqa: ASYNC221 - a test may block its own loop
"""The SQLite engine with no space left: on a full disk if one can be mounted, and at its own limit."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from genie.controller.store import Delete, Put
from genie.controller.store.sqlite import STORE_FILE_BYTES_MAX, SqliteStore
from genie.errors import LeaseLostError, StoreFullError
from tests.fakes.clock import FakeClock
from tests.needs import require_namespaces
from tests.waiting import until


@dataclass
class LimitedDisk:
    folder: Path
    size_bytes_max: int = STORE_FILE_BYTES_MAX


@pytest.fixture(params=["cap", "disk"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LimitedDisk]:
    if request.param == "cap":
        yield LimitedDisk(tmp_path, size_bytes_max=1024 * 1024)
        return
    require_namespaces("mount")  # the right to create one implies the right to mount
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=True)
    try:
        yield LimitedDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@dataclass
class LimitedStore:
    store: SqliteStore
    clock: FakeClock


@pytest.fixture
async def limited_store(disk: LimitedDisk) -> AsyncIterator[LimitedStore]:
    clock = FakeClock()
    store = await SqliteStore.open(disk.folder / "s.db", clock=clock, size_bytes_max=disk.size_bytes_max)
    yield LimitedStore(store, clock)
    await store.close()


async def fill_store(store: SqliteStore) -> list[str]:
    """Puts keys until there is no space; returns those that were stored."""
    taken: list[str] = []
    for size_bytes in (200_000, 20_000, 1):
        with pytest.raises(StoreFullError, match="nothing was changed"):
            for number in range(3000):
                key = f"fill/{size_bytes}/{number:04}"
                await store.commit([], [Put(key, b"x" * size_bytes), Put(f"{key}/twin", b"")])
                taken.append(key)
    return taken


async def make_space(store: SqliteStore, disk: LimitedDisk) -> None:
    if disk.size_bytes_max < STORE_FILE_BYTES_MAX:
        await store.commit([], [Delete("fill/200000/0000")])
    else:
        subprocess.run(["mount", "-o", "remount,size=12m", str(disk.folder)], check=True)


async def test_store_recovers_from_a_full_disk_without_changes(
    limited_store: LimitedStore, disk: LimitedDisk
) -> None:
    store = limited_store.store
    taken = await fill_store(store)
    before = await store.range("fill/", limit=10_000)
    assert {item.key for item in before.items} == {*taken, *(f"{key}/twin" for key in taken)}
    with pytest.raises(StoreFullError):
        await store.commit([], [Put("more", b"x" * 300_000)])
    assert (await store.range("", limit=10_000)).items == before.items
    await make_space(store, disk)
    with_space = (await store.range("", limit=1)).revision
    revision = (await store.commit([], [Put("more", b"x" * 10_000)])).revision
    assert revision == with_space + 1
    async with store.watch("more", after_revision=before.revision) as events:
        assert (await anext(events)).key == "more"


async def test_lease_that_expires_on_a_full_disk_is_removed_when_there_is_space(
    limited_store: LimitedStore, disk: LimitedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = limited_store.store
    lease_id = await store.grant_lease(5)
    await store.commit([], [Put("held", b"", lease_id)])
    await fill_store(store)
    if disk.size_bytes_max < STORE_FILE_BYTES_MAX:
        # With a size limit, the log still has space for a delete. A full disk does not.
        monkeypatch.setattr("genie.controller.store.sqlite_file.SqliteFile.revoke_lease", _fail_with_no_space)
    await limited_store.clock.advance(6)
    with pytest.raises(LeaseLostError):
        await store.keep_alive(lease_id)
    assert await store.get("held") is not None
    monkeypatch.undo()
    await make_space(store, disk)

    async def is_gone() -> bool:
        await limited_store.clock.advance(1.5)
        return await store.get("held") is None

    await until(is_gone)


def _fail_with_no_space(*_: object) -> None:
    raise StoreFullError("no space, says the test")


async def test_write_that_does_not_fit_does_not_fail_others(limited_store: LimitedStore) -> None:
    store = limited_store.store
    outcomes = await asyncio.gather(
        store.commit([], [Put("small/1", b"x")]),
        *(store.commit([], [Put(f"large/{number}", b"x" * 900_000)]) for number in range(4)),
        store.commit([], [Put("small/2", b"x")]),
        return_exceptions=True,
    )
    full = [outcome for outcome in outcomes if isinstance(outcome, StoreFullError)]
    assert full
    assert not isinstance(outcomes[0], BaseException)
    assert not isinstance(outcomes[-1], BaseException)
    stored = len((await store.range("large/")).items)
    assert stored == 4 - len(full)
