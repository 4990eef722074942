"""Gangs, preemption, time limits, quotas and pins under seeded faults, with the real controller and agents.

Invariants are checked continuously (genie/sim/invariants.py, processes.py). After the faults, no
job that could start may be pending; after the owner's changes are reverted, every job must end as expected.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from genie.agent.journal import Journal
from genie.controller.controller import Controller
from genie.controller.jobs.launches import JobLaunches
from genie.controller.placement.planner import Planner
from genie.errors import JobRefusedError
from genie.model.job import Job, JobSpec, JobState, PlacementConstraints, Resources, Spread, Within
from genie.model.messages import CancelJob
from genie.scheduler.decisions import Preempt, Start
from genie.scheduler.request import WHOLE_GPU_MILLI
from genie.sim import loop
from genie.sim.cluster import SimCluster
from genie.sim.faults import fault_injector
from genie.sim.invariants import InvariantChecker
from tests.sim.seeds import seed_parameters

JOBS = 30
NODES, GPUS = 3, 4
FAULTS_S, EVERY_S = 80.0, 4.0
SETTLE_S = 400.0
FOREVER_S = 300.0
"""Longer than any time limit and any fault."""
MISMATCH_S_MAX = 45.0
"""More than heartbeat timeout, grace period, leader election and launch confirmation together."""


@dataclass
class ScenarioOutcome:
    violations: list[str]
    jobs: dict[str, Job] = field(default_factory=dict)
    submitted: dict[str, tuple[JobSpec, float]] = field(default_factory=dict)
    """Submitted jobs and their durations."""
    cancelled: set[str] = field(default_factory=set)


def _random_spec(rng: random.Random, node_ids: list[str]) -> tuple[JobSpec, float]:
    """Return a random job and its duration."""
    seconds = rng.uniform(1, 25)
    gpus, milli, node_id, gpu_ids = rng.choice((1, 1, 2)), WHOLE_GPU_MILLI, "", ()
    constraints: dict[str, object] = {"grace_s": rng.choice((0.0, 3.0, 15.0))}
    kind = rng.choice(("one", "share", "gang", "elastic", "spread", "within", "pinned", "wide"))
    match kind:
        case "share":
            gpus, milli = 1, rng.choice((250, 500))
        case "gang":
            constraints |= {"workers": rng.randint(2, 4)}
        case "elastic":
            constraints |= {"workers": rng.randint(3, 8), "workers_min": 2}
        case "spread":
            constraints |= {"workers": rng.randint(2, NODES), "spread": Spread.SPREAD}
        case "within":
            gpus = 1
            constraints |= {"workers": rng.randint(2, 3), "within": Within.NODE}
        case "pinned":
            node_id = rng.choice(node_ids)
            gpu_ids = tuple(sorted(rng.sample(range(GPUS), gpus)))
        case "wide":
            gpus = 1
            constraints |= {"workers": NODES * GPUS - rng.randint(0, 2)}
    if rng.random() < 0.5:
        constraints |= {"preemptible": True}
    constraints |= {"priority": rng.choice((0, 0, 0, 5, 9))}
    match rng.choice(("none", "none", "ample", "short")):
        case "ample":
            constraints |= {"time_limit_s": 3 * seconds + 60.0}
        case "short":
            constraints |= {"time_limit_s": rng.uniform(2, 10)}
            seconds = FOREVER_S
    spec = JobSpec(
        name=kind,
        command=("simulated",),
        resources=Resources(gpus=gpus, gpu_milli=milli),
        node_id=node_id,
        gpu_ids=gpu_ids,
        constraints=PlacementConstraints(**constraints),  # type: ignore[arg-type]
    )
    return spec, seconds


async def _submit_all(cluster: SimCluster, outcome: ScenarioOutcome) -> None:
    rng = cluster.world.random
    node_ids = [cluster.node_id(host) for host in cluster.node_hosts]
    for _ in range(JOBS):
        await asyncio.sleep(rng.expovariate(1 / 1.5))
        spec, seconds = _random_spec(rng, node_ids)
        tenant = rng.choice(("", *fault_injector.QUOTA_TENANTS))
        try:
            job_id = await cluster.submit_spec(spec, seconds=seconds, tenant=tenant)
        except JobRefusedError:
            continue  # too few accelerators are left for it
        outcome.submitted[job_id] = (spec, seconds)
        if rng.random() < 0.1:
            outcome.cancelled.add(job_id)
            cluster.group.create_task(_cancel(cluster, job_id, after_s=rng.uniform(0, 20)))


async def _cancel(cluster: SimCluster, job_id: str, *, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await cluster.send_request(CancelJob(job_id=job_id))


# -- continuous checks ------------------------------------------------------------------------------


async def _check_planner_continuously(cluster: SimCluster) -> None:
    """Check continuously that the planner's book of the leader matches its ledger."""
    while True:
        await asyncio.sleep(0.3)
        leader = cluster.leader
        if leader is not None and leader._ledger.is_loaded and not leader._planner._is_scheduler_stale:
            for wrong in _placements_unlike_ledger(leader):
                cluster.machines.report_violation(wrong)


