"""Waiting for a change: woken by the ring or by the clock, and nothing stays behind."""

from __future__ import annotations

import asyncio

from genie.controller.waiting import Bell
from tests.fakes.clock import FakeClock


async def test_a_wait_ends_when_the_condition_does_and_not_at_any_ring() -> None:
    clock = FakeClock()
    bell, holds = Bell(clock), True
    async with asyncio.TaskGroup() as group:
        waits = [
            group.create_task(bell.wait_while("a", lambda: holds, timeout_s=60)),
            group.create_task(bell.wait_while("a", lambda: holds, timeout_s=60)),
            group.create_task(bell.wait_while("b", lambda: holds, timeout_s=60)),
        ]
        await clock.advance(0)
        bell.ring("a")
        await clock.advance(0)
        assert not any(task.done() for task in waits)
        holds = False
        bell.ring("a")
        await clock.advance(0)
        assert [task.done() for task in waits] == [True, True, False], "only those for that key"
        bell.ring_all()
        await clock.advance(0)
        assert waits[2].done()
    assert not bell._waiting


async def test_a_wait_ends_when_its_time_is_over_however_often_it_rings() -> None:
    clock = FakeClock()
    bell = Bell(clock)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bell.wait_while("a", lambda: True, timeout_s=3.0))
        await clock.advance(0)
        for _ in range(2):
            await clock.advance(1.0)
            bell.ring("a")
            assert not task.done()
        await clock.advance(1.0)
        assert task.done()
    assert not bell._waiting


async def test_a_wait_that_is_given_up_leaves_nothing() -> None:
    clock = FakeClock()
    bell = Bell(clock)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bell.wait_while("a", lambda: True, timeout_s=3.0))
        await clock.advance(1.0)
        task.cancel()
    assert not bell._waiting
    await clock.advance(5.0)
