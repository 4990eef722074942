"""Gangs, preemption, time limits, quotas and pins under seeded faults, with the real controller and agents.

What must never be is looked for all the time (genie/sim/witness.py, processes.py). When the faults are over,
nothing may wait that could start; when the owner has put everything back, every job ends as it should.
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
from genie.controller.jobs import Jobs
from genie.controller.planning import Planner
from genie.errors import JobRefusedError
from genie.model.job import Job, JobSpec, JobState, Resources, Spread, Wishes, Within
from genie.model.messages import CancelJob
from genie.scheduler.request import FULL_MILLI
from genie.scheduler.scheduler import Preempt, Start
from genie.sim import loop, saboteur
from genie.sim.cluster import SimCluster
from genie.sim.witness import Witness

JOBS = 30
NODES, GPUS = 3, 4
FAULTS_S, EVERY_S = 80.0, 4.0
SETTLE_S = 400.0
FOREVER_S = 300.0
"""Runs longer than any limit and any fault."""
WITHOUT_S = 30.0
"""More than a node's silence, the grace, a new leader and a time to confirm take together."""


@dataclass
class Outcome:
    violations: list[str]
    jobs: dict[str, Job] = field(default_factory=dict)
    asked: dict[str, tuple[JobSpec, float]] = field(default_factory=dict)
    """What was submitted, and how long it runs."""
    cancelled: set[str] = field(default_factory=set)


def _wished(rng: random.Random, node_ids: list[str]) -> tuple[JobSpec, float]:
    """A job of some kind, and how long it runs."""
    seconds = rng.uniform(1, 25)
    gpus, milli, node_id, gpu_ids = rng.choice((1, 1, 2)), FULL_MILLI, "", ()
    wishes: dict[str, object] = {"grace_s": rng.choice((0.0, 3.0, 15.0))}
    kind = rng.choice(("one", "share", "gang", "elastic", "spread", "within", "pinned", "wide"))
    match kind:
        case "share":
            gpus, milli = 1, rng.choice((250, 500))
        case "gang":
            wishes |= {"workers": rng.randint(2, 4)}
        case "elastic":
            wishes |= {"workers": rng.randint(3, 8), "workers_min": 2}
        case "spread":
            wishes |= {"workers": rng.randint(2, NODES), "spread": Spread.SPREAD}
        case "within":
            gpus = 1
            wishes |= {"workers": rng.randint(2, 3), "within": Within.NODE}
        case "pinned":
            node_id = rng.choice(node_ids)
            gpu_ids = tuple(sorted(rng.sample(range(GPUS), gpus)))
        case "wide":
            gpus = 1
            wishes |= {"workers": NODES * GPUS - rng.randint(0, 2)}
    if rng.random() < 0.5:
        wishes |= {"preemptible": True}
    wishes |= {"priority": rng.choice((0, 0, 0, 5, 9))}
    match rng.choice(("none", "none", "ample", "short")):
        case "ample":
            wishes |= {"time_limit_s": 3 * seconds + 60.0}
        case "short":
            wishes |= {"time_limit_s": rng.uniform(2, 10)}
            seconds = FOREVER_S
    spec = JobSpec(
        name=kind,
        command=("simulated",),
        resources=Resources(gpus=gpus, gpu_milli=milli),
        node_id=node_id,
        gpu_ids=gpu_ids,
        wishes=Wishes(**wishes),  # type: ignore[arg-type]
    )
    return spec, seconds


async def _submit_all(cluster: SimCluster, outcome: Outcome) -> None:
    rng = cluster.world.random
    node_ids = [cluster.node_id(host) for host in cluster.node_hosts]
    for _ in range(JOBS):
        await asyncio.sleep(rng.expovariate(1 / 1.5))
        spec, seconds = _wished(rng, node_ids)
        tenant = rng.choice(("", *saboteur.TENANTS))
        try:
            job_id = await cluster.submit_spec(spec, seconds=seconds, tenant=tenant)
        except JobRefusedError:
            continue  # accelerators are gone, and what there is would never do
        outcome.asked[job_id] = (spec, seconds)
        if rng.random() < 0.1:
            outcome.cancelled.add(job_id)
            cluster.group.create_task(_cancel(cluster, job_id, after_s=rng.uniform(0, 20)))


