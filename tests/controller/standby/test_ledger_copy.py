"""A copy of the ledger contains every change, and its age is never too low."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from genie.controller.ledger import TABLES_AGE_S_MAX
from genie.controller.rows import NodeRecord
from genie.controller.standby.ledger_copy import LedgerCopy
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
    memory: MemoryStore, clock: FakeClock | SystemClock, *, on_leader_lost: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[LedgerCopy, MemoryStore]]:
    """A copy that is kept current, and its client of the store."""
    store = memory.connect()

    async def write_mark() -> int:
        return (await store.commit([], [Put("controller/two", b"host:1")])).revision

    copy = LedgerCopy(store, clock=clock, write_mark=write_mark, on_leader_lost=on_leader_lost)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(copy.follow())
        yield copy, store
        task.cancel()
    await store.close()


def quota(tenant: str, gpus: float) -> Put:
    return Put(f"quota/{tenant}", msgspec.json.encode(QuotaRecord(tenant=tenant, gpus=gpus)))


async def advance_until_current(clock: FakeClock, copy: LedgerCopy) -> None:
    """Until the copy has all changes of the time before this call."""
    called_s = clock.monotonic_s()

    async def is_current() -> bool:
        await clock.advance(0.1)
        return copy.is_loaded and clock.monotonic_s() - copy.age_s > called_s

    await until(is_current)


@pytest.mark.parametrize("seed", range(30))
async def test_copy_has_every_change_that_is_older_than_its_age(seed: int) -> None:
    rng, clock = random.Random(seed), FakeClock()
    memory = await MemoryStore.open(clock=clock, history_revisions=rng.choice([5, 10_000]))
    quotas: dict[str, float] = {}
    states = [(clock.monotonic_s(), dict(quotas))]
    async with followed_copy(memory, clock) as (copy, store):
        for _ in range(150):
            tenant = f"t{rng.randrange(20)}"
            if tenant in quotas and rng.random() < 0.3:
                del quotas[tenant]
                await memory.commit([], [Delete(f"quota/{tenant}")])
            else:
                quotas[tenant] = rng.random()
                await memory.commit([], [quota(tenant, quotas[tenant])])
            states.append((clock.monotonic_s(), dict(quotas)))
            store.set_available(rng.random() < 0.9)
            await clock.advance(rng.choice([0.0, 0.01, 0.3, 2.0]))
            assert not copy.is_loaded or is_state_within_age(copy, states, now_s=clock.monotonic_s())
        store.set_available(True)
        await advance_until_current(clock, copy)
        assert rows_of(copy) == quotas
    await memory.close()


def rows_of(copy: LedgerCopy) -> dict[str, float | None]:
    return {tenant: row.gpus for tenant, row in copy.tables.quotas.items()}


def is_state_within_age(
    copy: LedgerCopy, states: list[tuple[float, dict[str, float]]], *, now_s: float
) -> bool:
    """Whether the copy is a state of the store that was replaced at most `age_s` ago."""
    found, replaced_s = rows_of(copy), math.inf
    for since_s, state in reversed(states):
        if replaced_s < now_s - copy.age_s - 1e-6:
            return False
        if found == state:
            return True
        replaced_s = since_s
    return math.isinf(copy.age_s)


async def test_age_grows_while_the_store_does_not_respond() -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    async with followed_copy(memory, clock) as (copy, store):
        await advance_until_current(clock, copy)
        store.set_available(False)
        await clock.advance(100.0)
        assert 99.0 < copy.age_s < 102.0
        copy.check_usable()
        await clock.advance(TABLES_AGE_S_MAX)
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


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [each for each in warnings if "copy of the ledger" in each]


@pytest.mark.parametrize(
    ("row", "reason"),
    [(b'{"cluster_id": "c", "ca_pin": "p", "orbit": 1}', "does not know orbit"), (b"{", "cannot be read")],
)
async def test_row_that_prevents_the_copy_is_logged_once_and_retried_ever_less_often(
    row: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    await memory.commit([], [Put("cluster", row)])
    async with followed_copy(memory, clock) as (copy, _):
        attempts = 0
        load = copy.tables.read_all_tables

        async def count_and_load() -> None:
            nonlocal attempts
            attempts += 1
            await load()

        copy.tables.read_all_tables = count_and_load  # type: ignore[method-assign]
        for _ in range(1200):
            await clock.advance(0.1)
        assert not copy.is_loaded
        assert 4 <= attempts <= 12
        (warning,) = list_warnings(caplog)
        assert reason in warning
        await memory.commit([], [Delete("cluster")])
        await advance_until_current(clock, copy)
    await memory.close()


async def test_each_outage_of_the_store_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    async with followed_copy(memory, clock) as (copy, store):
        for outages in (1, 2):
            await advance_until_current(clock, copy)
            store.set_available(False)
            for _ in range(100):
                await clock.advance(0.1)
            assert len(list_warnings(caplog)) == outages
            store.set_available(True)
    await memory.close()


async def test_copy_knows_whether_a_controller_leads() -> None:
    clock = FakeClock()
    memory = await MemoryStore.open(clock=clock)
    await memory.commit([], [Put("leader", b"{}")])
    is_lost = asyncio.Event()
    async with followed_copy(memory, clock, on_leader_lost=is_lost.set) as (copy, _):
        await advance_until_current(clock, copy)
        assert copy.has_leader_key and not is_lost.is_set()
        await memory.commit([], [Delete("leader")])
        await advance_until_current(clock, copy)
        assert not copy.has_leader_key and is_lost.is_set()
        record = NodeRecord(info=make_node_info("n1"))
        await memory.commit([], [Put("node/n1", msgspec.json.encode(record))])
        await advance_until_current(clock, copy)
        assert copy.tables.nodes["n1"].info.node_id == "n1"
    await memory.close()
