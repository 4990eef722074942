"""Leader election: one leader at a time, by its own clock, with increasing fencing tokens."""

from __future__ import annotations

import asyncio

import pytest

from genie.controller.election import LEADER_KEY, Election, StoreHealth
from genie.controller.ledger import Ledger
from genie.controller.rows import Counter
from genie.controller.store import KeyValue, Put
from genie.errors import DuplicateControllerError, NotLeaderError, StoreCorruptError, StoreUnavailableError
from genie.sim.store import MemoryStore
from tests.fakes.clock import FakeClock
from tests.waiting import until

TTL_S = 6.0


def make_election(store: MemoryStore, clock: FakeClock, name: str, *, instance: str = "") -> Election:
    return Election(store, clock=clock, name=name, ttl_s=TTL_S, health=StoreHealth(), instance=instance)


async def test_next_leader_has_a_higher_fencing_token() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    first, second = make_election(store, clock, "a"), make_election(store, clock, "b")
    assert await first.try_win_election("a:1")
    assert not await second.try_win_election("b:1")
    assert second.leader is not None
    assert second.leader.address == "a:1"
    with pytest.raises(NotLeaderError, match="a:1"):
        second.require_fencing_token()
    before = first.require_fencing_token()
    await first.resign()
    assert not first.is_leading
    assert await second.try_win_election("b:1")
    assert second.require_fencing_token() > before
    await second.resign()
    await store.close()


async def test_candidate_that_loses_the_election_knows_the_winner() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    other = make_election(store, clock, "b")
    late_store = store.connect()
    late, grant = make_election(late_store, clock, "a"), late_store.grant_lease

    async def grant_after_the_other_has_won(ttl_s: float, *, timeout_s: float = 5.0) -> int:
        assert await other.try_win_election("b:1")
        return await grant(ttl_s, timeout_s=timeout_s)

    late_store.grant_lease = grant_after_the_other_has_won  # type: ignore[method-assign]
    assert not await late.try_win_election("a:1")
    assert late.leader is not None and late.leader.address == "b:1"
    await other.resign()
    await late_store.close()
    await store.close()


async def test_candidate_that_cannot_read_the_winner_keeps_no_lease() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    other = make_election(store, clock, "b")
    late_store = store.connect()
    late, get, revoke = make_election(late_store, clock, "a"), late_store.get, late_store.revoke_lease
    revoked: list[int] = []

    async def fail_after_the_other_has_won(key: str, *, timeout_s: float = 5.0) -> KeyValue | None:
        if other.is_leading:
            raise StoreUnavailableError("no reply")
        found = await get(key, timeout_s=timeout_s)
        if key == LEADER_KEY:
            assert await other.try_win_election("b:1")
        return found

    async def record_revoked(lease_id: int, *, timeout_s: float = 5.0) -> None:
        revoked.append(lease_id)
        await revoke(lease_id, timeout_s=timeout_s)

    late_store.get = fail_after_the_other_has_won  # type: ignore[method-assign]
    late_store.revoke_lease = record_revoked  # type: ignore[method-assign]
    assert not await late.try_win_election("a:1")
    assert len(revoked) == 1
    await other.resign()
    await late_store.close()
    await store.close()


async def test_leader_that_cannot_renew_steps_down_by_its_own_clock() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    one = make_election(store, clock, "a")
    assert await one.try_win_election("a:1")
    async with asyncio.TaskGroup() as group:
        held = group.create_task(one.hold_leadership_until_term_ends())
        for _ in range(5):
            await clock.advance(2.0)
        assert one.is_leading, "it was renewed"
        store.set_available(False)
        await clock.advance(TTL_S - 0.1)
        await clock.advance(0.2)
        assert not one.is_leading
        async with asyncio.timeout(20):
            await held
    with pytest.raises(StoreUnavailableError):
        one.require_fencing_token()
    store.set_available(True)
    await store.close()


