"""A row that cannot be read, and without which nothing can be decided: no controller leads, jobs go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from genie.controller.election import LEADER_KEY
from genie.controller.store import Delete, Put
from genie.errors import GenieError, NotLeaderError
from genie.model.job import JobState
from genie.runtime.credentials import connect_authenticated
from genie.sim.store import MemoryStore
from tests.controller.running_controller import job_spec, running_controller
from tests.fakes.agent import FakeAgent, make_node_info
from tests.fakes.clock import FakeClock
from tests.waiting import until

EPOCH = "counter/epoch"


@pytest.mark.parametrize("value", [b"{", b'{"value": 3, "stride": 2}'], ids=["damaged", "of a newer release"])
async def test_unreadable_counter_stops_decisions_but_no_job_until_it_is_corrected(
    tmp_path: Path, value: bytes
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
        before = await store.get(EPOCH)
        assert before is not None
        await store.commit([], [Put(EPOCH, value)])
        await one.restart()
        store.add_commit_listener(count_elections)
        async with one.client() as owner:
            for _ in range(20):
                await clock.advance(5.0)
            assert elections <= 1, "it does not win elections again and again"
            assert await store.get(LEADER_KEY) is None, "another controller could lead"
            status = await owner.status()
            (alarm,) = status.alarms
            assert alarm.startswith(f"this server cannot lead: store key '{EPOCH}'")
            assert ("genie store restore" if value == b"{" else "upgrade this server") in alarm
            assert not status.leading
            assert status.store_ok
            with pytest.raises(NotLeaderError):
                await owner.submit(gpus=1)
        async with connect_authenticated(one.network, access, timeout_s=10.0, program="agent") as (
            _,
            welcome,
        ):
            assert not welcome.leading, "so restartable jobs go on"
        await store.commit([], [Put(EPOCH, before.value)])
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
