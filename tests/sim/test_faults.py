"""The real controller and agents under seeded faults: no duplicate processes and no leaked holds.

The test ID contains the seed; a failing seed becomes a regression test. The last tests disable one safeguard
each and expect the simulation to detect that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from genie.agent import heartbeats
from genie.agent.jobs import NodeJobs
from genie.agent.leftovers import AdoptedJob
from genie.model.job import Job, JobState
from genie.sim import loop
from genie.sim.cluster import CONTROLLER_CONFIG, SimCluster
from genie.sim.faults import fault_injector
from genie.sim.processes import SimLauncher
from tests.sim.seeds import seed_parameters

JOBS = 30
SETTLE_S = 240.0


@dataclass(frozen=True)
class ScenarioOutcome:
    jobs: dict[str, Job]
    violations: list[str]


async def _wait_until_nothing_is_held(cluster: SimCluster) -> dict[str, Job]:
    """Wait until all jobs have ended and return them."""
    end_s = cluster.world.now_s + SETTLE_S
    while True:
        jobs = await cluster.fetch_jobs()
        held = [hold.job_id for view in await cluster.fetch_node_views() for hold in view.node_holds.holds]
        unfinished = [job.job_id for job in jobs.values() if not job.state.is_final]
        if not held and not unfinished:
            return jobs
        assert cluster.world.now_s < end_s, f"unfinished {unfinished}, still held {held}"
        await asyncio.sleep(1.0)


async def _run_scenario(
    seed: int,
    directory: Path,
    *,
    kinds: tuple[str, ...] = fault_injector.MIXED_FAULTS,
    controllers: int = 1,
    node_ttl_s: float = CONTROLLER_CONFIG.node_ttl_s,
    preemptible: bool | None = None,
) -> ScenarioOutcome:
    """`preemptible`: whether jobs are; None for half of them."""
    async with asyncio.TaskGroup() as group:
        config = replace(CONTROLLER_CONFIG, node_ttl_s=node_ttl_s)
        cluster = SimCluster(
            seed, directory, group, node_count=2, controller_count=controllers, config=config
        )
        await cluster.start()
        world = cluster.world

        async def submit_all() -> list[str]:
            ids = []
            for _ in range(JOBS):
                await asyncio.sleep(world.random.uniform(0.1, 3.0))
                gpus, seconds = world.random.choice((1, 1, 2)), world.random.uniform(1, 20)
                is_restartable = world.random.random() < 0.5 if preemptible is None else preemptible
                ids.append(await cluster.submit(gpus=gpus, seconds=seconds, preemptible=is_restartable))
            return ids

        submitting = group.create_task(submit_all())
        await fault_injector.inject_faults(cluster, duration_s=80.0, mean_interval_s=4.0, kinds=kinds)
        ids = await submitting
        jobs = await _wait_until_nothing_is_held(cluster)
        assert set(jobs) == set(ids), "every request creates exactly one job"
        assert not cluster.machines.live_processes(), "no process runs without a job"
        for job in jobs.values():
            if job.state is JobState.SUCCEEDED:
                count = cluster.machines.completed_run_count_by_job.get(job.job_id, 0)
                assert count, f"{job.job_id} succeeded without completing"
                # Of a restartable job, the exit of an earlier run may have been reported too late.
                assert count == 1 or job.spec.is_restartable, f"{job.job_id} ran {count} times"
        await cluster.stop()
    return ScenarioOutcome(jobs, cluster.machines.violations)


@pytest.mark.parametrize("seed", seed_parameters(range(3), long=range(3, 8)))
def test_faults_cause_no_overallocation_and_no_leaked_holds(seed: int, tmp_path: Path) -> None:
    assert loop.run_simulated(_run_scenario(seed, tmp_path)).violations == []


@pytest.mark.parametrize("seed", seed_parameters([100, 6004], long=[101, 102, 107, 108]))
def test_faults_with_two_controllers_cause_no_overallocation(seed: int, tmp_path: Path) -> None:
    assert loop.run_simulated(_run_scenario(seed, tmp_path, controllers=2)).violations == []


@pytest.mark.parametrize("seed", seed_parameters([303], long=[301, 302]))
def test_jobs_that_cannot_be_restarted_survive_outages_and_restartable_jobs_run_again(
    seed: int, tmp_path: Path
) -> None:
    kinds = ("isolate_node", "hang_agent", "freeze_node", "restart_controller")
    outcome = loop.run_simulated(_run_scenario(seed, tmp_path, kinds=kinds, node_ttl_s=10.0))
    assert outcome.violations == []
    assert {job.state for job in outcome.jobs.values()} == {JobState.SUCCEEDED}
    assert any(job.earlier for job in outcome.jobs.values()), "a restartable job has run again"
    assert all(job.spec.is_restartable or not job.earlier for job in outcome.jobs.values())


@pytest.mark.parametrize("seed", seed_parameters([200], long=[201, 202]))
def test_running_jobs_survive_controller_restarts(seed: int, tmp_path: Path) -> None:
    outcome = loop.run_simulated(_run_scenario(seed, tmp_path, kinds=fault_injector.CONTROLLER_FAULTS))
    assert {job.state for job in outcome.jobs.values()} == {JobState.SUCCEEDED}


def test_equal_seeds_give_equal_runs(tmp_path: Path) -> None:
    def summary(where: str) -> list[tuple[str, str, str, float | None]]:
        jobs = loop.run_simulated(_run_scenario(7, tmp_path / where)).jobs
        return [(job.job_id, job.state, job.reason, job.ended_at) for job in jobs.values()]

    assert summary("one") == summary("two")


def _any_seed_violates(
    tmp_path: Path, kinds: tuple[str, ...], *, likely: int = 0, preemptible: bool | None = None
) -> bool:
    """`likely` is tried first: it is known to violate. The time to live of nodes is short, so that some jobs
    run longer."""

    def violates(seed: int) -> bool:
        scenario = _run_scenario(
            seed, tmp_path / str(seed), kinds=kinds, node_ttl_s=10.0, preemptible=preemptible
        )
        return bool(loop.run_simulated(scenario).violations)

    return any(violates(seed) for seed in (likely, *(seed for seed in range(20) if seed != likely)))


def test_simulation_detects_an_agent_that_leaves_orphans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither adopts nor kills them."""

    async def leave(self: SimLauncher, jobs_dir: Path, *, may_adopt: object) -> tuple[list[AdoptedJob], int]:
        return [], 0

    monkeypatch.setattr(SimLauncher, "adopt_jobs_and_kill_leftovers", leave)
    assert _any_seed_violates(tmp_path, ("crash_node",))


def test_simulation_detects_a_dead_man_timer_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "LEASE_TTL_SHARE", 5.0)
    monkeypatch.setattr(NodeJobs, "_why_accelerators_not_free", lambda self, launch: "")
    assert _any_seed_violates(tmp_path, ("cut_node",), likely=9, preemptible=True)


def test_simulation_detects_an_agent_that_starts_before_the_previous_job_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeJobs, "_why_accelerators_not_free", lambda self, launch: "")
    assert _any_seed_violates(tmp_path, ("freeze_node",))
