"""The etcd engine only: versions, endpoints, lost responses, interrupted streams, the quota."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from genie.controller.etcd.membership import open_etcd_cluster
from genie.controller.store import Compare, Delete, Put, WatchEvent
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.etcd_address import parse_etcd_url
from genie.controller.store.etcd_errors import check_etcd_version, without_grpc_address
from genie.controller.store.etcd_proto import kv_pb2, rpc_pb2
from genie.errors import (
    CompactedError,
    LeaseLostError,
    OtherStoreClusterError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
    UsageError,
)
from tests.controller.store.etcd_server import EtcdServer
from tests.controller.store.fake_etcd import FakeEtcd, TcpProxy
from tests.ports import free_ports
from tests.waiting import until

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
async def fake_etcd() -> AsyncIterator[FakeEtcd]:
    async with FakeEtcd() as fake:
        yield fake


@pytest.fixture
async def fake_store(fake_etcd: FakeEtcd) -> AsyncIterator[EtcdStore]:
    store = await EtcdStore.open(f"etcd://{fake_etcd.endpoint}")
    yield store
    await store.close()


# --- versions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version", ["3.4.22", "3.4.23", "3.4.40", "3.5.6", "3.5.21", "3.6.0", "3.6.1+git", "4.0.0"]
)
def test_supported_versions_are_accepted(version: str) -> None:
    check_etcd_version(version, endpoint="here:1")


@pytest.mark.parametrize(
    "version",
    ["2.3.8", "3.3.27", "3.4.0", "3.4.21", "3.5.0", "3.5.0-rc.1", "3.5.1", "3.5.5", "", "new", "3.5"],
)
def test_versions_that_lose_data_are_rejected_with_reason_and_hint(version: str) -> None:
    with pytest.raises(StoreVersionError, match=r"here:1.*3\.4\.22 or later of 3\.4, or 3\.5\.6"):
        check_etcd_version(version, endpoint="here:1")


async def test_server_of_an_unsupported_version_is_not_used(fake_etcd: FakeEtcd) -> None:
    fake_etcd.version = "3.5.3"
    with pytest.raises(StoreVersionError, match=r"3\.5\.3.*killed"):
        await EtcdStore.open(f"etcd://{fake_etcd.endpoint}")
    assert fake_etcd.calls == []


async def test_version_of_another_endpoint_is_checked_before_its_first_use(fake_etcd: FakeEtcd) -> None:
    async with FakeEtcd(version="3.4.3") as old:
        store = await EtcdStore.open(f"etcd://{fake_etcd.endpoint},{old.endpoint}")
        fake_etcd.fail["Range"] = [(UNAVAILABLE, "gone")]
        with pytest.raises(StoreVersionError):
            await store.get("a")
        assert old.calls == []
        await store.close()


# --- endpoints --------------------------------------------------------------------------------


async def test_error_names_each_unreachable_endpoint_with_its_reason() -> None:
    one, two = free_ports(2)
    with pytest.raises(StoreUnavailableError, match=rf"127\.0\.0\.1:{one}: .*127\.0\.0\.1:{two}: "):
        await EtcdStore.open(f"etcd://127.0.0.1:{one},127.0.0.1:{two}", timeout_s=0.3)


async def test_unreachable_endpoint_is_skipped(etcd_server: EtcdServer) -> None:
    (dead,) = free_ports(1)
    store = await EtcdStore.open(f"etcd://127.0.0.1:{dead},{etcd_server.endpoint}?namespace=/dead/")
    assert (await store.commit([], [Put("a", b"")])).succeeded
    await store.close()


@pytest.fixture
def other_etcd_server(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "other")
    server.start()
    yield server
    server.stop()


async def test_member_of_another_etcd_cluster_is_not_used(
    etcd_server: EtcdServer, other_etcd_server: EtcdServer
) -> None:
    """As after a restore at the same endpoint while this process runs; gRPC reconnects by itself."""
    namespace = "namespace=/cluster-id/"
    async with TcpProxy(etcd_server.endpoint) as proxy:
        store = await EtcdStore.open(f"etcd://{proxy.endpoint}?{namespace}")
        lease = await store.grant_lease(60)
        async with store.watch("k", after_revision=(await store.range("k")).revision) as events:
            first = await store.commit([], [Put("k", b"first")])
            assert (await anext(events)).revision == first.revision
            await proxy.redirect(other_etcd_server.endpoint)
            for key in ("during", "after"):
                commits = [store.commit([], [Put(f"{key}{n}", b"")], timeout_s=1.0) for n in range(20)]
                alive = store.keep_alive(lease, timeout_s=1.0)
                errors = await asyncio.gather(alive, *commits, return_exceptions=True)
                assert [type(each) for each in errors if not isinstance(each, StoreUnavailableError)] == []
            with pytest.raises(OtherStoreClusterError, match=r"belongs to etcd cluster \w+ instead of"):
                await store.get("k", timeout_s=1.0)
            await proxy.redirect(etcd_server.endpoint)
            found = await store.get("k")
            assert found is not None and found.value == b"first"
            last = await store.commit([], [Put("k", b"last")])
            assert (await anext(events)).revision == last.revision
        await store.close()
    there = await EtcdStore.open(f"{other_etcd_server.url}?{namespace}")
    # One that was sent while the connection was replaced may arrive, and its caller gets an error.
    assert [item.key for item in (await there.range("")).items if not item.key.startswith("during")] == []
    await there.close()


async def test_cluster_id_of_the_address_decides_which_members_are_used(
    etcd_server: EtcdServer, other_etcd_server: EtcdServer
) -> None:
    """Also if the member of the own cluster does not respond when the process starts."""
    own = parse_etcd_url(f"etcd://{etcd_server.endpoint}?namespace=/cluster-id-2/")
    async with open_etcd_cluster(own) as cluster:
        address = replace(own, cluster_id=await cluster.fetch_cluster_id())
    (closed_port,) = free_ports(1)
    lost = replace(address, endpoints=(f"127.0.0.1:{closed_port}", other_etcd_server.endpoint))
    with pytest.raises(StoreUnavailableError, match=r"belongs to etcd cluster .* restart this process"):
        await EtcdStore.open_address(lost, timeout_s=1.0)
    both = replace(address, endpoints=(other_etcd_server.endpoint, etcd_server.endpoint))
    store = await EtcdStore.open_address(both)
    await store.commit([], [Put("k", b"own")])
    await store.close()
    there = await EtcdStore.open_address(replace(both, endpoints=both.endpoints[:1], cluster_id=""))
    assert await there.get("k") is None
    await there.close()


async def test_keys_are_under_the_namespace_and_other_keys_are_hidden(etcd_server: EtcdServer) -> None:
    genie = await EtcdStore.open(etcd_server.url)
    other = await EtcdStore.open(f"{etcd_server.url}?namespace=/genie2/")
    everything = await EtcdStore.open(f"{etcd_server.url}?namespace=/")
    await genie.commit([], [Put("spaced", b"1")])
    await other.commit([], [Put("spaced", b"2")])
    assert [item.value for item in (await genie.range("")).items] == [b"1"]
    under = {item.key: item.value for item in (await everything.range("genie", limit=10)).items}
    assert under == {"genie/spaced": b"1", "genie2/spaced": b"2"}
    for store in (genie, other, everything):
        await store.close()


async def test_calls_and_watches_fail_over_to_another_endpoint(etcd_server: EtcdServer) -> None:
    async with TcpProxy(etcd_server.endpoint) as one, TcpProxy(etcd_server.endpoint) as two:
        store = await EtcdStore.open(f"etcd://{one.endpoint},{two.endpoint}?namespace=/failover/")
        start = (await store.commit([], [Put("k/0", b"")])).revision
        async with store.watch("k/", after_revision=start - 1) as events:
            assert (await anext(events)).key == "k/0"
            waiting = asyncio.ensure_future(anext(events))
            await until(lambda: one.connections == 1)
            await one.cut()
            assert await store.get("k/0") is not None
            for number in range(1, 20):
                await store.commit([], [Put(f"k/{number}", b"")])
            seen = [(await waiting).key] + [(await anext(events)).key for _ in range(18)]
            assert seen == [f"k/{number}" for number in range(1, 20)]
        assert two.connections >= 1
        await store.close()


async def test_unresponsive_endpoint_leaves_time_for_another(fake_etcd: FakeEtcd) -> None:
    fake_etcd.silent = {"Range"}
    async with FakeEtcd() as other:
        store = await EtcdStore.open(f"etcd://{fake_etcd.endpoint},{other.endpoint}")
        assert await store.get("a", timeout_s=4.0) is None
        assert (fake_etcd.calls, other.calls) == (["Range"], ["Range"])
        assert await store.get("b") is None
        assert (fake_etcd.calls, other.calls) == (["Range"], ["Range", "Range"])
        await store.close()


async def test_requests_carry_the_hasleader_metadata(fake_etcd: FakeEtcd, fake_store: EtcdStore) -> None:
    fake_etcd.watches = [[make_watch_response(make_event("a", 2))]]
    await fake_store.get("a")
    await fake_store.commit([], [Put("a", b"")])
    async with fake_store.watch("", after_revision=0) as events:
        await anext(events)
    assert [metadata.get("hasleader") for metadata in fake_etcd.metadata] == ["true"] * 3


# --- ranges of several pages ------------------------------------------------------------------


class ActionBetweenPages:
    """Runs an action once, after the first page of a range."""

    def __init__(self, store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._todo: list[Callable[[], Awaitable[object]]] = []
        monkeypatch.setattr("genie.controller.store.etcd.RANGE_PAGE_KEYS", 2)
        read_page = store._send_range

        async def read_and_do(request: rpc_pb2.RangeRequest, *, timeout_s: float) -> rpc_pb2.RangeResponse:
            page = await read_page(request, timeout_s=timeout_s)
            while self._todo:
                await self._todo.pop()()
            return page

        monkeypatch.setattr(store, "_send_range", read_and_do)

    def do(self, work: Callable[[], Awaitable[object]]) -> None:
        self._todo.append(work)


async def test_all_pages_of_a_range_have_one_revision(etcd_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await EtcdStore.open(etcd_url)
    before = (await store.commit([], [Put(name, b"old") for name in "abcde"])).revision
    ActionBetweenPages(store, monkeypatch).do(lambda: store.commit([], [Put("d", b"new"), Delete("e")]))
    found = await store.range("")
    assert [(item.key, item.value) for item in found.items] == [(name, b"old") for name in "abcde"]
    assert (found.revision, found.more) == (before, False)
    await store.close()


async def test_range_restarts_when_its_revision_is_compacted(
    etcd_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await EtcdStore.open(etcd_url)
    await store.commit([], [Put(name, b"old") for name in "abcde"])

    async def rewrite_and_compact() -> None:
        await store.commit([], [Put("d", b"new")])
        await store.compact((await store.commit([], [Delete("a")])).revision)

    ActionBetweenPages(store, monkeypatch).do(rewrite_and_compact)
    found = await store.range("")
    assert {item.key: item.value for item in found.items} == {
        "b": b"old",
        "c": b"old",
        "d": b"new",
        "e": b"old",
    }
    await store.close()


# --- lost responses ---------------------------------------------------------------------------


async def test_read_is_retried(fake_etcd: FakeEtcd, fake_store: EtcdStore) -> None:
    fake_etcd.fail["Range"] = [(UNAVAILABLE, "gone"), (UNAVAILABLE, "still gone")]
    assert await fake_store.get("a") is None
    assert fake_etcd.calls == ["Range"] * 3


async def test_commit_whose_response_was_lost_is_not_retried(
    fake_etcd: FakeEtcd, fake_store: EtcdStore
) -> None:
    fake_etcd.fail["Txn"] = [(UNAVAILABLE, "the connection broke")]
    with pytest.raises(StoreUnavailableError, match="may have been applied"):
        await fake_store.commit([Compare("a", 0)], [Put("a", b"")])
    assert fake_etcd.calls == ["Txn"]


@pytest.mark.parametrize("code", [UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION])
async def test_commit_rejected_by_a_learner_is_retried(
    code: grpc.StatusCode, fake_etcd: FakeEtcd, fake_store: EtcdStore
) -> None:
    """The status depends on the version of etcd."""
    rejection = (code, "etcdserver: rpc not supported for learner")
    fake_etcd.fail["Txn"] = [rejection]
    assert (await fake_store.commit([], [Put("a", b"")])).succeeded
    fake_etcd.fail["Txn"] = [rejection] * 100
    with pytest.raises(StoreUnavailableError, match="not supported for learner"):
        await fake_store.commit([], [Put("a", b"")], timeout_s=0.2)


async def test_commit_rejected_without_a_leader_is_retried(
    fake_etcd: FakeEtcd, fake_store: EtcdStore
) -> None:
    fake_etcd.fail["Txn"] = [(UNAVAILABLE, "etcdserver: no leader")] * 2
    assert (await fake_store.commit([], [Put("a", b"")])).succeeded
    assert fake_etcd.calls == ["Txn"] * 3


async def test_retries_end_at_the_deadline(fake_etcd: FakeEtcd, fake_store: EtcdStore) -> None:
    fake_etcd.fail["Range"] = [(UNAVAILABLE, "gone")] * 1000
    # The deadline may also expire during an attempt.
    with pytest.raises(StoreUnavailableError, match=r"gone|Deadline Exceeded"):
        await fake_store.get("a", timeout_s=0.5)


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", StoreFullError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests", StoreUnavailableError),
        (grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found", LeaseLostError),
        (
            grpc.StatusCode.OUT_OF_RANGE,
            "etcdserver: mvcc: required revision has been compacted",
            CompactedError,
        ),
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large", UsageError),
        (grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied", StoreError),
        (grpc.StatusCode.DATA_LOSS, "etcdserver: corrupt cluster", StoreCorruptError),
        (grpc.StatusCode.UNIMPLEMENTED, "unknown service", StoreVersionError),
        (grpc.StatusCode.UNKNOWN, "something else", StoreUnavailableError),
    ],
)
async def test_etcd_statuses_are_translated_to_genie_errors(
    fake_etcd: FakeEtcd, fake_store: EtcdStore, code: grpc.StatusCode, text: str, expected: type[StoreError]
) -> None:
    fake_etcd.fail["Txn"] = [(code, text)]
    with pytest.raises(StoreError if expected is not UsageError else UsageError) as caught:
        await fake_store.commit([], [Put("a", b"")])
    assert type(caught.value) is expected


async def test_only_a_write_may_have_been_applied(fake_etcd: FakeEtcd, fake_store: EtcdStore) -> None:
    fake_etcd.fail["Txn"] = [(grpc.StatusCode.UNKNOWN, "something else")]
    fake_etcd.fail["Range"] = [(grpc.StatusCode.UNKNOWN, "something else")]
    with pytest.raises(StoreUnavailableError) as of_write:
        await fake_store.commit([], [Put("a", b"")])
    with pytest.raises(StoreUnavailableError) as of_read:
        await fake_store.get("a")
    assert "may have been applied" in of_write.value.hint
    assert of_read.value.hint == ""


async def test_lost_connection_is_named_instead_of_the_text_of_grpc(
    fake_etcd: FakeEtcd, fake_store: EtcdStore
) -> None:
    fake_etcd.fail["Txn"] = [(grpc.StatusCode.INTERNAL, "Internal error from Core")]
    with pytest.raises(StoreUnavailableError, match="commit failed: the connection was lost"):
        await fake_store.commit([], [Put("a", b"")])


def test_connection_failures_name_each_address_once() -> None:
    grpc_text = "failed to connect to all addresses; last error: UNKNOWN: "
    for address in ("ipv4:127.0.0.1:1", "ipv6:%5B::1%5D:1"):
        text = f"{grpc_text}{address}: Failed to connect to remote host: Connection refused"
        assert without_grpc_address(text) == "Connection refused"
    assert without_grpc_address("etcdserver: no leader") == "etcdserver: no leader"


@pytest.mark.parametrize(("ttl_s", "asked"), [(0.2, 1), (1.0, 1), (1.2, 2), (30.0, 30)])
async def test_lease_ttls_are_rounded_up_to_whole_seconds(
    fake_etcd: FakeEtcd, fake_store: EtcdStore, ttl_s: float, asked: int
) -> None:
    await fake_store.grant_lease(ttl_s)
    assert fake_etcd.requests == [rpc_pb2.LeaseGrantRequest(TTL=asked)]


async def test_close_fails_pending_calls_without_cancelling_their_callers(
    fake_etcd: FakeEtcd, fake_store: EtcdStore
) -> None:
    fake_etcd.silent = {"Range"}
    waiting = asyncio.ensure_future(fake_store.get("a", timeout_s=30))
    await until(lambda: fake_etcd.calls)
    await fake_store.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        await waiting


# --- watches ----------------------------------------------------------------------------------


def make_event(key: str, revision: int) -> kv_pb2.Event:
    return kv_pb2.Event(kv=kv_pb2.KeyValue(key=b"/genie/" + key.encode(), value=b"v", mod_revision=revision))


def make_watch_response(*events: kv_pb2.Event) -> rpc_pb2.WatchResponse:
    return rpc_pb2.WatchResponse(events=events)


async def test_watch_interrupted_within_a_transaction_resumes_there(
    fake_etcd: FakeEtcd, fake_store: EtcdStore
) -> None:
    transaction = [make_event(name, 12) for name in "abcd"]
    fake_etcd.watches = [
        [
            make_watch_response(make_event("old", 10), make_event("w", 11)),
            make_watch_response(*transaction[:1]),
            None,
        ],
        [make_watch_response(*transaction[:3]), None],
        [None],
        [make_watch_response(*transaction), make_watch_response(make_event("x", 13))],
    ]
    async with fake_store.watch("", after_revision=10) as events:
        seen = [await anext(events) for _ in range(6)]
    assert seen == [
        WatchEvent("w", b"v", 11),
        *(WatchEvent(name, b"v", 12) for name in "abcd"),
        WatchEvent("x", b"v", 13),
    ]
    starts = [
        request.create_request.start_revision
        for request in fake_etcd.requests
        if isinstance(request, rpc_pb2.WatchRequest)
    ]
    assert starts == [10, 12, 12, 12]


async def test_watch_after_revision_zero_replays_everything(
    fake_etcd: FakeEtcd, fake_store: EtcdStore
) -> None:
    fake_etcd.watches = [[make_watch_response(make_event("a", 2))]]
    async with fake_store.watch("", after_revision=0) as events:
        assert (await anext(events)).key == "a"
    (request,) = fake_etcd.requests
    assert isinstance(request, rpc_pb2.WatchRequest)
    # For etcd, 0 means "from now on".
    assert request.create_request.start_revision == 1
    assert request.create_request.fragment


async def test_watch_ended_by_the_server_is_resumed(fake_etcd: FakeEtcd, fake_store: EtcdStore) -> None:
    ended = rpc_pb2.WatchResponse(canceled=True, cancel_reason="for the test")
    fake_etcd.watches = [
        [make_watch_response(make_event("a", 6)), ended],
        [make_watch_response(make_event("a", 6), make_event("b", 7))],
    ]
    async with fake_store.watch("", after_revision=5) as events:
        assert [(await anext(events)).key, (await anext(events)).key] == ["a", "b"]


async def test_watch_raises_when_etcd_stays_unreachable(
    fake_etcd: FakeEtcd, fake_store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.controller.store.etcd_watch.WATCH_RECONNECT_S_MAX", 0.2)
    fake_etcd.fail["Watch"] = [(UNAVAILABLE, "etcdserver: no leader")] * 100
    async with fake_store.watch("", after_revision=5) as events:
        with pytest.raises(StoreUnavailableError, match="no leader"):
            await anext(events)


async def test_resumed_watch_raises_compacted_error(etcd_url: str) -> None:
    store = await EtcdStore.open(etcd_url)
    start = (await store.commit([], [Put("a", b"0")])).revision
    async with store.watch("a", after_revision=start - 1) as events:
        await anext(events)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):  # grpc.aio ends the stream of a cancelled reader
                await anext(events)
        for number in range(3):
            last = (await store.commit([], [Put("a", b"%d" % number)])).revision
        await store.compact(last)
        with pytest.raises(CompactedError):
            await anext(events)
    await store.close()


# --- space ------------------------------------------------------------------------------------


async def test_etcd_over_its_quota_raises_store_full_and_stays_readable(tmp_path: Path) -> None:
    # etcd updates its size per batch: with batches of one, after every change.
    quota = ["--quota-backend-bytes", str(4 * 1024 * 1024), "--backend-batch-limit", "1"]
    server = EtcdServer(tmp_path, options=quota)
    server.start()
    store = await EtcdStore.open(server.url)
    try:
        taken = 0
        with pytest.raises(StoreFullError, match="nothing was changed"):
            for taken in range(20):
                values = [Put(f"fill/{taken:02}", b"x" * 1_000_000), Put(f"twin/{taken:02}", b"")]
                await store.commit([], values, timeout_s=30)
        assert len((await store.range("fill/")).items) == taken > 0
        assert len((await store.range("twin/")).items) == taken
        assert (await store.commit([], [Delete("fill/00")])).succeeded
    finally:
        await store.close()
        server.stop()


SPACE = (grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")


def make_key_value(value: bytes, *, revision: int) -> kv_pb2.KeyValue:
    return kv_pb2.KeyValue(key=b"/genie/a", value=value, create_revision=revision, mod_revision=revision)


@pytest.mark.parametrize(
    "found", [[], [make_key_value(b"new", revision=7)], [make_key_value(b"old", revision=7)]]
)
async def test_no_space_without_a_newer_revision_means_nothing_changed(
    fake_etcd: FakeEtcd, fake_store: EtcdStore, found: list[kv_pb2.KeyValue]
) -> None:
    fake_etcd.stored = found
    await fake_store.get("a")
    fake_etcd.fail["Txn"] = [SPACE]
    with pytest.raises(StoreFullError):
        await fake_store.commit([], [Put("a", b"new")])


async def test_commit_that_exceeded_the_quota_and_was_applied_succeeds(
    fake_etcd: FakeEtcd, fake_store: EtcdStore
) -> None:
    await fake_store.get("a")
    fake_etcd.stored = [make_key_value(b"new", revision=8)]
    fake_etcd.fail["Txn"] = [SPACE]
    result = await fake_store.commit([], [Delete("b"), Put("a", b"new")])
    assert (result.succeeded, result.revision) == (True, 8)


async def test_no_space_with_a_concurrent_change_is_ambiguous(
    fake_etcd: FakeEtcd, fake_store: EtcdStore
) -> None:
    await fake_store.get("a")
    fake_etcd.stored = [make_key_value(b"another's", revision=8)]
    fake_etcd.fail["Txn"] = [SPACE]
    with pytest.raises(StoreUnavailableError, match="may have been applied"):
        await fake_store.commit([], [Put("a", b"new")])
