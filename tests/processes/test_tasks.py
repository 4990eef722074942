"""Garbage collection of a server, task groups, paused timeouts."""

from __future__ import annotations

import asyncio
import gc

import pytest

from genie.errors import ProtocolError
from genie.processes.tasks import (
    first_error,
    pause_timeout,
    reduce_garbage_collection,
    run_all_concurrently,
    unwrapped_task_group,
    wait_first_completed,
)


def test_tune_for_serving_raises_the_gc_threshold() -> None:
    threshold = gc.get_threshold()
    try:
        reduce_garbage_collection()
        assert gc.get_threshold()[0] > threshold[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


async def test_all_of_cancels_the_rest_and_raises_the_first_error() -> None:
    ended: list[str] = []

    async def blocks() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("blocks")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ProtocolError("no")

    with pytest.raises(ProtocolError, match="no"):
        await run_all_concurrently([blocks(), fails()])
    assert ended == ["blocks"]


async def test_all_of_returns_results_in_order() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await run_all_concurrently(map(after, (5, 0, 2))) == [5, 0, 2]
    assert await run_all_concurrently([]) == []


async def test_paused_timeout_continues_with_its_remaining_time() -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60) as limit:
        first = limit.when()
        with pause_timeout(limit):
            await asyncio.sleep(0)
            assert limit.when() is None
        later = limit.when()
    assert first is not None
    assert later is not None
    assert first <= later <= loop.time() + 60


async def test_either_cancels_the_awaitable_that_has_not_finished() -> None:
    ended: list[str] = []

    async def blocks(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def quick() -> None:
        await asyncio.sleep(0)

    async def fails() -> None:
        raise ProtocolError("no")

    await wait_first_completed(blocks("first"), quick())
    await wait_first_completed(quick(), blocks("second"))
    with pytest.raises(ProtocolError, match="no"):
        await wait_first_completed(fails(), blocks("third"))
    assert ended == ["first", "second", "third"]


async def test_call_of_either_can_be_cancelled() -> None:
    waiting = asyncio.create_task(wait_first_completed(asyncio.Event().wait(), asyncio.Event().wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_first_error_descends_into_nested_groups() -> None:
    inner = ValueError("inner")
    group = ExceptionGroup("outer", [ExceptionGroup("middle", [inner, KeyError("x")]), TypeError("y")])
    assert first_error(group) is inner


async def test_unwrapped_task_group_raises_the_error_of_the_block_and_cancels_its_tasks() -> None:
    with pytest.raises(ProtocolError, match="block"):
        async with unwrapped_task_group() as group:
            task = group.create_task(asyncio.Event().wait())
            await asyncio.sleep(0)
            raise ProtocolError("block")
    assert task.cancelled()


async def test_unwrapped_task_group_raises_the_error_of_a_task() -> None:
    async def fails() -> None:
        raise ProtocolError("task")

    with pytest.raises(ProtocolError, match="task"):
        async with unwrapped_task_group() as group:
            group.create_task(fails())
            await asyncio.Event().wait()


async def test_unwrapped_task_group_can_be_cancelled() -> None:
    async def waits() -> None:
        async with unwrapped_task_group() as group:
            group.create_task(asyncio.Event().wait())

    waiting = asyncio.create_task(waits())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_unwrapped_task_group_keeps_the_cause_of_an_error() -> None:
    async def fails() -> None:
        raise ProtocolError("task") from OSError("cause")

    with pytest.raises(ProtocolError, match="task") as of_task:
        async with unwrapped_task_group() as group:
            group.create_task(fails())
    with pytest.raises(ProtocolError, match="block") as of_block:
        async with unwrapped_task_group():
            raise ProtocolError("block") from OSError("cause")
    assert [str(caught.value.__cause__) for caught in (of_task, of_block)] == ["cause", "cause"]
    assert all(caught.value.__suppress_context__ for caught in (of_task, of_block))
