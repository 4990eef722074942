"""The real controller and agents under seeded faults: nothing runs twice, nothing is held for ever.

A failure names its seed in the test id; the seed then stays as a test of its own. The last tests
take safeguards away one at a time and want the simulation to notice.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from genie.agent import lease
from genie.agent.jobs import Jobs
from genie.model.job import Job, JobState
from genie.sim import loop, saboteur
from genie.sim.cluster import SimCluster
from genie.sim.processes import SimLauncher

JOBS = 30
SETTLE_S = 240.0


@dataclass(frozen=True)
class Outcome:
    jobs: dict[str, Job]
    violations: list[str]


async def _settled(cluster: SimCluster) -> dict[str, Job]:
    """The jobs once all have ended, in a healed world; failing that, what is still open."""
    end_s = cluster.world.now_s + SETTLE_S
    while True:
        jobs = await cluster.jobs()
        held = [hold.job_id for view in await cluster.node_views() for hold in view.ledger.holds]
        open_now = [job.job_id for job in jobs.values() if not job.state.is_final]
        if not held and not open_now:
            return jobs
        assert cluster.world.now_s < end_s, f"still open {open_now}, still held {held}"
        await asyncio.sleep(1.0)


async def _scenario(
    seed: int, directory: Path, *, kinds: tuple[str, ...] = saboteur.ALL_FAULTS, controllers: int = 1
) -> Outcome:
    async with asyncio.TaskGroup() as group:
        cluster = SimCluster(seed, directory, group, nodes=2, controllers=controllers)
        await cluster.start()
        world = cluster.world

        async def submit_all() -> list[str]:
            ids = []
            for _ in range(JOBS):
                await asyncio.sleep(world.random.uniform(0.1, 3.0))
                gpus, seconds = world.random.choice((1, 1, 2)), world.random.uniform(1, 20)
                ids.append(await cluster.submit(gpus=gpus, seconds=seconds))
            return ids

        submitting = group.create_task(submit_all())
        await saboteur.rampage(cluster, seconds=80.0, every_s=4.0, kinds=kinds)
        ids = await submitting
        jobs = await _settled(cluster)
        assert set(jobs) == set(ids), "every request made exactly one job"
        assert not cluster.machines.alive(), "nothing runs that no job stands for"
        for job in jobs.values():
            if job.state is JobState.SUCCEEDED:
                assert cluster.machines.finished.get(job.job_id) == 1, f"{job.job_id} did not run to its end"
        await cluster.stop()
    return Outcome(jobs, cluster.machines.violations)


@pytest.mark.parametrize("seed", range(8))
def test_no_accelerator_and_no_job_is_ever_doubled_and_nothing_stays_held(seed: int, tmp_path: Path) -> None:
    assert loop.run(_scenario(seed, tmp_path)).violations == []


@pytest.mark.parametrize("seed", [100, 101, 102, 107, 108, 6004])
def test_two_controllers_never_double_anything_either(seed: int, tmp_path: Path) -> None:
    assert loop.run(_scenario(seed, tmp_path, controllers=2)).violations == []


@pytest.mark.parametrize("seed", range(200, 203))
def test_a_controller_that_dies_and_returns_disturbs_no_running_job(seed: int, tmp_path: Path) -> None:
    outcome = loop.run(_scenario(seed, tmp_path, kinds=saboteur.CONTROLLER_FAULTS))
    assert {job.state for job in outcome.jobs.values()} == {JobState.SUCCEEDED}


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    def summary(where: str) -> list[tuple[str, str, str, float | None]]:
        jobs = loop.run(_scenario(7, tmp_path / where)).jobs
        return [(job.job_id, job.state, job.reason, job.ended_at) for job in jobs.values()]

    assert summary("one") == summary("two")


def _some_seed_is_violated(tmp_path: Path, kinds: tuple[str, ...]) -> bool:
    return any(loop.run(_scenario(seed, tmp_path / str(seed), kinds=kinds)).violations for seed in range(20))


def test_an_agent_that_leaves_orphans_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimLauncher, "end_leftovers", lambda self, jobs_dir: 0)
    assert _some_seed_is_violated(tmp_path, ("crash_node",))


def test_a_dead_man_timer_that_is_too_long_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "DEADMAN_SHARE", 5.0)
    monkeypatch.setattr(Jobs, "_crowded", lambda self, launch: "")
    assert _some_seed_is_violated(tmp_path, ("cut_node",))


def test_an_agent_that_starts_beside_what_still_ends_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Jobs, "_crowded", lambda self, launch: "")
    assert _some_seed_is_violated(tmp_path, ("freeze_node",))