def _placements_unlike_ledger(controller: Controller) -> Iterator[str]:
    planner, jobs = controller._planner, controller._ledger.jobs
    held = planner._scheduler.allocations.allocations_by_job
    for job in jobs.values():
        if job.state in (JobState.PLACING, JobState.RUNNING):
            there = held[job.job_id].places if job.job_id in held else ()
            if there != planner._places_of_running_workers(job):
                yield f"the book has {there} for {job}"
    for job_id in held:
        if (job := jobs.get(job_id)) is None or job.state.is_final:
            yield f"the book has {held[job_id]}, but the job is {job}"


# -- final checks -----------------------------------------------------------------------------------


def _planner_state(planner: Planner) -> dict[str, object]:
    scheduler = planner._scheduler
    allocations = scheduler.allocations
    return {
        "held": {job_id: held.places for job_id, held in allocations.allocations_by_job.items()},
        "running": sorted(running.request.job_id for running in scheduler.running_jobs),
        "waiting": sorted(request.job_id for request in scheduler.queued_requests),
        "free": {
            facts.node_id: allocations.free_resources_of_node(facts.node_id) for facts in allocations.nodes
        },
        "usage": [
            (allocations.usage(each), allocations.nonpreemptible_usage(each))
            for each in ("default", *fault_injector.QUOTA_TENANTS)
        ],
        "capacity": allocations.capacity,
    }


def _difference_to_rebuilt_planner(controller: Controller) -> str:
    """Return the differences between the planner's book and the ledger; empty if there are none."""
    planner, fresh = controller._planner, controller._build_planner()
    planner._node_snapshots.current_snapshots()
    if planner._is_scheduler_stale:
        planner._rebuild_scheduler()
    fresh._rebuild_scheduler()
    mine, rebuilt = _planner_state(planner), _planner_state(fresh)
    wrong = [
        f"{name}: {mine[name]}, rebuilt: {rebuilt[name]}" for name in mine if mine[name] != rebuilt[name]
    ]
    for node_id, ledger in controller._ledger.holds.items():
        free = planner._scheduler.allocations.free_resources_of_node(node_id)[2]
        expected = [
            WHOLE_GPU_MILLI - ledger.gpu_used_milli(gpu_id) for gpu_id in planner._gpu_ids_by_node[node_id]
        ]
        if [milli for milli, _ in free] != expected:
            wrong.append(f"free on {node_id}: {free}, ledger: {expected}")
    return "; ".join(wrong)


def _decisions_of_rebuilt_planner(controller: Controller) -> list[str]:
    """Return the decisions of a planner that is rebuilt from the ledger."""
    decisions = controller._build_planner().place()
    return [str(each) for each in decisions if isinstance(each, Start | Preempt)]


async def _wait_until_idle(cluster: SimCluster, *, all_over: bool) -> None:
    """Wait until no job runs and none could start, or with `all_over` until all have ended."""
    end_s = cluster.world.now_s + SETTLE_S
    while True:
        await asyncio.sleep(1.0)
        jobs = await cluster.fetch_jobs()
        leader = cluster.leader
        busy = [job.job_id for job in jobs.values() if job.state in (JobState.PLACING, JobState.RUNNING)]
        waits = [job for job in jobs.values() if job.state is JobState.QUEUED]
        held = [hold.job_id for view in await cluster.fetch_node_views() for hold in view.node_holds.holds]
        starts = (
            [] if busy or leader is None or not leader.is_leading else _decisions_of_rebuilt_planner(leader)
        )
        if not busy and not held and leader is not None and not (waits if all_over else starts):
            return
        pending = [(job.job_id, job.reason, str(job.spec.constraints)) for job in waits]
        assert cluster.world.now_s < end_s, (
            f"open {busy}, held {held}, pending {pending}, could start {starts}"
        )


def _find_wrong_final_states(cluster: SimCluster, outcome: ScenarioOutcome) -> Iterator[str]:
    for job_id, job in outcome.jobs.items():
        spec, seconds = outcome.submitted[job_id]
        limit_s = spec.constraints.time_limit_s
        units = {(job.worker_name(rank), job.epoch) for rank in range(len(job.placements))}
        if job.state is JobState.SUCCEEDED:
            if not units <= cluster.machines.completed_workers_and_epochs:
                yield f"{job_id} succeeded without completing: {job}"
            if limit_s is not None and seconds > limit_s:
                yield f"{job_id} succeeded despite its time limit: {job}"
        elif job.state is JobState.CANCELLED and job_id not in outcome.cancelled:
            yield f"{job_id} is cancelled without a request: {job}"
        had_time = limit_s is None or seconds <= limit_s
        if job.state is JobState.FAILED and had_time and "time limit" in job.reason:
            yield f"{job_id} was ended before its time limit: {job}"


