"""Locks of a real controller: grants, fencing tokens, leases, waiting, tenants and limits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest

from genie.controller.locks import ended_acquisitions, lock_table, waiters
from genie.controller.locks.lock_table import LockTable
from genie.controller.rows import ClusterRecord
from genie.controller.store import Put
from genie.controller.store.sqlite import SqliteStore
from genie.errors import (
    LockError,
    LockLimitError,
    LockLostError,
    LockNotFoundError,
    NameInvalidError,
    PermissionError_,
    UsageError,
)
from genie.model.messages.locks import (
    AcquireLock,
    BreakLock,
    ListLocks,
    LockGrant,
    ReleaseLock,
    RenewLock,
)
from genie.model.tenant import TokenKind
from tests.controller.running_controller import Client, RunningController, running_controller
from tests.fakes.clock import FakeClock
from tests.waiting import until

TTL_S = 10.0
_acquisition_numbers = itertools.count(1)


def new_acquisition_id() -> str:
    return f"acquisition-{next(_acquisition_numbers)}"


async def acquire(
    client: Client, acquisition_id: str, *, name: str = "l", wait_s: float = 0.0, ttl_s: float = TTL_S
) -> LockGrant:
    return await client.ask(
        AcquireLock(
            name=name,
            acquisition_id=acquisition_id,
            holder=f"holder-of-{acquisition_id}",
            ttl_s=ttl_s,
            wait_s=wait_s,
        )
    )


async def renew(client: Client, acquisition_id: str, token: int) -> str:
    """Return why the lock was lost; empty if it is held."""
    request = RenewLock(name="l", acquisition_id=acquisition_id, fencing_token=token)
    return (await client.ask(request)).lost_reason


async def release(client: Client, acquisition_id: str) -> bool:
    return (await client.ask(ReleaseLock(name="l", acquisition_id=acquisition_id))).was_held


async def waiting_count(client: Client) -> int:
    return sum(view.waiting for view in (await client.ask(ListLocks())).locks)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def controller(tmp_path: Path, clock: FakeClock) -> AsyncIterator[RunningController]:
    async with running_controller(tmp_path, clock=clock, leader_ttl_s=10_000.0) as running:
        yield running


@pytest.fixture
async def client(controller: RunningController) -> AsyncIterator[Client]:
    async with controller.client() as owner:
        yield owner


async def advance_until_granted(
    clock: FakeClock, client: Client, acquisition_id: str, *, step_s: float = 0.5
) -> tuple[LockGrant, float]:
    """Poll without entering the queue; return the grant and the simulated time until then."""
    began_s = clock.monotonic_s()

    async def granted() -> LockGrant | None:
        grant = await acquire(client, acquisition_id)
        if not grant.fencing_token:
            await clock.advance(step_s)
        return grant if grant.fencing_token else None

    return await until(granted, what="a grant"), clock.monotonic_s() - began_s


# --- one holder -------------------------------------------------------------------------------


async def test_a_held_lock_is_not_granted_to_another_client(client: Client) -> None:
    one, two = new_acquisition_id(), new_acquisition_id()
    assert (await acquire(client, one)).fencing_token > 0
    assert await acquire(client, two) == LockGrant(holder=f"holder-of-{one}")


async def test_a_released_lock_is_granted_with_a_higher_token(client: Client) -> None:
    one, two = new_acquisition_id(), new_acquisition_id()
    first = await acquire(client, one)
    assert await release(client, one)
    second = await acquire(client, two)
    assert second.fencing_token > first.fencing_token


async def test_repeated_requests_neither_double_nor_lose_a_lock(client: Client) -> None:
    one = new_acquisition_id()
    first = await acquire(client, one)
    assert await acquire(client, one) == first
    assert await release(client, one)
    assert not await release(client, one)
    with pytest.raises(LockLostError, match="it was released"):
        await acquire(client, one)  # such as a request that was delayed in the network
    assert (await acquire(client, new_acquisition_id())).fencing_token > first.fencing_token


async def test_concurrent_requests_grant_a_lock_once(client: Client) -> None:
    grants = await asyncio.gather(*(acquire(client, new_acquisition_id()) for _ in range(20)))
    assert sum(grant.fencing_token > 0 for grant in grants) == 1


async def test_a_release_of_a_lock_of_another_holder_has_no_effect(client: Client) -> None:
    one, two = new_acquisition_id(), new_acquisition_id()
    grant = await acquire(client, one)
    assert not await release(client, two)
    assert await renew(client, one, grant.fencing_token) == ""


# --- leases -----------------------------------------------------------------------------------


async def test_an_expired_lock_is_granted_to_another_client(clock: FakeClock, client: Client) -> None:
    one, two = new_acquisition_id(), new_acquisition_id()
    first = await acquire(client, one)
    second, waited_s = await advance_until_granted(clock, client, two)
    assert second.fencing_token > first.fencing_token
    assert waited_s == TTL_S
    assert "expired" in await renew(client, one, first.fencing_token)
    assert not await release(client, one)


async def test_renewals_extend_the_lease(clock: FakeClock, client: Client) -> None:
    one, two = new_acquisition_id(), new_acquisition_id()
    grant = await acquire(client, one)
    for _ in range(5):
        await clock.advance(0.6 * TTL_S)
        assert await renew(client, one, grant.fencing_token) == ""
    _, waited_s = await advance_until_granted(clock, client, two)
    assert waited_s == TTL_S


async def test_a_repeated_acquisition_extends_the_lease(clock: FakeClock, client: Client) -> None:
    """The client counts its lease from its last request."""
    one = new_acquisition_id()
    grant = await acquire(client, one)
    for _ in range(3):
        await clock.advance(0.6 * TTL_S)
        assert await acquire(client, one) == grant


@pytest.fixture
def expired_records_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The periodic step that deletes the records of expired locks is late."""

    async def do_nothing(self: LockTable) -> None:
        pass

    monkeypatch.setattr(LockTable, "end_expired_leases", do_nothing)


