"""Restores of the simulated store: which jobs continue or are lost, and which controllers nodes follow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from genie.controller.store import Compare, Put
from genie.errors import StoreUnavailableError
from genie.model.job import JobState
from genie.sim import loop
from genie.sim.cluster import STORE_HOST, SimCluster
from genie.sim.faults.restores import RestoreChecker, restore_beside_old_controller, restore_store
from tests.sim.scenario import INNOCENT_TENANT, make_invariant_checkers

_LONG_S = 300.0


async def _start_cluster(cluster: SimCluster) -> RestoreChecker:
    checker, innocent = make_invariant_checkers(cluster, node_ttl_s=cluster.config.node_ttl_s)
    restores = RestoreChecker(cluster, checker, innocent)
    await cluster.start()
    await cluster.wait_for_nodes()
    cluster.store.add_commit_listener(checker.on_store_commit)
    await cluster.get_user_token(INNOCENT_TENANT)
    return restores


async def _wait_until(is_true: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await is_true():
            return
        await asyncio.sleep(0.1)


async def _submit_and_wait_running(cluster: SimCluster) -> str:
    job_id = await cluster.submit(gpus=1, seconds=_LONG_S)

    async def is_running() -> bool:
        state = (await cluster.fetch_jobs())[job_id].state
        return state is JobState.RUNNING and bool(cluster.machines.live_processes())

    await _wait_until(is_running)
    return job_id


def test_jobs_of_the_backup_continue_and_later_ones_are_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            cluster = SimCluster(8, tmp_path, group, controller_count=3)
            restores = await _start_cluster(cluster)

            async def has_backup() -> bool:
                return (cluster.directory / "store.backup").exists()

            before = await _submit_and_wait_running(cluster)
            (process,) = cluster.machines.live_processes()
            restoring = group.create_task(restore_store(cluster, "restore", 5.0))
            await _wait_until(has_backup)
            after = await cluster.submit(gpus=1, seconds=_LONG_S)
            await restoring
            assert restores.lost_job_ids == {after}
            jobs = await cluster.fetch_jobs()
            assert jobs.keys() == {before}
            assert jobs[before].state is JobState.RUNNING
            assert cluster.machines.live_processes() == [process]
            assert not cluster.machines.violations
            await cluster.stop()

    loop.run_simulated(scenario())


def test_nodes_do_not_follow_a_controller_with_the_store_from_before_a_restore(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            cluster = SimCluster(3, tmp_path, group, controller_count=3)
            await _start_cluster(cluster)
            job_id = await _submit_and_wait_running(cluster)
            old_store = cluster.store

            async def does_old_controller_lead() -> bool:
                return bool(cluster.outdated_controller_hosts) and await old_store.get("leader") is not None

            restoring = group.create_task(restore_beside_old_controller(cluster, "restore", 5.0))
            await _wait_until(does_old_controller_lead)
            await restoring
            assert {view.info.status for view in await cluster.fetch_node_views()} == {"healthy"}
            assert [process.job_id for process in cluster.machines.live_processes()] == [job_id]
            assert not cluster.machines.violations
            await cluster.stop()

    loop.run_simulated(scenario())


@pytest.mark.parametrize("are_replies_cut", [False, True])
def test_commit_over_a_cut_link_fails_and_still_takes_effect(are_replies_cut: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            cluster = SimCluster(1, tmp_path, group, node_count=0)
            await cluster.start()
            (host,) = cluster.controller_hosts
            ends = (STORE_HOST, host) if are_replies_cut else (host, STORE_HOST)
            cluster.world.cut_link(*ends, both_directions=False)
            with pytest.raises(StoreUnavailableError, match=r"did not respond within 1 s"):
                await cluster.store_of(host).commit([Compare("key", 0)], [Put("key", b"1")], timeout_s=1.0)
            assert (await cluster.store.get("key") is not None) is are_replies_cut
            cluster.world.heal_link(*ends, both_directions=False)
            await asyncio.sleep(1.0)
            assert await cluster.store.get("key") is not None
            await cluster.stop()

    loop.run_simulated(scenario())
