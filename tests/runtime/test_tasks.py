"""What a server sets for the whole process, and work side by side."""

from __future__ import annotations

import asyncio
import gc

import pytest

from genie.errors import ProtocolError
from genie.runtime.tasks import all_of, either, paused, tune_for_serving


def test_a_server_collects_seldom() -> None:
    threshold = gc.get_threshold()
    try:
        tune_for_serving()
        assert gc.get_threshold()[0] > threshold[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


async def test_a_failure_cancels_what_goes_on_beside_it_and_is_raised_as_it_is() -> None:
    ended: list[str] = []

    async def patient() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("patient")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ProtocolError("no")

    with pytest.raises(ProtocolError, match="no"):
        await all_of([patient(), fails()])
    assert ended == ["patient"]


async def test_results_come_in_the_order_of_the_work() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await all_of(map(after, (5, 0, 2))) == [5, 0, 2]
    assert await all_of([]) == []


async def test_a_paused_limit_is_none_and_has_its_time_again_afterwards() -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60) as limit:
        first = limit.when()
        with paused(limit):
            await asyncio.sleep(0)
            assert limit.when() is None
        later = limit.when()
    assert first is not None
    assert later is not None
    assert first <= later <= loop.time() + 60


async def test_of_two_the_one_that_is_over_later_is_cancelled() -> None:
    ended: list[str] = []

    async def patient(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def quick() -> None:
        await asyncio.sleep(0)

    async def fails() -> None:
        raise ProtocolError("no")

    await either(patient("first"), quick())
    await either(quick(), patient("second"))
    with pytest.raises(ProtocolError, match="no"):
        await either(fails(), patient("third"))
    assert ended == ["first", "second", "third"]


async def test_whoever_waits_for_either_can_be_cancelled() -> None:
    waiting = asyncio.create_task(either(asyncio.Event().wait(), asyncio.Event().wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
