"""Waiting for a change: ended by a notification or the timeout, without leaks."""

from __future__ import annotations

import asyncio

from genie.controller.change_notifier import ChangeNotifier
from tests.fakes.clock import FakeClock


async def test_wait_ends_when_its_condition_is_false() -> None:
    clock = FakeClock()
    notifier, holds = ChangeNotifier(clock), True
    async with asyncio.TaskGroup() as group:
        waits = [
            group.create_task(notifier.wait_while("a", lambda: holds, timeout_s=60)),
            group.create_task(notifier.wait_while("a", lambda: holds, timeout_s=60)),
            group.create_task(notifier.wait_while("b", lambda: holds, timeout_s=60)),
        ]
        await clock.advance(0)
        notifier.notify("a")
        await clock.advance(0)
        assert not any(task.done() for task in waits)
        holds = False
        notifier.notify("a")
        await clock.advance(0)
        assert [task.done() for task in waits] == [True, True, False], "only those for that key"
        notifier.notify_all()
        await clock.advance(0)
        assert waits[2].done()
    assert not notifier._waiters


async def test_wait_ends_at_its_timeout_despite_notifications() -> None:
    clock = FakeClock()
    notifier = ChangeNotifier(clock)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(notifier.wait_while("a", lambda: True, timeout_s=3.0))
        await clock.advance(0)
        for _ in range(2):
            await clock.advance(1.0)
            notifier.notify("a")
            assert not task.done()
        await clock.advance(1.0)
        assert task.done()
    assert not notifier._waiters


async def test_cancelled_wait_leaves_no_waiter() -> None:
    clock = FakeClock()
    notifier = ChangeNotifier(clock)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(notifier.wait_while("a", lambda: True, timeout_s=3.0))
        await clock.advance(1.0)
        task.cancel()
    assert not notifier._waiters
    await clock.advance(5.0)
