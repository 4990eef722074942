"""What a server sets for the whole process, and work side by side."""

from __future__ import annotations

import asyncio
import gc

import pytest

from genie.errors import ProtocolError
from genie.runtime.tasks import all_of, paused, tune_for_serving


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