@pytest.mark.usefixtures("expired_records_remain")
async def test_the_end_of_a_lease_is_final_although_its_record_remains(
    clock: FakeClock, client: Client, controller: RunningController
) -> None:
    one = new_acquisition_id()
    first = await acquire(client, one)
    await clock.advance(TTL_S)
    assert "expired" in await renew(client, one, first.fencing_token)
    assert (await client.ask(ListLocks())).locks == ()
    assert (await controller.store.range("lock/")).items
    second = await acquire(client, one)
    assert second.fencing_token > first.fencing_token, "the same acquisition gets another grant"
    await clock.advance(TTL_S)
    assert not await release(client, one)
    third = await acquire(client, new_acquisition_id())
    assert third.fencing_token > second.fencing_token


async def test_the_record_of_an_expired_lock_is_deleted(
    clock: FakeClock, client: Client, controller: RunningController
) -> None:
    await acquire(client, new_acquisition_id())
    assert (await controller.store.range("lock/")).items

    async def is_deleted() -> bool:
        await clock.advance(0.5)
        return not (await controller.store.range("lock/")).items

    await until(is_deleted)


async def test_a_new_term_begins_with_a_full_lease(clock: FakeClock, controller: RunningController) -> None:
    one, two = new_acquisition_id(), new_acquisition_id()
    async with controller.client() as client:
        first = await acquire(client, one)
        await clock.advance(0.9 * TTL_S)
    await controller.restart()
    async with controller.client() as client:
        second, waited_s = await advance_until_granted(clock, client, two)
        assert waited_s == TTL_S
        assert second.fencing_token > first.fencing_token


