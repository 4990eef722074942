"""The contract of every engine: keys, ranges, transactions, limits."""

from __future__ import annotations

import asyncio

import pytest

from genie.controller.store import Compare, Delete, KeyValue, MeasurableStore, Put, Store
from genie.controller.store.protocol import KEY_BYTES_MAX, TXN_BYTES_MAX, TXN_OPS_MAX, VALUE_BYTES_MAX
from genie.errors import LeaseLostError, StoreUnavailableError, UsageError
from tests.controller.store.conftest import ContractStore
from tests.waiting import until


async def put(store: Store, key: str, value: bytes = b"") -> int:
    return (await store.commit([], [Put(key, value)])).revision


async def keys_under(store: Store, prefix: str) -> list[str]:
    return [item.key for item in (await store.range(prefix)).items]


async def test_get_returns_a_put_key_with_its_revisions(store: ContractStore) -> None:
    revision = await put(store, "a", b"one")
    assert await store.get("a") == KeyValue("a", b"one", revision, revision)


async def test_get_returns_none_for_a_missing_key(store: ContractStore) -> None:
    assert await store.get("nothing") is None


async def test_overwriting_changes_only_the_mod_revision(
    store: ContractStore,
) -> None:
    created = await put(store, "a", b"one")
    rewritten = await put(store, "a", b"two")
    assert rewritten > created
    assert await store.get("a") == KeyValue("a", b"two", created, rewritten)


async def test_recreated_key_has_a_new_create_revision(store: ContractStore) -> None:
    first = await put(store, "a")
    await store.commit([], [Delete("a")])
    assert await store.get("a") is None
    again = await put(store, "a")
    item = await store.get("a")
    assert item is not None
    assert item.create_revision == again > first


async def test_deleting_a_missing_key_succeeds_and_changes_nothing(store: ContractStore) -> None:
    before = await put(store, "a")
    result = await store.commit([], [Delete("b")])
    assert (result.succeeded, result.revision) == (True, before)


async def test_empty_transaction_returns_the_current_revision(store: ContractStore) -> None:
    before = await put(store, "a")
    result = await store.commit([], [])
    assert (result.succeeded, result.revision) == (True, before)


@pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256))])
async def test_values_are_arbitrary_bytes(store: ContractStore, value: bytes) -> None:
    await put(store, "a", value)
    item = await store.get("a")
    assert item is not None
    assert item.value == value


async def test_range_returns_exactly_the_keys_under_the_prefix(store: ContractStore) -> None:
    for key in ["a", "a/", "a/1", "a/2", "a0", "b", "a/\u00ff", "a/\U0001f600", "a/\0"]:
        await put(store, key)
    assert await keys_under(store, "a/") == ["a/", "a/\0", "a/1", "a/2", "a/\u00ff", "a/\U0001f600"]
    assert len(await keys_under(store, "")) == 9
    assert await keys_under(store, "c") == []


async def test_keys_are_ordered_by_their_utf8_bytes(store: ContractStore) -> None:
    keys = ["\uffff", "\U00010000", "z", "a\0b", "a", "ab", "\u00e9", "A"]
    for key in keys:
        await put(store, key)
    assert await keys_under(store, "") == sorted(keys, key=str.encode)


async def test_range_is_truncated_at_the_limit_and_continues_after_the_last_key(store: ContractStore) -> None:
    for name in "abcde":
        await put(store, f"k/{name}")
    first = await store.range("k/", limit=2)
    assert ([item.key for item in first.items], first.more) == (["k/a", "k/b"], True)
    rest = await store.range("k/", start_after="k/b", limit=3)
    assert ([item.key for item in rest.items], rest.more) == (["k/c", "k/d", "k/e"], False)
    assert (await store.range("k/", start_after="k/e")).items == ()
    everything = await store.range("k/", start_after="a")
    assert len(everything.items) == 5


async def test_range_returns_the_revision_it_was_read_at(store: ContractStore) -> None:
    revision = await put(store, "a")
    assert (await store.range("a")).revision == revision


