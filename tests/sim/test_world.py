"""The simulated environment: pauses and freezes of hosts; detection of livelocks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from genie.errors import DeadlineError, GenieError, NothingListensError
from genie.sim import loop
from genie.sim.cluster import CLIENT_HOST, CONTROLLER_PORT, SimCluster
from genie.sim.world import SimClock, SimNetwork, World


def test_shorter_pause_of_a_host_does_not_shorten_a_longer_one() -> None:
    async def wake_times() -> dict[str, float]:
        world, at_s = World(0), {}

        async def wait(name: str) -> None:
            await world.wait_unpaused("host")
            at_s[name] = world.now_s

        world.pause_host("host", 20.0)
        SimClock(world, "host").call_later(1.0, lambda: at_s.update(timer=world.now_s))
        async with asyncio.TaskGroup() as group:
            group.create_task(wait("early"))
            await asyncio.sleep(5.0)
            world.pause_host("host", 2.0)
            world.heal_links_and_clocks()
            group.create_task(wait("late"))
        return at_s

    assert loop.run_simulated(wake_times()) == {"timer": 20.0, "early": 20.0, "late": 20.0}


def test_longest_freeze_of_a_host_applies() -> None:
    async def frozen() -> list[bool]:
        world = World(0)
        world.freeze_host("host", 2.0)
        world.freeze_host("host", 9.0)
        world.freeze_host("host", 1.0)
        await asyncio.sleep(8.0)
        before = world.is_frozen("host"), world.is_paused("host")
        await asyncio.sleep(2.0)
        return [*before, world.is_frozen("host"), world.is_paused("host")]

    assert loop.run_simulated(frozen()) == [True, True, False, False]


@pytest.mark.parametrize(("power_off", "error"), [(True, DeadlineError), (False, NothingListensError)])
def test_host_without_power_does_not_refuse_connections(
    power_off: bool, error: type[GenieError], tmp_path: Path
) -> None:
    async def connect() -> None:
        async with asyncio.TaskGroup() as group:
            cluster = SimCluster(1, tmp_path, group, node_count=0)
            await cluster.start()
            host = cluster.controller_hosts[0]
            network = SimNetwork(cluster.world, CLIENT_HOST)
            cluster.crash(host, power_off=power_off)
            with pytest.raises(error):
                await network.connect(host, CONTROLLER_PORT, tls=None, timeout_s=1.0)
            cluster.restart(host)
            await asyncio.sleep(1.0)
            (await network.connect(host, CONTROLLER_PORT, tls=None, timeout_s=1.0)).close()
            await cluster.stop()

    loop.run_simulated(connect())


def test_livelock_is_detected() -> None:
    async def spin() -> None:
        await asyncio.sleep(3.0)
        for _ in range(2 * loop.ITERATIONS_WITHOUT_PROGRESS_MAX):
            await asyncio.sleep(0)

    with pytest.raises(loop.SimulationStuckError, match=r"livelock at 3\.000 s"):
        loop.run_simulated(spin())


def test_many_iterations_are_no_livelock_while_time_advances() -> None:
    async def work() -> float:
        for _ in range(loop.ITERATIONS_WITHOUT_PROGRESS_MAX):
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
        return asyncio.get_running_loop().time()

    assert loop.run_simulated(work()) == pytest.approx(loop.ITERATIONS_WITHOUT_PROGRESS_MAX / 1000)
