"""Many at once through a whole controller: few commits, and each answer only when it is durable."""

from __future__ import annotations

import asyncio
from pathlib import Path

from genie.controller.store import Store
from genie.model.job import JobState
from tests.controller.standing import Standing, standing
from tests.waiting import until

MANY = 16


class Commits:
    """Counts the transactions of a store from now on."""

    def __init__(self, store: Store) -> None:
        self.count = 0
        commit = store.commit

        async def counted(*arguments: object, **more: object) -> object:
            self.count += 1
            return await commit(*arguments, **more)  # type: ignore[arg-type]

        store.commit = counted  # type: ignore[method-assign, assignment]


async def kept(one: Standing, job_id: str) -> bytes:
    found = await one.store.get(f"job/{job_id}")
    assert found is not None, "answered before it was durable"
    return found.value


async def test_many_on_one_connection_share_commits_from_submission_to_end(tmp_path: Path) -> None:
    async with standing(tmp_path) as one, one.client() as client, one.agent(gpus=MANY) as agent:
        commits = Commits(one.store)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(client.submit(gpus=1)) for _ in range(MANY)]
        jobs = [task.result() for task in asked]
        assert len({job.job_id for job in jobs}) == MANY
        assert {gpu for job in jobs if job.placement for gpu in job.placement.gpu_ids} == set(range(MANY))
        assert commits.count <= MANY // 2, "submitted and placed, two steps each"
        for job in jobs:
            assert b'"placing"' in await kept(one, job.job_id)

        launches = [await agent.next_launch() for _ in jobs]
        commits.count = 0
        async with asyncio.TaskGroup() as group:
            for launch in launches:
                group.create_task(agent.confirm(launch))
        assert commits.count <= MANY // 4

        for launch in launches:
            agent.end(launch)
        commits.count = 0
        await agent.beat()
        assert not agent.exits, "all are settled"
        assert commits.count <= 2
        for job in jobs:
            assert b'"succeeded"' in await kept(one, job.job_id)
        assert await client.held("n1") == []


async def test_the_oldest_finished_jobs_are_forgotten_beside_the_passes(tmp_path: Path) -> None:
    async with standing(tmp_path, jobs_kept=1) as one, one.client() as client, one.agent(gpus=1) as agent:
        jobs = [await client.submit(gpus=1) for _ in range(5)]
        for _ in jobs:
            agent.end(await agent.start_next())
            await agent.beat()

        async def forgotten() -> bool:
            await agent.beat()
            return [job.job_id for job in jobs if await one.store.get(f"job/{job.job_id}")] == [
                jobs[-1].job_id
            ]

        await until(forgotten, what="the oldest four are forgotten")
        assert (await client.job(jobs[-1].job_id)).state is JobState.SUCCEEDED