async def test_range_returns_five_thousand_keys_in_order(store: ContractStore) -> None:
    names = [f"large/{number:05}" for number in range(5000)]
    for start in range(0, len(names), TXN_OPS_MAX):
        await store.commit([], [Put(name, name.encode() * 4) for name in names[start : start + TXN_OPS_MAX]])
    at_once = await store.range("large/", limit=10_000)
    assert [item.key for item in at_once.items] == names
    assert all(item.value == item.key.encode() * 4 for item in at_once.items)
    assert not at_once.more
    paged: list[str] = []
    page = await store.range("large/", limit=700)
    paged += [item.key for item in page.items]
    while page.more:
        page = await store.range("large/", start_after=paged[-1], limit=700)
        paged += [item.key for item in page.items]
    assert paged == names


async def test_range_is_truncated_at_the_byte_limit(
    store: ContractStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("genie.controller.store.sqlite_file", "genie.controller.store.etcd", "genie.sim.store"):
        monkeypatch.setattr(f"{module}.RANGE_BYTES_MAX", 250)
    for name in "abcde":
        await put(store, f"k/{name}", b"x" * 100)
    cut = await store.range("k/")
    assert ([item.key for item in cut.items], cut.more) == (["k/a", "k/b", "k/c"], True)
    rest = await store.range("k/", start_after="k/c")
    assert ([item.key for item in rest.items], rest.more) == (["k/d", "k/e"], False)


async def test_transaction_gives_all_its_keys_the_same_revision(store: ContractStore) -> None:
    result = await store.commit([], [Put("a", b"1"), Put("b", b"2")])
    items = (await store.range("")).items
    assert [item.mod_revision for item in items] == [result.revision, result.revision]


async def test_transaction_is_applied_only_if_all_compares_succeed(store: ContractStore) -> None:
    created = await put(store, "a", b"one")
    rewritten = await put(store, "a", b"two")
    good = [
        Compare("a", rewritten),
        Compare("a", created, "create"),
        Compare("b", 0),
        Compare("b", 0, "create"),
    ]
    for wrong in (Compare("a", created), Compare("a", rewritten, "create"), Compare("a", 0), Compare("b", 1)):
        refused = await store.commit([*good, wrong], [Put("a", b"three"), Put("c", b"")])
        assert (refused.succeeded, refused.revision) == (False, rewritten)
    assert await store.get("a") == KeyValue("a", b"two", created, rewritten)
    assert await store.get("c") is None
    done = await store.commit(good, [Put("c", b""), Delete("a")])
    assert done.succeeded
    assert await keys_under(store, "") == ["c"]


async def test_exactly_one_of_many_concurrent_creators_succeeds(store: ContractStore) -> None:
    results = await asyncio.gather(
        *(store.commit([Compare("leader", 0)], [Put("leader", b"%d" % number)]) for number in range(20))
    )
    winners = [number for number, result in enumerate(results) if result.succeeded]
    assert len(winners) == 1
    item = await store.get("leader")
    assert item is not None
    assert item.value == b"%d" % winners[0]
    assert item.create_revision == results[winners[0]].revision


async def test_concurrent_compare_and_swap_increments_are_all_counted(store: ContractStore) -> None:
    await put(store, "count", b"0")

    async def increment() -> None:
        for _ in range(5):
            while True:
                item = await store.get("count")
                assert item is not None
                value = b"%d" % (int(item.value) + 1)
                if (
                    await store.commit([Compare("count", item.mod_revision)], [Put("count", value)])
                ).succeeded:
                    break

    await asyncio.gather(*(increment() for _ in range(6)))
    item = await store.get("count")
    assert item is not None
    assert item.value == b"30"


async def test_transaction_with_an_expired_lease_changes_nothing(store: ContractStore) -> None:
    before = await put(store, "z")
    with pytest.raises(LeaseLostError):
        await store.commit([], [Put("a", b""), Delete("z"), Put("b", b"", lease_id=987654321)])
    assert await keys_under(store, "") == ["z"]
    assert (await store.range("")).revision == before


async def test_failed_compare_takes_precedence_over_an_expired_lease(store: ContractStore) -> None:
    result = await store.commit([Compare("a", 5)], [Put("b", b"", lease_id=987654321)])
    assert not result.succeeded


@pytest.mark.parametrize(
    "operations",
    [
        [Put("", b"")],
        [Put("k" * (KEY_BYTES_MAX + 1), b"")],
        [Put("\u00e9" * (KEY_BYTES_MAX // 2 + 1), b"")],
        [Put("\ud800", b"")],
        [Put("a", b"x" * (VALUE_BYTES_MAX + 1))],
        [Put("a", b"", lease_id=-1)],
        [Put("a", b""), Delete("a")],
        [Put("a", b"x" * VALUE_BYTES_MAX), Put("b", b"x" * (TXN_BYTES_MAX - VALUE_BYTES_MAX))],
    ],
    ids=["empty", "long", "long-utf8", "surrogate", "value", "lease", "twice", "bytes"],
)
async def test_operations_over_a_limit_raise_usage_error(
    store: ContractStore, operations: list[Put | Delete]
) -> None:
    with pytest.raises(UsageError):
        await store.commit([], operations)
    assert await keys_under(store, "") == []


@pytest.mark.parametrize("compares", [[Compare("", 0)], [Compare("a", -1)]])
async def test_compares_over_a_limit_raise_usage_error(store: ContractStore, compares: list[Compare]) -> None:
    with pytest.raises(UsageError):
        await store.commit(compares, [Put("b", b"")])


async def test_transaction_length_is_limited_by_txn_ops_max(store: ContractStore) -> None:
    most = store.txn_ops_max
    assert most >= TXN_OPS_MAX
    puts = [Put(f"{number:05}", b"") for number in range(most + 1)]
    absent = [Compare(put.key, 0) for put in puts]
    with pytest.raises(UsageError):
        await store.commit([], puts)
    with pytest.raises(UsageError):
        await store.commit(absent, [])
    assert await keys_under(store, "") == []
    done = await store.commit(absent[:most], puts[:most])
    assert done.succeeded
    assert len((await store.range("", limit=10_000)).items) == most
    assert not (await store.commit(absent[most - 1 :], puts[most:])).succeeded
    stand = [Compare(put.key, done.revision) for put in puts[:most]]
    assert (await store.commit(stand, [Delete(put.key) for put in puts[:most]])).succeeded
    assert await keys_under(store, "") == []


async def test_other_arguments_out_of_bounds_raise_usage_error(store: ContractStore) -> None:
    for limit in (0, -1, 10_001):
        with pytest.raises(UsageError):
            await store.range("a", limit=limit)
    for ttl_s in (0.0, -1.0, float("nan"), float("inf"), 86_401.0):
        with pytest.raises(UsageError):
            await store.grant_lease(ttl_s)
    with pytest.raises(UsageError):
        await store.get("")
    with pytest.raises(UsageError):
        async with store.watch("", after_revision=-1):
            pass


async def test_values_at_the_limits_are_accepted(store: ContractStore) -> None:
    names = [f"{number:0{KEY_BYTES_MAX}}" for number in range(TXN_OPS_MAX)]
    await store.commit([Compare(name, 0) for name in names], [Put(name, b"") for name in names])
    assert await keys_under(store, "") == names
    rest_bytes = TXN_BYTES_MAX - VALUE_BYTES_MAX - 2
    await store.commit([], [Put("a", b"x" * VALUE_BYTES_MAX), Put("b", b"y" * rest_bytes)])
    item = await store.get("a")
    assert item is not None
    assert len(item.value) == VALUE_BYTES_MAX


async def test_closed_store_rejects_calls_and_close_is_idempotent(store: ContractStore) -> None:
    lease_id = await store.grant_lease(60)
    await store.close()
    await store.close()
    for call in (
        store.get("a"),
        store.range("a"),
        store.commit([], [Put("a", b"")]),
        store.grant_lease(5),
        store.keep_alive(lease_id),
        store.revoke_lease(lease_id),
    ):
        with pytest.raises(StoreUnavailableError):
            await call


async def test_space_grows_with_values_and_names_its_maximum(store: ContractStore) -> None:
    assert isinstance(store, MeasurableStore)
    before = await store.measure_space()
    assert 0 <= before.used_bytes < before.bytes_max
    for index in range(8):
        result = await store.commit([], [Put(f"large/{index}", b"x" * 500_000)])

    async def has_grown() -> bool:
        return (await store.measure_space()).used_bytes >= before.used_bytes + 4_000_000

    await until(has_grown, what="etcd measures after a batch of changes")
    after = await store.measure_space()
    assert (after.bytes_max, after.revision >= result.revision) == (before.bytes_max, True)
    await store.compact(after.revision)