async def test_a_holder_keeps_its_lock_across_a_restart(
    clock: FakeClock, controller: RunningController
) -> None:
    one = new_acquisition_id()
    async with controller.client() as client:
        grant = await acquire(client, one)
    await controller.restart()
    async with controller.client() as client:
        assert await renew(client, one, grant.fencing_token) == ""
        assert await acquire(client, one) == grant
        assert await release(client, one)


async def test_tokens_grow_after_a_restore_of_an_older_backup(
    clock: FakeClock, controller: RunningController
) -> None:
    async with controller.client() as client:
        grants = []
        for _ in range(3):
            acquisition_id = new_acquisition_id()
            grants.append(await acquire(client, acquisition_id))
            await release(client, acquisition_id)
    await controller.stop()
    await _raise_generation_and_reset_lock_counter(controller.store)
    assert isinstance(controller.store, SqliteStore)
    await controller.start()
    async with controller.client() as client:
        grant = await acquire(client, new_acquisition_id())
        assert grant.fencing_token > grants[-1].fencing_token


async def _raise_generation_and_reset_lock_counter(store: object) -> None:
    """Do what a restore of a backup from before the first grant does."""
    assert isinstance(store, SqliteStore)
    found = await store.get("cluster")
    assert found is not None
    cluster = msgspec.structs.replace(msgspec.json.decode(found.value, type=ClusterRecord), generation=1)
    await store.commit(
        [], [Put("cluster", msgspec.json.encode(cluster)), Put("counter/lock", b'{"value":0}')]
    )


# --- waiting ----------------------------------------------------------------------------------


async def test_waiting_clients_get_the_lock_in_the_order_of_their_arrival(
    controller: RunningController, client: Client
) -> None:
    holder = new_acquisition_id()
    last_token = (await acquire(client, holder)).fencing_token
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        waiting = []
        for number in range(4):
            other, acquisition_id = await stack.enter_async_context(controller.client()), new_acquisition_id()
            task = group.create_task(acquire(other, acquisition_id, wait_s=30))
            waiting.append((other, acquisition_id, task))
            await until(lambda count=number + 1: _has_waiting(client, count))
        for other, acquisition_id, task in waiting:
            assert await release(client, holder)
            grant = await task
            assert grant.fencing_token > last_token
            holder, client, last_token = acquisition_id, other, grant.fencing_token
            assert (
                sum(each.done() for _, _, each in waiting) == waiting.index((other, acquisition_id, task)) + 1
            )


async def _has_waiting(client: Client, count: int) -> bool:
    return await waiting_count(client) == count


async def test_a_client_keeps_its_place_between_two_polls(clock: FakeClock, client: Client) -> None:
    holder, first, second = new_acquisition_id(), new_acquisition_id(), new_acquisition_id()
    await acquire(client, holder)
    async with asyncio.TaskGroup() as group:
        poll = group.create_task(acquire(client, first, wait_s=1.0))
        await until(lambda: _has_waiting(client, 1))
        later = group.create_task(acquire(client, second, wait_s=5.0))
        await until(lambda: _has_waiting(client, 2))
        await clock.advance(1.0)
        assert not (await poll).fencing_token
        await release(client, holder)
        grant = await acquire(client, first, wait_s=5.0)
        assert grant.fencing_token
        assert not later.done()
        await release(client, first)
        assert (await later).fencing_token > grant.fencing_token


async def test_a_client_that_stopped_waiting_is_forgotten(clock: FakeClock, client: Client) -> None:
    await acquire(client, holder := new_acquisition_id())
    async with asyncio.TaskGroup() as group:
        poll = group.create_task(acquire(client, new_acquisition_id(), wait_s=1.0))
        await until(lambda: _has_waiting(client, 1))
        await clock.advance(1.0)
        await poll
    await clock.advance(waiters.BETWEEN_POLLS_S)
    await until(lambda: _has_waiting(client, 0))
    await release(client, holder)
    assert (await acquire(client, new_acquisition_id())).fencing_token


