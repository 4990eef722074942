"""Servers, agents and rows of another release of Genie: real controllers on a real store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from genie.controller.jobs.lifecycle import LAUNCH_ATTEMPTS_MAX
from genie.controller.ledger import LedgerTable, Transaction
from genie.controller.nodes.releases import SERVER_RELEASE_KEY_PREFIX, ServerRelease, ServerReleases
from genie.controller.rows import Counter
from genie.controller.store import Put, Store
from genie.errors import (
    GenieError,
    NodeError,
    ReleaseSkewError,
    StoreVersionError,
    TokenRefusedError,
    VersionError,
)
from genie.model.job import JobState
from genie.model.messages import (
    CancelJob,
    DrainNode,
    EmptyNode,
    GetJob,
    RemoveNode,
    RevokeToken,
    UndrainNode,
)
from genie.model.messages.handshake import Hello
from genie.model.record import Record
from genie.model.release import OWN_RELEASE, Release, since
from genie.model.tenant import TokenKind
from genie.runtime import rpc
from genie.sim.store import MemoryStore
from genie.tenancy.access import parse_token
from tests.controller.running_controller import RunningController, running_controller
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

CALL_S = 10.0
NEXT = f"{OWN_RELEASE.major}.{OWN_RELEASE.minor + 1}.0"
AFTER_NEXT = f"{OWN_RELEASE.major}.{OWN_RELEASE.minor + 2}.0"
NEXT_MAJOR = f"{OWN_RELEASE.major + 1}.0.0"
PREVIOUS = Release(OWN_RELEASE.major, OWN_RELEASE.minor - 1)


async def change_row(store: Store, key: str, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Change the stored JSON as a newer release would have written it; returns the new value."""
    found = await store.get(key)
    assert found is not None
    fields = json.loads(found.value)
    change(fields)
    value = json.dumps(fields).encode()
    await store.commit([], [Put(key, value)])
    return value


def write_server_release(store: Store, name: str, version: str, *, at: float) -> Any:
    record = ServerRelease(version=version, address=f"{name}:5555", announced_at=at)
    return store.commit([], [Put(SERVER_RELEASE_KEY_PREFIX + name, msgspec.json.encode(record))])


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["field", "state"])
async def test_job_of_a_newer_release_runs_on_and_its_row_is_never_replaced(
    tmp_path: Path, part: str
) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit(gpus=1)
            launch = await agent.start_next()
        user = await one.token(TokenKind.USER, tenant="blue")
        key = f"job/{job.job_id}"
        before = await one.store.get(key)
        assert before is not None

        def add_part(row: dict[str, Any]) -> None:
            if part == "field":
                row["spec"].setdefault("wishes", {})["pods"] = 2
            else:
                row["state"] = "paused"

        value = await change_row(one.store, key, add_part)
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            assert (await agent.beat()).jobs_to_kill == ()
            (row,) = (await owner.status()).quarantined
            assert row.key == key
            assert "was written by a newer release" in row.reason
            assert ("spec.wishes.pods" if part == "field" else "state = 'paused'") in row.reason
            with pytest.raises(ReleaseSkewError, match="newer release"):
                await owner.ask(CancelJob(job_id=job.job_id))
            async with one.client(user) as other_tenant:
                for request in (CancelJob(job_id=job.job_id), GetJob(job_id=job.job_id)):
                    with pytest.raises(ReleaseSkewError, match="newer release") as caught:
                        await other_tenant.ask(request)
                    assert "pods" not in str(caught.value) + caught.value.hint
                    assert "paused" not in str(caught.value) + caught.value.hint
            agent.end(launch)
            for _ in range(4):
                await agent.beat()
            assert list(agent.exits) == [launch.job_id], (
                "the exit is not settled by a leader that cannot store it"
            )
            assert await owner.held("n1") == [job.job_id]
            assert (await owner.submit(gpus=1)).job_id, "other jobs are accepted"
            stored = await one.store.get(key)
            assert stored is not None
            assert stored.value == value
        await one.store.commit([], [Put(key, before.value)])  # as a server of the newer release reads it
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register(*agent.exits.values())
            await agent.beat()
            assert agent.exits == {}
            assert (await owner.job(job.job_id)).state is JobState.SUCCEEDED