class _ErrorRecorder(logging.Handler):
    """Records log messages of level ERROR as violations."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._violations = violations

    def emit(self, record: logging.LogRecord) -> None:
        self._violations.append(logging.Formatter("%(message)s").format(record))


@contextmanager
def _record_errors_as_violations(violations: list[str]) -> Iterator[None]:
    handler, logger = _ErrorRecorder(violations), logging.getLogger("genie")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _accepted_epoch(cluster: SimCluster, node_id: str, unit: str) -> int:
    host = next(host for host in cluster.node_hosts if cluster.node_id(host) == node_id)
    record = Journal(cluster.directory / host / "agents" / node_id).read_job_record(unit)
    return 0 if record is None else record.epoch


async def _run_scenario(
    seed: int,
    directory: Path,
    *,
    kinds: tuple[str, ...] = fault_injector.MIXED_FAULTS_AND_OWNER_ACTIONS,
    controllers: int = 1,
) -> ScenarioOutcome:
    async with asyncio.TaskGroup() as group:
        cluster = SimCluster(
            seed, directory, group, node_count=NODES, gpus_per_node=GPUS, controller_count=controllers
        )
        checker = InvariantChecker(
            cluster.world,
            cluster.machines,
            get_accepted_epoch=lambda node_id, unit: _accepted_epoch(cluster, node_id, unit),
            hold_mismatch_s_max=MISMATCH_S_MAX,
        )
        await cluster.start()
        cluster.store.add_commit_listener(checker.on_store_commit)
        watching = [
            group.create_task(checker.check_periodically()),
            group.create_task(_check_planner_continuously(cluster)),
        ]
        outcome = ScenarioOutcome(cluster.machines.violations)
        with _record_errors_as_violations(outcome.violations):
            submitting = group.create_task(_submit_all(cluster, outcome))
            await fault_injector.inject_faults(
                cluster, duration_s=FAULTS_S, mean_interval_s=EVERY_S, kinds=kinds
            )
            await submitting
            checker.have_faults_ended = True
            await _settle_and_check(cluster, outcome)
        for task in watching:
            task.cancel()
        await cluster.stop()
    return outcome


async def _settle_and_check(cluster: SimCluster, outcome: ScenarioOutcome) -> None:
    await _wait_until_idle(cluster, all_over=False)
    await fault_injector.undo_owner_actions(cluster)
    await _wait_until_idle(cluster, all_over=True)
    outcome.jobs = await cluster.fetch_jobs()
    report_violation = outcome.violations.append
    if set(outcome.jobs) != set(outcome.submitted):
        report_violation(f"unexpected or missing jobs: {set(outcome.jobs) ^ set(outcome.submitted)}")
    if alive := cluster.machines.live_processes():
        report_violation(f"still alive: {alive}")
    leader = cluster.leader
    assert leader is not None
    if wrong := _difference_to_rebuilt_planner(leader):
        report_violation(wrong)
    outcome.violations.extend(_find_wrong_final_states(cluster, outcome))


@pytest.mark.parametrize("seed", seed_parameters([1000, 4082], long=[1001, 1005, 1024, 1057, 1100]))
def test_scheduling_survives_faults(seed: int, tmp_path: Path) -> None:
    assert loop.run_simulated(_run_scenario(seed, tmp_path)).violations == []


@pytest.mark.parametrize("seed", seed_parameters([2002], long=[2000, 2001, 2031, 2036]))
def test_scheduling_survives_faults_with_two_controllers(seed: int, tmp_path: Path) -> None:
    assert loop.run_simulated(_run_scenario(seed, tmp_path, controllers=2)).violations == []


@pytest.mark.parametrize("seed", seed_parameters([3000], long=[3001, 3002, 3003]))
def test_jobs_end_in_the_expected_state_without_node_faults(seed: int, tmp_path: Path) -> None:
    kinds = (*fault_injector.CONTROLLER_FAULTS, "lose_reply", "drain", "quota")
    outcome = loop.run_simulated(_run_scenario(seed, tmp_path, kinds=kinds))
    assert outcome.violations == []
    for job_id, job in outcome.jobs.items():
        spec, seconds = outcome.submitted[job_id]
        is_short = spec.constraints.time_limit_s is not None and spec.constraints.time_limit_s < seconds
        if job_id not in outcome.cancelled:
            assert job.state is (JobState.FAILED if is_short else JobState.SUCCEEDED), job


def _any_seed_violates(tmp_path: Path, text: str) -> bool:
    several = (
        loop.run_simulated(_run_scenario(seed, tmp_path / str(seed))).violations for seed in range(1000, 1010)
    )
    return any(text in violation for violations in several for violation in violations)


def test_simulation_detects_a_gang_that_starts_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobLaunches, "_mark_worker_ready", lambda self, job, rank: None)
    assert _any_seed_violates(tmp_path, "was never accepted")


def test_simulation_detects_a_planner_that_misses_worker_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "_release_ended_workers", lambda self, job: None)
    assert _any_seed_violates(tmp_path, "the book has")