async def test_a_disconnected_client_does_not_get_the_lock(
    controller: RunningController, client: Client
) -> None:
    await acquire(client, holder := new_acquisition_id())
    async with asyncio.TaskGroup() as group:
        async with controller.client() as other:
            lost = group.create_task(_acquire_until_disconnected(other))
            await until(lambda: _has_waiting(client, 1))
        await lost
        waiting = group.create_task(acquire(client, new_acquisition_id(), wait_s=5.0))
        await until(lambda: _has_waiting(client, 2))
        await release(client, holder)
        assert (await waiting).fencing_token


async def _acquire_until_disconnected(client: Client) -> None:
    with pytest.raises(Exception, match="closed"):
        await acquire(client, new_acquisition_id(), wait_s=30.0)


async def test_a_client_that_withdraws_does_not_get_the_lock(client: Client) -> None:
    await acquire(client, holder := new_acquisition_id())
    async with asyncio.TaskGroup() as group:
        first = new_acquisition_id()
        poll = group.create_task(_acquire_and_expect_release(client, first))
        await until(lambda: _has_waiting(client, 1))
        second = group.create_task(acquire(client, new_acquisition_id(), wait_s=5.0))
        await until(lambda: _has_waiting(client, 2))
        assert not await release(client, first)
        await release(client, holder)
        assert (await second).fencing_token
        await poll


async def _acquire_and_expect_release(client: Client, acquisition_id: str) -> None:
    with pytest.raises(LockLostError, match="it was released"):
        await acquire(client, acquisition_id, wait_s=5.0)


async def test_waiting_clients_get_an_expired_lock(clock: FakeClock, client: Client) -> None:
    first = await acquire(client, new_acquisition_id())
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(acquire(client, new_acquisition_id(), wait_s=30.0))
        await until(lambda: _has_waiting(client, 1))
        await clock.advance(TTL_S + 0.5)
        assert (await waiting).fencing_token > first.fencing_token


# --- tenants, owners and limits ---------------------------------------------------------------


async def test_tenants_have_locks_of_their_own(controller: RunningController, client: Client) -> None:
    red, blue = [await controller.token(TokenKind.USER, tenant=tenant) for tenant in ("red", "blue")]
    async with controller.client(red) as in_red, controller.client(blue) as in_blue:
        red_id, blue_id = new_acquisition_id(), new_acquisition_id()
        assert (await acquire(in_red, red_id)).fencing_token
        assert (await acquire(in_blue, blue_id)).fencing_token
        assert not await release(in_blue, red_id)
        assert [view.tenant for view in (await in_red.ask(ListLocks())).locks] == ["red"]
        assert [view.tenant for view in (await client.ask(ListLocks())).locks] == ["blue", "red"]
        with pytest.raises(PermissionError_, match="user tokens cannot break locks"):
            await in_red.ask(BreakLock(tenant="blue", name="l"))


async def test_releases_of_a_tenant_do_not_let_an_ended_acquisition_of_another_get_the_lock_again(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_acquisitions, "ENDED_ACQUISITIONS_PER_TENANT_MAX", 2)
    red, blue = [await controller.token(TokenKind.USER, tenant=tenant) for tenant in ("red", "blue")]
    async with controller.client(red) as in_red, controller.client(blue) as in_blue:
        await acquire(in_red, red_id := new_acquisition_id())
        assert await release(in_red, red_id)
        for _ in range(4):
            await acquire(in_blue, blue_id := new_acquisition_id())
            assert await release(in_blue, blue_id)
        with pytest.raises(LockLostError, match="it was released"):
            await acquire(in_red, red_id)


async def test_releases_of_locks_that_were_never_held_do_not_let_an_ended_acquisition_get_the_lock_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_acquisitions, "ENDED_ACQUISITIONS_PER_TENANT_MAX", 2)
    await acquire(client, one := new_acquisition_id())
    assert await release(client, one)
    for _ in range(4):
        assert not await release(client, new_acquisition_id())
    with pytest.raises(LockLostError, match="it was released"):
        await acquire(client, one)


