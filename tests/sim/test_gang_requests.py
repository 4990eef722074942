"""A large gang that waits for its slowest worker sends few requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from genie.agent.jobs import CONFIRM_WAIT_FOR_WORKERS_S, LocalJob, NodeJobs
from genie.agent.launcher import LaunchPlan
from genie.config import AgentConfig
from genie.model.job import JobSpec, JobState, PlacementConstraints, Resources
from genie.model.messages import Launch
from genie.sim import loop
from genie.sim.cluster import SimCluster

NODES, GPUS = 32, 8
WORKERS = NODES * GPUS
SLOW_S, SETTLE_S, WINDOW_S = 60.0, 10.0, 30.0
HEARTBEATS_AT_EDGES = 2


def test_each_worker_of_a_waiting_gang_sends_one_request_per_confirmation_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = NodeJobs._prepare_launch

    async def slowly(self: NodeJobs, job: LocalJob, launch: Launch) -> LaunchPlan:
        if launch.rank == 0:  # as if its working directory was large
            await self._clock.sleep(SLOW_S)
        return await prepare(self, job, launch)

    monkeypatch.setattr(NodeJobs, "_prepare_launch", slowly)
    requests, states = loop.run_simulated(_count_requests(tmp_path))
    heartbeats = NODES * (WINDOW_S / AgentConfig().heartbeat_s + HEARTBEATS_AT_EDGES)
    assert states == [JobState.PLACING, JobState.RUNNING]
    assert WORKERS < requests <= heartbeats + WORKERS * WINDOW_S / CONFIRM_WAIT_FOR_WORKERS_S


async def _count_requests(directory: Path) -> tuple[int, list[JobState]]:
    """Return the number of requests of all nodes while the gang waits, and its states then and later."""
    async with asyncio.TaskGroup() as group:
        cluster = SimCluster(1, directory, group, node_count=NODES, gpus_per_node=GPUS)
        await cluster.start()
        await cluster.wait_for_nodes()
        spec = JobSpec(
            name="gang",
            command=("simulated",),
            resources=Resources(gpus=1),
            constraints=PlacementConstraints(workers=WORKERS),
        )
        job_id = await cluster.submit_spec(spec, seconds=1000.0)
        await asyncio.sleep(SETTLE_S)
        sent = cluster.world.requests_sent_by_host
        before = sum(sent[host] for host in cluster.node_hosts)
        await asyncio.sleep(WINDOW_S)
        count = sum(sent[host] for host in cluster.node_hosts) - before
        states = [(await cluster.fetch_jobs())[job_id].state]
        await asyncio.sleep(SLOW_S)
        states.append((await cluster.fetch_jobs())[job_id].state)
        await cluster.stop()
    return count, states
