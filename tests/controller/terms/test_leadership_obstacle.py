"""A row that cannot be read, and without which nothing can be decided: no controller leads, jobs go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from genie.controller.election import LEADER_KEY
from genie.controller.store import Delete, Put
from genie.errors import GenieError, NotLeaderError
from genie.model.job import JobState
from genie.model.tenant import TokenKind
from genie.runtime.credentials import connect_authenticated
from genie.sim.store import MemoryStore
from genie.tenancy.access import parse_token
from tests.controller.running_controller import job_spec, running_controller
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

EPOCH = "counter/epoch"


@pytest.mark.parametrize(
    ("prefix", "value"),
    [(EPOCH, b"{"), (EPOCH, b'{"value": 3, "stride": 2}'), ("cluster", b"{"), ("token/", b"{")],
    ids=["counter", "counter of a newer release", "record of the cluster", "token"],
)
async def test_unreadable_required_row_stops_decisions_but_no_job_until_it_is_corrected(
    tmp_path: Path, prefix: str, value: bytes
) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    elections = 0

    def count_elections(operations: Sequence[Put | Delete]) -> None:
        nonlocal elections
        elections += any(each.key == LEADER_KEY and isinstance(each, Put) for each in operations)

    async with running_controller(tmp_path, clock=clock, store=store) as one:
        access = await one.join("n1")
        agent = FakeAgent(make_node_info("n1"))
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            job = await owner.submit_spec(job_spec(gpus=1, preemptible=True))
            await agent.start_next()
        unused = parse_token(await one.token(TokenKind.USER)).token_id
        key = prefix + unused if prefix == "token/" else prefix
        before = await store.get(key)
        assert before is not None
        await store.commit([], [Put(key, value)])
        await one.restart()
        store.add_commit_listener(count_elections)
        async with one.client() as owner:
            for _ in range(20):
                await clock.advance(5.0)
            assert elections <= 1, "it does not win elections again and again"
            assert await store.get(LEADER_KEY) is None, "another controller could lead"
            status = await owner.status()
            (alarm,) = status.alarms
            assert alarm.startswith(f"this server cannot lead: store key '{key}'")
            assert ("genie store restore" if value == b"{" else "upgrade this server") in alarm
            assert not status.leading
            assert status.store_ok
            with pytest.raises(NotLeaderError):
                await owner.submit(gpus=1)
        connecting = connect_authenticated(one.network, access, timeout_s=10.0, program="agent")
        async with connecting as (_, welcome):
            assert not welcome.leading, "so restartable jobs go on"
        await store.commit([], [Put(key, before.value)])
        assert one.controller is not None
        await clock.advance(5.0)
        await until(lambda: one.controller is not None and one.controller.is_leading)
        async with one.client() as owner, agent.connected(one.network, access):
            await agent.register()
            await agent.beat()
            assert (await owner.job(job.job_id)).state is JobState.RUNNING
            assert (await owner.status()).alarms == ()
            second = await owner.submit(gpus=1)
            assert second.state is JobState.QUEUED


async def test_leader_that_cannot_read_its_tables_again_steps_down(tmp_path: Path) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with running_controller(tmp_path, clock=clock, store=store) as one, one.client() as owner:
        await owner.submit()
        await store.commit([], [Put("counter/sequence", b"{")])
        with pytest.raises(NotLeaderError):
            await owner.submit()  # the store has newer data: the tables are read again
        with pytest.raises(GenieError, match=r"cannot be read|does not lead"):
            await owner.submit()
        assert one.controller is not None
        await until(lambda: one.controller is not None and not one.controller.is_leading)
        await clock.advance(5.0)

        async def alarms() -> tuple[str, ...]:
            return (await owner.status()).alarms

        await until(alarms)
        assert "store key 'counter/sequence' cannot be read" in (await alarms())[0]


async def test_unreadable_leader_key_is_an_alarm_and_logged_once_until_it_is_corrected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    store = await MemoryStore.open(clock=clock)
    async with running_controller(tmp_path, clock=clock, store=store) as one:
        before = await store.get(LEADER_KEY)
        assert before is not None
        await store.commit([], [Put(LEADER_KEY, b"{")])
        await one.restart()
        async with one.client() as owner:
            for _ in range(20):
                await clock.advance(5.0)
                status = await owner.status()
                (alarm,) = status.alarms
                assert alarm.startswith("this server cannot lead: store key 'leader' cannot be read")
                assert status.store_ok
            messages = [record.getMessage() for record in caplog.records]
            assert len([text for text in messages if "'leader' cannot be read" in text]) == 1
            await store.commit([], [Put(LEADER_KEY, before.value)])
            await clock.advance(5.0)
            await until(lambda: one.controller is not None and one.controller.is_leading)
            assert (await owner.status()).alarms == ()
