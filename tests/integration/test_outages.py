"""Outages of a node: restartable jobs run elsewhere, all others go on and keep their accelerators.

Real processes: a controller and two agents with one accelerator each, and a short time to live.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from genie.errors import NodeError
from genie.model.job import JobSpec, JobState, PlacementConstraints, Resources
from tests.integration.cluster_processes import run_cluster_processes
from tests.integration.test_faults import (
    NODE_TTL_S,
    CountingJobOutput,
    fetch_holds,
    make_counting_job,
    wait_for_job_state,
    watch_ledger,
)
from tests.waiting import until


def make_job(file: Path, *, preemptible: bool) -> JobSpec:
    """A counting job that uses half of an accelerator, so that two of them fit on one node."""
    spec = make_counting_job(file, until_file=file.with_suffix(".end"))
    return msgspec.structs.replace(
        spec,
        resources=Resources(gpus=1, gpu_milli=500),
        constraints=PlacementConstraints(preemptible=preemptible),
    )


@pytest.mark.timeout(180)
async def test_only_the_restartable_job_of_a_suspended_agent_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_NODE_TTL_S", str(NODE_TTL_S))
    ordinary, restartable = (CountingJobOutput(tmp_path / name) for name in ("ordinary", "restartable"))
    async with run_cluster_processes(tmp_path, "a") as cluster, cluster.client() as client:
        kept = await client.submit(make_job(ordinary.file, preemptible=False))
        moved = await client.submit(make_job(restartable.file, preemptible=True))
        await ordinary.wait_started()
        await restartable.wait_started()
        first_pid = restartable.pid
        await cluster.start_agent("b")
        async with watch_ledger(client):
            os.kill(cluster.agents["a"].pid, signal.SIGSTOP)
            try:

                async def runs_on_b() -> bool:
                    job = await client.get_job(moved.job_id)
                    return job.state is JobState.RUNNING and job.placements[0].node_id == "b"

                await until(runs_on_b, timeout_s=60, what="the restartable job runs on b")
                await until(
                    lambda: restartable.number > 0 and restartable.pid != first_pid,
                    what="its command has started",
                )
                with suppress(ProcessLookupError):
                    os.kill(first_pid, 0)
                    pytest.fail("the first run has not ended")
                job = await client.get_job(moved.job_id)
                assert any("queued again: node a sent no heartbeat" in step.reason for step in job.history)
                number = ordinary.number
                await until(lambda: ordinary.number > number + 20, what="the ordinary job continues")
                job = await client.get_job(kept.job_id)
                assert job.state is JobState.RUNNING
                assert "keeps its accelerators until the node returns or 'genie forget a'" in job.reason
                holds = await fetch_holds(client)
                assert [name for name, _ in holds["a"]] == [kept.job_id]
                assert [name for name, _ in holds["b"]] == [moved.job_id]
            finally:
                os.kill(cluster.agents["a"].pid, signal.SIGCONT)

            async def has_returned() -> bool:
                return (await cluster.node("a")).status == "healthy"

            await until(has_returned, timeout_s=60, what="node a returns")
            number = ordinary.number
            await until(lambda: ordinary.number > number + 20, what="the ordinary job continues")
            assert ordinary.start_count == 1
            assert (await client.get_job(kept.job_id)).reason == "started on node a"
            for output in (ordinary, restartable):
                output.file.with_suffix(".end").touch()
            for job_id in (kept.job_id, moved.job_id):
                assert (await client.wait_job(job_id, timeout_s=30)).state is JobState.SUCCEEDED
            assert not any((await fetch_holds(client)).values())


@pytest.mark.timeout(180)
async def test_removed_node_that_was_only_suspended_ends_its_job_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_CONTROLLER_NODE_TTL_S", str(NODE_TTL_S))
    output = CountingJobOutput(tmp_path / "count")
    async with run_cluster_processes(tmp_path, "a") as cluster, cluster.client() as client:
        job = await client.submit(make_counting_job(output.file, node_id="a"))
        await output.wait_started()
        os.kill(cluster.agents["a"].pid, signal.SIGSTOP)
        try:

            async def is_removed() -> bool:
                with suppress(NodeError):  # until the jobs with a dead-man timer have certainly ended
                    await client.forget_node("a")
                    return True
                return False

            await until(is_removed, timeout_s=60, what="the node can be removed")
            await wait_for_job_state(client, job.job_id, JobState.LOST)
            assert output.is_alive
        finally:
            os.kill(cluster.agents["a"].pid, signal.SIGCONT)
        await until(lambda: not output.is_alive, timeout_s=60, what="the job ends")
        await cluster.agents["a"].wait_ended()
        assert await client.nodes() == ()