async def test_restarted_leader_takes_its_key_at_once() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    before, after = make_election(store, clock, "same"), make_election(store, clock, "same")
    assert await before.try_win_election("a:1")
    assert await after.try_win_election("a:1")
    assert after.fencing_token > before.fencing_token
    await after.resign()
    await store.close()


async def test_restarted_leader_of_the_same_instance_takes_its_key_at_once() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    before = make_election(store, clock, "same", instance="m1")
    after = make_election(store, clock, "same", instance="m1")
    assert await before.try_win_election("a:1")
    assert await after.try_win_election("a:1")
    await after.resign()
    await store.close()


async def test_a_running_controller_with_the_same_name_is_refused() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    one = make_election(store, clock, "same", instance="m1")
    copy = make_election(store, clock, "same", instance="m2")
    assert await one.try_win_election("a:1")
    async with asyncio.TaskGroup() as group:
        held = group.create_task(one.hold_leadership_until_term_ends())
        with pytest.raises(DuplicateControllerError, match="the controller at a:1 is running") as caught:
            for _ in range(20):
                assert not await copy.try_win_election("b:1")
                await clock.advance(1.0)
        assert "controller/name" in caught.value.hint
        assert one.is_leading
        held.cancel()
    await one.resign()
    await store.close()


async def test_the_key_of_a_controller_that_ended_elsewhere_is_taken_when_it_expires() -> None:
    """As after a reboot, or when its directory was moved to another machine."""
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    before = make_election(store, clock, "same", instance="m1")
    after = make_election(store, clock, "same", instance="m2")
    assert await before.try_win_election("a:1")
    assert not await after.try_win_election("a:1")
    await clock.advance(TTL_S + 0.1)
    assert await after.try_win_election("a:1")
    await after.resign()
    await store.close()


async def test_replaced_leader_cannot_write_and_steps_down() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    old, new = make_election(store, clock, "a"), make_election(store, clock, "a")
    assert await old.try_win_election("a:1")
    ledger = Ledger(store, old, StoreHealth())
    await ledger.load_tables()
    async with asyncio.TaskGroup() as group:
        writer = group.create_task(ledger.run())
        assert await ledger.write(lambda txn: txn.next_counter_value("epoch")) == 1
        assert await new.try_win_election("a:2")
        assert old.is_leading, "by its own clock it still leads"
        with pytest.raises(NotLeaderError):
            await ledger.write(lambda txn: txn.next_counter_value("epoch"))
        assert not old.is_leading
        kept = ledger.counters.get("epoch")
        assert kept == Counter(value=1), "memory has only durable rows"
        writer.cancel()
    await new.resign()
    await store.close()


async def test_error_names_the_unreadable_row_that_is_needed() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    one = make_election(store, clock, "a")
    assert await one.try_win_election("a:1")
    await store.commit([], [Put("job/j-1", b"{}")])
    ledger = Ledger(store, one, StoreHealth())
    await ledger.load_tables()
    assert list(ledger.quarantined) == ["job/j-1"]
    await store.commit([], [Put("token/t-1", b"{}")])
    with pytest.raises(StoreCorruptError, match="'token/t-1' cannot be read"):
        await ledger.load_tables()
    await one.resign()
    await store.close()


async def test_write_completes_when_its_caller_is_cancelled() -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    one = make_election(store, clock, "a")
    assert await one.try_win_election("a:1")
    ledger = Ledger(store, one, StoreHealth())
    await ledger.load_tables()
    async with asyncio.TaskGroup() as group:
        writer = group.create_task(ledger.run())
        caller = group.create_task(ledger.write(lambda txn: txn.next_counter_value("epoch")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await until(lambda: ledger.counters.get("epoch") == Counter(value=1))
        with pytest.raises(ZeroDivisionError):
            await ledger.write(lambda txn: 1 // 0)
        assert await ledger.write(lambda txn: txn.next_counter_value("epoch")) == 2
        writer.cancel()
    assert await store.get(LEADER_KEY) is not None
    await one.resign()
    assert await store.get(LEADER_KEY) is None
    await store.close()