@pytest.mark.parametrize("is_held", [False, True], ids=["free", "held by another client"])
async def test_a_request_that_its_release_has_overtaken_does_not_acquire_the_lock(
    clock: FakeClock, client: Client, is_held: bool
) -> None:
    other, late = new_acquisition_id(), new_acquisition_id()
    if is_held:
        await acquire(client, other)
    assert not await release(client, late)
    for wait_s in (0.0, 5.0):
        with pytest.raises(LockLostError, match="it was released before its request arrived"):
            await acquire(client, late, wait_s=wait_s)
    if is_held:
        assert await release(client, other)
    assert (await acquire(client, new_acquisition_id())).fencing_token


async def test_a_lock_that_was_released_before_it_was_requested_is_refused_for_a_limited_time(
    clock: FakeClock, client: Client
) -> None:
    late = new_acquisition_id()
    assert not await release(client, late)
    await clock.advance(ended_acquisitions.ENDED_ACQUISITIONS_KEPT_S)
    assert (await acquire(client, late)).fencing_token


def test_the_oldest_ended_acquisitions_of_a_tenant_and_the_tenant_with_the_oldest_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ended_acquisitions, "ENDED_ACQUISITIONS_PER_TENANT_MAX", 2)
    monkeypatch.setattr(ended_acquisitions, "TENANTS_MAX", 2)
    ended = ended_acquisitions.EndedAcquisitions()
    for acquisition_id in ("a1", "a2", "a3"):
        ended.add("red", "l", acquisition_id, "released", now_s=0.0)
    find_reason = partial(ended.find_reason, now_s=7199.0)
    assert [find_reason("red", "l", name) for name in ("a1", "a2", "a3")] == [None, "released", "released"]
    ended.add("blue", "l", "b1", "released", now_s=0.0)
    ended.add("red", "l", "a4", "released", now_s=0.0)
    ended.add("green", "l", "c1", "released", now_s=1.0)
    assert find_reason("blue", "l", "b1") is None
    assert find_reason("red", "l", "a4") == find_reason("green", "l", "c1") == "released"
    assert ended.find_reason("red", "l", "a4", now_s=7200.0) is None


async def test_an_owner_breaks_a_lock_and_its_holder_learns_why(client: Client) -> None:
    one = new_acquisition_id()
    first = await acquire(client, one)
    broken = await client.ask(BreakLock(tenant="default", name="l"))
    assert (broken.holder, broken.fencing_token) == (f"holder-of-{one}", first.fencing_token)
    assert "genie lock release --force" in await renew(client, one, first.fencing_token)
    assert (await acquire(client, new_acquisition_id())).fencing_token > first.fencing_token
    await client.ask(BreakLock(tenant="default", name="l"))
    with pytest.raises(LockNotFoundError, match="'l' of tenant default is not held"):
        await client.ask(BreakLock(tenant="default", name="l"))


async def test_the_number_of_locks_is_limited(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_table, "LOCKS_PER_TENANT_MAX", 2)
    for name in ("a", "b"):
        await acquire(client, new_acquisition_id(), name=name)
    with pytest.raises(LockLimitError, match="tenant default holds 2 locks"):
        await acquire(client, new_acquisition_id(), name="c")
    monkeypatch.setattr(lock_table, "LOCKS_PER_TENANT_MAX", 3)
    monkeypatch.setattr(lock_table, "LOCKS_MAX", 2)
    with pytest.raises(LockLimitError, match="2 locks are held in the cluster"):
        await acquire(client, new_acquisition_id(), name="c")
    assert not (await acquire(client, new_acquisition_id(), name="a")).fencing_token