async def _cancel(cluster: SimCluster, job_id: str, *, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await cluster.ask(CancelJob(job_id=job_id))


# -- all the time -----------------------------------------------------------------------------------


async def _audit(cluster: SimCluster) -> None:
    """What the ledger of the leader has as held is so in its planner's book, at every moment."""
    while True:
        await asyncio.sleep(0.3)
        leader = cluster.leader
        if leader is not None and leader._ledger.is_loaded and not leader._planner._is_stale:
            for wrong in _not_in_the_book(leader):
                cluster.machines.violated(wrong)


def _not_in_the_book(controller: Controller) -> Iterator[str]:
    planner, jobs = controller._planner, controller._ledger.jobs
    held = planner._scheduler.book.held
    for job in jobs.values():
        if job.state in (JobState.PLACING, JobState.RUNNING):
            there = held[job.job_id].places if job.job_id in held else ()
            if there != planner._places(job):
                yield f"the book has {there} for {job}"
    for job_id in held:
        if (job := jobs.get(job_id)) is None or job.state.is_final:
            yield f"the book has {held[job_id]}, and the job is {job}"


# -- in the end -------------------------------------------------------------------------------------


def _held_by(planner: Planner) -> dict[str, object]:
    scheduler = planner._scheduler
    book = scheduler.book
    return {
        "held": {job_id: held.places for job_id, held in book.held.items()},
        "running": sorted(running.request.job_id for running in scheduler.running),
        "waiting": sorted(request.job_id for request in scheduler.waiting),
        "free": {facts.node_id: book.free_on(facts.node_id) for facts in book.nodes},
        "usage": [(book.usage(each), book.fixed(each)) for each in ("default", *saboteur.TENANTS)],
        "capacity": book.capacity,
    }


def _differs(controller: Controller) -> str:
    """How the planner's book is not what the ledger's rows say; empty when it is."""
    planner, fresh = controller._planner, controller._build_planner()
    planner._views.current()
    if planner._is_stale:
        planner._start_anew()
    fresh._start_anew()
    mine, anew = _held_by(planner), _held_by(fresh)
    wrong = [f"{name}: {mine[name]}, and anew {anew[name]}" for name in mine if mine[name] != anew[name]]
    for node_id, ledger in controller._ledger.holds.items():
        free = planner._scheduler.book.free_on(node_id)[2]
        should = [FULL_MILLI - ledger.gpu_used_milli(gpu_id) for gpu_id in planner._gpu_ids[node_id]]
        if [milli for milli, _ in free] != should:
            wrong.append(f"free on {node_id}: {free}, and by the ledger {should}")
    return "; ".join(wrong)


def _could_start(controller: Controller) -> list[str]:
    """What somebody who knows nothing but the rows would do now."""
    decisions = controller._build_planner().decide()
    return [str(each) for each in decisions if isinstance(each, Start | Preempt)]


async def _until_still(cluster: SimCluster, *, all_over: bool) -> None:
    """Until nothing runs and nothing could, or all is over."""
    end_s = cluster.world.now_s + SETTLE_S
    while True:
        await asyncio.sleep(1.0)
        jobs = await cluster.jobs()
        leader = cluster.leader
        busy = [job.job_id for job in jobs.values() if job.state in (JobState.PLACING, JobState.RUNNING)]
        waits = [job for job in jobs.values() if job.state is JobState.QUEUED]
        held = [hold.job_id for view in await cluster.node_views() for hold in view.ledger.holds]
        starts = [] if busy or leader is None or not leader.is_leading else _could_start(leader)
        if not busy and not held and leader is not None and not (waits if all_over else starts):
            return
        words = [(job.job_id, job.reason, str(job.spec.wishes)) for job in waits]
        assert cluster.world.now_s < end_s, f"open {busy}, held {held}, waits {words}, could start {starts}"


def _check_ends(cluster: SimCluster, outcome: Outcome) -> Iterator[str]:
    for job_id, job in outcome.jobs.items():
        spec, seconds = outcome.asked[job_id]
        limit_s = spec.wishes.time_limit_s
        units = {(job.unit(rank), job.epoch) for rank in range(len(job.placements))}
        if job.state is JobState.SUCCEEDED:
            if not units <= cluster.machines.finished_launches:
                yield f"{job_id} did not run to its end: {job}"
            if limit_s is not None and seconds > limit_s:
                yield f"{job_id} had no time for that: {job}"
        elif job.state is JobState.CANCELLED and job_id not in outcome.cancelled:
            yield f"{job_id} was not cancelled by anybody: {job}"
        had_time = limit_s is None or seconds <= limit_s
        if job.state is JobState.FAILED and had_time and "time limit" in job.reason:
            yield f"{job_id} had time enough: {job}"


class _Errors(logging.Handler):
    """What is logged as an error is one: the code under test goes on after those."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._violations = violations

    def emit(self, record: logging.LogRecord) -> None:
        self._violations.append(logging.Formatter("%(message)s").format(record))


@contextmanager
def _errors_count(violations: list[str]) -> Iterator[None]:
    handler, logger = _Errors(violations), logging.getLogger("genie")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _accepted(cluster: SimCluster, node_id: str, unit: str) -> int:
    host = next(host for host in cluster.node_hosts if cluster.node_id(host) == node_id)
    record = Journal(cluster.directory / host / "agents" / node_id).record(unit)
    return 0 if record is None else record.epoch


async def _run(
    seed: int, directory: Path, *, kinds: tuple[str, ...] = saboteur.EVERYTHING, controllers: int = 1
) -> Outcome:
    async with asyncio.TaskGroup() as group:
        cluster = SimCluster(seed, directory, group, nodes=NODES, gpus=GPUS, controllers=controllers)
        witness = Witness(
            cluster.world,
            cluster.machines,
            accepted=lambda node_id, unit: _accepted(cluster, node_id, unit),
            without_s=WITHOUT_S,
        )
        await cluster.start()
        cluster.memory.on_commit(witness.seen)
        watching = [group.create_task(witness.run()), group.create_task(_audit(cluster))]
        outcome = Outcome(cluster.machines.violations)
        with _errors_count(outcome.violations):
            submitting = group.create_task(_submit_all(cluster, outcome))
            await saboteur.rampage(cluster, seconds=FAULTS_S, every_s=EVERY_S, kinds=kinds)
            await submitting
            witness.is_calm = True
            await _settle(cluster, outcome)
        for task in watching:
            task.cancel()
        await cluster.stop()
    return outcome


async def _settle(cluster: SimCluster, outcome: Outcome) -> None:
    await _until_still(cluster, all_over=False)
    await saboteur.restore(cluster)
    await _until_still(cluster, all_over=True)
    outcome.jobs = await cluster.jobs()
    violated = outcome.violations.append
    if set(outcome.jobs) != set(outcome.asked):
        violated(f"jobs that nobody asked for, or lost ones: {set(outcome.jobs) ^ set(outcome.asked)}")
    if alive := cluster.machines.alive():
        violated(f"still alive: {alive}")
    leader = cluster.leader
    assert leader is not None
    if wrong := _differs(leader):
        violated(wrong)
    outcome.violations.extend(_check_ends(cluster, outcome))


@pytest.mark.parametrize("seed", [1000, 1001, 1005, 1024, 1057, 1100, 4082])
def test_what_is_planned_survives_faults(seed: int, tmp_path: Path) -> None:
    assert loop.run(_run(seed, tmp_path)).violations == []


@pytest.mark.parametrize("seed", [2000, 2001, 2002, 2031, 2036])
def test_what_is_planned_survives_faults_of_two_controllers(seed: int, tmp_path: Path) -> None:
    assert loop.run(_run(seed, tmp_path, controllers=2)).violations == []


@pytest.mark.parametrize("seed", range(3000, 3004))
def test_without_faults_of_nodes_every_job_ends_as_it_says(seed: int, tmp_path: Path) -> None:
    kinds = (*saboteur.CONTROLLER_FAULTS, "lose_answer", "drain", "quota")
    outcome = loop.run(_run(seed, tmp_path, kinds=kinds))
    assert outcome.violations == []
    for job_id, job in outcome.jobs.items():
        spec, seconds = outcome.asked[job_id]
        is_short = spec.wishes.time_limit_s is not None and spec.wishes.time_limit_s < seconds
        if job_id not in outcome.cancelled:
            assert job.state is (JobState.FAILED if is_short else JobState.SUCCEEDED), job


def _some_seed_is_violated(tmp_path: Path, words: str) -> bool:
    several = (loop.run(_run(seed, tmp_path / str(seed))).violations for seed in range(1000, 1010))
    return any(words in violation for violations in several for violation in violations)


def test_a_gang_that_does_not_wait_for_all_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Jobs, "_arrive", lambda self, job, rank: None)
    assert _some_seed_is_violated(tmp_path, "was never taken on")


def test_a_planner_that_does_not_see_workers_end_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "_give_back", lambda self, job: None)
    assert _some_seed_is_violated(tmp_path, "the book has")
