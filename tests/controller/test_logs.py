"""Logs of jobs that ran several times."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.errors import JobNotFoundError
from genie.model.job import RUNS_KEPT, Job, JobSpec, JobState, Resources, Wishes
from genie.model.messages import LogChunk, ReadLog
from tests.controller.standing import Client, standing
from tests.fakes.agent import FakeAgent


async def preempted(owner: Client, agent: FakeAgent, job: Job) -> None:
    """Runs it and sends it away for another, which ends at once."""
    launch = await agent.start_next()
    assert launch.job_id == job.job_id
    high = await owner.submit_spec(spec("high", priority=900))
    await agent.next_kill()
    agent.end(launch, 0)
    await agent.beat()
    second = await agent.start_next()
    assert second.job_id == high.job_id
    agent.end(second)
    await agent.beat()


def spec(name: str = "low", **wishes: object) -> JobSpec:
    return JobSpec(name=name, command=("true",), resources=Resources(gpus=1), wishes=Wishes(**wishes))


def logs_of(agent: FakeAgent, job: Job, *, epochs: dict[int, bytes]) -> None:
    for epoch, data in epochs.items():
        agent.logs[f"{job.job_id}@{epoch}"] = data


async def test_each_run_of_a_job_has_its_log_and_the_last_is_shown(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as agent:
        job = await owner.submit_spec(spec(preemptible=True))
        await preempted(owner, agent, job)
        (first,) = (await owner.job(job.job_id)).earlier
        logs_of(agent, job, epochs={first.epoch: b"one"})

        async def read(run: int = 0, **more: float) -> LogChunk:
            return await owner.ask(ReadLog(job_id=job.job_id, run=run, **more))

        waiting = await read()
        assert (waiting.data, waiting.run, waiting.runs) == (b"one", 1, (1,)), "the last one that there was"
        with pytest.raises(JobNotFoundError, match="no log of run 2") as caught:
            await read(2)
        assert caught.value.hint == "there are logs of 1"
        launch = await agent.start_next()
        logs_of(agent, job, epochs={launch.placement.epoch: b"second"})
        last = await read()
        assert (last.data, last.run, last.runs) == (b"second", 2, (1, 2))
        assert ((await read(1)).data, (await read(2)).data) == (b"one", b"second")
        with pytest.raises(JobNotFoundError, match="no log of run 4"):
            await read(4, wait_s=1.0)
        agent.end(launch)
        await agent.beat()
        await owner.until_state(job.job_id, JobState.SUCCEEDED)
        following = await read(3, wait_s=1.0)
        assert (following.eof, following.run) == (True, 0), "who follows hears that there is no other run"


async def test_of_many_runs_the_newest_are_kept_and_survive_the_controller(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as agent:
        job = await owner.submit_spec(spec(preemptible=True))
        for _ in range(RUNS_KEPT + 2):
            await preempted(owner, agent, job)
        kept = (await owner.job(job.job_id)).earlier
        assert [run.number for run in kept] == list(range(3, RUNS_KEPT + 3))
        assert all(run.nodes == ("a",) and run.started_at <= run.ended_at for run in kept)
        with pytest.raises(JobNotFoundError, match="no log of run 2"):
            await owner.ask(ReadLog(job_id=job.job_id, run=2))
        await one.restart()
        async with one.client() as again:
            assert (await again.job(job.job_id)).earlier == kept


async def test_a_launch_that_never_ran_is_no_run(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as owner, one.agent("a") as agent:
        job = await owner.submit_spec(spec())
        launch = await agent.next_launch()
        agent.end(launch, None, reason="not started", started=False)
        await agent.beat()
        again = await owner.job(job.job_id)
        assert (again.earlier, again.run) == ((), 1)
