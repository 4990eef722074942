"""A standby campaigns as soon as the leader key is deleted, and otherwise polls it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from genie.controller.election import ControllerAddresses
from genie.controller.standby.ledger_copy import LedgerCopy
from genie.controller.terms.leadership import Leadership
from genie.errors import GenieError, NotLeaderError, StoreUnavailableError
from genie.model.failover import campaign_interval_s
from genie.sim.store import MemoryStore
from tests.controller.running_controller import RunningController, running_controller
from tests.fakes.clock import FakeClock
from tests.waiting import until

STEP_S = 0.01
SPREAD_S = 0.05
NEVER_S = 1e6


@asynccontextmanager
async def leader_and_standby(
    folder: Path, clock: FakeClock
) -> AsyncIterator[tuple[RunningController, RunningController, MemoryStore]]:
    memory = await MemoryStore.open(clock=clock)
    async with (
        running_controller(folder / "1", store=memory.connect(), clock=clock, name="one") as one,
        running_controller(folder / "2", store=memory.connect(), clock=clock, name="two") as two,
    ):
        assert one.controller is not None and one.controller.is_leading
        yield one, two, memory
    await memory.close()


async def advance_until_standby_leads(clock: FakeClock, standby: RunningController) -> float:
    """Return how long it took, on the clock."""
    began_s = clock.monotonic_s()

    async def is_leading() -> bool:
        if standby.controller is not None and standby.controller.is_leading:
            return True
        await clock.advance(STEP_S)
        return False

    await until(is_leading)
    return clock.monotonic_s() - began_s


async def wait_until_standby_watches(standby: RunningController, clock: FakeClock) -> None:
    async def is_watching() -> bool:
        await clock.advance(STEP_S)
        assert standby.controller is not None
        copy = standby.controller._standby_requests._copy
        return copy is not None and copy.is_usable

    await until(is_watching)


async def stop_polls(clock: FakeClock, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("genie.controller.terms.leadership.campaign_interval_s", lambda ttl_s: NEVER_S)
    for _ in range(60):  # the polls that were already waiting
        await clock.advance(STEP_S)


async def test_standby_leads_when_the_leader_key_is_deleted_without_waiting_for_its_next_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    async with leader_and_standby(tmp_path, clock) as (one, two, memory):
        await wait_until_standby_watches(two, clock)
        await stop_polls(clock, monkeypatch)
        await one.store.close()  # as if it was killed: it does not resign
        leader_key = await memory.get("leader")
        assert leader_key is not None
        await memory.revoke_lease(leader_key.lease_id)
        assert await advance_until_standby_leads(clock, two) <= SPREAD_S + 2 * STEP_S


async def test_log_of_a_standby_names_the_leader_and_says_when_it_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = "genie.controller.terms.leadership"
    caplog.set_level("INFO", logger=logger)
    clock = FakeClock()

    def messages() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == logger]

    async with leader_and_standby(tmp_path, clock) as (one, two, _):
        assert one.controller is not None and two.controller is not None
        assert messages()[-1] == f"standby: controller one at {one.controller.address} leads"
        await wait_until_standby_watches(two, clock)
        caplog.clear()
        await stop_polls(clock, monkeypatch)
        assert not messages()  # the polls have found the same leader
        await one.stop()
        await advance_until_standby_leads(clock, two)
        assert messages()[0] == "the leader has resigned or its lease has expired: trying to lead"
        assert messages()[1].startswith("became leader, fencing token ")
        await one.start()
        assert messages()[-1] == f"standby: controller two at {two.controller.address} leads"


async def test_standby_does_not_announce_itself_again_before_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_early = ControllerAddresses.register, []
    clock = FakeClock()
    async with leader_and_standby(tmp_path, clock) as (one, two, _):
        await wait_until_standby_watches(two, clock)
        await stop_polls(clock, monkeypatch)

        async def register(self: ControllerAddresses) -> None:
            is_early.append(two.controller is None or not two.controller.is_leading)
            await real(self)

        monkeypatch.setattr(ControllerAddresses, "register", register)
        await one.stop()
        await advance_until_standby_leads(clock, two)
        assert not any(is_early)
        await one.start()


async def test_standby_whose_watch_is_lost_finds_the_leader_key_deleted_at_its_next_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow_nothing(self: LedgerCopy) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(LedgerCopy, "follow", follow_nothing)
    clock = FakeClock()
    async with leader_and_standby(tmp_path, clock) as (one, two, _):
        assert one.controller is not None
        interval_s = campaign_interval_s(one.config.leader_ttl_s)
        await one.stop()
        assert await advance_until_standby_leads(clock, two) <= interval_s + 2 * STEP_S
        await one.start()


async def test_controllers_that_cannot_begin_a_term_do_not_campaign_in_turn_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0

    async def fail_to_begin(self: Leadership) -> bool:
        nonlocal attempts
        attempts += 1
        return False

    clock, duration_s = FakeClock(), 3.0
    async with leader_and_standby(tmp_path, clock) as (one, two, _):
        await wait_until_standby_watches(two, clock)
        monkeypatch.setattr(Leadership, "_try_begin_term", fail_to_begin)
        assert one.controller is not None
        one.controller._election.step_down("of a test")
        await one.controller._election.resign()
        for _ in range(int(duration_s / STEP_S)):
            await clock.advance(STEP_S)
        assert 2 <= attempts <= 2 * (duration_s / campaign_interval_s(one.config.leader_ttl_s) + 1)


@pytest.mark.parametrize("hanging_call", ["range", "commit"])
async def test_registration_is_rejected_when_the_term_ends_while_the_store_does_not_respond(
    hanging_call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent must be able to distinguish this from its own isolation (decision 0002)."""
    clock, is_called = FakeClock(), asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        is_called.set()
        await asyncio.Event().wait()

    async with leader_and_standby(tmp_path, clock) as (one, _, _memory), one.agent("n1") as agent:
        monkeypatch.setattr(one.store, hanging_call, hang)
        async with asyncio.TaskGroup() as group:
            registration = group.create_task(error_of(agent.register()))
            await is_called.wait()
            assert one.controller is not None
            one.controller._election.step_down("of a test")
            error = await registration
            monkeypatch.undo()
        assert isinstance(error, NotLeaderError | StoreUnavailableError)


async def error_of(call: Coroutine[object, object, object]) -> GenieError:
    with pytest.raises(GenieError) as caught:
        await call
    return caught.value
