"""A copy of the ledger contains every change, and its age is never too low."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from genie.controller.ledger import LedgerTables, NodeRecord
from genie.controller.standby.ledger_copy import COPY_AGE_S_MAX, LedgerCopy
from genie.controller.store import Delete, Put, RangeResult
from genie.errors import NotLeaderError
from genie.model.tenant import QuotaRecord
from genie.processes.clock import SystemClock
from genie.sim.store import MemoryStore
from tests.fakes.agent import make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until


@asynccontextmanager
async def followed_copy(
    memory: MemoryStore, clock: FakeClock | SystemClock
) -> AsyncIterator[tuple[LedgerCopy, MemoryStore]]:
    """A copy that is kept current, and its client of the store."""
    store = memory.connect()

    async def write_mark() -> int:
        return (await store.commit([], [Put("controller/two", b"host:1")])).revision

    copy = LedgerCopy(store, clock=clock, write_mark=write_mark)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(copy.follow())
        yield copy, store
        task.cancel()


def quota(tenant: str, gpus: float) -> Put:
    return Put(f"quota/{tenant}", msgspec.json.encode(QuotaRecord(tenant=tenant, gpus=gpus)))


async def advance_until_current(clock: FakeClock, copy: LedgerCopy) -> None:
    async def is_current() -> bool:
        await clock.advance(0.1)
        return copy.is_loaded and copy.age_s < 1.0

    await until(is_current)


@pytest.mark.parametrize("seed", range(20))
async def test_copy_converges_while_it_is_loaded_and_interrupted(seed: int) -> None:
    rng, clock = random.Random(seed), FakeClock()
    memory = await MemoryStore.open(clock=clock, history_revisions=rng.choice([5, 10_000]))
    for number in range(30):
        await memory.commit([], [quota(f"t{number}", 1.0)])
    async with followed_copy(memory, clock) as (copy, store):
        for _ in range(100):
            changes = {f"t{rng.randrange(40)}": rng.random() for _ in range(rng.randrange(1, 4))}
            operations = [
                Delete(f"quota/{tenant}") if gpus < 0.3 else quota(tenant, gpus)
                for tenant, gpus in changes.items()
            ]
            await memory.commit([], operations)
            if rng.random() < 0.1:
                store.set_available(False)
                await clock.advance(rng.random() * 3)
                store.set_available(True)
            await clock.advance(rng.choice([0.0, 0.0, 0.05]))
        await advance_until_current(clock, copy)
        expected = LedgerTables(memory, clock=clock)
        await expected.read_all_tables()
        assert dict(copy.tables.quotas.items()) == dict(expected.quotas.items())
    await memory.close()


async def test_age_grows_while_the_store_does_not_respond() -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    async with followed_copy(memory, clock) as (copy, store):
        await advance_until_current(clock, copy)
        store.set_available(False)
        await clock.advance(100.0)
        assert 99.0 < copy.age_s < 102.0
        copy.check_usable()
        await clock.advance(COPY_AGE_S_MAX)
        with pytest.raises(NotLeaderError, match="the limit is 3600 s"):
            copy.check_usable()
        store.set_available(True)
        await advance_until_current(clock, copy)
    await memory.close()


async def test_copy_is_not_current_while_its_watch_lags() -> None:
    """A store that responds proves nothing about changes that the watch has not delivered."""
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    async with followed_copy(memory, clock) as (copy, _):
        await advance_until_current(clock, copy)
        copy._apply = lambda event: None  # type: ignore[method-assign]
        await memory.commit([], [quota("red", 1.0)])
        await clock.advance(20.0)
        assert copy.age_s > 18.0
    await memory.close()


async def test_changes_of_other_programs_do_not_make_the_copy_old() -> None:
    """They raise the revision of a shared etcd, and are not in the watch."""
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    async with followed_copy(memory, clock) as (copy, store):
        await advance_until_current(clock, copy)
        read = store.range

        async def read_with_other_changes(prefix: str, **settings: object) -> object:
            found = await read(prefix, **settings)  # type: ignore[arg-type]
            await memory.commit([], [Put("other", b"1")])
            other = await memory.commit([], [Delete("other")])
            return RangeResult(found.items, other.revision, found.more)

        store.range = read_with_other_changes  # type: ignore[method-assign, assignment]
        apply = copy._apply
        copy._apply = lambda event: None if event.key == "other" else apply(event)  # type: ignore[method-assign]
        oldest_s = 0.0
        for _ in range(300):
            await clock.advance(0.1)
            oldest_s = max(oldest_s, copy.age_s)
        assert 1.0 < oldest_s < 10.0
    await memory.close()


async def test_unreadable_row_does_not_end_the_copy() -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    async with followed_copy(memory, clock) as (copy, _):
        await advance_until_current(clock, copy)
        await memory.commit([], [Put("quota/red", b"{"), quota("blue", 1.0)])
        await advance_until_current(clock, copy)
        assert list(copy.tables.quotas) == ["blue"] and list(copy.tables.quarantined) == ["quota/red"]
        await memory.commit([], [quota("red", 2.0)])
        await advance_until_current(clock, copy)
        assert set(copy.tables.quotas) == {"red", "blue"} and not copy.tables.quarantined
    await memory.close()


async def test_copy_knows_whether_a_controller_leads() -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    await memory.commit([], [Put("leader", b"{}")])
    async with followed_copy(memory, clock) as (copy, _):
        await advance_until_current(clock, copy)
        assert copy.has_leader_key
        await memory.commit([], [Delete("leader")])
        await advance_until_current(clock, copy)
        assert not copy.has_leader_key
        record = NodeRecord(info=make_node_info("n1"))
        await memory.commit([], [Put("node/n1", msgspec.json.encode(record))])
        await advance_until_current(clock, copy)
        assert copy.tables.nodes["n1"].info.node_id == "n1"
    await memory.close()
