"""kill -9 during writes: acknowledged writes are kept, and no transaction is partial."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from genie.controller.store import Store
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.sqlite import SqliteStore
from genie.errors import StoreUnavailableError
from tests.controller.store.commit_pairs import WRITERS, make_key_pair_puts
from tests.controller.store.etcd_server import EtcdServer

_ROOT = Path(__file__).parents[3]


async def stored_pairs(store: Store) -> set[tuple[int, int]]:
    """Returns the stored pairs; fails on half a pair or a wrong value."""
    halves: dict[tuple[int, int], int] = {}
    after = ""
    while True:
        page = await store.range("pair/", start_after=after, limit=1000)
        for item in page.items:
            _, writer, number, half = item.key.split("/")
            name = (int(writer), int(number))
            assert item.value == make_key_pair_puts(*name)["ab".index(half)].value
            halves[name] = halves.get(name, 0) + 1
        if not page.more:
            break
        after = page.items[-1].key
    assert set(halves.values()) <= {2}, "half a transaction"
    return set(halves)


def write_until_killed(path: Path, *, acknowledgements: int) -> set[tuple[int, int]]:
    """The pairs that were acknowledged before the process was killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.controller.store.commit_pairs", str(path)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(acknowledgements)]
        process.kill()
        lines += process.stdout.readlines()
    assert all(lines[:acknowledgements]), "it ended by itself"
    whole = [line.split() for line in lines if line.endswith(b"\n")]
    return {(int(writer), int(number)) for writer, number in whole}


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_sqlite_keeps_acknowledged_writes_when_its_process_is_killed(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    path = tmp_path / "store.sqlite3"
    acknowledged = write_until_killed(path, acknowledgements=chance.randrange(20, 400))
    store = await SqliteStore.open(path)
    found = await stored_pairs(store)
    await store.close()
    assert acknowledged <= found
    # At most the commit in progress may be there in addition.
    assert len(found - acknowledged) <= WRITERS


async def test_sqlite_has_no_partial_transaction_wherever_its_log_is_truncated(tmp_path: Path) -> None:
    chance = random.Random(4)
    path = tmp_path / "store.sqlite3"
    write_until_killed(path, acknowledgements=120)
    log = path.with_name(path.name + "-wal")
    for number in range(12):
        # As after a power failure: the end of the log never reached the disk.
        copy = tmp_path / f"copy-{number}.sqlite3"
        shutil.copy(path, copy)
        copy.with_name(copy.name + "-wal").write_bytes(
            log.read_bytes()[: chance.randrange(log.stat().st_size)]
        )
        store = await SqliteStore.open(copy)
        found = await stored_pairs(store)
        await store.close()
        for writer in range(WRITERS):
            numbers = sorted(number for who, number in found if who == writer)
            assert numbers == list(range(len(numbers))), "a later transaction is there without an earlier one"


async def test_etcd_keeps_acknowledged_writes_when_the_server_is_killed(tmp_path: Path) -> None:
    chance = random.Random(5)
    server = EtcdServer(tmp_path)
    server.start()
    try:
        store = await EtcdStore.open(server.url)
        start = (await store.range("")).revision
        acknowledged: set[tuple[int, int]] = set()
        for round_number in range(2):
            acknowledged |= await _write_until_server_is_killed(
                store, server, first=round_number * 10_000, acknowledgements=chance.randrange(30, 250)
            )
            server.start()
            # The same store object recovers.
            found = await stored_pairs(store)
            assert acknowledged <= found
            assert len(found - acknowledged) <= WRITERS * (round_number + 1)
        async with store.watch("pair/", after_revision=start) as events:
            seen = {tuple(map(int, (await anext(events)).key.split("/")[1:3])) for _ in range(2 * len(found))}
        assert seen == found
        await store.close()
    finally:
        server.stop()


async def _write_until_server_is_killed(
    store: EtcdStore, server: EtcdServer, *, first: int, acknowledgements: int
) -> set[tuple[int, int]]:
    acknowledged: set[tuple[int, int]] = set()

    async def write(writer: int) -> None:
        number = first
        while True:
            try:
                await store.commit([], make_key_pair_puts(writer, number), timeout_s=0.5)
            except StoreUnavailableError:
                return
            acknowledged.add((writer, number))
            number += 1
            if len(acknowledged) == acknowledgements:
                server.kill()

    async with asyncio.TaskGroup() as group:
        for writer in range(WRITERS):
            group.create_task(write(writer))
    return acknowledged