async def test_the_number_of_waiting_clients_is_limited(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await acquire(client, holder := new_acquisition_id())
    monkeypatch.setattr(waiters, "WAITERS_PER_LOCK_MAX", 1)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(acquire(client, new_acquisition_id(), wait_s=5.0))
        await until(lambda: _has_waiting(client, 1))
        with pytest.raises(LockLimitError, match="1 clients wait for lock 'l'"):
            await acquire(client, new_acquisition_id(), wait_s=5.0)
        monkeypatch.setattr(waiters, "WAITERS_PER_LOCK_MAX", 2)
        monkeypatch.setattr(waiters, "WAITERS_PER_TENANT_MAX", 1)
        with pytest.raises(LockLimitError, match="of tenant default wait"):
            await acquire(client, new_acquisition_id(), wait_s=5.0)
        await release(client, holder)
        await waiting


async def test_invalid_requests_are_rejected(client: Client) -> None:
    with pytest.raises(NameInvalidError, match="lock name"):
        await acquire(client, new_acquisition_id(), name="a/b")
    with pytest.raises(NameInvalidError, match="acquisition ID"):
        await acquire(client, "")
    for ttl_s in (0.0, 0.5, 3601.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=r"ttl_s .* is not allowed"):
            await acquire(client, new_acquisition_id(), ttl_s=ttl_s)
    with pytest.raises(UsageError, match="holder has 201 characters"):
        await client.ask(AcquireLock(name="l", acquisition_id="a", holder="x" * 201, ttl_s=TTL_S))


async def test_an_unreadable_record_blocks_only_its_lock_until_an_owner_deletes_it(
    controller: RunningController,
) -> None:
    await controller.stop()
    await controller.store.commit([], [Put("lock/default/l", b"{")])
    await controller.start()
    async with controller.client() as client:
        with pytest.raises(LockError, match="cannot be read") as caught:
            await acquire(client, new_acquisition_id())
        assert "genie lock release l --force" in caught.value.hint
        assert (await acquire(client, new_acquisition_id(), name="other")).fencing_token
        assert (await client.ask(BreakLock(tenant="default", name="l"))).holder == ""
        assert (await acquire(client, new_acquisition_id())).fencing_token


async def test_a_record_of_a_newer_release_stays_until_that_release_leads(
    controller: RunningController, clock: FakeClock
) -> None:
    holder = new_acquisition_id()
    async with controller.client() as client:
        token = (await acquire(client, holder)).fencing_token
        stored = await controller.store.get("lock/default/l")
        assert stored is not None
    await controller.stop()
    newer = stored.value.replace(b"{", b'{"shared": true, ', 1)
    await controller.store.commit([], [Put("lock/default/l", newer)])
    await controller.start()
    async with controller.client() as client:
        await clock.advance(10 * TTL_S)
        for request in (
            acquire(client, new_acquisition_id()),
            renew(client, holder, token),
            release(client, holder),
        ):
            with pytest.raises(LockError, match=r"newer release of Genie: .* does not know shared"):
                await request
        unchanged = await controller.store.get("lock/default/l")
        assert unchanged is not None
        assert unchanged.value == newer
    await controller.stop()
    await controller.store.commit([], [Put("lock/default/l", stored.value)])  # as the newer release reads it
    await controller.start()
    async with controller.client() as client:
        assert await renew(client, holder, token) == ""


async def test_an_owner_deletes_the_record_of_a_newer_release(controller: RunningController) -> None:
    async with controller.client() as client:
        await acquire(client, new_acquisition_id())
        stored = await controller.store.get("lock/default/l")
        assert stored is not None
    await controller.stop()
    await controller.store.commit(
        [], [Put("lock/default/l", stored.value.replace(b"{", b'{"shared": true, ', 1))]
    )
    await controller.start()
    async with controller.client() as client:
        assert (await client.ask(BreakLock(tenant="default", name="l"))).holder == ""
        assert (await acquire(client, new_acquisition_id())).fencing_token