@pytest.mark.parametrize("table", ["node", "ledger"])
async def test_node_with_a_row_of_a_newer_release_keeps_its_jobs_and_gets_no_new_ones(
    tmp_path: Path, table: str
) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            await owner.submit(gpus=1)
            await agent.start_next()
        value = await change_row(one.store, f"{table}/n1", lambda row: row.update(warranty="void"))
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            for _ in range(3):
                assert (await agent.beat()).jobs_to_kill == ()
            assert (await owner.submit(gpus=1)).state is JobState.QUEUED
            assert [row.key for row in (await owner.status()).quarantined] == [f"{table}/n1"]
            stored = await one.store.get(f"{table}/n1")
            assert stored is not None
            assert stored.value == value
            for request in (
                DrainNode(node_id="n1"),
                EmptyNode(node_id="n1"),
                UndrainNode(node_id="n1"),
                RemoveNode(node_id="n1"),
            ):
                with pytest.raises(ReleaseSkewError, match=f"'{table}/n1' was written by a newer release"):
                    await owner.ask(request)
            await agent.beat()  # it has not been removed


async def test_node_with_an_unreadable_record_is_removed_with_its_holds_when_it_is_down(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit(gpus=1)
            await agent.start_next()
        await one.store.commit([], [Put("node/n1", b"{")])
        await one.restart()
        async with one.client() as owner:
            with pytest.raises(NodeError, match="its jobs may still run"):
                await owner.ask(RemoveNode(node_id="n1"))
            await clock.advance(30.0)
            await owner.ask(RemoveNode(node_id="n1"))
            assert (await owner.job(job.job_id)).state is JobState.LOST
            for key in ("node/n1", "ledger/n1"):
                assert await one.store.get(key) is None


async def test_node_with_a_token_of_a_newer_release_is_not_removed(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        for node_id in ("n1", "n2"):
            await one.join(node_id)
        (item,) = [
            item
            for item in (await one.store.range("token/")).items
            if json.loads(item.value).get("name") == "n1"
        ]
        value = await change_row(one.store, item.key, lambda row: row.update(only_reads=True))
        await one.restart()
        async with one.client() as owner:
            with pytest.raises(ReleaseSkewError, match=f"{item.key!r} was written by a newer release"):
                await owner.ask(RemoveNode(node_id="n1"))
            with pytest.raises(ReleaseSkewError, match="newer release"):
                await owner.ask(RevokeToken(token_id=item.key.removeprefix("token/")))
            await owner.ask(RemoveNode(node_id="n2"))
        stored = await one.store.get(item.key)
        assert stored is not None
        assert stored.value == value


async def test_job_does_not_end_while_the_allocations_of_its_node_cannot_be_changed(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit(gpus=1)
            launch = await agent.start_next()
        before = await one.store.get("ledger/n1")
        assert before is not None
        value = await change_row(one.store, "ledger/n1", lambda row: row.update(warranty="void"))
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            agent.end(launch)
            for _ in range(4):
                await agent.beat()
            assert list(agent.exits) == [launch.job_id], "the exit stays unsettled"
            assert (await owner.job(job.job_id)).state is JobState.RUNNING
            stored = await one.store.get("ledger/n1")
            assert stored is not None
            assert stored.value == value
        await one.store.commit([], [Put("ledger/n1", before.value)])  # as the newer release reads it
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register(*agent.exits.values())
            await agent.beat()
            assert agent.exits == {}
            assert (await owner.job(job.job_id)).state is JobState.SUCCEEDED
            assert await owner.held("n1") == []


@pytest.mark.parametrize("successor", ["none", "running"])
async def test_hold_of_a_placement_that_is_over_is_released(tmp_path: Path, successor: str) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1", gpus=2))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit(gpus=1)
            launch = await agent.start_next()
            held = await one.store.get("ledger/n1")
            assert held is not None
            if successor == "none":
                agent.end(launch)
                await agent.beat()
            assert (await owner.job(job.job_id)).state.is_final == (successor == "none")

        def add_outdated_hold(row: dict[str, Any]) -> None:
            (hold,) = json.loads(held.value)["holds"]
            if successor != "none":
                hold = {**hold, "epoch": hold["epoch"] - 1, "gpu_ids": [1]}
            row["holds"] = [*row.get("holds", ()), hold]

        await change_row(one.store, "ledger/n1", add_outdated_hold)
        await one.restart()
        current = [] if successor == "none" else [job.job_id]
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            assert await owner.held("n1") == [*current, job.job_id]
            for _ in range(4):
                await agent.beat()
            assert await owner.held("n1") == current
            assert (await owner.job(job.job_id)).state.is_final == (successor == "none")


async def test_facts_of_a_newer_release_in_a_node_row_are_ignored(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with agent.connected(one.network, access):
            await agent.register()
        await change_row(
            one.store, "node/n1", lambda row: row["info"].update(orbit="low", status="throttled")
        )
        await one.restart()
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            await owner.submit(gpus=1)
            await agent.start_next()
            assert (await owner.status()).quarantined == ()


async def test_token_of_a_newer_release_is_refused_and_the_others_work(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        restricted, plain = [await one.token(TokenKind.USER, tenant="blue") for _ in range(2)]
        token_id = parse_token(restricted).token_id
        value = await change_row(one.store, f"token/{token_id}", lambda row: row.update(only_reads=True))
        await one.restart()
        with pytest.raises(TokenRefusedError, match=r"newer release of Genie: .* does not know only_reads"):
            async with one.client(restricted):
                pass
        async with one.client(plain) as user:
            assert (await user.status()).quarantined_count == 1
        stored = await one.store.get(f"token/{token_id}")
        assert stored is not None
        assert stored.value == value


async def test_cluster_record_of_a_newer_release_prevents_leading(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        await change_row(one.store, "cluster", lambda row: row.update(fencing="by other means"))
        await one.restart()
        assert one.controller is not None
        assert not one.controller.is_leading


def test_damaged_row_is_not_taken_for_one_of_a_newer_release() -> None:
    table = LedgerTable("counter/", Counter)
    for value in (b'{"value": "x", "more": 1}', b"{", b'{"more": 1}', b"[]"):
        with pytest.raises(GenieError, match="cannot be read"):
            table.decode("a", value)
    with pytest.raises(StoreVersionError, match="does not know more"):
        table.decode("a", b'{"value": 1, "more": 1}')


class _Part(Record, frozen=True, kw_only=True):
    size: int = 0
    shape: Annotated[str, since(NEXT)] = ""


class _Row(Record, frozen=True, kw_only=True):
    name: str
    parts: tuple[_Part, ...] = ()
    pods: Annotated[int | None, since(NEXT)] = None


def test_field_that_not_all_servers_have_is_not_stored() -> None:
    table, counters = LedgerTable("row/", _Row), LedgerTable("counter/", Counter)
    for row, path in (
        (_Row(name="a", pods=1), "pods"),
        (_Row(name="a", parts=(_Part(shape="x"),)), r"parts\[0\].shape"),
    ):
        old = Transaction(counters, cluster_release=OWN_RELEASE)
        with pytest.raises(
            ReleaseSkewError, match=f"cannot store {path}: a server .* runs Genie {OWN_RELEASE}"
        ):
            old.put(table, "a", row)
        old.put(table, "a", _Row(name="a", parts=(_Part(size=1),)))
        new = Transaction(counters, cluster_release=Release(OWN_RELEASE.major, OWN_RELEASE.minor + 1))
        new.put(table, "a", row)
    # A row that has such a field already, from before a server was downgraded, can still be changed.
    table.set_row("b", _Row(name="b", pods=1))
    old.put(table, "b", _Row(name="c", pods=1))


# --- servers ------------------------------------------------------------------------------------


async def test_owner_token_is_read_off_the_event_loop_until_it_is_known() -> None:
    found = ["", "token-1", "token-2"]
    reads: list[str] = []

    async def offload(work: Callable[[], Any], *, writes: bool = False) -> Any:
        reads.append(work())
        return reads[-1]

    store = await MemoryStore.open(clock=FakeClock())
    servers = ServerReleases(
        store,
        name="one",
        clock=FakeClock(),
        set_cluster_release=lambda _release: None,
        get_owner_token_id=lambda: found.pop(0),
        offload=offload,
    )
    for _ in range(3):
        await servers.announce("one:5555")
    assert reads == ["", "token-1"]
    row = await store.get(SERVER_RELEASE_KEY_PREFIX + "one")
    assert row is not None and b"token-1" in row.value
    await store.close()


async def test_release_of_the_cluster_is_the_lowest_of_its_servers_in_both_directions() -> None:
    clock, found = FakeClock(), list[Release]()
    store = await MemoryStore.open(clock=clock)
    servers = ServerReleases(store, name="one", clock=clock, set_cluster_release=found.append)
    await servers.announce("one:5555")
    await servers.refresh()
    assert servers.alarms([]) == []
    await write_server_release(store, "two", str(PREVIOUS), at=clock.wall_s())
    await write_server_release(store, "three", NEXT, at=clock.wall_s())
    await servers.refresh()
    (alarm,) = servers.alarms([])
    assert f"two:5555 ({PREVIOUS})" in alarm
    assert f"three:5555 ({NEXT})" in alarm
    await write_server_release(store, "two", NEXT, at=clock.wall_s())
    await servers.refresh()
    await clock.advance(25 * 3600.0)
    await servers.refresh()
    assert found == [OWN_RELEASE, PREVIOUS, OWN_RELEASE, OWN_RELEASE]
    assert servers.alarms([]) == [], "servers that have not run for a day are ignored"
    await store.close()


@pytest.mark.parametrize("version", [AFTER_NEXT, NEXT_MAJOR])
async def test_server_does_not_lead_beside_servers_that_it_does_not_work_with(
    tmp_path: Path, version: str
) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one:
        await write_server_release(one.store, "two", version, at=clock.wall_s())
        async with one.client() as owner:
            assert (await owner.status()).leading, "a server of the cluster goes on"
        await one.restart()
        assert one.controller is not None
        assert not one.controller.is_leading
        async with one.client() as owner:
            (alarm,) = (await owner.status()).alarms
            assert f"the server at two:5555 runs {version}" in alarm
        await write_server_release(one.store, "two", NEXT, at=clock.wall_s())

        async def leads() -> bool:
            await clock.advance(0.5)
            return one.controller is not None and one.controller.is_leading

        await until(leads)


# --- agents and clients -------------------------------------------------------------------------


async def _say_hello(one: RunningController, version: str) -> None:
    access = await one.access()
    async with rpc.dial(one.network, access.host, access.port, tls=access.tls, timeout_s=CALL_S) as peer:
        await peer.call(Hello(token=str(access.token), version=version, program="agent"), timeout_s=CALL_S)


async def test_peers_one_minor_version_apart_are_accepted_and_others_are_rejected_by_name(
    tmp_path: Path,
) -> None:
    async with running_controller(tmp_path) as one:
        for version in (str(PREVIOUS), f"{OWN_RELEASE}.7", NEXT, f"{NEXT}rc1"):
            await _say_hello(one, version)
        for version, hint in (
            (AFTER_NEXT, "upgrade this controller first, one minor version at a time: the servers"),
            (NEXT_MAJOR, "install the same release"),
        ):
            with pytest.raises(
                VersionError, match=rf"agent at \S+ runs Genie {version}, this controller"
            ) as caught:
                await _say_hello(one, version)
            assert hint in caught.value.hint
        for version in ("", "0", "new"):
            with pytest.raises(VersionError, match="does not say which release"):
                await _say_hello(one, version)


async def test_nodes_of_another_release_are_an_alarm(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        for name, version in (("n1", NEXT), ("n2", f"{OWN_RELEASE}.9")):
            access = await one.join(name)
            agent = FakeAgent(msgspec.structs.replace(make_node_info(name), version=version))
            async with one.client() as owner, agent.connected(one.network, access):
                await agent.register()
                await agent.beat()
                alarms = (await owner.status()).alarms
            if name == "n1":
                (alarm,) = alarms
                assert "1 node runs another release of Genie than this controller" in alarm
                assert f"n1 ({NEXT})" in alarm
            await one.restart()


async def test_job_that_an_agent_of_an_older_release_does_not_understand_is_not_failed(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with running_controller(tmp_path, clock=clock) as one, one.client() as owner, one.agent() as agent:
        agent.refuse = VersionError(
            "the controller sent Launch with spec.wishes.pods, which Genie 0.0 does not know"
        )
        job = await owner.submit(gpus=1)

        async def was_rejected_often() -> bool:
            await clock.advance(2.0)
            await agent.beat()
            history = (await owner.job(job.job_id)).history
            rejections = [step for step in history if "spec.wishes.pods" in step.reason]
            return len(rejections) > LAUNCH_ATTEMPTS_MAX

        await until(was_rejected_often, timeout_s=60)
        assert not (await owner.job(job.job_id)).state.is_final
        agent.refuse = None

        async def is_launched() -> bool:
            await clock.advance(2.0)
            await agent.beat()
            return not agent.launches.empty()

        await until(is_launched, timeout_s=60)
